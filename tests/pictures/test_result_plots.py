"""How the lines of methods are drawn."""

from __future__ import annotations

from rope_ext_hf.pictures.result_plots import line_styles


def test_a_method_keeps_its_colour_and_its_factors_share_one() -> None:
    styles = line_styles(["as loaded", "yarn x4", "yarn x8", "rerope"])
    assert styles["yarn x4"]["color"] == styles["yarn x8"]["color"] != styles["rerope"]["color"]
    assert styles["yarn x4"]["linestyle"] != styles["yarn x8"]["linestyle"]
