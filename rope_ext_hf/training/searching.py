"""`search`: the method and the numbers with which a model reads a text best at a longer length.

    report = search("reference", "found", data="stdlib", target_length=2048, minutes=10)
    print(report)

Three stages: fixed methods, divisors of the frequencies by band, then by pair. The last two change the best candidate a
little at a time. What is found is written where, on other text, it surely reads better than the best fixed method. The
same call continues an interrupted run.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CorpusError, FileError, MethodError, duration, one_line
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement, Result, difference
from rope_ext_hf.files import atomic_file
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import method_from_dict, resolve_method
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.geometry import base_rope_of_model, patch_geometry
from rope_ext_hf.patches.patching import patch
from rope_ext_hf.pictures.divisors import draw_divisors
from rope_ext_hf.questions import command_line, forward
from rope_ext_hf.reading.spans import prefix_tokens, prepare
from rope_ext_hf.runs.folder import read_run, read_whole, write_whole
from rope_ext_hf.runs.identity import code_digest, digest_inputs
from rope_ext_hf.runs.journal import holds_folder
from rope_ext_hf.runs.kinds import RunPlan
from rope_ext_hf.runs.measures import exponential, perplexity_text
from rope_ext_hf.runs.run_file import RunFile, run_file
from rope_ext_hf.runs.runner import Progress, carry_out
from rope_ext_hf.runs.statistics import Estimate, estimate
from rope_ext_hf.runs.verdicts import UNPATCHED, Outcome, percent, verdict
from rope_ext_hf.serving.model_card import CARD_COLUMNS, made_from, write_card
from rope_ext_hf.terminal import Report, as_wide_as, text_table, wrapped
from rope_ext_hf.training.candidates import (
    Candidate,
    DivisorCurve,
    Passage,
    Reader,
    best_candidate,
    best_of,
    fixed_methods,
    is_static,
    key_passages,
    pieces,
    prompts,
    scored_tokens,
    short_passages,
    text_passages,
    two_lists,
)
from rope_ext_hf.training.questions import Searching
from rope_ext_hf.training.run_folder import Budget, open_run, save_model, settings_of, split_texts

_STAGES = {"methods": math.inf, "bands": 0.6, "pairs": 1.0}
"""Each stage, and the share of the budget at which it ends at the latest: every fixed method is read."""
_PATIENCE = 40  # a stage ends after so many candidates in a row without a better one
_BANDS = 9  # points of the curve of divisors in the second stage
_FEW_DOCUMENTS = 8  # fewer held-out documents than these are cut into passages, which the intervals then resample
_WIDEST = 4.0  # the largest divisor that is tried, in multiples of the factor that the target length needs
_KEYS_UNDER = ("yarn", "llama3", "rerope")
"""The methods that key tokens may be found under: the one that reads best at the target length."""
_CANDIDATES = "trials.json"
_FIRST_STEP, _LEAST_STEP = 0.4, 0.05
"""Changes of divisors as logarithms to base 2: at the beginning of a stage, and the smallest."""

_UNMEASURED = ("unpatched", "chosen", "found")  # the rows of a report that are no fixed method
_WITHIN = {
    Outcome.BETTER: "within the bound of {bound}",
    Outcome.WORSE: "above the bound of {bound}",
    Outcome.NO_DIFFERENCE: "not significantly different from the bound of {bound}",
}


def decide(
    found: str,
    best_fixed: str | None,
    change: Estimate | None,
    *,
    length: int,
    counted: bool = False,
    is_fixed: bool = False,
) -> tuple[bool, str]:
    """Return whether the result of a search is written, or the best other fixed method within the bound, and why.

    A fixed method needs no search: without a significant difference it is written, also where the result is one itself
    (`is_fixed`). `change` is the loss of the result less that of this method, in nats per token, on text that the
    search did not read; `counted`: over the tokens that count alone.
    """
    if best_fixed is None:
        return True, f"No other fixed method stays within the bound: {found} is written."
    result = verdict(change, perplexity=True, item="passage")
    keeps = result.outcome is Outcome.BETTER or (is_fixed and result.outcome is not Outcome.WORSE)
    compared = f"compared with {best_fixed}, the best {'other ' * is_fixed}fixed method, is {result}"
    written = found if keeps else best_fixed
    what = f"The perplexity{' over the tokens that count' * counted} of what was found, {found}"
    return keeps, f"{what}, at {length:,} tokens, {compared}: {written} is written."


@dataclass(frozen=True)
class SearchReport(Report):
    """The results of a search. Losses are in nats per token, on documents that the search did not read.

    Attributes:
        settings: the arguments.
        context_length, target_length: in tokens.
        method: `RopeMethod.to_dict` of what was chosen, which is written.
        label: of the chosen method: the stage that it came up in, and its root, or the fixed method.
        decision: why it was chosen and not what was found, or not a fixed method, in words.
        losses: of the model as loaded, of every fixed method, of what was found where that was not chosen, and of what
            was chosen, by length.
        gains: by how much the chosen one is lower than each at the target length.
        lost: how much higher it is than the model as loaded at the context length.
        key_losses, key_gains: the same over the tokens that counted, at the target length: key tokens, or answers;
            empty where all tokens counted.
        keys_by: which tokens these are, and how many.
        trials, stopped: how many candidates were read, and how many of them not to the end.
        seconds, cpu_seconds: of the search; those of interrupted runs count, measuring and loading do not.
        folder: of the patched model.
        save_route: how its config states the method, and which programs are known to read that right.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    method: dict[str, Any]
    label: str
    decision: str
    losses: dict[str, dict[str, float]]
    gains: dict[str, Estimate]
    lost: Estimate
    key_losses: dict[str, dict[str, float]]
    key_gains: dict[str, Estimate]
    keys_by: str
    trials: int
    stopped: int
    seconds: float
    cpu_seconds: float
    folder: str
    save_route: str = ""

    @property
    def best_fixed(self) -> str:
        """The fixed method with the lowest loss at the target length."""
        fixed = [name for name in self.losses if name not in _UNMEASURED]
        return min(fixed, key=lambda name: self.losses[name][str(self.target_length)])

    @property
    def findings(self) -> str:
        """What was measured, and what follows from it."""
        tables = [_table("perplexity", self.losses, self.gains)]
        if self.key_losses:
            tables += ["", _table("perplexity of the tokens that count", self.key_losses, self.key_gains), self.keys_by]
        bound = self.settings["most_lost"]
        within = _WITHIN[verdict(self.lost, than=bound).outcome].format(bound=_bound_text(bound))
        sentences = (
            self.decision,
            f"At {self.context_length:,} tokens, compared with {UNPATCHED}, the perplexity of what is written is "
            f"{verdict(self.lost, perplexity=True, item='passage')}, {within}.",
            f"All this is of text that the search did not read; intervals are over {self.lost.items} documents or "
            "passages of it.",
            f"{self.trials} trials, {self.stopped} of them stopped early, in {self.seconds / 60:.1f} minutes "
            f"({self.cpu_seconds:.0f} CPU seconds)",
        )
        return "\n".join([*tables, "", *map(wrapped, sentences)])

    def __str__(self) -> str:
        where = wrapped(
            f"The model, extended {self.target_length / self.context_length:g} times, is in {self.folder}, as "
            f"{self.save_route}. `rope_ext_hf.from_pretrained` loads it; measure it on other text:"
        )
        command = command_line("ppl", self.folder, lengths=(self.context_length, self.target_length), data="TEXT")
        return "\n".join([self.findings, where, f"  {command}"])


