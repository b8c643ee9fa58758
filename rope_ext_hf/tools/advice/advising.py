"""`advise`: from a model and a length in tokens to a method, its cost, the engines that serve it, and the commands.

print(advise("Qwen/Qwen3-8B", 131072))
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import MOST_TOKENS, Length, parse_length, whole
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, UnsupportedModelError, duration, one_line
from rope_ext_hf.errors import short as short_text
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.describing import scalings_underneath, short_input_notes
from rope_ext_hf.patches.geometry import base_rope_of_config, bind_to, rope_of_layers
from rope_ext_hf.patches.layer_types import SLIDING
from rope_ext_hf.patches.loading import empty_model
from rope_ext_hf.patches.patch_records import PatchSpec
from rope_ext_hf.patches.recipes import find_recipe, recipe_note
from rope_ext_hf.patches.stand_in import refusal, stand_in
from rope_ext_hf.questions import command_line
from rope_ext_hf.reading.cache_size import cached_bytes, cached_layers
from rope_ext_hf.reading.operations import estimate_flops
from rope_ext_hf.tools.advice.advice import Advice, CacheMemory, MethodAdvice, reported, signed
from rope_ext_hf.tools.advice.guidance import FINE_TUNING, GOALS, PURPOSES, SERVING, Guidance, guidance_of
from rope_ext_hf.tools.advice.measurements import Rise, helped, reach_text, rises_at, rises_for_short_inputs
from rope_ext_hf.tools.engines.base import find_engine, list_engines, reference_engine, usual_server
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.serving.configs import Model, make_target, open_model
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory, gpu_memory
from rope_ext_hf.tools.serving.questions import GPUServer

_WIDTHS = {"float32": 4, "bfloat16": 2, "8 bits": 1}  # bytes of a number by dtype; float16 has those of bfloat16
_OWN_PROCESS = reference_engine().name
"""The engine that is this package's own process: it is no evidence about a server."""
_MEASURED_SPANS = 8  # of every length, in the commands that measure: enough to compare methods, and no whole corpus
_SUSTAINED = 1e14
"""Operations per second, for times: a round number that accelerators of several generations sustain in bfloat16."""


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
    """Advise on how a model gets to a length, from its config alone; no weights are read.

    Args:
        model: a model in memory, a folder, a Hub id or "reference"; or what `open_model` made of one.
        target_length: tokens.
        over, context_length: as in `patch`.
        batches: the numbers of inputs at a time that memory is computed for.
        server: the GPUs of a server, for what fits there and for its options.
        engines: those that are asked whether they serve each method, by name; None: all.
        purpose: "serve", "python" (in your own process) or "train": the purpose that one method is recommended for.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        MethodError: a length or a batch below 1, or one that no model has; or an unknown purpose.
        CheckpointError: no such model.
        UnsupportedModelError: a model without rotary embeddings, or with several.
    """
    target_length, context_length = parse_length(target_length), parse_length(context_length)
    given = [("target_length", target_length), *(("a batch", each) for each in batches)]
    for name, value in given:
        whole(name, value, 1, MOST_TOKENS)
    check_purpose(purpose)
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    specs = opened.specs if over == "own" and context_length is None else []
    own = base_rope_of_config(opened.described, over, context_length, opened.config)
    rotary, rule = own.rotary, own.rule
    reached, extended_by = rotary.context_length, [str(each) for each in scalings_underneath(rotary)]
    if specs:
        top = specs[-1]
        extended = top.target_length or top.method.extended_length(top.rotary)
        reached, rule = max(reached, extended or 0), "the patch that it carries"
        extended_by.append(f"{top.method.label()}, a patch" + (f", for {extended:,} tokens" if extended else ""))
    on_gpus = None if server is None or not server.gpus else gpu_memory(opened.whole(), target_length, server)
    given_base = {"over": over, "context_length": context_length}
    run = _Planner(opened, rotary, target_length, given_base, engines or list_engines())
    needed = target_length > reached
    methods = run.methods() if needed else []
    choices = _choices(methods)
    served, configs = run.served(methods) if needed else run.as_it_is()
    larger: tuple[str, ...] = ()
    if specs and 2 * target_length <= reached:
        times = f"{reached / target_length:.3g} times what is asked for"
        larger = (
            f"The patch is for {reached:,} tokens, {times}.",
            *short_input_notes(specs[-1].method, specs[-1].rotary),
        )
    parameters = getattr(opened.config, "rope_parameters", None) or {}
    apart = next((key for key, value in parameters.items() if key in SLIDING and isinstance(value, Mapping)), None)
    sliding = None if apart is None else rope_of_layers(opened.config, apart)
    note, _ = opened.layers.sliding_note(sliding, target_length)
    present = (specs[-1].rotary, specs[-1].method) if specs else (rotary, None)
    published = recipe_note(opened.config, *(run.result(choices) if needed else present))
    lengths = sorted({min(reached, target_length), target_length})
    helping = {each.method for each in methods if each.fits}
    recommended = next(iter(choices.get(GOALS[purpose], ())), "")
    of_type = [each for each in reported() if opened.config.model_type in each.model_types]
    return Advice(
        model=opened.given,
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
        memory=_cache_memory(opened.config, lengths, list(batches)),
        commands=run.commands(served, configs, choices, reached, server, on_gpus),
        notes=(*(text for text in (note, opened.described.note, run.refusal, published) if text), *larger),
        reported=tuple([each for each in of_type or reported() if helping & each.values.keys()]),
        on_gpus=on_gpus,
        purpose=purpose,
        recommended=recommended,
        next_steps=run.next_steps(purpose, recommended, lengths, served),
    )


