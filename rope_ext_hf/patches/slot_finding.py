"""Find a model's rotary modules, and the layout of angles that each returns: by structure, not by class names.

A slot is a module that holds `inv_freq` (or `<layer type>_inv_freq`), takes `position_ids`, and belongs to the model's
text config. Its layout is what its own forward does with a few made-up frequencies. A family that keeps a table of
angles in its weights instead (RoFormer) is read otherwise; see `angle_tables`.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.class_angles import same_frequencies
from rope_ext_hf.patches.config import ConfigRope, read_rope
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.layer_types import AttentionLayers, Layers, LayerType
from rope_ext_hf.patches.slots import PatchedSlot, Slot, check_filled, check_is_model
from rope_ext_hf.rotary.embedding import Layout


def find_slots(model: nn.Module, layers: Layers | None = None) -> list[Slot]:
    """Every slot of a model's decoder; in a patched model the modules that were replaced count as what is there.

    `layers` are those that a method applies to; None: those that attend to everything before them.
    """
    found = rotary_modules(model)
    if not found:
        root: Any = model.config
        names = vars(sys.modules.get(type(model).__module__, object))  # of the file of its class
        rotates_inside = any("rotary" in name or "rotate" in name for name in names)
        raise UnsupportedModelError(
            f"{type(model).__name__} ({root.model_type}) has no rotary position embedding that can be replaced"
            + (
                "; its attention layers compute angles themselves, as GPT-J's do; a method takes the place of a module "
                "that computes cos and sin for them, as Llama and GPT-NeoX have"
                if rotates_inside
                else ": it knows positions in another way, or not at all, and this package changes rotary ones (RoPE)"
            )
        )
    return [_inspect(*each, several=len(found) > 1, asked=layers) for each in found]


_Found = tuple[nn.Module, str, nn.Module, Any]


def rotary_modules(model: nn.Module) -> list[_Found]:
    """The rotary modules of a decoder: parent, attribute, the module as loaded, the config it was built from."""
    check_is_model(model)
    root: Any = getattr(model, "config", None)
    if not hasattr(root, "model_type"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model: it has no config")
    text = root.get_text_config() if hasattr(root, "get_text_config") else root
    found: list[_Found] = []
    modules = list(model.modules())
    with_frequencies = {id(module) for module in modules for name in module._buffers if name.endswith("inv_freq")}
    for parent in modules:
        if isinstance(parent, PatchedSlot):
            continue
        for attribute, child in parent.named_children():
            module = child.replaced if isinstance(child, PatchedSlot) else child
            if id(module) not in with_frequencies and not isinstance(module, nn.Embedding):  # a table is one
                continue
            config = getattr(module, "config", None) or getattr(parent, "config", None)
            if isinstance(child, PatchedSlot):  # the one that the module was built from
                config = next((swap.original for swap in child.state.configs if swap.patched is config), config)
            # No config, or something else: Idefics keeps a dropout rate there; or one of another part, such as vision.
            if getattr(config, "model_type", None) != text.model_type:
                continue
            takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters
            table = family(text.model_type).angle_table
            if (takes_positions and frequency_buffers(module)) or attribute == table:
                found.append((parent, attribute, module, config))
    return found


def frequency_buffers(module: nn.Module) -> dict[LayerType, str]:
    """Names of the buffers that hold inverse frequencies, by layer type; originals left aside."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    return {
        name.removesuffix("inv_freq").removesuffix("_") or None: name
        for name in names
        if not name.endswith("original_inv_freq")
    }


