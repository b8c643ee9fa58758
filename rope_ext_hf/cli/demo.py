"""The command `demo`: what the bundled model loses beyond its trained length, and what methods bring back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rope_ext_hf.cli.console import print_text
from rope_ext_hf.cli.evaluation import shown_progress
from rope_ext_hf.cli.options import CONTINUES, Json, Out, command
from rope_ext_hf.errors import multiple_text
from rope_ext_hf.eval.questions import Passkey, Perplexity
from rope_ext_hf.questions import argument
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from rope_ext_hf.reading.documents import Document
    from rope_ext_hf.runs.comparison import Comparison
    from rope_ext_hf.runs.findings import Findings
    from rope_ext_hf.runs.measures import Measure

_METHODS = ("yarn", "dynamic-yarn", "rerope", "self-extend")
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TRY = "rope-ext ppl MODEL --method yarn --factor 4 --lengths 4k,16k --data 'books/*.txt'"


@command("Start here", interrupted=CONTINUES)
def demo(
    out: Out = Path("rope-ext-results"),
    texts: int = argument(8, "Texts that are read; more take longer and show smaller differences.", least=3),
    questions: int = argument(40, "Questions per length, each in a text of its own; a multiple of 5.", least=5),
    device: str = argument("cpu", "cpu, cuda, mps, ..."),
    as_json: Json = False,
) -> None:
    """Try four methods on the bundled model, offline.

    It shows what the model loses beyond its trained length, and what the methods bring back: perplexity of
    Python's own library, and questions whose answers stand in it.

    Example: `rope-ext demo`
    """
    from rope_ext_hf.eval.measuring import measure
    from rope_ext_hf.files import json_text
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.runs.comparison import Comparison

    model = load_model("reference", dtype="float32", device=device)
    trained = patch_geometry(model).context_length
    ask = partial(measure, model, methods=_METHODS, out=out, progress=shown_progress())
    longest = 4 * trained
    loss = ask(Perplexity(lengths=[trained, 2 * trained, longest], data=_texts(texts, longest), data_name="stdlib"))
    retrieval = ask(
        Passkey(
            lengths=[trained, longest],
            task="key-value",
            haystack="stdlib?max_documents=8",
            depths=_DEPTHS,
            trials=questions // len(_DEPTHS),
            distractors=1,
        )
    )
    comparison = Comparison([loss, retrieval])
    page, picture = comparison.write_page(out / "comparison.html"), out / "demo.png"
    note = str(picture)
    try:
        comparison.draw(picture, "A small model read beyond the length that it was trained at")
    except ImportError as error:
        note = f"none; {error}"
    shown = Demonstration.of(comparison)
    if as_json:
        whole = {"perplexity": loss.to_dict(), "passkey": retrieval.to_dict()}
        print_text(json_text(whole | {"conclusion": shown.sentences}))
        return
    print_text(f"{shown}\n\nreport   {page}\npicture  {note}")


def _texts(count: int, tokens: int) -> list[Document]:
    """Return passages of Python's library, each as long as one span; the bundled model reads bytes."""
    from rope_ext_hf.reading.corpora import stdlib_held_out
    from rope_ext_hf.reading.documents import Document

    modules = stdlib_held_out()
    passages = []
    for index in range(count):
        module, start = modules[index % len(modules)], (1 + index // len(modules)) * 4 * tokens
        passages.append(Document(f"{module.name} from {start:,}", module.text[start : start + 3 * tokens // 2]))
    return passages


@dataclass(frozen=True)
class Demonstration:
    """Perplexity and right answers of one model with several methods, at its trained length and at a longer one."""

    findings: Findings
    perplexity: Measure
    answers: Measure
    portable: Mapping[str, bool]  # by the key of a method: whether other software has it

    @classmethod
    def of(cls, comparison: Comparison) -> Demonstration:
        """Take the two measures out of a comparison of a perplexity run and a retrieval run."""
        from rope_ext_hf.methods.registry import method_from_dict
        from rope_ext_hf.methods.remapping import RemappingMethod

        known = comparison.findings
        methods = {result.key: result.method for run in comparison.runs for result in run.results}
        resolved = {key: method_from_dict(method) for key, method in methods.items() if method is not None}
        return cls(
            known,
            next(each for each in known.measures if each.exponential),
            next(each for each in known.measures if each.shares),
            {
                key: not (isinstance(method, RemappingMethod) or method.length_dependent)
                for key, method in resolved.items()
            },
        )

    @property
    def short(self) -> int:
        return self.findings.context_length

    @property
    def long(self) -> int:
        return self.perplexity.longest

    def _count(self, key: str, length: int) -> int:
        return round(sum(score for score, _ in self.answers.items[key][length]))

    @property
    def asked(self) -> int:
        """The number of questions at one length."""
        return len(self.answers.items[self.findings.loaded][self.long])

    def table(self) -> str:
        """Return the values of both measures at both lengths, the best at the longer one marked."""
        from rope_ext_hf.runs.tables import BEST_NOTE

        known, (short, long) = self.findings, (self.short, self.long)
        width = max(map(len, known.names.values())) + 1
        read, right = "perplexity", f"right answers of {self.asked}"
        lines = [
            f"{'':{width}}  {read:^18}  {right:^20}",
            f"{'':{width}}  {short:>8,} {long:>8,}   {short:>9,} {long:>9,}",
        ]
        stars = [known.starred(measure, long) for measure in (self.perplexity, self.answers)]
        for key, name in known.names.items():
            marks = ["*" if key in starred else " " for starred in stars]
            values = [self.perplexity.text(self.perplexity.value(key, length)) for length in (short, long)]
            counts = [self._count(key, length) for length in (short, long)]
            lines.append(
                f" {name:{width}} {values[0]:>8} {values[1]:>8}{marks[0]}  {counts[0]:>9} {counts[1]:>9}{marks[1]}"
            )
        if any(stars):
            lines.append(f" {BEST_NOTE}")
        return "\n".join(line.rstrip() for line in lines)

    @property
    def sentences(self) -> list[str]:
        """What follows from the table."""
        return [self._unpatched(), *self._well(), *self._portable()]

    def _unpatched(self) -> str:
        from rope_ext_hf.runs.outcomes import Outcome

        known, key = self.findings, self.findings.loaded
        if known.outcome_against_short(self.perplexity, key, self.long) is not Outcome.WORSE:
            return f"Unpatched, it reads {self.long:,} tokens about as well as {self.short:,}."
        times = self.perplexity.value(key, self.long) / self.perplexity.value(key, self.short)
        count = self._count(key, self.long)
        high = f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"
        answers = f"{count} of {self.asked} answers" if count else "no answer"
        return f"Unpatched, it fails beyond {self.short:,}: perplexity {high} times as high, {answers} found."

    def _well(self) -> list[str]:
        from rope_ext_hf.runs.wording import listed

        known = self.findings
        well = [key for key in known.names if key != known.loaded and known.reads_as_well(key, self.long)]
        if not well:
            return [f"No method reads {self.long:,} tokens as well as {self.short:,} are read unpatched."]
        names = listed(self.findings.names[key] for key in well)
        verb, them = ("reads", "it") if len(well) == 1 else ("read", "them")
        only = "" if any(self.portable[key] for key in well) else f"; only this package runs {them}"
        return [f"{names} {verb} {self.long:,} tokens as well as {self.short:,}{only}."]

    def _portable(self) -> list[str]:
        known, sentences = self.findings, []
        for key in (key for key, portable in self.portable.items() if portable):
            before, after = [
                self.perplexity.text(self.perplexity.value(each, self.short)) for each in (known.loaded, key)
            ]
            worse = known.reads_short_worse(self.perplexity, key)
            short = f"short inputs get worse ({before} to {after})" if worse else "short inputs read as well as before"
            sentences.append(f"{known.names[key]} runs in other software too; {short}.")
        return sentences

    def __str__(self) -> str:
        times = multiple_text(self.long, self.short)
        texts = len(self.perplexity.items[self.findings.loaded][self.long])
        lines: Sequence[str] = [
            f"The bundled model was trained at {self.short:,} tokens. Read at {self.long:,} ({times}):",
            self.table(),
            *map(wrapped, self.sentences),
            f"A small model, {texts} texts, {self.asked} questions. Measure yours:",
            f"  {_TRY}",
        ]
        return "\n".join(lines)
