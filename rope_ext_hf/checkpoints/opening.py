"""Open the folder of a checkpoint in the format that it is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.files.model_folders import model_folder
from rope_ext_hf.files.other_formats import has_weights

if TYPE_CHECKING:
    from rope_ext_hf.checkpoints.meta.meta_source import MetaSource

Opened: TypeAlias = "Source | MetaSource"
"""A folder that was opened, in Hugging Face's format or in Meta's."""


def open_checkpoint(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Opened:
    """Open a folder or Hub repository in Meta's format or in Hugging Face's, which may have a params.json too.

    Mistral's repositories hold a model in both formats: it is read in Hugging Face's.
    """
    folder = model_folder(path, revision=revision)
    has_params = (folder / "params.json").is_file()
    has_config = (folder / "config.json").is_file()
    has_parts = any(folder.glob("consolidated.*.pth"))
    has_shards = any(folder.glob("consolidated*.safetensors"))
    in_metas = (has_params and has_parts) or ((has_params or has_parts or has_shards) and not has_config)
    if in_metas or (has_params and has_shards and not has_weights(folder)):
        from rope_ext_hf.checkpoints.meta.meta_source import MetaSource  # imports torch

        return MetaSource(folder)
    return Source(folder, trust_remote_code=trust_remote_code)
