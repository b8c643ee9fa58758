"""What holds for every engine: each method on each family is served exactly, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import (
    ServingError,
    UnknownMethodError,
)
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.engines.base import Engine, NotCheckedError, find_engine, list_engines, register_engine
from rope_ext_hf.tools.engines.hf_transformers import Transformers
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.serving.configs import make_target
from tests.conformance.generate import text_config
from tests.support.models import build
from tests.tools.support.serving_models import FOLDER, SERVED, serve, served_model, targets

pytestmark = pytest.mark.filterwarnings("ignore")
every_family = pytest.mark.parametrize("family", SERVED)
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def measured(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("over", ["own", "original"])
def test_every_method_is_served_exactly_or_refused_by_name(family: str, over: str) -> None:
    served = 0
    for method, target in targets(family, over):
        for name in list_engines():
            if not isinstance(target, Target):
                assert method.name in str(target) or method.label() in str(target)
                continue
            config, refusal = serve(name, target)
            if config is None:
                assert name in refusal
                assert target.method in refusal
                continue
            served += 1
            embedding = served_model(family).rope.embedding
            expected = method.frequencies(embedding.rotary if over == "own" else embedding.plain, target.length)
            assert config.computed is not None
            computed = torch.tensor(config.computed.inv_freq, dtype=torch.float64)
            torch.testing.assert_close(computed, expected.inv_freq, rtol=1e-6, atol=1e-30)
            assert math.isclose(config.computed.attention_factor, expected.attention_factor, rel_tol=1e-6)
            json.dumps(config.to_dict())
    assert served >= 7, "at least the model as it is, and most methods by transformers"


# What the sources of the engines say, by hand: family, method over the original length, engine -> how it is served.
@pytest.mark.parametrize(
    ("family", "over", "method", "engine", "encoding"),
    [
        ("Mistral", "own", "yarn", "vllm", "native"),
        ("Mistral", "own", "factors", "llama.cpp", "divisors in rope_freqs.weight"),
        ("Llama", "own", "linear", "llama.cpp", "native"),
        ("Llama", "own", "yarn", "vllm", "longrope"),
        ("Qwen3", "original", "llama3", "llama.cpp", None),
        ("Qwen3-VL", "own", "yarn", "sglang", "native"),
        ("Qwen3-VL", "own", "linear", "vllm", None),
        ("gpt-oss", "own", "yarn", "vllm", None),
        ("gpt-oss", "original", "yarn", "vllm", "native"),
        ("DeepSeek", "own", "default", "sglang", "native"),
        ("DeepSeek", "own", "default", "exllamav3", "native"),
        ("gpt-oss", "original", "yarn", "exllamav3", "native"),
        ("Llama", "own", "yarn", "exllamav3", "longrope"),
        ("Qwen3", "original", "yarn", "tensorrt-llm", "native"),
        ("Qwen3", "original", "linear", "tensorrt-llm", None),
        ("Gemma 3", "original", "by-parts", "tensorrt-llm", "longrope with equal lists"),
        ("Gemma 3", "original", "yarn", "tensorrt-llm", None),
        ("DeepSeek", "own", "ntk", "vllm", None),
        ("Phi-3", "original", "yarn", "mlx", "longrope with equal lists"),
    ],
)
def test_how_a_method_is_served(family: str, over: str, method: str, engine: str, encoding: str | None) -> None:
    target = next(each for known, each in targets(family, over) if known.name == method)
    assert isinstance(target, Target)
    if encoding is None:
        with pytest.raises(ServingError, match=engine):
            find_engine(engine).config_for(target)
    else:
        assert find_engine(engine).config_for(target).encoding == encoding


def test_a_magnitude_is_spelled_for_every_engine() -> None:
    target = make_target(served_model("Mistral"), "by-parts", factor=4.0)
    for name, read in (("vllm", "attention_factor"), ("sglang", "attn_factor"), ("mlx", "mscale")):
        config = find_engine(name).config_for(target)
        settings = config.config_keys.get("rope_parameters") or config.config_keys["rope_scaling"]
        without = {key: value for key, value in settings.items() if key not in (read, "mscale", "attn_factor")}
        keys = config.config_keys | ({"rope_scaling": without} if name == "mlx" else {"rope_parameters": without})
        if name != "vllm":
            changed = find_engine(name).computes({**target.config, "rope_parameters": None} | keys, target.length)
            assert changed.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
        assert config.computed is not None
        assert config.computed.attention_factor == pytest.approx(1.0)


def test_versions() -> None:
    with pytest.raises(ServingError, match="--rope-scaling"):
        find_engine("vllm").check_version("0.10.2")
    assert not find_engine("vllm").check_version("0.33.0")
    assert find_engine("vllm").check_version("0.40.0")
    assert find_engine("llama.cpp").check_version("b12000")
    with pytest.raises(UnknownMethodError, match="Did you mean 'vllm'"):
        find_engine("vlm")


def test_an_engine_is_one_class() -> None:
    with pytest.raises(ValueError, match="already"):
        register_engine("vllm")(Transformers)
    for name, engine in list_engines().items():
        assert issubclass(engine, Engine), f"the class registered as {name!r} must derive from engines.base.Engine"
        assert getattr(engine, "version", ""), (
            f"engine {name!r}: state `version`, that of the source its rules are from"
        )


@pytest.mark.slow
def test_the_rules_are_those_of_the_versions_that_were_compared() -> None:
    for engine in measured("engine-classes")["engines"]:
        assert engine["version"] == find_engine(engine["engine"]).version
        assert {row["family"] for row in engine["rows"]} | set(engine["skipped"]) >= {"Llama", "Qwen3-VL", "DeepSeek"}
        assert engine.get("untouched", len(engine["rows"])) == len(engine["rows"])
        for row in engine["rows"] + engine.get("plugin", []):
            assert row["frequencies"] <= 2e-5, row
            assert max(row["magnitude"], row.get("softmax_scale", 0.0)) <= 1e-6, row
            assert row.get("positions", 0.0) <= 2e-5, row
    files = measured("llama-cpp")
    assert files["versions"]["llama.cpp"] == find_engine("llama.cpp").version
    methods: dict[str, set[str]] = {}
    for row in files["rows"]:
        if "difference" not in row:
            assert row["refused"], row
            continue
        assert max(row["difference"].values()) <= files["agree"], row
        if row["name"] not in ("default", "type none beside a factor"):
            assert row["without"] > 100 * files["agree"], row
        methods.setdefault(row["by"], set()).add(row["name"])
    assert {"linear", "ntk", "yarn", "by-parts", "llama3", "factors"} <= methods["file"]
    assert {"linear", "ntk", "yarn"} <= methods["flags"]
    assert "yarn with other betas" in methods["rules"]


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang", "exllamav3", "mlx"])
def test_the_rules_foresee_what_a_release_was_measured_to_do(engine: str) -> None:
    """Where the numbers of a published configuration are not those of conformance/, the rules say so."""
    rules, asked = find_engine(engine), 0
    runs = measured("conformance")["programs"]
    run = next(each for each in runs if each["version"] == f"{rules.title} {rules.version}")
    wrong = {name for name, check, _ in run.get("differences", ()) if check in ("inv_freq", "magnitude")}
    for path in sorted(FOLDER.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        if entry["method"] in ("ntk", "dynamic-ntk") or path.stem.startswith("gemma-4"):
            continue  # not in the rules: frequencies that follow an input, heads of two sizes
        standardised = engine in ("transformers", "vllm", "sglang")
        config = text_config(entry["config"]).to_dict() if standardised else entry["config"]
        for row in entry["rows"]:
            length = "" if row["length"] is None else f", {row['length']:,} tokens"
            name = path.stem + (f", {row['layer_type']}" if row["layer_type"] else "") + length
            if run["cells"].get(name, "-") == "-" or row["layer_type"] == "sliding_attention":
                continue
            try:
                computed = rules.computes(config, row["length"])
            except NotCheckedError:
                continue
            difference = computed.difference(row["inv_freq"], row["magnitude"], computed.softmax_scale)
            assert (difference is not None) == (name in wrong), (name, difference)
            asked += 1
    assert asked >= 15


GEMMA_3 = {
    **{"model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 12, "max_position_embeddings": 32768},
    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512},
}


def gemma_3_layers(every: int) -> list[str]:
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(12)]


@pytest.mark.parametrize("name", ["llama.cpp", "gguf", "ollama", "mlx"])
def test_gemma_3_with_another_pattern_of_layers_is_refused_where_the_pattern_is_fixed(name: str) -> None:
    """llama.cpp's converter writes no pattern and the loader takes 6; mlx-lm reads sliding_window_pattern alone."""
    engine = find_engine(name)
    usual = engine.computes(GEMMA_3)
    assert engine.computes(GEMMA_3 | {"layer_types": gemma_3_layers(6)}) == usual
    for other in (gemma_3_layers(3), gemma_3_layers(4), ["full_attention"] * 12):
        with pytest.raises(ServingError, match="takes every 6th layer for a full-attention layer"):
            engine.computes(GEMMA_3 | {"layer_types": other})
    stated = GEMMA_3 | {"layer_types": gemma_3_layers(3), "sliding_window_pattern": 3}
    if name == "mlx":
        assert engine.computes(stated) == usual
        with pytest.raises(ServingError, match="stops at fewer than 6 layers"):
            engine.computes(GEMMA_3 | {"num_hidden_layers": 4})
    else:
        with pytest.raises(ServingError, match="takes every 6th layer"):
            engine.computes(stated)


@pytest.mark.parametrize("name", ["llama.cpp", "gguf", "mlx"])
def test_serving_a_gemma_3_of_other_layers_is_refused(name: str) -> None:
    with pytest.raises(ServingError, match="takes every 6th layer"):
        serving.serving_config(build("gemma3"), name, "linear", factor=4)
    assert serving.serving_config(build("gemma3"), "vllm", "linear", factor=4).command


@pytest.mark.parametrize("method", ["mrrope", "by-parts"])
@pytest.mark.parametrize("engine", ["mlx", "exllamav3"])
def test_engines_that_ignore_the_attention_factor_work_it_out(method: str, engine: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 8192}
    model = rope.patch(build("llama", **settings), method, factor=4)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    factor = {"mrrope": 0.1 * math.log(4) + 1, "by-parts": 1.0}[method]
    assert config["rope_scaling"]["attention_factor"] == pytest.approx(factor)
    assert find_engine(engine).computes(config).attention_factor == pytest.approx(factor, rel=1e-5)
