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
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.reference import path
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.tools.advice.extending import Comparison, ExtensionVerdict, LengthVerdict, plan_extension
from rope_ext_hf.tools.serving.serving_options import Extending
from tests.support.models import build
from tests.support.wrapped_text import unwrapped
from tests.tools.support.serving_models import FOLDER

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
    arguments = ("reference", "--target-length", "512", "--data", "stdlib")
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
    losses: dict[tuple[bool, int], float] = {}
    by_document: dict[tuple[bool, int], torch.Tensor] = {}
    for each in read_run(folder).results:
        assert len(each.documents) >= 3
        in_each = [document.nats / document.tokens for document in each.documents]
        by_document[each.method is not None, each.length] = torch.tensor(in_each, dtype=torch.float64)
        nats = sum(document.nats for document in each.documents)
        losses[each.method is not None, each.length] = nats / sum(document.tokens for document in each.documents)
    compared = {512: verdict["gain"]} | {int(length): each for length, each in verdict["short_inputs"].items()}
    for length, each in compared.items():
        assert each["unpatched"] == pytest.approx(math.exp(losses[False, length]))
        assert each["extended"] == pytest.approx(math.exp(losses[True, length]))
        assert each["change"][0] == pytest.approx(losses[True, length] - losses[False, length])
    assert verdict["gain"]["change"][2] < 0  # the upper end of the interval
    said = f"At 512 tokens: perplexity {math.exp(losses[False, 512]):.2f} to {math.exp(losses[True, 512]):.2f}."
    assert verdict["text"].startswith(said)
    for length, balance in verdict["balances"].items():
        short, long = (by_document[True, each] - by_document[False, each] for each in (int(length), 512))
        assert balance[0] == pytest.approx((short + long).mean().item())  # every document has the same weight there

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
    flat, text = ("guessing", "--target-length", "256"), ("--data", "stdlib")
    unclear = extend(*flat, *text)
    assert unclear.exit_code == 2
    assert re.search(
        r"no significant difference in perplexity at 256 tokens \(\S+ to \S+\); nothing was written. Give --anyway",
        " ".join(unclear.stderr.split()),
    )
    one = extend(*flat, "--data", "one.txt", "--max-spans", "4")
    assert one.exit_code == 2
    assert "perplexity at 256 tokens does not get better with yarn" in " ".join(one.stderr.split())
    # Stated to be for half of what it is for, the bundled model reads the whole better without a method.
    worse = extend("reference", "--target-length", "256", "--context-length", "128")
    assert worse.exit_code == 2
    assert "perplexity at 256 tokens gets worse with yarn (" in " ".join(worse.stderr.split())
    assert "At 256 tokens: perplexity gets worse (" in unwrapped(worse.stdout)
    assert not list(tmp_path.glob("*-256"))
    anyway = extend(*flat, *text, "--anyway")
    assert anyway.exit_code == 0, anyway.output
    assert "no significant difference" in anyway.stdout
    assert (tmp_path / "guessing-256" / "config.json").is_file()


LOWER, HIGHER, SAME = Estimate(-2.0, -2.5, -1.5, 8), Estimate(0.3, 0.2, 0.4, 8), Estimate(0.01, -0.1, 0.1, 8)
FEW = Estimate(-2.0, None, None, 2)
NOT_FINITE = Estimate(-math.inf, None, None, 8)
GAIN, PRICE, NONE = Comparison(20.46, 2.73, LOWER), Comparison(2.01, 2.48, HIGHER), Comparison(3.0, 3.03, SAME)


def judged(**values: Any) -> ExtensionVerdict:
    standard: dict[str, Any] = {
        "method": "yarn", "context_length": 256, "target_length": 2048, "gain": GAIN,
        "short_inputs": {256: PRICE, 32: NONE}, "balances": {256: LOWER, 32: LOWER},
    }  # fmt: skip
    return ExtensionVerdict(**standard | values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, ""),
        ({"gain": Comparison(2.0, 2.7, HIGHER)}, "perplexity at 2,048 tokens gets worse with yarn (2.00 to 2.70)"),
        ({"gain": NONE}, "no significant difference in perplexity at 2,048 tokens (3.00 to 3.03)"),
        ({"gain": Comparison(20.0, 2.7, FEW)}, ""),  # too few documents speak for nothing and against nothing
        (
            {"gain": Comparison(2.0, 2.0, Estimate(0.0, None, None, 1))},
            "perplexity at 2,048 tokens does not get better with yarn (2.00 to 2.00)",
        ),
        ({"gain": Comparison(math.inf, 2.7, NOT_FINITE)}, ""),
        (
            {"gain": Comparison(2.0, 2.0, None)},
            "perplexity at 2,048 tokens was not measured both unpatched and with yarn",
        ),
        (
            {"balances": {256: LOWER, 32: HIGHER}},
            "inputs of 32 tokens lose more (3.00 to 3.03) than inputs of 2,048 tokens gain (20.46 to 2.73)",
        ),
        ({"balances": {256: SAME, 32: None}}, ""),
    ],
)  # fmt: skip
def test_a_folder_is_refused_only_where_the_measurement_speaks_against_it(values: dict[str, Any], said: str) -> None:
    assert judged(**values).refusal == said


