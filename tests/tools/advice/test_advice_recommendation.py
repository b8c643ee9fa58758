"""The recommendation of `rope.advise` and `extend --dry-run`: short, with a reason, a price, memory and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.advice import advise
from rope_ext_hf.tools.advice.guidance import GOALS
from rope_ext_hf.tools.advice.measured import rises_at, rises_for_short_inputs
from rope_ext_hf.tools.serving.serving_options import GPUServer
from tests.support.commands import run
from tests.support.wrapped_text import unwrapped
from tests.tools.support.serving_models import PUBLISHED

pytestmark = pytest.mark.filterwarnings("ignore")
K = 1024


def assert_short(text: str) -> None:
    """At most 25 lines of 80 columns; a path or a URL alone may be longer than a line."""
    lines = text.rstrip("\n").splitlines()
    assert len(lines) <= 25, text
    for line in lines:
        assert len(line) <= 80 or len(max(line.split(), key=len)) > 60, line


@pytest.mark.parametrize("times", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ["reference", *PUBLISHED])
@pytest.mark.sampled(13)
def test_advice_is_25_lines_of_80_columns(
    name: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    model = "reference"
    if name != "reference":
        PUBLISHED[name].write(Path())
        model = PUBLISHED[name].name
    context = 256 if name == "reference" else PUBLISHED[name].context_length
    advice = advise(model, times * context, server=GPUServer(gpus=8), purpose="serve")
    assert_short(str(advice))
    assert f"of keys and values for one input of {times * context:,} tokens" in unwrapped(str(advice))
    if times == 1:
        assert "take the model as it is. No method is needed." in unwrapped(str(advice))
    elif advice.recommended:
        assert f"take {advice.recommended}, to serve it without training" in unwrapped(str(advice))
        assert "because on SmolLM2-135M-Instruct, perplexity per token at" in unwrapped(str(advice))
    else:
        assert "no method is known to help here, to serve it without training" in unwrapped(str(advice))


@pytest.mark.parametrize(("purpose", "method"), [("serve", "yarn"), ("python", "dca"), ("train", "yarn")])
def test_one_method_is_recommended_for_the_purpose(purpose: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    advice = advise("reference", 2 * K, purpose=purpose)
    assert (advice.recommended, advice.choices[GOALS[purpose]][0]) == (method, method)
    assert_short(str(advice))
    for line in advice.next_steps:
        if line.startswith("rope-ext"):
            _, command, *words = shlex.split(line)
            typer.main.get_command(app).commands[command].make_context(command, words)  # type: ignore[attr-defined]
    last = {"serve": "rope-ext serve-config", "python": "rope.patch(model, 'dca', ", "train": "rope-ext finetune"}
    assert advice.next_steps[-1].startswith(last[purpose])


def test_reason_and_price_are_what_was_measured() -> None:
    (of_real_model, *_) = rises_at("yarn", 8)
    assert of_real_model.model.name == "SmolLM2-135M-Instruct"
    text = unwrapped(str(advise("reference", 2 * K)))
    ratio, unpatched = 2**of_real_model.increase, 2**of_real_model.as_loaded
    assert (
        f"rises to {ratio:.3g} times its value on short inputs; unpatched it rises to {unpatched:.3g} times that"
        in text
    )
    short = 2 ** rises_for_short_inputs("yarn", 8)[0].increase
    assert "short inputs within 256 tokens read worse: " in text
    assert f"with factor 8, their perplexity per token is {short:.3g} times that of the unpatched model" in text
    exact = unwrapped(str(advise("reference", 2 * K, purpose="python")))
    assert "short inputs of up to 255 tokens give the output of the unpatched model, but for rounding" in exact


def test_a_small_model_speaks_where_no_real_one_was_measured() -> None:
    assert all(rise.model.is_small for rise in rises_at("yarn", 16))
    text = unwrapped(str(advise("reference", 4 * K)))
    assert re.search(r"because on a small model \(\d\.\dM parameters\), perplexity per byte at 16x the trained", text)


def test_the_commands_run_and_all_prints_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("extend", "reference", "--target-length", "2k", "--dry-run")
    assert code == 0, err
    assert_short(out)
    assert "All methods, engines and sources: --all" in out
    code, everything, err = run("extend", "reference", "--target-length", "2k", "--dry-run", "--all")
    assert code == 0, err
    assert len(everything.splitlines()) > 100
    assert "reported by YaRN" in unwrapped(everything)


def test_an_unknown_purpose_is_refused() -> None:
    with pytest.raises(MethodError, match="purpose must be one of serve, python, train, got 'sell'"):
        advise("reference", 2 * K, purpose="sell")


@pytest.mark.parametrize(("name", "measure"), [("reference", True), ("reference", False), ("Qwen3", False)])
def test_the_dry_run_of_extend_is_25_lines_of_80_columns(
    name: str, measure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    model = "reference" if name == "reference" else PUBLISHED[name].write(Path())
    options = () if measure else ("--no-measure",)
    length = "2k" if name == "reference" else "128k"
    code, out, err = run("extend", model, "--target-length", length, "--dry-run", *options)
    assert code == 0, err
    assert_short(out)
    assert "take     yarn, to serve it without training" in out
    assert out.rstrip().endswith("Nothing was run, and no weights were read.")
    assert not list(tmp_path.glob("*-131072"))
    if name == "Qwen3":
        assert "published for Qwen3" in unwrapped(out)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--target-length", "256"), "take     the model as it is. No method is needed."),
        (("--target-length", "64k"), "see --purpose train"),
        (("--target-length", "2k", "--data", "short.txt"), "stops    "),
        (("--target-length", "2k", "--purpose", "python"), "rope.patch(model, 'dca', target_length=2048)"),
        (("--target-length", "2k", "--purpose", "train"), "rope-ext finetune reference --method yarn"),
    ],
)
def test_advice_is_given_where_nothing_is_written(
    options: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("def short(): ...", encoding="utf-8")
    code, out, err = run("extend", "reference", *options, "--dry-run")
    assert code == 0, err
    assert_short(out)
    assert line in out
    assert out.rstrip().endswith("Nothing was run, and no weights were read.")
    assert len(set(out.splitlines())) == len(out.splitlines())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_dry_run_of_a_model_of_which_only_the_config_is_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps need a tokenizer and text; the advice does not."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    model = PUBLISHED[name].write(Path())
    length = 2 * PUBLISHED[name].context_length
    code, out, err = run("extend", model, "--target-length", length, "--dry-run", "--gpus", "8")
    assert code == 0, err
    assert_short(out)
    given = advise(model, length)
    assert f"of keys and values for one input of {length:,} tokens" in unwrapped(out)
    assert ("take     nothing" in out) == (not given.recommended)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--purpose", "python"),
            "for advice on --purpose python type: rope-ext extend reference --target-length 2048 --purpose python "
            "--dry-run",
        ),
        (("--purpose", "sell"), "purpose must be one of serve, python, train, got 'sell'"),
        (("--purpose", "sell", "--dry-run"), "purpose must be one of serve, python, train, got 'sell'"),
        (("--all",), "--all belongs to a dry run; add --dry-run"),
        (("--batch", "1"), "--batch belongs to a dry run; add --dry-run"),
    ],
)
def test_what_belongs_to_a_dry_run_is_refused_without_one(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("extend", "reference", "--target-length", "2k", "--yes", *options)
    assert (code, out) == (2, "")
    assert said in err
    assert not list(tmp_path.iterdir())
