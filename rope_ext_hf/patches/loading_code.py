"""Code in a patched folder by which plain transformers loads it, for methods that no config can state.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The code is made from loading_code.txt.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import read_json, write_json
from rope_ext_hf.patches.config import PLUGIN_PREFIX
from rope_ext_hf.patches.patch_records import PATCH_KEY

_MODULE = "modeling_rope_ext_hf"
"""The name of the Python module that is written into the folder."""


def write_loading_code(folder: str | Path) -> None:
    """Add code to a patched folder, by which the Auto classes of transformers load it with `trust_remote_code=True`.

    The code is one small Python file, which needs this package installed, and its name in config.json. A folder whose
    method transformers has a rope type for needs no code.

    Args:
        folder: a folder that `save_pretrained` of a patched model, or `rope-ext patch`, has written.

    Raises:
        CheckpointError: the folder has no patch, or plain transformers loads it with its method already.
        FileError: there is no config.json that can be read.
    """
    import transformers

    file = Path(folder) / "config.json"
    config = read_json(file)
    patched_parts = [part for part in (config, *config.values()) if isinstance(part, dict) and PATCH_KEY in part]
    if not patched_parts:
        raise CheckpointError(f"{str(folder)!r} has no patch; write one with rope-ext patch, or save a patched model")
    part = patched_parts[0]
    method = part[PATCH_KEY]["method"]["method"]
    if f"{PLUGIN_PREFIX}{method}" not in str(part.get("rope_parameters")):
        raise CheckpointError(f"plain transformers loads {str(folder)!r} with {method} as it is; it needs no code")
    config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
    autos = [name for name in names if config_class in getattr(transformers, name)._model_mapping]
    template = files("rope_ext_hf.patches").joinpath("loading_code.txt").read_text(encoding="utf-8")
    classes = [f'\n\nclass Patched{name}(Patched):\n    auto_class = "{name}"\n' for name in autos]
    code = Template(template).substitute(method=method, auto=autos[0]) + "".join(classes)
    Path(folder, f"{_MODULE}.py").write_text(code, encoding="utf-8")
    others = config.get("auto_map") or {}
    write_json(file, config | {"auto_map": others | {name: f"{_MODULE}.Patched{name}" for name in autos}})


def without_loading_code(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config without the entries of `auto_map` that lead to this code.

    A model that this package has loaded is saved without them, because saving copies no code.
    """
    others = {key: value for key, value in (config.get("auto_map") or {}).items() if _MODULE not in str(value)}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    if others:
        plain["auto_map"] = others
    return plain
