"""What fits on the GPUs of a server: numbers worked out by hand from published configs, and vLLM's own reports."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from rope_ext_hf.bounds import parse_bytes
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError, ServingError
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.reading.cost.memory import cached_bytes
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.advice import advise
from rope_ext_hf.tools.advice.extending import plan_extension
from rope_ext_hf.tools.serving.gpu_memory import gpu_memory, weight_bytes
from rope_ext_hf.tools.serving.serving_options import Extending
from tests.support.wrapped_text import unwrapped

K = 1024
GIB = 2**30
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128 * K,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8 * K,
    },
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
GEMMA_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "sliding_window": 1024,
}


def config(given: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**given)


def test_keys_and_values_of_published_configs() -> None:
    """By hand: two times layers, key heads, dims and bytes; a latent is whole on every GPU; a window and a step."""
    assert cached_bytes(config(LLAMA_8B), 1) == 2 * 32 * 8 * 128 * 2 == 128 * K
    assert cached_bytes(config(LLAMA_70B), 1) == 320 * K
    assert cached_bytes(config(LLAMA_70B), 1, gpus=8) == 40 * K
    assert cached_bytes(config(LLAMA_70B), 1, gpus=16) == 40 * K  # two GPUs have the same head
    assert cached_bytes(config(QWEN_7B), 1, gpus=2, width=1) == 2 * 28 * 2 * 128
    assert cached_bytes(config(DEEPSEEK), 1, gpus=8) == 61 * 576 * 2 == 70272
    per_layer = 2 * 16 * 128 * 2
    assert cached_bytes(config(GEMMA_27B), 128 * K) == per_layer * (10 * 128 * K + 52 * 1024)
    assert cached_bytes(config(GEMMA_27B), 128 * K, ahead=8 * K) == per_layer * (10 * 128 * K + 52 * 9 * K)


REPORTS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs/results/vllm_memory.json").read_text())


@pytest.mark.parametrize("row", REPORTS["rows"], ids=lambda row: f"{row['model']}-{row['gpus']}-{row['keys']}")
def test_as_many_inputs_fit_as_a_running_vllm_reports(row: dict[str, Any]) -> None:
    """A window does not begin where a block does: one block more."""
    if "failed" in row:
        pytest.skip(row["failed"])
    width = 1 if row["keys"] == "fp8" else 4
    given = {"width": width, "gpus": row["gpus"], "ahead": REPORTS["step"] + REPORTS["block"]}
    size = cached_bytes(config(REPORTS["models"][row["model"]]), REPORTS["length"], **given)
    assert row["inputs"] == pytest.approx(REPORTS["bytes"] / size, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "parameters"), [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (QWEN_7B, 7_615_616_512)]
)
def test_weights_of_published_models(given: dict[str, Any], parameters: int) -> None:
    """The numbers of parameters are those of their model cards."""
    model = empty_model(config(given))
    assert weight_bytes(model) == 2 * parameters
    hidden, layers = given["hidden_size"], given["num_hidden_layers"]
    norms = 2 * (2 * layers + 1) * hidden  # whole on every GPU
    shared = weight_bytes(model, gpus=4)
    assert shared >= (2 * parameters + 3 * norms) / 4
    assert shared == pytest.approx((2 * parameters + 3 * norms) / 4, rel=1e-3)  # Qwen's biases are whole there too
    tables = 2 * 2 * given["vocab_size"] * hidden
    quarter = weight_bytes(model, bits=4)
    assert quarter == pytest.approx((2 * parameters - tables) * 4.5 / 16 + tables, rel=1e-3)


def test_what_fits_on_one_gpu_and_on_eight() -> None:
    """Llama 3.1 8B at 512k: 68.7 GB of keys and values in 16 bits, beside 16.1 GB of weights."""
    model = empty_model(config(LLAMA_8B))
    weights = 2 * 8_030_261_248
    one = gpu_memory(model, 512 * K, serving.GPUServer(gpus=1, gpu_memory="80GB"))
    assert (one.weights, one.shared_by) == (weights, 1)
    assert one.room == 72_000_000_000 - weights - 2 * GIB
    assert (one.sizes, one.inputs, one.kv_bits) == ({16: 2**36, 8: 2**35}, {16: 0, 8: 1}, 8)
    assert one.longest == {16: one.room // (128 * K) // 16 * 16, 8: one.room // (64 * K) // 16 * 16}
    assert one.options == {"gpus": 1, "keys": "fp8_e4m3", "inputs": 1, "share": 0.9, "static": 0.87}
    several = gpu_memory(model, 512 * K, serving.GPUServer(gpus=8, gpu_memory="80GiB"))
    assert (several.sizes[16], several.inputs[16], several.kv_bits) == (2**33, several.room // 2**33, 16)
    assert several.inputs[16] == 8
    small = gpu_memory(model, 512 * K, serving.GPUServer(gpus=1, gpu_memory="24GB"))
    assert (small.kv_bits, small.fewest) == (None, 4)
    assert "takes 68.7 GB of each GPU in 16 bits or 34.4 GB of each GPU in 8 bits, and does not fit" in str(small)
    assert "; this length on 4 GPUs." in str(small)
    none = gpu_memory(model, 512 * K, serving.GPUServer(gpus=1, gpu_memory="1GB"))
    assert none.fewest is None
    assert "does not fit on 64 GPUs either" in str(none)


def test_a_model_is_dealt_out_in_equal_parts() -> None:
    """Qwen2.5 7B has 28 heads and 4 key heads: 7 divides the former, 8 neither."""
    model = empty_model(config(QWEN_7B))
    for gpus, shared_by in ((1, 1), (2, 2), (3, 2), (7, 4), (8, 4), (28, 4)):
        assert gpu_memory(model, K, serving.GPUServer(gpus=gpus)).shared_by == shared_by
    assert "4 of them share the model" in str(gpu_memory(model, K, serving.GPUServer(gpus=8)))


def test_bits_of_quantised_weights_are_asked_for() -> None:
    model = empty_model(config(LLAMA_8B | {"num_hidden_layers": 2}))
    model.config.quantization_config = {"quant_method": "fp8"}
    assert gpu_memory(model, K, serving.GPUServer(gpus=1, weight_bits=8)).weights == weight_bytes(model, bits=8)
    with pytest.raises(MethodError, match="give --weight-bits"):
        gpu_memory(model, K, serving.GPUServer(gpus=1))


def test_amounts_of_memory() -> None:
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("80 GiB") == 80 * GIB
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes(17) == 17
    for wrong in ("", "GB", "80", "80TB", "-1GB", "80GiBs"):
        with pytest.raises(MethodError, match="write 80GB or 80GiB"):
            parse_bytes(wrong)
    assert serving.GPUServer(gpus=2, gpu_memory="40GiB").options == {"gpus": 2, "gpu_memory": "42.94967296GB"}
    with pytest.raises(MethodError, match="gpus must be a whole number"):
        serving.GPUServer(gpus=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def served(command: tuple[str, ...] | str, option: str) -> str:
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return words[words.index(option) + 1]


def test_serve_config_prints_what_fits_or_says_what_does_not(folder: Path) -> None:
    asked: dict[str, Any] = {"method": "yarn", "target_length": "512k"}
    plain = serving.serving_config(folder, "vllm", **asked)
    assert any("takes 68.7 GB of keys and values in 16 bits" in note for note in plain.notes)
    one = serving.serving_config(folder, "vllm", **asked, server=serving.GPUServer(gpus=1))
    expected = {
        "--max-model-len": "524288",
        "--tensor-parallel-size": "1",
        "--kv-cache-dtype": "fp8_e4m3",
        "--max-num-seqs": "1",
        "--gpu-memory-utilization": "0.9",
    }
    assert {name: served(one.command, name) for name in expected} == expected
    assert {name: served(one.by_folder[1], name) for name in expected} == expected
    several = serving.serving_config(folder, "sglang", **asked, server=serving.GPUServer(gpus=8))
    assert served(several.command, "--tp-size") == "8"
    with pytest.raises(
        ServingError, match=r"An input of 524,288 tokens takes .* does not fit\. These fit: .*; this length on 4 GPUs\."
    ):
        serving.serving_config(folder, "vllm", **asked, server=serving.GPUServer(gpus=1, gpu_memory="24GB"))
    with pytest.raises(ServingError, match=r"known for vllm and sglang, not for llama\.cpp; leave out --gpus"):
        serving.serving_config(folder, "llama.cpp", **asked, server=serving.GPUServer(gpus=1))


def test_a_model_as_published_is_served_as_far_as_it_fits(folder: Path) -> None:
    """Its frequencies do not follow the length that the server is started for."""
    small = serving.GPUServer(gpus=1, gpu_memory="24GB")
    config = serving.serving_config(folder, "vllm", server=small)
    longest = (21_600_000_000 - 2 * 8_030_261_248 - 2 * GIB) // (128 * K) // 16 * 16
    assert (config.length, served(config.command, "--max-model-len")) == (longest, str(longest))
    assert served(config.command, "--kv-cache-dtype") == "auto"
    assert any(f"The server is started for {longest:,} tokens" in note for note in config.notes)
    assert config.computed == serving.serving_config(folder, "vllm").computed


@pytest.mark.slow
def test_advise_and_extend_take_the_gpus_too(folder: Path, tmp_path: Path) -> None:
    eight = advise(folder, 512 * K, server=serving.GPUServer(gpus=8))
    assert eight.on_gpus is not None
    assert "7 fit at a time" in unwrapped(eight)
    configure, start = eight.commands["serve with vllm"]
    assert served(configure, "--gpus") == served(start, "--tensor-parallel-size") == "8"
    assert "--gpus" not in " ".join(eight.commands["serve with llama.cpp"])
    small: dict[str, Any] = {"gpus": 1, "gpu_memory": "24GB"}
    none = advise(folder, 512 * K, server=serving.GPUServer(**small))
    assert "does not fit" in unwrapped(none)
    assert len(none.commands["serve with vllm"]) == 1  # the command that says so, and none to start it with
    plan = plan_extension(str(folder), Extending(target_length="512k", gpus=2))
    assert served(plan.commands["serve-config"], "--gpus") == "2"
    with pytest.raises(ServingError, match="does not fit"):
        plan_extension(str(folder), Extending(target_length="512k", **small))
    given = ["--engine", "vllm", "--gpus", "2", "--gpu-memory", "40GiB", "--weight-bits", "8"]
    printed = CliRunner().invoke(app, ["serve-config", str(folder), *given])
    assert printed.exit_code == 0, printed.output
    assert "--tensor-parallel-size 2" in printed.output
    assert "2 GPUs of 42.9 GB: 4." in unwrapped(printed.output)
