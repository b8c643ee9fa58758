"""`cope`: the slowest pairs fade out, on ten families, in saved folders and over the scalings of models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.clipping import Cope
from rope_ext_hf.methods.registry import frequencies
from tests.support.every_model import tiny
from tests.support.method_checks import law, some_rotaries
from tests.support.method_examples import example_method
from tests.support.models import FAMILIES, THETA, TRAINED, build, logits, tokens
from tests.support.oracles import faded, slower_than

NAMES = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "gpt_neox", "glm", "gpt_oss", "deepseek_v3", "olmo3"),
    "cohere",
)
SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def used(model: Any) -> list[float]:
    """The frequencies that a model rotates by, in radians per position, as `describe` states their wavelengths."""
    return [
        0.0 if math.isinf(wavelength) else 2 * math.pi / wavelength for wavelength in rope.describe(model).wavelengths
    ]


def close(actual: list[float], expected: list[float], *, rel: float = 1e-12) -> None:
    assert actual == pytest.approx(expected, rel=rel, abs=1e-17)


@law
@given(rotary=some_rotaries, share=st.floats(0, 1))
def test_the_formula_in_float64(rotary: Rotary, share: float) -> None:
    pairs = rotary.dim // 2
    plain = [rotary.theta ** (-2 * i / rotary.dim) for i in range(pairs)]
    clip = 2 + round(share * (pairs - 2))
    if pairs > 1:
        result = frequencies("cope", rotary, clip=clip)
        close(result.inv_freq.tolist(), faded(plain, clip))
        assert result.inv_freq[-1] == 0.0
        assert result.attention_factor == 1.0
    close(frequencies("cope", rotary, clip=1, hard=True).inv_freq.tolist(), faded(plain, 1, hard=True))
    by_period = slower_than(plain, rotary.trained_length)
    if by_period > 1:
        close(frequencies("cope", rotary).inv_freq.tolist(), faded(plain, by_period))
        close(frequencies("cope", rotary, hard=True).inv_freq.tolist(), faded(plain, by_period, hard=True))


@pytest.mark.parametrize("name", NAMES)
def test_families_rotate_by_the_formula_and_can_be_unpatched(name: str, tmp_path: Path) -> None:
    model, ids, dim = build(name), tokens(3 * TRAINED), FAMILIES[name].rotated
    before = logits(model, ids)
    plain = [THETA ** (-2 * i / dim) for i in range(dim // 2)]
    clip = slower_than(plain, TRAINED)
    for params, expected in (
        ({}, faded(plain, clip)),
        ({"clip": 3}, faded(plain, 3)),
        ({"hard": True}, faded(plain, clip, hard=True)),
    ):
        rope.patch(model, "cope", **params)
        close(used(model), expected)
        assert rope.describe(model).attention_factor == 1.0
        patched = logits(model, ids)
        assert not torch.equal(patched, before)
        check_saved(model, patched, ids, expected, tmp_path / json.dumps(params))
    assert torch.equal(logits(rope.unpatch(model), ids), before)


def check_saved(model: Any, expected_logits: Tensor, ids: Tensor, expected: list[float], folder: Path) -> None:
    """Plain transformers gives the same, and the frequencies are read back, with our record and without it."""
    model.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(plain, ids), expected_logits, atol=2e-5, rtol=0)
    close(used(rope.from_pretrained(folder)), expected)
    config = json.loads((folder / "config.json").read_text())
    written = config["rope_parameters"]
    assert written.get("full_attention", written)["attention_factor"] == 1.0
    del config["rope_ext_hf"]
    (folder / "config.json").write_text(json.dumps(config))
    close(used(AutoModelForCausalLM.from_pretrained(folder)), expected, rel=1e-6)


@pytest.mark.parametrize("form", SCALED)
def test_it_fades_the_frequencies_of_a_scaling_of_the_model(form: str, tmp_path: Path) -> None:
    model = build("llama", SCALED[form], max_position_embeddings=4 * TRAINED if form != "linear" else TRAINED)
    own, factor = model.model.rotary_emb.inv_freq.double().tolist(), model.model.rotary_emb.attention_scaling
    length = rope.describe(model).context_length
    assert length == 4 * TRAINED
    rope.patch(model, "cope")
    expected = faded(own, slower_than(own, length))
    close(used(model), expected, rel=1e-6)  # transformers works its own frequencies out in float32
    assert rope.describe(model).attention_factor == pytest.approx(factor)
    ids = tokens(5 * TRAINED)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(plain, ids), logits(model, ids), atol=1e-4, rtol=0)


def test_over_two_lists_short_inputs_keep_the_first() -> None:
    lists = {"short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    model = build(
        "phi3",
        {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, "factor": 4.0} | lists,
        max_position_embeddings=4 * TRAINED,
    )
    plain = [THETA ** (-2 * i / 16) for i in range(8)]
    own = [w / divisor for w, divisor in zip(plain, lists["long_factor"], strict=True)]
    short = tokens(TRAINED)
    before = logits(model, short)
    rope.patch(model, "cope")
    close(used(model), faded(own, slower_than(own, 4 * TRAINED)))
    torch.testing.assert_close(logits(model, short), before, atol=2e-5, rtol=0)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    ids = tokens(2 * TRAINED)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids).logits, logits(model, ids), atol=2e-5, rtol=0)


def test_pairs_that_do_not_rotate_are_not_counted_and_the_folder_is_ours(tmp_path: Path) -> None:
    model = tiny("gemma4_text")
    rotating = [w for w in used(model) if w > 0]
    assert 2 <= len(rotating) < len(used(model))
    rope.patch(model, "cope", clip=2)
    close([w for w in used(model) if w > 0], rotating[:-1])
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["full_attention"]
    assert written["rope_type"].startswith("rope_ext_hf")
    ids = tokens(20)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), ids), logits(model, ids))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clip": 9}, "clip must be at most 8, the pairs that rotate; got 9"),
        ({"clip": 0}, "clip must be at least 1, got 0"),
        ({"clip": 1}, r"would change nothing \(clip=1\); give clip, the number of pairs to clip, 2 to 8"),
        ({"clip": 2.5}, "clip must be a whole number, got 2.5"),
        (
            {"context_length": 100_000},
            r"would change nothing \(8 of 8 pairs turn around within the context length, 100,0",
        ),
    ],
)
def test_what_cannot_be_clipped_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        rope.patch(build("llama"), "cope", **params)


@pytest.mark.parametrize("name", [name for name in rope.list_methods() if name != "theta"])
def test_other_methods_go_over_it(name: str) -> None:
    model = rope.patch(build("llama"), "cope", hard=True)
    clipped = used(model)
    assert 0.0 in clipped
    rotary = Rotary(dim=16, theta=THETA, trained_length=TRAINED)
    method = Cope(clip=2) if name == "cope" else example_method(rope.list_methods()[name], rotary)
    rope.patch(model, method, over="patched", context_length=TRAINED)
    assert all(w == 0 for w, before in zip(used(model), clipped, strict=True) if before == 0)
    assert any(w > 0 for w in used(model)) is (name != "nope")
    assert logits(model, tokens(3 * TRAINED)).isfinite().all()


def test_linear_over_it_and_training_through_it() -> None:
    model = rope.patch(build("llama"), "cope")
    clipped = used(model)
    rope.patch(model, "linear", factor=2, over="patched", context_length=TRAINED)
    close(used(model), [w / 2 for w in clipped])
    model(input_ids=tokens(TRAINED), labels=tokens(TRAINED)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