def check_purpose(purpose: str) -> None:
    """Raise a MethodError for a purpose that is not one of `GOALS`."""
    if purpose not in GOALS:
        raise MethodError(f"purpose must be one of {', '.join(GOALS)}, got {short_text(repr(purpose))}")


def _cache_memory(config: Any, lengths: list[int], batches: list[int]) -> tuple[CacheMemory, ...]:
    with foreign_errors("the sizes of the heads cannot be read from this config"):
        if not (layers := cached_layers(config)):
            raise ServingError("a model without layers that keep keys and values of their own cannot be served")
        sizes = {
            (tokens, dtype): cached_bytes(config, tokens, width=width, layers=layers)
            for tokens in lengths
            for dtype, width in _WIDTHS.items()
        }
        return tuple(
            CacheMemory(dtype, batch, tokens, batch * sizes[tokens, dtype])
            for tokens in lengths
            for batch in batches
            for dtype in _WIDTHS
        )


def _choices(methods: Sequence[MethodAdvice]) -> dict[str, tuple[str, ...]]:
    """The candidates by purpose, not ranked: those that helped a measured model at this length; for fine-tuning any.

    Where no candidate for serving helped, they are the methods that did and that a server runs.
    """
    servers = list_engines().keys() - {_OWN_PROCESS}
    served = [each for each in methods if any(map(each.engines.get, servers))]
    possible = [each for each in methods if each.kind]
    helping = [each for each in possible if each.fits]
    chosen: dict[str, tuple[str, ...]] = {}
    for purpose in PURPOSES:
        candidates = possible if purpose == FINE_TUNING else helping
        chosen[purpose] = tuple(
            [each.method for each in candidates if purpose in each.purposes and (purpose != SERVING or each in served)]
        )
    if not chosen[SERVING]:
        chosen[SERVING] = tuple([each.method for each in helping if each in served])
    return {purpose: names for purpose, names in chosen.items() if names}


