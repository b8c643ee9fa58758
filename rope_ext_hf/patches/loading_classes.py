"""The classes that the code of a patched folder gives to the Auto classes of transformers (see loading_code.py).

transformers runs that code under `trust_remote_code=True` alone. The models and configs that the methods here return
are of classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.loading import before_patch, from_pretrained, load_patched_config, restore_patch
from rope_ext_hf.patches.saved.adapters import find_adapter
from rope_ext_hf.patches.small_replica import check_without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def loading_class(auto_class: str) -> type[Any]:
    """Return the class that the code of a patched folder gives to an Auto class of transformers.

    The file that `write_loading_code` adds to a folder calls this function; nobody else needs it.

    Args:
        auto_class: the name of the Auto class, such as "AutoModelForCausalLM" or "AutoConfig".
    """
    base = _LoadedConfig if auto_class == "AutoConfig" else _LoadedModel
    return type(f"Patched{auto_class}", (base,), {"auto_class": auto_class})


class _Loaded:
    auto_class: str

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a patched model writes the code itself when it is saved."""


class _LoadedConfig(_Loaded):
    """The class for AutoConfig, where the config class itself refuses the rope type of the folder (Phi-3)."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config as the folder states it, with its patch; settings in `kwargs` replace those of the folder.

        Under `return_unused_kwargs` it is a pair: the config, and the rest of `kwargs`.
        """
        config, unused = load_patched_config(path, **kwargs)
        return (config, unused) if return_unused_kwargs else config


class _LoadedModel(_Loaded):
    """The class for an Auto class of models."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *args: Any,
        config: Any,
        trust_remote_code: bool | None = None,
        adapter_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Return the patched model; settings that were given to the Auto class stand in `config`.

        Where the Auto class was given the folder of an adapter, `path` is that of its base model, and `adapter_kwargs`
        names the adapter. The patch that the adapter records replaces that of its base model.
        """
        cls._check_known(config)
        model = from_pretrained(path, auto_class=cls.auto_class, config=config, **kwargs)
        of_adapter = dict(adapter_kwargs or {})
        folder = of_adapter.pop("_adapter_model_path", None)
        if folder is not None:
            adapter = find_adapter(folder, **of_adapter)
            if adapter is not None and adapter.record is not None:
                restore_patch(model, adapter.record)
            model.load_adapter(folder, adapter_kwargs=of_adapter)
        return model

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
        """Return a patched model with random weights, or without weights where transformers is asked for such a model.

        Weights that are loaded into it afterwards run under the method.
        """
        cls._check_known(config)
        plain, record = before_patch(config)
        model: PreTrainedModel = cls._auto().from_config(plain, **kwargs)
        if record is not None:
            restore_patch(model, record)
            check_without_weights(model)
        return model

    @classmethod
    def _auto(cls) -> Any:
        import transformers

        return getattr(transformers, cls.auto_class)

    @classmethod
    def _check_known(cls, config: Any) -> None:
        """Check that the Auto class loads models of this type in the installed release; it may have had it in another.

        transformers has registered the class of the folder for it then, which would call itself without an end.
        """
        model_class = cls._auto()._model_mapping.get(type(config), None)
        if model_class is None or (isinstance(model_class, type) and issubclass(model_class, _LoadedModel)):
            from transformers import __version__

            raise CheckpointError(
                f"{cls.auto_class} of transformers {__version__} has no class for {config.model_type!r} models; load "
                "the folder with AutoModel, or with the release of transformers that it was written with"
            )
