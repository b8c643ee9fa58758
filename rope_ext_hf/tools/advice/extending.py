"""Extending a model: the steps to a folder that an engine serves, and the verdict on whether the extension helps."""

from __future__ import annotations

import math
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rope_ext_hf.checkpoints.folder_copies import unlike_copies
from rope_ext_hf.errors import MethodError, ServingError, short
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.files.model_folders import model_folder
from rope_ext_hf.hub import load_empty, read_config
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.options.method_choice import LayerChoice
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure, perplexity_text
from rope_ext_hf.runs.conclusions.statistics import FEWEST, Estimate
from rope_ext_hf.runs.conclusions.verdicts import Outcome, verdict
from rope_ext_hf.runs.run import Run
from rope_ext_hf.tools.advice.advice import Advice, MethodAdvice
from rope_ext_hf.tools.advice.advising import advise
from rope_ext_hf.tools.advice.guidance import SERVING
from rope_ext_hf.tools.engines.base import find_engine, list_engines
from rope_ext_hf.tools.gguf.models import is_gguf, way_out
from rope_ext_hf.tools.serving.configs import Model, needs_nothing, open_model
from rope_ext_hf.tools.serving.serving_options import Extending

_LENGTH_ALONE, _SHARPER = "default", "temperature"
"""The methods for models whose full-attention layers do not rotate: what is written, and what is measured beside it."""
_SHORT_INPUTS = 4  # the shortest inputs that are measured have a quarter of the context length
_CHARACTERS = 6
"""Characters of a document of the default text for each token of the target length; tokens have fewer on average."""


