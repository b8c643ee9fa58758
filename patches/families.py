"""The family table: what a live model does not reveal about itself, read from `families.toml`.

>>> family("phi3").rope_types
('default', 'longrope')

The comments at the top of families.toml explain every field, and how to add a family.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from rope_ext_hf.errors import UnsupportedModelError, did_you_mean

__all__ = [
    "KV_HEADS",
    "ConfigNumber",
    "Family",
    "ModuleRows",
    "choose",
    "families",
    "family",
    "look_up",
    "parse_families",
    "tables",
]

BLOCKS = ("q", "k", "v", "q_gated", "norm", "latent_q", "latent_kv", "latent_k", "index_q", "index_k", "index_norm")
KV_HEADS = "num_key_value_heads"
CONFIG_KEYS = (
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
FORMER_KEYS = ("rope_theta", "partial_rotary_factor")
LINEAR_ORIGINAL_KEYS = ("max_position_embeddings", "rope_theta")
# Facts about published checkpoints, which another family with the same code need not share.
NOT_INHERITED = frozenset({"linear_lengths", "linear_original", "original_length"})
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class ModuleRows:
    """How the rows of one module's weight are stored, for configs in which `when` is true.

    Attributes:
        blocks: what follows what; names of `BLOCKS`.
        repeat: how many times that is repeated, each with its share of the heads; or `KV_HEADS`, for every key head.
        when: a config key that must be true; None: no condition.
    """

    blocks: tuple[str, ...]
    repeat: int | str = 1
    when: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigNumber:
    """A number that a config gives under a family's own keys, for configs in which `when` is true.

    Attributes:
        product: config keys and numbers to be multiplied.
        when: a config key that must be true; None: no condition.
    """

    product: tuple[str | float, ...]
    when: str | None = None


class _Conditional(Protocol):
    @property
    def when(self) -> str | None: ...


T = TypeVar("T", bound=_Conditional)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One table of families.toml; the comments there explain each field."""

    pairing: str | None = None
    pairing_switch: str | None = None
    rotated: Mapping[str, tuple[ModuleRows, ...]] = field(default_factory=dict)
    unrotated: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    rotating_layers: str | None = None
    config_keys: Mapping[str, tuple[ConfigNumber, ...]] = field(default_factory=dict)
    remote_attention: str | None = None
    reject_if: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] | None = None
    former_keys: Mapping[str, str] = field(default_factory=dict)
    original_in_config: bool = False
    angle_table: str | None = None
    rotates_values: str | None = None
    softmax_mscale: bool = False
    static_alpha: bool = False
    short_list_only: bool = False
    own_temperature: bool = False
    sliding_rope_only: bool = False
    rope_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    log_multiplier: str | None = None
    rotates_back: bool = False
    linear_lengths: str = "original"
    linear_original: Mapping[str, float] | None = None
    original_length: int | None = None

    def linear_is_extended(self, theta: float, max_position_embeddings: int) -> bool:
        """Return whether max_position_embeddings beside a linear scaling is the extended length, not the original."""
        if self.linear_original is not None:
            most = self.linear_original["max_position_embeddings"]
            if theta == self.linear_original["rope_theta"] and max_position_embeddings <= most:
                return False
        return self.linear_lengths == "extended"


def choose(alternatives: Iterable[T], config: Any) -> T:
    """Return the first alternative without a condition, or whose condition this config meets."""
    return next(each for each in alternatives if each.when is None or look_up(config, each.when))


def look_up(config: Any, key: str) -> Any:
    """Return the value of a config key, `outer.inner` for one inside another; None where it is missing.

    Raises:
        UnsupportedModelError: layers have values of their own.
    """
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
    """Return every family by the `model_type` of its text config."""
    return {name: family(name) for name in tables()}


@cache
def family(model_type: str) -> Family:
    """Return the family of a model_type, read when it is first asked for; without a table, one with nothing special."""
    return _read_table(tables(), model_type) if model_type in tables() else Family()


