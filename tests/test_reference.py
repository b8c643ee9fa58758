"""The bundled model, real weights on real text, on which the methods do what they are for."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import train_reference
from training_prompts import Part

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.retrieval.statements import HELD_OUT_WORDS, TRAINING_WORDS
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import HELD_OUT, stdlib_held_out
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path

LENGTHS = (256, 512, 1024)
BUNDLED = train_reference.RECIPES["bundled"]


@cache
def held_out() -> list[Tokens]:
    return tokenize(stdlib_held_out(), load_tokenizer("reference"))


@cache
def bits_per_byte(
    method: str | None, factor: float | None = None, lengths: tuple[int, ...] = LENGTHS
) -> dict[int, float]:
    """Return held-out bits per token, which is a byte here, by length over 8 windows, protocol matched."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval()
    if method is not None:
        rope.patch(model, method, factor=factor)
    return {r.length: r.bits_per_token for r in perplexity(model, held_out(), lengths=lengths, max_spans=8)}


@pytest.mark.slow
def test_plain_rope_reads_at_its_trained_length_and_fails_beyond() -> None:
    plain = bits_per_byte(None)
    assert plain[256] <= 1.4
    assert plain[512] >= plain[256] + 1.0
    assert plain[1024] >= plain[256] + 1.0


@pytest.mark.thorough
def test_the_best_method_reads_on_at_four_times_the_trained_length() -> None:
    names = ("linear", "ntk", "by-parts", "yarn", "llama3")
    values = {name: bits_per_byte(name, 4.0, lengths=(1024,))[1024] for name in names}
    assert min(values.values()) <= bits_per_byte(None)[256] + 0.25, values
    assert values["yarn"] < bits_per_byte(None)[1024] - 1.0
    # A factor of 4 does not carry NTK-aware scaling to 4x, as the paper says.
    assert values["yarn"] < values["ntk"] - 1.0


@pytest.mark.slow
def test_dynamic_scaling_costs_nothing_at_the_trained_length() -> None:
    dynamic = bits_per_byte("dynamic", factor=4.0)
    assert dynamic[256] == pytest.approx(bits_per_byte(None)[256], abs=1e-5)
    assert dynamic[512] < bits_per_byte(None)[512] - 1.0


@pytest.mark.thorough
def test_with_attention_level_methods_longer_context_helps() -> None:
    plain = bits_per_byte(None)[256]
    values = {
        name: bits_per_byte(name, lengths=(512, 1024)) for name in ("rerope", "leaky-rerope", "self-extend", "dca")
    }
    assert min(row[512] for row in values.values()) < plain, values
    assert min(row[1024] for row in values.values()) <= plain, values
    assert max(row[1024] for row in values.values()) <= plain + 0.15, values


@pytest.mark.slow
def test_it_loads_with_plain_transformers_and_is_small() -> None:
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        f"p = {str(path())!r}; m = AutoModelForCausalLM.from_pretrained(p); t = AutoTokenizer.from_pretrained(p); "
        "ids = t('import ', add_special_tokens=False, return_tensors='pt'); "
        "text = t.decode(m.generate(**ids, max_new_tokens=8)[0]); "
        "assert text.startswith('import '), text; assert 'rope_ext_hf' not in sys.modules; "
        "assert m.config.head_dim == 64 and m.config.num_key_value_heads < m.config.num_attention_heads"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (path() / "model.safetensors").stat().st_size <= 8_000_000


