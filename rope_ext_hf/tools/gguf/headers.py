"""Read GGUF files, the model files of llama.cpp: their headers, and the rotary embedding that they describe."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rope_ext_hf.bounds import limit
from rope_ext_hf.errors import CheckpointError, MethodError, short
from rope_ext_hf.files.whole import foreign_errors
from rope_ext_hf.installing import install_command

_HEADER = struct.Struct("<4sIQQ")
_MAX_ENTRIES = 1_000_000  # of keys, and of tensors, in a header; the largest published files have some thousands
_MAX_READS = 20_000_000  # of numbers and strings in a header; a vocabulary of 256,000 tokens takes some 2 million
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class FileRope:
    """The rotary embedding that a GGUF file describes."""

    architecture: str
    dim: int  # rotated dims per head
    keys: dict[str, Any]  # metadata without the architecture in front: "rope.freq_base", "rope.scaling.type", ...
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)  # divisors of the frequencies, by tensor name
    head_dim: int | None = None  # dims per head; None: the file does not state them
    parts: int = 1  # the number of files that hold the model


@contextlib.contextmanager
def open_gguf(path: Path) -> Iterator[Any]:
    """Open a GGUF file and yield its reader; any error about the file's contents becomes a CheckpointError."""
    try:
        import gguf
    except ImportError as error:
        raise MethodError(f"GGUF files need the gguf package: {install_command('gguf')}") from error
    failure = f"the GGUF file {short(str(path))!r} cannot be read"
    if not path.is_file():
        raise CheckpointError(f"{failure}: it is not a file")
    with foreign_errors(failure):
        with path.open("rb") as stream:
            magic, version, tensors, keys = _HEADER.unpack(stream.read(_HEADER.size).ljust(_HEADER.size, b"\0"))
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointError(f"{failure}: it is not a little-endian GGUF file of version 2 or 3")
        if tensors > _MAX_ENTRIES or keys > _MAX_ENTRIES:
            raise CheckpointError(
                f"{failure}: its header states {keys:,} keys and {tensors:,} tensors, which is too many"
            )
        reader = _bounded_reader(gguf.GGUFReader)(path)
        end = path.stat().st_size
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > end or tensor.n_bytes != tensor.data.nbytes:
                raise CheckpointError(f"{failure}: the tensor {short(tensor.name)!r} lies beyond its end")
        yield reader


def _bounded_reader(base: Any) -> Any:
    """Return a subclass of gguf's reader, `base`, that raises ValueError when a file ends too early.

    gguf's own reader does not notice the end of a file, and returns empty values from there on.
    """

    class BoundedReader(base):  # type: ignore[misc]
        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            self.reads += 1
            if self.reads > _MAX_READS:
                raise ValueError("its header holds more metadata than that of any model")
            if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
                raise ValueError("it ends before what its header states")
            return super()._get(offset, dtype, count, *args, **kwargs)

    return BoundedReader


def architecture_of(reader: Any, path: Path) -> str:
    field = reader.get_field("general.architecture")
    name = field.contents() if field is not None else None
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"the GGUF file {short(str(path))!r} states no general.architecture")
    return name


def read_file_rope(path: Path) -> FileRope:
    """Read the rotary embedding that a GGUF file describes.

    Raises:
        CheckpointError: the file is damaged, or describes no rotary embedding.
    """
    with open_gguf(path) as reader:
        architecture = architecture_of(reader, path)
        prefix = f"{architecture}."
        values = {
            name.removeprefix(prefix): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(prefix) and "tokenizer" not in name
        }
        heads, head_dim = values.get("attention.head_count", 0), values.get("attention.key_length")
        if head_dim is None and isinstance(heads, int) and heads:
            head_dim = values.get("embedding_length", 0) // heads or None
        dim = values.get("rope.dimension_count", head_dim)
        if not isinstance(dim, int) or not 2 <= dim <= limit("head_dim") or dim % 2:
            raise CheckpointError(
                f"the GGUF file {short(str(path))!r} must state an even number of rotated dims from 2 to "
                f"{limit('head_dim'):,} (rope.dimension_count, else attention.key_length), got {short(repr(dim))}"
            )
        keys = {name: value for name, value in values.items() if name.startswith("rope.") or name == "context_length"}
        tensors = {
            tensor.name: tuple(np.asarray(tensor.data, np.float64).ravel().tolist())
            for tensor in reader.tensors
            if tensor.name in _FACTORS
        }
        split = reader.get_field("split.count")
        parts = max(1, int(split.contents())) if split is not None else 1
        return FileRope(architecture, dim, keys, tensors, head_dim if isinstance(head_dim, int) else None, parts)
