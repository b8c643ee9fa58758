"""Advice: what published models are for, which methods fit, memory by hand, engines, and commands that run."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError, MethodError
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.reading.cost.memory import cached_bytes
from rope_ext_hf.reading.cost.operations import ReadingSpeed
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.advice import Advice, advise, next_commands
from rope_ext_hf.tools.advice.guidance import FINE_TUNING, PURPOSES, PYTHON, SERVING, SHORT_INPUTS, guidance_of
from tests.support.models import build
from tests.support.wrapped_text import unwrapped
from tests.tools.support.serving_models import FOLDER

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("llama-3.1", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "Qwen3-8B": (
        "qwen3-8b-yarn",
        {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_scaling": None}
        | {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936},
    ),
    "Mistral-7B": ("mistral-7b-v0.3", {"num_hidden_layers": 32, "num_key_value_heads": 8}),
    "Gemma-3-4B": (
        "gemma-3-4b",
        {"num_hidden_layers": 34, "num_key_value_heads": 4, "layer_types": None, "sliding_window_pattern": 6},
    ),
    "DeepSeek-V3": ("deepseek-v3", {"num_hidden_layers": 61, "kv_lora_rank": 512}),
    "gpt-oss-20b": ("gpt-oss-20b", {"num_hidden_layers": 24, "num_key_value_heads": 8, "layer_types": None}),
    "Qwen3-VL-8B": ("qwen3-vl-8b", {}),
}
"""Published configs with their published sizes."""
K = 1024
ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of the model that a test names, with its config alone."""
    file, sizes = MODELS[request.param]
    config = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))["config"] | sizes
    path = tmp_path / str(request.param)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def of_model(*names: str) -> Any:
    return pytest.mark.parametrize("folder", names, indirect=True)


def memory(advice: Advice, tokens: int, dtype: str = "bfloat16", batch: int = 1) -> int:
    (found,) = (m.bytes for m in advice.memory if (m.tokens, m.dtype, m.batch) == (tokens, dtype, batch))
    return found


# --- what is advised --------------------------------------------------------------------------------------------------


@of_model("Llama-3.1-8B")
def test_a_model_that_reads_so_far_already_needs_no_method(folder: Path) -> None:
    advice = advise(folder, 128 * K)
    assert (advice.context_length, advice.original_length, advice.factor) == (128 * K, 8 * K, 1.0)
    assert advice.extended_by[0].startswith("llama3(factor=8")
    assert not advice.methods
    assert not advice.choices
    command = next(line for line in advice.commands["serve with vllm"] if line.startswith("vllm"))
    assert shlex.split(command) == ["vllm", "serve", str(folder), "--max-model-len", "131072"]
    shorter = advise(folder, 32 * K)
    assert "--max-model-len 32768" in " ".join(shorter.commands["serve with vllm"])


@of_model("Qwen3-8B", "Mistral-7B")
def test_a_plain_model_is_served_with_the_first_choice(folder: Path) -> None:
    advice = advise(folder, 128 * K)
    assert advice.extended_by == ()
    assert advice.choices[SERVING] == ("yarn", "mrrope")
    assert advice.choices[FINE_TUNING] == ("yarn",)
    assert set(advice.choices[SHORT_INPUTS]) == {"dynamic-yarn", "dynamic-self-extend", "jet-long"}
    assert set(advice.choices[PYTHON]) == {"dynamic-self-extend", "rerope", "dca"}
    assert {advice.served[engine] for engine in ("vllm", "sglang", "llama.cpp", "ollama", "mlx")} == {"yarn"}
    by_name = {each.method: each for each in advice.methods}
    guided = {name: known for name in list_methods() if (known := guidance_of(name)) is not None}
    assert set(by_name) == {name for name, known in guided.items() if not known.unrotated}
    kinds = {name: by_name[name].kind for name in ("yarn", "dynamic-yarn", "self-extend", "learnable")}
    assert list(kinds.values()) == ["static", "length-dependent", "remapping", "trained"]
    assert not by_name["linear"].fits
    assert by_name["linear"].why.startswith("did not help on ")
    assert by_name["factors"].why == "as good as its list"
    assert not any(by_name["self-extend"].engines.values())


