"""The files that install, and the names that are exported."""

from __future__ import annotations

import ast
import email
import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.tools import modules

ROOT = Path(__file__).parent.parent


def test_exports() -> None:
    for name in rope.__all__:
        value = getattr(rope, name)
        assert name == "__version__" or inspect.getdoc(value), f"{name} has no docstring"
    assert dir(rope) == rope.__all__
    with pytest.raises(AttributeError, match="no attribute 'pacth'"):
        rope.pacth  # noqa: B018


def test_type_checkers_see_the_names_that_there_are() -> None:
    """Type checkers read imports only, so the block under TYPE_CHECKING lists the names as well."""
    tree = ast.parse(Path(rope.__file__).read_text(encoding="utf-8"))
    seen = [
        (f"{node.module}.{alias.name}", alias.asname)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    objects = {name: path for path, name in seen if name is not None}
    assert sorted([*objects, "__version__"]) == rope.__all__
    for name, path in objects.items():
        module, _, own_name = path.rpartition(".")
        assert own_name == name
        assert getattr(rope, name) is getattr(import_module(module), name)


def test_modules_for_other_models_stand_together() -> None:
    assert modules is import_module("rope_ext_hf.tools.modules")
    assert modules.NTKAwareRoPE is rope.NTKAwareRoPE
    for name in modules.__all__:
        assert inspect.getdoc(getattr(modules, name)), f"{name} has no docstring"


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (
            "patch",
            "(model, method, factor=None, *, target_length=None, over='own', context_length=None, layers=None, "
            "native=False, **params)",
        ),
        ("unpatch", "(model)"),
        ("patched", "(model, method, factor=None, **kwargs)"),
        ("describe", "(model)"),
        ("list_methods", "()"),
        ("frequencies", "(method, rotary, *, length=None, **params)"),
        ("fixed_length", "(model, length)"),
        (
            "from_pretrained",
            "(path, method=None, factor=None, *, auto_class=None, target_length=None, over='own', context_length=None, "
            "layers=None, native=False, **kwargs)",
        ),
        ("apply_rotary_pos_emb", "(x, cos, sin)"),
        ("NTKAwareRoPE", "(head_dim, max_seq_len, base=10000, k=1, dynamic=False, dtype=torch.float32, device=None)"),
    ],
)
def test_signatures(function: str, signature: str) -> None:
    found = inspect.signature(getattr(rope, function))
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)) == signature


@pytest.mark.slow
def test_importing_is_free_and_changes_nothing() -> None:
    code = (
        "import sys, rope_ext_hf; heavy = {'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules); "
        "assert not heavy, heavy; import torch; rope_ext_hf.Rotary, rope_ext_hf.RotaryEmbedding, rope_ext_hf.patch; "
        "assert 'transformers' not in sys.modules; "
        "assert 'rope_ext_hf.tools.modules' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_under_one_name(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    for link in ("patches", "eval"):  # the build must not depend on the symlinks
        (tree / link).unlink()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            str(tree),
        ],
        check=True,
        env=os.environ | {"PIP_NO_INDEX": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        everything = archive.namelist()
        (metadata_file,) = (name for name in everything if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
    names = {name for name in everything if ".dist-info/" not in name}
    expected = {file.relative_to(tree).as_posix() for file in (tree / "rope_ext_hf").rglob("*") if file.is_file()}
    assert names == expected
    assert {
        "rope_ext_hf/py.typed",
        "rope_ext_hf/models/families.toml",
        "rope_ext_hf/tools/advice/measured.json",
    } < names
    assert "rope_ext_hf/reference/model.safetensors" in names

    readme = metadata.get_payload()  # on a package index's page, where no relative link leads anywhere
    assert isinstance(readme, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert readme.lstrip().startswith("# rope_ext_hf")
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert len(targets) > 10
    assert all(target.startswith("https://") for target in targets)


def test_the_installed_script_is_the_command_line() -> None:
    script = Path(sys.executable).with_name("rope-ext")
    done = subprocess.run([script, "--version"], check=True, capture_output=True, text=True)
    assert rope.__version__ in done.stdout
