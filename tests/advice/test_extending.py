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

from rope_ext_hf.advice.extending import ExtensionVerdict, plan_extension
from rope_ext_hf.cli.app import app
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.corpora import stdlib_held_out
from rope_ext_hf.reference import path
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.serving.questions import Extending
from tests.support.models import build
from tests.support.serving_models import FOLDER
from tests.support.wrapped_text import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore")


def extend(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["extend", *arguments, "--yes"])


def tiny(file: str, folder: Path, **changes: Any) -> Path:
    """A folder with the published config values of a model, small sizes and random weights."""
    values = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))["config"] | changes
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.thorough
def test_the_bundled_model_gets_a_folder_for_twice_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("reference", "--target-length", "512", "--data", "stdlib?max_documents=4")
    text = extend(*arguments)
    assert text.exit_code == 0, text.output
    steps = [shlex.split(line)[2:] for line in text.stdout.splitlines() if line.startswith("$ rope-ext")]
    assert [words[0] for words in steps] == ["ppl", "patch", "card", "serve-config"]
    assert "vllm serve reference-512 \\\n  --max-model-len 512" in text.stdout
    card = (tmp_path / "reference-512" / "README.md").read_text()
    assert "## Measured: perplexity on stdlib" in card
    for words in (steps[0], steps[2], steps[3]):  # each step is a command of its own
        assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "reference-512" / "README.md").read_text() == card
    patched = extend("reference-512", "--target-length", "1k")
    assert patched.exit_code == 2
    assert "carries a patch, yarn x2" in patched.stderr
    written = (tmp_path / "reference-512" / "config.json").stat().st_mtime_ns
    again = extend(*arguments, "--json")
    assert "parts were done before" in again.stderr
    assert (tmp_path / "reference-512" / "config.json").stat().st_mtime_ns == written
    result = json.loads(again.stdout)
    verdict = result["verdict"]
    assert verdict["text"] in unwrapped(text.stdout)
    assert verdict["refusal"] == ""
    assert result["serving"]["command"][:3] == ["vllm", "serve", "reference-512"]

    (folder,) = (tmp_path / "rope-ext-results").iterdir()
    loss: dict[tuple[bool, int], float] = {}
    for each in read_run(folder).results:
        bits = [document.nats / math.log(2) / document.bytes for document in each.documents]
        assert len(bits) >= 3
        loss[each.method is not None, each.length] = sum(bits) / len(bits)
    assert verdict["change"][0] == pytest.approx(loss[True, 512] - loss[False, 512])
    assert verdict["change"][2] < 0  # the upper end of the interval
    for length, price in verdict["prices"].items():
        assert price[0] == pytest.approx(loss[True, int(length)] - loss[False, int(length)])
        assert verdict["balances"][length][0] == pytest.approx(price[0] + verdict["change"][0])
    for length, rise in verdict["rises"].items():
        assert rise[0] == pytest.approx(loss[True, int(length)] - loss[False, 256])

    # plain transformers reads with the folder what it does not read as loaded
    text_ids = torch.tensor(load_tokenizer("reference")(stdlib_held_out()[1].text[:512]).input_ids)[None]
    plain: dict[str, float] = {}
    for name, source in (("as_loaded", path()), ("extended", tmp_path / "reference-512")):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            logits = model(text_ids).logits[0, -65:-1]
        plain[name] = torch.nn.functional.cross_entropy(logits, text_ids[0, -64:]).item()
    assert plain["as_loaded"] - plain["extended"] > 1


@pytest.mark.thorough
def test_no_folder_is_written_where_the_measurement_speaks_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    guessing = build("llama", vocab_size=259)
    torch.nn.init.zeros_(guessing.lm_head.weight)  # whatever it reads, all tokens are equally likely
    guessing.save_pretrained("guessing")
    load_tokenizer("reference").save_pretrained("guessing")
    Path("one.txt").write_text(stdlib_held_out()[1].text[:5000])
    flat, text = ("guessing", "--target-length", "256"), ("--data", "stdlib?max_documents=4")
    unclear = extend(*flat, *text)
    assert unclear.exit_code == 2
    assert re.search(
        r"yarn is not known to gain at 256 tokens: the loss is not told apart: .* \[.*\] bits per byte; nothing was "
        r"written. Give --anyway",
        " ".join(unclear.stderr.split()),
    )
    one = extend(*flat, "--data", "one.txt", "--max-spans", "4")
    assert one.exit_code == 2
    assert "1 document gives no interval; nothing was written" in " ".join(one.stderr.split())
    # Stated to be for half of what it is for, the bundled model reads the whole better without a method.
    worse = extend("reference", "--target-length", "256", "--context-length", "128")
    assert worse.exit_code == 2
    assert "gain at 256 tokens: the loss is higher by 0." in " ".join(worse.stderr.split())
    assert "documents: at 256 tokens the loss is higher by 0." in unwrapped(worse.stdout)
    assert not list(tmp_path.glob("*-256"))
    anyway = extend(*flat, *text, "--anyway")
    assert anyway.exit_code == 0, anyway.output
    assert "not told apart" in anyway.stdout
    assert (tmp_path / "guessing-256" / "config.json").is_file()


