"""The machine of `make gpu`: its device, driver, versions and two ceilings as JSON, or why torch has no device here.

    python benchmarks/gpu_machine.py [--device cuda]

The ceilings are the bandwidth of a large copy on the device and the speed of a large matrix product in the dtype that
models are run in: nothing that moves bytes or multiplies matrices is faster, so every other table is read beside them.
nvidia-smi answers for the driver, the power limit and the clocks. A value that cannot be found out is null.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from stock import usual_dtype
from timing import seconds_of

from rope_ext_hf.rotary import key_rotation

ROOT = Path(__file__).parent.parent
ASKED = {
    "power_limit_watts": "power.limit",
    "most_mhz": "clocks.max.sm",
    "most_memory_mhz": "clocks.max.memory",
}
"""Numbers of the record, and what nvidia-smi calls them."""

TINY = {"copied": 2**20, "size": 256}
"""Sizes of what measures the ceilings in a trial."""

WHEELS = "https://download.pytorch.org/whl/"


def ask_nvidia_smi(fields: str, device: str | None = None) -> list[str] | None:
    """Return what nvidia-smi says about the first device, or the named one; None if it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    one = [] if device is None else [f"--id={device}"]
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits", *one]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return [value.strip() for value in lines[0].split(",")] if done.returncode == 0 and lines else None


def number(answer: str) -> float | None:
    """An answer of nvidia-smi as a number; None where a device has no such value: "[N/A]"."""
    try:
        return float(answer)
    except ValueError:
        return None


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver of this machine; None: there is none."""
    answer = ask_nvidia_smi("driver_version")
    if answer is not None:
        return answer[0]
    loaded = Path("/sys/module/nvidia/version")
    return loaded.read_text(encoding="ascii").strip() if loaded.exists() else None


def has_amd_device() -> bool:
    """Return whether the driver of AMD's GPUs is loaded."""
    return Path("/dev/kfd").exists()


def why_torch_has_none() -> str:
    """Return torch's own reason for seeing no CUDA device; "" if it gives none."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
            return str(error).strip()
    return "; ".join(str(each.message) for each in seen)


def why_no_device(cuda: str | None, hip: str | None, driver: str | None, amd: bool, said: str) -> str:
    """A sentence that says why torch has no CUDA device, and the way out.

    Args:
        cuda, hip: the versions of CUDA and ROCm that torch is built for, None: without.
        driver: the NVIDIA driver of the machine, None: without.
        amd: the machine has the driver of an AMD GPU.
        said: what torch says.
    """
    other = f"install torch for it in .venv: pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}"
    if driver is not None and cuda is None:
        built = f"ROCm {hip}" if hip is not None else "CPUs alone"
        return f"the machine has an NVIDIA GPU (driver {driver}), but this torch is built for {built}; {other}"
    if driver is not None:
        return (
            f"the machine has an NVIDIA GPU, but its driver {driver} does not serve this torch, which is built for "
            f"CUDA {cuda} (torch says: {said or 'nothing'}). Update the driver, or {other} --index-url {WHEELS}cuNNN, "
            "where NNN is a CUDA version of the driver (the first lines of `nvidia-smi`) or an older one"
        )
    if amd and hip is None:
        built = f"CUDA {cuda}" if cuda is not None else "CPUs alone"
        return (
            f"the machine has an AMD GPU, but this torch is built for {built}; {other} --index-url {WHEELS}rocmN.N, "
            "where N.N is the installed version of ROCm or an older one"
        )
    if amd:
        return (
            f"the machine has an AMD GPU, but this torch, built for ROCm {hip}, cannot open it (torch says: "
            f"{said or 'nothing'}). The user must be in the groups render and video to open /dev/kfd"
        )
    return "the machine has no GPU that torch could use: neither the driver of NVIDIA nor that of AMD is loaded"


def why_it_cannot_run(device: str) -> str | None:
    """Why a device that torch sees runs nothing; None: it runs.

    A torch without kernels for an older device, and a device in a bad state, show at the first kernel.
    """
    try:
        float((torch.ones(1, device=device) + 1).cpu())
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        built = ", ".join(torch.cuda.get_arch_list())
        return f"the device (compute capability {capability}) runs nothing: {first}. This torch is built for {built}"
    return None


def git_commit() -> str | None:
    """The commit that runs, with "-dirty" where files were changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() or None


def installed(package: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rotated_by(device: str) -> str:
    """Return the name of the code that rotates keys and queries on a device; if Triton fails there, its reason."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        # As it stands there, where a simulated device replaces it.
        fused = key_rotation.can_fuse(torch.zeros(1, 1, 1, 2, device=device))  # type: ignore[attr-defined]
    reasons = "; ".join(str(each.message) for each in seen)
    return "one Triton kernel" if fused else f"torch's operators{f': {reasons}' if reasons else ''}"


def describe_machine(device: str) -> dict[str, Any]:
    """The device, the driver, and all versions that kernels depend on."""
    described: dict[str, Any] = {
        "commit": git_commit(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton": installed("triton"),
        "rotations": rotated_by(device),
    }
    if not device.startswith("cuda"):
        return described
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    answers = ask_nvidia_smi(",".join(ASKED.values()), None if uuid is None else f"GPU-{uuid}")
    return described | {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "gigabytes": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": nvidia_driver(),
        **dict(zip(ASKED, map(number, answers or [""] * len(ASKED)), strict=True)),
    }


def measure_ceilings(device: str, *, copied: int = 2**30, size: int = 8192) -> dict[str, float]:
    """Measure what a device can do at most.

    Args:
        copied: bytes of the tensor that is copied; far more than a cache holds.
        size: rows and columns of the matrices that are multiplied.

    Returns:
        "bandwidth", bytes read and written per second, and "product", floating-point operations per second, each the
        median of ten runs on random numbers (zeros are faster than any data).
    """
    dtype = getattr(torch, usual_dtype(device))
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return {
        "bandwidth": 2 * copied / seconds_of(lambda: target.copy_(source), device),
        "product": 2 * size**3 / seconds_of(lambda: one @ other, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    device, sizes = arguments.device, TINY if arguments.tiny else {}
    if (problem := why_it_cannot_run(device)) is not None:
        sys.exit(problem)
    print(json.dumps(describe_machine(device) | measure_ceilings(device, **sizes)))


if __name__ == "__main__":
    main()
