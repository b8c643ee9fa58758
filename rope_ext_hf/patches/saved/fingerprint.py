"""Fingerprints of the rotary embeddings of models, and the differences between two of them, in sentences.

A fingerprint of a live model is read from its rotary modules, not from its config: a trainer or a converter that drops
a scaling may leave a config that looks right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import CheckpointError, FingerprintError, UnsupportedModelError
from rope_ext_hf.files.whole import json_digest
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.config import read_rope
from rope_ext_hf.models.layer_types import layers_text
from rope_ext_hf.patches.rows.row_probe import pairing_of
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, patched_slots
from rope_ext_hf.patches.slots.slot_finding import frequency_buffers, rotary_modules
from rope_ext_hf.patches.slots.unrotated_layers import unrotated_layers

FINGERPRINT_KEY = "fingerprint"
"""The key, in the record of a patch, of the fingerprint of the model that was saved."""
_SAME = 1e-5
"""The largest relative difference between numbers that are equal but were computed in different ways."""
_NEARLY = 1e-2
"""The largest relative difference at which numbers fit an explanation; they may have been rounded since."""
_SHORT_DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of a cast to a dtype."""
_SMALLEST_FLOAT16 = 2.0**-24
_STEPS = 137.3
"""The steps to which a digest rounds a number, per factor of e; uneven, so that no round number is at an edge."""
_FEWEST_TOKENS = 1


@dataclass(frozen=True)
class _LayerRope:
    """The rotation of the layers of one type.

    Attributes:
        theta: the base; it is not compared, but explains differences.
        inv_freq: radians per position of each pair, for inputs of the extended length; without one, for four times the
            context length.
        short_inv_freq: the same for the shortest inputs, where the frequencies follow the length; else None.
        attention_factor: the factor of cos and sin at the length of `inv_freq`.
        positions: a remapping method and its parameters; None: the positions of keys are not changed.
    """

    theta: float
    inv_freq: tuple[float, ...]
    short_inv_freq: tuple[float, ...] | None
    attention_factor: float
    positions: dict[str, Any] | None = None


