"""The class of transformers for the model that a config describes, and the model itself without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.errors import CheckpointError, RopeExtError, UnsupportedModelError, one_line, short
from rope_ext_hf.models.family_settings import check_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["empty_model", "vocabulary_size"]


def class_to_load(config: Any, auto_class: str | None = None) -> Any:
    """Return the class of transformers with which to load the model that a config describes.

    It is the class that `auto_class` names; else the first one that the config names under `architectures`; else the
    first of AutoModelForCausalLM, AutoModelForImageTextToText and AutoModel that knows the config.

    Raises:
        CheckpointError: `auto_class` is not the name of a model class, or `architectures` is not a list of names.
    """
    import transformers

    if auto_class is not None:
        if not hasattr(getattr(transformers, auto_class, None), "from_pretrained"):
            raise CheckpointError(f"auto_class must be a model class of transformers, got {auto_class!r}")
        return getattr(transformers, auto_class)
    names = getattr(config, "architectures", None) or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"'architectures' in the config must be a list of names, got {short(repr(names))}")
    if not names:
        autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)
        return next((auto for auto in autos if type(config) in auto._model_mapping), autos[0])
    name = names[0]
    # Where the class comes with the folder, `auto_map` names the Auto class that loads it.
    remote = getattr(config, "auto_map", None) or {}
    auto = next((key for key, value in remote.items() if str(value).endswith(f".{name}")), None)
    return getattr(transformers, auto or name, transformers.AutoModelForCausalLM)


_WITHOUT_WEIGHTS = "{}, which 'architectures' in the config names, has no weights"


def empty_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model that a config describes, on the meta device, without weights.

    Its class is the one that `from_pretrained` would load.

    Args:
        config: the config of a model, before any patch.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        CheckpointError: the config is too large for `rope_ext_hf.limits`, or no model can be built from it.
    """
    try:
        loader = class_to_load(config)
        check_sizes(config)
        with torch.device("meta"):
            if hasattr(loader, "_model_mapping"):
                model: PreTrainedModel = loader.from_config(config, trust_remote_code=trust_remote_code)
            # Refused before it is built: PreTrainedModel caches what it learns from a class for all models.
            elif getattr(loader, "config_class", None) is None:
                raise CheckpointError(_WITHOUT_WEIGHTS.format(loader.__name__))
            else:
                model = loader._from_config(config)
        if next(model.parameters(), None) is None:
            raise CheckpointError(_WITHOUT_WEIGHTS.format(type(model).__name__))
    except RopeExtError:
        raise
    except Exception as error:  # model classes raise anything on bad values
        raise CheckpointError(f"no language model can be built from this config: {one_line(error)}") from error
    return model


def class_of_part(model: Any, config: Any) -> type[Any] | None:
    """Return the class of the outermost model inside a model that has a config of the class of `config`.

    That is the class of the text model, for a text config and a model of text and images. None: there is none.
    """
    from transformers import PreTrainedModel

    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((type(part) for part in parts if type(part.config) is type(config)), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model has an embedding for.

    Raises:
        UnsupportedModelError: its embeddings are more than one table, as those of a model for speech may be.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on token ids alone: its embeddings are more than one table"
        )
    return int(weight.shape[0])
