"""A forward pass of the tiny models in numpy and float64, from the papers alone. Nothing here imports the package.

The rotations are those of tests/conformance/formulas.py. One function for seven families: what differs is read from the
names of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance import formulas

Array = Any
Weights = dict[str, Array]


def forward(config: formulas.Json, weights: Weights, ids: list[int]) -> Array:
    """The logits of every token, (tokens, vocabulary)."""
    eps, gemma = config["rms_norm_eps"], config["model_type"] == "gemma3_text"
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    x = weights["model.embed_tokens.weight"][ids] * (np.sqrt(config["hidden_size"]) if gemma else 1.0)

    def norm(name: str, values: Array) -> Array:
        scale = weights[f"{name}.weight"] + gemma
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + eps) * scale

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        kind = (config.get("layer_types") or [None] * (i + 1))[i]
        rope = formulas.read(config, kind if gemma else None, len(ids))
        window = config["sliding_window"] if kind == "sliding_attention" else len(ids)
        names = ["post_attention_layernorm", None, None]  # before the network, after attention, after the network
        if gemma:
            names = ["pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"]
        elif config["model_type"] == "glm4":
            names[1:] = ["post_self_attn_layernorm", "post_mlp_layernorm"]
        own = {key.removeprefix(f"{layer}."): value for key, value in weights.items() if key.startswith(f"{layer}.")}
        out = attention(config, own, norm(f"{layer}.input_layernorm", x), rope, window, norm, f"{layer}.self_attn")
        x = x + (norm(f"{layer}.{names[1]}", out) if names[1] else out)
        out = network(config, own, norm(f"{layer}.{names[0]}", x))
        x = x + (norm(f"{layer}.{names[2]}", out) if names[2] else out)
    return norm("model.norm", x) @ (weights if "lm_head.weight" in weights else tied)["lm_head.weight"].T


def attention(
    config: formulas.Json, own: Weights, x: Array, rope: formulas.Rope, window: int, norm: Any, name: str
) -> Array:
    own = {key.removeprefix("self_attn."): value for key, value in own.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def project(part: str, values: Array = x) -> Array:
        return values @ own[f"{part}.weight"].T + own.get(f"{part}.bias", 0.0)

    def apart(values: Array, count: int) -> Array:  # (count, tokens, width)
        return values.reshape(len(x), count, -1).transpose(1, 0, 2)

    def normed(part: str, values: Array) -> Array:
        return norm(f"{name}.{part}", values) if f"{part}.weight" in own else values

    interleaved = config["model_type"] in ("glm4", "deepseek_v3")
    if "kv_b_proj.weight" in own:
        rank, apart_dims = config["kv_lora_rank"], config["qk_nope_head_dim"]
        q = apart(project("q_b_proj", norm(f"{name}.q_a_layernorm", project("q_a_proj"))), heads)
        both = project("kv_a_proj_with_mqa")
        kv = apart(project("kv_b_proj", norm(f"{name}.kv_a_layernorm", both[:, :rank])), heads)
        turned = rotate(both[None, :, rank:], rope, interleaved).repeat(heads, 0)
        k, v = np.concatenate([kv[..., :apart_dims], turned], -1), kv[..., apart_dims:]
        q = np.concatenate([q[..., :apart_dims], rotate(q[..., apart_dims:], rope, interleaved)], -1)
    else:
        if "qkv_proj.weight" in own:
            width = rope.width
            q, k, v = np.split(project("qkv_proj"), [heads * width, (heads + groups) * width], -1)
        else:
            q, k, v = (project(f"{part}_proj") for part in "qkv")
        q, k, v = apart(q, heads), apart(k, groups), apart(v, groups)
        q, k = (rotate(normed(f"{part}_norm", each), rope, interleaved) for part, each in (("q", q), ("k", k)))
        k, v = (each.repeat(heads // groups, 0) for each in (k, v))
    scores = q @ k.transpose(0, 2, 1) * float(rope.softmax_scale)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    if "sinks" in own:  # one more score that no value belongs to
        scores = np.concatenate([scores, np.broadcast_to(own["sinks"][:, None, None], (heads, len(x), 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., : len(x)]
    return project("o_proj", (weights @ v).transpose(1, 0, 2).reshape(len(x), -1))


def rotate(values: Array, rope: formulas.Rope, interleaved: bool) -> Array:
    """(heads, tokens, width): complex numbers times e^(i p f)."""
    count, pairs = values.shape[1], len(rope.inv_freq)
    turns = np.exp(1j * np.arange(count)[:, None] * np.array([float(f) for f in rope.inv_freq]))
    turns = turns * float(rope.magnitude)
    out = values.copy()
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    product = (values[..., first] + 1j * values[..., second]) * turns
    out[..., first], out[..., second] = product.real, product.imag
    return out


def network(config: formulas.Json, own: Weights, x: Array) -> Array:
    own = {key.removeprefix("mlp."): value for key, value in own.items()}
    if "experts.gate_up_proj" in own:  # gpt-oss, where every token goes to both experts
        routed = x @ own["router.weight"].T + own["router.bias"]
        shares = np.exp(routed - routed.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        total = np.zeros_like(x)
        for i in range(config["num_local_experts"]):
            both = x @ own["experts.gate_up_proj"][i] + own["experts.gate_up_proj_bias"][i]
            gate, up = np.minimum(both[:, ::2], 7.0), np.clip(both[:, 1::2], -7.0, 7.0)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            total += shares[:, i : i + 1] * (inner @ own["experts.down_proj"][i] + own["experts.down_proj_bias"][i])
        return total
    if "gate_up_proj.weight" in own:
        gate, up = np.split(x @ own["gate_up_proj.weight"].T, 2, -1)
    else:
        gate, up = x @ own["gate_proj.weight"].T, x @ own["up_proj.weight"].T
    if config["model_type"] == "gemma3_text":
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        active = gate / (1 + np.exp(-gate))
    return (active * up) @ own["down_proj.weight"].T