def test_the_card_tells_how_it_was_made() -> None:
    card = (path() / "README.md").read_text(encoding="utf-8")
    record = json.loads((path() / "training.json").read_text(encoding="utf-8"))
    assert all(f"`{name}`" in card for name in HELD_OUT)
    assert f"seed {record['seed']}" in card
    final = record["final"]
    assert f"{final['held_out_bits_per_byte']:.3f} bits per byte" in card
    assert f"{final['exact_match']:.1%} are answered" in card
    assert all(f"- {name}: " in card for name in ("key-value", "assignment", "quote", "copy"))
    assert (path() / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert record["seed"] == train_reference.SEED
    for name, phase in BUNDLED.phases.items():
        settings = asdict(phase)
        assert {key: record["phases"][name][key] for key in settings} == settings
    assert list(record["phases"]) == list(BUNDLED.phases)


def test_the_model_with_wide_heads_has_a_band_like_that_of_large_models() -> None:
    """Pairs that complete 1 to 32 cycles over the trained length: docs/choosing.md."""

    def between(dim: int, theta: float, length: int) -> int:
        cycles = [length * theta ** (-2 * i / dim) / 6.283185307179586 for i in range(dim // 2)]
        return sum(1 <= each <= 32 for each in cycles)

    config = train_reference.RECIPES["wide-heads"].config()
    theta = config.rope_parameters["rope_theta"]
    assert between(config.head_dim, theta, config.max_position_embeddings) == 17
    assert between(128, 500_000.0, 8192) == 16  # Llama 3 8B
    assert train_reference.RECIPES["wide-heads"].phases["retrieval"].steps == 1000


@pytest.mark.slow
def test_training_is_seeded_and_continues_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOG_EVERY": 1, "TEXT_PROBES": 2, "FINAL_PROBES": 2}.items():
        monkeypatch.setattr(train_reference, name, value)
    for name in ("stdlib_training", "stdlib_held_out"):
        monkeypatch.setattr(train_reference, name, lambda: stdlib_held_out()[:1])
    short = {
        name: replace(phase, steps=2, text_rows=1, prompt_rows=min(phase.prompt_rows, 1))
        for name, phase in BUNDLED.phases.items()
    }
    recipe = replace(BUNDLED, phases=short)
    train_reference.train(tmp_path / "one", "cpu", recipe)

    kept: list[bool] = []
    whole_save = torch.save

    def save_and_stop(*args: Any) -> None:
        whole_save(*args)
        kept.append(True)
        if len(kept) in (1, 3):
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save_and_stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_reference.train(tmp_path / "two", "cpu", recipe)
        (tmp_path / "two" / "checkpoint.partial").replace(tmp_path / "two" / "checkpoint.pt")
    train_reference.train(tmp_path / "two", "cpu", recipe)
    assert len(kept) == 2 * len(short)

    one, two = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two"))
    assert one == two
    assert one != (path() / "model.safetensors").read_bytes()
    card = (tmp_path / "one" / "README.md").read_text(encoding="utf-8")
    assert "trained at 256 bytes" in card
    assert "2 steps of 1 rows of text and 1 retrieval prompts" in card
    assert not (tmp_path / "two" / "checkpoint.pt").exists()


@cache
def prompts_of_training() -> tuple[list[bytes], list[list[int]]]:
    """Return four hundred training prompts, and the part of the prompt that each byte belongs to."""
    text = stdlib_held_out()[0].text.encode("utf-8")
    rows, parts = train_reference.training_prompts(text, random.Random(0), 400, BUNDLED)
    assert rows.shape == parts.shape == (400, train_reference.TRAINED_LENGTH + 1)
    return [bytes(token - train_reference.BYTE_OFFSET for token in row) for row in rows.tolist()], parts.tolist()


def test_training_prompts_are_whole_and_mark_their_answers() -> None:
    answered = 0
    for text, parts in zip(*prompts_of_training(), strict=True):
        begin = parts.index(Part.ANSWER)
        pieces = "".join(chr(b) if p == Part.ANSWER else "|" for b, p in zip(text[begin:], parts[begin:], strict=True))
        for answer in filter(None, pieces.split("|")):
            assert answer.strip().encode() in text[:begin]  # it was stated before the first question
            answered += 1
    assert answered > 2 * 400


def test_filler_of_training_prompts_is_text_as_it_stands() -> None:
    source = stdlib_held_out()[0].text.encode("utf-8")
    for text, parts in zip(*prompts_of_training(), strict=True):
        filler = bytes(b for b, p in zip(text, parts, strict=True) if p == Part.FILLER)
        assert filler in source


def test_nothing_of_the_measurements_is_in_training_prompts() -> None:
    """The bytes of prompts are searched for names and values of the measurements, however the prompts were drawn."""
    lines = [line for text in prompts_of_training()[0] for line in text.decode("latin-1").lower().split("\n")]
    stated = [line for line in lines if re.search(r"\d{3,}", line)]
    names = {name for line in stated for name in re.findall(r"[a-z]+", line)}
    assert len(names & set(TRAINING_WORDS)) > 30  # the search finds what is there
    assert not names & set(HELD_OUT_WORDS)
    assert not [line for line in lines if re.match(r"\| \w+ \| \d+ \|$|\w+ := \d+$|[a-z_]+ = 0x\d{5}$", line)]
