"""Every RoPE method as pure formulas, independent of any model.

    >>> frequencies("ntk", Rotary(dim=128, theta=10000.0, trained_length=4096), factor=8).inv_freq[-1]
    tensor(1.4435e-05, dtype=torch.float64)

Every file of this folder is imported here, so that a class decorated with `register_method` is known as soon as one
method is; `static` first, so that lists of methods begin with `default`.
"""

import importlib
import pkgutil

from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.registry import frequencies, list_methods, method_from_dict, register_method, resolve_method

__all__ = [
    "Frequencies",
    "RopeMethod",
    "Rotary",
    "frequencies",
    "list_methods",
    "method_from_dict",
    "register_method",
    "resolve_method",
]

for _name in ("static", *(file.name for file in pkgutil.iter_modules(__path__))):
    importlib.import_module(f"{__name__}.{_name}")
