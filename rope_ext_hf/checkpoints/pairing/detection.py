"""Detect from a checkpoint's weights which pairing they are in.

    print(detect_pairing("path/or/hub-id"))

`pairing_scores` scores the queries and keys of a few layers (`query_key_weights`). The verdict is the sign of the mean
score over heads; it needs `_MIN_SIGMA` standard errors and `_MIN_LAYER_AGREEMENT` of the layers, else it is None. If a
text is given, the loss on it is measured with the rows in either order as well (`text_losses`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rope_ext_hf.checkpoints.opening import open_checkpoint
from rope_ext_hf.checkpoints.pairing.pairing_report import LayerScore, PairingReport, TextLosses
from rope_ext_hf.checkpoints.pairing.query_key_weights import Numbers, RotatedWeights
from rope_ext_hf.checkpoints.pairing.right_calls import Call, folder_call, model_call, remedy
from rope_ext_hf.checkpoints.pairing.source_weights import weights_from_source
from rope_ext_hf.checkpoints.rows.head_blocks import evenly_spaced
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.model_files import model_file

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

F = TypeVar("F", bound=NDArray[np.floating[Any]])

_MAX_LAYERS_READ = 8  # evenly spaced over the depth
_MIN_LAYER_AGREEMENT = 0.75  # some models have a few layers without rotation
_MIN_SIGMA = 4.5  # standard errors; chance alone exceeds them 7 times in a million


def detect_pairing(
    path_or_model: str | Path | nn.Module,
    *,
    text: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PairingReport:
    """Determine from its weights which pairing a model is in; "undecided" (None) where they leave it open.

    Packed weights and adapters alone stay undecided, and so does a model that has learned next to nothing.

    Args:
        path_or_model: a folder or Hub id (safetensors or .bin, read a tensor at a time; Meta's format too), a GGUF file
            (which transformers loads, with its rows in their order), or a loaded model, patched or under PEFT or not.
        text: a few thousand tokens of text like that which the model was trained on: the losses under both pairings are
            compared as well. A folder's model is loaded for that; a loaded model has its weights reordered meanwhile
            and put back, bit for bit, with any adapter that it has.
        tokenizer: for the text; default: the one beside the weights.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: as in transformers.

    Raises:
        CheckpointError, FileError: a folder that is missing or contradicts itself; a text for weights in Meta's format,
            or of a family without a class in transformers.
        CorpusError: a text that is too short, or no tokenizer for it.
        UnsupportedModelError: a family that the table does not list.
    """
    has_config = True
    call: Call | None = None  # the rows in a model file are not converted where they are
    if hasattr(path_or_model, "named_parameters"):
        from rope_ext_hf.checkpoints.pairing.model_weights import weights_from_model

        weights, call = weights_from_model(path_or_model), model_call
    elif model_file(path_or_model) is not None:
        from rope_ext_hf.checkpoints.pairing.model_weights import weights_from_model
        from rope_ext_hf.hub import load_model, load_tokenizer

        weights = replace(weights_from_model(load_model(path_or_model, dtype="float32")), path=str(path_or_model))
        if text is not None and tokenizer is None:
            tokenizer = load_tokenizer(path_or_model)
    else:
        call = folder_call(path_or_model, "NEW", revision)
        source = open_checkpoint(path_or_model, revision=revision, trust_remote_code=trust_remote_code)
        has_config = isinstance(source, Source)
        weights = weights_from_source(source, str(path_or_model), trust_remote_code=trust_remote_code)
    report = replace(detect_in_weights(weights), consumers=detect_in_consumers(weights))
    if text is not None:
        from rope_ext_hf.checkpoints.pairing.text_losses import compare_losses

        report = combine_evidence(report, compare_losses(weights, text, tokenizer))
    if call is None:
        return report
    return replace(report, remedy=remedy(report, weights.runs, call, has_config=has_config))


def detect_in_weights(weights: RotatedWeights) -> PairingReport:
    """Detect the pairing of the queries and keys in a model's own layers.

    The report is undecided if they cannot be read.
    """
    report = PairingReport(weights.path, stated=weights.stated)
    try:
        return _detect(weights, report, weights.attentions(), ("q", "k"))
    except CheckpointError as error:
        return replace(report, reason=str(error))


def detect_in_consumers(weights: RotatedWeights, stated: str | None = None) -> tuple[PairingReport, ...]:
    """Detect the pairing of indexers, and of layers that predict further tokens, apart from that of the model itself.

    Args:
        weights: the weights of the model.
        stated: the pairing that the weights are said to be in; default: that of the config or the family table.
    """
    stated = stated or weights.stated
    reports = []
    indexed, own_pairing = weights.indexers()
    if indexed:
        report = PairingReport("indexers", stated=own_pairing or stated)
        reports.append(_detect(weights, report, indexed, ("index_q", "index_k")))
    try:
        further = weights.attentions(further=True)
    except CheckpointError:  # the model's layers are of several kinds, and the kind of a further layer is unknown
        further = []
    if further:
        report = PairingReport("layers that predict further tokens", stated=stated)
        reports.append(_detect(weights, report, further, ("q", "k")))
    return tuple(reports)


def combine_evidence(report: PairingReport, text: TextLosses) -> PairingReport:
    """Return the report with the losses on a text added, and a verdict by both the weights and the text.

    If one of the two is undecided, the other decides. If they contradict each other, the verdict is None.
    """
    report = replace(report, text=text)
    if text.pairing is None or text.pairing == report.pairing:
        return report
    if report.pairing is None:
        sure = _confidence(text.half - text.interleaved, text.error)
        return replace(report, pairing=text.pairing, confidence=sure, reason=None)
    return replace(
        report, pairing=None, confidence=0.0, reason=f"the weights show {report.pairing}, the text {text.pairing}"
    )


def _detect(
    weights: RotatedWeights, report: PairingReport, attentions: list[str], sides: tuple[str, str]
) -> PairingReport:
    """Return the report with the scores of these attention modules added, and with a verdict.

    Args:
        weights: the weights of the model.
        report: a report without scores.
        attentions: names of attention modules.
        sides: the kinds of rows that are compared, see `RotatedWeights.queries_and_keys`.
    """
    layers: list[LayerScore] = []
    scores: list[NDArray[np.float64]] = []
    try:
        if not attentions:
            raise CheckpointError(f"no tensor has a name of a rotated module of {weights.tensors.model_type!r}")
        for name in evenly_spaced(attentions, _MAX_LAYERS_READ):
            correlations = _correlations(weights, name, sides)
            half, interleaved = correlations.mean(0).tolist()
            layers.append(LayerScore(name, len(correlations), half, interleaved))
            scores.append(correlations[:, 0] - correlations[:, 1])
    except CheckpointError as unreadable:
        return replace(report, reason=str(unreadable))
    score, error = _mean_score(np.concatenate(scores), weights.inv_freq)
    report = replace(report, score=score, error=error, layers=tuple(layers), confidence=_confidence(score, error))
    if abs(score) < _MIN_SIGMA * error or not error:
        return replace(report, reason="the difference between the pairings may be chance")
    agreeing = sum((layer.half - layer.interleaved) * score > 0 for layer in layers)
    if agreeing < _MIN_LAYER_AGREEMENT * len(layers):
        return replace(report, reason=f"{len(layers) - agreeing} of {len(layers)} layers contradict the others")
    return replace(report, pairing="half" if score > 0 else "interleaved")


def _correlations(weights: RotatedWeights, attention: str, sides: tuple[str, str]) -> NDArray[np.float64]:
    """Return the correlations of each head of one attention module, whose weights are in memory meanwhile."""
    with np.errstate(over="ignore", invalid="ignore"):  # weights may be of any size
        query, key = weights.queries_and_keys(attention, sides)
        return pairing_correlations(query, key, weights.inv_freq).astype(np.float64)


# --- scores of the two pairings -----------------------------------------------------------------------------------


_DECAY_LENGTHS = (256, 1024, 4096)  # tokens; each alone gives the right sign for every benchmarked model


def pairing_correlations(query: Numbers, key: Numbers, inv_freq: NDArray[np.float64]) -> Numbers:
    """Correlate the energies of each head with the likenesses of its dims under the half and the interleaved pairing.

    Args:
        query: (heads, dims, width), the rows of W_q that rotate.
        key: (key heads, dims, width), those of W_k; each key head belongs to heads / key heads query heads, in order.
        inv_freq: (dims / 2,), radians per token.

    Returns:
        (heads, 2), the correlations with the half and the interleaved pairing.
    """
    group = len(query) // len(key)
    grouped = query.reshape(len(key), group * query.shape[1], -1)
    energy = np.square((grouped @ key.swapaxes(1, 2)).reshape(*query.shape[:2], -1))
    centered = _double_center(energy).reshape(len(energy), -1)
    correlations: Numbers = _normalized(centered) @ _likenesses(inv_freq).astype(centered.dtype).T
    return correlations


def _mean_score(by_head: NDArray[np.float64], inv_freq: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of the scores of all heads, and its standard error.

    The error is computed from the differences between heads; or, if that is larger, it is the one that energies in
    random order would give, which correlate with either likeness by chance.

    Args:
        by_head: (heads,), the score of each head.
        inv_freq: (dims / 2,), radians per token.
    """
    between_heads = float(by_head.std(ddof=1)) if len(by_head) > 1 else 0.0
    like_half, like_interleaved = _likenesses(inv_freq)
    independent = max(1, len(like_half) - 2 * len(inv_freq))  # entries of an energy without its diagonal
    by_chance = float(np.linalg.norm(like_half - like_interleaved)) / math.sqrt(independent)
    return float(by_head.mean()), max(between_heads, by_chance) / math.sqrt(len(by_head))


def _confidence(difference: float, error: float) -> float:
    """Return the probability that a difference of this size is not chance, if its error is normally distributed."""
    return math.erf(abs(difference) / error / math.sqrt(2)) if error else 0.0


def _likenesses(inv_freq: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the likeness of any two dims of a head under the half and under the interleaved pairing.

    The result is (2, dims * dims), each row of norm 1.
    """
    frequencies = np.stack([np.concatenate([inv_freq, inv_freq]), inv_freq.repeat(2)])  # (2, dims)
    difference = frequencies[:, :, None] - frequencies[:, None]
    likeness = sum(1 / (1 + np.square(difference * length)) for length in _DECAY_LENGTHS)
    return _normalized(_double_center(likeness).reshape(2, -1))


def _double_center(table: F) -> F:
    """Return square tables (..., n, n) with a zero diagonal and the means of rows and columns subtracted."""
    diagonal = np.arange(table.shape[-1])
    table = table.copy()
    for _ in range(4):  # without the diagonal, centring rows shifts the columns a little
        for axis in (-1, -2):
            table[..., diagonal, diagonal] = 0
            table -= table.sum(axis, keepdims=True) / (table.shape[-1] - 1)
    table[..., diagonal, diagonal] = 0
    return table


def _normalized(rows: F) -> F:
    """Return rows divided by their norms; a row of zeros stays."""
    normalized: F = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return normalized
