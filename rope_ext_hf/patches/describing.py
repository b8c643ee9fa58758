"""`describe`: which RoPE method a model runs, what lies underneath, and how the model would be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rope_ext_hf.methods.base import TWO_PI, UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.adapters import SAVE_ROUTE, modules_with_adapters
from rope_ext_hf.patches.config import read_rope, recorded_specs
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import base_rope_of_config, before_patches, check_pairing
from rope_ext_hf.patches.patch_state import PatchState
from rope_ext_hf.patches.planning import PatchPlan
from rope_ext_hf.patches.recipes import recipe_note
from rope_ext_hf.patches.saving import engine_agreement
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import Slot, first_scaled, patched_slots
from rope_ext_hf.terminal import Rows, ShownAsTables, wrapped

_PAIRINGS: dict[str | None, str] = {
    "half": "half (dims i and i + d/2 rotate together)",
    "interleaved": "interleaved (dims 2i and 2i + 1 rotate together)",
}


@dataclass(frozen=True)
class _Scaling:
    """One scaling underneath a patch, and the length in tokens that the model is for under it."""

    method: str
    params: dict[str, Any]
    context_length: int

    def __str__(self) -> str:
        return f"{_call({'method': self.method, **self.params})}, for {self.context_length:,} tokens"


@dataclass(frozen=True, repr=False)
class Description(ShownAsTables):
    """What a model's rotary embedding is and how a model saved now would be loaded.

    Attributes:
        method, params: the method on top by name and its parameters.
        underneath: the scalings that the method is applied over, bottom first; empty for a plain model.
        pairing: "half" or "interleaved"; None where the family is not in the table.
        trained_length: tokens that RoPE without any scaling is for.
        context_length: tokens that the model is for without the method on top; `factor` multiplies it.
        context_rule: which reading of the config, or which argument, gave `context_length`.
        extended_length: tokens that the model is for with the method on top; None: it follows the input.
        rotating_layers: how many full-attention layers rotate, of how many there are.
        wavelengths: per pair, 2 pi / inv_freq in tokens, at the context length; inf where a pair does not rotate.
        attention_factor: what cos and sin are multiplied by.
        save_route: how `save_pretrained` would write it.
        patched: whether the method was put in by `patch`.
        notes: what a patch does not reach.
        short_inputs: what the patch does to inputs within the context length, by what was measured, and what is unusual
            about it on this rotary embedding.
    """

    model_type: str
    method: str
    params: dict[str, Any]
    underneath: tuple[_Scaling, ...]
    pairing: str | None
    trained_length: int
    context_length: int
    context_rule: str
    extended_length: int | None
    rotating_layers: tuple[int, int]
    wavelengths: tuple[float, ...]
    attention_factor: float
    save_route: str
    patched: bool
    theta: float
    notes: tuple[str, ...] = ()
    short_inputs: tuple[str, ...] = ()
    recipe: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the wavelength of a pair that does not rotate is None."""
        return asdict(self) | {"wavelengths": [w if math.isfinite(w) else None for w in self.wavelengths]}

    @property
    def rows(self) -> Rows:
        """What it says, each under a name."""
        longer = sum([wavelength > self.trained_length for wavelength in self.wavelengths])
        extended = f"{self.extended_length:,} tokens" if self.extended_length else "no fixed limit"
        if self.extended_length == self.context_length:
            extended += " (not extended)"
        shown = sorted({round(i * (len(self.wavelengths) - 1) / 7) for i in range(8)})
        return [
            ("method", _call({"method": self.method, **self.params})),
            *[("over", str(scaling)) for scaling in reversed(self.underneath)],
            ("pairing", _PAIRINGS.get(self.pairing, "unknown: this package does not know the model family")),
            ("trained length", f"{self.trained_length:,} tokens"),
            ("context length", f"{self.context_length:,} tokens ({self.context_rule})"),
            ("extended length", extended),
            ("theta", f"{self.theta:g}"),
            ("layers with RoPE", f"{self.rotating_layers[0]} of {self.rotating_layers[1]} full-attention layers"),
            ("attention factor", f"{self.attention_factor:.4f}"),
            ("wavelengths", f"{longer} of {len(self.wavelengths)} pairs have a wavelength beyond the trained length"),
            ("  in tokens", ", ".join([f"pair {pair}: {self.wavelengths[pair]:,.4g}" for pair in shown])),
            ("saved as", self.save_route),
            *((("published", self.recipe),) if self.recipe else ()),
            *[("short inputs", text) for text in self.short_inputs],
            *[("note", note) for note in self.notes],
        ]

    def tables(self) -> Sequence[Rows]:
        return [[("model", self._heading), *self.rows]]

    @property
    def _heading(self) -> str:
        return f"{self.model_type}, {'patched' if self.patched else 'as loaded'}"

    def __str__(self) -> str:
        return "\n".join([self._heading, *[wrapped(text, f"  {name:<18}") for name, text in self.rows]])


