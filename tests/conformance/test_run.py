"""The runner of conformance/: that it needs nothing of this package, and that it names the mistakes of a port."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conformance import formulas, models
from tests.conformance.generate import KIT
from tests.tools.support import model_servers

ALONE = (
    "import runpy, sys; sys.modules['rope_ext_hf'] = None; sys.argv[0] = {0!r}; runpy.run_path({0!r}, None, '__main__')"
)
"""Runs a file as a program that cannot import this package."""


def kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformance_kit", KIT / "kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KIT_MODULE = kit()


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = str(KIT / "run.py")
    command = [sys.executable, "-c", ALONE.format(program), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


DEVIATIONS = {
    ("llama-dynamic", "growing cache"),  # cached keys keep the base of the length at which they were written
    ("llama-dynamic", "chunks"),
    ("llama-dynamic", "left padding"),  # the longest row decides for all
    ("phi3-longrope", "growing cache"),  # called directly; `generate` reads the text anew at the original length
    ("phi3-longrope", "left padding"),
}
"""What transformers computes otherwise than the kit."""


@pytest.mark.thorough
@pytest.mark.slow
def test_transformers_passes_but_for_what_is_known(tmp_path: Path) -> None:
    done = run("--port", "transformers", "--json", "outcomes.json", cwd=tmp_path)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text(encoding="utf-8"))["outcomes"]
    assert {(each["case"], each["check"]) for each in outcomes if each["error"]} == DEVIATIONS, done.stdout
    assert done.returncode == 1
    agree = [each for each in outcomes if each["error"] == ""]
    assert {each["case"] for each in agree} == {name for name, _ in (*KIT_MODULE.cases(), *KIT_MODULE.models())}
    assert {each["check"] for each in agree} == {*KIT_MODULE.CHECKS, *KIT_MODULE.READ}


PORT = """
def inv_freq(config):
    if "rope_scaling" in config or "rope_theta" not in config:
        raise NotImplementedError
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return [{theta} ** (-2 * i / dim) for i in range(dim // 2)]
"""


def test_a_function_is_a_port(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(PORT.format(theta='config["rope_theta"]'), encoding="utf-8")
    (tmp_path / "wrong.py").write_text(PORT.format(theta="10_000"), encoding="utf-8")
    done = run("--port", "right:inv_freq", "--cases", "llama-3-8b", "llama-3.1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 agree, 0 differ" in done.stdout
    done = run("--port", "wrong:inv_freq", "--cases", "llama-3-8b", "phi-2", cwd=tmp_path)
    assert done.returncode == 1
    assert "as with: theta 10,000" in done.stdout
    assert "40 pairs rotate instead of 16; as with: a partial rotation ignored" in done.stdout


# --- servers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Any:
    """A model of the kit, and the same one without its scaling."""
    config = KIT_MODULE.read(KIT / "models" / "llama-yarn.json")["config"]
    return [models.load(each, torch.float32) for each in (config, config | {"rope_scaling": None})]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", model_servers.KINDS)
def test_a_server_is_right_or_its_mistake_is_named(kind: str, served: Any, tmp_path: Path) -> None:
    for model, status, said in zip(
        served, (0, 1), ("llama-yarn: agrees after 12 prefixes", "no scaling at all"), strict=True
    ):
        with model_servers.serving(kind, model) as url:
            done = run("--server", url, "--model", "llama-yarn", cwd=tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
        assert said in done.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "path", "states", "prefixes"),
    [
        ("llama.cpp b1", "/props", {"default_generation_settings": {"n_ctx": 100}}, 6),
        ("vLLM 0.33.0", "/v1/models", {"data": [{"id": "served", "max_model_len": 101}]}, 6),
    ],
)
def test_a_server_with_a_short_context(
    kind: str, path: str, states: Any, prefixes: int, served: Any, tmp_path: Path
) -> None:
    usual = model_servers.KINDS[kind][2]

    def answer(model: Any, body: Any) -> Any:
        return usual(model, body) if len(body["prompt"]) < 101 else None

    with model_servers.serving(kind, served[0], answer, states={path: states}) as url:
        done = run("--server", url, "--model", "llama-yarn", cwd=tmp_path)
    assert f"agrees after {prefixes} prefixes" in done.stdout, done.stderr


def test_a_server_that_is_none(tmp_path: Path) -> None:
    done = run("--server", "http://127.0.0.1:9", "--model", "llama-yarn", cwd=tmp_path)
    assert done.returncode == 1
    assert "does not answer like vLLM, SGLang, llama.cpp" in done.stderr


# --- C++ ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_example_in_cpp(tmp_path: Path) -> None:
    source = (KIT / "example.cpp").read_text(encoding="utf-8")
    wrong = source.replace('if (settings.get("truncate", 1)) low', "low")
    assert wrong != source
    for name, text in (("right", source), ("wrong", wrong)):
        (tmp_path / f"{name}.cpp").write_text(text, encoding="utf-8")
        subprocess.run(["g++", "-std=c++17", "-o", name, f"{name}.cpp"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "right", KIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert re.fullmatch(r"\d{2} agree, 0 differ, \d+ not offered\n", done.stdout)
    done = subprocess.run([tmp_path / "wrong", KIT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gpt-oss-20b differs in its frequencies; as with: truncate true" in done.stdout


# --- ports with one mistake ---------------------------------------------------------------------------------------


def exact(**changed: Any) -> SimpleNamespace:
    """A port by the papers' formulas, with some functions replaced."""

    def read(config: Any, layer_type: str | None, length: int | None) -> formulas.Rope:
        return formulas.read(config, layer_type, length)

    def cos_sin(config: Any, positions: Any, layer_type: str | None, length: int | None) -> Any:
        rope = read(config, layer_type, length)
        axes, frequencies = rope.axes or (0,) * len(rope.inv_freq), [float(f) for f in rope.inv_freq]
        at = [[each[axis] for axis in axes] if isinstance(each, list) else [each] * len(axes) for each in positions]
        turns = [
            [float(rope.magnitude) * formulas.turned(p, f) for p, f in zip(row, frequencies, strict=True)] for row in at
        ]
        return [[t.real for t in row] for row in turns], [[t.imag for t in row] for row in turns]

    def rotate(config: Any, vector: Any, position: int, layer_type: str | None, length: int | None) -> Any:
        rope, result = read(config, layer_type, length), list(vector)
        pairs = len(rope.inv_freq)
        for i, f in enumerate(rope.inv_freq):
            turned = complex(vector[i], vector[i + pairs]) * formulas.turned(position, float(f)) * float(rope.magnitude)
            result[i], result[i + pairs] = turned.real, turned.imag
        return result

    port = {
        "inv_freq": lambda *given: [float(f) for f in read(*given).inv_freq],
        "magnitude": lambda *given: float(read(*given).magnitude),
        "softmax_scale": lambda *given: float(read(*given).softmax_scale),
        "cos_sin": cos_sin,
        "rotate": rotate,
    }
    named = {key: _with_names(function) for key, function in port.items()}
    return SimpleNamespace(**(named | changed))


def _with_names(function: Any) -> Callable[..., Any]:
    def called(*given: Any, layer_type: str | None = None, length: int | None = None) -> Any:
        return function(*given, layer_type, length)

    return called


def errors(port: Any, case: str, check: str, dtype: str = "float64") -> list[str]:
    outcomes = list(KIT_MODULE.check_tables(port, dtype, [case]))
    assert all(not each.error for each in outcomes if each.check != check)
    return [each.error for each in outcomes if each.check == check]


@pytest.mark.parametrize("case", ["qwen3-vl-8b-yarn", "gpt-oss-20b", "gemma-4-31b", "phi-4-mini", "internlm3-8b"])
def test_the_formulas_pass_in_float64(case: str) -> None:
    outcomes = list(KIT_MODULE.check_tables(exact(), "float64", [case]))
    assert all(not each.error for each in outcomes)
    assert sum(each.error == "" for each in outcomes) >= 5 * len({(e.layer_type, e.length) for e in outcomes})


def scaled(change: Callable[[Any], None]) -> Callable[..., Any]:
    """Frequencies of a config that was changed."""

    def inv_freq(config: Any, layer_type: str | None = None, length: int | None = None) -> list[float]:
        change(config)
        return [float(f) for f in formulas.read(config, layer_type, length).inv_freq]

    return inv_freq


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("gpt-oss-20b", lambda c: c["rope_scaling"].update(truncate=True), "truncate true"),
        ("qwen3-8b-yarn", lambda c: c["rope_scaling"].update(factor=1.25), "the factor from max_position_embeddings"),
        ("llama-3.1", lambda c: c.pop("rope_scaling"), "no scaling at all"),
        ("llama-3.1", lambda c: c.update(rope_theta=8.0, rope_scaling=None), "the factor in place of theta"),
        ("gemma-3-1b", lambda c: c.update(rope_local_base_freq=1e6), "the settings of full_attention"),
    ],
)
def test_wrong_frequencies_are_named(case: str, change: Any, said: str) -> None:
    found = errors(exact(inv_freq=scaled(change)), case, "inv_freq")
    assert any(said in error for error in found), found


def test_wrong_numbers_are_named() -> None:
    again = 0.1 * math.log(0.1 * math.log(8) + 1) + 1
    (error,) = (e for e in errors(exact(magnitude=lambda config: again), "olmo-3", "magnitude")[1:])
    assert "the magnitude through the logarithm again" in error
    (error,) = errors(exact(rotate=None, softmax_scale=lambda config: 192**-0.5), "deepseek-v3", "softmax_scale")
    assert "mscale_all_dim left out of the softmax scale" in error


def test_wrong_angles_are_named() -> None:
    def half(config: Any, positions: Any) -> Any:
        inv_freq = torch.tensor([float(f) for f in formulas.read(config).inv_freq], dtype=torch.bfloat16)
        angles = torch.tensor(positions, dtype=torch.bfloat16)[:, None] * inv_freq
        return angles.double().cos().tolist(), angles.double().sin().tolist()

    (error,) = errors(exact(cos_sin=half), "llama-3-8b", "cos_sin")
    assert "angles in bfloat16" in error
    (error,) = errors(exact(), "glm-4-9b", "rotated")
    assert "half pairing in place of interleaved" in error
