"""`check_server`: whether a running server computes what was measured, by the log-probabilities that it gives.

print(servers.check_server("http://localhost:8000", "my-model-yarn/"))

Token ids go to the server, short prompts first, and its log-probabilities are compared with those of the model here.
Where they differ, the likely mistakes are computed here too, and the one that fits is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import MethodError, ServingError, duration
from rope_ext_hf.hub import find_device, find_dtype, load_model, load_tokenizer
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.memory import check_memory
from rope_ext_hf.reading.operations import estimate_flops, measure_flops
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.terminal import Rows, ShownAsTables
from rope_ext_hf.tools.servers.answers import (
    Collected,
    Prompt,
    as_text,
    collect,
    difference_rows,
    differing_tokens,
    read_answers,
)
from rope_ext_hf.tools.servers.clients import connect
from rope_ext_hf.tools.servers.mistakes import AS_MEASURED, configurations, rarer_configurations, slightly_wrong
from rope_ext_hf.tools.serving.configs import open_model

_CERTAIN = 6.0  # standard errors by which a configuration fits worse than another before it is excluded
_MARGIN = 3.0  # how many times the rounding of a dtype here explains in a server, whose sums run in another order
_RESOLUTION = 1e-6  # of a log-probability in float32, in nats
_BLOCK = 32  # weights with one scale
_STRICT = 1.0  # percent of the softmax scale: the error that a strict check must be able to tell
_MOST_MORE = 128  # prompts of a strict check, beside the usual ones
_SECONDS = 600.0  # that a prompt may take to compute here, by default
_READINGS, _COMPARED = 8, 128  # times that a prompt is computed here, and its tokens that the head reads: about
_KEYS = "{}-bit keys and values"
_Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, repr=False)
class ServerReport(ShownAsTables):
    """The configuration that a server runs.

    Attributes:
        url, server: the address, and the program with its version.
        method: the method that was measured.
        runs: the configuration that the server agrees with: "as measured", or the name of a mistake; None: none.
        closest: the configuration with the smallest difference, whether the server agrees with it or not.
        precision: the dtype whose rounding explains the difference that is left; None: none does.
        alike: configurations that these answers do not tell from `closest`.
        refused: the server's words on the shortest prompt that it does not answer; None: it answers all.
        lengths: of the prompts, in tokens.
        differences: by configuration, the root mean square difference of log-probabilities in nats, at each length up
            to the one that excludes it.
        explained: by dtype, the largest such difference that its rounding explains.
        suggested: dtypes that were not stated and whose rounding would explain the difference.
        tokens: how the server's tokens of a text differ from those of the tokenizer here; None: they do not, or the
            server gives none.
        told: by dtype, the smallest errors in percent that these answers show: of the softmax scale, and noise in the
            attention output of one layer.
        strict: whether an error of 1% of the softmax scale had to show.
        left_out: the longest length that was left out as too costly to compute here; None: none was.
    """

    also = ("agrees",)
    url: str
    server: str
    method: str
    runs: str | None
    closest: str
    precision: str | None
    alike: tuple[str, ...]
    refused: str | None
    lengths: tuple[int, ...]
    differences: dict[str, tuple[float, ...]]
    explained: dict[str, tuple[float, ...]]
    suggested: tuple[str, ...] = ()
    tokens: str | None = None
    told: dict[str, tuple[float, float]] = field(default_factory=dict)
    strict: bool = False
    left_out: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether the server computes what was measured, at every length asked for."""
        return self.runs == AS_MEASURED and self.refused is None and self.tokens is None and not self.untold

    @property
    def untold(self) -> bool:
        """Whether a strict check could not tell as small an error as it has to."""
        return self.strict and self.told_here > _STRICT

    @property
    def told_here(self) -> float:
        """The smallest error of the softmax scale, in percent, that shows under the dtype that the server fits."""
        return self.told.get(self.precision or "", (math.inf, math.inf))[0]

    @property
    def sentences(self) -> list[str]:
        """What it comes to, and what remains open."""
        if self.runs == AS_MEASURED:
            reach = "" if self.refused is None else f" up to {self.lengths[-1]:,} tokens"
            verdict = f"serves what was measured{reach}: {self.method}"
        elif self.runs is not None:
            verdict = f"does not serve what was measured ({self.method}): it runs the model {self.runs}"
        else:
            verdict = (
                f"serves neither what was measured ({self.method}) nor the model with a likely mistake; the closest, "
                f"{self.closest}, differs by more than rounding explains"
            )
        sentences = [f"{self.server} at {self.url} {verdict}"]
        if self.precision is not None:
            sentences.append(f"the difference that is left is within the rounding of {self.precision}")
        elif self.suggested:
            held = " or of ".join(self.suggested)
            sentences.append(
                f"it would be within the rounding of {held}: state --weight-bits or --kv-bits of the server"
            )
        if self.alike:
            sentences.append(f"these answers do not tell that from the model {', '.join(self.alike)}")
        if self.refused is not None:
            sentences.append(f"it does not answer a longer prompt: {self.refused}")
        if self.left_out is not None:
            sentences.append(
                f"prompts of up to {self.left_out:,} tokens were left out: they would take more than "
                f"{duration(_SECONDS)} to compute here, each; --lengths asks for them"
            )
        if self.tokens is not None:
            sentences.append(f"its tokenizer is not the one here: {self.tokens}")
        for name, (scale, noise) in self.told.items():
            sentences.append(
                f"under {name} these answers show an error of the softmax scale from {scale:.2g}% on, and noise in the "
                f"attention output of one layer from {noise:.2g}%"
            )
        if self.untold:
            sentences.append(f"a strict check has to show {_STRICT:g}%: more prompts than there are would be needed")
        return sentences

    @property
    def _differences(self) -> dict[str, tuple[float, ...]]:
        return self.differences | {f"allowed for {name}": values for name, values in self.explained.items()}

    def tables(self) -> Sequence[Rows]:
        first, *others = self.sentences
        rows = [("verdict", first), *(("note", each) for each in others)]
        return [rows, difference_rows(self.lengths, self._differences)]

    def __str__(self) -> str:
        return as_text(self.sentences, self.lengths, self._differences)


