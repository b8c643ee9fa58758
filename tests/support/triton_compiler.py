"""Triton's compiler and JIT without a GPU.

    with WithoutDevice("sm_90", kernel) as device:
        launch(torch.zeros(4))  # a function that launches `kernel`, on tensors of the CPU
    device.launches, [resources(variant) for variant in device.variants]

The kernel is compiled for the target as on a machine that has it, down to machine code. Nothing is launched: the kernel
writes no result.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

TRITON_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Budgets were measured with 3.7.1, and anew where the compiler of 3.9.0 takes more."""

TARGETS = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (75, 80, 86, 89, 90, 100, 120)} | {
    name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")
}
"""Turing; Ampere in servers and desktops; Ada; Hopper; Blackwell in servers and desktops; MI200; MI300."""

SHARED_KILOBYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""The most shared memory of a program, in units of 1,024 bytes (CUDA C++ Programming Guide, compute capabilities).

64 for targets that are not listed.
"""

_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_AMD_BITS = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16} | {
    "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128
}  # fmt: skip


class WithoutDevice(DriverBase):  # type: ignore[misc, unused-ignore]
    """A driver of Triton for a device that is not there, in force while inside.

    Args:
        target: a name of TARGETS.
        kernel: the kernel whose variants are collected.
        others: further kernels that are launched.

    Attributes:
        launches: how many there would have been, of any kernel.
        variants: the kernel as compiled, once for each specialisation to its arguments; filled in at the end.
    """

    def __init__(self, target: str, kernel: Any, *others: Any) -> None:
        self.target, self.kernel, self.launches = TARGETS[target], kernel, 0
        self.kernels = kernel, *others
        self.shared = SHARED_KILOBYTES.get(target, 64)
        self.variants: list[Any] = []
        self.utils, self.launcher_cls = self, self._launcher
        self.get_current_device, self.get_current_stream = lambda: 0, lambda _: 0

    def __enter__(self) -> WithoutDevice:
        for kernel in self.kernels:
            kernel.device_caches.clear()  # made for another driver
        triton.compiler.compiler.max_shared_mem.cache_clear()
        triton.runtime.driver.set_active(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.variants = _compiled(self.kernel)
        for kernel in self.kernels:
            for variant in _compiled(kernel):
                variant.module = None  # else Triton 3.9 has a driver unload it later, when there is none
            kernel.device_caches.clear()
        triton.runtime.driver._active = None  # `reset_active` looks for a device at once

    def _launcher(self, *_: Any) -> Any:
        def launch(*_: Any) -> None:
            self.launches += 1

        return launch

    # --- what Triton asks a driver for

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared * 1024, "warpSize": self.target.warp_size}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # handles of module and function, registers, spills (see `resources`), threads

    def unload_module(self, _: Any) -> None: ...

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> None: ...


def _compiled(kernel: Any) -> list[Any]:
    """What Triton has compiled of a kernel."""
    return [variant for made, *_ in kernel.device_caches.values() for variant in made.values()]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a device.

    Attributes:
        registers: vector registers of 32 bits per thread.
        spilled: bytes per thread that lie in memory for want of registers.
        shared: bytes of shared memory per program.
        loads, stores: widths in bits of the instructions that read and write global memory.
    """

    registers: int
    spilled: int
    shared: int
    loads: frozenset[int]
    stores: frozenset[int]


def resources(variant: Any) -> Resources:
    """What a compiled kernel takes, read from its machine code."""
    read = _read_amd if "amdgcn" in variant.asm else _read_nvidia
    registers, spilled, loads, stores = read(variant.asm)
    assert loads, "this reader does not know how the target reads memory"
    assert stores, "this reader does not know how the target writes memory"
    return Resources(registers, spilled, variant.metadata.shared, loads, stores)


def _read_nvidia(asm: Any) -> tuple[int, int, frozenset[int], frozenset[int]]:
    usage, code = _nvidia_tool("cuobjdump", "--dump-resource-usage", asm), _nvidia_tool("nvdisasm", "-c", asm)
    registers, stack, local = (int(_only(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK", "LOCAL"))
    loads, stores = (
        frozenset(
            # The width is a modifier of its own, as in LDG.E.U16 and LDG.E.128.CONSTANT; without one it is 32.
            next((int(m.lstrip("US")) for m in modifiers.split(".") if re.fullmatch(r"[US]?(8|16|64|128|256)", m)), 32)
            for modifiers in re.findall(rf"\b{instruction}\.([.\w]+)", code)
        )
        for instruction in ("LDG", "STG")
    )
    return registers, stack + local, loads, stores


def spills_in_products(variant: Any) -> int:
    """Count the instructions that read or write spilled registers, in the innermost loops that multiply matrices."""
    lines = _nvidia_tool("nvdisasm", "-c", variant.asm).splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\s*(\.L\S+):", line))}
    jumps = ((at, re.search(r"\bBRA\b.*\((\.L\S+)\)", line)) for at, line in enumerate(lines))
    loops = [(labels[jump[1]], at) for at, jump in jumps if jump is not None and labels[jump[1]] < at]
    innermost = ["\n".join(lines[a:b]) for a, b in loops if not any(a <= c and d < b for c, d in loops)]
    products = [code for code in innermost if re.search(r"\b(HMMA|HGMMA|UTC[A-Z]*MMA)\b", code)]
    assert products, "this reader does not know how the target multiplies matrices"
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", code)) for code in products)


def _nvidia_tool(tool: str, option: str, asm: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        return subprocess.run(
            [_NVIDIA_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def _read_amd(asm: Any) -> tuple[int, int, frozenset[int], frozenset[int]]:
    code = asm["amdgcn"]
    registers, spilled = (
        int(_only(rf"\.{name}:\s*(\d+)", code)) for name in ("vgpr_count", "private_segment_fixed_size")
    )
    loads, stores = (
        frozenset(
            _AMD_BITS[width] for width in re.findall(rf"\b(?:global|buffer|flat)_{what}_(dword(?:x\d)?|[a-z]+)", code)
        )
        for what in ("load", "store")
    )
    return registers, spilled, loads, stores


def _only(pattern: str, text: str) -> str:
    """What one place of a text holds.

    Raises:
        ValueError: several places hold different things, or there is none.
    """
    (held,) = set(re.findall(pattern, text))
    return str(held)
