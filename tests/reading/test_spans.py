"""Plans of perplexity count the documents that are too short."""

from __future__ import annotations

import torch

from rope_ext_hf.reading.spans import make_plan
from rope_ext_hf.reading.text.documents import Tokens


def test_documents_that_a_sample_passes_over_are_not_too_short() -> None:
    documents = [
        Tokens(name, torch.arange(length), tuple(range(1, length + 1)))
        for name, length in (("one", 64), ("two", 64), ("short", 5), ("three", 64))
    ]
    assert make_plan(documents, lengths=[16]).left_out == 1
    plan = make_plan(documents, lengths=[16], max_spans=1)
    assert len(plan.documents) < 3
    assert plan.left_out == 1
