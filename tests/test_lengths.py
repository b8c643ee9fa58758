"""Length-dependent methods: every row its own length, every cache one base; against references that know neither hook.

A decode step of a one-layer model equals the full recomputation, because the hidden states that its keys come from do
not depend on the scale; deeper models are compared with a Llama written here that caches un-rotated keys. A `..._gap`
is how far a model is from what it should be: ours is held to 1e-4, and transformers' own must be off by 1e-2 or more.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.families import families
from rope_ext_hf.rotary.forward_state import running
from rope_ext_hf.rotary.kv_cache import KeyLayout, KeyRotation, rotate_cached_keys_
from tests.dispatch import HostReads
from tests.models import FAMILIES, TRAINED, build, build_known, logits, tokens

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("dynamic-ntk", {}),
    "hf": ("dynamic-ntk", {"growth": "hf", "factor": 4.0}),
    "even": ("dynamic-ntk", {"growth": "even"}),
    "pow2": ("dynamic-ntk", {"growth": "pow2"}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "longrope": (
        "longrope",
        {
            "short_factor": [1.0 + i / 10 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
            "attention_factor": 1.2,
        },
    ),
}
every_rule = pytest.mark.parametrize("rule", RULES)
LONG = 4 * TRAINED


def patched(name: str, rule: str, **overrides: Any) -> Any:
    method, params = RULES[rule]
    return rope.patch(build(name, **overrides), method, **params)


def stock(rule: str = "hf", **overrides: Any) -> Any:
    """transformers' own form of a rule."""
    if rule == "hf":
        return build("llama", {"rope_type": "dynamic", "factor": 4.0}, **overrides)
    form = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": TRAINED} | RULES["longrope"][1]
    return build("llama", form, max_position_embeddings=LONG, **overrides)


