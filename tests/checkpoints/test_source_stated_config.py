"""Checkpoints whose config.json settles what rotates are read without a class of transformers, and read alike."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors, rotary_tensors
from rope_ext_hf.checkpoints.source import Source, stated_config
from rope_ext_hf.models.families import families
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.patches.model_rope import ModelRope
from tests.support.models import build_known
from tests.support.planted_pairs import planted

FOLDER = Path(__file__).parents[2] / "conformance" / "configurations"
PUBLISHED = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}
WITHOUT_CLASS = [name for name, known in families().items() if known.attention is not None and not known.remote]
ASK_THE_CLASS = {"auto_map": {"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]}}
"""A key that decides nothing about rotation, and with which the class of the model is asked all the same."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def values_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def rewrite(folder: Path, values: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


def as_transformers_4(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as transformers 4 wrote it: theta at the top, and a scaling under `rope_scaling`."""
    scaling = dict(values.pop("rope_parameters"))
    values["rope_theta"] = scaling.pop("rope_theta")
    values["rope_scaling"] = None
    if scaling["rope_type"] != "default":
        values["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_rotation(name: str) -> None:
    values, rows = PUBLISHED[name]["config"], PUBLISHED[name]["rows"]
    config = stated_config(values)
    if config is None:
        assert values["model_type"] not in WITHOUT_CLASS or name in ("phi-3-mini-128k", "phi-4-mini")
        return
    rotary = ModelRope.of_checkpoint(config).rotary
    short = next((row for row in rows if row["length"] is None), rows[0])
    published = torch.tensor(short["inv_freq"], dtype=torch.float64)
    torch.testing.assert_close(rotary.inv_freq(), published, rtol=1e-9, atol=0)
    model = empty_model(transformers.AutoConfig.for_model(**values))
    assert rotary == ModelRope.of_checkpoint(model.config, model).rotary
    assert RotaryTensors(config, rotary.dim).layers == rotary_tensors(model, rotary).layers


FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def check_alike(folder: Path, values: dict[str, Any]) -> None:
    """Check that a folder with this config.json is read without a class as it is read with it."""
    rewrite(folder, values)
    stated = Source(folder)
    rewrite(folder, values | ASK_THE_CLASS)
    asked = Source(folder)
    assert stated.model is None
    assert asked.model is not None
    assert stated.rotary == asked.rotary
    assert stated.tensors.layers == asked.tensors.layers
    assert stated.expected == asked.expected
    assert stated.pairing == asked.pairing == "half"
    assert stated.layouts() == asked.layouts()
    assert type(stated.class_config) is type(asked.config)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", WITHOUT_CLASS)
def test_a_folder_is_read_as_with_its_class(tmp_path: Path, model_type: str, form: str) -> None:
    if form not in (families()[model_type].rope_types or FORMS):
        pytest.skip(f"the config of {model_type} does not accept {form}")
    width = {"head_dim": 16} if model_type == "mixtral" else {}  # without it transformers cannot scale this family
    rope_parameters = {"rope_theta": 5000.0, **FORMS[form]}
    build_known(model_type, rope_parameters=rope_parameters, **width).save_pretrained(tmp_path)
    values = values_of(tmp_path)
    check_alike(tmp_path, dict(values))
    check_alike(tmp_path, as_transformers_4(values))
    if not width and not families()[model_type].own_head_dim:
        check_alike(tmp_path, {key: value for key, value in values.items() if key != "head_dim"})


def test_of_two_statements_transformers_takes_rope_scaling(tmp_path: Path) -> None:
    build_known("llama").save_pretrained(tmp_path)
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    check_alike(tmp_path, values_of(tmp_path) | scaling | {"rope_theta": 7000.0})
    assert Source(tmp_path).rotary.own is not None


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "qwen2", "phi3"])
def test_a_window_in_all_layers_changes_nothing(tmp_path: Path, model_type: str) -> None:
    build_known(model_type, sliding_window=8).save_pretrained(tmp_path)
    check_alike(tmp_path, values_of(tmp_path) | {"sliding_window": 8, "use_sliding_window": True})


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_weights_are_judged_as_with_the_class(tmp_path: Path, name: str) -> None:
    """Also by the gain of their norms, which is that of the class or the weight itself."""
    planted(name, "interleaved").save_pretrained(tmp_path)
    values = values_of(tmp_path)
    stated = rope.detect_pairing(tmp_path)
    rewrite(tmp_path, values | ASK_THE_CLASS)
    asked = rope.detect_pairing(tmp_path)
    assert stated.pairing == asked.pairing == "interleaved"
    assert math.isclose(stated.score, asked.score, rel_tol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "deepseek_v3"},
        {"model_type": "gemma3_text"},
        {"model_type": "gemma2"},
        {"model_type": "qwen3", "head_dim": None},
        {"head_dim": "16"},
        {"num_key_value_heads": None},
        {"num_attention_heads": "4"},
        {"hidden_size": True},
        {"num_hidden_layers": 0},
        {"max_position_embeddings": None},
        {"rope_theta": None},
        {"rope_theta": "1e4"},
        {"rope_scaling": {"type": "longrope"}},
        {"rope_scaling": {"rope_type": "rope_ext_hf/ntk"}},
        {"rope_scaling": [2.0]},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_ext_hf": {"method": "yarn"}},
        {"text_config": {"model_type": "llama"}},
        ASK_THE_CLASS,
    ],
    ids=str,
)
def test_where_config_json_leaves_something_open_the_class_is_asked(changes: dict[str, Any]) -> None:
    settled = SIZES | {"model_type": "llama", "rope_theta": 10_000.0}
    assert stated_config(settled) is not None
    assert stated_config(settled | changes) is None


def test_no_class_is_imported_for_a_usual_checkpoint(tmp_path: Path) -> None:
    planted("llama", "half").save_pretrained(tmp_path / "source")
    code = f"""
import sys
import rope_ext_hf as rope
folder = {str(tmp_path)!r}
assert rope.detect_pairing(folder + "/source").pairing == "half"
rope.convert_checkpoint(folder + "/source", folder + "/copy", to="interleaved")
print([name for name in sys.modules if name.startswith(("transformers.models", "transformers.modeling_utils"))])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout
