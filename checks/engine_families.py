"""Do llama.cpp and mlx-lm compute what rope_ext_hf.tools.engines says they do, for every family that their tables hold?

    nox -s engine-families
    python -m checks.engine_families --llama-cpp PYTHON --source FOLDER --mlx-lm PYTHON [--only llama,qwen3] [--again]

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import rope_ext_hf as rope
from checks.llama_cpp_engine import read_flags
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.gguf.rewriting import rewrite
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support import every_model
from tests.support.models import ROTATING, build_known, logits, without_window

ROOT = Path(__file__).parent.parent
WORK = Path(os.environ.get("ROPE_EXT_FAMILIES", ROOT / "build" / "engine-families"))
RESULT = ROOT / "docs" / "results" / "engine-families.json"
AGREE = 2e-4
"""The largest difference of two logits that counts as the same model, in standard deviations of the logits.

It holds of the model here as it is, or where `OWN_WAYS` has the family, with the engine's own way imitated.
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
_INDEXER = {"index_head_dim": 128, "index_n_heads": 16, "index_topk": 16}
"""Of few heads many keys have the score 0, and the choice among these is each program's own."""
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_INTERLEAVED = {
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"rms_norm_eps": 1e-6} for name in ("qwen2_vl_text", "qwen2_5_vl_text")},
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _INTERLEAVED),
    "bitnet": {"tie_word_embeddings": True},
    "phi": {"qk_layernorm": False, "num_key_value_heads": 4, "intermediate_size": 4 * 64},
    "stablelm": {"qk_layernorm": False},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 1},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "cohere": {"use_qk_norm": False},
    "dots1": {"num_key_value_heads": 4} | _ONE_GROUP,
    "olmoe": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_intermediate_size": 24},  # two are to have intermediate_size / num_key_value_heads
    **dict.fromkeys(("exaone_moe", "glm4_moe_lite", "mimo_v2_flash"), _ONE_GROUP),
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), _ONE_GROUP | _INDEXER),
    "llama4_text": {"num_hidden_layers": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "activation_sparsity_pattern": [0.95] * 5,
        "intermediate_size": [8192] * 5,
    },
    "qwen4_exp_text": _DELTA | {"indexer_n_heads": 16, "output_gate_type": "sigmoid"},
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
    "qwen3_vl_moe_text": {"text_config": {"tie_word_embeddings": False, "num_experts": 4, "norm_topk_prob": True}},
    **{name: {"scoring_func": "sigmoid"} for name in ("dots1", "exaone_moe", "glm_moe_dsa", "deepseek_v32")},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "qwen4_exp_text": {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]},
    "solar_open": {"intermediate_size": 96, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 32,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10_000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 48,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.334,
    },
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "exaone4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16},
    "lfm2": {"block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96, 96], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "minimax_m2": {"rotary_dim": 16, "shared_intermediate_size": 0, "use_qk_norm": True, "scoring_func": "sigmoid"},
}
"""Keys that published configs have and transformers 5 does not write."""
JOINED = ("qwen3_5_moe_text",)
"""Families whose published files hold the experts of a layer in one tensor, unlike those that transformers 5 saves."""


def transposed_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as published files of Qwen3-VL-MoE have them."""
    return {name: each.mT.contiguous() if ".experts." in name else each for name, each in weights.items()}


def split_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss as mlx-lm's own converter leaves it; of published files it reads those in MXFP4 alone."""
    made = {}
    for name, each in weights.items():
        name = name.replace("_proj_bias", "_proj.bias")
        if ".experts." in name and not name.endswith(".bias"):
            name, each = name + ".weight", each.mT
        if "gate_up_proj" in name:
            step = (slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))
            for part, rows in zip(("gate_proj", "up_proj"), step, strict=True):
                made[name.replace("gate_up_proj", part)] = each[rows].contiguous()
        else:
            made[name] = each.contiguous()
    return made


def without_empty_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """LongCat-Flash without the weights that transformers 5 saves of experts that have none; there are four others."""
    return {name: each for name, each in weights.items() if ".experts.4." not in name}


