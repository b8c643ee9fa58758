"""The names of methods in tables, plots and sentences, and their keys in dicts and journals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rope_ext_hf.errors import MethodError, printable, short
from rope_ext_hf.methods.registry import method_from_dict

Method = dict[str, Any] | None  # `RopeMethod.to_dict` of the method of a result, or None for the model as loaded


@dataclass(frozen=True)
class MethodResult:
    """A result of one method at one context length in tokens."""

    method: Method
    length: int

    @cached_property
    def key(self) -> str:
        """The key of its method."""
        return method_key(self.method)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def method_key(method: Mapping[str, Any] | None) -> str:
    """A method as a key of dicts and of a journal: its JSON."""
    return json.dumps(method)


def label(method: dict[str, Any] | None) -> str:
    """Return what tables and plots call a method: "yarn x8", "dynamic-ntk paper", "unpatched"."""
    if method is None:
        return "unpatched"
    try:
        return printable(method_from_dict(method).label())
    except (MethodError, TypeError, ValueError):  # not in this installation, such as a plug-in of the run's author
        return short(printable(str(method["method"])))


def labels(methods: Iterable[dict[str, Any] | None]) -> dict[str, str]:
    """A label for each method, by its key, in the order given; equal labels get the parameters that tell them apart."""
    given = {method_key(method): method for method in methods}
    names = {key: label(method) for key, method in given.items()}
    for name in {name for name in names.values() if list(names.values()).count(name) > 1}:
        same = [key for key, other in names.items() if other == name]
        parameters = {key: dict(given[key] or {}) for key in same}
        for key in same:
            told = [f"{k}={v}" for k, v in parameters[key].items() if any(p.get(k) != v for p in parameters.values())]
            names[key] = f"{name} ({short(printable(', '.join(told)))})"
    return names


def short_labels(names: Iterable[str]) -> list[str]:
    """Labels without further parameters than the factor, where that tells all of them apart."""
    full = list(names)
    first = [name if name == label(None) else "".join(re.findall(r"^\S+| x[\d.]+$", name)) for name in full]
    return first if len(set(first)) == len(full) else full
