"""The params.json of released models, and the settings that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.checkpoints.meta.meta_params import Llama

ROPE = {"norm_eps": 1e-05, "rope_theta": 500000.0}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 1 7B": ({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256, "norm_eps": 1e-06}, 11008),
    "Llama 1 13B": ({"dim": 5120, "n_layers": 40, "n_heads": 40, "multiple_of": 256, "norm_eps": 1e-06}, 13824),
    "Llama 1 30B": ({"dim": 6656, "n_layers": 60, "n_heads": 52, "multiple_of": 256, "norm_eps": 1e-06}, 17920),
    "Llama 1 65B": ({"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 256, "norm_eps": 1e-05}, 22016),
    "Llama 2 70B": (
        {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "multiple_of": 4096}
        | {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-05},
        28672,
    ),
    "Llama 3 8B": (
        {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}
        | ROPE,
        14336,
    ),
    "Llama 3.1 405B": (
        {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "multiple_of": 4096}
        | {"ffn_dim_multiplier": 1.2, "use_scaled_rope": True}
        | ROPE,
        53248,
    ),
    "Llama 3.2 1B": (
        {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 256, "ffn_dim_multiplier": 1.5}
        | {"use_scaled_rope": True}
        | ROPE,
        8192,
    ),
    "Llama 3.2 3B": (  # its ffn_dim_multiplier is 1.0, which has no effect
        {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "multiple_of": 256, "use_scaled_rope": True}
        | ROPE,
        8192,
    ),
}


def published_llama(name: str, params: dict[str, Any], ffn: int) -> Llama:
    tied = "3.2" in name
    return Llama(
        dim=params["dim"],
        layers=params["n_layers"],
        heads=params["n_heads"],
        kv_heads=params.get("n_kv_heads", params["n_heads"]),
        ffn=ffn,
        vocab=32000,
        eps=params["norm_eps"],
        theta=params.get("rope_theta", 10000.0),
        factor=(32.0 if tied else 8.0) if params.get("use_scaled_rope") else None,
        tied=tied,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_params(name: str) -> None:
    params, ffn = PUBLISHED[name]
    assert published_llama(name, params, ffn).to_params() == params | {"vocab_size": 32000}


@pytest.mark.parametrize(
    ("name", "length"),
    {
        "Llama 1 7B": 2048,
        "Llama 1 13B": 2048,
        "Llama 1 30B": 2048,
        "Llama 1 65B": 2048,  # by norm_eps alone it would be a Llama 2
        "Llama 2 70B": 4096,
        "Llama 3 8B": 8192,
        "Llama 3.1 405B": 131072,
        "Llama 3.2 1B": 131072,
        "Llama 3.2 3B": 131072,
    }.items(),
)
def test_released_models_have_the_length_they_were_trained_at(name: str, length: int) -> None:
    params, ffn = PUBLISHED[name]
    llama = published_llama(name, params, ffn)
    release = llama.release
    assert release is not None
    assert release.name.split()[1][0] == name.split()[1][0]
    tokens, note, guessed = llama.context_length()
    assert (tokens, guessed) == (length, False)
    assert f"is that of {release.name}, which has these sizes, theta and scaling" in note
