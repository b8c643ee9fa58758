"""Methods and commands that another package adds by entry points, as docs/own-method.md shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rope_ext_hf import plug_ins
from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.methods import registry
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.runs import kinds

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
TITLES = {"my_methods": "class HalfLinear", "my_commands": "def longest_wavelength", "my_runs": "class PageRuns"}
"""What the code of each module of the page's package holds."""


def install(folder: Path, pyproject: str, **modules: str) -> Path:
    """Write the files of an installed package: its modules, its name and its entry points."""
    project = tomllib.loads(pyproject)["project"]
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    module = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    module.mkdir(parents=True)
    (module / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (module / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    return folder


@pytest.fixture
def page_package(tmp_path: Path) -> Path:
    """Return a folder in which the package of the page is installed."""
    (pyproject,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    code = {name: next(block for block in blocks if title in block) for name, title in TITLES.items()}
    code["my_methods"] = code["my_methods"].partition("\nmodel = ")[0]  # the class alone, as the page says
    assert tomllib.loads(pyproject)["tool"]["setuptools"]["py-modules"] == list(TITLES)
    return install(tmp_path, pyproject, **code)


@pytest.fixture
def on_path(page_package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the package of the page on the path of this process, and take it out of every registry after the test."""
    registry.list_methods()  # so that those of this package stay when the registries of the test go
    for name in plug_ins.plug_in_names("run_kinds"):
        kinds.run_kind(name)
    monkeypatch.syspath_prepend(page_package)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    plug_ins._entries.cache_clear()
    registry._load_plug_ins.cache_clear()
    yield page_package
    plug_ins._entries.cache_clear()
    registry._load_plug_ins.cache_clear()
    for name in TITLES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("on_path")
def test_methods_and_kinds_of_runs_of_another_package_are_known_by_name() -> None:
    rotary = Rotary(8, 1e4, 4096)
    assert registry.frequencies("half_linear", rotary, factor=4).inv_freq.tolist() == [1.0, 0.1, 0.01 / 4, 0.001 / 4]
    assert list(registry.list_methods())[-1] == "half-linear"  # behind those of this package
    assert kinds.run_kind("pages").item == "page"


def test_a_package_that_cannot_be_loaded_is_named(on_path: Path) -> None:
    (on_path / "my_methods.py").write_text("import no_such_library\n", encoding="utf-8")
    with pytest.raises(RopeExtError, match=r"'half-linear', which the package my-methods adds, .*no_such_library"):
        plug_ins.plug_in("methods", "half-linear")
    with pytest.warns(UserWarning, match="my-methods"):
        known = registry.list_methods()
    assert {"yarn", "alibi"} <= known.keys()
    assert "half-linear" not in known


@pytest.mark.slow
@pytest.mark.thorough
def test_commands_of_another_package_are_commands(page_package: Path) -> None:
    def rope_ext(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(page_package), str(ROOT)))}
        command = [sys.executable, "-m", "rope_ext_hf", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    output = rope_ext("longest-wavelength", "reference")
    described = json.loads(rope_ext("describe", "reference", "--json").stdout)
    assert output.stdout == f"{max(described['wavelengths']):,.0f} tokens\n"
    assert "My methods" in rope_ext("--help").stdout
    with_method = rope_ext("describe", "reference", "--method", "half-linear", "--factor", "4", "--json")
    assert json.loads(with_method.stdout)["method"] == "half-linear"
    (page_package / "my_commands.py").write_text("import no_such_library\n", encoding="utf-8")
    broken = rope_ext("methods")
    assert broken.returncode == 0
    assert "my-methods" in broken.stderr
    assert "yarn" in broken.stdout


@pytest.mark.parametrize("group", ["commands", "run_kinds", "methods", "parts"])
def test_a_checkout_that_is_not_installed_has_the_same_plug_ins(group: str) -> None:
    entries = {entry.name: entry.value for entry in plug_ins._of_checkout(group)}
    assert entries
    assert entries == {
        name: entry.value
        for name, entry in plug_ins._entries(group).items()
        if entry.dist is not None and entry.dist.name == "rope-ext-hf"
    }


WITHOUT_TOOLS = """
import sys
import rope_ext_hf as rope
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
for method in ("yarn", "dynamic-ntk", "rerope"):
    model = rope.patch(LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **sizes)), method, factor=4)
    model.save_pretrained(method)
    assert rope.from_pretrained(method).config.rope_ext_hf["method"]["method"] == method
    rope.unpatch(model).save_pretrained("plain")
    rope.from_pretrained("plain", "linear", factor=2, dtype="bfloat16").save_pretrained("linear")
rope.convert_checkpoint("plain", "interleaved", to="interleaved")
print(sorted(name for name in sys.modules if name.startswith("rope_ext_hf.tools")))
"""


def test_patching_saving_loading_and_converting_import_no_tool(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", WITHOUT_TOOLS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
