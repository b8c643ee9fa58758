"""The plug-in of vLLM without vLLM: what it takes over, what it leaves alone, and the table that it builds.

`make test-vllm` runs it in a real vLLM.
"""

from __future__ import annotations

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
from rope_ext_hf.serving.vllm_plugin import register
from tests.support.models import build

HOME = "vllm.model_executor.layers.rotary_embedding"


class Rotary:
    """The constructor of vLLM's class: it asks its methods for a table, and keeps that in the dtype of the model."""

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
    ) -> None:
        self.cache_max_position_num = 4 * max_position
        super().__init__(head_size, rotary_dim, max_position, *others)
        self.more = {"mrope_section": mrope_section, "mrope_interleaved": mrope_interleaved}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of vLLM's names with the plug-in registered, and a model's module that had imported the function."""

    def get_rope(
        head_size: int, max_position: int, is_neox_style: bool = True, rope_parameters: Any = None, dtype: Any = None
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


def settings(model: Any, **asked: Any) -> dict[str, Any]:
    overrides = rope.serving_config(model, "vllm", plugin=True, **asked).overrides
    assert overrides is not None
    parameters: dict[str, Any] = overrides["rope_parameters"]
    return parameters


def test_other_rope_types_go_to_vllm(engine: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert engine.get_rope(64, 4096, rope_parameters=yarn) == ("stock", 64, yarn)
    assert engine.get_rope(64, 4096) == ("stock", 64, None)


def test_a_table_is_exact_at_positions_of_a_million(engine: Any) -> None:
    given = settings(build("llama"), method="yarn", factor=4)
    module = engine.get_rope(16, 2**20, True, given, torch.float32)
    assert module.cos_sin_cache.shape == (2**20, 16)
    last = 2**20 - 1
    for pair, frequency in enumerate(json.loads(given["inv_freq"])):
        for column, function in ((pair, math.cos), (8 + pair, math.sin)):
            exact = given["attention_factor"] * function(math.fmod(last * frequency, 2 * math.pi))
            assert module.cos_sin_cache[last, column].item() == pytest.approx(exact, abs=1e-6)
    assert engine.get_rope(16, 2**20, True, dict(given), torch.float32) is module
    assert engine.get_rope(16, 128, True, given, torch.float32) is not module


def test_a_module_that_rotates_otherwise_than_the_saved_model_is_named(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    present = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=AutoConfig.from_pretrained(tmp_path)))
    monkeypatch.setattr(sys.modules["vllm.config"], "get_current_vllm_config_or_none", lambda: present)
    right, asked = settings(model), [settings(build("llama"), method="yarn", factor=8)]
    asked += [right | {"attention_factor": 1.0}, settings(build("llama"), method="default")]
    for dtype in (torch.float32, torch.bfloat16):
        engine.get_rope(16, 256, True, right, dtype)  # warnings are errors here
    engine.get_rope(16, 256, rope_parameters={"rope_type": "yarn"})  # its stand-in has no table
    for wrong, said in zip(asked, ("Frequencies differ", "is missing", "The scaling is missing"), strict=True):
        with pytest.warns(UserWarning, match=f"vLLM does not rotate as the model did when it was saved: .*{said}"):
            engine.get_rope(16, 256, True, wrong, torch.float32)
    engine.get_rope(16, 256, True, dict(asked[0]), torch.float32)  # said once
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
    with pytest.raises(ValueError, match="have 8 frequencies, and the model rotates 32 dims"):
        engine.get_rope(32, 128, True, axes, torch.float32)


def test_who_has_a_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    assert EntryPoint(name, value, "vllm.general_plugins").load() is register
    with pytest.raises(ServingError, match="no plug-in of this package for mlx; there is one for vllm, sglang"):
        rope.serving_config(build("llama"), "mlx", "yarn", factor=4, plugin=True)
    with pytest.raises(ServingError, match="builds rope settings of its own"):
        rope.serving_config(build("gpt_oss"), "vllm", "yarn", factor=4, plugin=True)