LAYOUTS = {"qwen3_vl_moe_text": transposed_experts}
"""How weights stand in published files, where transformers 5 saves them otherwise."""
LAYOUTS_OF_MLX = {"gpt_oss": split_experts, "longcat_flash": without_empty_experts}
"""How they stand in files of mlx-lm."""


# --- where engines do something else, that has nothing to do with RoPE ------------------------------------------------


class Activation(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.forward = function


def gelu_of_ggml(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh, from a table of numbers in float16, as ggml computes it on a CPU."""
    table = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x >= 10, x, torch.where(x <= -10, torch.zeros_like(x), table))


@contextmanager
def other_gelu(function: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module) -> Iterator[None]:
    """A model with another GELU."""
    found = [(each, *child) for each in model.modules() for child in each.named_children()]
    found = [(each, name, child) for each, name, child in found if "GELU" in type(child).__name__]
    assert found
    for parent, name, _ in found:
        setattr(parent, name, Activation(function))
    try:
        yield
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


@contextmanager
def other_sparsity(model: torch.nn.Module) -> Iterator[None]:
    """Gemma 3n with the GELU of ggml, and its sparsity by the standard deviation of a sample."""

    def sparse(self: Any, x: torch.Tensor) -> torch.Tensor:
        times = NormalDist().inv_cdf(self.activation_sparsity)
        return torch.relu(x - (x.mean(-1, keepdim=True) + times * x.std(-1, keepdim=True)))

    kind = type(next(each for each in model.modules() if hasattr(each, "_gaussian_topk")))
    with other_gelu(gelu_of_ggml, model), mock.patch.object(kind, "_gaussian_topk", sparse):
        yield


@contextmanager
def other_epsilon(value: float, model: torch.nn.Module) -> Iterator[None]:
    """A model with another epsilon of its RMS norms."""
    before = [(each, each.variance_epsilon) for each in model.modules() if hasattr(each, "variance_epsilon")]
    assert before
    for norm, _ in before:
        norm.variance_epsilon = value  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm, epsilon in before:
            norm.variance_epsilon = epsilon


@dataclass(frozen=True)
class OwnWay:
    """A known difference between an engine and transformers.

    Attributes:
        cause: in words.
        imitated: a context in which a model here does the same.
        within: what may remain then, in standard deviations of the logits.
    """

    cause: str
    imitated: Callable[[torch.nn.Module], AbstractContextManager[None]]
    within: float = AGREE


_TABLE = OwnWay("GELU by a table of numbers in float16 (ggml-cpu/vec.h)", partial(other_gelu, gelu_of_ggml), 2e-3)
_SPARSE = OwnWay(f"{_TABLE.cause}; sparsity by the deviation of a sample (gemma3n.cpp)", other_sparsity, 2e-3)
_ERF = OwnWay("GELU without its approximation by tanh", partial(other_gelu, torch.nn.functional.gelu))
_UNREAD = OwnWay("the epsilon of its norms is not read, and is 0 (models/qwen2vl.cpp)", partial(other_epsilon, 0.0))
_GLM = OwnWay("its converter writes 1e-5 as epsilon of norms (conversion/chatglm.py)", partial(other_epsilon, 1e-5))
_GELU = ("falcon", "gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "starcoder2")
OWN_WAYS = {
    "gguf": {
        **dict.fromkeys(_GELU, _TABLE),
        "gemma3n_text": _SPARSE,
        "qwen2_vl_text": _UNREAD,
        "qwen2_5_vl_text": _UNREAD,
        "glm": _GLM,
    },
    "mlx": {"gemma": _ERF, "starcoder2": _ERF},
}
OWN_WAYS["llama.cpp"] = OWN_WAYS["gguf"]

# --- runs -------------------------------------------------------------------------------------------------------------


def relay(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None) -> None:
    """Change the weights of a folder."""
    if change is not None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})


def build(family: str) -> Any:
    """A small random model of a family, for `CONTEXT` tokens."""
    if family in WHOLE:
        entry = next(each for each in every_model.entries() if each.model_type == WHOLE[family])
        sizes: dict[str, Any] = {"max_position_embeddings": CONTEXT}
        sizes |= SETTINGS.get(family, {})
        return every_model.build(entry, **({"text_config": sizes} if family.endswith("_text") else sizes))
    return build_known(family, **without_window(family) | SETTINGS.get(family, {}))


def merged(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other keys, those of its text config too."""
    inside = {"text_config": {**config["text_config"], **keys["text_config"]}} if "text_config" in keys else {}
    return {**config, **keys, **inside}


def save(model: Any, folder: Path, family: str) -> None:
    """Save a model as published ones are saved."""
    model.save_pretrained(folder, save_original_format=family not in JOINED)
    relay(folder, LAYOUTS.get(family))
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
        row: what is known of it; `difference`, `imitated` and `without` are filled in later.
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

    def imitated(self, times: int) -> Any:
        """The logits here in the engine's own way; None: it has none."""
        file = self.folder / f"{self.row['method']}, {times}, {self.row['engine']}.npy"
        return np.load(file) if file.exists() else None


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
            for engine in engines:
                if way := OWN_WAYS.get(engine, {}).get(family):
                    with way.imitated(model):
                        np.save(folder / f"{name}, {times}, {engine}.npy", logits(model, each)[0].numpy())
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
    command = [sys.executable, str(ROOT / "checks" / "llama_cpp_convert.py"), str(source), str(jobs)]
    subprocess.run(command, capture_output=True, check=True)


def llama_cpp_job(case: Case, times: int) -> Any:
    """Return the job for checks/llama_cpp_logits.py."""
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
    """Return the job for checks/engine_logits.py."""
    out = case.out(times)
    served = out.with_suffix("")
    shutil.copytree(case.folder / "hf", served)
    relay(served, LAYOUTS_OF_MLX.get(str(case.row["family"])))
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
    done = run_all(python, [str(ROOT / "checks" / script), *words], jobs, WORK)
    for (case, times), (there, complaint) in zip(asked, done, strict=True):
        if there is None:
            case.row["not run"] = complaint
            continue
        wanted, plain = case.expected(times), case.expected(times, "as published")
        far, moved = (float(np.abs(each - wanted).max() / wanted.std()) for each in (there, plain))
        case.row["difference"][str(times)] = far
        if (imitated := case.imitated(times)) is not None:
            left = float(np.abs(there - imitated).max() / wanted.std())
            case.row.setdefault("imitated", {})[str(times)] = left
        case.row["without"] = max(case.row["without"], moved)
    loaded = {
        case.row["family"] for case in cases if case.row["method"] == "as published" and case.row.get("difference")
    }
    for row in (case.row for case in cases if "not run" in case.row):
        del row["difference"], row["without"]
        if row["family"] in loaded:  # the model runs there, and with this method it does not
            row["error"] = row.pop("not run")


def remaining(row: Mapping[str, Any]) -> float:
    """Return the largest difference of logits between an engine and the model here, known differences imitated."""
    return float(max(row.get("imitated", row.get("difference", {"": 0.0})).values()))


def within(row: Mapping[str, Any]) -> float:
    """Return the largest difference that is allowed."""
    way = OWN_WAYS.get(str(row["engine"]), {}).get(str(row["family"]))
    return AGREE if way is None else way.within


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
    wrong += [row for row in rows if "error" in row or remaining(row) > within(row)]
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers", "gguf")}
    versions |= {name: find_engine(name).version for name in ("llama.cpp", "mlx")}
    causes = {
        name: {family: {"cause": way.cause, "within": way.within} for family, way in ways.items()}
        for name, ways in OWN_WAYS.items()
    }
    content: dict[str, Any] = {"command": "nox -s engine-families", "versions": versions, "agree": AGREE}
    content |= {"own_ways": causes, "rows": []}
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=lambda row: (row["engine"], row["family"])))
    text = json.dumps(content, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    RESULT.write_text(text + "\n", encoding="utf-8")
    print(*(["what follows differs", *wrong] if wrong else [f"{len(rows)} configurations agree"]), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
