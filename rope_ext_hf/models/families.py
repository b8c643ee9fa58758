"""The family table, `families.toml`, which states what a live model does not reveal about itself.

The comments of the table explain its fields. A peculiarity of the classes of a single family is a function here.
"""

# Annotations are not postponed: `strict` checks values against the types themselves.
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from rope_ext_hf.errors import UnsupportedModelError, one_line
from rope_ext_hf.files.whole import package_table

_Block = Literal[
    "q", "k", "v", "q_gated", "norm", "latent_q", "latent_kv", "latent_k", "index_q", "index_k", "index_norm"
]
KV_HEADS = "num_key_value_heads"
"""The value of `repeat` for rows whose blocks are repeated for every key head."""


@strict
@dataclass(kw_only=True)
class ModuleRows:
    """The order in which the rows of a module's weight are stored.

    Attributes:
        blocks: the kinds of rows, in the order in which they are stored.
        repeat: how many times the blocks follow each other, each time with its share of the heads; or `KV_HEADS`.
        when: the config key that must be true for this order; None: it holds for all configs.
        pairing: the pairing of these rows; None: that of the attention.
    """

    blocks: list[_Block]
    repeat: int | Literal["num_key_value_heads"] = 1
    when: str | None = None
    pairing: Literal["half", "interleaved"] | None = None


@strict
@dataclass(kw_only=True)
class ConfigNumber:
    """A number that a config states under keys of its family.

    Attributes:
        product: config keys and numbers, whose product is the number.
        when: the config key that must be true for this; None: it holds for all configs.
    """

    product: list[str | int | float]
    when: str | None = None


T = TypeVar("T", ModuleRows, ConfigNumber)


@strict
@dataclass(kw_only=True)
class Family:
    """Facts about a model family that a live model does not reveal: one table of families.toml.

    The comments of that file explain each field. Do not change the object: it is shared.
    """

    pairing: Literal["half", "interleaved"] | None = None
    pairing_switch: str | None = None
    rotated: dict[str, list[ModuleRows]] = field(default_factory=dict)
    unrotated: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    config_keys: dict[str, list[ConfigNumber]] = field(default_factory=dict)
    attention: str | None = None
    own_head_dim: bool = False
    remote: bool = False
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
    """Return the first alternative that has no condition, or whose condition this config meets."""
    return next(option for option in alternatives if option.when is None or look_up(config, option.when))


def look_up(config: Any, key: str) -> Any:
    """Return the value of a config key, None where it is missing; `outer.inner` is a key inside another.

    Raises:
        UnsupportedModelError: the layers of the model have values of their own for the key.
    """
    for part in key.split("."):
        if part in (getattr(config, "per_layer_attributes", None) or ()):
            raise UnsupportedModelError(
                f"{part} differs from layer to layer in this {config.model_type!r} model; one number is needed"
            )
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


@cache
def families_toml() -> dict[str, Any]:
    """Return families.toml as it stands: one table per `model_type`, none of them read yet."""
    return package_table("rope_ext_hf.models", "families.toml")


def families() -> dict[str, Family]:
    """Return every family of families.toml by its `model_type`."""
    return {name: family(name) for name in families_toml()}


@cache
def family(model_type: str) -> Family:
    """Return the entry of the family table for a `model_type`; without one, an entry with the defaults."""
    return _read_table(families_toml(), model_type) if model_type in families_toml() else Family()


def parse_families(text: str) -> dict[str, Family]:
    """Return the families of a text in the format of families.toml.

    Raises:
        ValueError: a field is unknown or has a value of another type; the message names the family.
    """
    parsed = tomllib.loads(text)
    return {name: _read_table(parsed, name) for name in parsed}


def _read_table(parsed: Mapping[str, Any], name: str) -> Family:
    """Return the family that the table `name` of a parsed families.toml describes."""
    try:
        fields = _with_base(parsed, name)
        rotated = fields.get("rotated", {})
        fields["rotated"] = {module: _alternatives(value, _rows) for module, value in rotated.items()}
        numbers = fields.get("config_keys", {})
        fields["config_keys"] = {key: _alternatives(value, _number) for key, value in numbers.items()}
        return Family(**fields)
    except (AttributeError, KeyError, StrictDataclassError, TypeError) as error:
        raise ValueError(f"[{name}]: {one_line(error)}") from error


