"""Options that are wrong whatever the model is are refused before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.options.method_choice import shipped_names

WRONG: dict[tuple[str, ...], str] = {
    ("ppl", "reference", "--lengths", "256", "--data", "nosuch.txt"): "no such text file, folder or pattern",
    ("ppl", "reference", "--lengths", "256", "--data", "stdlib?joined=1"): "Did you mean 'join'",
    ("ppl", "reference", "--lengths", "256", "--protocol", "mached"): "Did you mean 'matched'",
    ("sweep", "reference", "--lengths", "256", "--method", "yan"): "Did you mean 'yarn'",
    ("patch", "reference", "--method", "string", "--out", "x"): "was removed; the last version",
    ("passkey", "reference", "--lengths", "256", "--haystack", "nosuch/*.txt"): "no such text file, folder or pattern",
}
CODE = """
import json, sys
from typer.testing import CliRunner
from rope_ext_hf.cli.app import app
said = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
heavy = [name for name in ("torch", "transformers", "scipy", "datasets") if name in sys.modules]
print(json.dumps([heavy, [[each.exit_code, each.stderr] for each in said]]))
"""


@pytest.mark.slow
def test_wrong_options_are_refused_before_heavy_imports() -> None:
    check_refusals(WRONG)


def check_refusals(wrong: Mapping[tuple[str, ...], str]) -> None:
    """Each command must be refused in one line, with its message, by a process that imports no heavy library."""
    words = json.dumps(list(wrong))
    done = subprocess.run([sys.executable, "-c", CODE, words], capture_output=True, text=True, check=True)
    heavy, outcomes = json.loads(done.stdout)
    assert heavy == []
    for (code, error), message in zip(outcomes, wrong.values(), strict=True):
        assert code == 2
        assert message in error
        assert len(error.splitlines()) == 1


def test_the_names_in_the_files_are_those_of_the_registry() -> None:
    own = {name: cls for name, cls in list_methods().items() if cls.__module__.startswith("rope_ext_hf.methods.")}
    assert sorted(shipped_names()) == sorted([*own, *(alias for cls in own.values() for alias in cls.aliases)])