def check_server(
    url: str,
    model: str | Path,
    *,
    lengths: Sequence[Length] | None = None,
    data: str = "stdlib",
    served_name: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    seconds: float = 300.0,
    weight_bits: int = 8,
    kv_bits: int = 16,
    strict: bool = False,
    from_file: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ServerReport:
    """Compare what a running server computes with the model here.

    Args:
        url: the server's address, e.g. http://localhost:8000: vLLM, SGLang, llama.cpp, or a program with OpenAI's
            completions that gives the log-probabilities of a prompt. An API key is taken from ROPE_EXT_API_KEY.
        model: the folder or Hub id that it serves, patched or not; its weights are loaded here.
        lengths: of prompts in tokens; default: half the context length, and doubled up to the extended length, without
            those, but the first, that would take more than ten minutes each to compute here.
        data: the text that prompts are cut from, as `rope_ext_hf.eval.perplexity` takes it.
        served_name: the name of the model on the server; default: the first that it lists.
        dtype, device: of the model here.
        seconds: that an answer may take.
        weight_bits: of the weights on the server, 2 to 32; what coarser weights would explain is not allowed. Above
            16, the rounding of float16 is.
        kv_bits: of keys and values on the server: 16, 8 (float8 with four bits of exponent, or coarser than Q8_0) or 4.
        strict: ask about more prompts, until an error of 1% of the softmax scale would show.
        from_file: answers collected elsewhere, in place of the server's: JSON with {"prompts": [{"ids": [...],
            "answers": [[position, token, logprob], ...]}]}, of a token given the tokens before the position.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
        progress: called with the tokens of prompts that were computed here, and of all of them.

    Raises:
        ServingError: nothing there, or no log-probabilities; the message has the server's words.
    """
    if not 2 <= weight_bits <= 32:
        raise MethodError(f"weight_bits must be from 2 to 32, got {weight_bits}")
    if kv_bits not in (4, 8, 16):
        raise MethodError(f"kv_bits must be 4, 8 or 16, got {kv_bits}")
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    opened, place, kind = open_model(model, **source), find_device(device), find_dtype(dtype)
    empty, kind = opened.whole(), torch.float32 if isinstance(kind, str) else kind
    if from_file is not None:
        collected = read_answers(Path(from_file))
    else:
        client = connect(url, served_name, seconds)
        most = math.inf if lengths else _SECONDS * measure_flops(place, kind)
        collected = collect(
            client, model, lengths, data, source, lambda n: estimate_flops(empty, _READINGS * [n], _COMPARED) <= most
        )
    check_memory(empty, max(len(ids) for ids, _ in collected.prompts), kind, place)
    tokenizer, tokens = load_tokenizer(model, **source), None
    if collected.tokens is not None:
        ours = [tokenizer(collected.text, add_special_tokens=special)["input_ids"] for special in (False, True)]
        tokens = differing_tokens(collected.tokens, ours, "there", "here")

    def compare(make: Callable[[Any], dict[str, _Context]]) -> ServerReport:
        loaded = load_model(model, dtype=dtype, device=device, **source)
        return _compare(url, collected, loaded, make(loaded), weight_bits, kv_bits, progress)

    report = compare(lambda loaded: configurations(loaded, opened.described.rotary))
    coarse = weight_bits < 8 and report.closest == AS_MEASURED  # rounding that is as large as a mistake
    if report.precision is None or coarse:
        rarer = compare(lambda loaded: rarer_configurations(loaded, opened.described.rotary, tokenizer))
        if rarer.precision is not None:
            report = replace(rarer, differences=report.differences | rarer.differences)
    if report.closest == AS_MEASURED and strict and _STRICT < report.told_here < math.inf:
        needed = math.ceil(8 * (report.told_here / _STRICT) ** 2)  # chance falls with the root of prompts, bias stays
        collected.prompts = [*collected.more(min(needed, _MOST_MORE)), *collected.prompts]
        again = compare(lambda loaded: {AS_MEASURED: nullcontext})
        report = replace(again, alike=report.alike, differences=report.differences | again.differences)
    return replace(report, tokens=tokens, strict=strict, left_out=collected.left_out)


def _compare(
    url: str,
    collected: Collected,
    model: Any,
    made: dict[str, _Context],
    weight_bits: int,
    kv_bits: int,
    progress: Callable[[int, int], object],
) -> ServerReport:
    """Compare the answers of a server with those of the model here in each configuration; its weights are lost."""
    size, prompts = model.get_input_embeddings().weight.shape[0], collected.prompts
    asked = [token for ids, answers in prompts for token in (*ids, *(answer.token for answer in answers))]
    if foreign := [token for token in asked if not 0 <= token < size]:
        raise ServingError(f"token {foreign[0]} is outside this model's vocabulary of {size}; another model is served")
    specs = present_specs(model)
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: len(prompt.ids))]
    theirs = [torch.tensor([a.logprob for p in group for a in p.answers], dtype=torch.float64) for group in groups]
    ours: dict[str, list[Tensor]] = {name: [] for name in made}
    scorer = TokenScorer(model, longest=max(len(ids) for ids, _ in prompts))
    left, done, total = list(made), 0, sum(len(prompt.ids) for prompt in prompts)
    progress(done, total)
    for group in groups:  # the shortest first: what it excludes is not computed for the longer ones
        for name in left:
            with made[name]() as before:
                ours[name].append(_logprobs(scorer, before, group))
        closest = min(left, key=lambda name: math.hypot(*_distances(theirs, ours[name])))
        left = [name for name in left if name == AS_MEASURED or not _excluded(theirs, ours[name], ours[closest])]
        progress(done := done + sum(len(prompt.ids) for prompt in group), total)
    alike = [name for name in left if name != closest and not _excluded(theirs, ours[name], ours[closest])]
    if AS_MEASURED in alike:
        alike[alike.index(AS_MEASURED)], closest = closest, AS_MEASURED
    report = ServerReport(
        url=str(url),
        server=collected.server,
        method=specs[-1].method.label() if specs else "the model as published",
        runs=None,
        closest=closest,
        precision=None,
        alike=tuple(alike),
        refused=collected.refused,
        lengths=tuple(len(group[0].ids) for group in groups),
        differences={name: _distances(theirs, values) for name, values in ours.items()},
        explained={},
    )
    with made[closest]() as before:  # a model beyond its length is more sensitive to rounding than an extended one
        read = partial(_logprobs, scorer, before)
        return _explained(report, scorer, read, groups, theirs, ours[closest], weight_bits, kv_bits)


