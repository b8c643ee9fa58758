"""`nope`: no rotation, against classes of transformers whose rotation is replaced here."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.patches.patching import patched_method
from tests.support.method_examples import example_method
from tests.support.models import THETA, TRAINED, build, logits, tokens
from tests.support.wrapped_text import unwrapped

ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
WARNING = "nope drops the rotation that this model was trained with"
ALL_ROTATE = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gemma2", "olmo2", "gpt_neox", "glm", "cohere")

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}")


def without_rotation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the class of a model leave queries and keys as they are."""
    module = sys.modules[type(model).__module__]
    names = [name for name in ROTATIONS if hasattr(module, name)]
    assert names
    for name in names:
        monkeypatch.setattr(module, name, lambda q, k, *args, **kwargs: (q, k))


@pytest.mark.parametrize("name", ALL_ROTATE)
def test_logits_are_those_of_the_class_without_its_rotation(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = build(name), tokens(4 * TRAINED, batch=2)
    before = logits(model, ids)
    rope.patch(model, "nope")
    actual = logits(model, ids)
    model.save_pretrained(tmp_path)
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    assert torch.equal(logits(rope.unpatch(model), ids), before)
    assert not torch.allclose(actual, before, atol=1e-3)
    without_rotation(model, monkeypatch)
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-6, rtol=0)
    torch.testing.assert_close(plain, logits(model, ids), atol=1e-5, rtol=0)


def test_windows_keep_their_rotation_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("gemma3"), tokens(2 * TRAINED)
    rope.patch(model, "nope")
    full = logits(model, ids)
    assert rope.describe(model).wavelengths == (math.inf,) * 8
    position = torch.arange(9)[None]
    cos, _ = model.model.rotary_emb(torch.zeros(1), position, layer_type="sliding_attention")
    assert float(cos.min()) < 0.9
    rope.patch(model, "nope", layers="sliding_attention")
    windows = logits(model, ids)
    without_rotation(rope.unpatch(model), monkeypatch)
    in_no_layer = logits(model, ids)
    assert all(not torch.allclose(each, in_no_layer, atol=1e-4) for each in (full, windows))
    module = sys.modules[type(model).__module__]
    monkeypatch.undo()
    rotate = module.apply_rotary_pos_emb
    calls = iter(range(2))  # the first layer has a window, the second attends to everything
    monkeypatch.setattr(
        module, "apply_rotary_pos_emb", lambda q, k, *args, **kw: (q, k) if next(calls) else rotate(q, k, *args, **kw)
    )
    torch.testing.assert_close(full, logits(model, ids), atol=1e-5, rtol=0)


def test_patching_warns_until_the_model_is_recalibrated() -> None:
    with pytest.warns(UserWarning, match=rf"{WARNING}.*rope-ext finetune MODEL --method nope"):
        model = rope.patch(build("llama"), "nope")
    assert f"N{WARNING[1:]}" in str(rope.describe(model)).replace("\n" + " " * 20, " ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.patch(model, "nope", recalibrated=12_000_000)
    text = unwrapped(rope.describe(model))
    assert "nope(recalibrated=12000000)" in text
    assert re.search(r"note +The model was trained on 12,000,000 tokens after its rotation was dropped\.", text)
    assert WARNING[5:] not in text
    method = patched_method(model)
    assert method is not None
    assert method.label() == "nope"
    with pytest.raises(MethodError, match="recalibrated must be at least 0"):
        rope.patch(model, "nope", recalibrated=-1)


def test_the_tokens_are_kept_in_a_saved_folder(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "nope", recalibrated=500, target_length=4 * TRAINED)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 4 * TRAINED
    assert config["rope_parameters"]["rope_type"] == "longrope"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = rope.from_pretrained(tmp_path)
    assert rope.describe(loaded).params == {"recalibrated": 500}
    assert rope.describe(loaded).extended_length == 4 * TRAINED


def test_the_attention_factor_of_a_scaling_stays() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    model = build("llama", scaling, max_position_embeddings=4 * TRAINED)
    rope.patch(model, "nope")
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[0, 5, 5000]]))
    torch.testing.assert_close(cos, torch.full_like(cos, 0.1 * math.log(4) + 1))
    assert not sin.any()


def test_two_lists_are_refused() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, "factor": 4.0} | lists
    model = build("phi3", scaling, max_position_embeddings=4 * TRAINED)
    with pytest.raises(MethodError, match=r"nope drops the rotation at every length.*over='original'"):
        rope.patch(model, "nope")
    rope.patch(model, "nope", over="original")
    assert rope.describe(model).wavelengths == (math.inf,) * 8


def test_temperature_over_it_scales_queries_beyond_the_context_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attention of the class is run on queries that this test multiplies."""
    model, ids = rope.patch(build("llama"), "nope", recalibrated=7), tokens(4 * TRAINED, batch=2)
    rope.patch(model, "temperature", over="patched")
    actual = logits(model, ids)
    text = str(rope.describe(model))
    assert "nope(recalibrated=7)" in text
    assert "rotate their queries and keys" not in text
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), ids), actual)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert written["rope_type"].startswith("rope_ext_hf")

    rope.unpatch(rope.unpatch(model))
    factors = [max(1.0, math.log(n + 1) / math.log(TRAINED)) for n in range(ids.shape[1])]
    module = sys.modules[type(model).__module__]
    scale = torch.tensor(factors)[:, None]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q * scale, k))
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=0)


WITHOUT_ROTATION = {"default", "nope", "temperature", "alibi", "kerple"}


@pytest.mark.parametrize("name", rope.list_methods())
@pytest.mark.parametrize("recorded", [True, False])
def test_methods_over_it_that_need_a_rotation_are_refused(name: str, recorded: bool, tmp_path: Path) -> None:
    """Over a live patch, and in a folder whose record of the patch is lost."""
    model = rope.patch(build("llama"), "nope")
    over = "patched"
    if not recorded:
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        del config["rope_ext_hf"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        model, over = AutoModelForCausalLM.from_pretrained(tmp_path), "own"
    method = example_method(rope.list_methods()[name], rope.Rotary(dim=16, theta=THETA, trained_length=TRAINED))
    if name in WITHOUT_ROTATION:
        rope.patch(model, method, over=over)
        assert logits(model, tokens(2 * TRAINED)).isfinite().all()
    elif name == "theta":  # which goes over no scaling
        with pytest.raises(MethodError, match=r"no pair of this model rotates|another base cannot be put underneath"):
            rope.patch(model, method, over=over)
    else:
        with pytest.raises(
            (MethodError, UnsupportedModelError),
            match=r"no pair of this model rotates, so .* has no frequency to change|both rotates and attends",
        ):
            rope.patch(model, method, over=over)


def test_a_fingerprint_says_what_is_missing() -> None:
    model = build("llama")
    plain = rope.fingerprint(model)
    dropped = rope.fingerprint(rope.patch(model, "nope"))
    clipped = rope.fingerprint(rope.patch(model, "cope"))
    missing = "The scaling is missing: frequencies are those without any scaling."
    assert [missing in str(each.differences(plain)) for each in (dropped, clipped)] == [True, True]
    assert "No pair rotates: every frequency is 0." in str(clipped.differences(dropped))
    assert "There is a scaling where none is expected." in str(plain.differences(clipped))


def test_generation_from_a_cache_is_that_of_whole_forwards() -> None:
    model, ids = rope.patch(build("llama"), "nope"), tokens(30)
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    repeated = ids
    for _ in range(8):
        repeated = torch.cat([repeated, logits(model, repeated)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, repeated)
