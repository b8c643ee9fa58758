"""The logits of saved models by another program, run in an environment of its own by checks/other_engines.py.

    python checks/engine_logits.py transformers FOLDER     # or: mlx_lm

FOLDER holds token ids, `short.npy` and `long.npy` (1, length), and one folder for every model; beside each of those
appears NAME.PROGRAM.npy, the logits of both inputs one after the other, (positions, vocabulary) float32, or
NAME.PROGRAM.txt with the error. FOLDER may be a JSON file with a list of jobs instead: the folder of a model, the file
of its token ids, and the file for the logits.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def with_transformers(folder: Path, inputs: list[Any]) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(ids), use_cache=False).logits[0].numpy() for ids in inputs]


def with_mlx_lm(folder: Path, inputs: list[Any]) -> list[Any]:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return [np.array(model(mx.array(ids))[0].astype(mx.float32)) for ids in inputs]


if __name__ == "__main__":
    program, root = sys.argv[1], Path(sys.argv[2])
    run = {"transformers": with_transformers, "mlx_lm": with_mlx_lm}[program]
    if root.suffix == ".json":
        jobs = [(Path(job[0]), [np.load(job[1])], Path(job[2])) for job in json.loads(root.read_text(encoding="utf-8"))]
    else:
        inputs = [np.load(root / "short.npy"), np.load(root / "long.npy")]
        folders = sorted(each for each in root.iterdir() if each.is_dir())
        jobs = [(folder, inputs, root / f"{folder.name}.{program}.npy") for folder in folders]
    for folder, inputs, out in jobs:
        try:
            np.save(out, np.concatenate(run(folder, inputs)))
        except Exception as error:
            out.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    print(version(program))
