"""Remapping methods in whole models, compared with models whose attention is the plain definition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, MethodError, UnsupportedModelError
from tests.support.definition import assert_gradients_are_defined, defined, patched_method
from tests.support.dispatch import LargestTensor
from tests.support.models import FAMILIES, TRAINED, build, build_config, from_config, logits, tokens
from tests.support.oracles import distances

NAMES = ["rerope", "leaky-rerope", "self-extend", "stairs", "dca"]
each_method = pytest.mark.parametrize("method", NAMES)
each_family = pytest.mark.parametrize("name", FAMILIES)
ATOL = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")  # Llama 4, whose layers are chunked


@pytest.mark.sampled(5)
@pytest.mark.slow
@each_family
@each_method
def test_logits_are_those_of_the_definition(name: str, method: str) -> None:
    model, ids = build(name), tokens(3 * TRAINED)
    with rope.patched(model, method):
        actual, fitted = logits(model, ids), patched_method(model)
    plain = logits(model, ids)
    with defined(model, name, fitted):
        expected = logits(model, ids)
    torch.testing.assert_close(actual, expected, atol=ATOL, rtol=0)
    assert (plain - expected).abs().max() > 100 * ATOL


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["none", "log-n", "llama4"])
@pytest.mark.parametrize("method", ["rerope", "stairs"])
def test_layers_without_rope_get_the_temperature_alone(method: str, temperature: str) -> None:
    sizes = build_config("llama").to_dict() | {"no_rope_layers": [1, 0], "use_sliding_window": False}
    config = transformers.SmolLM3Config(
        **{key: sizes[key] for key in sizes if key not in ("model_type", "layer_types")}
    )
    model, ids = from_config(config), tokens(3 * TRAINED)
    with rope.patched(model, method, temperature=temperature):
        actual, fitted, notes = logits(model, ids), patched_method(model), rope.describe(model).notes
        whole, cache = logits(model, ids), DynamicCache(config=config)
        with torch.no_grad():
            parts = [model(x, past_key_values=cache, use_cache=True).logits for x in torch.split(ids, [100, 1, 91], 1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=ATOL, rtol=0)
    effect = "the method does not reach them" if temperature == "none" else f"the temperature ({temperature}) is all"
    assert any(note.startswith("1 of the 2 full-attention layers do not rotate") and effect in note for note in notes)
    with defined(model, "llama", fitted):
        torch.testing.assert_close(actual, logits(model, ids), atol=ATOL, rtol=0)


@each_family
@each_method
@pytest.mark.sampled(3)
def test_chunks_and_single_steps_are_one_shot(name: str, method: str) -> None:
    model, ids = rope.patch(build(name), method), tokens(3 * TRAINED, batch=2)
    whole, cache, parts = logits(model, ids), DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in torch.split(ids, [50, 1, 1, 77, 3, 60], dim=1):
            parts.append(model(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=ATOL, rtol=0)


@pytest.mark.sampled(5)
@pytest.mark.slow
@each_family
@each_method
@pytest.mark.parametrize("positions", [True, False], ids=["positions given", "mask alone"])
def test_padding_changes_nothing(name: str, method: str, positions: bool) -> None:
    model = rope.patch(build(name), method)
    lengths, total = [3 * TRAINED, 100, 5], 3 * TRAINED
    rows = [tokens(length, seed=length) for length in lengths]
    alone = [logits(model, row)[0] for row in rows]
    for left in (True, False):
        ids, mask = torch.zeros(3, total, dtype=torch.int64), torch.zeros(3, total, dtype=torch.int64)
        for i, row in enumerate(rows):
            where = slice(total - row.shape[1], total) if left else slice(0, row.shape[1])
            ids[i, where], mask[i, where] = row[0], 1
        arguments = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
        together = logits(model, ids, attention_mask=mask, **arguments)
        for out, real, expected in zip(together, mask.bool(), alone, strict=True):
            torch.testing.assert_close(out[real], expected, atol=ATOL, rtol=0)


@each_method
def test_right_padding_in_a_cache(method: str) -> None:
    model, ids = rope.patch(build("llama"), method), tokens(160)
    whole = logits(model, ids)
    padded = torch.cat([ids[:, :140], torch.zeros(1, 10, dtype=torch.int64)], dim=1)
    mask = torch.cat([torch.ones(1, 140), torch.zeros(1, 10), torch.ones(1, 20)], dim=1).long()
    with torch.no_grad():
        cache = model(padded, attention_mask=mask[:, :150], use_cache=True).past_key_values
        positions = torch.arange(140, 160)[None]
        out = model(ids[:, 140:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(out, whole[:, 140:], atol=ATOL, rtol=0)


@each_method
def test_packed_rows_are_separate_inputs(method: str) -> None:
    model = rope.patch(build("qwen2"), method)
    rows = [tokens(120, seed=2), tokens(90, seed=3)]
    positions = torch.cat([torch.arange(120), torch.arange(90)])[None]
    packed = logits(model, torch.cat(rows, dim=1), position_ids=positions)
    torch.testing.assert_close(packed, torch.cat([logits(model, row) for row in rows], dim=1), atol=ATOL, rtol=0)


def by_hand(model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the tokens with `count` more, by greedy decoding without a cache."""
    for _ in range(count):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.sampled(3)
