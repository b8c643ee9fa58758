from __future__ import annotations

import html
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf import CheckpointError, MethodError, __version__, hub
from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli import console
from rope_ext_hf.cli.app import app
from rope_ext_hf.cli.parameters import parse_parameters
from rope_ext_hf.files.whole import json_text
from rope_ext_hf.hub import load_empty
from rope_ext_hf.methods.grouped import SelfExtend
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.plug_ins import plug_in_names
from rope_ext_hf.reference import path
from rope_ext_hf.runs.chosen_methods import resolve_choice
from tests.support.models import build
from tests.support.texts import ONE_MODULE

runner = CliRunner()


def run(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("text", "tokens"), [("256", 256), ("4k", 4096), ("32K", 32768), ("1M", 1048576), ("1.5k", 1536), (" 8k ", 8192)]
)
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4x", "-1", "0", "nan", "inf", "1.5", "4kk", "9" * 400, "9" * 30 + "M"])
def test_text_that_is_no_length(text: str) -> None:
    with pytest.raises(MethodError, match="not a length in tokens") as caught:
        parse_length(text)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("words", "candidate"), [("rope-ext swe", "sweep"), ("rope-ext convert --veri", "--verify")])
def test_shells_complete_commands_and_options(words: str, candidate: str) -> None:
    """As the script that --install-completion writes asks for them."""
    asked = {"_ROPE_EXT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = runner.invoke(app, [], env=asked, prog_name="rope-ext")
    assert candidate in result.stdout.split()


def test_parameters_keep_their_names() -> None:
    arguments = ["--beta-fast", "16", "--ramp=cycles", "--sticky", "--truncate", "false", "--factors", "1,2.5"]
    assert parse_parameters(arguments) == {
        "beta_fast": 16,
        "ramp": "cycles",
        "sticky": True,
        "truncate": False,
        "factors": (1.0, 2.5),
    }
    with pytest.raises(MethodError, match="unexpected argument 'stray'"):
        parse_parameters(["stray"])


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from rope_ext_hf.cli.app import app\n"
        "for arguments in ([], ['--help'], ['--version'], ['sweep', '--help']):\n"
        "    r = CliRunner().invoke(app, arguments); assert r.exit_code == 0, r.output\n"
        "    assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["convert", "detect"])
def test_a_command_of_the_library_imports_no_other_command(command: str) -> None:
    code = (
        "import sys; from rope_ext_hf.cli.app import main\n"
        "try: main()\n"
        "finally: print(*sorted(name for name in sys.modules if name.startswith('rope_ext_hf.')))"
    )
    done = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert "rope_ext_hf.cli.models" in imported
    assert not [name for name in imported if name.startswith(("rope_ext_hf.tools", "rope_ext_hf.eval"))]


def test_a_misspelt_command_is_compared_with_all_commands() -> None:
    program = [sys.executable, "-m", "rope_ext_hf"]
    for misspelt, meant in (("convrt", "convert"), ("audt", "audit")):
        done = subprocess.run([*program, misspelt], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"Did you mean '{meant}'" in done.stderr


def test_version() -> None:
    assert run("--version") == (0, f"rope-ext {__version__}\n", "")


COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
OWN = [name for name in COMMANDS if name not in plug_in_names("commands")]
"""The commands of the library; the others are those of plug-ins."""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"rope-ext {command}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_80_columns_cuts_nothing_off(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    options = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    for panel in {getattr(option, "rich_help_panel", None) for option in options} - {None}:
        assert f"\N{BOX DRAWINGS LIGHT HORIZONTAL} {panel} \N{BOX DRAWINGS LIGHT HORIZONTAL}" in out


def test_help_has_a_line_of_80_columns_per_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--help")
    listed = [
        line
        for line in out.partition(" Start here ")[2].splitlines()
        if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL}")
    ]
    assert sorted(line.split()[1] for line in listed) == sorted(COMMANDS)  # in panels
    assert [line.split()[1] for line in listed][: len(OWN)] == OWN
    assert all(line.split()[-2].endswith(".") for line in listed)


# What makes an example quick: the last of two values of an option counts.
QUICK = {
    "demo": ["--texts", "3", "--questions", "5"],
    "ppl": ["--max-spans", "1", "--data", ONE_MODULE],
    "sweep": ["--max-spans", "1", "--data", ONE_MODULE],
    "passkey": ["--trials", "1"],
    "lm-eval": ["--limit", "1"],
}


def example_line(command: str) -> str:
    """The example in a command's help, less the program."""
    text = inspect.getdoc(next(c.callback for c in app.registered_commands if c.name == command and c.callback)) or ""
    match = re.search(r"Example: `rope-ext ([^`]*)`", text)
    assert match is not None, text
    return match[1]


def example(command: str) -> list[str]:
    """The arguments of the example."""
    return shlex.split(example_line(command))


@pytest.mark.parametrize("command", [str(command.name) for command in app.registered_commands])
def test_the_example_of_every_command_parses_as_a_shell_hands_it_over(command: str, tmp_path: Path) -> None:
    """In a folder with files that its patterns match."""
    for name in ("books/one.txt", "books/two.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    shell = ["sh", "-c", f"printf '%s\\n' {example_line(command)}"]
    printed = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    group: Any = typer.main.get_command(app)
    with group.make_context("rope-ext", [], resilient_parsing=True) as context:
        group.commands[command].make_context(command, printed.splitlines()[1:], parent=context)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppl", "reference", "--lengths", "256", "--method", ""], "--method names no method"),
        (["describe", "reference", "--method", " , "], "--method names no method"),
        (["patch", "reference", "--method", "", "--out", "new"], "--method names no method"),
        (["ppl", "reference", "--lengths", "256", "--method", "yarn", "--target-length", ""], "not a length in tokens"),
        (["ppl", "reference", "--lengths", "256", "--data", ""], "'' does not name a text"),
    ],
)
def test_an_option_with_nothing_in_it_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert (code, message in err) == (2, True), err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command,
            marks=[pytest.mark.slow] * (command in {*QUICK, "report"})
            + [pytest.mark.thorough] * (command in ("sweep", "passkey", "lm-eval", "report", "demo")),
        )
        for command in OWN
        if command not in ("detect", "run")  # whose examples need files that are not there
    ],
)
@pytest.mark.filterwarnings("default::UserWarning")  # the command line prints them
def test_the_example_of_every_own_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "lm-eval":
        pytest.importorskip("lm_eval")
    arguments = [*example(command), *QUICK.get(command, [])]
    if command == "report":
        assert run(*example("sweep"), *QUICK["sweep"])[0] == 0
        arguments[1] = next(str(folder) for folder in Path(arguments[1]).parent.iterdir() if folder.is_dir())
    code, out, err = run(*arguments)
    assert code == 0, err
    assert out


