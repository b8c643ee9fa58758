"""Names of a package that are imported only when first used; `if TYPE_CHECKING` lists them for type checkers."""

from __future__ import annotations

import ast
import json
import pkgutil
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def lazy_names(package: str, *others: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package whose names are imported only when first used.

    Args:
        package: the name of the package; its `__init__.py` imports each name under `if TYPE_CHECKING`, as in `from
            MODULE import NAME as NAME`.
        *others: further names, which the `__init__.py` defines itself.
    """
    sources = _lazy_imports(package)

    def get(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = sources[name]
        if module == package:  # a submodule
            value = import_module(f"{module}.{attribute}")
        else:
            value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted({*sources, *others})
    return names, get, lambda: names


def _lazy_imports(package: str) -> dict[str, tuple[str, str]]:
    """Return the module and the attribute for each name that a package's `__init__.py` imports under an `if`."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    imports = {}
    for block in ast.parse(source).body:
        if not isinstance(block, ast.If):
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom):
                imports.update({alias.asname: (str(node.module), alias.name) for alias in node.names if alias.asname})
    return imports


# --- names of packages to install ---------------------------------------------------------------------------------


NAME = "rope-ext-hf"


def install_command(extra: str = "", *options: str) -> str:
    """Return the pip command that installs this package with an extra and with further options of pip."""
    return " ".join(["pip install", *options, *_source(f"[{extra}]" if extra else "")])


def _source(extra: str) -> list[str]:
    """Return the arguments that make pip install this package, with an extra, from where pip got it (see PEP 610)."""
    origin, from_index = {}, False
    # Without a distribution these are bare files; the record may be damaged.
    with suppress(metadata.PackageNotFoundError, ValueError):
        record = metadata.distribution(NAME).read_text("direct_url.json")
        origin = json.loads(record or "{}")
        from_index = not record  # pip writes no record for a package from an index
    url = origin.get("url", "")
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():  # installed as editable, or on the path without being installed
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*editable, shlex.quote(f"{checkout}{extra}")]
    if "dir_info" in origin:
        return [shlex.quote(url2pathname(urlsplit(url).path) + extra)]
    if version := origin.get("vcs_info"):
        return [shlex.quote(f"{NAME}{extra} @ {version['vcs']}+{url}@{version['commit_id']}")]
    if url:
        return [shlex.quote(f"{NAME}{extra} @ {url}")]
    return [shlex.quote(NAME + extra if from_index else f"CHECKOUT{extra}")]
