"""The family table, `families.toml`: what a live model does not reveal about itself; its comments explain it.

What the classes of one family do as no others do is a function below.
"""

# No postponed annotations: `strict` checks values against the types themselves.
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.files import package_table

_Block = Literal[
    "q", "k", "v", "q_gated", "norm", "latent_q", "latent_kv", "latent_k", "index_q", "index_k", "index_norm"
]
KV_HEADS = "num_key_value_heads"


@strict
@dataclass(kw_only=True)
class ModuleRows:
    """How the rows of one module's weight are stored, for configs in which `when` is true."""

    blocks: list[_Block]  # the kinds of rows, one below the other
    repeat: int | Literal["num_key_value_heads"] = 1
    """How many times the blocks follow, each with its share of the heads; or `KV_HEADS`, for every key head."""
    when: str | None = None  # a config key; None: no condition
    pairing: Literal["half", "interleaved"] | None = None  # None: that of the attention


@strict
@dataclass(kw_only=True)
class ConfigNumber:
    """A number that a config gives under a family's own keys, for configs in which `when` is true."""

    product: list[str | int | float]  # config keys and numbers to be multiplied
    when: str | None = None  # a config key; None: no condition


T = TypeVar("T", ModuleRows, ConfigNumber)


@strict
@dataclass(kw_only=True)
class Family:
    """One table of families.toml; the comments there explain each field. It is shared: not to be changed."""

    pairing: Literal["half", "interleaved"] | None = None
    pairing_switch: str | None = None
    rotated: dict[str, list[ModuleRows]] = field(default_factory=dict)
    unrotated: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    config_keys: dict[str, list[ConfigNumber]] = field(default_factory=dict)
    remote_attention: str | None = None
    rope_types: list[str] | None = None
    angle_table: str | None = None
    learned_log_multiplier: str | None = None
    linear_extended: bool = False
    alpha_is_ntk: bool = False
    rotates_values: str | None = None
    softmax_mscale: bool = False
    own_temperature: bool = False
    sliding_rope_only: bool = False


def choose(alternatives: Iterable[T], config: Any) -> T:
    """Return the first alternative without a condition, or whose condition this config meets."""
    return next(each for each in alternatives if each.when is None or look_up(config, each.when))


def look_up(config: Any, key: str) -> Any:
    """Return the value of a config key, `outer.inner` for one inside another; None where it is missing."""
    for part in key.split("."):
        if part in (getattr(config, "per_layer_attributes", None) or ()):
            raise UnsupportedModelError(
                f"{part} differs from layer to layer in this {config.model_type!r} model; one number is needed"
            )
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


@cache
def tables() -> dict[str, Any]:
    """Return families.toml as it stands: one table per `model_type`, none of them read yet."""
    return package_table("rope_ext_hf.patches", "families.toml")


def families() -> dict[str, Family]:
    return {name: family(name) for name in tables()}


@cache
def family(model_type: str) -> Family:
    """Return the family of a model_type, read when it is first asked for; without a table, one with nothing special."""
    return _read_table(tables(), model_type) if model_type in tables() else Family()


def parse_families(text: str) -> dict[str, Family]:
    """Parse a whole table; ValueError names the family with an unknown field, or a value of another type."""
    parsed = tomllib.loads(text)
    return {name: _read_table(parsed, name) for name in parsed}


def _read_table(parsed: Mapping[str, Any], name: str) -> Family:
    try:
        stated = _with_base(parsed, name)
        for key, kind, plain in (
            ("rotated", ModuleRows, lambda blocks: ModuleRows(blocks=blocks)),
            ("config_keys", ConfigNumber, lambda factor: ConfigNumber(product=[factor])),
        ):
            stated[key] = {each: _alternatives(value, kind, plain) for each, value in stated.get(key, {}).items()}
        return Family(**stated)
    except (AttributeError, KeyError, StrictDataclassError, TypeError) as error:
        raise ValueError(f"[{name}]: {one_line(error)}") from error


def _with_base(parsed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of a table, over those of the table that it is like."""
    own = dict(parsed[name])
    base = own.pop("like", None)
    return own if base is None else _with_base(parsed, base) | own


def _alternatives(value: Any, kind: Any, plain: Callable[[Any], Any]) -> list[Any]:
    """A value that may be a list of alternatives; each is a table of fields, or stands for the first field alone."""
    several = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    return [kind(**item) if isinstance(item, dict) else plain(item) for item in (value if several else [value])]


# --- what the classes of single families do as no others do: one function each --------------------------------------


def rotates_back(model_type: str) -> bool:
    """Whether its attention rotates values as well, and rotates its output back."""
    return model_type == "deepseek_v4"


def rows_rotate(model_type: str, layer: Any) -> bool:
    """Whether a layer rotates, by its part of the config; elsewhere every layer of a kind does."""
    return model_type != "mistral_large4_text" or bool(layer.no_rope_layers)  # named for the contrary


def rope_keys(model_type: str, layer_types: list[str]) -> list[str]:
    """The key of `rope_parameters` under which the rotary embedding of each layer stands, by their types."""
    if model_type == "deepseek_v4":
        return ["main" if layer_type == "sliding_attention" else "compress" for layer_type in layer_types]
    return layer_types


def former_key(model_type: str, key: str) -> str:
    """The top-level key of a rope setting in its configs of transformers 4."""
    former = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return former.get(key, key) if model_type in ("gpt_neox", "gpt_neox_japanese") else key


def check_architecture(text: Any) -> None:
    """Check that a text config is no other architecture of the same model_type than the family table describes."""
    if text.model_type == "chatglm" and getattr(text, "inner_hidden_size", None) is not None:
        raise UnsupportedModelError(
            "by 'inner_hidden_size' in its config this 'chatglm' is the first ChatGLM-6B, which rotates each half of a "
            "head by positions of its own; that one is not in the family table"
        )


def linear_is_extended(model_type: str, theta: float, max_position_embeddings: int) -> bool:
    """Whether max_position_embeddings beside a linear scaling is the extended length already, not the original."""
    if model_type == "llama":  # as in deepseek-coder and others, but not in Vicuna-16k and LongChat
        return theta != 10_000 or max_position_embeddings > 4096
    return family(model_type).linear_extended


def original_length_of_linear(model_type: str, extended: int, factor: float) -> int:
    """The length in tokens before a linear scaling, where the config states the extended one."""
    if model_type == "gemma3_text":  # technical report, arXiv 2503.19786, sec. 2; no config has it
        return 32_768
    return round(extended / factor)


def runs_short_list(model_type: str, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The longrope settings as its class runs them, and a note where that is not what they state.

    The PhiMoE class never uses the long list, and multiplies cos and sin by short_mscale or long_mscale.
    """
    if model_type != "phimoe":
        return settings, ""
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if short is None or short != long:
        raise UnsupportedModelError(
            f"the {model_type!r} class multiplies cos and sin by short_mscale={short} or long_mscale={long}, whichever "
            "the longest row of a batch asks for; that cannot be replaced unless both are equal"
        )
    note = (
        f"The {model_type!r} class of transformers never uses long_factor; the model runs short_factor. A longrope "
        "patch with both lists uses it beyond the original length and is no identity, even at factor 1."
    )
    changed = {"long_factor": settings["short_factor"], "attention_factor": short}
    return settings | changed, note if settings["long_factor"] != settings["short_factor"] else ""
