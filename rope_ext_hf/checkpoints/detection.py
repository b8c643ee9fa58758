"""Which pairing a checkpoint's weights are in, told from the weights alone; or that they do not tell.

    print(detect_pairing("path/or/hub-id"))

Training makes the rows of W_q and W_k that turn at like frequencies alike: in W_q W_k^T of one head, the entries that
join the two dims of a turning pair have several times the energy (square) of others. But neighbouring frequencies are
alike too, which raises adjacent dims in half-paired weights. So a reading is judged by all entries, not by those of its
pairs alone: it gives every dim a frequency, hence every two dims a likeness, 1 for a pair, and a head's score is how
much better the energies go with the likenesses of the half reading than with those of the interleaved one (correlations
off the diagonal, less the means of rows and columns, so that dims with large weights do not count as alike).

The verdict is the mean score over heads against its standard error, by how much heads differ or, if that is more, by
how much entries in any order would. It takes `SURE` of these and `AGREE` of the layers; else it cannot be told.

Measured on bytes of Python's standard library, models of 1.6 to 1.8 million parameters after 9 minutes of training
(`benchmarks/detection.py`), score and standard error, all said rightly, by a text too; 555 random initialisations of 20
families had at most 3.4 standard errors:

    model                          half paired        interleaved
    bundled (3.8M, 36 minutes)     0.099 +- 0.004    -0.100 +- 0.012
    qwen2, biases                  0.235 +- 0.014    -0.235 +- 0.017
    qwen3, norms of q and k        0.173 +- 0.009    -0.189 +- 0.008
    glm, half of a head rotates    0.132 +- 0.013    -0.129 +- 0.022
    cohere, norms of q and k       0.075 +- 0.010    -0.167 +- 0.011

The energies of pairs alone, half over interleaved, left half-paired qwen3 (log ratio 0.13 +- 0.13) and cohere
(0.01 +- 0.09) undecided.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.detection_sources import LAYERS, _of_folder, _of_model, _Weights
from rope_ext_hf.checkpoints.detection_text import TextLosses, _by_text
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.rotary.pairing import PAIRINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AGREE", "REACH", "SURE", "LayerScore", "PairingReport", "detect_pairing", "scores"]

SURE = 4.5  # standard errors; chance alone goes beyond that seven times in a million
AGREE = 0.75  # of the layers; some models have a few without rotation
REACH = (256, 1024, 4096)  # tokens; each alone has the right sign on every model above, and none is best on all


@dataclass(frozen=True)
class LayerScore:
    """What one layer says.

    Attributes:
        name: of its attention module.
        heads: of its queries.
        half, interleaved: how the energies go with the likenesses of either reading, correlations, means over heads.
    """

    name: str
    heads: int
    half: float
    interleaved: float


@dataclass(frozen=True)
class PairingReport:
    """What `detect_pairing` found.

    Attributes:
        pairing: "half", "interleaved", or None: cannot tell.
        confidence: that the difference between the readings is no chance.
        score: mean over heads, half less interleaved.
        error: its standard error.
        layers: those that were looked at.
        stated: the pairing that the config or the family says.
        reason: why it cannot be told.
        text: what the text said, if one was given.
    """

    path: str
    pairing: str | None
    confidence: float
    score: float
    error: float
    layers: tuple[LayerScore, ...]
    stated: str | None
    reason: str | None = None
    text: TextLosses | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        sure = "above 0.9999" if self.confidence > 0.9999 else f"{self.confidence:.4f}"
        lines = [f"{self.path}: " + (f"{self.pairing}, confidence {sure}" if self.pairing else "cannot tell")]
        if self.reason:
            lines.append(f"  because          {self.reason}")
        if self.pairing and self.stated and self.stated != self.pairing:
            lines.append(f"  contradiction    by its config or family it is {self.stated}")
        if self.layers:
            lines.append(
                f"  score            {self.score:+.3f} +- {self.error:.3f} (half above, interleaved below zero)"
            )
            width = max(len(layer.name) for layer in self.layers)
            lines += [
                f"  {layer.name:{width}}  half {layer.half:+.3f}  interleaved {layer.interleaved:+.3f}"
                for layer in self.layers
            ]
        if self.text:
            text = self.text
            lines.append(
                f"  loss on text     half {text.half:.3f}, interleaved {text.interleaved:.3f} nats per token, "
                f"difference +- {text.error:.3f}, {text.tokens:,} tokens: {text.pairing or 'cannot tell'}"
            )
        return "\n".join(lines)


def detect_pairing(
    path_or_model: str | Path | nn.Module,
    *,
    text: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PairingReport:
    """Say from its weights which pairing a model is in; "cannot tell" (None) where they do not clearly say.

    Args:
        path_or_model: a folder or Hub id (safetensors or .bin, read a tensor at a time; Meta's format too), or a loaded
            model, patched or under PEFT or not.
        text: a few thousand tokens of what the model was trained on: the losses under both readings are compared as
            well. A folder's model is loaded for that; a loaded one has its weights reordered meanwhile and put back,
            bit for bit, with any adapter it has.
        tokenizer: for the text; default: the one beside the weights.

    Raises:
        CheckpointError: a folder that is missing or contradicts itself; a text for weights in Meta's format, or of a
            family that transformers has no class of.
        CorpusError: a text that is too short, or no tokenizer to read it with.
        UnsupportedModelError: a family that the table of what rotates says nothing of.

    Weights that are packed, or an adapter by itself, do not tell; nor does a model that has learned next to nothing.
    """
    if isinstance(path_or_model, nn.Module):
        weights = _of_model(path_or_model)
    else:
        weights = _of_folder(path_or_model, revision, trust_remote_code)
    report = _by_weights(weights)
    if text is None:
        return report
    return _with_text(report, _by_text(weights, text, tokenizer))


def scores(query: Tensor, key: Tensor, inv_freq: Tensor) -> Tensor:
    """How each head's energies go with the likenesses of its dims under either reading.

    Args:
        query: (heads, dims, width), rows that rotate.
        key: (key heads, dims, width); each is of as many query heads, in order.
        inv_freq: (dims / 2,).

    Returns:
        (heads, 2): correlations with the half and with the interleaved reading, over all entries off the diagonal.
    """
    shared = len(query) // len(key)
    grouped = query.reshape(len(key), shared * query.shape[1], -1)
    energy = (grouped @ key.mT).view(*query.shape[:2], -1).square()
    found = _centred(energy).flatten(1)
    return nn.functional.normalize(found, dim=1) @ _expected(inv_freq).to(found).T


def _expected(inv_freq: Tensor) -> Tensor:
    """How alike two dims are under the half and the interleaved reading, (2, dims * dims), each of length 1.

    Two frequencies are as alike as their turns stay together where attention falls off as e^(-distance / reach).
    """
    of_dims = torch.stack([torch.cat([inv_freq, inv_freq]), inv_freq.repeat_interleave(2)])
    apart = of_dims[:, :, None] - of_dims[:, None]
    alike = torch.stack([1 / (1 + (apart * reach).square()) for reach in REACH]).sum(0)
    return nn.functional.normalize(_centred(alike).flatten(1), dim=1)


def _chance(inv_freq: Tensor) -> float:
    """The standard deviation of one head's score if its entries stood in any order."""
    half, interleaved = _expected(inv_freq)
    return float((half - interleaved).norm()) / math.sqrt(max(1, len(half) - 2 * len(inv_freq)))


def _centred(table: Tensor) -> Tensor:
    """(..., n, n) without its diagonal and without what its rows and columns have as a whole."""
    diagonal = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
    for _ in range(4):  # without the diagonal, taking out rows brings a little back into columns
        for dim in (-1, -2):
            table = table.masked_fill(diagonal, 0.0)
            table = table - table.sum(dim, keepdim=True) / (table.shape[-1] - 1)
    return table.masked_fill(diagonal, 0.0)


def _by_weights(weights: _Weights) -> PairingReport:
    names = weights.attentions()
    chosen = [names[i] for i in _evenly(len(names), LAYERS)]
    inv_freq = weights.rotary.inv_freq()
    layers: list[LayerScore] = []
    heads: list[Tensor] = []
    report = PairingReport(weights.path, None, 0.0, 0.0, 0.0, (), weights.stated)
    try:
        if not names:
            raise CheckpointError(f"no tensor rotates by the names of {weights.rows.model_type!r}")
        for name in chosen:
            found = scores(*weights.queries_and_keys(name), inv_freq).cpu().double()
            half, interleaved = found.mean(0).tolist()
            layers.append(LayerScore(name, len(found), half, interleaved))
            heads.append(found[:, 0] - found[:, 1])
    except CheckpointError as unread:
        return replace(report, reason=str(unread))
    every = torch.cat(heads)
    spread = float(every.std()) if len(every) > 1 else 0.0
    score, error = float(every.mean()), max(spread, _chance(inv_freq)) / math.sqrt(len(every))
    report = replace(report, score=score, error=error, layers=tuple(layers), confidence=_confidence(score, error))
    agree = sum((layer.half - layer.interleaved) * score > 0 for layer in layers)
    if abs(score) < SURE * error or not error:
        return replace(report, reason="chance could make such a difference between the readings")
    if agree < AGREE * len(layers):
        return replace(report, reason=f"{len(layers) - agree} of {len(layers)} layers say the contrary of the others")
    return replace(report, pairing="half" if score > 0 else "interleaved")


def _evenly(count: int, most: int) -> list[int]:
    """At most so many of 0..count - 1, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _confidence(difference: float, error: float) -> float:
    """That so large a difference, either way, is no chance; errors are taken to be normal."""
    return math.erf(abs(difference) / error / math.sqrt(2)) if error else 0.0


# --- what a text says ----------------------------------------------------------------------------------------------


def _with_text(report: PairingReport, text: TextLosses) -> PairingReport:
    """The verdict of both; each may leave it to the other, and where they contradict each other there is none."""
    report = replace(report, text=text)
    if text.pairing is None or text.pairing == report.pairing:
        return report
    if report.pairing is None:
        certainty = _confidence(text.half - text.interleaved, text.error)
        return replace(report, pairing=text.pairing, confidence=certainty, reason=None)
    return replace(
        report, pairing=None, confidence=0.0, reason=f"the weights say {report.pairing}, the text says {text.pairing}"
    )


def _other(pairing: str) -> str:
    return next(name for name in PAIRINGS if name != pairing)
