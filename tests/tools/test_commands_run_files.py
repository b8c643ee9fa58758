"""`run` and `--dry-run` of the tool box: every kind of run again from its file, and what a run would take."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as chat_templates
from transformers import AutoTokenizer

from rope_ext_hf.plug_ins import plug_in_names
from rope_ext_hf.tools.suites import tasks
from tests.cli.test_evaluation_dry_runs import check_dry_run, write_inputs_without_weights
from tests.cli.test_run_files import TEXT, asking, check_changes_are_refused, check_repeated
from tests.support.commands import run
from tests.support.inputs import write_model

MORE = (*TEXT, "--eval-data", "held-out/*.txt", "--max-spans", "2")
TRAINED = ("--train-all", "--accumulate", "1")
KINDS: dict[str, tuple[str, ...]] = {
    "tasks": ("--suite", "json-kv", "--lengths", "768", "--score", "rank", "--samples", "2", "--device", "cpu"),
    "gain": ("--lengths", "1k", "--samples", "2", "--device", "cpu"),
    "extend": (*TEXT, "--target-length", "128", "--max-spans", "2", "--anyway", "--yes"),
    "finetune": (*MORE, *TRAINED, "--method", "linear", "--factor", "2", "--steps", "2", "--out", "trained"),
}
"""A small run of each kind, of the model in the folder "model"."""


def test_every_kind_has_a_case() -> None:
    assert asking().keys() & {*plug_in_names("commands")} == KINDS.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*would load .* and run another model:UserWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.thorough] * (each in ("tasks", "gain"))) for each in KINDS]
)
def test_the_file_of_a_run_repeats_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_repeated(kind, KINDS[kind], tmp_path, monkeypatch, *["--yes"] * (kind == "extend"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*would load .* and run another model:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_text_or_model_is_not_measured_unasked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_changes_are_refused(kind, KINDS[kind], tmp_path, monkeypatch, *["--yes"] * (kind == "extend"))


def test_a_date_in_the_chat_template_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained("model")

    def ask() -> None:
        tasks("model", suite="json-kv", lengths=[768], samples=2, score="rank", out="runs")

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2036, 1, 1)

    ask()
    monkeypatch.setattr(chat_templates, "datetime", Clock)
    with pytest.warns(UserWarning, match=r"begins anew.*the text.* changed \(the chat template states today's date\)"):
        ask()


def test_a_file_with_two_lengths_of_a_training_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text(
        "run: finetune\nmodel: a\ndata: b\nmethod: yarn\nsteps: 1\nminutes: 1\nout: c", encoding="utf-8"
    )
    code, out, err = run("run", tmp_path / "given.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "either minutes or steps" in err


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_a_dry_run_reads_no_weights_and_writes_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = write_inputs_without_weights(tmp_path)
    held = 2 * size if kind == "finetune" else size  # and its guard
    check_dry_run((kind, "model", *KINDS[kind]), tmp_path, held, size if kind in ("extend", "finetune") else None)
