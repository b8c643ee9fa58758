"""Losses of every model class, read in chunks if it can be, equal those of its ordinary forward."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from checks.losses import EQUAL, RESULT, measured
from rope_ext_hf.reading import scorer as scorer_module
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.through import chunked_reader
from rope_ext_hf.reading.through.span_cache import SpanCache, StoringCache
from tests.support.dispatch import LargestTensor
from tests.support.every_model import Entry, build, data, entries, tiny
from tests.support.models import build as build_family
from tests.support.tiers import OLDER

IN_CHUNKS = [
    "bailing_hybrid",
    "bamba",
    "beam",
    "falcon_h1",
    "gemma2",
    "gemma3n_text",
    "granitemoehybrid",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "olmo_hybrid",
    "phimoe",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
    "zaya",
]
"""Linear attention, convolutions and Mamba, alone and beside attention; windows and chunks; layers of other sizes."""
WHOLE = {
    "deepseek_v32": "DynamicIndexedLayer",
    "doge": "mask itself",
    "falcon": "mask itself",
    "minimax": "cache of its own",
}
"""Model types that are read whole, and words of the reason that is given."""
REFUSED = {"bert": "no rotary", "modernbert": "sees the tokens", "t5gemma": "token ids alone"}
ROWS = {(row["model_type"], row["class"]): row for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]}
HYBRIDS = ["falcon_h1", "lfm2_moe", "qwen3_next"]


def first_entry(model_type: str) -> Entry:
    return next(entry for entry in entries() if entry.model_type == model_type)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def ordinary_losses(model: Any, ids: Tensor) -> Tensor:
    """Return the losses (tokens - 1,) of one forward of the model."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


AT_ONCE = {"llama": ["yarn", "dynamic-ntk", "rerope"], "gemma3": ["yarn"], "qwen3_moe": [], "cohere": ["ntk"]}


@pytest.mark.parametrize(
    ("family", "method"), [(name, method) for name, methods in AT_ONCE.items() for method in (None, *methods)]
)
def test_a_short_text_is_read_at_once(family: str, method: str | None) -> None:
    """One forward of the decoder gives the losses, and no chunk is read."""
    model, ids = build_family(family, vocab_size=5000), torch.randint(3, 5000, (300,))
    if method is not None:
        rope.patch(model, method, target_length=512)
    scorer = TokenScorer(model, head_bytes=64 * 1024 * 4)
    with LargestTensor() as seen:
        losses = scorer.losses(ids, 1)
    torch.testing.assert_close(losses, ordinary_losses(model, ids), atol=EQUAL, rtol=0)
    assert scorer.reader.cache is None
    assert seen.elements < 300 * 5000 / 4
    torch.testing.assert_close(TokenScorer(model, chunk=64).losses(ids, 100), losses[99:], atol=EQUAL, rtol=0)


def test_a_text_that_is_too_long_for_the_memory_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory left")

    model, ids = build_family("llama"), tokens(70)
    scorer = TokenScorer(model)
    assert scorer.reads_at_once(70)
    assert not scorer.reads_at_once(2000)
    monkeypatch.setattr(scorer_module, "decoder_outputs", fail)
    torch.testing.assert_close(scorer.losses(ids, 1), ordinary_losses(model, ids), atol=EQUAL, rtol=0)
    assert scorer.reader.cache is not None


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_a_scaling_of_some_layers_that_follows_the_input_sees_the_whole_text(family: str) -> None:
    config = build_family(family).config
    if OLDER and not all(isinstance(value, dict) for value in config.rope_parameters.values()):
        pytest.skip("this transformers mixes settings of the family for all layers with those by layer type")
    settings = {key: dict(value) for key, value in config.rope_parameters.items()}
    settings["full_attention"] |= {"rope_type": "dynamic", "factor": 4.0}
    model = build_family(family, rope_parameters=settings)
    for count in (65, 100):
        losses = TokenScorer(model).losses(tokens(count), 1)
        torch.testing.assert_close(losses, ordinary_losses(model, tokens(count)), atol=1e-5, rtol=0)


