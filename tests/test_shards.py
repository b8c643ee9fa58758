"""Weight files as bytes: what the reader accepts is a safetensors file, and everything else is refused."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import tempfile
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.torch_files import writing
from rope_ext_hf.checkpoints.weight_files import (
    DTYPES,
    TORCH_DTYPES,
    Entry,
    SafetensorsFile,
    TorchFile,
    bytes_of,
    holds,
    write_safetensors,
)
from rope_ext_hf.files import copy_range

VALID = save(
    {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)},
    {"format": "pt"},
)


def accepted(data: bytes) -> bool:
    """Whether the reader takes these bytes for a file; the library has to agree, and to read the same."""
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
                assert bytes(bytes_of(tensor)) == data[entry.begin : entry.end]
        return True


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes(data: bytes) -> None:
    accepted(data)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
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
        "dtype": st.one_of(st.sampled_from(sorted(DTYPES)), odd),
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


@given(header=headers, body=st.binary(max_size=64), padding=st.sampled_from([b"", b" ", b"\n", b"x"]))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_header(header: dict[str, Any], body: bytes, padding: bytes) -> None:
    text = json.dumps(header).encode() + padding
    accepted(len(text).to_bytes(8, "little") + text + body)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_right_file_is_accepted(data: st.DataObject) -> None:
    """Tensors in any order of their bytes, of any dtype, empty ones among them."""
    names = data.draw(
        st.lists(st.text(min_size=1, max_size=5).filter(lambda n: n != "__metadata__"), unique=True, max_size=5)
    )
    at = 0
    fields: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        dtype = data.draw(st.sampled_from(sorted(set(DTYPES) - {"F4", "F6_E2M3", "F6_E3M2"})))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        end = at + math.prod(shape) * DTYPES[dtype] // 8
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
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\x02" + b"\0" * 7, "a header of 2 bytes in a file of 8"),
        ((2**63).to_bytes(8, "little") + b"{}", "a header of 9223372036854775808 bytes"),
        (with_header("[]"), "no JSON object"),
        (with_header(" {}"), "no JSON object"),
        (with_header('{"a":' + ENTRY + "}", b"xyz"), "the tensors end at byte .*, the file at"),
        (with_header('{"a":' + ENTRY + "}", b"x"), "the tensors end at byte .*, the file at"),
        (with_header('{"a":' + ENTRY + ',"a":' + ENTRY + "}", b"xy"), "'a' occurs twice"),
        (with_header('{"a":' + ENTRY + ',"b":' + ENTRY + "}", b"xy"), "'b' begins at byte"),
        (with_header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"xyz"), "'a' begins at byte"),
        (with_header('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}', b"xy"), "'a': 2 bytes for shape"),
        (with_header('{"a":{"dtype":"U7","shape":[2],"data_offsets":[0,2]}}', b"xy"), "dtype 'U7'"),
        (with_header('{"a":{"dtype":"U8","shape":"","data_offsets":[0,1]}}', b"x"), "shape ''"),
        (with_header('{"a":{"dtype":"U8","shape":[],"data_offsets":"01"}}', b"x"), "data_offsets '01'"),
        (with_header('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', b"x"), "1 bytes for shape"),
        (with_header('{"a":{"dtype":"U8","shape":[2]}}', b"xy"), "'a' has not dtype, shape and data_offsets"),
        (with_header('{"__metadata__":{"a":1}}'), "__metadata__ does not hold words"),
        (with_header('{"__metadata__":[]}'), "__metadata__ does not hold words"),
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
    with pytest.raises(rope.CheckpointError, match="is no whole safetensors file"):
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
        copy_range(source.fileno(), target.fileno(), 0, len(VALID), lambda count: None)


def test_dtypes_that_torch_lacks_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(with_header('{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"x"))
    with pytest.raises(rope.CheckpointError, match="dtype F4 cannot be read here"):
        SafetensorsFile(path).read("a")


# --- torch's files ---------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_torch_files_with_some_bytes_changed(data: st.DataObject) -> None:
    """Tensors or a CheckpointError, never anything else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.bin"
        legacy = data.draw(st.booleans())
        torch.save({"a": torch.zeros(3), "b": torch.ones(2)}, path, _use_new_zipfile_serialization=not legacy)
        changed = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(changed)
        try:
            found = TorchFile(path)
        except rope.CheckpointError:
            return
        for name, entry in found.tensors.items():
            assert len(bytes_of(found.read(name))) == entry.end


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(2, 3, 4)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    with_attributes = torch.nn.Parameter(torch.ones(3))
    with_attributes.note = {"a": [1, 2.5, None, True]}  # type: ignore[attr-defined]
    annotated = torch.zeros(2)
    annotated.note = -1  # type: ignore[attr-defined]
    return module.state_dict() | {
        "base": base,
        "turned": base.permute(2, 0, 1),
        "row": base[1, 2],
        "steps": base[:, ::2, 1:],
        "again": base.expand(1, 2, 3, 4),
        "one": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "none of a part": base[2:],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "with attributes": with_attributes,
        "annotated": annotated,
        "bool": torch.tensor([True, False]),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
        "complex": torch.tensor([1 + 2j]),
        **{str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
        **{str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)},
    }


