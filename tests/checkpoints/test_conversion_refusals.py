"""Hostile and broken folders are refused, with their names, before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import rope_ext_hf as rope
from tests.support.checkpoint_folders import (
    FIRST,
    INDEX,
    SECOND,
    convert,
    llama_tensors,
    untouched,
    write_config,
    write_source,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def everything_in(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, lambda where: where.update(dict.fromkeys(where, name)))


def link_out(name: str) -> Callable[[Path], None]:
    """Move a file to a place beside the folder, and put a link to it in its place."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return change


def without(tensor: str) -> Callable[[Path], None]:
    """Remove a tensor from its file and from the index."""

    def change(folder: Path) -> None:
        name = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][tensor]
        tensors = load_file(folder / name)
        del tensors[tensor]
        save_file(tensors, folder / name)
        edit_index(folder, lambda where: where.pop(tensor))

    return change


def with_tensor(tensor: str, *shape: int, file: str = FIRST, indexed: bool = True) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(load_file(folder / file) | {tensor: torch.zeros(shape)}, folder / file)
        if indexed:
            edit_index(folder, lambda where: where.update({tensor: file}))

    return change


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def configured(**overrides: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **overrides)


K = "model.layers.1.self_attn.k_proj.weight"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a name that leads up": (everything_in("../outside.safetensors"), "is not a valid file name in"),
    "an absolute name": (everything_in("/etc/passwd"), "'/etc/passwd' .* is not a valid file name in"),
    "a name in a folder below": (everything_in("deep/x.safetensors"), "is not a valid file name in"),
    "the folder itself": (everything_in(".."), "is not a valid file name in|leads out"),
    "an empty name": (everything_in(""), "'' is not a plain file"),
    "a null byte": (everything_in("a\0b.safetensors"), "is not a valid file name in .*null"),
    "a name that is too long": (everything_in("a" * 5000), "is not a valid file name in .*too long"),
    "a part linked from outside": (link_out(FIRST), f"'{FIRST}' leads out of the folder"),
    "a config linked from outside": (link_out("config.json"), "'config.json' leads out of the folder"),
    "an index linked from outside": (link_out(INDEX), f"'{INDEX}' leads out of the folder"),
    "another file linked from outside": (link_out("tokenizer.json"), "'tokenizer.json' leads out of the folder"),
    "a folder linked from outside": (lambda f: (f / "more").symlink_to("/etc"), "'more' leads out of the folder"),
    "a link to a folder": (lambda f: (f / "more").symlink_to("deep"), "'more' is not a plain file"),
    "a link to nothing": (lambda f: (f / "more").symlink_to("nothing"), "'more' is not a plain file"),
    "links in a circle": (lambda f: (f / "more").symlink_to("more"), "'more' is not "),
    "a pipe": (lambda f: os.mkfifo(f / "more"), "more' is not a regular file but a device or a pipe"),
    "a part that is missing": (lambda f: (f / SECOND).unlink(), f"'{SECOND}' is missing"),
    "a part that is a folder": (
        lambda f: (f / SECOND).rename(f / "deep" / SECOND) and (f / "deep").rename(f / SECOND),
        f"'{SECOND}' is not a plain file",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), "holds no weights .* parts of a model without the index"),
    "no weights": (
        lambda f: any(map(Path.unlink, (f / INDEX, f / FIRST, f / SECOND))),
        "holds no weights; looked for model.safetensors.index.json",
    ),
    "no weights, whatever else": (  # a home folder, or /, is not listed to its end first
        lambda f: os.symlink("/etc", (f / INDEX).rename(f / "other.json").with_name("more")),  # noqa: PTH211
        "holds no weights .* parts of a model without the index",
    ),
    "a tensor in another part": (
        lambda f: edit_index(f, lambda w: w.update({K: FIRST if w[K] == SECOND else SECOND})),
        f"'{K}' is not in",
    ),
    "a tensor that no part has": (
        lambda f: edit_index(f, lambda w: w.update({"ghost": FIRST})),
        "'ghost' is not in",
    ),
    "a tensor twice": (with_tensor(K, 32, 64, indexed=False), f"'{K}' is in .* and in"),
    "a tensor that the index lacks": (with_tensor("ghost", 1, indexed=False), "'ghost' in .* is not in"),
    "a key that is missing": (without(K), f"'{K.removesuffix('.weight')}' is missing in"),
    "a query that is missing": (
        without("model.layers.0.self_attn.q_proj.weight"),
        "layers.0.self_attn.q_proj' is missing",
    ),
    "an unknown tensor in an attention": (
        with_tensor("model.layers.0.self_attn.q_norm.weight", 16),
        "q_norm.* unknown whether its rows rotate",
    ),
    "an unknown parameter": (
        with_tensor("model.layers.0.self_attn.q_proj.oft_r", 16),
        "'oft_r' is not a known kind of parameter",
    ),
    "no map in the index": (rewritten(INDEX, lambda data: b"{}"), "has no weight_map"),
    "a map that is a list": (rewritten(INDEX, lambda data: b'{"weight_map": ["a"]}'), "has no weight_map"),
    "a map to numbers": (rewritten(INDEX, lambda data: b'{"weight_map": {"a": 1}}'), "has no weight_map"),
    "an index that is no JSON": (rewritten(INDEX, lambda data: data[:-5]), "cannot be read"),
    "an index that is no text": (rewritten(INDEX, lambda data: b"\xff\xfe"), "cannot be read"),
    "an index that is a list": (rewritten(INDEX, lambda data: b"[]"), "not a JSON object"),
    "an index that says a thing twice": (
        rewritten(INDEX, lambda data: b'{"weight_map": {"a": "b", "a": "c"}}'),
        "'a' occurs twice",
    ),
    "an index of many brackets": (rewritten(INDEX, lambda data: b"[" * 100_000), "cannot be read"),
    "a part cut short": (
        rewritten(SECOND, lambda data: data[:-1]),
        "is not a valid safetensors file: .*not fully covered",
    ),
    "a part cut in its header": (
        rewritten(SECOND, lambda data: data[:100]),
        "is not a valid safetensors file: .*header",
    ),
    "a part that is longer": (
        rewritten(SECOND, lambda data: data + b"\0"),
        "is not a valid safetensors file: .*not fully covered",
    ),
    "an empty part": (rewritten(SECOND, lambda data: b""), "is not a valid safetensors file: .*header too small"),
    "a header of impossible length": (
        rewritten(SECOND, lambda data: b"\xff" * 8 + data[8:]),
        "is not a valid safetensors file",
    ),
    "other heads in the config": (
        configured(num_key_value_heads=4),
        r"k_proj.weight' has shape \(32, 64\), but by the config 64 rows",
    ),
    "other dims in the config": (configured(head_dim=32), "proj.weight' has shape .* config and weights disagree"),
    "more layers in the config": (
        configured(num_hidden_layers=3),
        "'model.layers.2.self_attn.k_proj' is missing in .*, and 1 more",
    ),
    "no heads in the config": (
        configured(num_attention_heads=0),
        "the config of .* could not be loaded|no language model can be built",
    ),
    "words for numbers": (
        configured(num_attention_heads="four"),
        "the config of .* could not be loaded|no language model can be built",
    ),
    "negative sizes": (configured(hidden_size=-64), "could not be loaded|no language model can be"),
    "an unknown family": (configured(model_type="no_such_family"), "the config of .* could not be loaded"),
    "a config that is no JSON": (rewritten("config.json", lambda data: data[:-5]), "config"),
    "no config": (lambda f: (f / "config.json").unlink(), "'config.json' is missing"),
    "a pairing that is none": (
        configured(rope_pairing="neox"),
        "rope_pairing in .* is 'neox'; known: half, interleaved",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_folders_are_refused(name: str, source: Path, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    change(source)
    with pytest.raises((rope.CheckpointError, rope.FileError), match=message):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


def test_families_without_rotation_are_refused(source: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=4, n_embd=64, vocab_size=97).to_dict()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(rope.UnsupportedModelError, match="no rotary position embedding"):
        convert(source, tmp_path / "converted", "interleaved")
    assert untouched(tmp_path)


class Trap:
    """A class whose pickle runs code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def without_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": "trap"}, r"cannot be read as tensors alone \(weights_only\)"),
        ([torch.zeros(1)], "does not hold tensors by name"),
        ({"a": 1}, "does not hold tensors by name"),
        ({1: torch.zeros(1)}, "does not hold tensors by name"),
        ({"a": torch.zeros(1).expand(10**12)}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(3, device="meta")}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "'a' is not a plain tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "'a' is torch.complex128, which safetensors has no name for"),
        ("short", "cannot be read as tensors alone"),
        ("garbage", "cannot be read as tensors alone"),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_that_are_not_tensors_alone_are_refused(
    content: Any, message: str, legacy: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_config(source)
    path = source / "pytorch_model.bin"
    if content == {"a": "trap"}:
        content = {"a": Trap(tmp_path / "sprung")}
    torch.save(
        llama_tensors() if isinstance(content, str) else content, path, _use_new_zipfile_serialization=not legacy
    )
    if content == "short":
        path.write_bytes(path.read_bytes()[:-200])
    elif content == "garbage":
        path.write_bytes(b"\x80\x02garbage" * 50)
    with pytest.raises(rope.CheckpointError, match=message):
        convert(source, tmp_path / "converted", "interleaved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"num_hidden_layers": 100_000},
            "has 100,000 layers; at most 2,000 .*--raise-limit layers=",
        ),
        (
            {"head_dim": 2**30},
            "has 1,073,741,824 dims per head; at most 65,536 .*--raise-limit head_dim=",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(
    overrides: dict[str, int], message: str, source: Path, tmp_path: Path
) -> None:
    write_config(source, **overrides)
    with pytest.raises(rope.CheckpointError, match=message):
        convert(source, tmp_path / "converted", "interleaved")


@pytest.mark.parametrize("legacy", [False, True])
def test_an_empty_tensor_in_an_attention_is_converted_as_it_is(legacy: bool, tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 0)}
    source = tmp_path / "source"
    source.mkdir()
    write_config(source)
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    convert(source, tmp_path / "converted", "interleaved", verify=True)
    written = load_file(tmp_path / "converted" / "model.safetensors")
    assert written["model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (64, 0)
