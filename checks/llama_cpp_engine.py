"""Does llama.cpp compute what rope_ext_hf.tools.engines.gguf_rules says it does?

    nox -s llama-cpp
    python -m checks.llama_cpp_engine --python ENV/bin/python

ENV has xllamacpp, whose library holds llama.cpp for CPUs, and llama-cpp-py-sync, which declares its C interface. GGUF
files in float32 are written of the bundled model as a Llama and, with the same weights, as a Phi-3, and of a small
random Qwen3. Under every method that serving_config serves there, by a rewritten file and by flags, and under further
metadata by the rules of the engine module alone, its logits are compared with those of transformers, over text of the
context length and of four times that. The result goes to docs/results/llama-cpp.json; the exit status is 1 where they
differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.utils import logging

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, ServingError
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.gguf_rules import ARCHITECTURES, converted, file_computes
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.gguf.headers import read_file_rope
from rope_ext_hf.tools.gguf.rewriting import rewrite
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support.models import build, logits

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "llama-cpp-files"
RESULT = ROOT / "docs" / "results" / "llama-cpp.json"
AGREE = 1e-3
"""The largest difference of two logits that counts as the same model, in standard deviations of the logits."""
TIMES = (1, 4)
"""How many times the context length is read."""

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 4.0}),
    "ntk": ("ntk", {"factor": 4.0}),
    "theta": ("theta", {"theta": 100_000.0}),
    "by-parts": ("by-parts", {"factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}),
    "yarn, an attention factor given": ("yarn", {"factor": 4.0, "attention_factor": 1.3}),
    "yarn, other betas": ("yarn", {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0}),
    "yarn, truncate false": ("yarn", {"factor": 4.0, "truncate": False}),
    "llama3": ("llama3", {"factor": 4.0}),
    "mrrope": ("mrrope", {"factor": 4.0, "beta_fast": 16.0}),
    "mrrope, uniform": ("mrrope", {"factor": 4.0, "beta_fast": 16.0, "radix": "uniform"}),
    "longrope, one list": ("longrope", {"lists": ("short_factor", "long_factor"), "factor": 4.0}),
    "factors": ("factors", {"lists": ("factors",), "attention_factor": 1.1}),
    "cope": ("cope", {}),
    "cope, hard": ("cope", {"hard": True}),
    "nope": ("nope", {"recalibrated": 1}),
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "linear without its type": {"rope.scaling.factor": 4.0},
        "type none beside a factor": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        "yarn without the original length": YARN,
        "yarn with attn_factor": YARN | {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
        "yarn with yarn_attn_factor": YARN | {"rope.scaling.yarn_attn_factor": 1.2},
        "yarn with its factor in yarn_ext_factor": YARN | {"rope.scaling.yarn_ext_factor": 4.0},
        "yarn with yarn_ext_factor 0.5": YARN | {"rope.scaling.yarn_ext_factor": 0.5},
        "yarn with other betas": YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        "yarn over divisors": YARN | {"rope_freqs.weight": 2.0},
        "linear over divisors": {"rope.scaling.factor": 2.0, "rope_freqs.weight": 2.0},
        "attn_factor without a type": {"rope.scaling.attn_factor": 1.2},
        "longrope with its lists": {
            "rope.scaling.type": "longrope",
            "rope_factors_long.weight": 4.0,
            "rope_factors_short.weight": 1.5,
        },
        "longrope with rope_freqs.weight": {"rope.scaling.type": "longrope", "rope_freqs.weight": 2.0},
    },
    "phi3": {
        "two lists": {"rope_factors_long.weight": 4.0, "rope_factors_short.weight": 1.5},
        "rope_freqs.weight": {"rope_freqs.weight": 2.0},
    },
    "qwen3": {
        "yarn with attn_factor": YARN | {"rope.scaling.attn_factor": 1.2},
        "rope_freqs.weight": {"rope_freqs.weight": 2.0},
    },
}
"""Metadata by architecture that serving_config does not write, or not so; a tensor is written with one number."""


class Case:
    """One model, its text, and its GGUF file."""

    def __init__(self, name: str, model: Any, ids: Tensor) -> None:
        self.name, self.model, self.ids = name, model, ids
        self.context: int = model.config.max_position_embeddings
        self.file = WORK / f"{name}.gguf"
        self.plain = logits(model, ids)[0].numpy()
        self.spread = float(self.plain.std())
        write_gguf(model, self.file)

    @property
    def rotary(self) -> rope.Rotary:
        described: rope.Rotary = open_model(self.model).rope.embedding.rotary
        return described


def as_phi3(model: Any) -> Any:
    """A Phi-3 with the weights of a Llama, whose queries, keys and values stand in one matrix there."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    copied = {key: getattr(model.config, key) for key in (*sizes, "num_key_value_heads", "rms_norm_eps")}
    length = model.config.max_position_embeddings
    config = Phi3Config(
        **copied,
        max_position_embeddings=length,
        original_max_position_embeddings=length,
        rope_parameters=dict(model.config.rope_parameters),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    state, weights = model.state_dict(), {}
    for key, value in state.items():
        if key.endswith("q_proj.weight"):
            parts = [state[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            weights[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif key.endswith("gate_proj.weight"):
            weights[key.replace("gate_proj", "gate_up_proj")] = torch.cat([value, state[key.replace("gate", "up")]])
        elif not key.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            weights[key] = value
    phi = Phi3ForCausalLM(config).float().eval()
    phi.load_state_dict(weights)
    return phi


def cases() -> Iterator[Case]:
    model = AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32).eval()
    length = TIMES[-1] * model.config.max_position_embeddings
    text = load_tokenizer("reference")(stdlib_held_out()[0].text, add_special_tokens=False, return_tensors="pt")
    yield Case("llama", model, text.input_ids[:, :length])
    yield Case("phi3", as_phi3(model), text.input_ids[:, :length])
    small = build("qwen3", max_position_embeddings=128, vocab_size=259)
    draws = torch.randint(3, 255, (1, TIMES[-1] * 128), generator=torch.Generator().manual_seed(0))
    yield Case("qwen3", small, draws)


# --- files ------------------------------------------------------------------------------------------------------------


def write_gguf(
    model: Any,
    path: Path,
    kind: str = "F32",
    tokens: Sequence[bytes] = (),
    *,
    permuted: bool = True,
    first_token: bool = False,
) -> None:
    """The file that llama.cpp's converter makes.

    Args:
        kind: of the matrices; vectors are in float32.
        tokens: the vocabulary, bytes as byte-level tokenizers write them; none: the file has none.
        first_token: whether a text begins with a special token.
        permuted: whether the rows of a Llama are in the order that llama.cpp rotates.
    """
    config, own = model.config, converted(model.config.to_dict())
    writer = gguf.GGUFWriter(path, own.architecture)
    writer.add_context_length(own.keys["context_length"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(own.dim)
    writer.add_rope_freq_base(own.keys["rope.freq_base"])
    writer.add_vocab_size(config.vocab_size)
    if config.model_type.startswith("gemma3"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2" if tokens else "none")
    if tokens:
        kinds = [gguf.TokenType.NORMAL if len(token.decode()) == 1 else gguf.TokenType.CONTROL for token in tokens]
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(
            [f"{tokens[-2].decode()} {tokens[-1].decode()}"]
        )  # into no token: an empty list has no type
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(first_token)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == own.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored = gguf.GGMLQuantizationType[kind]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight",))
        assert name, key
        part = key.split(".")[-2]
        if own.architecture == "gemma3" and part.endswith("norm"):
            value = value + 1  # which the model adds there
        if own.architecture == "llama" and part in heads and permuted:  # rotated in pairs (2i, 2i + 1) there
            value = value.reshape(heads[part], 2, own.dim // 2, -1).transpose(1, 2).reshape(value.shape)
        numbers, used = value.float().contiguous().numpy(), stored if value.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(numbers, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewritten(case: Case, name: str, config: ServingConfig) -> Path:
    out = WORK / f"{case.name}, {name}.gguf"
    rewrite(case.file, out, config)
    return out


# --- what llama.cpp makes of them -------------------------------------------------------------------------------------

KINDS = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
FIELDS: dict[str, tuple[str, Any]] = {
    "--rope-scaling": ("rope_scaling_type", KINDS.__getitem__),
    "--rope-scale": ("rope_freq_scale", lambda value: 1 / float(value)),
    "--rope-freq-base": ("rope_freq_base", float),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int),
    "--yarn-beta-fast": ("yarn_beta_fast", float),
    "--yarn-beta-slow": ("yarn_beta_slow", float),
}
"""The fields of llama_context_params that the flags of llama-server set (common/arg.cpp, common.cpp)."""


def read_flags(command: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the context, and overrides of metadata."""
    context: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    words = list(command[command.index("-c") + 2 :])
    while words:
        flag, value = words.pop(0), words.pop(0)
        if flag == "--override-kv":
            key, _, typed = value.partition("=")
            overrides[key] = typed.split(":")
        else:
            name, read = FIELDS[flag]
            context[name] = read(value)
    return context, overrides


def run(python: str, job: dict[str, Any]) -> tuple[Any, str]:
    """The logits and the version of llama.cpp, or None and why there are none."""
    file, out = WORK / "job.json", WORK / "logits.npy"
    out.unlink(missing_ok=True)
    file.write_text(json.dumps(job | {"ids": str(WORK / "ids.npy"), "out": str(out)}), encoding="utf-8")
    script = ROOT / "checks" / "llama_cpp_logits.py"
    done = subprocess.run([python, str(script), str(file)], capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        last = [line for line in done.stderr.splitlines() if "error" in line.lower() or "assert" in line.lower()]
        return None, (last or done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
    return np.load(out), done.stdout.splitlines()[-1]


def bits(case: Case, logits: Any) -> float:
    """Bits per token of the text."""
    scores = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), -1)
    return -float(scores.gather(1, case.ids[0, 1 : len(logits), None]).mean()) / float(np.log(2))


def measured(python: str, case: Case, expected: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The differences of the logits at every length, in standard deviations, and bits per token."""
    theirs, version_or_error = run(python, {"positions": len(expected), "context": {}, "overrides": {}} | job)
    if theirs is None:
        return {"error": version_or_error}
    rows = {f"{times}x": slice(0, times * case.context) for times in TIMES if times * case.context <= len(expected)}
    cells = {name: float(np.abs(theirs[part] - expected[part]).max()) / case.spread for name, part in rows.items()}
    return {
        "version": version_or_error,
        "difference": cells,
        "without": float(np.abs(case.plain[: len(expected)] - expected).max()) / case.spread,
        "bits": {"transformers": bits(case, expected), "llama.cpp": bits(case, theirs)},
    }


def served_rows(python: str, case: Case) -> Iterator[dict[str, Any]]:
    """Every method, by a rewritten file and by flags."""
    for name, (method, given) in METHODS.items():
        params = dict(given)
        steps = torch.arange(case.rotary.dim // 2) / 8
        for key in params.pop("lists", ()):
            params[key] = tuple((1 + steps).tolist())
        target = make_target(open_model(case.model), method, **params)
        rope.patch(case.model, method, **params)
        expected = logits(case.model, case.ids)[0].numpy()
        rope.unpatch(case.model)
        for engine in ("gguf", "llama.cpp"):
            row = {"model": case.name, "name": name, "by": "file" if engine == "gguf" else "flags"}
            try:
                config = find_engine(engine).config_for(target)
            except ServingError:
                if engine == "gguf":
                    yield row | {"refused": True}
                continue
            row["encoding"] = config.encoding
            if engine == "gguf":
                job: dict[str, Any] = {"file": str(rewritten(case, name, config))}
            elif config.gguf_keys:
                continue
            else:
                context, overrides = read_flags(config.command)
                job = {"file": str(case.file), "context": context, "overrides": overrides}
            yield row | measured(python, case, expected, job)


def rule_rows(python: str, case: Case) -> Iterator[dict[str, Any]]:
    """Metadata of any kind, against a model with the frequencies and the magnitude that the rules give."""
    architecture = ARCHITECTURES[case.model.config.model_type][0]
    pairs = case.rotary.dim // 2
    for name, keys in RULES[case.name].items():
        tensors = {key: tuple([value] * pairs) for key, value in keys.items() if key.endswith(".weight")}
        metadata = {f"{architecture}.{key}": value for key, value in keys.items() if key not in tensors}
        metadata[f"{architecture}.context_length"] = case.context
        config = ServingConfig("gguf", "", "", name, case.context, gguf_keys=metadata, gguf_tensors=tensors)
        file = rewritten(case, name, config)
        lists = "rope_factors_short.weight" in tensors  # of which the allocated length chooses one
        for positions in (case.ids.shape[1], *([case.context] if lists else [])):
            row = {"model": case.name, "name": name, "by": "rules", "positions": positions}
            try:
                computed = file_computes(read_file_rope(file), positions)
            except (ServingError, CheckpointError) as error:
                theirs, reason = run(
                    python, {"file": str(file), "positions": positions, "context": {}, "overrides": {}}
                )
                yield (
                    row
                    | {"refused": theirs is None, "error": str(error)}
                    | ({} if theirs is None else {"engine": reason})
                )
                continue
            divisors = case.rotary.theta_inv_freq() / torch.tensor(computed.inv_freq, dtype=torch.float64)
            rope.patch(case.model, "factors", factors=divisors.tolist(), attention_factor=computed.attention_factor)
            expected = logits(case.model, case.ids[:, :positions])[0].numpy()
            rope.unpatch(case.model)
            np.save(WORK / "ids.npy", case.ids[0, :positions].numpy())
            yield row | measured(python, case, expected, {"file": str(file), "positions": positions})
            np.save(WORK / "ids.npy", case.ids[0].numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", required=True, metavar="PYTHON", help="of an environment with llama.cpp, see noxfile.py"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for case in cases():
        np.save(WORK / "ids.npy", case.ids[0].numpy())
        for row in chain(served_rows(given.python, case), rule_rows(given.python, case)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers", "gguf")}
    versions["llama.cpp"] = next(row.pop("version") for row in rows if "version" in row)
    for row in rows:
        row.pop("version", None)
    content = {"command": "nox -s llama-cpp", "versions": versions, "agree": AGREE, "rows": []}
    lines = ",\n  ".join(map(json.dumps, rows))
    text = json.dumps(content, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    RESULT.write_text(text + "\n", encoding="utf-8")
    wrong = [
        row
        for row in rows
        if ("error" in row and not row.get("refused")) or max(row.get("difference", {"": 0.0}).values()) > AGREE
    ]
    print(*(["what follows differs", *wrong] if wrong else [f"{len(rows)} files and command lines agree"]), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
