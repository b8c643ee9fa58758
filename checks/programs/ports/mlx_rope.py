"""Frequencies and magnitude of a model of mlx, whose rope rotates a prompt of the length that is asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import rotation

mx.set_default_device(mx.cpu)


class Rope:
    """The rope of one layer of a model, for prompts of one length.

    Args:
        layers: the layers of the model.
        config: the config that the model was made from.
        layer_type: the type of the layer; None: the first one.
        length: the number of tokens of the prompt; None: any.
    """

    def __init__(self, layers: Any, config: dict[str, Any], layer_type: str | None, length: int | None) -> None:
        rope = layers[config["layer_types"].index(layer_type) if layer_type else 0].self_attn.rope

        def rotate(vectors: Any) -> Any:
            return np.array(rope(mx.array(vectors)[None, None])[0, 0])

        self.pairs = rotation.pairs(rotate, getattr(rope, "dims", None) or rope.dim, length)

    def inv_freq(self) -> list[float]:
        return list(np.angle(self.pairs).tolist())

    def magnitude(self) -> float:
        return float(np.median(np.abs(self.pairs)))
