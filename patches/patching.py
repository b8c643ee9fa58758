"""Put a method into a live model, take it out again, and say what is there.

    model = patch(model, "yarn", factor=8)
    print(describe(model))
    unpatch(model)

Nothing of transformers is changed: a patched model gets its own copy of its config and our module in its slots, and
both go when it is unpatched. Everything that can fail is worked out before the model is touched.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError
from rope_ext_hf.patches.attention import NAME, Calls, attach, detach, discover, register
from rope_ext_hf.patches.config import (
    FOREIGN,
    PAIRING_KEY,
    RECORD,
    SAVED_KEYS,
    SLIDING,
    read_rope,
    settings_before,
    sliding_layers,
    write_rope,
)
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.layouts import runs_pairing, stated_rotary
from rope_ext_hf.patches.lengths import follow_lengths
from rope_ext_hf.patches.saving import SaveForeign
from rope_ext_hf.patches.slots import PatchedSlot, Slot, find_slots, patched_slots
from rope_ext_hf.relative import AttentionLevel
from rope_ext_hf.rotary import RotaryEmbedding
from rope_ext_hf.scaling import TWO_PI, Rotary, Scaling, method_from_dict, resolve_method

__all__ = [
    "Description",
    "describe",
    "fitted",
    "fixed_length",
    "geometry",
    "install",
    "patch",
    "patched",
    "patched_method",
    "reset",
    "rotation",
    "unpatch",
]

M = TypeVar("M", bound=nn.Module)


@dataclass
class Record:
    """What unpatching and describing need; held by every patched slot of a model."""

    method: Scaling
    target_length: int | None
    native: bool
    rotary: Rotary
    rope_type: str
    extended_length: int | None
    notes: tuple[str, ...]
    configs: list[OwnConfig]


@dataclass
class OwnConfig:
    """A config object of a patched model.

    Attributes:
        now: the copy the model runs with.
        before: the one it had, which other models may share.
        written: `now` as the patch left it, to tell what its user changed since.
    """

    now: Any
    before: Any
    written: dict[str, Any] = field(default_factory=dict)

    def hand_over(self) -> None:
        """Carry what the user changed in `now` over to `before`, as if the model had had that all the time."""
        for key, value in vars(self.now).items():
            if key in (RECORD, *SAVED_KEYS) or hasattr(value, "model_type"):
                continue
            if key not in self.written or self.written[key] != value:
                self.before.__dict__[key] = value


def patch(
    model: M,
    method: str | Scaling,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    native: bool = False,
    **params: Any,
) -> M:
    """Change the RoPE method of a loaded model, in place; a patched model gets the new method instead of the old.

    Args:
        model: a transformers model with rotary embeddings, bare or inside PEFT, DDP and the like; the whole model,
            because a decoder taken out of it has no hold on the config that is saved.
        method: a name of `rope_ext_hf.methods()`, or a method object.
        factor: how many times the trained length the model is to reach.
        target_length: the same in tokens. For methods without a factor it states the extended length.
        native: save in a native form of transformers even where that is known to behave otherwise ("dynamic").
        **params: further parameters of the method.

    Returns:
        The model. Its config now says the method and the extended length, so that `generate`, `save_pretrained` and
        serving engines agree; other models that shared its config keep theirs.

    Raises:
        MethodError: unknown method or parameter, or a value it cannot work with.
        UnsupportedModelError: a model without rotary embeddings, or with some that cannot be replaced.

    The model is unchanged when an exception is raised.
    """

    def resolve(rotary: Rotary) -> Scaling:
        return resolve_method(method, rotary, factor=factor, target_length=target_length, **params)

    record = install(model, resolve, target_length, native)
    if any(note.startswith(_EVERY_LAYER) for note in record.notes):
        warnings.warn(next(note for note in record.notes if note.startswith(_EVERY_LAYER)), stacklevel=2)
    return model


def install(model: nn.Module, resolve: Callable[[Rotary], Scaling], target_length: int | None, native: bool) -> Record:
    """`patch`, for a method that is known once the geometry is."""
    check_pairing(model)
    slots = find_slots(model)
    first = slots[0]
    known = family(first.config.model_type)
    configs = _copied_configs(model, first.config)
    own = next(config.now for config in configs if config.before is first.config)
    _forget_saved_patch(own)

    rotary = _shared_geometry(slots, own)
    method = resolve(rotary)
    layers: list[Any] = []
    calls = Calls()
    if isinstance(method, AttentionLevel):
        method = method.fitted(rotary, *_own_method(first), target_length)
        layers = [] if _only_shapes(model) else discover(model, slots, method, rotary, calls)
    rope_type = write_rope(own, rotary, method, known, first.scaled_layers, target_length, native)
    if known.softmax_mscale:
        _check_softmax_scale(first, own, rope_type)
    extended_length = getattr(own, RECORD)["target_length"]
    notes = _notes(first, extended_length or rotary.trained_length)
    record = Record(method, target_length, native, rotary, rope_type, extended_length, notes, configs)
    fillings = [PatchedSlot(slot, method, rotary, record) for slot in slots]

    unpatch(model)
    _repoint(model, {id(config.before): config.now for config in configs})
    if isinstance(method, AttentionLevel):
        register()
        attach(layers)
        for config in configs:
            config.now._attn_implementation = NAME
    for config in configs:
        config.written = copy.deepcopy({k: v for k, v in vars(config.now).items() if not hasattr(v, "model_type")})
    for slot, filling in zip(slots, fillings, strict=True):
        filling.train(slot.module.training)
        setattr(slot.parent, slot.attribute, filling)
        if "config" in slot.module.__dict__:
            slot.module.config = slot.config  # what was replaced keeps what it was built from
        if isinstance(method, AttentionLevel):
            filling.hooks = [
                slot.parent.register_forward_pre_hook(calls.before, with_kwargs=True),
                slot.parent.register_forward_hook(calls.after, always_call=True),
            ]
    if method.length_dependent:
        follow_lengths(model)
    if rope_type.startswith(FOREIGN) and known.rope_types is not None:
        SaveForeign.attach(model)
    return record


def unpatch(model: M) -> M:
    """Put everything back: modules, configs, hooks. A model that is not patched is left alone.

    Logits, config and state_dict keys are bit for bit those of a model that was never patched and went through the
    same `.to` calls.
    """
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, PatchedSlot):
                setattr(parent, attribute, child.replaced)
                for config in child.record.configs:
                    config.hand_over()
                _repoint(model, {id(config.now): config.before for config in child.record.configs})
                for hook in child.hooks:
                    hook.remove()
    SaveForeign.detach(model)
    detach(model)
    return model


@contextmanager
def patched(model: M, method: str | Scaling, **kwargs: Any) -> Iterator[M]:
    """`patch` for the length of a `with` block; what the model had before comes back, also after an exception."""
    before: Record | None = next((slot.record for slot in patched_slots(model)), None)
    patch(model, method, **kwargs)
    try:
        yield model
    finally:
        unpatch(model)
        if before is not None:
            install(model, lambda rotary: before.method, before.target_length, before.native)


@contextmanager
def fixed_length(model: M, length: int) -> Iterator[M]:
    """Inside, length-dependent methods use the frequencies of an input of `length` tokens for every forward.

        with fixed_length(model, prompt_length + max_new_tokens):
            model.generate(...)

    Static methods are not affected.

    Raises:
        MethodError: a length below 1.
        UnsupportedModelError: an unpatched model whose own config is length-dependent; patch it first.
    """
    if not isinstance(length, int) or length < 1:
        raise MethodError(f"length must be a whole number of at least 1 token, got {length!r}")
    slots = patched_slots(model)
    own = (
        {}
        if slots
        else {
            method.name for slot in find_slots(model) for _, method in slot.native.values() if method.length_dependent
        }
    )
    if own:
        raise UnsupportedModelError(
            f"this model's own {min(own)} follows the input inside transformers and cannot be held from here; "
            "patch it first: rope_ext_hf.patch(model, ...)"
        )
    with ExitStack() as stack:
        for table in _tables(model):
            if table.method.length_dependent:
                stack.enter_context(table.at_length(length))
        yield model


def reset(model: M) -> M:
    """Forget the longest input a sticky method has met."""
    for table in _tables(model):
        table.reset()
    return model


def fitted(model: nn.Module, method: Scaling, length: int) -> Scaling:
    """The method with what it has not been given worked out for inputs of this length, as `patch` does it."""
    if not isinstance(method, AttentionLevel):
        return method
    return method.fitted(geometry(model), *_own_method(find_slots(model)[0]), length)


def _own_method(slot: Slot) -> tuple[Scaling, int]:
    """The method a model came with, and the length it is for in tokens."""
    rotary, method = slot.native[(slot.scaled_layers or list(slot.native))[0]]
    return method, rotary.trained_length if method.name == "default" else slot.config.max_position_embeddings


def _only_shapes(model: nn.Module) -> bool:
    """Whether a model's weights are not there, and no hook brings them when they are needed."""
    return all(p.device.type == "meta" for p in model.parameters()) and not any(
        hasattr(module, "_hf_hook") for module in model.modules()
    )