@dataclass(frozen=True)
class Extension:
    """The plan for extending a model: the method, the lengths to measure, and the command for each step."""

    model: str
    engine: str  # by name
    method: str  # by name
    target_length: int  # in tokens
    context_length: int  # in tokens
    reason: str  # the reason for this method, in a clause; empty: what was measured here
    summary: str  # the recommendation, in lines
    lengths: tuple[int, ...]  # the lengths to measure, in tokens; the context length and the target length last
    out: str  # the folder to write
    patch: LayerChoice  # the method, as `rope-ext patch` takes it
    measured: LayerChoice  # the method that is measured beside the model as it is: `patch`, unless that changes nothing
    perplexity: Perplexity | None  # what is measured before the folder is written; None: nothing
    commands: dict[
        str, str
    ]  # the commands as they are typed, by name: ppl if something is measured, patch, serve-config

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; "steps" has the commands, each a list of words without the program's name."""
        return {
            "model": self.model,
            "engine": self.engine,
            "method": self.method,
            "target_length": self.target_length,
            "context_length": self.context_length,
            "reason": self.reason,
            "summary": self.summary,
            "lengths": self.lengths,
            "out": self.out,
            "steps": {name: shlex.split(command)[1:] for name, command in self.commands.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """The perplexities of the unpatched and the extended model on one text at one length.

    In `LengthVerdict` they are those of one text in short and in long inputs, and without and with `temperature`.
    """

    unpatched: float
    extended: float
    change: Estimate | None  # of the loss in nats per token, paired by document; None: one of the two was not measured

    @property
    def outcome(self) -> Outcome:
        return verdict(self.change).outcome

    @property
    def values(self) -> str:
        """Both perplexities as text."""
        return f"{_perplexity(self.unpatched)} to {_perplexity(self.extended)}"


def _perplexity(value: float) -> str:
    return perplexity_text(value) if math.isfinite(value) else "not finite"


@dataclass(frozen=True)
class _Verdict:
    """Base of the verdicts on an extension that was measured."""

    context_length: int  # in tokens
    target_length: int  # in tokens

    @property
    @abstractmethod
    def refusal(self) -> str:
        """A clause with the reason why the measurement speaks against the extension; empty if it does not."""

    @property
    @abstractmethod
    def decisive(self) -> Comparison:
        """The comparison that decides whether the model reads long inputs."""

    @abstractmethod
    def sentences_on_values(self, *, tested: bool) -> list[str]:
        """Return sentences on what was measured; `tested`: there are enough documents to say what is significant."""

    @property
    def sentences(self) -> list[str]:
        """Sentences on what was measured, and on whether there are enough documents."""
        change = self.decisive.change
        if change is None or change.items >= FEWEST:
            return self.sentences_on_values(tested=True)
        are = "document is" if change.items == 1 else "documents are"
        too_few = f"{change.items} {are} too few to say whether these differences are by chance."
        return [*self.sentences_on_values(tested=False), too_few]

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"refusal": self.refusal, "text": str(self)}


@dataclass(frozen=True)
class ExtensionVerdict(_Verdict):
    """The verdict on an extended model that was measured: the gain on long inputs, and the loss on short ones.

    Perplexities are those in the run's table. Tests are paired over documents, in nats per token.

    Attributes:
        method: the name of the method.
        context_length, target_length: both lengths in tokens.
        gain: the comparison at the target length.
        short_inputs: comparisons up to the context length, by length.
        balances: for each short length, the change of the loss there plus the change at the target length; above 0,
            short inputs lose more than long ones gain.
    """

    method: str
    gain: Comparison
    short_inputs: Mapping[int, Comparison]
    balances: Mapping[int, Estimate | None]

    @property
    def refusal(self) -> str:
        """A clause with the reason why the measurement speaks against the extension; empty if it does not."""
        target, values = f"{self.target_length:,} tokens", self.gain.values
        at = f"at {target}"
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
                return f"inputs of {length:,} tokens lose more ({lost}) than inputs of {target} gain ({values})"
        return ""

    @property
    def decisive(self) -> Comparison:
        return self.gain

    def sentences_on_values(self, *, tested: bool) -> list[str]:
        gain = _clause(self.gain, better="perplexity {}", tested=tested)
        sentences = [f"At {self.target_length:,} tokens: {gain}."]
        for length, comparison in self.short_inputs.items():
            if _perplexity(comparison.unpatched) == _perplexity(comparison.extended):
                clause = f"perplexity stays {_perplexity(comparison.extended)}"
            else:
                clause = _clause(comparison, better="perplexity gets better ({})", tested=tested)
            sentences.append(f"Short inputs ({length:,} tokens): {clause}.")
        return sentences


@dataclass(frozen=True)
class LengthVerdict(_Verdict):
    """The verdict on a longer length for a model whose full-attention layers do not rotate, which needs no patch.

    Attributes:
        context_length, target_length: both lengths in tokens.
        longer: the model as it is: the same text, read with the context length and with the target length before it.
        temperature: the model as it is, and with the method `temperature`, at the target length.
    """

    longer: Comparison
    temperature: Comparison

    @property
    def refusal(self) -> str:
        """A clause with the reason why the measurement speaks against the longer length; empty if it does not."""
        if self.longer.change is None:
            return f"perplexity was not measured at {self.context_length:,} and at {self.target_length:,} tokens"
        if self.longer.outcome is Outcome.WORSE:
            return (
                f"the same text reads worse in inputs of {self.target_length:,} tokens than in inputs of "
                f"{self.context_length:,} ({self.longer.values})"
            )
        return ""

    @property
    def decisive(self) -> Comparison:
        return self.longer

    def sentences_on_values(self, *, tested: bool) -> list[str]:
        longer = _clause(self.longer, better="perplexity gets better ({})", tested=tested)
        temperature = _clause(self.temperature, better="perplexity gets better ({})", tested=tested)
        return [
            f"From {self.context_length:,} to {self.target_length:,} tokens before the same text: {longer}.",
            f"With the method temperature at {self.target_length:,} tokens: {temperature}.",
        ]


def _clause(comparison: Comparison, *, better: str, tested: bool) -> str:
    """Return a clause that compares two perplexities, such as "no significant difference in perplexity (5.1, 5.2)".

    Args:
        comparison: the two values, and which of them is better.
        better: the words for a comparison in which the extended model is better.
        tested: whether the difference was tested for significance; if not, the clause has only the two values.
    """
    clauses = {
        Outcome.BETTER: better,
        Outcome.WORSE: "perplexity gets worse ({})",
        Outcome.NO_DIFFERENCE: "no significant difference in perplexity ({})",
        Outcome.NOT_MEASURED: "perplexity was not measured",
    }
    clause = clauses[comparison.outcome] if tested else "perplexity {}"
    return clause.format(comparison.values)


def plan_extension(
    model: str,
    options: Extending,
    *,
    advice: Advice | None = None,
    reading: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Extension:
    """Choose the method for extending a model, and plan the steps; no weights are read.

    Args:
        model: a folder, a Hub id, or "reference" for the bundled model.
        options: the target length, the engine, and the options of the measurement.
        advice: the result of `advise` for the same model and target length, if it is known.
        reading: further options of `rope-ext ppl`, such as device, by their names in Python.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        MethodError: the model is a GGUF file, needs no extension or carries a patch, or no method is known to help.
        ServingError: the engine serves no such method, or the length does not fit on the GPUs.
    """
    if is_gguf(model):
        raise MethodError(f"{model!r} is a GGUF file, and a folder is extended here. {way_out(Path(model))}")
    target_length, base_arguments = options.target_length, options.base_arguments
    engine = find_engine(options.engine)
    loading: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    opened = open_model(model, **loading)
    if opened.patches:
        serve = command_line("serve-config", model, engine=engine.name)
        raise MethodError(
            f"{model} carries a patch, {opened.patches[-1].method.label()}, which a new one would replace; extend the "
            f"model that it was made from, or serve it as it is: `{serve}`"
        )
    ask = partial(advise, opened, target_length, server=options.server, **base_arguments)
    advice = advice or ask(engines=[engine.name])
    method = _method_for(engine.name, advice, ask).method
    if advice.on_gpus is not None:
        engine.gpu_options(advice.on_gpus.options)  # raises an error if this engine's options are not known
        if advice.on_gpus.kv_bits is None:
            raise ServingError(str(advice.on_gpus))
    as_published = options.over == "own" and options.context_length is None
    reason = _published_reason(opened, method, target_length) if as_published else ""
    folder = str(options.out or f"{Path(model).name}-{target_length}")
    patch = LayerChoice(method=method, target_length=target_length, **base_arguments)
    lengths = (max(32, advice.context_length // _SHORT_INPUTS), advice.context_length, target_length)
    perplexity = None
    commands: dict[str, str] = {}
    if options.measure:
        text = options.data or f"stdlib?join={_CHARACTERS * target_length}"
        perplexity = Perplexity(lengths=lengths, max_spans=options.max_spans, data=text)
        commands["ppl"] = command_line(
            "ppl", model, **_measured(patch).options, **loading, **perplexity.options, **(reading or {})
        )
    commands["patch"] = command_line("patch", model, **patch.options, **loading, out=folder)
    commands["serve-config"] = command_line("serve-config", folder, engine=engine.name, **options.server.options)
    return Extension(
        model=model,
        engine=engine.name,
        method=method,
        target_length=target_length,
        context_length=advice.context_length,
        reason=reason,
        summary="\n".join(replace(advice, recommended=method).recommendation(reason)),
        lengths=lengths,
        out=folder,
        patch=patch,
        measured=_measured(patch),
        perplexity=perplexity,
        commands=commands,
    )


def _measured(patch: LayerChoice) -> LayerChoice:
    """Return the patch that is measured beside the model as it is: the planned one, unless that changes nothing.

    Then it is `temperature`, the one method that changes the attention of such a model.
    """
    return replace(patch, method=(_SHARPER,)) if patch.method == (_LENGTH_ALONE,) else patch


def _published_reason(opened: Model, method: str, target_length: int) -> str:
    """Return a clause saying that the publisher of a model recommends this method; empty if that is not so."""
    recipe = opened.recipe
    if recipe is None or not recipe.entry or method != recipe.entry["rope_type"]:
        return ""
    reach = "" if recipe.reaches(target_length) else f", for {recipe.extended_length:,} tokens and not for more"
    return f"{method} over {recipe.context_length:,} tokens is published for {recipe.name}{reach}: {recipe.source}"


def dry_run(model: str, target_length: int, purpose: str) -> str:
    """Return the command line that only recommends a method for a purpose."""
    return command_line("extend", model, target_length=target_length, purpose=purpose, dry_run=True)


def _method_for(engine: str, advice: Advice, advise_on_all_engines: Callable[[], Advice]) -> MethodAdvice:
    """Return the method to take for an engine: one that helped and that the engine serves.

    Raises:
        MethodError: no method is needed, or none that engines serve has helped.
        ServingError: the engine serves none of those; the message names engines that serve the first.
    """
    if not advice.methods:
        commands = advice.commands.get(f"serve with {engine}", ())
        hint = f" Serve it as it is: {commands[-1]}" if commands else ""
        raise MethodError(f"{needs_nothing(advice.context_length, advice.target_length, advice.context_rule)}{hint}")
    helping = [method for method in advice.methods if method.fits and method.engines]
    if not helping:
        raise MethodError(
            f"no method that engines serve is known to bring {advice.model} from {advice.context_length:,} to "
            f"{advice.target_length:,} tokens without training; take a shorter target length, or see "
            f"`{dry_run(advice.model, advice.target_length, 'train')}` for training"
        )
    helping.sort(key=lambda method: SERVING not in method.purposes)
    for method in helping:
        if method.engines.get(engine):
            return method
    first = helping[0]
    on_all_engines = next(method for method in advise_on_all_engines().methods if method.method == first.method)
    others = [name for name in list_engines() if on_all_engines.engines.get(name)]
    raise ServingError(f"{first.refusals[engine]}. Engines that serve {first.method}: {', '.join(others)}")


def carries(extension: Extension, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Return whether the output folder exists already, with the planned patch and the files of the present model.

    The files of the folder are compared with those of the model, which takes as long as copying them.

    Raises:
        MethodError: the folder exists, but it has another patch, or other files than the model.
    """
    out = Path(extension.out)
    if not out.exists():
        return False
    patches = open_model(extension.out).patches if (out / "config.json").is_file() else []
    patch = patches[-1] if len(patches) == 1 else None
    planned = (extension.method, extension.target_length, extension.context_length)
    if patch is None or (patch.method.name, patch.target_length, patch.rotary.context_length) != planned:
        raise MethodError(f"{extension.out!r} exists already and is something else; give --out another name")
    load_empty(out, trust_remote_code=trust_remote_code)  # raises an error for a damaged record of the patch
    different = unlike_copies(model_folder(extension.model, revision=revision), out)
    config, _ = read_config(extension.model, revision=revision, trust_remote_code=trust_remote_code)
    copied_config, _ = read_config(out, trust_remote_code=trust_remote_code)
    if _settings(config) != _settings(copied_config):
        different.append("config.json")
    if different:
        raise MethodError(
            f"{extension.out!r} was not made from {extension.model!r} as it is now: {short(', '.join(different))} "
            "changed since, or belong to another model; give --out another name, or remove the folder"
        )
    return True


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings in a config, without its folder name and the version of transformers that wrote it."""
    values: dict[str, Any] = config.to_dict()
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def judge(extension: Extension, run: Run[Any]) -> ExtensionVerdict | LengthVerdict:
    """Return the verdict on an extension after its measurement.

    `run` has the perplexities of the model, unpatched and with the method that `Extension.measured` names.
    """
    target = extension.target_length
    unpatched = method_key(run.settings["loaded"])
    loss = next(measure for measure in run.kind.measures(run) if measure.evidence is Evidence.LOSS)
    extended = next(key for key in loss.items if key != unpatched)
    if extension.method == _LENGTH_ALONE:
        return _judge_length(extension, loss, unpatched, extended)
    short_lengths = [
        length for length in sorted(loss.lengths(unpatched), reverse=True) if length <= extension.context_length
    ]
    # the sum of the losses at a short length and at the target length counts as one more length, so that the test of
    # the balance is paired over documents too; it stands under the negative short length
    items = {key: dict(by_length) for key, by_length in loss.items.items()}
    for by_length in items.values():
        for length in short_lengths:
            pairs = zip(by_length[length], by_length[target], strict=True)
            by_length[-length] = [
                (short_loss / short_tokens + long_loss / long_tokens, 1.0)
                for (short_loss, short_tokens), (long_loss, long_tokens) in pairs
            ]
    with_sums = replace(loss, items=items)

    def compare(length: int) -> Comparison:
        return Comparison(
            loss.value(unpatched, length),
            loss.value(extended, length),
            loss.change((extended, length), (unpatched, length)),
        )

    return ExtensionVerdict(
        method=extension.method,
        context_length=extension.context_length,
        target_length=target,
        gain=compare(target),
        short_inputs={length: compare(length) for length in short_lengths},
        balances={length: with_sums.change((extended, -length), (unpatched, -length)) for length in short_lengths},
    )


def _judge_length(extension: Extension, loss: Measure, as_loaded: str, temperature: str) -> LengthVerdict:
    """Return the verdict on a longer length for a model that needs no patch.

    Args:
        extension: the plan.
        loss: the measured losses.
        as_loaded, temperature: the keys of the model as it is and of the method `temperature`.
    """

    def compare(before: tuple[str, int], after: tuple[str, int]) -> Comparison:
        return Comparison(loss.value(*before), loss.value(*after), loss.change(after, before))

    long = (as_loaded, extension.target_length)
    return LengthVerdict(
        context_length=extension.context_length,
        target_length=extension.target_length,
        longer=compare((as_loaded, extension.context_length), long),
        temperature=compare(long, (temperature, extension.target_length)),
    )
