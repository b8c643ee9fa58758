"""`Advice`, the result of `advise`: how a model gets to a length, as values and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rope_ext_hf.terminal import Rows, ShownAsTables, broken_command, text_table, wrapped
from rope_ext_hf.tools.advice.guidance import GOALS, NOTHING
from rope_ext_hf.tools.advice.measured import evidence, measured_models, price
from rope_ext_hf.tools.advice.reported import Reported
from rope_ext_hf.tools.engines.base import usual_server
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory

_SERVE = "serve with "  # the beginning of the goals in `Advice.commands` that name an engine
_NOTHING_NEEDED = "No method is needed."
_MOST_LINES = 25  # of a recommendation, at 80 columns; `Advice.full_text` has everything
_MEMORY = "Every generated token reads the keys and values of its input once. Weights and activations take memory too."


@dataclass(frozen=True)
class CacheMemory:
    """The memory that keys and values take for a number of inputs of one length, in one dtype."""

    dtype: str  # "float32", "bfloat16" (and float16) or "8 bits"
    batch: int  # the number of inputs at a time
    tokens: int  # the length of each input
    bytes: int  # the memory of all inputs together


@dataclass(frozen=True)
class MethodAdvice:
    """The advice on one method for one model and target length: whether it helped, its price, and its engines."""

    method: str
    kind: str  # "static", "length-dependent", "remapping" or "trained"
    fits: bool  # whether it helped a measured model at this length without training, or is all that such a model needs
    why: str  # the models that it helped, or the reason why none is known, in a clause
    measured: dict[str, float]  # the rise of the loss in bits per token or byte, by the name of the measured model
    short_inputs: str  # the effect on inputs within the context length, in words
    decode: str  # as in `Guidance`
    when: str  # as in `Guidance`
    purposes: tuple[str, ...]  # the purposes that it is a candidate for, of `PURPOSES`
    engines: dict[str, str | None]  # the encoding in which each engine serves it, by its name; None: it refuses
    refusals: dict[str, str]  # the reason, by the name of an engine that refuses

    @property
    def rises(self) -> str:
        """The rise of the loss on each measured model, in order, as text; a dash if it was not measured on a model."""
        return signed(self.measured)


@dataclass(frozen=True, repr=False)
class Advice(ShownAsTables):
    """The advice on extending a model to a length: a recommendation, and everything that it follows from.

    As text it is the recommendation in at most 25 lines of 80 columns; `full_text` has everything.

    Attributes:
        model, model_type: the model.
        target_length: the length to reach, in tokens.
        original_length: the length in tokens that RoPE without any scaling is for.
        context_length, context_rule: the length in tokens that the model is for, and the rule that gave it.
        extended_by: the scalings and patches that the model has already, the last one first.
        factor: the target length divided by the context length.
        methods: the advice on every method, beginning with those that helped a measured model; empty: no method is
            needed.
        choices: for each purpose, the names of the methods to choose from; the first is recommended.
        served: the method that is advised for each engine; "": the model as it is.
        memory: the memory of keys and values, at the context length and at the target length.
        commands: the commands to run next, by their goal in words.
        notes: further remarks, in sentences.
        reported: the results that papers report for the methods that helped, on models of this type, or else on any
            models.
        on_gpus: what fits on the GPUs of a server, at the target length; None: no GPUs were stated.
        purpose: the purpose that the recommendation is for, one of `GOALS`.
        recommended: the name of the method for that purpose; empty: none is needed, or none helped.
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
    def _lengths(self) -> Rows:
        """The rows of a table with the lengths and the notes, each with a name."""
        return [
            ("made for", f"{self.context_length:,} tokens ({self.context_rule})"),
            *(("extended by", extension) for extension in self.extended_by or ("nothing",)),
            ("needed", f"{self.target_length:,} tokens, {self.factor:.3g} times as many"),
            *(("note", note) for note in self.notes),
        ]

    @property
    def _candidates(self) -> Rows:
        rows = [(purpose, ", ".join(names)) for purpose, names in self.choices.items()]
        return [("purpose", "candidates"), *rows] if rows else []

    @property
    def _helped(self) -> Rows:
        """The rows of a table with the methods that helped a measured model, and their prices and gains."""
        head = ("helped", "kind", "inputs within the context length", "rise at this length")
        rows = [
            (method.method, method.kind, method.short_inputs, method.rises) for method in self.methods if method.fits
        ]
        return [head, *rows] if rows else []

    def tables(self) -> Sequence[Rows]:
        model = [("model", f"{self.model} ({self.model_type})"), *self._lengths]
        if not self.methods:
            model.append(("methods", _NOTHING_NEEDED))
        reported = [("by others", str(table)) for table in self.reported]
        commands = [
            (goal, "".join(f"{broken_command(line)}\n" for line in lines)) for goal, lines in self.commands.items()
        ]
        return [model, self._candidates, self._helped, reported, _memory_rows(self.memory), commands]

    def __str__(self) -> str:
        """Return the recommendation in at most 25 lines of 80 columns."""
        return self.short_text()

    def short_text(self, reason: str = "", closing: Sequence[str] = ()) -> str:
        """Return the recommendation, as many notes as fit, the next steps, and the `closing` lines.

        `reason`, if given, replaces the reason from this project's measurements.
        """
        recommendation = self.recommendation(reason)
        steps = [broken_command(step) for step in self.next_steps]
        end = ["All methods, engines and sources: --all (in Python: full_text)", *closing]
        return "\n".join([*recommendation, *self._shown_notes(recommendation, steps, end), *steps, *end])

    def recommendation(self, reason: str = "") -> list[str]:
        """Return lines on the method to take, the reason, the effect on short inputs, and the memory for a long input.

        `reason`, if given, replaces the reason from this project's measurements.
        """
        need = f"{self.target_length:,} tokens, {self.factor:.3g} times as many"
        rows = [("model", f"{self.model} ({self.model_type}), for {self.context_length:,} tokens; you need {need}")]
        rows += self._method_rows(reason)
        for memory in self.memory:
            if (memory.tokens, memory.batch, memory.dtype) == (self.target_length, 1, "bfloat16"):
                use = f"keys and values for one input of {self.target_length:,} tokens in bfloat16"
                rows.append(("cache", f"{_size(memory.bytes)} of {use}"))
        lines: list[str] = []
        for name, text in rows:
            lines += wrapped(text, f"{name:<9}").splitlines()
        return lines

    def _method_rows(self, reason: str) -> list[tuple[str, str]]:
        """Return rows with a name each: the method to take, the reason, and the effect on short inputs."""
        for method in self.methods:
            if method.method == self.recommended:
                rows = [("take", f"{method.method}, {GOALS[self.purpose]}")]
                why = reason or evidence(method.method, self.factor)
                if not why and method.when:
                    why = f"it is the choice when {method.when}"
                if why:
                    rows.append(("because", why))
                return [*rows, ("short", self._short_inputs(method))]
        if not self.methods:
            return [("take", f"the model as it is. {_NOTHING_NEEDED}")]
        others = [word for word, purpose in GOALS.items() if purpose in self.choices and word != self.purpose]
        hint = f"; see --purpose {' or '.join(others)}" if others else ""
        return [("take", f"nothing: no method is known to help here, {GOALS[self.purpose]}{hint}")]

    def _shown_notes(self, *other_lines: Sequence[str]) -> list[str]:
        """Return lines with as many notes as fit beside the other lines, and with the number of notes left out."""
        room = _MOST_LINES - sum(text.count("\n") + 1 for lines in other_lines for text in lines)
        notes = [*([] if self.on_gpus is None else self.on_gpus.sentences), *self.notes]
        shown: list[str] = []
        for number, note in enumerate(notes):
            lines = wrapped(note, f"{'note':<9}").splitlines()
            is_last = number == len(notes) - 1
            if len(shown) + len(lines) > (room if is_last else room - 1):  # a line remains for the number left out
                if len(shown) < room:
                    shown.append(f"{'note':<9}{len(notes) - number} more: --all")
                return shown
            shown += lines
        return shown

    def _short_inputs(self, method: MethodAdvice) -> str:
        """Return a clause on how a method changes the output for inputs within the context length."""
        same, _, how = method.short_inputs.partition(", ")  # a comma in a number has no space after it
        if same == "the same":
            return f"inputs within {self.context_length:,} tokens give the output of the unpatched model, {how}"
        if same.startswith("the same up to "):
            kept = same.removeprefix("the same up to ")
            return f"inputs of up to {kept} give the output of the unpatched model, {how}; longer ones change"
        effect = price(method.method, self.factor) or "change their output; by how much was not measured"
        return f"inputs within {self.context_length:,} tokens {effect}"

    def full_text(self) -> str:
        """Return the whole advice as text: all methods, measurements, reported results, engines and commands."""
        lines = [f"{self.model} ({self.model_type})"]
        lines += [wrapped(text, f"  {name:<16}") for name, text in self._lengths]
        if not self.methods:
            lines += ["", _NOTHING_NEEDED]
        if self.choices:
            lines += ["", text_table(self._candidates)]
        if self.methods:
            lines += ["", *self._measured(), *self._served()]
        if self.reported:
            lines += ["", "Reported by others, not measured here:"]
            lines += [wrapped(str(table), "  ", "    ") for table in self.reported]
        lines += ["", text_table(_memory_rows(self.memory)), wrapped(_MEMORY)]
        if self.on_gpus is not None:
            lines += ["", *[wrapped(sentence) for sentence in self.on_gpus.sentences]]
        for goal, commands in self.commands.items():
            if not goal.startswith(_SERVE):
                lines += ["", f"# {goal}", *[broken_command(command) for command in commands]]
        return "\n".join([*lines, *self._serving()])

    def _serving(self) -> list[str]:
        """Return lines with the commands that print how engines serve the model.

        Engines that serve it alike share a command: it is shown for one of them, and the others are listed below.
        """
        engines_by_command: dict[str, list[str]] = {}
        for goal, commands in self.commands.items():
            if goal.startswith(_SERVE):
                engine = goal.removeprefix(_SERVE)
                engines_by_command.setdefault(commands[0].removesuffix(engine), []).append(engine)
        lines = []
        for command, engines in engines_by_command.items():
            first = usual_server() if usual_server() in engines else engines[0]
            lines += ["", f"# {_SERVE}{first}", broken_command(command + first)]
            others = ", ".join(engine for engine in engines if engine != first)
            if others:
                lines.append(wrapped(f"or --engine {others}", "# ", "# "))
        return lines

    def _measured(self) -> list[str]:
        """Return lines on the methods that helped: their measurements, and the cases in which to choose each of them.

        They end with the reasons why the other methods are not among them.
        """
        lines = ["Measured here, without training:"]
        lines += [wrapped(str(model), "  ", "    ") for model in measured_models()]
        units: dict[str, list[str]] = {}
        for model in measured_models():
            units.setdefault(model.unit, []).append(model.noun)
        in_bits = " and ".join([f"per {unit} of {', '.join(names)}" for unit, names in units.items()])
        lines.append(
            wrapped(
                f"A rise is in bits {in_bits}, over the loss of the unpatched model at its context length. The models "
                "do not agree, and the reason is not known: they differ in size, text, rotated dims and theta. Measure "
                "which candidate reads best on your model, with the first command below."
            )
        )
        helping = [method for method in self.methods if method.fits]
        if helping:
            lines += ["", text_table(self._helped), "", "Take"]
            lines += [wrapped(f"{method.method} when {method.when}", "  ", "    ") for method in helping if method.when]
            slower: dict[str, list[str]] = {}
            for method in helping:
                if method.decode != NOTHING:
                    slower.setdefault(method.decode, []).append(method.method)
            if slower:
                lines += ["More time for each generated token", *_lines_by_group(slower)]
        others: dict[str, list[str]] = {}
        for method in self.methods:
            if not method.fits:
                others.setdefault(method.why, []).append(method.method)
        if others:
            lines += ["", "Not known to help at this length", *_lines_by_group(others)]
        return lines

    def _served(self) -> list[str]:
        """Return lines on how engines serve the methods that helped, and why some refuse the recommended one."""
        methods_by_ways: dict[str, list[str]] = {}
        for method in self.methods:
            if not (method.fits and method.engines):
                continue
            engines_by_way: dict[str, list[str]] = {}
            for engine, encoding in method.engines.items():
                way = (encoding or "refused").partition(" in ")[0].removesuffix(" with equal lists")
                engines_by_way.setdefault(way, []).append(engine)
            ways = "; ".join([f"{way} in {', '.join(engines)}" for way, engines in engines_by_way.items()])
            methods_by_ways.setdefault(ways, []).append(method.method)
        advised = next((name for name in self.served.values() if name), None)
        refusals: dict[str, str] = next((method.refusals for method in self.methods if method.method == advised), {})
        engines_by_reason: dict[str, list[str]] = {}
        for engine, refusal in refusals.items():
            if engine not in self.served:
                reason = refusal[max(0, refusal.find("cannot")) :]
                engines_by_reason.setdefault(reason, []).append(engine)
        head = ["", "Served by engines"] if methods_by_ways else []
        return [*head, *_lines_by_group(methods_by_ways), *_lines_by_group(engines_by_reason)]


def _lines_by_group(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line "NAMES: TEXT" for each text; `groups` has, for each text, the names that it applies to."""
    return [wrapped(f"{', '.join(names)}: {text}", "  ", "    ") for text, names in groups.items()]


def signed(by_model: Mapping[str, float]) -> str:
    """Return the values for the measured models, in order, with sign and two decimals; a dash if there is none."""
    values = [f"{by_model[model.name]:+.2f}" if model.name in by_model else "-" for model in measured_models()]
    return " / ".join(values)


def _size(number: int) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e8 else f"{number / 1e6:,.2f} MB"


def _memory_rows(memory: Iterable[CacheMemory]) -> Rows:
    """Return the rows of a table of memory: one for each length and batch, with a column for each dtype."""
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for entry in memory:
        rows.setdefault((entry.tokens, entry.batch), {})[entry.dtype] = _size(entry.bytes)
    head = ("keys and values", "inputs at a time", *next(iter(rows.values())))
    return [head, *((f"{tokens:,} tokens", str(batch), *cells.values()) for (tokens, batch), cells in rows.items())]
