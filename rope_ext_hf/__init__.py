"""Longer context for Hugging Face models: RoPE methods for loaded models, checkpoints and measurements.

import rope_ext_hf as rope
model = rope.patch(model, "yarn", factor=8)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_ext_hf.attention.linear import LinearAttentionState, linear_attention
    from rope_ext_hf.attention.rotary_attention import KeyValueCache, RotaryAttention
    from rope_ext_hf.bounds import limits
    from rope_ext_hf.checkpoints.conversion import convert_checkpoint
    from rope_ext_hf.checkpoints.detection import PairingReport, detect_pairing
    from rope_ext_hf.checkpoints.live_model import convert
    from rope_ext_hf.checkpoints.migration import migrate_to_rope
    from rope_ext_hf.checkpoints.report import ConversionReport
    from rope_ext_hf.engines.base import ServingConfig
    from rope_ext_hf.errors import (
        CheckpointError,
        CorpusError,
        FileError,
        LengthError,
        MethodError,
        RopeExtError,
        ServingError,
        UnsupportedModelError,
    )
    from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
    from rope_ext_hf.methods.registry import frequencies, list_methods, register_method
    from rope_ext_hf.patches.describing import Description, describe
    from rope_ext_hf.patches.loading import from_pretrained
    from rope_ext_hf.patches.patching import fixed_length, patch, patched, reset, unpatch
    from rope_ext_hf.rotary.axial import AxialRotaryEmbedding
    from rope_ext_hf.rotary.embedding import RotaryEmbedding
    from rope_ext_hf.rotary.standalone import NTKAwareRoPE, apply_rotary_pos_emb
    from rope_ext_hf.serving.advice import Advice, advise
    from rope_ext_hf.serving.audit import Audit, audit
    from rope_ext_hf.serving.configs import serving_config

__version__ = "0.1.0"

# Where each public name lives. They load when first used: the command line answers --help without torch, and importing
# this package costs nothing.
_HOMES = {
    "rope_ext_hf.bounds": ("limits",),
    "rope_ext_hf.errors": (
        "CheckpointError",
        "CorpusError",
        "FileError",
        "LengthError",
        "MethodError",
        "RopeExtError",
        "ServingError",
        "UnsupportedModelError",
    ),
    "rope_ext_hf.checkpoints.conversion": ("convert_checkpoint",),
    "rope_ext_hf.checkpoints.report": ("ConversionReport",),
    "rope_ext_hf.checkpoints.detection": ("PairingReport", "detect_pairing"),
    "rope_ext_hf.checkpoints.live_model": ("convert",),
    "rope_ext_hf.checkpoints.migration": ("migrate_to_rope",),
    "rope_ext_hf.patches.describing": ("Description", "describe"),
    "rope_ext_hf.patches.patching": ("fixed_length", "patch", "patched", "reset", "unpatch"),
    "rope_ext_hf.patches.loading": ("from_pretrained",),
    "rope_ext_hf.rotary.axial": ("AxialRotaryEmbedding",),
    "rope_ext_hf.rotary.embedding": ("RotaryEmbedding",),
    "rope_ext_hf.rotary.standalone": ("NTKAwareRoPE", "apply_rotary_pos_emb"),
    "rope_ext_hf.attention.linear": ("LinearAttentionState", "linear_attention"),
    "rope_ext_hf.attention.rotary_attention": ("KeyValueCache", "RotaryAttention"),
    "rope_ext_hf.engines.base": ("ServingConfig",),
    "rope_ext_hf.serving.advice": ("Advice", "advise"),
    "rope_ext_hf.serving.audit": ("Audit", "audit"),
    "rope_ext_hf.serving.configs": ("serving_config",),
    "rope_ext_hf.methods.base": ("Frequencies", "RopeMethod", "Rotary"),
    "rope_ext_hf.methods.registry": ("frequencies", "list_methods", "register_method"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Advice",
    "Audit",
    "AxialRotaryEmbedding",
    "CheckpointError",
    "ConversionReport",
    "CorpusError",
    "Description",
    "FileError",
    "Frequencies",
    "KeyValueCache",
    "LengthError",
    "LinearAttentionState",
    "MethodError",
    "NTKAwareRoPE",
    "PairingReport",
    "RopeExtError",
    "RopeMethod",
    "Rotary",
    "RotaryAttention",
    "RotaryEmbedding",
    "ServingConfig",
    "ServingError",
    "UnsupportedModelError",
    "__version__",
    "advise",
    "apply_rotary_pos_emb",
    "audit",
    "convert",
    "convert_checkpoint",
    "describe",
    "detect_pairing",
    "fixed_length",
    "frequencies",
    "from_pretrained",
    "limits",
    "linear_attention",
    "list_methods",
    "migrate_to_rope",
    "patch",
    "patched",
    "register_method",
    "reset",
    "serving_config",
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
