"""`rope-ext explain` and what it draws: mean scores against loops over every pair of tokens, the page, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from rope_ext_hf import Rotary, patch
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.methods.static import Linear
from rope_ext_hf.pictures.attention_vectors import mean_scores, spectra
from rope_ext_hf.pictures.explaining import explain
from rope_ext_hf.pictures.rope_plots import draw_bound, draw_rotated
from tests.support import oracles
from tests.support.models import tokens

SMALL = Rotary(16, 1e3, 64)


def tiny(kind: str = "Llama", **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 120,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.15,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }
        | settings
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def first_layer(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the first layer from its weights, before any rotation, (heads, tokens, head_dim)."""
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))
        q, k = (
            p(hidden).view(len(ids), -1, 16).transpose(0, 1) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
    return q.double(), k.double().repeat_interleave(2, 0)


@pytest.mark.parametrize("kind", ["Llama", "Cohere"])  # half pairing, interleaved pairing
def test_mean_scores_are_means_over_every_query_and_key(kind: str) -> None:
    model, ids = tiny(kind), tokens(40)[0]
    theta = model.config.rope_parameters["rope_theta"]
    inv_freq = torch.tensor(oracles.plain(Rotary(16, theta, 64)), dtype=torch.float64)
    found = mean_scores(spectra(model, ids), inv_freq, torch.tensor([0, 3, 50]))
    assert found.shape == (8, 3)  # two layers of four heads
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in first_layer(model, ids))
    pairing: Any = "half" if kind == "Llama" else "interleaved"
    for column, distance in enumerate([0, 3, 50]):
        positions = torch.full((40,), 7)
        rotated_q, rotated_k = (
            oracles.rotate_to(q, positions + distance, 16, theta, pairing),
            oracles.rotate_to(k, positions, 16, theta, pairing),
        )
        expected = (rotated_q @ rotated_k.mT).mean((1, 2))
        torch.testing.assert_close(found[:4, column], expected, atol=1e-5, rtol=0)


def test_what_cannot_be_listened_to_is_refused() -> None:
    model = tiny()
    with pytest.raises(LengthError, match="16 to 64 tokens"):
        spectra(model, tokens(8)[0])
    with pytest.raises(UnsupportedModelError, match="the model is patched"):
        spectra(patch(model, "linear", factor=2), tokens(40)[0])


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny().train(), tokens(40)[0]
    before = model.config._attn_implementation
    spectra(model, ids)
    assert model.config._attn_implementation == before
    assert model.training


@pytest.mark.slow
@pytest.mark.thorough
def test_the_page_holds_every_picture_and_fetches_nothing(tmp_path: Path) -> None:
    vectors = torch.randn(3, 8, dtype=torch.complex128)
    made = explain(
        tmp_path, SMALL, {"linear <x4>": Linear(factor=4.0)}, length=256, title="a & b", trained=vectors, note="Noted."
    )
    page = made.page.read_text(encoding="utf-8")
    assert {path.stem for path in tmp_path.iterdir()} == {*made.pictures, "explanation"}
    assert page.count('src="data:image/png;base64,') == len(made.pictures) == 6
    assert "<title>a &amp; b</title>" in page
    assert "Noted." in page
    assert "linear &lt;x4&gt;" in page
    assert not any(text in page for text in ('src="http', "url(http", "<link", "<script"))
    # Wavelengths of pairs 0, 2, 4, 5 and 7 of plain RoPE, by hand
    row = "".join(f"<td>{2 * torch.pi * 1e3 ** (i / 8):,.{0 if i > 3 else 1}f}</td>" for i in (0, 2, 4, 5, 7))
    assert f"<td>plain RoPE</td>{row}" in page


def test_the_bound_is_drawn_for_every_base_size_and_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: set[str] = set()

    def keep(figure: Any, path: Any, **_: Any) -> None:
        texts.update(text.get_text() for text in figure.findobj(Text))
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_bound(tmp_path / "bound.png", SMALL, {"linear x4": Linear(factor=4.0)}, 256)
    assert {"theta 100", "theta 10,000,000", "d 16", "d 256", "plain RoPE", "linear x4"} <= texts


def test_without_scikit_learn_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install .*\[eval\]"):
        draw_rotated(tmp_path / "rotated.png", SMALL)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rope_ext_hf.cli.app import app

    drawn: list[dict[str, Any]] = []

    def note(folder: Path, rotary: Rotary, methods: Any, **rest: Any) -> Any:
        from rope_ext_hf.pictures.explaining import Explanation

        drawn.append({"rotary": rotary, "methods": methods, **rest})
        return Explanation(folder / "explanation.html", {})

    monkeypatch.setattr("rope_ext_hf.pictures.explaining.explain", note)
    out = ["--out", str(tmp_path / "made"), "--json"]
    stated = CliRunner().invoke(app, ["explain", "--dim", "64", "--trained-length", "1k", "--factor", "4", *out])
    assert stated.exit_code == 0, stated.output
    assert (drawn[0]["rotary"], drawn[0]["length"], drawn[0]["trained"]) == (Rotary(64, 1e4, 1024), 4096, None)
    loaded = CliRunner().invoke(app, ["explain", "reference", *out])
    assert json.loads(loaded.stdout)["trained_heads"] == 20
    assert drawn[1]["trained"].shape == (20, 32)
    chosen = CliRunner().invoke(
        app, ["explain", "reference", "-m", "yarn,dca", "--factor", "2,4", "--no-weights", *out]
    )
    assert chosen.exit_code == 0, chosen.output
    assert [name.partition(" llama4")[0] for name in drawn[2]["methods"]] == ["yarn x2", "yarn x4", "dca"]
    assert drawn[2]["length"] == 4 * 256
    both = CliRunner().invoke(app, ["explain", "reference", "--dim", "64", *out])
    assert both.exit_code == 2
    assert "--dim given beside a model" in both.stderr
    without = CliRunner().invoke(app, ["explain", "--over", "original", *out])
    assert "--over and --context-length say what of a model is extended; give a model" in without.stderr
    large = CliRunner().invoke(app, ["explain", "--dim", "1000000", *out])
    assert large.exit_code == 2
    assert "cannot be drawn" in large.stderr


def test_the_patch_of_a_folder_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rope_ext_hf.cli.app import app
    from rope_ext_hf.pictures import explaining

    drawn: list[tuple[Rotary, Any, int]] = []

    def note(_: Path, rotary: Rotary, methods: Any, *, length: int, **__: Any) -> Any:
        drawn.append((rotary, methods, length))
        return explaining.Explanation(tmp_path, {})

    monkeypatch.setattr(explaining, "explain", note)
    patch(tiny(), "yarn", factor=4).save_pretrained(tmp_path / "patched")
    run = ["explain", str(tmp_path / "patched"), "--no-weights", "--out", str(tmp_path / "made")]
    assert CliRunner().invoke(app, run).exit_code == 0
    ((rotary, methods, length),) = drawn
    assert (rotary, list(methods), length) == (Rotary(16, 1e4, 64), ["yarn x4"], 256)
