"""The plug-in of vLLM without vLLM: what it takes over, what it leaves alone, and the table that it builds.

`make test-vllm` runs it in a real vLLM.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import rope_ext_hf as rope
from rope_ext_hf.errors import ServingError
from rope_ext_hf.methods.registry import method_from_dict
from rope_ext_hf.plugins.tables import for_transformers
from rope_ext_hf.plugins.vllm import BACKEND, register
from tests.support.models import build
from tests.support.oracles import stored_position

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
        positions_factor: int = 4,
    ) -> None:
        self.cache_max_position_num = positions_factor * max_position
        super().__init__(head_size, rotary_dim, max_position, *others)
        self.more = {"mrope_section": mrope_section, "mrope_interleaved": mrope_interleaved}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of vLLM's names with the plug-in registered, and a model's module that had imported the function."""

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


def settings(model: Any, **asked: Any) -> dict[str, Any]:
    overrides = rope.serving_config(model, "vllm", plugin=True, **asked).overrides
    assert overrides is not None
    parameters: dict[str, Any] = overrides["rope_parameters"]
    return parameters


def test_other_rope_types_go_to_vllm(engine: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert engine.get_rope(64, 4096, rope_parameters=yarn) == ("stock", 64, yarn)
    assert engine.get_rope(64, 4096) == ("stock", 64, None)


@pytest.mark.slow
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


def test_models_of_two_dtypes_in_one_process_have_tables_of_their_own(
    engine: Any, request: pytest.FixtureRequest
) -> None:
    given = settings(build("llama"), method="yarn", factor=4)
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):  # which vLLM sets while it builds a model
        torch.set_default_dtype(dtype)
        assert engine.get_rope(16, 128, True, given).cos_sin_cache.dtype == dtype


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
    single = engine.get_rope(16, 128, True, axes, torch.float32, mrope_positions_factor=1)
    assert torch.equal(single.cos_sin_cache, module.cos_sin_cache[:128])
    with pytest.raises(ValueError, match="have 8 frequencies, and the model rotates 32 dims"):
        engine.get_rope(32, 128, True, axes, torch.float32)


@pytest.mark.parametrize("name", ["stairs", "leaky-rerope", "dca"])
def test_the_table_of_a_remapping_method_is_that_of_its_cached_keys(engine: Any, name: str) -> None:
    given = settings(build("llama"), method=name, target_length=512)
    module = engine.get_rope(16, 512, True, given, torch.float32)
    frequencies = json.loads(given["inv_freq"])
    method = method_from_dict(json.loads(given["remapping"])["method"])
    for n in (0, 1, 70, 511):
        angles = stored_position(method, n) * torch.tensor(frequencies, dtype=torch.float64)  # type: ignore[arg-type]
        assert torch.allclose(module.cos_sin_cache[n].double(), torch.cat((angles.cos(), angles.sin())), atol=1e-6)
    with pytest.raises(ValueError, match="in interleaved pairs, and its rope settings are for half ones"):
        engine.get_rope(16, 512, False, given, torch.float32)


@dataclass
class Backends:
    """vLLM's registry of attention backends and its CPU platform, which passes over what was asked for."""

    path: str | None = None

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str | None:
        return self.path

    def get_class(self) -> Any:
        def reasons(**asked: Any) -> list[str]:
            return ["sliding window not supported"] if asked["has_sliding_window"] else []

        return SimpleNamespace(validate_configuration=reasons)


@dataclass
class Choice:
    """What a layer needs of a backend."""

    has_sliding_window: bool = False

    def _asdict(self) -> dict[str, Any]:
        return vars(self)


def backends(monkeypatch: pytest.MonkeyPatch, taken_by: str | None, *, cpu: bool = True) -> tuple[Any, Any]:
    custom = Backends(taken_by)
    platform = SimpleNamespace(is_cpu=lambda: cpu, get_attn_backend_cls=lambda *args, **kwargs: "stock")
    registry, platforms = ModuleType("vllm.v1.attention.backends.registry"), ModuleType("vllm.platforms")
    vars(registry).update(
        AttentionBackendEnum=SimpleNamespace(CUSTOM=custom),
        register_backend=lambda member, path: setattr(member, "path", path),
    )
    vars(platforms)["current_platform"] = platform
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
    register()
    return custom, platform


