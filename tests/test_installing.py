from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf import installing
from rope_ext_hf.installing import NAME, install_command

ROOT = Path(__file__).parent.parent


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the package an installed copy, outside a checkout, with an installer's record of its origin."""

    def install(noted: dict[str, Any] | str | None) -> None:
        folder = tmp_path / "rope_ext_hf-9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 9\n", encoding="utf-8")
        if noted is not None:
            text = noted if isinstance(noted, str) else json.dumps(noted)
            (folder / "direct_url.json").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(installing, "__file__", str(tmp_path / "rope_ext_hf" / "installing.py"))

    return install


GIT = {"url": "https://example.org/rope", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}


@pytest.mark.parametrize(
    ("noted", "requirement"),
    [
        (None, "rope-ext-hf[eval]"),  # from an index
        (GIT, "rope-ext-hf[eval] @ git+https://example.org/rope@abc123"),
        ({"url": "file:///home/me/a%20b", "dir_info": {}}, "/home/me/a b[eval]"),
        (
            {"url": "https://example.org/rope_ext_hf-9.whl", "archive_info": {}},
            "rope-ext-hf[eval] @ https://example.org/rope_ext_hf-9.whl",
        ),
        ("damaged", "CHECKOUT[eval]"),
    ],
)
def test_an_installed_copy(noted: Any, requirement: str, origin: Any) -> None:
    origin(noted)
    assert shlex.split(install_command("eval")) == ["pip", "install", requirement]


def test_files_that_were_never_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    monkeypatch.setattr(installing, "__file__", str(tmp_path / "rope_ext_hf" / "installing.py"))
    assert install_command("gguf") == "pip install 'CHECKOUT[gguf]'"


def test_a_checkout() -> None:
    *command, requirement = shlex.split(install_command("gguf", "--no-deps"))
    assert command[:3] == ["pip", "install", "--no-deps"]
    assert requirement == f"{ROOT}[gguf]"


def test_extras_in_messages_exist_and_no_source_names_the_package_of_an_index() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = set()
    for folder in ("rope_ext_hf", "patches", "eval", "docs", "examples"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix not in (".py", ".md", ".ipynb") or file.name == "installing.py":
                continue
            text = file.read_text(encoding="utf-8")
            named |= set(re.findall(r"install_command\('(\w+)'", text))
            assert not re.search(r"pip install[^\n]* '?rope[-_]ext[-_]hf(?!\S* @ )", text), file
    assert named
    assert named <= extras.keys()
