"""fla-core: the tables of cos and sin of its rotary module, which takes a base and no scaling.

Its kernel needs a GPU; the tables do not.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import rope_settings
import torch
from fla.modules import RotaryEmbedding


def version() -> str:
    return f"fla-core {installed('fla-core')}, torch {torch.__version__}"


def _first_turn(config: dict[str, Any]) -> Any:
    """Return cos + i sin of each pair at position 1."""
    rope = rope_settings.read(config)
    if rope["rope_type"] != "default":
        raise NotImplementedError
    module = RotaryEmbedding(config["head_dim"], base=rope["rope_theta"])
    module._update_cos_sin_cache(2, device=torch.device("cpu"), dtype=torch.float32)
    return torch.complex(module._cos_cached[1].double(), module._sin_cached[1].double())


def inv_freq(config: dict[str, Any]) -> Any:
    return _first_turn(config).angle().tolist()


def magnitude(config: dict[str, Any]) -> float:
    return float(_first_turn(config).abs()[0])
