"""The row of transformers in an audit, and what serve-config starts from, against living models of every family."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from rope_ext_hf.errors import RopeExtError, UnsupportedModelError
from rope_ext_hf.models.model_classes import class_to_load
from rope_ext_hf.patches.slots.slot_finding import find_slots
from rope_ext_hf.tools.serving.auditing import audit_config
from rope_ext_hf.tools.serving.configs import Model
from tests.support import every_model

pytestmark = pytest.mark.filterwarnings("ignore")
_LENGTH = 256
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FORMS: dict[str, dict[str, Any] | None] = {
    "own": None,
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    "yarn": _YARN,
    "yarn, mscale": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "llama3": _YARN | _LLAMA3 | {"rope_type": "llama3"},
    "longrope": _YARN | {"rope_type": "longrope"},
}
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_FULL = {"deepseek_v4": "compress"}  # the key of the settings of full-attention layers, where it is not their type
_NO_FULL = {"beam", "cohere_compass_text", "cohere_compass"}  # whose full-attention layers do not rotate
_QUICK = ("llama", "phi3", "gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "deepseek_v4", "sarvam_mla")
_FAMILIES = sorted({each.model_type for each in every_model.entries() if each.kind in ("causal", "vision")})


def scaled(parameters: Mapping[str, Any], form: str, pairs: int, layer_type: str) -> dict[str, Any]:
    """The rope settings of a config with a scaling in place of their own."""
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return {
            key: scaled(value, form, pairs, "") if key == layer_type else value for key, value in parameters.items()
        }
    settings = FORMS[form]
    if settings is None:
        return dict(parameters)
    lists = {"short_factor": [1 + i / 8 for i in range(pairs)], "long_factor": [1.0 + i for i in range(pairs)]}
    kept = {key: parameters[key] for key in _KEPT if parameters.get(key) is not None}
    return kept | {"rope_type": "default"} | settings | (lists if form == "longrope" else {})


def rotary(model: Any, layer_type: str) -> tuple[Any, dict[str, Any]]:
    """The rotary module of the text part of a living model that full-attention layers use, and its further argument."""
    text = model.config.get_text_config()
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if not names or getattr(getattr(module, "config", None), "model_type", None) != text.model_type:
            continue
        if "inv_freq" in names:
            return module, {}
        if f"{layer_type}_inv_freq" in names:
            return module, {"layer_type": layer_type}
    return None, {}


def numbers(model: Any, layer_type: str, length: int) -> tuple[list[float], float]:
    """Frequencies and magnitude that a living model rotates with at a length, by its cos and sin at position 1."""
    module, named = rotary(model, layer_type)
    out = module(torch.zeros(1), torch.tensor([[1, max(1, length - 1)]]), **named)
    if not isinstance(out, tuple):
        return out[0, 0].angle().tolist(), float(out.abs().mean())
    cos, sin = (part[0, 0].double() for part in out)
    angles, half = torch.atan2(sin, cos), len(cos) // 2
    magnitude = float((cos.square() + sin.square()).sqrt().mean())
    if torch.equal(angles[:half], angles[half:]):
        return angles[:half].tolist(), magnitude
    repeated = len(cos) > 1 and torch.equal(angles[0::2], angles[1::2])
    return (angles[0::2] if repeated else angles).tolist(), magnitude


def compare(model_type: str, forms: Any) -> list[str]:
    """How audit and serve-config differ from living models of a family, but for scalings that it refuses."""
    entry = next(each for each in every_model.entries() if each.model_type == model_type)
    every_model.stand_in_for_timm()
    kind = transformers.CONFIG_MAPPING[model_type]
    try:
        base = kind(**every_model.settings(kind, every_model.data()["classes"].get(entry.name, {})))
        living = build(transformers.AutoConfig.for_model(**base.to_dict()))
    except Exception as error:
        pytest.skip(f"no model of it can be built: {error!r}"[:90])
    layer_type = _FULL.get(model_type, "full_attention")
    module, _ = rotary(living, layer_type)
    if module is None:
        pytest.skip("it has no rotary module that takes positions")
    pairs, differing = len(numbers(living, layer_type, 4)[0]), []
    for form in forms:
        stated = json.loads(json.dumps(base.to_dict()))
        text = stated.get("text_config", stated)
        if not text.get("rope_parameters"):
            continue
        text["rope_parameters"] = scaled(text["rope_parameters"], form, pairs, layer_type)
        if form != "own":
            text["max_seq_len" if "max_seq_len" in text else "max_position_embeddings"] = _LENGTH
        try:
            config = transformers.AutoConfig.for_model(**copy.deepcopy(stated))
            living, length = build(config), config.get_text_config().max_position_embeddings
            expected = numbers(living, layer_type, length)
            if not_patched(living):  # it arranges its pairs in an order of its own
                expected = sorted(expected[0], reverse=True), expected[1]
        except Exception:  # transformers itself refuses the scaling
            continue
        row = audit_config(stated).engines[0]
        if row.computed is None:
            differing.append(f"{form}: {row.verdict}")
            continue
        close = same(row.computed.inv_freq, expected[0]) and abs(row.computed.attention_factor - expected[1]) < 1e-5
        differing += [] if close else [f"{form}: audit has {row.computed.inv_freq}, the model {expected[0]}"]
        scales = [part.scaling for part in living.modules() if hasattr(part, "kv_lora_rank")]
        if scales and form == "yarn, mscale":
            plain = build(transformers.AutoConfig.for_model(**copy.deepcopy(base.to_dict())))
            sizes = [part.qk_head_dim for part in plain.modules() if hasattr(part, "kv_lora_rank")]
            if abs(row.computed.softmax_scale - scales[0] * sizes[0] ** 0.5) > 1e-5:
                differing.append(f"{form}: softmax scale {row.computed.softmax_scale}")
        if model_type in _NO_FULL:
            continue
        if not_patched(living):
            continue
        try:
            described = Model("m", config.get_text_config(), composite=False, patches=[]).rope.embedding
        except RopeExtError as error:
            differing.append(f"{form}: serve-config: {error}")
            continue
        served = described.method.frequencies(described.plain, length)
        if not same(served.inv_freq.tolist(), expected[0]):
            differing.append(f"{form}: serve-config has {served.inv_freq}, the model {expected[0]}")
    return differing


def not_patched(living: Any) -> bool:
    """Whether no method can be put into a model, so that nothing is served with one."""
    try:
        find_slots(living)
    except UnsupportedModelError:
        return True
    return False


def build(config: Any) -> Any:
    """A living model of a config, on the CPU."""
    loader = class_to_load(config)
    with torch.random.fork_rng(devices=[]):
        return loader.from_config(config) if hasattr(loader, "_model_mapping") else loader._from_config(config)


def same(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(
        abs(a - b) <= (4e-6 * abs(b) or 1e-12) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("model_type", [each for each in _QUICK if each in _FAMILIES])
def test_audit_and_serve_config_start_from_what_a_living_model_runs(model_type: str) -> None:
    assert not compare(model_type, ("own", "alpha", "yarn, mscale"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", _FAMILIES)
@pytest.mark.sampled(29)
def test_audit_and_serve_config_start_from_what_every_family_runs(model_type: str) -> None:
    assert not compare(model_type, FORMS)
