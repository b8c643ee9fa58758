"""The command `demo`: how far the bundled model reads without a method, and with four methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rope_ext_hf.cli.console import print_text
from rope_ext_hf.cli.options import CONTINUES, Json, Out, command
from rope_ext_hf.cli.run_progress import shown_progress
from rope_ext_hf.errors import multiple_text
from rope_ext_hf.eval.measurement_options import Passkey, Perplexity
from rope_ext_hf.options.arguments import argument
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from rope_ext_hf.reading.text.documents import Document
    from rope_ext_hf.runs.comparison import Comparison
    from rope_ext_hf.runs.conclusions.findings import Findings
    from rope_ext_hf.runs.conclusions.measures import Measure

_METHODS = ("yarn", "dynamic-yarn", "rerope", "self-extend")
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TRY = "rope-ext ppl MODEL --method yarn --factor 4 --lengths 4k,16k --data 'books/*.txt'"


@command("Start here", interrupted=CONTINUES)
def demo(
    out: Out = Path("rope-ext-results"),
    texts: int = argument(8, "Number of texts; more texts take longer and show smaller differences.", least=3),
    questions: int = argument(
        40, "Number of questions per length, each in a text of its own; a multiple of 5.", least=5
    ),
    device: str = argument("cpu", "cpu, cuda, mps, ..."),
    as_json: Json = False,
) -> None:
    """Try four methods on the bundled model, offline.

    It shows how much worse the model reads beyond its trained length, and how well with each method: perplexity on
    Python's own library, and questions whose answers stand in the text.

    Example: `rope-ext demo`
    """
    from rope_ext_hf.eval.evaluations import measure
    from rope_ext_hf.files.whole import json_text
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.patches.model_rope import ModelRope
    from rope_ext_hf.runs.comparison import Comparison

    model = load_model("reference", dtype="float32", device=device)
    trained = ModelRope.of_model(model).rotary.context_length
    measure_all = partial(measure, model, methods=_METHODS, out=out, progress=shown_progress())
    longest = 4 * trained
    loss = measure_all(
        Perplexity(lengths=[trained, 2 * trained, longest], data=_texts(texts, longest), data_name="stdlib")
    )
    retrieval = measure_all(
        Passkey(
            lengths=[trained, longest],
            task="key-value",
            haystack="stdlib",
            depths=_DEPTHS,
            trials=questions // len(_DEPTHS),
            distractors=1,
        )
    )
    comparison = Comparison([loss, retrieval])
    page, picture = comparison.write_page(out / "comparison.html"), out / "demo.png"
    picture_note = str(picture)
    try:
        comparison.draw(picture, "A small model read beyond the length that it was trained at")
    except ImportError as error:  # matplotlib is not installed
        picture_note = f"none; {error}"
    demonstration = Demonstration.of(comparison)
    if as_json:
        results = {"perplexity": loss.to_dict(), "passkey": retrieval.to_dict()}
        print_text(json_text(results | {"conclusion": demonstration.sentences}))
        return
    print_text(f"{demonstration}\n\nreport   {page}\npicture  {picture_note}")


def _texts(count: int, tokens: int) -> list[Document]:
    """Return passages of Python's library, each long enough for one span (text read at once) of `tokens` tokens.

    A token of the bundled model is a byte.
    """
    from rope_ext_hf.reading.text.documents import Document
    from rope_ext_hf.reading.text.load import stdlib_held_out

    modules = stdlib_held_out()
    passages = []
    for index in range(count):
        module, start = modules[index % len(modules)], (1 + index // len(modules)) * 4 * tokens
        passages.append(Document(f"{module.name} from {start:,}", module.text[start : start + 3 * tokens // 2]))
    return passages


@dataclass(frozen=True)
class Demonstration:
    """The results of `demo`: perplexity and right answers with each method, at the trained length and a longer one."""

    findings: Findings
    perplexity: Measure
    answers: Measure
    portable: Mapping[str, bool]  # whether other software has a method, by the method's key

    @classmethod
    def of(cls, comparison: Comparison) -> Demonstration:
        """Return the results from a comparison of a perplexity run and a retrieval run."""
        from rope_ext_hf.methods.registry import method_from_dict
        from rope_ext_hf.methods.remapping import RemappingMethod

        portable: dict[str, bool] = {}
        for run in comparison.runs:
            for result in run.results:
                if result.method is not None:
                    method = method_from_dict(result.method)
                    portable[result.key] = not (isinstance(method, RemappingMethod) or method.length_dependent)
        measures = comparison.findings.measures
        return cls(
            findings=comparison.findings,
            perplexity=next(measure for measure in measures if measure.exponential),
            answers=next(measure for measure in measures if measure.shares),
            portable=portable,
        )

    @property
    def short(self) -> int:
        """The trained length, in tokens."""
        return self.findings.context_length

    @property
    def long(self) -> int:
        """The longest length that was measured, in tokens."""
        return self.perplexity.longest

    def _right_answers(self, key: str, length: int) -> int:
        return round(sum(score for score, _ in self.answers.items[key][length]))

    @property
    def questions(self) -> int:
        """The number of questions at one length."""
        return len(self.answers.items[self.findings.loaded][self.long])

    def table(self) -> str:
        """Return both measures at both lengths as text; the best values at the longer one have a mark."""
        from rope_ext_hf.runs.tables import BEST_NOTE

        known, (short, long) = self.findings, (self.short, self.long)
        width = max(map(len, known.names.values())) + 1
        lines = [
            f"{'':{width}}  {'perplexity':^18}  {f'right answers of {self.questions}':^20}",
            f"{'':{width}}  {short:>8,} {long:>8,}   {short:>9,} {long:>9,}",
        ]
        stars = [known.starred(measure, long) for measure in (self.perplexity, self.answers)]
        for key, name in known.names.items():
            marks = ["*" if key in starred else " " for starred in stars]
            values = [self.perplexity.text(self.perplexity.value(key, length)) for length in (short, long)]
            counts = [self._right_answers(key, length) for length in (short, long)]
            lines.append(
                f" {name:{width}} {values[0]:>8} {values[1]:>8}{marks[0]}  {counts[0]:>9} {counts[1]:>9}{marks[1]}"
            )
        if any(stars):
            lines.append(f" {BEST_NOTE}")
        return "\n".join(line.rstrip() for line in lines)

    @property
    def sentences(self) -> list[str]:
        """The conclusions that follow from the table, in sentences."""
        return [self._sentence_on_the_unpatched_model(), self._sentence_on_the_best(), *self._sentences_on_portable()]

    def _sentence_on_the_unpatched_model(self) -> str:
        from rope_ext_hf.runs.conclusions.verdicts import Outcome

        known, key = self.findings, self.findings.loaded
        if known.outcome_against_short(self.perplexity, key, self.long) is not Outcome.WORSE:
            return f"Unpatched, it reads {self.long:,} tokens about as well as {self.short:,}."
        ratio = self.perplexity.value(key, self.long) / self.perplexity.value(key, self.short)
        times = f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}"
        right = self._right_answers(key, self.long)
        answers = f"{right} of {self.questions} answers" if right else "no answer"
        return f"Unpatched, it fails beyond {self.short:,}: perplexity {times} times as high, {answers} found."

    def _sentence_on_the_best(self) -> str:
        """Return a sentence on the methods that read long texts as well as the unpatched model reads short ones."""
        from rope_ext_hf.errors import listed

        known = self.findings
        best = [key for key in known.names if key != known.loaded and known.reads_as_well(key, self.long)]
        if not best:
            return f"No method reads {self.long:,} tokens as well as the unpatched model reads {self.short:,}."
        names = listed(known.names[key] for key in best)
        verb, pronoun = ("reads", "it") if len(best) == 1 else ("read", "them")
        condition = "" if any(self.portable[key] for key in best) else f"; only this package runs {pronoun}"
        return f"{names} {verb} {self.long:,} tokens as well as {self.short:,}{condition}."

    def _sentences_on_portable(self) -> list[str]:
        """Return sentences on the methods that other programs support, too: what each costs at the trained length."""
        known, sentences = self.findings, []
        for key, portable in self.portable.items():
            if not portable:
                continue
            cost = "short inputs read as well as before"
            if known.reads_short_worse(self.perplexity, key):
                before = self.perplexity.text(self.perplexity.value(known.loaded, self.short))
                after = self.perplexity.text(self.perplexity.value(key, self.short))
                cost = f"short inputs get worse (perplexity {before} to {after})"
            sentences.append(f"{known.names[key]} runs in other software too; {cost}.")
        return sentences

    def __str__(self) -> str:
        times = multiple_text(self.long, self.short)
        texts = len(self.perplexity.items[self.findings.loaded][self.long])
        lines: Sequence[str] = [
            f"The bundled model was trained at {self.short:,} tokens. Read at {self.long:,} ({times}):",
            self.table(),
            *map(wrapped, self.sentences),
            f"This was a small model with {texts} texts and {self.questions} questions. Measure your own model:",
            f"  {_TRY}",
        ]
        return "\n".join(lines)
