"""Comparison of a server's log-probabilities with those of the model here, as measured and with each likely mistake.

The model as measured, and with each mistake, is a "configuration". A configuration is excluded at the first length
where its log-probabilities are further from the server's than those of the best one, by more than chance explains. The
difference that then remains must be due to rounding: `roundings` says how much the rounding of each dtype explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.tools.servers.answers import Collected, Prompt
from rope_ext_hf.tools.servers.mistakes import AS_MEASURED, Configuration, slightly_wrong
from rope_ext_hf.tools.servers.roundings import Rounding, StatedBits, rounded_keys, roundings
from rope_ext_hf.tools.servers.server_report import ServerReport

_CERTAIN = 6.0  # standard errors by which a configuration must fit worse than another to be excluded
_MARGIN = 3.0  # a server sums in another order, so that it may differ by this many times the rounding here
_RESOLUTION = 1e-6  # of a log-probability in float32, in nats


@dataclass(frozen=True)
class Comparison:
    """A comparison of a server's log-probabilities with the model here; holds everything that it needs but the model.

    Attributes:
        url: the server's address, for the report.
        collected: the server's answers.
        bits: the number formats that the server is said to use.
        progress: called with two numbers of tokens: in the prompts computed here so far, and in all prompts.
    """

    url: str
    collected: Collected
    bits: StatedBits
    progress: Callable[[int, int], object]

    def report(self, model: Any, configurations: Mapping[str, Configuration]) -> ServerReport:
        """Compare the server's log-probabilities with those of the model in each configuration, and return the report.

        A configuration is the model as measured, or with a mistake that a server may make. The model's weights are
        overwritten.

        Raises:
            ServingError: the answers are about tokens outside the model's vocabulary.
        """
        patches = active_patches(model)
        answers = _Answers(self.collected.prompts, model)
        elimination = self._eliminate(answers, configurations)
        report = ServerReport(
            url=str(self.url),
            server=self.collected.server,
            method=patches[-1].method.label() if patches else "the model as published",
            runs=None,
            closest=elimination.closest,
            precision=None,
            alike=elimination.alike,
            refused=self.collected.refused,
            lengths=tuple(len(group[0].ids) for group in answers.groups),
            differences={name: _distances(answers.theirs, ours) for name, ours in elimination.ours.items()},
            explained={},
        )
        # Rounding is measured in the closest configuration: beyond its length a model is more sensitive to it.
        with configurations[elimination.closest]() as before:
            return _explained(report, answers, before, elimination.ours[elimination.closest], self.bits)

    def _eliminate(self, answers: _Answers, configurations: Mapping[str, Configuration]) -> _Elimination:
        """Compute the prompts in all configurations, the shortest first, and drop those that fit clearly worse.

        A configuration is the model as measured, or with a mistake that a server may make.
        """
        ours: dict[str, list[Tensor]] = {name: [] for name in configurations}
        left = list(configurations)
        closest, done, total = left[0], 0, sum(len(prompt.ids) for prompt in self.collected.prompts)
        self.progress(done, total)
        for group in answers.groups:
            for name in left:
                with configurations[name]() as before:
                    ours[name].append(answers.logprobs(group, before))
            closest = min(left, key=lambda name: math.hypot(*_distances(answers.theirs, ours[name])))
            left = [
                name
                for name in left
                if name == AS_MEASURED or not _fits_worse(answers.theirs, ours[name], ours[closest])
            ]
            done += sum(len(prompt.ids) for prompt in group)
            self.progress(done, total)
        alike = [
            name for name in left if name != closest and not _fits_worse(answers.theirs, ours[name], ours[closest])
        ]
        if AS_MEASURED in alike:  # where the answers do not decide, the server counts as right
            alike[alike.index(AS_MEASURED)], closest = closest, AS_MEASURED
        return _Elimination(ours, closest, tuple(alike))


@dataclass(frozen=True)
class _Elimination:
    """The model's log-probabilities in each configuration, and the configurations that fit the server's best."""

    ours: dict[str, list[Tensor]]  # (answers,) float64 for each length up to the one that excludes it
    closest: str
    alike: tuple[str, ...]  # other configurations that fit as well


class _Answers:
    """A server's log-probabilities, grouped by the length of their prompts, and the model that computes them here."""

    def __init__(self, prompts: Sequence[Prompt], model: Any) -> None:
        size = vocabulary_size(model)
        for prompt in prompts:
            for token in (*prompt.ids, *(answer.token for answer in prompt.answers)):
                if not 0 <= token < size:
                    raise ServingError(
                        f"token {token} is outside this model's vocabulary of {size}; another model is served"
                    )
        self.groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: len(prompt.ids))]
        self.theirs = [  # the server's log-probabilities, (answers,) for each group
            torch.tensor([answer.logprob for prompt in group for answer in prompt.answers], dtype=torch.float64)
            for group in self.groups
        ]
        self.scorer = TokenScorer(model, longest=max(len(prompt.ids) for prompt in prompts))

    def logprobs(self, group: Sequence[Prompt], before: Any) -> Tensor:
        """Return the model's log-probabilities for the tokens of a group of prompts that the server answered about.

        The result is (answers,) float64. `before` is the value that the configuration's context manager yields: a list
        of tokens to read before each prompt, or any other value for none.
        """
        prefix = before if isinstance(before, list) else []
        parts = []
        for ids, answers in group:
            first = min(answer.position for answer in answers)
            logits = self.scorer.last_logits(torch.tensor([*prefix, *ids]), len(ids) - first + 1)
            rows = torch.tensor([answer.position - first for answer in answers])
            tokens = torch.tensor([answer.token for answer in answers])
            scores = logits.log_softmax(-1)
            parts.append(scores[rows.to(scores.device), tokens.to(scores.device)].double().cpu())
        return torch.cat(parts)


