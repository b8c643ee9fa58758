"""Functions that read the rotary embedding of a GGUF file, and write a copy of the file with a RoPE method in it."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rope_ext_hf.bounds import limit
from rope_ext_hf.errors import CheckpointError, MethodError, short
from rope_ext_hf.files import atomic_file, check_destination
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.installing import install_command
from rope_ext_hf.tools.engines.gguf_rules import FileRope
from rope_ext_hf.tools.engines.serving_config import ServingConfig

_HEADER = struct.Struct("<4sIQQ")
_MAX_ENTRIES = 1_000_000  # of keys, and of tensors, in a header; the largest published files have some thousands
_MAX_READS = 20_000_000  # of numbers and strings in a header; a vocabulary of 256,000 tokens takes some 2 million
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
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


def _architecture(reader: Any, path: Path) -> str:
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
    with _opened(path) as reader:
        architecture = _architecture(reader, path)
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
        return FileRope(architecture, dim, keys, tensors, head_dim if isinstance(head_dim, int) else None)


def rewrite(source: Path, destination: Path, config: ServingConfig) -> None:
    """Copy a GGUF file, with the keys and tensors for RoPE changed to those of a serving config.

    After an error there is no copy, not even a part of one.

    Raises:
        CheckpointError: the file is damaged, or the config is for another architecture or number of rotated pairs.
        FileError: the destination exists, or cannot be written.
    """
    check_destination(destination, source)
    with _opened(source) as reader:
        architecture = _architecture(reader, source)
        planned = next((key.partition(".")[0] for key in config.gguf_keys), architecture)
        if planned != architecture:
            raise CheckpointError(
                f"the architecture of {short(str(source))!r} is {architecture!r}, but that of --model is {planned!r}; "
                "give the model that the file was made from"
            )
        rope = read_file_rope(source)
        for name, divisors in config.gguf_tensors.items():
            if 2 * len(divisors) != rope.dim:
                raise CheckpointError(
                    f"{name} has {len(divisors)} divisors, but the file has {rope.dim // 2} rotated pairs"
                )
        with atomic_file(destination) as part, foreign_errors(f"{str(destination)!r} cannot be written"):
            _write(reader, part, architecture, config)


def _write(reader: Any, part: Path, architecture: str, config: ServingConfig) -> None:
    import gguf

    writer = gguf.GGUFWriter(part, architecture, endianess=reader.endianess)
    alignment = reader.get_field("general.alignment")
    if alignment is not None:
        writer.data_alignment = int(alignment.contents())
    # all keys of the former scaling go; rope.scale_linear is what rope.scaling.factor was called before
    scaling = (f"{architecture}.rope.scaling.", f"{architecture}.rope.scale_linear")
    for name, field in reader.fields.items():
        replaced = name in config.gguf_keys or (name.startswith(scaling) and bool(config.gguf_keys))
        if name.startswith("GGUF.") or name == "general.architecture" or replaced:
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1] if len(field.types) > 1 else None)
    types = gguf.GGUFValueType
    for name, value in config.gguf_keys.items():
        if isinstance(value, str):
            kind = types.STRING
        elif name.endswith("context_length"):
            kind = types.UINT32
        elif math.isfinite(value):
            kind = types.FLOAT32
        else:
            raise CheckpointError(f"{name} must be a finite number, got {value}")
        writer.add_key_value(name, value, kind)
    replaced_tensors = {*config.gguf_tensors, *config.gguf_removed}
    kept = [tensor for tensor in reader.tensors if tensor.name not in replaced_tensors]
    added = {name: np.asarray(values, np.float32) for name, values in config.gguf_tensors.items()}
    for tensor in kept:
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
        )
    for name, values in added.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in (*(tensor.data for tensor in kept), *added.values()):
        writer.write_tensor_data(data)
    writer.close()
