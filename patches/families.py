"""The family table: what a live model does not tell about itself, read from `families.toml`.

>>> family("phi3").rope_types
('default', 'longrope')
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["PIECES", "Family", "families", "family", "parse_families"]

PIECES = frozenset({"q", "q+gate", "k", "v", "head", "nope+rope", "latent", "rope"})
"""What the rows of a tensor are made up of, see families.toml."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One table of families.toml; the comments there say what each field means."""

    pairing: str | None = None
    pairing_switch: str | None = None
    cache: str | None = None
    rotates: dict[str, str] = field(default_factory=dict)
    stays: tuple[str, ...] = ()
    rope_types: tuple[str, ...] | None = None
    original_in_config: bool = False
    softmax_mscale: bool = False

    def __post_init__(self) -> None:
        for name in ("pairing", "cache"):
            if getattr(self, name) not in (None, "half", "interleaved"):
                raise ValueError(f"{name} must be 'half' or 'interleaved', got {getattr(self, name)!r}")
        for name in ("original_in_config", "softmax_mscale"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.pairing_switch is not None and not isinstance(self.pairing_switch, str):
            raise ValueError(f"pairing_switch must be the name of a config key, got {self.pairing_switch!r}")
        for name in ("rope_types", "stays"):
            names: object = getattr(self, name)
            if names is not None:
                if not isinstance(names, (list, tuple)) or not all(isinstance(item, str) for item in names):
                    raise ValueError(f"{name} must be a list of names, got {names!r}")
                object.__setattr__(self, name, tuple(names))
        rotates: object = self.rotates
        if not isinstance(rotates, dict):
            raise ValueError(f"rotates must be a table of module names, got {rotates!r}")
        for module, rows in rotates.items():
            words = rows.split() if isinstance(rows, str) else []
            if words[:1] == ["grouped"]:
                words = words[1:]
            if not words or not set(words) <= PIECES:
                known = ", ".join(sorted(PIECES))
                raise ValueError(f"rotates.{module} must be words of {known}, after 'grouped' or not; got {rows!r}")


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
        inherited = {key: value for key, value in raw[base].items() if key != "cache"} if base else {}
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
