"""From a model and a length to a folder that an engine serves: which steps, and what the measurement among them says.

plan = plan_extension("Qwen/Qwen3-8B", 131072, engine="vllm")
print(plan.method, plan.reason, *plan.steps, sep="\n")
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.engines.base import find_engine, list_engines
from rope_ext_hf.engines.comparison import usual_server
from rope_ext_hf.errors import MethodError, ServingError, short
from rope_ext_hf.eval.perplexity_runs import TOLERANCE
from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.runs import Run
from rope_ext_hf.hub import load_empty, model_folder, read_config
from rope_ext_hf.methods.guidance import SERVING
from rope_ext_hf.patches.recipes import find_recipe
from rope_ext_hf.patches.saving import unlike_copies
from rope_ext_hf.serving.advice import Advice, MethodAdvice, signed
from rope_ext_hf.serving.advising import advise
from rope_ext_hf.serving.target import needs_nothing, open_model

__all__ = ["Extension", "carries", "judge", "plan_extension"]

_SHORT_INPUTS = 8
"""The shortest inputs that are measured have the context length over this."""


@dataclass(frozen=True)
class Extension:
    """How a model is extended and served.

    Attributes:
        model, engine: what is extended, and for which engine.
        method: the method, by name.
        target_length, context_length: tokens; the factor is one over the other.
        reason: why this method, in words.
        expected: what it costs inputs within the context length by the measurements of this package, in words.
        lengths: the lengths in tokens that are measured, the context length and the target length last.
        out: the folder that is written.
        steps: the commands, by name: ppl (where it is measured), patch and serve-config, without the program's name.
    """

    model: str
    engine: str
    method: str
    target_length: int
    context_length: int
    reason: str
    expected: str
    lengths: tuple[int, ...]
    out: str
    steps: dict[str, tuple[str, ...]]

    @property
    def commands(self) -> dict[str, str]:
        """The steps as they are typed."""
        return {name: f"rope-ext {shlex.join(words)}" for name, words in self.steps.items()}


@dataclass(frozen=True)
class Verdict:
    """What a measurement says of an extension; losses in nats per token, by length in tokens.

    Attributes:
        as_loaded, extended: the losses of the model as loaded and with the method.
        context_length, target_length: tokens.
    """

    as_loaded: dict[int, float]
    extended: dict[int, float]
    context_length: int
    target_length: int

    @property
    def gains(self) -> bool:
        """Whether the loss at the target length is lower than that of the model as loaded."""
        return self.extended[self.target_length] < self.as_loaded[self.target_length]

    def __str__(self) -> str:
        costs = [
            f"{self.extended[length] - loss:+.3f}{'' if position else ' nats per token'} at {length:,} tokens"
            for position, (length, loss) in enumerate(sorted(self.as_loaded.items()))
            if length <= self.context_length
        ]
        reached, before = self.extended[self.target_length], self.as_loaded[self.context_length]
        higher = reached > (1 + TOLERANCE) * before
        above = f"with a loss {reached - before:.3f} above that of" if higher else "at the loss of"
        losses = f"{reached:.3f} against {before:.3f}; as loaded {self.as_loaded[self.target_length]:.3f}"
        return (
            f"It costs {' and '.join(costs)}, and reads {self.target_length:,} tokens {above} "
            f"{self.context_length:,} ({losses})."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"gains": self.gains, "text": str(self)}


def plan_extension(
    model: str,
    target_length: int,
    *,
    engine: str | None = None,
    data: str = "stdlib?join=true",
    most_spans: int = 8,
    reading: Sequence[str] = (),
    measure: bool = True,
    out: Path | None = None,
    over: str = "own",
    context_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Extension:
    """Choose how a model is extended, by `advise`, and list the commands that do it; no weights are read.

    Args:
        model: a folder, a Hub id or "reference".
        target_length: tokens.
        engine: a name that `rope-ext serve-config --help` lists; None: the usual server.
        data, most_spans: the text that is read, and how many spans of each length.
        reading: further options of `rope-ext ppl`, such as --device.
        measure: whether the loss is measured.
        out: the folder to write; None: the name of the model with the length.
        over, context_length: as in `patch`; None: the published one where a recipe is for such a length, else as read.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        MethodError: a model that needs no extension or carries a patch, or that no method brings to this length.
        ServingError: an engine that serves no fitting method.
        CheckpointError: no such model.
    """
    engine = find_engine(engine or usual_server()).name
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    if opened.specs:
        raise MethodError(
            f"{model} carries a patch, {opened.specs[-1].method.label()}, which a new one would replace; extend the "
            f"model it was made from, or serve it: `rope-ext serve-config {shlex.quote(model)} --engine {engine}`"
        )
    recipe = find_recipe(opened.config) if over == "own" and context_length is None else None
    advice = advise(
        model,
        target_length,
        over=over,
        context_length=context_length,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    chosen = _choose(advice, engine)
    reason = f"{chosen.method} is the first choice for serving at {advice.factor:.3g} times the context length"
    if recipe is not None and recipe.entry and chosen.method == recipe.entry["rope_type"]:
        where = f"{chosen.method} over {recipe.context_length:,} tokens is published for {recipe.name}"
        longer = "" if recipe.reaches(target_length) else f", for {recipe.extended_length:,} tokens and not for more"
        reason = f"{where}{longer}: {recipe.source}"
    folder = str(out or f"{Path(model).name}-{target_length}")
    loading = ["--revision", revision] if revision else []
    loading += ["--trust-remote-code"] if trust_remote_code else []
    underneath = ["--over", over] if over != "own" else []
    underneath += ["--context-length", str(context_length)] if context_length else []
    asked = [model, "--method", chosen.method, "--target-length", str(target_length), *underneath, *loading]
    lengths = (max(32, advice.context_length // _SHORT_INPUTS), advice.context_length, target_length)
    text = ["--lengths", ",".join(map(str, lengths)), "--max-spans", str(most_spans), "--data", data]
    steps = {"ppl": ("ppl", *asked, *text, *reading)} if measure else {}
    steps["patch"] = ("patch", *asked, "--out", folder)
    steps["serve-config"] = ("serve-config", folder, "--engine", engine)
    return Extension(
        model=model,
        engine=engine,
        method=chosen.method,
        target_length=target_length,
        context_length=advice.context_length,
        reason=reason,
        expected=f"inputs within {advice.context_length:,} tokens: {chosen.short_inputs}; at the length asked for: "
        f"{' / '.join(signed(chosen.measured.values()))} bits per byte, on two small models",
        lengths=lengths,
        out=folder,
        steps=steps,
    )


def _choose(advice: Advice, engine: str) -> MethodAdvice:
    """The method to take for an engine: the first choice for serving, else the first that fits and that it serves."""
    if not advice.methods:
        served = advice.commands.get(f"serve with {engine}", ())
        how = f" Serve it as it is: {served[-1]}" if served else ""
        raise MethodError(f"{needs_nothing(advice.context_length, advice.target_length, advice.context_rule)}{how}")
    fitting = [each for each in advice.methods if each.fits and each.engines]
    if not fitting:
        raise MethodError(
            f"no method that engines serve brings {advice.model} from {advice.context_length:,} to "
            f"{advice.target_length:,} tokens without training, by what was measured; ask for fewer tokens, or see "
            f"`rope-ext advise {shlex.quote(advice.model)} --target-length {advice.target_length}` for training"
        )
    ordered = sorted(fitting, key=lambda each: SERVING not in each.purposes)
    chosen = next((each for each in ordered if each.engines.get(engine)), None)
    if chosen is None:
        others = [name for name in list_engines() if ordered[0].engines.get(name)]
        raise ServingError(
            f"{ordered[0].refusals[engine]}. Engines that serve {ordered[0].method}: {', '.join(others)}"
        )
    return chosen


def carries(extension: Extension, *, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """Whether the folder is there already, with the patch of an extension, made from the model as it is now.

    Its files are compared with those of the model, which takes as long as to copy them.

    Args:
        revision, trust_remote_code: as `plan_extension` takes them.

    Raises:
        MethodError: it is there without that patch, or was made from another model or other weights.
        CheckpointError, FingerprintError: its config is damaged.
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


def judge(extension: Extension, run: Run[Result]) -> Verdict:
    """What a measurement says of an extension."""
    losses: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for result in run.results:
        losses[result.method is not None][result.length] = result.loss
    return Verdict(losses[False], losses[True], extension.context_length, extension.target_length)
