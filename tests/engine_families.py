"""Do llama.cpp and mlx-lm compute what rope_ext_hf.engines says they do, for every family that their tables hold?

    make test-engine-families
    python -m tests.engine_families --llama-cpp PYTHON --source FOLDER --mlx-lm PYTHON [--only llama,qwen3] [--again]

FOLDER holds the sources of llama.cpp, whose own converter writes the GGUF file of a small random model of each family;
the file, or flags, are then changed as serving_config prints it, and so are the folders that mlx-lm reads. Logits over
the context length and over four times that are compared with those of the patched model. The result goes to
docs/results/engine-families.json; the exit status is 1 where an engine computes something else, or where a table says
of a family that it was run and it is not in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

import rope_ext_hf as rope
from rope_ext_hf.engines.base import ServingConfig, find_engine
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.serving.gguf_files import rewrite
from rope_ext_hf.serving.target import make_target, open_model
from tests.llama_cpp_engine import read_flags
from tests.support import every_model
from tests.support.models import ROTATING, build_known, logits, without_window

ROOT = Path(__file__).parent.parent
WORK = Path(os.environ.get("ROPE_EXT_FAMILIES", ROOT / "build" / "engine-families"))
RESULT = ROOT / "docs" / "results" / "engine-families.json"
AGREE = 1e-2
"""The largest difference of two logits that counts as the same model, in standard deviations of the logits.

Approximations and epsilons of the engines move some by 6e-3 without any method.
"""
CONTEXT, TIMES = 64, (1, 4)
METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "as published": (None, {}),
    "linear": ("linear", {"factor": 4.0}),
    "ntk": ("ntk", {"factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}),
    "llama3": ("llama3", {"factor": 4.0}),
}
WHOLE = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
    "mistral4": "mistral4",
}
"""Text models that come inside another one: the model type of that."""
INSIDE = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Text models that mlx-lm runs inside another one alone: the model type of that."""
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bitnet": {"tie_word_embeddings": True},
    "phi": {"qk_layernorm": False, "num_key_value_heads": 4},
    "stablelm": {"qk_layernorm": False},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 1},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "cohere": {"use_qk_norm": False},
    **{name: {"num_key_value_heads": 4} for name in ("dots1", "olmoe")},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "dense"]},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "qwen3_moe": {"norm_topk_prob": True},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
}
"""Settings with which a family is as published models have it."""
_UNTIED = {"text_config": {"tie_word_embeddings": False}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.25},
    "cohere2": {"rotary_pct": 1.0},
    "falcon_h1": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen2_vl_text": _UNTIED,
    "qwen2_5_vl_text": _UNTIED,
    "qwen3_vl_text": _UNTIED,
    "qwen3_vl_moe_text": {"text_config": {"tie_word_embeddings": False, "num_experts": 4, "head_dim": 16}},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "exaone4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16},
    "lfm2": {"block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96, 96], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "minimax_m2": {"rotary_dim": 16, "shared_intermediate_size": 0, "use_qk_norm": True, "scoring_func": "sigmoid"},
}
"""Keys that published configs have and transformers 5 does not write."""


def build(family: str) -> Any:
    """A small random model of a family, for `CONTEXT` tokens."""
    if family in WHOLE:
        entry = next(each for each in every_model.entries() if each.model_type == WHOLE[family])
        sizes: dict[str, Any] = {"max_position_embeddings": CONTEXT}
        return every_model.build(entry, **({"text_config": sizes} if family.endswith("_text") else sizes))
    return build_known(family, **without_window(family) | SETTINGS.get(family, {}))


