"""The reader accepts safetensors files alone, as the library does."""

from __future__ import annotations

import json
import math
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.files.numbers import TensorInfo, tensor_bytes
from rope_ext_hf.checkpoints.files.torch_files import TORCH_DTYPES
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile, file_matches, write_safetensors
from rope_ext_hf.files.whole import copy_range

VALID = save(
    {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)},
    {"format": "pt"},
)


def accepted(data: bytes) -> bool:
    """Return whether the reader accepts these bytes; the library must agree, and read the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        path.write_bytes(data)
        try:
            found = SafetensorsFile(path)
        except rope.CheckpointError:
            return False
        library: Any = safetensors
        by_library = dict(library.deserialize(data))
        assert found.tensors.keys() == by_library.keys()
        for name, entry in found.tensors.items():
            assert (entry.dtype, list(entry.shape)) == (by_library[name]["dtype"], by_library[name]["shape"])
            assert data[entry.begin : entry.end] == by_library[name]["data"]
            if entry.dtype in TORCH_DTYPES:
                tensor = found.read(name)
                assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[entry.dtype], entry.shape)
                assert bytes(tensor_bytes(tensor)) == data[entry.begin : entry.end]
        return True


@pytest.mark.slow
@given(data=st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes(data: bytes) -> None:
    accepted(data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_with_some_bytes_changed(data: st.DataObject) -> None:
    changed = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    accepted(bytes(changed))


@given(end=st.integers(0, len(VALID) - 1), more=st.binary(max_size=9))
@settings(max_examples=100, deadline=None)
def test_a_file_cut_short_or_prolonged(end: int, more: bytes) -> None:
    assert not accepted(VALID[:end])
    assert accepted(VALID + more) == (more == b"")


odd: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 40),
    st.sampled_from(
        [2**31, 2**62, 2**63, 2**64, 10**30, -1, 1.0, 1e400, True, None, "", "F32", "4", [], [4], {}, {"a": 1}]
    ),
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.sampled_from([0, 2**62, 2**63, -1, 1.5, "1", None, [1]]), max_size=3),
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*TORCH_DTYPES, "F4", "F6_E2M3", "F6_E3M2"]), odd),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), odd),
        "data_offsets": st.one_of(st.lists(st.integers(0, 64), min_size=2, max_size=2), odd),
    },
    optional={"more": odd},
)
headers = st.dictionaries(
    st.one_of(st.sampled_from(["a", "b", "__metadata__", "\ud800", ""]), st.text(max_size=3)),
    st.one_of(entries, odd, st.dictionaries(st.text(max_size=2), st.one_of(st.text(max_size=2), odd), max_size=2)),
    max_size=3,
)


@pytest.mark.slow
@given(header=headers, body=st.binary(max_size=64), padding=st.sampled_from([b"", b" ", b"\n", b"x"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_header(header: dict[str, Any], body: bytes, padding: bytes) -> None:
    text = json.dumps(header).encode() + padding
    accepted(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_right_file_is_accepted(data: st.DataObject) -> None:
    """Return tensors of any dtype in any order of their bytes, some of them empty."""
    names = data.draw(
        st.lists(st.text(min_size=1, max_size=5).filter(lambda n: n != "__metadata__"), unique=True, max_size=5)
    )
    at = 0
    fields: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        dtype = data.draw(st.sampled_from(sorted(TORCH_DTYPES)))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        end = at + math.prod(shape) * TORCH_DTYPES[dtype].itemsize
        fields.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}))
        at = end
    metadata = data.draw(st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)))
    header = dict(data.draw(st.permutations(fields)))
    text = json.dumps(header if metadata is None else {"__metadata__": metadata} | header).encode()
    body = data.draw(st.binary(min_size=at, max_size=at))
    for entry in header.values():  # a byte of a bool is 0 or 1
        if entry["dtype"] == "BOOL":
            begin, end = entry["data_offsets"]
            body = body[:begin] + bytes(byte & 1 for byte in body[begin:end]) + body[end:]
    assert accepted(len(text).to_bytes(8, "little") + text + body)


def with_header(header: str, body: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + body


ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header too small"),
        (b"\x02" + b"\0" * 7, "invalid header length"),
        ((2**63).to_bytes(8, "little") + b"{}", "header too large"),
        (with_header("[]"), "invalid type: sequence"),
        (with_header('{"a":' + ENTRY + "}", b"xyz"), "file not fully covered"),
        (with_header('{"a":' + ENTRY + "}", b"x"), "file not fully covered"),
        (with_header('{"a":' + ENTRY + ',"a":' + ENTRY + "}", b"xy"), "'a' occurs twice"),
        (with_header('{"a":' + ENTRY + ',"b":' + ENTRY + "}", b"xy"), "invalid offset for tensor"),
        (with_header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"xyz"), "invalid offset for tensor `a`"),
        (
            with_header('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}', b"xy"),
            "invalid shape",
        ),
        (with_header('{"a":{"dtype":"U7","shape":[2],"data_offsets":[0,2]}}', b"xy"), "unknown variant `U7`"),
        (with_header('{"a":{"dtype":"U8","shape":"","data_offsets":[0,1]}}', b"x"), "invalid type: string"),
        (with_header('{"a":{"dtype":"U8","shape":[],"data_offsets":"01"}}', b"x"), "expected a tuple of size 2"),
        (
            with_header('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', b"x"),
            "byte boundary",
        ),
        (with_header('{"a":{"dtype":"U8","shape":[2]}}', b"xy"), "missing field `data_offsets`"),
        (with_header('{"__metadata__":{"a":1}}'), "invalid type: integer `1`, expected a string"),
        (with_header('{"__metadata__":[]}'), "invalid type: sequence, expected a map"),
        (
            with_header('{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
            "'a' has a shape that no tensor of torch can have",
        ),
    ],
)
def test_what_is_wrong_is_said(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    with pytest.raises(rope.CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**40], [0, 2**62], [1] * 1000, [2**62] * 64])
def test_no_claim_makes_it_take_memory(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    entry = {"dtype": "F64", "shape": shape, "data_offsets": [0, 8 if shape[-1] == 1 else 2**40 if shape[0] else 0]}
    path.write_bytes(with_header(json.dumps({"a": entry}), b"12345678"))
    tracemalloc.start()
    with pytest.raises(rope.CheckpointError, match="is not a valid safetensors file"):
        SafetensorsFile(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(VALID)
    file = SafetensorsFile(path)
    path.write_bytes(VALID[:-4])
    with pytest.raises(rope.CheckpointError, match="ended at byte"):
        file.read(next(name for name, entry in file.tensors.items() if entry.end == len(VALID)))
    with (
        path.open("rb") as source,
        (tmp_path / "copy").open("wb") as target,
        pytest.raises(rope.FileError, match="ended at byte"),
    ):
        copy_range(source, target, 0, len(VALID), lambda count: None)


def test_dtypes_that_torch_lacks_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(with_header('{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"x"))
    with pytest.raises(rope.CheckpointError, match="is F4, which torch has no dtype for"):
        SafetensorsFile(path).read("a")


# --- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3).T,  # columns first
        "b": torch.ones(3, dtype=torch.bfloat16)[::2],
        "c": torch.zeros(0, 5),
        "d": torch.tensor(7),
    }
    named = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    entries = {
        name: TensorInfo(named[t.dtype], tuple(t.shape), 0, t.numel() * t.element_size()) for name, t in tensors.items()
    }
    seen: list[int] = []
    path = tmp_path / "file.safetensors"
    write_safetensors(path, entries, tensors.__getitem__, seen.append)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert sum(seen) == sum(entry.end for entry in entries.values())
    assert file_matches(path, entries, tensors.__getitem__)
    assert file_matches(path, entries, tensors.__getitem__, header=SafetensorsFile(path).header)
    assert not file_matches(path, entries, tensors.__getitem__, header=b"another header")
    assert not file_matches(path, entries, lambda name: tensors[name] + (name == "d"))
    assert not file_matches(path, dict(list(entries.items())[1:]), tensors.__getitem__)
    assert not file_matches(tmp_path / "nothing.safetensors", entries, tensors.__getitem__)


def test_saved_by_the_library_read_here(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.tensor([1, 0], dtype=torch.bool),
        "c": torch.randn(2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "file.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "file.safetensors")
    assert file.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert bytes(tensor_bytes(file.read(name))) == bytes(tensor_bytes(tensor))
