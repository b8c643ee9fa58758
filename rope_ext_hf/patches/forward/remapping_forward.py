"""The forward of a decoder under a remapping method: positions of all tokens, for attention modules that are prepared.

A remapping method changes relative positions, which the rotation of queries and keys alone cannot express (a near pair
at its true distance, a far pair at a smaller one). So the attention modules of a patched model run a function of ours,
`attention_function`. What a module does with its rotary embedding (which dims of a head rotate, how they are paired,
whether at all) is measured when a model is patched, by running a few tokens through it, see `attention_probe`; `attach`
keeps the result with the module. The forward here tells the function the positions of the tokens of each call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rope_ext_hf.attention.rules import RowGroup
from rope_ext_hf.attention.static_step import can_step
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.weights_at_hand import on_meta_device
from rope_ext_hf.patches.forward.attention_function import register
from rope_ext_hf.patches.forward.attention_interface import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    PROBE_RECORDS,
    Layer,
    Places,
    places_of_attention,
)
from rope_ext_hf.patches.forward.attention_probe import probe_layers
from rope_ext_hf.patches.forward.forward_call import CALL_KWARG, ForwardCall
from rope_ext_hf.patches.forward.patched_forward import DecoderForward
from rope_ext_hf.patches.forward.token_positions import has_static_places, place_step, place_tokens
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding
from rope_ext_hf.patches.slots.slot_finding import find_slots
from rope_ext_hf.rotary.cache_memory import CacheMemory, recall
from rope_ext_hf.rotary.forward_state import graph_break

_PROBING = threading.Lock()
"""Held while a decoder is probed in a forward, when no other thread may run it."""


class RemappingForward(DecoderForward):
    """The forward of a decoder under a method that remaps relative positions, such as Self-Extend.

    It hands the positions and the padding of all tokens to the attention layers.
    """

    def __init__(self, module: nn.Module, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        super().__init__(module, slots)
        self.layers: dict[int, nn.Module] = {}  # attention modules of the decoder by index; looked up when first needed
        self.places: Places = []  # where these modules stood when they were looked up
        parameters = inspect.signature(type(module).forward).parameters.values()
        self.passes_keywords_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def prepare(self, model: nn.Module) -> None:
        """Find the attention modules; those of a decoder without weights are looked up in its first forward."""
        self._look_up_layers()

    def begin(self, call: ForwardCall, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Work out the positions of all tokens, and pass them on to the attention modules inside."""
        if call.compiled and self._is_static_step(call):
            call.memory = recall(call.cache, self.origin())
            _check_attention(self.module, kwargs)
            call.static_step = place_step(call)
            return kwargs
        # It branches on the values of tensors. The error of torch.export(strict=True) quotes the next line.
        return graph_break(self._begin)(call, kwargs)  # torch.export takes it with strict=False

    def _is_static_step(self, call: ForwardCall) -> bool:
        """Return whether a compiled call can be one graph at every step: one token per row onto a static cache."""
        if torch.compiler.is_exporting() or torch.is_grad_enabled() or not self.layers:
            return False
        rules = [module.__dict__[LAYER_ATTRIBUTE].rule for module in self.layers.values()]
        return has_static_places(call) and all(can_step(rule, call.cache.layers[0].max_cache_len) for rule in rules)

    def _begin(self, call: ForwardCall, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Do the same as `begin` for any call, uncompiled."""
        if PROBE_RECORDS.get() is not None:  # a forward of attention_probe, with attention of its own
            return kwargs
        self._look_up_layers()
        _check_attention(self.module, kwargs)
        call.read_values(self.axes)
        self.check(call)
        if call.past_length:
            call.memory = recall(call.cache, self.origin())
        call.token_positions = positions = place_tokens(call)
        call.layers = self.layers
        call.row_groups = self._group_rows(call)
        if call.memory is None:
            call.memory = CacheMemory(self.origin(), packed=call.packed)
        no_padding = positions.left_padding is not None and not any(positions.left_padding)
        call.memory.in_order = positions.key_mask is None and no_padding
        call.memory.counted = positions.is_counted
        passed_on: dict[str, Any] = {}
        if self.passes_keywords_on:  # as a keyword the call survives until a checkpointed layer runs in the backward
            passed_on[CALL_KWARG] = call
        if call.position_ids is None or "position_ids" in kwargs:
            passed_on["position_ids"] = positions.query_positions
        return kwargs | passed_on

    def end(self, call: ForwardCall, output: Any) -> None:
        """Remember with the cache how its keys are rotated."""
        if call.memory is not None:
            self.remember(call, output, call.memory)

    def check_exportable(self, call: ForwardCall) -> None:
        """Check that a graph for another program can hold this forward, which is traced or exported.

        Raises:
            UnsupportedModelError: the call has padding or positions, whose values decide what is computed, and a graph
                would keep the decisions for its example; its shape is left open, which decides the tiles of attention;
                or torch.jit.trace cannot follow the method.
        """
        super().check_exportable(call)
        if any(isinstance(size, torch.SymInt) for size in call.new_tokens.shape[:2]):
            raise UnsupportedModelError(
                f"an exported model under {self.tables[0].method.name} reads inputs of the shape of its example alone: "
                "export it without dynamic_shapes or dynamic_axes, or patch it with a frequency method, such as yarn"
            )
        if call.padding_mask is not None or call.position_ids is not None:
            raise UnsupportedModelError(
                f"a traced or exported model under {self.tables[0].method.name} cannot follow an "
                "attention_mask or position_ids: export the model without them, for inputs without padding, or patch "
                "it with a frequency method, such as yarn"
            )

    def _look_up_layers(self) -> None:
        """Find the attention modules of the decoder; find them again if one has been replaced since the last time."""
        moved = any(getattr(parent, name, None) is not module for parent, name, module in self.places)
        if self.layers and not moved:
            return
        layers = _prepared_layers(self.module)
        if not layers and not on_meta_device(self.module):
            with _PROBING:
                layers = _prepared_layers(self.module) or self._prepare_layers()
        self.layers = layers
        self.places = places_of_attention(self.module, layers.values(), self.slots[0].state.patch.method.name)

    def _prepare_layers(self) -> dict[int, nn.Module]:
        """Prepare the attention modules of a decoder that was patched without its weights; return them by index.

        This is done in the first forward, before any of its state is kept.
        """
        patch = self.slots[0].state.patch
        assert isinstance(patch.method, RemappingMethod)
        slots = find_slots(self.module, patch.layers)
        with torch.inference_mode(mode=False):  # what is measured here serves later forwards with gradients, too
            attach(probe_layers(self.module, slots, patch.method, patch.rotary), slots[0].config)
        return _prepared_layers(self.module)

    def _group_rows(self, call: ForwardCall) -> tuple[RowGroup, ...]:
        """Return the rows of a forward, grouped by their rule of attention; empty if all follow the rule of the method.

        Raises:
            LengthError: a row holds several inputs, each of which needs the rule of its own length.
        """
        table = next(table for table in self.tables if isinstance(table.method, RemappingMethod))
        method, positions = table.method, call.token_positions
        assert isinstance(method, RemappingMethod)
        assert positions is not None
        if method.scales_queries_only:
            return (RowGroup(None, None, positions),)
        if not method.depends_on_total_length:
            return ()
        lengths = (table.fixed_length,) if table.fixed_length else positions.lengths
        rules = [method.at_length(length) for length in lengths]
        if call.packed and not table.fixed_length and any(rules):
            raise LengthError(
                "a row holds several inputs one after the other (its position_ids start anew), and the rule of "
                f"{method.name} follows the length of each: give one input per row, or hold one length with "
                "rope_ext_hf.fixed_length(model, length)"
            )
        rows_of: dict[RemappingMethod | None, list[int]] = {}
        for row, rule in enumerate(rules):
            rows_of.setdefault(rule, []).append(row)
        if len(rows_of) == 1:
            return (RowGroup(None, rules[0], positions),)
        return tuple(RowGroup(tuple(rows), rule, positions.of_rows(tuple(rows))) for rule, rows in rows_of.items())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention function, which a pickled model needs in the process that loads it."""
        self.__dict__.update(state)
        register()


def _prepared_layers(decoder: nn.Module) -> dict[int, nn.Module]:
    """Return the attention modules of a decoder that `attach` has prepared, by their index."""
    layers: dict[int, nn.Module] = {}
    for module in decoder.modules():
        layer: Layer | None = module.__dict__.get(LAYER_ATTRIBUTE)
        if layer is not None:
            layers[layer.index] = module
    return layers


def _check_attention(decoder: nn.Module, kwargs: dict[str, Any]) -> None:
    """Check that a decoder still runs our attention function, and that a call asks for nothing it cannot return."""
    config: Any = decoder.config
    if config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(
            f"this model is patched with a remapping method, and its attention was set to "
            f"{config._attn_implementation!r} since: unpatch it first, or set {ATTENTION_NAME!r} again"
        )
    wants_weights = kwargs.get("output_attentions")
    if wants_weights is None:
        wants_weights = getattr(config, "output_attentions", False)
    if wants_weights:
        raise UnsupportedModelError(
            "a remapping method computes attention in blocks and has no attention weights to return; call the "
            "model without output_attentions=True, or unpatch it first and use attn_implementation='eager'"
        )


def attach(layers: Sequence[tuple[nn.Module, Layer]], as_loaded: Any) -> None:
    """Store on each attention module the `Layer` that `probe_layers` measured for it, and the config it came with.

    `as_loaded`: the config that the model was loaded with, which names its own attention function.
    """
    for index, (module, layer) in enumerate(layers):
        module.__dict__[LAYER_ATTRIBUTE] = replace(layer, index=index, as_loaded=as_loaded)


def remapped_windows(model: nn.Module) -> list[tuple[int, int | None]]:
    """Return the layer index and the window of every attention module under a remapping method.

    The window is in tokens; None: the module attends to everything before it. The index is -1 where a module has none.
    """
    windows = []
    for module in model.modules():
        layer: Layer | None = module.__dict__.get(LAYER_ATTRIBUTE)
        if layer is not None:
            windows.append((getattr(module, "layer_idx", -1), layer.rule.window_size))
    return windows


def detach(model: nn.Module) -> None:
    """Undo `attach` in every module of a model."""
    for module in model.modules():
        module.__dict__.pop(LAYER_ATTRIBUTE, None)