def _tables(model: nn.Module) -> list[RotaryEmbedding]:
    return [
        module
        for slot in patched_slots(model)
        for module in slot.tables.values()
        if isinstance(module, RotaryEmbedding)
    ]


def _copied_configs(model: nn.Module, text_config: Any) -> list[OwnConfig]:
    """A copy of every config object in a model, linked to each other as the originals are."""
    for slot in patched_slots(model):
        for config in slot.record.configs:
            config.hand_over()
    unpatched = {id(config.now): config.before for slot in patched_slots(model) for config in slot.record.configs}
    originals = {id(text_config): text_config}
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "model_type"):
            config = unpatched.get(id(config), config)
            originals[id(config)] = config
    memo: dict[int, Any] = {}
    return [OwnConfig(copy.deepcopy(config, memo), config) for config in originals.values()]


def _repoint(model: nn.Module, other: Mapping[int, Any]) -> None:
    """Give every module that holds one of these configs (by id) the other one."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in other:
            module.config = other[id(config)]


def _forget_saved_patch(config: Any) -> None:
    """Turn the config of a model loaded from a patched folder back into what it was before that patch."""
    before = settings_before(config.to_dict())
    if before is not None:
        for key, value in before.items():
            setattr(config, key, value)
        delattr(config, RECORD)


def check_pairing(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights are, by its config, in a pairing that its class does not run."""
    config: Any = getattr(model, "config", None)
    said = getattr(config, PAIRING_KEY, None)
    if said is None or (runs := runs_pairing(config)) in (None, said):
        return
    folder = getattr(config, "_name_or_path", None) or "FOLDER"
    raise CheckpointError(
        f"by the {PAIRING_KEY} of its config this model's weights are {said}, and {config.model_type!r} runs {runs} in "
        f"transformers: what it says is noise. Mend the folder with `rope-ext convert {folder} NEW --to {runs}`, or "
        f"the loaded model with rope.convert(model, to={runs!r})"
    )


