"""Files of torch.save are read as torch reads them, without running their code or holding more than one tensor."""

from __future__ import annotations

import io
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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.files.numbers import TensorInfo, tensor_bytes
from rope_ext_hf.checkpoints.files.torch_files import TorchFile, open_writer


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_torch_files_with_some_bytes_changed(data: st.DataObject) -> None:
    """They give tensors or a CheckpointError, never another error."""
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
            assert len(tensor_bytes(found.read(name))) == entry.end


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
    # torch itself does not read the newest dtypes in the old format.
    expected = saved if legacy else torch.load(path, weights_only=True)
    found = TorchFile(path)
    assert list(found.tensors) == list(expected)
    for name, tensor in expected.items():
        read = found.read(name)
        assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert bytes(tensor_bytes(read)) == bytes(tensor_bytes(tensor)), name
        assert found.tensors[name] == TensorInfo(found.tensors[name].dtype, tuple(tensor.shape), 0, tensor.nbytes)


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


@pytest.mark.slow
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
    """The file has a hole: its size is 64 GB, and a few blocks are on the disk."""
    numbers = 2**34
    said = [{"a": Tensors("0", numbers, shape=(numbers,)), "b": Tensors("1", 2)}, ["0", "1"]]
    path = tmp_path / "file.bin"
    with path.open("wb") as file:
        write_pickles(file, [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, *said])
        file.write(numbers.to_bytes(8, "little"))
        file.seek(4 * numbers, os.SEEK_CUR)
        file.write((2).to_bytes(8, "little") + bytes(tensor_bytes(torch.tensor([1.0, 2.0]))))
    found = TorchFile(path)
    assert found.tensors["a"].end == 2**36
    assert torch.equal(found.read("b"), torch.tensor([1.0, 2.0]))


@dataclass
class Tensors:
    """A tensor of one storage as pickles have it, with parts that may be wrong."""

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
    "another storage": ({"a": Tensors(storage=torch.QInt8Storage)}, "one of its storages is a torch.QInt8Storage"),
    "no storage": ({"a": Tensors(kind="module")}, "refers to something other than a storage"),
    "a negative count": ({"a": Tensors(count=-1)}, "refers to something other than a storage"),
    "two counts": ({"a": Tensors(), "b": Tensors(count=3)}, "storage 0 is described in two ways"),
    "two types": ({"a": Tensors(), "b": Tensors(storage=torch.IntStorage)}, "storage 0 is described in two ways"),
    "a negative size": ({"a": Tensors(shape=(-2,))}, "'a' has no valid shape"),
    "a size of a half": ({"a": Tensors(shape=(0.5,))}, "'a' has no valid shape"),
    "a list for a shape": ({"a": Tensors(shape=[2])}, "a list where a tuple must be"),
    "a negative offset": ({"a": Tensors(offset=-1)}, "'a' has no valid shape"),
    "a stride too many": ({"a": Tensors(stride=(1, 1))}, "'a' has no valid shape"),
    "many dimensions": ({"a": Tensors(shape=(1,) * 65, stride=(1,) * 65)}, "'a' has no valid shape"),
    "too many numbers": ({"a": Tensors(shape=(3,), stride=(0,))}, "'a' is not a plain tensor"),
    "none of too many": ({"a": Tensors(shape=(0, 2**62, 2**62), stride=(1, 1, 1))}, "'a' is not a plain tensor"),
    "behind its storage": ({"a": Tensors(offset=1)}, "'a' extends past the end of its storage"),
    "far behind it": ({"a": Tensors(stride=(2**62,))}, "'a' extends past the end of its storage"),
    "conjugate": ({"a": Tensors(metadata=({"conj": True},))}, "'a' is not a plain tensor"),
    "another function": ({"a": Tensors(function=torch._utils._rebuild_qtensor)}, "'a' is not a plain tensor"),
    "no dtype": ({"a": Tensors(function=torch._utils._rebuild_tensor_v3, metadata=(torch.load,))}, "NoneType where"),
    "half a letter": ({"\ud800": Tensors()}, "surrogates not allowed"),
    "a list": ([Tensors()], "does not hold tensors by name"),
    "tensors in tensors' place": ({"a": {"b": Tensors()}}, "does not hold tensors by name"),
}


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_pickles_that_are_no_tensors(name: str, archive: bool, tmp_path: Path) -> None:
    value, message = BAD[name]
    path = tmp_path / "file.bin"
    data = bytes(tensor_bytes(torch.tensor([1.0, 2.0])))
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
        (b"\x80\x02})" + b"q\x00h\x00\x86" * 200 + b"Ns.", "a dict key of type tuple"),  # whose hash takes forever
        (b"\x80\x02X\xff\xff\xff\x7fa.", "expected 2147483647 bytes"),  # a text of two
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "its pickle has FRAME"),
        (b"\x80\x02]}b.", "a list where a dict must be"),
        (b"\x80\x02ctorch\nload\n}b.", "a _GlobalName where a dict must be"),  # attributes of a function
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
    """Pack a changed archive anew."""
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
        (lambda c: c.update({"file/byteorder": b"big"}), zipfile.ZIP_STORED, "its numbers are big-endian"),
        (lambda c: c.update({"other/data.pkl": b"."}), zipfile.ZIP_STORED, "not an archive of torch.save"),
        (lambda c: c.pop("file/data.pkl"), zipfile.ZIP_STORED, "not an archive of torch.save"),
        (lambda c: c.pop("file/data/0"), zipfile.ZIP_STORED, "the archive has no file/data/0 of 40000 bytes"),
        (
            lambda c: c.update({"file/data/0": b"short"}),
            zipfile.ZIP_STORED,
            "the archive has no file/data/0 of 40000 bytes",
        ),
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
    with open_writer(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"e": "a"}) as write:
        for name in ("b", "d", "a", "c"):  # in any order
            write(name, tensor_bytes(tensors[name]))
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


@pytest.mark.parametrize(
    ("limit", "message"),
    [("pickle_opcodes", "its pickle has more than 1,000 opcodes"), ("pickle_bytes", "more than 1,000 bytes")],
)
def test_a_very_large_pickle_is_refused(limit: str, message: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.bin", "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02" + b"]" * 2000 + b".")
    with (
        rope.limits(**{limit: 1000}),
        pytest.raises(rope.CheckpointError, match=f"{message}; .*--raise-limit {limit}="),
    ):
        TorchFile(tmp_path / "file.bin")
    with pytest.raises(rope.CheckpointError, match="does not hold tensors by name"):
        TorchFile(tmp_path / "file.bin")