def _inspect(
    parent: nn.Module, attribute: str, module: nn.Module, config: Any, *, several: bool, asked: Layers | None
) -> Slot:
    """The slot of a rotary module, of one of several in its model, for the layers that `find_slots` takes."""
    as_loaded: dict[LayerType, ConfigRope] = {}
    layout: Layout = "bare"
    cast, log_multiplier = True, None
    axis_of_pair: dict[LayerType, tuple[int, ...] | None] = {}
    check_filled(module)
    if is_table := attribute == family(config.model_type).angle_table:
        as_loaded[None], axis_of_pair[None] = _rope_of_table(module, config), None
    for layer_type, name in ({} if is_table else frequency_buffers(module)).items():
        inv_freq = getattr(module, name.removesuffix("inv_freq") + "original_inv_freq", getattr(module, name))
        as_loaded[layer_type] = rope = read_rope(config, 2 * inv_freq.shape[-1], layer_type)
        stated = rope.method.frequencies(rope.plain, rope.plain.trained_length).inv_freq
        _check_against_config(config, inv_freq, rope, stated)
        layout, cast, axis_of_pair[layer_type] = _probe(module, stated.float(), layer_type)
        log_multiplier = _log_multiplier(module, config, inv_freq.shape[-1])
    layers = AttentionLayers(config)
    served = layers.served(list(as_loaded), as_loaded[None].plain.theta if several and None in as_loaded else None)
    scaled, idle = layers.choose(served, asked), not any(served.values())
    found = (parent, attribute, module, config)
    return Slot(*found, layers, as_loaded, layout, cast, axis_of_pair, is_table, log_multiplier, scaled, idle)


def _log_multiplier(module: nn.Module, config: Any, pairs: int) -> str | None:
    """The buffer whose exponential multiplies the frequencies of a module, of the families that have one."""
    named = family(config.model_type).learned_log_multiplier
    tensors = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    learned = [name for name, tensor in tensors.items() if not name.endswith("inv_freq") and tensor.numel() == pairs]
    if other := [name for name in learned if name != named]:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds {other[0]!r}, a number for each of its {pairs} frequencies that a "
            "replacement would drop"
        )
    return named if named in learned else None


