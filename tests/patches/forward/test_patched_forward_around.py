"""Code around the forward of a patched model: autocast, compiling, tracing, prefix tuning, continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from tests.support.models import TRAINED, build, logits, tokens

PLAIN: dict[str, Any] = {"rope_theta": 10000.0, "original_max_position_embeddings": TRAINED // 2, "factor": 2.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": PLAIN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": PLAIN | {"rope_type": "yarn"},
}


@pytest.mark.parametrize("name", ["llama", "glm", "gpt_oss"])
@pytest.mark.parametrize("method", ["stairs", "rerope", "dca"])
def test_a_cache_of_float32_is_continued_under_autocast(method: str, name: str) -> None:
    model, ids = rope.patch(build(name), method), tokens(150)
    expected = logits(model, ids)[:, -1]
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with torch.autocast("cpu", torch.bfloat16):
            actual = model(ids[:, -1:], past_key_values=cache).logits[:, -1].float()
    assert (actual - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("method", ["dynamic-yarn", "dynamic-ntk"])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_one_graph_over_a_scaling(method: str, scaling: str) -> None:
    torch._dynamo.reset()
    model, ids = rope.patch(build("llama", SCALINGS[scaling]), method), tokens(3 * TRAINED)
    with torch.no_grad():
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        actual = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=1e-5)


HALF = TRAINED // 2
LISTS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
OVER_LONGROPE: dict[str, tuple[str | None, dict[str, Any], int]] = {
    "unpatched": (None, {}, 6 * HALF),
    "linear": ("linear", {"factor": 2}, HALF),
    "ntk": ("ntk", {"factor": 2}, HALF),
    "yarn": ("yarn", {"factor": 2}, HALF),
    "by-parts": ("by-parts", {"factor": 2}, HALF),
    "dynamic-ntk": ("dynamic-ntk", {}, 4 * HALF),
    "dynamic-yarn": ("dynamic-yarn", {}, 4 * HALF),
    "yarn, original": ("yarn", {"factor": 4, "over": "original"}, 0),
    "dynamic-ntk, original": ("dynamic-ntk", {"over": "original"}, 0),
    "dynamic-yarn, original": ("dynamic-yarn", {"over": "original"}, 0),
    "longrope, original": ("longrope", {"factor": 4, "over": "original"} | LISTS, 6 * HALF),
}
"""Methods over the longrope of Phi-3, which has a list of divisors up to the original length and another beyond it, and
the longest input that is read as by the unpatched model."""

QUICK = [("linear", "compiled"), ("yarn", "compiled for any length")]


def phi3(which: str) -> Any:
    form = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": HALF} | LISTS
    sizes = {"max_position_embeddings": 4 * HALF, "original_max_position_embeddings": HALF}
    method, params, _ = OVER_LONGROPE[which]
    model = build("phi3", form, num_hidden_layers=1, **sizes)
    return model if method is None else rope.patch(model, method, **params)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("which", "mode"),
    [
        pytest.param(which, mode, marks=[pytest.mark.thorough] * ((which, mode) not in QUICK))
        for which in OVER_LONGROPE
        if which != "unpatched"
        for mode in ("compiled", "compiled for any length")
    ],
)
def test_one_graph_over_the_longrope_of_phi3(which: str, mode: str) -> None:
    """Inputs are shorter and longer than the original length, and than the extended one."""
    model, unpatched, kept = phi3(which), phi3("unpatched"), OVER_LONGROPE[which][2]
    dynamic = True if mode == "compiled for any length" else None
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    for length in (HALF + 1, HALF - 4, HALF, 4 * HALF, 4 * HALF + 1, 6 * HALF):
        ids = tokens(length)
        expected = logits(model, ids)
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
        if length <= kept:
            torch.testing.assert_close(expected, logits(unpatched, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("method", ["dynamic-yarn", "dynamic-ntk", "rerope", "stairs", "dynamic-self-extend"])
def test_prefix_tuning_is_named(method: str) -> None:
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(rope.patch(build("llama"), method), prefix)
    with pytest.raises(LengthError, match=r"Prefix tuning of PEFT .* use LoRA"):
        model(input_ids=tokens(70), attention_mask=torch.ones(1, 70, dtype=torch.long))


@pytest.mark.parametrize("method", ["dynamic-yarn", "dynamic-ntk"])
def test_continuous_batching_is_refused_before_it_begins(method: str) -> None:
    model = rope.patch(build("llama"), method)
    settings = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(LengthError, match=r"continuous batching .* rope_ext_hf\.fixed_length"):
        model.generate_batch([[3, 4, 5]], generation_config=settings)
    assert "init_continuous_batching" not in vars(rope.unpatch(model))


def test_a_sticky_patch_of_inference_mode_is_trained_on() -> None:
    model, ids = build("llama"), tokens(60)
    with torch.inference_mode():
        rope.patch(model, "dynamic-ntk", growth="even", sticky=True)
        model(tokens(2 * TRAINED))
    model(ids, labels=ids).loss.backward()
    assert rope.reset(model) is model
