"""Run `rope-ext demo` as a newcomer does, and record what it prints and its picture, for README.md and the pages.

    python benchmarks/first_run.py

It writes docs/results/first-run.json and docs/demo.png.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import with_machine

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        command = [sys.executable, "-m", "rope_ext_hf", "demo"]
        environment = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        result = {"command": "rope-ext demo", "seconds": round(time.monotonic() - start), "text": run.stdout}
        shutil.copy(Path(folder) / "rope-ext-results" / "demo.png", DOCS / "demo.png")
    file = DOCS / "results" / "first-run.json"
    file.write_text(json.dumps(with_machine(result, "cpu"), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
