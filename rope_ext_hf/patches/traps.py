"""Traps of transformers: settings that it passes over, and states that it keeps, without a word.

`describe` prints the line of every trap that a model meets, patched or not. Two of them leave the model with another
theta than its user believes, and `patch` warns of these as well, because a patch extends the theta that the model runs.
Each trap is one function, in `theta_traps` or `_TRAPS`, which says when it bites. Tests show it without a patch first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.files.whole import read_json
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.models.config import ConfigRope
from rope_ext_hf.models.config_keys import text_settings, unread_settings
from rope_ext_hf.models.layer_types import SLIDING, LayerType
from rope_ext_hf.patches.model_rope import ModelRope

_RENEWS_CACHE = "original_max_position_embeddings"
"""The config key that `prepare_inputs_for_generation` reads in the classes that renew their cache (Phi-3)."""


@dataclass(frozen=True)
class _Seen:
    """A model, and the method that it runs over a rotary embedding: its own one, or that of its patch."""

    rope: ModelRope
    method: RopeMethod
    rotary: Rotary
    patched: bool  # whether a live patch runs the method, and not the model's own class

    @property
    def as_loaded(self) -> Iterator[tuple[LayerType, ConfigRope]]:
        """The rotary embeddings that the config states, by layer type."""
        for slot in self.rope.slots:
            yield from slot.as_loaded.items()

    @property
    def follows_length(self) -> bool:
        """True if the frequencies of what runs depend on the length of the input."""
        return self.method.depends_on_length(self.rotary)


def traps(rope: ModelRope, method: RopeMethod, rotary: Rotary, *, patched: bool) -> tuple[str, ...]:
    """Return a line for each further trap of transformers that a model meets; most models meet none.

    Args:
        rope: the rope of the model.
        method: the method that runs, that of a patch or the scaling of the model itself.
        rotary: the rotary embedding that the method is applied to.
        patched: whether a live patch runs the method.
    """
    seen = _Seen(rope, method, rotary, patched)
    return tuple([line for trap in _TRAPS if (line := trap(seen)) is not None])


def theta_traps(rope: ModelRope) -> tuple[str, ...]:
    """Return a line for each trap that leaves a model with another theta than its user may believe."""
    return tuple([line for line in (_unread_spelling(rope), _unread_theta(rope)) if line is not None])


# --- settings that nothing reads --------------------------------------------------------------------------------------


def _unread_spelling(rope: ModelRope) -> str | None:
    """Return a line for a config.json with `rope_scaling` beside `rope_parameters`, which nothing reads then."""
    name = getattr(getattr(rope.model, "config", None), "_name_or_path", None)
    file = Path(name or ".", "config.json")
    if not name or not file.is_file():
        return None
    with suppress(RopeExtError):  # whoever loads this file explains the error
        text = text_settings(read_json(file))
        live, unread = getattr(rope.config, "rope_parameters", None) or {}, text.get("rope_parameters") or {}
        if all(live.get(key) == value for key, value in unread.items()):  # another config was given with the folder
            return None
        return unread_settings(text)
    return None


def _unread_theta(rope: ModelRope) -> str | None:
    """Return a line for a `rope_theta` beside `rope_parameters`, which stays an attribute that nothing reads."""
    stated = vars(rope.config).get("rope_theta")
    thetas = [embedding.plain.theta for slot in rope.slots for embedding in slot.as_loaded.values()]
    # Some classes declare the key, with a default that may not be the theta of a model.
    if stated is None or stated in thetas or hasattr(type(rope.config), "rope_theta"):
        return None
    return (
        f"config.rope_theta = {stated:g} has no effect: transformers reads theta inside config.rope_parameters, where "
        f"it is {thetas[0]:g}, when the model is built. To change it, load the model with that in its config.json, or "
        f"patch it: rope.patch(model, 'theta', theta={stated:g}); else delete the attribute."
    )


def _unread_truncate(seen: _Seen) -> str | None:
    """Return a line for a `truncate` inside the yarn settings of a layer type, which is read only beside them."""
    parameters: Mapping[str, Any] = getattr(seen.rope.config, "rope_parameters", None) or {}
    read = parameters.get("truncate", True)
    for layer_type, settings in parameters.items():
        if isinstance(settings, Mapping) and settings.get("rope_type") == "yarn":
            stated = settings.get("truncate", read)
            if stated != read:
                return (
                    f"truncate = {stated} in the yarn settings of the {layer_type} layers has no effect: transformers "
                    f"reads it beside the layer types, and runs {read}. In config.json, move it up: "
                    f"rope_parameters['truncate'] = {stated}."
                )
    return None


def _unread_nomic_keys(seen: _Seen) -> str | None:
    """Return a line for NomicBert, whose published configs state lengths and scaling under keys of their own code."""
    config = seen.rope.config
    if seen.patched or config.model_type != "nomic_bert":
        return None
    length = config.max_position_embeddings
    run = {"rotary_scaling_factor": None, "n_positions": length, "max_trained_positions": length}
    run |= {"rotary_emb_base": seen.rotary.theta, "n_embd": config.hidden_size}
    stated = {key: vars(config).get(key) for key in run}
    unread = [f"{key} {stated[key]:g}" for key in run if stated[key] not in (None, run[key])]
    if not unread:
        return None
    factor, trained = stated["rotary_scaling_factor"], stated["max_trained_positions"]
    call = f"'dynamic', factor={factor:g}" if factor else "'dynamic-ntk'"
    if trained not in (None, length):
        call += f", context_length={trained}"
    return (
        f"transformers reads nothing of this in its config: {', '.join(unread)}. It runs {seen.method.name} with theta "
        f"{seen.rotary.theta:g}; the code that the model was published with has a dynamic NTK scaling. "
        f"rope.patch(model, {call}) computes that."
    )


def _scaled_windows(seen: _Seen) -> str | None:
    """Return a line for ModernBERT, whose `rope_scaling` reaches sliding-window layers; in Gemma 3 it does not."""
    if not seen.rope.config.model_type.startswith("modernbert"):
        return None
    for layer_type, embedding in seen.as_loaded:
        if layer_type in SLIDING and embedding.method.name != "default":
            return (
                f"The {layer_type} layers are scaled as well ({embedding.method.name}), although they see no further "
                "than their window: transformers puts rope_scaling of this family into the settings of all layers. "
                "Load the model without it, and patch it: a patch leaves these layers alone."
            )
    return None


# --- states that transformers keeps -----------------------------------------------------------------------------------


def _earlier_lengths(seen: _Seen) -> str | None:
    """Return a line for `dynamic`, whose module keeps the frequencies of the longest input so far."""
    factor = getattr(seen.method, "factor", None)
    if seen.patched or seen.method.name != "dynamic-ntk" or factor is None:
        return None
    return (
        "transformers keeps the frequencies of the longest input so far for later inputs of "
        f"{seen.rotary.context_length:,} tokens and more, and gives every row of a batch those of the longest row. "
        f"rope.patch(model, 'dynamic', factor={factor:g}) takes those of each row."
    )


def _stale_cache(seen: _Seen) -> str | None:
    """Return a line for longrope with two lists, between which only the classes of Phi-3 renew the cache."""
    model, two_lists = _generating(seen.rope.model), seen.method.name == "longrope" and seen.follows_length
    if model is None or not two_lists or _RENEWS_CACHE in _names_read(type(model).prepare_inputs_for_generation):
        return None
    stale = (
        f"transformers goes on with long_factor when generation passes {seen.rotary.context_length:,} tokens, and "
        "leaves in the cache the keys that short_factor rotated"
    )
    if not seen.patched:
        return f"{stale}. rope.patch(model, 'default') rotates them anew."
    if seen.method.rope_parameters(seen.rotary) is None:  # plain transformers cannot load it
        return None
    return f"Loaded from the saved folder by plain transformers, without this patch: {stale}."


def _assisted_generation(seen: _Seen) -> str | None:
    """Return a line for frequencies that follow the length, which assisted generation takes from later tokens."""
    if not seen.follows_length or _generating(seen.rope.model) is None:
        return None
    return (
        "Assisted generation (assistant_model, prompt_lookup_num_tokens) may give another output than generation "
        f"without it beyond {seen.rotary.context_length:,} tokens, because it reads several tokens at the length of "
        "the last one. Within rope.fixed_length(model, LENGTH) "
        + ("both agree." if seen.patched else "both agree, once the model is patched.")
    )


_TRAPS: tuple[Callable[[_Seen], str | None], ...] = (
    _unread_truncate,
    _unread_nomic_keys,
    _scaled_windows,
    _earlier_lengths,
    _stale_cache,
    _assisted_generation,
)


# --- what a model can do ----------------------------------------------------------------------------------------------


def _generating(model: nn.Module | None) -> Any:
    """Return the model, or the one inside it, that has `generate`; None: there is none."""
    from transformers import PreTrainedModel

    parts = () if model is None else model.modules()
    return next((part for part in parts if isinstance(part, PreTrainedModel) and part.can_generate()), None)


def _names_read(function: Any) -> tuple[str, ...]:
    """Return the names of the attributes and globals that a function reads, without those of functions it calls."""
    names: tuple[str, ...] = inspect.unwrap(function).__code__.co_names
    return names


def is_encoder(model: nn.Module | None) -> bool:
    """Return whether a model sees the tokens behind a token as well, so that it has no perplexity."""
    if model is None or _generating(model) is not None:
        return False
    causal = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return bool(causal) and not any(causal)