def test_a_decoder_that_returns_something_else_is_read_whole() -> None:
    model = build_family("llama")
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs).to_tuple()
    model.forward = lambda input_ids, **_: SimpleNamespace(logits=model.lm_head(model.model(input_ids=input_ids)[0]))
    scorer = TokenScorer(model)
    assert scorer.reading.startswith("whole: ")
    torch.testing.assert_close(scorer.losses(tokens(70), 1), ordinary_losses(model, tokens(70)), atol=EQUAL, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("of_type", ["llama", "gemma2", "deepseek_v32"])
def test_logits_after_the_last_tokens_also_of_rounded_keys(of_type: str) -> None:
    """Read in chunks or whole, they equal those of an ordinary forward with its keys and values rounded alike."""
    model, ids = tiny(of_type), tokens(70)
    scorer = TokenScorer(model, chunk=16)
    exact = model(input_ids=ids[None], use_cache=False).logits[0, -7:].float()
    torch.testing.assert_close(scorer.last_logits(ids, 7), exact, rtol=1e-4, atol=1e-4)
    scorer.store_through(lambda x: (4 * x).round() / 4)
    cache = StoringCache(config=scorer.reader.decoder.config)
    cache.stored = scorer.reader.stored
    rounded = model(input_ids=ids[None], past_key_values=cache).logits[0, -7:].float()
    assert (rounded - exact).abs().max() > 1e-3
    torch.testing.assert_close(scorer.last_logits(ids, 7), rounded, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("of_type", IN_CHUNKS)
def test_a_class_is_read_in_chunks(of_type: str) -> None:
    """Spans beyond every window, answers after a prompt, and prompts with a beginning in common."""
    assert measured(tiny(of_type), first_entry(of_type)) == "in chunks"


@pytest.mark.parametrize("of_type", WHOLE)
def test_a_class_that_needs_more_is_read_whole_and_says_why(of_type: str) -> None:
    how = measured(tiny(of_type), first_entry(of_type))
    assert how.startswith("whole: ")
    assert WHOLE[of_type] in how


@pytest.mark.parametrize("of_type", REFUSED)
def test_a_class_without_next_token_losses_is_refused(of_type: str) -> None:
    masked = next(entry for entry in reversed(entries()) if entry.model_type == of_type)
    with pytest.raises(rope.UnsupportedModelError, match=REFUSED[of_type]):
        TokenScorer(build(masked))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # what classes of transformers say while they are built
def test_every_class_is_measured_as_recorded() -> None:
    wrong = []
    for entry in entries():
        row = ROWS[entry.model_type, entry.name]["measured"]
        if entry.model_type in data()["not_measured"] or entry.model_type in data()["measured_as"]:
            continue  # transformers does not build it alone
        try:
            how = measured(build(entry), entry)
        except rope.RopeExtError:
            as_recorded = not row["works"]
        else:
            as_recorded = row["works"] and (how == "in chunks") == ("because" not in row)
        if not as_recorded:
            wrong.append((entry.model_type, entry.name))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "rerope"])
@pytest.mark.parametrize("of_type", HYBRIDS)
def test_patched_hybrids(of_type: str, method: str) -> None:
    model = tiny(of_type)
    params: dict[str, Any] = {"yarn": {"factor": 4}, "rerope": {"window": 32}}.get(method, {})
    rope.patch(model, method, **params)
    ids = tokens(200)
    with rope.fixed_length(model, 200):
        expected = ordinary_losses(model, ids)
    scorer = TokenScorer(model, chunk=37)
    assert scorer.chunked
    torch.testing.assert_close(scorer.losses(ids, 1), expected, atol=EQUAL, rtol=0)
    rope.unpatch(model)
    torch.testing.assert_close(scorer.losses(ids, 1), ordinary_losses(model, ids), atol=EQUAL, rtol=0)


def test_a_window_that_the_mask_alone_states() -> None:
    """PhiMoE gives its attention no sliding_window; without the window its losses would differ."""
    model = tiny("phimoe", sliding_window=32)
    ids = tokens(160)
    expected = ordinary_losses(model, ids)
    scorer = TokenScorer(model, chunk=37)
    assert scorer.chunked
    torch.testing.assert_close(scorer.losses(ids, 1), expected, atol=EQUAL, rtol=0)
    wide = tiny("phimoe", sliding_window=1000)
    assert (ordinary_losses(wide, ids) - expected).abs().max() > 0.01


def test_a_window_in_the_keywords_alone_is_not_trusted() -> None:
    """sdpa and eager attention follow the mask, flash attention the keyword: such a model is read whole."""
    model = build_family("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"sliding_window": 8}), with_kwargs=True
        )
    scorer = TokenScorer(model, chunk=37)
    assert "mask has the window None, but its attention has the window 8" in scorer.reading
    ids = tokens(60)
    torch.testing.assert_close(scorer.losses(ids, 1), ordinary_losses(model, ids), atol=EQUAL, rtol=0)


