"""Length profiles: short rows equal those of the model as loaded, long ones those of the static method, to the bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, MethodError
from tests.patches.test_slots_multimodal import build as build_multimodal
from tests.patches.test_slots_multimodal import with_image
from tests.support.dispatch import HostReads
from tests.support.models import FAMILIES, TRAINED, VOCABULARY, build, logits, tokens
from tests.support.wrapped_text import unwrapped

FACTORS = (1, 2, 4)
NEW = 12
LENGTHS = [TRAINED - NEW, TRAINED - NEW + 1, 2 * TRAINED - NEW, 2 * TRAINED - NEW + 1, 5]
"""Prompts that reach the end of a profile with what is generated, or pass it by one token."""
WANTED = [1, 2, 2, 4, 1]
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
EXPERTS = {"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"}
"""Families whose rounding depends on the other rows: tokens of a batch share the products of an expert."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
DIVISORS = [1.0 + i / 4 for i in range(8)]
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"beta_fast": 16.0},
    "ntk": {},
    "linear": {},
    "by-parts": {},
    "llama3": {},
    "factors": {"factors": DIVISORS, "attention_factor": 1.1},
    "longrope": {"short_factor": DIVISORS, "long_factor": DIVISORS},
}


def batch(lengths: Sequence[int], side: str = "left") -> tuple[Tensor, Tensor]:
    """Rows of these lengths, padded to one batch, and their mask."""
    ids = torch.full((len(lengths), max(lengths)), 3)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(ids.shape[1] - length, None) if side == "left" else slice(length)
        ids[row, where], mask[row, where] = tokens(length, seed=row)[0], 1
    return ids, mask


def smallest(length: int) -> int:
    return next((factor for factor in FACTORS if length <= factor * TRAINED), FACTORS[-1])


@functools.cache
def model_at(name: str, factor: int | None) -> Any:
    """A family's model at one factor: at 1 without a patch; None: under profiles."""
    if factor is None:
        return rope.profiles(build(name), FACTORS)
    return build(name) if factor == 1 else rope.patch(build(name), "yarn", factor=factor)


