"""Descriptions of a model's RoPE: its method, the scalings underneath, and how the model would be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from rope_ext_hf.methods.base import TWO_PI, UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.models.engine_keys import compare_engines
from rope_ext_hf.models.recipes import recipe_note
from rope_ext_hf.patches.model_rope import ModelRope, check_pairing
from rope_ext_hf.patches.planning import PatchPlan
from rope_ext_hf.patches.saved.adapters import SAVE_ROUTE, modules_with_adapters
from rope_ext_hf.patches.slots.patch_state import PatchState
from rope_ext_hf.patches.slots.patched_slot import patched_slots
from rope_ext_hf.patches.traps import is_encoder, theta_traps, traps
from rope_ext_hf.plug_ins import plug_in
from rope_ext_hf.terminal import Rows, ShownAsTables, wrapped

__all__ = ["Description", "describe", "scalings_underneath", "short_input_notes"]

_PAIRINGS: dict[str | None, str] = {
    "half": "half (dims i and i + d/2 rotate together)",
    "interleaved": "interleaved (dims 2i and 2i + 1 rotate together)",
}


_THETA_OF_FORMER_CLASSES = 10_000.0
"""The theta of most config classes of transformers 4, where a config.json states none under a key that they read."""


@dataclass(frozen=True)
class _Scaling:
    """A scaling that a model's method is applied over, and the length in tokens that the model is for under it."""

    method: str
    params: dict[str, Any]
    context_length: int

    def __str__(self) -> str:
        return f"{_call({'method': self.method, **self.params})}, for {self.context_length:,} tokens"


