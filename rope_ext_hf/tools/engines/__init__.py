"""Models of the serving engines: the frequencies, magnitude and length that each computes from a model's config.

There is one file per engine, which names its source (repository, version, files) at the top. A file registers its
engine when it is imported, so all files of this folder are imported here.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
