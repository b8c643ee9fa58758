"""Read the rotated weights of a folder that was opened; torch is imported where its class or its format needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.checkpoints.opening import Opened
from rope_ext_hf.checkpoints.pairing.query_key_weights import RotatedWeights, numbers_in_files
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.model_folders import loading
from rope_ext_hf.models.families import family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.checkpoints.meta.meta_source import MetaSource


def weights_from_source(source: Opened, path: str, *, trust_remote_code: bool = False) -> RotatedWeights:
    """Return the rotated weights of a model whose folder was opened; `path` is its name in reports."""
    if not isinstance(source, Source):
        return _weights_from_meta(source, path)
    gains = {}
    if source.model is not None:
        from rope_ext_hf.checkpoints.pairing.model_weights import measured_gains

        gains = dict(measured_gains(source.model))

    def load() -> PreTrainedModel:
        from rope_ext_hf.models.model_classes import class_to_load

        model_type = source.tensors.model_type
        if family(model_type).remote:
            raise CheckpointError(
                f"transformers has no class that runs a {model_type!r} on a text: leave out the text, and the "
                "weights alone are looked at"
            )
        with loading(f"the model in {path!r}"):
            config = source.class_config
            settings = {"config": config, "dtype": "auto", "trust_remote_code": trust_remote_code}
            loaded: PreTrainedModel = class_to_load(config).from_pretrained(source.folder, **settings)
        return loaded

    return RotatedWeights(
        path=path,
        tensors=source.tensors,
        inv_freq=source.inv_freq,
        trained_length=lambda: source.rotary.trained_length,
        gains=gains,
        shapes={name: info.shape for name, info in source.view.tensors.items()},
        read=numbers_in_files(source.view),
        stated=source.pairing,
        runs=source.class_pairing,
        load=load,
    )


def _weights_from_meta(source: MetaSource, path: str) -> RotatedWeights:
    """Return the rotated weights of a model in Meta's format, which are interleaved; `path` is its name in reports."""
    import torch

    from rope_ext_hf.checkpoints.pairing.model_weights import measured_gains
    from rope_ext_hf.models.model_classes import empty_model
    from rope_ext_hf.patches.model_rope import ModelRope

    model = empty_model(source.llama.to_config("interleaved", torch.float32, source.llama.context_length()))
    rotary, view = ModelRope.of_model(model).rotary, source.view()

    def load() -> PreTrainedModel:
        raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")

    return RotatedWeights(
        path=path,
        tensors=RotaryTensors(model.config, rotary.dim),
        inv_freq=rotary.inv_freq().numpy(),
        trained_length=lambda: rotary.trained_length,
        gains=measured_gains(model),
        shapes={name: info.shape for name, info in view.tensors.items()},
        read=numbers_in_files(view),
        stated="interleaved",
        runs="half",
        load=load,
    )
