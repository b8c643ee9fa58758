"""Advice, the result of `advise`: how a model gets to a length, as values and as text; and what papers report.

What papers report stands in reported.toml, with the source of each number; nothing there was measured by this project.

    >>> [each.numbers("jet-long") for each in reported() if "jet-long" in each.values]
    ['4.79 / 2.18 / 2.03']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rope_ext_hf.files import package_table
from rope_ext_hf.terminal import Rows, ShownAsTables, broken_command, text_table, wrapped
from rope_ext_hf.tools.advice.guidance import GOALS, NOTHING
from rope_ext_hf.tools.advice.measurements import evidence, measured_models, price
from rope_ext_hf.tools.engines.base import usual_server
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory

_SERVE = "serve with "
_NOTHING_NEEDED = "No method is needed."
_MOST_LINES = 25  # of a recommendation at 80 columns; everything else is in `Advice.full_text`
_MEMORY = "Every generated token reads those of its own input once; weights and activations come on top."


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One table that is reported, or a part of it."""

    source: str
    url: str
    place: str  # where in the source
    model: str  # and how it was trained further
    model_types: tuple[str, ...]  # in transformers
    benchmark: str
    unit: str  # and whether higher or lower is better
    lengths: tuple[str, ...]  # what the numbers of each method belong to
    values: dict[str, tuple[float | str, ...]]  # by method, in the order of `lengths`; text where no number is reported

    def numbers(self, method: str) -> str:
        return " / ".join(map(str, self.values[method]))

    def __str__(self) -> str:
        numbers = "; ".join([f"{method} {self.numbers(method)}" for method in self.values])
        what = f"{self.model}, {self.benchmark} ({self.unit}), {' / '.join(self.lengths)}"
        return f"reported by {self.source} ({self.place}): {what}: {numbers}"


@cache
def reported() -> tuple[Reported, ...]:
    tables = []
    for saved in package_table("rope_ext_hf.tools.advice", "reported.toml")["reported"]:
        saved["values"] = {method: tuple(numbers) for method, numbers in saved["values"].items()}
        saved |= {key: tuple(saved[key]) for key in ("model_types", "lengths")}
        tables.append(Reported(**saved))
    return tuple(tables)


@dataclass(frozen=True)
class CacheMemory:
    """Memory of keys and values."""

    dtype: str  # "float32", "bfloat16" (and float16) or "8 bits"
    batch: int  # inputs at a time
    tokens: int  # of each input
    bytes: int  # of all of them together


@dataclass(frozen=True)
class MethodAdvice:
    """One method for a model and a length."""

    method: str
    kind: str  # "static", "length-dependent", "remapping" or "trained"
    fits: bool  # whether it helped a measured model at this length, without training
    why: str  # where it helped
    measured: dict[str, float]  # how much the loss rose here in bits per byte, by the model it was measured on
    short_inputs: str  # the effect on inputs within the context length, in words
    decode: str  # as in `Guidance`
    when: str  # as in `Guidance`
    purposes: tuple[str, ...]  # the goals that it is a candidate for; names of `PURPOSES`
    engines: dict[str, str | None]  # how each engine serves it, by its name; None: it refuses
    refusals: dict[str, str]  # why, by the engine's name

    @property
    def rises(self) -> str:
        """`measured` in order, with a dash for a model that it was not measured on."""
        return signed(self.measured)


