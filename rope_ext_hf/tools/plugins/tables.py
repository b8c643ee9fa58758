"""Functions that the plug-ins of vLLM and SGLang share: they read rope settings and build tables of cos and sin.

The rope settings contain the frequencies themselves:

    {"rope_type": "rope_ext_hf", "rope_theta": 10000.0, "inv_freq": "[1.0, 0.5, ...]", "attention_factor": 1.1}

`inv_freq` is a string, because engines use settings as keys of dicts. There is no `factor`, because engines would
multiply the model's length by it. Settings without `inv_freq` are passed to the engine's own function unchanged.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.tools.engines.keys import REMAPPING_KEY, plugin_frequencies, plugin_settings

_BLOCK = 65536  # positions whose float64 angles are computed at a time


def own_get_rope(settings_name: str, build: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a wrapper for an engine's function `get_rope`, which builds rotary modules.

    The wrapper is called with the engine's `get_rope` and its arguments. Where the rope settings are those of the
    plug-in, it builds the rotary module itself, once for equal arguments; else it calls `get_rope`.

    Args:
        settings_name: the name of the argument that holds the rope settings.
        build: makes the rotary module from all arguments by name and the rope settings.
    """
    modules: dict[tuple[Any, ...], Any] = {}

    def get_rope(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(stock).bind(*args, **kwargs)
        bound.apply_defaults()
        settings = plugin_settings(bound.arguments.get(settings_name) or {})
        if settings is None:
            return stock(*args, **kwargs)
        # A module whose dtype is not given gets torch's default, which is that of the model being built.
        key = (torch.get_default_dtype(), json.dumps(bound.arguments, sort_keys=True, default=str))
        if key not in modules or _is_freed(modules[key]):
            modules[key] = build(bound.arguments, settings)
        return modules[key]

    return get_rope


def _is_freed(module: Any) -> bool:
    """Return True if the table of a rotary module is gone: SGLang frees tables of a model that it unloads.

    A module that was built on the meta device has no table either.
    """
    table = module.cos_sin_cache
    empty = table.is_meta or table.untyped_storage().nbytes() == 0
    return bool(empty and torch.get_default_device().type != "meta")


def build_rotary(engine: Any, arguments: Mapping[str, Any], settings: dict[str, Any], rotary_dim: int) -> Any:
    """Build an engine's rotary module that rotates with the frequencies in the plug-in's rope settings.

    Args:
        engine: the engine's package of rotary classes; the module's class is a subclass of one of them.
        arguments: the arguments of the engine's `get_rope`, by name.
        settings: the rope settings.
        rotary_dim: rotated dims of a head.

    Raises:
        ValueError: the settings have frequencies for another number of dims, or name a method that remaps positions.
    """
    _refuse_remapping(settings)
    frequencies, factor = plugin_frequencies(settings)
    if 2 * len(frequencies) != rotary_dim:
        raise ValueError(
            f"the rope settings of this config have {len(frequencies)} frequencies, but the model rotates {rotary_dim} "
            "dims in pairs; write the config anew with rope-ext serve-config"
        )
    has_axes = "mrope_section" in settings
    base: type[Any] = engine.MRotaryEmbedding if has_axes else engine.RotaryEmbedding
    attributes = {
        "frequencies": torch.tensor(frequencies, dtype=torch.float64, device="cpu"),
        "magnitude": factor,
    }
    cls = type(f"RopeExt{base.__name__}", (_Table, base), attributes)
    parameters = inspect.signature(base.__init__).parameters
    axes = {name: settings[name] for name in parameters if name.startswith("mrope") and name in settings}
    positions_factor = arguments.get("mrope_positions_factor")
    if "positions_factor" in parameters and positions_factor is not None:
        axes["positions_factor"] = positions_factor
    return cls(
        arguments["head_size"],
        rotary_dim,
        arguments["max_position"],
        settings.get("rope_theta", 10000.0),
        arguments["is_neox_style"],
        arguments.get("dtype") or torch.get_default_dtype(),
        **axes,
    )


class _Table:
    """Mix-in that replaces the frequencies and the table of cos and sin in an engine's rotary class."""

    frequencies: Tensor  # (pairs,) float64, radians per position
    magnitude: float  # the factor of cos and sin
    cos_sin_cache: Tensor  # the table, an attribute of the engine's class
    max_position_embeddings: int  # an attribute of the engine's class

    def _compute_inv_freq(self, base: float) -> Tensor:
        return self.frequencies.float()

    def _compute_cos_sin_cache(self) -> Tensor:
        return self._rows(0, int(getattr(self, "cache_max_position_num", self.max_position_embeddings)))

    def _ensure_cos_sin_cache_length(self, position: int) -> None:
        """Extend the table up to a position; SGLang calls this for inputs that are longer than it was started for."""
        table = self.cos_sin_cache
        if position >= len(table):
            more = self._rows(len(table), (position // _BLOCK + 1) * _BLOCK)
            self.cos_sin_cache = torch.cat((table, more.to(table.device, table.dtype)))

    def _rows(self, start: int, end: int) -> Tensor:
        """Return cos and sin for the positions `start` to `end` - 1.

        The result is (positions, rotary_dim) float32, rounded once from float64 angles.
        """
        parts = []
        for first in range(start, end, _BLOCK):
            positions = torch.arange(first, min(first + _BLOCK, end), dtype=torch.float64, device="cpu")
            angles = positions[:, None] * self.frequencies
            parts.append(torch.cat((angles.cos(), angles.sin()), dim=-1).mul(self.magnitude).float())
        return torch.cat(parts).to(torch.get_default_device())


def _refuse_remapping(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for rope settings with a method that remaps positions, such as Self-Extend.

    An earlier version of the plug-in ran such methods.
    """
    if REMAPPING_KEY in settings:
        raise ValueError(
            f"the rope settings of this config have a {REMAPPING_KEY!r} method, which only the vLLM plug-in of "
            "rope-ext-hf 0.1.0 and earlier could run; choose a static method, and write the config anew with rope-ext "
            "serve-config"
        )


def for_transformers(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Return the plug-in's frequencies and magnitude from a config, as a function of transformers' ROPE_INIT_FUNCTIONS.

    Engines run some models with transformers' classes, or take the frequencies from that table. The inverse frequencies
    are (pairs,) float32; the second value is the attention factor.
    """
    _refuse_remapping(config.rope_parameters)
    inv_freq, attention_factor = plugin_frequencies(config.rope_parameters)
    return torch.tensor(inv_freq, dtype=torch.float32, device=device), attention_factor
