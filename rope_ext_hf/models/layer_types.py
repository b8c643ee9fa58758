"""The attention layers of a model by its config: how far each attends, whether it rotates, by which rotary embedding.

A method for a longer context is for *full-attention* layers, which attend to all tokens before them. A sliding-window
layer sees no further however its tokens are rotated, so that a patch leaves it alone unless its user names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from rope_ext_hf.errors import MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.models.config import ConfigRope
from rope_ext_hf.models.families import family, rope_keys
from rope_ext_hf.models.family_settings import values_of
from rope_ext_hf.models.patch_records import recorded_patches

__all__ = ["SLIDING", "AttentionLayers", "LayerType", "LayersByEmbedding", "layers_text"]

SLIDING = frozenset({"sliding_attention", "chunked_attention", "window_attention", "hybrid_sliding"})
"""Layer types that never attend past their window, whatever their rotary embedding does."""
_NOT_FULL = SLIDING | {"linear_attention", "conv", "moe", "mamba", "recurrent"}
"""Sliding-window types, and types without keys that could be rotated; every other type attends to everything."""
LayerType = str | None
"""The name of one of several rotary embeddings, a layer type in most families; None: there is one for all layers."""
Layers = str | int | Sequence[str | int]
"""A choice of layers: layer types, keys of `rope_parameters`, or indices that count from 0."""
_LISTED_INDICES = 6
"""How many layers a message names before it says "..."."""

LayersByEmbedding = Mapping[LayerType, tuple[int, ...]]
"""The indices of the layers that use each rotary embedding of a rotary module; the key None: one embedding for all."""


class AttentionLayers:
    """The attention type of each layer by a text config, with the window, and which of the layers rotate.

    The config may have a patch recorded in it or not.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @cached_property
    def types(self) -> list[str]:
        """The attention type of each layer, such as "full_attention" or "sliding_attention".

        Without `layer_types` in the config all layers have one type. It is "sliding_attention" where the window is
        shorter than the length that the config states, as in Mistral 7B v0.1. Else it is "full_attention", because no
        input of that length reaches beyond the window.
        """
        count, window = self.config.num_hidden_layers, self.window
        only = "sliding_attention" if window and window < self._stated_length() else "full_attention"
        return list(getattr(self.config, "layer_types", None) or [only] * count)[:count]

    def _stated_length(self) -> int:
        """Return the length in tokens that the config stated before it was patched; 0 where it states none."""
        with suppress(MethodError):  # a damaged record is refused by the function that reads the patch
            patches = recorded_patches(self.config)
            if patches:
                return patches[0].rotary.context_length
        stated = getattr(self.config, "max_position_embeddings", None)
        return stated if isinstance(stated, int) else 0

    @cached_property
    def window(self) -> int | None:
        """The window of the sliding-window layers in tokens, the largest of several; None if there is none."""
        if getattr(self.config, "use_sliding_window", True) is False:
            return None
        stated = [*values_of(self.config, "sliding_window"), *values_of(self.config, "attention_chunk_size")]
        return max([size for size in stated if isinstance(size, int) and size > 0], default=None)

    @property
    def sliding(self) -> int:
        """The number of sliding-window layers."""
        stated = getattr(self.config, "layer_types", None)
        if not self.window:
            return 0
        return sum(kind in SLIDING for kind in stated) if stated else self.config.num_hidden_layers

    @cached_property
    def rotating(self) -> tuple[int, int]:
        """The number of full-attention layers that rotate queries and keys, and that of all full-attention layers."""
        return len(self.rotating_layers & self.full_attention), len(self.full_attention)

    @cached_property
    def full_attention(self) -> frozenset[int]:
        """The indices of the full-attention layers."""
        return frozenset([index for index, kind in enumerate(self.types) if kind not in _NOT_FULL])

    @cached_property
    def rotating_layers(self) -> frozenset[int]:
        """The indices of the layers that rotate queries and keys."""
        config = self.config
        sliding = frozenset([index for index, kind in enumerate(self.types) if kind in SLIDING])
        if family(config.model_type).sliding_rope_only and any(values_of(config, "sliding_window")):
            return sliding
        settings: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
        without_rope = {key for key, value in settings.items() if value is None}
        candidates = self.full_attention | sliding
        rotating = frozenset([index for index in candidates if self._rope_keys[index] not in without_rope])
        # Both lists hold 0 for a layer that does not rotate. `no_rope_layers` does, too, in spite of its name (Llama 4,
        # SmolLM3).
        for key in ("no_rope_layers", "layer_rope_theta"):
            by_layer = getattr(config, key, None)
            if by_layer:
                rotating = frozenset([index for index in rotating if by_layer[index]])
        return rotating

    @cached_property
    def _rope_keys(self) -> list[str]:
        """The key in `rope_parameters` of each layer's rotary embedding, in a model that has several embeddings."""
        return rope_keys(self.config.model_type, self.types)

    def layers_by_embedding(self, keys: Sequence[LayerType], theta: float | None = None) -> LayersByEmbedding:
        """Return the indices of the layers that use each rotary embedding of one rotary module.

        Args:
            keys: the names of the module's embeddings, which are layer types; [None] for a module with one embedding.
            theta: the base of a module that serves only the layers with this number in `layer_rope_theta`; None: the
                module serves all layers.
        """
        if list(keys) == [None]:
            thetas = None if theta is None else getattr(self.config, "layer_rope_theta", None)
            return {None: tuple([i for i in range(len(self.types)) if thetas is None or thetas[i] == theta])}
        return {key: tuple([i for i, name in enumerate(self._rope_keys) if name == key]) for key in keys}

    def choose(self, by_embedding: LayersByEmbedding, layers: Layers | None = None) -> tuple[LayerType, ...]:
        """Return those rotary embeddings of one rotary module that a method changes, by their layer types.

        Args:
            by_embedding: the indices of the layers that use each embedding, from `layers_by_embedding`.
            layers: the layers that the method is for; None: all that attend to everything before them.

        Raises:
            MethodError: `layers` names no layers of this model.
        """
        if layers is None:
            return self._of_full_attention(by_embedding)
        return tuple(self.named(by_embedding, layers))

    def named(self, by_embedding: LayersByEmbedding, layers: Layers) -> LayersByEmbedding:
        """Return the layers that a user names, by the rotary embedding of one rotary module that they use.

        The arguments are those of `choose`. Embeddings are left out if none of their layers is named.
        """
        wanted = self._indices(by_embedding, layers)
        named = {key: tuple([index for index in indices if index in wanted]) for key, indices in by_embedding.items()}
        return {key: indices for key, indices in named.items() if indices}

    @property
    def embeddings(self) -> list[LayerType]:
        """The keys in `rope_parameters` of the rotary embeddings that the config states; [None]: one for all layers."""
        settings: Mapping[str, Any] = getattr(self.config, "rope_parameters", None) or {}
        return [key for key, value in settings.items() if isinstance(value, Mapping)] or [None]

    def are_default(self, layers: Layers) -> bool:
        """Return whether a user who names layers names those that a method is for without a choice."""
        by_embedding = self.layers_by_embedding(self.embeddings)
        default = {key: by_embedding[key] for key in self.choose(by_embedding)}
        return self.named(by_embedding, layers) == default

    def check_keys_are_own(self, chosen: Collection[int]) -> None:
        """Raise UnsupportedModelError if layers were chosen apart from others that use the same keys.

        Some models have layers that attend to the keys of an earlier layer of their type (Gemma 3n), which it has
        rotated.
        """
        reusing = [mode for mode in getattr(self.config, "kv_sharing_modes", None) or () if "reuse" in str(mode)]
        if not reusing and not getattr(self.config, "num_kv_shared_layers", 0):
            return
        of_types = {self.types[index] for index in chosen}
        others = [index for index in self.rotating_layers if self.types[index] in of_types and index not in chosen]
        if others:
            raise UnsupportedModelError(
                f"layers of this {self.config.model_type!r} model use the keys of earlier layers, so the rotation of "
                f"{layers_text(chosen)} cannot be dropped without that of {layers_text(others)}; choose layers by "
                f"their type: {', '.join(sorted(of_types))}"
            )

    def sharing(self, named: Collection[int], others: Collection[int]) -> UnsupportedModelError:
        """Return the error for a method that is for named layers, which share a rotary embedding with others."""
        return UnsupportedModelError(
            f"one rotary embedding serves {layers_text(named)} and also {layers_text(others)} of this "
            f"{self.config.model_type!r} model; a method applies to all of them or to none (except nope, which is put "
            "into each layer by itself)"
        )

    def _of_full_attention(self, by_embedding: LayersByEmbedding) -> tuple[LayerType, ...]:
        """Return those rotary embeddings of a module that a method changes if its user names no layers.

        `by_embedding`: the indices of the layers that use each embedding.
        """
        types = self.types
        full = [
            key
            for key, indices in by_embedding.items()
            if not _NOT_FULL.issuperset([types[index] for index in indices])
        ]
        if full:
            return tuple(full)
        if self._none_of_full_rotates:  # a method for these layers changes no frequencies: any embedding can hold it
            return tuple(by_embedding)
        if list(by_embedding) != [None]:  # an embedding that no layer names may still be one for full attention
            return tuple(key for key, indices in by_embedding.items() if not indices and key not in SLIDING)
        # The only embedding of a module, and none of its layers is known to attend to everything. It is changed all the
        # same, because types of layers that are not known here may; except where windows are all that it serves: by a
        # window in a config without types, or by a base of its own for some of the layers.
        indices = by_embedding[None]
        windows_alone = getattr(self.config, "layer_types", None) is None and SLIDING.issuperset(types)
        return (None,) if indices and len(indices) == len(types) and not windows_alone else ()

    def _indices(self, by_embedding: LayersByEmbedding, layers: Layers) -> set[int]:
        """Return the indices of the layers that a user names by number or by layer type."""
        types, chosen = self.types, set[int]()
        for layer in [layers] if isinstance(layers, (str, int)) else layers:
            if isinstance(layer, str):
                known = {*types, *(key for key in by_embedding if key is not None)}
                if layer not in known:
                    raise MethodError(
                        f"this {self.config.model_type!r} model has no {layer!r} layers, only "
                        f"{', '.join(sorted(known))}.{did_you_mean(layer, known)}"
                    )
                chosen |= {i for i, names in enumerate(zip(types, self._rope_keys, strict=True)) if layer in names}
            elif isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(types):
                raise MethodError(f"layers must be layer types, or numbers from 0 to {len(types) - 1}; got {layer!r}")
            else:
                chosen.add(layer)
        if not chosen:
            raise MethodError(
                "layers names no layer of this model: give layer types or indices, or leave it out for all layers that "
                "attend to everything before them"
            )
        return chosen

    @property
    def _none_of_full_rotates(self) -> bool:
        """True if there are full-attention layers, and none of them rotates."""
        rotating, full = self.rotating
        return bool(full) and not rotating

    @property
    def no_patch_needed(self) -> str | None:
        """Two sentences for a model whose full-attention layers do not rotate; None for all other models."""
        if not self._none_of_full_rotates:
            return None
        _, full = self.rotating
        return (
            f"None of the {full} full-attention layers rotates its queries and keys (no RoPE), so longer inputs need "
            "no patch: the method `default` with a target length raises max_position_embeddings and changes nothing "
            "else. The one method that changes these layers is `temperature`, which makes their attention sharper "
            "beyond the context length. Measure both: rope-ext ppl."
        )

    def check_method(self, method: RopeMethod, layers: Layers | None = None) -> None:
        """Check that a method has something to change: a full-attention layer that rotates, or `layers` by name.

        `default`, by which only the length in the config grows, needs no such layer. Nor does a method that changes
        nothing but the size of queries, which takes no `layers`.

        Raises:
            MethodError: such a method, and `layers`.
            UnsupportedModelError: no full-attention layer rotates, and `layers` is None.
        """
        _, full = self.rotating
        if isinstance(method, RemappingMethod) and method.scales_queries_only:
            if layers is not None:
                raise MethodError(f"{method.name} is for all full-attention layers; leave out layers (--layers)")
        elif self._none_of_full_rotates and layers is None and not isinstance(method, Default):
            raise UnsupportedModelError(
                f"none of the {full} full-attention layers of this {self.config.model_type!r} model rotates its "
                f"queries and keys, so longer inputs need no patch; {method.name} would change its sliding-window "
                "layers only, which see no further for it. For such models there are `default`, which raises the "
                "length in the config alone, and `temperature`"
            )

    def sliding_note(
        self, apart: ConfigRope | None, extended_length: int, changed: LayerType = None
    ) -> tuple[str | None, bool]:
        """Return a sentence on what a patch does to sliding-window layers, and whether every layer is one.

        The sentence is None where the model has no window, or one that is longer than any input will be.

        Args:
            apart: the rotary embedding of the sliding-window layers, where they have one of their own; else None.
            extended_length: the length in tokens that the patched model is for.
            changed: the type of these layers, where the patch is for them; else None.
        """
        window, sliding, count = self.window, self.sliding, self.config.num_hidden_layers
        if not window or not sliding or window >= extended_length:
            return None, False
        if sliding == count:
            reach = f"Every layer attends to the last {window} tokens only"
            return f"{reach}: a longer RoPE does not make the model look further back.", True
        if changed is not None:
            only = f"Its {changed} layers alone are changed. They attend to the last {window} tokens only"
            return f"{only}, and a longer RoPE does not make them look further back.", False
        share = f"{sliding} of {count} layers attend to the last {window} tokens only"
        if self._none_of_full_rotates:
            return f"{share}; of all layers, they alone rotate.", False
        if apart is not None:
            own = f"{apart.method.name}, theta {apart.plain.theta:g}"
            return f"{share} and keep their own rotary embedding ({own}).", False
        return f"{share}; they share one rotary embedding with the others, so the method changes them too.", False

    def unrotated_note(self, method: RopeMethod, rotary: Rotary | None = None) -> str | None:
        """Return a sentence on full-attention layers that a method does not reach; None where it reaches all.

        Most methods reach the layers that rotate; one that changes the size of queries is for those that do not.

        Args:
            method: the method.
            rotary: the rotary embedding that it is applied to; under `nope` no layer rotates. None: it is not known.
        """
        rotating, full = self.rotating
        if rotary is not None and rotary.rotation_dropped:
            rotating = 0
        if isinstance(method, RemappingMethod) and method.scales_queries_only:
            if not rotating:
                return None
            share = f"All {full}" if rotating == full else f"{rotating} of the {full}"
            return (
                f"{share} full-attention layers rotate their queries and keys. Inputs beyond the context length bring "
                f"distances that these layers were not trained at, and {method.name} does not change them."
            )
        if rotating == full or isinstance(method, Default):
            return None
        layers = f"{full - rotating} of the {full} full-attention layers do not rotate their queries and keys (no RoPE)"
        if isinstance(method, RemappingMethod):
            if not method.moves_keys:  # it adds a bias to scores, which every layer gets
                return None
            if method.temperature != "none":
                return f"{layers}: the temperature ({method.temperature}) is all that the method changes there."
        return f"{layers}: the method does not reach them."

    def nothing_to_extend(self) -> UnsupportedModelError:
        """Return the error for a model in which a method finds no layer that attends to everything before it."""
        window = f" of {self.window:,} tokens" if self.window else ""
        return UnsupportedModelError(
            f"every layer of this model has a sliding window{window} and sees no further, whatever the RoPE method; "
            "there is nothing to extend. layers='sliding_attention' (--layers sliding_attention) changes these layers "
            "all the same"
        )


def layers_text(indices: Collection[int]) -> str:
    """Return "layer 3" or "layers 0, 3" for a message, ascending; of many layers the first ones."""
    first = ", ".join(map(str, sorted(indices)[:_LISTED_INDICES]))
    return f"layer{'s'[: len(indices) - 1]} {first}" + (", ..." if len(indices) > _LISTED_INDICES else "")