def _explained(
    report: ServerReport,
    scorer: TokenScorer,
    read: Callable[[Sequence[Prompt]], Tensor],
    groups: Sequence[Sequence[Prompt]],
    theirs: Sequence[Tensor],
    exact: Sequence[Tensor],
    weight_bits: int,
    kv_bits: int,
) -> ServerReport:
    """The report with the dtype whose rounding explains what is left, and with what slight errors would show."""

    def changed(bits: int | None = None) -> list[Tensor]:
        scorer.store_through(None if bits is None else partial(_in_bits, bits=bits))
        try:
            return [read(group) - values for group, values in zip(groups, exact, strict=True)]
        finally:
            scorer.store_through(None)

    model: Any = scorer.model
    effects = []  # of 1% on the shortest prompts
    for error in ({"scale": 0.01}, {"noise": 0.01}):
        with slightly_wrong(model, **error) as can:
            effects += [read(groups[0]) - exact[0]] if can else []
    effects = effects if all(each.any() for each in effects) else []  # of a family that scales elsewhere
    places = torch.tensor([(at, each.position) for at, prompt in enumerate(groups[0]) for each in prompt.answers])
    rows = torch.unique(places, dim=0, return_inverse=True)[1]

    def share(residual: Tensor) -> tuple[float, float]:
        """The share of an effect in a residual, its standard error; answers about one place have errors in common."""
        effect, part = effects[0], float(residual @ effects[0] / (effects[0] @ effects[0]))
        sums = torch.zeros(len(rows), dtype=torch.float64).index_add(0, rows, (residual - part * effect) * effect)
        return part, math.hypot(float(sums.norm()), _RESOLUTION) / float(effect @ effect)

    explained: dict[str, tuple[float, ...]] = {}
    told: dict[str, tuple[float, float]] = {}
    fitting: dict[bool, list[str]] = {True: [], False: []}  # dtypes that explain all, by whether they are usual
    off, chance = share(theirs[0] - exact[0]) if effects else (0.0, 0.0)
    left = _size(theirs[0] - exact[0] - off * effects[0]) if effects else 0.0  # beside a wrong softmax scale
    finest, widest = "", 0.0  # the first dtype that explains what that leaves; percent that rounding explains of it
    for batch in _roundings(model, changed, weight_bits, kv_bits):
        for name, usual, moved in batch:
            explained[name] = tuple(_MARGIN * _size(each) for each in moved)
            if all(a <= b for a, b in zip(_distances(theirs, exact), explained[name], strict=True)):
                fitting[usual].append(name)
            if effects and usual:
                bias, spread = share(moved[0])
                noise = math.sqrt(_MARGIN**2 - 1) * _size(moved[0]) / _size(effects[1])
                told[name] = _MARGIN * (abs(bias) + 2 * spread), noise
                if not finest:
                    widest = max(widest, abs(bias) + spread)
                    finest = name if left <= explained[name][0] else ""
        if fitting[True]:
            break
    report = replace(report, explained=explained, suggested=tuple(fitting[False]))
    wrong = finest and report.closest == AS_MEASURED and abs(off) > _MARGIN * max(widest, chance)
    if not wrong and not fitting[True]:
        return report
    runs = f"with a softmax scale {abs(off):.1f}% too {'large' if off > 0 else 'small'}" if wrong else report.closest
    return replace(report, runs=runs, precision=finest if wrong else fitting[True][0], told=told)