def _table(head: str, losses: Mapping[str, Mapping[str, float]], gains: Mapping[str, Estimate]) -> str:
    """Return a line per method: its perplexity by length, and how it compares with that of the chosen one."""
    lengths = list(next(iter(losses.values())))
    rows = [[head, *(f"{int(length):,}" for length in lengths), "compared with the chosen one"]]
    for name, row in losses.items():
        compared = str(verdict(gains[name], perplexity=True, item="passage")) if name in gains else ""
        rows.append([name, *(perplexity_text(exponential(row[length])) for length in lengths), compared])
    return text_table(rows, f"l{'r' * len(lengths)}l")


def _bound_text(nats: float) -> str:
    return f"{percent(nats):.1f} percent (--most-lost-at-1x {nats:g})"


@forward(Searching)
def search(
    model: str | Path,
    out: str | Path,
    *,
    report: Callable[[str], None] | None = None,
    progress: Progress | bool | None = None,
    **fields: Any,
) -> SearchReport:
    """Search the method and the divisors with which a model reads a text best at a longer length.

    Args:
        model: a folder, a Hub id or "reference".
        out: the folder of the run: the patched model in `model`, every candidate in trials.csv.
        report: called with a line of progress.
        progress: of the measurement, as `rope_ext_hf.eval.measure` takes it; True: a bar of tqdm.
        **fields: those of `Searching`: data, target_length, one of minutes and trials, and more.

    Raises:
        MethodError: not one of minutes and trials, a target length within the context length, or no candidate that
            holds the bound.
        CorpusError: too short a text, or one with too few key tokens.
        FileError: the folder holds a run of other settings, of a model, tokenizer, text or code that changed since, or
            damaged trials; or another process is writing it.
    """
    asked, say = Searching(model=str(model), **fields), report or (lambda line: None)
    tokenizer = load_tokenizer(asked.model, **asked.source)
    loaded = load_model(asked.model, dtype=asked.dtype, device=asked.device, **asked.source)
    rotary = patch_geometry(loaded, **asked.underneath)
    if asked.target_length <= rotary.context_length:
        raise MethodError(
            f"target_length must be above the context length of {rotary.context_length:,} tokens, got "
            f"{asked.target_length:,}"
        )
    for name in asked.methods or ():  # a wrong name is refused before anything is read
        resolve_method(name, rotary, target_length=asked.target_length)
    return _answer(asked, loaded, tokenizer, rotary, out=Path(out), say=say, progress=Progress.of(progress))


