"""Folders of embedding models, as sentence-transformers writes them: the layers on top of the model are kept whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, Transformer

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder, unlike_copies
from rope_ext_hf.hub import load_empty
from rope_ext_hf.reference import path
from tests.support.checkpoint_folders import content, convert

pytestmark = pytest.mark.filterwarnings("default")  # sentence-transformers warns of names of its own
TEXTS = ["def f():\n    return 1\n", "import os\n" * 60]
LAYERS = ("1_Pooling", "2_Dense", "3_LayerNorm")
SETTINGS = "sentence_bert_config.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model of the bundled one, with layers that have settings and layers that have weights."""
    transformer = Transformer(str(path()), model_args={"dtype": "float32"})
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    width = transformer.model.config.hidden_size
    layers = [Pooling(width, "lasttoken"), Dense(width, 24), LayerNorm(24)]
    folder = tmp_path_factory.mktemp("embeddings") / "source"
    SentenceTransformer(modules=[transformer, *layers], device="cpu").save(str(folder))
    assert {str(file.parent) for file in map(Path, content(folder))} == {".", *LAYERS}
    return folder


@pytest.fixture
def source(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "source"))


def of_layers(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name.startswith(LAYERS)}


def encode(model: Any) -> Any:
    loaded = SentenceTransformer(str(model), device="cpu") if isinstance(model, Path) else model
    return loaded.encode(TEXTS)


def patched_copy(source: Path, out: Path) -> Path:
    save_patched_folder(rope.patch(load_empty(source), "yarn", factor=4), source, out)
    return out


def test_a_patched_copy_gives_the_embeddings_of_the_patched_model(source: Path, tmp_path: Path) -> None:
    out = patched_copy(source, tmp_path / "out")
    assert of_layers(out) == of_layers(source) != {}
    assert not unlike_copies(source, out)
    in_memory = rope.patch(SentenceTransformer(str(source), device="cpu"), "yarn", factor=4)
    in_memory.max_seq_length = 1024
    assert np.abs(encode(out) - encode(in_memory)).max() < 1e-5
    assert np.abs(encode(out) - encode(source)).max() > 1e-2


def test_names_that_are_left_out_at_the_top_are_kept_in_subfolders(source: Path, tmp_path: Path) -> None:
    names = ("config.json", "README.md", "__init__.py", "run.yaml", "modeling_rope_ext_hf.py", "params.json")
    for name in (*names, ".eval_results/mine.yaml"):
        for folder in ("1_Pooling", "code/inner", "."):
            file = source / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if folder != "." or name not in ("config.json", "params.json"):
                file.write_text("{}", encoding="utf-8")
    out = patched_copy(source, tmp_path / "out")
    before, after = content(source), content(out)
    assert {name: data for name, data in before.items() if "/" in name and name[0] != "."} == {
        name: data for name, data in after.items() if "/" in name
    }
    assert {name for name in before if name not in after} == {*names[1:5], ".eval_results/mine.yaml"}
    (out / "code" / "inner" / "config.json").write_text('{"other": 1}', encoding="utf-8")
    assert unlike_copies(source, out) == ["code/inner/config.json"]


@pytest.mark.parametrize(("stated", "later"), [(256, 1024), (100, 100), (2000, 2000), (None, 1024)])
def test_texts_are_cut_to_the_extended_length_where_they_were_cut_to_the_context_length(
    stated: int | None, later: int, source: Path, tmp_path: Path
) -> None:
    settings = json.loads((source / SETTINGS).read_text())
    (source / SETTINGS).write_text(json.dumps(settings | {"max_seq_length": stated}), encoding="utf-8")
    out = patched_copy(source, tmp_path / "out")
    assert SentenceTransformer(str(out), device="cpu").max_seq_length == later
    assert not unlike_copies(source, out)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_converted_folder_keeps_the_weights_of_the_layers(suffix: str, source: Path, tmp_path: Path) -> None:
    if suffix == "bin":  # as older versions wrote them
        torch.save(load_file(source / "2_Dense" / "model.safetensors"), source / "2_Dense" / "pytorch_model.bin")
        (source / "2_Dense" / "model.safetensors").unlink()
    report = convert(source, tmp_path / "other", "interleaved")
    assert report.skipped_files == ()
    assert of_layers(tmp_path / "other") == of_layers(source) != {}
    convert(tmp_path / "other", tmp_path / "back", "half")
    assert (encode(tmp_path / "back") == encode(source)).all()


@pytest.mark.parametrize("modules", ['{"a": 1}', "not JSON", "[1, {}]", '[{"path": 3}, {"path": ""}, {"path": "."}]'])
def test_weights_in_folders_that_no_module_names_are_left_out_and_named(
    modules: str, source: Path, tmp_path: Path
) -> None:
    (source / "modules.json").write_text(modules, encoding="utf-8")
    report = convert(source, tmp_path / "other", "interleaved")
    assert report.skipped_files == ("2_Dense/model.safetensors", "3_LayerNorm/model.safetensors")
    assert "2_Dense/config.json" in content(tmp_path / "other")
