"""Conversions check the config against the weights: none moves rows a second time, or calls that verified."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.pairing.pairing_report import PairingReport
from rope_ext_hf.checkpoints.pairing.source_pairing import settle_pairing
from rope_ext_hf.rotary.pairing_names import PAIRINGS
from tests.support.checkpoint_folders import OTHER, all_tensors, convert, same, unstated, untouched, watch_reads
from tests.support.commands import run
from tests.support.models import build, logits, tokens
from tests.support.planted_pairs import PLANTED, planted
from tests.support.wrapped_text import unwrapped

INTERLEAVED = {"cohere", "glm"}


def runs(name: str) -> str:
    return "interleaved" if name in INTERLEAVED else "half"


def saved(folder: Path, name: str, pairing: str, **config: Any) -> Path:
    """Return a folder of several files with weights in this pairing, whose config does not record it."""
    model = planted(name, pairing)
    for key, value in config.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def printed(message: str) -> list[list[str]]:
    """Return the commands in a message, each split into words as by a shell."""
    return [shlex.split(line)[1:] for line in re.findall(r"`(rope-ext .*?)`", message)]


def moved(tensor: torch.Tensor, to: str, heads: int, dims: int) -> torch.Tensor:
    """Return rows in the other order, by the definition of the pairings."""
    rows = tensor.reshape(heads, dims, *tensor.shape[1:])
    evens, odds = rows[:, 0::2], rows[:, 1::2]
    first, second = rows[:, : dims // 2], rows[:, dims // 2 :]
    return (torch.cat([evens, odds], 1) if to == "half" else torch.stack([first, second], 2).flatten(1, 2)).flatten(
        0, 1
    )


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_weights_that_contradict_the_config_are_not_converted_by_it(name: str, tmp_path: Path) -> None:
    """Each command that the refusal prints does what it says."""
    stated, true = runs(name), OTHER[runs(name)]
    source = saved(tmp_path / "source", name, true)
    with pytest.raises(
        rope.CheckpointError, match=f"look {true} .*, but the config or the model family says {stated}"
    ) as no:
        convert(source, tmp_path / "twice", true, verify=True)
    assert untouched(tmp_path, "twice")
    right, insisting = printed(str(no.value))
    assert right == ["convert", str(source), str(tmp_path / "twice"), "--to", stated, "--from", true]
    assert insisting == ["convert", str(source), str(tmp_path / "twice"), "--to", true, "--from", stated]
    code, out, _ = run(*right, "--verify")
    assert code == 0
    assert f"{true}: you stated it, and the weights agree" in unwrapped(out)
    assert f"the weights agree that the source is in the {true} pairing" in unwrapped(out)
    assert rope.detect_pairing(tmp_path / "twice").pairing == stated
    convert(tmp_path / "twice", tmp_path / "back", true)
    assert same(all_tensors(tmp_path / "back"), all_tensors(source))
    with pytest.raises(rope.CheckpointError, match=f"look {true}.*to convert them: `") as also:  # "half already" before
        convert(source, tmp_path / "again", stated)
    assert printed(str(also.value)) == [[*right[:2], str(tmp_path / "again"), *right[3:]]]


@pytest.mark.parametrize("name", PLANTED)
def test_weights_that_agree_are_converted_and_the_report_says_so(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", name, runs(name))
    report = convert(source, tmp_path / "new", OTHER[runs(name)], verify=True)
    assert f"{runs(name)}: the config or the model family says so, and the weights agree (score" in unwrapped(report)
    assert str(report.verified).endswith(f"the weights agree that the source is in the {runs(name)} pairing")


def test_the_rows_that_the_printed_command_moves(tmp_path: Path) -> None:
    """Reorder the rows by hand: 4 query heads and 2 key heads of 16 dims."""
    source = saved(tmp_path / "source", "llama", "interleaved")
    convert(source, tmp_path / "half", "half", source_pairing="interleaved")
    expected = {
        key: moved(value, "half", 4 if "q_proj" in key else 2, 16) if "q_proj" in key or "k_proj" in key else value
        for key, value in all_tensors(source).items()
    }
    assert same(all_tensors(tmp_path / "half"), expected)


@pytest.mark.parametrize("true", PAIRINGS)
def test_a_pairing_that_the_config_records_is_held_to_the_weights_too(true: str, tmp_path: Path) -> None:
    """Convert there, remove the record or write the wrong one, and convert back."""
    there = convert(
        saved(tmp_path / "source", "llama", OTHER[true]), tmp_path / "there", true, source_pairing=OTHER[true]
    )
    assert there.to == true
    recorded = json.loads((tmp_path / "there" / "config.json").read_text(encoding="utf-8"))
    assert recorded["rope_pairing"] == true
    (tmp_path / "there" / "config.json").write_text(json.dumps(recorded | {"rope_pairing": OTHER[true]}), "utf-8")
    with pytest.raises(rope.CheckpointError, match=f'look {true}.*write "rope_pairing": "{true}" into their config'):
        convert(tmp_path / "there", tmp_path / "twice", true)
    unstated(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", OTHER[true], source_pairing=true)
    assert same(all_tensors(tmp_path / "back"), all_tensors(tmp_path / "source"))


@pytest.mark.parametrize("options", [{"source_pairing": "half"}, {"force": True}])
def test_what_the_user_states_against_the_weights_is_done_and_never_verified(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """`force` on a folder that records interleaved means that its weights are half."""
    source = saved(tmp_path / "source", "llama", "interleaved", rope_pairing="interleaved")
    with pytest.raises(rope.CheckpointError, match=r"could not be verified: .* look interleaved .*leave out verify"):
        convert(source, tmp_path / "new", "interleaved", verify=True, **options)
    assert untouched(tmp_path, "new")
    with pytest.warns(
        UserWarning, match=r"look interleaved .*; they are read in the half pairing, because you stated it"
    ):
        report = convert(source, tmp_path / "new", "interleaved", **options)
    assert "half: you stated it, but the weights look interleaved" in unwrapped(report)
    assert any("read in the half pairing, because you stated it" in note for note in report.notes)


@pytest.mark.parametrize(("score", "said"), [(-0.036, True), (0.036, False), (-0.02, False)])
def test_undecided_weights_that_look_more_like_the_other_pairing_get_a_remark(score: float, said: bool) -> None:
    """Gemma 3 270M with its rows interleaved scores 4 standard errors, and a verdict needs 4.5."""
    shown = PairingReport("folder", score=score, error=0.009, reason="may be chance", stated="half")
    settled = settle_pairing(shown, "interleaved", stated=None, configured="half", command=lambda *_: "")
    remark = "look more like interleaved (score -0.036 +- 0.009). Unsure? `rope-ext detect folder"
    assert (remark in str(settled)) is said, str(settled)
    assert "the weights do not show it" in str(settled)


def test_weights_that_do_not_tell_go_by_the_config_and_the_report_says_so(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "new", "interleaved", verify=True)
    assert (
        "half: the config or the model family says so; the weights do not show it: the difference between"
        in unwrapped(report)
    )
    assert "not verified: that the source is in the half pairing" in str(report.verified)
    with pytest.raises(
        rope.CheckpointError,
        match=r"half pairing already: the config or the model family says so; .*Unsure. `rope-ext detect",
    ):
        convert(tmp_path / "source", tmp_path / "again", "half")


def test_a_family_without_a_pairing_is_told_what_its_weights_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rope_ext_hf.checkpoints.source import Source

    source = saved(tmp_path / "source", "llama", "interleaved")
    make = Source.__init__

    def without(self: Source, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.pairing = None

    monkeypatch.setattr(Source, "__init__", without)
    with pytest.raises(
        rope.CheckpointError, match=r"look interleaved .*neither the config nor .*; .* --to half --from interleaved"
    ):
        convert(source, tmp_path / "new", "half")


def test_few_rows_are_read_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", num_hidden_layers=40).save_pretrained(tmp_path / "source")
    seen = watch_reads(monkeypatch)
    convert(tmp_path / "source", tmp_path / "new", "interleaved")
    again = [name for name in seen if seen.count(name) > 1 or "layernorm" in name]
    assert len(set(again)) <= 3 * 8


# --- Meta's format ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _of_no_length() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(context length|Meta's format has no place|does not run)")
        yield


@pytest.mark.usefixtures("_of_no_length")
def test_into_metas_format_and_out_of_it(tmp_path: Path) -> None:
    """Interleaved rows stay where they are; a file in that format with half-paired rows is refused as well."""
    source = saved(tmp_path / "source", "llama", "interleaved")
    with pytest.raises(rope.CheckpointError, match=r"look interleaved .* they are in the half pairing") as no:
        convert(source, tmp_path / "meta", "meta", verify=True)
    right = printed(str(no.value))[0]
    assert right == ["convert", str(source), str(tmp_path / "meta"), "--to", "meta", "--from", "interleaved"]
    assert run(*right, "--verify")[0] == 0
    there = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    rows = all_tensors(source)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(there["layers.0.attention.wq.weight"], rows)

    for layer in range(4):
        for part, heads in (("wq", 4), ("wk", 2)):
            key = f"layers.{layer}.attention.{part}.weight"
            there[key] = moved(there[key], "half", heads, 16)
    torch.save(there, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(rope.CheckpointError, match=r"look half .*, but Meta's format says interleaved") as no:
        convert(tmp_path / "meta", tmp_path / "back", "half", verify=True)
    right = printed(str(no.value))[0]
    assert right[-4:] == ["--to", "half", "--from", "half"]
    for to in PAIRINGS:
        report = convert(tmp_path / "meta", tmp_path / to, to, source_pairing="half", verify=True)
        assert "the weights agree that the source is in the half pairing" in str(report.verified)
    assert torch.equal(all_tensors(tmp_path / "interleaved")["model.layers.0.self_attn.q_proj.weight"], rows)
    mine, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half"),
        planted("llama", "interleaved"),
    )
    plain.config.rope_pairing = "interleaved"
    rope.convert(plain, "half")
    torch.testing.assert_close(logits(mine, tokens(24)), logits(plain, tokens(24)))


# --- loaded models, adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_a_loaded_model_is_held_to_its_weights(name: str) -> None:
    stated, true = runs(name), OTHER[runs(name)]
    model = planted(name, true)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(rope.CheckpointError, match=f"look {true}") as no:
        rope.convert(model, true)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    call = f"rope.convert(model, to={stated!r}, source_pairing={true!r})"
    assert f"for code that runs {stated}: `{call}`" in str(no.value)
    eval(call)
    assert rope.detect_pairing(model).pairing == stated
    with pytest.raises(rope.CheckpointError, match=f"are in the {stated} pairing already: .*, and the weights agree"):
        rope.convert(model, stated)
    with pytest.warns(UserWarning, match=f"look {stated} .*they are read in the {true} pairing, because"):
        rope.convert(model, stated, source_pairing=true)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_held_to_the_model_that_it_was_trained_on(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = saved(tmp_path / "base", "llama", "interleaved")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(rope.CheckpointError, match=f"the weights of {str(base)!r} look interleaved"):
        convert(tmp_path / "adapter", tmp_path / "twice", "interleaved", verify=True)
    report = convert(tmp_path / "adapter", tmp_path / "new", "half", source_pairing="interleaved", verify=True)
    assert "interleaved: you stated it, and the weights agree" in unwrapped(report)
    report = convert(tmp_path / "new", tmp_path / "back", "interleaved", verify=True)  # its config names the old model
    assert "not verified: that the source is in the half pairing" in str(report.verified)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    config = (base / "config.json").read_bytes()
    (tmp_path / "adapter" / "config.json").write_bytes(config)
    settings["base_model_name_or_path"] = "OWNER/NAME"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    report = convert(tmp_path / "adapter", tmp_path / "of a Hub model", "interleaved")
    assert "it is an adapter; `rope-ext detect OWNER/NAME` reads its model" in unwrapped(report)
