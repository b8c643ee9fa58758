"""`finetune`: patch a model, train it on a text, mostly at the extended length, and measure it before and after.

    report = finetune("reference", "longer", data="books/*.txt", method="yarn", factor=4, minutes=10)
    print(report)

The same call continues an interrupted run. The trained model is in the folder `longer/model`, which loads with stock
transformers where the method does.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.integrations import get_available_reporting_integrations

from rope_ext_hf.errors import CorpusError, MethodError, UnsupportedModelError, duration
from rope_ext_hf.eval.evaluations import passkey, perplexity
from rope_ext_hf.eval.spans.perplexity_runs import Result, difference
from rope_ext_hf.files.whole import disk_errors, json_text, with_tilde, write_text
from rope_ext_hf.hub import is_adapter, load_empty, load_model, load_tokenizer
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import TrainingDefaults
from rope_ext_hf.methods.registry import class_of
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.options.arguments import with_fields_of
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.patching import patch, unpatch
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.scorer import check_numbers
from rope_ext_hf.reading.text.documents import Tokens, corpus_name
from rope_ext_hf.reading.text.tokenizing import prefix_tokens
from rope_ext_hf.runs.conclusions.statistics import estimate_share, estimate_share_change
from rope_ext_hf.runs.folder.folder import exclusive
from rope_ext_hf.runs.folder.identity import digest_inputs
from rope_ext_hf.runs.folder.run_file import RunFile, check_inputs, run_file
from rope_ext_hf.runs.measurement import Listener
from rope_ext_hf.runs.run import Run
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools.gguf.models import is_gguf, way_out
from rope_ext_hf.tools.serving.model_card import CARD_COLUMNS, made_from, write_card
from rope_ext_hf.tools.training.callback import RopeCallback
from rope_ext_hf.tools.training.finetune_report import FinetuneReport
from rope_ext_hf.tools.training.finetuning_options import Finetuning
from rope_ext_hf.tools.training.guarded_training import Rows, train
from rope_ext_hf.tools.training.run_folder import open_run, save_model
from rope_ext_hf.tools.training.texts import split_texts

_LOGGED_EVERY, _LOGGED_SPANS = 20, 8  # steps between measurements for a logger, and spans of text in each
RETRIEVAL_TRIALS = 12  # prompts per depth, at five depths
_MODELS = ("unpatched", "patched", "trained", "control", "control, patched")
"""The names of models in results, in order.

They are the model as loaded, patched, patched and then trained, trained without the patch, and the last one patched
after its training.
"""


def training_defaults(options: Finetuning) -> TrainingDefaults:
    """Return the defaults of the method that is trained."""
    (method,) = options.method
    return class_of(method).training


def with_defaults(options: Finetuning) -> Finetuning:
    """Return the options with their method's defaults for the settings that they leave out."""
    names = [name for name in ("learning_rate", "train_all", "guard") if getattr(options, name) is None]
    defaults = training_defaults(options)
    return replace(options, **{name: getattr(defaults, name) for name in names})


