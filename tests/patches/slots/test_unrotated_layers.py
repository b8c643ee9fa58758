"""`nope` in some of the layers that share a rotary embedding, against classes whose rotation is replaced here."""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.dropping import Nope
from rope_ext_hf.models.layer_types import layers_text
from tests.methods.test_dropping import ROTATIONS, WARNING
from tests.support.every_model import build as build_entry
from tests.support.every_model import entries
from tests.support.models import TRAINED, build, build_known, logits, tokens
from tests.support.wrapped_text import unwrapped

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}")

SHARED = [
    *("llama", "qwen3", "mixtral", "phi3", "gemma2", "gpt_oss"),
    *("gpt_neox", "glm", "cohere", "llama4", "deepseek_v2", "deepseek_v3"),
]
"""Families whose layers share one rotary embedding: half, interleaved and complex, whole and partial."""
INTERLEAVED = "apply_rotary_pos_emb_interleave"


def without_rotation_in(model: Any, layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the class of a model leave queries and keys as they are in these layers."""
    module, running = sys.modules[type(model).__module__], [0]
    for attention in model.modules():
        if isinstance(getattr(attention, "layer_idx", None), int):
            attention.register_forward_pre_hook(lambda inner, _: running.__setitem__(0, inner.layer_idx))

    def unless_dropped(rotate: Any) -> Any:
        def replaced(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if running[0] not in layers:
                rotated: tuple[Tensor, Tensor] = rotate(q, k, *args, **kwargs)
                return rotated
            # The interleaved form of DeepSeek also puts the dims of queries and keys in another order.
            return (_by_halves(q), _by_halves(k)) if rotate.__name__ == INTERLEAVED else (q, k)

        return replaced

    names = [name for name in ROTATIONS if hasattr(module, name)]
    assert names
    for name in names:
        monkeypatch.setattr(module, name, unless_dropped(getattr(module, name)))


def _by_halves(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", SHARED)
def test_logits_are_those_of_the_class_without_the_rotation_of_a_layer(
    name: str, layer: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = build(name), tokens(2 * TRAINED, batch=2)
    before = logits(model, ids)
    rope.patch(model, "nope", layers=[layer])
    actual = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), ids), actual)
    rope.unpatch(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model, ids), before)
    assert not torch.allclose(actual, before, atol=1e-3)
    without_rotation_in(model, [layer], monkeypatch)
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_all_layers_of_a_model_with_two_embeddings(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, ids = build(name), tokens(2 * TRAINED)
    rope.patch(model, "nope", layers=["full_attention", "sliding_attention"])
    actual = logits(model, ids)
    assert rope.describe(model).rotating_layers == (0, 1)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(rope.from_pretrained(tmp_path), ids), actual)
    without_rotation_in(rope.unpatch(model), [0, 1], monkeypatch)
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=0)


def test_layers_may_be_named_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("gpt_oss"), tokens(2 * TRAINED)
    full = model.config.layer_types.index("full_attention")
    rope.patch(model, "nope", layers="full_attention")
    actual = logits(model, ids)
    without_rotation_in(rope.unpatch(model), [full], monkeypatch)
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=0)


def test_all_layers_by_number_are_written_for_plain_transformers(tmp_path: Path) -> None:
    model, ids = rope.patch(build("llama"), "nope", layers=[0, 1]), tokens(2 * TRAINED)
    model.save_pretrained(tmp_path)
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    torch.testing.assert_close(plain, logits(model, ids), atol=1e-5, rtol=0)


def test_the_attention_factor_of_a_scaling_stays() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    given: list[Any] = []
    model = build("llama", scaling, max_position_embeddings=4 * TRAINED)
    rope.patch(model, "nope", layers=[1])
    attention = [layer.self_attn for layer in model.model.layers]
    for module in attention:
        module.register_forward_pre_hook(lambda _, args, kw: given.append(kw["position_embeddings"]), with_kwargs=True)
    logits(model, tokens(8))
    (cos, sin), (dropped_cos, dropped_sin) = given
    assert cos.std() > 0.1 < sin.std()
    torch.testing.assert_close(dropped_cos, torch.full_like(cos, 0.1 * math.log(4) + 1))
    assert not dropped_sin.any()


def test_layers_with_other_attention_factors_are_refused() -> None:
    """OLMo 3 scales only the layers that attend to everything."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    model = build("olmo3", scaling, max_position_embeddings=4 * TRAINED)
    with pytest.raises(UnsupportedModelError, match=r"attention factors of 1, 1.13863; choose layers that have the s"):
        rope.patch(model, "nope", layers=[0, 1])


def test_the_method_may_be_given_in_any_form() -> None:
    ids = tokens(TRAINED)
    forms: list[Any] = ["nope", "DroPE", Nope(), {"rope_type": "nope"}]
    first, *others = [logits(rope.patch(build("llama"), form, layers=[1]), ids) for form in forms]
    assert all(torch.equal(other, first) for other in others)
    number: Any = 5
    with pytest.raises(TypeError, match="method must be a name, a method object, or a dict"):
        rope.patch(build("llama"), number, layers=[1])


def test_describe_names_the_layers(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "nope", layers=[1], recalibrated=12)
    text = unwrapped(rope.describe(model))
    assert "The rotation of layer 1 is dropped, as the wavelengths say; other layers rotate as before." in text
    assert "extended length 64 tokens (not extended)" in text
    assert "layers with RoPE 1 of 2 full-attention layers" in text
    assert "saved as rope_type 'rope_ext_hf/nope" in text
    with pytest.warns(UserWarning, match=r"loads with rope_ext_hf.from_pretrained alone"):
        model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["rope_ext_hf"]
    assert record["layers"] == [1] == record["fingerprint"]["unrotated"]
    with pytest.raises(KeyError, match=r"load with rope_ext_hf\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_fingerprints_differ_by_the_layers() -> None:
    model = build("llama")
    plain = rope.fingerprint(model)
    one = rope.fingerprint(rope.patch(model, "nope", layers=[1]))
    again = type(one).from_dict(json.loads(json.dumps(one.to_dict())))
    assert one.differences(again) == []
    assert one.differences(plain) == ["The rotation of layer 1 is not dropped, unlike in the expected model."]
    assert plain.differences(one) == ["The rotation of layer 1 is dropped, unlike in the expected model."]
    assert len({plain.digest, one.digest, rope.fingerprint(rope.patch(model, "nope", layers=[0])).digest}) == 3
    assert "unrotated" not in plain.to_dict()


def test_generation_from_a_cache_is_that_of_whole_forwards() -> None:
    model, ids = rope.patch(build("llama"), "nope", layers=[0]), tokens(30, batch=2)
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    repeated = ids
    for _ in range(8):
        repeated = torch.cat([repeated, logits(model, repeated)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, repeated)


def test_copies_and_pickles_keep_it_and_can_be_unpatched() -> None:
    model, ids = build("llama"), tokens(TRAINED)
    before = logits(model, ids)
    expected = logits(rope.patch(model, "nope", layers=[1]), ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), expected)
        assert torch.equal(logits(rope.unpatch(other), ids), before)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradients_under_checkpoints_are_those_without() -> None:
    model, ids = rope.patch(build("llama"), "nope", layers=[1]).train(), tokens(TRAINED)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    model, ids = rope.patch(build("llama"), "nope", layers=[1]), tokens(TRAINED)
    expected = logits(model, ids)
    compiled: Any = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        actual = compiled(input_ids=ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_one_patch_replaces_another() -> None:
    model, ids = build("llama"), tokens(TRAINED)
    first = logits(rope.patch(model, "nope", layers=[0]), ids)
    rope.patch(model, "nope", layers=[1])
    assert not torch.allclose(logits(model, ids), first, atol=1e-3)
    assert torch.equal(logits(rope.patch(model, "nope", layers=[0]), ids), first)
    yarn = logits(rope.patch(build("llama"), "yarn", factor=4), ids)
    assert torch.equal(logits(rope.patch(model, "yarn", factor=4), ids), yarn)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("yarn", {"factor": 4, "layers": [1]}, r"serves layer 1 and also layer 0 of this 'llama'.*except nope"),
        ("self-extend", {"factor": 4, "layers": [1]}, r"one rotary embedding serves layer 1"),
        ("yarn", {"factor": 4, "over": "patched"}, r"no method can be applied over nope in chosen layers"),
        ("temperature", {"layers": [1], "over": "patched"}, r"no method can be applied over nope in chosen layers"),
    ],
)
def test_other_methods_are_refused(method: str, arguments: dict[str, Any], message: str) -> None:
    model, ids = rope.patch(build("llama"), "nope", layers=[1]), tokens(TRAINED)
    before = logits(model, ids)
    with pytest.raises((MethodError, UnsupportedModelError), match=message):
        rope.patch(model, method, **arguments)
    assert torch.equal(logits(model, ids), before)


def test_a_layer_that_takes_no_angles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose forward has no argument for cos and sin, as that of another release might be."""
    model = build("llama")

    class Other(type(model.model.layers[1].self_attn)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    class OtherLayer(type(model.model.layers[1])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    model.model.layers[1].__class__, model.model.layers[1].self_attn.__class__ = OtherLayer, Other
    ids = tokens(TRAINED)
    before = logits(model, ids)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of LlamaModel has no position_embeddings"):
        rope.patch(model, "nope", layers=[1])
    assert torch.equal(logits(model, ids), before)
    rope.patch(model, "nope", layers=[0])


def test_layers_with_rotary_modules_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of DeepseekV4Model has a rotary module of its own"):
        rope.patch(build_known("deepseek_v4"), "nope", layers=[0])


def test_layers_that_use_the_keys_of_others_are_dropped_together() -> None:
    """Without a rotation, or with one, the same tokens at later positions have the same logits."""
    types = ["sliding_attention", "full_attention"] * 2
    model = build_known("gemma3n_text", num_hidden_layers=4, layer_types=types, num_kv_shared_layers=2)
    ids = tokens(12)
    place = torch.arange(12)[None]

    def moved() -> float:
        one, other = (logits(model, ids, position_ids=place + first) for first in (0, 20))
        return float((one - other).abs().max())

    assert moved() < 1e-4
    for layers in ([1], [0, 1], [0, 2, 3]):
        with pytest.raises(UnsupportedModelError, match=r"use the keys of earlier layers.*choose layers by their type"):
            rope.patch(model, "nope", layers=layers)
    for named in ([1, 3], "sliding_attention", ["sliding_attention", "full_attention"]):
        rope.patch(model, "nope", layers=named)
        assert moved() < 1e-4


def test_layers_that_do_not_rotate_are_left_out(tmp_path: Path) -> None:
    """Cohere 2 rotates in its sliding-window layers alone."""
    types = ["sliding_attention", "full_attention"]
    model, ids = build_known("cohere2", layer_types=types, num_hidden_layers=2), tokens(TRAINED)
    for layers in ([1], "full_attention"):
        with pytest.raises(UnsupportedModelError, match=r"named \((1|full_attention)\) do not rotate"):
            rope.patch(model, "nope", layers=layers)
    rope.patch(model, "nope", layers=[0])  # the one layer that rotates: plain transformers runs it
    model.save_pretrained(tmp_path)
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    torch.testing.assert_close(plain, logits(model, ids), atol=1e-5, rtol=0)


def test_an_encoder_and_a_decoder_are_refused() -> None:
    (entry,) = [each for each in entries() if each.model_type == "t5gemma"]
    with pytest.raises(UnsupportedModelError, match=r"several stacks of layers with the same numbers"):
        rope.patch(build_entry(entry), "nope", layers=[1])


def test_the_scaling_of_all_layers_is_not_replaced_by_that_of_some() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    model = build("llama", scaling, max_position_embeddings=4 * TRAINED)
    with pytest.raises(MethodError, match=r"over='original' replaces the scaling of all layers"):
        rope.patch(model, "nope", layers=[1], over="original")
    rope.patch(model, "nope", layers=[0, 1], over="original")


def test_a_patch_that_replaces_that_of_a_folder_says_in_which_layers_it_was(tmp_path: Path) -> None:
    rope.patch(build("llama"), "nope", layers=[0]).save_pretrained(tmp_path)
    for method, arguments in (("yarn", {"factor": 4}), ("nope", {"layers": [1]}), ("nope", {})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rope.from_pretrained(tmp_path, method, **arguments)
        (text,) = [str(each.message) for each in caught if "the folder of this model" in str(each.message)]
        assert "records nope for 64 tokens in layers 0, and this patch replaces it" in text
        assert "keeps it underneath" not in text


def test_layers_of_several_rotary_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite SWA has a rotary module for each base in a list of its config."""
    model, ids = build_known("granite_swa"), tokens(TRAINED)
    rope.patch(model, "nope", layers=[0, 1])
    actual = logits(model, ids)
    without_rotation_in(rope.unpatch(model), [0, 1], monkeypatch)
    torch.testing.assert_close(actual, logits(model, ids), atol=1e-5, rtol=0)


def test_a_layer_that_is_given_something_else_says_so() -> None:
    model = rope.patch(build("llama"), "nope", layers=[0])
    with pytest.raises(UnsupportedModelError, match=r"LlamaDecoderLayer was given no cos and sin"):
        model.model.layers[0](torch.zeros(1, 4, model.config.hidden_size))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(4)[None])
    hidden = torch.randn(1, 4, model.config.hidden_size)
    by_name = model.model.layers[0](hidden, position_embeddings=(cos, sin))
    arguments = inspect.signature(type(model.model.layers[0]).forward).parameters
    before = [each.default for each in list(arguments.values())[2 : list(arguments).index("position_embeddings")]]
    in_order = model.model.layers[0](hidden, *before, (cos, sin))
    torch.testing.assert_close(by_name, in_order)


def test_layers_in_messages() -> None:
    assert [layers_text([3]), layers_text({5, 0})] == ["layer 3", "layers 0, 5"]
    assert layers_text(range(7)) == "layers 0, 1, 2, 3, 4, 5, ..."


def test_no_warning_for_a_recalibrated_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.patch(build("llama"), "nope", layers=[1], recalibrated=5)
