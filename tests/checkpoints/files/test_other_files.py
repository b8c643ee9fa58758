"""Files beside the weights that are converted: other copies of the weights stay behind, whatever file they are in."""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.reference import path
from tests.support.checkpoint_folders import content, convert, write_folder

Tensors = dict[str, Tensor]


def numbers(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def as_tar(tensors: Tensors, file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        data = save(tensors)
        entry = tarfile.TarInfo("model.safetensors")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def as_zip(tensors: Tensors, file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.safetensors", save(tensors))


def as_pieces(tensors: Tensors, file: Path) -> None:
    """One file per tensor, of raw numbers, as stores of arrays write them."""
    for name, tensor in tensors.items():
        (file / name).mkdir(parents=True)
        (file / name / "0.0").write_bytes(tensor.numpy().tobytes())


CONTAINERS: dict[str, Callable[[Tensors, Path], Any]] = {
    "pytorch_model_fsdp_0": lambda tensors, file: save_distributed({"model": tensors}, checkpoint_id=file),
    "weights.npz": lambda tensors, file: np.savez(file, **numbers(tensors)),
    "q_proj.npy": lambda tensors, file: np.save(file, numbers(tensors)["model.layers.0.self_attn.q_proj.weight"]),
    "ema.pkl": lambda tensors, file: file.write_bytes(pickle.dumps(numbers(tensors))),
    "text.pkl": lambda tensors, file: file.write_bytes(pickle.dumps(numbers(tensors), protocol=0)),
    "ema.p": lambda tensors, file: file.write_bytes(pickle.dumps(numbers(tensors))),
    "best.pth.tar": torch.save,
    "best.pt": torch.save,
    "old": lambda tensors, file: torch.save(tensors, file, _use_new_zipfile_serialization=False),
    "model.tar": as_tar,
    "model.zip": as_zip,
    "model.safetensors.bak": save_file,
    "model.safetensors.gz": lambda tensors, file: file.write_bytes(gzip.compress(save(tensors))),
    "half.fp16": lambda tensors, file: file.write_bytes(b"".join(t.half().numpy().tobytes() for t in tensors.values())),
    "flat.dat": lambda tensors, file: file.write_bytes(b"".join(t.numpy().tobytes() for t in tensors.values())),
    "arrays.zarr": as_pieces,
}


def weights(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


@pytest.mark.filterwarnings("default")  # torch's checkpoints warn of their own interface
@pytest.mark.parametrize("where", [".", "runs/last"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_weights_in_any_container_are_left_out_and_named(name: str, where: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    before = set(content(source))
    (source / where).mkdir(parents=True, exist_ok=True)
    CONTAINERS[name](weights(source), source / where / name)
    held = set(content(source)) - before
    report = convert(source, tmp_path / "converted", "interleaved")
    assert set(report.skipped_files) == held != set()
    assert set(content(tmp_path / "converted")) == before
    assert all(file in str(report) for file in held)


def as_sentencepiece(first: bytes) -> Callable[[Path], Any]:
    """Write a file that begins with the bytes of one that SentencePiece has trained."""
    return lambda file: file.write_bytes(first + b"\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>" + bytes(1000))


KEPT: dict[str, Callable[[Path], Any]] = {
    "tokenizer.model": as_sentencepiece(b"\n\x0e\n\x05<unk>"),
    "source.spm": as_sentencepiece(b"\n\x0e\n\x05<pad>"),
    "curve.png": lambda file: shutil.copyfile(next(path().glob("*.png")), file),
    "voice.wav": lambda file: file.write_bytes(b"RIFF" + bytes(100)),
    "paper.pdf": lambda file: file.write_bytes(b"%PDF-1.7\n" + bytes(100)),
    "notes.txt": lambda file: file.write_text("naïve 東京\n\f\x1b[1mbold\x1b[0m", encoding="utf-8"),
    "latin.txt": lambda file: file.write_text("naïve", encoding="latin-1"),
    "merges.txt": lambda file: file.write_text("a b\n" * 100_000, encoding="utf-8"),
    "tokenizer.tiktoken": lambda file: file.write_text("IQ== 0\nIg== 1\n", encoding="utf-8"),
    "empty": lambda file: file.touch(),
    "modeling_mine.py": lambda file: file.write_text("x = 1\n", encoding="utf-8"),
    "chat_template.jinja": lambda file: file.write_text("{{ bos_token }}", encoding="utf-8"),
}


@pytest.mark.parametrize("name", KEPT)
def test_text_tokenizers_and_pictures_are_copied(name: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    KEPT[name](source / name)
    report = convert(source, tmp_path / "converted", "interleaved")
    assert report.skipped_files == ()
    assert (tmp_path / "converted" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.filterwarnings("ignore:Meta's format has no place:UserWarning")
@pytest.mark.parametrize("to", ["meta", "half"])
def test_conversions_of_metas_format_leave_them_out_too(to: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    if to == "half":
        convert(source, tmp_path / "in-between", "meta")
        source = tmp_path / "in-between"
    (source / "flat.dat").write_bytes(bytes(1000))
    report = convert(source, tmp_path / "converted", to, **({"context_length": 64} if to == "half" else {}))
    assert report.skipped_files == ("flat.dat",)
    assert "flat.dat" not in content(tmp_path / "converted")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    source = write_folder(tmp_path / "source")
    for name in ("ema.pkl", "ema.p", "ema.pt"):
        (source / name).write_bytes(pickle.dumps(Trap()))
    convert(source, tmp_path / "converted", "interleaved")
    assert not (tmp_path / "sprung").exists()
    (source / "model.safetensors").rename(source / "model.dat")
    with pytest.raises(CheckpointError, match="holds no weights"):
        rope.convert_checkpoint(source, tmp_path / "again", "interleaved")
    assert not (tmp_path / "sprung").exists()