@pytest.mark.slow
@each_method
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_generate(name: str, method: str) -> None:
    model = rope.patch(build(name), method)
    settings: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    long, short = tokens(150), tokens(70, seed=5)
    alone = [by_hand(model, ids, 12) for ids in (long, short)]
    padded = torch.cat([torch.zeros(1, 80, dtype=torch.int64), short], dim=1)
    mask = torch.ones(2, 150, dtype=torch.int64)
    mask[1, :80] = 0
    batch = torch.cat([long, padded])
    out = model.generate(batch, attention_mask=mask, do_sample=False, **settings)
    assert torch.equal(out[0], alone[0][0])
    assert torch.equal(out[1, 80:], alone[1][0])
    static = model.generate(long, do_sample=False, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static, alone[0])
    beams = model.generate(batch, attention_mask=mask, num_beams=3, do_sample=False, **settings)
    single = model.generate(long, num_beams=3, do_sample=False, **settings)
    assert torch.equal(beams[0], single[0])


@pytest.mark.slow
@each_method
def test_a_cache_can_be_cropped_copied_and_gone_on_with(method: str) -> None:
    model, ids, other = rope.patch(build("llama"), method), tokens(170), tokens(170, seed=9)
    with torch.no_grad():
        cache = model(ids[:, :150], use_cache=True).past_key_values
        kept = copy.deepcopy(cache)
        first = model(ids[:, 150:], past_key_values=cache).logits
        cache.crop(-70)
        second = model(other[:, 100:], past_key_values=cache).logits
        third = model(ids[:, 150:], past_key_values=kept).logits
    torch.testing.assert_close(first, logits(model, ids)[:, 150:], atol=ATOL, rtol=0)
    mixed = torch.cat([ids[:, :100], other[:, 100:]], dim=1)
    torch.testing.assert_close(second, logits(model, mixed)[:, 100:], atol=ATOL, rtol=0)
    assert torch.equal(third, first)


@pytest.mark.slow
@each_method
def test_assisted_decoding(method: str) -> None:
    model, assistant = rope.patch(build("llama"), method), build("llama", seed=0)
    ids = tokens(120)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, assistant_model=assistant, **settings), by_hand(model, ids, 12))


@each_family
@each_method
@pytest.mark.sampled(3)
def test_inside_the_window_nothing_changes(name: str, method: str) -> None:
    model = build(name)
    with rope.patched(model, method):
        inside = patched_method(model)
        length = min(getattr(inside, "chunk", None) or TRAINED, inside.zone_distances(TRAINED)[0][1])
    ids = tokens(length, batch=2)
    before = logits(model, ids)
    with rope.patched(model, method):
        torch.testing.assert_close(logits(model, ids), before, atol=1e-5, rtol=0)


@each_family
def test_unpatch_is_exact_and_nobody_else_notices(name: str) -> None:
    entries = dict(ALL_ATTENTION_FUNCTIONS)
    config = build_config(name)
    model, other = from_config(config), from_config(config)
    ids = tokens(100)
    before, saved, keys = logits(model, ids), copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    rope.patch(model, "dca")
    assert not torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(other, ids), before)
    assert other.config._attn_implementation != model.config._attn_implementation
    rope.patch(model, "rerope")
    rope.patch(model, "default")
    torch.testing.assert_close(logits(model, ids), before, atol=ATOL, rtol=0)
    rope.unpatch(rope.patch(model, "self-extend"))
    assert torch.equal(logits(model, ids), before)
    assert model.config.to_dict() == saved
    assert model.config._attn_implementation == other.config._attn_implementation
    assert {key: value for key, value in ALL_ATTENTION_FUNCTIONS.items() if key in entries} == entries


