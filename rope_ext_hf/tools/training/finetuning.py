"""`finetune`: from a model and a text to a folder of a longer model, with what it reads before and after.

    report = finetune("reference", "longer", data="books/*.txt", method="yarn", factor=4, minutes=10)
    print(report)

The same call continues where it was interrupted. The folder `longer/model` loads plainly wherever the method does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.integrations import get_available_reporting_integrations

from rope_ext_hf.errors import CorpusError, MethodError, UnsupportedModelError, duration
from rope_ext_hf.eval.measuring import passkey, perplexity
from rope_ext_hf.eval.perplexity_runs import Result, difference
from rope_ext_hf.files import json_text, write_text
from rope_ext_hf.hub import is_adapter, load_empty, load_model, load_tokenizer
from rope_ext_hf.installing import install_command
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.patching import patch
from rope_ext_hf.questions import forward
from rope_ext_hf.reading.documents import Tokens, corpus_name
from rope_ext_hf.reading.scorer import check_numbers
from rope_ext_hf.reading.spans import prefix_tokens
from rope_ext_hf.runs.identity import digest_inputs
from rope_ext_hf.runs.journal import holds_folder
from rope_ext_hf.runs.measures import exponential, perplexity_text
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.run_file import RunFile, run_file
from rope_ext_hf.runs.runner import Progress
from rope_ext_hf.runs.statistics import Estimate, estimate_share, estimate_share_change
from rope_ext_hf.runs.tables import BEYOND
from rope_ext_hf.runs.verdicts import Verdict, verdict
from rope_ext_hf.terminal import Report, as_wide_as, text_table, wrapped
from rope_ext_hf.tools.serving.model_card import CARD_COLUMNS, made_from, write_card
from rope_ext_hf.tools.training.callback import RopeCallback
from rope_ext_hf.tools.training.guarded_training import Rows, train
from rope_ext_hf.tools.training.questions import Finetuning
from rope_ext_hf.tools.training.run_folder import open_run, save_model, settings_of, split_texts

_HELD_OUT = 10  # one document of so many is measured on instead of trained on
_LOGGED_EVERY, _LOGGED_SPANS = 20, 8  # steps between measurements for a logger, and spans of each
RETRIEVAL_TRIALS = 12  # prompts per depth, at five depths
_MODELS = ("unpatched", "patched", "trained", "control", "control, patched")


@dataclass(frozen=True)
class FinetuneReport(Report):
    """The changes by a training. Losses are in nats per token, of the same tokens at every length and for every model.

    Attributes:
        settings: the fields of the question.
        context_length, target_length: tokens.
        losses: by model ("unpatched", "patched", "trained", and with a control "control" and "control, patched"), then
            by length in tokens: the loss.
        gains: by model other than "trained", then by length: how much lower the loss of the trained model is, with its
            95% interval, paired by document; "unpatched at 1x" compares with the unpatched model at its context length.
        retrieval: by model with the patch, the share of prompts at the target length that are answered exactly, with
            its interval over prompts; empty: not measured.
        retrieval_gains: by such a model other than "trained", by how much the share of the trained model is larger.
        training: steps, seconds and losses of the training, and of the control.
        folder: the trained model.

    In JSON an estimate is its value, the ends of its interval, and the number of documents or prompts.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    losses: dict[str, dict[str, float]]
    gains: dict[str, dict[str, Estimate]]
    retrieval: dict[str, Estimate]
    retrieval_gains: dict[str, Estimate]
    training: dict[str, dict[str, Any]]
    folder: str

    @property
    def verdicts(self) -> dict[str, dict[str, Verdict]]:
        """By model other than "trained", then by length: how its loss compares with that of the trained model."""
        return {
            name: {length: verdict(gain, perplexity=True) for length, gain in by_length.items()}
            for name, by_length in self.gains.items()
        }

    @property
    def findings(self) -> str:
        """What was measured, and what follows from it."""
        lengths = list(self.losses["trained"])
        heads = [f"{int(length):,}{BEYOND if int(length) > self.target_length else ''}" for length in lengths]
        rows = [
            [name, *(perplexity_text(exponential(loss[length])) for length in lengths)]
            for name, loss in self.losses.items()
        ]
        lines = [text_table([["perplexity", *heads], *rows], "lr")]
        for name, told in self.verdicts.items():
            lines += ["", f"perplexity of the model {name!r}, compared with the trained one"]
            lines += [wrapped(str(each), f"{int(length):>12,}: ") for length, each in told.items()]
        if self.retrieval:
            lines += ["", f"prompts of {self.target_length:,} tokens that are answered exactly"]
        for name, share in self.retrieval.items():
            prompts = f" of {share.items} prompts" if share.low is None else ""
            lines.append(f"  {name}: {share.text('{:.0%}'.format)}{prompts}")
        for name, gain in self.retrieval_gains.items():
            more = verdict(gain, unit="points", higher_is_better=True, item="prompt", scale=100, digits=1)
            lines.append(wrapped(str(more), f"  trained, compared with {name!r}: "))
        if any(BEYOND in head for head in heads):
            lines += ["", f"{BEYOND} longer than the model is trained for, {self.target_length:,} tokens"]
        ran = self.training["trained"]
        return "\n".join([*lines, "", f"{ran['steps']} steps in {ran['seconds'] / 60:.1f} minutes"])

    def __str__(self) -> str:
        return f"{self.findings}; the model is in {self.folder}"


