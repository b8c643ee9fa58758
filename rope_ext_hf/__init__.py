"""Longer context for Hugging Face models: RoPE methods for loaded models, checkpoints and measurements.

import rope_ext_hf as rope
model = rope.patch(model, "yarn", factor=8)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_ext_hf.checkpoint import ConversionReport, convert_checkpoint
    from rope_ext_hf.detect import PairingReport, detect_pairing
    from rope_ext_hf.errors import (
        CheckpointError,
        CorpusError,
        LengthError,
        MethodError,
        RopeExtError,
        UnsupportedModelError,
    )
    from rope_ext_hf.patches.converting import convert
    from rope_ext_hf.patches.patching import Description, describe, fixed_length, patch, patched, reset, unpatch
    from rope_ext_hf.patches.saving import from_pretrained
    from rope_ext_hf.rotary import NTKAwareRoPE, RotaryEmbedding, apply_rotary_pos_emb
    from rope_ext_hf.scaling import Frequencies, Rotary, Scaling, frequencies, methods

__version__ = "0.1.0"

# Where each public name lives. They load when first used: the command line answers --help without torch, and importing
# this package costs nothing.
_HOMES = {
    "rope_ext_hf.errors": (
        "CheckpointError",
        "CorpusError",
        "LengthError",
        "MethodError",
        "RopeExtError",
        "UnsupportedModelError",
    ),
    "rope_ext_hf.checkpoint": ("ConversionReport", "convert_checkpoint"),
    "rope_ext_hf.detect": ("PairingReport", "detect_pairing"),
    "rope_ext_hf.patches.converting": ("convert",),
    "rope_ext_hf.patches.patching": (
        "Description",
        "describe",
        "fixed_length",
        "patch",
        "patched",
        "reset",
        "unpatch",
    ),
    "rope_ext_hf.patches.saving": ("from_pretrained",),
    "rope_ext_hf.rotary": ("NTKAwareRoPE", "RotaryEmbedding", "apply_rotary_pos_emb"),
    "rope_ext_hf.scaling": ("Frequencies", "Rotary", "Scaling", "frequencies", "methods"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointError",
    "ConversionReport",
    "CorpusError",
    "Description",
    "Frequencies",
    "LengthError",
    "MethodError",
    "NTKAwareRoPE",
    "PairingReport",
    "RopeExtError",
    "Rotary",
    "RotaryEmbedding",
    "Scaling",
    "UnsupportedModelError",
    "__version__",
    "apply_rotary_pos_emb",
    "convert",
    "convert_checkpoint",
    "describe",
    "detect_pairing",
    "fixed_length",
    "frequencies",
    "from_pretrained",
    "methods",
    "patch",
    "patched",
    "reset",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
