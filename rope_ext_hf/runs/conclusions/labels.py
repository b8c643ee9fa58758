"""Names of methods: keys for dicts and journals, and labels for tables, plots and sentences.

`MethodResult`, the base class of all results, is here because it contains the key of its method.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rope_ext_hf.errors import MethodError, printable, short
from rope_ext_hf.methods.registry import method_from_dict

__all__ = ["Method", "MethodResult", "label", "method_key"]

Method = dict[str, Any] | None
"""The method of a result: its `RopeMethod.to_dict`, or None for the model as loaded."""


@dataclass(frozen=True)
class MethodResult:
    """Base class for the result of one method at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        length: context length in tokens.
    """

    method: Method
    length: int

    @cached_property
    def key(self) -> str:
        """The key (a JSON text) that identifies the method of this result."""
        return method_key(self.method)

    @property
    def complete(self) -> bool:
        """True if the result has every value that its kind measures now; results of earlier versions may lack some."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict of JSON values."""
        return asdict(self)


def method_key(method: Mapping[str, Any] | None) -> str:
    """Return the text that identifies a method in dicts and journals: its dict as JSON."""
    return json.dumps(method)


def label(method: dict[str, Any] | None) -> str:
    """Return the name of a method for tables and plots: "yarn x8", "dynamic-ntk paper", "unpatched"."""
    if method is None:
        return "unpatched"
    try:
        return printable(method_from_dict(method).label())
    except (MethodError, TypeError, ValueError):
        # a method that is not in this installation, such as that of a plug-in
        return short(printable(str(method["method"])))


def labels(methods: Iterable[dict[str, Any] | None]) -> dict[str, str]:
    """Return a unique label for each method, by its key, in the order given.

    Where two methods have the same label, it is followed by the parameters in which they differ.
    """
    by_key = {method_key(method): method for method in methods}
    names = {key: label(method) for key, method in by_key.items()}
    all_names = list(names.values())
    for name in {name for name in all_names if all_names.count(name) > 1}:
        same_name = [key for key, other in names.items() if other == name]
        parameters = {key: dict(by_key[key] or {}) for key in same_name}
        for key in same_name:
            differing = [
                f"{parameter}={value}"
                for parameter, value in parameters[key].items()
                if any(others.get(parameter) != value for others in parameters.values())
            ]
            names[key] = f"{name} ({short(printable(', '.join(differing)))})"
    return names


def short_labels(names: Iterable[str]) -> list[str]:
    """Return labels shortened to method and factor; those that would not be unique then stay as they are."""
    full = list(names)
    shortened = [name if name == label(None) else "".join(re.findall(r"^\S+| x[\d.]+(?= |$)", name)) for name in full]
    return [short if shortened.count(short) == 1 else name for name, short in zip(full, shortened, strict=True)]
