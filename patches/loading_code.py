"""Code in a patched folder by which plain transformers loads it, for methods that no config can state.

AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import read_json, write_json
from rope_ext_hf.patches.config import PATCH_KEY

_MODULE = "modeling_rope_ext_hf"

_CODE = '''"""Loads this folder with its RoPE method, {method}. It needs the package rope_ext_hf.

    {auto}.from_pretrained(FOLDER, trust_remote_code=True)
"""

try:
    import rope_ext_hf
except ImportError as error:
    raise ImportError(
        "this model reads with the RoPE method {method}, which needs the package rope_ext_hf; install it first, as "
        "its README says"
    ) from error


class Patched:
    """What the Auto classes of transformers call; the model is of their own class, patched."""

    auto_class: str

    @classmethod
    def from_pretrained(cls, path, *args, config, trust_remote_code=None, adapter_kwargs=None, **kwargs):
        # Settings given to the Auto class stand in `config` alone.
        kwargs.setdefault("attn_implementation", config._attn_implementation)
        saved = type(config).from_pretrained(path).to_dict()
        changed = {{key: value for key, value in config.to_dict().items() if saved.get(key) != value}}
        return rope_ext_hf.from_pretrained(path, auto_class=cls.auto_class, **{{**changed, **kwargs}})

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Saving the loaded model copies no code."""
'''

_CLASS = """

class Patched{auto}(Patched):
    auto_class = "{auto}"
"""


def write_loading_code(folder: str | Path) -> None:
    """Add code to a patched folder, by which the Auto classes of transformers load it under `trust_remote_code=True`.

    One small Python file, which needs this package, and its name in config.json.
    """
    import transformers

    file = Path(folder) / "config.json"
    config = read_json(file)
    parts = [part for part in (config, *config.values()) if isinstance(part, dict) and PATCH_KEY in part]
    if not parts:
        raise CheckpointError(f"{str(folder)!r} has no patch; write one with rope-ext patch, or save a patched model")
    method = parts[0][PATCH_KEY]["method"]["method"]
    if f"rope_ext_hf/{method}" not in str(parts[0].get("rope_parameters")):
        raise CheckpointError(f"plain transformers loads {str(folder)!r} with {method} as it is; it needs no code")
    config_class = transformers.AutoConfig.for_model(config["model_type"]).__class__
    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
    autos = [name for name in names if config_class in getattr(transformers, name)._model_mapping]
    code = _CODE.format(method=method, auto=autos[0]) + "".join(_CLASS.format(auto=name) for name in autos)
    Path(folder, f"{_MODULE}.py").write_text(code, encoding="utf-8")
    others = config.get("auto_map") or {}
    write_json(file, config | {"auto_map": others | {name: f"{_MODULE}.Patched{name}" for name in autos}})


def without_loading_code(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the names of that code, as a model that is loaded with this package saves it."""
    others = {key: value for key, value in (config.get("auto_map") or {}).items() if _MODULE not in str(value)}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    return plain | ({"auto_map": others} if others else {})
