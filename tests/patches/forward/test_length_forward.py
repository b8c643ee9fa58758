"""Length-dependent methods: each row by its own length, and all keys of a cache by one; compared without any hooks.

A decode step of a one-layer model equals the full recomputation, because the hidden states that its keys come from do
not depend on the frequencies. Deeper models are compared with a Llama written here that caches unrotated keys.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import accelerate
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.families import families
from tests.support.length_examples import (
    LONG,
    RULES,
    each_kind_of_rule,
    every_rule,
    in_parts,
    keys_that_stay,
    one_layer,
    patched,
)
from tests.support.models import FAMILIES, TRAINED, build, build_known, logits, tokens
from tests.support.tiers import spread

# --- one layer: a cached step is the full recomputation -----------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), spread(FAMILIES, lambda _: RULES))
def test_a_cached_step_equals_the_recomputation(name: str, rule: str) -> None:
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    model = patched(name, rule, **one_layer(name))
    ids = tokens(200)
    actual = in_parts(model, ids, [40, 30])
    for end in (41, 63, 64, 65, 70, 71, 100, 127, 128, 129, 130, 199, 200):
        if end > 70 or end == 40:
            torch.testing.assert_close(actual[:, end - 1], logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@every_rule
def test_sliding_layers_too(rule: str) -> None:
    """The window is shorter than the text, and the layer keeps only the last keys."""
    model = patched("mistral", rule, num_hidden_layers=1, sliding_window=24)
    ids = tokens(150)
    actual = in_parts(model, ids, [50])
    for end in (51, 65, 100, 129, 150):
        torch.testing.assert_close(actual[:, end - 1], logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case[0] != "llama"))
        for case in spread(FAMILIES, lambda _: RULES)
    ],
)
def test_a_cached_step_in_bfloat16(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as near the same weights in float32 as bfloat16 is without a cache."""
    if rule == "longrope" and FAMILIES[name].rotated != 16:
        pytest.skip("other lists of divisors")
    method, params = RULES[rule]
    narrow, wide = build(name, **one_layer(name)).to(torch.bfloat16), build(name, **one_layer(name))
    wide.load_state_dict(narrow.state_dict())
    rope.patch(wide, method, **params)
    ids, ends = tokens(132), (71, 100, 128, 129, 132)
    expected = torch.stack([logits(wide, ids[:, :end])[:, -1] for end in ends], 1)

    def gap(model: Any) -> float:
        actual = in_parts(rope.patch(model, method, **params), ids, [40, 30])[:, [end - 1 for end in ends]]
        return float((actual - expected).norm() / expected.norm())

    followed = gap(copy.deepcopy(narrow))
    assert followed < 0.03
    keys_that_stay(monkeypatch)
    assert gap(narrow) > 2 * followed


CAUSAL = set(families()) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
AFTER_THE_ROTATION = {"hunyuan_v1_dense", "hunyuan_v1_moe"}  # a norm with weights follows the rotation
INDEXED = {"deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text"}  # keys of an index are cached, too
NOT_COMPARED = {
    "longcat_flash",  # two attentions in a layer
    "deepseek_v4",  # its cache keeps keys of windows
    "bamba",  # unpatched, a step onto its cache is not the recomputation either
    *("beam", "codegen", "cohere_compass_text", "gptj", "qwen3_5_moe_text", "qwen3_5_text"),  # not patched
    "roformer",  # static methods only
}
ROTATES_WHERE_IT_SLIDES = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"}
MINISTRAL: dict[str, Any] = {  # its temperature is to stay under a method
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": TRAINED,
    }
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {},  # one of its two layers attends
    "falcon_h1": {"num_hidden_layers": 1},
    "ministral3": MINISTRAL,
    "gemma4_text": {"per_layer_config": {}},  # build_known states settings of its second layer
} | {
    name: {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}
    }  # their own scaling states another length
    for name in ("apertus", "cwm")
}
WITHOUT_LAYER_TYPES = ("olmo_hybrid", "falcon_h1")


