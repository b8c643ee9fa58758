"""Save a patched model where its config class refuses our rope types, and write patched copies of folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.config import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PluginSave", "save_patched_folder"]


class PluginSave:
    """Stands in for `save_pretrained` on one model whose config class accepts no rope type of ours (Phi-3).

    The config is saved as the class likes it, then its rope type is replaced on disk, so that plain loading stops
    rather than runs without the method.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        if push_to_hub:
            raise CheckpointError("this method has no native form for this family; save to a folder and upload that")
        type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
        _write_rope_parameters(Path(save_directory))

    @classmethod
    def attach(cls, model: nn.Module) -> None:
        from transformers import PreTrainedModel

        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.__dict__["save_pretrained"] = cls(module)

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module.__dict__.get("save_pretrained"), cls):
                del module.__dict__["save_pretrained"]


def _write_rope_parameters(folder: Path) -> None:
    """Put the rope settings a config's record names where transformers reads them."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in [config, *config.values()]:
        if isinstance(part, dict) and RECORD in part:
            part["rope_parameters"] = part[RECORD]["rope_parameters"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_patched_folder(model: PreTrainedModel, source: Path, out: Path) -> None:
    """A copy of a model's folder with the config of a patched model (whose weights are not needed).

    Raises:
        CheckpointError: `out` exists, or the copy fails; nothing is left of it then.
    """
    if out.exists():
        raise CheckpointError(f"{str(out)!r} exists already; give a new folder")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("config.json", "__pycache__", "__init__.py"))
        model.config.save_pretrained(unfinished)
        _write_rope_parameters(unfinished)
        unfinished.rename(out)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{str(out)!r} could not be written: {error.strerror or error}") from error