def _explained(
    report: ServerReport, answers: _Answers, before: Any, exact: Sequence[Tensor], bits: StatedBits
) -> ServerReport:
    """Return the report with the dtype whose rounding explains the remaining difference from the server, if one does.

    Args:
        report: the report so far, without that dtype.
        answers: the server's answers, and the model in the configuration that fits them best.
        before: the value that the context manager of that configuration yielded.
        exact: the model's log-probabilities in that configuration, without further rounding; one tensor for each
            length.
        bits: the number formats that the server is said to use.
    """
    scorer, groups = answers.scorer, answers.groups

    def change(key_bits: int | None = None) -> list[Tensor]:
        scorer.store_through(None if key_bits is None else partial(rounded_keys, bits=key_bits))
        try:
            return [answers.logprobs(group, before) - values for group, values in zip(groups, exact, strict=True)]
        finally:
            scorer.store_through(None)

    scale_error = None
    effects = _effects_of_errors(answers, before, exact[0])
    if effects is not None:
        scale_error = _ScaleError(effects, answers.theirs[0] - exact[0])
    distances = _distances(answers.theirs, exact)
    explained: dict[str, tuple[float, ...]] = {}
    smallest_errors: dict[str, tuple[float, float]] = {}
    fitting, suggested = list[str](), list[str]()
    for batch in roundings(scorer.model, change, bits):
        for rounding in batch:
            largest = tuple(_MARGIN * _rms(changes) for changes in rounding.changes)
            explained[rounding.dtype] = largest
            if all(distance <= most for distance, most in zip(distances, largest, strict=True)):
                (fitting if rounding.allowed else suggested).append(rounding.dtype)
            if scale_error is not None and rounding.allowed:
                smallest_errors[rounding.dtype] = scale_error.smallest_errors(rounding)
        if fitting:
            break
    report = replace(report, explained=explained, suggested=tuple(suggested))
    if scale_error is not None and report.closest == AS_MEASURED and scale_error.significant:
        size = "large" if scale_error.percent > 0 else "small"
        runs = f"with a softmax scale {abs(scale_error.percent):.1f}% too {size}"
        return replace(report, runs=runs, precision=scale_error.dtype, smallest_errors=smallest_errors)
    if fitting:
        return replace(report, runs=report.closest, precision=fitting[0], smallest_errors=smallest_errors)
    return report


