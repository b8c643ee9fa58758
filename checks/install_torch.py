"""Install torch with pip into the environment of the Python that runs this script.

    .venv/bin/python checks/install_torch.py -c constraints.txt torch

The arguments are those of `pip install`. On Linux, PyPI's torch brings several gigabytes of CUDA along. Without an
NVIDIA GPU, this script therefore takes the CPU build, and PyPI's torch only if the address of the CPU builds does not
answer.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def has_nvidia_gpu() -> bool:
    return bool(shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*")))


def main() -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if sys.platform == "linux" and not has_nvidia_gpu():
        # Without the packages that torch needs: not all of the pinned ones are at this address.
        at_once = ["--timeout", "5", "--retries", "0", "--no-deps", "--index-url", CPU_BUILDS]
        subprocess.run([*install, *at_once, *sys.argv[1:]], stderr=subprocess.DEVNULL)
    sys.exit(subprocess.run([*install, *sys.argv[1:]]).returncode)


if __name__ == "__main__":
    main()
