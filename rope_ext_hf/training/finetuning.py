"""`finetune`: from a model and a text to a folder of a longer model, with what it reads before and after.

    report = finetune("reference", "longer", data="books/*.txt", method="yarn", factor=4, minutes=10)
    print(report)

The same call continues where it was interrupted. The folder `longer/model` loads plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.journal import holds_folder
from rope_ext_hf.eval.measuring import perplexity
from rope_ext_hf.eval.plan import tokenize
from rope_ext_hf.eval.results import Result, difference
from rope_ext_hf.eval.retrieval import passkey
from rope_ext_hf.files import write_json
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.patching import patch
from rope_ext_hf.training.recipe import Budget, Rows, train
from rope_ext_hf.training.run_folder import open_run, split

__all__ = ["FinetuneReport", "finetune"]

HELD_OUT = 10
"""One document of so many is measured on instead of trained on."""
RETRIEVAL_TRIALS = 12  # prompts per depth, at five depths


@dataclass(frozen=True)
class FinetuneReport:
    """What a training changed. Losses are in nats per token, of the same tokens at every length and for every model.

    Attributes:
        settings: what was asked for.
        context_length, target_length: tokens.
        losses: by model ("as loaded", "patched", "trained", and with a control "control" and "control, patched"), then
            by length in tokens: the loss.
        gains: by model other than "trained", then by length: how much lower the loss of the trained model is, and its
            95% interval, paired by document; "as loaded at 1x" compares with the context length of the model as loaded.
        retrieval: by model with the patch, the share of prompts at the target length that are answered exactly; empty:
            not measured.
        training: steps, seconds and losses of the training, and of the control.
        folder: the trained model.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    losses: dict[str, dict[str, float]]
    gains: dict[str, dict[str, tuple[float, float, float]]]
    retrieval: dict[str, float]
    training: dict[str, dict[str, Any]]
    folder: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lengths = list(self.losses["trained"])
        width = max(map(len, (*self.losses, *self.gains, "nats per token"))) + 2
        lines = [f"{'nats per token':{width}}" + "".join(f"{int(length):>12,}" for length in lengths)]
        for name, by_length in self.losses.items():
            lines.append(f"{name:{width}}" + "".join(f"{by_length[length]:>12.4f}" for length in lengths))
        lines += ["", f"lower than ...{'':{width - 14}}" + "".join(f"{int(length):>12,}" for length in lengths)]
        for name, gain_at in self.gains.items():
            lines.append(f"{name:{width}}" + "".join(f"{gain_at[length][0]:>12.4f}" for length in lengths))
            half = ((gain_at[length][2] - gain_at[length][1]) / 2 for length in lengths)
            lines.append(f"{'  +-':{width}}" + "".join(f"{value:>12.4f}" for value in half))
        lines += ["", *(f"retrieval, {name}: {share:.0%}" for name, share in self.retrieval.items())]
        ran = self.training["trained"]
        lines.append(f"{ran['steps']} steps in {ran['seconds'] / 60:.1f} minutes; the model is in {self.folder}")
        return "\n".join(lines)