def test_attention_with_additions_to_its_scores_is_read_whole() -> None:
    model = build_family("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"position_bias": torch.zeros(1, 4, 1, 1)}), with_kwargs=True
        )
    assert TokenScorer(model).reading == "whole: the model's attention is given position_bias"


def deep(layers: int, width: int, scale: float) -> Any:
    """Return a narrow random Llama in bfloat16 whose weights have the standard deviation `scale`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=scale,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "width", "scale"), [(32, 256, 0.02), (32, 256, 0.12), (80, 64, 0.06)])
def test_rounding_in_deep_bfloat16_models_is_no_reason_to_read_them_whole(
    layers: int, width: int, scale: float
) -> None:
    scorer = TokenScorer(deep(layers, width, scale), chunk=64)
    assert scorer.reading == "in chunks of 64 tokens, layer by layer"


@pytest.mark.slow
def test_logits_of_another_model_are_told_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 too, it is noticed if one layer of 32 forgets everything before its chunk."""
    model = deep(32, 256, 0.06)
    update = SpanCache.update

    def forget(self: Any, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, key, value, layer, *args, **kwargs)
        if layer == 5:
            keys[:, :, : -key.shape[-2]] = values[:, :, : -key.shape[-2]] = 0
        return keys, values

    monkeypatch.setattr(SpanCache, "update", forget)
    assert "standard deviations" in TokenScorer(model, chunk=64).reading


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory left"), RuntimeError("CUDA error: launch failed")])
def test_failures_of_a_device_are_no_reason_to_read_whole(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr("rope_ext_hf.reading.through.chunked_attention.attend_from_kwargs", fail)
    with pytest.raises(type(error), match=str(error)):
        TokenScorer(build_family("llama"), chunk=16, longest=32)


def test_offloaded_tokens_are_one_run_of_memory() -> None:
    """Otherwise a device would copy them piece by piece through the host, pinned or not."""
    model = build_family("llama")
    scorer = TokenScorer(model, chunk=37, offload_cache=True)
    scorer.candidates(tokens(150), tokens(3)[None])
    assert scorer.reader.cache is not None
    for layer in scorer.reader.cache.layers:
        for room in (layer.keys, layer.values):
            assert room.shape[1] > 1
            written = room[:, :, 37:74].transpose(1, 2)
            assert written.is_contiguous()


def test_memory_is_allocated_for_the_longest_span_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def record(config: Any, capacity: int, **options: Any) -> SpanCache:
        made.append(capacity)
        return SpanCache(config, capacity, **options)

    monkeypatch.setattr(chunked_reader, "SpanCache", record)
    scorer = TokenScorer(build_family("llama"), chunk=37, longest=200)
    assert scorer.chunked
    made.clear()  # the cache of the check
    for count in (50, 100, 200):
        scorer.losses(tokens(count), 1)
    assert made == [200]


def test_prompts_with_another_beginning_are_read_again() -> None:
    """`again` has no effect if the cache had to grow meanwhile, whatever kinds of state the model keeps."""
    model = tiny("qwen3_next")
    scorer = TokenScorer(model, chunk=37)
    answers = tokens(6, seed=3).reshape(2, 3)
    scorer.candidates(tokens(50), answers, shared=30)
    longer = tokens(120)
    found, likeliest = scorer.candidates(longer, answers, shared=30, again=True)
    for row, answer in enumerate(answers):
        ids = torch.cat([longer, answer])
        torch.testing.assert_close(found[row], ordinary_losses(model, ids)[-3:], atol=EQUAL, rtol=0)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -4:-1]
        assert torch.equal(likeliest[row], logits.argmax(-1))


@pytest.mark.parametrize("method", [None, "yarn", "dca", "dynamic-yarn"])
def test_a_measurement_leaves_no_cache_behind(method: str | None) -> None:
    """Keys of a long span take gigabytes, and Python's collector runs by the number of objects, not by their size."""
    model = build_family("llama")
    gc.collect()
    gc.disable()
    try:
        with nullcontext() if method is None else rope.patched(model, method, target_length=512):
            scorer = TokenScorer(model, chunk=37)
            scorer.losses(torch.arange(3, 90), 1)
            cache = weakref.ref(scorer.reader.cache)
            assert cache() is not None
            del scorer
        assert cache() is None
    finally:
        gc.enable()