def _logprobs(scorer: TokenScorer, before: Any, group: Sequence[Prompt]) -> Tensor:
    """Log-probabilities by the model here of the tokens that a server answered about, (answers,) float64."""
    parts, begun = [], before if isinstance(before, list) else []  # tokens that are read before each prompt
    for ids, answers in group:
        first = min(answer.position for answer in answers)
        scores = scorer.last_logits(torch.tensor([*begun, *ids]), len(ids) - first + 1).log_softmax(-1)
        rows, tokens = (
            torch.tensor(part) for part in zip(*((a.position - first, a.token) for a in answers), strict=True)
        )
        parts.append(scores[rows.to(scores.device), tokens.to(scores.device)].double().cpu())
    return torch.cat(parts)


def _in_bits(x: Tensor, bits: int) -> Tensor:
    """Keys or values in few bits: float8 with four bits of exponent, or blocks with a scale."""
    if bits < 8:
        return _rounded(x.contiguous(), bits, math.gcd(_BLOCK, x.shape[-1])).to(x.dtype)
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def _distances(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> tuple[float, ...]:
    """The root mean square difference at each length that was computed, in nats."""
    return tuple(_size(a - b) for a, b in zip(theirs, ours, strict=False))


def _size(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _excluded(theirs: Sequence[Tensor], ours: Sequence[Tensor], best: Sequence[Tensor]) -> bool:
    """Whether one configuration fits worse than the best by more than the scatter about the best can do.

    Under independent scatter s about the best, the difference of the two sums of squares has the mean |ours - best|^2
    and the standard deviation 2 s |ours - best|.
    """
    server, other, first = (torch.cat(list(part[: len(ours)])) for part in (theirs, ours, best))
    scatter = max(_size(server - first), _RESOLUTION)
    worse = (server - other).square().sum() - (server - first).square().sum()
    return bool(worse > _CERTAIN * 2 * scatter * (other - first).norm())


def _roundings(
    model: Any, change: Callable[..., list[Tensor]], weight_bits: int, kv_bits: int
) -> Iterator[list[tuple[str, bool, list[Tensor]]]]:
    """By dtype, whether it is stated or usual, and what rounding to it changes; the model's weights are lost.

    `change` gives the changes of log-probabilities at each length, in nats, with keys and values in so many bits.
    """
    stated = change(kv_bits) if kv_bits < 16 else None

    def row(name: str, usual: bool, changed: list[Tensor]) -> tuple[str, bool, list[Tensor]]:
        if stated is None:
            return name, usual, changed
        return f"{name}, {_KEYS.format(kv_bits)}", usual, _sums(changed, stated)

    rounded: list[Tensor] = []
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
        rounded = change()
        model.to(torch.float32)
        eighth = [each / 8 for each in rounded]  # float16 has three bits more
        yield [row("float32 or float16", True, eighth), row("bfloat16", weight_bits <= 16, rounded)]
    keys = change(8) if stated is None else []
    usual = sorted({8, weight_bits}, reverse=True) if weight_bits <= 8 else []
    for bits in (*usual, *(bits for bits in (8, 4) if bits < weight_bits and bits not in usual)):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.shape[-1] % _BLOCK == 0:
                    parameter.copy_(_rounded(parameter.contiguous(), bits, _BLOCK))
        yield [row(f"{bits}-bit weights", bits in usual, change())]
    if keys:
        yield [(_KEYS.format(8), False, _sums(keys, rounded) if rounded else keys)]


def _sums(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _rounded(weight: Tensor, bits: int, block: int) -> Tensor:
    """Numbers in few bits, with a scale in float16 for every block; 8 bits in blocks of 32 are Q8_0 of llama.cpp."""
    blocks = weight.float().reshape(-1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    rounded: Tensor = whole * scale.half().float()
    return rounded.view_as(weight)
