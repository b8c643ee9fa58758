"""Code in a patched folder by which plain transformers loads it, for methods that no config can state.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The code is made from loading_code.txt. It takes its classes from loading_classes.py, so that
folders that are published already follow a change of this package.
"""

from __future__ import annotations

import copy
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.whole import read_json, write_json
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.models.config import EXPECTED_LINES, PLUGIN_PREFIX
from rope_ext_hf.models.config_keys import PATCH_KEY

_MODULE = "modeling_rope_ext_hf"
"""The name of the Python module that is written into the folder."""
CODE_FILE = f"{_MODULE}.py"


def write_loading_code(folder: str | Path) -> None:
    """Add code to a patched folder, by which the Auto classes of transformers load it with `trust_remote_code=True`.

    The code is one small Python file, which needs this package installed, and its name in config.json. It serves every
    Auto class that knows the type of the model. A model that is loaded from the folder and saved again has the code in
    its new folder, too. A folder whose method transformers has a rope type for needs no code.

    Args:
        folder: a folder that `save_pretrained` of a patched model, or `rope-ext patch`, has written.

    Raises:
        CheckpointError: the folder has no patch, plain transformers loads it with its method already, or transformers
            does not know the type of the model.
        FileError: there is no config.json that can be read.
    """
    file = Path(folder) / "config.json"
    config = read_json(file)
    patched_parts = [part for part in (config, *config.values()) if isinstance(part, dict) and PATCH_KEY in part]
    if not patched_parts:
        raise CheckpointError(f"{str(folder)!r} has no patch; write one with rope-ext patch, or save a patched model")
    part = patched_parts[0]
    method = part[PATCH_KEY]["method"]["method"]
    if f"{PLUGIN_PREFIX}{method}" not in str(part.get("rope_parameters")):
        raise CheckpointError(f"plain transformers loads {str(folder)!r} with {method} as it is; it needs no code")
    autos = _auto_classes(config)
    template = files("rope_ext_hf.patches.saved").joinpath("loading_code.txt").read_text(encoding="utf-8")
    classes = [f'Patched{name} = rope_ext_hf.loading_class("{name}")\n' for name in autos]
    code = Template(template).substitute(method=method) + "".join(classes)
    Path(folder, CODE_FILE).write_text(code, encoding="utf-8")
    part[PATCH_KEY]["loading_code"] = True
    others = config.get("auto_map") or {}
    write_json(file, config | {"auto_map": others | {name: f"{_MODULE}.Patched{name}" for name in autos}})


def _auto_classes(config: dict[str, Any]) -> list[str]:
    """Return the names of the Auto classes of transformers that load models of a type.

    AutoConfig is among them where the class of the config refuses the rope type of the folder (Phi-3), because the
    other Auto classes read the config first.

    Args:
        config: the values of the patched config.

    Raises:
        CheckpointError: transformers does not know the type.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    known = transformers.CONFIG_MAPPING
    model_type = config.get("model_type")
    if model_type not in known:
        raise CheckpointError(
            f"transformers has no model type {model_type!r}, so code in the folder could not load it; load it with "
            "rope_ext_hf.from_pretrained"
        )
    autos: dict[str, Any] = {name: auto for name, auto in vars(modeling_auto).items() if hasattr(transformers, name)}
    names = [
        name
        for name, auto in sorted(autos.items())
        if getattr(auto, "_model_mapping", None) is not None and known[model_type] in auto._model_mapping
    ]
    try:
        with left_out_of_log(*EXPECTED_LINES):
            known[model_type].from_dict(copy.deepcopy(config))  # which may change the values inside
    except Exception:  # config classes raise anything on a rope type that they refuse
        return ["AutoConfig", *names]
    return names


def without_loading_code(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config without the entries of `auto_map` that lead to this code.

    The config of a loaded model has none of them, because the code would not fit what may become of the model.
    """
    others = {key: value for key, value in (config.get("auto_map") or {}).items() if _MODULE not in str(value)}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    if others:
        plain["auto_map"] = others
    return plain
