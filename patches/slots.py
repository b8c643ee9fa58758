"""Where a model's rotary modules are, and the layout of angles that each returns: by structure, not by class names.

A slot is a module that holds `inv_freq` (or `<layer type>_inv_freq`), takes `position_ids`, and belongs to the model's
text config. Its layout is what its own forward does with a few made-up frequencies. A family that keeps a table of
angles in its weights instead (RoFormer) is read otherwise; see `angle_tables`.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import ConfigRope, read_rope
from rope_ext_hf.patches.family_hooks import angle_table, learned_log_multiplier
from rope_ext_hf.patches.layer_types import AttentionLayers, Layers, LayerType
from rope_ext_hf.patches.patch_spec import PatchSpec
from rope_ext_hf.patches.patch_state import PatchState
from rope_ext_hf.rotary.embedding import Layout, RotaryEmbedding
from rope_ext_hf.rotary.phase import fixed_point


@dataclass(frozen=True)
class Slot:
    """A rotary module in a model.

    Attributes:
        parent, attribute: where it hangs; `getattr(parent, attribute)` is `module`.
        config: the config it was built from.
        layers: the layers of that config.
        as_loaded: per layer type (None: there is one for all layers) the rotary embedding that its config describes.
        layout, cast: how its angles come out, see `RotaryEmbedding`.
        axis_of_pair: per layer type, the axis of the positions that rotates each pair, see `RotaryEmbedding`.
        is_table: whether the module is a table of angles instead of computing them.
        log_multiplier: the buffer of `module` whose exponential multiplies its frequencies; None: there is none.
        scaled_layers: the layer types that a method applies to.
        idle: it serves no layer (Granite SWA keeps one beside those of `layer_rope_theta`).
    """

    parent: nn.Module
    attribute: str
    module: nn.Module
    config: Any
    layers: AttentionLayers
    as_loaded: dict[LayerType, ConfigRope]
    layout: Layout
    cast: bool
    axis_of_pair: dict[LayerType, tuple[int, ...] | None]
    is_table: bool = False
    log_multiplier: str | None = None
    scaled_layers: tuple[LayerType, ...] = ()
    idle: bool = False

    @property
    def axes(self) -> int:
        """How many axes its positions have."""
        return max(1 if axes is None else 1 + max(axes) for axes in self.axis_of_pair.values())


class _RemappedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of an attention-level method: it turns queries and keys to where keys are stored."""

    beside_attention = True

    def _at(self, length: int | None) -> Frequencies:
        assert isinstance(self.method, RemappingMethod)
        inv_freq, attention_factor = super()._at(length)
        return Frequencies(
            inv_freq / self.method.key_position(torch.zeros((), dtype=torch.int64)).divisor, attention_factor
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        assert isinstance(self.method, RemappingMethod)
        positions = self.method.key_position(position_ids).positions
        assert positions is not None
        return super().forward(x, positions)


class _MultipliedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of a model that multiplies its inverse frequencies by something learned.

    Args:
        source: the module that is replaced, which goes on holding the buffer.
        buffer: the buffer's name; its exponential multiplies the frequencies, also when other weights are loaded.
    """

    beside_attention = True  # while a model is probed for remapping methods

    def __init__(self, *args: Any, source: nn.Module, buffer: str, **kwargs: Any) -> None:
        self.__dict__["_learned"] = (source, buffer)  # no submodule: the slot holds it
        super().__init__(*args, **kwargs)
        self.profiles = ()

    def _multiplied(self, inv_freq: Tensor) -> Tensor:
        source, buffer = self.__dict__["_learned"]
        learned: Tensor = getattr(source, buffer)
        return inv_freq * learned.to(inv_freq.device, torch.float64).exp()

    def _frequency_of_call(self, position_ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor | float]:
        if self.length_dependent:
            return super()._frequency_of_call(position_ids, device)
        inv_freq, attention_factor = self._at(self.fixed_length)
        return fixed_point(self._multiplied(inv_freq)).to(device), attention_factor


class _Removable(Protocol):
    """What a patch has put elsewhere in a model."""

    def remove(self) -> None:
        """Take it away again."""


class PatchedSlot(nn.Module):
    """What stands in a slot while a model is patched.

    Args:
        slot: the slot; its module is kept as a child, so that `.to` reaches it and unpatching is exact.
        method: what the scaled layers get; the others keep what their config states.
        rotary: the geometry the method works on.
        state: what `unpatch` and `describe` read, shared by all slots of a model; None while a model is
            probed.
    """

    def __init__(self, slot: Slot, method: RopeMethod, rotary: Rotary, state: PatchState | None) -> None:
        super().__init__()
        scaled = slot.scaled_layers
        self.tables = nn.ModuleDict()
        for layer_type, rope in slot.as_loaded.items():
            chosen = (method, rotary) if layer_type in scaled else (rope.method, rope.plain)
            kind: type[RotaryEmbedding] = RotaryEmbedding
            more: dict[str, Any] = {}
            if slot.log_multiplier is not None:
                kind, more = _MultipliedRotaryEmbedding, {"source": slot.module, "buffer": slot.log_multiplier}
            elif isinstance(chosen[0], RemappingMethod):
                kind = _RemappedRotaryEmbedding
            self.tables[layer_type or "all"] = kind(
                *chosen, layout=slot.layout, cast=slot.cast, axis_of_pair=slot.axis_of_pair[layer_type], **more
            )
        self.axes = slot.axes
        # A child, so that `.to` and `.half` reach it and unpatching gives what a model without a patch would have.
        self.replaced = slot.module
        self._state = state
        self.hooks: list[_Removable] = []  # that hand a method the lengths of each forward
        if slot.log_multiplier is not None:
            self._register_state_dict_hook(_without_replaced)  # type: ignore[no-untyped-call]
            self._register_load_state_dict_pre_hook(_with_replaced)  # type: ignore[no-untyped-call]
        device = next(chain(slot.module.buffers(), slot.module.parameters())).device
        if device.type != "meta":  # a table of a few numbers needs no offloading
            self.tables.to(device)

    def __getattr__(self, name: str) -> Any:
        """What else a model asks its rotary module for (its config, its layer types)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "replaced":
                raise
            return getattr(self.replaced, name)

    @property
    def state(self) -> PatchState:
        """What the patched model remembers of its patch."""
        assert self._state is not None, "this module stands in a slot for a probe"
        return self._state

    @property
    def present_spec(self) -> PatchSpec:
        """The patch, with the values that a trainable parameter has now."""
        spec = self.state.spec
        tables = (self.table(name) for name in self.tables)
        table = next((each for each in tables if each.method == spec.method), None)
        return spec if table is None else replace(spec, method=table.present_method)

    def table(self, name: str) -> RotaryEmbedding:
        """The table of a layer type, or of "all" layers."""
        table = self.tables[name]
        assert isinstance(table, RotaryEmbedding)
        return table

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        return self.tables[layer_type or "all"](x, position_ids)


_REPLACED = "replaced."


def _without_replaced(slot: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give what the replaced module holds the keys that it has without a patch."""
    for key in [key for key in state if key.startswith(prefix + _REPLACED)]:
        state[prefix + key.removeprefix(prefix + _REPLACED)] = state.pop(key)


def _with_replaced(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The inverse, for weights that are loaded into a patched model."""
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(prefix + "tables.")]:
        if not key.startswith(prefix + _REPLACED):
            state[prefix + _REPLACED + key.removeprefix(prefix)] = state.pop(key)


def patched_slots(model: nn.Module) -> list[PatchedSlot]:
    """The slots of a model that hold one of our modules."""
    return [module for module in model.modules() if isinstance(module, PatchedSlot)]


def patch_state(model: nn.Module) -> PatchState | None:
    """What a patched model remembers, which all its slots share; None for a model that runs as loaded."""
    slots = patched_slots(model)
    return slots[0].state if slots else None


def present_specs(model: nn.Module) -> tuple[PatchSpec, ...]:
    """The patches of a live model, bottom first; none for a model that runs as loaded."""
    return next(((*slot.state.below, slot.present_spec) for slot in patched_slots(model)), ())


def find_slots(model: nn.Module, layers: Layers | None = None) -> list[Slot]:
    """Every slot of a model's decoder; in a patched model the modules that were replaced count as what is there.

    Args:
        layers: the layers that a method applies to; None: those that attend to everything before them.

    Raises:
        MethodError: layers that do not exist.
        UnsupportedModelError: no rotary embedding, one that does something no method here can replace, or layers that
            share theirs with others.
    """
    root = getattr(model, "config", None)
    if root is None or not hasattr(root, "model_type"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model: it has no config")
    text_type = root.get_text_config().model_type if hasattr(root, "get_text_config") else root.model_type
    slots = [
        _inspect(parent, attribute, module, config)
        for parent, attribute, module, config in rotary_modules(model)
        if config.model_type == text_type
    ]
    if not slots:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({root.model_type}) has no rotary position embedding that can be replaced; "
            + (_ROTATES_INSIDE if _rotates_inside(model) else "its positions are learned, absolute or ALiBi")
        )
    return [_with_layers(slot, len(slots) > 1, layers) for slot in slots]


_ROTATES_INSIDE = (
    "its attention layers compute angles themselves, as GPT-J's do; a method takes the place of a module that computes "
    "cos and sin for them, as Llama and GPT-NeoX have"
)


def _rotates_inside(model: nn.Module) -> bool:
    """Whether the file of a model's class has a function that rotates."""
    names = vars(sys.modules.get(type(model).__module__, object))
    return any("rotary" in name or "rotate" in name for name in names)


def _with_layers(slot: Slot, several: bool, asked: Layers | None) -> Slot:
    """A slot, of a model with several slots or one, with the layer types that a method is applied to."""
    theta = slot.as_loaded[None].plain.theta if several and None in slot.as_loaded else None
    served = slot.layers.served(list(slot.as_loaded), theta)
    return replace(slot, scaled_layers=slot.layers.choose(served, asked), idle=not any(served.values()))


def rotary_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, Any]]:
    """Where each rotary module hangs (parent, attribute), the module as loaded, and the config it was built from."""
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
            if not hasattr(config, "model_type"):  # none, or something else: Idefics keeps a dropout rate there
                continue
            takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters
            if _is_table(attribute, config) or (frequency_names(module) and takes_positions):
                yield parent, attribute, module, config