@of_model("Mistral-7B")
def test_methods_are_advised_as_far_as_they_helped_a_measured_model(folder: Path) -> None:
    at_32_times, beyond = (advise(folder, length * K) for length in (1024, 2048))
    for advice in (at_32_times, beyond):
        assert advice.choices[FINE_TUNING] == ("yarn",)
    assert at_32_times.choices[SERVING] == ("yarn", "mrrope")
    at_32 = {each.method: each.why for each in at_32_times.methods}
    assert at_32["yarn"] == at_32["mrrope"] == "helped at this length on the wide-heads model"
    assert "dca" in at_32_times.choices[PYTHON]
    assert not {SERVING, PYTHON} & beyond.choices.keys()
    why = {each.method: each.why for each in beyond.methods}
    assert why["dca"] == (
        "not measured at this length; helped: to 8x on SmolLM2-135M-Instruct, to 32x on the bundled model and the "
        "wide-heads model, to 16x on the docstring model"
    )
    assert not any(each.fits for each in beyond.methods)


@pytest.mark.slow
@of_model("gpt-oss-20b", "DeepSeek-V3", "Qwen3-VL-8B", "Gemma-3-4B")
@pytest.mark.sampled(3)
def test_engines_are_those_whose_rules_compute_the_same(folder: Path) -> None:
    advice = advise(folder, 2 * advise(folder, 1).context_length)
    for each in advice.methods:
        for name, encoding in each.engines.items():
            if encoding is None:
                assert name in each.refusals[name] or each.method in each.refusals[name]
                continue
            config = serving.serving_config(folder, name, each.method, target_length=advice.target_length)
            assert config.encoding == encoding
    for engine, method in advice.served.items():
        assert next(m for m in advice.methods if m.method == method).engines[engine]
    json.dumps(advice.to_dict())
    assert folder.name in str(advice)


def test_purposes_have_a_first_choice() -> None:
    guided = [known for name in list_methods() if (known := guidance_of(name)) is not None]
    named = {purpose for guidance in guided for purpose in guidance.purposes}
    assert named == set(PURPOSES)


# --- every number of it is one of benchmarks/results.jsonl -----------------------------------------------------------


