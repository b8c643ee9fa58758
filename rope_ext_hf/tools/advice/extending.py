"""From a model and a length to a folder that an engine serves: the steps, and the verdict on the measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import MethodError, ServingError, short
from rope_ext_hf.eval.questions import Perplexity
from rope_ext_hf.hub import load_empty, model_folder, read_config
from rope_ext_hf.method_choice import LayerChoice
from rope_ext_hf.patches.folder_copies import unlike_copies
from rope_ext_hf.patches.recipes import find_recipe
from rope_ext_hf.questions import command_line, command_words, shell_line
from rope_ext_hf.runs.labels import method_key
from rope_ext_hf.runs.measures import Evidence, perplexity_text
from rope_ext_hf.runs.outcomes import Outcome
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.statistics import FEWEST, Estimate
from rope_ext_hf.runs.verdicts import verdict
from rope_ext_hf.tools.advice.advice import Advice, MethodAdvice
from rope_ext_hf.tools.advice.advising import advise
from rope_ext_hf.tools.advice.guidance import SERVING
from rope_ext_hf.tools.engines.base import find_engine, list_engines
from rope_ext_hf.tools.serving.configs import needs_nothing, open_model
from rope_ext_hf.tools.serving.questions import Extending

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
    reason: str  # why this method, in words; empty: what was measured on small models
    summary: str  # the recommendation, in lines
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
class Comparison:
    """Perplexity of the same text at one length, unpatched and extended."""

    unpatched: float
    extended: float
    change: Estimate | None  # of the nats per token, paired by document; None: one of the two was not measured

    @property
    def outcome(self) -> Outcome:
        return verdict(self.change).outcome

    @property
    def values(self) -> str:
        return f"{_perplexity(self.unpatched)} to {_perplexity(self.extended)}"


def _perplexity(value: float) -> str:
    return perplexity_text(value) if math.isfinite(value) else "not finite"


@dataclass(frozen=True)
class ExtensionVerdict:
    """Verdict on a measured extension: what inputs of the target length gain, and what short inputs lose.

    Perplexities are those of the run's table. Tests are paired over documents, in nats per token.
    """

    method: str  # by name
    context_length: int
    target_length: int
    gain: Comparison  # at the target length
    short_inputs: Mapping[int, Comparison]  # by length, up to the context length
    # nats per token that inputs of both lengths lose together, by the short length; above 0: less is gained than lost
    balances: Mapping[int, Estimate | None]

    @property
    def refusal(self) -> str:
        """The reason why the measurement speaks against the extension, as a clause; empty: it does not."""
        at, values = f"at {self.target_length:,} tokens", self.gain.values
        change, outcome = self.gain.change, self.gain.outcome
        if change is None:
            return f"perplexity {at} was not measured both unpatched and with {self.method}"
        if outcome is Outcome.WORSE:
            return f"perplexity {at} gets worse with {self.method} ({values})"
        if outcome is not Outcome.BETTER:
            if change.items >= FEWEST:
                return f"no significant difference in perplexity {at} ({values})"
            if not change.value < 0:
                return f"perplexity {at} does not get better with {self.method} ({values})"
        for length, balance in sorted(self.balances.items(), reverse=True):
            if verdict(balance).outcome is Outcome.WORSE:
                lost = self.short_inputs[length].values
                return f"inputs of {length:,} tokens lose more ({lost}) than inputs of {at[3:]} gain ({values})"
        return ""

    @property
    def sentences(self) -> list[str]:
        gain = {
            Outcome.BETTER: "perplexity {}",
            Outcome.WORSE: "perplexity gets worse ({})",
            Outcome.NO_DIFFERENCE: "no significant difference in perplexity ({})",
            Outcome.NOT_MEASURED: "perplexity was not measured",
        }
        price = gain | {Outcome.BETTER: "perplexity gets better ({})"}
        change = self.gain.change
        few = change is not None and change.items < FEWEST
        if few:  # no test
            gain = price = dict.fromkeys(Outcome, "perplexity {}")
        by_values: dict[str, list[str]] = {}
        for length, each in self.short_inputs.items():
            same = "perplexity stays {1}" if _perplexity(each.unpatched) == _perplexity(each.extended) else ""
            text = same or price[each.outcome]
            said = text.format(each.values, _perplexity(each.extended))
            by_values.setdefault(f"{length:,} tokens", []).append(said)
        sentences = [f"At {self.target_length:,} tokens: {gain[self.gain.outcome].format(self.gain.values)}."]
        sentences += [f"Short inputs ({where}): {said}." for where, (said,) in by_values.items()]
        if few and change is not None:
            are = "document is" if change.items == 1 else "documents are"
            sentences.append(f"{change.items} {are} too few to say whether these differences are by chance.")
        return sentences

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"refusal": self.refusal, "text": str(self)}


def plan_extension(
    model: str,
    asked: Extending,
    *,
    advice: Advice | None = None,
    reading: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Extension:
    """Choose how a model is extended, by `advise`, and what is measured before; no weights are read.

    `advice` is that of `advise` on the same question, where it was asked before. `reading` are further options of
    `rope-ext ppl`, such as device, by their names in Python. A MethodError where no extension is needed, a patch is
    there already, or no method brings it there; a ServingError of the engine.
    """
    target_length, underneath = asked.target_length, asked.underneath
    engine = find_engine(asked.engine).name
    loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    opened = open_model(model, **loading)
    if opened.specs:
        raise MethodError(
            f"{model} carries a patch, {opened.specs[-1].method.label()}, which a new one would replace; extend the "
            f"model it was made from, or serve it: `{command_line('serve-config', model, engine=engine)}`"
        )
    recipe = find_recipe(opened.config) if asked.over == "own" and asked.context_length is None else None
    ask = partial(advise, opened, target_length, server=asked.server, **underneath)
    advice = advice or ask(engines=[engine])
    chosen = _choose(advice, engine, ask)
    if advice.on_gpus is not None:
        find_engine(engine).gpu_options(advice.on_gpus.options)
        if advice.on_gpus.kv_bits is None:
            raise ServingError(str(advice.on_gpus))
    reason = ""
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
        "serve-config": command_words("serve-config", folder, engine=engine, **asked.server.options),
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
        summary="\n".join(replace(advice, recommended=chosen.method).recommendation(reason)),
        lengths=lengths,
        out=folder,
        patch=choice,
        perplexity=question if asked.measure else None,
        steps=steps,
    )


def dry_run(model: str, target_length: int, purpose: str) -> str:
    """Return the command that recommends a method for a purpose."""
    return command_line("extend", model, target_length=target_length, purpose=purpose, dry_run=True)


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
            f"`{dry_run(advice.model, advice.target_length, 'train')}` for training"
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


def judge(extension: Extension, run: Run[Any]) -> ExtensionVerdict:
    """Return the verdict on a measured extension."""
    loaded, context, target = method_key(run.settings["loaded"]), extension.context_length, extension.target_length
    loss = next(each for each in run.kind.measures(run) if each.evidence is Evidence.LOSS)
    extended = next(key for key in loss.items if key != loaded)
    short = [length for length in sorted(loss.lengths(loaded), reverse=True) if length <= context]
    joined = {key: dict(row) for key, row in loss.items.items()}
    for length in short:  # both lengths as one, so that the test takes their pairing into account
        for row in joined.values():
            pairs = zip(row[length], row[target], strict=True)
            row[-length] = [(a / of_a + b / of_b, 1.0) for (a, of_a), (b, of_b) in pairs]
    both = replace(loss, items=joined)

    def compare(length: int) -> Comparison:
        unpatched, with_method = (loss.value(key, length) for key in (loaded, extended))
        return Comparison(unpatched, with_method, loss.change((extended, length), (loaded, length)))

    return ExtensionVerdict(
        method=extension.method,
        context_length=context,
        target_length=target,
        gain=compare(target),
        short_inputs={length: compare(length) for length in short},
        balances={length: both.change((extended, -length), (loaded, -length)) for length in short},
    )
