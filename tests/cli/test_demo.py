"""The sentences of `rope-ext demo`, from made-up numbers whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.cli.demo import Demonstration
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from rope_ext_hf.terminal import as_wide_as

SPREAD = (-0.3, 0.1, 0.2, -0.1, 0.0, 0.05, 0.15, -0.1)
NOISE = (0.002, -0.001, 0.0, 0.003, -0.002, 0.001, -0.003, 0.0)
"""What documents differ by in nats, and what two methods on one document differ by at random."""


def demonstration(nats: dict[str, tuple[float, float]], right: dict[str, tuple[int, int]]) -> Demonstration:
    """Make one from nats and right answers of 40, at 256 and at 2,048 tokens, by method."""
    lengths = (256, 2048)
    losses: dict[str, Any] = {
        key: {
            n: [(level + text + noise * index, 1.0) for text, noise in zip(SPREAD, NOISE, strict=True)]
            for n, level in zip(lengths, row, strict=True)
        }
        for index, (key, row) in enumerate(nats.items())
    }
    scores: dict[str, Any] = {
        key: {n: [(float(i < count), 1.0) for i in range(40)] for n, count in zip(lengths, row, strict=True)}
        for key, row in right.items()
    }
    perplexity = Measure("perplexity", "", Evidence.LOSS, False, losses, exponential=True, tolerance=0.05)
    answers = Measure("exact match", "%", Evidence.RETRIEVAL, True, scores, "prompt")
    names = {key: key for key in nats}
    known = Findings(names, "unpatched", 256, [perplexity, answers])
    return Demonstration(known, perplexity, answers, {key: key == "yarn x8" for key in nats if key != "unpatched"})


NATS = {"unpatched": (0.7, 3.0), "yarn x8": (0.9, 1.0), "rerope": (0.7, 0.65), "self-extend": (0.7, 0.655)}
RIGHT = {"unpatched": (38, 0), "yarn x8": (18, 16), "rerope": (39, 39), "self-extend": (39, 36)}


def test_the_whole_text() -> None:
    with as_wide_as(100):
        text = str(demonstration(NATS, RIGHT))
    assert text.splitlines() == [
        "The bundled model was trained at 256 tokens. Read at 2,048 (8x):",
        "                  perplexity      right answers of 40",
        "                   256    2,048         256     2,048",
        " unpatched        2.01    20.09          38         0",
        " yarn x8          2.46     2.72          18        16",
        " rerope           2.01     1.92*         39        39*",
        " self-extend      2.01     1.93          39        36*",
        " * best, or no significant difference from the best",
        "Unpatched, it fails beyond 256: perplexity 10 times as high, no answer found.",
        "rerope and self-extend read 2,048 tokens as well as 256; only this package runs them.",
        "yarn x8 runs in other software too; short inputs get worse (perplexity 2.01 to 2.46).",
        "This was a small model with 8 texts and 40 questions. Measure your own model:",
        "  rope-ext ppl MODEL --method yarn --factor 4 --lengths 4k,16k --data 'books/*.txt'",
    ]


def test_texts_that_vary_are_no_evidence_against_a_method() -> None:
    """Perplexity falls from 2.34 to 2.30, by more in one text than in another."""
    shown = demonstration(NATS, RIGHT)
    longer = [
        (level + extra, 1.0) for level, extra in zip((0.4, 0.9, 1.1, 0.7, 0.8, 0.8, 1.2, 0.6), SPREAD, strict=True)
    ]
    shown.perplexity.items["rerope"][2048] = longer  # type: ignore[index]
    assert "rerope and self-extend read 2,048 tokens as well as 256; only this package runs them." in shown.sentences


@pytest.mark.parametrize(
    ("nats", "right", "sentence"),
    [
        ({"unpatched": (0.7, 0.71)}, {"unpatched": (38, 37)}, "Unpatched, it reads 2,048 tokens about as well as 256."),
        (
            {"unpatched": (0.7, 1.5)},
            {"unpatched": (38, 7)},
            "Unpatched, it fails beyond 256: perplexity 2.2 times as high, 7 of 40 answers found.",
        ),
        (
            {"rerope": (0.7, 1.2), "self-extend": (0.7, 1.2)},
            {},
            "No method reads 2,048 tokens as well as the unpatched model reads 256.",
        ),
        ({"self-extend": (0.7, 1.2)}, {}, "rerope reads 2,048 tokens as well as 256; only this package runs it."),
        ({}, {"self-extend": (39, 12)}, "rerope reads 2,048 tokens as well as 256; only this package runs it."),
        (
            {"yarn x8": (0.7, 0.66)},
            {"yarn x8": (38, 38)},
            "yarn x8, rerope and self-extend read 2,048 tokens as well as 256.",
        ),
        (
            {"yarn x8": (0.7, 0.66)},
            {},
            "yarn x8 runs in other software too; short inputs read as well as before.",
        ),
    ],
)
def test_every_form_of_sentence(nats: Any, right: Any, sentence: str) -> None:
    assert sentence in demonstration(NATS | nats, RIGHT | right).sentences
