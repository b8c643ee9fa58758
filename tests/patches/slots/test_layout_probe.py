"""The arrangement of cos and sin of a rotary module, which a probe finds out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.layout_probe import AngleLayout, probe_layout
from tests.support.every_model import tiny
from tests.support.models import build

PLAIN = AngleLayout("half", True, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_copies_of_llamas_forward_have_one_axis_and_the_half_layout(family: str) -> None:
    module = build(family).model.rotary_emb
    assert probe_layout(module, module.inv_freq, None) == PLAIN


@pytest.mark.parametrize(("family", "layout"), [("cohere", "interleaved"), ("gpt_oss", "bare")])
def test_another_forward_is_probed(family: str, layout: str) -> None:
    assert [slot.layout for slot in ModelRope.of_model(tiny(family)).slots] == [layout]


def test_a_forward_that_a_program_has_put_into_the_class_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaRotaryEmbedding.forward

    def interleaved(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        parts = original(self, x, position_ids)
        return tuple(part[..., : part.shape[-1] // 2].repeat_interleave(2, -1) for part in parts)

    model = build("llama")
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", interleaved)
    assert [slot.layout for slot in ModelRope.of_model(model).slots] == ["interleaved"]
