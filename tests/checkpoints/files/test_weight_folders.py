"""Folders whose weights are incomplete: no command writes a copy of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.files.weight_folders import check_weights
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder, unlike_copies
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError, FileError, RopeExtError
from rope_ext_hf.hub import load_empty
from tests.support.checkpoint_folders import content, untouched
from tests.support.models import build

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def as_safetensors(folder: Path) -> None:
    build("llama").save_pretrained(folder)


def as_shards(folder: Path) -> None:
    build("llama").save_pretrained(folder, max_shard_size="40KB")


def as_torch(folder: Path, **options: Any) -> None:
    as_safetensors(folder)
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin", **options)
    (folder / SINGLE).unlink()


def as_old_torch(folder: Path) -> None:
    as_torch(folder, _use_new_zipfile_serialization=False)


def as_torch_shards(folder: Path) -> None:
    as_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    for file in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(file), folder / f"pytorch_{file.stem}.bin")
        file.unlink()
    weight_map = {name: f"pytorch_{Path(file).stem}.bin" for name, file in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index | {"weight_map": weight_map}))
    (folder / INDEX).unlink()


def as_adapter(folder: Path) -> None:
    import peft

    base = folder.with_name("base")
    build("llama").save_pretrained(base)
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()


def as_torch_adapter(folder: Path) -> None:
    as_adapter(folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


LAYOUTS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        *(as_safetensors, as_shards, as_torch, as_old_torch, as_torch_shards),
        *(as_adapter, as_torch_adapter),
    )
}


def weight_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def cut(part: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(part * file.stat().st_size))


def as_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("blob")


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "a link to nothing": as_link,
    "a folder": as_folder,
    "empty": cut(0),
    "half": cut(0.5),
    "nearly whole": cut(0.98),
    "a pointer of git LFS": lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
}


@pytest.fixture(params=LAYOUTS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    LAYOUTS[request.param](folder)
    return folder


def patched_copy(source: Path, out: Path, **options: Any) -> None:
    save_patched_folder(rope.patch(load_empty(source), "yarn", factor=4), source, out, **options)


def test_a_complete_folder_is_copied(source: Path, tmp_path: Path) -> None:
    patched_copy(source, tmp_path / "out")
    names = [file.name for file in weight_files(source)]
    assert [file.name for file in weight_files(tmp_path / "out")] == names != []
    assert not unlike_copies(source, tmp_path / "out")
    assert rope.describe(rope.from_pretrained(tmp_path / "out")).method == "yarn"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_with_a_damaged_file_is_refused_by_its_name(damage: str, source: Path, tmp_path: Path) -> None:
    damaged = weight_files(source)[len(weight_files(source)) // 2]
    DAMAGES[damage](damaged)
    is_single = len(weight_files(source)) <= 1
    stem = "adapter_model" if "adapter" in damaged.name else "model"
    expected = stem if is_single else damaged.name
    with pytest.raises(RopeExtError, match=expected):
        patched_copy(source, tmp_path / "out")
    assert untouched(tmp_path, "out")


def test_a_folder_without_weights_is_refused(source: Path, tmp_path: Path) -> None:
    for file in [*weight_files(source), *source.glob("*.index.json")]:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights; looked for .*model\.safetensors"):
        patched_copy(source, tmp_path / "out")
    assert untouched(tmp_path, "out")


@pytest.mark.parametrize("name", ["config.json", "weights", "generation_config.json"])
def test_a_file_that_disappears_before_it_is_copied_leaves_nothing(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    as_shards(source)
    file = weight_files(source)[2] if name == "weights" else source / name
    if name == "config.json":
        file = source / "1_Pooling" / name
        file.parent.mkdir()
        file.write_text("{}")
    with pytest.raises(FileError, match=file.name):
        patched_copy(source, tmp_path / "out", progress=lambda done, total: file.unlink(missing_ok=True))
    assert untouched(tmp_path, "out")


def test_a_shard_that_lacks_a_tensor_of_the_index_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    as_shards(source)
    file = weight_files(source)[1]
    tensors = load_file(file)
    name, _ = tensors.popitem()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"'{name}' is not in '{file.name}'"):
        patched_copy(source, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_an_index_that_names_no_files_is_refused(text: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    as_shards(source)
    (source / INDEX).write_text(text)
    with pytest.raises(RopeExtError, match=INDEX):
        patched_copy(source, tmp_path / "out")
    assert untouched(tmp_path, "out")


def test_what_transformers_does_not_read_is_not_checked(tmp_path: Path) -> None:
    """It prefers a single file to an index, safetensors to torch files, and the weights of a model to an adapter's."""
    source = tmp_path / "source"
    as_safetensors(source)
    for name in (INDEX, "pytorch_model.bin", "adapter_model.bin", "pytorch_model.bin.index.json"):
        (source / name).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    patched_copy(source, tmp_path / "out")
    assert not unlike_copies(source, tmp_path / "out")


def test_an_index_need_not_list_every_tensor_of_a_shard_nor_a_shard_at_the_top(tmp_path: Path) -> None:
    source = tmp_path / "source"
    as_shards(source)
    index = json.loads((source / INDEX).read_text())
    (source / "shards").mkdir()
    for file in weight_files(source):
        save_file(load_file(file) | {f"unlisted.{file.stem}": torch.zeros(2)}, source / "shards" / file.name)
        file.unlink()
    weight_map = {name: f"shards/{file}" for name, file in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))
    patched_copy(source, tmp_path / "out")
    assert set(content(tmp_path / "out")) == set(content(source))
    shutil.rmtree(source / "shards")
    with pytest.raises(FileError, match="'shards/model-"):
        patched_copy(source, tmp_path / "again")


def test_packed_weights_in_a_file_of_torch_need_only_be_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    as_torch(source)
    file = source / "pytorch_model.bin"
    tensors: dict[str, Any] = dict(torch.load(file))
    tensors["packed"] = torch.ones(1000).to_sparse()
    torch.save(tensors, file)
    check_weights(source, adapter=False)
    cut(0.98)(file)
    with pytest.raises(CheckpointError, match="pytorch_model"):
        check_weights(source, adapter=False)


@pytest.mark.parametrize(
    "command",
    [
        ("patch", "--method", "yarn", "--factor", "4", "--out"),
        ("extend", "--target-length", "128", "--no-measure", "--yes", "--out"),
    ],
    ids=["patch", "extend"],
)
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_commands_stop_with_exit_code_2(
    damage: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    as_shards(source)
    file = weight_files(source)[3]
    before = shutil.copyfile(file, tmp_path / "kept")
    DAMAGES[damage](file)
    name, *options = command
    outcome = CliRunner().invoke(app, [name, "source", *options, "out"])
    assert (outcome.exit_code, file.name in outcome.output) == (2, True), outcome.output
    assert untouched(tmp_path, "out")
    shutil.copyfile(before, file)
    assert CliRunner().invoke(app, [name, "source", *options, "out"]).exit_code == 0
    if name == "extend":  # continued in a folder that is there already
        DAMAGES[damage](file)
        outcome = CliRunner().invoke(app, [name, "source", *options, "out"])
        assert (outcome.exit_code, file.name in outcome.output) == (2, True), outcome.output
