"""`extend`: from a model to a folder that an engine serves, with what it costs, in one command."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner, Result

from rope_ext_hf.cli.app import app
from rope_ext_hf.eval.stdlib_corpus import stdlib_held_out
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reference import path
from rope_ext_hf.serving.extending import plan_extension
from tests.support.serving_models import FOLDER

pytestmark = pytest.mark.filterwarnings("ignore")


def extend(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["extend", *arguments, "--yes"])


def tiny(file: str, folder: Path, **changes: Any) -> Path:
    """A folder with the published config values of a model, small sizes and random weights."""
    values = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))["config"] | changes
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_bundled_model_gets_a_folder_for_eight_times_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("reference", "--target-length", "2k", "--max-spans", "2")
    text = extend(*arguments)
    assert text.exit_code == 0, text.output
    steps = [shlex.split(line)[2:] for line in text.stdout.splitlines() if line.startswith("$ rope-ext")]
    assert [words[0] for words in steps] == ["ppl", "patch", "serve-config"]
    assert "vllm serve reference-2048 \\\n  --max-model-len 2048" in text.stdout
    for words in (steps[0], steps[2]):  # each step is a command of its own
        assert CliRunner().invoke(app, words).exit_code == 0
    patched = extend("reference-2048", "--target-length", "4k")
    assert patched.exit_code == 2
    assert "carries a patch, yarn x8" in patched.stderr
    written = (tmp_path / "reference-2048" / "config.json").stat().st_mtime_ns
    again = extend(*arguments, "--json")
    assert "parts were done before" in again.stderr
    assert (tmp_path / "reference-2048" / "config.json").stat().st_mtime_ns == written
    result = json.loads(again.stdout)
    verdict = result["verdict"]
    assert verdict["text"] in text.stdout
    assert verdict["gains"]
    assert result["serving"]["command"][:3] == ["vllm", "serve", "reference-2048"]

    run = json.loads(CliRunner().invoke(app, [*steps[0], "--json"]).stdout)
    for row in run["results"]:
        losses = verdict["as_loaded" if row["method"] is None else "extended"]
        assert losses[str(row["length"])] == pytest.approx(math.log(row["perplexity"]))

    # plain transformers reads the folder as well as the verdict says, on text of the same kind
    text_ids = torch.tensor(load_tokenizer("reference")(stdlib_held_out()[1].text[:2048]).input_ids)[None]
    plain: dict[str, float] = {}
    for name, source in (("as_loaded", path()), ("extended", tmp_path / "reference-2048")):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            logits = model(text_ids).logits[0, -257:-1]
        plain[name] = torch.nn.functional.cross_entropy(logits, text_ids[0, -256:]).item()
        assert plain[name] == pytest.approx(verdict[name]["2048"], abs=1.0)
    assert plain["as_loaded"] - plain["extended"] > 1


def test_one_command_leads_to_the_server_of_the_card_of_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rope_theta, factor and lengths are those of the model's card and of vLLM's page on context extension."""
    monkeypatch.chdir(tmp_path)
    tiny("qwen3-8b-yarn", tmp_path / "Qwen3-8B", rope_scaling=None)
    done = extend("Qwen3-8B", "--target-length", "128k", "--no-measure")
    assert done.exit_code == 0, done.output
    assert "published for Qwen3: https://" in done.stdout
    assert "expected  inputs within 32,768 tokens: rise by +0." in done.stdout
    assert "vllm serve Qwen3-8B-131072 \\\n  --max-model-len 131072" in done.stdout
    saved = json.loads((tmp_path / "Qwen3-8B-131072" / "config.json").read_text())
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0}
    assert saved["rope_parameters"] == saved["rope_parameters"] | entry
    assert saved["max_position_embeddings"] == 131072
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "Qwen3-8B-131072")
    assert loaded.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_one_command_leads_to_a_server_for_twice_the_context_of_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("llama-3.1", tmp_path / "Llama-3.1-8B")
    done = extend("Llama-3.1-8B", "--target-length", "256k", "--no-measure", "--engine", "sglang")
    assert done.exit_code == 0, done.output
    assert "expected  inputs within 131,072 tokens: rise by +0." in done.stdout
    assert "--context-length 262144" in done.stdout
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "Llama-3.1-8B").model.rotary_emb.inv_freq
    rotary = AutoModelForCausalLM.from_pretrained(tmp_path / "Llama-3.1-8B-262144").model.rotary_emb
    rotary(torch.zeros(1, 1), torch.tensor([[262143]]))  # transformers takes the long list from the first long input on
    assert rotary.inv_freq[-1].item() == pytest.approx(before[-1].item() / 2, rel=1e-5)  # halved under llama3's eighth
    assert rotary.inv_freq[0].item() == pytest.approx(before[0].item(), rel=1e-5)


def test_what_cannot_be_extended_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("gpt-oss-20b", tmp_path / "gpt-oss")
    (tmp_path / "reference-512").mkdir()
    refused = {
        (
            "reference",
            "--target-length",
            "256",
        ): "is for 256 .* needs no extension. Serve it as it is: vllm serve",
        ("reference", "--target-length", "64k"): "no method that engines serve brings .* without training",
        ("reference", "--target-length", "512"): "exists already and is something else; give --out another name",
        ("reference", "--target-length", "1k", "--engine", "vlm"): "Did you mean 'vllm'",
        ("gpt-oss", "--target-length", "256k", "--engine", "vllm"): "Engines that serve yarn: .*sglang",
    }
    for arguments, message in refused.items():
        result = extend(*arguments)
        assert result.exit_code == 2, result.output
        assert re.search(message, result.stderr), result.stderr
    asked = CliRunner().invoke(app, ["extend", "reference", "--target-length", "1k"])
    assert asked.exit_code == 2
    assert "give --yes" in asked.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt-oss", "reference-512"]


def test_a_published_recipe_decides_the_context_length(tmp_path: Path) -> None:
    folder = str(tiny("qwen3-8b-yarn", tmp_path / "Qwen3-8B", rope_scaling=None))
    assert plan_extension(folder, 65536).context_length == 32768  # the card advises a factor of 2 for 65,536 tokens
    assert plan_extension(folder, 131072).lengths == (4096, 32768, 131072)
    assert plan_extension(folder, 163840).context_length == 40960  # beyond what is published: as the config states
    assert plan_extension(folder, 131072, context_length=40960).context_length == 40960
    assert "--device" in plan_extension(folder, 131072, reading=["--device", "cuda"]).steps["ppl"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nothing", ""),
        ("weights", "model.safetensors changed since"),
        ("config", "config.json changed since"),
        ("tokenizer", "tokenizer_config.json changed since"),
        ("model", "model.safetensors, config.json changed since, or belong to another model"),
        ("copy", "model.safetensors changed since"),
    ],
)
def test_a_folder_made_from_another_model_is_not_served(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tiny("llama-3.1", tmp_path / "model")
    (source / "tokenizer_config.json").write_text('{"model_max_length": 131072, "eos_token": "a"}')
    arguments = ("model", "--target-length", "256k", "--no-measure", "--engine", "sglang")
    assert extend(*arguments).exit_code == 0
    if change == "model":
        tiny("llama-3.1", source, hidden_act="gelu")
    elif change == "config":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    elif change == "tokenizer":
        (source / "tokenizer_config.json").write_text('{"model_max_length": 131072, "eos_token": "b"}')
    elif change != "nothing":
        weights = tmp_path / ("model-262144" if change == "copy" else "model") / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1
        weights.write_bytes(data)
    done = extend(*arguments)
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (2 if said else 0, True), done.output
