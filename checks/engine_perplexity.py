"""Is the perplexity by a real vLLM or SGLang that of transformers?

    nox -s vllm sglang
    python -m checks.engine_perplexity vllm|sglang --python ENV/bin/python [--dtypes float32]

ENV has the engine, and this package beside it. There `rope-ext ppl` measures the bundled model with and without
`--engine`, and engine_batches.py reads texts together and one at a time. The result goes to
docs/results/ENGINE_perplexity.json, and SGLang's answers to tests/tools/servers/recorded/; the exit status is 1 where
the losses differ. It goes on where it was stopped; `rm -r build/ENGINE-perplexity` to begin anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rope_ext_hf.runs.conclusions.labels import label

ROOT = Path(__file__).parent.parent
ANSWERS = ROOT / "tests" / "tools" / "servers" / "recorded"
OPTIONS = ("--method", "yarn", "--factor", "4", "--lengths", "256,1024", "--max-spans", "8")
AGREE = {"float32": 1e-4, "bfloat16": 0.02}
"""The largest difference of two losses in nats per token that counts as equal."""


def run(python: Path, out: Path, *arguments: str) -> str:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    command = [str(python), *arguments]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def measure(python: Path, out: Path, *options: str) -> Any:
    """Return what `rope-ext ppl --json` prints for the bundled model."""
    command = ("-m", "rope_ext_hf", "ppl", "reference", *OPTIONS, *options, "--out", str(out), "--json")
    return json.loads(run(python, out, *command))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--dtypes", default=",".join(AGREE))
    arguments = parser.parse_args()
    python, engine = arguments.python.absolute(), arguments.engine
    out = ROOT / "build" / f"{engine}-perplexity"
    out.mkdir(parents=True, exist_ok=True)
    rows, versions = list[dict[str, Any]](), dict[str, str]()
    for dtype in arguments.dtypes.split(","):
        served, here = (measure(python, out, "--dtype", dtype, *more) for more in (("--engine", engine), ()))
        name, version = served["provenance"]["engine"].split()
        versions = served["provenance"]["versions"] | {name: version}
        for one, other in zip(served["results"], here["results"], strict=True):
            assert (one["method"], one["length"]) == (other["method"], other["length"])
            row = {"dtype": dtype, "method": label(one["method"]), "length": one["length"]}
            rows.append(row | {engine: one["perplexity"], "transformers": other["perplexity"]})
            rows[-1]["difference"] = abs(one["loss"] - other["loss"])
            print(rows[-1], flush=True)
    command_line = f"rope-ext ppl reference {' '.join(OPTIONS)} --engine {engine}"
    result: dict[str, Any] = {"command": command_line, "versions": versions, "agree": AGREE, "rows": rows}
    write(engine, result)
    command = ["-P", str(ROOT / "checks" / "engine_batches.py"), engine, str(out / "batches.json")]
    if engine == "sglang":
        command += ["--answers", str(ANSWERS / "sglang.json")]
    run(python, out, *command)
    result["batches"] = json.loads((out / "batches.json").read_text())
    print(result["batches"])
    write(engine, result)
    differ = any(not row["difference"] <= AGREE[row["dtype"]] for row in rows)
    sys.exit(1 if differ or not result["batches"]["largest_difference"] <= AGREE["float32"] else 0)


def write(engine: str, result: dict[str, Any]) -> None:
    (ROOT / "docs" / "results" / f"{engine}_perplexity.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
