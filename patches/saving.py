"""Write patched models and patched copies of folders where transformers' own saving is not enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import atomic_folder, copy_files, file_stamps, list_files
from rope_ext_hf.patches.config import RECORD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RewritingSave", "save_patched_folder"]


class RewritingSave:
    """`save_pretrained` of one patched model whose config on disk differs from the live one.

    The live config holds the extended length, which `generate` reads; a saved linear scaling has the length that
    readers multiply by the factor. And some config classes refuse a rope type of ours (Phi-3): the config is saved as
    the class accepts it, then rewritten, so that plain loading stops rather than runs without the method.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        if push_to_hub:
            raise CheckpointError(
                "push_to_hub=True would upload this model before its config is complete; save it to a folder and "
                "upload that: huggingface_hub.upload_folder(repo_id=..., folder_path=...)"
            )
        type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
        rewrite_config(Path(save_directory))

    @classmethod
    def attach(cls, model: nn.Module) -> None:
        """Use it for a model and every model inside it."""
        from transformers import PreTrainedModel

        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.__dict__["save_pretrained"] = cls(module)

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        """Go back to the `save_pretrained` of the class."""
        for module in model.modules():
            if isinstance(module.__dict__.get("save_pretrained"), cls):
                del module.__dict__["save_pretrained"]


def rewrite_config(folder: Path) -> None:
    """Put the rope settings and the length of the record in a config.json where transformers reads them."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in [config, *config.values()]:
        if isinstance(part, dict) and RECORD in part:
            part["rope_parameters"] = part[RECORD]["rope_parameters"]
            if "max_position_embeddings" in part:  # some families keep it under another name
                part["max_position_embeddings"] = part[RECORD]["max_position_embeddings"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_patched_folder(model: PreTrainedModel, source: Path, out: Path) -> None:
    """Write a copy of a model's folder with the config of a patched model, whose weights are not needed.

    The model card of the source and its pictures describe another model; a short card takes their place.

    Raises:
        FileError: `out` exists or lies inside the source, a file of the source leads out of it or changed while it was
            copied, or the disk refuses; nothing is left of `out` then.
    """
    names = [name for name in list_files(source) if not _left_out(Path(name))]
    inputs = file_stamps(source / name for name in names)
    size = sum(stamp.size for stamp in inputs.values())
    with atomic_folder(out, source=source, inputs=inputs, size=size) as staging:
        copy_files(source, names, staging)
        model.config.save_pretrained(staging)
        rewrite_config(staging)
        (staging / "README.md").write_text(_card(model, source), encoding="utf-8")


def _left_out(name: Path) -> bool:
    if "__pycache__" in name.parts or name.name in ("config.json", "README.md", "__init__.py"):
        return True
    return name.suffix in (".png", ".jpg", ".svg")


def _card(model: PreTrainedModel, source: Path) -> str:
    record = next(part for part in (model.config, model.config.get_text_config()) if hasattr(part, RECORD))
    step = getattr(record, RECORD)
    method = ", ".join(f"{key}={value}" for key, value in step["method"].items() if not isinstance(value, list))
    return (
        "---\nlibrary_name: transformers\ntags: [rope, long-context]\n---\n\n"
        f"# {source.name}, patched\n\nThe weights of `{source.name}` with another RoPE method: {method}; extended "
        f"length: {step['target_length'] or 'follows the input'}. Patched with rope_ext_hf; the model card of the "
        "original describes the weights.\n"
    )