def merged(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other keys, those of its text config too."""
    inside = {"text_config": {**config["text_config"], **keys["text_config"]}} if "text_config" in keys else {}
    return {**config, **keys, **inside}


def save(model: Any, folder: Path, family: str) -> None:
    """Save a model as published ones are saved."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = merged(json.loads(file.read_text(encoding="utf-8")), PUBLISHED.get(family, {}))
    file.write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {str(index): index for index in range(model.config.get_text_config().vocab_size)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def run_all(python: str, worker: list[str], jobs: list[Any], folder: Path) -> list[tuple[Any, str]]:
    """The logits of each job, or None with the complaint; a job that ends its process does not end the others."""
    outs = [Path(job["out"] if isinstance(job, dict) else job[2]) for job in jobs]
    results: list[tuple[Any, str]] = []
    while len(results) < len(jobs):
        file = folder / "jobs.json"
        file.write_text(json.dumps(jobs[len(results) :]), encoding="utf-8")
        command, environment = [python, *worker, str(file)], os.environ | {"GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        said = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line or "ASSERT" in line]
        for out in outs[len(results) :]:
            text = out.with_suffix(".txt")
            if out.exists():
                results.append((np.load(out), ""))
            elif text.exists():
                results.append((None, text.read_text(encoding="utf-8")[:200].replace(str(WORK), "")))
            else:  # it ended the process
                results.append((None, (said or ["no output"])[-1][:200].replace(str(WORK), "")))
                break
    return results


@dataclass(frozen=True)
class Case:
    """One family under one method in one engine.

    Attributes:
        row: what is known of it; `difference` and `without` are filled in later.
        config: how it is served; None: it is refused.
    """

    row: dict[str, Any]
    config: ServingConfig | None

    @property
    def folder(self) -> Path:
        return WORK / str(self.row["family"])

    @property
    def times(self) -> tuple[int, ...]:
        return TIMES if self.row["method"] != "as published" else TIMES[:1]

    def out(self, times: int) -> Path:
        return self.folder / f"{self.row['engine']}, {self.row['method']}, {times}.npy"

    def expected(self, times: int, method: str | None = None) -> Any:
        return np.load(self.folder / f"{method or self.row['method']}, {times}.npy")


def prepare(family: str, engines: Sequence[str]) -> Iterator[Case]:
    """Save a model of the family, and what each engine is expected to compute of it."""
    folder = WORK / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = build(family)
    save(model, folder / "hf", family)
    size = model.config.get_text_config().vocab_size
    draws = torch.Generator().manual_seed(0)
    ids = {times: torch.randint(3, size, (1, times * CONTEXT), generator=draws) for times in TIMES}
    for times, each in ids.items():
        np.save(folder / f"ids, {times}.npy", each.numpy())
    for name, (method, params) in METHODS.items():
        try:
            target = make_target(open_model(model), method, **params)
            if method is not None:
                rope.patch(model, method, **params)
        except RopeExtError as error:
            reason = {"family": family, "method": name, "refused": str(error)}
            yield from (Case({"engine": engine} | reason, None) for engine in engines)
            continue
        for times, each in ids.items():
            np.save(folder / f"{name}, {times}.npy", logits(model, each)[0].numpy())
        if method is not None:
            rope.unpatch(model)
        for engine in engines:
            row: dict[str, Any] = {"engine": engine, "family": family, "method": name}
            try:
                config = find_engine(engine).config_for(target)
            except ServingError as error:
                yield Case(row | {"refused": str(error)}, None)
                continue
            if engine != "llama.cpp" or not config.gguf_keys:  # else as the file of "gguf"
                yield Case(row | {"encoding": config.encoding, "difference": {}, "without": 0.0}, config)


def convert(families: Sequence[str], source: Path) -> None:
    """Write a GGUF file of each family."""
    jobs = WORK / "conversions.json"
    jobs.write_text(json.dumps([[str(WORK / each / "hf"), str(WORK / each / "model.gguf")] for each in families]))
    command = [sys.executable, str(ROOT / "tests" / "llama_cpp_convert.py"), str(source), str(jobs)]
    subprocess.run(command, capture_output=True, check=True)


def llama_cpp_job(case: Case, times: int) -> Any:
    """What tests/llama_cpp_logits.py is asked for."""
    file, out = case.folder / "model.gguf", case.out(times)
    job: dict[str, Any] = {"context": {}, "overrides": {}}
    if case.config is not None and case.config.gguf_keys:
        changed = out.with_suffix(".gguf")
        rewrite(file, changed, case.config)
        file = changed
    elif case.config is not None:
        job["context"], job["overrides"] = read_flags(case.config.command)
    ids = str(case.folder / f"ids, {times}.npy")
    return job | {"file": str(file), "ids": ids, "out": str(out), "positions": times * CONTEXT}


def mlx_job(case: Case, times: int) -> Any:
    """What tests/engine_logits.py is asked for."""
    out = case.out(times)
    served = out.with_suffix("")
    shutil.copytree(case.folder / "hf", served)
    file = served / "config.json"
    read = json.loads(file.read_text(encoding="utf-8"))
    read = merged(read, {} if case.config is None else case.config.config_keys)
    if inside := INSIDE.get(str(case.row["family"])):
        read = {"model_type": inside, "text_config": read}
    file.write_text(json.dumps(read), encoding="utf-8")
    return [str(served), str(case.folder / f"ids, {times}.npy"), str(out)]


JOBS: dict[str, tuple[Callable[[Case, int], Any], list[str]]] = {
    "gguf": (llama_cpp_job, ["llama_cpp_logits.py"]),
    "llama.cpp": (llama_cpp_job, ["llama_cpp_logits.py"]),
    "mlx": (mlx_job, ["engine_logits.py", "mlx_lm"]),
}


def measure(engine: str, python: str, cases: Sequence[Case]) -> None:
    """Fill the rows of the cases of one engine."""
    make, (script, *words) = JOBS[engine]
    asked: list[tuple[Case, int]] = []
    jobs: list[Any] = []
    for case in cases:
        failed = case.folder / "model.txt"
        if case.config is None or (engine != "mlx" and failed.exists()):
            case.row.update({} if case.config is None else {"not run": f"conversion: {failed.read_text('utf-8')}"})
            continue
        try:
            made = [make(case, times) for times in case.times]
        except RopeExtError as error:  # a file that states other sizes
            case.row["not run"] = str(error)
            continue
        asked += [(case, times) for times in case.times]
        jobs += made
    done = run_all(python, [str(ROOT / "tests" / script), *words], jobs, WORK)
    for (case, times), (there, complaint) in zip(asked, done, strict=True):
        if there is None:
            case.row["not run"] = complaint
            continue
        wanted, plain = case.expected(times), case.expected(times, "as published")
        far, moved = (float(np.abs(each - wanted).max() / wanted.std()) for each in (there, plain))
        case.row["difference"][str(times)] = far
        case.row["without"] = max(case.row["without"], moved)
    loaded = {
        case.row["family"] for case in cases if case.row["method"] == "as published" and case.row.get("difference")
    }
    for row in (case.row for case in cases if "not run" in case.row):
        del row["difference"], row["without"]
        if row["family"] in loaded:  # the model runs there, and with this method it does not
            row["error"] = row.pop("not run")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-cpp", required=True, metavar="PYTHON")
    parser.add_argument("--source", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--mlx-lm", required=True, metavar="PYTHON")
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--engines", default="gguf,llama.cpp,mlx")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pythons = {"gguf": given.llama_cpp, "llama.cpp": given.llama_cpp, "mlx": given.mlx_lm}
    engines = given.engines.split(",")
    held = {name: set(find_engine(name).table["families"]) for name in engines}
    families = given.only.split(",") if given.only else sorted(set.union(*held.values()) & {*ROTATING, *WHOLE})
    before = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    rows = [row for row in before if row["family"] not in families or row["engine"] not in engines]
    cases: list[Case] = []
    for family in families:
        try:
            cases += prepare(family, [name for name in engines if family in held[name]])
        except Exception as error:  # one family must not end the run
            cases.append(Case({"engine": "", "family": family, "method": "", "error": repr(error)}, None))
            print(family, repr(error), flush=True)
    if "gguf" in engines:
        convert([family for family in families if family in held["gguf"]], given.source)
    for engine in engines:
        own = [case for case in cases if case.row["engine"] == engine]
        measure(engine, pythons[engine], own)
        rows += [case.row for case in own]
    wrong = [case.row for case in cases if not case.row["engine"]]
    wrong += [row for row in rows if "error" in row or max(row.get("difference", {"": 0.0}).values()) > AGREE]
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers", "gguf")}
    versions |= {name: find_engine(name).version for name in ("llama.cpp", "mlx")}
    content = {"command": "make test-engine-families", "versions": versions, "agree": AGREE, "rows": []}
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=lambda row: (row["engine"], row["family"])))
    text = json.dumps(content, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    RESULT.write_text(text + "\n", encoding="utf-8")
    print(*(["what follows differs", *wrong] if wrong else [f"{len(rows)} configurations agree"]), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
