"""A fine-tuning warns of texts that a tokenizer does not know."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.tools.training.finetuning_options import Finetuning
from rope_ext_hf.tools.training.texts import split_texts
from tests.reading.text.test_unknown_tokens import DROPPED, FOREIGN, KNOWN, letters


@pytest.mark.parametrize("texts", [{"data": [FOREIGN * 100]}, {"data": [KNOWN * 100], "eval_data": [FOREIGN * 100]}])
def test_fine_tuning_warns(texts: dict[str, Any]) -> None:
    question = Finetuning(model="m", method="yarn", factor=2, steps=1, **texts)
    with pytest.warns(UserWarning, match=DROPPED):
        split_texts(question, letters())
