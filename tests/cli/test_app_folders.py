"""Every command that takes a model, on every kind of folder, with default options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reference import path
from tests.support.every_model import tiny
from tests.support.texts import ONE_MODULE

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # the command line prints them
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # of PEFT
]

KINDS = ("plain", "native", "restored", "converted", "adapter", "vision")
HAYSTACK = ["--haystack", ONE_MODULE]
QUICK = ["--max-spans", "1", "--data", ONE_MODULE]
COMMANDS: dict[str, list[str]] = {
    "describe": [],
    "patch": ["--method", "yarn", "--target-length", "1k"],
    "ppl": ["--lengths", "64", *QUICK],
    "sweep": ["--lengths", "64", *QUICK, "--method", "yarn,dca", "--factor", "2"],
    "passkey": ["--task", "key-value", "--lengths", "128", "--trials", "1", "--depths", "0.5", *HAYSTACK],
    "lm-eval": ["--tasks", "short", "--limit", "1"],
    "convert": ["--to", "interleaved"],
    "detect": [],
}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def write_folders(root: Path) -> dict[str, Path]:
    """Write the bundled model as it is; patched, with a native form and without; converted there and back; an adapter.

    And a model of text and images, of random weights.
    """
    shutil.copytree(path(), root / "plain")
    steps = [
        ("patch", str(root / "plain"), "--method", "yarn", "--target-length", "512", "--out", str(root / "native")),
        ("patch", str(root / "plain"), "--method", "dca", "--target-length", "512", "--out", str(root / "restored")),
        ("convert", str(root / "plain"), str(root / "there"), "--to", "interleaved"),
        ("convert", str(root / "there"), str(root / "converted"), "--to", "half"),
    ]
    for step in steps:
        code, _, err = run(*step)
        assert code == 0, err
    model = rope.patch(rope.from_pretrained(root / "plain"), "dca", target_length=512)
    vision = tiny("qwen3_vl", text_config={"vocab_size": 320, "max_position_embeddings": 256})
    vision.save_pretrained(root / "vision")
    load_tokenizer("reference").save_pretrained(root / "vision")
    import peft

    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(root / "adapter")
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


def cost(command: str, kind: str) -> list[pytest.MarkDecorator]:
    if command not in ("ppl", "sweep", "passkey", "lm-eval"):
        return []
    other = command == "lm-eval" or (command in ("sweep", "passkey") and kind in ("converted", "native"))
    return [pytest.mark.thorough if other else pytest.mark.slow]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kind"),
    [pytest.param(command, kind, marks=cost(command, kind)) for command in COMMANDS for kind in KINDS],
)
def test_a_command_runs_on_every_kind_of_folder(
    command: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    arguments = [command, str(folders[kind]), *COMMANDS[command]]
    if command == "convert":
        arguments.insert(2, str(tmp_path / "new"))
    elif command == "lm-eval":
        pytest.importorskip("lm_eval")
        (tmp_path / "short.yaml").write_text(TASK.format(folder=tmp_path))
        (tmp_path / "data.json").write_text(json.dumps([{"text": "def add(first, second):", "rest": " return"}]))
        arguments += ["--include-path", str(tmp_path)]
    elif command in ("patch", "ppl", "sweep", "passkey"):
        arguments += ["--out", str(tmp_path / "new")]
    check_answer(arguments)


def check_answer(arguments: list[str], expected: int = 0, said: str = "") -> None:
    """A command must end with this exit code, with JSON or with one line that has `said`."""
    code, out, err = run(*arguments, "--json")
    assert code == expected, err
    assert said in err
    if code == 2:
        assert err.startswith("rope-ext: ")
        assert err.count("\n") == 1
        return
    assert json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


TASK = """\
task: short
dataset_path: json
dataset_kwargs:
  data_files: {folder}/data.json
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{rest}}}}"
metric_list:
  - metric: acc
"""
