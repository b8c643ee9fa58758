"""`advise`: from a model and a length in tokens to a method, its cost, the engines that serve it, and the commands.

print(advise("Qwen/Qwen3-8B", 131072))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import MOST_TOKENS, Length, check_int, parse_length
from rope_ext_hf.errors import MethodError, ServingError, UnsupportedModelError, one_line, short
from rope_ext_hf.files.whole import foreign_errors
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.patches.describing import scalings_underneath, short_input_notes
from rope_ext_hf.reading.cost.memory import cached_bytes, cached_layers
from rope_ext_hf.tools.advice.advice import Advice, CacheMemory, MethodAdvice, signed
from rope_ext_hf.tools.advice.guidance import (
    FINE_TUNING,
    GOALS,
    PURPOSES,
    SERVING,
    Guidance,
    guidance_of,
    guided_methods,
)
from rope_ext_hf.tools.advice.measured import Rise, deciding, helped, reach_text, rises_at, rises_for_short_inputs
from rope_ext_hf.tools.advice.next_commands import NextCommands
from rope_ext_hf.tools.advice.reported import Reported, reported
from rope_ext_hf.tools.engines.base import find_engine, list_engines, reference_engine
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.serving.configs import Model, make_target, open_model
from rope_ext_hf.tools.serving.gpu_memory import gpu_memory
from rope_ext_hf.tools.serving.serving_options import GPUServer

_WIDTHS = {"float32": 4, "bfloat16": 2, "8 bits": 1}  # bytes of a number by dtype; float16 has those of bfloat16


@foreign_errors("no advice can be given on this model")
def advise(
    model: nn.Module | str | Path | Model,
    target_length: Length,
    *,
    over: str = "own",
    context_length: Length | None = None,
    batches: Sequence[int] = (1, 8),
    server: GPUServer | None = None,
    engines: Collection[str] | None = None,
    purpose: str = "serve",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Advice:
    """Advise on how to extend a model to a length, from its config alone; no weights are read.

    Args:
        model: a model in memory, a folder, a Hub id, or "reference" for the bundled model; or a model that `open_model`
            returned.
        target_length: the length in tokens.
        over, context_length: as in `patch`.
        batches: the batch sizes for which memory is computed.
        server: the GPUs of a server, to compute what fits there and its options.
        engines: names of the engines that the advice covers; None: all.
        purpose: the purpose for which one method is recommended: "serve", "python" (in your own process) or "train".
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        MethodError: a length or a batch below 1, or one that no model has; or an unknown purpose.
        CheckpointError: the model does not exist.
        UnsupportedModelError: a model without rotary embeddings, or with several.
    """
    target_length, context_length = parse_length(target_length), parse_length(context_length)
    check_int("target_length", target_length, 1, MOST_TOKENS)
    for batch in batches:
        check_int("a batch", batch, 1, MOST_TOKENS)
    check_purpose(purpose)
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    present = _Present.of(opened, over, context_length)
    on_gpus = None
    if server is not None and server.gpus:
        on_gpus = gpu_memory(opened.whole(), target_length, server)
    base_arguments = {"over": over, "context_length": context_length}
    options = {key: value for key, value in base_arguments.items() if value not in (None, "own")}
    advisor = _Advisor(opened, present.rotary, target_length, base_arguments, engines or list_engines())
    methods: list[MethodAdvice] = []
    if target_length > present.context_length:
        methods = advisor.methods()
        served, configs = advisor.served(methods)
    else:
        served, configs = advisor.served_as_it_is("default" if options else "")
    choices = _choices(methods)
    recommended = next(iter(choices.get(GOALS[purpose], ())), "")
    lengths = sorted({min(present.context_length, target_length), target_length})
    commands = NextCommands(opened, target_length, options)
    return Advice(
        model=opened.given_name,
        model_type=opened.config.model_type,
        target_length=target_length,
        original_length=present.rotary.trained_length,
        context_length=present.context_length,
        context_rule=present.rule,
        extended_by=present.extended_by,
        factor=target_length / present.context_length,
        methods=tuple(sorted(methods, key=lambda method: (not method.fits, not method.purposes))),
        choices=choices,
        served=served,
        memory=_cache_memory(opened.config, lengths, batches),
        commands=commands.by_goal(served, configs, choices, present.context_length, server, on_gpus),
        notes=_notes(opened, present, advisor, methods, choices, target_length),
        reported=_reported(opened.config.model_type, {method.method for method in methods if method.fits}),
        on_gpus=on_gpus,
        purpose=purpose,
        recommended=recommended,
        next_steps=commands.next_steps(purpose, recommended, lengths, served),
    )


def check_purpose(purpose: str) -> None:
    """Raise a MethodError for a purpose that is not one of `GOALS`."""
    if purpose not in GOALS:
        raise MethodError(f"purpose must be one of {', '.join(GOALS)}, got {short(repr(purpose))}")


@dataclass(frozen=True)
class _Present:
    """The present state of a model, before it is extended: its rotary embedding, patch and context length."""

    rotary: Rotary  # the rotary embedding that a method would extend
    patch: Patch | None  # the patch that it carries, unless that is taken away by `over` or `context_length`
    context_length: int  # the length in tokens that it is for, with that patch
    rule: str  # the reading of the config that gave the length
    extended_by: tuple[str, ...]  # scalings and patches, the last one first

    @classmethod
    def of(cls, opened: Model, over: str, context_length: int | None) -> _Present:
        base = opened.rope.extending(over, context_length)
        scalings = [str(scaling) for scaling in scalings_underneath(base.rotary)]
        reached, rule = base.rotary.context_length, base.rule
        if over != "own" or context_length is not None or not opened.patches:
            return cls(base.rotary, None, reached, rule, tuple(reversed(scalings)))
        patch = opened.patches[-1]
        extended = patch.target_length or patch.method.extended_length(patch.rotary)
        scalings.append(f"{patch.method.label()}, a patch" + (f", for {extended:,} tokens" if extended else ""))
        reached = max(reached, extended or 0)
        return cls(base.rotary, patch, reached, "the patch that it carries", tuple(reversed(scalings)))


def _notes(
    opened: Model,
    present: _Present,
    advisor: _Advisor,
    methods: Sequence[MethodAdvice],
    choices: Mapping[str, Sequence[str]],
    target_length: int,
) -> tuple[str, ...]:
    """Return sentences on whatever else a user should know before extending this model to this length."""
    if methods:
        rotary, method = advisor.first_choice_for_serving(choices)
    elif present.patch is not None:
        rotary, method = present.patch.rotary, present.patch.method
    else:
        rotary, method = present.rotary, None
    notes = [
        opened.rope.layers.no_patch_needed,
        opened.sliding_note(target_length),
        opened.rope.embedding.note,
        advisor.refusal,
        opened.published_note(rotary, method),
    ]
    if present.patch is not None and 2 * target_length <= present.context_length:
        times = f"{present.context_length / target_length:.3g} times as much as you need"
        notes.append(f"The patch is for {present.context_length:,} tokens, {times}.")
        notes += short_input_notes(
            present.patch.method,
            present.patch.rotary,
            as_loaded=opened.rope.embedding.is_kept(present.patch.method, present.patch.rotary),
            bit_equal=present.patch.method.keeps_bits and not opened.rope.embedding.follows_length,
        )
    return tuple([note for note in notes if note])


def _reported(model_type: str, methods: Collection[str]) -> tuple[Reported, ...]:
    """Return the results that papers report for these methods, on models of this type, or else on any models."""
    tables = [table for table in reported() if model_type in table.model_types] or reported()
    return tuple([table for table in tables if not table.values.keys().isdisjoint(methods)])


def _cache_memory(config: Any, lengths: Iterable[int], batches: Iterable[int]) -> tuple[CacheMemory, ...]:
    """Return the memory of keys and values, for each length, batch and dtype."""
    memory = []
    with foreign_errors("the sizes of the heads cannot be read from this config"):
        layers = cached_layers(config)
        if not layers:
            raise ServingError(
                "this model has no layer with a key-value cache of its own, so serving it cannot be planned"
            )
        for tokens in lengths:
            sizes = {
                dtype: cached_bytes(config, tokens, width=width, layers=layers) for dtype, width in _WIDTHS.items()
            }
            memory += [
                CacheMemory(dtype, batch, tokens, batch * size) for batch in batches for dtype, size in sizes.items()
            ]
    return tuple(memory)


def _choices(methods: Sequence[MethodAdvice]) -> dict[str, tuple[str, ...]]:
    """Return for each purpose the methods to choose from, the recommended one first; no purpose without any method.

    A candidate has helped a measured model at this length; for fine-tuning it need not have. For serving, a server must
    support it; if none of the methods meant for serving has helped, the candidates are all methods that helped and that
    a server supports.
    """
    servers = list_engines().keys() - {reference_engine().name}  # its own process says nothing about a server
    possible = [method for method in methods if method.kind]
    helping = [method for method in possible if method.fits]
    on_servers = [method.method for method in helping if any(map(method.engines.get, servers))]
    choices: dict[str, tuple[str, ...]] = {}
    for purpose in PURPOSES:
        candidates = possible if purpose == FINE_TUNING else helping
        names = [method.method for method in candidates if purpose in method.purposes]
        if purpose == SERVING:
            names = [name for name in names if name in on_servers] or on_servers
        if names:
            choices[purpose] = tuple(names)
    return choices


@dataclass
class _Advisor:
    """The part of `advise` that judges each method for one model and one target length.

    Attributes:
        configs: the serving configs that engines accepted, by engine and method.
        refusal: a sentence on what could not be found out; empty: everything could.
    """

    opened: Model
    rotary: Rotary
    target_length: int
    base_arguments: dict[str, Any]  # over and context_length
    engine_names: Collection[str]
    configs: dict[tuple[str, str], ServingConfig] = field(default_factory=dict)
    refusal: str = ""

    def __post_init__(self) -> None:
        self.factor = self.target_length / self.rotary.context_length
        self.engines = [find_engine(name) for name in self.engine_names]

    def first_choice_for_serving(self, choices: Mapping[str, Sequence[str]]) -> tuple[Rotary, RopeMethod | None]:
        """Return the first method to choose for serving, and before it the rotary embedding that the method extends.

        The method is None, and the rotary embedding that of the model, if no method is fit for serving. `choices` has
        the methods to choose from, by purpose.
        """
        if SERVING not in choices:
            return self.rotary, None
        patch = self.opened.planned_patch(choices[SERVING][0], target_length=self.target_length, **self.base_arguments)
        return patch.rotary, patch.method

    def methods(self) -> list[MethodAdvice]:
        """Return the advice on every method that guidance.toml has guidance for, for a model of this kind."""
        if not self.opened.can_be_tried:
            self.refusal = (
                "It was not tried which methods `patch` refuses on this model, because no small model of its class can "
                "be built."
            )
        advice = []
        unrotated = self.opened.rope.layers.no_patch_needed is not None
        for name in guided_methods():
            guidance = guidance_of(name)
            if guidance is not None and guidance.unrotated == unrotated and name in list_methods():
                advice.append(self._method(name, guidance))
        return advice

    def _method(self, name: str, guidance: Guidance) -> MethodAdvice:
        rises = rises_at(name, self.factor)
        kind, short_inputs = "", ""
        models: list[str] = []
        encodings: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        try:
            patch = self.opened.planned_patch(name, target_length=self.target_length, **self.base_arguments)
            refusal = self.opened.refusal(name, target_length=self.target_length, **self.base_arguments)
            if refusal is not None:
                raise refusal
        except MethodError as error:
            why = guidance.unmeasured or one_line(error)
        except UnsupportedModelError as error:
            why = one_line(error)
        else:
            kind = _kind(patch.method)
            models = [model.noun for model in helped(deciding(rises))]
            why = self._why(name, guidance, deciding(rises), models)
            short_inputs = self._short_inputs(patch.method)
            if kind == "static":
                encodings, refusals = self._engines(name, patch)
        return MethodAdvice(
            method=name,
            kind=kind,
            fits=bool(models) or (guidance.unrotated and bool(kind)),
            why=why,
            measured={rise.model.name: rise.increase for rise in rises},
            short_inputs=short_inputs,
            decode=guidance.decode,
            when=guidance.when,
            purposes=guidance.purposes,
            engines=encodings,
            refusals=refusals,
        )

    def _why(self, name: str, guidance: Guidance, rises: Sequence[Rise], models: Sequence[str]) -> str:
        """Return a clause on the measured models that a method helped at this length; `models` has their names."""
        if models:
            return f"helped at this length on {' and '.join(models)}"
        if rises:
            return f"did not help on {' and '.join([rise.model.noun for rise in rises])}"
        if guidance.unmeasured:
            return guidance.unmeasured
        reach = reach_text(name)
        return reach if reach == "not measured" else f"not measured at this length; helped: {reach}"

    def _short_inputs(self, method: RopeMethod) -> str:
        """Return a clause on inputs within the context length: unchanged outputs, or how much their loss rises."""
        kept = method.unchanged_length(self.rotary)
        if kept and not self.opened.rope.embedding.is_kept(method, self.rotary):
            return "change"  # the method extends the model without its own scaling, or under another patch
        exact = method.keeps_bits and not self.opened.rope.embedding.follows_length
        how = "bit for bit" if exact else "but for rounding"
        if kept >= self.target_length:
            return f"the same, {how}"
        if kept:
            return f"the same up to {kept:,} tokens, {how}"
        rises = rises_for_short_inputs(method.name, self.factor)
        if not rises:
            return "change"
        return f"rise by {signed({rise.model.name: rise.increase for rise in rises})}"

    def _engines(self, name: str, patch: Patch) -> tuple[dict[str, str | None], dict[str, str]]:
        """Return how each engine serves a patch (None: it refuses), and the reasons of the engines that refuse.

        `name` is the name of the method.
        """
        encodings: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        try:
            target = make_target(self.opened, patch)
        except (MethodError, ServingError) as error:
            return encodings, dict.fromkeys(self.engine_names, one_line(error))
        for engine in self.engines:
            try:
                config = engine.config_for(target)
            except ServingError as error:
                encodings[engine.name], refusals[engine.name] = None, one_line(error)
            else:
                encodings[engine.name] = config.encoding
                self.configs[engine.name, name] = config
        return encodings, refusals

    def served(self, methods: Sequence[MethodAdvice]) -> tuple[dict[str, str], dict[str, ServingConfig]]:
        """Return, for each engine that serves a method that helped, the name of one such method; and their configs.

        Methods that are candidates for serving come first.
        """
        helping = [method for method in methods if method.fits]
        helping.sort(key=lambda method: SERVING not in method.purposes)
        served: dict[str, str] = {}
        for engine in list_engines():
            names = [method.method for method in helping if method.engines.get(engine)]
            if names:
                served[engine] = names[0]
        return served, {engine: self.configs[engine, name] for engine, name in served.items()}

    def served_as_it_is(self, method: str) -> tuple[dict[str, str], dict[str, ServingConfig]]:
        """Return `method` for each engine that serves the model as it is, and the serving configs of these engines.

        The config is for the target length if the engine serves that length, else for the length that the model is for.
        """
        try:
            whole_length = make_target(self.opened, **self.base_arguments)
        except (MethodError, ServingError) as error:  # a patch that no engine runs
            self.refusal = one_line(error)
            return {}, {}
        targets = [whole_length]
        if not self.rotary.length_dependent:
            targets.insert(0, replace(whole_length, length=self.target_length))
        configs: dict[str, ServingConfig] = {}
        for engine, cls in list_engines().items():
            for target in targets:
                try:
                    configs[engine] = cls().config_for(target)
                    break
                except ServingError:
                    continue
        return dict.fromkeys(configs, method), configs


def _kind(method: RopeMethod) -> str:
    if isinstance(method, RemappingMethod):
        return "remapping"
    if method.trainable:
        return "trained"
    return "length-dependent" if method.length_dependent else "static"