def test_methods_lists_every_method() -> None:
    from rope_ext_hf import list_methods

    code, out, _ = run("methods", "--json")
    assert code == 0
    assert [row["method"] for row in json.loads(out)] == list(list_methods())
    code, out, _ = run("methods")
    assert code == 0
    assert "dynamic-yarn" in out
    assert "divided by factors[i]." in out  # no markup
    titles = ["the same for inputs of every length", "depend on the length", "Remapping methods", "Others"]
    parts = re.split("|".join(titles), " ".join(out.split()))
    assert len(parts) == 5
    for part, names in zip(
        parts[1:],
        (
            ["NTK-aware", "Position Interpolation", "yarn", "llama3"],
            ["dynamic-ntk", "Also called dynamic ", "dynamic-yarn", "longrope"],
            ["rerope", "self-extend", "dual-chunk-attention"],
            ["default", "learnable"],
        ),
        strict=True,
    ):
        for name in names:
            assert name in part, (name, part)


def test_describe() -> None:
    code, out, _ = run("describe", "reference", "--method", "yarn", "--factor", "8", "--beta-fast", "16", "--json")
    assert code == 0
    said = json.loads(out)
    assert (said["method"], said["params"]["beta_fast"], said["trained_length"]) == ("yarn", 16, 256)
    assert said["extended_length"] == 2048
    code, out, _ = run("describe", "reference")
    assert code == 0
    assert "as loaded" in out


