"""The plug-in of vLLM without vLLM: the settings that it handles, those that it passes on, and its tables.

`nox -s vllm` runs it in a real vLLM.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import rope_ext_hf as rope
from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.plugins.tables import for_transformers
from rope_ext_hf.tools.plugins.vllm import register
from tests.support.models import build

HOME = "vllm.model_executor.layers.rotary_embedding"


class Rotary:
    """A stand-in for vLLM's class: its constructor builds a table, and keeps it in the dtype of the model."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        neox: bool,
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        self.rotary_dim, self.max_position_embeddings, self.base, self.neox, self.more = (
            *(rotary_dim, max_position, base, neox, more),
        )
        self.cos_sin_cache = self._compute_cos_sin_cache().to(dtype)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        raise NotImplementedError


class SeveralAxes(Rotary):
    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        *others: Any,
        mrope_section: Any = None,
        mrope_interleaved: bool = False,
        positions_factor: int = 4,
    ) -> None:
        self.cache_max_position_num = positions_factor * max_position
        super().__init__(head_size, rotary_dim, max_position, *others)
        self.more = {"mrope_section": mrope_section, "mrope_interleaved": mrope_interleaved}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with vLLM's names and the plug-in registered, and a model's module that imported the function."""

    def get_rope(
        head_size: int,
        max_position: int,
        is_neox_style: bool = True,
        rope_parameters: Any = None,
        dtype: Any = None,
        mrope_positions_factor: int = 4,
    ) -> Any:
        return ("stock", head_size, rope_parameters)

    home, model = ModuleType(HOME), ModuleType("vllm.model_executor.models.llama")
    vars(home).update(get_rope=get_rope, RotaryEmbedding=Rotary, MRotaryEmbedding=SeveralAxes)
    vars(model).update(get_rope=get_rope)
    layers = ModuleType("vllm.model_executor.layers")
    vars(layers).update(rotary_embedding=home)
    config = ModuleType("vllm.config")
    vars(config).update(get_current_vllm_config_or_none=lambda: None)
    vars(parent := ModuleType("vllm")).update(config=config)
    names = {"vllm": parent, config.__name__: config, "vllm.model_executor": ModuleType("vllm.model_executor")}
    for name, module in {**names, layers.__name__: layers, HOME: home, model.__name__: model}.items():
        monkeypatch.setitem(sys.modules, name, module)
    register()
    once: Any = home.get_rope
    register()
    assert home.get_rope is once is model.get_rope
    assert once is not get_rope
    return home


def settings(model: Any, **wrong_settings: Any) -> dict[str, Any]:
    overrides = serving.serving_config(model, "vllm", plugin=True, **wrong_settings).overrides
    assert overrides is not None
    parameters: dict[str, Any] = overrides["rope_parameters"]
    return parameters


def test_other_rope_types_go_to_vllm(engine: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert engine.get_rope(64, 4096, rope_parameters=yarn) == ("stock", 64, yarn)
    assert engine.get_rope(64, 4096) == ("stock", 64, None)


@pytest.mark.slow
def test_a_table_is_exact_at_positions_of_a_million(engine: Any) -> None:
    rope_settings = settings(build("llama"), method="yarn", factor=4)
    module = engine.get_rope(16, 2**20, True, rope_settings, torch.float32)
    assert module.cos_sin_cache.shape == (2**20, 16)
    last = 2**20 - 1
    for pair, frequency in enumerate(json.loads(rope_settings["inv_freq"])):
        for column, function in ((pair, math.cos), (8 + pair, math.sin)):
            exact = rope_settings["attention_factor"] * function(math.fmod(last * frequency, 2 * math.pi))
            assert module.cos_sin_cache[last, column].item() == pytest.approx(exact, abs=1e-6)
    assert engine.get_rope(16, 2**20, True, dict(rope_settings), torch.float32) is module
    assert engine.get_rope(16, 128, True, rope_settings, torch.float32) is not module


def test_models_of_two_dtypes_in_one_process_have_tables_of_their_own(
    engine: Any, request: pytest.FixtureRequest
) -> None:
    rope_settings = settings(build("llama"), method="yarn", factor=4)
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):  # which vLLM sets while it builds a model
        torch.set_default_dtype(dtype)
        assert engine.get_rope(16, 128, True, rope_settings).cos_sin_cache.dtype == dtype


def test_a_module_that_rotates_otherwise_than_the_saved_model_is_named(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    present = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=AutoConfig.from_pretrained(tmp_path)))
    monkeypatch.setattr(sys.modules["vllm.config"], "get_current_vllm_config_or_none", lambda: present)
    right, wrong_settings = settings(model), [settings(build("llama"), method="yarn", factor=8)]
    wrong_settings += [right | {"attention_factor": 1.0}, settings(build("llama"), method="default")]
    for dtype in (torch.float32, torch.bfloat16):
        engine.get_rope(16, 256, True, right, dtype)  # warnings are errors here
    engine.get_rope(16, 256, rope_parameters={"rope_type": "yarn"})  # its stand-in has no table
    for wrong, message in zip(
        wrong_settings, ("Frequencies differ", "is missing", "The scaling is missing"), strict=True
    ):
        with pytest.warns(UserWarning, match=f"vLLM does not rotate as the model did when it was saved: .*{message}"):
            engine.get_rope(16, 256, True, wrong, torch.float32)
    engine.get_rope(16, 256, True, dict(wrong_settings[0]), torch.float32)  # warned of once
    longer = settings(build("qwen3", head_dim=32), method="linear", factor=4)
    engine.get_rope(32, 256, True, longer, torch.float32)  # of another geometry: a draft, a vision tower


def test_geometry_is_passed_on(engine: Any) -> None:
    partial = settings(build("gpt_neox"), method="ntk", factor=2)
    rotated = 2 * len(json.loads(partial["inv_freq"]))
    module = engine.get_rope(16, 128, False, partial, torch.bfloat16)
    assert (module.rotary_dim, module.neox, module.cos_sin_cache.dtype) == (rotated, False, torch.bfloat16)
    axes = {
        **settings(build("llama"), method="linear", factor=2),
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    }
    module = engine.get_rope(16, 128, True, axes, torch.float32)
    assert module.more == {"mrope_section": [2, 3, 3], "mrope_interleaved": True}
    assert len(module.cos_sin_cache) == 512
    single = engine.get_rope(16, 128, True, axes, torch.float32, mrope_positions_factor=1)
    assert torch.equal(single.cos_sin_cache, module.cos_sin_cache[:128])
    with pytest.raises(ValueError, match="have 8 frequencies, but the model rotates 32 dims"):
        engine.get_rope(32, 128, True, axes, torch.float32)


def test_a_config_with_a_remapping_method_is_refused(engine: Any) -> None:
    """The settings are those that `serve-config --plugin` of version 0.1.0 wrote."""
    held = {"method": {"method": "stairs", "window": 192, "start": 64, "chunk": 128}, "pairing": "half"}
    rope_settings = settings(build("llama"), method="yarn", factor=4) | {"remapping": json.dumps(held)}
    with pytest.raises(
        ValueError,
        match=r"'remapping' method, which only .* 0\.1\.0 and earlier could run",
    ):
        engine.get_rope(16, 512, True, rope_settings, torch.float32)
    with pytest.raises(ValueError, match="choose a static method, and write the config anew"):
        for_transformers(SimpleNamespace(rope_parameters=rope_settings))


def test_who_has_a_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    assert EntryPoint(name, value, "vllm.general_plugins").load() is register
    with pytest.raises(ServingError, match="has no plug-in for mlx, only for vllm, sglang"):
        serving.serving_config(build("llama"), "mlx", "yarn", factor=4, plugin=True)


def test_the_keys_that_gpt_oss_hands_on_hold_the_table(engine: Any) -> None:
    model = rope.patch(build("gpt_oss"), "factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), factor=2)
    rope_settings = settings(model)
    # vllm/model_executor/models/gpt_oss.py builds these settings, whatever the rope type is.
    kept = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    handed_on = {key: rope_settings[key] for key in kept} | {
        "rope_type": "yarn",
        "truncate": rope_settings.get("truncate", True),
    }
    assert rope_settings["factor"] == 1.0  # by which vLLM multiplies the length
    module = engine.get_rope(16, 64, True, handed_on, torch.float32)
    position, rotary = torch.tensor([[5]]), model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, 16), position)  # of gpt-oss: one column for each pair
    assert torch.allclose(module.cos_sin_cache[5], torch.cat((cos, sin), -1)[0, 0], atol=1e-6)


@pytest.mark.parametrize("over", ["own", "original"])
def test_the_model_of_deepseek_gets_its_softmax_scale(engine: Any, over: str) -> None:
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = build("deepseek_v3", rope_parameters=own | {"original_max_position_embeddings": 32})
    scale = model.model.layers[0].self_attn.scaling * (model.config.qk_head_dim**0.5)
    rope.patch(model, "linear", factor=2, over=over)
    rope_settings = settings(model)
    # vllm/model_executor/models/deepseek_v2.py: the rope type it chooses, and by what it multiplies the softmax scale.
    assert rope_settings["rope_type"] == "deepseek_yarn"
    assert "attention_factor" not in rope_settings
    mscale = 0.1 * rope_settings["mscale_all_dim"] * math.log(rope_settings["factor"]) + 1.0
    assert mscale**2 == pytest.approx(scale, rel=1e-9)
    assert "original_max_position_embeddings" not in rope_settings  # so that vLLM without the plug-in stops
    module = engine.get_rope(model.config.qk_rope_head_dim, 64, False, rope_settings, torch.float32)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[7]]))
    pairs = model.config.qk_rope_head_dim // 2
    assert torch.allclose(module.cos_sin_cache[7], torch.cat((cos[0, 0, :pairs], sin[0, 0, :pairs])), atol=1e-6)
