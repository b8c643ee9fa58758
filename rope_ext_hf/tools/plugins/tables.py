"""Common ground of the plug-ins of vLLM and SGLang: the rope settings that they read, and the tables that they build.

The rope settings hold the frequencies themselves:

    {"rope_type": "rope_ext_hf", "rope_theta": 10000.0, "inv_freq": "[1.0, 0.5, ...]", "attention_factor": 1.1}

`inv_freq` is text, because engines keep tables in dicts whose keys are the settings. There is no `factor`: they would
multiply the model's length by it. Settings without `inv_freq` go to the engine's own function, untouched.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.tools.engines.keys import REMAPPING_KEY, plugin_frequencies, plugin_settings

_BLOCK = 65536  # positions whose angles are computed at a time, in float64


def taken_over(settings_name: str, build: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function to put around an engine's `get_rope`: called with the engine's own and the arguments given to it.

    `build` makes the rotary module of all arguments and the rope settings among them, once for equal arguments.
    """
    tables: dict[tuple[Any, ...], Any] = {}

    def get_rope(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock).bind(*args, **kwargs)
        given.apply_defaults()
        settings = plugin_settings(given.arguments.get(settings_name) or {})
        if settings is None:
            return stock(*args, **kwargs)
        # A module without a dtype of its own gets the default, which is that of the model being built.
        key = (torch.get_default_dtype(), json.dumps(given.arguments, sort_keys=True, default=str))
        if key not in tables or _freed(tables[key]):
            tables[key] = build(given.arguments, settings)
        return tables[key]

    return get_rope


def _freed(module: Any) -> bool:
    """Whether a module has lost its table: SGLang frees those of a model that it unloads, and of one built on meta."""
    table = module.cos_sin_cache
    empty = table.is_meta or table.untyped_storage().nbytes() == 0
    return bool(empty and torch.get_default_device().type != "meta")


def build_rotary(engine: Any, arguments: Mapping[str, Any], settings: dict[str, Any], rotary_dim: int) -> Any:
    """The rotary module for these settings, of a class of `engine`, its package; `arguments` are of its `get_rope`."""
    _refuse_remapping(settings)
    frequencies, factor = plugin_frequencies(settings)
    if 2 * len(frequencies) != rotary_dim:
        raise ValueError(
            f"the rope settings of this config have {len(frequencies)} frequencies, and the model rotates "
            f"{rotary_dim} dims in pairs; write the config anew with rope-ext serve-config"
        )
    several_axes = "mrope_section" in settings
    base: type[Any] = engine.MRotaryEmbedding if several_axes else engine.RotaryEmbedding
    held = {
        "frequencies": torch.tensor(frequencies, dtype=torch.float64, device="cpu"),
        "magnitude": factor,
    }
    cls = type(f"RopeExt{base.__name__}", (_Table, base), held)
    known = inspect.signature(base.__init__).parameters
    axes = {name: settings[name] for name in known if name.startswith("mrope") and name in settings}
    if "positions_factor" in known and (times := arguments.get("mrope_positions_factor")) is not None:
        axes["positions_factor"] = times
    theta, dtype = settings.get("rope_theta", 10000.0), arguments.get("dtype") or torch.get_default_dtype()
    head_size, most, half = (arguments[name] for name in ("head_size", "max_position", "is_neox_style"))
    return cls(head_size, rotary_dim, most, theta, half, dtype, **axes)


class _Table:
    """Methods by which a rotary class of an engine computes other frequencies and another table than its own."""

    frequencies: Tensor  # (pairs,) float64, radians per position
    magnitude: float  # the number that cos and sin are multiplied by
    cos_sin_cache: Tensor  # of the engine's class, as the length below
    max_position_embeddings: int

    def _compute_inv_freq(self, base: float) -> Tensor:
        return self.frequencies.float()

    def _compute_cos_sin_cache(self) -> Tensor:
        return self._rows(0, int(getattr(self, "cache_max_position_num", self.max_position_embeddings)))

    def _ensure_cos_sin_cache_length(self, position: int) -> None:
        """Have a row for a position that lies beyond the table; SGLang calls it for inputs longer than announced."""
        table = self.cos_sin_cache
        if position >= len(table):
            more = self._rows(len(table), (position // _BLOCK + 1) * _BLOCK)
            self.cos_sin_cache = torch.cat((table, more.to(table.device, table.dtype)))

    def _rows(self, start: int, end: int) -> Tensor:
        """cos and sin of positions, (positions, rotary_dim) float32, from float64 angles: rounded once."""
        parts = []
        for first in range(start, end, _BLOCK):
            positions = torch.arange(first, min(first + _BLOCK, end), dtype=torch.float64, device="cpu")
            angles = positions[:, None] * self.frequencies
            parts.append(torch.cat((angles.cos(), angles.sin()), dim=-1).mul(self.magnitude).float())
        return torch.cat(parts).to(torch.get_default_device())


def _refuse_remapping(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for rope settings with a remapping method, which an earlier version of the plug-in ran."""
    if REMAPPING_KEY in settings:
        raise ValueError(
            f"the rope settings of this config have a {REMAPPING_KEY!r} method, which the plug-in of vLLM was able to "
            "run up to version 0.1.0 of rope-ext-hf; choose a static method, and write the config anew with rope-ext "
            "serve-config"
        )


def for_transformers(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Frequencies, (pairs,) float32, and magnitude, as the functions of transformers' ROPE_INIT_FUNCTIONS return them.

    Engines run some models by the classes of transformers, or with their frequencies.
    """
    _refuse_remapping(config.rope_parameters)
    inv_freq, attention_factor = plugin_frequencies(config.rope_parameters)
    return torch.tensor(inv_freq, dtype=torch.float32, device=device), attention_factor