def _settings(asked: Finetuning) -> dict[str, Any]:
    (method,) = asked.method
    values = settings_of(asked) | {"factor": asked.factor[0] if asked.factor else None}
    values["params"] = values.pop("parameters")
    del values["report_to"]  # a run may be continued with another one
    return values | {"method": method if isinstance(method, str) else method.to_dict()}


def _load(asked: Finetuning) -> Any:
    gc.collect()  # a Trainer and the model before refer to each other
    return load_model(asked.model, dtype=asked.dtype, device=asked.device, **asked.source)


@forward(Finetuning)
def finetune(
    model: str | Path,
    out: str | Path,
    *,
    report: Callable[[str], None] | None = None,
    progress: Progress | bool | None = None,
    **asked: Any,
) -> FinetuneReport:
    """Patch a model, train it at the extended length, and measure it before and after on text it did not see.

    Args:
        model: a folder, a Hub id or "reference".
        out: the folder of the run; the trained model is in its folder `model`.
        report: called with a line of progress.
        progress: of the measurements, as `rope_ext_hf.eval.measure` takes it; True: a bar of tqdm.
        **asked: the fields of `Finetuning`: data, method, one of minutes and steps, and more; others are parameters of
            the method.

    Raises:
        MethodError: not one of minutes and steps, or no length to extend to.
        CorpusError: too short a text.
        UnsupportedModelError: a model that gives NaN in place of losses, as loaded or after its training.
        FileError: the folder holds a run of other settings, or of a model, tokenizer or text that changed since.
        ImportError: PEFT is not installed, which adapters take.

    A training continues from its last checkpoint that is as it was written; damaged ones are removed and reported.
    """
    fields, of_method = Finetuning.apart(asked)
    question = Finetuning(model=str(model), parameters=of_method, **fields)
    check_packages(question)
    return _answer(question, Path(out), report or (lambda line: None), progress)


def check_packages(asked: Finetuning) -> None:
    """Raise ImportError where a package is missing that the training needs."""
    if not asked.train_all and find_spec("peft") is None:
        raise ImportError(f"adapters need PEFT: {install_command('train')}; or train all weights (train_all)")
    if asked.report_to not in ("none", *get_available_reporting_integrations()):
        raise ImportError(f"report_to={asked.report_to!r} needs its package: pip install {asked.report_to}")


@holds_folder
def _answer(
    asked: Finetuning, out: Path, say: Callable[[str], None], progress: Progress | bool | None
) -> FinetuneReport:
    short, long, tokenizer, texts = lengths_and_texts(asked)
    base = _load(asked)
    open_run(out, _settings(asked), digest_inputs(base, tokenizer, *texts))
    origin, file = made_from(asked.model, **asked.source), run_file(asked, asked.model, out=out)
    file.write(out)
    run = _FinetuningRun(asked, out, say, progress, tokenizer, *texts, short, long, file)
    run.measure("unpatched", base)
    run.measure("patched", patch(base, **asked.arguments_of_patch))
    del base  # before others are loaded
    for name in ("trained", "control") if asked.control else ("trained",):
        run.train_one(name)
    made = run.report()
    with as_wide_as(CARD_COLUMNS):
        about = made.findings
    write_card(out / "model", run.runs["trained"], name=out.resolve().name, about=about, **origin)
    write_text(out / "report.json", json_text(made.to_dict()) + "\n")
    return made


def lengths_and_texts(asked: Finetuning) -> tuple[int, int, PreTrainedTokenizerBase, tuple[list[Tokens], list[Tokens]]]:
    """The context length and the extended one, the tokenizer, and the texts that are trained on and measured."""
    if is_adapter(asked.model, revision=asked.revision):
        raise MethodError(f"{asked.model!r} is an adapter; merge it into its model first, and train that")
    described = describe(patch(load_empty(asked.model, **asked.source), **asked.arguments_of_patch))
    short, long = described.context_length, described.extended_length
    if long is None or long <= short:
        raise MethodError(f"{described.method} states no length to train at; give factor or target_length")
    tokenizer = load_tokenizer(asked.model, **asked.source)
    training, held_out = split_texts(asked, tokenizer, _HELD_OUT)
    if (tokens := sum(len(each.ids) for each in training)) < long:
        raise CorpusError(f"the text to train on has {tokens:,} tokens, and a row {long:,}; give longer text")
    return short, long, tokenizer, (training, held_out)


