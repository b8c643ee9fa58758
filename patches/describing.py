"""`describe`: which RoPE method a model runs, and how it would be saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rope_ext_hf.methods.base import TWO_PI
from rope_ext_hf.methods.registry import method_from_dict
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import PLUGIN_PREFIX, RECORD, SLIDING, read_rope, sliding_layers
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import check_pairing, undo_saved_patch
from rope_ext_hf.patches.patch_record import Record
from rope_ext_hf.patches.slots import Slot, find_slots, patched_slots

__all__ = ["Description", "describe"]


EVERY_LAYER = "Every layer"
_KNOWN_DISTANCES = "Far keys are seen at distances the model knows, {} tokens at most; frequencies stay as they are."


def notes_of(slot: Slot, extended_length: int) -> tuple[str, ...]:
    """What a reader must know about sliding-window layers."""
    config = slot.config
    window, sliding = sliding_layers(config)
    if not window or not sliding or window >= extended_length:
        return ()
    seen = f"attend{'s' if sliding == config.num_hidden_layers else ''} to the last {window} tokens only"
    if sliding == config.num_hidden_layers:
        return (f"{EVERY_LAYER} {seen}: a longer RoPE does not make the model look further back.",)
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
            undo_saved_patch(config)
            rotary, _ = read_rope(config, rotary.dim, layer_type)
            method = method_from_dict(saved["method"])
        native = method.extended_length(rotary)
        extended = slot.config.max_position_embeddings if native is None or method.name == "default" else native
        route = f"as it was loaded (rope type {slot.config.rope_parameters.get('rope_type', 'per layer type')})"
        notes = notes_of(slot, extended)
    else:
        rotary, method, extended, notes = record.rotary, record.method, record.extended_length, record.notes
        if isinstance(method, RemappingMethod):
            notes = (*notes, _KNOWN_DISTANCES.format(method.max_distance))
        route = f"transformers' own {record.rope_type!r}; loads anywhere"
        if record.rope_type.startswith(PLUGIN_PREFIX):
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
        pairing=class_pairing(slot.config),
        trained_length=rotary.trained_length,
        extended_length=extended,
        wavelengths=tuple((TWO_PI / inv_freq).tolist()),
        attention_factor=attention_factor,
        save_route=route,
        patched=record is not None,
        theta=rotary.theta,
        notes=notes,
    )