def one_layer(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name in ("gemma2", "gemma3", "gpt_oss", "olmo3", "llama4"):
        options["layer_types"] = ["full_attention"]
    if name == "llama4":
        options["no_rope_layers"] = [1]
    if name.startswith("deepseek"):
        options["first_k_dense_replace"] = 0
    return options


def in_parts(model: Any, ids: Tensor, sizes: Sequence[int], **kwargs: Any) -> Tensor:
    """The logits of ids, fed into a cache in parts of these sizes, the rest token by token."""
    cache, found, at = None, [], 0
    sizes = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    with torch.no_grad():
        for size in sizes:
            out = model(ids[:, at : at + size], past_key_values=cache, use_cache=True, **kwargs)
            cache, at = out.past_key_values, at + size
            found.append(out.logits)
    return torch.cat(found, 1)


# --- one layer: a cached step is the full recomputation -----------------------------------------------------------


@every_rule
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_step_equals_the_recomputation(name: str, rule: str) -> None:
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    model = patched(name, rule, **one_layer(name))
    ids = tokens(200)
    found = in_parts(model, ids, [40, 30])
    for end in (41, 63, 64, 65, 70, 71, 100, 127, 128, 129, 130, 199, 200):
        if end > 70 or end == 40:
            torch.testing.assert_close(found[:, end - 1], logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@every_rule
def test_sliding_layers_too(rule: str) -> None:
    """A window shorter than the text, whose layer keeps only the last keys."""
    model = patched("mistral", rule, num_hidden_layers=1, sliding_window=24)
    ids = tokens(150)
    found = in_parts(model, ids, [50])
    for end in (51, 65, 100, 129, 150):
        torch.testing.assert_close(found[:, end - 1], logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


def keys_that_stay(patch: pytest.MonkeyPatch) -> None:
    """From here on no key is turned in a model patched anew: what the tests would miss if they missed that."""
    patch.setattr("rope_ext_hf.patches.length_hooks._key_layouts", lambda *_: [None] * 8)


@every_rule
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_step_in_bfloat16(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near the same weights in float32 as bfloat16 is without a cache."""
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    method, params = RULES[rule]
    narrow, wide = build(name, **one_layer(name)).to(torch.bfloat16), build(name, **one_layer(name))
    wide.load_state_dict(narrow.state_dict())
    rope.patch(wide, method, **params)
    ids, ends = tokens(132), (71, 100, 128, 129, 132)
    expected = torch.stack([logits(wide, ids[:, :end])[:, -1] for end in ends], 1)

    def gap(model: Any) -> float:
        found = in_parts(rope.patch(model, method, **params), ids, [40, 30])[:, [end - 1 for end in ends]]
        return float((found - expected).norm() / expected.norm())

    followed = gap(copy.deepcopy(narrow))
    assert followed < 0.03
    keys_that_stay(monkeypatch)
    assert gap(narrow) > 2 * followed


AFTER_THE_ROTATION = {"hunyuan_v1_dense", "hunyuan_v1_moe"}  # a norm with weights comes then
INDEXED = {"deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"}  # keys of an index are cached, too
NOT_HERE = {
    "longcat_flash",  # two attentions in a layer
    "bamba",  # unpatched, a step onto its cache is not the recomputation either
    *("beam", "chatglm", "codegen", "cohere_compass_text", "gptj", "qwen3_5_moe_text", "qwen3_5_text"),  # not patched
}
ROTATES_WHERE_IT_SLIDES = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"}
MINISTRAL: dict[str, Any] = {  # what is not a method's is to stay
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": TRAINED,
    }
}
OF_ITS_OWN: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {},  # one of its two layers attends
    "falcon_h1": {"num_hidden_layers": 1},
    "ministral3": MINISTRAL,
} | {
    name: {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}  # theirs is of another length
    for name in ("apertus", "cwm")
}


def rotating_once(model_type: str) -> Any:
    """A model of one layer with rotation, whose keys do not depend on how other tokens were turned."""
    layer_type = "sliding_attention" if model_type in ROTATES_WHERE_IT_SLIDES else "full_attention"
    one = {"num_hidden_layers": 1, "layer_types": [layer_type], "sliding_window": 512}
    options = OF_ITS_OWN.get(model_type, one)
    return build_known(model_type, **(one | options if "rope_parameters" in options else options))


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("model_type", sorted(set(families()) - AFTER_THE_ROTATION - INDEXED - NOT_HERE))
def test_the_cache_of_every_family_of_the_table(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it keeps its keys is found by looking; a step is the recomputation."""
    ids = tokens(TRAINED + 6)

    def gap(method: str) -> float:
        model = rope.patch(rotating_once(model_type), method)
        return (in_parts(model, ids, [TRAINED - 2])[:, -1] - logits(model, ids)[:, -1]).abs().max().item()

    assert gap("dynamic-yarn") <= 1e-4
    assert gap("dynamic-ntk") <= 1e-4
    keys_that_stay(monkeypatch)
    assert gap("dynamic-yarn") > 1e-3


@pytest.mark.parametrize("model_type", sorted(AFTER_THE_ROTATION | INDEXED))
def test_a_cache_that_cannot_follow_is_refused(model_type: str) -> None:
    model, ids = rope.patch(build_known(model_type), "dynamic-ntk"), tokens(TRAINED + 6)
    with pytest.raises(LengthError, match=r"are not simply rotated .*fixed_length\(model, prompt_length"):
        in_parts(model, ids, [TRAINED - 2])
    with rope.fixed_length(model, TRAINED + 6):
        assert in_parts(model, ids, [TRAINED - 2]).isfinite().all()


def test_looking_at_a_cache_leaves_nothing_behind() -> None:
    model, ids = patched("gemma3", "dynamic-yarn"), tokens(90)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = logits(model, ids)
    in_parts(model, ids, [TRAINED])
    assert torch.equal(logits(model, ids), before)
    assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())


# --- deeper: a Llama written here, with un-rotated keys and formulas in plain math ---------------------------------


def inverse_frequencies(rule: str, length: int, dim: int = 16, theta: float = 10_000.0) -> tuple[list[float], float]:
    """FORMULAS in plain Python; (dim / 2 numbers, attention factor)."""
    ratio = length / TRAINED
    alpha = {
        "paper": lambda: max(1.0, ratio),
        "hf": lambda: 4.0 * max(1.0, ratio) - 3.0,
        "even": lambda: 1.0 if ratio <= 1 else 2.0 * math.ceil(ratio / 2),
        "pow2": lambda: 1.0 if ratio <= 1 else 2.0 ** math.ceil(math.log2(ratio) + 1) - 1,
    }
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rule in alpha:
        base = theta * alpha[rule]() ** (dim / (dim - 2))
        return [base ** (-2 * i / dim) for i in range(dim // 2)], 1.0
    if rule == "longrope":
        lists = RULES["longrope"][1]
        divisors = lists["long_factor"] if length > TRAINED else lists["short_factor"]
        return [f / d for f, d in zip(plain, divisors, strict=True)], 1.2
    scale = max(1.0, ratio)
    low, high = (dim * math.log(TRAINED / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = [min(1.0, max(0.0, (i - low) / max(high - low, 1e-3))) for i in range(dim // 2)]
    return [f / scale * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)], 0.1 * math.log(scale) + 1


def rotated(x: Tensor, rule: str, length: int, positions: Tensor) -> Tensor:
    """(heads, tokens, 16), half pairing, in float64."""
    inv_freq, factor = inverse_frequencies(rule, length)
    angle = positions[:, None].double() * torch.tensor(inv_freq, dtype=torch.float64)
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class UnrotatedLlama:
    """One row of text through the weights of a Llama; keys are cached before rotation and rotated when read."""

    def __init__(self, model: Any, rule: str) -> None:
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}
        self.config, self.rule = model.config, rule
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.known = 0

    def norm(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[name]
        return out

    def __call__(self, ids: Tensor) -> Tensor:
        c, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][ids]
        total = self.known + len(ids)
        at, every = torch.arange(self.known, total), torch.arange(total)
        for i in range(c.num_hidden_layers):
            name = f"model.layers.{i}."
            h = self.norm(x, f"{name}input_layernorm.weight")
            q, k, v = (
                (h @ w[f"{name}self_attn.{p}_proj.weight"].T).view(len(ids), -1, c.head_dim).transpose(0, 1)
                for p in "qkv"
            )
            if self.known:
                k, v = torch.cat((self.keys[i], k), 1), torch.cat((self.values[i], v), 1)
            self.keys[i : i + 1], self.values[i : i + 1] = [k], [v]
            groups = c.num_attention_heads // c.num_key_value_heads
            turned = rotated(k, self.rule, total, every).repeat_interleave(groups, 0)
            scores = rotated(q, self.rule, total, at) @ turned.transpose(1, 2) / math.sqrt(c.head_dim)
            scores = scores.masked_fill(every > at[:, None], -math.inf)
            out = (scores.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1).reshape(len(ids), -1)
            x = x + out @ w[f"{name}self_attn.o_proj.weight"].T
            h = self.norm(x, f"{name}post_attention_layernorm.weight")
            gate, up = (h @ w[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{name}mlp.down_proj.weight"].T
        self.known = total
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        result: Tensor = self.norm(x, "model.norm.weight") @ head.T
        return result


def cache_gap(model: Any, rule: str, sizes: Sequence[int], steps: int) -> float:
    """Prefill in parts, then single tokens."""
    ids = tokens(sum(sizes) + steps, seed=len(sizes))
    reference = UnrotatedLlama(model, rule)
    expected = torch.cat([reference(part) for part in torch.split(ids[0], [*sizes, *[1] * steps])])
    return (in_parts(model, ids, sizes)[0].double() - expected).abs().max().item()


@every_rule
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4), steps=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_the_cache_equals_one_of_unrotated_keys(rule: str, sizes: list[int], steps: int) -> None:
    assert cache_gap(patched("llama", rule), rule, sizes, steps) <= 1e-4


@pytest.mark.parametrize("rule", ["hf", "longrope"])
def test_that_of_stock_does_not(rule: str) -> None:
    assert cache_gap(stock(rule), rule, [40, 30, 20], 3) > 1e-2


@every_rule
def test_in_bfloat16_rounding_does_not_accumulate(rule: str) -> None:
    """After 1,024 steps the scores of the last query are within 1% of those of un-rotated float32 keys."""
    model = patched("llama", rule, num_hidden_layers=1).to(torch.bfloat16)
    ids = tokens(32 + 1024)
    with torch.no_grad():
        cache = model(ids[:, :32], use_cache=True).past_key_values
        for at in range(32, ids.shape[1] - 1):
            model(ids[:, at : at + 1], past_key_values=cache)
        seen: list[Tensor] = []
        attention = torch.nn.functional.scaled_dot_product_attention

        def spy(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.extend((query, key))
            return attention(query, key, *args, **kwargs)

        torch.nn.functional.scaled_dot_product_attention = spy
        try:
            model(ids[:, -1:], past_key_values=cache)
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention
    query, key = (tensor[0].double() for tensor in seen)
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids[0]))
    q, k = (
        projection(hidden).float().view(len(hidden), -1, 16).transpose(0, 1).detach()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    every = torch.arange(ids.shape[1])
    exact_query, exact_key = (rotated(x, rule, ids.shape[1], every) for x in (q, k))
    groups = exact_query.shape[0] // exact_key.shape[0]
    expected = exact_query[:, -1:] @ exact_key.repeat_interleave(groups, 0).transpose(1, 2)
    if key.shape[0] != query.shape[0]:
        key = key.repeat_interleave(groups, 0)
    found = query @ key.transpose(1, 2)
    assert ((found - expected).norm() / expected.norm()).item() < 0.01


# --- rows ----------------------------------------------------------------------------------------------------------


def rows_gap(model: Any, lengths: Sequence[int], side: str, given_positions: bool = False) -> float:
    """Rows padded to one batch against each alone, in a model that has met nothing else."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 3), torch.zeros(len(lengths), longest, dtype=torch.int64)
    rows = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if given_positions else {}
    found = logits(copy.deepcopy(model), ids, attention_mask=mask, **positions)
    return max(
        (found[i][mask[i].bool()] - logits(copy.deepcopy(model), row[None])[0]).abs().max().item()
        for i, row in enumerate(rows)
    )


@every_rule
@given(
    lengths=st.lists(st.integers(2, 150), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    given_positions=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_rows_do_not_touch_each_other(rule: str, lengths: list[int], side: str, given_positions: bool) -> None:
    """Whatever its batch mates and its padding, a row's logits are those it has alone."""
    assert rows_gap(patched("llama", rule), lengths, side, given_positions) <= 1e-4


@pytest.mark.parametrize("rule", ["hf", "longrope"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given_positions", [True, False])
def test_stock_rows_do(rule: str, side: str, given_positions: bool) -> None:
    assert rows_gap(stock(rule), [120, 48], side, given_positions) > 1e-2


def history_gap(model: Any, short: int, long: int) -> float:
    ids = tokens(short)
    before = logits(model, ids)
    logits(model, tokens(long))
    in_parts(model, tokens(long, seed=2), [long - 2])
    return (logits(model, ids) - before).abs().max().item()


@every_rule
@given(short=st.integers(1, 200), long=st.integers(TRAINED, LONG))
@settings(max_examples=15, deadline=None)
def test_history_leaves_no_trace(rule: str, short: int, long: int) -> None:
    assert history_gap(patched("llama", rule), short, long) == 0


@pytest.mark.parametrize("short", [TRAINED, TRAINED + 1, 100])
def test_in_stock_history_does(short: int) -> None:
    """The trained length itself among others; below it transformers starts anew."""
    assert history_gap(stock(), short, LONG) > 1e-2


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"longrope"}))  # whose short list is a change already
def test_up_to_the_trained_length_nothing_changes(rule: str) -> None:
    model, plain = patched("llama", rule), build("llama")
    logits(model, tokens(LONG))
    torch.testing.assert_close(logits(model, tokens(TRAINED)), logits(plain, tokens(TRAINED)), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(model, tokens(TRAINED + 1)), logits(plain, tokens(TRAINED + 1)), atol=1e-3)


def chunks_gap(model: Any, ids: Tensor, sizes: Sequence[int]) -> float:
    return (in_parts(copy.deepcopy(model), ids, sizes) - logits(copy.deepcopy(model), ids)).abs().max().item()


@every_rule
@given(sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4), steps=st.integers(0, 8), room=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_under_a_fixed_length_parts_do_not_matter(rule: str, sizes: list[int], steps: int, room: int) -> None:
    """One prefill, any parts, single tokens and no cache at all: one result, that of an input of the held length."""
    model, ids = patched("llama", rule), tokens(sum(sizes) + steps)
    with rope.fixed_length(model, ids.shape[1] + room):
        assert chunks_gap(model, ids, sizes) <= 1e-4
    with rope.fixed_length(model, ids.shape[1]):
        held = logits(model, ids)
    torch.testing.assert_close(held, logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["hf", "longrope"])
def test_in_stock_parts_do(rule: str) -> None:
    assert chunks_gap(stock(rule), tokens(120), [40, 40, 40]) > 1e-2


@every_rule
@given(
    lengths=st.lists(st.integers(2, 150), min_size=2, max_size=3),
    cut=st.integers(1, 149),
    steps=st.integers(1, 6),
)
@settings(max_examples=10, deadline=None)
def test_padded_rows_in_one_cache(rule: str, lengths: list[int], cut: int, steps: int) -> None:
    """Each row is what it is alone, read in the parts that the batch was read in."""
    model, longest = patched("llama", rule), max(lengths)
    cut = min(cut, longest - 1)
    ids, mask = torch.full((len(lengths), longest + steps), 3), torch.zeros(len(lengths), longest + steps).long()
    rows = [tokens(n + steps, seed=i)[0] for i, n in enumerate(lengths)]
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
    cache, found = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, end in itertools.pairwise([0, cut, *range(longest, longest + steps + 1)]):
            call = {"attention_mask": mask[:, :end], "past_key_values": cache}
            found.append(model(ids[:, start:end], **call).logits)
    together = torch.cat(found, 1)
    for i, row in enumerate(rows):
        first = max(0, cut - longest + lengths[i])
        alone = in_parts(model, row[None], [size for size in (first, lengths[i] - first) if size])
        torch.testing.assert_close(together[i, -len(row) :], alone[0], atol=1e-4, rtol=0)


@every_rule
def test_a_mask_may_come_and_go(rule: str) -> None:
    """Rows without padding are the same with a mask and without, and in the same cache."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(140, batch=2)
    with torch.no_grad():
        cache = model(ids[:, :50], use_cache=True).past_key_values
        for end in range(51, 141):
            mask = {"attention_mask": torch.ones(2, end, dtype=torch.int64)} if end % 3 else {}
            found = model(ids[:, end - 1 : end], past_key_values=cache, **mask).logits[:, -1]
            if end % 10 < 3:
                torch.testing.assert_close(found, logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


@every_rule
@pytest.mark.parametrize("positions", ["from a thousand", "in leaps"])
def test_positions_of_ones_own(rule: str, positions: str) -> None:
    """Without a mask a row is as long as its largest position says, however few its tokens are."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(40)
    at = (1000 + torch.arange(40) if positions == "from a thousand" else 5 * torch.arange(40))[None]
    causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()  # or leaps would be taken for the ends of inputs
    with torch.no_grad():
        mask = causal[..., :10, :10]
        cache = model(ids[:, :10], position_ids=at[:, :10], attention_mask=mask, use_cache=True).past_key_values
        for end in range(11, 41):
            found = model(ids[:, end - 1 : end], position_ids=at[:, end - 1 : end], past_key_values=cache).logits[:, -1]
            mask = causal[..., :end, :end]
            expected = logits(model, ids[:, :end], position_ids=at[:, :end], attention_mask=mask)[:, -1]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@every_rule
def test_packed_rows_count_for_themselves(rule: str) -> None:
    model = patched("llama", rule, attn_implementation="eager", num_hidden_layers=1)
    parts = [tokens(n, seed=n)[0] for n in (30, 100, 70)]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    ids = torch.cat(parts)[None]
    found = torch.split(logits(model, ids, position_ids=positions)[0], [30, 100, 70])
    for part, mine in zip(parts, found, strict=True):
        torch.testing.assert_close(mine, logits(model, part[None])[0], atol=1e-4, rtol=0)


def test_a_prepared_mask_needs_positions() -> None:
    model = patched("llama", "paper")
    mask = torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()
    with pytest.raises(LengthError, match=r"give position_ids with it.*fixed_length"):
        logits(model, tokens(80), attention_mask=mask)
    found = logits(model, tokens(80), attention_mask=mask, position_ids=torch.arange(80)[None])
    torch.testing.assert_close(found, logits(model, tokens(80)), atol=1e-5, rtol=0)


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
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out: Tensor = model.generate(ids, **asked)
    return out


@every_rule
@pytest.mark.parametrize("way", [way for way in WAYS if way != "offloaded cache" or torch.cuda.is_available()])
def test_generate_with_a_cache_equals_without(way: str, rule: str) -> None:
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(TRAINED - 5, batch=2)
    mask = torch.ones_like(ids)
    without = {key: value for key, value in WAYS[way].items() if key != "cache_implementation"}
    expected = generated(model, ids, attention_mask=mask, use_cache=False, **without)
    assert torch.equal(generated(model, ids, attention_mask=mask, **WAYS[way]), expected)


@every_rule
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


@every_rule
def test_a_cropped_cache_goes_on(rule: str) -> None:
    """What assisted decoding does: several tokens at once, some of them taken back, over every step of the rules."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(150)
    with torch.no_grad():
        cache = model(ids[:, :50], use_cache=True).past_key_values
        at = 50
        while at < 140:
            found = model(ids[:, at : at + 9], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(found, logits(model, ids[:, : at + 9])[:, -1], atol=1e-4, rtol=0)
            cache.crop(-6)
            at += 3
            found = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(found, logits(model, ids[:, : at + 1])[:, -1], atol=1e-4, rtol=0)
            at += 1


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@every_rule
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


@every_rule
@pytest.mark.parametrize("way", ASSISTANCE)
def test_assisted_decoding(rule: str, way: str) -> None:
    """Between two steps of a rule the result is greedy search's; the cache is as good as one never cropped."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(35).repeat(1, 2)
    mask = torch.ones_like(ids)
    out: Any = generated(model, ids, attention_mask=mask, return_dict_in_generate=True, **ASSISTANCE[way]())
    assert out.sequences.shape == (1, ids.shape[1] + NEW)
    if rule in ("even", "pow2", "longrope"):
        assert torch.equal(out.sequences, generated(model, ids, attention_mask=mask, use_cache=False))
    cache, known = out.past_key_values, out.past_key_values.get_seq_length()
    assert known < out.sequences.shape[1]
    with torch.no_grad():
        found = model(out.sequences[:, known:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, logits(model, out.sequences)[:, -1], atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("rule", ["even", "hf", "longrope"])
def test_assisted_decoding_with_windows(rule: str) -> None:
    """Whose layers keep what may be taken back for as long as it may."""
    model, ids = patched("mistral", rule, num_hidden_layers=1, sliding_window=24), tokens(35).repeat(1, 2)
    out: Any = generated(
        model, ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=4, return_dict_in_generate=True
    )
    if rule != "hf":
        assert torch.equal(out.sequences, generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False))
    cache, known = out.past_key_values, out.past_key_values.get_seq_length()
    with torch.no_grad():
        found = model(out.sequences[:, known:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, logits(model, out.sequences)[:, -1], atol=1e-4, rtol=0)


@every_rule
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_emptied_cache_starts_anew(kind: str, rule: str) -> None:
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(100)
    cache: Any = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    for size in (70, 30):
        with torch.no_grad():
            for part in torch.split(ids, size, dim=1):
                found = model(part, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(found, logits(model, ids)[:, -1], atol=1e-4, rtol=0)
        cache.reset()


@every_rule
def test_a_prompt_is_used_again(rule: str) -> None:
    """One prefill, copied, and continued in several ways, alone and as one batch."""
    model, prompt = patched("llama", rule, num_hidden_layers=1), tokens(TRAINED - 3)
    with torch.no_grad():
        prefilled = model(prompt, use_cache=True).past_key_values
    several = torch.cat([torch.cat((prompt, tokens(20, seed=seed)), 1) for seed in (1, 2, 3)])
    for ids in torch.split(several, 1):
        expected = generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        cache = copy.deepcopy(prefilled)
        found = generated(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        assert torch.equal(found, expected)
    prefilled.batch_repeat_interleave(3)
    together = generated(model, several, attention_mask=torch.ones_like(several), past_key_values=prefilled)
    assert torch.equal(together[2:], expected)
    prefilled.batch_select_indices(torch.tensor([0, 2]))
    with pytest.raises(LengthError, match="filled with 3 rows, and which of them became the 2"):
        logits(model, several[:2, :1], past_key_values=prefilled)


@every_rule
def test_a_conversation_in_one_cache(rule: str) -> None:
    """What was generated, and a new question, onto the same cache; from below the trained length to far beyond."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(20)
    cache = transformers.DynamicCache(config=model.config)
    for turn in range(4):
        ids = torch.cat((ids, tokens(10, seed=turn)), 1)
        expected = generated(model, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        ids = generated(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        assert torch.equal(ids, expected)


# --- caches of other kinds -----------------------------------------------------------------------------------------


def quantized(backend: str, config: Any) -> Any:
    """Such a cache, and how far its rounding may take the logits (relative)."""
    options: dict[str, Any] = {"fp8": {}, "quanto": {"nbits": 4}, "hqq": {"nbits": 8, "axis_key": 1, "axis_value": 1}}
    if backend != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
        options[backend] |= {"q_group_size": 8, "residual_length": 8}
    return transformers.QuantizedCache(backend, config, **options[backend])


@every_rule
@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_quantized_caches(name: str, backend: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are never turned and rounded again: what is off at the end is what was at the first step."""
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    ids, ends = tokens(140), (60, 65, 100, 129, 140)

    def gaps() -> Tensor:
        model = patched(name, rule, **one_layer(name))
        cache = quantized(backend, model.config)
        with torch.no_grad():
            parts = torch.split(ids, [50, *[1] * 90], dim=1)
            found = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
        expected = torch.stack([logits(model, ids[:, :end])[:, -1] for end in ends], 1)
        off: Tensor = (found[:, [end - 1 for end in ends]] - expected).norm(dim=-1) / expected.norm(dim=-1)
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


@every_rule
def test_a_quantized_cache_with_beams(rule: str) -> None:
    model, ids = patched("llama", rule), tokens(TRAINED - 5, batch=2)

    def cache() -> Any:
        return transformers.Cache(layers=[Roughly(residual_length=8) for _ in range(2)])

    mask = torch.ones_like(ids)
    found = generated(model, ids, attention_mask=mask, past_key_values=cache(), num_beams=2)
    alone = generated(model, ids[:1], attention_mask=mask[:1], past_key_values=cache(), num_beams=2)
    assert torch.equal(found[:1], alone)


class Stream:
    """Stands for a CUDA stream where there is none."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


@pytest.mark.skipif(torch.cuda.is_available(), reason="they work")
def test_offloaded_caches_need_cuda() -> None:
    """Of transformers' own accord, patched or not."""
    for model in (build("llama"), patched("llama", "even")):
        cache = transformers.DynamicCache(config=model.config, offloading=True)
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            model(tokens(8), past_key_values=cache)


@every_rule
def test_offloaded_caches(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are on their way somewhere between two forwards, so that none is turned in place."""
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
        with pytest.raises(LengthError, match=r"not stored under this model's dynamic-ntk.*fixed_length"):
            model(ids[:, :1], past_key_values=plain)
        other = patched("llama", "dynamic-yarn")(ids, use_cache=True).past_key_values
        with pytest.raises(LengthError, match="not stored under"):
            model(ids[:, :1], past_key_values=other)
    assert torch.equal(logits(model, ids), logits(patched("llama", "paper"), ids))  # nothing is left behind


def test_paged_caches_are_refused() -> None:
    """Those of continuous batching, whose forwards mix steps of many inputs."""
    with pytest.raises(LengthError, match=r"paged cache .*fixed_length"):
        logits(patched("llama", "even"), tokens(8), cache=object())


@every_rule
def test_an_error_inside_leaves_nothing_behind(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that turns keys; once what it has added is taken off again, the cache goes on."""
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
        with pytest.raises(LengthError, match="something else has added keys"):
            model(ids[:, -1:], past_key_values=cache)
        cache.crop(-1)
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, logits(model, ids)[:, -1], atol=1e-4, rtol=0)


def test_keys_turned_half_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched("llama", "even"), tokens(TRAINED + 1)
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1], "keys", None)
            with pytest.raises(AttributeError):
                model(ids[:, -1:], past_key_values=cache)
        with pytest.raises(LengthError, match="not stored under"):
            model(ids[:, -1:], past_key_values=cache)


@every_rule
def test_a_cache_that_is_not_asked_for_is_followed_all_the_same(rule: str) -> None:
    """use_cache=False with a cache given: transformers fills it and does not return it."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(100)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for part in torch.split(ids, [40, 58, 1, 1], dim=1):
            found = model(part, past_key_values=cache, use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, logits(model, ids)[:, -1], atol=1e-4, rtol=0)


def test_sticky_keeps_the_largest_until_reset() -> None:
    model = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True)
    fresh = logits(model, tokens(48))
    logits(model, tokens(LONG))
    grown = logits(model, tokens(48))
    with rope.fixed_length(rope.patch(build("llama"), "dynamic-ntk", growth="even"), LONG) as held:
        torch.testing.assert_close(grown, logits(held, tokens(48)), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(rope.reset(model), tokens(48)), fresh)


def test_sticky_growth_reaches_caches_under_way() -> None:
    """What another call made of the frequencies holds for the next step of this one."""
    model = rope.patch(build("llama", num_hidden_layers=1), "dynamic-ntk", growth="even", sticky=True)
    ids = tokens(40)
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True).past_key_values
        for at in range(20, 40):
            if at == 30:
                logits(model, tokens(LONG))
            found = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(found, logits(model, ids[:, : at + 1])[:, -1], atol=1e-4, rtol=0)


# --- compiled ------------------------------------------------------------------------------------------------------


def compiled(model: Any, kind: str, ids: Tensor, fullgraph: bool) -> tuple[int, Tensor]:
    """How many graphs a prefill of 62 tokens and single steps after it take, and the logits."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    run: Any = torch.compile(model, backend=counter, fullgraph=fullgraph)
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=96)
    with torch.no_grad():
        parts = torch.split(ids, [TRAINED - 2, *[1] * (ids.shape[1] - TRAINED + 2)], dim=1)
        found = torch.cat([run(part, past_key_values=cache).logits for part in parts], 1)
    return counter.frame_count, found


COMPILED = tokens(TRAINED + 3)


@functools.cache
def graphs_of_stock(kind: str, method: str) -> int:
    model = stock(num_hidden_layers=1) if method == "dynamic" else build("llama", num_hidden_layers=1)
    return compiled(model, kind, COMPILED, fullgraph=method != "dynamic")[0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@every_rule
def test_a_fixed_length_compiles_whole(rule: str, kind: str) -> None:
    """A prefill and steps onto a cache, and no cache, in no more graphs than the model has unpatched."""
    from torch._dynamo.testing import CompileCounter

    model = patched("llama", rule, num_hidden_layers=1)
    with rope.fixed_length(model, COMPILED.shape[1]):
        graphs, found = compiled(model, kind, COMPILED, fullgraph=True)
        assert graphs <= graphs_of_stock(kind, "default")
        torch.testing.assert_close(found, logits(model, COMPILED), atol=1e-4, rtol=0)
        torch.compiler.reset()
        counter = CompileCounter()
        whole: Any = torch.compile(model, backend=counter, fullgraph=True)
        torch.testing.assert_close(logits(whole, COMPILED), logits(model, COMPILED), atol=1e-5, rtol=0)
        assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("rule", ["even", "hf"])
def test_decoding_compiles_with_breaks(rule: str, kind: str) -> None:
    """Where the cache is looked at: in no more graphs than stock's dynamic, which cannot be compiled whole either."""
    model = patched("llama", rule, num_hidden_layers=1)
    graphs, found = compiled(model, kind, COMPILED, fullgraph=False)
    assert graphs <= graphs_of_stock(kind, "dynamic")
    torch.testing.assert_close(found, in_parts(model, COMPILED, [TRAINED - 2]), atol=1e-4, rtol=0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph ends here; with rope_ext_hf"):
        compiled(model, kind, COMPILED, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="branching"):
        compiled(stock(num_hidden_layers=1), kind, COMPILED, fullgraph=True)
    torch.compiler.reset()
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(whole, COMPILED), logits(model, COMPILED), atol=1e-5, rtol=0)


# --- what a step costs ---------------------------------------------------------------------------------------------


@every_rule
def test_a_step_does_not_wait_for_the_device(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that change with every token never do; rules in steps look once where a row may have come to the next."""
    model, ids = patched("llama", rule), tokens(LONG)
    reads, waited = HostReads(), []

    def counted(plain: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        reads.count += 1
        return plain(tensor, *args)

    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, functools.partialmethod(functools.partial(counted, getattr(Tensor, name))))
    in_parts(model, ids[:, :70], [60])  # the first time it looks how the cache keeps its keys
    with torch.no_grad(), reads:
        cache = model(ids[:, :40], use_cache=True).past_key_values
        for at in range(40, LONG):
            reads.count = 0
            model(ids[:, at : at + 1], past_key_values=cache)
            if reads.count:
                waited.append(at + 1)
    expected = {"even": [65, 129], "pow2": [65, 129], "longrope": [65]}
    assert waited == expected.get(rule, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_turned_in_little_memory(dtype: torch.dtype) -> None:
    """One layer at a time, and of what is wider than the keys only a stretch."""
    from torch.profiler import ProfilerActivity, profile

    class Layer:
        is_initialized = True

        def __init__(self) -> None:
            self.keys = torch.ones(1, 4, 4096, 64, dtype=dtype)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        layers = [(Layer(), KeyLayout("half", 0, 64)) for _ in range(12)]
        rotate_cached_keys_(layers, KeyRotation(torch.ones(1, 1, 4096, 32), torch.zeros(1, 1, 4096, 32)))
    held = sum(layer.keys.nbytes for layer, _ in layers)
    assert seen.profiler is not None
    results: Any = seen.profiler.kineto_results
    events = list(results.experimental_event_tree())
    for event in events:
        events.extend(event.children)
    sizes = sorted((e.start_time_ns, e.extra_fields.alloc_size) for e in events if e.name == "[memory]")
    live = list(itertools.accumulate(size for _, size in sizes))
    assert held < max(live) < 1.2 * held


def test_a_cache_keeps_to_the_length_that_was_held() -> None:
    model, ids = patched("llama", "paper"), tokens(90)
    with torch.no_grad():
        free = model(ids[:, :80], use_cache=True).past_key_values
        with rope.fixed_length(model, 200):
            held = model(ids[:, :80], use_cache=True).past_key_values
            model(ids[:, 80:81], past_key_values=held)
            with pytest.raises(LengthError, match="stored outside fixed_length, and 200 is held now"):
                model(ids[:, 80:81], past_key_values=free)
        with (
            rope.fixed_length(model, 300),
            pytest.raises(LengthError, match="at a fixed length of 200, and 300 is held"),
        ):
            model(ids[:, 81:82], past_key_values=held)
        with pytest.raises(LengthError, match="not stored under"):
            model(ids[:, 81:82], past_key_values=held)
        model(ids[:, 80:81], past_key_values=free)
