"""The commands of the tool box: their examples, and one line for bad input and damaged configs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rope_ext_hf.plug_ins import plug_in_names
from rope_ext_hf.reference import path
from tests.cli.test_app import QUICK, check_bad_input, check_damaged_config, example, run
from tests.support.models import build

MORE = {"gain": "--samples 2 --lengths 256", "tasks": "--samples 2 --lengths 768"}
"""What makes an example quick: the last of two values of an option counts."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=[pytest.mark.slow] * (command in {*MORE, "extend", "card"})
            + [pytest.mark.thorough] * (command in ("tasks", "extend")),
        )
        for command in plug_in_names("commands")
        # their examples need files or a server that is not there
        if command not in ("gguf", "check-server", "finetune")
    ],
)
@pytest.mark.filterwarnings("default::UserWarning")  # the command line prints them
def test_the_example_of_every_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*example(command), *shlex.split(MORE.get(command, ""))]
    if command == "card":  # a folder and a run, as those of the example
        assert run("patch", "reference", "--method", "yarn", "--factor", "4", "--out", arguments[1])[0] == 0
        measuring = ("ppl", arguments[1], "--lengths", "256", *QUICK["ppl"], "--out", "rope-ext-results")
        assert run(*measuring)[0] == 0
        arguments[2] = str(next(Path("rope-ext-results").iterdir()))
    code, out, err = run(*arguments)
    assert code == 0, err
    assert out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tasks reference --lengths 4096 --suite rulr", "Did you mean"),
        ("tasks reference --lengths 256 --suite json-kv", "1 of 1 tasks do not fit into 256 tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: str, message: str, tmp_path: Path) -> None:
    check_bad_input([*words.split(), "--out", str(tmp_path)], message)


_NESTED = {"full_attention": {"type": "linear", "factor": 2.0, "rope_theta": 1e4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "change", "code", "message"),
    [
        ("extend", {"architectures": 63}, 0, ""),
        ("extend", {"architectures": ["PreTrainedModel"]}, 0, ""),
        ("extend", {"sliding_window": "yarn"}, 0, ""),
        ("extend", {"original_max_position_embeddings": 1e-320}, 0, ""),
        ("extend", {"partial_rotary_factor": 255}, 2, "states 255 as its partial_rotary_factor; at most 1 is"),
        (
            "extend",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e308}},
            2,
            "states 1e+308 as its rope_theta",
        ),
        ("serve-config", {"rope_parameters": _NESTED}, 0, ""),
        ("audit", {"num_labels": 2**31}, 2, "states 2147483648 as its num_labels"),
    ],
)
def test_one_damaged_value_of_a_config(
    command: str, change: dict[str, object], code: int, message: str, tmp_path: Path
) -> None:
    """Each was a traceback, or a list of that many entries."""
    more = {"extend": ["--target-length", "1k", "--dry-run"], "serve-config": ["--engine", "gguf"]}
    check_damaged_config([command, str(tmp_path), *more.get(command, [])], change, code, message)


@pytest.mark.slow
def test_a_damaged_value_that_no_check_knows_is_one_line(tmp_path: Path) -> None:
    """Of the sliding-window layers, whose rotary embedding is read for a note alone."""
    config = build("gemma3").config.to_dict()
    config["rope_parameters"]["sliding_attention"]["rope_theta"] = {"factor": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, _, err = run("extend", str(tmp_path), "--target-length", "1k", "--dry-run")
    assert (code, err.count("\n")) == (2, 1)
    assert "no advice can be given on this model: TypeError" in err


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "file/below", "n" * 300])
@pytest.mark.parametrize(
    "command",
    [
        ["finetune", "reference", "--method", "yarn", "--factor", "4", "--data", "stdlib", "--steps", "1", "--out"],
        ["extend", "reference", "--target-length", "2k", "--no-measure", "--yes", "--out"],
    ],
    ids=lambda words: words[0],
)
def test_a_place_where_no_folder_can_be_made(command: list[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    code, _, err = run(*command, str(tmp_path / place))
    assert code == 2
    assert [line for line in err.splitlines() if line.startswith("rope-ext: ")] == err.splitlines()[-1:]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


def test_advice_on_the_bundled_model_calls_it_by_its_name() -> None:
    code, out, _ = run("extend", "reference", "--target-length", "1k", "--dry-run", "--json")
    assert code == 0
    advice = json.loads(out)["advice"]
    own = [line for lines in advice["commands"].values() for line in lines if line.startswith("rope-ext")]
    assert own
    assert advice["model"] == "reference"
    assert not [line for line in own if str(path()) in line]
