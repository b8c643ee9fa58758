"""Keywords of attention functions that a release of transformers renames or adds."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from tests.support.models import FAMILIES, build, logits, tokens

KEYWORDS = {"scaling": "gemma3", "softcap": "gemma2", "s_aux": "gpt_oss"}
"""Keywords that change a result, and a family whose result each changes."""


class Functions:
    """transformers' table of attention functions, but each function is called with other keywords."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change

    def get_interface(self, implementation: str, default: Any) -> Any:
        function = default if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        return lambda *args, **kwargs: function(*args, **self.change(kwargs))

    def __getitem__(self, implementation: str) -> Any:  # as classes of transformers 5.0 look it up
        return self.get_interface(implementation, None)


def release_with(
    family: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]], **back: str
) -> Any:
    """Return a model whose class passes changed keywords on; its own function takes them back (`back`: old=new)."""
    model = build(family)
    modeling: Any = sys.modules[type(model).__module__]
    own = modeling.eager_attention_forward

    def eager(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | {old: kwargs.pop(new) for old, new in back.items() if new in kwargs})

    monkeypatch.setattr(modeling, "eager_attention_forward", eager)
    monkeypatch.setattr(modeling, "ALL_ATTENTION_FUNCTIONS", Functions(change))
    return model


@pytest.mark.parametrize("method", ["rerope", "dynamic-self-extend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_under_a_new_name_is_refused(
    keyword: str, dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
        return {f"new_{name}" if name == keyword else name: value for name, value in kwargs.items()}

    model = release_with(KEYWORDS[keyword], monkeypatch, renamed, **{keyword: f"new_{keyword}"}).to(dtype)
    with pytest.raises(UnsupportedModelError) as refused:
        rope.patch(model, method, target_length=512)
    release = re.escape(transformers.__version__)
    assert re.search(rf"does not compute in transformers {release} \(called with .*new_{keyword}", str(refused.value))
    assert not rope.describe(model).method or "default" in str(rope.describe(model).method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*KEYWORDS.values(), "llama"])
def test_a_new_keyword_that_changes_nothing_is_passed_over(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = release_with(family, monkeypatch, lambda kwargs: kwargs | {"layer_tag": 3}).to(dtype)
    expected = logits(rope.patch(build(family).to(dtype), "rerope"), tokens(100))
    assert torch.equal(logits(rope.patch(model, "rerope"), tokens(100)), expected)


def test_keywords_of_a_user_change_nothing() -> None:
    """Trainers and collators give these keywords; where an input begins follows from positions that start anew."""
    model, ids = rope.patch(build("llama"), "rerope"), tokens(100)
    ends = torch.tensor([0, 100], dtype=torch.int32)
    keywords = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 100, "max_length_k": 100}
    assert torch.equal(logits(model, ids, **keywords, num_items_in_batch=torch.tensor(7)), logits(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_refused_for_its_keywords(family: str) -> None:
    rope.patch(build(family), "rerope")
