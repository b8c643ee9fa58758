"""Length profiles in a live model: a row has one set of frequencies, from its first token to the last of its cache.

How long a row may become is known to `generate` alone, so that of a patched model notes it for the forwards inside. A
forward outside of it goes by the size of a static cache, else by the tokens that are there.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.patches.forward_context import ForwardContext, row_lengths, several_inputs
from rope_ext_hf.patches.length_hooks import LengthHooks, checked_state, read_on_host, token_positions
from rope_ext_hf.patches.slots import PatchedSlot, PatchState, Slot, patch_state, tables_of
from rope_ext_hf.rotary.cache_state import CacheState, RowState, discard_state, follow_rows, packed_error
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.forward_state import ForwardState, pop, push, running, state_of_table

_REMEDY = "Hold the whole length from its first token on: rope_ext_hf.fixed_length(model, prompt_length + new_tokens)"


class ProfileSlot(PatchedSlot):
    """A slot under length profiles: at factor 1 rows get the angles of the module that it replaces.

    So their logits are bit for bit those of the model as loaded. Where its own frequencies depend on the length, they
    are not: transformers then chooses them for a whole batch, by the tokens so far.
    """

    def __init__(self, slot: Slot, method: RopeMethod, rotary: Rotary, state: PatchState | None) -> None:
        super().__init__(slot, method, rotary, state)
        as_loaded = not rotary.length_dependent
        for layer_type in slot.scaled_layers if as_loaded else ():
            rope = slot.as_loaded[layer_type]
            inv_freq, attention_factor = rope.method.frequencies(rope.plain)
            as_loaded = attention_factor == rotary.attention_factor and torch.equal(inv_freq, rotary.inv_freq())
        self.as_loaded_up_to = method.unchanged_length(rotary) if as_loaded else 0  # tokens

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        angles = super().forward(x, position_ids, layer_type)
        held = next((length for each in self.tables if (length := self.table(each).fixed_length)), None)
        state = state_of_table(self.table(layer_type or "all"))
        lengths = None if state is None else state.row_lengths
        if (held or 1) > self.as_loaded_up_to or (held is None and lengths is None):
            return angles
        own = self.replaced(x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        if held is not None:
            return own
        assert lengths is not None
        short = (lengths.to(x.device) <= self.as_loaded_up_to)[..., None]
        short = short if lengths.ndim > 1 else short[..., None]  # (rows, tokens or 1, 1)
        if isinstance(angles, Tensor):
            return torch.where(short, own, angles)
        return tuple(torch.where(short, *pair) for pair in zip(own, angles, strict=True))


@dataclass(eq=False, kw_only=True)
class _Generation(ForwardState):
    """A call of `generate`."""

    patch: PatchState | None
    encoder: nn.Module | None  # the half of a model that reads the prompt and generates nothing
    tokens: int | None = None  # how many the longest row may come to have, padding included; None: not worked out yet
    new_tokens: int = 0  # how many of them are generated
    begun: bool = False  # whether a forward inside the call was met


class _PlannedGenerate:
    """`generate` of one model, which notes how long its rows may become."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.__dict__ |= {"generate": self, "_prepare_generated_length": self.prepare_length}

    def remove(self) -> None:
        for name in ("generate", "_prepare_generated_length"):
            self.model.__dict__.pop(name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoder = self.model.get_encoder() if self.model.config.is_encoder_decoder else None
        push(_Generation(owner=self, patch=patch_state(self.model), encoder=encoder))
        try:
            return type(self.model).generate(self.model, *args, **kwargs)
        finally:
            pop(self)

    def prepare_length(self, *args: Any, **kwargs: Any) -> Any:
        """Note the length that `generate` has worked out from its arguments and the generation config."""
        method = type(self.model)._prepare_generated_length
        call = inspect.signature(method).bind(self.model, *args, **kwargs).arguments
        config = method(self.model, *args, **kwargs)
        generation, *around = (state for state in running() if isinstance(state, _Generation))
        prompt = call["input_ids_length"]
        generation.new_tokens = config.max_length - prompt
        if call["model_input_name"] == "inputs_embeds" and generation.encoder is None:
            prompt = call["inputs_tensor"].shape[1]
        # An assistant is called for a few tokens at a time, and continues its cache up to the end of the whole.
        generation.tokens = max([prompt + generation.new_tokens, *(outer.tokens or 0 for outer in around)])
        return config


def install_generate(model: nn.Module, slot: PatchedSlot) -> None:
    """Have `generate` of a model, and of every model inside it, note lengths; the slot keeps the way back."""
    from transformers import GenerationMixin

    slot.hooks += [_PlannedGenerate(each) for each in model.modules() if isinstance(each, GenerationMixin)]


class ProfileHooks(LengthHooks):
    """Hooks around the forward of a decoder under length profiles; LengthError: a row may outgrow that of its cache."""

    @property
    def axes(self) -> int:
        return 1

    def _begin(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tables: list[RotaryEmbedding]
    ) -> None:
        context = self.begin(decoder, args, kwargs)
        if context is None:
            return
        context.tables = tuple(tables_of(self.slots))
        table, tokens = tables[0], context.past_length + context.new_tokens.shape[1]
        positions = context.position_ids
        if positions is None or positions.ndim != 3:
            positions = token_positions(context)
        else:
            positions = positions[-max(slot.axes for slot in self.slots) :]
        lengths = row_lengths(positions, context.padding_mask, context.past_length)
        positions = positions.amax(0) if positions.ndim == 3 else positions
        total, checked = self._total(decoder, context)
        if total is not None:
            lengths = (lengths if lengths.ndim == 1 else lengths.amax(-1)) + (total - tokens)
        if context.past_length:
            context.row_lengths = self._continue(context, table, lengths, positions, total, checked)
            return
        if context.cache is not None:
            discard_state(context.cache)
        counted = context.padding_mask is not None or context.position_ids is None
        valid_up_to = total or (table.method.constant_until(table.rotary, 1) if counted else 0)
        rows = lengths if lengths.ndim == 1 else lengths.amax(-1)
        context.cache_state = CacheState(self.origin())
        context.cache_rows = RowState(rows, positions, valid_up_to, context.position_ids is None)
        context.row_lengths = lengths

    def _total(self, decoder: nn.Module, context: ForwardContext) -> tuple[int | None, bool]:
        """How many tokens the longest row may come to have, padding included, and whether that was checked before.

        None: nothing states it.
        """
        tokens = context.past_length + context.new_tokens.shape[1]
        for state in running():
            if not isinstance(state, _Generation) or state.patch is not self.slots[0].state:
                continue
            if state.encoder is not None and any(each is decoder for each in state.encoder.modules()):
                return None, False
            if state.tokens is None:
                raise LengthError(f"the generate of this model does not state how long rows may become. {_REMEDY}")
            begun, state.begun = state.begun, True
            if begun and not context.past_length:  # the prompt again, or a shorter one beside it, for guidance
                return min(state.tokens, tokens + state.new_tokens), False
            if context.past_length and not begun:  # a cache may be continued with the new ids alone
                state.tokens = max(state.tokens, tokens + state.new_tokens)
            if context.prepared_mask and len(context.new_tokens) > 1 and tokens + state.new_tokens < state.tokens:
                raise LengthError(
                    "the padding of a part of the prompt does not follow from a prepared attention mask: with a static "
                    f"cache, generate from several rows without prefill_chunk_size. {_REMEDY}"
                )
            return max(state.tokens, tokens), begun
        return _static_size(context.cache), False

    def _continue(
        self,
        context: ForwardContext,
        table: RotaryEmbedding,
        lengths: Tensor,
        positions: Tensor,
        total: int | None,
        checked: bool,
    ) -> Tensor:
        """The lengths by which the rows of a cache have their profiles, (rows,).

        Args:
            lengths: (rows or 1,), what the rows may come to have.
            positions: (rows or 1, tokens), of the new tokens.
            total, checked: as `_total` gives them.
        """
        state, stored = checked_state(context, self.origin())
        past = stored.positions[:, : context.past_length].expand(max(len(positions), len(stored.positions)), -1)
        every = torch.cat([past, positions.expand(past.shape[0], -1)], dim=1)
        cropped = stored.positions.shape[1] > context.past_length
        rows = max(len(lengths), len(stored.lengths))
        lengths, kept = lengths.expand(rows), stored.lengths.expand(rows)
        if not state.follows:  # compiled code made this cache, and code between the two may have moved its rows
            if not bool((kept == kept[:1]).all()):
                raise LengthError(
                    "compiled code has made this cache, whose rows have several lengths, and which row is which now "
                    "is not known. Pass a cache to the first forward: past_key_values=DynamicCache()"
                )
            follow_rows(context.cache, state)
        mask = context.padding_mask
        if mask is not None:  # a part of the prompt before may be padding alone
            kept = torch.where(mask[:, : context.past_length].any(-1).to(kept.device), kept, lengths)
        context.cache_state = state
        context.cache_rows = replace(stored, lengths=kept, positions=every)
        end = total if total is not None and not checked else every.shape[1]
        if end <= stored.valid_up_to and not (cropped and total is None):
            return kept  # without waiting for the device
        packed = None if stored.one_input_each else several_inputs(past, mask)
        needed, had, any_packed = read_on_host(lengths, kept, packed)
        if any_packed:
            raise packed_error()
        room = []
        for row, (length, before) in enumerate(zip(needed, had, strict=True)):
            limit = table.method.constant_until(table.rotary, before)
            if length > limit:
                raise LengthError(
                    f"row {row} of this cache has the frequencies of inputs of up to {limit} tokens, and would come to "
                    f"{length}: fill a new cache with all its tokens. {_REMEDY}"
                )
            room.append(limit - length)
        counted = total is not None or mask is not None or context.position_ids is None
        context.cache_rows = RowState(kept, every, end + min(room) if counted else 0, True)
        return kept


def _static_size(cache: Any) -> int | None:
    """How many tokens fit into a static cache; None: it grows."""
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    layers = () if cache is None else cache.layers
    sizes = [each.max_cache_len for each in layers if isinstance(each, StaticLayer)]
    sliding = all(isinstance(each, StaticSlidingWindowLayer) for each in layers)
    return None if sliding else max(sizes, default=None)