def parse_families(text: str) -> dict[str, Family]:
    """Parse a whole table strictly.

    Raises:
        ValueError: an unknown key, a wrong value, or a `like` that names no earlier table; the message names the table.
    """
    parsed = tomllib.loads(text)
    return {name: _read_table(parsed, name) for name in parsed}


def _read_table(parsed: Mapping[str, Any], name: str) -> Family:
    try:
        known = Family(**_fields(parsed, name))
        _check(known)
    except ValueError as error:
        raise ValueError(f"[{name}]: {error}") from error
    return known


def _fields(parsed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of a table, over those of the table that it is like."""
    table = parsed[name]
    if not isinstance(table, dict):
        raise ValueError(f"{name} stands outside any table; known keys of one: like, {', '.join(sorted(_PARSERS))}")
    taken_over = {}
    if (base := table.get("like")) is not None:
        if base not in list(parsed)[: list(parsed).index(name)]:
            raise ValueError(f"like = {base!r} names no table above it")
        taken_over = {key: value for key, value in _fields(parsed, base).items() if key not in NOT_INHERITED}
    own = {}
    for key, value in table.items():
        if key == "like":
            continue
        if key not in _PARSERS:
            raise ValueError(
                f"unknown key {key}; known keys: like, {', '.join(sorted(_PARSERS))}.{did_you_mean(key, _PARSERS)}"
            )
        own[key] = _PARSERS[key](key, value)
    return taken_over | own


def _check(known: Family) -> None:
    """Check what several fields say together."""
    if known.remote_attention is not None and "rotary_dim" not in known.config_keys:
        raise ValueError("remote_attention needs config_keys.rotary_dim: there is no model that could be asked")
    if known.angle_table is not None and "rope_theta" not in known.config_keys:
        raise ValueError("angle_table needs config_keys.rope_theta: its configs have no rope_parameters")


def _pairing(key: str, value: object) -> str:
    if value not in ("half", "interleaved"):
        raise ValueError(f"{key} must be 'half' or 'interleaved', got {value!r}")
    return str(value)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _names(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key} must be a list of names, got {value!r}")
    return tuple(value)


def _config_key(key: str, value: object) -> str:
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ValueError(f"{key} must be the name of a config key, got {value!r}")
    return value


def _module_pattern(key: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+\.\{\}\.\w+", value):
        raise ValueError(f"{key} must be like 'layers.{{}}.self_attention', got {value!r}")
    return value


def _descriptions(key: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{key} must be a table of config keys and descriptions, got {value!r}")
    return value


def _modules(key: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise ValueError(f"{key} must be a table of names of modules, got {value!r}")
    return value


def _labels(key: str, value: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a table of lists of layer types, got {value!r}")
    return {name: _names(f"{key}.{name}", each) for name, each in value.items()}


def _former_keys(key: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not set(value) <= set(FORMER_KEYS):
        raise ValueError(f"{key} must be a table with {' and '.join(FORMER_KEYS)} at most, got {value!r}")
    return {name: _config_key(f"{key}.{name}", each) for name, each in value.items()}


def _linear_lengths(key: str, value: object) -> str:
    if value not in ("original", "extended"):
        raise ValueError(f"{key} must be 'original' or 'extended', got {value!r}")
    return str(value)


def _linear_original(key: str, value: object) -> dict[str, float]:
    numbers = isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())
    if not isinstance(value, dict) or not numbers or sorted(value) != sorted(LINEAR_ORIGINAL_KEYS):
        raise ValueError(f"{key} must give the numbers {' and '.join(LINEAR_ORIGINAL_KEYS)}, got {value!r}")
    return value


def _tokens(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a number of tokens, got {value!r}")
    return value


def _rotated(key: str, value: object) -> dict[str, tuple[ModuleRows, ...]]:
    return _alternatives(key, value, _module_rows)


def _config_numbers(key: str, value: object) -> dict[str, tuple[ConfigNumber, ...]]:
    parsed = _alternatives(key, value, _config_number)
    for name in parsed:
        if name not in CONFIG_KEYS:
            raise ValueError(
                f"{key}.{name} is unknown; known: {', '.join(CONFIG_KEYS)}.{did_you_mean(name, CONFIG_KEYS)}"
            )
    return parsed


def _alternatives(key: str, value: object, parse: Callable[[str, object], T]) -> dict[str, tuple[T, ...]]:
    """Parse a table of values, each of which may be a list of alternatives: all but the last with a condition."""
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a table, got {value!r}")
    parsed: dict[str, tuple[T, ...]] = {}
    for name, given in value.items():
        several = isinstance(given, list) and any(isinstance(item, dict) for item in given)
        alternatives = tuple(parse(f"{key}.{name}", item) for item in (given if several else [given]))
        if [each.when is None for each in alternatives] != [False] * (len(alternatives) - 1) + [True]:
            raise ValueError(f"{key}.{name}: every alternative but the last must have `when`, got {given!r}")
        parsed[name] = alternatives
    return parsed


def _module_rows(key: str, value: object) -> ModuleRows:
    table = _table(key, value if isinstance(value, dict) else {"blocks": value}, {"blocks", "repeat", "when"})
    blocks, repeat = table.get("blocks"), table.get("repeat", 1)
    if not isinstance(blocks, list) or not blocks or not all(block in BLOCKS for block in blocks):
        raise ValueError(f"{key} must be a list of blocks ({', '.join(BLOCKS)}), got {blocks!r}")
    if repeat != KV_HEADS and (type(repeat) is not int or repeat < 1):
        raise ValueError(f"{key}: repeat must be a positive whole number or '{KV_HEADS}', got {repeat!r}")
    return ModuleRows(blocks=tuple(blocks), repeat=repeat, when=_condition(key, table))


def _config_number(key: str, value: object) -> ConfigNumber:
    table = _table(key, value if isinstance(value, dict) else {"value": value}, {"value", "product", "when"})
    if ("value" in table) == ("product" in table):
        raise ValueError(f"{key} must have either `value` or `product`, got {value!r}")
    factors = table["product"] if "product" in table else [table["value"]]
    if not isinstance(factors, list) or not factors or not all(map(_is_factor, factors)):
        raise ValueError(f"{key} must be a config key, a positive number, or a product of those, got {value!r}")
    return ConfigNumber(product=tuple(factors), when=_condition(key, table))


def _is_factor(value: object) -> bool:
    if isinstance(value, str):
        return _KEY.fullmatch(value) is not None
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


def _table(key: str, table: dict[str, Any], known: set[str]) -> dict[str, Any]:
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{key}: unknown key {unknown[0]}; known keys: {', '.join(sorted(known))}")
    return table


def _condition(key: str, table: dict[str, Any]) -> str | None:
    return _config_key(f"{key}.when", table["when"]) if "when" in table else None


_PARSERS: dict[str, Callable[[str, object], Any]] = {
    "pairing": _pairing,
    "pairing_switch": _config_key,
    "rotated": _rotated,
    "unrotated": _names,
    "renamed": _modules,
    "rotating_layers": _config_key,
    "config_keys": _config_numbers,
    "remote_attention": _module_pattern,
    "reject_if": _descriptions,
    "rope_types": _names,
    "former_keys": _former_keys,
    "original_in_config": _flag,
    "angle_table": _config_key,
    "rotates_values": _config_key,
    "softmax_mscale": _flag,
    "static_alpha": _flag,
    "short_list_only": _flag,
    "own_temperature": _flag,
    "sliding_rope_only": _flag,
    "rope_labels": _labels,
    "log_multiplier": _config_key,
    "rotates_back": _flag,
    "linear_lengths": _linear_lengths,
    "linear_original": _linear_original,
    "original_length": _tokens,
}
