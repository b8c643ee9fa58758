"""`finetune`: the trained folder, which stock transformers loads, and the measurements before and after."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, FileError, MethodError, UnsupportedModelError
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns, Result
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.methods.base import TrainingDefaults
from rope_ext_hf.methods.dropping import Nope
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path as reference
from rope_ext_hf.runs.conclusions.statistics import estimate_share, estimate_share_change
from rope_ext_hf.runs.conclusions.verdicts import Outcome
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.folder.run_file import RunFile
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools.serving.model_card import CARD_COLUMNS
from rope_ext_hf.tools.training import finetune
from rope_ext_hf.tools.training.finetune_report import FinetuneReport
from rope_ext_hf.tools.training.finetuning import TrainingMaterial, _FinetuningRun, _settings, with_defaults
from rope_ext_hf.tools.training.finetuning_options import Finetuning
from rope_ext_hf.tools.training.forecasts import forecast
from rope_ext_hf.tools.training.guarded_training import Rows
from rope_ext_hf.tools.training.run_folder import read_checked, write_checked
from tests.cli.test_app import run
from tests.support.byte_tokenizers import SPECIAL, VOCABULARY, byte_tokenizer
from tests.support.commands import run as command
from tests.support.forks import kill_when
from tests.support.inputs import write_inputs, write_model
from tests.support.models import TRAINED, build, logits, tokens
from tests.support.texts import ONE_MODULE
from tests.support.wrapped_text import unwrapped

LONG = 4 * TRAINED
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small")


@pytest.mark.slow
def test_training_begins_as_the_tokenizer_begins_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that an earlier release began without these tokens is not continued with them."""
    build("llama", vocab_size=VOCABULARY).save_pretrained(model := tmp_path / "small")
    byte_tokenizer("[gMASK] <sop> $A").save_pretrained(model)
    texts = [f"{number}. Mice pay in kind, and nobody counts the cheese. " * 30 for number in range(3)]
    drawn: list[dict[str, torch.Tensor]] = []
    draw = Rows.__getitem__

    def note(rows: Rows, index: int) -> dict[str, torch.Tensor]:
        drawn.append(draw(rows, index))
        return drawn[-1]

    monkeypatch.setattr(Rows, "__getitem__", note)
    question_fields: dict[str, Any] = {"data": texts, "method": "linear", "factor": 2, "steps": 1, "train_all": True}
    question_fields |= {"eval_data": texts, "max_spans": 2}
    finetune(model, tmp_path / "run", **question_fields)
    first = [row[:2].tolist() for each in drawn for row in (*each["long"], *each["short"])]
    assert first == [[SPECIAL.index("[gMASK]"), SPECIAL.index("<sop>")]] * len(first) != []
    kept = read_checked(settings := tmp_path / "run" / "settings.json")
    inputs = {name: value for name, value in kept["inputs"].items() if name != "what every text begins with"}
    assert inputs != kept["inputs"]
    write_checked(settings, {"settings": kept["settings"], "inputs": inputs})
    with pytest.raises(FileError, match="what every text begins with changed since the run in"):
        finetune(model, tmp_path / "run", **question_fields)


@pytest.mark.parametrize("name", ["unpatched", "trained"])
def test_a_model_without_a_loss_is_not_trained_and_not_written(name: str, tmp_path: Path) -> None:
    model, tokenizer = build("llama", vocab_size=259), AutoTokenizer.from_pretrained(reference())
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    question = with_defaults(Finetuning(model="a", data="b", method="yarn", steps=1, max_spans=1))
    file = RunFile("finetune", "a", {})
    held_out = tokenize([Document("a", "Mice pay in kind. " * 9)], tokenizer)
    material = TrainingMaterial(32, 64, 64, tokenizer, [], held_out)
    run = _FinetuningRun(question, material, tmp_path, lambda line: None, None, file)
    why = {"unpatched": "the model gives NaN in place of numbers", "trained": "the training diverged: the loss of the "}
    with pytest.raises(UnsupportedModelError, match=why[name]):
        run.measure(name, model)


