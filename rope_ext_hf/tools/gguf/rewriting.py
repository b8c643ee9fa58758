"""Functions that write a copy of a GGUF file with a RoPE method in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.files.whole import atomic_file, check_destination, foreign_errors
from rope_ext_hf.tools.gguf.headers import architecture_of, open_gguf, read_file_rope


class _Changes(Protocol):
    """The keys and tensors for RoPE that a copy of a GGUF file gets; `ServingConfig` has them."""

    @property
    def gguf_keys(self) -> Mapping[str, Any]: ...

    @property
    def gguf_tensors(self) -> Mapping[str, Sequence[float]]: ...

    @property
    def gguf_removed(self) -> Sequence[str]: ...


def rewrite(source: Path, destination: Path, config: _Changes) -> None:
    """Copy a GGUF file, with the keys and tensors for RoPE changed to those of a serving config.

    After an error there is no copy, not even a part of one.

    Raises:
        CheckpointError: the file is damaged, or the config is for another architecture or number of rotated pairs.
        FileError: the destination exists, or cannot be written.
    """
    check_destination(destination, source)
    with open_gguf(source) as reader:
        architecture = architecture_of(reader, source)
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


def _write(reader: Any, part: Path, architecture: str, config: _Changes) -> None:
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
