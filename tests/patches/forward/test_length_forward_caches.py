"""Length-dependent methods in generate, and caches of every kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from rope_ext_hf.rotary.forward_state import running
from tests.support.length_examples import LONG, each_kind_of_rule, in_parts, keys_that_stay, one_layer, patched
from tests.support.models import FAMILIES, TRAINED, build, logits, tokens

# --- generate ------------------------------------------------------------------------------------------------------

NEW = 40
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams, sampled": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "several": {"num_return_sequences": 2, "num_beams": 2},
}


def generated(model: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out: Tensor = model.generate(ids, **settings)
    return out


@pytest.mark.slow
@each_kind_of_rule
@pytest.mark.parametrize("way", [way for way in WAYS if way != "offloaded cache" or torch.cuda.is_available()])
@pytest.mark.sampled(5)
def test_generate_with_a_cache_equals_without(way: str, rule: str) -> None:
    device = "cuda" if way == "offloaded cache" else "cpu"  # transformers offloads from CUDA devices alone
    model, ids = patched("llama", rule, num_hidden_layers=1).to(device), tokens(TRAINED - 5, batch=2).to(device)
    mask = torch.ones_like(ids)
    without = {key: value for key, value in WAYS[way].items() if key != "cache_implementation"}
    expected = generated(model, ids, attention_mask=mask, use_cache=False, **without)
    assert torch.equal(generated(model, ids, attention_mask=mask, **WAYS[way]), expected)


@pytest.mark.slow
@each_kind_of_rule
def test_a_padded_batch_generates_what_each_row_does_alone(rule: str) -> None:
    model = patched("llama", rule)
    lengths = [TRAINED - 20, 10, TRAINED + 70]
    ids, mask = torch.zeros(3, max(lengths), dtype=torch.int64), torch.zeros(3, max(lengths), dtype=torch.int64)
    rows = [tokens(n, seed=n) for n in lengths]
    for i, row in enumerate(rows):
        ids[i, max(lengths) - row.shape[1] :], mask[i, max(lengths) - row.shape[1] :] = row[0], 1
    together = generated(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = generated(model, row, attention_mask=torch.ones_like(row))
        assert torch.equal(together[i, max(lengths) :], alone[0, row.shape[1] :])


@pytest.mark.slow
@each_kind_of_rule
def test_a_cropped_cache_goes_on(rule: str) -> None:
    """As in assisted decoding, several tokens are added at once and some taken back, past every step of the rules."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(150)
    with torch.no_grad():
        cache = model(ids[:, :50], use_cache=True).past_key_values
        at = 50
        while at < 140:
            actual = model(ids[:, at : at + 9], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(actual, logits(model, ids[:, : at + 9])[:, -1], atol=1e-4, rtol=0)
            cache.crop(-6)
            at += 3
            actual = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(actual, logits(model, ids[:, : at + 1])[:, -1], atol=1e-4, rtol=0)
            at += 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@each_kind_of_rule
@pytest.mark.parametrize("way", ["greedy", "beams", "static cache"])
def test_generate_with_windows_and_padding(way: str, rule: str) -> None:
    """Layers that keep only the last keys, in a batch of rows of two lengths."""
    model = patched("mistral", rule, num_hidden_layers=1, sliding_window=24)
    ids, mask = tokens(TRAINED - 5, batch=2), torch.ones(2, TRAINED - 5, dtype=torch.int64)
    mask[0, :30] = 0
    without = {key: value for key, value in WAYS[way].items() if key != "cache_implementation"}
    expected = generated(model, ids, attention_mask=mask, use_cache=False, **without)
    assert torch.equal(generated(model, ids, attention_mask=mask, **WAYS[way]), expected)


ASSISTANCE: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "assistant": lambda: {"assistant_model": rope.patch(build("llama", seed=3), "dynamic-ntk")},
}