@dataclass(frozen=True)
class _Effects:
    """Changes in the log-probabilities of the shortest prompts when the model gets one of two small errors on purpose.

    The errors are a softmax scale that is 1% too large, and noise of 1% in the attention output of one layer. Both
    changes are (answers,) float64 tensors.
    """

    scale: Tensor  # a softmax scale that is 1% too large
    noise: Tensor  # noise of 1% in the attention output of one layer
    places: Tensor  # (answers,) int64; answers about the same place of a prompt have the same number

    def scale_share(self, residual: Tensor) -> tuple[float, float]:
        """Return the error of the softmax scale, in percent, that best explains a difference of log-probabilities.

        `residual`: (answers,) float64, the difference. The error is estimated by least squares; the second value is its
        standard error. Answers about the same place in a prompt have errors in common, so the standard error is
        computed from their sums.
        """
        percent = float(residual @ self.scale / (self.scale @ self.scale))
        products = (residual - percent * self.scale) * self.scale
        sums = torch.zeros(len(self.places), dtype=torch.float64).index_add(0, self.places, products)
        return percent, math.hypot(float(sums.norm()), _RESOLUTION) / float(self.scale @ self.scale)


def _effects_of_errors(answers: _Answers, before: Any, exact: Tensor) -> _Effects | None:
    """Measure how log-probabilities change when the softmax scale is 1% too large, or attention outputs have 1% noise.

    `exact`: (answers,) float64, the log-probabilities without these errors. Returns None for a family whose attention
    modules have no attribute `scaling` to change.
    """
    group = answers.groups[0]
    effects = []
    for error in ({"scale": 0.01}, {"noise": 0.01}):
        with slightly_wrong(answers.scorer.model, **error) as possible:
            if possible:
                effects.append(answers.logprobs(group, before) - exact)
    if not effects or not all(effect.any() for effect in effects):
        return None
    places = [(index, answer.position) for index, prompt in enumerate(group) for answer in prompt.answers]
    _, numbers = torch.unique(torch.tensor(places), dim=0, return_inverse=True)
    return _Effects(effects[0], effects[1], numbers)


class _ScaleError:
    """Estimate of the error in a server's softmax scale, which tells it from the effect of rounding.

    Attributes:
        percent: the error by least squares; positive: the scale is too large.
        dtype: the first dtype whose rounding explains the difference that remains after this error is taken out; empty:
            none does.
    """

    def __init__(self, effects: _Effects, residual: Tensor) -> None:
        self.effects = effects
        self.percent, self._standard_error = effects.scale_share(residual)
        self._rest = _rms(residual - self.percent * effects.scale)
        self.dtype, self._by_rounding = "", 0.0

    def smallest_errors(self, rounding: Rounding) -> tuple[float, float]:
        """Return the smallest errors, in percent, that could be noticed under a dtype's rounding.

        The first is an error of the softmax scale, the second is noise in the attention output of a layer. The method
        must be called with finer dtypes first, since it also keeps the first dtype whose rounding explains the
        difference.
        """
        changes = rounding.changes[0]
        bias, spread = self.effects.scale_share(changes)
        if not self.dtype:
            self._by_rounding = max(self._by_rounding, abs(bias) + spread)
            if self._rest <= _MARGIN * _rms(changes):
                self.dtype = rounding.dtype
        noise = math.sqrt(_MARGIN**2 - 1) * _rms(changes) / _rms(self.effects.noise)
        return _MARGIN * (abs(bias) + 2 * spread), noise

    @property
    def significant(self) -> bool:
        """True if neither rounding nor chance explains the error of the softmax scale."""
        return bool(self.dtype) and abs(self.percent) > _MARGIN * max(self._by_rounding, self._standard_error)


def _distances(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the root mean square difference of two lists of log-probabilities, in nats, at each length.

    Lengths that only one of them has are left out.
    """
    return tuple(_rms(a - b) for a, b in zip(theirs, ours, strict=False))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _fits_worse(theirs: Sequence[Tensor], ours: Sequence[Tensor], best: Sequence[Tensor]) -> bool:
    """Return True if a configuration is further from the server than the best one, by more than chance explains.

    All three arguments are log-probabilities, a tensor for each length: those of the server, of the configuration, and
    of the best configuration. If the server scatters about the best independently with standard deviation s, the
    difference of the two sums of squares has the mean |ours - best|^2 and the standard deviation 2 s |ours - best|.
    """
    server, other, first = (torch.cat(list(part[: len(ours)])) for part in (theirs, ours, best))
    scatter = max(_rms(server - first), _RESOLUTION)
    excess = (server - other).square().sum() - (server - first).square().sum()
    return bool(excess > _CERTAIN * 2 * scatter * (other - first).norm())