@dataclass
class _FinetuningRun:
    """A fine-tuning in its folder."""

    asked: Finetuning
    folder: Path
    say: Callable[[str], None]
    progress: Progress | bool | None
    tokenizer: PreTrainedTokenizerBase
    training: list[Tokens]  # trained on
    held_out: list[Tokens]  # measured
    short: int  # the context length in tokens
    long: int  # the extended one
    file: RunFile  # what was asked
    runs: dict[str, list[Run[Any]]] = field(default_factory=dict)
    measured: dict[str, list[Result]] = field(default_factory=dict)  # of text, by model
    answered: dict[str, list[float]] = field(default_factory=dict)
    """By model, the share of each prompt answered exactly, over its depths."""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)  # steps, seconds and losses, by model

    def measure(self, name: str, model: Any) -> None:
        self.say(f"measuring: {name}")
        asked = self.asked
        kept: dict[str, Any] = {"tokenizer": self.tokenizer, "out": self.folder / "measured", "file": self.file}
        kept["progress"] = self.progress
        results = perplexity(
            model,
            self.held_out,
            lengths=doubling(self.short, self.long),
            targets=self.short // 2,
            max_spans=asked.max_spans,
            data=corpus_name(asked.data if asked.eval_data is None else asked.eval_data),
            **kept,
        )
        self._check(name, results)
        self.measured[name], self.runs[name] = results, [results.run]
        if asked.retrieval is not None and name not in ("unpatched", "control"):
            cells = passkey(model, lengths=[self.long], task=asked.retrieval, trials=RETRIEVAL_TRIALS, **kept)
            self.runs[name].append(cells.run)
            exact = ([float(score.exact) for score in cell.scores] for cell in cells)
            self.answered[name] = [fmean(depths) for depths in zip(*exact, strict=True)]

    def _check(self, name: str, results: list[Result]) -> None:
        """Check that a model has a loss at every length: one without cannot be trained, or was not trained well."""
        losses = torch.tensor([each.loss for each in results])
        if name in ("unpatched", "patched"):
            check_numbers(losses, self.short)
        elif bool(losses.isnan().any()):
            raise UnsupportedModelError(
                f"the training diverged: the loss of the model {name!r} is not a number, and no model is written; give "
                f"another folder and a lower learning rate than {self.asked.learning_rate:g} (--learning-rate)"
            )

    def train_one(self, name: str) -> None:
        """Train the patched model ("trained") or the one without ("control"), and measure it; the first is saved."""
        asked, extended = self.asked, name == "trained"
        model = patch(_load(asked), **asked.arguments_of_patch) if extended else _load(asked)
        torch.manual_seed(asked.seed)
        learner = model if asked.train_all else with_adapters(model, asked.rank)
        learner.train()
        self.say(f"training: {name}")
        length, end = self.long if extended else self.short, self.tokenizer.eos_token_id
        prefix = prefix_tokens(self.tokenizer, None)
        few: dict[str, Any] = {"every": _LOGGED_EVERY, "max_spans": _LOGGED_SPANS, "tokenizer": self.tokenizer}
        lengths = sorted({self.short, length})
        checks = None if asked.report_to == "none" else RopeCallback(data=self.held_out, lengths=lengths, **few)
        self.trained[name] = train(
            asked,
            learner,
            _load(asked).requires_grad_(False) if asked.guard else None,
            Rows([each.ids for each in self.training], length, self.short, prefix=prefix, end=end, seed=asked.seed),
            self.folder / f"checkpoints of {name}",
            batch=asked.batch * (1 if extended else round(self.long / self.short)),
            checks=checks,
            report=lambda step, loss, left: self.say(f"step {step}, loss {loss:.4f}, about {duration(left)} more"),
            say=self.say,
        )
        model = learner if asked.train_all else learner.merge_and_unload()
        self.measure(name, model)
        if extended:
            save_model(model, self.tokenizer, self.folder / "model")
        else:
            self.measure("control, patched", patch(model, **asked.arguments_of_patch))

    def report(self) -> FinetuneReport:
        order = [name for name in _MODELS if name in self.measured]
        base, ours = self.measured["unpatched"][0], self.measured["trained"]
        gains = {"unpatched at 1x": {str(each.length): difference(base, each) for each in ours}}
        for name in order:
            if name != "trained":
                pairs = zip(self.measured[name], ours, strict=True)
                gains[name] = {str(each.length): difference(theirs, each) for theirs, each in pairs}
        answered = {name: self.answered[name] for name in order if name in self.answered}
        return FinetuneReport(
            settings=_settings(self.asked),
            context_length=self.short,
            target_length=self.long,
            losses={name: {str(each.length): each.loss for each in self.measured[name]} for name in order},
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


def doubling(short: int, long: int) -> list[int]:
    """The context length, doubled up to twice the extended length."""
    lengths = [short]
    while lengths[-1] < 2 * long:
        lengths.append(min(2 * lengths[-1], 2 * long))
    return lengths


def with_adapters(model: Any, rank: int) -> Any:
    """A model with LoRA on all linear layers, and its norms and token embeddings trained whole.

    LongLoRA (Chen et al. 2023, arXiv 2309.12307, sec. 3.3): adapters alone fall short of training all weights here.
    """
    from peft import LoraConfig, get_peft_model

    embeddings = model.get_input_embeddings()
    whole = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module is embeddings or "Norm" in type(module).__name__
    }
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=sorted(whole),
        task_type="CAUSAL_LM",
        ensure_weight_tying=bool(model.config.get_text_config().tie_word_embeddings),
    )
    return get_peft_model(model, settings)