LOWER, HIGHER, SAME = Estimate(-2.0, -2.5, -1.5, 8), Estimate(0.3, 0.2, 0.4, 8), Estimate(0.01, -0.1, 0.1, 8)
FEW = Estimate(-2.0, None, None, 2)


def judged(**values: Any) -> ExtensionVerdict:
    standard: dict[str, Any] = {
        "method": "yarn", "context_length": 256, "target_length": 2048, "change": LOWER,
        "prices": {256: HIGHER, 32: SAME}, "balances": {256: LOWER, 32: LOWER}, "rises": {256: HIGHER, 2048: HIGHER},
        "expectations": {256: (), 2048: ()},
    }  # fmt: skip
    return ExtensionVerdict(**standard | values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, ""),
        ({"change": HIGHER}, "yarn is not known to gain at 2,048 tokens: the loss is higher by 0.300 [0.200 to 0.400]"),
        ({"change": SAME}, "the loss is not told apart: +0.010 [-0.100 to +0.100] bits per byte"),
        ({"change": FEW}, "the loss is not told apart: -2.000 bits per byte, and 2 documents give no interval"),
        ({"change": None}, "the loss is not known: no measure has both"),
        (
            {"balances": {256: LOWER, 32: HIGHER}},
            "the price at 32 tokens is above the gain: the loss at both together is higher by 0.300",
        ),
        ({"balances": {256: SAME, 32: LOWER}}, "the price at 256 tokens is not known to be below the gain: together"),
        ({"balances": {256: None, 32: LOWER}}, "the price at 256 tokens is not known to be below the gain"),
    ],
)
def test_a_folder_is_for_a_gain_that_is_surely_above_every_price(values: dict[str, Any], said: str) -> None:
    refusal = judged(**values).refusal
    assert (said in refusal, bool(refusal)) == (True, bool(said))


def test_gain_and_prices_are_said() -> None:
    assert str(judged()) == (
        "Compared with the model as loaded, in the mean over 8 documents: at 2,048 tokens the loss is lower by 2.000 "
        "[1.500 to 2.500] bits per byte; at 256 tokens it is higher by 0.300 [0.200 to 0.400] bits per byte, at 32 "
        "tokens it is not told apart: +0.010 [-0.100 to +0.100] bits per byte."
    )


@pytest.mark.parametrize(
    ("rise", "expected", "said"),
    [
        (Estimate(0.9, 0.8, 1.0, 8), (0.23,), "[+0.80 to +1.00] is measured: the expectation failed, it is higher."),
        (Estimate(0.1, 0.05, 0.15, 8), (0.23, 0.23), "is measured: the expectation failed, it is lower."),
        (Estimate(0.2, 0.1, 0.3, 8), (0.23,), "is measured: that is not told from the expectation."),
        (Estimate(0.5, None, None, 2), (0.23,), "+0.50 is measured: whether the expectation failed cannot be told."),
        (None, (0.23,), "nothing is measured: whether the expectation failed cannot be told."),
    ],
)  # fmt: skip
def test_an_expectation_is_held_against_the_measurement(
    rise: Estimate | None, expected: tuple[float, ...], said: str
) -> None:
    text = str(judged(rises={256: rise}, expectations={256: expected}))
    assert "At 256 tokens, +0.23 bits per byte above the loss as loaded at 256 was expected, and " in text
    assert text.endswith(said)


def test_an_expectation_may_be_a_spread() -> None:
    spread = judged(rises={256: Estimate(0.4, 0.35, 0.45, 8)}, expectations={256: (0.5, 0.3)})
    assert "+0.30 to +0.50 bits per byte above the loss" in str(spread)
    assert "not told from the expectation" in str(spread)


def test_one_command_leads_to_the_server_of_the_card_of_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rope_theta, factor and lengths are those of the model's card and of vLLM's page on context extension."""
    monkeypatch.chdir(tmp_path)
    tiny("qwen3-8b-yarn", tmp_path / "Qwen3-8B", rope_scaling=None)
    done = extend("Qwen3-8B", "--target-length", "128k", "--no-measure")
    assert done.exit_code == 0, done.output
    assert "published for Qwen3: https://" in unwrapped(done.stdout)
    assert "expected inputs within 32,768 tokens: rise by +0." in unwrapped(done.stdout)
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


@pytest.mark.slow
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
    assert (
        plan_extension(folder, Extending(target_length=65536)).context_length == 32768
    )  # the card advises a factor of 2 for 65,536 tokens
    assert plan_extension(folder, Extending(target_length=131072)).lengths == (8192, 32768, 131072)
    assert (
        plan_extension(folder, Extending(target_length=163840)).context_length == 32768
    )  # beyond what is published, too
    assert plan_extension(folder, Extending(target_length=131072, context_length=40960)).context_length == 40960
    assert (
        "--device" in plan_extension(folder, Extending(target_length=131072), reading={"device": "cuda"}).steps["ppl"]
    )


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
