"""The library without its tool box: a copy of the repository in which no file and no entry point of it is left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.texts import ONE_MODULE
from tests.test_architecture import ROOT, of_the_whole

pytestmark = pytest.mark.slow
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "__pycache__", ".*_cache", "*.egg-info")
COMMANDS = [
    "demo",
    "methods",
    "describe",
    "patch",
    "convert",
    "detect",
    "ppl",
    "sweep",
    "passkey",
    "report",
    "run",
    "lm-eval",
]
SAMPLE = ("tests/methods", "tests/rotary", "tests/runs")
TEXT = ("--data", ONE_MODULE, "--max-spans", "1")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("alone") / "copy"
    shutil.copytree(ROOT, made, symlinks=True, ignore=LEFT_OUT)
    shutil.rmtree(made / "rope_ext_hf" / "tools")
    shutil.rmtree(made / "tests" / "tools")
    project = (made / "pyproject.toml").read_text(encoding="utf-8")
    kept = [line for line in project.splitlines() if not re.match(r'[\w-]+ = "rope_ext_hf\.tools\.', line)]
    assert len(kept) < len(project.splitlines()) - 10
    (made / "pyproject.toml").write_text("\n".join(kept) + "\n", encoding="utf-8")
    python(made, "setup.py", "-q", "egg_info")
    return made


def python(copy: Path, *words: object, code: int = 0, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python on the package of the copy; it must end with this exit code."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder or copy, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def command(copy: Path, folder: Path, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    return python(copy, "-m", "rope_ext_hf", *words, code=code, folder=folder)


def test_help_shows_the_commands_of_the_library_alone(copy: Path, tmp_path: Path) -> None:
    done = command(copy, tmp_path, "--help")
    listed = re.findall(r"^\N{BOX DRAWINGS LIGHT VERTICAL} ([a-z]\S*) ", done.stdout, re.MULTILINE)
    assert (listed, done.stderr) == (COMMANDS, "")


@pytest.mark.parametrize(
    "words",
    [
        ("ppl", "reference", "--lengths", "64", *TEXT),
        ("passkey", "reference", "--lengths", "256", "--trials", "1", "--task", "key-value", "--depths", "0.5"),
        ("describe", "reference", "--method", "yarn", "--factor", "4"),
        ("convert", "reference", "other", "--to", "interleaved"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.sampled(2)
def test_a_command_works(words: tuple[str, ...], copy: Path, tmp_path: Path) -> None:
    assert command(copy, tmp_path, *words).stdout


def test_a_folder_that_patch_writes_loads_with_transformers_alone(copy: Path, tmp_path: Path) -> None:
    command(copy, tmp_path, "patch", "reference", "--method", "yarn", "--factor", "4", "--out", "new")
    load = (
        "import sys; sys.modules['rope_ext_hf'] = None; from transformers import AutoModelForCausalLM\n"
        "print(AutoModelForCausalLM.from_pretrained('new').config.rope_parameters['rope_type'])"
    )
    assert python(copy, "-c", load, folder=tmp_path).stdout == "yarn\n"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--keys-by", "reference"), "keys_by needs rope_ext_hf.tools, a part of this package that is not installed"),
        (("--store-states", "model"), "store_states needs rope_ext_hf.tools, a part of this package that is not"),
        (("--engine", "vllm"), "no package with engines for --engine is installed, got 'vllm'"),
    ],
    ids=lambda value: value[0],
)
def test_an_option_of_the_tool_box_is_refused_in_one_line(
    option: tuple[str, str], said: str, copy: Path, tmp_path: Path
) -> None:
    done = command(copy, tmp_path, "ppl", "reference", "--lengths", "64", *TEXT, *option, code=2)
    assert done.stderr.splitlines()[-1].startswith(f"rope-ext: {said}")
    assert "Traceback" not in done.stderr


def test_a_gguf_file_is_refused_in_one_line(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = "a .gguf file needs rope_ext_hf.tools, a part of this package that is not installed; install the package"
    lengths, new = ("--lengths", "64"), ("new", "--to", "hf")
    for words in (("ppl", "model.gguf", *lengths), ("describe", "model.gguf"), ("convert", "model.gguf", *new)):
        assert command(copy, tmp_path, *words, code=2).stderr.startswith(f"rope-ext: {said}")
    done = python(copy, "-c", "import rope_ext_hf; rope_ext_hf.from_pretrained('model.gguf')", folder=tmp_path, code=1)
    assert f"MethodError: {said}" in done.stderr


def test_a_stored_run_is_not_compared_with(copy: Path, tmp_path: Path) -> None:
    done = command(copy, tmp_path, "ppl", "reference", "--against", "runs", code=2)
    assert done.stderr.startswith("rope-ext: --against needs rope_ext_hf.tools, a part of this package that is not")
    done = python(copy, "-c", "from rope_ext_hf.eval import perplexity, divergence", folder=tmp_path, code=1)
    assert "\nImportError: rope_ext_hf.eval.divergence needs rope_ext_hf.tools, " in done.stderr


def of_the_library(copy: Path) -> list[str]:
    """The files of the tests of the library."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in files if not of_the_whole(path)]


def test_every_test_of_the_library_is_collected(copy: Path) -> None:
    options = ("--collect-only", "-q", "-p", "no:cacheprovider", "--strict-markers")
    done = python(copy, "-m", "pytest", *options, *of_the_library(copy))
    assert "error" not in done.stdout.splitlines()[-1]
    assert int(re.findall(r"(\d+)(?:/\d+)? tests collected", done.stdout)[0]) > 3000


@pytest.mark.thorough
def test_a_sample_of_the_tests_of_the_library_passes(copy: Path) -> None:
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
    assert " passed" in python(copy, "-m", "pytest", *options, *SAMPLE).stdout