def patched_method(model: nn.Module) -> Scaling | None:
    """The method `patch` put into a model, None if it runs as loaded."""
    return next((slot.record.method for slot in patched_slots(model)), None)


def geometry(model: nn.Module) -> Rotary:
    """The rotary geometry a patch of this model starts from, whatever patch it carries now.

    Raises:
        UnsupportedModelError: a model without rotary embeddings.
    """
    slots = find_slots(model)
    config = copy.deepcopy(slots[0].config)
    _forget_saved_patch(config)
    return _shared_geometry(slots, config)


def rotation(model: nn.Module) -> Rotary:
    """What rotates in a model, also where nothing could be patched: as the family table says, else its `geometry`.

    Raises:
        UnsupportedModelError: neither is known.
    """
    config = getattr(model, "config", None)
    stated = stated_rotary(config) if hasattr(config, "get_text_config") else None
    return stated or geometry(model)


def _shared_geometry(slots: Sequence[Slot], config: Any) -> Rotary:
    geometries = {
        read_rope(config, slot.native[layer_type][0].dim, layer_type)[0]
        for slot in slots
        for layer_type in slot.scaled_layers
    }
    if len(geometries) != 1:
        found = "; ".join(map(str, geometries)) or "none: every layer has a sliding window"
        raise UnsupportedModelError(
            f"one method needs one rotary geometry over all full-attention layers, found {found}"
        )
    return geometries.pop()


def _softmax_scale(settings: Mapping[str, Any]) -> float:
    """What DeepSeek's attention multiplies the softmax scale by when it is built."""
    all_dim = settings.get("mscale_all_dim")
    if settings.get("rope_type") == "default" or not all_dim:
        return 1.0
    return (0.1 * float(all_dim) * math.log(settings["factor"]) + 1) ** 2


def _check_softmax_scale(slot: Slot, config: Any, rope_type: str) -> None:
    """A native form must rebuild, on loading, the softmax scale the live attention modules have."""
    if rope_type.startswith(FOREIGN):
        return
    live, loaded = _softmax_scale(slot.config.rope_parameters), _softmax_scale(config.rope_parameters)
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{slot.config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )


_EVERY_LAYER = "Every layer"
_KNOWN_DISTANCES = "Far keys are seen at distances the model knows, {} tokens at most; frequencies stay as they are."


def _notes(slot: Slot, extended_length: int) -> tuple[str, ...]:
    """What a reader must know about sliding-window layers."""
    config = slot.config
    window, sliding = sliding_layers(config)
    if not window or not sliding or window >= extended_length:
        return ()
    seen = f"attend{'s' if sliding == config.num_hidden_layers else ''} to the last {window} tokens only"
    if sliding == config.num_hidden_layers:
        return (f"{_EVERY_LAYER} {seen}: a longer RoPE does not make the model look further back.",)
    share = f"{sliding} of {config.num_hidden_layers} layers {seen}"
    apart = [(name, native) for name, native in slot.native.items() if name in SLIDING]
    if apart:
        _, (rotary, method) = apart[0]
        return (f"{share} and keep their own rotary embedding ({method.name}, theta {rotary.theta:g}).",)
    return (f"{share}; they share one rotary embedding with the others, so the method changes them too.",)


