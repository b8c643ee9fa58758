"""The picture of `rope-ext demo`: loss and retrieval side by side, and what they show in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.eval.overview import Overview
from rope_ext_hf.eval.results import DocumentLoss, Result, Retrieval, Setting
from rope_ext_hf.pictures.result_plots import line_styles

YARN: dict[str, Any] = {"method": "yarn", "factor": 8.0}
REROPE: dict[str, Any] = {"method": "rerope", "window": 128, "temperature": "llama4"}
SETTING = Setting("matched", 128, 256, False, 0)


def loss(method: dict[str, Any] | None, length: int, bits: float) -> Result:
    nats = bits * 0.6931471805599453 * 100
    return Result.from_documents(method, SETTING, length, [DocumentLoss("text", nats, 100, 100, 1)])


def found(method: dict[str, Any] | None, length: int, depth: float, share: float) -> Retrieval:
    return Retrieval(method, "key-value", 5, length, depth, 4, 4, share, 1.0, share, 0.2, ())


def overview(share_of_rerope: float = 1.0) -> Overview:
    losses = [loss(None, 256, 1.25), loss(None, 2048, 4.5), loss(YARN, 256, 1.5), loss(YARN, 2048, 1.75)]
    losses += [loss(REROPE, 256, 1.25), loss(REROPE, 2048, 1.125)]
    retrievals = [
        found(method, length, depth, share if length > 256 else 1.0)
        for method, share in ((None, 0.0), (YARN, 0.25), (REROPE, 1.0))
        for length in (256, 2048, 8192)
        for depth in (0.0, 0.5, 1.0)
    ]
    retrievals[-1] = found(REROPE, 8192, 1.0, share_of_rerope)
    return Overview(losses, retrievals, 256)


def test_conclusions_say_what_the_results_are() -> None:
    assert overview().conclusions() == (
        "As loaded, the loss rises from 1.25 bits per byte at 256 to 4.50 at 2,048; with rerope it is 1.12.",
        "As loaded, 100% of the answers are found at 256 and 0% at 8,192 (32x); with rerope 100%.",
        "Beyond 256, rerope finds 100% at every length and depth.",
    )
    _, by_length, by_depth = overview(share_of_rerope=0.4).conclusions()
    assert by_length.endswith("0% at 8,192 (32x); with rerope 80%.")
    assert by_depth == "Beyond 256, rerope finds 90% over all depths, and least, 40%, at depth 100% of 8,192."


def test_the_best_method_is_the_one_that_finds_most_beyond_the_context_length() -> None:
    whole = overview()
    assert whole.best == "rerope"
    assert whole.found["yarn x8"] == {256: 1.0, 2048: 0.25, 8192: 0.25}
    without = [r for r in whole.retrievals if r.method != REROPE]
    assert Overview(whole.perplexities, without, 256).best == "yarn x8"


def test_methods_that_differ_in_a_parameter_keep_their_whole_names() -> None:
    other = REROPE | {"window": 64}
    whole = overview()
    more = [*whole.retrievals, *(found(other, n, 0.0, 0.5) for n in (256, 2048, 8192))]
    names = set(Overview(whole.perplexities, more, 256).found)
    assert {"as loaded", "yarn x8"} < names
    assert len(names) == 4


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    overview().draw(tmp_path / "overview.png", "a $strange$ title")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_keeps_its_colour_and_its_factors_share_one() -> None:
    styles = line_styles(["as loaded", "yarn x4", "yarn x8", "rerope"])
    assert styles["yarn x4"]["color"] == styles["yarn x8"]["color"] != styles["rerope"]["color"]
    assert styles["yarn x4"]["linestyle"] != styles["yarn x8"]["linestyle"]
