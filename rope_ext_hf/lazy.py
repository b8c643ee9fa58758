"""Names of a package that load when first used, each stated once: by an import that type checkers alone run."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, *others: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package: the imports under its `if TYPE_CHECKING`, and `others`."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    modules = {
        alias.asname: (str(node.module), alias.name)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = modules[name]
        value = (
            import_module(f"{module}.{attribute}") if module == package else getattr(import_module(module), attribute)
        )
        setattr(sys.modules[package], name, value)
        return value

    names = sorted({*modules, *others})
    return names, get, lambda: names
