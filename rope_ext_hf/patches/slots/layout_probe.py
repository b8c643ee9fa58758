"""Find out how a rotary module arranges cos and sin, by running a copy of it with frequencies chosen for that.

The copy gets different frequencies of at most one radian per token, in place of its own. At position 1 the angle of a
column is then the frequency that it was rotated by, so cos and sin themselves tell which pair each column belongs to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.rotary.embedding import Layout

_CAST_DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes in which cos and sin may come out where the hidden states are bfloat16."""
_AXIS_COUNTS = (3, 4, 2)
"""The numbers of axes that are tried: time, height and width in most families of M-RoPE; others have four, or two."""


class AngleLayout(NamedTuple):
    """The form in which a rotary module returns its angles.

    The first three fields are arguments of `RotaryEmbedding`; `axes` is how many axes the module's positions have.
    """

    layout: Layout
    cast: bool
    axis_of_pair: tuple[int, ...] | None
    axes: int = 1


def probe_layout(module: nn.Module, stated: Tensor, layer_type: str | None) -> AngleLayout:
    """Return how a rotary module arranges the angles of a few positions.

    Args:
        module: a rotary module as a model was loaded with it; it may be on any device, the meta device included.
        stated: the inverse frequencies that its config states, (dim // 2,) float32.
        layer_type: the layers to run it for, where it serves several types; else None.

    Raises:
        UnsupportedModelError: the module does more than a rotary embedding, so that nothing can stand in for it.
    """
    pairs = len(stated)
    known = torch.linspace(0.1, 1.0, pairs, device="cpu")
    run = _runner(module, known, layer_type)
    try:
        # Three rows of one token at position 1. A cast to the dtype of the hidden states shows in bfloat16.
        out = run(torch.ones(3, 1, dtype=torch.int64, device="cpu"), torch.bfloat16)
    except (IndexError, RuntimeError, ValueError) as error:  # Qwen2-VL, Qwen2.5-VL and GLM-4V before 5.17
        raise UnsupportedModelError(
            f"{type(module).__name__} takes no positions of one axis, so it cannot be replaced; in newer versions of "
            "transformers it takes them"
        ) from error
    if isinstance(out, Tensor) and out.is_complex() and out.shape[-1] == pairs:
        return AngleLayout("complex", True, None)
    layout = _layout_of_columns(out, pairs)
    if layout is not None:
        cast = out[0].dtype == torch.bfloat16
        axes, axis_of_pair = _axes(run, known, layout)
        if axis_of_pair is not None:
            return AngleLayout(layout, cast, axis_of_pair, axes)
        # Some modules compute from their config at every call and never read their buffer (PhiMoE).
        if axes == 1 and (_rotates_by(run, known, layout) or _rotates_by(run, stated, layout)):
            return AngleLayout(layout, cast, None)
    raise UnsupportedModelError(
        f"{type(module).__name__} does more with its angles than a rotary embedding: it arranges them in another way, "
        "so it cannot be replaced"
    )


def _runner(module: nn.Module, known: Tensor, layer_type: str | None) -> Callable[[Tensor, torch.dtype], Any]:
    """Return a function that runs a copy of a rotary module, with the frequencies `known`, at positions in a dtype."""
    # A shallow copy with buffers of its own on the CPU: the module may be on a GPU or have no weights yet (meta), and
    # a forward of a class that follows the length would change its buffers.
    stand_in = copy.copy(module)
    stand_in._buffers = {}
    for name, buffer in module._buffers.items():
        if name.endswith("inv_freq"):
            stand_in._buffers[name] = known.clone()
        else:
            stand_in._buffers[name] = None if buffer is None else buffer.new_zeros(buffer.shape, device="cpu")
    # Mistral Large 4 has a learned multiplier, a buffer up to transformers 5.23 and a parameter since; 0 is neutral.
    stand_in._parameters = {
        name: x if x is None else nn.Parameter(x.new_zeros(x.shape, device="cpu"), requires_grad=False)
        for name, x in module._parameters.items()
    }
    kwargs = {} if layer_type is None else {"layer_type": layer_type}

    def run(positions: Tensor, dtype: torch.dtype) -> Any:
        return type(module).forward(stand_in, torch.zeros(1, dtype=dtype, device="cpu"), positions, **kwargs)

    return run


def _layout_of_columns(out: Any, pairs: int) -> Layout | None:
    """Return the layout of cos and sin that a module gave for three rows of one token; None if it is unknown."""
    if not (isinstance(out, tuple) and len(out) == 2 and out[0].shape[0] == 3 and out[0].dtype in _CAST_DTYPES):
        return None
    cos = out[0][0, 0].float()  # (pairs,) or (2 * pairs,)
    if cos.shape[0] == pairs:
        return "bare"
    if cos.shape[0] != 2 * pairs:
        return None
    if torch.equal(cos[:pairs], cos[pairs:]):
        return "half"
    if torch.equal(cos[0::2], cos[1::2]):
        return "interleaved"
    return None


def _axes(
    run: Callable[[Tensor, torch.dtype], Any], known: Tensor, layout: Layout
) -> tuple[int, tuple[int, ...] | None]:
    """Return how many axes the positions of a module have, (axes, rows, tokens), and the axis of each pair.

    The second is None where the module takes one axis only, where a pair is not rotated by its own frequency, or where
    its two columns differ.
    """
    for count in _AXIS_COUNTS:
        # Another position on each axis, so that the angle of a pair names the axis that it was rotated by.
        positions = torch.arange(1, count + 1, device="cpu").reshape(count, 1, 1)
        try:
            out = run(positions, torch.float32)
        except (RuntimeError, ValueError, IndexError):
            continue
        if not (isinstance(out, tuple) and out[0].shape[:2] == (1, 1)):
            return 1, None
        pairs = len(known)
        cos, sin = [_columns_of_pairs(part[0, 0].float(), pairs, layout) for part in out]
        size = (cos.square() + sin.square()).sqrt()  # the attention factor of a scaling of the model's own
        angles = positions.flatten()[:, None] * known  # (axes, pairs)
        differences = (angles.cos() - cos / size).abs() + (angles.sin() - sin / size).abs()
        errors = differences.amax(0)  # over the columns of a pair
        axis = errors.argmin(0)
        exact = bool((errors.gather(0, axis[None]) < 1e-5).all())
        return count, tuple(axis.tolist()) if exact else None
    return 1, None


def _rotates_by(run: Callable[[Tensor, torch.dtype], Any], frequencies: Tensor, layout: Layout) -> bool:
    """Return whether a module rotates each pair by the frequency given for it; all are at most one radian."""
    out = run(torch.ones(1, 1, dtype=torch.int64, device="cpu"), torch.float32)
    cos, sin = [_columns_of_pairs(part[0, 0].float(), len(frequencies), layout) for part in out]
    return torch.allclose(torch.atan2(sin, cos), frequencies.expand_as(sin), atol=1e-5)


def _columns_of_pairs(columns: Tensor, pairs: int, layout: Layout) -> Tensor:
    """Return the columns of each pair below each other, (1 or 2, 1, pairs); a bare layout has one column a pair."""
    if layout == "bare":
        return columns.reshape(1, 1, pairs)
    return (columns.reshape(2, pairs) if layout == "half" else columns.reshape(pairs, 2).mT).unsqueeze(1)