def rotating_once(model_type: str) -> Any:
    """Return a model of one layer with rotation, whose keys do not depend on how other tokens were rotated."""
    layer_type = "sliding_attention" if model_type in ROTATES_WHERE_IT_SLIDES else "full_attention"
    sizes = {"num_hidden_layers": 1, "layer_types": [layer_type], "sliding_window": 512}
    options = OWN_SETTINGS.get(model_type, {})
    return build_known(model_type, **(options if model_type in WITHOUT_LAYER_TYPES else sizes | options))


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("model_type", sorted(CAUSAL - AFTER_THE_ROTATION - INDEXED - NOT_COMPARED))
def test_the_cache_of_every_family_of_the_table(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of its keys is probed; then a step equals the recomputation."""
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


NOT_OFFLOADED = pytest.mark.xfail(raises=NotImplementedError, reason="accelerate cannot offload the unpatched class")


@pytest.mark.parametrize(
    ("model_type", "weights"),
    [
        pytest.param(
            model_type, weights, marks=[NOT_OFFLOADED] * ((model_type, weights) == ("llama4_text", "offloaded"))
        )
        for model_type in ("llama", "gemma3_text", "qwen3", "gpt_neox", "deepseek_v3", "llama4_text")
        for weights in ("later", "offloaded")
    ],
)
def test_a_cache_is_followed_where_the_weights_were_not_at_hand(model_type: str, weights: str) -> None:
    """A small model of the class tells how keys are kept; no forward that the user did not make runs the model."""
    model, seen = build_known(model_type), []
    if weights == "later":
        filled = model
        with torch.device("meta"):
            model = type(filled)(filled.config)
        rope.patch(model, "dynamic-yarn")
        model.to_empty(device="cpu")
        model.load_state_dict(filled.state_dict())
        if model_type == "gemma3_text":
            model.model.embed_tokens.embed_scale.copy_(filled.model.embed_tokens.embed_scale)  # in no state dict
        model.eval()
    else:
        accelerate.cpu_offload(model)
        rope.patch(model, "dynamic-yarn")
    model.register_forward_hook(lambda *_: seen.append(1))
    ids = tokens(TRAINED + 6)
    expected = rope.patch(build_known(model_type), "dynamic-yarn")
    torch.testing.assert_close(in_parts(model, ids, [TRAINED - 2]), in_parts(expected, ids, [TRAINED - 2]))
    assert len(seen) == 9


def test_looking_at_a_cache_leaves_nothing_behind() -> None:
    model, ids = patched("gemma3", "dynamic-yarn"), tokens(90)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = logits(model, ids)
    in_parts(model, ids, [TRAINED])
    assert torch.equal(logits(model, ids), before)
    assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())


# --- deeper: a Llama written here, with un-rotated keys and formulas in plain math ---------------------------------


def inverse_frequencies(rule: str, length: int, dim: int = 16, theta: float = 10_000.0) -> tuple[list[float], float]:
    """Return the dim / 2 inverse frequencies of a rule, and its attention factor, by formulas in plain Python."""
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
    """Return x rotated in half pairing, (heads, tokens, 16) float64."""
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
    """Return the largest difference from `UnrotatedLlama`, over a prefill in parts and then single tokens."""
    ids = tokens(sum(sizes) + steps, seed=len(sizes))
    reference = UnrotatedLlama(model, rule)
    expected = torch.cat([reference(part) for part in torch.split(ids[0], [*sizes, *[1] * steps])])
    return (in_parts(model, ids, sizes)[0].double() - expected).abs().max().item()


@pytest.mark.slow
@each_kind_of_rule
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4), steps=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_the_cache_equals_one_of_unrotated_keys(rule: str, sizes: list[int], steps: int) -> None:
    assert cache_gap(patched("llama", rule), rule, sizes, steps) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.thorough] * (rule != "even")) for rule in RULES]
)
def test_in_bfloat16_rounding_does_not_accumulate(rule: str) -> None:
    """After 1,024 steps the scores of the last query are within 1% of those of unrotated float32 keys."""
    model = patched("llama", rule, num_hidden_layers=1).to(torch.bfloat16)
    ids = tokens(32 + 1024)
    with torch.no_grad():
        cache = model(ids[:, :32], use_cache=True).past_key_values
        for at in range(32, ids.shape[1] - 1):
            model(ids[:, at : at + 1], past_key_values=cache)
        recorded: list[Tensor] = []
        attention = torch.nn.functional.scaled_dot_product_attention

        def spy(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            recorded.extend((query, key))
            return attention(query, key, *args, **kwargs)

        torch.nn.functional.scaled_dot_product_attention = spy
        try:
            model(ids[:, -1:], past_key_values=cache)
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention
    query, key = (tensor[0].double() for tensor in recorded)
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
    actual = query @ key.transpose(1, 2)
    assert ((actual - expected).norm() / expected.norm()).item() < 0.01


# --- rows ----------------------------------------------------------------------------------------------------------


def rows_gap(model: Any, lengths: Sequence[int], side: str, given_positions: bool = False) -> float:
    """Return the largest difference of rows in a padded batch from each alone, in copies that have read nothing."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 3), torch.zeros(len(lengths), longest, dtype=torch.int64)
    rows = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if given_positions else {}
    actual = logits(copy.deepcopy(model), ids, attention_mask=mask, **positions)
    return max(
        (actual[i][mask[i].bool()] - logits(copy.deepcopy(model), row[None])[0]).abs().max().item()
        for i, row in enumerate(rows)
    )


@pytest.mark.slow
@each_kind_of_rule
@given(
    lengths=st.lists(st.integers(2, 150), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    given_positions=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_rows_do_not_touch_each_other(rule: str, lengths: list[int], side: str, given_positions: bool) -> None:
    """A row's logits are those it has alone, whatever stands beside it and however it is padded."""
    assert rows_gap(patched("llama", rule), lengths, side, given_positions) <= 1e-4


def history_gap(model: Any, short: int, long: int) -> float:
    ids = tokens(short)
    before = logits(model, ids)
    logits(model, tokens(long))
    in_parts(model, tokens(long, seed=2), [long - 2])
    return (logits(model, ids) - before).abs().max().item()


@pytest.mark.slow
@each_kind_of_rule
@given(short=st.integers(1, 200), long=st.integers(TRAINED, LONG))
@settings(max_examples=15, deadline=None)
def test_history_leaves_no_trace(rule: str, short: int, long: int) -> None:
    assert history_gap(patched("llama", rule), short, long) == 0


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"longrope"}))  # whose short list is a change already
def test_up_to_the_trained_length_nothing_changes(rule: str) -> None:
    model, plain = patched("llama", rule), build("llama")
    logits(model, tokens(LONG))
    torch.testing.assert_close(logits(model, tokens(TRAINED)), logits(plain, tokens(TRAINED)), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(model, tokens(TRAINED + 1)), logits(plain, tokens(TRAINED + 1)), atol=1e-3)