@pytest.mark.slow
def test_patch_writes_a_folder_plain_transformers_loads(tmp_path: Path) -> None:
    out = tmp_path / "patched"
    code, _, err = run("patch", "reference", str(out), "--method", "yarn", "--target-length", "2k")
    assert code == 0, err
    for folders in ([], [str(out), "--out", str(out)]):
        code, _, err = run("patch", "reference", *folders, "--method", "yarn", "--factor", "4")
        assert (code, "rope-ext patch MODEL OUT" in err) == (2, True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rope_ext_hf import Rotary, frequencies

    model = AutoModelForCausalLM.from_pretrained(out)
    expected = frequencies("yarn", Rotary(64, 10000.0, 256), factor=8)
    found = model.model.rotary_emb.inv_freq.double()
    assert ((found - expected.inv_freq).abs() <= 2e-5 * expected.inv_freq).all()
    assert model.config.max_position_embeddings == 2048
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"]
    assert (out / "model.safetensors").read_bytes() == (path() / "model.safetensors").read_bytes()
    code, _, err = run("patch", "reference", "--method", "yarn", "--factor", "8", "--out", str(out))
    assert (code, "exists already" in err) == (2, True)
    # a folder patched before is understood and patched anew, never twice over
    again = tmp_path / "again"
    assert run("patch", str(out), "--method", "linear", "--factor", "4", "--out", str(again))[0] == 0
    assert json.loads((again / "config.json").read_text())["rope_parameters"]["factor"] == 4.0
    # linear: readers multiply it by the factor
    assert json.loads((again / "config.json").read_text())["max_position_embeddings"] == 256


@pytest.mark.slow
def test_ppl_prints_a_table_and_writes_results(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n" * 40, encoding="utf-8")
    common = ["ppl", "reference", "--method", "ntk", "--factor", "4", "--lengths", "256,512", "--data", str(text)]
    arguments = [*common, "--out", str(tmp_path / "out"), "--dtype", "float32"]
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "unpatched" in out
    assert "ntk x4" in out
    (folder,) = (tmp_path / "out").iterdir()
    saved = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    ntk = {"method": "ntk", "factor": 4.0}
    assert [(r["method"], r["length"]) for r in saved["results"]] == [(None, 256), (None, 512), (ntk, 256), (ntk, 512)]
    assert saved["provenance"]["dtype"] == "float32"
    assert saved["provenance"]["versions"]["torch"]
    assert all(r["tokens"] == saved["results"][0]["tokens"] for r in saved["results"])
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    assert shlex.join(["rope-ext", "run", str(folder / "run.yaml")]) in page
    asked = (folder / "run.yaml").read_text(encoding="utf-8").splitlines()
    assert {"run: ppl", "model: reference", "lengths: [256, 512]", "method: [ntk]"} <= set(asked)
    assert "\n".join(asked[1 : asked.index("dtype: float32") + 1]) in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppl", "reference", "--lengths", "256", "--method", "yran"], "Did you mean 'yarn'"),
        (["describe", "reference", "--method", "yarn"], "yarn needs factor"),
        (["ppl", "reference", "--lengths", "256", "--method", "yarn", "--factor", "0.5"], "at least 1, got 0.5"),
        (["ppl", "reference", "--lengths", "256", "--method", "yarn", "--factor", "nan"], "must be a finite number"),
        (["ppl", "reference", "--lengths", "256", "-m", "yarn", "--factor", "2", "--target-length", "1k"], "give one"),
        (["ppl", "reference", "--lengths", "256", "-m", "yarn", "--factor", "2", "--beta-fats", "3"], "'--beta-fast'"),
        (["ppl", "reference", "--lengths", "256", "--factor", "2"], "add --method"),
        (["sweep", "reference", "--lengths", "256", "--beta-fast", "2"], "--beta-fast given without a method"),
        (["ppl", "reference", "--length", "256"], "no such option: --length. Did you mean '--lengths'?"),
        (["sweep", "reference", "--methods", "yarn", "--lengths", "256"], "Did you mean '--method'?"),
        (["detect", "reference", "--revison", "main"], "Did you mean '--revision'?"),
        (["describ", "reference"], "Did you mean 'describe'?"),
        (["ppl", "reference"], "--lengths is missing"),
        (["describe", "reference", "-m", "yarn,ntk", "--factor", "2"], "takes one method"),
        (["ppl", "reference", "--lengths", "9" * 400], "not a length"),
        (
            ["ppl", "reference", "--lengths", "256", "--max-spans", "0"],
            "--max-spans must be a whole number of at least 1",
        ),
        (["describe", "reference", "-m", "yarn", "--factor", "1e308"], "--factor must be"),
        (["describe", "reference", "--over", "original"], "add --method"),
        (["describe", "reference", "-m", "yarn", "--factor", "2", "--over", "orginal"], "'orginal'"),
        (["patch", "reference", "-m", "yarn", "--factor", "2", "--over", "patched", "--out", "x"], "patch"),
        (["describe", "reference", "-m", "yarn", "--factor", "8", "--beta-fast", "[" * 5000], "got '[[["),
        (["describe", "reference", "-m", "yarn", "--factor", "8", "--beta-fast", "9" * 5000], "beta_fast must be"),
        (
            ["describe", "reference", "-m", "longrope", "--short-factor", "1,2", "--long-factor=1,2", "--factor", "4"],
            "needs one number per pair",
        ),
        (["ppl", "reference", "--lengths", "x"], "not a length"),
        (["ppl", "reference", "--lengths", "2M", "--data", ONE_MODULE], "no document has 2097152 tokens"),
        (["ppl", "reference", "--lengths", "256", "--data", "no-such-file.txt"], "no such text file"),
        (["ppl", "reference", "--lengths", "256", "--dtype", "float3"], "unknown dtype"),
        (["ppl", "reference", "--lengths", "256", "--device", "quantum"], "cannot be used here"),
        (["ppl", "./no-such-folder", "--lengths", "256"], "no such model folder"),
        (["ppl", "reference", "--lengths", "256", "--protocol", "blocs"], "Did you mean 'blocks'"),
        (["sweep", "reference", "--lengths", "256", "--processes", "2"], "2 processes were asked for, 1 are running"),
        (
            ["sweep", "reference", "--lengths", "256", "--factor", "2;4"],
            "--factor takes numbers, e.g. 2,4,8",
        ),
        (["sweep", "reference", "--lengths", "256", "--method", "ntk,yran"], "Did you mean 'yarn'"),
        (
            ["passkey", "reference", "--lengths", "256", "--trials", "999999999"],
            "--trials must be a whole number from 1 to 10,000",
        ),
        (["passkey", "reference", "--lengths", "256", "--keys", "999999999"], "from 1 to 1,000"),
        (["passkey", "reference", "--lengths", "256", "--distractors", "999999999"], "from 1 to 1,000"),
        (["detect", "reference", "--text", "/dev/zero"], "no such text file: '/dev/zero'"),
        (["report", "no-such-run"], "not the folder of a run"),
        (["describe", "./no-such-folder"], "no such model folder"),
        (
            ["describe", "reference", "--method", "longrope", "--short-factor", "1,2", "--long-factor", "1,2"],
            "give factor",
        ),
        (["patch", "reference", "--method", "zigzag", "--out", "x"], "unknown method 'zigzag'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    if arguments[0] in ("ppl", "sweep", "passkey"):
        arguments = [*arguments, "--out", str(tmp_path)]
    if arguments[0] == "ppl" and "--data" not in arguments:
        arguments += ["--data", ONE_MODULE]
    check_bad_input(arguments, message)


def check_bad_input(arguments: list[str], message: str) -> None:
    """A command must end with one line on standard error that has the message."""
    code, out, err = run(*arguments)
    assert code == 2, (out, err)
    assert message in err
    assert err.strip().count("\n") == 0
    assert len(err) < 1200
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": [63]}, "must be a list of names, got [63]"),
        ({"architectures": ["LlamaPreTrainedModel"]}, "LlamaPreTrainedModel, which 'architectures'"),
        ({"num_labels": 2**31}, "states 2147483648 as its num_labels"),
    ],
)
def test_one_damaged_value_of_a_config(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """Each was a traceback, or a list of that many entries."""
    check_damaged_config(["describe", str(tmp_path)], change, 2, message)


def check_damaged_config(words: list[str], change: dict[str, object], code: int, message: str) -> None:
    """Write a config with a change into the folder that is the second word; the command must answer in one line."""
    folder = Path(words[1])
    build("llama").config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": None} | change), encoding="utf-8")
    given, _, err = run(*words)
    assert given == code, err
    assert message in err
    assert err.count("\n") == (code > 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("command", ["--help", "describe --help", "--version", "methods"])
def test_results_on_a_full_disk_are_one_error(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rope_ext_hf", *command.split()], stdout=full, stderr=subprocess.PIPE, text=True
        )
        assert done.stderr == "rope-ext: the results could not be printed: No space left on device\n"
        assert done.returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_an_error_on_a_full_disk_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-m", "rope_ext_hf", "nope"], stderr=full).returncode == 2


def test_a_method_with_no_near_name_gets_no_suggestion() -> None:
    _, _, err = run("describe", "reference", "--method", "zigzag")
    assert "unknown method 'zigzag'. Known methods" in err


def test_methods_are_named_once_more_or_in_a_list() -> None:
    choice = MethodChoice(method=["yarn,ntk", " linear"], factor=["2,4", "8"])
    assert choice.method == ("yarn", "ntk", "linear")
    assert choice.factor == (2, 4, 8)


def test_one_factor_extends_methods_with_and_without_a_factor() -> None:
    model = load_empty("reference")
    choice = MethodChoice(method=["yarn,self-extend"], factor=["8"], parameters=parse_parameters(["--window", "64"]))
    yarn, grouped = resolve_choice(choice, model, 512)
    assert yarn.to_dict()["factor"] == 8
    assert isinstance(grouped, SelfExtend)
    assert grouped.window == 64
    # 256 trained tokens, 64 of them in the window: ceil((2048 - 64) / (256 - 64)) keys per group
    assert grouped.group == 11
    with pytest.raises(MethodError, match="windw"):
        resolve_choice(replace(choice, parameters={"windw": 64}), model, 512)


def test_a_parameter_may_stand_before_the_model() -> None:
    code, out, _ = run("describe", "--beta-fast", "16", "reference", "--method", "yarn", "--factor", "8", "--json")
    assert code == 0
    assert json.loads(out)["params"]["beta_fast"] == 16


def test_what_a_method_extends() -> None:
    common = ["describe", "reference", "-m", "yarn", "--target-length", "4k", "--json"]
    factors = {
        options: json.loads(run(*common, *options)[1])["params"]["factor"]
        for options in ((), ("--over", "original"), ("--context-length", "512"))
    }
    assert factors == {(): 16, ("--over", "original"): 16, ("--context-length", "512"): 8}


def test_a_factor_of_a_method_without_one_states_the_extended_length() -> None:
    for options, extended in (((), 2048), (("--context-length", "512"), 4096)):
        code, out, err = run("describe", "reference", "-m", "dca", "--factor", "8", *options, "--json")
        assert code == 0, err
        assert json.loads(out)["extended_length"] == extended


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = ("reference", "--lengths", "64", "--out", str(tmp_path), "--data", __file__)
    with monkeypatch.context() as patched:
        patched.setattr("rope_ext_hf.reading.scorer.TokenScorer.losses_together", interrupt)
        code, _, err = run("sweep", *words)
        assert code == 130
        assert err.splitlines()[-1] == "rope-ext: stopped; the same command continues where it stopped"
    monkeypatch.setattr(hub, "find_config", interrupt)  # before there is a folder, and in a dry run
    for command in ("ppl", "passkey"):
        for more in ((), ("--dry-run",)):
            assert run(command, "reference", *words[1:5], *more)[::2] == (130, "rope-ext: stopped\n")
    assert run("describe", "reference")[::2] == (130, "rope-ext: stopped\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")
def test_sigterm_says_that_the_same_command_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rope_ext_hf", "ppl", "reference", "--lengths", "256,4096", "--max-spans", "all"]
    with subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("run"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        last = process.stderr.read().splitlines()[-1]
    assert (process.returncode, last) == (143, "rope-ext: stopped; the same command continues where it stopped")


@pytest.mark.parametrize("behind", [False, True])
def test_traceback_on_request(behind: bool) -> None:
    command = ("describe", "./no-such-folder")
    code, _, err = run(*command, "--traceback") if behind else run("--traceback", *command)
    assert code == 2
    assert "Traceback" in err
    assert err.strip().splitlines()[-1] == "rope-ext: no such model folder: './no-such-folder'"


def test_json_has_no_infinity() -> None:
    value = {"infinite": [math.inf, -math.inf, math.nan], "text": "Infinity", "tuple": (1.5,), "path": Path("a")}
    assert json.loads(json_text(value)) == {
        "infinite": [None, None, None],
        "text": "Infinity",
        "tuple": [1.5],
        "path": "a",
    }


def test_a_terminal_gets_no_control_characters_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_text("a\x1b[2Jb\x9bc\td\n\N{GREEK SMALL LETTER MU}")
    console.print_error("bad \x1b]0;title\x07 name")
    console.print_note("run", "\rfolder")
    out, err = capsys.readouterr()
    assert out == "a\\x1b[2Jb\\x9bc\td\n\N{GREEK SMALL LETTER MU}\n"
    assert err == "rope-ext: bad \\x1b]0;title\\x07 name\nrun      \\rfolder\n"


def test_tables_take_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
    from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns
    from rope_ext_hf.reading.spans import Setting
    from rope_ext_hf.runs.run import Run

    setting = Setting("matched", 128, 256, False, 0)
    method = {"method": "\x1b[31m[/red]"}
    result = PerplexityRuns().result(method, setting, (256,), [DocumentLoss("a", 1.0, 1, 1, 1)])
    settings = {"kind": "perplexity", "context_length": 256, "over": "own", "loaded": None, "data": "text"}
    table = Run(None, settings, [result], PerplexityRuns()).table()
    assert table is not None
    console.print_table(table)
    out = capsys.readouterr().out
    assert "[/red]" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_memory_is_checked_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rope_ext_hf.reading.cost import memory as reading_memory

    monkeypatch.setattr(reading_memory, "available", lambda device: 800_000_000)
    monkeypatch.setattr(hub, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    (text := tmp_path / "text.txt").write_text("x" * 530_000, encoding="utf-8")
    options = ["--dtype", "float32", "--data", str(text), "--out", str(tmp_path)]
    code, _, err = run("ppl", "reference", "--lengths", "512k", *options)
    assert code == 2
    # keys and values of one layer: 2 x 2 heads x 64 dims x 512k tokens x 4 bytes
    assert "spans of 524,288 tokens need" in err
    assert "536.9 MB keys and values" in err
    assert "shorter lengths: up to" in err
    assert "--device-map" not in err  # one device is all there is


@pytest.mark.slow
def test_documents_that_are_too_short_are_counted_before_anything_is_read(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, count in (("long", 1000), ("one", 20), ("two", 30)):
        (texts / f"{name}.txt").write_text("x y " * count, encoding="utf-8")
    code, _, err = run("ppl", "reference", "--lengths", "256,512", "--data", str(texts), "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert err.index("2 documents are too short and left out") < err.index("at most 64 per length") < err.index("run ")


@pytest.mark.slow
def test_a_table_says_what_its_length_is_the_length_of(tmp_path: Path) -> None:
    """Of a folder with YaRN, over the model without it."""
    rope.patch(hub.load_model("reference"), "yarn", factor=4.0).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
    del config["rope_ext_hf"]  # as somebody else would have trained it
    (tmp_path / "m" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(path() / "tokenizer_config.json", tmp_path / "m")
    options = ["--lengths", "2,256", "--targets", "1", "--max-spans", "1", "--data", ONE_MODULE]
    options += ["-m", "ntk", "--factor", "4", "--out", str(tmp_path / "out")]
    for over, words in (("original", "256 tokens without its own scaling"), ("own", "1,024 tokens")):
        code, out, err = run("ppl", str(tmp_path / "m"), *options, "--over", over)
        assert code == 0, err
        assert f"the model is for {words}" in " ".join(out.split())
    assert "under 0.01x" in out
    assert "0.25x" in out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ppl", "sweep", "passkey"])
def test_what_it_will_take_is_said_first(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise CheckpointError("weights are read now")

    monkeypatch.setattr(hub, "from_pretrained", read)
    text = ONE_MODULE
    options = ["--trials", "2", "--haystack", text] if command == "passkey" else ["--max-spans", "4", "--data", text]
    code, _, err = run(command, "reference", "--lengths", "256,512", *options, "--out", str(tmp_path))
    assert code == 2
    reads, *_, last = err.strip().splitlines()
    assert re.fullmatch(r"reads    [\d,]+k? tokens, unpatched( and with each of 7 methods)?: about .+", reads)
    assert "needs" not in err  # where memory is ample
    assert "weights are read now" in last


@pytest.mark.slow
def test_memory_is_said_where_it_is_not_ample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise CheckpointError("weights are read now")

    monkeypatch.setattr(hub, "from_pretrained", read)
    monkeypatch.setattr("rope_ext_hf.reading.cost.memory.available", lambda device: 40_000_000)
    options = ["--max-spans", "4", "--data", ONE_MODULE, "--out", str(tmp_path)]
    code, _, err = run("ppl", "reference", "--lengths", "256,512", *options)
    assert code == 2
    needs = next(line for line in err.splitlines() if line.startswith("needs"))
    # keys and values of one layer, and the hidden states of 512 tokens twice
    cache = "262.1 kB keys and values, 393.2 kB hidden states"
    assert re.match(rf"needs    [\d.]+ MB: 7.5 MB weights, {cache}, [\d.]+ MB activations", needs)


@pytest.mark.slow
def test_memory_is_said_again_where_texts_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        return "of this test"

    monkeypatch.setattr("rope_ext_hf.reading.scorer.try_in_chunks", refuse)
    monkeypatch.setattr("rope_ext_hf.reading.cost.memory.available", lambda device: 40_000_000)
    options = ["--max-spans", "1", "--targets", "128", "--data", ONE_MODULE, "--out", str(tmp_path)]
    code, _, err = run("ppl", "reference", "--lengths", "256,512", *options)
    assert code == 0
    _, again = (line for line in err.splitlines() if line.startswith("needs"))
    # 3.8 million weights and 4 times the widest activation of 512 tokens in bfloat16, and the logits of 128 tokens
    assert again.startswith("needs    11.9 MB: 7.5 MB weights, 4.2 MB activations, 198.9 kB logits")
    assert "because texts are" in err


@pytest.mark.thorough
@pytest.mark.slow
def test_warnings_are_one_line(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=384, sliding_window=64, max_position_embeddings=256, **sizes, **heads)
    MistralForCausalLM(config).save_pretrained(tmp_path / "narrow")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "class": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "narrow")
    common = ["ppl", str(tmp_path / "narrow"), "--lengths", "256", "--max-spans", "1", "--out", str(tmp_path)]
    common += ["--data", ONE_MODULE]
    done = subprocess.run([sys.executable, "-m", "rope_ext_hf", *common], capture_output=True, text=True, check=True)
    said = "warning  3 of 3 layers attend to the last 64 tokens only; spans of 256 tokens are longer"
    assert said in done.stderr.splitlines()


def test_a_model_without_rope_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32).save_pretrained(tmp_path)
    code, _, err = run("describe", str(tmp_path))
    assert code == 2
    assert "gpt2" in err
    assert "no rotary position embedding" in err


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_with_exit_code_1(tmp_path: Path) -> None:
    import math
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(path(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code, out, err = run("ppl", str(folder), "--lengths", "256", *QUICK["ppl"], "--out", str(tmp_path / "out"))
    assert code == 1
    assert "not finite" in out
    assert "the loss is not finite: unpatched at 256 in" in err
    (written,) = (tmp_path / "out").iterdir()
    assert json.loads((written / "results.json").read_text())["results"][0]["loss"] is None


def test_an_unquoted_pattern_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app(["ppl", "reference", "--lengths", "256", "--data", "books/1.txt", "books/2.txt"])
    assert stopped.value.code == 2
    assert "quote a pattern, --data 'texts/*.txt'" in capsys.readouterr().err


@pytest.mark.slow
def test_prints_of_compiled_code_are_kept_out_of_the_results() -> None:
    code = (
        "import os; from rope_ext_hf.cli import app\n"
        "@app.app.command(cls=app._Command)\n"
        "def noisy():\n"
        "    os.write(1, b'a remark\\n'); app.print_text('[]')\n"
        "app.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "noisy"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "a remark\n")


def test_a_conversion_says_each_thing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("convert", "reference", "other", "--to", "interleaved")
    assert code == 0
    assert (out + err).count("holds weights in the interleaved pairing") == 1
