"""Detect from a checkpoint's weights which pairing they are in.

    print(detect_pairing("path/or/hub-id"))

Training makes rows of W_q and W_k that rotate at similar frequencies similar. For one head, let

    energy[i, j]     = (W_q W_k^T)[i, j]^2
    likeness_p[i, j] = sum over r in DECAY_LENGTHS of 1 / (1 + (r (f_p[i] - f_p[j]))^2),

where f_p[i] is the frequency of dim i under pairing p: the Fourier transform of an attention that falls off as
e^(-distance / r), so that the two dims of a pair have the greatest likeness. The head's score is the correlation of the
energy with the likeness of the half pairing, minus that of the interleaved pairing. Correlations leave out the diagonal
and the means of rows and columns, so that dims with large weights do not count as similar. (The energies of pairs alone
left half-paired models with norms of q and k undecided: neighbouring frequencies are similar too, which raises adjacent
dims of half-paired weights.)

The verdict is the sign of the mean score over heads. It needs `_MIN_SIGMA` standard errors (from the differences
between heads or, if larger, from energies in random order) and `_MIN_LAYER_AGREEMENT` of the layers; else it is None.
`benchmarks/detection.py` measures it, with results in docs/conversion.md. Where a text is given, the loss on it is
measured with the rows in either order as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.meta_conversion import MetaSource, open_checkpoint
from rope_ext_hf.checkpoints.reordering import reordered
from rope_ext_hf.checkpoints.row_layouts import RotaryTensors, evenly_spaced
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError, CorpusError, UnsupportedModelError
from rope_ext_hf.hub import leading_tokens, load_tokenizer, loading
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.attention_interface import evaluating
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import checkpoint_geometry, patch_geometry
from rope_ext_hf.patches.loading import class_to_load, empty_model
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.patches.slots import patched_slots
from rope_ext_hf.rotary.pairing import other_pairing
from rope_ext_hf.terminal import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_LAYERS_READ = 8  # evenly spaced over the depth
_MIN_LAYER_AGREEMENT = 0.75  # some models have a few layers without rotation
_MIN_SIGMA = 4.5  # standard errors; chance alone exceeds them 7 times in a million
_LEANING_SIGMA = 3.0  # standard errors that are worth a remark: Gemma 3 270M in interleaved rows has 4
_DECAY_LENGTHS = (256, 1024, 4096)  # tokens; each alone gives every model above the right sign, and none is best on all
SPAN_TOKENS, SPANS = 256, 8  # tokens of a text read at a time, and how many times
TEXT_CHARACTERS = 20 * SPAN_TOKENS * SPANS  # of a text that are tokenised: a whole book would take long
_TEXT_MARGIN = 0.1  # nats per token by which the better loss must beat the other, and the loss of a uniform guess
_NORM_BESIDE = "hidden_norm"  # an EAGLE head reads embeddings, and after them states of the model with a norm of theirs
_INPUT_NORMS = ("input_layernorm", "ln_attn", "operator_norm", "ln_1", "norm_1", "attn_norm")
_LATENT = dict.fromkeys(("q_b_proj", "indexer.wq_b"), ("q_a_proj", "q_a_layernorm"))
"""Modules that read a latent, and the modules that compute it, where a layer has them."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")


@dataclass(frozen=True)
class _LayerScore:
    """The score of one layer: correlations of energies with the likenesses of either pairing, means over heads."""

    name: str  # the name of its attention module
    heads: int  # query heads
    half: float
    interleaved: float


@dataclass(frozen=True)
class TextLosses:
    """The loss on a text with the weights read as either pairing, in nats per token."""

    half: float
    interleaved: float
    error: float  # standard error of their difference, over spans
    tokens: int  # the predicted tokens
    pairing: str | None  # the clearly better one; None: neither is, or the model cannot predict such text


