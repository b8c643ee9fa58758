"""Patched models whose queries and keys are rotated by kernels of the Hub (`use_kernels=True`): `nox -s kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.import_utils import is_kernels_available

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from tests.support.hub_kernels import rotated_by, write_kernels
from tests.support.models import build, tokens

pytestmark = pytest.mark.skipif(not is_kernels_available(), reason="needs the kernels library")

STATIC = ["yarn", "by-parts"]
OWN_ANGLES = ["dynamic-ntk", "dynamic-yarn", "rerope", "self-extend", "stairs", "dca"]
LENGTHS = (150, 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_kernels(tmp_path)


def patched(method: str) -> Any:
    return rope.patch(build("llama"), method, **{"factor": 4.0} if method in STATIC else {})


@torch.no_grad()
def read_and_decode(model: Any, rows: slice = slice(None)) -> Tensor:
    """Return the logits of a padded batch, and of two more tokens of each row onto its cache."""
    ids, mask = tokens(152).expand(2, -1)[rows], torch.ones(2, 152, dtype=torch.int64)[rows]
    for row, length in zip(mask, LENGTHS, strict=False):
        row[: 150 - length] = 0
    output = model(ids[:, :150], attention_mask=mask[:, :150], use_cache=True)
    parts = [output.logits * mask[:, :150, None]]
    for at in (150, 151):
        output = model(
            ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=output.past_key_values,
            position_ids=mask[:, : at + 1].sum(-1, keepdim=True) - 1,
        )  # fmt: skip
        parts.append(output.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("first", ["patch", "kernels"])
@pytest.mark.parametrize("method", [*STATIC, *OWN_ANGLES])
def test_a_kernel_rotates_by_the_angles_of_the_patch(method: str, first: str, folder: Path) -> None:
    expected, as_loaded = read_and_decode(patched(method)), read_and_decode(build("llama"))
    with rotated_by(folder, "OwnAngles") as calls:
        model = build("llama")
        if first == "kernels":
            model.use_kernels = True
        rope.patch(model, method, **{"factor": 4.0} if method in STATIC else {})
        model.use_kernels = True
        calls.clear()
        torch.testing.assert_close(read_and_decode(model), expected)
        assert calls
        torch.testing.assert_close(read_and_decode(rope.unpatch(model)), as_loaded)


@pytest.mark.parametrize("method", OWN_ANGLES)
def test_a_kernel_that_rotates_all_rows_alike_is_refused_where_they_differ(method: str, folder: Path) -> None:
    """The kernel came with another model of the class, and after this model had run without it."""
    model = patched(method)
    expected = read_and_decode(model, slice(0, 1))
    read_and_decode(model)
    with rotated_by(folder, "AnglesOfFirst"):
        build("llama").use_kernels = True
        with pytest.raises(UnsupportedModelError, match=f"wrong under {method}: give one row at a time"):
            read_and_decode(model)
        torch.testing.assert_close(read_and_decode(model, slice(0, 1)), expected)  # one row has no other
    read_and_decode(model)


@pytest.mark.parametrize("method", STATIC)
def test_a_kernel_that_rotates_all_rows_alike_keeps_the_frequencies_of_static_methods(
    method: str, folder: Path
) -> None:
    expected = patched(method)(tokens(150).expand(2, -1)).logits
    with rotated_by(folder, "AnglesOfFirst") as calls, torch.no_grad():
        model = patched(method)
        model.use_kernels = True
        torch.testing.assert_close(model(tokens(150).expand(2, -1)).logits, expected)
        assert calls