@holds_folder
def _answer(
    asked: Searching,
    model: Any,
    tokenizer: Any,
    rotary: Rotary,
    *,
    out: Path,
    say: Callable[[str], None],
    progress: Progress,
) -> SearchReport:
    target, context, underneath = asked.target_length, rotary.context_length, asked.underneath
    origin = made_from(asked.model, **asked.source)
    targets = scored_tokens(context)
    settings = settings_of(asked) | {"methods": list(asked.methods or fixed_methods(rotary)), "targets": targets}
    searched, held_out = split_texts(asked, tokenizer, 2)
    inputs = digest_inputs(model, tokenizer, searched, held_out) | {"the code of this package": code_digest(model)}
    open_run(out, settings, inputs, may_differ=("minutes", "trials"))
    file = run_file(asked, asked.model, out=out)
    file.write(out)
    read_before = _read_candidates(out / _CANDIDATES)  # a damaged file is refused before anything is measured
    if sum(len(each.ids) >= target for each in held_out) < _FEW_DOCUMENTS:
        held_out = pieces(held_out, target, asked.max_spans)
    if not held_out:
        raise CorpusError(f"no held-out document has {target:,} tokens; give longer text, or another with eval_data")
    texts = text_passages(searched, target, asked.passages, tokenizer, targets)
    measured: dict[str, Any] = {"lengths": [context, target], "targets": targets, "max_spans": asked.max_spans}
    measurement = PerplexityMeasurement(prepare(model, held_out, tokenizer=tokenizer, **measured))
    answered: list[Passage] = []
    if asked.fitness == "loss":
        read = texts
    elif asked.fitness == "key-tokens":
        under = [resolve_method(each, rotary, target_length=target) for each in _KEYS_UNDER]
        evaluator = best_of(model, under, texts, **underneath)
        read, measurement = key_passages(model, evaluator, texts, measurement, **underneath)
        say(f"key tokens: {measurement.keys_from}")
    else:
        read = prompts(asked.fitness, searched, target, asked.passages, tokenizer, asked.seed)
        answered = prompts(asked.fitness, held_out, target, asked.passages, tokenizer, asked.seed + 1)
    short = short_passages(texts, context, prefix_tokens(tokenizer, None))
    reader = Reader(model, read, short, asked.most_lost, **underneath)
    run = _Search(out, reader, rotary, settings, say, read_before, Budget(asked.minutes, asked.trials))
    to_measure = asked.max_spans * (len(run.fixed) + 3) * (1 + context / target)
    best = run.through_all_stages(to_measure)
    say("measuring on text that the search did not read")
    data = settings["eval_data"] or settings["data"]
    held = _HeldOut(reader, measurement, data, answered, target, out / "measured", progress, file)
    best, made = run.measured(best, held)
    values = method_from_dict(best.method).to_dict()
    stated: dict[str, Any] = {} if "factor" in values else {"target_length": target}
    patch(model, values.pop("method"), **values, **stated, **underneath)
    made = replace(made, save_route=describe(model).save_route)
    save_model(model, tokenizer, out / "model")
    with as_wide_as(CARD_COLUMNS):
        about = made.findings
    write_card(out / "model", [read_run(held.run.folder)], name=out.resolve().name, about=about, **origin)
    run.draw(best)
    write_whole(out / "report.json", made.to_dict())
    return made