def test_the_attention_backend_is_chosen_by_name_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    custom, platform = backends(monkeypatch, None)
    assert custom.path == BACKEND
    assert platform.get_attn_backend_cls(None, attn_selector_config=Choice()) == "stock"
    assert platform.get_attn_backend_cls("CPU_ATTN", attn_selector_config=Choice(), num_heads=4) == "stock"
    assert platform.get_attn_backend_cls(custom, attn_selector_config=Choice()) == BACKEND
    with pytest.raises(ValueError, match="CUSTOM does not run this model: sliding window not supported"):
        platform.get_attn_backend_cls(custom, attn_selector_config=Choice(has_sliding_window=True))
    custom, platform = backends(monkeypatch, None, cpu=False)
    assert custom.path == BACKEND
    assert (
        platform.get_attn_backend_cls(custom, attn_selector_config=Choice()) == "stock"
    )  # it asks the registry itself
    custom, platform = backends(monkeypatch, "another.Backend")
    assert custom.path == "another.Backend"
    assert platform.get_attn_backend_cls(custom, attn_selector_config=Choice()) == "stock"


def test_no_model_with_a_remapping_method_starts_without_the_backend(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom, _ = backends(monkeypatch, None)
    given = settings(build("llama"), method="stairs", target_length=512)
    chosen = SimpleNamespace(backend=custom, backend_per_kind={})
    text_config = SimpleNamespace(rope_parameters=given)
    present = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text_config), attention_config=chosen)
    monkeypatch.setattr(sys.modules["vllm.config"], "get_current_vllm_config_or_none", lambda: present)
    engine.get_rope(16, 512, True, given, torch.float32)
    for wrong in ({"backend": None}, {"backend": "CPU_ATTN"}, {"backend_per_kind": {"full_attention": "FLASH_ATTN"}}):
        vars(chosen).update({"backend": custom, "backend_per_kind": {}} | wrong)
        with pytest.raises(
            ValueError, match="start vLLM with --attention-backend CUSTOM, and with no backends per kind"
        ):
            engine.get_rope(16, 512, True, given, torch.float32)
    vars(chosen).update(backend=custom, backend_per_kind={})
    custom.path = "another.Backend"
    with pytest.raises(ValueError, match="another plug-in of vLLM has the attention backend CUSTOM"):
        engine.get_rope(16, 512, True, given, torch.float32)
    text_config.rope_parameters = settings(build("llama"), method="yarn", factor=4)
    engine.get_rope(16, 512, True, text_config.rope_parameters, torch.float32)  # any backend will do
    with pytest.raises(ValueError, match="which vLLM's own model classes run"):
        for_transformers(SimpleNamespace(rope_parameters=given))


def test_who_has_a_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    assert EntryPoint(name, value, "vllm.general_plugins").load() is register
    with pytest.raises(ServingError, match="no plug-in of this package for mlx; there is one for vllm, sglang"):
        rope.serving_config(build("llama"), "mlx", "yarn", factor=4, plugin=True)


def test_the_keys_that_gpt_oss_hands_on_hold_the_table(engine: Any) -> None:
    model = rope.patch(build("gpt_oss"), "factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), factor=2)
    given = settings(model)
    # vllm/model_executor/models/gpt_oss.py builds these settings, whatever the rope type is.
    kept = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    handed_on = {key: given[key] for key in kept} | {"rope_type": "yarn", "truncate": given.get("truncate", True)}
    assert given["factor"] == 1.0  # by which vLLM multiplies the length
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
    given = settings(model)
    # vllm/model_executor/models/deepseek_v2.py: the rope type it chooses, and by what it multiplies the softmax scale.
    assert given["rope_type"] == "deepseek_yarn"
    assert "attention_factor" not in given
    mscale = 0.1 * given["mscale_all_dim"] * math.log(given["factor"]) + 1.0
    assert mscale**2 == pytest.approx(scale, rel=1e-9)
    assert "original_max_position_embeddings" not in given  # so that vLLM without the plug-in stops
    module = engine.get_rope(model.config.qk_rope_head_dim, 64, False, given, torch.float32)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[7]]))
    pairs = model.config.qk_rope_head_dim // 2
    assert torch.allclose(module.cos_sin_cache[7], torch.cat((cos[0, 0, :pairs], sin[0, 0, :pairs])), atol=1e-6)
