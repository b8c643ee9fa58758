"""Length-dependent methods: every row its own length, every cache one base; against references that know neither hook.

A decode step of a one-layer model equals the full recomputation, because the hidden states that its keys come from do
not depend on the scale; deeper models are compared with a Llama written here that caches un-rotated keys.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from tests.models import FAMILIES, TRAINED, build, logits, tokens

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


def one_layer(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name in ("gemma2", "gemma3", "gpt_oss", "olmo3"):
        options["layer_types"] = ["full_attention"]
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
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama4"}))
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


@every_rule
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4), steps=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_the_cache_equals_one_of_unrotated_keys(rule: str, sizes: list[int], steps: int) -> None:
    """Prefill in any parts, then single tokens."""
    model = patched("llama", rule)
    ids = tokens(sum(sizes) + steps, seed=len(sizes))
    reference = UnrotatedLlama(model, rule)
    parts = [*sizes, *[1] * steps]
    expected = torch.cat([reference(part) for part in torch.split(ids[0], parts)])
    torch.testing.assert_close(in_parts(model, ids, sizes)[0].double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["hf", "even"])
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


@every_rule
@given(
    lengths=st.lists(st.integers(2, 150), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    given_positions=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_rows_do_not_touch_each_other(rule: str, lengths: list[int], side: str, given_positions: bool) -> None:
    """Whatever its batch mates and its padding, a row's logits are those it has alone."""
    model = patched("llama", rule)
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 3), torch.zeros(len(lengths), longest, dtype=torch.int64)
    rows = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if given_positions else {}
    found = logits(model, ids, attention_mask=mask, **positions)
    for i, row in enumerate(rows):
        alone = logits(model, row[None])[0]
        torch.testing.assert_close(found[i][mask[i].bool()], alone, atol=1e-4, rtol=0)


@every_rule
def test_history_leaves_no_trace(rule: str) -> None:
    model = patched("llama", rule)
    short = tokens(48)
    before = logits(model, short)
    logits(model, tokens(LONG))
    in_parts(model, tokens(LONG, seed=2), [100, 80])
    assert torch.equal(logits(model, short), before)


@every_rule
def test_up_to_the_trained_length_nothing_changes(rule: str) -> None:
    model, plain = patched("llama", rule), build("llama")
    if rule == "longrope":
        return  # its short list is a change already
    torch.testing.assert_close(logits(model, tokens(TRAINED)), logits(plain, tokens(TRAINED)), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(model, tokens(TRAINED + 1)), logits(plain, tokens(TRAINED + 1)), atol=1e-3)


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


@pytest.mark.parametrize("rule", ["even", "pow2", "longrope"])
@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
def test_assisted_decoding(rule: str, way: str) -> None:
    """Between two steps of a rule the result is greedy search's."""
    model, ids = patched("llama", rule, num_hidden_layers=1), tokens(35).repeat(1, 2)
    mask = torch.ones_like(ids)
    expected = generated(model, ids, attention_mask=mask, use_cache=False)
    help_with: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if way == "assistant":
        help_with = {"assistant_model": rope.patch(build("llama", seed=3), "dynamic-ntk")}
    assert torch.equal(generated(model, ids, attention_mask=mask, **help_with), expected)


@every_rule
def test_a_prompt_is_used_again(rule: str) -> None:
    """One prefill, copied, and continued in two ways."""
    model, prompt = patched("llama", rule, num_hidden_layers=1), tokens(TRAINED - 3)
    with torch.no_grad():
        prefilled = model(prompt, use_cache=True).past_key_values
    for seed in (1, 2):
        ids = torch.cat((prompt, tokens(20, seed=seed)), 1)
        cache = copy.deepcopy(prefilled)
        with torch.no_grad():
            out = model(ids[:, prompt.shape[1] :], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(out, logits(model, ids)[:, -1], atol=1e-4, rtol=0)


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


def test_a_family_whose_cache_is_not_known_is_refused() -> None:
    model, ids = patched("llama4", "paper"), tokens(80)
    with pytest.raises(LengthError, match="keeps its keys in a cache is not known"):
        in_parts(model, ids, [60])


def test_an_error_inside_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched("llama", "paper"), tokens(90)
    with torch.no_grad():
        cache = model(ids[:, :80], use_cache=True).past_key_values

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

        norm: Callable[..., Any] = model.model.norm.forward
        monkeypatch.setattr(model.model.norm, "forward", fail)
        with pytest.raises(RuntimeError, match="broken"):
            model(ids[:, 80:81], past_key_values=cache)
        monkeypatch.setattr(model.model.norm, "forward", norm)
    assert not [layer for layer in cache.layers if "update" in vars(layer)]
    tables = [m for m in model.modules() if isinstance(m, rope.RotaryEmbedding)]
    assert all(table.row_lengths is None for table in tables)


def test_sticky_keeps_the_largest_until_reset() -> None:
    model = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True)
    fresh = logits(model, tokens(48))
    logits(model, tokens(LONG))
    grown = logits(model, tokens(48))
    with rope.fixed_length(rope.patch(build("llama"), "dynamic-ntk", growth="even"), LONG) as held:
        torch.testing.assert_close(grown, logits(held, tokens(48)), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(rope.reset(model), tokens(48)), fresh)


def test_stock_transformers_has_none_of_this() -> None:
    """The defects that the tests above are about are real: they show in transformers' own dynamic scaling."""
    form = {"rope_type": "dynamic", "factor": 4.0}
    stock = build("llama", form=form)
    short = logits(stock, tokens(48))
    logits(stock, tokens(LONG))
    one = build("llama", form=form, num_hidden_layers=1)
    step = in_parts(one, tokens(120), [40])[:, -1]
    recomputed = logits(build("llama", form=form, num_hidden_layers=1), tokens(120))[:, -1]
    assert (step - recomputed).abs().max() > 1e-2
    mask = torch.ones(2, 120, dtype=torch.int64)
    mask[0, :72] = 0
    ids = tokens(120, batch=2)
    padded = logits(build("llama", form=form), ids, attention_mask=mask)[0, 72:]
    alone = logits(build("llama", form=form), ids[:1, 72:])[0]
    assert (padded - alone).abs().max() > 1e-2
    assert short.shape == (1, 48, 97)


@pytest.mark.parametrize("rule", ["paper", "even"])
def test_compiled_decoding_equals_eager(rule: str) -> None:
    """With graph breaks where the cache is looked at; without a cache, and under a fixed length, in one graph."""
    model, ids = patched("llama", rule), tokens(140)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(in_parts(compiled, ids, [70]), in_parts(model, ids, [70]), atol=1e-5, rtol=0)
    torch.compiler.reset()
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(ids, use_cache=False).logits, logits(model, ids), atol=1e-5, rtol=0)
        with rope.fixed_length(model, 140):
            torch.compiler.reset()
            torch.testing.assert_close(whole(ids, use_cache=False).logits, logits(model, ids), atol=1e-5, rtol=0)


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