def _rope_of_table(module: nn.Module, config: Any) -> ConfigRope:
    """The rotary embedding of a table whose rows are [sin | cos] of every position, which the config must describe."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rope = read_rope(config, weight.shape[-1])
    if weight.device.type != "meta":
        inv_freq, attention_factor = rope.method.frequencies(rope.plain, rope.plain.trained_length)
        shown = weight[:512].detach().double().cpu()
        angles = torch.arange(len(shown), dtype=torch.float64)[:, None] * inv_freq
        if not torch.allclose(shown, torch.cat((angles.sin(), angles.cos()), -1) * attention_factor, atol=2e-2):
            raise _another_geometry(config, rope)
    return rope


def _check_against_config(config: Any, inv_freq: Tensor, rope: ConfigRope, stated: Tensor) -> None:
    """The config must describe the frequencies the model has; else a patch would start from the wrong geometry."""
    if inv_freq.device.type == "meta":
        return
    if not same_frequencies(inv_freq, stated):
        raise _another_geometry(config, rope)


def _another_geometry(config: Any, rope: ConfigRope) -> UnsupportedModelError:
    rotary = rope.plain
    return UnsupportedModelError(
        f"the inverse frequencies of this {config.model_type!r} model are not what its config describes "
        f"({rope.method.name}, theta {rotary.theta:g}, {rotary.dim} dims); its rotary module cannot be replaced "
        "safely"
    )


def _probe(module: nn.Module, stated: Tensor, layer_type: str | None) -> tuple[Layout, bool, tuple[int, ...] | None]:
    """Run a stand-in of a module on a few positions: its layout, cast, axes. `stated`: frequencies of its config."""
    # A shallow copy with buffers of its own on the CPU: the module may be on a GPU or have no weights yet (meta), and
    # forwards that follow the input would change its buffers.
    stand_in, pairs = copy.copy(module), len(stated)
    # Different frequencies of at most one radian: each pair of columns shows which of them it was rotated by.
    known = torch.linspace(0.1, 1.0, pairs, device="cpu")
    empty = {name: x if x is None else x.new_zeros(x.shape, device="cpu") for name, x in module._buffers.items()}
    stand_in._buffers = {name: known.clone() if name.endswith("inv_freq") else x for name, x in empty.items()}
    # Without gradients; Mistral Large 4 has a learned multiplier, a buffer up to transformers 5.23.
    stand_in._parameters = {
        name: x if x is None else nn.Parameter(x.new_zeros(x.shape, device="cpu"), requires_grad=False)
        for name, x in module._parameters.items()
    }
    kwargs = {} if layer_type is None else {"layer_type": layer_type}

    def run(positions: Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
        return type(module).forward(stand_in, torch.zeros(1, dtype=dtype, device="cpu"), positions, **kwargs)

    try:  # three rows of one token at position 1; x in bfloat16 shows whether cos and sin are cast to its dtype
        out = run(torch.ones(3, 1, dtype=torch.int64, device="cpu"))
    except (IndexError, RuntimeError, ValueError) as error:  # Qwen2-VL, Qwen2.5-VL and GLM-4V before 5.17
        raise UnsupportedModelError(
            f"{type(module).__name__} takes no positions of one axis, so it cannot be replaced; newer versions of "
            "transformers have it take them"
        ) from error
    if isinstance(out, Tensor) and out.is_complex() and out.shape[-1] == pairs:
        return "complex", True, None
    if isinstance(out, tuple) and len(out) == 2 and out[0].shape[0] == 3 and out[0].dtype in _CAST:
        cos, cast = out[0][0, 0].float(), out[0].dtype == torch.bfloat16  # (pairs,) or (2 * pairs,)
        layouts: dict[Layout, bool] = {
            "bare": cos.shape[0] == pairs,
            "half": cos.shape[0] == 2 * pairs and torch.equal(cos[:pairs], cos[pairs:]),
            "interleaved": cos.shape[0] == 2 * pairs and torch.equal(cos[0::2], cos[1::2]),
        }
        layout = next((name for name, matches in layouts.items() if matches), None)
        if layout is not None:
            several, axis_of_pair = _axes(run, known, layout)
            # Some modules compute from their config at every call and never read their buffer (PhiMoE).
            alone = not several and (_own_angles(run, known, layout) or _own_angles(run, stated, layout))
            if axis_of_pair is not None or alone:
                return layout, cast, axis_of_pair
    raise UnsupportedModelError(
        f"{type(module).__name__} does more with its angles than a rotary embedding: it arranges them in another way, "
        "so it cannot be replaced"
    )


_CAST = (torch.bfloat16, torch.float32)  # the dtypes in which cos and sin may come out where x is bfloat16


def _axes(run: Callable[..., Any], known: Tensor, layout: Layout) -> tuple[bool, tuple[int, ...] | None]:
    """Whether positions (axes, batch, length) come out as one row, and the axis that rotates each pair.

    That axis is None where a pair is not rotated by its own frequency, or its two columns differ.
    """
    for count in (3, 4, 2):  # M-RoPE has time, height and width; other families have four axes, or two
        # Another position on each axis, so that the angle of a pair names the axis that it was rotated by.
        positions = torch.arange(1, count + 1, device="cpu").reshape(count, 1, 1)
        try:
            out = run(positions, torch.float32)
        except (RuntimeError, ValueError, IndexError):
            continue
        if not (isinstance(out, tuple) and out[0].shape[:2] == (1, 1)):
            return False, None
        pairs = len(known)
        cos, sin = [_once(part[0, 0].float(), pairs, layout) for part in out]
        size = (cos.square() + sin.square()).sqrt()  # (1 or 2, 1, pairs): the attention factor of a scaling of its own
        angles = positions.flatten()[:, None] * known  # (axes, pairs)
        differences = (angles.cos() - cos / size).abs() + (angles.sin() - sin / size).abs()
        errors = differences.amax(0)  # over the columns of a pair
        axis = errors.argmin(0)
        exact = bool((errors.gather(0, axis[None]) < 1e-5).all())
        return True, tuple(axis.tolist()) if exact else None
    return False, None


def _own_angles(run: Callable[..., Any], frequencies: Tensor, layout: Layout) -> bool:
    """Whether each pair is rotated by its own one of these frequencies, of at most one radian."""
    out = run(torch.ones(1, 1, dtype=torch.int64, device="cpu"), torch.float32)
    cos, sin = [_once(part[0, 0].float(), len(frequencies), layout) for part in out]
    return torch.allclose(torch.atan2(sin, cos), frequencies.expand_as(sin), atol=1e-5)


def _once(columns: Tensor, pairs: int, layout: Layout) -> Tensor:
    """The columns of each pair below each other, (1 or 2, 1, pairs)."""
    if layout == "bare":
        return columns.reshape(1, 1, pairs)
    return (columns.reshape(2, pairs) if layout == "half" else columns.reshape(pairs, 2).mT).unsqueeze(1)
