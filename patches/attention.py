"""Attention-level methods in a live model: its attention runs our function, which knows each layer and each forward.

transformers' attention interface is used as it is: a name of ours in its two tables, and the model's own configs say
that name. What a layer does with its rotary embedding (which dims of a head turn, how they are paired, whether at all)
is found by running a few tokens through the model, and checked there, not looked up by class names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rope_ext_hf.attending import Call, Extras, Phases, Rotation, Rule, Window, attend
from rope_ext_hf.cache import alike, outside_graphs, possible_layouts
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.patches.lengths import arguments, new_tokens
from rope_ext_hf.patches.slots import PatchedSlot, Slot
from rope_ext_hf.relative import AttentionLevel, Place
from rope_ext_hf.scaling import Default, Rotary, Scaling

__all__ = ["NAME", "UNKNOWN", "Calls", "attach", "attended", "attention_of", "detach", "discover", "register"]

NAME = "rope_ext_hf.zones"  # a name with a slash would be looked for among the kernels on the Hub
PROBE = "rope_ext_hf.probe"
LAYER = "_rope_ext_hf_layer"
UNKNOWN = ("position_bias", "sinks", "head_mask")  # additions to the scores that are not known here


@dataclass(frozen=True)
class Layer:
    """What the attention function must know of a module it is called for."""

    rule: Rule
    rotation: Rotation | None
    calls: Calls


class Calls:
    """Hooks around the forward of a decoder: positions and padding of the call under way, for its attention."""

    def __init__(self) -> None:
        self.now: Call | None = None
        self._by_positions: MutableMapping[Tensor, Call] = WeakIdKeyDictionary()

    @outside_graphs  # it looks at values
    def before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        config: Any = decoder.config
        if _probed is not None:
            return None
        if config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"this model is patched with an attention-level method, and its attention was set to "
                f"{config._attn_implementation!r} since: unpatch it first, or set {NAME!r} again"
            )
        call = arguments(decoder, args, kwargs)
        given = new_tokens(call)
        if given is None:
            return None  # the decoder's own error says it better
        cache, positions = call.get("past_key_values"), call.get("position_ids")
        known = int(cache.get_seq_length()) if cache is not None else 0
        self.now = _call(given, known, _padding(call.get("attention_mask"), known + given.shape[1]), positions)
        if positions is not None and "position_ids" not in kwargs:
            self._by_positions[positions] = self.now
            return None
        named = self.now.queries.view_as(self.now.queries)  # a tensor of this call alone
        self._by_positions[named] = self.now
        return args, kwargs | {"position_ids": named}

    def of(self, positions: Tensor | None) -> Call | None:
        """The call whose attention runs: with gradient checkpointing a backward runs that of earlier ones again."""
        if positions is None or torch.compiler.is_compiling():
            return self.now
        return self._by_positions.get(positions, self.now)

    def after(self, *_: Any) -> None:
        """What served all layers of this forward is of no use to the next; called after an exception, too."""
        if self.now is not None:
            self.now.turns.clear()


def _padding(mask: Any, total: int) -> Tensor | None:
    """(rows, total) bool, where a mask of that kind was given."""
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    found = next((m for m in masks if isinstance(m, Tensor) and m.ndim == 2), None)
    if found is None:
        return None
    real = found.bool()
    return nn.functional.pad(real, (0, max(0, total - real.shape[1])), value=True)[:, :total]


def _call(given: Tensor, known: int, real: Tensor | None, positions: Tensor | None) -> Call:
    """What is to be known of a forward, with one look at values where it takes any.

    Args:
        known: tokens in the cache.
        real: (rows, known + tokens) bool, False where padding is.
        positions: (rows or 1, tokens) as given.
    """
    rows, tokens = given.shape[:2]
    total = known + tokens
    if positions is not None:
        if positions.ndim != 2:
            raise LengthError(f"attention-level methods need one position per token, got {tuple(positions.shape)}")
        positions = positions.to(given.device)

    def agree(keys: Tensor, real: Tensor | None) -> Tensor:
        """Whether the positions given, if any, are those of the last keys, but for padding; a scalar bool."""
        if positions is None:
            return torch.ones((), dtype=torch.bool, device=given.device)
        differs = keys[:, known:] != positions
        return ~(differs if real is None else differs & real[:, known:]).any()

    keys = torch.arange(total, device=given.device)[None]
    offsets: tuple[int, ...] | None = (0,) * rows
    if real is None and positions is None:
        return Call(keys[:, known:], keys, offsets, None)
    looks = agree(keys, None)[None]
    if real is not None:
        counted = (real.cumsum(-1) - 1).clamp(min=0)
        begins = real.int().argmax(-1)
        unbroken = real.int().diff(dim=-1).clamp(min=0).sum(-1) + real[:, 0] == 1  # one run of real tokens
        to_the_end = (begins + real.sum(-1) == total) | (known == 0)
        facts = [agree(counted, real), real.all(), (unbroken & to_the_end).all()]
        looks = torch.cat([looks, torch.stack(facts), begins])
    agreed, *padded = looks.tolist()
    if padded and padded[1]:
        real = None
    elif padded:
        agreed, _, in_order, *begin = padded
        keys, offsets = counted, tuple(begin) if in_order else None
    if agreed:
        return Call(keys[:, known:], keys, offsets, real)
    assert positions is not None
    if known == 0:  # inputs one after the other in a row, or not from 0 on
        return Call(positions, positions, None, real)
    keys = keys + positions[:, -1:] - keys[:, -1:]
    if not bool(agree(keys, real)):
        raise LengthError("the positions given do not follow those of the keys in the cache")
    if real is None and not bool((keys[:, 0] > 0).any()):  # padding that only the positions tell of
        before = (-keys[:, 0]).expand(rows)
        return Call(positions, keys.clamp(min=0), tuple(before.tolist()), None if not bool(before.any()) else keys >= 0)
    return Call(positions, keys, None, real)


def zones_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a patched model, as transformers calls it.

    Args:
        query: (rows, heads, tokens, head_dim).
        key, value: (rows, kv_heads, past + tokens, head_dim).

    Returns:
        (rows, tokens, heads, head_dim), None for the weights.
    """
    layer: Layer | None = module.__dict__.get(LAYER)
    call = None if layer is None else layer.calls.of(given.get("position_ids"))
    if layer is None or call is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was not there, or had no weights yet, when its model was patched; patch it again"
        )
    total = call.keys.shape[-1]
    key, value = key[:, :, :total], value[:, :, :total]  # a static cache has room after them
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    return attended(layer.rule, layer.rotation, call, query, key, value, mask, **given)


