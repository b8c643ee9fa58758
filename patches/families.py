"""The family table: what a live model does not tell about itself, read from `families.toml`.

>>> family("phi3").rope_types
('default', 'longrope')
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["PIECES", "WORDS", "Family", "choose", "families", "family", "look_up", "parse_families"]

PIECES = frozenset({"q", "q+gate", "k", "v", "head", "nope+rope", "latent", "rope", "index_q", "index_k"})
"""What the rows of a tensor are made up of, see families.toml."""
WORDS = frozenset(
    {"num_hidden_layers", "num_key_value_heads", "head_dim", "rotary_dim", "rope_theta", "max_position_embeddings"}
)
"""What a family may say by other keys of its config than transformers mostly does."""
_CHOICE = re.compile(r"(?P<what>.+?)( if (?P<key>[A-Za-z_]\w*(\.\w+)*))?")
_ROWS = re.compile(r"((grouped|[1-9]\d* of) )?(?P<pieces>.+)")
_PRODUCT = re.compile(r"(\d+(\.\d+)?|[A-Za-z_]\w*(\.\w+)*)( \* (\d+(\.\d+)?|[A-Za-z_]\w*(\.\w+)*))*")

_LINEAR_ORIGINAL = frozenset({"rope_theta", "max_position_embeddings"})
_NOT_INHERITED = frozenset({"linear_lengths", "linear_original", "original_length"})
"""Facts about published checkpoints, which another family with the same code need not share."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One table of families.toml; the comments there say what each field means."""

    pairing: str | None = None
    pairing_switch: str | None = None
    rotates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stays: tuple[str, ...] = ()
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    own_code: str | None = None
    unlike: dict[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] | None = None
    original_in_config: bool = False
    softmax_mscale: bool = False
    static_alpha: bool = False
    short_list_only: bool = False
    own_temperature: bool = False
    linear_lengths: str = "original"
    linear_original: dict[str, float] | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        if self.pairing not in (None, "half", "interleaved"):
            raise ValueError(f"pairing must be 'half' or 'interleaved', got {self.pairing!r}")
        flags = ("original_in_config", "softmax_mscale", "static_alpha", "short_list_only", "own_temperature")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.linear_lengths not in ("original", "extended"):
            raise ValueError(f"linear_lengths must be 'original' or 'extended', got {self.linear_lengths!r}")
        if self.linear_original is not None and set(self.linear_original) != _LINEAR_ORIGINAL:
            raise ValueError(f"linear_original must give {' and '.join(sorted(_LINEAR_ORIGINAL))}")
        if self.original_length is not None and not (type(self.original_length) is int and self.original_length > 0):
            raise ValueError(f"original_length must be a number of tokens, got {self.original_length!r}")
        if self.pairing_switch is not None and not isinstance(self.pairing_switch, str):
            raise ValueError(f"pairing_switch must be the name of a config key, got {self.pairing_switch!r}")
        for name in ("rope_types", "stays"):
            names: object = getattr(self, name)
            if names is not None:
                if not isinstance(names, (list, tuple)) or not all(isinstance(item, str) for item in names):
                    raise ValueError(f"{name} must be a list of names, got {names!r}")
                object.__setattr__(self, name, tuple(names))
        for name in ("rotates", "words"):
            object.__setattr__(self, name, _choices(name, getattr(self, name)))
        for module, choices in self.rotates.items():
            for rows in map(_what, choices):
                found = _ROWS.fullmatch(rows)
                if found is None or not set(found["pieces"].split(" ")) <= PIECES:
                    known = ", ".join(sorted(PIECES))
                    raise ValueError(
                        f"rotates.{module} must be words of {known}, after 'grouped' or 'N of' or not; got {rows!r}"
                    )
        for word, choices in self.words.items():
            if word not in WORDS:
                raise ValueError(f"words.{word} is none of {', '.join(sorted(WORDS))}")
            for product in map(_what, choices):
                if not _PRODUCT.fullmatch(product):
                    raise ValueError(
                        f"words.{word} must be config keys and numbers with ' * ' between, got {product!r}"
                    )
        unlike: object = self.unlike
        if not isinstance(unlike, dict) or not all(isinstance(text, str) for text in unlike.values()):
            raise ValueError(f"unlike must be a table of config keys and what they are a sign of, got {unlike!r}")
        if self.own_code is not None:
            if not isinstance(self.own_code, str) or not re.fullmatch(r"\w+\.\{\}\.\w+", self.own_code):
                raise ValueError(f"own_code must be like 'layers.{{}}.self_attention', got {self.own_code!r}")
            if "rotary_dim" not in self.words:
                raise ValueError("own_code needs words.rotary_dim: no model is built that could tell")

    def linear_is_extended(self, theta: float, max_position_embeddings: int) -> bool:
        """Whether max_position_embeddings beside a linear scaling is the extended length, not the original one."""
        if self.linear_original is not None:
            most = self.linear_original["max_position_embeddings"]
            if theta == self.linear_original["rope_theta"] and max_position_embeddings <= most:
                return False
        return self.linear_lengths == "extended"


def _choices(name: str, table: object) -> dict[str, tuple[str, ...]]:
    """Each value as a list of `X if KEY`, of which the last, or only one, has no condition."""
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, got {table!r}")
    found: dict[str, tuple[str, ...]] = {}
    for key, value in table.items():
        choices = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        parts = [_CHOICE.fullmatch(choice) if isinstance(choice, str) else None for choice in choices]
        if [part and bool(part["key"]) for part in parts] != [True] * (len(parts) - 1) + [False]:
            raise ValueError(
                f"{name}.{key} must be a string, or several of which all but the last end in ' if KEY'; got {value!r}"
            )
        found[key] = tuple(choices)
    return found


def _what(choice: str) -> str:
    return choice.partition(" if ")[0]


def choose(choices: Sequence[str], config: Any) -> str:
    """The X of the first `X if KEY` where this config has a KEY that is true, else the last, which has no condition."""
    split = (choice.partition(" if ") for choice in choices)
    return next(what for what, _, key in split if not key or look_up(config, key))


def look_up(config: Any, key: str) -> Any:
    """A key of a config, `outer.inner` for one inside another; None where it is not there."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


def parse_families(text: str) -> dict[str, Family]:
    """Read the table strictly.

    Raises:
        ValueError: naming the table, on an unknown key, a wrong value, or a `like` that names no earlier table.
    """
    known = {item.name for item in fields(Family)}
    raw: dict[str, dict[str, Any]] = {}
    parsed: dict[str, Family] = {}
    for name, table in tomllib.loads(text).items():
        if not isinstance(table, dict):
            raise ValueError(f"{name} stands outside any table; known keys of one: like, {', '.join(sorted(known))}")
        base = table.pop("like", None)
        if base is not None and base not in raw:
            raise ValueError(f"[{name}]: like = {base!r} names no table above it")
        if unknown := sorted(set(table) - known):
            raise ValueError(
                f"[{name}]: unknown key {', '.join(unknown)}; known keys: like, {', '.join(sorted(known))}"
            )
        inherited = {key: value for key, value in raw[base].items() if key not in _NOT_INHERITED} if base else {}
        raw[name] = inherited | table
        try:
            parsed[name] = Family(**raw[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"[{name}]: {error}") from error
    return parsed


@cache
def families() -> dict[str, Family]:
    """Every family by the `model_type` of its text config."""
    return parse_families(files("rope_ext_hf.patches").joinpath("families.toml").read_text(encoding="utf-8"))


def family(model_type: str) -> Family:
    """The family of a model_type; one that is not in the table has nothing special to it."""
    return families().get(model_type, Family())
