"""Models by name: folders, Hub ids, "reference"; what is missing or damaged becomes one line."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf import CheckpointError, MethodError
from rope_ext_hf.cli.app import app
from rope_ext_hf.eval import perplexity
from rope_ext_hf.files.model_folders import model_folder, model_source
from rope_ext_hf.files.whole import foreign_errors
from rope_ext_hf.hub import find_device, find_dtype, load_empty, load_model, load_tokenizer
from rope_ext_hf.patches.loading import load_config
from rope_ext_hf.reference import path
from tests.support.commands import run
from tests.support.forks import run_command, run_forked
from tests.support.texts import ONE_MODULE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(path(), tmp_path / "model"))


def test_the_bundled_model_by_name() -> None:
    assert model_folder("reference") == path()
    assert load_empty("reference").device.type == "meta"
    assert load_tokenizer("reference")("a")["input_ids"]


def test_dtype_and_device() -> None:
    model = load_model("reference", dtype="float16", device="cpu")
    assert (model.dtype, model.device.type, model.training) == (torch.float16, "cpu", False)
    assert load_model("reference", dtype="float32").dtype == torch.float32
    assert load_model("reference").dtype == torch.bfloat16  # as saved
    with pytest.raises(MethodError, match="Did you mean 'bfloat16'"):
        find_dtype("bfloat1")
    with pytest.raises(MethodError, match="cannot be used here"):
        find_device("quantum")


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "no/such/folder", "x" * 5000 + "/a/b", ""])
def test_names_that_can_be_no_model(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such model folder|an empty name") as caught:
        load_empty(name)
    assert len(str(caught.value)) < 200


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="it is a file, give the folder it is in"):
        model_source(folder / "model.safetensors")


def test_a_misspelt_id_is_answered_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    started = time.monotonic()
    for load in (load_empty, load_model, load_tokenizer, model_folder, rope.from_pretrained):
        with pytest.raises(
            CheckpointError, match=r"the Hub cannot be reached or has a fault. Did you mean 'reference'"
        ):
            load("referense")
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        rope.patch("org/name", "yarn", factor=2)
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        perplexity("org/name", "stdlib", lengths=["1k"])
    assert time.monotonic() - started < 10


def test_an_adapter_whose_model_is_not_here_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name", "peft_type": "LORA"}')
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"org/name.*the Hub cannot be reached"):
        rope.from_pretrained(tmp_path)
    assert time.monotonic() - started < 10


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"there is no tokenizer in .*; copy tokenizer.json and"):
        load_tokenizer(folder)


def test_errors_of_other_libraries() -> None:
    with pytest.raises(CheckpointError, match="the model failed: KeyError: 'a b'"), foreign_errors("the model failed"):
        raise KeyError("a b")
    with pytest.raises(CheckpointError, match="the model failed: first second"), foreign_errors("the model failed"):
        raise OSError("first\nsecond")
    with pytest.raises(MethodError, match=r"^as it is$"), foreign_errors("the model failed"):
        raise MethodError("as it is")
    with pytest.raises(KeyboardInterrupt), foreign_errors("the model failed"):
        raise KeyboardInterrupt


def _unknown_type(folder: Path) -> None:
    _edit(folder, model_type="llama9")


def _broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def _wrong_values(folder: Path) -> None:
    _edit(folder, rope_parameters={"rope_type": "yarn", "factor": "many", "rope_theta": [1] * 5000})


def _wrong_sizes(folder: Path) -> None:
    _edit(folder, hidden_size="wide", num_attention_heads=0)


def _truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": "many"}')


def _edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


TEXT = ["--max-spans", "1", "--data", ONE_MODULE]
MEASURED = {
    "ppl": ["--lengths", "64", *TEXT],
    "sweep": ["--lengths", "64", *TEXT, "--method", "ntk"],
    "passkey": ["--lengths", "128", "--trials", "1"],
}
ALL = {"describe": [], "patch": ["--method", "yarn", "--factor", "2"], **MEASURED}


@pytest.mark.parametrize("key", ["extra_ids", "offset", "num_madeup_words"])
def test_no_tokenizer_makes_any_number_of_tokens(key: str, tmp_path: Path) -> None:
    settings = {"tokenizer_class": "ByT5Tokenizer", key: 2**53}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {key} asks for 9007199254740992 tokens"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_token_setting_that_would_reach_the_terminal(file: str, folder: Path) -> None:
    tokens = {"bos_token": {"content": "<s>", "lstrip": False, "\x1b]0;title\x07": True}}
    (folder / file).write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"} | tokens))
    with pytest.raises(CheckpointError, match=rf"{file}: '\\x1b\]0;title\\x07' is not a setting of a token"):
        load_tokenizer(folder)


@pytest.mark.slow
def test_what_transformers_logs_and_raises_is_one_line(folder: Path, tmp_path: Path) -> None:
    _edit(folder, model_type="falcon", head_dim=16)  # a property there, which transformers logs with the whole config
    output = run_forked(run_command, ["describe", str(folder)], folder=tmp_path, status=2)
    assert re.fullmatch("rope-ext: .* property 'head_dim' of 'FalconConfig' object has no setter\n", output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "commands"),
    [
        (_unknown_type, ALL),
        (_broken_json, ALL),
        (_wrong_values, ALL),
        (_wrong_sizes, ALL),
        (_truncated, MEASURED),
        (_no_weights, MEASURED),
        (_broken_tokenizer, MEASURED),
    ],
)
def test_a_damaged_folder_is_one_line_and_exit_code_2(
    damage: object, commands: dict[str, list[str]], folder: Path, tmp_path: Path
) -> None:
    assert callable(damage)
    damage(folder)
    for command, options in commands.items():
        out = [] if command == "describe" else ["--out", str(tmp_path / f"out-{command}")]
        result = CliRunner().invoke(app, [command, str(folder), *options, *out])
        assert result.exit_code == 2, (command, result.output, result.exception)
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("rope-ext: "), result.stderr
        assert len(last) < 1100
        assert result.stdout == ""


@pytest.mark.parametrize("form", [".safetensors", ".bin"])
def test_a_loaded_model_does_not_change_with_its_files(folder: Path, form: str) -> None:
    """As where a training run saves again; a file that becomes shorter would end the process."""
    weights = folder / "model.safetensors"
    if form == ".bin":
        torch.save(load_model("reference").state_dict(), folder / "pytorch_model.bin")
        weights.unlink()
        weights = folder / "pytorch_model.bin"
    model, other = load_model(folder, device="cpu"), load_model("reference", device="cpu")
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 4)
        file.write(bytes(weights.stat().st_size // 2))
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_weights_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_while_saved(*arguments: Any, **kwargs: Any) -> Any:
        model = rope.from_pretrained(*arguments, **kwargs)
        shutil.copyfile(path() / "model.safetensors", folder / "model.safetensors")
        return model

    monkeypatch.setattr("rope_ext_hf.hub.from_pretrained", load_while_saved)
    with pytest.raises(CheckpointError, match="changed while they were read; load them once they are complete"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "values", "readers"),
    [
        ("config.json", 20_000, [load_empty, load_model, model_folder, rope.from_pretrained, load_config]),
        ("generation_config.json", 20_000, [load_model, rope.from_pretrained]),
        ("tokenizer_config.json", 400_000, [load_tokenizer]),
    ],
)
def test_a_file_of_very_many_values_is_refused_before_transformers_reads_it(
    file: str, values: int, readers: list[Callable[[Path], Any]], folder: Path
) -> None:
    """transformers takes minutes for a megabyte of small lists."""
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(content | {"more": [[n] for n in range(values)]}))
    for reader in readers:
        with pytest.raises(
            rope.FileError, match=rf"{file}' cannot be read: about [\d,]+ values are more than {values:,}"
        ):
            reader(folder)
    (folder / file).write_text(json.dumps(content | {"more": " " * 10 * values}))
    for reader in readers:
        assert reader(folder)


def test_the_limit_on_values_can_be_raised(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"more": [0] * 20_000}))
    code, _, err = run("describe", folder)
    assert code == 2
    assert "raise the limit: --raise-limit config_values=NUMBER" in err
    assert run("describe", folder, "--raise-limit", "config_values=30000")[0] == 0