@dataclass(frozen=True)
class Fingerprint:
    """The rotation of queries and keys in a model, to compare it with that of another model.

        rope.fingerprint("trained-model").differences(rope.fingerprint("converted-model"))

    Attributes:
        pairing: "half" or "interleaved"; None where this package does not know the model family.
        length: the length in tokens that the model is for by its config; None: it states none.
        softmax_scale: the factors of attention scores, one for each kind of attention that states it, ascending.
        layers: the rotation of the layers of each type, by type; by "all" where there is only one.
        unrotated: the indices of layers that do not rotate, whatever `layers` says, because a patch dropped the
            rotation of some of the layers that share a rotary embedding.
    """

    pairing: str | None
    length: int | None
    softmax_scale: tuple[float, ...]
    layers: dict[str, _LayerRope]
    unrotated: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits as a short name for the rotation; numbers are first rounded to about 1%.

        Models that rotate alike nearly always have the same digest. They get different ones only if a number lies at an
        edge of the rounding. To find out whether two models rotate alike, compare their fingerprints by `differences`.
        """
        values: list[Any] = [self.pairing, self.length, _rounded(self.softmax_scale)]
        for name in sorted(self.layers):
            layer = self.layers[name]
            short = layer.short_inv_freq
            numbers = _rounded((layer.attention_factor, *layer.inv_freq, *(short or ())))
            values.append([name, layer.positions, short is None, numbers])
        if self.unrotated:
            values.append(list(self.unrotated))
        return json_digest(values)[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return the fingerprint as plain values, as JSON holds them; `from_dict` reads them back."""
        values: dict[str, Any] = json.loads(json.dumps({"digest": self.digest} | asdict(self)))
        if not self.unrotated:
            del values["unrotated"]
        return values

    @classmethod
    def from_dict(cls, values: Any) -> Fingerprint:
        """Return the fingerprint that `to_dict` wrote.

        Raises:
            CheckpointError: the values are not those of a fingerprint.
        """
        try:
            layers = {
                str(name): _LayerRope(
                    float(layer["theta"]),
                    tuple(map(float, layer["inv_freq"])),
                    None if layer["short_inv_freq"] is None else tuple(map(float, layer["short_inv_freq"])),
                    float(layer["attention_factor"]),
                    layer["positions"],
                )
                for name, layer in values["layers"].items()
            }
            softmax_scale = tuple(map(float, values["softmax_scale"]))
            unrotated = tuple(values.get("unrotated", ()))
            fingerprint = cls(values["pairing"], values["length"], softmax_scale, layers, unrotated)
            if not fingerprint._is_possible():
                raise ValueError("a number, name or list is missing or impossible")
            return fingerprint
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(
                "this is not the fingerprint of a model's RoPE, as `rope.fingerprint` gives it"
            ) from error

    def _is_possible(self) -> bool:
        """Return whether values that were read from a file are of the right types, and all numbers finite."""
        if not self.layers or self.pairing not in (None, "half", "interleaved"):
            return False
        if self.length is not None and type(self.length) is not int:
            return False
        if any(type(index) is not int for index in self.unrotated):
            return False
        numbers = [*self.softmax_scale]
        for layer in self.layers.values():
            numbers += layer.theta, layer.attention_factor, *layer.inv_freq, *(layer.short_inv_freq or ())
            if layer.positions is not None and type(layer.positions["method"]) is not str:
                return False
        return all(map(math.isfinite, numbers))

    def differences(self, other: Fingerprint) -> list[str]:
        """Return sentences on how another model rotates differently from this one, which is the expected one.

        There are none where both rotate alike. Numbers that differ by no more than a cast to a shorter dtype count as
        alike.
        """
        sentences = []
        if None not in (self.pairing, other.pairing) and self.pairing != other.pairing:
            sentences.append(
                f"The pairing is {other.pairing} instead of {self.pairing}: the rows of the query and key weights are "
                "in another order than their class rotates, or belong to another class."
            )
        layers, other_layers = self.layers, other.layers
        if len(layers) == len(other_layers) == 1:  # the name of the only type does not matter
            layers = {"": next(iter(layers.values()))}
            other_layers = {"": next(iter(other_layers.values()))}
        sentences += [f"There are no {name} layers that rotate." for name in layers if name not in other_layers]
        sentences += [f"There are further layers that rotate: {name}." for name in other_layers if name not in layers]
        for name, expected in layers.items():
            if name in other_layers:
                where = f"{name} layers: " if len(layers) > 1 else ""
                sentences += [where + sentence for sentence in _layer_differences(expected, other_layers[name])]
        for these, those, state in ((self, other, "not dropped"), (other, self, "dropped")):
            only = set(these.unrotated) - set(those.unrotated)
            if only:
                sentences.append(f"The rotation of {layers_text(only)} is {state}, unlike in the expected model.")
        if not _alike(self.softmax_scale, other.softmax_scale):
            sentences.append(
                f"Scores are multiplied by {_scales_text(other.softmax_scale)} instead of "
                f"{_scales_text(self.softmax_scale)}: the softmax scale differs (an mscale of the attention that was "
                "dropped or added)."
            )
        if self.length != other.length:
            sentences.append(
                f"The config states a length of {other.length or 'no'} tokens instead of {self.length or 'no'}."
            )
        return sentences


def _scales_text(scales: Sequence[float]) -> str:
    """Return softmax scales as a list in words."""
    return ", ".join([f"{scale:.5g}" for scale in scales]) or "nothing"


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """Return the fingerprint of a live model, patched or not; on the meta device it is the one that its config states.

    Raises:
        UnsupportedModelError: the model has no rotary modules with frequencies.
    """
    rotary = rotary_modules(model)
    root: Any = model.config
    layers: dict[str, _LayerRope] = {}
    lengths: list[int | None] = []
    for parent, attribute, module, config in rotary:
        for layer_type, buffer in frequency_buffers(module).items():
            title = layer_type or ("all" if len(rotary) == 1 else attribute)
            layers[title], length = _layer_rope(getattr(parent, attribute), module, buffer, layer_type, config)
            lengths.append(length)
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({root.model_type}) has no rotary modules whose frequencies could be compared"
        )
    scales = [getattr(module, "scaling", None) for module in model.modules() if hasattr(module, "layer_idx")]
    softmax_scales = sorted({scale for scale in scales if isinstance(scale, float)})
    stated = getattr(root.get_text_config(), "max_position_embeddings", None)
    length = lengths[0] or stated
    return Fingerprint(pairing_of(model), length, tuple(softmax_scales), layers, unrotated_layers(model))


