"""From a model and a length to a folder that an engine serves: which steps, and what the measurement between says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rope_ext_hf.advice.advice import Advice, MethodAdvice
from rope_ext_hf.advice.advising import advise
from rope_ext_hf.engines.base import find_engine, list_engines
from rope_ext_hf.errors import MethodError, ServingError, short
from rope_ext_hf.eval.perplexity_runs import Result
from rope_ext_hf.eval.questions import Perplexity
from rope_ext_hf.hub import load_empty, model_folder, read_config
from rope_ext_hf.method_choice import LayerChoice
from rope_ext_hf.methods.guidance import SERVING
from rope_ext_hf.methods.measurements import rises_for_short_inputs
from rope_ext_hf.patches.recipes import find_recipe
from rope_ext_hf.patches.saving import unlike_copies
from rope_ext_hf.questions import command_line, command_words, shell_line
from rope_ext_hf.runs.kinds import Run
from rope_ext_hf.runs.labels import method_key
from rope_ext_hf.runs.measures import Evidence, Measure
from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.runs.verdicts import UNPATCHED, Outcome, verdict
from rope_ext_hf.serving.configs import needs_nothing, open_model
from rope_ext_hf.serving.questions import Extending, GPUServer

_UNIT = "bits per byte"

_SHORT_INPUTS = 4  # the shortest inputs that are measured have the context length over this
_CHARACTERS = 6
"""Characters of a document of the default text, for each token of the target length: more than tokens have."""


@dataclass(frozen=True)
class Extension:
    """How a model is extended and served."""

    model: str
    engine: str
    method: str  # by name
    target_length: int
    context_length: int  # in tokens as well; the factor is one over the other
    reason: str  # why this method, in words
    expected: str  # what it costs inputs within the context length by our measurements, in words
    expectations: dict[int, tuple[float, ...]]  # by length, rises on the small models, bits per byte
    lengths: tuple[int, ...]  # in tokens, to be measured; the context length and the target length last
    out: str  # the folder that is written
    patch: LayerChoice  # the method, as it is patched in
    perplexity: Perplexity | None  # what is measured before; None: nothing
    steps: dict[str, list[str]]  # words of commands: ppl where it is measured, patch, serve-config

    @property
    def commands(self) -> dict[str, str]:
        """The steps as they are typed."""
        return {name: shell_line(words) for name, words in self.steps.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("patch", "perplexity")
        }


@dataclass(frozen=True)
class ExtensionVerdict:
    """What follows from a measurement of an extension: is there a gain, at what price, and was that expected?

    All numbers are in bits per byte, means over documents that weigh alike, paired: where one long document weighs as
    much as all others, little is known of the mean by tokens.
    """

    method: str  # by name
    context_length: int
    target_length: int
    change: Estimate | None  # of the loss at the target length, over the model as loaded there
    prices: Mapping[int, Estimate | None]  # the change, by length up to the context length
    balances: Mapping[int, Estimate | None]  # change and price together, by length; above 0: no gain is left
    rises: Mapping[int, Estimate | None]  # of the loss over the model as loaded at the context length
    expectations: Mapping[int, Sequence[float]]  # the same rises on each small model

    @property
    def refusal(self) -> str:
        """Why the model had better stay as it is, in words; empty: the gain is there and above every price."""
        gain = verdict(self.change, unit=_UNIT)
        if gain.outcome is not Outcome.BETTER:
            return f"{self.method} is not known to gain at {self.target_length:,} tokens: the loss is {gain}"
        for length, balance in sorted(self.balances.items(), reverse=True):
            left = verdict(balance, unit=_UNIT)
            if left.outcome is Outcome.WORSE:
                return f"the price at {length:,} tokens is above the gain: the loss at both together is {left}"
            if left.outcome is not Outcome.BETTER:
                return f"the price at {length:,} tokens is not known to be below the gain: together they are {left}"
        return ""

    @property
    def sentences(self) -> list[str]:
        gain = f"at {self.target_length:,} tokens the loss is {verdict(self.change, unit=_UNIT)}"
        prices = [f"at {length:,} tokens it is {verdict(price, unit=_UNIT)}" for length, price in self.prices.items()]
        items = 0 if self.change is None else self.change.items
        over = f"in the mean over {items} document{'s' * (items != 1)}"
        return [
            f"Compared with {UNPATCHED}, {over}: {gain}; {', '.join(prices)}.",
            *[self._expectation(length) for length, expected in self.expectations.items() if expected],
        ]

    def _expectation(self, length: int) -> str:
        """Whether the loss rises as on the small models: within what they span, by the interval."""
        expected, rise = self.expectations[length], self.rises.get(length)
        outcomes = [verdict(rise, than=than).outcome for than in (max(expected), min(expected))]
        if rise is None or rise.low is None or rise.high is None:
            measured = "nothing" if rise is None else f"{rise.value:+.2f}"
            said = "whether the expectation failed cannot be told"
        else:
            measured = f"{rise.value:+.2f} [{rise.low:+.2f} to {rise.high:+.2f}]"
            said = "that is not told from the expectation"
            if outcomes[0] is Outcome.WORSE:
                said = "the expectation failed, it is higher"
            elif outcomes[1] is Outcome.BETTER:
                said = "the expectation failed, it is lower"
        spread = " to ".join(dict.fromkeys(f"{end:+.2f}" for end in (min(expected), max(expected))))
        return (
            f"At {length:,} tokens, {spread} {_UNIT} above the loss as loaded at {self.context_length:,} was expected, "
            f"and {measured} is measured: {said}."
        )

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"refusal": self.refusal, "text": str(self)}


def plan_extension(
    model: str,
    asked: Extending,
    *,
    reading: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Extension:
    """Choose how a model is extended, by `advise`, and what is measured before; no weights are read.

    `reading` are further options of `rope-ext ppl`, such as device, by their names in Python. A MethodError where no
    extension is needed, a patch is there already, or no method brings it there; a ServingError of the engine.
    """
    target_length, over, context_length = asked.target_length, asked.over, asked.context_length
    engine = find_engine(asked.engine).name
    loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    opened = open_model(model, **loading)
    if opened.specs:
        raise MethodError(
            f"{model} carries a patch, {opened.specs[-1].method.label()}, which a new one would replace; extend the "
            f"model it was made from, or serve it: `{command_line('serve-config', model, engine=engine)}`"
        )
    recipe = find_recipe(opened.config) if over == "own" and context_length is None else None
    server = GPUServer(gpus=asked.gpus, gpu_memory=asked.gpu_memory, weight_bits=asked.weight_bits)
    underneath: dict[str, Any] = {"over": over, "context_length": context_length}
    ask = partial(advise, opened, target_length, server=server, **underneath)
    advice = ask(engines=[engine])
    chosen = _choose(advice, engine, ask)
    if advice.on_gpus is not None:
        find_engine(engine).options_on(advice.on_gpus.options)
        if advice.on_gpus.kv_bits is None:
            raise ServingError(str(advice.on_gpus))
    reason = f"{chosen.method} is the first candidate for serving at {advice.factor:.3g} times the context length"
    if recipe is not None and recipe.entry and chosen.method == recipe.entry["rope_type"]:
        where = f"{chosen.method} over {recipe.context_length:,} tokens is published for {recipe.name}"
        longer = "" if recipe.reaches(target_length) else f", for {recipe.extended_length:,} tokens and not for more"
        reason = f"{where}{longer}: {recipe.source}"
    folder = str(asked.out or f"{Path(model).name}-{target_length}")
    choice = LayerChoice(method=chosen.method, target_length=target_length, **underneath)
    lengths = (max(32, advice.context_length // _SHORT_INPUTS), advice.context_length, target_length)
    question = Perplexity(
        lengths=lengths, max_spans=asked.max_spans, data=asked.data or f"stdlib?join={_CHARACTERS * target_length}"
    )
    steps = {
        "ppl": command_words("ppl", model, **choice.options, **loading, **question.options, **(reading or {})),
        "patch": command_words("patch", model, **choice.options, **loading, out=folder),
        "serve-config": command_words("serve-config", folder, engine=engine, **server.options),
    }
    if not asked.measure:
        del steps["ppl"]
    return Extension(
        model=model,
        engine=engine,
        method=chosen.method,
        target_length=target_length,
        context_length=advice.context_length,
        reason=reason,
        expected=f"inputs within {advice.context_length:,} tokens: {chosen.short_inputs}; at the length asked for: "
        f"{chosen.rises} bits per byte, on small models",
        expectations={
            advice.context_length: tuple([r.increase for r in rises_for_short_inputs(chosen.method, advice.factor)]),
            target_length: tuple(chosen.measured.values()),
        },
        lengths=lengths,
        out=folder,
        patch=choice,
        perplexity=question if asked.measure else None,
        steps=steps,
    )


def _choose(advice: Advice, engine: str, ask: Callable[[], Advice]) -> MethodAdvice:
    """The method to take for an engine: the first candidate for serving that it serves, else the first that fits."""
    if not advice.methods:
        served = advice.commands.get(f"serve with {engine}", ())
        how = f" Serve it as it is: {served[-1]}" if served else ""
        raise MethodError(f"{needs_nothing(advice.context_length, advice.target_length, advice.context_rule)}{how}")
    fitting = [each for each in advice.methods if each.fits and each.engines]
    if not fitting:
        raise MethodError(
            f"no method that engines serve brings {advice.model} from {advice.context_length:,} to "
            f"{advice.target_length:,} tokens without training, by what was measured; ask for fewer tokens, or see "
            f"`{command_line('advise', advice.model, target_length=advice.target_length)}` for training"
        )
    ordered = sorted(fitting, key=lambda each: SERVING not in each.purposes)
    chosen = next((each for each in ordered if each.engines.get(engine)), None)
    if chosen is None:
        everywhere = next(each for each in ask().methods if each.method == ordered[0].method)  # advice on all engines
        others = [name for name in list_engines() if everywhere.engines.get(name)]
        raise ServingError(
            f"{ordered[0].refusals[engine]}. Engines that serve {ordered[0].method}: {', '.join(others)}"
        )
    return chosen


def carries(extension: Extension, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Whether the folder is there already, with the patch of an extension, made from the model as it is now.

    Its files are compared with those of the model, which takes as long as to copy them; MethodError: they differ.
    """
    out = Path(extension.out)
    if not out.exists():
        return False
    specs = open_model(extension.out).specs if (out / "config.json").is_file() else []
    spec = specs[-1] if len(specs) == 1 else None
    same = spec is not None and (spec.method.name, spec.target_length, spec.rotary.context_length) == (
        extension.method,
        extension.target_length,
        extension.context_length,
    )
    if not same:
        raise MethodError(f"{extension.out!r} exists already and is something else; give --out another name")
    load_empty(out, trust_remote_code=trust_remote_code)  # refuses a record that contradicts itself
    unlike = unlike_copies(model_folder(extension.model, revision=revision), out)
    given, copied = (
        read_config(name, trust_remote_code=trust_remote_code, **where)[0]
        for name, where in ((extension.model, {"revision": revision}), (out, {}))
    )
    if _plain(given) != _plain(copied):
        unlike.append("config.json")
    if unlike:
        raise MethodError(
            f"{extension.out!r} was not made from {extension.model!r} as it is now: {short(', '.join(unlike))} "
            "changed since, or belong to another model; give --out another name, or remove the folder"
        )
    return True


