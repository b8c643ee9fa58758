"""Models of the serving engines: the frequencies, magnitude and length that each computes from a model's config.

programs: one file per engine, which names its source (repository, version, files) at the top.
base, config_engine, overrides, former_spelling, gguf_rules: what engines have in common.
target, serving_config: what an engine is to serve, and the command and keys with which it does.
keys, formulas: the rope keys of a config, and the numbers that engines compute from them.
comparison: do two engines compute the same?

A file registers its engine when it is imported, so all files of this folder are imported here.
"""

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
