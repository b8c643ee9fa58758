"""`Fingerprint`: what rotates how in a model, layer type by layer type, and how two of them differ, as sentences.

What a model runs is read from its rotary modules, not from its config: a trainer or a converter that drops a scaling
leaves a config that looks right.
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
from rope_ext_hf.files import json_digest
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import read_rope
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.slot_finding import frequency_buffers, rotary_modules
from rope_ext_hf.patches.slots import PatchedSlot, patched_slots

FINGERPRINT_KEY = "fingerprint"
"""The key in the record of a patch, in a config or beside an adapter, that states what the saved model rotated."""
_SAME = 1e-5  # the largest relative difference of two numbers that computing them in another way explains
_NEARLY = 1e-2  # the largest relative difference at which an explanation fits: numbers may have been rounded since
_SHORT_DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the largest relative error of a cast to each dtype
_SMALLEST_FLOAT16 = 2.0**-24
_STEPS = 137.3  # of a number in a digest, per factor of e: uneven, so that round numbers do not stand at an edge
_FEWEST_TOKENS = 1


@dataclass(frozen=True)
class _LayerRope:
    """RoPE of the layers of one type."""

    theta: float  # the base; it only explains differences
    inv_freq: tuple[float, ...]
    """Radians per position of each pair, for the longest inputs; where they change without end, for inputs of four
    times the context length.
    """
    short_inv_freq: tuple[float, ...] | None  # for the shortest inputs, where they follow the length
    attention_factor: float  # of cos and sin, for the longest inputs
    positions: dict[str, Any] | None = None  # a remapping method and its parameters; None: keys are seen where they are


@dataclass(frozen=True)
class Fingerprint:
    """What rotates how in a model.

    Attributes:
        pairing: "half" or "interleaved"; None where the family is not in the table.
        length: tokens that the model is for by its config; None: it states none.
        softmax_scale: what scores are multiplied by in each kind of attention that states it, in ascending order.
        layers: by layer type; "all" where there is one.
    """

    pairing: str | None
    length: int | None
    softmax_scale: tuple[float, ...]
    layers: dict[str, _LayerRope]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits, of numbers rounded to about 1%.

        Models that rotate alike have one digest, but for numbers that stand at an edge of rounding: compare
        fingerprints by `differences`, and use the digest where a short name is all there is room for.
        """
        values: list[Any] = [self.pairing, self.length, _rounded(self.softmax_scale)]
        for name in sorted(self.layers):
            layer = self.layers[name]
            short = layer.short_inv_freq
            numbers = _rounded((layer.attention_factor, *layer.inv_freq, *(short or ())))
            values.append([name, layer.positions, short is None, numbers])
        return json_digest(values)[:12]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        values: dict[str, Any] = json.loads(json.dumps({"digest": self.digest} | asdict(self)))
        return values

    @classmethod
    def from_dict(cls, values: Any) -> Fingerprint:
        """The inverse of `to_dict`; CheckpointError for values of another form."""
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
            made = cls(values["pairing"], values["length"], tuple(map(float, values["softmax_scale"])), layers)
            numbers = [*made.softmax_scale]
            for layer in layers.values():
                numbers += layer.theta, layer.attention_factor, *layer.inv_freq, *(layer.short_inv_freq or ())
            kinds = made.length is None or type(made.length) is int, made.pairing in (None, "half", "interleaved")
            named = all(each.positions is None or type(each.positions["method"]) is str for each in layers.values())
            if not (layers and all(map(math.isfinite, numbers)) and all(kinds) and named):
                raise ValueError("a number, name or list is missing or impossible")
            return made
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(
                "this is not the fingerprint of a model's RoPE, as `rope.fingerprint` gives it"
            ) from error

    def differences(self, other: Fingerprint) -> list[str]:
        """How another model rotates otherwise than this one, the expected one; empty where both rotate alike.

        Numbers that a cast to a shorter dtype explains count as alike.
        """
        sentences = []
        if None not in (self.pairing, other.pairing) and self.pairing != other.pairing:
            sentences.append(
                f"The pairing is {other.pairing} instead of {self.pairing}: the rows of the query and key weights are "
                "in another order than their class rotates, or belong to another class."
            )
        mine, others = self.layers, other.layers
        if len(mine) == len(others) == 1:  # one program may name them, and another not
            mine, others = [{"": next(iter(layers.values()))} for layers in (mine, others)]
        sentences += [f"There are no {name} layers that rotate." for name in mine if name not in others]
        sentences += [f"There are further layers that rotate: {name}." for name in others if name not in mine]
        for name, expected in mine.items():
            where = f"{name} layers: " if len(mine) > 1 else ""
            if (actual := others.get(name)) is not None:
                sentences += [where + sentence for sentence in _layer_differences(expected, actual)]
        if not _alike(self.softmax_scale, other.softmax_scale):
            scales = [
                ", ".join([f"{scale:.5g}" for scale in each]) or "nothing"
                for each in (other.softmax_scale, self.softmax_scale)
            ]
            sentences.append(
                f"Scores are multiplied by {scales[0]} instead of {scales[1]}: the softmax scale differs (an mscale of "
                "the attention that was dropped or added)."
            )
        if self.length != other.length:
            sentences.append(
                f"The config states a length of {other.length or 'no'} tokens instead of {self.length or 'no'}."
            )
        return sentences


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """The fingerprint of a live model, patched or not; on the meta device it is the one that its config states."""
    found = rotary_modules(model)
    root: Any = model.config
    layers: dict[str, _LayerRope] = {}
    lengths: list[int | None] = []
    for parent, attribute, module, own in found:
        for layer_type, name in frequency_buffers(module).items():
            title = layer_type or ("all" if len(found) == 1 else attribute)
            layers[title], length = _layer_rope(getattr(parent, attribute), module, name, layer_type, own)
            lengths.append(length)
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({root.model_type}) has no rotary modules whose frequencies could be compared"
        )
    attention = (module for module in model.modules() if hasattr(module, "layer_idx"))
    scales = {scale for module in attention if isinstance(scale := getattr(module, "scaling", None), float)}
    stated = getattr(root.get_text_config(), "max_position_embeddings", None)
    return Fingerprint(class_pairing(root), lengths[0] or stated, tuple(sorted(scales)), layers)


