"""The serving engines: one file each, with a table of the model families that it runs.

A file registers its engine when it is imported, so all files of this folder are imported here.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