@dataclass(frozen=True)
class Description:
    """What a model's rotary embedding is and how a model saved now would be loaded.

    Attributes:
        method, params: the method by name and its parameters.
        pairing: "half" or "interleaved"; None where the family is not in the table.
        trained_length, extended_length: tokens; extended None where it follows the input.
        wavelengths: per turning pair, 2 pi / inv_freq in tokens, at the trained length; inf where a pair does not turn.
        attention_factor: what cos and sin are multiplied by.
        save_route: how `save_pretrained` would write it.
        patched: whether the method was put in by `patch`.
        notes: what a patch does not reach, in words.
    """

    model_type: str
    method: str
    params: dict[str, Any]
    pairing: str | None
    trained_length: int
    extended_length: int | None
    wavelengths: tuple[float, ...]
    attention_factor: float
    save_route: str
    patched: bool
    theta: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the wavelength of a pair that does not turn is None."""
        return asdict(self) | {"wavelengths": [w if math.isfinite(w) else None for w in self.wavelengths]}

    def __str__(self) -> str:
        params = ", ".join(f"{key}={_short(value)}" for key, value in self.params.items())
        never = sum(wavelength > self.trained_length for wavelength in self.wavelengths)
        extended = f"{self.extended_length:,} tokens" if self.extended_length else "follows the input"
        shown = sorted({round(i * (len(self.wavelengths) - 1) / 7) for i in range(8)})
        lines = [
            f"{self.model_type}, {'patched' if self.patched else 'as loaded'}",
            f"  method            {self.method}({params})",
            f"  pairing           {self.pairing or 'unknown (family not in the table)'}",
            f"  trained length    {self.trained_length:,} tokens",
            f"  extended length   {extended}",
            f"  theta             {self.theta:g}",
            f"  attention factor  {self.attention_factor:.4f}",
            f"  wavelengths       {len(self.wavelengths)} pairs, {never} of them longer than the trained length",
            f"      pair          {'  '.join(f'{i:>9}' for i in shown)}",
            f"      tokens        {'  '.join(f'{self.wavelengths[i]:>9.4g}' for i in shown)}",
            f"  saved as          {self.save_route}",
        ]
        return "\n".join([*lines, *(f"  note              {note}" for note in self.notes)])


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}={_short(item)}" for key, item in value.items() if key != "method")
        return f"{value['method']}({inner})"
    if isinstance(value, (list, tuple)):
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(model: nn.Module) -> Description:
    """Say which RoPE method a model runs, patched or as loaded.

    Raises:
        UnsupportedModelError: a model without rotary embeddings.
    """
    check_pairing(model)
    slots = find_slots(model)
    slot = slots[0]
    record: Record | None = next((filled.record for filled in patched_slots(model)), None)
    if record is None:
        layer_type = (slot.scaled_layers or list(slot.native))[0]
        rotary, method = slot.native[layer_type]
        config = copy.deepcopy(slot.config)
        if (saved := vars(config).get(RECORD)) is not None:  # loaded plainly from a folder that was saved patched
            _forget_saved_patch(config)
            rotary, _ = read_rope(config, rotary.dim, layer_type)
            method = method_from_dict(saved["method"])
        native = method.extended_length(rotary)
        extended = slot.config.max_position_embeddings if native is None or method.name == "default" else native
        route = f"as it was loaded (rope type {slot.config.rope_parameters.get('rope_type', 'per layer type')})"
        notes = _notes(slot, extended)
    else:
        rotary, method, extended, notes = record.rotary, record.method, record.extended_length, record.notes
        if isinstance(method, AttentionLevel):
            notes = (*notes, _KNOWN_DISTANCES.format(method.limit))
        route = f"transformers' own {record.rope_type!r}; loads anywhere"
        if record.rope_type.startswith(FOREIGN):
            route = f"{record.rope_type!r}: plain loading stops there, rope_ext_hf.from_pretrained restores it"
        elif method.length_dependent and record.rope_type == "dynamic":
            route = "transformers' own 'dynamic', as asked for: plain loading depends on earlier calls and batch mates"
    inv_freq, attention_factor = method.frequencies(rotary)
    params = method.to_dict()
    params.pop("method")
    return Description(
        model_type=slot.config.model_type,
        method=method.name,
        params=params,
        pairing=runs_pairing(slot.config),
        trained_length=rotary.trained_length,
        extended_length=extended,
        wavelengths=tuple((TWO_PI / inv_freq).tolist()),
        attention_factor=attention_factor,
        save_route=route,
        patched=record is not None,
        theta=rotary.theta,
        notes=notes,
    )
