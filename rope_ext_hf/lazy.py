"""Names of a package that are imported only when first used; `if TYPE_CHECKING` lists them for type checkers."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


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
