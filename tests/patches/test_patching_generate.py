"""`generate` of a patched model warns of no length that the patch is for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

import rope_ext_hf as rope
from tests.support.models import TRAINED, build

REMINDER = "exceeded the model's predefined maximum length"


def reminded(model: Any, length: int, caplog: pytest.LogCaptureFixture) -> bool:
    """Return whether transformers warns when it generates from a prompt of `length` tokens."""
    transformers_logging.warning_once.cache_clear()
    caplog.clear()
    ids = torch.arange(length)[None] % 90 + 3
    with caplog.at_level(logging.WARNING, "transformers"):
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    return REMINDER in caplog.text


@pytest.mark.parametrize("method", ["linear", "ntk", "dynamic-ntk", "yarn", "dynamic-yarn", "rerope", "dca"])
def test_generation_up_to_the_extended_length_is_not_warned_of(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    before = model.config.to_dict()
    assert reminded(model, 2 * TRAINED, caplog)
    rope.patch(model, method, target_length=4 * TRAINED)
    assert not reminded(model, 2 * TRAINED, caplog)
    assert reminded(model, 5 * TRAINED, caplog)
    rope.unpatch(model)
    assert model.config.to_dict() == before
    assert reminded(model, 2 * TRAINED, caplog)