@each_method
def test_saved_and_restored(method: str, tmp_path: Path) -> None:
    model, ids = rope.patch(build("qwen3"), method, target_length=4 * TRAINED), tokens(2 * TRAINED)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(Exception, match=f"rope_ext_hf/{method}"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    back = rope.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert back.config.max_position_embeddings == 4 * TRAINED
    assert rope.describe(back).to_dict() == rope.describe(model).to_dict()


def test_another_attention_set_afterwards_is_not_run_in_silence() -> None:
    model = rope.patch(build("llama"), "dca")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match="unpatch"):
        model(tokens(10))


@pytest.mark.slow
@each_method
def test_no_tensor_is_as_large_as_length_squared(method: str) -> None:
    model = rope.patch(build("llama", vocab_size=8, max_position_embeddings=512), method)
    mask = torch.ones(2, 4096, dtype=torch.int64)
    mask[1, :1000] = 0
    with LargestTensor() as largest:
        logits(model, tokens(4096, batch=2) % 8, attention_mask=mask, logits_to_keep=1)
    assert largest.elements < 4096 * 4096 / 8


@pytest.mark.slow
@each_method
def test_gradients_are_those_of_the_definition(method: str) -> None:
    assert_gradients_are_defined(method, 2 * TRAINED)


@each_method
def test_gradients_of_upper_layers_alone(method: str) -> None:
    """In one forward the attention of the lower layers then runs as kernels, and that of the upper ones does not."""
    model, ids = rope.patch(build("llama"), method), tokens(100, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    expected = logits(model, ids, attention_mask=mask)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in key)
    actual = model(ids, attention_mask=mask).logits.detach()
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@each_method
def test_gradient_checkpoints_of_two_forwards(method: str, reentrant: bool) -> None:
    """A backward runs the attention of its own forward again, though another forward with other padding came since."""
    model = rope.patch(build("llama"), method).train()
    masks = torch.ones(2, 2, 100, dtype=torch.int64)
    masks[0, 0, :30] = masks[1, 1, :50] = 0
    targets = masks.clone()
    targets[0, 0, 30] = targets[1, 1, 50] = 0  # padding would predict these

    def gradients() -> list[Tensor]:
        model.zero_grad()
        ids = tokens(100, batch=2)
        losses = [
            model(ids, attention_mask=mask, labels=ids.masked_fill(target == 0, -100), use_cache=False).loss
            for mask, target in zip(masks, targets, strict=True)
        ]
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(), expected, atol=1e-6, rtol=1e-4)


@each_method
def test_autocast(method: str) -> None:
    model, ids = build("llama"), tokens(150, batch=2)
    with rope.patched(model, method), torch.autocast("cpu", torch.bfloat16):
        actual = logits(model, ids).float()
    with rope.patched(model, method):
        expected = logits(model, ids)
    assert (actual - expected).norm() / expected.norm() < 0.05


@each_method
def test_reading_in_chunks_gives_the_losses_of_one_forward(method: str) -> None:
    from rope_ext_hf.reading.scorer import TokenScorer

    model, ids = rope.patch(build("gemma2"), method), tokens(200)[0]
    scorer = TokenScorer(model, chunk=32)
    assert scorer.chunked
    expected = nn.functional.cross_entropy(logits(model, ids[None])[0, 99:-1], ids[100:], reduction="none")
    torch.testing.assert_close(scorer.losses(ids, first=100), expected, atol=ATOL, rtol=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft() -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = build("llama"), tokens(150)
    expected = logits(rope.patch(copy.deepcopy(model), "dca"), ids)
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"]))
    rope.patch(adapted, "dca")
    torch.testing.assert_close(logits(adapted, ids), expected, atol=ATOL, rtol=0)
    adapted(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for key, p in adapted.named_parameters() if "lora_B" in key)


@pytest.mark.thorough
def test_compiled_copied_and_in_half_precision() -> None:
    model, ids = rope.patch(build("llama"), "dca"), tokens(150)
    expected = logits(model, ids)
    assert torch.equal(logits(copy.deepcopy(model), ids), expected)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, ids), expected, atol=ATOL, rtol=0)
    half = logits(model.to(torch.bfloat16), ids).float()
    assert (half - expected).norm() / expected.norm() < 0.05