@dataclass(frozen=True)
class PairingReport(Report):
    """The result of `detect_pairing`.

    Attributes:
        path: the folder or Hub id, or the model's name.
        pairing: "half", "interleaved", or None: undecided.
        confidence: probability that so large a score is not chance.
        score: mean over heads of the correlation for half minus that for interleaved.
        error: standard error of the score.
        layers: the layers that were read.
        stated: the pairing by the config or the family table.
        reason: why it is undecided.
        text: the losses on the text, if one was given.
        consumers: the same of what else rotates: indexers that choose keys, layers that predict further tokens.
    """

    path: str
    pairing: str | None = None
    confidence: float = 0.0
    score: float = 0.0
    error: float = 0.0
    layers: tuple[_LayerScore, ...] = ()
    stated: str | None = None
    reason: str | None = None
    text: TextLosses | None = None
    consumers: tuple[PairingReport, ...] = ()

    @property
    def leaning(self) -> str | None:
        """The pairing that the weights look more like, decided or not; None: neither."""
        if not self.error or abs(self.score) < _LEANING_SIGMA * self.error:
            return None
        return "half" if self.score > 0 else "interleaved"

    @property
    def contradiction(self) -> str | None:
        """How the weights contradict what is stated of them; None: they do not."""
        if None in (self.pairing, self.stated) or self.pairing == self.stated:
            return None
        return f"the config or the model family says {self.stated}"

    def __str__(self) -> str:
        confidence = "above 0.9999" if self.confidence > 0.9999 else f"{self.confidence:.4f}"
        rows = {"because": self.reason, "contradiction": self.contradiction}
        if self.layers:
            rows["score"] = f"{self.score:+.3f} +- {self.error:.3f} (above zero: half; below: interleaved)"
        if self.layers and self.pairing is None and self.text is None:
            rows["next"] = "compare the losses of both pairings on a text of yours: --text FILE (in Python: text=...)"
        lines = [f"{self.path}: " + (f"{self.pairing}, confidence {confidence}" if self.pairing else "undecided")]
        lines += [f"  {name:<16} {text}" for name, text in rows.items() if text]
        width = max((len(layer.name) for layer in self.layers), default=0)
        if self.layers:
            lines.append("  by layer: how well the weights fit each pairing (a correlation)")
        lines += [
            f"  {layer.name:{width}}  half {layer.half:+.3f}  interleaved {layer.interleaved:+.3f}"
            for layer in self.layers
        ]
        if self.text:
            text = self.text
            lines.append(
                f"  perplexity       half {_perplexity(text.half)}, interleaved {_perplexity(text.interleaved)}, "
                f"on {text.tokens:,} tokens of the text: {text.pairing or 'undecided'}"
            )
        for consumer in self.consumers:
            lines += [f"  {line}" for line in str(replace(consumer, layers=consumer.layers[:1])).splitlines()]
        return "\n".join(lines)


def _perplexity(nats: float) -> str:
    return f"{math.exp(min(nats, 700.0)):.4g}"