def fingerprint_record(model: nn.Module) -> dict[str, Any]:
    """Return a dict with the fingerprint of a patched model, to be merged into the record of its patch.

    The length in the fingerprint is that of the patch, because this is the length that a saved folder states, even if
    the live config was changed. The dict is empty for a model that rotates by a table of angles in its weights.
    """
    try:
        saved = fingerprint_of(model)
    except UnsupportedModelError:
        return {}
    encoding = patched_slots(model)[0].state.encoding
    length = encoding.extended_length or encoding.saved_length
    return {FINGERPRINT_KEY: replace(saved, length=length).to_dict()}


def with_pairing(record: Mapping[str, Any], pairing: str) -> dict[str, Any]:
    """Return the record of a patch, changed for a model whose weights were converted to another pairing of dims."""
    converted = replace(Fingerprint.from_dict(record[FINGERPRINT_KEY]), pairing=pairing)
    return {**record, FINGERPRINT_KEY: converted.to_dict()}


def check_recorded(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Check that a model rotates as it did when it was saved; a record without a fingerprint passes.

    Raises:
        FingerprintError: it rotates differently; the message says how.
        CheckpointError: the fingerprint in the record is damaged.
    """
    if FINGERPRINT_KEY not in record:
        return
    way_out = f"delete the key {FINGERPRINT_KEY!r} from the record of its patch"
    try:
        saved = Fingerprint.from_dict(record[FINGERPRINT_KEY])
    except CheckpointError as error:
        raise CheckpointError(f"the fingerprint of this folder is damaged; {way_out}") from error
    sentences = saved.differences(fingerprint_of(model))
    if sentences:
        raise FingerprintError(
            f"the loaded model does not rotate as it did when it was saved: {' '.join(sentences)} Undo the change; or, "
            f"to load the model as it is now, {way_out}"
        )


def table_differences(record: Mapping[str, Any], cos: Tensor, sin: Tensor) -> list[str]:
    """Return sentences on how the rotary module of an engine differs from the model that was saved.

    There are none where one of the saved layer types has the frequencies of the module, to within 1%. There are also
    none where the record has no fingerprint, or a layer type whose frequencies follow the length or whose positions are
    remapped: such a record is not compared.

    Args:
        record: the record of the patch in the saved config.
        cos: cos at position 1, with the attention factor, shape (pairs,), any dtype.
        sin: sin at position 1, likewise.
    """
    if FINGERPRINT_KEY not in record:
        return []
    cos, sin = cos.double().cpu(), sin.double().cpu()
    inv_freq, factor = tuple(torch.atan2(sin, cos).tolist()), float(torch.hypot(cos, sin).mean())
    sentences: list[str] = []
    for expected in Fingerprint.from_dict(record[FINGERPRINT_KEY]).layers.values():
        if len(expected.inv_freq) != len(inv_freq):
            continue
        alike = _close(expected.inv_freq, inv_freq) and _close((expected.attention_factor,), (factor,))
        if alike or expected.positions is not None or expected.short_inv_freq is not None:
            return []
        actual = replace(expected, inv_freq=inv_freq, attention_factor=factor)
        if not sentences:
            sentences = list(_layer_differences(expected, actual))
    return sentences


def _layer_rope(
    current: nn.Module, module: nn.Module, name: str, layer_type: str | None, config: Any
) -> tuple[_LayerRope, int | None]:
    """Return the rotation of the layers of a type, and the length in tokens that an unpatched linear scaling is for.

    That length may be a multiple of the one that the config states; it is None under anything else.

    Args:
        current: the module that rotates now: the model's own, or the one of a patch in its place.
        module: the model's own rotary module.
        name: its buffer with the frequencies of the layers of the type.
        layer_type: the type; None: all layers.
        config: the config of the module.
    """
    if isinstance(current, PatchedRotaryEmbedding):
        table = current.table(layer_type or "all")
        method, rotary = table.present_method, table.rotary
        patch = current.state.patch
        stated = patch.target_length if table.method == patch.method else None
        length = stated or method.extended_length(rotary) or 4 * rotary.context_length
        return _of_method(method, rotary, length), None
    buffer = getattr(module, name)
    described = read_rope(config, 2 * buffer.shape[-1], layer_type)
    rope = _of_method(described.method, described.plain, described.context_length)
    if buffer.device.type != "meta" and not described.method.length_dependent:
        factor = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", rope.attention_factor)
        rope = replace(rope, inv_freq=tuple(buffer.double().tolist()), attention_factor=float(factor))
    return rope, described.context_length if described.method.name == "linear" else None


def _of_method(method: RopeMethod, rotary: Rotary, length: int) -> _LayerRope:
    """Return the rotation by a method over a rotary embedding, for inputs of `length` tokens."""
    inv_freq, attention_factor = method.frequencies(rotary, length)
    short = tuple(method.frequencies(rotary, _FEWEST_TOKENS).inv_freq.tolist()) if method.length_dependent else None
    positions = method.to_dict() if isinstance(method, RemappingMethod) else None
    return _LayerRope(rotary.theta, tuple(inv_freq.tolist()), short, attention_factor, positions)


def _layer_differences(expected: _LayerRope, actual: _LayerRope) -> Iterator[str]:
    """Yield sentences on how the layers of a type rotate differently from what is expected."""
    if expected.positions != actual.positions:
        name = actual.positions["method"] if actual.positions else "none"
        expected_name = expected.positions["method"] if expected.positions else "none"
        remapping = f"{name} with other parameters"
        if name != expected_name:
            remapping = f"{name} instead of {expected_name}"
        yield f"The remapping of positions is {remapping}: {_parameters(actual)} instead of {_parameters(expected)}."
    if len(expected.inv_freq) != len(actual.inv_freq):
        yield (
            f"{len(actual.inv_freq)} pairs rotate instead of {len(expected.inv_freq)}: the share of rotated dims "
            "differs."
        )
        return
    frequencies = _frequency_difference(expected, actual)
    if frequencies is not None:
        yield frequencies
    elif (expected.short_inv_freq is None) != (actual.short_inv_freq is None):
        follows = "follow" if expected.short_inv_freq is None else "do not follow"
        yield f"Frequencies {follows} the length of the input: short inputs get others than expected."
    elif not _alike(expected.short_inv_freq or (), actual.short_inv_freq or ()):
        yield "Short inputs get other frequencies, those of long ones as expected: the list for short inputs differs."
    expected_factor, factor = expected.attention_factor, actual.attention_factor
    if not _alike((expected_factor,), (factor,)):
        if _close((factor,), (1.0,)):
            reason = "the attention factor (mscale) is missing"
        elif _close((factor,), (expected_factor * expected_factor,)):
            reason = "the attention factor (mscale) is applied twice"
        else:
            reason = "the attention factor differs"
        yield f"cos and sin are multiplied by {factor:.6g} instead of {expected_factor:.6g}: {reason}."


def _frequency_difference(expected: _LayerRope, actual: _LayerRope) -> str | None:
    """Return a sentence on how frequencies differ, by the first explanation that fits; None where they are alike."""
    a, b = expected.inv_freq, actual.inv_freq
    if _alike(a, b):
        return None
    turning = [bool(x or y) for x, y in zip(a, b, strict=True)]  # a scaling may stop pairs that rotate without it
    unscaled = _without_scaling(expected, turning)
    if _close(unscaled, b):
        return "The scaling is missing: frequencies are those without any scaling."
    if _close(unscaled, a) and _close(unscaled, _without_scaling(actual, turning)):
        return "There is a scaling where none is expected."
    twice = [x * x / plain if plain else 0.0 for x, plain in zip(a, unscaled, strict=True)]
    if _close(twice, b):
        return "The scaling is applied twice: frequencies are divided by its divisors once more."
    theta = _other_theta(a, b, expected.theta)
    if theta is not None:
        is_default = _close((theta,), (10_000.0,))
        lost = "; it is the default of a config that does not state its own" if is_default else ""
        return f"theta is {theta:,.10g} instead of {expected.theta:,.10g}{lost}."
    if expected.theta != actual.theta:
        return f"theta is {actual.theta:,.10g} instead of {expected.theta:,.10g}."
    if any(a) and not any(b):
        return "No pair rotates: every frequency is 0."
    ratios = [x / y for x, y in zip(a, b, strict=True) if y]
    if ratios and ratios[0] and _close([ratios[0]] * len(ratios), ratios):
        return f"Every frequency is divided by {ratios[0]:.6g} more than expected: a linear factor of another size."
    worst = max(range(len(a)), key=lambda pair: _relative_difference(a[pair], b[pair]))
    return (
        f"Frequencies differ by up to {_relative_difference(a[worst], b[worst]):.2g} of their size, most in pair "
        f"{worst}: {b[worst]:.4g} instead of {a[worst]:.4g} radians per token. The method or its numbers differ."
    )


def _without_scaling(layer: _LayerRope, turning: Sequence[bool]) -> tuple[float, ...]:
    """Return the frequencies of the base alone, and 0 for the pairs that `turning` leaves out."""
    plain = Rotary(2 * len(turning), layer.theta, _FEWEST_TOKENS).inv_freq().tolist()
    return tuple([value if turns else 0.0 for value, turns in zip(plain, turning, strict=True)])


def _other_theta(a: Sequence[float], b: Sequence[float], theta: float) -> float | None:
    """Return the base that turns frequencies `a` into `b`; None where no base does.

    The frequencies `a` are those of base `theta`, under any scaling that divides them.
    """
    if len(a) < 3 or not (a[-1] and b[-1]):
        return None
    # The ratio of the frequencies of pair i of d/2 is (theta / other)^(2i/d).
    other = theta * (a[-1] / b[-1]) ** (len(a) / (len(a) - 1))
    frequencies = [x * (theta / other) ** (i / len(a)) for i, x in enumerate(a)]
    return float(f"{other:.4g}") if _close(frequencies, b) else None


def _close(a: Sequence[float], b: Sequence[float], tolerance: float = _NEARLY) -> bool:
    """Return whether two lists are of one length and their numbers differ by no more than a relative tolerance."""
    return len(a) == len(b) and all(_relative_difference(x, y) <= tolerance for x, y in zip(a, b, strict=True))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two lists of numbers are equal, or one is the other one after a cast to a shorter dtype."""
    return _close(a, b, _SAME) or _is_cast(a, b) or _is_cast(b, a)


def _is_cast(values: Sequence[float], cast: Sequence[float]) -> bool:
    """Return whether the numbers `cast` are `values` after a cast to a shorter dtype, rounded in either direction."""
    before = torch.tensor(values, dtype=torch.float64)
    after = torch.tensor(cast, dtype=torch.float64)
    if before.shape != after.shape:
        return False
    for dtype, error in _SHORT_DTYPES.items():
        exact_in_dtype = torch.equal(after.to(dtype).double(), after)
        tolerance = (1.01 * error * before.abs()).clamp(min=_SMALLEST_FLOAT16)
        if exact_in_dtype and bool(((before - after).abs() <= tolerance).all()):
            return True
    return False


def _relative_difference(a: float, b: float) -> float:
    """Return the difference of two numbers as a share of the larger one."""
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def _parameters(layer: _LayerRope) -> str:
    """Return the parameters of the remapping method in a layer's fingerprint as JSON."""
    return json.dumps({key: value for key, value in (layer.positions or {}).items() if key != "method"})


def _rounded(numbers: Sequence[float]) -> list[int | None]:
    """Return each number as its rounded logarithm, in steps of about 1%; None for 0."""
    return [round(_STEPS * math.log(abs(number)) + 0.3) if number else None for number in numbers]