@dataclass(frozen=True, repr=False)
class Description(ShownAsTables):
    """The rotary embedding of a model, and how the model would be saved; printing it shows a table.

    Attributes:
        model_type: the model type of the text config.
        method: the name of the method on top.
        params: its parameters.
        underneath: the scalings that the method is applied over, bottom first; empty for a plain model. Each has
            `method`, `params` and `context_length`.
        pairing: "half" or "interleaved", the dims that rotate together; None where this package does not know the
            model family.
        trained_length: the length in tokens that RoPE without any scaling is for.
        context_length: the length in tokens that the model is for without the method on top; a factor multiplies it.
        context_rule: the reading of the config, or the argument, that gave `context_length`.
        extended_length: the length in tokens that the model is for with the method on top; None: it follows the input.
        rotating_layers: the number of full-attention layers that rotate, and of all full-attention layers.
        wavelengths: 2 pi / inv_freq of each pair, in tokens, at the context length; inf where a pair does not rotate.
        attention_factor: the factor of cos and sin.
        save_route: how `save_pretrained` would write the method.
        patched: whether `patch` put the method in.
        theta: the base of the frequencies.
        notes: sentences on what the method does not reach, and on what the model's class does differently.
        short_inputs: sentences on what the patch does to inputs within the context length, and on what is unusual about
            it on this rotary embedding.
        recipe: a line on what the publisher of the model states about its context; None where nothing is known.
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
        """Return the attributes as plain values, as JSON holds them; an infinite wavelength is None."""
        return asdict(self) | {"wavelengths": [w if math.isfinite(w) else None for w in self.wavelengths]}

    @property
    def rows(self) -> Rows:
        """The rows of the table that printing shows, each a name and a text."""
        longer = sum([wavelength > self.trained_length for wavelength in self.wavelengths])
        extended = f"{self.extended_length:,} tokens" if self.extended_length else "no fixed limit"
        if self.extended_length == self.context_length:
            extended += " (not extended)"
        shown_pairs = sorted({round(i * (len(self.wavelengths) - 1) / 7) for i in range(8)})
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
            ("  in tokens", ", ".join([f"pair {pair}: {self.wavelengths[pair]:,.4g}" for pair in shown_pairs])),
            ("saved as", self.save_route),
            *((("published", self.recipe),) if self.recipe else ()),
            *[("short inputs", text) for text in self.short_inputs],
            *[("note", note) for note in self.notes],
        ]

    def tables(self) -> Sequence[Rows]:
        """Return the tables that a notebook shows: one, with the model in its first row."""
        return [[("model", self._heading), *self.rows]]

    @property
    def _heading(self) -> str:
        """The model type, and whether the model is patched."""
        return f"{self.model_type}, {'patched' if self.patched else 'as loaded'}"

    def __str__(self) -> str:
        return "\n".join([self._heading, *[wrapped(text, f"  {name:<18}") for name, text in self.rows]])


def _call(saved: Mapping[str, Any]) -> str:
    """Return a saved method, as `to_dict` gives it, written like a call: "yarn(factor=4, ...)"."""
    params = [f"{key}={_short(value)}" for key, value in saved.items() if key != "method"]
    return f"{saved['method']}({', '.join(params)})" if params else str(saved["method"])


def _short(value: Any) -> str:
    """Return the value of a parameter in a few words."""
    if isinstance(value, Mapping):
        return _call(value)
    if isinstance(value, (list, tuple)):
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(model: nn.Module | PatchPlan) -> Description:
    """Describe the RoPE method that a model runs: its parameters, the scalings underneath, lengths and wavelengths.

        print(rope.describe(model))

    Args:
        model: a model, patched or not; or a plan of `plan_patch`, for the model as it would be with that patch.

    Raises:
        UnsupportedModelError: the model has no rotary embeddings that could be replaced.
        CheckpointError: the weights are, by the config, in another pairing than the class rotates.
    """
    if isinstance(model, PatchPlan):
        return _describe_patched(model.rope, model.state, model.state.patch.method)
    check_pairing(model)
    live = patched_slots(model)
    if live:
        present = live[0].present_patch
        return _describe_patched(ModelRope.of_model(model, present.layers), live[0].state, present.method)
    rope = ModelRope.of_model(model)
    slot, embedding = rope.slot, rope.stated[0]
    base = replace(rope, stated=(embedding,))  # of several embeddings the first is described
    rotary, method, context = embedding.plain, embedding.method, base.rotary.context_length
    extended = context
    if rope.patches:  # plain transformers loaded the model from a folder that was saved patched
        rotary, method = rope.patches[-1].rotary, rope.patches[-1].method
        extended = rope.patches[-1].length or extended
    settings = getattr(slot.config, "rope_parameters", None) or {"rope_type": "default"}
    note, _ = slot.sliding_note(extended)
    return _description(
        rope,
        rotary,
        method,
        context_length=rotary.context_length if rope.patches else context,
        context_rule=base.rule,
        extended_length=extended,
        save_route=_save_route_unpatched(settings),
        patched=False,
        notes=(
            *[text for text in (slot.layers.no_patch_needed, note, embedding.note) if text],
            *theta_traps(rope),
            *traps(rope, method, rotary, patched=False),
        ),
        recipe=recipe_note(rope.config, rotary, method if rope.patches else None),
    )


def _save_route_unpatched(settings: Mapping[str, Any]) -> str:
    """Return a text: how `save_pretrained` writes the rope settings of an unpatched model, and who cannot read them."""
    route = f"it is now (rope_type {settings.get('rope_type', 'per layer type')})"
    theta = settings.get("rope_theta", _THETA_OF_FORMER_CLASSES)  # a family with a table of angles states none
    if settings.get("rope_type") == "default" and theta == _THETA_OF_FORMER_CLASSES:
        return route
    return (
        f"{route}, in rope_parameters alone; transformers 4 reads none of it and takes the theta of its class, without "
        "a scaling. Patched with `default`, the folder has its keys as well"
    )


def _save_route(rope: ModelRope, state: PatchState) -> str:
    """Return a text: how `save_pretrained` writes the method of a patched model, and which programs can read it."""
    encoding = state.encoding
    assert rope.model is not None
    if modules_with_adapters(rope.model):
        return SAVE_ROUTE
    if rope.slot.is_table:
        positions = f"{encoding.saved_length:,} positions"
        return f"a table of {positions} in the weights, which every version of transformers reads"
    if not encoding.loads_plainly:
        return f"rope_type {encoding.rope_type!r}; plain transformers refuses it with that message"
    if not encoding.exact:
        return (
            f"transformers' own {encoding.rope_type!r}, because native was given: its results depend on earlier calls "
            "and on the other rows of a batch"
        )
    config = rope.slot.config
    engines = compare_engines({"model_type": config.model_type, **vars(config), **state.record})
    readers = ", ".join(["transformers 5", *engines.agreeing])
    if engines.by_source:
        readers += f"; by their source code, which was read but not run, also by {', '.join(engines.by_source)}"
    return f"transformers' own {encoding.rope_type!r}; known to be read right by {readers}"


def _describe_patched(rope: ModelRope, state: PatchState, method: RopeMethod) -> Description:
    """Describe a model under a patch, live or planned; `method` has the present values of a trained parameter."""
    slots, rotary, encoder = rope.slots, state.patch.rotary, is_encoder(rope.model)
    return _description(
        rope,
        rotary,
        method,
        context_length=rotary.context_length,
        context_rule=state.rule,
        extended_length=state.encoding.extended_length,
        save_route=_save_route(rope, state),
        patched=True,
        notes=(*state.notes, method.note) if method.note else state.notes,
        short_inputs=(
            *short_input_notes(
                method,
                rotary,
                as_loaded=all(each.rotates_as_loaded(method, rotary) and each.is_accurate for each in slots),
                bit_equal=method.keeps_bits and not any(r.follows_length for s in slots for r in s.as_loaded.values()),
                has_perplexity=not encoder,
            ),
            *(() if encoder else _measured_note(method, rotary)),
        ),
        recipe=recipe_note(rope.config, rotary, method),
    )


def short_input_notes(
    method: RopeMethod,
    rotary: Rotary,
    *,
    as_loaded: bool = True,
    bit_equal: bool | None = None,
    has_perplexity: bool = True,
) -> tuple[str, ...]:
    """Return sentences on what a method does to inputs within the context length, and on what is unusual about it.

    Args:
        method: the method, with every parameter filled in.
        rotary: the rotary embedding that it is applied to.
        as_loaded: whether that is the rotary embedding of the model as loaded, whose frequencies no cast has rounded.
        bit_equal: whether the modules of the unpatched model read such inputs; None: as `RopeMethod.keeps_bits` says.
        has_perplexity: whether the model predicts the next token, so that `rope-ext ppl` can measure it.
    """
    unchanged = method.unchanged_length(rotary)
    bit_equal = method.keeps_bits if bit_equal is None else bit_equal
    notes = []
    if 0 < unchanged < UNBOUNDED:
        inputs = f"Inputs of up to {unchanged:,} tokens"
        if not as_loaded:
            notes.append(f"{inputs} keep the frequencies that this patch extends, not those of the unpatched model.")
        elif bit_equal:
            notes.append(f"{inputs} give the output of the unpatched model, bit for bit.")
        else:
            notes.append(f"{inputs} give the output of the unpatched model up to rounding.")
    if _factor_for_all_lengths(method, rotary):
        measure = ": `rope-ext ppl` measures by how much" if has_perplexity else ""
        notes.append(
            f"Inputs within the context length change as well, and mostly get worse{measure}. Take the smallest factor "
            "that reaches the length you need."
        )
    return (*notes, *method.cautions(rotary))


def _factor_for_all_lengths(method: RopeMethod, rotary: Rotary) -> float | None:
    """Return the factor of a method that changes inputs of every length; None for all other methods."""
    factor: float | None = getattr(method, "factor", None)
    return factor if factor and factor > 1 and not method.unchanged_length(rotary) else None


def _measured_note(method: RopeMethod, rotary: Rotary) -> tuple[str, ...]:
    """Return a sentence on what short inputs lost on a measured model, if this method with this factor changes them."""
    factor = _factor_for_all_lengths(method, rotary)
    measured = plug_in("parts", "short_inputs")  # of the tool box, which may not be installed
    if factor is None or measured is None:
        return ()
    clause = measured(method.name, factor)
    return (f"Inputs within the context length {clause}.",) if clause else ()


def _description(rope: ModelRope, rotary: Rotary, method: RopeMethod, **attributes: Any) -> Description:
    """Return a description with the attributes that follow from a model, and from a method over its RoPE.

    `attributes` are the others.
    """
    inv_freq, attention_factor = method.frequencies(rotary)
    rotating = rope.slot.layers.rotating
    if method.drops_rotation or rotary.rotation_dropped:
        dropped = [index for slot in rope.slots for index in slot.changed_layers]
        layers = rope.slot.layers
        rotating = len((layers.rotating_layers & layers.full_attention).difference(dropped)), rotating[1]
    return Description(
        model_type=rope.config.model_type,
        method=method.name,
        params=_params(method),
        underneath=tuple(scalings_underneath(rotary)),
        pairing=rope.pairing,
        trained_length=rotary.trained_length,
        wavelengths=tuple((TWO_PI / inv_freq).tolist()),
        attention_factor=attention_factor,
        theta=rotary.theta,
        rotating_layers=rotating,
        **attributes,
    )


def scalings_underneath(rotary: Rotary) -> list[_Scaling]:
    """Return the scalings of a rotary embedding, bottom first; none for a plain one."""
    if rotary.own is None:
        return []
    own = rotary.own
    return [*scalings_underneath(own.rotary), _Scaling(own.method.name, _params(own.method), own.context_length)]


def _params(method: RopeMethod) -> dict[str, Any]:
    """Return the parameters of a method as plain values."""
    return {key: value for key, value in method.to_dict().items() if key != "method"}
