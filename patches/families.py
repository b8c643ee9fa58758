"""The family table, `families.toml`: what a live model does not reveal about itself; its comments explain it."""

# No postponed annotations: `strict` checks values against the types themselves.
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeVar

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassError

from rope_ext_hf.errors import UnsupportedModelError, did_you_mean, one_line

_Block = Literal[
    "q", "k", "v", "q_gated", "norm", "latent_q", "latent_kv", "latent_k", "index_q", "index_k", "index_norm"
]
KV_HEADS = "num_key_value_heads"
_CONFIG_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    KV_HEADS,
    "head_dim",
    "index_n_heads",
    "index_head_dim",
    "rotary_dim",
    "rope_theta",
    "max_position_embeddings",
)


def _matches(pattern: str, what: str) -> Callable[[str | None], None]:
    def check(value: str | None) -> None:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}, got {value!r}")

    return check


_is_key = _matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a config key")


@strict
@dataclass(kw_only=True)
class ModuleRows:
    """How the rows of one module's weight are stored, for configs in which `when` is true."""

    blocks: list[_Block]  # the kinds of rows, one below the other
    repeat: int | Literal["num_key_value_heads"] = 1
    """How many times the blocks follow, each with its share of the heads; or `KV_HEADS`, for every key head."""
    when: str | None = validated_field(_is_key, default=None)  # a config key; None: no condition
    pairing: Literal["half", "interleaved"] | None = None  # None: that of the attention

    def validate_rows(self) -> None:
        if not self.blocks or (self.repeat != KV_HEADS and int(self.repeat) < 1):
            raise ValueError(f"blocks {self.blocks}, {self.repeat} times, are no rows")


@strict
@dataclass(kw_only=True)
class ConfigNumber:
    """A number that a config gives under a family's own keys, for configs in which `when` is true."""

    product: list[str | int | float]  # config keys and numbers to be multiplied
    when: str | None = validated_field(_is_key, default=None)  # a config key; None: no condition

    def validate_number(self) -> None:
        for factor in self.product:
            if isinstance(factor, str):
                _is_key(factor)
        if not self.product or not all(isinstance(each, str) or 0 < each < float("inf") for each in self.product):
            raise ValueError(f"product must be config keys and positive numbers, got {self.product!r}")


class _Conditional(Protocol):
    when: str | None


T = TypeVar("T", bound=_Conditional)


@strict
@dataclass(kw_only=True)
class Family:
    """One table of families.toml; the comments there explain each field. It is shared: not to be changed."""

    pairing: Literal["half", "interleaved"] | None = None
    pairing_switch: str | None = validated_field(_is_key, default=None)
    rotated: dict[str, list[ModuleRows]] = field(default_factory=dict)
    unrotated: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    config_keys: dict[str, list[ConfigNumber]] = field(default_factory=dict)
    remote_attention: str | None = validated_field(
        _matches(r"\w+\.\{\}\.\w+", "like 'layers.{}.self_attention'"), default=None
    )
    rope_types: list[str] | None = None
    rotates_values: str | None = validated_field(_is_key, default=None)
    softmax_mscale: bool = False
    own_temperature: bool = False
    sliding_rope_only: bool = False

    def validate_alternatives(self) -> None:
        values: dict[str, Any] = {**self.rotated, **self.config_keys}
        for name, alternatives in values.items():
            if [each.when is None for each in alternatives] != [False] * (len(alternatives) - 1) + [True]:
                raise ValueError(f"{name}: every alternative but the last must have `when`")

    def validate_keys(self) -> None:
        if unknown := next((key for key in self.config_keys if key not in _CONFIG_KEYS), None):
            known = ", ".join(_CONFIG_KEYS)
            raise ValueError(f"config_keys.{unknown} is unknown; known: {known}.{did_you_mean(unknown, _CONFIG_KEYS)}")
        if self.remote_attention is not None and "rotary_dim" not in self.config_keys:
            raise ValueError("remote_attention needs config_keys.rotary_dim: there is no model that could be asked")


_KEYS = ("like", *(each.name for each in fields(Family)))


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
    return tomllib.loads(files("rope_ext_hf.patches").joinpath("families.toml").read_text(encoding="utf-8"))


def families() -> dict[str, Family]:
    return {name: family(name) for name in tables()}


@cache
def family(model_type: str) -> Family:
    """Return the family of a model_type, read when it is first asked for; without a table, one with nothing special."""
    return _read_table(tables(), model_type) if model_type in tables() else Family()


def parse_families(text: str) -> dict[str, Family]:
    """Parse a whole table strictly; ValueError names the table that is wrong."""
    parsed = tomllib.loads(text)
    return {name: _read_table(parsed, name) for name in parsed}


def _read_table(parsed: Mapping[str, Any], name: str) -> Family:
    try:
        given = _with_base(parsed, name)
        for key, read in (("rotated", _module_rows), ("config_keys", _config_number)):
            if isinstance(table := given.get(key), dict):  # anything else is refused as a field of Family
                given[key] = {at: _alternatives(f"{key}.{at}", value, read) for at, value in table.items()}
        return Family(**given)
    except _REFUSED as error:
        raise ValueError(f"[{name}]: {_reason(error)}") from error


_REFUSED = (StrictDataclassError, TypeError, ValueError)


def _reason(error: BaseException) -> str:
    """The message of an error, and of the first in its chain: a list's names the item alone, the first its value."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    outer, inner = one_line(error), one_line(first)
    return outer if inner in outer else f"{outer}: {inner}"


def _with_base(parsed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of a table, over those of the table that it is like."""
    table = parsed[name]
    if not isinstance(table, dict):
        raise ValueError(f"{name} stands outside any table; known keys of one: {', '.join(_KEYS)}")
    if unknown := next((key for key in table if key not in _KEYS), None):
        raise ValueError(f"unknown key {unknown}; known keys: {', '.join(_KEYS)}.{did_you_mean(unknown, _KEYS)}")
    own = {key: value for key, value in table.items() if key != "like"}
    if (base := table.get("like")) is None:
        return own
    if base not in list(parsed)[: list(parsed).index(name)]:
        raise ValueError(f"like = {base!r} names no table above it")
    return _with_base(parsed, base) | own


def _alternatives(where: str, value: Any, read: Callable[[Any], T]) -> list[T]:
    """Read a value that may be a list of alternatives."""
    several = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    try:
        return [read(item) for item in (value if several else [value])]
    except _REFUSED as error:
        raise ValueError(f"{where}: {_reason(error)}") from error


def _module_rows(value: Any) -> ModuleRows:
    return ModuleRows(**value) if isinstance(value, dict) else ModuleRows(blocks=value)


def _config_number(value: Any) -> ConfigNumber:
    return ConfigNumber(**value) if isinstance(value, dict) else ConfigNumber(product=[value])