def generated(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Ids (rows, tokens) and logits (rows, steps, vocabulary)."""
    options = {"attention_mask": torch.ones_like(ids)} | OPTIONS | options
    torch.manual_seed(0)
    made = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    return made.sequences, torch.stack(made.logits, 1)


def assert_rows_equal(model: Any, static: Any, lengths: Sequence[int], wanted: Sequence[int], **options: Any) -> None:
    """Compare `generate` of a mixed batch with that of the model at each factor, row by row.

    Args:
        static: gives the model at a factor.
    """
    ids, mask = batch(lengths)
    sequences, found = generated(model, ids, attention_mask=mask, **options)
    for factor in sorted({*wanted}):
        expected_sequences, expected = generated(static(factor), ids, attention_mask=mask, **options)
        rows = torch.tensor([each == factor for each in wanted])
        for one, other in ((sequences, expected_sequences), (found, expected)):
            chosen = rows.repeat_interleave(len(one) // len(lengths))
            assert torch.equal(one[chosen], other[chosen])


# --- which profile -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EXPERTS])
def test_every_row_of_a_mixed_batch(name: str) -> None:
    assert_rows_equal(model_at(name, None), lambda factor: model_at(name, factor), LENGTHS, WANTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPERTS))
@pytest.mark.parametrize(("length", "factor"), list(zip(LENGTHS, WANTED, strict=True))[:4])
def test_rows_alone_of_models_with_experts(name: str, length: int, factor: int) -> None:
    assert_rows_equal(model_at(name, None), lambda each: model_at(name, each), [length], [factor])


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5), side=st.sampled_from(["left", "right"]))
@settings(max_examples=25, deadline=None)
def test_whole_sequences_go_by_their_own_length(lengths: list[int], side: str) -> None:
    ids, mask = batch(lengths, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model_at("llama", None), ids, attention_mask=mask, position_ids=positions)
    for row, length in enumerate(lengths):
        expected = logits(model_at("llama", smallest(length)), ids, attention_mask=mask, position_ids=positions)
        assert torch.equal(found[row][mask[row].bool()], expected[row][mask[row].bool()])


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4), chunk=st.none() | st.integers(1, 90))
@settings(max_examples=12, deadline=None)
def test_generation_goes_by_prompt_and_new_tokens(lengths: list[int], chunk: int | None) -> None:
    """Whatever the batch, and however the prompt is cut into chunks, of which the first may be padding alone."""
    wanted = [smallest(length + NEW) for length in lengths]
    assert_rows_equal(
        model_at("llama", None), lambda factor: model_at("llama", factor), lengths, wanted, prefill_chunk_size=chunk
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="sampled"),
        pytest.param({"num_beams": 3, "num_return_sequences": 2}, id="beams"),
        pytest.param({"use_cache": False}, id="no-cache"),
        pytest.param({"cache_implementation": "static"}, id="static-cache"),
        pytest.param({"prefill_chunk_size": 10}, id="chunks"),
        pytest.param({"max_new_tokens": None, "max_length": max(LENGTHS) + NEW}, id="max-length"),
    ],
)
def test_every_way_to_generate(options: dict[str, Any]) -> None:
    assert_rows_equal(model_at("llama", None), lambda factor: model_at("llama", factor), LENGTHS, WANTED, **options)


def test_a_short_input_beside_the_prompt_is_short() -> None:
    """Guidance runs the model without the prompt, too, onto a cache of its own."""
    lengths, options = [100, TRAINED - NEW], {"guidance_scale": 1.5}
    ids, mask = batch(lengths)
    found = generated(model_at("llama", None), ids, attention_mask=mask, **options)[1]
    assert torch.equal(found[1], generated(model_at("llama", 1), ids, attention_mask=mask, **options)[1][1])


def test_unknown_padding_of_a_part_of_the_prompt_is_refused() -> None:
    ids, mask = batch([20, 100])
    options: dict[str, Any] = {"cache_implementation": "static", "prefill_chunk_size": 16}
    with pytest.raises(LengthError, match="without prefill_chunk_size"):
        generated(model_at("llama", None), ids, attention_mask=mask, **options)
    found, expected = (generated(model_at("llama", which), ids[1:], **options)[1] for which in (None, 2))
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_images_count_by_their_positions() -> None:
    for tokens_, factor in ((40, 1), (TRAINED, 1), (100, 2)):
        inputs = with_image(tokens_)
        model, static = rope.profiles(build_multimodal("qwen3_vl"), FACTORS), build_multimodal("qwen3_vl")
        static = static if factor == 1 else rope.patch(static, "yarn", factor=factor)
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, static(**inputs).logits)
        if tokens_ != TRAINED:
            assert torch.equal(*(each.generate(**inputs, **OPTIONS) for each in (model, static)))


@pytest.mark.slow
def test_each_half_of_an_encoder_and_decoder_counts_for_itself() -> None:
    half: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": TRAINED,
        "sliding_window": 32,
        "initializer_range": 0.15,
    }

    def halves() -> Any:
        torch.manual_seed(0)
        config = transformers.T5GemmaConfig(encoder=dict(half), decoder=dict(half), vocab_size=97)
        return transformers.T5GemmaForConditionalGeneration(config).eval()

    model = rope.profiles(halves(), FACTORS)
    ids, options = tokens(TRAINED), {"decoder_start_token_id": 2, "max_new_tokens": TRAINED - 1}
    assert torch.equal(generated(model, ids, **options)[1], generated(halves(), ids, **options)[1])
    encoded = model.get_encoder()(tokens(TRAINED + 1)).last_hidden_state
    static = rope.patch(halves(), "yarn", factor=2).get_encoder()(tokens(TRAINED + 1)).last_hidden_state
    assert torch.equal(encoded, static)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["own", "original"])
@pytest.mark.parametrize("method", METHODS)
def test_every_static_method_over_a_trained_scaling(method: str, over: str) -> None:
    def trained() -> Any:
        return build("llama", LLAMA3, max_position_embeddings=2 * TRAINED)

    def static(factor: int) -> Any:
        if factor > 1:
            return rope.patch(trained(), method, factor=factor, over=over, **METHODS[method])
        return trained() if over == "own" else rope.patch(trained(), "default", over=over)

    context = 2 * TRAINED if over == "own" else TRAINED
    model = rope.profiles(trained(), FACTORS, method, over=over, **METHODS[method])
    lengths = [context - NEW, context - NEW + 1, 2 * context - NEW + 1]
    assert_rows_equal(model, static, lengths, [1, 2, 4])


def test_without_a_factor_of_1_no_row_runs_as_loaded() -> None:
    model = rope.profiles(build("llama"), [4, 2])
    assert_rows_equal(model, lambda factor: model_at("llama", factor), LENGTHS, [2, 2, 2, 4, 2])


def test_one_factor_is_the_static_method() -> None:
    model = rope.profiles(build("llama"), [4])
    assert_rows_equal(model, lambda factor: model_at("llama", factor), LENGTHS, [4] * 5)


def test_over_two_lists_the_step_goes_by_the_whole_length_too() -> None:
    """transformers changes lists in the middle of a generation; a row here keeps one."""
    form = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": DIVISORS}
    form["original_max_position_embeddings"] = TRAINED

    def loaded() -> Any:
        return build("phi3", form, max_position_embeddings=4 * TRAINED)

    model = rope.profiles(loaded(), [1, 2])
    for length in (TRAINED - NEW, TRAINED + 1):
        torch.testing.assert_close(
            generated(model, tokens(length))[1], generated(loaded(), tokens(length))[1], atol=1e-4, rtol=0
        )
    crossing, long = tokens(TRAINED - 2), rope.profiles(loaded(), [2])
    for each in (model, long):
        with rope.fixed_length(each, TRAINED + NEW):
            expected = generated(each, crossing)[1]
        assert torch.equal(generated(each, crossing)[1], expected)


def test_several_inputs_in_a_row_have_their_own() -> None:
    model = model_at("llama", None)
    parts = [tokens(30, seed=1), tokens(100, seed=2)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    found = logits(model, torch.cat(parts, 1), position_ids=positions)
    torch.testing.assert_close(found[:, :30], logits(model_at("llama", 1), parts[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 30:], logits(model_at("llama", 2), parts[1]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_half_precision_before_and_after_the_patch() -> None:
    def cast(model: Any) -> Any:
        return model.to(torch.bfloat16)

    def static(factor: int) -> Any:
        return cast(build("llama") if factor == 1 else rope.patch(build("llama"), "yarn", factor=factor))

    for model in (rope.profiles(cast(build("llama")), FACTORS), cast(rope.profiles(build("llama"), FACTORS))):
        assert_rows_equal(model, static, LENGTHS, WANTED)


# --- one cache, one profile ----------------------------------------------------------------------------------------


def test_a_conversation_within_its_profile_goes_on() -> None:
    model, plain = model_at("llama", None), build("llama")
    made = []
    for each in (model, plain):
        cache = transformers.DynamicCache(config=each.config)
        first, _ = generated(each, tokens(20), past_key_values=cache)
        made.append(generated(each, torch.cat([first, tokens(5)], 1), past_key_values=cache)[1])
    assert torch.equal(*made)


@pytest.mark.parametrize("ids", ["all", "new"])
def test_a_conversation_that_may_outgrow_its_profile_is_refused_before_it_begins(ids: str) -> None:
    model = model_at("llama", None)
    cache = transformers.DynamicCache(config=model.config)
    first, _ = generated(model, tokens(20), past_key_values=cache)
    known = cache.get_seq_length()
    more = torch.cat([first, tokens(5)], 1)
    mask, given_ids = torch.ones_like(more), more if ids == "all" else more[:, known:]
    options = {"attention_mask": mask, "past_key_values": cache}
    with pytest.raises(LengthError, match=rf"row 0 .* up to {TRAINED} tokens, and would come to {TRAINED + 1}: fill"):
        generated(model, given_ids, max_new_tokens=TRAINED + 1 - more.shape[1], **options)
    assert cache.get_seq_length() == known
    generated(model, given_ids, max_new_tokens=TRAINED - more.shape[1], **options)


def test_the_longest_profile_is_never_outgrown() -> None:
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for each, into in ((model_at("llama", None), found), (model_at("llama", 4), expected)):
        cache = transformers.DynamicCache(config=each.config)
        first, _ = generated(each, tokens(250), past_key_values=cache)
        into.append(generated(each, first, past_key_values=cache)[1])
    assert torch.equal(found[0], expected[0])


def test_a_loop_of_forwards_has_the_profile_of_its_first() -> None:
    model = model_at("llama", None)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(TRAINED - 3), past_key_values=cache)
        for _ in range(3):
            model(tokens(1), past_key_values=cache)
        with pytest.raises(LengthError, match=r"fill a new cache .*fixed_length\(model, prompt_length \+ new_tokens\)"):
            model(tokens(1), past_key_values=cache)


def decoded(model: Any, cache: Any, prompt: int, steps: int) -> Tensor:
    """The logits of single tokens after a prompt, (1, steps, vocabulary)."""
    ids = tokens(prompt + steps)
    with torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache)
        made = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(prompt, prompt + steps)]
    return torch.cat(made, 1)


def test_a_static_cache_states_the_length_by_its_size() -> None:
    for size, factor in ((TRAINED, 1), (TRAINED + 1, 2), (200, 4)):
        model, static = model_at("llama", None), model_at("llama", factor)
        found, expected = (
            decoded(each, transformers.StaticCache(config=each.config, max_cache_len=size), 20, 30)
            for each in (model, static)
        )
        assert torch.equal(found, expected)


def test_a_fixed_length_states_the_length() -> None:
    for length, factor in ((TRAINED, 1), (TRAINED + 1, 2), (200, 4)):
        model, static = model_at("llama", None), model_at("llama", factor)
        with rope.fixed_length(model, length):
            found = decoded(model, transformers.DynamicCache(config=model.config), 20, 30)
        assert torch.equal(found, decoded(static, transformers.DynamicCache(config=static.config), 20, 30))


def test_rows_that_move_take_their_profile_along() -> None:
    ids, mask = batch([20, 100])
    step = {"attention_mask": torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)}
    model = model_at("llama", None)

    def prefilled(each: Any) -> Any:
        cache = transformers.DynamicCache(config=each.config)
        with torch.no_grad():
            each(ids, attention_mask=mask, past_key_values=cache)
        return cache

    cache, swapped = prefilled(model), torch.tensor([1, 0])
    cache.reorder_cache(swapped)
    step = {"attention_mask": step["attention_mask"][swapped]}
    found = logits(model, tokens(1, batch=2), past_key_values=cache, **step)
    for row, factor in ((0, 2), (1, 1)):
        static = model_at("llama", factor)
        cache = prefilled(static)
        cache.reorder_cache(swapped)
        assert torch.equal(found[row], logits(static, tokens(1, batch=2), past_key_values=cache, **step)[row])


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("how", ["assistant", "patched assistant", "lookup"])
def test_assisted_generation(how: str, factor: int) -> None:
    ids = tokens(TRAINED - NEW + factor - 1)
    # An id that no token has: 5.0 looks for it among the tokens that follow what it looks up, and fails without one.
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY}
    if how != "lookup":
        assistant = build("llama", num_hidden_layers=1)
        options = {"assistant_model": rope.profiles(assistant, FACTORS) if how == "patched assistant" else assistant}
    found = model_at("llama", None).generate(ids, **OPTIONS | options)
    assert torch.equal(found, model_at("llama", factor).generate(ids, **OPTIONS))


@pytest.mark.parametrize("stated", [{}, {"max_new_tokens": None}])
def test_a_prompt_of_embeddings(stated: dict[str, Any]) -> None:
    for length, factor in ((TRAINED - NEW, 1), (TRAINED - NEW + 1, 2)):
        model = model_at("llama", None)
        embeds = model.get_input_embeddings()(tokens(length)).detach()
        options = OPTIONS | stated | ({"max_length": length + NEW} if stated else {})
        made = [each.generate(inputs_embeds=embeds, **options) for each in (model, model_at("llama", factor))]
        assert torch.equal(*made)


# --- a patched model stays a model of transformers -----------------------------------------------------------------


def test_no_forward_of_a_generation_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = batch(LENGTHS)
    counted = []
    for model in (model_at("llama", None), model_at("llama", 1)):
        with HostReads() as reads:
            logits(model, ids, attention_mask=mask)
            generated(model, ids, attention_mask=mask)
        counted.append(reads.count)
    assert counted[0] == counted[1]

    def refuse(*_: Any) -> None:
        raise AssertionError("values were read on the host")

    monkeypatch.setattr("rope_ext_hf.patches.length_hooks._read_on_host", refuse)
    generated(model_at("llama", None), ids, attention_mask=mask, num_beams=2)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_other_profiles_compile_nothing_anew() -> None:
    counted = []
    for model in (model_at("llama", None), model_at("llama", 4)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        for lengths in ([20, 100, 200], [200, 200, 5], [64, 65, 200], [1, 2, 200]):
            ids, mask = batch(lengths)
            with torch.no_grad():
                found = compiled(ids, attention_mask=mask, use_cache=False).logits
            assert torch.equal(found, logits(model, ids, attention_mask=mask))
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counted == [1, 1]


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
def test_other_profiles_compile_no_decode_step_anew() -> None:
    model = copy.deepcopy(model_at("llama", None))
    compiled: Any = torch.compile(model, backend="eager")
    counted = []
    for lengths in ([20, 50, 90, 100], [100, 100, 5, 5], [55, 56, 57, 100]):
        ids, mask = batch(lengths)
        caches = [transformers.StaticCache(config=model.config, max_cache_len=140) for _ in range(2)]
        with torch.no_grad():
            for each, cache in zip((compiled, model), caches, strict=True):
                each(ids, attention_mask=mask, past_key_values=cache)
            for seed in range(4):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                step = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
                ids = tokens(1, batch=4, seed=seed)
                found, expected = (
                    each(ids, past_key_values=cache, **step).logits
                    for each, cache in zip((compiled, model), caches, strict=True)
                )
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counted == counted[:1] * 3


@pytest.mark.slow
def test_copies_pickles_and_saved_folders(tmp_path: Path) -> None:
    model = model_at("llama", None)
    model.save_pretrained(tmp_path / "saved")
    torch.save(model, tmp_path / "whole.pt")
    copies = [
        copy.deepcopy(model),
        torch.load(tmp_path / "whole.pt", weights_only=False),
        rope.from_pretrained(tmp_path / "saved"),
    ]
    for each in copies:
        assert each.config.max_position_embeddings == 4 * TRAINED
        for length in LENGTHS:
            assert torch.equal(*(generated(one, tokens(length))[1] for one in (each, model)))
    rope.unpatch(copies[0])
    assert torch.equal(generated(copies[0], tokens(60))[1], generated(build("llama"), tokens(60))[1])
    assert "generate" not in vars(copies[0])
    assert "generate" in vars(model)
    with pytest.raises(KeyError, match=r"rope_ext_hf\.from_pretrained"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_unpatching_gives_the_class_its_methods_back() -> None:
    model, before = build("llama"), build("llama")
    config, keys = model.config.to_dict(), list(vars(model))
    rope.profiles(model, FACTORS)
    rope.unpatch(model)
    assert model.config.to_dict() == config
    assert list(vars(model)) == keys
    assert torch.equal(generated(model, tokens(30))[1], generated(before, tokens(30))[1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_an_adapter_generates_with_profiles() -> None:
    peft = pytest.importorskip("peft")
    loaded = peft.get_peft_model(build("llama"), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    model = rope.profiles(copy.deepcopy(loaded), FACTORS)
    for length, factor in ((30, 1), (60, 2)):
        static = copy.deepcopy(loaded)
        static = static if factor == 1 else rope.patch(static, "yarn", factor=factor)
        assert torch.equal(*(generated(each, tokens(length))[1] for each in (model, static)))


@pytest.mark.slow
def test_layers_on_disk(tmp_path: Path) -> None:
    build("gemma3").save_pretrained(tmp_path / "loaded")
    places = ["model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    model, whole = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "loaded", **how)
        for how in (
            {
                "device_map": dict.fromkeys(places, "cpu") | {"model.layers.0": "disk"},
                "offload_folder": tmp_path / "off",
            },
            {},
        )
    )
    for each in (model, whole):
        rope.profiles(each, FACTORS)
    for length in LENGTHS:
        assert torch.equal(*(generated(each, tokens(length))[1] for each in (model, whole)))


def test_it_describes_itself() -> None:
    text = str(rope.describe(model_at("llama", None)))
    assert (
        "Each row, with all that is generated after it, has one factor: x1 up to 64 tokens, x2 up to 128"
        in unwrapped(text)
    )
    assert "Inputs of up to 64 tokens give the output of the model" in text


@pytest.mark.parametrize("factors", [[], [0.5, 2], ["2"], [1, float("nan")]])
def test_impossible_factors(factors: list[Any]) -> None:
    with pytest.raises(MethodError, match=r"factor|smaller"):
        rope.profiles(build("llama"), factors)


@pytest.mark.parametrize("method", ["dynamic-yarn", "dca", "learnable"])
def test_methods_that_are_not_static(method: str) -> None:
    with pytest.raises(MethodError, match="frequency must be a static frequency method"):
        rope.profiles(build("llama"), FACTORS, method)
