"""Conversion of loaded models; the checkpoints on disk are in checkpoint_folders.py."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.head_blocks import RowLayout
from rope_ext_hf.checkpoints.rows.loaded_rows import reordered
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reading.text.documents import Tokens
from tests.support.models import FAMILIES, build, build_known, logits, tokens

INTERLEAVED = {"glm", "cohere", "llama4", "deepseek_v2"}


def randomise(model: Any) -> Any:
    """Randomise every parameter, norms and biases too, so that a forgotten one shows."""
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def other(name: str) -> tuple[str, str]:
    """Return the pairing that a family runs, and the other one."""
    return ("interleaved", "half") if name in INTERLEAVED or name == "deepseek_v3" else ("half", "interleaved")


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_the_identity(name: str) -> None:
    model = randomise(build(name))
    before = copy.deepcopy(model.state_dict())
    runs, to = other(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope.convert(model, to)
    assert model.config.rope_pairing == to
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert not [key for key in moved if ".v_proj" in key or ".o_proj" in key or "mlp" in key]
    rope.convert(model, runs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.rope_pairing == runs


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"deepseek_v3"}))
def test_a_wrongly_paired_model_is_mended(name: str) -> None:
    """A folder says one pairing and holds the other: after loading, one line makes the logits equal."""
    runs, to = other(name)
    right = randomise(build(name))
    expected = logits(right, tokens(24))
    wrong = copy.deepcopy(right)
    with pytest.warns(UserWarning, match=f"in the {runs} pairing: save them for code that rotates in the {to} pairing"):
        rope.convert(wrong, to)
    del wrong.config.rope_pairing  # nothing records the pairing
    assert not torch.allclose(logits(wrong, tokens(24)), expected, atol=1e-2)
    rope.convert(wrong, runs, source_pairing=to)
    torch.testing.assert_close(logits(wrong, tokens(24)), expected, atol=0, rtol=0)


def test_a_family_with_a_switch_runs_either() -> None:
    model = randomise(build("deepseek_v3"))
    expected = logits(model, tokens(24))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.convert(model, "half")
    assert model.config.rope_interleave is False
    torch.testing.assert_close(logits(model, tokens(24)), expected, atol=1e-4, rtol=0)
    assert rope.describe(model).pairing == "half"


def merged(model: Any, ids: Tensor) -> Tensor:
    return logits(copy.deepcopy(model).merge_and_unload(), ids)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_come_along(dora: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], use_dora=dora, init_lora_weights=False)
    model = randomise(get_peft_model(build("qwen2"), config)).eval()
    expected = merged(model, tokens(24))
    with pytest.warns(UserWarning, match="save them for code"):
        rope.convert(model, "interleaved")
    del model.config.rope_pairing
    assert not torch.allclose(merged(model, tokens(24)), expected, atol=1e-2)
    rope.convert(model, "half", source_pairing="interleaved")
    torch.testing.assert_close(merged(model, tokens(24)), expected)


def test_what_cannot_be_converted_is_refused() -> None:
    model = build("llama")
    with pytest.raises(rope.CheckpointError, match="half pairing already"):
        rope.convert(model, "half")
    with pytest.raises(rope.MethodError, match="must be one of half, interleaved, got 'neox'"):
        rope.convert(model, "neox")
    with pytest.raises(rope.MethodError, match="unpatch it"):
        rope.convert(rope.patch(build("llama"), "yarn", factor=2), "interleaved")
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(rope.CheckpointError, match="offloaded to disk"):
        rope.convert(empty, "interleaved")


def test_weights_and_code_that_disagree_are_refused_everywhere(tmp_path: Path) -> None:
    model = build("llama")
    with pytest.warns(UserWarning, match="save them for code"):
        rope.convert(model, "interleaved")
    model.save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path)
    assert loaded.config.rope_pairing == "interleaved"
    document = Tokens("a", torch.arange(3, 67), tuple(range(64)))
    for use in (
        lambda: rope.patch(loaded, "yarn", factor=2),
        lambda: rope.describe(loaded),
        lambda: perplexity(loaded, [document], lengths=[64], bos=False),
    ):
        with pytest.raises(rope.CheckpointError, match=rf"rope-ext convert {re.escape(str(tmp_path))} NEW --to half"):
            use()
    rope.convert(loaded, "half")
    rope.patch(loaded, "yarn", factor=2)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_a_family_without_a_rotary_module(name: str) -> None:
    """The table and the config say what rotates; the model itself does not show it."""
    model = build_known(name)
    before, expected = copy.deepcopy(model.state_dict()), logits(model, tokens(24))
    with pytest.warns(
        UserWarning, match="rotates in the interleaved pairing: save them for code that rotates in the half"
    ):
        rope.convert(model, "half")
    assert not torch.allclose(logits(model, tokens(24)), expected, atol=1e-2)
    rope.convert(model, "interleaved")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_weights_whose_reordering_stops_half_way_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk or memory error in the middle must not leave a model whose layers are in different pairings."""
    model = randomise(build("llama"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converting, calls = RowLayout.to_pairing, 0

    def fail_at_the_third(layout: RowLayout, tensor: Tensor, to: str) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room for another copy")
        return converting(layout, tensor, to)

    monkeypatch.setattr(RowLayout, "to_pairing", fail_at_the_third)
    with pytest.raises(MemoryError), reordered(model, "interleaved"):
        pytest.fail("nothing runs on half of a conversion")
    assert calls == 5  # two tensors were moved, the third failed, and both went back
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