def rises() -> dict[str, dict[tuple[str, float | None, float], float]]:
    """Of every model the increase by method, factor and length in context lengths, as the benchmark recorded it."""
    lines = [json.loads(line) for line in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    names = {
        "reference": "bundled model",
        "docstring-model": "docstring model",
        "wide-heads-model": "wide-heads model",
    }
    found: dict[str, dict[tuple[str, float | None, float], float]] = {}
    longest = {max(row["length"] for row in line["rows"]) for line in lines if line["benchmark"] == "factors"}
    for length in sorted(longest):  # a measurement that goes further is on other text, and counts beyond the others
        known = {name: max(scale for *_, scale in rows) for name, rows in found.items()}
        for line in lines:
            if line["benchmark"] == "factors" and max(row["length"] for row in line["rows"]) == length:
                name = names[line["model"]]  # later lines win; one may hold some methods alone
                for row in line["rows"]:
                    scale = row["length"] / line["context_length"]
                    if scale > known.get(name, 0):
                        found.setdefault(name, {})[row["method"], row["factor"], scale] = row["increase"]
    small = {name: found[name] for name in names.values() if name in found}
    return {"SmolLM2-135M-Instruct": rises_of_real_model(), **small}


def rises_of_real_model() -> dict[tuple[str, float | None, float], float]:
    """The rises of SmolLM2-135M in bits per token, by `make real-models`, and where that has none, by `make gpu`."""
    found: dict[tuple[str, float | None, float], list[float]] = {}
    gpu = json.loads((ROOT / "docs/results/gpu-nvidia-h200.json").read_text(encoding="utf-8"))
    rows = [row for row in gpu["steps"]["real model"]["results"] if "loss" in row]
    short = {row["text"]: row["loss"]["8192"] for row in rows if row["method"] == "unpatched"}
    for row in rows:
        method, _, factor = row["method"].partition(" x")
        for scale in (1, float(factor)) if factor else (1, 2, 4, 8):
            rise = row["loss"][str(int(scale * 8192))] - short[row["text"]]
            found.setdefault((method, float(factor) if factor else None, scale), []).append(rise / math.log(2))
    entries = json.loads((ROOT / "docs/results/real-models.json").read_text(encoding="utf-8"))["models"]
    by_factor = ("yarn", "ntk", "mrrope", "linear")
    read: dict[tuple[str, float | None, float], list[float]] = {}
    # One for each dtype; of a method the one with most texts counts, of equally many that in which more was measured.
    for entry in sorted(entries, key=lambda entry: -len(entry["texts"])):
        if not entry["model"].startswith("SmolLM2"):
            continue
        base = {(row["text"], row["multiple"]): row for row in entry["texts"] if row["method"] == "unpatched"}
        here: dict[tuple[str, float | None, float], list[float]] = {}
        for row in entry["texts"]:
            multiple, known = row["multiple"], base[row["text"], row["multiple"]]
            factor = float(multiple) if row["method"] in by_factor else None
            for scale in (1, multiple) if factor or multiple == 2 else (multiple,):
                reference = known["loss"]["8192"] if scale == 1 else known["recent"][str(scale * 8192)]
                rise = (row["loss"][str(scale * 8192)] - reference) / math.log(2)
                here.setdefault((row["method"], factor, scale), []).append(rise)
        read |= {key: values for key, values in here.items() if len(values) > len(read.get(key, ()))}
    return {key: sum(values) / len(values) for key, values in (found | read).items()}


def said_of(key: tuple[str, float | None, float], measured: dict[str, dict[Any, float]]) -> str:
    """Return what is to be said of a method and a length: small models count where no real one was measured."""
    real = {name: rows for name, rows in measured.items() if "model" not in name and key in rows}
    on = real or {name: rows for name, rows in measured.items() if key in rows}
    nouns = {name: f"the {name}" if "model" in name else name for name in on}
    helped = [nouns[name] for name, rows in on.items() if rows[key] <= 0.2 * rows["unpatched", None, key[2]] + 1e-9]
    return (
        f"helped at this length on {' and '.join(helped)}"
        if helped
        else f"did not help on {' and '.join(nouns.values())}"
    )


def in_order(values: dict[str, float], models: Any) -> str:
    return " / ".join(f"{values[name]:+.2f}" if name in values else "-" for name in models)


@pytest.mark.parametrize("times", [2, 4, 8, 16])
@of_model("Mistral-7B")
def test_advice_is_what_was_measured(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # as in a pipe: the numbers of a row stay on one line
    measured = rises()
    assert {"SmolLM2-135M-Instruct", "bundled model", "docstring model"} <= set(measured)
    advice = advise(folder, times * 32 * K)
    checked = 0
    for each in advice.methods:
        keys = ((each.method, times, times), (each.method, None, times))
        key = next((k for k in keys if any(k in rows for rows in measured.values())), None)
        if key is None:
            assert not each.fits
            assert not each.measured
            continue
        checked += 1
        on = {name: rows for name, rows in measured.items() if key in rows}
        assert each.measured == pytest.approx({name: rows[key] for name, rows in on.items()}, abs=1e-6)
        assert each.why == said_of(key, measured), each.method
        assert each.fits == each.why.startswith("helped")
        numbers = in_order(each.measured, measured)
        if each.fits:
            assert numbers in advice.full_text()
        if key[1]:
            at_1x = (each.method, times, 1)  # not of a model whose measurement to this length is of other text
            short = in_order({name: rows[at_1x] for name, rows in measured.items() if at_1x in rows}, measured)
            assert each.short_inputs == f"rise by {short}"
        elif each.method == "cope":  # the one measured method without a factor that changes short inputs
            assert each.short_inputs.startswith("rise by ")
        else:
            assert each.short_inputs.startswith("the same up to ")
    known = {method for rows in measured.values() for method, _, scale in rows if scale == times}
    assert checked == len(known - {"unpatched"})
    for purpose, names in advice.choices.items():
        fits = {each.method for each in advice.methods if each.fits}
        assert purpose == FINE_TUNING or set(names) <= fits
    for model in measured:
        assert model in advice.full_text()


@of_model("Mistral-7B")
def test_a_real_model_decides_where_one_was_measured(folder: Path) -> None:
    """Small models decide on the other methods; where they disagree, none is hidden."""
    measured = rises()
    by_name = {each.method: each for each in advise(folder, 64 * K).methods}
    assert by_name["yarn"].why == "helped at this length on SmolLM2-135M-Instruct"
    assert by_name["by-parts"].why == said_of(("by-parts", 2, 2), measured)
    assert "model" in by_name["by-parts"].why
    full = advise(folder, 64 * K)
    assert "Measure which candidate reads best on your model" in unwrapped(full.full_text())
    assert next(iter(full.commands)).startswith("measure on your own text: ")


def test_a_patch_for_far_more_than_is_asked_for_is_noted() -> None:
    model = rope.patch(build("llama"), "yarn", factor=16)  # of 64 tokens
    notes = advise(model, 128).notes
    assert notes[0] == "The patch is for 1,024 tokens, 8 times as much as you need."
    assert notes[1] == rope.describe(model).short_inputs[0]
    assert advise(model, 1024).notes == ()


def test_the_text_is_narrow_and_names_methods_once() -> None:
    advice = advise("reference", 512)
    prose = advice.full_text().split("\n# ")[0].splitlines()
    assert max(map(len, prose)) <= 120
    for each in advice.methods:
        if not each.fits:
            assert sum(f" {each.method}:" in line for line in prose) <= 1
            assert not any(line.startswith(f"{each.method} ") for line in prose)
    assert "the long line" not in advice.full_text()
    assert "Write these keys" not in advice.full_text()
    measuring = next(key for key in advice.commands if key.startswith("measure"))
    assert "tokens are read" in measuring
    assert sum(command.startswith("llama-server") for each in advice.commands.values() for command in each) == 1


@of_model("Qwen3-8B")
def test_every_line_fits_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    text = run_line("rope-ext extend Qwen3-8B --target-length 128k --dry-run --all")
    assert max(map(len, text.splitlines())) <= 120
    measuring = next(line for line in text.splitlines() if line.startswith("# measure"))
    assert "TFLOP" not in text
    assert re.search(r"about [\d,.]+ \w+ on (cpu|cuda)", measuring)


@of_model("Qwen3-8B")
def test_suggested_measurements_take_minutes_on_this_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 models, 2 operations for each of 7 billion weights and token; and attention."""
    pairs = 32768**2 / 2 + 131072**2 / 2
    operations = 8 * (2 * 6.9e9 * (32768 + 131072) + 4 * pairs * 36 * 32 * 128)

    def lines(rate: float, in_float32: float) -> tuple[str, list[str]]:
        def speed(model: Any, device: Any, dtype: torch.dtype) -> ReadingSpeed:
            products = in_float32 if dtype == torch.float32 else rate
            return ReadingSpeed(products, products, 1e30, 1e30, 1e30)

        monkeypatch.setattr(next_commands, "measure_speed", speed)
        monkeypatch.setattr(next_commands, "loaded_dtype", lambda *_: torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        commands = advise(folder, 128 * K).commands
        goal = next(goal for goal in commands if goal.startswith("measure"))
        return goal, list(commands[goal])

    goal, (ppl, passkey) = lines(
        operations * 3.5 / 600, operations * 3.5 / 600
    )  # three spans and a half in ten minutes
    assert "--max-spans 3" in ppl
    assert "--trials 1" in passkey  # five depths
    assert f"{3 * 8 * (32768 + 131072):,} tokens" in goal
    assert "about 9 minutes on cpu; retrieval: about 14 minutes" in goal
    assert "--dtype" not in ppl + passkey
    goal, (ppl, passkey) = lines(operations / 6000, operations / 28)  # bfloat16 is 200 times slower than float32
    assert "--max-spans 8 --dtype float32" in ppl
    assert "--trials 4 --dtype float32" in passkey


# --- memory, by hand --------------------------------------------------------------------------------------------------


@of_model("Llama-3.1-8B")
def test_keys_and_values_of_a_llama(folder: Path) -> None:
    advice = advise(folder, 256 * K, batches=(1, 8))
    for tokens in (128 * K, 256 * K):
        by_hand = 2 * 32 * 8 * 128 * tokens  # keys and values x layers x key heads x dims
        assert memory(advice, tokens) == 2 * by_hand
        assert memory(advice, tokens, "float32", 8) == 8 * 4 * by_hand
        assert memory(advice, tokens, "8 bits") == by_hand
    assert "17.18 GB" in advice.full_text()


@of_model("Gemma-3-4B")
def test_sliding_windows_keep_their_window(folder: Path) -> None:
    advice = advise(folder, 128 * K)  # of 34 layers every sixth attends to all tokens, the others to 1,024
    assert memory(advice, 128 * K) == 2 * (2 * 4 * 256) * (5 * 128 * K + 29 * 1024)
    assert "29 of 34 layers attend to the last 1024 tokens only" in advice.notes[0]


@of_model("DeepSeek-V3")
def test_latent_attention_keeps_latents(folder: Path) -> None:
    advice = advise(folder, 160 * K)
    assert memory(advice, 160 * K) == 2 * 61 * (512 + 64) * 160 * K


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_keys_and_values_are_what_a_cache_holds(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        cache = model(torch.arange(3, 83)[None], use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:  # a sliding layer leaves out the token that the next one pushes out
        held += sum(t.numel() // t.shape[2] * (t.shape[2] + layer.is_sliding) for t in (layer.keys, layer.values))
    assert cached_bytes(model.config, 80, width=1) == held


def test_layers_with_sizes_of_their_own_and_shared_ones() -> None:
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    gemma4 = AutoConfig.for_model("gemma4_text", **sizes, head_dim=16, global_head_dim=32, sliding_window=8)
    assert gemma4.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert cached_bytes(gemma4, 100, width=1) == 5 * 2 * 16 * 8 + 2 * 32 * 100
    hybrid = AutoConfig.for_model("qwen3_next", **sizes | {"num_hidden_layers": 4}, head_dim=16)
    assert hybrid.layer_types.count("linear_attention") == 3
    state = hybrid.linear_num_value_heads * hybrid.linear_key_head_dim * hybrid.linear_value_head_dim
    assert cached_bytes(hybrid, 100, width=1) == 2 * 16 * 100 + 3 * 4 * state


# --- the commands -----------------------------------------------------------------------------------------------------


def parse(command: str) -> str:
    """Feed a command to the command line's parser; the name of the command."""
    program, name, *arguments = shlex.split(command)
    assert program == "rope-ext"
    group = typer.main.get_command(app)
    group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    return name


@pytest.mark.slow
@of_model("Llama-3.1-8B", "Qwen3-8B", "Mistral-7B", "gpt-oss-20b")
@pytest.mark.parametrize(("length", "stated"), [(128 * K, None), (256 * K, None), (64 * K, 32 * K)])
@pytest.mark.sampled(5)
def test_commands_parse(folder: Path, length: int, stated: int | None) -> None:
    advice = advise(folder, length, context_length=stated)
    lines = [line for commands in advice.commands.values() for line in commands if not line.startswith("#")]
    parsed = [parse(line) for line in lines if line.startswith("rope-ext")]
    served = [name for name in advice.commands if name.startswith(("serve with", "as published"))]
    assert parsed.count("serve-config") == len(served)
    assert {"serve with llama.cpp", "serve with gguf"} - set(advice.commands)  # one program
    if advice.choices:
        assert {"ppl", "passkey", "describe", "patch"} <= set(parsed)
    for line in lines:
        words = shlex.split(line)
        if "--hf-overrides" in words:
            json.loads(words[words.index("--hf-overrides") + 1])
    assert any(line.startswith("vllm serve") for line in lines) or "vllm" not in advice.served


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    result = run(app, ["extend", "reference", "--target-length", "1k", "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    advice = json.loads(result.output)["advice"]
    assert advice["context_length"] == 256
    lines = [line for commands in advice["commands"].values() for line in commands if line.startswith("rope-ext")]
    quick = [words for _, *words in map(shlex.split, lines) if words[0] in ("describe", "patch", "serve-config")]
    assert len(quick) >= 7
    for words in quick:
        result = run(app, words)
        assert result.exit_code == 0, (words, result.output)
    patched = advise("reference-1024", 1024)  # the folder that one of the commands wrote
    assert (patched.context_length, patched.methods) == (1024, ())
    assert "yarn" in patched.extended_by[0]
    text = run(app, ["extend", "reference-1024", "--target-length", "2k", "--dry-run", "--all"]).output
    assert "# serve with vllm" in text


def run_line(line: str) -> str:
    """The output of a command that advice printed."""
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    return result.output


def served_by_vllm(text: str) -> tuple[list[str], dict[str, Any]]:
    """The words of the server command in a text, and the values of the config that it overrides."""
    words = shlex.split(text[text.index("vllm serve") :].replace("\\\n", " "))
    return words, json.loads(words[words.index("--hf-overrides") + 1])


@pytest.mark.slow
@of_model("Qwen3-8B")
def test_the_command_of_the_card_of_qwen3_is_two_commands_away(folder: Path) -> None:
    """The entry and the length are those of the model's card and of vLLM's example of context extension."""
    text = run_line(f"rope-ext extend {folder} --target-length 128k --dry-run --all")
    assert "This is as published for Qwen3" in text  # over 32,768 tokens, where its config states 40,960
    assert re.search(r"yarn +static +rise by \+0\.\d\d /", text)  # what it costs short inputs
    section = text.split("# as published for Qwen3\n")[1].split("\n\n")[0].replace(" \\\n", " ")
    described, configured = section.splitlines()
    words, overrides = served_by_vllm(run_line(configured))
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert words[words.index("--max-model-len") + 1] == "131072"
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000}
    assert overrides["rope_parameters"] == overrides["rope_parameters"] | entry
    assert "Inputs within the context length change as well" in unwrapped(run_line(described))
    other = run_line(f"rope-ext extend {folder} --target-length 128k --context-length 40960 --dry-run --all")
    assert "context_length=32768, target_length=131072" in " ".join(other.split())
    # Of a long folder name the server's own command is not shown, but the one that prints it.
    configured = text.split("# serve with vllm\n")[1].replace(" \\\n", " ").splitlines()[0]
    assert served_by_vllm(run_line(configured))[1] == overrides


@of_model("Llama-3.1-8B")
def test_a_server_command_for_twice_the_context_of_llama_is_two_commands_away(folder: Path) -> None:
    text = run_line(f"rope-ext extend {folder} --target-length 256k --dry-run --all").replace(" \\\n", " ")
    assert re.search(r"yarn +static +rise by \+0\.\d\d /", text)
    (line,) = (
        each
        for each in text.splitlines()
        if each.startswith("rope-ext serve-config") and "--method" in each and "vllm" in each
    )
    words, overrides = served_by_vllm(run_line(line))
    assert words[words.index("--max-model-len") + 1] == "262144"
    config = AutoConfig.from_pretrained(folder)
    wavelengths = {}
    for scaling in ("llama3", "longrope"):
        inv_freq, magnitude = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"), seq_len=262144)
        wavelengths[scaling] = 2 * torch.pi / inv_freq
        for key, value in overrides.items():
            setattr(config, key, value)
    trained, extended = wavelengths.values()
    assert trained[19] < 131072 / 32  # YaRN leaves pairs alone that complete 32 cycles within the context length
    torch.testing.assert_close(extended[:20], trained[:20], rtol=1e-5, atol=0)
    assert extended[-1] == pytest.approx(2 * trained[-1].item(), rel=1e-5)
    assert magnitude == pytest.approx(0.1 * math.log(2) + 1, rel=1e-6)


def test_impossible_lengths(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="target_length must be"):
        advise("reference", 0)
    with pytest.raises(MethodError, match="a batch must be"):
        advise("reference", 1024, batches=(0,))
    with pytest.raises(CheckpointError, match="no such model folder"):
        advise(tmp_path / "none", 1024)
    result = CliRunner().invoke(app, ["extend", "reference", "--target-length", "1k", "--dry-run", "--batch", "1.5"])
    assert result.exit_code == 2
