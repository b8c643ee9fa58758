"""The method `temperature`: larger queries beyond the context length, in full-attention layers, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.cohere2.modeling_cohere2 import eager_attention_forward

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from tests.support.models import build, from_config, logits, tokens

WINDOW, LIMIT, LONG = 16, 64, 200
FACTORS = {
    "log-n": lambda position: max(1.0, math.log(position + 1) / math.log(LIMIT)),
    "llama4": lambda position: 1 + 0.1 * math.log(1 + (position + 1) // LIMIT),
}


def cohere2() -> Any:
    """A model whose full-attention layers do not rotate, and whose sliding-window layers do."""
    from transformers import Cohere2Config

    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 97, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "logit_scale": 1.0}
    lengths = {"max_position_embeddings": LIMIT, "sliding_window": WINDOW, "layer_types": types}
    model = from_config(Cohere2Config(**sizes, **heads, **lengths, eos_token_id=0))
    with torch.no_grad():  # so that attention looks at some tokens more than at others
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 8
    return model


def scaled_by_hand(model: Any, factor: Any) -> None:
    """Let plain transformers multiply the queries of the full-attention layers by a factor of their positions."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("sliding_window") is None:
            query = query * torch.tensor([factor(position) for position in range(query.shape[2])])[:, None]
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("tests_scaled", attention)
    AttentionMaskInterface.register("tests_scaled", eager_mask)
    model.set_attn_implementation("tests_scaled")


@pytest.mark.parametrize("temperature", FACTORS)
def test_queries_are_those_that_plain_transformers_multiplies_by_the_factor(temperature: str) -> None:
    model, ids = cohere2(), tokens(LONG, batch=2)
    with rope.patched(model, "temperature", temperature=temperature):
        actual = logits(model, ids)
    unpatched = logits(model, ids)
    scaled_by_hand(model, FACTORS[temperature])
    torch.testing.assert_close(actual, logits(model, ids), atol=2e-5, rtol=0)
    assert (actual - unpatched).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_positions_up_to_the_context_length_are_as_loaded_to_the_bit(implementation: str) -> None:
    """Also in longer inputs, and in rows with padding."""
    model = cohere2()
    model.set_attn_implementation(implementation)
    ids = tokens(LONG, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    padded: dict[str, Any] = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected, with_padding = logits(model, ids), logits(model, ids, **padded)
    with rope.patched(model, "temperature"):
        assert torch.equal(logits(model, ids)[:, :LIMIT], expected[:, :LIMIT])
        assert torch.equal(logits(model, ids[:, :LIMIT]), logits(rope.unpatch(model), ids[:, :LIMIT]))
    with rope.patched(model, "temperature"):
        actual = logits(model, ids, **padded)
    assert torch.equal(actual[0, :LIMIT], with_padding[0, :LIMIT])
    assert torch.equal(actual[1, 23 : 23 + LIMIT], with_padding[1, 23 : 23 + LIMIT])
    assert not torch.equal(actual[1], with_padding[1])


def test_decoding_onto_a_cache_equals_one_forward() -> None:
    model, ids = rope.patch(cohere2(), "temperature"), tokens(LONG, batch=2)
    whole = logits(model, ids)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :50], use_cache=True).past_key_values
        steps = [model(input_ids=ids[:, 50:90], past_key_values=cache).logits]
        steps += [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(90, LONG)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, 50:], atol=2e-5, rtol=0)


def test_a_static_cache_and_generate_give_the_same_tokens() -> None:
    model, ids = rope.patch(cohere2(), "temperature", target_length=256), tokens(100)
    greedy = {"do_sample": False, "max_new_tokens": 12, "use_cache": True, "pad_token_id": 0}
    dynamic = model.generate(ids, **greedy)
    static = model.generate(ids, cache_implementation="static", **greedy)
    assert torch.equal(dynamic, static)
    repeated = ids
    for _ in range(12):
        repeated = torch.cat([repeated, logits(model, repeated)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(dynamic, repeated)


def test_compiled_code_and_gradients_agree_with_the_plain_forward() -> None:
    model, ids = rope.patch(cohere2(), "temperature"), tokens(LONG)
    expected = logits(model, ids)
    with torch.no_grad():
        run: Any = torch.compile(model, backend="eager")
        compiled = run(input_ids=ids).logits
    torch.testing.assert_close(compiled, expected, atol=2e-5, rtol=0)
    model(input_ids=ids, labels=ids).loss.backward()
    actual = model.model.layers[1].self_attn.q_proj.weight.grad.clone()
    rope.unpatch(model).zero_grad()
    scaled_by_hand(model, FACTORS["log-n"])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(actual, model.model.layers[1].self_attn.q_proj.weight.grad, atol=1e-6, rtol=1e-4)


def test_a_saved_folder_keeps_the_factor_and_plain_transformers_refuses_it(tmp_path: Path) -> None:
    model, ids = rope.patch(cohere2(), "temperature", target_length=256, temperature="llama4"), tokens(LONG)
    model.save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    assert loaded.config.max_position_embeddings == 256
    with pytest.raises(KeyError, match=r"load with rope_ext_hf\.from_pretrained"):
        type(model).from_pretrained(tmp_path)


def test_a_model_that_rotates_in_all_layers_is_told_what_stays_as_it_is() -> None:
    notes = rope.describe(rope.patch(build("llama"), "temperature")).notes
    assert any("All 2 full-attention layers rotate" in note for note in notes)
    notes = rope.describe(rope.patch(cohere2(), "temperature")).notes
    assert not any("rotate their queries" in note for note in notes)
    assert any("Queries at positions from 64 on" in note for note in notes)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"frequency": "yarn", "factor": 2}, "takes no frequency"),
        ({"beyond_only": True}, "takes no beyond_only"),
        ({"layers": "full_attention"}, "is for all full-attention layers"),
    ],
)
def test_parameters_without_a_meaning_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        rope.patch(build("gemma3"), "temperature", **params)


def test_a_model_with_a_factor_of_its_own_is_refused_unless_one_is_named() -> None:
    with pytest.raises(MethodError, match="a factor of its own"):
        rope.patch(build("llama4"), "temperature")
    rope.patch(build("llama4"), "temperature", temperature="log-n")


def test_methods_that_rotate_name_this_one_where_no_full_attention_layer_does() -> None:
    with pytest.raises(UnsupportedModelError, match=r"there are `default`.* and `temperature`"):
        rope.patch(cohere2(), "yarn", factor=4)