@holds_folder
def finetune(
    model: str | Path,
    out: str | Path,
    *,
    data: str,
    method: str | RopeMethod,
    factor: float | None = None,
    target_length: int | None = None,
    over: str = "own",
    context_length: int | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    eval_data: str | None = None,
    train_all: bool = False,
    rank: int = 16,
    learning_rate: float = 2e-4,
    batch: int = 1,
    accumulate: int = 4,
    guard: float = 1.0,
    control: bool = False,
    retrieval: str | None = None,
    max_spans: int = 48,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: Callable[[str], None] | None = None,
    **params: Any,
) -> FinetuneReport:
    """Patch a model, train it at the extended length, and measure it before and after on text it did not see.

    Args:
        model: a folder, a Hub id or "reference".
        out: the folder of the run; the trained model is in its folder `model`.
        data: the text to train on, as `rope_ext_hf.eval.perplexity` takes it.
        method, factor, target_length, over, context_length, params: as `rope_ext_hf.patch` takes them.
        minutes, steps: how long is trained; one of the two. With minutes the result depends on the machine's speed.
        eval_data: the text that is measured; None: one in ten documents of `data`, or the last tenth of a single one,
            which are not trained on.
        train_all: train all weights instead of adapters (LoRA of all linear layers, with norms and embeddings trained
            whole, as LongLoRA needs them), which are merged at the end.
        rank: of the adapters.
        learning_rate: its peak. Large models trained whole commonly take 2e-5.
        batch, accumulate: long rows of a pass on each device, and passes of a step.
        guard: how strongly the model is held to the one before the patch on inputs of the context length; 0: not, and
            no second copy of the model is in memory.
        control: also train the model without the patch for as long, on as many tokens in rows of the context length.
        retrieval: a task of `rope_ext_hf.eval.passkey`, e.g. "needle", that is measured at the target length.
        max_spans: spans of text measured at each length.
        seed: of what is drawn.
        dtype, device: of the model.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
        report: called with a line of progress.

    Raises:
        MethodError: not one of minutes and steps, or no length to extend to.
        CorpusError: too short a text.
        FileError: the folder holds a run of other settings.
    """
    if (minutes is None) == (steps is None):
        raise MethodError("give one of minutes and steps: how long is trained")
    if not (minutes is None or minutes > 0) or not (steps is None or steps > 0):
        raise MethodError(f"the training must be longer than nothing, got minutes={minutes}, steps={steps}")
    settings = {key: value for key, value in locals().items() if key not in ("report", "out")}
    settings |= {"model": str(model), "method": method if isinstance(method, str) else method.to_dict()}
    folder, say = Path(out), report or (lambda line: None)
    open_run(folder, settings)
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(model, **source)
    training, held_out = split(tokenize(load(data), tokenizer), HELD_OUT)
    if eval_data is not None:
        training, held_out = training + held_out, tokenize(load(eval_data), tokenizer)
    budget = Budget(minutes, steps)

    def fresh() -> Any:
        return load_model(model, dtype=dtype, device=device, **source)

    def patched(loaded: Any) -> Any:
        under: dict[str, Any] = {"over": over, "context_length": context_length, **params}
        return patch(loaded, method, factor=factor, target_length=target_length, **under)

    learner = patched(fresh())
    described = describe(learner)
    short, long = described.context_length, described.extended_length
    if long is None or long <= short:
        raise MethodError(f"{described.method} states no length to train at; give factor or target_length")
    lengths = _doubling(short, long)
    measured: dict[str, list[Result]] = {}
    retrieved: dict[str, float] = {}

    def measure(name: str, subject: Any) -> None:
        say(f"measuring: {name}")
        measured[name] = list(
            perplexity(
                subject,
                held_out,
                lengths=lengths,
                targets=short // 2,
                max_spans=max_spans,
                tokenizer=tokenizer,
                out=folder / "measured",
                data=eval_data or data,
            )
        )
        if retrieval is not None and name in ("patched", "trained", "control, patched"):
            cells = passkey(
                subject,
                lengths=[long],
                task=retrieval,
                trials=RETRIEVAL_TRIALS,
                tokenizer=tokenizer,
                out=folder / "measured",
            )
            retrieved[name] = sum(cell.exact_match for cell in cells) / len(cells)

    base = fresh()
    measure("as loaded", base)
    measure("patched", patched(base))
    del base
    rows = {
        "trained": Rows([each.ids for each in training], long, short, end=tokenizer.eos_token_id, seed=seed),
        "control": Rows([each.ids for each in training], short, short, end=tokenizer.eos_token_id, seed=seed),
    }
    trained: dict[str, dict[str, Any]] = {}
    for name in ("trained", *(["control"] if control else [])):
        subject = learner if name == "trained" else fresh()
        torch.manual_seed(seed)
        wrapped = subject if train_all else _with_adapters(subject, rank)
        wrapped.train()
        say(f"training: {name}")
        trained[name] = train(
            wrapped,
            fresh().requires_grad_(False) if guard else None,
            rows[name],
            folder / f"checkpoints of {name}",
            budget,
            learning_rate=learning_rate,
            batch=batch * (1 if name == "trained" else round(long / short)),
            accumulate=accumulate,
            guard=guard,
            device="cpu" if next(subject.parameters()).device.type == "cpu" else device,
            report=lambda step, loss, used: say(f"step {step}, loss {loss:.4f}, {used:.0%} of the time"),
        )
        whole = wrapped if train_all else wrapped.merge_and_unload()
        measure(name, whole)
        if name == "trained":
            whole.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
        else:
            measure("control, patched", patched(whole))
    made = _report(settings, short, long, measured, retrieved, trained, str(folder / "model"))
    write_json(folder / "report.json", made.to_dict())
    return made


def _doubling(short: int, long: int) -> list[int]:
    """The context length, doubled up to twice the extended length."""
    lengths = [short]
    while lengths[-1] < 2 * long:
        lengths.append(min(2 * lengths[-1], 2 * long))
    return lengths


def _with_adapters(model: Any, rank: int) -> Any:
    """A model with LoRA on all linear layers, and its norms and token embeddings trained whole.

    LongLoRA (Chen et al. 2023, arXiv 2309.12307, sec. 3.3): adapters alone fall short of training all weights here.
    """
    from peft import LoraConfig, get_peft_model

    embeddings = model.get_input_embeddings()
    whole = {name.rpartition(".")[2] for name, module in model.named_modules() if module is embeddings}
    whole |= {name.rpartition(".")[2] for name, module in model.named_modules() if "Norm" in type(module).__name__}
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=sorted(whole),
        task_type="CAUSAL_LM",
        ensure_weight_tying=bool(model.config.get_text_config().tie_word_embeddings),
    )
    return get_peft_model(model, settings)


def _report(
    settings: dict[str, Any],
    short: int,
    long: int,
    measured: dict[str, list[Result]],
    retrieved: dict[str, float],
    trained: dict[str, dict[str, Any]],
    folder: str,
) -> FinetuneReport:
    order = [name for name in ("as loaded", "patched", "trained", "control", "control, patched") if name in measured]
    base = measured["as loaded"][0]
    gains: dict[str, dict[str, tuple[float, float, float]]] = {
        "as loaded at 1x": {str(each.length): difference(base, each) for each in measured["trained"]}
    }
    for name in order:
        if name != "trained":
            pairs = zip(measured[name], measured["trained"], strict=True)
            gains[name] = {str(ours.length): difference(theirs, ours) for theirs, ours in pairs}
    return FinetuneReport(
        settings=settings,
        context_length=short,
        target_length=long,
        losses={name: {str(each.length): each.loss for each in measured[name]} for name in order},
        gains=gains,
        retrieval={name: retrieved[name] for name in order if name in retrieved},
        training=trained,
        folder=folder,
    )