@dataclass
class _Search:
    """A search in its folder."""

    folder: Path
    reader: Reader
    rotary: Rotary
    settings: dict[str, Any]
    say: Callable[[str], None]
    candidates: list[Candidate]  # those that were read, in an earlier run or in this one
    budget: Budget

    def __post_init__(self) -> None:
        self.target: int = self.settings["target_length"]
        self.bound: float = self.settings["most_lost"]  # nats per token at the context length
        names = dict.fromkeys((*self.settings["methods"], *fixed_methods(self.rotary)))
        self.fixed = {method.label(): method for method in map(self._fitted, names)}

    def _fitted(self, name: str) -> RopeMethod:
        method = resolve_method(name, self.rotary, target_length=self.target)
        return base_rope_of_model(self.reader.model, **self.reader.underneath).bind(method, self.target)

    @property
    def best(self) -> Candidate | None:
        return best_candidate(self.candidates, self.bound)

    def through_all_stages(self, to_measure: float) -> Candidate:
        """Read candidates until the budget is used, but for the time to read `to_measure` more passages."""
        for stage, share in _STAGES.items():
            for method, parameters, label in self._methods() if stage == "methods" else self._curves(stage):
                if self._used(to_measure) >= share or self._idle(stage) >= _PATIENCE:
                    break
                self._try(stage, method, parameters, label)
        if (best := self.best) is not None:
            return best
        least = min((each for each in self.candidates if not each.stopped), key=lambda each: each.cost(self.bound))
        advice = ", or leave static out" if self.settings["static"] else ""
        raise MethodError(
            f"with each of {len(self.candidates)} candidates, perplexity at the context length may rise by more than "
            f"{_bound_text(self.bound)}; nearest was {least.label}, with up to {percent(least.most_lost or 0.0):.1f} "
            f"percent. Allow as much (--most-lost-at-1x {(least.most_lost or 0.0) + 0.0005:.3f}){advice}"
        )

    def _used(self, to_measure: float) -> float:
        if not self.candidates:
            return 0.0
        seconds = sum(each.seconds for each in self.candidates)
        a_passage = seconds / sum(len(each.losses) for each in self.candidates)
        return self.budget.share_used(seconds, len(self.candidates), left_over=to_measure * a_passage)

    def _idle(self, stage: str) -> int:
        """How many candidates of a stage came after its best one."""
        of_stage = [each for each in self.candidates if each.stage == stage]
        best = self.best
        return len(of_stage) - 1 - of_stage.index(best) if best in of_stage else len(of_stage)

    def _try(self, stage: str, method: RopeMethod, parameters: dict[str, Any], label: str) -> None:
        before = self.best
        if is_static(method):
            parameters = parameters | {"static": method.to_dict()}
            method = method if self.settings["static"] else two_lists(method, self.rotary, self.target)
        # A fixed method is read to the end, and at the context length: what is found is compared with it.
        candidate = self.reader.read(stage, method, [] if stage == "methods" else self.candidates, parameters, label)
        self.candidates.append(candidate)
        write_whole(self.folder / _CANDIDATES, {"trials": [vars(each) for each in self.candidates]})
        if (best := self.best) is not None and best is not before:
            lost = f"{percent(best.lost or 0.0):+.1f}% at 1x"
            so_far = sum(each.seconds for each in self.candidates)
            left = duration(self.budget.seconds_left(so_far, len(self.candidates)))
            found = f"{best.label}, perplexity {perplexity_text(exponential(best.loss))}, {lost}"
            self.say(f"trial {len(self.candidates)}, {stage}: {found}; at most about {left} more")

    def _methods(self) -> Iterator[tuple[RopeMethod, dict[str, Any], str]]:
        """The fixed methods that were not read yet."""
        for name in self.settings["methods"][sum(each.stage == "methods" for each in self.candidates) :]:
            method = self._fitted(name)
            yield method, {}, method.label()

    def _curves(self, stage: str) -> Iterator[tuple[RopeMethod, dict[str, Any], str]]:
        """Neighbours of the best static candidate's divisors, nearer ones after each that was no better."""
        pairs = int((self.rotary.inv_freq() > 0).sum())
        points = pairs if stage == "pairs" else min(_BANDS, pairs)
        highest = math.log2(_WIDEST * self.target / self.rotary.context_length)
        while (parent := self._parent(points)) is not None:
            curve, root = parent
            draws = random.Random(self.settings["seed"] * 1_000_003 + len(self.candidates))
            changed = curve.changed(draws, self._step(stage), highest)
            parameters = {"levels": list(changed.levels), "attention_factor": changed.attention_factor, "from": root}
            yield changed.method(self.rotary), parameters, f"divisors by {stage.removesuffix('s')}, from {root}"

    def _parent(self, points: int) -> tuple[DivisorCurve, str] | None:
        """The curve of the best static candidate, and the label of what it began with; None: there is none."""
        static = [each for each in self.candidates if "static" in each.parameters and not each.stopped]
        best = best_candidate(static, self.bound) or min(static, key=lambda each: each.cost(self.bound), default=None)
        if best is None:
            return None
        if "levels" in (made := best.parameters):
            return DivisorCurve(tuple(made["levels"]), made["attention_factor"]).resampled(points), made["from"]
        return DivisorCurve.of_method(method_from_dict(made["static"]), self.rotary, points), best.label

    def _step(self, stage: str) -> float:
        """The size of the next change: half as much more after a better candidate, a little less after another one."""
        step, best = _FIRST_STEP, float("inf")
        for each in self.candidates:
            cost = each.cost(self.bound)
            if each.stage == stage:
                step = min(2 * _FIRST_STEP, step * 1.5) if cost < best else max(_LEAST_STEP, step * 0.93)
            if not each.stopped:
                best = min(best, cost)
        return step

    def measured(self, found: Candidate, held: _HeldOut) -> tuple[Candidate, SearchReport]:
        """Choose between what was found and the best fixed method on other text: what is written, and its report."""
        held.read({"unpatched": None, **self.fixed, "found": method_from_dict(found.method)})
        tried = {each.label: each for each in self.candidates if each.stage == "methods" and each.holds(self.bound)}
        rivals = [label for label in tried if label in self.fixed and tried[label] != found]
        rival = min(rivals, key=held.loss, default=None)
        change = None if rival is None else held.change("found", rival)
        counted, is_fixed = bool(held.counted), found.stage == "methods"
        keeps, why = decide(found.label, rival, change, length=self.target, counted=counted, is_fixed=is_fixed)
        chosen = found if keeps or rival is None else tried[rival]
        if chosen is found:
            held.results["chosen"] = held.results.pop("found")
            if held.asked:
                held.answers["chosen"] = held.answers.pop("found")
        else:
            held.read({"chosen": method_from_dict(chosen.method)})
        self._write_table()
        context = min(held.results["chosen"])
        at_target = {name: row[self.target] for name, row in held.results.items()}
        others = [name for name in held.results if name != "chosen"]
        report = SearchReport(
            settings=self.settings,
            context_length=context,
            target_length=self.target,
            method=chosen.method,
            label=chosen.label,
            decision=why,
            losses={name: {str(n): each.loss for n, each in row.items()} for name, row in held.results.items()},
            gains={name: difference(at_target[name], at_target["chosen"]) for name in others},
            lost=difference(held.results["chosen"][context], held.results["unpatched"][context]),
            key_losses={name: {str(self.target): held.loss(name)} for name in held.results if held.counted},
            key_gains={name: held.change(name, "chosen") for name in others if held.counted},
            keys_by=held.counted,
            trials=len(self.candidates),
            stopped=sum(each.stopped for each in self.candidates),
            seconds=round(sum(each.seconds for each in self.candidates), 1),
            cpu_seconds=round(sum(each.cpu_seconds for each in self.candidates), 1),
            folder=str(self.folder / "model"),
        )
        return chosen, report

    def _write_table(self) -> None:
        columns = ("stage", "label", "loss", "lost", "most_lost", "stopped", "seconds")
        with atomic_file(self.folder / "trials.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("trial", *columns, "passages"))
            for number, each in enumerate(self.candidates, 1):
                writer.writerow([number, *(getattr(each, name) for name in columns), len(each.losses)])

    def draw(self, best: Candidate) -> None:
        """The chosen divisors beside those of PI, NTK and YaRN, where matplotlib is installed."""
        if "static" not in best.parameters:
            return
        names = ("linear", "ntk", "yarn")
        shown = {name: resolve_method(name, self.rotary, target_length=self.target) for name in names}
        shown["chosen"] = method_from_dict(best.method)
        try:
            draw_divisors(self.folder / "divisors.png", self.rotary, shown, self.target)
        except ImportError as error:
            self.say(str(error))


@dataclass
class _HeldOut:
    """Losses of methods on text that the search did not read: of all tokens, and of those that count."""

    reader: Reader
    measurement: PerplexityMeasurement
    data: str
    asked: Sequence[Passage]
    """Prompts whose answers count; none: key tokens where the measurement has them, else all tokens."""
    target: int
    folder: Path
    progress: Progress
    file: RunFile  # what was asked
    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    """By the method's name in the report, then by length."""
    answers: dict[str, list[float]] = field(default_factory=dict)  # by that name, the loss of each

    def read(self, methods: dict[str, RopeMethod | None]) -> None:
        """Measure methods by their names in the report; what the folder holds already is not read again."""
        model, underneath = self.reader.model, self.reader.underneath
        plan = RunPlan(self.measurement, self.data, tuple(dict.fromkeys(methods.values())), **underneath)
        self.run = run = carry_out(model, plan, out=self.folder, progress=self.progress, file=self.file)
        for name, method in methods.items():
            saved = run.settings["loaded"] if method is None else method.to_dict()
            self.results[name] = {each.length: each for each in run.results if each.method == saved}
            if self.asked:
                self.answers[name] = self.reader.losses(method, self.asked)

    @property
    def counted(self) -> str:
        """The tokens that count, in words; empty: all."""
        if self.asked:
            return f"the answers of {len(self.asked)} prompts, in text that the search did not read"
        result = next(iter(self.results.values()))[self.target]
        keys = self.measurement.keys_from
        return f"key tokens: {result.key_tokens} of {result.tokens}, found with {keys}" if keys else ""

    def loss(self, name: str) -> float:
        """The loss that counts at the target length, in nats per token; infinite where it is not finite."""
        result = self.results[name][self.target]
        if self.asked:
            loss = estimate(self.answers[name]).value
        else:
            loss = math.log(result.longppl) if result.longppl else result.loss
        return loss if math.isfinite(loss) else math.inf

    def change(self, one: str, other: str) -> Estimate:
        """How much higher the loss that counts is at the target length, paired."""
        if self.asked:
            return estimate([a - b for a, b in zip(self.answers[one], self.answers[other], strict=True)])
        results = (self.results[name][self.target] for name in (one, other))
        return difference(*results, keys=self.measurement.keys is not None)


def _read_candidates(file: Path) -> list[Candidate]:
    if not file.is_file():
        return []
    try:
        return [Candidate(**each | {"losses": tuple(each["losses"])}) for each in read_whole(file)["trials"]]
    except (KeyError, TypeError) as error:
        raise FileError(f"{str(file)!r} does not hold the trials of a search: {one_line(error)}") from error
