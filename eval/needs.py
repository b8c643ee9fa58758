"""`need`: whether a model needs a longer context at all, how far it reads as it is, and what its architecture says.

print(rope_ext_hf.eval.need(model, "books/*.txt", target_length=65536))
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CorpusError, FileError, MethodError
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.documents import Corpus
from rope_ext_hf.eval.measuring import perplexity
from rope_ext_hf.eval.plan import tokenize
from rope_ext_hf.eval.results import difference
from rope_ext_hf.eval.retrieval import passkey
from rope_ext_hf.eval.task_suites import tasks
from rope_ext_hf.files import read_json, write_json
from rope_ext_hf.hub import load_tokenizer, model_by_name
from rope_ext_hf.patches.describing import Description, describe
from rope_ext_hf.patches.layer_types import sliding_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Need", "need", "reach_in"]

NEED_FILE = "need.json"
"""The name of the file that a run leaves in its folder."""

SCALES = (1, 1.5, 2, 4)
"""Lengths that are measured, in context lengths."""
MOST_RISE = 0.02
"""Nats per token by which the loss may be higher than at the context length."""
ENOUGH = 0.85
"""The share of its own score at the context length that a model has to keep, as in RULER (Hsieh et al. 2024, arXiv
2404.06654, whose threshold is another model's score)."""
KNOWN = 0.5
"""The score at the context length from which a task tells anything about a model."""
TASKS = ("needle", "key-value")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
READ_TOKENS = 4_000_000
"""About how many tokens are read in all: ten minutes for 7 billion weights at 10^14 operations per second."""


@dataclass(frozen=True)
class Need:
    """What was found.

    Attributes:
        model: its name, for the command.
        context_length: tokens that the model is for as it is, with the patch that it carries.
        target_length: tokens that are wanted; None: none were stated.
        rises: by length in tokens: how much higher the loss is than at the context length, in nats per token of the
            same tokens, and its 95% interval over the documents.
        scores: by task, then by length: the share of prompts that are answered.
        reads_to: the longest length up to which nothing that was measured fails.
        fails: what fails at the next length, in words; empty: nothing does at any.
        architecture: what says how far a model may read, in sentences.
        notes: what was not measured, and why.
        conclusion, command: one sentence, and what to run next.
    """

    model: str
    context_length: int
    target_length: int | None
    rises: dict[int, tuple[float, float, float]]
    scores: dict[str, dict[int, float]]
    reads_to: int
    fails: str
    architecture: tuple[str, ...]
    notes: tuple[str, ...] = ()
    conclusion: str = ""
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lengths = list(self.rises)
        head = f"{'tokens':>24}" + "".join(f"{length:>11,}" for length in lengths)
        loss = "".join(f"{self.rises[length][0]:>+11.3f}" for length in lengths)
        half = "".join(f"{(high - low) / 2:>11.3f}" for _, low, high in self.rises.values())
        lines = [head, f"{'loss, nats per token':>24}{loss}", f"{'+-':>24}{half}"]
        for task, by_length in self.scores.items():
            cells = (f"{by_length[length]:>11.0%}" if length in by_length else f"{'-':>11}" for length in lengths)
            lines.append(f"{task + ', answered':>24}" + "".join(cells))
        lines += ["", *self.architecture, *self.notes, "", self.conclusion, f"  {self.command}"]
        return "\n".join(lines)


def need(
    model: PreTrainedModel | str | Path,
    corpus: Corpus = "stdlib",
    *,
    target_length: Length | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "MODEL",
    out: str | Path | None = None,
    chunk: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Need:
    """Find out whether a model needs extending, by a short fixed plan.

    Read are: the same tokens at 1, 1.5, 2 and 4 times the context length; a statement hidden in text (needle,
    key-value), and variable tracking of RULER, as far as the model can do these at its context length. A length is read
    where the loss is not higher than at the context length by more than 0.02 nats per token, and at least 85% of the
    answers stay.

    Args:
        model: as it is, patched or not, on any device; or a folder, a Hub id or "reference", which is loaded.
        corpus: the text, as `perplexity` takes it; lengths beyond its longest document are left out.
        target_length: tokens that are wanted, 65536 or "64k": measured too, and no longer ones.
        tokenizer: default: the one beside the model's weights.
        name: of the model, for the command.
        out: a folder for the runs and for `need.json`; an interrupted run is continued there. Default: no files.
        chunk: tokens per pass of the decoder, as in `perplexity`.
        report: called with a line of progress.

    Raises:
        MethodError: a target length that is not above 0.
        CorpusError: no document longer than the context length.
        UnsupportedModelError: a model without rotary embeddings.
    """
    target_length = parse_length(target_length)
    if target_length is not None and target_length < 1:
        raise MethodError(f"target_length must be at least 1 token, got {target_length}")
    model = model_by_name(model)
    say, described = report or (lambda line: None), describe(model)
    short = described.extended_length or described.context_length
    tokenizer = tokenizer or load_tokenizer(model.config._name_or_path)
    given = load(corpus)
    documents = tokenize(given, tokenizer)
    lengths, notes = _lengths(short, target_length, max(len(each.ids) for each in documents) - 1)
    repeats = max(4, min(24, READ_TOKENS // (4 * sum(lengths))))
    shared: dict[str, Any] = {"tokenizer": tokenizer, "chunk": chunk, "out": out}
    say("reading the same tokens at every length")
    results = perplexity(
        model, documents, lengths=lengths, targets=max(1, short // 2), max_spans=repeats, data=given.source, **shared
    )
    first, *_ = results
    rises = {each.length: difference(each, first) for each in results}
    scores: dict[str, dict[int, float]] = {}

    def ask(task: str, score: Callable[[Sequence[int]], dict[int, float]]) -> None:
        say(f"asking: {task}")
        try:
            known = score(lengths[:1])
            if known[short] >= KNOWN:
                scores[task] = known | (score(lengths[1:]) if lengths[1:] else {})
            else:
                notes.append(f"{task} tells nothing here: {known[short]:.0%} are answered at {short:,} tokens.")
        except (MethodError, CorpusError, ImportError) as error:
            notes.append(f"{task} was not asked: {error}.")

    for task in TASKS:
        ask(task, lambda at, task=task: _retrieval(model, task, at, trials=max(2, repeats // 2), **shared))  # type: ignore[misc]
    ask("variable tracking", lambda at: _tracking(model, at, samples=max(4, repeats // 2), **shared))
    reads_to, fails = _reach(lengths, rises, scores)
    found = Need(name, short, target_length, rises, scores, reads_to, fails, _architecture(model, described), (*notes,))
    conclusion, command = _conclusion(found, lengths[-1], "" if out is None else f" --need {shlex.quote(str(out))}")
    made = replace(found, conclusion=conclusion, command=command)
    if out is not None:
        write_json(Path(out) / NEED_FILE, made.to_dict())
    return made


def reach_in(folder: str | Path) -> int:
    """The tokens up to which a model reads as it is, by what `need` left in a folder.

    Raises:
        FileError: no such file, or a damaged one.
    """
    found = read_json(file := Path(folder) / NEED_FILE).get("reads_to")
    if type(found) is not int or found < 1:
        raise FileError(f"{str(file)!r} states no length that a model reads to; run rope-ext need again")
    return found


def _lengths(short: int, target: int | None, longest: int) -> tuple[list[int], list[str]]:
    """The lengths to measure, and a note on those that no document reaches.

    Raises:
        CorpusError: only the context length could be measured.
    """
    wanted = {round(scale * short) for scale in SCALES}
    if target is not None and target > short:
        wanted = {length for length in wanted if length < target} | {target}
    lengths = sorted(length for length in wanted if length <= longest)
    if len(lengths) < 2:
        raise CorpusError(
            f"the longest document has {longest + 1:,} tokens, and the model is for {short:,}: give a text with a "
            "longer document"
        )
    left_out = sorted(wanted - set(lengths))
    listed = ", ".join(f"{length:,}" for length in left_out)
    return lengths, [f"No document is long enough for {listed} tokens."] if left_out else []


def _retrieval(model: Any, task: str, lengths: Sequence[int], trials: int, **shared: Any) -> dict[int, float]:
    cells = passkey(model, lengths=lengths, depths=DEPTHS, keys=len(DEPTHS), task=task, trials=trials, **shared)
    return {
        length: sum(cell.exact_match for cell in cells if cell.length == length) / len(DEPTHS) for length in lengths
    }


def _tracking(model: Any, lengths: Sequence[int], samples: int, **shared: Any) -> dict[int, float]:
    results = tasks(model, lengths=lengths, suite="ruler", tasks=["vt"], samples=samples, **shared)
    return {result.length: result.score / 100 for result in results}


def _reach(
    lengths: Sequence[int], rises: dict[int, tuple[float, float, float]], scores: dict[str, dict[int, float]]
) -> tuple[int, str]:
    """The longest length up to which all is well, and what is not at the next."""
    reached = lengths[0]
    for length in lengths[1:]:
        mean, low, _ = rises[length]
        failing = [f"the loss is {mean:.2f} nats per token higher"] if mean > MOST_RISE and low > 0 else []
        for task, by_length in scores.items():
            if by_length[length] < ENOUGH * by_length[lengths[0]]:
                failing.append(f"{by_length[length]:.0%} of {task} is answered instead of {by_length[lengths[0]]:.0%}")
        if failing:
            return reached, f"at {length:,} tokens " + " and ".join(failing)
        reached = length
    return reached, ""


def _architecture(model: PreTrainedModel, described: Description) -> tuple[str, ...]:
    rotating, full = described.rotating_layers
    config: Any = model.config.get_text_config()
    window, sliding = sliding_layers(config)
    layers = [f"{rotating} of {full} full-attention layers rotate their queries and keys"]
    if window and sliding:
        layers.append(f"{sliding} of {config.num_hidden_layers} layers see the last {window:,} tokens only")
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


def _conclusion(found: Need, longest: int, option: str) -> tuple[str, str]:
    """One sentence, and the next command, which takes the result by an option."""
    target, reach, short, model = found.target_length, found.reads_to, found.context_length, shlex.quote(found.model)
    if target is not None and reach >= target:
        return (
            f"It needs nothing for {target:,} tokens: as it is, it reads them.",
            f"rope-ext ppl {model} --lengths {short},{target} --data 'texts/*.txt'",
        )
    if target is not None and target > longest:
        text = f"As it is, it reads to {reach:,} tokens of {longest:,} that were measured; {target:,} were not"
    elif found.fails:
        text = f"As it is, it reads to {reach:,} tokens; {found.fails}"
    else:
        return (
            f"It reads to at least {reach:,} tokens as it is, {reach / short:g} times its context length: up to there "
            "it needs nothing.",
            f"rope-ext need {model} --target-length {2 * reach} --data 'texts/*.txt'",
        )
    wanted = target or 4 * short
    asked = f"--target-length {wanted}{option if reach > short else ''}"
    return f"{text}. Beyond that it needs extending.", f"rope-ext advise {model} {asked}"
