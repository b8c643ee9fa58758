"""The result of detecting a pairing: scores by layer, losses on a text, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rope_ext_hf.terminal import Report

_LEANING_SIGMA = 3.0
"""The number of standard errors above which a score is worth a remark: Gemma 3 270M in interleaved rows has 4."""


@dataclass(frozen=True)
class LayerScore:
    """The score of one layer: how well its queries and keys fit the half and the interleaved pairing.

    Attributes:
        name: the name of its attention module.
        heads: the number of query heads.
        half, interleaved: the correlation of energies with the likenesses under each pairing, a mean over heads; see
            `rope_ext_hf.checkpoints.pairing.detection`.
    """

    name: str
    heads: int
    half: float
    interleaved: float


@dataclass(frozen=True)
class TextLosses:
    """The losses on a text with the weights read as either pairing, in nats per token.

    Attributes:
        half, interleaved: the loss under each pairing.
        error: the standard error of the difference between the two, over spans of the text.
        tokens: the number of predicted tokens.
        pairing: the pairing that is clearly better; None: neither is, or the model cannot predict such text.
    """

    half: float
    interleaved: float
    error: float
    tokens: int
    pairing: str | None

    def __str__(self) -> str:
        half, interleaved = (f"{math.exp(min(nats, 700.0)):.4g}" for nats in (self.half, self.interleaved))
        return (
            f"half {half}, interleaved {interleaved}, on {self.tokens:,} tokens of the text: "
            f"{self.pairing or 'undecided'}"
        )


@dataclass(frozen=True)
class PairingReport(Report):
    """The result of `detect_pairing`.

    Attributes:
        path: the folder or Hub id, or the model's name.
        pairing: the verdict: "half", "interleaved", or None if it is undecided.
        confidence: probability that so large a score is not chance.
        score: mean over heads of the correlation for half minus that for interleaved.
        error: standard error of the score.
        layers: the layers that were read.
        stated: the pairing by the config or the family table.
        reason: why the pairing is undecided.
        text: the losses on the text, if one was given.
        remedy: what to do if the config or the model family contradicts the weights, with the call to type; else None.
        consumers: a report of this kind for everything else that rotates: indexers that choose keys, and layers that
            predict further tokens.
    """

    path: str
    pairing: str | None = None
    confidence: float = 0.0
    score: float = 0.0
    error: float = 0.0
    layers: tuple[LayerScore, ...] = ()
    stated: str | None = None
    reason: str | None = None
    text: TextLosses | None = None
    remedy: str | None = None
    consumers: tuple[PairingReport, ...] = ()

    @property
    def leaning(self) -> str | None:
        """The pairing that the weights look more like, even if that is too little for a verdict; None: neither."""
        if not self.error or abs(self.score) < _LEANING_SIGMA * self.error:
            return None
        return "half" if self.score > 0 else "interleaved"

    @property
    def contradiction(self) -> str | None:
        """A clause that says how the config contradicts the weights; None: it does not."""
        if None in (self.pairing, self.stated) or self.pairing == self.stated:
            return None
        return f"the config or the model family says {self.stated}"

    def __str__(self) -> str:
        verdict = "undecided"
        if self.pairing is not None:
            confidence = "above 0.9999" if self.confidence > 0.9999 else f"{self.confidence:.4f}"
            verdict = f"{self.pairing}, confidence {confidence}"
        rows = {"because": self.reason, "contradiction": self.contradiction, "next": self.remedy}
        if self.layers:
            rows["score"] = f"{self.score:+.3f} +- {self.error:.3f} (above zero: half; below: interleaved)"
        if self.layers and self.pairing is None and self.text is None:
            rows["next"] = "compare the losses of both pairings on a text of yours: --text FILE (in Python: text=...)"
        lines = [f"{self.path}: {verdict}"]
        lines += [f"  {name:<16} {text}" for name, text in rows.items() if text]
        if self.layers:
            lines.append("  by layer: how well the weights fit each pairing (a correlation)")
            width = max(len(layer.name) for layer in self.layers)
            lines += [
                f"  {layer.name:{width}}  half {layer.half:+.3f}  interleaved {layer.interleaved:+.3f}"
                for layer in self.layers
            ]
        if self.text is not None:
            lines.append(f"  perplexity       {self.text}")
        for consumer in self.consumers:
            with_one_layer = replace(consumer, layers=consumer.layers[:1])
            lines += [f"  {line}" for line in str(with_one_layer).splitlines()]
        return "\n".join(lines)