def detect_pairing(
    path_or_model: str | Path | nn.Module,
    *,
    text: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PairingReport:
    """Determine from its weights which pairing a model is in; "undecided" (None) where they leave it open.

    Args:
        path_or_model: a folder or Hub id (safetensors or .bin, read a tensor at a time; Meta's format too), or a loaded
            model, patched or under PEFT or not.
        text: a few thousand tokens of what the model was trained on: the losses under both pairings are compared as
            well. A folder's model is loaded for that; a loaded one has its weights reordered meanwhile and put back,
            bit for bit, with any adapter it has.
        tokenizer: for the text; default: the one beside the weights.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: as in transformers.

    Raises:
        CheckpointError, FileError: a folder that is missing or contradicts itself; a text for weights in Meta's format,
            or of a family without a class in transformers.
        CorpusError: a text that is too short, or no tokenizer for it.
        UnsupportedModelError: a family that the table does not list.

    Packed weights and adapters alone stay undecided, as does a model that has learned next to nothing.
    """
    if isinstance(path_or_model, nn.Module):
        weights = weights_from_model(path_or_model)
    else:
        source = open_checkpoint(path_or_model, revision=revision, trust_remote_code=trust_remote_code)
        weights = weights_from_source(source, str(path_or_model), trust_remote_code=trust_remote_code)
    report = replace(detect_weights(weights), consumers=consumers(weights))
    return report if text is None else combine_evidence(report, _compare_losses(weights, text, tokenizer))


def detect_weights(weights: _Weights) -> PairingReport:
    """Detect the pairing of queries and keys alone; weights that cannot be read leave it open."""
    report = PairingReport(weights.path, stated=weights.stated)
    try:
        return _of_attentions(weights, report, weights.attentions(), ("q", "k"))
    except CheckpointError as unreadable:
        return replace(report, reason=str(unreadable))


def scores(query: Tensor, key: Tensor, inv_freq: Tensor) -> Tensor:
    """How each head's energies correlate with the likenesses of its dims under half and interleaved: (heads, 2).

    query: (heads, dims, width), the rows that rotate; key: (key heads, dims, width), each for heads / key heads query
    heads, in order; inv_freq: (dims / 2,), radians per token.
    """
    shared = len(query) // len(key)
    grouped = query.reshape(len(key), shared * query.shape[1], -1)
    energy = (grouped @ key.mT).view(*query.shape[:2], -1).square()
    centered = _double_center(energy).flatten(1)
    return nn.functional.normalize(centered, dim=1) @ _likeness(inv_freq).to(centered).T


def _likeness(inv_freq: Tensor) -> Tensor:
    """The likeness of any two dims under the half and the interleaved pairing: (2, dims * dims), each of norm 1."""
    frequencies = torch.stack([torch.cat([inv_freq, inv_freq]), inv_freq.repeat_interleave(2)])  # (2, dims)
    difference = frequencies[:, :, None] - frequencies[:, None]
    likeness = torch.stack([1 / (1 + (difference * length).square()) for length in _DECAY_LENGTHS]).sum(0)
    return nn.functional.normalize(_double_center(likeness).flatten(1), dim=1)


def _double_center(table: Tensor) -> Tensor:
    """Set the diagonal of (..., n, n) to zero and subtract the means of rows and columns."""
    diagonal = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
    for _ in range(4):  # without the diagonal, centring rows shifts the columns a little
        for dim in (-1, -2):
            table = table.masked_fill(diagonal, 0.0)
            table = table - table.sum(dim, keepdim=True) / (table.shape[-1] - 1)
    return table.masked_fill(diagonal, 0.0)


def consumers(weights: _Weights, pairing: str | None = None) -> tuple[PairingReport, ...]:
    """Detect the pairing of what rotates beside the attention, which is stated to be in `pairing`."""
    pairing = pairing or weights.stated
    indexers, kept = weights.indexers()
    try:
        further = weights.attentions(further=True)
    except CheckpointError:  # layers of several kinds, and which of them such a layer is like is unknown
        further = []
    found = (
        ("indexers", indexers, ("index_q", "index_k"), kept or pairing),
        ("layers that predict further tokens", further, ("q", "k"), pairing),
    )
    return tuple(
        _of_attentions(weights, PairingReport(name, stated=stated), attentions, sides)
        for name, attentions, sides, stated in found
        if attentions
    )


def _of_attentions(weights: _Weights, report: PairingReport, names: list[str], sides: tuple[str, str]) -> PairingReport:
    """A report without figures, with those of the queries and keys of these attention modules."""
    inv_freq = weights.rotary.inv_freq()
    layers: list[_LayerScore] = []
    differences: list[Tensor] = []
    try:
        if not names:
            raise CheckpointError(f"no tensor has a name of a rotated module of {weights.tensors.model_type!r}")
        for name in evenly_spaced(names, _MAX_LAYERS_READ):
            correlations = scores(*weights.queries_and_keys(name, sides), inv_freq).cpu().double()
            half, interleaved = correlations.mean(0).tolist()
            layers.append(_LayerScore(name, len(correlations), half, interleaved))
            differences.append(correlations[:, 0] - correlations[:, 1])
    except CheckpointError as unreadable:
        return replace(report, reason=str(unreadable))
    by_head = torch.cat(differences)
    spread = float(by_head.std()) if len(by_head) > 1 else 0.0
    like_half, like_interleaved = _likeness(inv_freq)  # by which energies in random order would score, too
    by_chance = float((like_half - like_interleaved).norm()) / math.sqrt(max(1, len(like_half) - 2 * len(inv_freq)))
    score, error = float(by_head.mean()), max(spread, by_chance) / math.sqrt(len(by_head))
    report = replace(report, score=score, error=error, layers=tuple(layers), confidence=_confidence(score, error))
    agreeing = sum((layer.half - layer.interleaved) * score > 0 for layer in layers)
    if abs(score) < _MIN_SIGMA * error or not error:
        return replace(report, reason="the difference between the pairings may be chance")
    if agreeing < _MIN_LAYER_AGREEMENT * len(layers):
        return replace(report, reason=f"{len(layers) - agreeing} of {len(layers)} layers contradict the others")
    return replace(report, pairing="half" if score > 0 else "interleaved")


def _confidence(difference: float, error: float) -> float:
    """The probability that so large a difference is not chance, for normal errors."""
    return math.erf(abs(difference) / error / math.sqrt(2)) if error else 0.0


def combine_evidence(report: PairingReport, text: TextLosses) -> PairingReport:
    """Join the verdicts of weights and text: either may be undecided, and a contradiction gives None."""
    report = replace(report, text=text)
    if text.pairing is None or text.pairing == report.pairing:
        return report
    if report.pairing is None:
        confidence = _confidence(text.half - text.interleaved, text.error)
        return replace(report, pairing=text.pairing, confidence=confidence, reason=None)
    return replace(
        report, pairing=None, confidence=0.0, reason=f"the weights show {report.pairing}, the text {text.pairing}"
    )


def _compare_losses(weights: _Weights, text: str, tokenizer: PreTrainedTokenizerBase | None) -> TextLosses:
    """Measure the loss on a text with the rows as they are and in the other order."""
    model = weights.load()
    runs = class_pairing(model.config)
    if runs is None:
        raise UnsupportedModelError(f"the family table has no pairing for {weights.tensors.model_type!r}")
    try:
        tokenizer = tokenizer or load_tokenizer(model.name_or_path)
    except CheckpointError as none:
        raise CorpusError(f"no tokenizer for the text beside {weights.path!r}; give one (tokenizer=...)") from none
    ids = tokenizer(text[:TEXT_CHARACTERS], add_special_tokens=False, return_tensors="pt").input_ids[0]
    length = min(SPAN_TOKENS, weights.rotary.trained_length)
    spans: Tensor = ids[: len(ids) // length * length].view(-1, length)[:SPANS]
    if len(spans) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least {2 * length} are needed")
    before = spans.new_tensor(leading_tokens(tokenizer)).expand(len(spans), -1)
    spans, first = torch.cat([before, spans], 1), max(1, before.shape[1])
    with evaluating(model), torch.no_grad():
        losses = {runs: _losses(model, spans, first)}
        with reordered(model, weights.tensors, runs):
            losses[other_pairing(runs)] = _losses(model, spans, first)
    half, interleaved = float(losses["half"].mean()), float(losses["interleaved"].mean())
    differences = losses["half"] - losses["interleaved"]
    error = float(differences.std()) / math.sqrt(len(differences))
    clear = abs(half - interleaved) >= max(_TEXT_MARGIN, _MIN_SIGMA * error)
    uniform = math.log(model.get_input_embeddings().weight.shape[0])
    learned = min(half, interleaved) <= uniform - _TEXT_MARGIN
    better = "half" if half < interleaved else "interleaved"
    return TextLosses(half, interleaved, error, spans[:, first:].numel(), better if clear and learned else None)


def _losses(model: PreTrainedModel, spans: Tensor, first: int) -> Tensor:
    """Nats per token of each span (spans, tokens), from the token at `first` on: (spans,), float64."""
    device = model.get_input_embeddings().weight.device
    with fixed_length(model, spans.shape[1]) if patched_slots(model) else nullcontext():
        logits = (model(input_ids=span[None].to(device), use_cache=False).logits[0, first - 1 : -1] for span in spans)
        pairs = zip(logits, spans, strict=True)
        losses = [nn.functional.cross_entropy(made.float(), ids[first:].to(made.device)) for made, ids in pairs]
    return torch.stack([loss.cpu().double() for loss in losses])


# --- the weights of a loaded model, a folder, or a folder in Meta's format --------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """The weights of a model, read one tensor at a time."""

    path: str  # how the report names them
    tensors: RotaryTensors
    rotary: Rotary
    norms: dict[str, nn.Module]  # one of each kind, by the last part of its name, to be called
    shapes: Mapping[str, Sequence[int]]  # the shape of every tensor, by its name
    read: Callable[[str], Tensor]  # returns a tensor, by its name
    stated: str | None  # the pairing by the config or the family table
    load: Callable[[], PreTrainedModel]  # returns the model itself

    def attentions(self, *, further: bool = False) -> list[str]:
        """Attention modules that rotate as many dims as `rotary`, by layer; `further`: of layers no config counts."""
        parts = filter(None, (self.tensors.split_name(name, further=further) for name in self.shapes))
        names = {".".join(filter(None, (prefix, attention))) for prefix, attention, _ in parts}
        alike = []
        for name in names:
            layouts = self.tensors.layouts_in(name).values()
            if any(block.rotary == self.rotary.dim for layout in layouts for block in layout.blocks):
                alike.append(name)
        numbered = {part: part.zfill(9) for name in alike for part in name.split(".") if part.isdigit()}  # 10 after 2
        return sorted(alike, key=lambda name: [(p in numbered, numbered.get(p, p)) for p in name.split(".")])

    def indexers(self) -> tuple[list[str], str | None]:
        """Return the names of the attention modules with an indexer, and the pairing that it keeps; None: theirs."""
        held = {name.rpartition(".")[0].removesuffix(".base_layer") for name in self.shapes}
        found: list[tuple[str, str | None]] = []
        for name in self.attentions():
            for module, layout in self.tensors.layouts_in(name).items():
                stored = any(f"{name}.{each}" in held for each in self.tensors.stored_names(module))
                if stored and any(block.side == "index_q" for block in layout.blocks) and "norm" not in module:
                    found.append((name, layout.pairing))
        return [name for name, _ in found], next((pairing for _, pairing in found), None)

    def queries_and_keys(self, attention: str, sides: tuple[str, str] = ("q", "k")) -> tuple[Tensor, Tensor]:
        """Return the rotated rows of one attention module: (heads, dims, width) and (key heads, dims, width), float32.

        The norms before and after the projections are multiplied in, so that W_q W_k^T is the bilinear form of the
        scores. Where queries read a latent, its projection is multiplied into the keys. `sides` may be those of an
        indexer, ("index_q", "index_k").
        """
        rows: dict[str, Tensor] = {}
        gains: dict[str, Tensor] = {}
        latent: tuple[str, str] | None = None
        for module, layout in self.tensors.layouts_in(attention).items():
            if not any(block.side in sides for block in layout.blocks):
                continue
            names = (f"{attention}.{name}" for name in self.tensors.stored_names(module))
            weight = next((weight for name in names if (weight := self._weight(name)) is not None), None)
            if weight is None:
                continue
            is_norm = weight.numel() == layout.rows
            if is_norm:
                weight = self._gain(module, weight, layout.rows).reshape(layout.rows, 1)
            else:
                latent = _LATENT.get(module, latent)
            if weight.ndim != 2:
                raise CheckpointError(f"a projection of queries or keys has shape {tuple(weight.shape)}; {_DISAGREE}")
            for block, heads in layout.heads(weight):
                if block.rotary:
                    (gains if is_norm else rows)[block.side] = heads.narrow(1, block.start, block.rotary)
        if not set(sides) <= set(rows):
            raise CheckpointError(
                f"{attention!r} has no readable query and key weights: they are packed, or of an adapter"
            )
        query, key = (rows[side] * gains.get(side, 1.0) for side in sides)
        layer = attention.rpartition(".")[0]
        beside = self._weight(f"{layer}.{_NORM_BESIDE}")
        for name in _INPUT_NORMS:
            weight = self._weight(f"{layer}.{name}")
            if weight is not None:
                gain = self._gain(name, weight, key.shape[-1] - (0 if beside is None else beside.numel()))
                key = key * (gain if beside is None else torch.cat((gain, beside))).square()
        if latent is not None and ("q" in sides or query.shape[-1] != key.shape[-1]):  # some indexers read no latent
            down, norm = (self._weight(f"{attention}.{name}") for name in latent)
            if down is None or norm is None:
                missing = latent[0] if down is None else latent[1]
                raise CheckpointError(f"'{attention}.{missing}.weight' is missing")
            if down.ndim != 2 or down.shape[1] != key.shape[-1]:
                raise CheckpointError(f"{latent[0]!r} of {attention!r} has shape {tuple(down.shape)}; {_DISAGREE}")
            key = key @ down.mT * self._gain(latent[1], norm, len(down))
        if key.shape[-1] != query.shape[-1]:
            raise CheckpointError(
                f"queries and keys of {attention!r} read {query.shape[-1]} and {key.shape[-1]} inputs; {_DISAGREE}"
            )
        if not (query.isfinite().all() and key.isfinite().all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _weight(self, module: str) -> Tensor | None:
        """Read the weight of a module as float32, also if an adapter wraps it or it is quantised with a scale."""
        path = next((p for p in (module, f"{module}.base_layer") if f"{p}.weight" in self.shapes), None)
        if path is None:
            return None
        weight = self.read(f"{path}.weight")
        scale = next((self.read(name) for s in _SCALES if (name := f"{path}.{s}") in self.shapes), None)
        if is_traceable_wrapper_subclass(weight):
            kind = type(weight).__name__
            raise CheckpointError(
                f"'{path}.weight' is packed or sharded ({kind}); give the folder instead of the model"
            )
        if weight.is_meta:
            raise CheckpointError(f"'{path}.weight' is offloaded to disk; give the folder instead of the model")
        if not weight.is_floating_point() and (weight.dtype != torch.int8 or scale is None):
            raise CheckpointError(f"'{path}.weight' is packed into {weight.dtype}")
        self.tensors.find(f"{path}.weight", weight.shape)  # raises if config and weights disagree
        return weight.float() if scale is None else _scaled(weight.float(), scale.float())

    def _gain(self, name: str, weight: Tensor, size: int) -> Tensor:
        """What a norm with this weight multiplies each dim by: the weight, or in some families (Gemma) 1 + weight."""
        if weight.numel() != size:
            raise CheckpointError(f"the norm {name!r} has a weight of shape {tuple(weight.shape)}; {_DISAGREE}")
        norm = self.norms.get(name)
        if norm is None:
            return weight
        signs = 1.0 - 2.0 * (torch.arange(size, device=weight.device) % 2).view(weight.shape)
        parameters = {key: torch.zeros(p.shape, device=weight.device) for key, p in norm.named_parameters()}
        try:
            gain: Tensor = torch.func.functional_call(norm, parameters | {"weight": weight}, (signs,)) * signs
        except RuntimeError as error:  # a norm of a fixed shape
            raise CheckpointError(
                f"the norm {name!r} has a weight of shape {tuple(weight.shape)}; {_DISAGREE}"
            ) from error
        return gain


_DISAGREE = "config and weights disagree"


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply a weight by one scale, one per row, or one per block of rows and columns."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scale


def weights_from_model(model: Any) -> _Weights:
    rotary = checkpoint_geometry(model)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return _Weights(
        path=model.name_or_path or type(model).__name__,
        tensors=RotaryTensors(model.config, rotary.dim),
        rotary=rotary,
        norms=_norms(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        stated=getattr(model.config, PAIRING_KEY, None) or class_pairing(model.config),
        load=lambda: model,
    )


def weights_from_source(source: Source | MetaSource, path: str, *, trust_remote_code: bool = False) -> _Weights:
    if isinstance(source, Source):
        model, rotary, view, stated, tensors = source.model, source.rotary, source.view, source.pairing, source.tensors
    else:
        model = empty_model(source.llama.to_config("interleaved", torch.float32, source.llama.context_length()))
        rotary, view, stated = patch_geometry(model), source.view(), "interleaved"
        tensors = RotaryTensors(model.config, rotary.dim)

    def load() -> PreTrainedModel:
        if not isinstance(source, Source):
            raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")
        if model is None:
            model_type = tensors.model_type
            raise CheckpointError(f"transformers has no class of {model_type!r} that could read a text; give no text")
        settings = {"config": source.config, "dtype": "auto", "trust_remote_code": trust_remote_code}
        with loading(f"the model in {path!r}"):
            loaded: PreTrainedModel = class_to_load(source.config).from_pretrained(source.folder, **settings)
        return loaded

    return _Weights(
        path=path,
        tensors=tensors,
        rotary=rotary,
        norms={} if model is None else _norms(model),
        shapes={name: info.shape for name, info in view.tensors.items()},
        read=view.read,
        stated=stated,
        load=load,
    )


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}