def chunks_gap(model: Any, ids: Tensor, sizes: Sequence[int], length: int) -> float:
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    with rope.fixed_length(one, length), rope.fixed_length(other, length):
        return (in_parts(one, ids, sizes) - logits(other, ids)).abs().max().item()


@pytest.mark.slow
@each_kind_of_rule
@given(sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4), steps=st.integers(0, 8), room=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_under_a_fixed_length_parts_do_not_matter(rule: str, sizes: list[int], steps: int, room: int) -> None:
    """One prefill, any parts, single tokens or no cache at all give one result: that of an input of the held length."""
    model, ids = patched("llama", rule), tokens(sum(sizes) + steps)
    assert chunks_gap(model, ids, sizes, ids.shape[1] + room) <= 1e-4
    with rope.fixed_length(model, ids.shape[1]):
        held = logits(model, ids)
    torch.testing.assert_close(held, logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.slow
@each_kind_of_rule
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
    cache, actual = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for start, end in itertools.pairwise([0, cut, *range(longest, longest + steps + 1)]):
            call = {"attention_mask": mask[:, :end], "past_key_values": cache}
            actual.append(model(ids[:, start:end], **call).logits)
    together = torch.cat(actual, 1)
    for i, row in enumerate(rows):
        first = max(0, cut - longest + lengths[i])
        alone = in_parts(model, row[None], [size for size in (first, lengths[i] - first) if size])
        torch.testing.assert_close(together[i, -len(row) :], alone[0], atol=1e-4, rtol=0)


@pytest.mark.slow
@each_kind_of_rule
def test_a_mask_may_come_and_go(rule: str) -> None:
    """Rows without padding are the same with a mask and without, and in the same cache."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(140, batch=2)
    with torch.no_grad():
        cache = model(ids[:, :50], use_cache=True).past_key_values
        for end in range(51, 141):
            mask = {"attention_mask": torch.ones(2, end, dtype=torch.int64)} if end % 3 else {}
            actual = model(ids[:, end - 1 : end], past_key_values=cache, **mask).logits[:, -1]
            if end % 10 < 3:
                torch.testing.assert_close(actual, logits(model, ids[:, :end])[:, -1], atol=1e-4, rtol=0)


@pytest.mark.slow
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
            actual = model(ids[:, end - 1 : end], position_ids=at[:, end - 1 : end], past_key_values=cache).logits[
                :, -1
            ]
            mask = causal[..., :end, :end]
            expected = logits(model, ids[:, :end], position_ids=at[:, :end], attention_mask=mask)[:, -1]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@every_rule
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_a_mask_may_number_its_tokens(rule: str, kind: torch.dtype) -> None:
    """Trainers number the inputs that they pack into a row; the sum of such a mask is not the length of the row."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(90, batch=2)
    numbers = torch.tensor([[1] * 30 + [2] * 30 + [3] * 30, [1] * 30 + [5] * 20 + [0] * 40]).to(kind)
    with torch.no_grad():
        both = model(ids, attention_mask=numbers, use_cache=True)
        rows = [model(ids[:1], use_cache=True), model(ids[1:, :50], use_cache=True)]
        torch.testing.assert_close(both.logits[0], rows[0].logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(both.logits[1, :50], rows[1].logits[0], atol=1e-4, rtol=0)
        # A step onto the cache counts the tokens anew.
        longer, new = torch.nn.functional.pad(numbers, (0, 1), value=7), ids[:, :1]
        step = model(new, attention_mask=longer, past_key_values=both.past_key_values).logits[0]
        torch.testing.assert_close(
            step, model(new[:1], past_key_values=rows[0].past_key_values).logits[0], atol=1e-4, rtol=0
        )


@every_rule
def test_packed_rows_count_for_themselves(rule: str) -> None:
    model = patched("llama", rule, attn_implementation="eager", num_hidden_layers=1)
    parts = [tokens(n, seed=n)[0] for n in (30, 100, 70)]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    ids = torch.cat(parts)[None]
    actual = torch.split(logits(model, ids, position_ids=positions)[0], [30, 100, 70])
    for part, mine in zip(parts, actual, strict=True):
        torch.testing.assert_close(mine, logits(model, part[None])[0], atol=1e-4, rtol=0)


def test_a_prepared_mask_needs_positions() -> None:
    model = patched("llama", "paper")
    mask = torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()
    with pytest.raises(LengthError, match=r"give position_ids with it.*fixed_length"):
        logits(model, tokens(80), attention_mask=mask)
    actual = logits(model, tokens(80), attention_mask=mask, position_ids=torch.arange(80)[None])
    torch.testing.assert_close(actual, logits(model, tokens(80)), atol=1e-5, rtol=0)