def _with_base(parsed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a table, and those but `attention` that it takes over from the one that `like` names."""
    own = dict(parsed[name])
    base = own.pop("like", None)
    if base is None:
        return own
    taken_over = _with_base(parsed, base)
    taken_over.pop("attention", None)
    return taken_over | own


def _alternatives(value: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Return the alternatives that a value of a table states, each converted by `read`.

    A list is a list of alternatives only where tables are among its items; otherwise it is one alternative.
    """
    several = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    return [read(item) for item in (value if several else [value])]


def _rows(value: Any) -> ModuleRows:
    """Return the order of a weight's rows from its value in families.toml: a table, or a list of blocks."""
    return ModuleRows(**value) if isinstance(value, dict) else ModuleRows(blocks=value)


def _number(value: Any) -> ConfigNumber:
    """Return a number of the config from its value in families.toml: a table, a config key, or a plain number."""
    return ConfigNumber(**value) if isinstance(value, dict) else ConfigNumber(product=[value])


# --- peculiarities of the classes of a single family: one function each ---------------------------------------------


def rotates_back(model_type: str) -> bool:
    """Return whether the attention of this model type rotates values too, and rotates its output back."""
    return model_type == "deepseek_v4"


def rows_rotate(model_type: str, layer: Any) -> bool:
    """Return whether a layer rotates, by its part of the config; only one family states that (else it is True)."""
    if model_type != "mistral_large4_text":
        return True
    return bool(layer.no_rope_layers)  # true for a layer that rotates, whatever the name says


def rope_keys(model_type: str, layer_types: list[str]) -> list[str]:
    """Return, for each layer by its type, the key of `rope_parameters` that holds the settings of the layer."""
    if model_type == "deepseek_v4":
        return ["main" if layer_type == "sliding_attention" else "compress" for layer_type in layer_types]
    return layer_types


def former_key(model_type: str, key: str) -> str:
    """Return the top-level key under which configs of transformers 4 hold a rope setting."""
    former = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return former.get(key, key) if model_type in ("gpt_neox", "gpt_neox_japanese") else key


def check_architecture(text: Any) -> None:
    """Raise UnsupportedModelError for a text config of another architecture than the family table has for its type."""
    if text.model_type == "chatglm" and getattr(text, "inner_hidden_size", None) is not None:
        raise UnsupportedModelError(
            "'inner_hidden_size' in its config marks this 'chatglm' as the first ChatGLM-6B, which rotates each half "
            "of a head by its own positions and is not supported; ChatGLM2 and later models are supported"
        )


def linear_is_extended(model_type: str, theta: float, max_position_embeddings: int) -> bool:
    """Return whether max_position_embeddings beside a linear scaling is the extended length, not the original one."""
    if model_type == "llama":  # as in deepseek-coder and others, but not in Vicuna-16k and LongChat
        return theta != 10_000 or max_position_embeddings > 4096
    return family(model_type).linear_extended


def original_length_of_linear(model_type: str, extended: int, factor: float) -> int:
    """Return the length in tokens before a linear scaling, where the config states the extended one."""
    if model_type == "gemma3_text":  # by the technical report, arXiv 2503.19786, sec. 2; no config states it
        return 32_768
    return round(extended / factor)


def runs_short_list(model_type: str, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return longrope settings as the class runs them, and a sentence where that differs from what they state.

    The PhiMoE class never uses the long list, and multiplies cos and sin by short_mscale or long_mscale. In other
    families the settings are returned unchanged, with an empty text.

    Raises:
        UnsupportedModelError: short_mscale and long_mscale differ, or are missing.
    """
    if model_type != "phimoe":
        return settings, ""
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if short is None or short != long:
        raise UnsupportedModelError(
            f"the {model_type!r} class multiplies cos and sin by short_mscale={short} or long_mscale={long}, depending "
            "on the longest row of a batch. A patch can reproduce that only where both are equal"
        )
    run = settings | {"long_factor": settings["short_factor"], "attention_factor": short}
    if settings["long_factor"] == settings["short_factor"]:
        return run, ""
    return run, (
        f"The {model_type!r} class of transformers never uses long_factor; the model runs short_factor. A longrope "
        "patch with both lists uses long_factor beyond the original length, and so changes the model even at factor 1."
    )
