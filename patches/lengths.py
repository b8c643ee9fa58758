"""How long each row is, told to the rotary module; and a cache whose keys follow.

The rotary module sees positions only. Which of them are padding, and what is in the cache, is known one level up, so
two hooks on the decoder stand around its forward while its method depends on the length (`rope_ext_hf/cache.py` says
how the cache is kept).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.cache import KeyLayout, Stored, Turn, hand_out_turned, outside_graphs, turn_in_place
from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.slots import PatchedSlot
from rope_ext_hf.rotary import RotaryEmbedding, segment_lengths

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

__all__ = ["RowLengths"]

STORED = "_rope_ext_hf_stored"
_REMEDY = "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."


class RowLengths:
    """Hooks around the forward of the decoder whose patched slot hangs at `attribute`.

    Args:
        pairing: of the rotated dims of cached keys; None where the family table does not say.

    Raises:
        LengthError: a cache that was filled elsewhere, or a family whose cached keys are not known; not under
            `fixed_length`, where nothing changes.
    """

    def __init__(self, attribute: str, pairing: str | None) -> None:
        self.attribute, self.pairing = attribute, pairing
        self.open: ExitStack | None = None  # what a forward has changed until it ends
        self.coming: Stored | None = None  # what its cache will hold then

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Work out the lengths of the rows, and bring the keys in the cache to their frequencies."""
        slot: PatchedSlot = getattr(decoder, self.attribute)
        names = [name for name, table in slot.tables.items() if table.length_dependent]
        if not names:
            self._check_fixed(slot, kwargs.get("past_key_values"))
            return
        call = kwargs
        if args:
            call = inspect.signature(type(decoder).forward).bind_partial(decoder, *args, **kwargs).arguments
            call = call | call.get("kwargs", {})
        given = call.get("inputs_embeds") if call.get("input_ids") is None else call.get("input_ids")
        if given is None:
            return  # the decoder's own error says it better
        cache = call.get("past_key_values")
        known = int(cache.get_seq_length()) if cache is not None else 0
        positions, mask = call.get("position_ids"), call.get("attention_mask")
        if positions is None:
            if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
                raise LengthError(
                    "a prepared attention mask does not say how long each row is; give position_ids with it, or a mask "
                    f"of shape (rows, tokens). {_REMEDY}"
                )
            positions = torch.arange(known, known + given.shape[1], device=given.device)[None]
        if positions.ndim != 2:
            raise LengthError(f"positions of shape {tuple(positions.shape)} do not say how long each row is. {_REMEDY}")
        lengths = _lengths(positions, mask, known)
        self.open, self.coming = ExitStack(), None
        table = slot.table(names[0])
        lengths = table.effective(lengths)
        rows = lengths if lengths.ndim == 1 else lengths.amax(-1)
        if known:
            self._bring(slot, names, table, cache, known, rows, positions)
        for name in names:
            self.open.callback(setattr, slot.tables[name], "row_lengths", None)
            slot.tables[name].row_lengths = lengths
        if self.coming is None:
            quiet = table.rotary.trained_length if given.shape[1] <= table.rotary.trained_length else 0
            self.coming = Stored(table.method.to_dict(), rows, positions, quiet)

    def _check_fixed(self, slot: PatchedSlot, cache: Any) -> None:
        """Keys stored at one length are no use at another that is held now."""
        if cache is None or torch.compiler.is_compiling() or not cache.get_seq_length():
            return
        stored, held = getattr(cache, STORED, None), _held(slot)
        if isinstance(stored, Stored) or stored not in (None, held):
            when = "outside fixed_length" if isinstance(stored, Stored) else f"at a fixed length of {stored}"
            raise LengthError(f"the keys in this cache were stored {when}, and {held} is held now: fill a new one")

    @outside_graphs  # it looks at values
    def _bring(
        self,
        slot: PatchedSlot,
        names: list[str],
        table: RotaryEmbedding,
        cache: Cache,
        known: int,
        rows: Tensor,
        positions: Tensor,
    ) -> None:
        """Bring the keys of a cache with `known` tokens to the frequencies of rows as long as they will be."""
        stored = getattr(cache, STORED, None)
        batch = positions.shape[0]
        mine = isinstance(stored, Stored) and stored.method == table.method.to_dict()
        if not isinstance(stored, Stored) or not mine or stored.lengths.shape[0] not in (1, rows.shape[0]):
            raise LengthError(
                f"the keys in this cache were not stored under this model's {table.method.name}, so with which "
                f"frequencies they were turned is not known. {_REMEDY}"
            )
        if stored.positions.shape[1] < known:
            raise LengthError(f"something else has added keys to this cache. {_REMEDY}")
        past = stored.positions[:, :known].expand(max(batch, stored.positions.shape[0]), -1)
        every = torch.cat([past, positions.expand(past.shape[0], -1)], dim=1)
        total = every.shape[1]
        self.coming = Stored(stored.method, stored.lengths, every, stored.quiet)
        cropped = known < stored.positions.shape[1]
        if total <= stored.quiet and not cropped:
            return
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        layers = _layers(slot, cache, names)
        layout = self._layout(slot, table, layers)
        plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
        plain = plain and not getattr(cache, "offloading", False)  # whose keys are on their way somewhere
        if table.method.steps and plain:
            until = [table.method.constant_until(table.rotary, length) for length in rows.tolist()]
            before = [table.method.constant_until(table.rotary, length) for length in stored.lengths.tolist()]
            if until != before:
                turn_in_place(layers, Turn.between(table, stored.lengths, rows, past), layout)
            slack = min(end - length for end, length in zip(until, rows.tolist(), strict=True))
            self.coming = Stored(stored.method, rows, every, total + slack)
            return
        back = Turn.between(table, rows, stored.lengths, positions)
        forth = Turn.between(table, stored.lengths, rows, every)
        assert self.open is not None
        self.open.enter_context(hand_out_turned(layers, back, forth, layout))

    def _layout(self, slot: PatchedSlot, table: RotaryEmbedding, layers: list[Any]) -> KeyLayout:
        config = slot.record.configs[0].now.get_text_config()
        if self.pairing is None:
            raise LengthError(f"how {config.model_type!r} keeps its keys in a cache is not known here. {_REMEDY}")
        latent = getattr(config, "kv_lora_rank", None)
        if latent is None:
            return KeyLayout(self.pairing, 0, table.rotary.dim)
        if layers[0].keys.shape[-1] == latent:
            return KeyLayout(self.pairing, 0, table.rotary.dim, in_values=True)
        return KeyLayout(self.pairing, config.qk_nope_head_dim, table.rotary.dim)

    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Undo what `before` did to others, and note what the cache holds now. Called after an exception, too."""
        from transformers.cache_utils import Cache

        holds: Stored | int | None = self.coming
        if self.open is not None:
            self.open.close()
            self.open = self.coming = None
        elif not torch.compiler.is_compiling():
            holds = _held(getattr(decoder, self.attribute))
        cache = next((value for value in _values(output) if isinstance(value, Cache)), None)
        if cache is not None and holds is not None:
            setattr(cache, STORED, holds)


def _held(slot: PatchedSlot) -> int | None:
    """The length that is held, if one is."""
    tables = (slot.table(name) for name in slot.tables)
    return next((table.fixed_length for table in tables if table.method.length_dependent), None)


def _values(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else []


def _lengths(positions: Tensor, mask: Any, known: int) -> Tensor:
    """Real tokens so far: (rows, tokens) of the input that each token belongs to, or (rows,) onto a cache.

    What a mask leaves out is padding; positions that start anew begin another input of the same row.
    """
    by_position = positions.amax(-1) + 1 if known else segment_lengths(positions)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return by_position
    count = mask.sum(-1).to(by_position.device, by_position.dtype)
    return torch.minimum(count if known else count[:, None], by_position).clamp(min=1)


def _layers(slot: PatchedSlot, cache: Cache, names: list[str]) -> list[Any]:
    """The layers of the cache whose keys were turned by the tables that change."""
    config = slot.record.configs[0].now.get_text_config()
    types = getattr(config, "layer_types", None)
    turning = getattr(config, "no_rope_layers", None) or None  # 1 where a layer has rope, strange as the name is
    return [
        layer
        for i, layer in enumerate(cache.layers)
        if ("all" in names or (types is not None and types[i] in names)) and (turning is None or turning[i])
    ]
