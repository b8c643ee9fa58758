"""Longer context for Hugging Face models: RoPE methods for loaded models, checkpoints and measurements.

import rope_ext_hf as rope
model = rope.patch(model, "yarn", factor=8)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

__version__ = "0.1.0"

# These names load when first used: the command line answers --help without torch, and importing this package is quick.
if TYPE_CHECKING:
    from rope_ext_hf.bounds import limits as limits
    from rope_ext_hf.checkpoints.conversion import convert_checkpoint as convert_checkpoint
    from rope_ext_hf.checkpoints.live_model import convert as convert
    from rope_ext_hf.checkpoints.pairing.detection import detect_pairing as detect_pairing
    from rope_ext_hf.checkpoints.pairing.pairing_report import PairingReport as PairingReport
    from rope_ext_hf.checkpoints.report import ConversionReport as ConversionReport
    from rope_ext_hf.errors import CheckpointError as CheckpointError
    from rope_ext_hf.errors import CorpusError as CorpusError
    from rope_ext_hf.errors import FileError as FileError
    from rope_ext_hf.errors import FingerprintError as FingerprintError
    from rope_ext_hf.errors import LengthError as LengthError
    from rope_ext_hf.errors import MethodError as MethodError
    from rope_ext_hf.errors import RopeExtError as RopeExtError
    from rope_ext_hf.errors import ServingError as ServingError
    from rope_ext_hf.errors import UnsupportedModelError as UnsupportedModelError
    from rope_ext_hf.hub import fingerprint as fingerprint
    from rope_ext_hf.methods.base import Frequencies as Frequencies
    from rope_ext_hf.methods.base import RopeMethod as RopeMethod
    from rope_ext_hf.methods.base import Rotary as Rotary
    from rope_ext_hf.methods.registry import frequencies as frequencies
    from rope_ext_hf.methods.registry import list_methods as list_methods
    from rope_ext_hf.methods.registry import register_method as register_method
    from rope_ext_hf.patches.applying import apply_plan as apply_plan
    from rope_ext_hf.patches.describing import Description as Description
    from rope_ext_hf.patches.describing import describe as describe
    from rope_ext_hf.patches.loading import from_pretrained as from_pretrained
    from rope_ext_hf.patches.loading_classes import loading_class as loading_class
    from rope_ext_hf.patches.patching import fixed_length as fixed_length
    from rope_ext_hf.patches.patching import patch as patch
    from rope_ext_hf.patches.patching import patched as patched
    from rope_ext_hf.patches.patching import reset as reset
    from rope_ext_hf.patches.patching import unpatch as unpatch
    from rope_ext_hf.patches.planning import PatchPlan as PatchPlan
    from rope_ext_hf.patches.planning import plan_patch as plan_patch
    from rope_ext_hf.patches.saved.fingerprint import Fingerprint as Fingerprint
    from rope_ext_hf.patches.saved.loading_code import write_loading_code as write_loading_code
    from rope_ext_hf.rotary.embedding import RotaryEmbedding as RotaryEmbedding
    from rope_ext_hf.rotary.standalone import NTKAwareRoPE as NTKAwareRoPE
    from rope_ext_hf.rotary.standalone import apply_rotary_pos_emb as apply_rotary_pos_emb

__all__, __getattr__, __dir__ = lazy_names(__name__, "__version__")