def _call(saved: Mapping[str, Any]) -> str:
    params = [f"{key}={_short(value)}" for key, value in saved.items() if key != "method"]
    return f"{saved['method']}({', '.join(params)})" if params else str(saved["method"])


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return _call(value)
    if isinstance(value, (list, tuple)):
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(model: nn.Module | PatchPlan) -> Description:
    """Describe the RoPE method that a model runs, patched or as loaded.

    Args:
        model: a model, or the plan of a patch: then the model as it would be.

    Raises:
        UnsupportedModelError: a model without rotary embeddings.
    """
    if isinstance(model, PatchPlan):
        return _describe_patched(model.model, model.slots, model.state, model.state.spec.method)
    check_pairing(model)
    if filled := patched_slots(model):
        present = filled[0].present_spec
        return _describe_patched(model, find_slots(model, present.layers), filled[0].state, present.method)
    slot = first_scaled(find_slots(model))
    layer_type = (*slot.scaled_layers, *slot.as_loaded)[0]
    config = before_patches(slot.config)
    settings = getattr(slot.config, "rope_parameters", None) or {"rope_type": "default"}
    specs = recorded_specs(slot.config)  # of a model that was loaded plainly from a folder that was saved patched
    described = read_rope(config, slot.as_loaded[layer_type].plain.dim, layer_type)
    base = base_rope_of_config(described, "own", None, config)
    rotary, method, context = described.plain, described.method, base.rotary.context_length
    extended = context
    if specs:
        rotary, method = specs[-1].rotary, specs[-1].method
        extended = specs[-1].target_length or method.extended_length(rotary) or extended
    note, _ = slot.sliding_note(extended)
    return _description(
        slot,
        rotary,
        method,
        context_length=rotary.context_length if specs else context,
        context_rule=base.rule,
        extended_length=extended,
        save_route=f"it is now (rope_type {settings.get('rope_type', 'per layer type')})",
        patched=False,
        notes=tuple(text for text in (note, described.note) if text),
        recipe=recipe_note(config, rotary, method if specs else None),
    )


def _save_route(model: nn.Module, slot: Slot, state: PatchState) -> str:
    encoding = state.encoding
    if modules_with_adapters(model):
        return SAVE_ROUTE
    if slot.is_table:
        positions = f"{encoding.saved_length:,} positions"
        return f"a table of {positions} in the weights, which every version of transformers reads"
    if not encoding.loads_plainly:
        return f"rope_type {encoding.rope_type!r}; plain transformers refuses it with that message"
    if not encoding.exact:
        return (
            f"transformers' own {encoding.rope_type!r}, because native was given: its results depend on earlier calls "
            "and on the other rows of a batch"
        )
    engines = engine_agreement(state)
    right = ", ".join(["transformers 5", *engines.agreeing])
    if engines.by_source:
        right += f"; by their source code, not run here, also by {', '.join(engines.by_source)}"
    return f"transformers' own {encoding.rope_type!r}; known to be read right by {right}"


def _describe_patched(model: nn.Module, slots: Sequence[Slot], state: PatchState, method: RopeMethod) -> Description:
    slot, rotary = first_scaled(slots), state.spec.rotary
    return _description(
        slot,
        rotary,
        method,
        context_length=rotary.context_length,
        context_rule=state.rule,
        extended_length=state.encoding.extended_length,
        save_route=_save_route(model, slot, state),
        patched=True,
        notes=(*state.notes, method.note) if isinstance(method, RemappingMethod) else state.notes,
        short_inputs=short_input_notes(method, rotary),
        recipe=recipe_note(before_patches(slot.config), rotary, method),
    )


def short_input_notes(method: RopeMethod, rotary: Rotary) -> tuple[str, ...]:
    """Return what a method does to inputs within the context length, and all that is unusual about it, in sentences."""
    kept, factor = method.unchanged_length(rotary), getattr(method, "factor", None)
    notes = []
    if 0 < kept < UNBOUNDED:
        notes.append(f"Inputs of up to {kept:,} tokens give the same output as the unpatched model.")
    if factor and factor > 1 and not kept:
        notes.append(
            "Inputs within the context length change as well, and mostly get worse: `rope-ext ppl` measures by how "
            "much. Take the smallest factor that reaches the length you need."
        )
    return (*notes, *method.cautions(rotary))


def _description(slot: Slot, rotary: Rotary, method: RopeMethod, **rest: Any) -> Description:
    inv_freq, attention_factor = method.frequencies(rotary)
    return Description(
        model_type=slot.config.model_type,
        method=method.name,
        params=_params(method),
        underneath=tuple(scalings_underneath(rotary)),
        pairing=class_pairing(slot.config),
        trained_length=rotary.trained_length,
        wavelengths=tuple((TWO_PI / inv_freq).tolist()),
        attention_factor=attention_factor,
        theta=rotary.theta,
        rotating_layers=slot.layers.rotating,
        **rest,
    )


def scalings_underneath(rotary: Rotary) -> list[_Scaling]:
    """The scalings of a rotary embedding, bottom first; empty for a plain one."""
    if rotary.own is None:
        return []
    own = rotary.own
    return [*scalings_underneath(own.rotary), _Scaling(own.method.name, _params(own.method), own.context_length)]


def _params(method: RopeMethod) -> dict[str, Any]:
    return {key: value for key, value in method.to_dict().items() if key != "method"}
