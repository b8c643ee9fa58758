"""`advise`: from a model and a length in tokens to a method, its cost, the engines that serve it, and the commands.

print(rope.advise("Qwen/Qwen3-8B", 131072))
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.engines.base import ServingConfig, list_engines
from rope_ext_hf.engines.comparison import reference_engine
from rope_ext_hf.errors import MethodError, ServingError, one_line
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.guidance import FINE_TUNING, NOTHING, PURPOSES, SERVING, Guidance
from rope_ext_hf.methods.measurements import (
    Rise,
    cost_notes,
    factor_for,
    measured_models,
    measured_reach,
    rises_at,
    rises_for_short_inputs,
    worth_trying,
)
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.describing import scalings_underneath
from rope_ext_hf.patches.geometry import base_rope_of_config, bind_to
from rope_ext_hf.patches.layer_types import SLIDING
from rope_ext_hf.patches.notes import sliding_note
from rope_ext_hf.serving.memory import CacheMemory, cache_memory
from rope_ext_hf.serving.target import Model, describe_config, make_target, open_model

__all__ = ["Advice", "advise"]

_OWN_PROCESS = reference_engine().name
"""The engine that is this package's own process: it is no evidence about a server."""
_SHORT_COMMAND = 400
"""Characters; a longer command line is left out of the text: `serve-config`, which stands before it, prints it."""
_WIDTH = 100
_MEASURED_SPANS = 8
"""Of every length, in the commands that measure: enough to compare methods, and no whole corpus."""


