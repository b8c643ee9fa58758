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
from rope_ext_hf.errors import MethodError, ServingError, one_line
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.guidance import FINE_TUNING, PURPOSES, SERVING, Guidance
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

_OWN_PROCESS = "transformers"
"""The engine that is this package's own process: it says nothing about a server."""
_SHORT_COMMAND = 400
"""Characters; of a longer command line the text says where it comes from."""


@dataclass(frozen=True)
class MethodAdvice:
    """What one method is for a model and a length.

    Attributes:
        method: its name.
        kind: "static", "length-dependent", "remapping" or "trained".
        fits: whether it is worth trying at this length without training.
        why: why it fits or does not, in words.
        untrained, short_inputs, decode, when: see `Guidance`.
        purposes: what it is the first choice for; names of `PURPOSES`.
        engines: how each engine serves it, by the engine's name; None: it refuses.
        refusals: why, by the engine's name.
    """

    method: str
    kind: str
    fits: bool
    why: str
    untrained: str
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
        extended_by: the scalings and patches that it has already, in words, the last one first.
        factor: the target length over the context length.
        methods: every method, the fitting ones first; empty where no method is needed.
        choices: the methods to take first, by purpose.
        served: the method that is advised for each engine; "": the model as it is.
        memory: of keys and values, at the context length and at the target length.
        commands: what to run next, by what for.
        notes: what else there is to know, in words.
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
            fit = ("method", "kind", "without training", "short inputs", "at this length")
            lines += ["", *_columns([fit, *map(_method_row, self.methods)])]
            cost = ("method", "a generated token costs", "take it when")
            lines += ["", *_columns([cost, *((each.method, each.decode, each.when) for each in self.methods)])]
            engines = [name for name in list_engines() if any(name in each.engines for each in self.methods)]
            fitting = [each for each in self.methods if each.engines and each.fits]
            rows = [(each.method, *(_form(each.engines[name]) for name in engines)) for each in fitting]
            lines += ["", *_columns([("served by", *engines), *rows])]
            lines += [f"  {names}: {reason}" for names, reason in self._refusals()]
        lines += ["", *_memory_table(self.memory)]
        for purpose, commands in self.commands.items():
            lines += ["", f"# {purpose}", *(_shown(each) for each in commands)]
        return "\n".join(lines)

    def _refusals(self) -> list[tuple[str, str]]:
        """Why engines refuse the method that was chosen first, and which."""
        chosen = next((name for name in self.served.values() if name), None)
        each = next((m for m in self.methods if m.method == chosen), None)
        grouped: dict[str, list[str]] = {}
        for name, reason in each.refusals.items() if each else ():
            if name not in self.served:
                grouped.setdefault(reason[max(0, reason.find("cannot")) :], []).append(name)
        return [(", ".join(names), reason) for reason, names in grouped.items()]


def _shown(command: str) -> str:
    return command if len(command) <= _SHORT_COMMAND else f"# {command.split()[0]}: the long line that this prints"


def _method_row(each: MethodAdvice) -> tuple[str, ...]:
    return each.method, each.kind, each.untrained, each.short_inputs, each.why


def _form(form: str | None) -> str:
    """How a method is written for an engine, in one word or two; a dash where the engine refuses it."""
    return "-" if form is None else form.partition(" in ")[0].removesuffix(" with equal lists")


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
        notes=tuple(text for text in (note, opened.described.note, run.refusal) if text),
    )


def _sliding_rope(opened: Model) -> Any:
    parameters = getattr(opened.config, "rope_parameters", None) or {}
    apart = next((key for key, value in parameters.items() if key in SLIDING and isinstance(value, Mapping)), None)
    return None if apart is None else describe_config(opened.config, apart)


def _choices(methods: Sequence[MethodAdvice]) -> dict[str, tuple[str, ...]]:
    """The methods that are first choices at this length, by purpose; what they are served by is asked for serving."""

    def takes(each: MethodAdvice, purpose: str) -> bool:
        ready = each.kind != "" and (each.fits or purpose == FINE_TUNING)
        served = any(form for name, form in each.engines.items() if name != _OWN_PROCESS)
        return purpose in each.purposes and ready and (served or purpose != SERVING)

    chosen = {purpose: tuple(m.method for m in methods if takes(m, purpose)) for purpose in PURPOSES}
    if methods and not chosen[SERVING]:
        chosen[SERVING] = tuple(m.method for m in methods if m.fits and any(m.engines.values()))[:1]
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
        kind, fits = "", False
        try:
            method = resolve_method(name, self.rotary, target_length=self.target_length)
            method = bind_to(method, self.rotary, self.opened.config.model_type, self.target_length)
        except MethodError as error:
            why = one_line(error)
        else:
            kind = _kind(method)
            fits = factor <= guidance.reach and factor * guidance.share > 1
            why = self._why(guidance, factor)
        if kind == "static":
            engines, refusals = self._engines(name)
        return MethodAdvice(
            method=name,
            kind=kind,
            fits=fits,
            why=why,
            untrained=guidance.untrained,
            short_inputs=guidance.short_inputs,
            decode=guidance.decode,
            when=guidance.when,
            purposes=guidance.purposes,
            engines=engines,
            refusals=refusals,
        )

    def _why(self, guidance: Guidance, factor: float) -> str:
        if factor > guidance.reach:
            return "after training" + ("" if guidance.reach <= 1 else f"; untrained up to {guidance.reach_text}")
        if guidance.share < 1:
            works = round(guidance.share * self.target_length)
            return f"works to about {works:,} tokens with this factor"
        return f"worth trying (up to {guidance.reach_text})"

    def _engines(self, name: str) -> tuple[dict[str, str | None], dict[str, str]]:
        forms: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        try:
            target = make_target(self.opened, name, target_length=self.target_length, **self.underneath)
        except (MethodError, ServingError) as error:
            return forms, dict.fromkeys(list_engines(), one_line(error))
        for engine, cls in list_engines().items():
            try:
                config = cls().config_for(target)
            except ServingError as error:
                forms[engine], refusals[engine] = None, one_line(error)
            else:
                forms[engine] = config.encoding
                self.configs[engine, name] = config
        return forms, refusals

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
            result["measure on your own text: bits per byte, then retrieval"] = (
                f"rope-ext ppl {quoted} {asked} --data 'texts/*.txt'",
                f"rope-ext passkey {quoted} {asked}",
            )
        if first is not None:
            asked = f"--method {first} --target-length {target}{self.options}"
            out = shlex.quote(f"{Path(model).name}-{target}")
            result["see what it changes, and keep it in a folder"] = (
                f"rope-ext describe {quoted} {asked}",
                f"rope-ext patch {quoted} {asked} --out {out}",
            )
        for engine, name in served.items():
            if engine == _OWN_PROCESS:
                continue
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
    if config.gguf_keys or (config.config_keys and config.overrides is None):
        yield from (f"# {note}" for note in config.notes)
    complete = config.command and (config.overrides is not None or not config.config_keys)
    if complete:
        variables = "".join(f"{key}={shlex.quote(value)} " for key, value in config.environment.items())
        yield variables + shlex.join(config.command)