def patch_to_train(model: Any, options: Finetuning) -> Any:
    """Patch a model as the options say, and return it, without the method's warning that it is not trained yet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch(model, **options.arguments_of_patch)
    untrained = active_patches(model)[-1].method.warning
    for each in caught:
        text = str(each.message)
        if untrained is not None and text.startswith(untrained):
            text = text.removeprefix(untrained).removeprefix(". ")
        if text:
            warnings.warn(text, each.category, stacklevel=2)
    return model


def _settings(options: Finetuning) -> dict[str, Any]:
    """Return the settings that must be equal when an interrupted fine-tuning is continued.

    They are JSON values, except for texts that were given as objects and not by their names.
    """
    (method,) = options.method
    settings = options.arguments | {
        "data": corpus_name(options.data),
        "eval_data": corpus_name(options.eval_data),
        "factor": options.factor[0] if options.factor else None,
        "method": method if isinstance(method, str) else method.to_dict(),
    }
    settings["params"] = settings.pop("parameters")
    layers = list(settings.pop("layers"))
    if layers:  # else left out, so that a run is continued that was begun before there was this setting
        settings["layers"] = layers
    del settings["report_to"]  # a run may be continued with another logger
    return settings


def _load(options: Finetuning) -> Any:
    """Load the unpatched model with its weights."""
    gc.collect()  # an earlier model and its Trainer refer to each other, and keep their memory until then
    return load_model(options.model, dtype=options.dtype, device=options.device, **options.source)


@with_fields_of(Finetuning)
def finetune(
    model: str | Path,
    out: str | Path,
    *,
    report: Callable[[str], None] | None = None,
    progress: Listener | bool | None = None,
    **fields: Any,
) -> FinetuneReport:
    """Patch a model, train it at the extended length, and measure it before and after on text that it did not see.

    A training continues from its last undamaged checkpoint; damaged ones are removed and reported. Under `nope`, which
    drops the rotation, the model is trained at its context length instead, with defaults of its own
    (`rope_ext_hf.methods.dropping.Nope.training`), and the method that is saved states the tokens of the training.

    Args:
        model: a folder, a Hub id, or "reference" for the bundled model.
        out: the folder of the run; the trained model is in its folder `model`.
        report: a function that is called with each line about the progress.
        progress: called during measurements, as in `rope_ext_hf.eval.measure`; True shows a tqdm bar.
        **fields: the fields of `Finetuning` (data, method, minutes or steps, and others); any other argument is a
            parameter of the method.

    Raises:
        MethodError: both or none of minutes and steps are given, or there is no length to extend to.
        CorpusError: the text is too short.
        UnsupportedModelError: the model's loss is not a number, as loaded or after its training.
        FileError: the folder holds a run with other settings, or one whose model, tokenizer or text has changed since.
        ImportError: PEFT is not installed, which adapters need.
    """
    question_fields, method_parameters = Finetuning.split_kwargs(fields)
    options = with_defaults(Finetuning(model=str(model), parameters=method_parameters, **question_fields))
    check_packages(options)
    out = Path(out)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with exclusive(out):
        return _finetune(options, out, report or (lambda line: None), progress)


def check_packages(options: Finetuning) -> None:
    """Raise ImportError if a package that the training needs is not installed."""
    if not options.train_all and find_spec("peft") is None:
        raise ImportError(f"adapters need PEFT: {install_command('train')}; or train all weights (train_all)")
    if options.report_to not in ("none", *get_available_reporting_integrations()):
        raise ImportError(f"report_to={options.report_to!r} needs its package: pip install {options.report_to}")


def _finetune(
    options: Finetuning, out: Path, say: Callable[[str], None], progress: Listener | bool | None
) -> FinetuneReport:
    material = training_material(options)
    base = _load(options)
    inputs = digest_inputs(base, material.tokenizer, material.training, material.held_out)
    check_inputs(options.command, inputs)
    open_run(out, _settings(options), inputs)
    origin, file = made_from(options.model, **options.source), run_file(options, options.model, out=out)
    file.with_inputs(options.command, inputs).write(out)
    run = _FinetuningRun(options, material, out, say, progress, file)
    run.measure("unpatched", base)
    run.measure("patched", patch_to_train(base, options))
    del base  # its memory is needed for the next model
    run.train_patched()
    if options.control:
        run.train_control()
    report = run.report()
    with as_wide_as(CARD_COLUMNS):
        findings = report.findings
    write_card(out / "model", run.runs["trained"], name=out.resolve().name, about=findings, **origin)
    write_text(out / "report.json", with_tilde(json_text(report.to_dict())) + "\n")
    return report


@dataclass(frozen=True)
class TrainingMaterial:
    """The lengths, the tokenizer and the texts of a fine-tuning.

    Attributes:
        short: the context length of the model, in tokens.
        long: the extended length, in tokens; twice the context length where none is stated, to see how far it reads.
        row: the number of tokens in a row that is trained on.
        tokenizer: the model's tokenizer.
        training: the texts to train on.
        held_out: the texts to measure.
    """

    short: int
    long: int
    row: int
    tokenizer: PreTrainedTokenizerBase
    training: list[Tokens]
    held_out: list[Tokens]

    @property
    def lengths(self) -> list[int]:
        """The lengths to measure: of those of `_doubling`, the ones that some text to measure has, in tokens."""
        longest = max(len(document.ids) for document in self.held_out)
        return [length for length in _doubling(self.short, self.long) if length <= longest]


def training_material(options: Finetuning) -> TrainingMaterial:
    """Read and check everything that a fine-tuning needs besides weights.

    Raises:
        MethodError: the model is an adapter or a GGUF file, or the method states no length to extend to.
        CorpusError: the text to train on is shorter than one row, or no document to measure is as long.
    """
    if is_gguf(options.model):
        raise MethodError(
            f"{options.model!r} is a GGUF file, whose weights cannot be trained. {way_out(Path(options.model))}"
        )
    if is_adapter(options.model, revision=options.revision):
        raise MethodError(f"{options.model!r} is an adapter; merge it into its model first, and train that")
    described = describe(patch_to_train(load_empty(options.model, **options.source), options))
    short, long = described.context_length, described.extended_length
    extended_rows = training_defaults(options).extended_rows
    if extended_rows and (long is None or long <= short):
        raise MethodError(f"{described.method} states no length to train at; give factor or target_length")
    tokenizer = load_tokenizer(options.model, **options.source)
    training, held_out = split_texts(options, tokenizer)
    tokens = sum(len(document.ids) for document in training)
    row = long if extended_rows and long is not None else short
    needed, long = long or short, long or 2 * short
    if tokens < row:
        raise CorpusError(
            f"the text to train on has {tokens:,} tokens, fewer than the {row:,} of one row; give longer text"
        )
    longest = max((len(document.ids) for document in held_out), default=0)
    if longest < needed:
        source = "a tenth of --data that is held out" if options.eval_data is None else "--eval-data"
        name = "the extended length" if needed > short else "the context length"
        raise CorpusError(
            f"the text to measure ({source}) has no document of {needed:,} tokens, {name}; the longest has "
            f"{longest:,}. Give longer documents with --eval-data"
        )
    return TrainingMaterial(short, long, row, tokenizer, training, held_out)


@dataclass
class _FinetuningRun:
    """A fine-tuning that is carried out in its folder, step by step."""

    options: Finetuning
    material: TrainingMaterial
    folder: Path
    say: Callable[[str], None]
    progress: Listener | bool | None
    file: RunFile  # the run file that measurements leave in their folders
    runs: dict[str, list[Run[Any]]] = field(default_factory=dict)  # of perplexity and retrieval, by model
    measured: dict[str, list[Result]] = field(default_factory=dict)  # perplexities, by model
    answered: dict[str, list[float]] = field(default_factory=dict)  # by model, share of depths answered, per prompt
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)  # steps, seconds and losses, by model

    def measure(self, name: str, model: Any) -> None:
        """Measure a model's perplexity by length, and its retrieval if the settings ask for it.

        Raises:
            UnsupportedModelError: a loss is not a number.
        """
        self.say(f"measuring: {name}")
        options, material = self.options, self.material
        shared: dict[str, Any] = {
            "tokenizer": material.tokenizer,
            "out": self.folder / "measured",
            "file": self.file,
            "progress": self.progress,
        }
        results = perplexity(
            model,
            material.held_out,
            lengths=material.lengths,
            targets=material.short // 2,
            max_spans=options.max_spans,
            data=corpus_name(options.data if options.eval_data is None else options.eval_data),
            **shared,
        )
        self._check_losses(name, results)
        self.measured[name], self.runs[name] = results, [results.run]
        if options.retrieval is not None and name not in ("unpatched", "control"):
            cells = passkey(model, lengths=[material.long], task=options.retrieval, trials=RETRIEVAL_TRIALS, **shared)
            self.runs[name].append(cells.run)
            exact = ([float(score.exact) for score in cell.scores] for cell in cells)
            self.answered[name] = [fmean(depths) for depths in zip(*exact, strict=True)]

    def _check_losses(self, name: str, results: list[Result]) -> None:
        """Raise UnsupportedModelError if a loss is not a number, before the training or because it diverged."""
        losses = torch.tensor([result.loss for result in results])
        if name in ("unpatched", "patched"):
            check_numbers(losses, self.material.short)
        elif bool(losses.isnan().any()):
            raise UnsupportedModelError(
                f"the training diverged: the loss of the model {name!r} is not a number, and no model is written; give "
                f"another folder and a lower learning rate than {self.options.learning_rate:g} (--learning-rate)"
            )

    def train_patched(self) -> None:
        """Train the patched model, measure it, and save it."""
        loaded = _load(self.options)
        patches = active_patches(loaded)
        model = patch_to_train(loaded, self.options)
        model = self._train("trained", model, self.material.row, self.options.batch)
        self._patch_again(model, patches[-1] if patches else None)
        self.measure("trained", model)
        save_model(model, self.material.tokenizer, self.folder / "model")

    def _patch_again(self, model: Any, before: Patch | None) -> None:
        """Put the method into the trained model as it is after the training, if it is another one then.

        `before`: the patch of the model as it was loaded; None: it had none.
        """
        options, present = self.options, active_patches(model)[-1]
        tokens = self.trained["trained"]["steps"] * options.batch * options.accumulate * self.material.row
        same_layers = before is not None and before.layers == present.layers
        after = present.method.after_training(tokens, before.method if before and same_layers else None)
        if after != present.method:
            kept = options.base_arguments | {"target_length": present.target_length, "layers": present.layers}
            patch(unpatch(model), after.to_dict(), **kept)

    def train_control(self) -> None:
        """Train the unpatched model at its context length, with as many tokens as the patched one, for comparison.

        It is measured without the patch and with it.
        """
        short_rows = round(self.material.row / self.material.short)
        model = self._train("control", _load(self.options), self.material.short, self.options.batch * short_rows)
        self.measure("control", model)
        self.measure("control, patched", patch_to_train(model, self.options))

    def _train(self, name: str, model: Any, length: int, batch: int) -> Any:
        """Train a model on rows of `length` tokens, and return it with its adapters merged into the weights."""
        options, material = self.options, self.material
        torch.manual_seed(options.seed)
        learner = model if options.train_all else with_adapters(model, options.rank)
        learner.train()
        self.say(f"training: {name}")
        checks = None
        if options.report_to != "none":
            checks = RopeCallback(
                data=material.held_out,
                lengths=sorted({material.short, length} | ({material.long} & set(material.lengths))),
                every=_LOGGED_EVERY,
                max_spans=_LOGGED_SPANS,
                tokenizer=material.tokenizer,
            )
        rows = Rows(
            [document.ids for document in material.training],
            length,
            material.short,
            prefix=prefix_tokens(material.tokenizer, None),
            end=material.tokenizer.eos_token_id,
            seed=options.seed,
        )
        self.trained[name] = train(
            options,
            learner,
            _load(options).requires_grad_(False) if options.guard else None,
            rows,
            self.folder / f"checkpoints of {name}",
            batch=batch,
            checks=checks,
            report=lambda step, loss, left: self.say(f"step {step}, loss {loss:.4f}, about {duration(left)} more"),
            say=self.say,
        )
        return learner if options.train_all else learner.merge_and_unload()

    def report(self) -> FinetuneReport:
        """Return the report of all measurements."""
        order = [name for name in _MODELS if name in self.measured]
        unpatched, trained = self.measured["unpatched"][0], self.measured["trained"]
        gains = {"unpatched at 1x": {str(result.length): difference(unpatched, result) for result in trained}}
        for name in order:
            if name != "trained":
                pairs = zip(self.measured[name], trained, strict=True)
                gains[name] = {str(result.length): difference(other, result) for other, result in pairs}
        answered = {name: self.answered[name] for name in order if name in self.answered}
        return FinetuneReport(
            settings=_settings(self.options),
            context_length=self.material.short,
            target_length=self.material.long,
            row_length=self.material.row,
            losses={name: {str(result.length): result.loss for result in self.measured[name]} for name in order},
            gains=gains,
            retrieval={name: estimate_share(shares) for name, shares in answered.items()},
            retrieval_gains={
                name: estimate_share_change(answered["trained"], shares)
                for name, shares in answered.items()
                if name != "trained"
            },
            training=self.trained,
            folder=str(self.folder / "model"),
        )


def _doubling(short: int, long: int) -> list[int]:
    """Return the lengths to measure: the context length `short`, doubled repeatedly up to twice the extended length."""
    lengths = [short]
    while lengths[-1] < 2 * long:
        lengths.append(min(2 * lengths[-1], 2 * long))
    return lengths


def with_adapters(model: Any, rank: int) -> Any:
    """Return a model with LoRA adapters on all linear layers; its norms and token embeddings are trained in full.

    Adapters alone fall short of training all weights when the context is extended: LongLoRA (Chen et al. 2023, arXiv
    2309.12307, sec. 3.3).
    """
    from peft import LoraConfig, get_peft_model

    embeddings = model.get_input_embeddings()
    trained_whole = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module is embeddings or "Norm" in type(module).__name__
    }
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=sorted(trained_whole),
        task_type="CAUSAL_LM",
        ensure_weight_tying=bool(model.config.get_text_config().tie_word_embeddings),
    )
    return get_peft_model(model, settings)
