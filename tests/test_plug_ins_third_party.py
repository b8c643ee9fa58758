"""A package of a third party that adds a method, a command, a kind of run, and a command that cannot be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ENTRY_POINTS = """
[rope_ext_hf.methods]
half-speed = guest_of_rope:HalfSpeed

[rope_ext_hf.commands]
greet = guest_of_rope:greet
broken = guest_of_rope_broken:command

[rope_ext_hf.run_kinds]
pages = guest_of_rope:PageRuns
"""
PACKAGE = '''
from dataclasses import dataclass, replace

from rope_ext_hf.cli.console import print_text
from rope_ext_hf.cli.options import command
from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns
from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.runs.kinds import register_run_kind


@register_method("half-speed")
@dataclass(frozen=True, kw_only=True)
class HalfSpeed(RopeMethod):
    """Every pair turns half as fast."""

    def compute(self, rotary, length):
        return rotary.inv_freq(length.device) / 2, 1.0


@command("Guests")
def greet() -> None:
    """Greet whoever types it.

    Example: `rope-ext greet`
    """
    print_text("good morning")


class Pages(PerplexityMeasurement):
    kind = "pages"


@register_run_kind
class PageRuns(PerplexityRuns):
    """Perplexity of pages."""

    name = "pages"
    item = "page"

    def plan(self, question, model, tokenizer, **settings):
        plan = super().plan(question, model, tokenizer, **settings)
        return replace(plan, measurement=Pages(plan.measurement.plan))


class PageOptions(Perplexity):
    kind = "pages"
'''
IN_PYTHON = """
import json
import rope_ext_hf as rope
from guest_of_rope import PageOptions
from rope_ext_hf.eval import measure

model = rope.from_pretrained("reference")
plain = rope.describe(model).wavelengths
patched = rope.describe(rope.patch(model, "half_speed")).wavelengths
rope.unpatch(model)
run = measure(model, PageOptions(lengths=[64], data=["Mice pay in kind. " * 9]), methods="half-speed", out="runs")
listed = "half-speed" in rope.list_methods()
print(json.dumps([plain, patched, listed, str(run.folder), [result.perplexity for result in run.results]]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of installed packages with that of the third party."""
    folder: Path = tmp_path_factory.mktemp("site")
    (folder / "guest_of_rope.py").write_text(PACKAGE, encoding="utf-8")
    (folder / "guest_of_rope_broken.py").write_text("raise OSError('no such\\nlibrary')\n", encoding="utf-8")
    metadata = folder / "guest_of_rope-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest-of-rope\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def python(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python in a folder with the package installed; it must end without an error."""
    folder = tmp_path_factory.mktemp("work")
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(root)]), "COLUMNS": "80"}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def in_python(python: Callable[..., Any]) -> Any:
    return json.loads(python("-c", IN_PYTHON).stdout.splitlines()[-1])


BROKEN = "rope-ext: the command 'broken', which the package guest-of-rope adds, cannot be loaded: no such library\n"


def test_the_method_patches_by_name_in_python(in_python: Any) -> None:
    plain, patched, listed, _, _ = in_python
    assert patched == pytest.approx([2 * each for each in plain])
    assert listed


def test_the_method_patches_on_the_command_line(in_python: Any, python: Callable[..., Any]) -> None:
    done = python("-m", "rope_ext_hf", "describe", "reference", "--method", "half-speed", "--json")
    assert json.loads(done.stdout)["wavelengths"] == pytest.approx(in_python[1])
    assert done.stderr == ""  # a command of the library loads no commands of plug-ins, and no broken one


def test_the_method_is_listed(python: Callable[..., Any]) -> None:
    rows = json.loads(python("-m", "rope_ext_hf", "methods", "--json").stdout)
    assert "half-speed" in [row["method"] for row in rows]


def test_help_has_the_command_and_names_the_broken_one(python: Callable[..., Any]) -> None:
    done = python("-m", "rope_ext_hf", "--help")
    assert " Guests " in done.stdout
    assert "greet" in done.stdout
    assert "Greet whoever types it." in done.stdout
    assert "broken" not in done.stdout
    assert done.stderr == BROKEN


def test_the_command_runs(python: Callable[..., Any]) -> None:
    done = python("-m", "rope_ext_hf", "greet")
    assert (done.stdout, done.stderr) == ("good morning\n", BROKEN)


def test_report_shows_what_the_kind_of_run_measured(in_python: Any, python: Callable[..., Any]) -> None:
    """The process that reports has not imported the package."""
    _, _, _, folder, perplexities = in_python
    assert len(perplexities) == 2
    assert perplexities[0] != pytest.approx(perplexities[1])
    assert "-pages-" in folder
    done = python("-m", "rope_ext_hf", "report", folder)
    assert "half-speed" in done.stdout
    assert all(f"{each:.2f}" in done.stdout for each in perplexities)
