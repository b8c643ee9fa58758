"""Logits of a model that optimum has exported and loaded again."""

from __future__ import annotations

from typing import Any

import torch


def last_logits(model: Any, row: list[int]) -> Any:
    """Return the logits of the last token of a row, (vocabulary,)."""
    inputs = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row)).long()}
    return model(**inputs).logits[0, -1].double().numpy()