@pytest.mark.slow
@each_kind_of_rule
@pytest.mark.parametrize("way", ASSISTANCE)
def test_assisted_decoding(rule: str, way: str) -> None:
    """Between two steps of a rule the result is that of greedy search; the cropped cache is as good as any other."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(35).repeat(1, 2)
    mask = torch.ones_like(ids)
    out: Any = generated(model, ids, attention_mask=mask, return_dict_in_generate=True, **ASSISTANCE[way]())
    assert out.sequences.shape == (1, ids.shape[1] + NEW)
    if rule in ("even", "pow2", "longrope"):
        assert torch.equal(out.sequences, generated(model, ids, attention_mask=mask, use_cache=False))
    cache, known = out.past_key_values, out.past_key_values.get_seq_length()
    assert known < out.sequences.shape[1]
    with torch.no_grad():
        actual = model(out.sequences[:, known:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(actual, logits(model, out.sequences)[:, -1], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("rule", ["even", "hf", "longrope"])
def test_assisted_decoding_with_windows(rule: str) -> None:
    """Layers with windows keep the keys that may be taken back for as long as they may."""
    model, ids = patched("mistral", rule, num_hidden_layers=1, sliding_window=24), tokens(35).repeat(1, 2)
    out: Any = generated(
        model, ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=4, return_dict_in_generate=True
    )
    if rule != "hf":
        assert torch.equal(out.sequences, generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False))
    cache, known = out.past_key_values, out.past_key_values.get_seq_length()
    with torch.no_grad():
        actual = model(out.sequences[:, known:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(actual, logits(model, out.sequences)[:, -1], atol=1e-4, rtol=0)


@each_kind_of_rule
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_emptied_cache_starts_anew(kind: str, rule: str) -> None:
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(100)
    cache: Any = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    for size in (70, 30):
        with torch.no_grad():
            for part in torch.split(ids, size, dim=1):
                actual = model(part, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(actual, logits(model, ids)[:, -1], atol=1e-4, rtol=0)
        cache.reset()


@pytest.mark.slow
@each_kind_of_rule
def test_a_prompt_is_used_again(rule: str) -> None:
    """One prefill, copied, and continued in several ways, alone and as one batch."""
    model, prompt = patched("llama", rule, num_hidden_layers=1), tokens(TRAINED - 3)
    with torch.no_grad():
        prefilled = model(prompt, use_cache=True).past_key_values
    several = torch.cat([torch.cat((prompt, tokens(20, seed=seed)), 1) for seed in (1, 2, 3)])
    for ids in torch.split(several, 1):
        expected = generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        cache = copy.deepcopy(prefilled)
        actual = generated(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        assert torch.equal(actual, expected)
    prefilled.batch_repeat_interleave(3)
    together = generated(model, several, attention_mask=torch.ones_like(several), past_key_values=prefilled)
    assert torch.equal(together[2:], expected)
    for layer in prefilled.layers:
        layer.keys, layer.values = layer.keys[:2], layer.values[:2]
    with pytest.raises(LengthError, match="filled with 3 rows, and which of them became the 2"):
        logits(model, several[:2, :1], past_key_values=prefilled)


@pytest.mark.slow
@each_kind_of_rule
def test_a_conversation_in_one_cache(rule: str) -> None:
    """Each turn adds a question and its answer to one cache, from below the trained length to far beyond."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(20)
    cache = transformers.DynamicCache(config=model.config)
    for turn in range(4):
        ids = torch.cat((ids, tokens(10, seed=turn)), 1)
        expected = generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        ids = generated(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        assert torch.equal(ids, expected)


# --- caches of other kinds -----------------------------------------------------------------------------------------


def quantized(backend: str, config: Any) -> Any:
    """Return a quantized cache of a backend."""
    options: dict[str, Any] = {"fp8": {}, "quanto": {"nbits": 4}, "hqq": {"nbits": 8, "axis_key": 1, "axis_value": 1}}
    if backend != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
        options[backend] |= {"q_group_size": 8, "residual_length": 8}
    return transformers.QuantizedCache(backend, config, **options[backend])


@pytest.mark.slow
@each_kind_of_rule
@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_quantized_caches(name: str, backend: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are never rotated and rounded again, so that errors do not grow from the first step to the last."""
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    ids, ends = tokens(140), (60, 65, 100, 129, 140)

    def gaps() -> Tensor:
        model = patched(name, rule, **one_layer(name))
        cache = quantized(backend, model.config)
        with torch.no_grad():
            parts = torch.split(ids, [50, *[1] * 90], dim=1)
            actual = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
        expected = torch.stack([logits(model, ids[:, :end])[:, -1] for end in ends], 1)
        off: Tensor = (actual[:, [end - 1 for end in ends]] - expected).norm(dim=-1) / expected.norm(dim=-1)
        return off[0]

    followed = gaps()
    assert followed.max() < 0.25
    keys_that_stay(monkeypatch)
    assert gaps()[-1] > 2 * followed[-1]


class Roughly(transformers.cache_utils.QuantizedLayer):  # type: ignore[misc]
    """A backend that rounds to sixteenths."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return (tensor * 16).round()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor / 16


@pytest.mark.slow
@each_kind_of_rule
def test_a_quantized_cache_with_beams(rule: str) -> None:
    model, ids = patched("llama", rule), tokens(TRAINED - 5, batch=2)

    def cache() -> Any:
        return transformers.Cache(layers=[Roughly(residual_length=8) for _ in range(2)])

    mask = torch.ones_like(ids)
    actual = generated(model, ids, attention_mask=mask, past_key_values=cache(), num_beams=2)
    alone = generated(model, ids[:1], attention_mask=mask[:1], past_key_values=cache(), num_beams=2)
    assert torch.equal(actual[:1], alone)


class Stream:
    """Stands for a CUDA stream where there is none."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


@pytest.mark.slow
@each_kind_of_rule
def test_offloaded_caches(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys may be under way to another device between two forwards, so that none is rotated in place."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: Stream())
    model, ids = patched("llama", rule), tokens(140)
    cache = transformers.DynamicCache(config=model.config, offloading=True)
    cache.prefetch_stream = Stream()
    before = []
    with torch.no_grad():
        for part in torch.split(ids, [50, *[1] * 90], dim=1):
            before.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(before, 1), in_parts(model, ids, [50]), atol=1e-4, rtol=0)


def test_a_cache_from_elsewhere_is_refused() -> None:
    model, ids = patched("llama", "paper"), tokens(80)
    with torch.no_grad():
        plain = build("llama")(ids, use_cache=True).past_key_values
        with pytest.raises(LengthError, match=r"not stored under this model's dynamic-ntk.*by an unpatched model"):
            model(ids[:, :1], past_key_values=plain)
        other = patched("llama", "dynamic-yarn")(ids, use_cache=True).past_key_values
        with pytest.raises(LengthError, match=r"stored under dynamic-yarn.*this model is under dynamic-ntk"):
            model(ids[:, :1], past_key_values=other)
    assert torch.equal(logits(model, ids), logits(patched("llama", "paper"), ids))  # nothing is left behind


@each_kind_of_rule
def test_an_error_inside_leaves_nothing_behind(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes in a step that rotates keys. Without the keys that it has added, the cache goes on."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(2 * TRAINED + 1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    in_parts(model, ids, [TRAINED])  # so that how the cache keeps its keys is known
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with monkeypatch.context() as patch:
            patch.setattr(model.model.norm, "forward", fail)
            with pytest.raises(RuntimeError, match="broken"):
                model(ids[:, -1:], past_key_values=cache)
        assert not [layer for layer in cache.layers if "update" in vars(layer)]
        assert not list(running())
        with pytest.raises(LengthError, match="other code has added keys"):
            model(ids[:, -1:], past_key_values=cache)
        cache.crop(-1)
        actual = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(actual, logits(model, ids)[:, -1], atol=1e-4, rtol=0)


def test_keys_turned_half_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched("llama", "even"), tokens(TRAINED + 1)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1], "keys", None)
            with pytest.raises(AttributeError):
                model(ids[:, -1:], past_key_values=cache)
        with pytest.raises(LengthError, match="rotated half-way: fill a new one"):
            model(ids[:, -1:], past_key_values=cache)


@each_kind_of_rule
def test_a_cache_that_is_not_asked_for_is_followed_all_the_same(rule: str) -> None:
    """use_cache=False with a cache given: transformers fills it and does not return it."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(100)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for part in torch.split(ids, [40, 58, 1, 1], dim=1):
            actual = model(part, past_key_values=cache, use_cache=False).logits[:, -1]
    torch.testing.assert_close(actual, logits(model, ids)[:, -1], atol=1e-4, rtol=0)


def test_sticky_keeps_the_largest_until_reset() -> None:
    model = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True)
    fresh = logits(model, tokens(48))
    logits(model, tokens(LONG))
    grown = logits(model, tokens(48))
    with rope.fixed_length(rope.patch(build("llama"), "dynamic-ntk", growth="even"), LONG) as held:
        torch.testing.assert_close(grown, logits(held, tokens(48)), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(rope.reset(model), tokens(48)), fresh)


def test_sticky_growth_reaches_caches_under_way() -> None:
    """A longer input in another call changes the frequencies of the next step of this one."""
    model = rope.patch(build("llama", num_hidden_layers=1), "dynamic-ntk", growth="even", sticky=True)
    ids = tokens(40)
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True).past_key_values
        for at in range(20, 40):
            if at == 30:
                logits(model, tokens(LONG))
            actual = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(actual, logits(model, ids[:, : at + 1])[:, -1], atol=1e-4, rtol=0)