@pytest.mark.slow
@pytest.mark.parametrize("train_all", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_run_ends_in_a_folder_that_loads_plainly(train_all: bool, small: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    report = finetune(
        small, tmp_path / "run", data=ONE_MODULE, method="yarn", factor=4, steps=3, max_spans=2,
        learning_rate=1e-3, train_all=train_all, control=True, report=lines.append,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ours, ids = rope.from_pretrained(tmp_path / "run" / "model"), tokens(LONG)
    torch.testing.assert_close(logits(plain, ids), logits(ours, ids), atol=1e-4, rtol=0)
    untrained = rope.patch(AutoModelForCausalLM.from_pretrained(small), "yarn", factor=4)
    assert rope.fingerprint(untrained).differences(rope.fingerprint(plain)) == []
    assert float((logits(ours, ids) - logits(untrained, ids)).abs().max()) > 1e-3
    changed = {
        name for name, value in plain.state_dict().items() if not torch.equal(value, untrained.state_dict()[name])
    }
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= changed

    assert (report.context_length, report.target_length) == (TRAINED, LONG)
    assert list(report.losses) == ["unpatched", "patched", "trained", "control", "control, patched"]
    assert list(report.losses["trained"]) == ["64", "128", "256", "512"]
    gain = report.gains["patched"]["256"]
    assert gain.value == pytest.approx(report.losses["patched"]["256"] - report.losses["trained"]["256"])
    assert gain.items == 1  # document: too few for an interval
    assert report.training["control"]["steps"] == report.training["trained"]["steps"] == 3
    assert json.loads((tmp_path / "run" / "report.json").read_text())["losses"] == report.losses
    assert "perplexity of the model 'patched', compared with the trained one" in unwrapped(report)
    assert "1 document is too few for a confidence interval" in unwrapped(report)
    assert "+-" not in str(report)
    assert any("training: control" in line for line in lines)
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []
    check_card(tmp_path / "run" / "model", report)

    with pytest.raises(FileError, match="holds a run with other settings: seed"):
        finetune(
            small, tmp_path / "run", data=ONE_MODULE, method="yarn", factor=4, steps=3, max_spans=2,
            learning_rate=1e-3, train_all=train_all, control=True, seed=1,
        )  # fmt: skip


def check_card(folder: Path, report: FinetuneReport) -> None:
    """The card has the report and the results of the trained model, and its run counts as one of these weights."""
    card: Any = ModelCard.load(folder / "README.md")
    assert card.data.to_dict()["tags"] == ["rope", "long-context", "yarn"]
    assert card.text.startswith("\n<!-- rope-ext: card -->\n# run\n")
    assert "vllm serve run" in card.text
    with as_wide_as(CARD_COLUMNS):
        assert f"## How it was made\n\n```\n{report.findings}\n```" in card.text
    results = folder / ".eval_results" / "rope-ext-perplexity-1.yaml"
    entries = parse_eval_result_entries(yaml.safe_load(results.read_text()))
    losses = {entry.task_id.removeprefix("perplexity_"): math.log(entry.value) for entry in entries}
    assert losses == {length: pytest.approx(loss, abs=1e-5) for length, loss in report.losses["trained"].items()}
    runs = [each.parent for each in (folder.parent / "measured").glob("*/run.json")]
    taken = [run_of for run_of in runs if command("card", folder, run_of)[0] == 0]
    assert len(taken) == 1  # the other models that were measured have other weights, or no patch
    assert {f"{n}": each.loss for each in read_run(taken[0]).results if (n := each.length)} == report.losses["trained"]


def test_nope_is_trained_at_the_context_length_and_counts_its_tokens(small: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"data": ONE_MODULE, "steps": 2, "batch": 2, "accumulate": 3, "max_spans": 1}
    report = finetune(small, tmp_path / "first", method="nope", **fields)
    assert (report.context_length, report.row_length, report.target_length) == (TRAINED, TRAINED, 2 * TRAINED)
    assert list(report.losses["trained"]) == ["64", "128", "256"]
    assert {name: report.settings[name] for name in ("learning_rate", "train_all", "guard")} == {
        "learning_rate": 3e-4, "train_all": True, "guard": 0.0,
    }  # fmt: skip
    assert "longer than the model is trained for, 64 tokens" in unwrapped(report)
    tokens_read = 2 * 2 * 3 * TRAINED
    folder = tmp_path / "first" / "model"
    assert rope.describe(rope.from_pretrained(folder)).params == {"recalibrated": tokens_read}
    model, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), tokens(LONG)
    torch.testing.assert_close(logits(model, ids), logits(rope.from_pretrained(folder), ids), atol=1e-5, rtol=0)
    before = AutoModelForCausalLM.from_pretrained(small).state_dict()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    # Trained further, by a name or by a method object, it states the tokens of both trainings.
    again: list[dict[str, Any]] = [
        {"method": "drope", "target_length": 4 * TRAINED},
        {"method": Nope(recalibrated=1_000)},
    ]
    for number, given in enumerate(again):
        finetune(folder, tmp_path / f"further {number}", **given, **fields)
    further = [rope.describe(rope.from_pretrained(tmp_path / f"further {n}" / "model")) for n in range(2)]
    assert [each.params["recalibrated"] for each in further] == [2 * tokens_read, 1_000 + tokens_read]
    assert [each.extended_length for each in further] == [4 * TRAINED, None]


def test_nope_in_chosen_layers(small: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"data": ONE_MODULE, "steps": 2, "batch": 2, "accumulate": 3, "max_spans": 1}
    for _ in range(2):  # the second time it is continued, and complete
        report = finetune(small, tmp_path / "first", method="nope", layers=[1], **fields)
        assert report.settings["layers"] == [1]
    folder = tmp_path / "first" / "model"
    described = rope.describe(rope.from_pretrained(folder))
    tokens_read = 2 * 2 * 3 * TRAINED
    assert described.params == {"recalibrated": tokens_read}
    assert described.rotating_layers == (1, 2)
    # The tokens of an earlier training count where the same layers did not rotate in it.
    for layers, total in ([1], 2 * tokens_read), ([0], tokens_read):
        finetune(folder, tmp_path / f"further {layers}", method="nope", layers=layers, **fields)
        described = rope.describe(rope.from_pretrained(tmp_path / f"further {layers}" / "model"))
        assert described.params == {"recalibrated": total}


@pytest.mark.slow
def test_nope_with_adapters_a_guard_and_a_control(small: Path, tmp_path: Path) -> None:
    report = finetune(
        small, tmp_path / "run", data=ONE_MODULE, method="nope", steps=2, max_spans=1, train_all=False, guard=0.5,
        control=True,
    )  # fmt: skip
    assert list(report.losses) == ["unpatched", "patched", "trained", "control", "control, patched"]
    described = rope.describe(rope.from_pretrained(tmp_path / "run" / "model"))
    assert described.params == {"recalibrated": 2 * 4 * TRAINED}


def test_a_run_has_the_settings_that_earlier_releases_wrote() -> None:
    """They stated these defaults themselves, and a run of theirs is continued with equal settings alone."""
    settings = _settings(with_defaults(Finetuning(model="a", data="b", method="yarn", factor=4, steps=1)))
    earlier = {"learning_rate": 2e-4, "train_all": False, "guard": 1.0}
    assert {name: settings[name] for name in earlier} == earlier
    assert "layers" not in settings


def test_the_help_states_the_defaults_of_nope() -> None:
    usual, dropped = TrainingDefaults(), Nope.training
    assert f"Default: {usual.learning_rate:.0e}, and {dropped.learning_rate:.0e}".replace("e-0", "e-") in (
        Finetuning.help_of("learning_rate")
    )
    assert f"Default: {usual.guard:g}, and {dropped.guard:g} for nope" in Finetuning.help_of("guard")
    assert (usual.train_all, dropped.train_all) == (False, True)
    assert "Default: yes for nope, no for other methods" in Finetuning.help_of("train_all")


def test_the_forecast_of_nope_says_what_it_costs_in_tokens(small: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"data": ONE_MODULE, "steps": 5, "batch": 2, "accumulate": 3, "max_spans": 1}
    text = unwrapped(forecast(Finetuning(model=str(small), method="nope", **fields), tmp_path))
    assert f"train all weights for 5 steps, 6 rows of {TRAINED} tokens a step" in text
    assert (
        f"({5 * 6 * TRAINED:,} tokens in all; the authors of DroPE train Llama 2 7B on 10.5 billion tokens, 0.5% of"
        in text
    )
    assert "(the context length, doubled)" in text
    usual = unwrapped(forecast(Finetuning(model=str(small), method="yarn", factor=4, **fields), tmp_path))
    assert "authors" not in usual


@pytest.mark.slow
def test_a_training_is_logged_with_losses_by_length(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for trackio's callback is used, which the Trainer creates as it creates the real one."""
    logged: list[tuple[int, dict[str, float], str]] = []

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logged.append((state.global_step, dict(logs), args.run_name))

    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "trackio.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "trackio", Recorder)
    fields: dict[str, Any] = {"data": ONE_MODULE, "method": "yarn", "factor": 4, "train_all": True}
    report = finetune(
        small, tmp_path / "run", steps=20, max_spans=1, accumulate=1, guard=0, **fields, report_to="trackio"
    )
    by_step = {step: logs for step, logs, _ in logged if f"loss_at_{TRAINED}" in logs}
    assert list(by_step) == [0, 20]
    assert all(0 < logs[f"loss_at_{length}"] < 10 for logs in by_step.values() for length in (TRAINED, LONG))
    assert by_step[20][f"loss_at_{LONG}"] < by_step[0][f"loss_at_{LONG}"]
    assert [step for step, logs, _ in logged if "loss" in logs] == [10, 20]
    assert {name for *_, name in logged} == {"run, checkpoints of trained"}
    assert "report_to" not in report.settings


def test_a_logger_that_is_not_installed_is_named(small: Path, tmp_path: Path) -> None:
    assert find_spec("wandb") is None
    arguments = (
        "finetune",
        small,
        "--method",
        "yarn",
        "--factor",
        "4",
        "--steps",
        "1",
        "--data",
        "stdlib",
        "--train-all",
    )
    code, _, err = command(*arguments, "--out", tmp_path / "run", "--report-to", "wandb")
    assert (code, err) == (2, "rope-ext: report_to='wandb' needs its package: pip install wandb\n")
    code, _, err = command(*arguments, "--out", tmp_path / "run", "--report-to", "wandbb")
    assert code == 2
    assert "--report-to must be 'none' or 'tensorboard' or 'trackio' or 'wandb', got 'wandbb'" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rerope", pytest.param("self-extend", marks=pytest.mark.thorough)])
def test_a_run_under_a_remapping_method(method: str, small: Path, tmp_path: Path) -> None:
    """The method's attention runs through the fused kernels and their backward; no stock folder can express it."""
    fields: dict[str, Any] = {
        "data": ONE_MODULE, "method": method, "factor": 4, "max_spans": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    report = finetune(small, tmp_path / "run", steps=3, **fields)
    with pytest.raises((ValueError, KeyError), match="rope_ext_hf"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ours, ids = rope.from_pretrained(tmp_path / "run" / "model"), tokens(LONG)
    untrained = rope.patch(AutoModelForCausalLM.from_pretrained(small), method, factor=4)
    assert rope.describe(ours).method == rope.describe(untrained).method
    assert rope.fingerprint(untrained).differences(rope.fingerprint(ours)) == []
    assert float((logits(ours, ids) - logits(untrained, ids)).abs().max()) > 1e-3
    assert (report.context_length, report.target_length) == (TRAINED, LONG)
    assert report.training["trained"]["steps"] == 3
    assert finetune(small, tmp_path / "run", steps=3, **fields) == report
    with pytest.raises(MethodError, match="rerope states no length to train at; give factor or target_length"):
        finetune(small, tmp_path / "no length", data=ONE_MODULE, method="rerope", steps=3)


ASKED: dict[str, Any] = {
    "data": "texts/*.txt", "eval_data": "held-out/*.txt", "method": "yarn", "factor": 4, "steps": 22, "train_all": True,
    "max_spans": 4, "device": "cpu", "learning_rate": 1e-3, "accumulate": 1,
}  # fmt: skip


def finetune_asked() -> None:
    """Run the process that is killed."""
    finetune("model", "cut", **ASKED)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, text, and the folder "cut" of a fine-tuning that was killed after its first checkpoint."""
    root = tmp_path_factory.mktemp("finetuning")
    write_inputs(root, texts=4, held_out=4)
    checkpoint = root / "cut" / "checkpoints of trained" / "checkpoint-20" / "clock.json"
    # Not a fork of this process: torch refuses a backward pass where one ran before the fork.
    kill_when(checkpoint.exists, finetune_asked, folder=root)
    assert not (root / "cut" / "model").exists()
    return root


@pytest.fixture
def cut(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the interrupted run, and change to the copy."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_model_and_numbers(cut: Path) -> None:
    reports = [finetune("model", name, **ASKED) for name in ("cut", "whole")]
    weights = [(cut / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert weights[0] == weights[1]
    assert reports[0].losses == reports[1].losses
    assert reports[0].gains == reports[1].gains
    assert reports[0].training["trained"]["losses"] == reports[1].training["trained"]["losses"] != []
    again = finetune("model", "cut", **ASKED)
    assert again == reports[0]
    gain = again.gains["unpatched"]["256"]
    assert gain.items >= 3
    assert gain.low is not None
    assert gain.low < gain.value < (gain.high or 0)
    assert str(again.verdicts["unpatched"]["256"]) in str(again)
    assert again.verdicts["unpatched"]["256"].outcome is Outcome.WORSE


@pytest.mark.thorough
@pytest.mark.slow
def test_a_damaged_checkpoint_gives_the_same_model_from_the_one_before(cut: Path) -> None:
    whole, lines = finetune("model", "whole", **ASKED), list[str]()
    assert sorted(path.name for path in (cut / "whole" / "checkpoints of trained").iterdir()) == [
        "checkpoint-20",
        "checkpoint-22",
    ]
    optimizer = cut / "whole" / "checkpoints of trained" / "checkpoint-22" / "optimizer.pt"
    data = bytearray(optimizer.read_bytes())
    data[len(data) // 2] ^= 1
    optimizer.write_bytes(data)
    again = finetune("model", "whole", **ASKED, report=lines.append)
    assert [line for line in lines if "checkpoint-22 is removed: optimizer.pt changed since it was written" in line]
    assert (again.losses, again.gains) == (whole.losses, whole.gains)


def _change(folder: Path, what: str) -> None:
    if what == "weights":
        weights = folder / "model" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1
        weights.write_bytes(data)
    elif what == "config":
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))
    elif what == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.add_tokens(["<more>"])
        tokenizer.save_pretrained(folder / "model")
    else:
        (folder / "texts" / "3.txt").write_text((folder / "texts" / "2.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("weights", "the model (weights, config or adapter)"),
        ("config", "the model (weights, config or adapter)"),
        ("tokenizer", "the tokenizer"),
        ("text", "the text"),
    ],
)
def test_a_run_is_not_continued_over_what_changed_in_place(changed: str, named: str, cut: Path) -> None:
    _change(cut, changed)
    with pytest.raises(FileError, match=rf"^{re.escape(named)} changed since the run in 'cut' was begun"):
        finetune("model", "cut", **ASKED)
    with pytest.raises(FileError, match="holds a run with other settings: method"):
        finetune("model", "cut", **ASKED | {"method": "linear"})


@pytest.mark.slow
@pytest.mark.parametrize(("guard", "most"), [(0.0, 1), (1.0, 2)])
@pytest.mark.sampled(2)
def test_no_more_models_are_in_memory_than_are_promised(guard: float, most: int, small: Path, tmp_path: Path) -> None:
    def living() -> int:
        models = (each for each in gc.get_objects() if type(each) is LlamaForCausalLM)
        return sum(each.device.type != "meta" for each in models)

    counts: dict[str, int] = {}

    def count(line: str) -> None:
        counts[line] = living() - before

    gc.collect()
    before = living()
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 500)
    finetune(
        small, tmp_path / "run", data=str(tmp_path / "text.txt"), method="yarn", factor=4, steps=1, max_spans=1,
        guard=guard, control=True, accumulate=1, report=count,
    )  # fmt: skip
    assert (counts["measuring: unpatched"], counts["measuring: patched"]) == (1, 1)
    assert max(counts.values()) <= most, counts


def losses_of(length: int, nats: list[float]) -> Result:
    documents = [DocumentLoss(str(index), 100 * each, 100, 400, 1) for index, each in enumerate(nats)]
    return PerplexityRuns().result(None, Setting("matched", 32, 256, False, 0), (length,), documents)


@pytest.mark.parametrize(
    ("before", "outcome", "message"),
    [
        ([2.0, 2.1, 2.2, 2.3], Outcome.WORSE, "higher by 171.8 (171.8 to 171.8) percent"),
        (
            [1.0, 1.5, 0.9, 1.4],
            Outcome.NO_DIFFERENCE,
            "not significantly different (+5.1 percent, 95% confidence interval -",
        ),
        ([0.5, 0.7, 0.6, 0.9], Outcome.BETTER, "lower by 37.8 ("),
        (
            [2.0, 2.1],
            Outcome.NO_DIFFERENCE,
            "higher by 171.8 percent (2 documents are too few for a confidence interval)",
        ),
        ([2.0], Outcome.NO_DIFFERENCE, "higher by 171.8 percent (1 document is too few for a confidence interval)"),
        ([math.inf, 2.0, 2.0, 2.0], Outcome.WORSE, "not finite"),
    ],
)
def test_a_report_says_what_follows_from_its_numbers(before: list[float], outcome: Outcome, message: str) -> None:
    after = [1.0, 1.1, 1.2, 1.3][: len(before)]
    question, tokenizer = (
        Finetuning(model="a", data="b", method="yarn", steps=1),
        AutoTokenizer.from_pretrained(reference()),
    )
    material = TrainingMaterial(64, 256, 256, tokenizer, [], [])
    run = _FinetuningRun(question, material, Path("c"), print, None, RunFile("finetune", "a", {}))
    measured = {"unpatched": before, "patched": before, "trained": after}
    run.measured = {name: [losses_of(64, nats)] for name, nats in measured.items()}
    run.trained = {"trained": {"steps": 1, "seconds": 1.0, "losses": []}}
    report = run.report()
    comparison = report.verdicts["unpatched"]["64"]
    assert comparison.outcome is outcome
    assert message in str(comparison)
    assert f" 64: {comparison}" in unwrapped(report)
    assert report.retrieval == {}
    assert "\N{DAGGER}" not in str(report)
    assert str(replace(report, row_length=32)).count("\N{DAGGER}") == 2  # the column, and what the mark means
    json.loads(json_text(report.to_dict()))

    run.answered = {"patched": [0.0] * 12, "trained": [1.0] * 12}
    with_prompts = run.report()
    assert with_prompts.retrieval == {name: estimate_share(shares) for name, shares in run.answered.items()}
    assert with_prompts.retrieval_gains == {"patched": estimate_share_change([1.0] * 12, [0.0] * 12)}
    assert re.search(r"patched: 0% \(0% to \d+%\)\n  trained: 100% \(\d\d% to 100%\)", str(with_prompts))
    assert re.search(
        r"trained, compared with 'patched': higher by 100.0 \(\d\d\.\d to 100.0\) points", str(with_prompts)
    )


def test_adapters_without_peft_are_refused_before_anything_is_read(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"adapters need PEFT: .*\[train\]"):
        finetune(small, tmp_path / "run", data="stdlib", method="yarn", factor=4, steps=1)
    assert not (tmp_path / "run").exists()
    code, _, err = run("finetune", str(small), "--method", "yarn", "--factor", "4", "--data", "stdlib", "--steps", "1",
                       "--out", str(tmp_path / "run"))  # fmt: skip
    assert code == 2
    assert "adapters need PEFT" in err
    assert "Traceback" not in err


def test_too_short_a_text_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 20)
    with pytest.raises(CorpusError, match="has 90 tokens, fewer than the 256 of one row; give longer text"):
        finetune(small, tmp_path / "run", data=str(tmp_path / "short.txt"), method="yarn", factor=4, steps=1)


def test_an_adapter_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    settings = {"base_model_name_or_path": str(small), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(MethodError, match="is an adapter; merge it into its model first"):
        finetune(tmp_path / "adapter", tmp_path / "run", data="stdlib", method="yarn", factor=4, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either minutes or steps"),
        ({"minutes": 1, "steps": 1}, "give either minutes or steps"),
        ({"minutes": 0}, "minutes must be above 0, got 0"),
        ({"steps": 1, "method": "dynamic-yarn", "factor": None}, "dynamic-yarn states no length to train at"),
    ],
)
def test_refused(given: dict[str, Any], message: str, small: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"method": "yarn", "factor": 4} | given
    with pytest.raises(MethodError, match=message):
        finetune(small, tmp_path / "run", data=ONE_MODULE, **arguments)
