"""The errors for models in which no rotary module can be replaced: the reason, and what to do."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rope_ext_hf.errors import UnsupportedModelError, listed
from rope_ext_hf.models.decoder_arguments import is_of_transformers

_REQUIREMENTS = (
    "In a class of your own, a rotary module that can be replaced keeps its frequencies in a buffer inv_freq, its "
    "forward takes x and position_ids and returns cos and sin, and it, or the module around it, has the config of the "
    "model as its config (docs/own-models.md)"
)
_LEAVE_IT = "Leave it as it is; docs/models.md lists the models that can be patched"


def no_config(model: nn.Module) -> UnsupportedModelError:
    """Return the error for a module that is not a model of transformers; name the model inside it, if there is one."""
    name = type(model).__name__
    from transformers import PreTrainedModel

    path = next((path for path, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)
    if path is None:
        return UnsupportedModelError(
            f"{name} is not a transformers model: it has no config. Give a model that transformers has loaded, or one "
            "of a class of your own that derives from PreTrainedModel (docs/own-models.md)"
        )
    model_class = type(model.get_submodule(path)).__name__
    return UnsupportedModelError(
        f"{name} is not a transformers model: it has no config. Give its .{path}, which is a {model_class}; the patch "
        f"changes that model in place, so that {name} runs it too"
    )


def saved_frequencies(module: nn.Module, config: Any) -> UnsupportedModelError:
    """Return the error for a class of transformers that keeps its frequencies in the weights (ESM 2)."""
    return UnsupportedModelError(
        f"{type(module).__name__} keeps its frequencies (inv_freq) in the weights of this {config.model_type!r} model, "
        "and transformers loads them over whatever theta and rope_parameters of the config say, so that a patch would "
        f"be lost when the model is saved and loaded. {_LEAVE_IT}"
    )


def no_rotary_module(model: nn.Module) -> UnsupportedModelError:
    """Return the error for a model without a rotary module that can be replaced; say what it has instead."""
    config: Any = model.config
    reason, way_out = _what_it_has(model)
    if not is_of_transformers(model):
        way_out = _REQUIREMENTS
    name = f"{type(model).__name__} ({config.model_type})"
    return UnsupportedModelError(f"{name} has no rotary position embedding that can be replaced: {reason}. {way_out}")


def _what_it_has(model: nn.Module) -> tuple[str, str]:
    """Return a clause on how a model without a replaceable rotary module knows positions, and what to do about it."""
    config: Any = model.config
    text_type = (config.get_text_config() if hasattr(config, "get_text_config") else config).model_type
    other_parts: dict[str, None] = {}
    for parent in model.modules():
        for child in parent.children():
            if not any(name.endswith("inv_freq") for name in child._buffers):
                continue
            arguments = forward_arguments(child)
            if "position_ids" not in arguments:
                return (
                    f"its {type(child).__name__} takes {listed(arguments)} and no position_ids, so it chooses the "
                    "positions itself, and a method cannot take its place",
                    _LEAVE_IT,
                )
            own: Any = getattr(child, "config", None) or getattr(parent, "config", None)
            part_type = getattr(own, "model_type", None)
            if part_type is None:
                return f"neither {type(child).__name__} nor {type(parent).__name__} has the model's config", _LEAVE_IT
            if part_type != text_type:
                other_parts[part_type] = None
    if other_parts:
        return (
            f"those that it has belong to parts with configs of their own ({', '.join(other_parts)}), and a method is "
            "for the text model",
            _LEAVE_IT,
        )
    table = next((module for module in model.modules() if _takes_positions_alone(module)), None)
    if table is not None:
        return f"its {type(table).__name__} has no buffer inv_freq of the frequencies that a method changes", _LEAVE_IT
    rotating = next((module for module in model.modules() if _rotates_itself(module)), None)
    if rotating is not None:
        return (
            f"{type(rotating).__name__} rotates its queries and keys itself, by angles that no module computes for it, "
            "and a method takes the place of such a module",
            "Use a model of another class, such as Llama or GPT-NeoX, whose layers share a rotary module",
        )
    return (
        "it knows positions in another way, or not at all, and this package changes rotary ones (RoPE)",
        _LEAVE_IT,
    )


def _takes_positions_alone(module: nn.Module) -> bool:
    """Return whether a module computes something of positions, without parameters or other modules (GPT-J's table)."""
    has_parts = any(True for _ in module.parameters()) or any(True for _ in module.children())
    return not has_parts and "position_ids" in forward_arguments(module)


def _rotates_itself(module: nn.Module) -> bool:
    """Return whether an attention module calls a function that rotates, in its forward or in a method called there.

    That does not count where cos and sin come from outside, which may not happen in this model (ESM-1). Nor does a
    method without such a function, which may be for other positions than the model has (Wav2Vec2-Conformer).
    """
    is_attention = any(isinstance(child, nn.Linear) for child in module.children())
    if not is_attention or "position_embeddings" in forward_arguments(module):
        return False
    forward = inspect.unwrap(type(module).forward)
    methods = [getattr(type(module), name, None) for name in forward.__code__.co_names]
    return any(
        ("rotary" in name or "rotate" in name) and callable(function.__globals__.get(name))
        for function in (forward, *filter(inspect.isfunction, methods))
        for name in function.__code__.co_names
    )


def reads_no_tokens(model: nn.Module, rotary_module: nn.Module) -> UnsupportedModelError:
    """Return the error for a model of images or sound whose rotary module has no context length in tokens."""
    config: Any = model.config
    return UnsupportedModelError(
        f"{type(model).__name__} ({config.model_type}) takes {forward_arguments(model)[0]} and no tokens: its "
        f"{type(rotary_module).__name__} rotates by places in an image, a video or a sound, and there is no context "
        "length that a method could extend. Leave it as it is; if it is a part of a language model, patch the whole "
        "model"
    )


def forward_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]