def attended(
    rule: Rule,
    rotation: Rotation | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    /,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend`, with the keywords that transformers gives an attention function; returns what it wants of one."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(rule, rotation, call, query, key, value, scale, Extras(softcap, s_aux, mask, dropout))
    return out.transpose(1, 2).contiguous(), None


def zones_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A mask as long as a row, where causality and a window are all there is beside it; else transformers' own."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    function, size = kwargs.get("mask_function"), kwargs.get("local_size")
    if function is causal_mask_function or (
        size is not None and _same(function, sliding_window_causal_mask_function(size))
    ):
        mask: Tensor | None = kwargs.get("attention_mask")
        return mask
    whole: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return whole


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are the same code around the same values."""
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return all(map(_same, one, other))
        return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
    cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
    return one.__code__ is other.__code__ and _same(*cells)


def register() -> None:
    """Put our functions into transformers' tables, under names of ours."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function, mask in ((NAME, zones_attention, zones_mask), (PROBE, _probe_attention, _no_mask)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)


def attach(layers: list[tuple[nn.Module, Layer]]) -> None:
    """Tell each attention module what `discover` found."""
    for module, layer in layers:
        module.__dict__[LAYER] = layer


def detach(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(LAYER, None)


# --- what each layer does with its rotary embedding -----------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What an attention function was called with."""

    module: nn.Module
    query: Tensor
    key: Tensor
    window: int | None
    refused: str | None


_probed: list[_Seen] | None = None


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Writes down what it gets and adds nothing, so that what later layers get does not depend on any rotation."""
    assert _probed is not None
    refused = next((name for name in UNKNOWN if kwargs.get(name) is not None), None)
    if not getattr(module, "is_causal", True):
        refused = "attention that is not causal"
    _probed.append(_Seen(module, query, key, kwargs.get("sliding_window"), refused))
    rows, heads, tokens = query.shape[:3]
    return value.new_zeros(rows, tokens, heads, value.shape[-1]), None


def _no_mask(*args: Any, **kwargs: Any) -> None: ...


def discover(
    model: nn.Module, slots: Sequence[Slot], method: AttentionLevel, rotary: Rotary, calls: Calls
) -> list[tuple[nn.Module, Layer]]:
    """What each attention module of a model must be told.

    Raises:
        UnsupportedModelError: attention that cannot be taken over, with the reason.
    """
    if len(slots) != 1:
        raise UnsupportedModelError(f"an attention-level method needs one rotary module, found {len(slots)}")
    (slot,) = slots
    assert method.limit is not None
    plain = method.frequency or Default()
    near = torch.arange(4)[None]
    far = method.limit + torch.tensor([[1, 2, 5, 9]])
    with _probing(model):
        here = _run(model, slot, plain, rotary, near)
        there = _run(model, slot, plain, rotary, far)
        stored = _run(model, slot, method, rotary, far)
    if not here:
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} does not go through transformers' attention interface"
        )
    phases = Phases(plain.frequencies(rotary).inv_freq)
    layers = [
        (a.module, _layer(a, b, c, method, rotary, phases, near, far, calls))
        for a, b, c in zip(here, there, stored, strict=True)
    ]
    if not any(layer.rule is method for _, layer in layers):
        raise UnsupportedModelError(
            f"no layer of this {slot.config.model_type!r} model both rotates and attends to everything before it; an "
            "attention-level method would change nothing"
        )
    return layers


def _layer(
    here: _Seen,
    there: _Seen,
    stored: _Seen,
    method: AttentionLevel,
    rotary: Rotary,
    phases: Phases,
    near: Tensor,
    far: Tensor,
    calls: Calls,
) -> Layer:
    """One layer, from what it was given with positions near, far, and where far keys are stored."""
    name = type(here.module).__name__
    if here.refused:
        raise UnsupportedModelError(f"{name} has {here.refused}, which attention-level methods cannot do")
    if alike(stored.key, there.key) and alike(stored.query, there.query):
        return Layer(Window(here.window), None, calls)  # no rotation, or one of its own
    device = here.key.device
    moved = phases.turn(Place(near), Place(far), device)
    kept = phases.turn(Place(near), method.stored(far), device)
    for layout in possible_layouts(here.key.shape[-1], rotary.dim):
        if all(
            alike(turn.applied(before, layout), after)
            for turn, later in ((moved, there), (kept, stored))
            for before, after in ((here.key, later.key), (here.query, later.query))
        ):
            rule: Rule = method if here.window is None else Window(here.window, method)
            return Layer(rule, Rotation(phases, layout), calls)
    raise UnsupportedModelError(
        f"{name} does more with its queries and keys after rotating them than an attention-level method can undo (a "
        "norm after the rotation, or another arrangement of its dims)"
    )


@contextmanager
def attention_of(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, every attention module of a model runs the function of that name in transformers' tables."""
    found: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, its attention writing down what it gets."""
    global _probed
    register()
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    _probed = []
    try:
        with attention_of(model, PROBE), torch.no_grad():
            yield
    finally:
        _probed = None
        for module in training:
            module.training = True


def _run(model: nn.Module, slot: Slot, method: Scaling, rotary: Rotary, positions: Tensor) -> list[_Seen]:
    """A few tokens at these positions, with a method in the slot."""
    assert _probed is not None
    _probed.clear()
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: its hooks move what comes
    standing = getattr(slot.parent, slot.attribute)
    ids = torch.arange(3, 3 + positions.shape[1], device=device)[None]
    with ExitStack() as stack:
        stack.callback(setattr, slot.parent, slot.attribute, standing)
        setattr(slot.parent, slot.attribute, PatchedSlot(slot, method, rotary, None))
        try:
            slot.parent(input_ids=ids, position_ids=positions.to(device), use_cache=False)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(slot.parent).__name__} cannot be run on a few tokens to see how it attends: {error}"
            ) from error
    return list(_probed)