def test_dca_over_another_frequency() -> None:
    model, ids = build("llama"), tokens(6 * TRAINED)
    rope.patch(model, "dca", frequency="yarn", factor=2.0)
    method = patched_method(model)
    assert (method.max_distance, method.to_dict()["frequency"]) == (
        2 * TRAINED,
        rope.list_methods()["yarn"](factor=2.0).to_dict(),  # type: ignore[call-arg]
    )
    inside = logits(model, ids[:, : TRAINED + 20])
    rope.patch(model, "yarn", factor=2.0)
    torch.testing.assert_close(inside, logits(model, ids[:, : TRAINED + 20]), atol=ATOL, rtol=0)


def test_a_models_own_scaling_stays_underneath() -> None:
    form = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 6.0}
    model = build("llama", form | {"original_max_position_embeddings": TRAINED}, max_position_embeddings=4 * TRAINED)
    ids = tokens(2 * TRAINED)
    before = logits(model, ids)
    rope.patch(model, "rerope")
    assert patched_method(model).max_distance == 4 * TRAINED
    torch.testing.assert_close(logits(model, ids), before, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("method", "parameters", "error", "message"),
    [
        ("rerope", {"window": 65}, MethodError, "64"),
        ("rerope", {"window": 0}, MethodError, "window"),
        ("rerope", {"window": 2.5}, MethodError, "whole number"),
        ("rerope", {"group": 4}, MethodError, "group"),
        ("leaky-rerope", {"k": 0.5}, MethodError, "k must"),
        ("leaky-rerope", {"k": 2.0, "target_length": 4096}, MethodError, "k=2"),
        ("self-extend", {"group": 2, "target_length": 4096}, MethodError, "group=2"),
        ("dca", {"chunk": 60, "window": 10}, MethodError, "chunk and window"),
        ("dca", {"frequency": "dynamic", "factor": 2.0}, MethodError, "frequency"),
        ("dca", {"frequency": "rerope"}, MethodError, "frequency"),
    ],
)
def test_what_cannot_be_is_refused(
    method: str, parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, ids = build("llama"), tokens(20)
    before = logits(model, ids)
    with pytest.raises(error, match=message):
        rope.patch(model, method, **parameters)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("target", [100, 256, 1000, 4096])
@pytest.mark.parametrize(("name", "parameter"), [("leaky-rerope", "k"), ("self-extend", "group")])
def test_target_length_fits_the_parameters(name: str, parameter: str, target: int) -> None:
    method = patched_method(rope.patch(build("llama"), name, target_length=target))
    assert max(distances(method)(target - 1, n) for n in range(target)) <= TRAINED
    smaller: dict[str, Any] = {parameter: getattr(method, parameter) - 1}
    if smaller[parameter] >= 1:
        with pytest.raises(MethodError, match=f"{parameter}="):
            rope.patch(build("llama"), name, target_length=target, **smaller)


def test_models_whose_attention_cannot_be_taken_over_say_why() -> None:
    hunyuan = transformers.HunYuanDenseV1Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=TRAINED, pad_token_id=0,
    )  # fmt: skip
    model = from_config(hunyuan)
    for layer in model.model.layers:  # as trained ones are: not all alike
        nn.init.uniform_(layer.self_attn.query_layernorm.weight, 0.5, 1.5)
    with pytest.raises(UnsupportedModelError, match="norm after the rotation"):
        rope.patch(model, "dca")
    own = build("llama", {"rope_type": "dynamic", "factor": 2.0})
    rope.patch(own, "dca")  # a dynamic config has nothing underneath: it is a plain model up to its context length
    assert rope.describe(own).underneath == ()
    with pytest.raises(UnsupportedModelError, match="nothing to extend"):
        rope.patch(build("mistral", sliding_window=32), "dca")
    with pytest.raises(UnsupportedModelError, match="would change nothing"):
        rope.patch(build("mistral", sliding_window=32), "dca", layers="sliding_attention")


def test_positions_that_contradict_the_cache_are_refused() -> None:
    model, ids = rope.patch(build("llama"), "dca"), tokens(30)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(LengthError, match="positions"):
            model(ids[:, :3], past_key_values=cache, position_ids=torch.tensor([[30, 35, 31]]))
        with pytest.raises(LengthError, match="do not continue"):  # the keys would be elsewhere than they were stored
            model(ids[:, :3], past_key_values=cache, position_ids=torch.tensor([[40, 41, 42]]))
