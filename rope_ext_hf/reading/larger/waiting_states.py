"""Places where the hidden states of a text wait between two layers, if it is read layer by layer (`layer_reader`).

They wait on the device if they fit there. Else they wait in main memory, and else in a memory-mapped file; the states
of one chunk at a time are then moved to the device, through a layer, and back. Where they wait changes no number.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Literal

import torch
from torch import Tensor

from rope_ext_hf.files.whole import disk_errors, disk_folder

Place = Literal["device", "memory", "disk"]

_MEASURED_BYTES = 2**26
_ADVICE = "set TMPDIR to a folder on a larger disk, or give shorter lengths"


class WaitingStates:
    """Hidden states of the tokens of one text, by chunks.

    Args:
        place: "device": on the device that computed them; "memory": in main memory, pinned if the device is CUDA;
            "disk": in a file without a name in a temporary folder, which the system removes with the process at the
            latest.
        tokens: the number of tokens in the text.

    Raises:
        FileError: by `put`, if the disk has too little room.
    """

    def __init__(self, place: Place, tokens: int) -> None:
        self._place, self._tokens = place, tokens
        self._chunks: dict[int, Tensor] = {}
        self._devices: dict[int, torch.device] = {}
        self._whole = torch.empty(0)  # the memory that the chunks of a text share, unless each has its own

    def put(self, start: int, states: Tensor) -> None:
        """Keep the hidden states of a chunk, (1, tokens, ...); `start` is the position of its first token."""
        kept = self._chunks.get(start)
        moved = self._place == "device" and kept is not None and kept.device != states.device
        if kept is None or moved or kept.dtype != states.dtype:
            kept = self._chunks[start] = self._room(start, states)
        kept.copy_(states, non_blocking=self._is_pinned(states.device))
        self._devices[start] = states.device

    def take(self, start: int) -> Tensor:
        """Return the hidden states of the chunk that begins at this position, on the device that they came from."""
        device = self._devices[start]
        return self._chunks[start].to(device, non_blocking=self._is_pinned(device))

    def _is_pinned(self, device: torch.device) -> bool:
        """Return whether states from a device wait in pinned memory.

        The host need not wait for copies then, because the stream of the device keeps their order.
        """
        return self._place == "memory" and device.type == "cuda"

    def _room(self, start: int, states: Tensor) -> Tensor:
        """Return memory for the states of a chunk."""
        if self._place == "memory":
            # A tensor for each chunk: torch keeps pinned memory for tensors of the same size, and rounds a large one
            # up to a power of two.
            return torch.empty(states.shape, dtype=states.dtype, pin_memory=self._is_pinned(states.device))
        on_disk = self._place == "disk"
        device = torch.device("cpu") if on_disk else states.device
        if (self._whole.dtype, self._whole.device) != (states.dtype, device) or not self._whole.numel():
            rows, _, *sizes = states.shape
            shape = (rows, self._tokens, *sizes)
            self._whole = _in_file(shape, states.dtype) if on_disk else states.new_empty(shape)
        return self._whole[:, start : start + states.shape[1]]


def _in_file(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a memory-mapped file without a name, which is gone when the tensor or the process is."""
    size = torch.Size(shape).numel() * dtype.itemsize
    folder = disk_folder()
    with disk_errors(folder, _ADVICE), tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a disk that is full while a mapped page is written ends the process
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(shape)


def measure_moving(place: Place, device: torch.device) -> float:
    """Measure how many bytes a second go from a device to a place and back, each way counted.

    Data on a disk is forced out of main memory before it is read again, because states that wait on a disk do not fit
    there. Some systems offer no way to do so; then reading is measured faster than it is.
    """
    if place == "device" or (place == "memory" and device.type == "cpu"):
        return float("inf")
    if place == "memory":
        states = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device)
        kept = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        kept.copy_(states)  # the first copy takes longer
        started = time.perf_counter()
        kept.copy_(states)
        states.copy_(kept)
        states[0].item()  # waits for the device
    else:
        content = bytearray(os.urandom(_MEASURED_BYTES))  # which no file system compresses
        with disk_errors(disk_folder(), _ADVICE), tempfile.TemporaryFile(dir=disk_folder(), buffering=0) as file:
            started = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, _MEASURED_BYTES, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            file.readinto(content)
    return 2 * _MEASURED_BYTES / (time.perf_counter() - started)
