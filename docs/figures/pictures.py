"""The pictures of the pages: one for each method, and those of docs/rope.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.figures.registry import ROOT, read_result

PICTURES = ROOT / "docs" / "pictures"

DRAWN: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8},
    "theta": {"theta": 1_000_000.0},
    "ntk": {"factor": 8},
    "dynamic-ntk": {"growth": "even"},
    "by-parts": {"factor": 8},
    "yarn": {"factor": 8},
    "dynamic-yarn": {},
    "llama3": {"factor": 8},
    "mrrope": {"factor": 8},
    "rerope": {},
    "leaky-rerope": {},
    "self-extend": {},
    "dca": {},
}
"""Methods with a picture, and their parameters; a model like Llama 2, 4,096 tokens extended to 32,768."""


def draw_pictures() -> None:
    """One picture for each method, one with the frequency methods over one another, and those of the laws."""
    from rope_ext_hf.methods import Rotary, resolve_method
    from rope_ext_hf.methods.remapping import RemappingMethod
    from rope_ext_hf.pictures.rope_plots import draw
    from rope_ext_hf.runs.labels import label

    rotary, extended = Rotary(dim=128, theta=10_000.0, trained_length=4096), 32_768
    drawn = {}
    for name, parameters in DRAWN.items():
        method = resolve_method(name, rotary, **parameters)
        if isinstance(method, RemappingMethod):
            method = method.bind(rotary, extended)
        drawn[name] = (label(method.to_dict()), method)
    together = {name: drawn[name] for name in ("linear", "ntk", "yarn", "llama3")}
    PICTURES.mkdir(exist_ok=True)
    for name, shown in [("methods", together), *((name, {name: drawn[name]}) for name in drawn)]:
        file = PICTURES / f"{name}.png"
        draw(file, rotary, dict(shown.values()), extended_length=extended, title=name)
        _shrink(file)
    draw_laws(rotary, dict(together.values()), extended)
    draw_search()


def draw_search() -> None:
    """The divisors of docs/search.md."""
    from rope_ext_hf.hub import load_empty
    from rope_ext_hf.methods.registry import method_from_dict, resolve_method
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.pictures.rope_plots import draw_divisors

    report = read_result("search")["report"]
    rotary, length = patch_geometry(load_empty("reference")), report["target_length"]
    shown = {name: resolve_method(name, rotary, target_length=length) for name in ("linear", "ntk", "yarn")}
    draw_divisors(PICTURES / "search.png", rotary, {**shown, "found": method_from_dict(report["method"])}, length)
    _shrink(PICTURES / "search.png")


def draw_laws(rotary: Any, methods: Any, extended: int) -> None:
    """The pictures of docs/rope.md; those of trained queries and keys come from the bundled model."""
    import torch

    from rope_ext_hf.hub import load_model, load_tokenizer
    from rope_ext_hf.methods.registry import resolve_method
    from rope_ext_hf.patches.geometry import patch_geometry
    from rope_ext_hf.pictures.attention_vectors import spectra
    from rope_ext_hf.pictures.rope_plots import draw_angles, draw_bound, draw_rotated, draw_scores, draw_similarity
    from rope_ext_hf.reading.corpora import stdlib_held_out
    from rope_ext_hf.runs.labels import label

    model = load_model("reference")
    own = patch_geometry(model)
    ids = load_tokenizer("reference")(stdlib_held_out()[0].text[:8000], add_special_tokens=False).input_ids
    trained = spectra(model, torch.tensor(ids[: own.context_length]))
    over_own = {
        label(method.to_dict()): method
        for method in (resolve_method(name, own, factor=8.0) for name in ("linear", "ntk", "yarn"))
    }
    drawings: dict[str, Callable[[Path], None]] = {
        "angles": lambda file: draw_angles(file, rotary),
        "similarity": lambda file: draw_similarity(file, rotary, methods, extended),
        "bound": lambda file: draw_bound(file, rotary, methods, extended),
        "scores": lambda file: draw_scores(file, own, over_own, 8 * own.context_length, trained),
        "rotated": lambda file: draw_rotated(file, rotary),
    }
    for name, draw_into in drawings.items():
        draw_into(file := PICTURES / f"rope-{name}.png")
        _shrink(file)


def _shrink(file: Path) -> None:
    """A quarter of the bytes, and no difference to the eye."""
    from PIL import Image

    with Image.open(file) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(file, optimize=True)
