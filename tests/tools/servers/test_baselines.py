"""`record_server` and `compare_server`: the contents of a record, and its comparison with a server that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import FileError, ServingError
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools import servers
from rope_ext_hf.tools.servers.baselines import compare_server, record_server
from tests.support.wrapped_text import unwrapped
from tests.tools.support.model_servers import KINDS, serving

TOKENIZER = AutoTokenizer.from_pretrained(reference_folder())
LENGTHS = [64, 200]


def plain(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0} | settings
    return AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=dtype, rope_parameters=rope_parameters).eval()


def tokenize(text: str, special: bool) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=special)["input_ids"]
    return ids


def states(length: int = 256, **others: Any) -> dict[str, Any]:
    """Return the facts that a vLLM server states about itself."""
    return {"/v1/models": {"data": [{"id": "served", "max_model_len": length, "root": "folder"} | others]}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_of_each_kind_answers_as_it_did(kind: str, tmp_path: Path) -> None:
    with serving(kind, plain(), tokenize=tokenize) as url:
        record_server(url, record := tmp_path / "record.json", lengths=LENGTHS)
        report = compare_server(url, record)
    assert report.agrees, str(report)
    assert (report.begins, report.lengths, report.server) == (None, (64, 200), kind)
    assert report.differences == (0.0, 0.0)
    assert "answers as recorded" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vLLM 0.33.0", "llama.cpp b1"])
def test_what_changed_is_named(kind: str, tmp_path: Path) -> None:
    """A server that lists only likely tokens may later list others."""
    with serving(kind, plain(), tokenize=tokenize) as url:
        record_server(url, record := tmp_path / "record.json", lengths=LENGTHS)
    for changed, cause in (
        (plain(torch.bfloat16), "by as little as another dtype"),
        (plain(rope_type="linear", factor=2.0), "by as much as another method"),
        (plain(rope_theta=50000.0), "by as much as another method"),
    ):
        with serving(kind, changed, tokenize=tokenize) as url:
            report = compare_server(url, record)
        assert (report.agrees, report.begins) == (False, 64)
        assert f"from 64 tokens on, {cause}" in unwrapped(report)


@pytest.mark.slow
def test_the_length_at_which_a_change_begins(tmp_path: Path) -> None:
    """Under a length-dependent method such as "dynamic", answers differ only beyond the context length."""
    with serving("vLLM 0.33.0", plain(), tokenize=tokenize) as url:
        record_server(url, record := tmp_path / "record.json", lengths=[64, 200, 400, 500])
    with serving("vLLM 0.33.0", plain(rope_type="dynamic", factor=4.0), tokenize=tokenize) as url:
        report = compare_server(url, record)
    assert (report.agrees, report.begins) == (False, 400)
    assert "from 400 tokens on, while up to 200 it does: this suggests a method" in unwrapped(report)


@pytest.mark.slow
def test_what_a_server_states_of_itself(tmp_path: Path) -> None:
    def ask(**changes: Any) -> Any:
        given: dict[str, Any] = {"states": states(), "tokenize": tokenize} | changes
        with serving("vLLM 0.33.0", plain(), **given) as url:
            return compare_server(url, record)

    with serving("vLLM 0.33.0", plain(), states=states(), tokenize=tokenize) as url:
        record_content = record_server(url, record := tmp_path / "record.json")
    assert [len(prompt.ids) for prompt in record_content.prompts] == [32, 64, 128, 255]  # of its own length
    assert record_content.stated == {"version": "vLLM 0.33.0", "length": 256, "folder": "folder"}
    assert ask().agrees
    elsewhere = ask(states=states(root="another") | {"/version": {"version": "0.34.0"}})
    assert elsewhere.agrees
    assert elsewhere.notes == (
        "folder: folder then, another now",
        "version: vLLM 0.33.0 then, vLLM 0.34.0 now",
    )
    longer = ask(states=states(512))
    assert (longer.agrees, longer.begins, longer.changed) == (False, None, ("length: 256 then, 512 now",))
    begun = ask(tokenize=lambda text, special: [1] * special + tokenize(text, special))
    assert not begun.agrees
    assert begun.changed[0].startswith("tokens: a text with special tokens has 2,001 then, from 0 on")
    usual = KINDS["vLLM 0.33.0"][2]
    short = ask(answer=lambda model, body: None if len(body["prompt"]) > 128 else usual(model, body))
    assert (short.agrees, short.begins, len(short.differences)) == (False, None, 3)
    assert "it no longer answers 255 tokens" in unwrapped(short)


@pytest.mark.slow
def test_as_much_as_asking_again_changes_is_allowed(tmp_path: Path) -> None:
    """Some servers sum in another order each time."""
    draws, usual = torch.Generator().manual_seed(0), KINDS["vLLM 0.33.0"][2]

    def unsteady(model: Any, body: Any) -> Any:
        answer = usual(model, body)
        for each in answer["choices"][0]["prompt_logprobs"][1:]:
            for given in each.values():
                given["logprob"] += 0.01 * float(torch.randn((), generator=draws))
        return answer

    with serving("vLLM 0.33.0", plain(), unsteady, tokenize=tokenize) as url:
        record_server(url, record := tmp_path / "record.json", lengths=LENGTHS)
        assert compare_server(url, record).agrees
    with serving("vLLM 0.33.0", plain(rope_theta=20000.0), unsteady, tokenize=tokenize) as url:
        assert not compare_server(url, record).agrees


@pytest.mark.slow
def test_a_record_with_the_model_keeps_its_fingerprint_and_is_compared_like_answers(tmp_path: Path) -> None:
    """A server that returns no tokens needs the model's tokenizer; changes of the folder are reported, too."""
    with serving("SGLang", plain()) as url:
        with pytest.raises(ServingError, match="returns no tokens for a text: give the model"):
            record_server(url, tmp_path / "none.json", lengths=LENGTHS)
        with pytest.raises(ServingError, match="does not state its context length"):
            record_server(url, tmp_path / "none.json")
        record_server(url, record := tmp_path / "record.json", reference_folder(), lengths=LENGTHS)
        assert compare_server(url, record, reference_folder()).agrees
        rope.patch(plain(), "yarn", factor=4.0).save_pretrained(patched := tmp_path / "patched")
        report = compare_server(url, record, patched)
        assert servers.check_server(url, reference_folder(), from_file=record).agrees
    assert report.begins is None
    assert any(each.startswith("method: ") for each in report.changed), report.changed
    with pytest.raises(FileError, match="exists"):
        record_server(url, record, reference_folder())


@pytest.mark.slow
def test_the_command_needs_no_model(tmp_path: Path) -> None:
    record, run = tmp_path / "record.json", CliRunner().invoke
    with serving("vLLM 0.33.0", plain(), tokenize=tokenize) as url:
        written = run(app, ["check-server", url, "--record", str(record), "--lengths", "64,200"])
        assert written.exit_code == 0, written.output
        same = run(app, ["check-server", url, "--against", str(record)])
        assert same.exit_code == 0, same.output
        assert run(app, ["check-server", url]).exit_code == 2
        assert run(app, ["check-server", url, "--record", "a", "--against", "b"]).exit_code == 2
    with serving("vLLM 0.33.0", plain(rope_theta=20000.0), tokenize=tokenize) as url:
        other = run(app, ["check-server", url, "--against", str(record), "--json"])
    assert other.exit_code == 1
    answer = json.loads(other.stdout)
    assert (answer["agrees"], answer["begins"]) == (False, 64)
