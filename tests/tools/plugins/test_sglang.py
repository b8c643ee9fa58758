"""The plug-in of SGLang without SGLang: the settings that it handles, those that it passes on, and its tables.

`nox -s engines` registers it with SGLang's own hook registry and builds SGLang's own rotary classes.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tomllib
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_ext_hf as rope
from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.plugins.sglang import FACTORY, register
from tests.support.models import build

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.rotary_embedding", FACTORY)


class Rotary:
    """A stand-in for SGLang's class: its constructor builds a table, and keeps it in float32 or in the dtype."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position: int, base: float, half: bool, dtype: torch.dtype
    ) -> None:
        self.rotary_dim, self.max_position_embeddings, self.half = rotary_dim, max_position, half
        self.cos_sin_cache = self._compute_cos_sin_cache().to(dtype)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        raise NotImplementedError

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        raise NotImplementedError


class HookType(Enum):
    AROUND = "around"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with SGLang's names, the plug-in registered, and its hooks put around the functions."""

    def get_rope(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: Any = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
    ) -> Any:
        return ("stock", head_size, rope_scaling)

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            home, name = target.rsplit(".", 1)
            setattr(sys.modules[home], name, functools.partial(hook, getattr(sys.modules[home], name)))

    modules: dict[str, Any] = {name: ModuleType(name) for name in PACKAGES}
    vars(modules[FACTORY]).update(get_rope=get_rope, get_rope_cpu=get_rope)
    vars(modules[PACKAGES[3]]).update(RotaryEmbedding=Rotary)
    vars(modules[PACKAGES[2]]).update(rotary_embedding=modules[PACKAGES[3]])
    hooks: Any = SimpleNamespace(HookRegistry=HookRegistry, HookType=HookType)
    modules |= {"sglang.srt.plugins": ModuleType("sglang.srt.plugins"), "sglang.srt.plugins.hook_registry": hooks}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with monkeypatch.context() as undone:
        undone.setitem(ROPE_INIT_FUNCTIONS, "rope_ext_hf", None)
        register()
        yield modules[FACTORY]


def settings(model: Any, method: str = "yarn", **options: Any) -> dict[str, Any]:
    overrides = serving.serving_config(model, "sglang", method, factor=4, plugin=True, **options).overrides
    assert overrides is not None
    parameters: dict[str, Any] = overrides["rope_parameters"]
    return parameters


def test_other_rope_types_go_to_sglang(engine: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for get_rope in (engine.get_rope, engine.get_rope_cpu):
        assert get_rope(64, 64, 4096, 10000, rope_scaling=yarn) == ("stock", 64, yarn)
        assert get_rope(64, 64, 4096, 10000) == ("stock", 64, None)


@pytest.mark.slow
def test_tables_grow_and_stay_exact(engine: Any) -> None:
    given = settings(build("llama"), "by-parts")
    module = engine.get_rope(16, 16, 256, 10000, True, given, torch.float32)
    assert (len(module.cos_sin_cache), module.half) == (256, True)
    module._ensure_cos_sin_cache_length(2**20 - 1)
    assert len(module.cos_sin_cache) == 2**20
    for row in (255, 256, 2**20 - 1):
        for pair, frequency in enumerate(json.loads(given["inv_freq"])):
            for column, function in ((pair, math.cos), (8 + pair, math.sin)):
                exact = given["attention_factor"] * function(math.fmod(row * frequency, 2 * math.pi))
                assert module.cos_sin_cache[row, column].item() == pytest.approx(exact, abs=1e-6)
    before = module.cos_sin_cache
    module._ensure_cos_sin_cache_length(17)
    assert module.cos_sin_cache is before
    assert engine.get_rope(16, 16, 256, 10000, True, dict(given), torch.float32) is module


def test_a_freed_table_is_built_again(engine: Any) -> None:
    given = settings(build("llama"))
    with torch.device("meta"):
        module = engine.get_rope(16, 16, 256, 10000, True, given, torch.float32)
        assert module.cos_sin_cache.is_meta
        assert engine.get_rope(16, 16, 256, 10000, True, given, torch.float32) is module
    again = engine.get_rope(16, 16, 256, 10000, True, given, torch.float32)
    assert again is not module
    assert not again.cos_sin_cache.is_meta
    again.cos_sin_cache.untyped_storage().resize_(0)
    assert len(engine.get_rope(16, 16, 256, 10000, True, given, torch.float32).cos_sin_cache) == 256


def test_partial_rotation(engine: Any) -> None:
    given = settings(build("glm"), "ntk")
    module = engine.get_rope(16, 16, 128, 10000, False, given, torch.bfloat16, given["partial_rotary_factor"])
    assert (module.rotary_dim, module.half, module.cos_sin_cache.dtype) == (8, False, torch.bfloat16)
    with pytest.raises(ValueError, match="have 4 frequencies, but the model rotates 16 dims"):
        engine.get_rope(16, 16, 128, 10000, False, given, torch.bfloat16)


def test_gemma_3_takes_frequencies_by_transformers_names(engine: Any) -> None:
    overrides = serving.serving_config(build("gemma3"), "sglang", "yarn", factor=4, plugin=True).overrides
    assert overrides is not None
    config: Any = SimpleNamespace(rope_parameters=overrides["rope_parameters"]["full_attention"])
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS["rope_ext_hf"](config, torch.device("cpu"))
    expected = rope.describe(rope.patch(build("gemma3"), "yarn", factor=4))
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
    torch.testing.assert_close(2 * math.pi / inv_freq, torch.tensor(expected.wavelengths), rtol=1e-6, atol=0)


def test_what_it_cannot_reach_is_refused() -> None:
    for family in ("mixtral", "gemma2"):
        with pytest.raises(ServingError, match="passes on theta alone"):
            serving.serving_config(build(family), "sglang", "yarn", factor=4, plugin=True)
        with pytest.raises(ServingError, match=f"cannot serve .* on this '{family}' model"):
            serving.serving_config(build(family), "sglang", "yarn", factor=4)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is register


def test_a_length_is_not_multiplied_by_a_factor_that_stays() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = build("llama", scaling)
    served = serving.serving_config(model, "sglang", "yarn", factor=2, plugin=True)
    assert served.computed is not None
    assert served.computed.length == served.length == 8 * model.config.max_position_embeddings