def frequency_names(module: nn.Module) -> list[str]:
    """Names of the buffers that hold inverse frequencies, originals left aside."""
    return [
        name
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]


def _is_table(attribute: str, config: Any) -> bool:
    return attribute == angle_table(config.model_type)


def _inspect(parent: nn.Module, attribute: str, module: nn.Module, config: Any) -> Slot:
    if _is_table(attribute, config):
        return _inspect_table(parent, attribute, module, config)
    as_loaded: dict[LayerType, ConfigRope] = {}
    layout: Layout = "half"
    cast = True
    axis_of_pair: dict[LayerType, tuple[int, ...] | None] = {}
    for name in frequency_names(module):
        layer_type = name.removesuffix("inv_freq").removesuffix("_") or None
        inv_freq = getattr(module, name.removesuffix("inv_freq") + "original_inv_freq", getattr(module, name))
        as_loaded[layer_type] = read_rope(config, 2 * inv_freq.shape[-1], layer_type)
        _check_against_config(config, inv_freq, as_loaded[layer_type])
        layout, cast, axis_of_pair[layer_type] = _probe(module, as_loaded[layer_type], layer_type)
    log_multiplier = _log_multiplier(module, config, inv_freq.shape[-1])
    layers = AttentionLayers(config)
    return Slot(
        parent,
        attribute,
        module,
        config,
        layers,
        as_loaded,
        layout,
        cast,
        axis_of_pair,
        log_multiplier=log_multiplier,
    )


