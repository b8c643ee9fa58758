"""The picture of docs/search.md."""

from __future__ import annotations

from pathlib import Path

from docs.figures.registry import ROOT, read_result

PICTURES = ROOT / "docs" / "pictures"


def draw_search() -> None:
    """The divisors of docs/search.md."""
    from rope_ext_hf.hub import load_empty
    from rope_ext_hf.methods.registry import method_from_dict, resolve_method
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.pictures.divisors import draw_divisors

    report = read_result("search")["report"]
    rotary, length = patch_geometry(load_empty("reference")), report["target_length"]
    shown = {name: resolve_method(name, rotary, target_length=length) for name in ("linear", "ntk", "yarn")}
    draw_divisors(PICTURES / "search.png", rotary, {**shown, "found": method_from_dict(report["method"])}, length)
    _shrink(PICTURES / "search.png")


def _shrink(file: Path) -> None:
    """A quarter of the bytes, and no difference to the eye."""
    from PIL import Image

    with Image.open(file) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(file, optimize=True)