@dataclass(frozen=True)
class MethodAdvice:
    """What one method is for a model and a length.

    Attributes:
        method: its name.
        kind: "static", "length-dependent", "remapping" or "trained".
        fits: whether it is worth trying at this length without training, by what was measured.
        why: why it fits or does not.
        measured: how much the loss rose at this length, by the model that it was measured on, in bits per byte.
        short_inputs: what it does to inputs within the context length.
        decode, when: see `Guidance`.
        purposes: what it is the first choice for; names of `PURPOSES`.
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
        methods: every method, the fitting ones first; empty where no method is needed.
        choices: the methods to take first, by purpose.
        served: the method that is advised for each engine; "": the model as it is.
        memory: of keys and values, at the context length and at the target length.
        commands: what to run next, by what for.
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
            *(f"  note            {note}" for note in self.notes),
        ]
        if not self.methods:
            lines += ["", "No method is needed."]
        if self.choices:
            lines += ["", *_columns([("for", "take"), *((key, ", ".join(v)) for key, v in self.choices.items())])]
        if self.methods:
            lines += ["", *self._measured_table()]
            engines = [name for name in list_engines() if any(name in each.engines for each in self.methods)]
            rows = [
                (m.method, *(_brief(m.engines[name]) for name in engines)) for m in self.methods if m.fits and m.engines
            ]
            if rows:
                lines += ["", *_columns([("served by", *engines), *rows])]
            lines += [f"  {names}: {reason}" for names, reason in self._refusals()]
        lines += ["", *_memory_table(self.memory)]
        for purpose, commands in self.commands.items():
            lines += ["", f"# {purpose}", *(_wrapped(each) for each in commands if len(each) <= _SHORT_COMMAND)]
        return "\n".join(lines)

    def _measured_table(self) -> list[str]:
        """The methods that fit with what was measured, what sets them apart, and why the others do not fit."""
        fitting = [each for each in self.methods if each.fits]
        lines = ["Without training, measured on:", *(f"  the {model}" for model in measured_models())]
        lines.append("A rise is in bits per byte, over the loss of the model as loaded at its context length.")
        lines.append("Small models rank methods; they do not predict a large one. Measure yours.")
        if fitting:
            head = ("worth trying", "kind", "inputs within the context length", "rise at this length")
            rows = ((m.method, m.kind, m.short_inputs, " / ".join(_signed(m.measured.values()))) for m in fitting)
            lines += ["", *_columns([head, *rows]), ""]
            lines += ["take", *(f"  {each.method} when {each.when}" for each in fitting if each.when)]
            costs = _grouped((each.decode, each.method) for each in fitting if each.decode != NOTHING)
            lines += ["time of a generated token", *(f"  {', '.join(names)}: {cost}" for cost, names in costs.items())]
        others = _grouped((each.why, each.method) for each in self.methods if not each.fits)
        if others:
            lines += [
                "",
                "not advised at this length",
                *(f"  {', '.join(names)}: {why}" for why, names in others.items()),
            ]
        return lines

    def _refusals(self) -> list[tuple[str, str]]:
        """Why engines refuse the method that was chosen first, and which."""
        chosen = next((name for name in self.served.values() if name), None)
        each = next((m for m in self.methods if m.method == chosen), None)
        refused = [(reason, name) for name, reason in each.refusals.items() if name not in self.served] if each else []
        grouped = _grouped((reason[max(0, reason.find("cannot")) :], name) for reason, name in refused)
        return [(", ".join(names), reason) for reason, names in grouped.items()]


def _wrapped(command: str) -> str:
    """A command line, its options on further lines where it is long."""
    lines = [""]
    for part in command.replace(" --", "\n--").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH - 3:
            lines.append("  " + part)
        else:
            lines[-1] += (" " if lines[-1] else "") + part
    return " \\\n".join(lines)


def _signed(values: Iterable[float]) -> list[str]:
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


def advise(
    model: nn.Module | str | Path,
    target_length: int,
    *,
    over: str = "own",
    context_length: int | None = None,
    batches: Sequence[int] = (1, 8),
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Advice:
    """Advise on how a model gets to a length, from its config alone; no weights are read.

    Args:
        model: a model in memory, a folder, a Hub id or "reference".
        target_length: tokens.
        over, context_length: as in `patch`.
        batches: the numbers of inputs at a time that memory is computed for.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        MethodError: a length or a batch below 1.
        CheckpointError: no such model.
        UnsupportedModelError: a model without rotary embeddings, or with several.
    """
    for name, value in (("target_length", target_length), *(("a batch", each) for each in batches)):
        if not isinstance(value, int) or value < 1:
            raise MethodError(f"{name} must be a whole number of at least 1, got {value!r}")
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    own = base_rope_of_config(opened.described, over, context_length)
    rotary, rule, specs = own.rotary, own.rule, opened.specs if over == "own" and context_length is None else []
    reached, extended_by = rotary.context_length, [str(each) for each in scalings_underneath(rotary)]
    if specs:
        top = specs[-1]
        extended = top.target_length or top.method.extended_length(top.rotary)
        reached, rule = max(reached, extended or 0), "the patch that it carries"
        extended_by.append(f"{top.method.label()}, a patch" + (f", for {extended:,} tokens" if extended else ""))
    run = _Planner(opened, rotary, target_length, {"over": over, "context_length": context_length})
    needed = target_length > reached
    methods = run.methods() if needed else []
    choices = _choices(methods)
    served, configs = run.served(methods) if needed else run.as_it_is()
    larger: tuple[str, ...] = ()
    if specs and 2 * target_length <= reached:
        times = f"{reached / target_length:.3g} times what is asked for"
        larger = (f"The patch is for {reached:,} tokens, {times}.", *cost_notes(specs[-1].method, specs[-1].rotary))
    note, _ = sliding_note(opened.config, _sliding_rope(opened), target_length)
    lengths = sorted({min(reached, target_length), target_length})
    return Advice(
        model=opened.name,
        model_type=opened.config.model_type,
        target_length=target_length,
        original_length=rotary.trained_length,
        context_length=reached,
        context_rule=rule,
        extended_by=tuple(reversed(extended_by)),
        factor=target_length / reached,
        methods=tuple(sorted(methods, key=lambda each: (not each.fits, not each.purposes))),
        choices=choices,
        served=served,
        memory=cache_memory(opened.config, lengths, list(batches)),
        commands=run.commands(served, configs, choices, reached),
        notes=(*(text for text in (note, opened.described.note, run.refusal) if text), *larger),
    )


def _sliding_rope(opened: Model) -> Any:
    parameters = getattr(opened.config, "rope_parameters", None) or {}
    apart = next((key for key, value in parameters.items() if key in SLIDING and isinstance(value, Mapping)), None)
    return None if apart is None else describe_config(opened.config, apart)


def _choices(methods: Sequence[MethodAdvice]) -> dict[str, tuple[str, ...]]:
    """The methods to take at this length, by purpose: the candidates that fit, by what was measured.

    Where no candidate for serving fits: the fitting method with the lowest loss that an engine serves. Fine-tuning
    needs no fit.
    """

    def served(each: MethodAdvice) -> bool:
        return any(encoding for name, encoding in each.engines.items() if name != _OWN_PROCESS)

    def takes(each: MethodAdvice, purpose: str) -> bool:
        ready = each.kind != "" and (each.fits or purpose == FINE_TUNING)
        return purpose in each.purposes and ready and (served(each) or purpose != SERVING)

    chosen = {purpose: tuple(m.method for m in methods if takes(m, purpose)) for purpose in PURPOSES}
    if not chosen[SERVING]:
        fitting = [each for each in methods if each.fits and served(each)]
        lowest = sorted(fitting, key=lambda each: sum(each.measured.values()))
        chosen[SERVING] = tuple(each.method for each in lowest[:1])
    return {purpose: names for purpose, names in chosen.items() if names}


class _Planner:
    """One model on its way to one length."""

    def __init__(self, opened: Model, rotary: Rotary, target_length: int, underneath: dict[str, Any]) -> None:
        self.opened, self.rotary, self.target_length, self.underneath = opened, rotary, target_length, underneath
        given = {key: value for key, value in underneath.items() if value not in (None, "own")}
        self.options = "".join(f" --{key.replace('_', '-')} {value}" for key, value in given.items())
        self.configs: dict[tuple[str, str], ServingConfig] = {}
        self.refusal = ""

    def methods(self) -> list[MethodAdvice]:
        """Every method that states when to use it."""
        known = list_methods().items()
        return [self._method(name, cls, cls.guidance) for name, cls in known if cls.guidance is not None]

    def _method(self, name: str, cls: type[RopeMethod], guidance: Guidance) -> MethodAdvice:
        engines: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        factor = self.target_length / self.rotary.context_length
        rises = rises_at(name, factor)
        kind, fits, short = "", False, ""
        try:
            method = resolve_method(name, self.rotary, target_length=self.target_length)
            method = bind_to(method, self.rotary, self.opened.config.model_type, self.target_length)
        except MethodError as error:
            why = guidance.unmeasured or one_line(error)
        else:
            kind = _kind(method)
            fits = worth_trying(rises)
            why = self._why(name, guidance, rises)
            short = self._short_inputs(method, factor)
        if kind == "static":
            engines, refusals = self._engines(name)
        return MethodAdvice(
            method=name,
            kind=kind,
            fits=fits,
            why=why,
            measured={rise.model.name: rise.increase for rise in rises},
            short_inputs=short,
            decode=guidance.decode,
            when=guidance.when,
            purposes=guidance.purposes,
            engines=engines,
            refusals=refusals,
        )

    def _why(self, name: str, guidance: Guidance, rises: Sequence[Rise]) -> str:
        factor = self.target_length / self.rotary.context_length
        reach, longest = measured_reach(name)
        if longest == 1:
            return guidance.unmeasured or "not measured"
        if not rises:
            return f"not measured beyond {longest:g} times the context length; worth trying up to {reach:g} times"
        if worth_trying(rises):
            return f"worth trying (up to {reach:g} times the context length)"
        larger = factor_for(name, factor)
        if larger is not None:
            return f"worth trying with a larger factor, {larger:g} and not {factor:.3g}"
        return f"the loss rose too much: {' / '.join(_signed(rise.increase for rise in rises))}"

    def _short_inputs(self, method: RopeMethod, factor: float) -> str:
        kept = method.unchanged_length(self.rotary)
        if kept >= min(self.target_length, UNBOUNDED):
            return "the same"
        if kept:
            return f"the same up to {kept:,} tokens"
        rises = rises_for_short_inputs(method.name, factor)
        if not rises:
            return "change"
        return f"rise by {' / '.join(_signed(rise.increase for rise in rises))}"

    def _engines(self, name: str) -> tuple[dict[str, str | None], dict[str, str]]:
        encodings: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        try:
            target = make_target(self.opened, name, target_length=self.target_length, **self.underneath)
        except (MethodError, ServingError) as error:
            return encodings, dict.fromkeys(list_engines(), one_line(error))
        for engine, cls in list_engines().items():
            try:
                config = cls().config_for(target)
            except ServingError as error:
                encodings[engine], refusals[engine] = None, one_line(error)
            else:
                encodings[engine] = config.encoding
                self.configs[engine, name] = config
        return encodings, refusals

    def served(self, methods: Sequence[MethodAdvice]) -> tuple[dict[str, str], dict[str, ServingConfig]]:
        """The fitting method that each engine serves: the first choice for serving, else the first of the others."""
        fitting = [each for each in methods if each.fits]
        ordered = sorted(fitting, key=lambda each: SERVING not in each.purposes)
        served: dict[str, str] = {}
        for engine in list_engines():
            name = next((each.method for each in ordered if each.engines.get(engine)), None)
            if name is not None:
                served[engine] = name
        return served, {engine: self.configs[engine, name] for engine, name in served.items()}

    def as_it_is(self) -> tuple[dict[str, str], dict[str, ServingConfig]]:
        """The engines that serve the model without a further method, up to the target length where they can."""
        configs: dict[str, ServingConfig] = {}
        try:
            whole = make_target(self.opened, **self.underneath)
        except (MethodError, ServingError) as error:  # a patch that no engine runs
            self.refusal = one_line(error)
            return {}, {}
        shorter = whole if self.rotary.length_dependent else replace(whole, length=self.target_length)
        for engine, cls in list_engines().items():
            for target in (shorter, whole):
                try:
                    configs[engine] = cls().config_for(target)
                    break
                except ServingError:
                    continue
        return dict.fromkeys(configs, Default.name if self.options else ""), configs

    def commands(
        self,
        served: Mapping[str, str],
        configs: Mapping[str, ServingConfig],
        choices: Mapping[str, Sequence[str]],
        reached: int,
    ) -> dict[str, tuple[str, ...]]:
        """What to run next, by what for."""
        model, target = self.opened.name, str(self.target_length)
        quoted = shlex.quote(model)
        first = next(iter(choices.get(SERVING, ())), None)
        compared = list(dict.fromkeys(name for names in choices.values() for name in names))
        lengths = f"{min(reached, self.target_length)},{target}" if reached != self.target_length else target
        result: dict[str, tuple[str, ...]] = {}
        if compared:
            asked = f"--method {','.join(compared)} --target-length {target}{self.options} --lengths {lengths}"
            tokens = _MEASURED_SPANS * (len(compared) + 1) * sum(map(int, lengths.split(",")))
            result[f"measure on your own text: bits per byte ({tokens:,} tokens are read), then retrieval"] = (
                f"rope-ext ppl {quoted} {asked} --max-spans {_MEASURED_SPANS} --data 'texts/*.txt'",
                f"rope-ext passkey {quoted} {asked}",
            )
        if first is not None:
            asked = f"--method {first} --target-length {target}{self.options}"
            out = shlex.quote(f"{Path(model).name}-{target}")
            result["see what it changes, and keep it in a folder"] = (
                f"rope-ext describe {quoted} {asked}",
                f"rope-ext patch {quoted} {asked} --out {out}",
            )
        programs: set[str] = set()
        for engine, name in served.items():
            program = next((word for word in configs[engine].command if word not in ("python", "-m")), engine)
            if engine == _OWN_PROCESS or program in programs:  # a second way to run the same program
                continue
            programs.add(program)
            asked = f" --method {name}" + ("" if name == Default.name else f" --target-length {target}") if name else ""
            result[f"serve with {engine}"] = tuple(_serve(quoted, asked + self.options, engine, configs[engine]))
        return result


def _kind(method: RopeMethod) -> str:
    if isinstance(method, RemappingMethod):
        return "remapping"
    if method.trainable:
        return "trained"
    return "length-dependent" if method.length_dependent else "static"


def _serve(model: str, asked: str, engine: str, config: ServingConfig) -> Iterable[str]:
    """The commands that lead to a running server."""
    yield f"rope-ext serve-config {model}{asked} --engine {engine}"
    if config.gguf_keys:
        yield f"rope-ext gguf IN.gguf OUT.gguf --model {model}{asked}"
    complete = config.command and (config.overrides is not None or not config.config_keys)
    if complete:
        variables = "".join(f"{key}={shlex.quote(value)} " for key, value in config.environment.items())
        yield variables + shlex.join(config.command)