def save_torch(value: Any, path: Path, legacy: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_are_read_as_torch_reads_them(legacy: bool, tmp_path: Path) -> None:
    saved = tensors_of_every_kind()
    path = save_torch(saved, tmp_path / "file.bin", legacy)
    # Of the old format torch itself does not read the newest dtypes.
    expected = saved if legacy else torch.load(path, weights_only=True)
    found = TorchFile(path)
    assert list(found.tensors) == list(expected)
    for name, tensor in expected.items():
        read = found.read(name)
        assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert bytes(bytes_of(read)) == bytes(bytes_of(tensor)), name
        assert found.tensors[name] == Entry(found.tensors[name].dtype, tuple(tensor.shape), 0, tensor.nbytes)


def test_torch_files_without_checksums(tmp_path: Path) -> None:
    options = pytest.importorskip("torch.serialization")
    if not hasattr(options, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    options.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "file.bin")
    finally:
        options.set_crc32_options(True)
    assert torch.equal(TorchFile(tmp_path / "file.bin").read("a"), torch.ones(3))


@pytest.mark.parametrize("legacy", [False, True])
def test_no_more_than_a_tensor_is_in_memory(legacy: bool, tmp_path: Path) -> None:
    size = 4_000_000
    path = save_torch({str(i): torch.full((size // 4,), i) for i in range(8)}, tmp_path / "file.bin", legacy)
    tracemalloc.start()
    file = TorchFile(path)
    assert tracemalloc.get_traced_memory()[1] < 500_000
    for i in range(8):
        assert file.read(str(i))[-1] == i
    assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    tracemalloc.stop()


def test_a_torch_file_of_any_size(tmp_path: Path) -> None:
    """A file with a hole: 64 GB by its size, of which a few blocks are on the disk."""
    numbers = 2**34
    said = [{"a": Tensors("0", numbers, shape=(numbers,)), "b": Tensors("1", 2)}, ["0", "1"]]
    path = tmp_path / "file.bin"
    with path.open("wb") as file:
        write_pickles(file, [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, *said])
        file.write(numbers.to_bytes(8, "little"))
        file.seek(4 * numbers, os.SEEK_CUR)
        file.write((2).to_bytes(8, "little") + bytes(bytes_of(torch.tensor([1.0, 2.0]))))
    found = TorchFile(path)
    assert found.tensors["a"].end == 2**36
    assert torch.equal(found.read("b"), torch.tensor([1.0, 2.0]))


@dataclass
class Tensors:
    """A tensor of one storage, as a pickle has it, with what may be wrong about it."""

    key: str = "0"
    count: Any = 2
    shape: Any = (2,)
    stride: Any = (1,)
    offset: Any = 0
    storage: Any = torch.FloatStorage
    kind: str = "storage"
    metadata: tuple[Any, ...] = ()
    function: Any = torch._utils._rebuild_tensor_v2


def write_pickles(file: IO[bytes], values: list[Any]) -> None:
    class Storage:
        def __init__(self, said: tuple[Any, ...]) -> None:
            self.said = said

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.said if isinstance(value, Storage) else None

        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, Tensors):
                return NotImplemented
            storage = Storage((value.kind, value.storage, value.key, "cpu", value.count, None))
            rest = (value.offset, value.shape, value.stride, False, OrderedDict(), *value.metadata)
            return value.function, (storage, *rest)

    for value in values:
        Pickler(file, 2).dump(value)


BAD: dict[str, tuple[Any, str]] = {
    "code": ({"a": os.getcwd}, "its pickle names posix.getcwd"),
    "code of torch's": ({"a": Tensors(), "b": torch.hub.load}, "does not hold tensors by name"),
    "another storage": ({"a": Tensors(storage=torch.QInt8Storage)}, "a storage in it is torch.QInt8Storage"),
    "no storage": ({"a": Tensors(kind="module")}, "something in it is no storage"),
    "a negative count": ({"a": Tensors(count=-1)}, "something in it is no storage"),
    "two counts": ({"a": Tensors(), "b": Tensors(count=3)}, "storage 0 is described in two ways"),
    "two types": ({"a": Tensors(), "b": Tensors(storage=torch.IntStorage)}, "storage 0 is described in two ways"),
    "a negative size": ({"a": Tensors(shape=(-2,))}, "'a' has no shape"),
    "a size of a half": ({"a": Tensors(shape=(0.5,))}, "'a' has no shape"),
    "a list for a shape": ({"a": Tensors(shape=[2])}, "a list in place of a tuple"),
    "a negative offset": ({"a": Tensors(offset=-1)}, "'a' has no shape"),
    "a stride too many": ({"a": Tensors(stride=(1, 1))}, "'a' has no shape"),
    "many dimensions": ({"a": Tensors(shape=(1,) * 65, stride=(1,) * 65)}, "'a' has no shape"),
    "too many numbers": ({"a": Tensors(shape=(3,), stride=(0,))}, "'a' is not a plain tensor"),
    "none of too many": ({"a": Tensors(shape=(0, 2**62, 2**62), stride=(1, 1, 1))}, "'a' is not a plain tensor"),
    "behind its storage": ({"a": Tensors(offset=1)}, "'a' goes on behind its storage"),
    "far behind it": ({"a": Tensors(stride=(2**62,))}, "'a' goes on behind its storage"),
    "conjugate": ({"a": Tensors(metadata=({"conj": True},))}, "'a' is not a plain tensor"),
    "another function": ({"a": Tensors(function=torch._utils._rebuild_qtensor)}, "'a' is not a plain tensor"),
    "no dtype": ({"a": Tensors(function=torch._utils._rebuild_tensor_v3, metadata=(torch.load,))}, "NoneType in place"),
    "half a letter": ({"\ud800": Tensors()}, "surrogates not allowed"),
    "a list": ([Tensors()], "does not hold tensors by name"),
    "tensors in tensors' place": ({"a": {"b": Tensors()}}, "does not hold tensors by name"),
}


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_pickles_that_are_no_tensors(name: str, archive: bool, tmp_path: Path) -> None:
    value, message = BAD[name]
    path = tmp_path / "file.bin"
    data = bytes(bytes_of(torch.tensor([1.0, 2.0])))
    if archive:
        pickled = io.BytesIO()
        write_pickles(pickled, [value])
        with zipfile.ZipFile(path, "w") as target:
            target.writestr("archive/data.pkl", pickled.getvalue())
            target.writestr("archive/data/0", data)
    else:
        with path.open("wb") as file:
            write_pickles(file, [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, value, ["0"]])
            file.write((2).to_bytes(8, "little") + data)
    with pytest.raises(rope.CheckpointError, match=f"cannot be read as tensors alone .*{message}"):
        TorchFile(path)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"\x80\x02}q\xff", "pickle exhausted"),
        (b"\x80\x02r\xff\xff\xff\xff.", "list index"),  # a memo of four billion
        (b"\x80\x02})" + b"q\x00h\x00\x86" * 200 + b"Ns.", "a key of type tuple"),  # whose hash takes forever
        (b"\x80\x02X\xff\xff\xff\x7fa.", "expected 2147483647 bytes"),  # a text of two
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "its pickle has FRAME"),
        (b"\x80\x02]}b.", "a list in place of a dict"),
        (b"\x80\x02ctorch\nload\n}b.", "a _Name in place of a dict"),  # attributes of a function
        (b"\x80\x02(lp0\n.", "its pickle has LIST"),
        (b"\x80\x02}", "pickle exhausted"),
        (b"", "pickle exhausted"),
    ],
)
def test_pickles_that_are_none(pickled: bytes, message: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.bin", "w") as target:
        target.writestr("archive/data.pkl", pickled)
    with pytest.raises(rope.CheckpointError, match=message) as caught:
        TorchFile(tmp_path / "file.bin")
    assert "(weights_only)" in str(caught.value)


def entries_of(path: Path, change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> None:
    """Pack an archive anew, changed."""
    with zipfile.ZipFile(path) as old:
        content = {entry.filename: old.read(entry) for entry in old.infolist()}
    change(content)
    with zipfile.ZipFile(path, "w") as new:
        for name, data in content.items():
            new.writestr(name, data, method)


@pytest.mark.parametrize(
    ("change", "method", "message"),
    [
        (lambda c: None, zipfile.ZIP_DEFLATED, "it is compressed"),
        (lambda c: c.update({"file/byteorder": b"big"}), zipfile.ZIP_STORED, "their high bytes first"),
        (lambda c: c.update({"other/data.pkl": b"."}), zipfile.ZIP_STORED, "no archive of torch's"),
        (lambda c: c.pop("file/data.pkl"), zipfile.ZIP_STORED, "no archive of torch's"),
        (lambda c: c.pop("file/data/0"), zipfile.ZIP_STORED, "it has no file/data/0 of 40000 bytes"),
        (lambda c: c.update({"file/data/0": b"short"}), zipfile.ZIP_STORED, "it has no file/data/0 of 40000 bytes"),
    ],
)
def test_archives_that_are_not_torchs(
    change: Callable[[dict[str, bytes]], object], method: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.bin"
    torch.save({"a": torch.zeros(10_000)}, path)
    entries_of(path, lambda content: None)
    assert TorchFile(path).tensors["a"].shape == (10_000,)
    entries_of(path, change, method)
    with pytest.raises(rope.CheckpointError, match=message):
        TorchFile(path)


def test_what_is_written_is_what_torch_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.ones(7, dtype=torch.bfloat16),
        "c": torch.zeros(0, 2),
        "d": torch.tensor(1.5, dtype=torch.float64),
    }
    path = tmp_path / "file.pth"
    with writing(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"e": "a"}) as write:
        for name in ("b", "d", "a", "c"):  # in any order
            write(name, bytes_of(tensors[name]))
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert list(found) == [*tensors, "e"]
        for name, tensor in found.items():
            assert torch.equal(tensor, tensors.get(name, tensors["a"]))
            assert tensor.dtype == tensors.get(name, tensors["a"]).dtype
            assert tensor.data_ptr() % 64 == 0
        assert found["e"].data_ptr() == found["a"].data_ptr()
    file = TorchFile(path)
    assert all(torch.equal(file.read(name), found[name]) for name in found)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


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
        name: Entry(named[t.dtype], tuple(t.shape), 0, t.numel() * t.element_size()) for name, t in tensors.items()
    }
    seen: list[int] = []
    path = tmp_path / "file.safetensors"
    write_safetensors(path, entries, tensors.__getitem__, {"format": "pt"}, seen.append)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert sum(seen) == sum(entry.end for entry in entries.values())
    assert holds(path, entries, tensors.__getitem__)
    assert holds(path, entries, tensors.__getitem__, SafetensorsFile(path).header)
    assert not holds(path, entries, tensors.__getitem__, b"another header")
    assert not holds(path, entries, lambda name: tensors[name] + (name == "d"))
    assert not holds(path, dict(list(entries.items())[1:]), tensors.__getitem__)
    assert not holds(tmp_path / "nothing.safetensors", entries, tensors.__getitem__)


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
        assert bytes(bytes_of(file.read(name))) == bytes(bytes_of(tensor))