@dataclass
class _Planner:
    """One model on its way to one length."""

    opened: Model
    rotary: Rotary
    target_length: int
    underneath: dict[str, Any]
    engines: Collection[str]
    configs: dict[tuple[str, str], ServingConfig] = field(default_factory=dict)
    refusal: str = ""

    def __post_init__(self) -> None:
        self.options = {key: value for key, value in self.underneath.items() if value not in (None, "own")}
        self.factor = self.target_length / self.rotary.context_length
        self.asked = [find_engine(name) for name in self.engines]

    def result(self, choices: Mapping[str, Sequence[str]]) -> tuple[Rotary, RopeMethod | None]:
        """The model's rotary embedding, and the method that the commands take; None: no candidate is for serving."""
        if SERVING not in choices:
            return self.rotary, None
        return self.rotary, resolve_method(choices[SERVING][0], self.rotary, target_length=self.target_length)

    def methods(self) -> list[MethodAdvice]:
        """Every method that states when to use it."""
        if stand_in(self.opened.config.to_json_string(use_diff=False)) is None:
            self.refusal = (
                "Which methods `patch` refuses on this model was not tried: no small model of its class is built."
            )
        return [self._method(name, known) for name in list_methods() if (known := guidance_of(name)) is not None]

    def _method(self, name: str, guidance: Guidance) -> MethodAdvice:
        engines: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        rises = rises_at(name, self.factor)
        kind, short, models = "", "", list[str]()
        try:
            method = resolve_method(name, self.rotary, target_length=self.target_length)
            method = bind_to(method, self.rotary, self.opened.config, self.target_length)
            self._check(name)
        except MethodError as error:
            why = guidance.unmeasured or one_line(error)
        except UnsupportedModelError as error:
            why = one_line(error)
        else:
            kind = _kind(method)
            models = [model.name for model in helped(rises)]
            why = self._why(name, guidance, rises, models)
            short = self._short_inputs(method)
        if kind == "static":
            engines, refusals = self._engines(name, PatchSpec(method, self.rotary, self.target_length))
        return MethodAdvice(
            method=name,
            kind=kind,
            fits=bool(models),
            why=why,
            measured={rise.model.name: rise.increase for rise in rises},
            short_inputs=short,
            decode=guidance.decode,
            when=guidance.when,
            purposes=guidance.purposes,
            engines=engines,
            refusals=refusals,
        )

    def _check(self, name: str) -> None:
        """Raise the error with which `patch` would refuse a method on this model, where a small one can tell."""
        error = refusal(self.opened.config, name, target_length=self.target_length, **self.underneath)
        if error is not None:
            raise error

    def _why(self, name: str, guidance: Guidance, rises: Sequence[Rise], models: Sequence[str]) -> str:
        if not rises:
            reach = reach_text(name)
            never = "not measured" if reach == "not measured" else f"not measured at this length; helped: {reach}"
            return guidance.unmeasured or never
        if models:
            return f"helped at this length on the {' and the '.join(models)}"
        return f"helped none of the small models that were measured ({len(rises)})"

    def _short_inputs(self, method: RopeMethod) -> str:
        kept = method.unchanged_length(self.rotary)
        if kept >= min(self.target_length, UNBOUNDED):
            return "the same"
        if kept:
            return f"the same up to {kept:,} tokens"
        rises = rises_for_short_inputs(method.name, self.factor)
        if not rises:
            return "change"
        return f"rise by {signed({rise.model.name: rise.increase for rise in rises})}"

    def _engines(self, name: str, spec: PatchSpec) -> tuple[dict[str, str | None], dict[str, str]]:
        encodings: dict[str, str | None] = {}
        refusals: dict[str, str] = {}
        try:
            target = make_target(self.opened, spec)
        except (MethodError, ServingError) as error:
            return encodings, dict.fromkeys(self.engines, one_line(error))
        for engine in self.asked:
            try:
                config = engine.config_for(target)
            except ServingError as error:
                encodings[engine.name], refusals[engine.name] = None, one_line(error)
            else:
                encodings[engine.name] = config.encoding
                self.configs[engine.name, name] = config
        return encodings, refusals

    def served(self, methods: Sequence[MethodAdvice]) -> tuple[dict[str, str], dict[str, ServingConfig]]:
        """A method that helped, by the engine that serves it; a candidate for serving where there is one."""
        ordered = sorted([each for each in methods if each.fits], key=lambda each: SERVING not in each.purposes)
        names = {each: [one.method for one in ordered if one.engines.get(each)] for each in list_engines()}
        served = {engine: own[0] for engine, own in names.items() if own}
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

    def _time(self, passes: Sequence[int]) -> str:
        """About how long passes of so many tokens take on an accelerator, in words; empty where that is unknown."""
        try:
            model = empty_model(self.opened.config)
        except CheckpointError:  # the text half of a composite model may have no class that loads alone
            return ""
        seconds = estimate_flops(model, passes, scored=0) / _SUSTAINED
        return f", about {duration(seconds)} at {_SUSTAINED / 1e12:g} TFLOP/s"

    def next_steps(
        self, purpose: str, method: str, lengths: Sequence[int], served: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the lines to type with the recommended method: measure it, then use it for the purpose."""
        model, target = self.opened.given, self.target_length
        serving = (each for each in (usual_server(), *served) if served.get(each) == method)
        engine = next(serving, usual_server())
        if not method:  # the model is served as it is, or no method helps
            plain = purpose == "serve" and served and set(served.values()) <= {"", Default.name}
            return (command_line("serve-config", model, **self.options, engine=engine),) if plain else ()
        asked: dict[str, Any] = {"method": method, "target_length": target, **self.options}
        text: dict[str, Any] = {"lengths": lengths, "max_spans": _MEASURED_SPANS, "data": "texts/*.txt"}
        measured = command_line("ppl", model, **asked, **text)
        folder = f"{Path(model).name}-{target}"
        if purpose == "train":
            return (measured, command_line("finetune", model, **asked, data="texts/*.txt", minutes=60, out=folder))
        if purpose == "python":
            arguments = "".join(f", {name}={value!r}" for name, value in asked.items() if name != "method")
            return (measured, f"rope.patch(model, {method!r}{arguments})  # import rope_ext_hf as rope")
        return (
            measured,
            command_line("patch", model, **asked, out=folder),
            command_line("serve-config", folder, engine=engine),
        )

    def commands(
        self,
        served: Mapping[str, str],
        configs: Mapping[str, ServingConfig],
        choices: Mapping[str, Sequence[str]],
        reached: int,
        server: GPUServer | None,
        on_gpus: GPUMemory | None,
    ) -> dict[str, tuple[str, ...]]:
        model, target = self.opened.given, self.target_length  # "reference" is no folder of the user's
        first = next(iter(choices.get(SERVING, ())), None)
        compared = list(dict.fromkeys([name for names in choices.values() for name in names]))
        lengths = tuple(dict.fromkeys((min(reached, target), target)))
        result: dict[str, tuple[str, ...]] = {}
        if compared:
            asked: dict[str, Any] = {"method": compared, "target_length": target, **self.options, "lengths": lengths}
            passes = [*lengths] * (_MEASURED_SPANS * (len(compared) + 1))
            reading = f"{sum(passes):,} tokens are read{self._time(passes)}"
            result[f"measure on your own text: {reading}"] = (
                command_line("ppl", model, **asked, max_spans=_MEASURED_SPANS, data="texts/*.txt"),
                command_line("passkey", model, **asked),
            )
        if first is not None:
            asked = {"method": first, "target_length": target, **self.options}
            result["see what it changes, and keep it in a folder"] = (
                command_line("describe", model, **asked),
                command_line("patch", model, **asked, out=f"{Path(model).name}-{target}"),
            )
        recipe = find_recipe(self.opened.config)
        if recipe is not None and (recipe.extended_length or 0) >= self.target_length > recipe.context_length:
            given = recipe.arguments(self.opened.config.max_position_embeddings)
            result[f"as published for {recipe.name}"] = (
                command_line("describe", model, **given),
                command_line("serve-config", model, **given, engine=usual_server()),
            )
        programs: set[str] = set()
        for engine, name in served.items():
            program = next((word for word in configs[engine].command if word not in ("python", "-m")), engine)
            if engine == _OWN_PROCESS or program in programs:  # a second way to run the same program
                continue
            programs.add(program)
            length = target if name not in ("", Default.name) else None
            asked = {"method": name or None, "target_length": length, **self.options}
            config, known = configs[engine], find_engine(engine)
            if server is not None and on_gpus is not None and known.on_gpus:
                options = known.gpu_options(on_gpus.options)
                config = replace(config, command=(*config.command, *options) if on_gpus.kv_bits else ())
                asked |= server.options
            lines = [command_line("serve-config", model, **asked, engine=engine)]
            if config.gguf_keys:
                lines.append(command_line("gguf", "IN.gguf", "OUT.gguf", model=model, **asked))
            if config.command and (config.overrides is not None or not config.config_keys):
                lines.append(shlex.join(config.command))
            result[f"serve with {engine}"] = tuple(lines)
        return result


def _kind(method: RopeMethod) -> str:
    if isinstance(method, RemappingMethod):
        return "remapping"
    if method.trainable:
        return "trained"
    return "length-dependent" if method.length_dependent else "static"