def test_a_large_gain_over_four_documents_is_enough() -> None:
    gains = estimate([-2.9, -2.4, -3.1, -2.464])  # nats or bits, of which the mean is -2.716
    assert gains.value == pytest.approx(-2.716)
    assert judged(gain=Comparison(40.0, 2.7, gains), balances={256: gains}).refusal == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {},
            "At 2,048 tokens: perplexity 20.46 to 2.73. Short inputs (256 tokens): perplexity gets worse (2.01 to "
            "2.48). Short inputs (32 tokens): no significant difference in perplexity (3.00 to 3.03).",
        ),
        (
            {"gain": Comparison(2.0, 2.7, HIGHER), "short_inputs": {256: Comparison(2.0, 1.5, LOWER)}},
            "At 2,048 tokens: perplexity gets worse (2.00 to 2.70). Short inputs (256 tokens): perplexity gets better "
            "(2.00 to 1.50).",
        ),
        (
            {"gain": NONE, "short_inputs": {256: Comparison(2.0, 2.0, Estimate(0.0, 0.0, 0.0, 8))}},
            "At 2,048 tokens: no significant difference in perplexity (3.00 to 3.03). Short inputs (256 tokens): "
            "perplexity stays 2.00.",
        ),
        (
            {"gain": Comparison(20.0, 2.7, FEW), "short_inputs": {256: Comparison(2.0, 2.5, FEW)}},
            "At 2,048 tokens: perplexity 20.00 to 2.70. Short inputs (256 tokens): perplexity 2.00 to 2.50. 2 "
            "documents are too few to say whether these differences are by chance.",
        ),
        (
            {"gain": Comparison(math.inf, 2.7, NOT_FINITE), "short_inputs": {}},
            "At 2,048 tokens: perplexity not finite to 2.70.",
        ),
        (
            {"gain": Comparison(2.0, 2.0, None), "short_inputs": {}},
            "At 2,048 tokens: perplexity was not measured.",
        ),
    ],
)
def test_gain_and_prices_are_said_in_perplexity(values: dict[str, Any], said: str) -> None:
    assert str(judged(**values)) == said


def test_one_command_leads_to_the_server_of_the_card_of_qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rope_theta, factor and lengths are those of the model's card and of vLLM's page on context extension."""
    monkeypatch.chdir(tmp_path)
    tiny("qwen3-8b-yarn", tmp_path / "Qwen3-8B", rope_scaling=None)
    done = extend("Qwen3-8B", "--target-length", "128k", "--no-measure")
    assert done.exit_code == 0, done.output
    assert "published for Qwen3: https://" in unwrapped(done.stdout)
    assert re.search(
        r"inputs within 32,768 tokens read worse: .* their perplexity per token is 1\.\d+ times that",
        unwrapped(done.stdout),
    )
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
    assert "inputs within 131,072 tokens " in unwrapped(done.stdout)
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
        ("reference", "--target-length", "64k"): "no method that engines serve is known to bring .* without training",
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
        "--device"
        in plan_extension(folder, Extending(target_length=131072), reading={"device": "cuda"}).commands["ppl"]
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


def without_rope(folder: Path) -> Path:
    """A folder of a model whose full-attention layers do not rotate, with the tokenizer of the bundled model."""
    tokenizer = load_tokenizer("reference")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "bos_token_id": None}
    lengths = {"max_position_embeddings": 64, "sliding_window": 16}
    types = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model("cohere2", **sizes, **heads, **lengths, layer_types=types, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_whose_full_attention_layers_do_not_rotate_gets_a_longer_length_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is measured as it is, at both lengths, and under the method `temperature`."""
    monkeypatch.chdir(tmp_path)
    without_rope(tmp_path / "model")
    result = extend("model", "--target-length", "256", "--data", "stdlib", "--max-spans", "4", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["plan"]["method"] == "default"
    assert "temperature" in answer["plan"]["steps"]["ppl"]
    assert "default" in answer["plan"]["steps"]["patch"]
    assert answer["serving"]["command"] == ["vllm", "serve", "model-256", "--max-model-len", "256"]
    loaded = AutoModelForCausalLM.from_pretrained("model-256")
    assert loaded.config.max_position_embeddings == 256
    before = AutoModelForCausalLM.from_pretrained("model")
    assert all(torch.equal(value, before.state_dict()[key]) for key, value in loaded.state_dict().items())

    (folder,) = (tmp_path / "rope-ext-results").iterdir()
    nats: dict[tuple[bool, int], float] = {}
    for each in read_run(folder).results:
        total = sum(document.nats for document in each.documents)
        nats[each.method is not None, each.length] = total / sum(document.tokens for document in each.documents)
    verdict = answer["verdict"]
    assert verdict["longer"]["unpatched"] == pytest.approx(math.exp(nats[False, 64]))
    assert verdict["longer"]["extended"] == pytest.approx(math.exp(nats[False, 256]))
    assert verdict["temperature"]["extended"] == pytest.approx(math.exp(nats[True, 256]))
    assert "With the method temperature at 256 tokens" in verdict["text"]
    assert "## Measured: perplexity on stdlib" in (tmp_path / "model-256" / "README.md").read_text()


@pytest.mark.parametrize(
    ("longer", "said"),
    [
        ([0.31, 0.29, 0.3, 0.32, 0.3], "the same text reads worse in inputs of 256 tokens than in inputs of 64"),
        ([0.31, -0.29, 0.3, -0.32, 0.01], ""),
        ([-0.31, -0.29, -0.3, -0.32, -0.3], ""),
        (None, "perplexity was not measured at 64 and at 256 tokens"),
    ],
)
def test_a_longer_length_is_refused_where_the_same_text_reads_worse_in_it(
    longer: list[float] | None, said: str
) -> None:
    change = None if longer is None else estimate(longer, [1.0] * len(longer))
    same = Comparison(5.0, 5.0, estimate([0.0, 0.1, -0.1], [1.0] * 3))
    verdict = LengthVerdict(64, 256, Comparison(5.0, 6.0, change), same)
    assert verdict.refusal.startswith(said) if said else not verdict.refusal