def fingerprint_record(model: nn.Module) -> dict[str, Any]:
    """What the record of a patch keeps of a patched model that is saved; nothing of one that rotates by a table.

    The length is that of the patch: a config is saved with it, whatever the live one says.
    """
    try:
        saved = fingerprint_of(model)
    except UnsupportedModelError:
        return {}
    encoding = patched_slots(model)[0].state.encoding
    length = encoding.extended_length or encoding.saved_length
    return {FINGERPRINT_KEY: replace(saved, length=length).to_dict()}


def with_pairing(record: Mapping[str, Any], pairing: str) -> dict[str, Any]:
    """The record of a patch after the weights, and the class that runs them, went over to another pairing."""
    converted = replace(Fingerprint.from_dict(record[FINGERPRINT_KEY]), pairing=pairing)
    return {**record, FINGERPRINT_KEY: converted.to_dict()}


def check_recorded(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Check that a model rotates as the saved one did by the record of its patch; a record without it passes."""
    if FINGERPRINT_KEY not in record:
        return
    way_out = f"delete the key {FINGERPRINT_KEY!r} from the record of its patch"
    try:
        saved = Fingerprint.from_dict(record[FINGERPRINT_KEY])
    except CheckpointError as error:
        raise CheckpointError(f"the fingerprint of this folder is damaged; {way_out}") from error
    if sentences := saved.differences(fingerprint_of(model)):
        raise FingerprintError(
            f"the loaded model does not rotate as it did when it was saved: {' '.join(sentences)} Undo what was "
            f"changed since; or, to load it as it is now, {way_out}"
        )


def table_differences(record: Mapping[str, Any], cos: Tensor, sin: Tensor) -> list[str]:
    """How the table of an engine's rotary module differs from the model that was saved, in sentences.

    A record without a fingerprint, and a layer type whose frequencies follow the length or whose positions are
    remapped, is not compared. `cos` and `sin` are of position 1, (pairs,), with the attention factor, in any dtype:
    differences up to 1% count as none. One layer type with these frequencies is enough.
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
        sentences = sentences or list(_layer_differences(expected, actual))
    return sentences


def _layer_rope(
    current: nn.Module, module: nn.Module, name: str, layer_type: str | None, config: Any
) -> tuple[_LayerRope, int | None]:
    """RoPE of a layer type as `current` has it, which stands for `module` with frequencies in its buffer `name`.

    Also the tokens that it is for as loaded under a linear scaling, which may be a multiple of what its config states.
    """
    if isinstance(current, PatchedSlot):
        table = current.table(layer_type or "all")
        method, rotary = table.present_method, table.rotary
        spec = current.state.spec
        stated = spec.target_length if table.method == spec.method else None
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
    inv_freq, attention_factor = method.frequencies(rotary, length)
    short = tuple(method.frequencies(rotary, _FEWEST_TOKENS).inv_freq.tolist()) if method.length_dependent else None
    positions = method.to_dict() if isinstance(method, RemappingMethod) else None
    return _LayerRope(rotary.theta, tuple(inv_freq.tolist()), short, attention_factor, positions)


def _layer_differences(expected: _LayerRope, actual: _LayerRope) -> Iterator[str]:
    if expected.positions != actual.positions:
        names = [each["method"] if each else "none" for each in (actual.positions, expected.positions)]
        what = f"{names[0]} instead of {names[1]}" if names[0] != names[1] else f"{names[0]} with other parameters"
        yield f"The remapping of positions is {what}: {_parameters(actual)} instead of {_parameters(expected)}."
    if len(expected.inv_freq) != len(actual.inv_freq):
        count = f"{len(actual.inv_freq)} pairs rotate instead of {len(expected.inv_freq)}"
        yield f"{count}: the share of rotated dims differs."
        return
    frequencies = _frequency_difference(expected, actual)
    if frequencies is not None:
        yield frequencies
    elif (expected.short_inv_freq is None) != (actual.short_inv_freq is None):
        follows = "follow" if expected.short_inv_freq is None else "do not follow"
        yield f"Frequencies {follows} the length of the input: short inputs get others than expected."
    elif not _alike(expected.short_inv_freq or (), actual.short_inv_freq or ()):
        yield "Short inputs get other frequencies, those of long ones as expected: the list for short inputs differs."
    a, b = expected.attention_factor, actual.attention_factor
    if not _alike((a,), (b,)):
        if _close((b,), (1.0,)):
            reason = "the attention factor (mscale) is missing"
        elif _close((b,), (a * a,)):
            reason = "the attention factor (mscale) is applied twice"
        else:
            reason = "the attention factor differs"
        yield f"cos and sin are multiplied by {b:.6g} instead of {a:.6g}: {reason}."


def _frequency_difference(expected: _LayerRope, actual: _LayerRope) -> str | None:
    """What became of the frequencies, by the first explanation that fits; None: they are alike."""
    a, b = expected.inv_freq, actual.inv_freq
    if _alike(a, b):
        return None
    base, other_base = [_without_scaling(layer) for layer in (expected, actual)]
    if _close(base, b):
        return "The scaling is missing: frequencies are those without any scaling."
    if _close(base, a) and _close(base, other_base):
        return "There is a scaling where none is expected."
    twice = [x * x / plain if plain else 0.0 for x, plain in zip(a, base, strict=True)]
    if _close(twice, b):
        return "The scaling is applied twice: frequencies are divided once more by what they are divided by already."
    if (theta := _theta(a, b, expected.theta)) is not None:
        lost = "; it is the default of a config that does not state its own" if _close((theta,), (10_000.0,)) else ""
        return f"theta is {theta:,.10g} instead of {expected.theta:,.10g}{lost}."
    if expected.theta != actual.theta:
        return f"theta is {actual.theta:,.10g} instead of {expected.theta:,.10g}."
    ratios = [x / y for x, y in zip(a, b, strict=True) if y]
    if ratios and _close([ratios[0]] * len(ratios), ratios):
        return f"Every frequency is divided by {ratios[0]:.6g} more than expected: a linear factor of another size."
    worst = max(range(len(a)), key=lambda pair: _relative(a[pair], b[pair]))
    return (
        f"Frequencies differ by up to {_relative(a[worst], b[worst]):.2g} of their size, most in pair {worst}: "
        f"{b[worst]:.4g} instead of {a[worst]:.4g} radians per token. The method or its numbers differ."
    )


def _without_scaling(layer: _LayerRope) -> tuple[float, ...]:
    pairs = len(layer.inv_freq)
    plain = Rotary(2 * pairs, layer.theta, _FEWEST_TOKENS).inv_freq().tolist()
    return tuple([value if actual else 0.0 for value, actual in zip(plain, layer.inv_freq, strict=True)])


def _theta(a: Sequence[float], b: Sequence[float], theta: float) -> float | None:
    """The base that makes frequencies `b` of `a`, those of base `theta` under any scaling; None: no base does."""
    if len(a) < 3 or not (a[-1] and b[-1]):
        return None
    # pair i of d/2: the ratio of the frequencies is (theta / other)^(2i/d)
    other = theta * (a[-1] / b[-1]) ** (len(a) / (len(a) - 1))
    made = [x * (theta / other) ** (i / len(a)) for i, x in enumerate(a)]
    return float(f"{other:.4g}") if _close(made, b) else None


def _close(one: Sequence[float], other: Sequence[float], tolerance: float = _NEARLY) -> bool:
    return len(one) == len(other) and all(_relative(x, y) <= tolerance for x, y in zip(one, other, strict=True))


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether numbers are the same, or one side is the other one after a cast to a shorter dtype."""
    return _close(one, other, _SAME) or _is_cast(one, other) or _is_cast(other, one)


def _is_cast(values: Sequence[float], cast: Sequence[float]) -> bool:
    """Whether numbers became others by a cast; one between two numbers of a dtype may have been rounded either way."""
    given, made = (torch.tensor(each, dtype=torch.float64) for each in (values, cast))
    return given.shape == made.shape and any(
        torch.equal(made.to(dtype).double(), made)
        and bool(((given - made).abs() <= (1.01 * error * given.abs()).clamp(min=_SMALLEST_FLOAT16)).all())
        for dtype, error in _SHORT_DTYPES.items()
    )


def _relative(expected: float, actual: float) -> float:
    return abs(expected - actual) / max(abs(expected), abs(actual), 1e-30)


def _parameters(layer: _LayerRope) -> str:
    return json.dumps({key: value for key, value in (layer.positions or {}).items() if key != "method"})


def _rounded(numbers: Sequence[float]) -> list[int | None]:
    return [round(_STEPS * math.log(abs(number)) + 0.3) if number else None for number in numbers]