def _plain(config: Any) -> dict[str, Any]:
    """The settings of a config without its name, the version that wrote it, and what another folder may state again."""
    values: dict[str, Any] = config.to_dict()
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def judge(extension: Extension, run: Run[Result]) -> ExtensionVerdict:
    """What a measurement says of an extension."""
    loaded, context, target = method_key(run.settings["loaded"]), extension.context_length, extension.target_length
    items: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for each in run.results:
        losses = [(d.nats / math.log(2) / max(1, d.bytes), 1.0) for d in each.documents]
        items.setdefault(method_key(each.method), {})[each.length] = losses
    extended = next(key for key in items if key != loaded)
    short = [length for length in sorted(items[loaded], reverse=True) if length <= context]
    for length in short:  # both lengths as one, which takes their pairing into account
        for key in (loaded, extended):
            pairs = zip(items[key][length], items[key][target], strict=True)
            items[key][-length] = [(a + b, 1.0) for (a, _), (b, _) in pairs]
    loss = Measure("loss", _UNIT, Evidence.LOSS, False, items)
    return ExtensionVerdict(
        method=extension.method,
        context_length=context,
        target_length=target,
        change=loss.change((extended, target), (loaded, target)),
        prices={length: loss.change((extended, length), (loaded, length)) for length in short},
        balances={length: loss.change((extended, -length), (loaded, -length)) for length in short},
        rises={length: loss.change((extended, length), (loaded, context)) for length in (context, target)},
        expectations=extension.expectations,
    )
