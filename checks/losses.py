"""The losses of one tiny model, read as measurements read them, against those of an ordinary forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.reading.scorer import TokenScorer
from tests.support.every_model import Entry, inputs

RESULT = Path(__file__).parent.parent / "docs" / "results" / "coverage.json"
"""The file in which `python -m checks.coverage` records every language model class."""
EQUAL = 2e-4
"""The largest difference of two outputs that count as equal, in float32: stock angles are off by 1e-5 at 200 tokens."""
LONG = 160  # tokens of a text
PROMPT, ANSWER, CHUNK = 100, 3, 37
"""Tokens of a prompt and its answers, and of a chunk, which no window, state or chunk of attention divides."""


class WrongError(AssertionError):
    """A patched model that does something else than it must."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongError(what)


def measured(model: Any, entry: Entry) -> str:
    """Losses are those of an ordinary forward, in spans and of answers to prompts; the result says how it is read."""
    ids = inputs(entry, LONG).get("input_ids", torch.arange(3, 90)[None])
    scorer = TokenScorer(model, chunk=CHUNK)
    losses = _ordinary_losses(model, ids[0])
    for each, way in ((scorer, scorer.reading), (TokenScorer(model), "at once, if it can be")):
        far = float((each.losses(ids[0], 1) - losses).abs().max())
        require(far < EQUAL, f"losses are off by {far:.2g}, read {way}")
    if scorer.by_layer:
        found, layers = scorer.losses(ids[0], 1), scorer.reader.layers
        scorer.reader.layers = None
        require(torch.equal(scorer.losses(ids[0], 1), found), "losses read layer by layer are others")
        scorer.reader.layers = layers
    prompt = ids[0, :PROMPT]
    answers = torch.stack([ids[0, PROMPT : PROMPT + ANSWER], ids[0, -ANSWER:]])
    losses = torch.stack([_ordinary_losses(model, torch.cat([prompt, answer]))[-ANSWER:] for answer in answers])
    for again in (False, True):
        found, _ = scorer.candidates(prompt, answers, shared=PROMPT // 2, again=again)
        far = float((found - losses).abs().max())
        require(far < EQUAL, f"losses of answers are off by {far:.2g} ({again=}), read {scorer.reading}")
    return "in chunks" if scorer.chunked else scorer.reading


@torch.no_grad()
def _ordinary_losses(model: Any, ids: Tensor) -> Tensor:
    """(tokens - 1,), from the logits of one forward."""
    logits = model(input_ids=ids[None], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[1:], reduction="none")
