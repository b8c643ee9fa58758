"""`need`: whether a model needs a longer context at all, how far it reads as it is, and what its architecture says.

print(rope_ext_hf.eval.need(model, "books/*.txt", target_length=65536))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.measuring import passkey, tasks
from rope_ext_hf.eval.perplexity_runs import Result, difference
from rope_ext_hf.eval.questions import Need, Perplexity
from rope_ext_hf.hub import load_tokenizer, model_by_name
from rope_ext_hf.patches.describing import Description, describe
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Corpus, Tokens
from rope_ext_hf.reading.scorer import check_numbers
from rope_ext_hf.reading.spans import EvalPlan, tokenize
from rope_ext_hf.runs.journal import holds_folder
from rope_ext_hf.runs.run_file import RunFile, run_file
from rope_ext_hf.runs.runner import Progress, carry_out
from rope_ext_hf.runs.statistics import FEWEST, Estimate, estimate, estimate_share
from rope_ext_hf.runs.verdicts import Outcome, verdict
from rope_ext_hf.terminal import Rows, ShownAsTables, text_table, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LENGTHS = (1, 1.5, 2, 4)  # lengths that are measured, in context lengths
_TASKS = ("needle", "key-value")
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_READ_TOKENS = 4_000_000
"""About how many tokens are read of text, and for each task: ten minutes for 7 billion weights at 10^14 operations per
second."""
_PROMPTS = (16, 64)  # spans, and prompts of a task: 29 right answers of 29 are surely 85%, 28 of 28 not


_MOST_RISE = 0.02  # nats per token by which the loss may be higher than at the context length
_ENOUGH = 0.85
"""The share of its own score at the context length that a model has to keep, as in RULER (Hsieh et al. 2024, arXiv
2404.06654, whose threshold is another model's score)."""
_KNOWN = 0.5  # the score at the context length from which a task tells anything about a model
_GUESSED = 0.9  # the share of the loss of guessing by frequency from which a loss tells nothing of a model
ALL_TASKS = "all these tasks"  # the name of the prompts of several tasks that tell something, as one task


@dataclass(frozen=True, repr=False)
class NeedReport(ShownAsTables):
    """The numbers of a measurement, and the conclusion from them.

    Attributes:
        context_length: tokens that the model is for as it is, with the patch that it carries.
        target_length: tokens that are wanted; None: none were stated.
        loss: at the context length, in nats per token.
        rises: by length in tokens: how much higher the loss of the same tokens is than at the context length.
        quarter: how much higher their loss is with a quarter of the context length.
        guessing: how much higher the loss at the context length is than that of guessing each token by its share in the
            text.
        scores: by task, then by length: the share of the prompts that are answered; lengths beyond the context length
            for tasks that tell something, and for `ALL_TASKS` of those together, where there are several.
        window: the tokens that a layer sees, where every layer has a sliding window; else None.
        layers: how many layers there are.
        architecture: the settings of the model that say how far it may read, in sentences.
        notes: sentences on measures that are missing, with the reason.
    """

    context_length: int
    target_length: int | None
    loss: float
    rises: Mapping[int, Estimate]
    quarter: Estimate
    guessing: Estimate
    scores: Mapping[str, Mapping[int, Estimate]]
    window: int | None = None
    layers: int = 1
    architecture: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that were measured, ascending, the context length first."""
        return self.context_length, *self.rises

    @property
    def goal(self) -> int:
        """The length that the conclusion is about: the one that is wanted, else the longest that was measured."""
        return self.target_length or self.lengths[-1]

    @property
    def known(self) -> list[str]:
        """The tasks that tell something: the model surely answers half of them at its context length."""
        return [task for task, at in self.scores.items() if _tells(at[self.context_length])]

    def judge(self, length: int) -> tuple[Outcome, str]:
        """Judge whether it reads a length, better for yes and worse for no, with the reason.

        It does where the loss surely does not rise by more than 0.02 nats per token, and it surely keeps 85% of its
        score; a rise or a loss of answers that is sure says that it does not. No measure: the loss alone.
        """
        if self.window is not None and self.window < length:
            return Outcome.WORSE, self._windowed(length)
        if length > self.context_length and length not in self.rises:
            return Outcome.CANNOT_TELL, "it was not measured"
        silent = f"it does not surely answer half of any task at its {self.context_length:,}"
        found = [] if self.known else [(Outcome.NO_MEASURE, silent)]
        if length > self.context_length:
            rise = verdict(self.rises[length], than=_MOST_RISE)
            texts = {
                Outcome.BETTER: f"the loss rises by less than {_MOST_RISE} nats per token",
                Outcome.CANNOT_TELL: f"a rise of the loss by {_MOST_RISE} is not excluded: it is {rise}",
                Outcome.WORSE: f"the loss is {rise}",
            }
            found.append((rise.outcome, texts[rise.outcome]))
            kept = {task: self._kept(task, length) for task in self.known}  # the last one is of all prompts
            found += [each for task, each in kept.items() if each[0] is Outcome.WORSE or task == self.known[-1]]
        for outcome in (Outcome.WORSE, Outcome.NO_MEASURE, Outcome.CANNOT_TELL):
            if reasons := [text for each, text in found if each is outcome]:
                return outcome, " and ".join(reasons)
        return Outcome.BETTER, " and ".join(text for _, text in found)

    def _kept(self, task: str, length: int) -> tuple[Outcome, str]:
        now, before = self.scores[task][length], self.scores[task][self.context_length]
        outcome = verdict(now, than=_ENOUGH * before.value, higher_is_better=True).outcome
        unsure = f"that {_ENOUGH:.0%} of its answers stay is not sure, " if outcome is Outcome.CANNOT_TELL else ""
        return outcome, f"{unsure}it answers {_share_text(now)} of {task} instead of {_share_text(before)}"

    def _windowed(self, length: int) -> str:
        reach = self.layers * ((self.window or 1) - 1) + 1
        far = f"and nothing from further back than {reach:,} tokens reaches the last one through all {self.layers}"
        steps = f"and what stands further back arrives at best in steps through the {self.layers} layers"
        return f"every layer sees the last {self.window:,} tokens only, {far if reach < length else steps}"

    @cached_property
    def _decisive(self) -> tuple[Outcome, int, str]:
        """The judgement of the goal, the length that decides it, and the reason."""
        judged = [(length, *self.judge(length)) for length in (*self.lengths, self.goal) if length <= self.goal]
        order = (Outcome.WORSE, Outcome.NO_MEASURE, Outcome.CANNOT_TELL)
        decisive = (each for outcome in order for each in judged if each[1] is outcome)
        length, outcome, reason = next(decisive, judged[-1])
        return outcome, length, reason

    @property
    def outcome(self) -> Outcome:
        """Of `goal`: better: it needs nothing; worse: it does not read that length; else it cannot be told."""
        return self._decisive[0]

    @property
    def too_narrow(self) -> bool:
        """Whether every layer's sliding window is shorter than `goal`, which no method for RoPE changes."""
        return self.window is not None and self.window < self.goal

    @property
    def reads_to(self) -> int | None:
        """The longest length up to which it reads every one that was measured; None: it is not known to read any."""
        return max(takewhile(lambda length: self.judge(length)[0] is Outcome.BETTER, self.lengths), default=None)

    @property
    def doubts(self) -> list[str]:
        """Reasons for which a flat loss says less, in sentences."""
        short, guess, sentences = self.context_length, self.loss - self.guessing.value, []
        if verdict(self.guessing, than=(_GUESSED - 1) * guess).outcome is not Outcome.BETTER:
            sentences.append(
                f"Its loss at {short:,} tokens, {self.loss:.3f} nats per token, is not surely a tenth below the "
                f"{guess:.3f} of guessing each token by its share in the text: a model that guesses has as flat a loss."
            )
        gain = verdict(self.quarter, higher_is_better=True)
        if gain.outcome is not Outcome.BETTER:
            sentences.append(
                f"It gains nothing that can be told between a quarter and the whole of its {short:,} tokens (with a "
                f"quarter the loss is {gain}): a model that sees no further back has as flat a loss."
            )
        return sentences

    @property
    def conclusion(self) -> str:
        """The conclusion for `goal`, in sentences."""
        (outcome, length, reason), goal, reach = self._decisive, self.goal, self.reads_to
        reads = "" if reach is None or outcome is Outcome.BETTER else f"As it is, it reads to {reach:,} tokens. "
        if self.too_narrow:
            no_method = "no method for RoPE makes it look further back"
            return (
                f"{reads}It does not read {goal:,} tokens, whatever its loss is: {self._windowed(goal)}; {no_method}."
            )
        if outcome is Outcome.WORSE:
            return f"{reads}At {length:,} tokens {reason}. For {goal:,} tokens it needs extending."
        if outcome is Outcome.NO_MEASURE:
            text = f"Whether it reads {goal:,} tokens cannot be told from the loss alone: {reason}."
        elif outcome is Outcome.CANNOT_TELL:
            text = f"{reads}Whether it reads {goal:,} tokens cannot be told: at {length:,} tokens {reason}."
        elif self.target_length:
            text = f"It needs nothing for {goal:,} tokens: as it is, it reads them{f'; {reason}' * bool(reason)}."
        else:
            times = f"{goal / self.context_length:g} times its context length"
            text = f"It reads to at least {goal:,} tokens as it is, {times}, and needs nothing up to there; {reason}."
        return " ".join([text, *self.doubts])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with what follows."""
        follows = {"lengths": self.lengths, "reads_to": self.reads_to, "outcome": self.outcome}
        return asdict(self) | follows | {"conclusion": self.conclusion}

    @property
    def _rows(self) -> Rows:
        rises = list(self.rises.values())
        ends = [["-" if each[at] is None else f"{each[at]:+.3f}" for each in rises] for at in (1, 2)]
        rows = [
            ["tokens", *(f"{length:,}" for length in self.lengths)],
            ["loss, nats per token", f"{self.loss:.3f}", *(f"{each.value:+.3f}" for each in rises)],
            ["from", "-", *ends[0]],
            ["to", "-", *ends[1]],
        ]
        for task, at in self.scores.items():
            cells = (f"{at[length].value:.0%}" if length in at else "-" for length in self.lengths)
            rows.append([f"{task}, answered", *cells])
        return rows

    def tables(self) -> Sequence[Rows]:
        notes = [("architecture", "\n".join(self.architecture)), *(("note", each) for each in self.notes)]
        return [[("conclusion", self.conclusion)], self._rows, notes]

    def __repr__(self) -> str:
        return f"<NeedReport: {self.conclusion}>"

    def __str__(self) -> str:
        sentences = ["", *self.architecture, *self.notes, "", self.conclusion]
        return "\n".join([text_table(self._rows, "r"), *map(wrapped, sentences)])


def _tells(score: Estimate) -> bool:
    """Whether a task tells something, by the score at the context length."""
    return verdict(score, than=_KNOWN, higher_is_better=True).outcome is Outcome.BETTER


def _share_text(score: Estimate) -> str:
    return score.text("{:.0%}".format)


@holds_folder
def need(
    model: PreTrainedModel | str | Path,
    corpus: Corpus = "stdlib",
    *,
    target_length: Length | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | Path | None = None,
    chunk: int | None = None,
    report: Callable[[str], None] | None = None,
    progress: Progress | bool | None = None,
    file: RunFile | None = None,
) -> NeedReport:
    """Find out whether a model needs extending, by a short fixed plan.

    Read are: the same tokens at 1, 1.5, 2 and 4 times the context length; statements hidden in that text (needle,
    key-value), and variable tracking of RULER, as far as the model can do these at its context length.

    Args:
        model: as it is, patched or not, on any device; or a folder, a Hub id or "reference", which is loaded.
        corpus: the text, as `perplexity` takes it; lengths that fewer than three of its documents have are left out.
        target_length: tokens that are wanted, 65536 or "64k": measured too, and no longer ones.
        tokenizer: default: the one beside the model's weights.
        out: a folder for the runs; an interrupted one is continued there. Default: no files.
        chunk: tokens per pass of the decoder, as in `perplexity`.
        report: called with a line before each part.
        progress: as `measure` takes it, for each part; True: a bar of tqdm.
        file: what the folders keep as their run.yaml; default: this question.

    Raises:
        MethodError: a target length that is not above 0.
        CorpusError: documents that are not longer than the context length.
        UnsupportedModelError: a model without rotary embeddings, or one that gives NaN in place of losses.
    """
    asked = Need(target_length=target_length, data=corpus)
    target_length = asked.target_length
    name, model = model, model_by_name(model)
    if out is not None:
        file = file or run_file(asked, name, tokenizer=tokenizer, tokens_per_pass=chunk, out=out)
        file.write(Path(out))
    say, described = report or (lambda line: None), describe(model)
    short = described.extended_length or described.context_length
    tokenizer = tokenizer or load_tokenizer(model.config._name_or_path)
    given = load(corpus)
    texts = list(given)
    documents = tokenize(texts, tokenizer)
    lengths, notes = lengths_to_read(short, target_length, [len(document.ids) for document in documents])
    few, many = _PROMPTS
    count = max(few, min(many, _READ_TOKENS // sum(lengths)))
    say("reading the same tokens at every length")
    long = [document for document in documents if len(document.ids) >= lengths[-1]]
    most = lengths[-1] * -(-count // len(long))  # tokens of each: where one document weighs most, intervals are wide
    question = Perplexity(
        data=[replace(each, ids=each.ids[:most], ends=each.ends[:most]) for each in long],
        data_name=given.source,
        lengths=[short // 4, *lengths],
        targets=max(1, short // 8),
        max_spans=count,
    )
    plan = question.plan(model, tokenizer=tokenizer, chunk=chunk)
    run = carry_out(model, plan, out=out, progress=Progress.of(progress), file=file)
    by_length = {result.length: result for result in run.results}
    first = by_length[short]
    check_numbers(torch.tensor([result.loss for result in run.results]), short)
    before = accumulate((len(document.ids) for document in documents), initial=0)
    hay = [each for each, tokens in zip(texts, before, strict=False) if tokens < 4 * lengths[-1]]  # enough for all
    options: dict[str, Any] = {"tokenizer": tokenizer, "chunk": chunk, "out": out, "progress": progress, "file": file}
    answers: dict[str, Callable[[Sequence[int]], dict[int, list[float]]]] = {
        **{task: partial(_retrieval, model, task, haystack=hay, trials=count, **options) for task in _TASKS},
        "variable tracking": partial(_tracking, model, samples=count, **options),
    }
    shares: dict[str, dict[int, list[float]]] = {}
    for task, answer in answers.items():
        say(f"asking: {task}")
        try:
            shares[task] = answer(lengths[:1])
            if _tells(known := estimate_share(shares[task][short])):
                shares[task] |= answer(lengths[1:])
            else:
                notes.append(
                    f"{task} tells nothing here: {_share_text(known)} is answered at {short:,} tokens, not surely half."
                )
        except (MethodError, CorpusError, ImportError) as error:
            shares.pop(task, None)
            notes.append(f"{task} was not asked: {error}.")
    if len(telling := [each for each in shares.values() if len(each) == len(lengths)]) > 1:
        shares[ALL_TASKS] = {length: [score for each in telling for score in each[length]] for length in lengths}
    attention = AttentionLayers(config := model.config.get_text_config())
    return NeedReport(
        context_length=short,
        target_length=target_length,
        loss=first.loss,
        rises={length: difference(by_length[length], first) for length in lengths[1:]},
        quarter=difference(by_length[short // 4], first),
        guessing=_over_guessing(first, plan.measurement.plan, documents),
        scores={task: {n: estimate_share(each) for n, each in at.items()} for task, at in shares.items()},
        window=attention.window if attention.sliding == config.num_hidden_layers else None,
        layers=config.num_hidden_layers,
        architecture=_architecture(model, described),
        notes=tuple(notes),
    )


def lengths_to_read(short: int, target: int | None, documents: Sequence[int]) -> tuple[list[int], list[str]]:
    """The lengths to measure, by the tokens of each document, and a note on those that too few documents have."""
    wanted = {round(scale * short) for scale in _LENGTHS}
    if target is not None and target > short:
        wanted = {length for length in wanted if length < target} | {target}
    sizes = sorted((tokens - 1 for tokens in documents), reverse=True)  # less one for a BOS token
    longest = sizes[:FEWEST][-1] if sizes else 0
    lengths = sorted(length for length in wanted if length <= longest)
    if len(lengths) < 2:
        raise CorpusError(
            f"{min(FEWEST, len(sizes))} documents have {longest + 1:,} tokens or more, and the model is for {short:,}: "
            f"give a text with {FEWEST} longer documents"
        )
    left_out = sorted(wanted - set(lengths))
    listed = ", ".join(f"{length:,}" for length in left_out)
    return lengths, [f"Fewer than {FEWEST} documents are long enough for {listed} tokens."] if left_out else []


def _over_guessing(result: Result, plan: EvalPlan, documents: Sequence[Tokens]) -> Estimate:
    """How much higher a loss is than that of guessing each token by its share in all documents, by document."""
    counts = torch.cat([document.ids for document in documents]).bincount().double()
    nats = counts.sum().log() - counts.log()  # of each token id
    guessed = {
        document.name: sum(float(nats[document.ids[s.score_from : s.score_to]].sum()) for s in spans if s.length == n)
        for n in [result.length]
        for document, spans in plan.documents
    }
    return estimate([d.nats - guessed[d.name] for d in result.documents], [d.tokens for d in result.documents])


def _retrieval(model: Any, task: str, lengths: Sequence[int], **options: Any) -> dict[int, list[float]]:
    """Of each prompt the share of its questions that are answered; they are about a statement at every depth."""
    cells = passkey(model, lengths=lengths, depths=_DEPTHS, keys=len(_DEPTHS), distractors=1, task=task, **options)
    at = {length: [cell.scores for cell in cells if cell.length == length] for length in lengths}
    return {n: [fmean(s.exact for s in of_prompt) for of_prompt in zip(*at[n], strict=True)] for n in lengths}


def _tracking(model: Any, lengths: Sequence[int], **options: Any) -> dict[int, list[float]]:
    results = tasks(model, lengths=lengths, suite="ruler", tasks=["vt"], **options)
    return {result.length: list(result.scores) for result in results}


def _architecture(model: PreTrainedModel, described: Description) -> tuple[str, ...]:
    rotating, full = described.rotating_layers
    config: Any = model.config.get_text_config()
    attention = AttentionLayers(config)
    layers = [f"{rotating} of {full} full-attention layers rotate their queries and keys"]
    if attention.window and attention.sliding:
        some = f"{attention.sliding} of {config.num_hidden_layers} layers"
        layers.append(f"{some} see the last {attention.window:,} tokens only")
    length = described.context_length
    complete = sum(wavelength <= length for wavelength in described.wavelengths)
    pairs = len(described.wavelengths)
    sentences = [
        "; ".join(layers) + ".",
        f"theta is {described.theta:,.10g}: {complete} of {pairs} pairs of dims complete a cycle within {length:,} "
        f"tokens; inputs beyond it turn the other {pairs - complete} by angles that training did not show.",
    ]
    if (told_apart := _told_apart(described.wavelengths, 64 * length)) is not None:
        sentences.append(
            f"By its frequencies alone, attention prefers similar tokens to random ones up to a distance of "
            f"{told_apart:,} tokens (Men et al. 2024, arXiv 2405.14591)."
        )
    if any(name.rpartition(".")[2] in _NORMS for name, _ in model.named_modules()):
        sentences.append("Queries and keys are normalised (QK norm), so that a high score cannot grow with the norms.")
    return tuple(sentences)


_NORMS = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "qk_norm", "query_layernorm", "key_layernorm"})


def _told_apart(wavelengths: Sequence[float], most: int) -> int | None:
    """The distance up to which sum_i cos(m theta_i) stays positive; None: beyond `most`."""
    inv_freq = 2 * torch.pi / torch.tensor(wavelengths, dtype=torch.float64)
    for start in range(1, most + 1, 65536):
        distances = torch.arange(start, min(start + 65536, most + 1), dtype=torch.float64)
        negative = (distances[:, None] * inv_freq).cos().sum(-1) < 0
        if negative.any():
            return start + int(negative.to(torch.int8).argmax()) - 1
    return None