def _log_multiplier(module: nn.Module, config: Any, pairs: int) -> str | None:
    """The buffer whose exponential multiplies the frequencies of a module, of the families that have one.

    Raises:
        UnsupportedModelError: the module holds something else for each pair.
    """
    named = learned_log_multiplier(config.model_type)
    tensors = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    learned = [name for name, tensor in tensors.items() if not name.endswith("inv_freq") and tensor.numel() == pairs]
    if other := [name for name in learned if name != named]:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds {other[0]!r}, a number for each of its {pairs} frequencies that a "
            "replacement would drop"
        )
    return named if named in learned else None


def _inspect_table(parent: nn.Module, attribute: str, module: nn.Module, config: Any) -> Slot:
    """A table whose rows are [sin | cos] of every position, which the config must describe."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rope = read_rope(config, weight.shape[-1])
    if weight.device.type != "meta":
        inv_freq, attention_factor = rope.method.frequencies(rope.plain, rope.plain.trained_length)
        shown = weight[:_ROWS_CHECKED].detach().double().cpu()
        angles = torch.arange(len(shown), dtype=torch.float64)[:, None] * inv_freq
        if not torch.allclose(shown, torch.cat((angles.sin(), angles.cos()), -1) * attention_factor, atol=2e-2):
            raise _another_geometry(config, rope)
    return Slot(
        parent,
        attribute,
        module,
        config,
        AttentionLayers(config),
        {None: rope},
        "bare",
        cast=True,
        axis_of_pair={None: None},
        is_table=True,
    )


_ROWS_CHECKED = 512


def _check_against_config(config: Any, inv_freq: Tensor, rope: ConfigRope) -> None:
    """The config must describe the frequencies the model has; else a patch would start from the wrong geometry."""
    if inv_freq.device.type == "meta":
        return
    rotary, method = rope.plain, rope.method
    expected = method.frequencies(rotary, rotary.trained_length).inv_freq
    # A cast to bfloat16 or float16, perhaps undone since, leaves that much of a difference; another geometry far more.
    # The absolute part is for frequencies near zero, which float16 keeps as multiples of 6e-8.
    if not torch.allclose(inv_freq.double().cpu(), expected, rtol=1e-2, atol=6e-8):
        raise _another_geometry(config, rope)


def _another_geometry(config: Any, rope: ConfigRope) -> UnsupportedModelError:
    rotary = rope.plain
    return UnsupportedModelError(
        f"the inverse frequencies of this {config.model_type!r} model are not what its config describes "
        f"({rope.method.name}, theta {rotary.theta:g}, {rotary.dim} dims); its rotary module cannot be replaced "
        "safely"
    )


def _probe(module: nn.Module, rope: ConfigRope, layer_type: str | None) -> tuple[Layout, bool, tuple[int, ...] | None]:
    """Run a stand-in of the module, with known frequencies, on a few positions: its layout, cast and axes."""
    # A shallow copy with buffers of its own on the CPU: the module may be on a GPU or have no weights yet (meta), and
    # forwards that follow the input would change its buffers.
    stand_in, pairs = copy.copy(module), rope.plain.dim // 2
    # Different frequencies of at most one radian: each pair of columns shows which of them it was rotated by.
    known = torch.linspace(0.1, 1.0, pairs, device="cpu")
    stand_in._buffers = {
        name: known.clone()
        if name.endswith("inv_freq")
        else buffer
        if buffer is None
        else buffer.new_zeros(buffer.shape, device="cpu")
        for name, buffer in module._buffers.items()
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
            # Some modules compute from their config at every call and never read their buffer.
            of_config = rope.method.frequencies(rope.plain, rope.plain.trained_length).inv_freq  # PhiMoE
            alone = not several and any(_own_angles(run, each, layout) for each in (known, of_config.float()))
            if axis_of_pair is not None or alone:
                return layout, cast, axis_of_pair
    raise UnsupportedModelError(
        f"{type(module).__name__} does more with its angles than a rotary embedding: it arranges them in another way, "
        "so it cannot be replaced"
    )


_CAST = (torch.bfloat16, torch.float32)
"""What cos and sin come out as where x is bfloat16."""


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
        cos, sin = (_once(part[0, 0].float(), pairs, layout) for part in out)
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
    cos, sin = (_once(part[0, 0].float(), len(frequencies), layout) for part in out)
    return torch.allclose(torch.atan2(sin, cos), frequencies.expand_as(sin), atol=1e-5)


def _once(columns: Tensor, pairs: int, layout: Layout) -> Tensor:
    """The columns of each pair below each other, (1 or 2, 1, pairs)."""
    if layout == "bare":
        return columns.reshape(1, 1, pairs)
    return (columns.reshape(2, pairs) if layout == "half" else columns.reshape(pairs, 2).mT).unsqueeze(1)
