"""Limits on the numbers in a model folder: checked before time or memory is spent, and raised by an option."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.bounds import LIMITS, check_int, limit
from rope_ext_hf.cli.app import app
from rope_ext_hf.hub import load_model
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.reference import path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the bundled model."""
    return Path(shutil.copytree(path(), tmp_path / "model"))


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": 2**30}, "has 1,073,741,824 dims per head; at most 65,536 .*--raise-limit head_dim="),
        ({"num_hidden_layers": 100_000}, "has 100,000 layers; at most 2,000 .*--raise-limit layers="),
    ],
)
def test_a_config_that_no_model_has_is_refused_before_anything_is_built(
    values: dict[str, int], message: str, folder: Path
) -> None:
    change(folder, **values)
    for load in (rope.from_pretrained, load_model):
        with pytest.raises(rope.CheckpointError, match=message):
            load(folder)


def test_the_other_parts_of_a_model_have_limits_too() -> None:
    config = transformers.LlavaConfig()
    config.vision_config.num_hidden_layers = 2_001
    with pytest.raises(rope.CheckpointError, match="this 'clip_vision_model' has 2,001 layers"):
        empty_model(config)


def test_a_limit_holds_inside_its_block_alone() -> None:
    with rope.limits(layers=5):
        with rope.limits(head_dim=8):
            assert (limit("layers"), limit("head_dim")) == (5, 8)
        assert (limit("layers"), limit("head_dim")) == (5, LIMITS["head_dim"])
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(limit("layers")))
        thread.start()
        thread.join()
        assert seen == [LIMITS["layers"]]
    assert limit("layers") == LIMITS["layers"]


def test_limits_that_are_none() -> None:
    with pytest.raises(rope.MethodError, match=r"unknown limit 'layer'. Did you mean 'layers'"), rope.limits(layer=5):
        pass
    for wrong in (0, 1.5, "5", True):
        with pytest.raises(rope.MethodError, match="whole number of at least 1"), rope.limits(layers=wrong):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("value", "least", "most", "allowed"),
    [
        (0, 1, math.inf, " of at least 1"),
        (2.0, -math.inf, math.inf, ""),
        (True, 0, 1_000, " from 0 to 1,000"),
        ("5", 9, 9, " from 9 to 9"),
    ],
)
def test_a_whole_number_out_of_its_bounds(value: object, least: float, most: float, allowed: str) -> None:
    message = f"width must be a whole number{allowed}, got {value!r}"
    with pytest.raises(rope.CheckpointError, match=f"^{re.escape(message)}$"):
        check_int("width", value, least, most, error=rope.CheckpointError)
    assert [check_int("width", edge, 1, 3) for edge in (1, 3)] == [1, 3]


DESCRIBE = ("describe", "reference")


def test_limits_on_the_command_line() -> None:
    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*DESCRIBE, *options])
        return result.exit_code, result.stderr

    with rope.limits(layers=2, head_dim=2):
        code, message = run("--raise-limit", "layers=100")
        assert (code, "dims per head" in message) == (2, True), message
        assert run("--raise-limit", "layers=100", "--raise-limit=head_dim=1000") == (0, "")
        first = CliRunner().invoke(app, ["--raise-limit", "layers=100", "--raise-limit=head_dim=99", *DESCRIBE])
        assert first.exit_code == 0, first.output
        assert (limit("layers"), limit("head_dim")) == (2, 2)
    assert run("--raise-limit", "layers") == (
        2,
        "rope-ext: --raise-limit takes NAME=NUMBER, e.g. layers=5000; got 'layers'\n",
    )
    assert "unknown limit 'size'" in run("--raise-limit", "size=1")[1]


def test_the_page_of_limits_lists_them() -> None:
    page = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for name, value in LIMITS.items():
        assert f"| `{name}` | {value:,} |" in page
