"""What each serving engine computes from a config: frequencies, magnitude and length, by the engine's own rules.

One file per engine, with its source (repository, version, file) at the top; every file of this folder is imported.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
