"""Advice, the result of `advise`: how a model gets to a length, as values and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rope_ext_hf.engines.base import list_engines
from rope_ext_hf.methods.guidance import NOTHING
from rope_ext_hf.methods.measurements import measured_models

_SHORT_COMMAND = 400
"""Characters; a longer command line is left out of the text: `serve-config`, which stands before it, prints it."""
_WIDTH = 100


@dataclass(frozen=True)
class CacheMemory:
    """Memory of keys and values.

    Attributes:
        dtype: "float32", "bfloat16" (and float16) or "8 bits".
        batch: inputs at a time.
        tokens: tokens of each input.
        bytes: of all of them together.
    """

    dtype: str
    batch: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class MethodAdvice:
    """One method for a model and a length.

    Attributes:
        method: its name.
        kind: "static", "length-dependent", "remapping" or "trained".
        fits: whether it helped a measured model at this length, without training.
        why: where it helped.
        measured: how much the loss rose at this length, by the model that it was measured on, in bits per byte.
        short_inputs: the effect on inputs within the context length, in words.
        decode, when: see `Guidance`.
        purposes: the goals that the method is a candidate for; names of `PURPOSES`.
        engines: how each engine serves it, by the engine's name; None: it refuses.
        refusals: why, by the engine's name.
    """

    method: str
    kind: str
    fits: bool
    why: str
    measured: dict[str, float]
    short_inputs: str
    decode: str
    when: str
    purposes: tuple[str, ...]
    engines: dict[str, str | None]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Advice:
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        extended = [f"  extended by     {each}" for each in self.extended_by] or ["  extended by     nothing"]
        lines = [
            f"{self.model} ({self.model_type})",
            f"  made for        {self.context_length:,} tokens ({self.context_rule})",
            *extended,
            f"  asked for       {self.target_length:,} tokens, {self.factor:.3g} times as many",
            *(line for note in self.notes for line in _note(note)),
        ]
        if not self.methods:
            lines += ["", "No method is needed."]
        if self.choices:
            lines += ["", *_columns([("for", "candidates"), *((key, ", ".join(v)) for key, v in self.choices.items())])]
        if self.methods:
            lines += ["", *self._measured_table()]
            engines = [name for name in list_engines() if any(name in each.engines for each in self.methods)]
            served = [each for each in self.methods if each.fits and each.engines]
            if served:
                rows = [(name, *(_brief(each.engines[name]) for each in served)) for name in engines]
                lines += ["", *_columns([("served by", *(each.method for each in served)), *rows])]
            lines += [f"  {names}: {reason}" for names, reason in self._refusals()]
        lines += ["", *_memory_table(self.memory)]
        for purpose, commands in self.commands.items():
            lines += ["", f"# {purpose}", *(_wrapped(each) for each in commands if len(each) <= _SHORT_COMMAND)]
        return "\n".join(lines)

    def _measured_table(self) -> list[str]:
        """The methods that fit, with their measurements and what sets each apart; then why the others do not fit."""
        fitting = [each for each in self.methods if each.fits]
        lines = ["Without training, measured on:", *(f"  the {model}" for model in measured_models())]
        lines.append("A rise is in bits per byte, over the loss of the model as loaded at its context length.")
        lines.append("They do not agree, and what decides it is not known: they differ in size, text, dims and base.")
        lines.append("Which candidate reads best here is known when it is measured, by the first command below.")
        if fitting:
            head = ("helped", "kind", "inputs within the context length", "rise at this length")
            rows = ((m.method, m.kind, m.short_inputs, " / ".join(signed(m.measured.values()))) for m in fitting)
            lines += ["", *_columns([head, *rows]), ""]
            lines += ["take", *(f"  {each.method} when {each.when}" for each in fitting if each.when)]
            costs = _grouped((each.decode, each.method) for each in fitting if each.decode != NOTHING)
            lines += ["time of a generated token", *(f"  {', '.join(names)}: {cost}" for cost, names in costs.items())]
        others = _grouped((each.why, each.method) for each in self.methods if not each.fits)
        if others:
            lines += [
                "",
                "not shown to help at this length",
                *(f"  {', '.join(names)}: {why}" for why, names in others.items()),
            ]
        return lines

    def _refusals(self) -> list[tuple[str, str]]:
        """The engines that refuse the method of the first engine that serves one, and their reasons."""
        chosen = next((name for name in self.served.values() if name), None)
        each = next((m for m in self.methods if m.method == chosen), None)
        refused = [(reason, name) for name, reason in each.refusals.items() if name not in self.served] if each else []
        grouped = _grouped((reason[max(0, reason.find("cannot")) :], name) for reason, name in refused)
        return [(", ".join(names), reason) for reason, names in grouped.items()]


def _note(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH + 10,
        initial_indent="  note            ",
        subsequent_indent=" " * 18,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(command: str) -> str:
    """A command line, its options on further lines where it is long, and JSON broken after commas."""
    lines = [""]
    for part in command.replace(" --", "\n--").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH - 3:
            lines.append("  " + part)
        else:
            lines[-1] += (" " if lines[-1] else "") + part
    return " \\\n".join(_json_wrapped(line) for line in lines)


def _json_wrapped(line: str) -> str:
    """A line with JSON in single quotes, where line ends change nothing, on lines that are not too long."""
    command, quote, json = line.partition("'{")
    if not quote:
        return line
    wrapped = textwrap.wrap(
        quote + json,
        _WIDTH,
        initial_indent=" " * len(command),  # outside the quotes, a line end would end the command
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return command + "\n".join(wrapped)[len(command) :]


def signed(values: Iterable[float]) -> list[str]:
    """Each value with its sign and two decimals."""
    return [f"{value:+.2f}" for value in values]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second of each pair, by the first."""
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _brief(encoding: str | None) -> str:
    """How a method is written for an engine, in one word or two; a dash where the engine refuses it."""
    return "-" if encoding is None else encoding.partition(" in ")[0].removesuffix(" with equal lists")


def _size(number: int) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e8 else f"{number / 1e6:,.2f} MB"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _memory_table(memory: Iterable[CacheMemory]) -> list[str]:
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for each in memory:
        rows.setdefault((each.tokens, each.batch), {})[each.dtype] = _size(each.bytes)
    dtypes = next(iter(rows.values()))
    head = ("keys and values", "inputs at a time", *dtypes)
    table = [head, *((f"{tokens:,} tokens", str(batch), *cells.values()) for (tokens, batch), cells in rows.items())]
    note = "Every generated token reads those of its own input once; weights and activations come on top."
    return [*_columns(table), note]