@dataclass(frozen=True, repr=False)
class Advice(ShownAsTables):
    """How a model gets to a length.

    Attributes:
        model, model_type: the model.
        target_length: the length asked for, in tokens.
        original_length: the length that RoPE without any scaling is for.
        context_length, context_rule: the length that the model is for, and how that is known.
        extended_by: the scalings and patches that it has already, the last one first.
        factor: the target length over the context length.
        methods: every method, those first that helped a measured model; empty where no method is needed.
        choices: the candidates, by purpose; they are not ranked.
        served: the method that is advised for each engine; "": the model as it is.
        memory: of keys and values, at the context length and at the target length.
        commands: the commands to run next, by their goal.
        notes: further remarks.
        reported: what papers report of the methods that helped, on models of this type, or of any where there is none.
        on_gpus: what fits on the GPUs of a server, at the target length; None: they are not stated.
        purpose: the purpose that the recommendation is for, one of `GOALS`.
        recommended: the name of the method for that purpose; empty where none is needed or none helped.
        next_steps: the commands, or lines of Python, to type next with the recommended method.
    """

    model: str
    model_type: str
    target_length: int
    original_length: int
    context_length: int
    context_rule: str
    extended_by: tuple[str, ...]
    factor: float
    methods: tuple[MethodAdvice, ...]
    choices: dict[str, tuple[str, ...]]
    served: dict[str, str]
    memory: tuple[CacheMemory, ...]
    commands: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    reported: tuple[Reported, ...] = ()
    on_gpus: GPUMemory | None = None
    purpose: str = "serve"
    recommended: str = ""
    next_steps: tuple[str, ...] = ()

    @property
    def _named(self) -> Rows:
        return [
            ("made for", f"{self.context_length:,} tokens ({self.context_rule})"),
            *(("extended by", each) for each in self.extended_by or ("nothing",)),
            ("asked for", f"{self.target_length:,} tokens, {self.factor:.3g} times as many"),
            *(("note", note) for note in self.notes),
        ]

    @property
    def _candidates(self) -> Rows:
        rows = [(key, ", ".join(names)) for key, names in self.choices.items()]
        return [("for", "candidates"), *rows] if rows else []

    @property
    def _helped(self) -> Rows:
        head = ("helped", "kind", "inputs within the context length", "rise at this length")
        rows = [(m.method, m.kind, m.short_inputs, m.rises) for m in self.methods if m.fits]
        return [head, *rows] if rows else []

    def tables(self) -> Sequence[Rows]:
        others = [("by others", str(each)) for each in self.reported]
        commands = [(goal, "".join(f"{broken_command(each)}\n" for each in own)) for goal, own in self.commands.items()]
        nothing = [] if self.methods else [("methods", _NOTHING_NEEDED)]
        named = [("model", f"{self.model} ({self.model_type})"), *self._named, *nothing]
        return [named, self._candidates, self._helped, others, _memory_rows(self.memory), commands]

    def __str__(self) -> str:
        """Return the recommendation in at most 25 lines of 80 columns."""
        return self.short_text()

    def short_text(self, reason: str = "", closing: Sequence[str] = ()) -> str:
        """Return the recommendation, the notes that have room beside it, the next steps, and the `closing` lines.

        `reason` stands in place of the reason that was measured here.
        """
        own = self.recommendation(reason)
        steps = [broken_command(each) for each in self.next_steps]
        last = ["All methods, engines and sources: --all (in Python: full_text)", *closing]
        return "\n".join([*own, *self._shown_notes(own, steps, last), *steps, *last])

    def recommendation(self, reason: str = "") -> list[str]:
        """Return the lines that say what to take, why, what short inputs lose, and what memory a long input takes.

        `reason` stands in place of the reason that was measured here.
        """
        times = f"{self.target_length:,} tokens, {self.factor:.3g} times as many"
        rows = [("model", f"{self.model} ({self.model_type}), for {self.context_length:,} tokens; you need {times}")]
        chosen = next((each for each in self.methods if each.method == self.recommended), None)
        if chosen is not None:
            rows.append(("take", f"{chosen.method}, {GOALS[self.purpose]}"))
            measured = evidence(chosen.method, self.factor)
            why = reason or measured or (chosen.when and f"the choice when {chosen.when}")
            rows += [("because", why)] if why else []
            rows.append(("short", self._short_inputs(chosen)))
        elif not self.methods:
            rows.append(("take", f"the model as it is. {_NOTHING_NEEDED}"))
        else:
            others = [word for word, purpose in GOALS.items() if purpose in self.choices and word != self.purpose]
            instead = f"; see --purpose {' or '.join(others)}" if others else ""
            rows.append(("take", f"nothing: no method is known to help here, {GOALS[self.purpose]}{instead}"))
        held = {each.dtype: each.bytes for each in self.memory if (each.tokens, each.batch) == (self.target_length, 1)}
        if held:
            size = _size(held["bfloat16"])
            rows.append(
                ("cache", f"{size} of keys and values for one input of {self.target_length:,} tokens in bfloat16")
            )
        return [line for name, text in rows for line in wrapped(text, f"{name:<9}").splitlines()]

    def _shown_notes(self, *others: Sequence[str]) -> list[str]:
        """Return the notes that still have room beside other lines, and how many are left out."""
        room = _MOST_LINES - sum(text.count("\n") + 1 for lines in others for text in lines)
        notes = [*([] if self.on_gpus is None else self.on_gpus.sentences), *self.notes]
        shown: list[str] = []
        for number, note in enumerate(notes):
            lines = wrapped(note, f"{'note':<9}").splitlines()
            if len(shown) + len(lines) > room - (number < len(notes) - 1):
                return [*shown, f"{'note':<9}{len(notes) - number} more: --all"] if len(shown) < room else shown
            shown += lines
        return shown

    def _short_inputs(self, chosen: MethodAdvice) -> str:
        """Say in a clause how inputs within the context length read."""
        if chosen.short_inputs == "the same":
            return f"inputs within {self.context_length:,} tokens give the same output as the unpatched model"
        if chosen.short_inputs.startswith("the same up to "):
            kept = chosen.short_inputs.removeprefix("the same up to ")
            return f"inputs of up to {kept} give the same output as the unpatched model; longer ones change"
        known = price(chosen.method, self.factor) or "change their output; by how much was not measured"
        return f"inputs within {self.context_length:,} tokens {known}"

    def full_text(self) -> str:
        """Return everything that is known: all methods, what was measured and reported of them, engines, commands."""
        lines = [f"{self.model} ({self.model_type})"]
        lines += [wrapped(text, f"  {name:<16}") for name, text in self._named]
        if not self.methods:
            lines += ["", _NOTHING_NEEDED]
        if self.choices:
            lines += ["", text_table(self._candidates)]
        if self.methods:
            lines += ["", *self._measured(), *self._served()]
        if self.reported:
            lines += ["", "by others, and not measured here"]
            lines += [wrapped(str(each), "  ", "    ") for each in self.reported]
        lines += ["", text_table(_memory_rows(self.memory)), wrapped(_MEMORY)]
        if self.on_gpus is not None:
            lines += ["", *[wrapped(sentence) for sentence in self.on_gpus.sentences]]
        for purpose, commands in self.commands.items():
            if not purpose.startswith(_SERVE):
                lines += ["", f"# {purpose}", *[broken_command(each) for each in commands]]
        return "\n".join([*lines, *self._serving()])

    def _serving(self) -> list[str]:
        """One command for the engines that serve the model alike; it prints the engine's own command and files."""
        serving = [
            (name.removeprefix(_SERVE), own[0]) for name, own in self.commands.items() if name.startswith(_SERVE)
        ]
        lines = []
        for command, engines in _grouped((own.removesuffix(name), name) for name, own in serving).items():
            first = usual_server() if usual_server() in engines else engines[0]
            lines += ["", f"# {_SERVE}{first}", broken_command(command + first)]
            if others := ", ".join(name for name in engines if name != first):
                lines.append(wrapped(f"or --engine {others}", "# ", "# "))
        return lines

    def _measured(self) -> list[str]:
        """The methods that fit with what was measured, what sets them apart, and why the others do not fit."""
        fitting = [each for each in self.methods if each.fits]
        lines = ["Measured here, without training, on:"]
        lines += [wrapped(f"the {model}", "  ", "    ") for model in measured_models()]
        lines.append(
            wrapped(
                "A rise is in bits per byte, over the loss of the model as loaded at its context length. They do not "
                "agree, and what decides it is not known: they differ in size, text, dims and base. Which candidate "
                "reads best here is known when it is measured, by the first command below."
            )
        )
        if fitting:
            lines += ["", text_table(self._helped), "", "take"]
            lines += [wrapped(f"{each.method} when {each.when}", "  ", "    ") for each in fitting if each.when]
            costs = _grouped([(each.decode, each.method) for each in fitting if each.decode != NOTHING])
            lines += ["time of a generated token", *_explained(costs)]
        if others := _grouped([(each.why, each.method) for each in self.methods if not each.fits]):
            lines += ["", "not shown to help at this length", *_explained(others)]
        return lines

    def _served(self) -> list[str]:
        """How each engine serves the methods that fit, and why engines refuse the method that was chosen first."""
        told = []
        for each in self.methods:
            if each.fits and each.engines:
                ways = dict[str, list[str]]()
                for name, encoding in each.engines.items():  # how it is written for the engine, in a word or two
                    way = (encoding or "refused").partition(" in ")[0].removesuffix(" with equal lists")
                    ways.setdefault(way, []).append(name)
                told.append(("; ".join([f"{way} in {', '.join(names)}" for way, names in ways.items()]), each.method))
        chosen = next((name for name in self.served.values() if name), None)
        refusals = next((each.refusals for each in self.methods if each.method == chosen), {})
        refused = _grouped(
            (reason[max(0, reason.find("cannot")) :], name)
            for name, reason in refusals.items()
            if name not in self.served
        )
        return [*(["", "served"] if told else []), *_explained(_grouped(told)), *_explained(refused)]


def _explained(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """What several names have in common, a line for each of their groups."""
    return [wrapped(f"{', '.join(names)}: {text}", "  ", "    ") for text, names in groups.items()]


def signed(by_model: Mapping[str, float]) -> str:
    """The value of every measured model in order, with its sign and two decimals; a dash where there is none."""
    names = [f"{by_model[each.name]:+.2f}" if each.name in by_model else "-" for each in measured_models()]
    return " / ".join(names)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second of each pair, by the first."""
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _size(number: int) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e8 else f"{number / 1e6:,.2f} MB"


def _memory_rows(memory: Iterable[CacheMemory]) -> Rows:
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for each in memory:
        rows.setdefault((each.tokens, each.batch), {})[each.dtype] = _size(each.bytes)
    head = ("keys and values", "inputs at a time", *next(iter(rows.values())))
    return [head, *((f"{tokens:,} tokens", str(batch), *cells.values()) for (tokens, batch), cells in rows.items())]
