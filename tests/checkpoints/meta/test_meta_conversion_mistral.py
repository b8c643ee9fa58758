"""Mistral's own format: read by convert and detect, and left out by patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rope_ext_hf.checkpoints.conversion import convert_checkpoint
from rope_ext_hf.checkpoints.pairing.detection import detect_pairing
from rope_ext_hf.errors import CheckpointError
from tests.support.commands import run
from tests.support.mistral_format import YARN, mistral, write_both_formats, write_mistral_format
from tests.support.wrapped_text import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.randint(3, 99, (1, 200), generator=torch.Generator().manual_seed(1))
_HF_YARN = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
_PARAMS = {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1}
OPTIONS = "--config-format hf --load-format safetensors"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS).logits
    return out


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({}, {"max_position_embeddings": 256}),
        ({}, {"use_biases": False, "max_seq_len": 256}),
        ({"head_dim": 16}, {"sliding_window": None}),
        ({"sliding_window": 32}, {"sliding_window": 32}),
        ({"rope_parameters": _HF_YARN}, {"yarn": _PARAMS}),
        ({"rope_parameters": _HF_YARN | {"attention_factor": 1.0}}, {"yarn": _PARAMS | {"apply_scale": False}}),
        ({"tie_word_embeddings": True}, {"tied_embeddings": True}),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_mistral_in_its_own_format_is_converted(
    settings: dict[str, Any], params: dict[str, Any], shards: int, tmp_path: Path
) -> None:
    model = mistral(**settings)
    source = write_mistral_format(model, tmp_path / "source", shards, **params)
    report = convert_checkpoint(source, tmp_path / "out", "half", verify=True)
    assert report.converted == 4
    assert not report.skipped_files
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(converted) is type(model)
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-5, atol=1e-5)
    assert not list((tmp_path / "out").glob("consolidated*")) + list((tmp_path / "out").glob("params.json"))
    assert detect_pairing(source).stated == "interleaved"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"moe": {"num_experts": 8}}, "moe = "),
        ({"use_biases": True}, "use_biases is True"),
        ({"hidden_dim": 128}, "hidden_dim 128"),
        ({"yarn": {"factor": 4}}, "yarn is"),
        ({"head_dim": 16}, "wq"),
    ],
)
def test_a_params_json_that_says_otherwise_is_refused_by_name(
    params: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_mistral_format(mistral(), tmp_path / "source", **params)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "out", "half")


def test_a_folder_without_weights_names_both_formats(tmp_path: Path) -> None:
    write_mistral_format(mistral(), tmp_path / "source")
    (tmp_path / "source" / "consolidated.safetensors").unlink()
    (tmp_path / "source" / "consolidated.00.pth").touch()
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", "half")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return write_both_formats(tmp_path / "both")


def test_a_converted_folder_keeps_nothing_of_the_other_format(both: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(both, tmp_path / "out", "interleaved", verify=True)
    assert "params.json" in report.skipped_files
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"config.json", "generation_config.json", "model.safetensors"}


def test_patch_leaves_the_other_format_out_and_says_so(both: Path, tmp_path: Path) -> None:
    _, out, _ = run("patch", both, "--method", "ntk", "--factor", 4, "--out", tmp_path / "out")
    assert "consolidated-00001-of-00003.safetensors" in unwrapped(out)
    assert "params.json are left out" in unwrapped(out)
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left - {"README.md"} == {"config.json", "generation_config.json", "model.safetensors"}  # a card may be added
    kept = ("patch", both, "--method", "ntk", "--factor", 4, "--keep-mistral-format", "--out", tmp_path / "kept")
    assert OPTIONS in unwrapped(run(*kept)[1])
    assert {file.name for file in both.iterdir()} <= {file.name for file in (tmp_path / "kept").iterdir()}
