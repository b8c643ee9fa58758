"""Do transformers 4 and mlx-lm run a patched folder as it was measured?

    nox -s other-engines
    python -m checks.other_engines --transformers ENV/bin/python --mlx-lm ENV/bin/python

Saves the bundled model, and small random models of the families in TRIED_FAMILIES, under every method; has both
programs, each in an environment of its own, compute logits over 600 tokens, and over 100 inside the original length,
and compares them with ours. mlx-lm also runs the unpatched folders with the keys that serving_config prints for it. The
result goes to docs/results/other-engines.json; the exit status is 1 where compare_engines, or serving_config,
states otherwise than what was measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import rope_ext_hf as rope
from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.engine_keys import TRIED_FAMILIES, compare_engines
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.engines.config_engine import other_engines
from tests.support.models import build, logits

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "other-engines"
LENGTHS = {"short": 100, "long": 600}  # tokens; the original lengths are 256 and 128
AGREE = 1e-3
"""The largest difference of two logits that counts as the same model, in standard deviations of the logits."""

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "ntk": ("ntk", {}),
    "yarn": ("yarn", {}),
    "yarn, an attention factor given": ("yarn", {"attention_factor": 1.1}),
    "by-parts": ("by-parts", {}),
    "llama3": ("llama3", {}),
    "mrrope": ("mrrope", {"beta_fast": 16.0}),
    "cope": ("cope", {}),
    "nope": ("nope", {"recalibrated": 1}),
    "longrope, one list": ("longrope", {"lists": (1, 1)}),
    "longrope, two lists": ("longrope", {"lists": (0, 1)}),
    "factors": ("factors", {"lists": (1,)}),
}


def patched(model: Any, variant: str, factor: float) -> Any:
    method, params = METHODS[variant]
    if "lists" in params:
        rotary = ModelRope.of_model(model).rotary
        plain, scaled = (
            rope.frequencies(m, rotary, **p).inv_freq for m, p in (("default", {}), ("ntk", {"factor": 4}))
        )
        lists = [[1.0] * len(plain), (plain / scaled).tolist()]
        chosen = [lists[index] for index in params["lists"]]
        if method == "factors":
            return rope.patch(model, method, factors=chosen[0], attention_factor=1.1)
        params = dict(zip(("short_factor", "long_factor"), chosen, strict=True))
    return rope.patch(model, method, factor=factor, **params)


def all_logits(model: Any, inputs: list[torch.Tensor]) -> Any:
    """(positions, vocabulary) of all inputs, one after the other."""
    return np.concatenate([logits(model, ids)[0].numpy() for ids in inputs])


def models() -> Iterator[tuple[str, Any, float]]:
    """Name, model and the factor to extend it by, so that 600 tokens are inside."""
    yield "reference", AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32).eval(), 8.0
    for name in sorted(TRIED_FAMILIES):
        yield name, build(name, max_position_embeddings=128, vocab_size=259), 8.0


def save_all() -> dict[str, dict[str, Any]]:
    """Every model under every method, and what is expected of each, by the name of its folder."""
    for part in ("models", "plain", "served"):  # beside the environments of both programs
        shutil.rmtree(WORK / part, ignore_errors=True)
        (WORK / part).mkdir(parents=True)
    draws = torch.Generator().manual_seed(0)
    inputs = [torch.randint(3, 255, (1, length), generator=draws) for length in LENGTHS.values()]
    for name, ids in zip(LENGTHS, inputs, strict=True):
        np.save(WORK / "models" / f"{name}.npy", ids.numpy())
        np.save(WORK / "served" / f"{name}.npy", ids.numpy())
    saved: dict[str, dict[str, Any]] = {}
    for name, model, factor in models():
        plain = all_logits(model, inputs)
        model.save_pretrained(WORK / "plain" / name)
        for variant in METHODS:
            patched(model, variant, factor)
            ours, folder = all_logits(model, inputs), WORK / "models" / f"{name}, {variant}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                model.save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            spread = float(ours.std())
            saved[folder.name] = {
                "model": name,
                "method": variant,
                "ours": ours,
                "spread": spread,
                "plain": float(np.abs(ours - plain).max()) / spread,
                "right": compare_engines(config).agreeing,
                "wrong": compare_engines(config).disagreeing,
                "served": write_served(model, WORK / "plain" / name, WORK / "served" / folder.name),
            }
            rope.unpatch(model)
    return saved


def write_served(model: Any, plain: Path, folder: Path) -> str:
    """Write a copy of an unpatched folder with the keys that serving_config prints for a patched model.

    Returns:
        The encoding, or "refused".
    """
    try:
        config = serving.serving_config(model, "mlx")
    except ServingError:
        return "refused"
    shutil.copytree(plain, folder)
    read = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(read | config.config_keys), encoding="utf-8")
    return config.encoding


def compare(program: str, saved: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for every folder, and the folders that compare_engines states otherwise."""
    package = {"transformers": "transformers", "mlx_lm": "mlx-lm"}[program]
    engine = next(each.label for each in other_engines() if each.label.startswith(package))
    rows, contradictions = [], []
    for folder, expected in saved.items():
        file = WORK / "models" / f"{folder}.{program}.npy"
        row = {"engine": engine, "model": expected["model"], "method": expected["method"], "without": expected["plain"]}
        if file.exists():
            row["difference"] = float(np.abs(np.load(file) - expected["ours"]).max()) / expected["spread"]
            stated = {True: "right", False: "wrong"}[row["difference"] <= AGREE]
        else:
            row["error"] = file.with_suffix(".txt").read_text(encoding="utf-8")
            stated = "refused"
        if stated == "refused" or engine not in expected[stated]:
            contradictions.append(f"{engine}: {folder} is {stated}: {row}")
        rows.append(row)
    return rows, contradictions


def served_rows(saved: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for every folder with the keys of serving_config, and those that mlx-lm runs otherwise."""
    rows, contradictions = [], []
    for folder, expected in saved.items():
        row = {"model": expected["model"], "method": expected["method"], "by": expected["served"]}
        file = WORK / "served" / f"{folder}.mlx_lm.npy"
        if expected["served"] != "refused":
            there = np.load(file) if file.exists() else np.full_like(expected["ours"], np.inf)
            row["difference"] = float(np.abs(there - expected["ours"]).max()) / expected["spread"]
            if not row["difference"] <= AGREE:
                contradictions.append(f"mlx-lm with the keys of serving_config: {row}")
        rows.append(row)
    return rows, contradictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", required=True, metavar="PYTHON")
    parser.add_argument("--mlx-lm", required=True, metavar="PYTHON")
    given = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    saved = save_all()
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    rows, contradictions = [], []
    for program, python in (("transformers", given.transformers), ("mlx_lm", given.mlx_lm)):
        worker = [python, str(ROOT / "checks" / "engine_logits.py"), program, str(WORK / "models")]
        done = subprocess.run(worker, capture_output=True, text=True, check=True)
        name = f"{program.replace('_', '-')} {done.stdout.split()[-1]}"
        more_rows, more = compare(program, saved)
        if not name.startswith(more_rows[0]["engine"]):
            more.append(f"{name} was run; rope_ext_hf.tools.engines names {more_rows[0]['engine']}")
        rows += [row | {"engine": name} for row in more_rows]
        contradictions += more
    subprocess.run([given.mlx_lm, worker[1], "mlx_lm", str(WORK / "served")], capture_output=True, check=True)
    served, more = served_rows(saved)
    contradictions += more
    command = "nox -s other-engines"
    result = {"command": command, "versions": versions, "lengths": LENGTHS, "agree": AGREE, "rows": [], "served": []}
    text = json.dumps(result, indent=1)
    for key, lines in (("rows", rows), ("served", served)):
        text = text.replace(f'"{key}": []', f'"{key}": [\n  ' + ",\n  ".join(map(json.dumps, lines)) + "\n ]")
    (ROOT / "docs" / "results" / "other-engines.json").write_text(text + "\n", encoding="utf-8")
    print("\n".join(contradictions) or f"{len(rows)} folders read as compare_engines states")
    sys.exit(bool(contradictions))


if __name__ == "__main__":
    main()
