"""Which layers of a model attend to everything before them, which rotate, and by which of its rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from rope_ext_hf.errors import MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import ConfigRope
from rope_ext_hf.patches.families import family, rope_keys
from rope_ext_hf.patches.family_settings import values_of
from rope_ext_hf.patches.patch_records import recorded_specs

SLIDING = frozenset({"sliding_attention", "chunked_attention", "window_attention", "hybrid_sliding"})
"""Layer types that never attend past their window, whatever their rotary embedding does."""
_NOT_FULL = SLIDING | {"linear_attention", "conv", "moe", "mamba", "recurrent"}
"""Those, and layer types without keys that could be rotated; all others attend to everything."""
LayerType = str | None
"""The name of one of several rotary embeddings, a layer type in most families; None: there is one for all layers."""
Layers = str | int | Sequence[str | int]
"""A choice of layers: layer types, keys of `rope_parameters`, or indices from 0 on."""


_Served = Mapping[LayerType, tuple[int, ...]]  # the indices of the layers that use each of a rotary module's embeddings


class AttentionLayers:
    """How far each layer attends, and whether it rotates, by a text config, with or without a patch recorded in it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @cached_property
    def types(self) -> list[str]:
        """The type of every layer.

        Where the config has none, "sliding_attention" under a window shorter than the length that the config states, as
        in Mistral 7B v0.1, else "full_attention": no input of that length reaches beyond a longer window.
        """
        count, window = self.config.num_hidden_layers, self.window
        only = "sliding_attention" if window and window < self._stated_length() else "full_attention"
        return list(getattr(self.config, "layer_types", None) or [only] * count)[:count]

    def _stated_length(self) -> int:
        """The length in tokens that the config states, without the patches recorded in it; 0: none."""
        with suppress(MethodError):  # a damaged record is refused by whoever reads the patch
            if specs := recorded_specs(self.config):
                return specs[0].rotary.context_length
        stated = getattr(self.config, "max_position_embeddings", None)
        return stated if isinstance(stated, int) else 0

    @cached_property
    def window(self) -> int | None:
        """The window in tokens of the sliding-window layers; None: there is none."""
        if getattr(self.config, "use_sliding_window", True) is False:
            return None
        stated = [*values_of(self.config, "sliding_window"), *values_of(self.config, "attention_chunk_size")]
        return max([each for each in stated if isinstance(each, int) and each > 0], default=None)

    @property
    def sliding(self) -> int:
        """How many layers have the window."""
        stated = getattr(self.config, "layer_types", None)
        if not self.window:
            return 0
        return sum(kind in SLIDING for kind in stated) if stated else self.config.num_hidden_layers

    @cached_property
    def rotating(self) -> tuple[int, int]:
        """How many full-attention layers rotate their queries and keys, and how many there are."""
        config = self.config
        full = [index for index, kind in enumerate(self.types) if kind not in _NOT_FULL]
        if family(config.model_type).sliding_rope_only and any(values_of(config, "sliding_window")):
            return 0, len(full)
        settings: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
        without = {key for key, value in settings.items() if value is None}
        # 0 in either where a layer does not rotate, though no_rope_layers is named for the contrary (Llama 4, SmolLM3)
        stated = [each for key in ("no_rope_layers", "layer_rope_theta") if (each := getattr(config, key, None))]
        rotating = {index for index in full if self._rope_keys[index] not in without}
        return len(rotating - {index for each in stated for index in rotating if not each[index]}), len(full)

    @cached_property
    def _rope_keys(self) -> list[str]:
        """The name of the rotary embedding of every layer, where there are several."""
        return rope_keys(self.config.model_type, self.types)

    def served(self, keys: Sequence[LayerType], theta: float | None = None) -> _Served:
        """The indices of the layers that use each of a rotary module's embeddings, `keys`; [None]: one for all layers.

        `theta`: of a module that serves those layers only whose `layer_rope_theta` is this number; None: of others.
        """
        if list(keys) == [None]:
            thetas = getattr(self.config, "layer_rope_theta", None) if theta is not None else None
            return {None: tuple([i for i in range(len(self.types)) if thetas is None or thetas[i] == theta])}
        return {key: tuple([i for i, each in enumerate(self._rope_keys) if each == key]) for key in keys}

    def choose(self, served: _Served, asked: Layers | None = None) -> tuple[LayerType, ...]:
        """The embeddings of those `served` that a method changes; `asked` None: of layers that attend to everything."""
        types = self.types
        if asked is None:
            if list(served) == [None]:
                attend = not _NOT_FULL.issuperset([types[i] for i in served[None]])
                apart = len(served[None]) < len(types)  # a module of its own theta, maybe for windows alone
                windows = getattr(self.config, "layer_types", None) is None and SLIDING.issuperset(types)
                return (None,) if served[None] and (attend or not (apart or windows)) else ()
            full = tuple([key for key, each in served.items() if not _NOT_FULL.issuperset([types[i] for i in each])])
            return full or tuple(key for key, indices in served.items() if not indices and key not in SLIDING)
        wanted = self._indices(served, asked)
        for indices in served.values():
            if (some := wanted & set(indices)) and (rest := set(indices) - wanted):
                raise UnsupportedModelError(
                    f"layers {_listed(some)} of this {self.config.model_type!r} model share one rotary embedding with "
                    f"layers {_listed(rest)}; a method applies to all of them or to none"
                )
        return tuple(key for key, indices in served.items() if wanted & set(indices))

    def _indices(self, served: _Served, asked: Layers) -> set[int]:
        types, chosen = self.types, set[int]()
        for each in [asked] if isinstance(asked, (str, int)) else asked:
            if isinstance(each, str):
                known = {*types, *(key for key in served if key is not None)}
                if each not in known:
                    raise MethodError(
                        f"this {self.config.model_type!r} model has no {each!r} layers, only "
                        f"{', '.join(sorted(known))}.{did_you_mean(each, known)}"
                    )
                chosen |= {i for i, names in enumerate(zip(types, self._rope_keys, strict=True)) if each in names}
            elif isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < len(types):
                raise MethodError(f"layers must be layer types, or numbers from 0 to {len(types) - 1}; got {each!r}")
            else:
                chosen.add(each)
        if not chosen:
            raise MethodError("layers names no layer of this model; leave it away for those that attend to everything")
        return chosen

    def check_rotating(self, asked: Layers | None = None) -> None:
        """Raise UnsupportedModelError where no full-attention layer rotates and no other layers were asked for."""
        rotating, full = self.rotating
        if full and not rotating and asked is None:
            raise UnsupportedModelError(
                f"none of the {full} full-attention layers of this {self.config.model_type!r} model rotates its "
                "queries and keys; a RoPE method would change its sliding-window layers only, which see no further "
                "for it"
            )

    def sliding_note(
        self, apart: ConfigRope | None, extended_length: int, changed: LayerType = None
    ) -> tuple[str | None, bool]:
        """What a patch does to sliding-window layers, as a sentence, and whether every layer is one.

        `apart`: the rotary embedding of the sliding-window layers, where it is one of their own; `changed`: their type,
        where the patch is for them.
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
        if apart is not None:
            own = f"{apart.method.name}, theta {apart.plain.theta:g}"
            return f"{share} and keep their own rotary embedding ({own}).", False
        return f"{share}; they share one rotary embedding with the others, so the method changes them too.", False

    def unrotated_note(self, method: RopeMethod) -> str | None:
        """What a method does to full-attention layers without RoPE, as a sentence; None: it reaches every layer."""
        rotating, full = self.rotating
        if rotating == full:
            return None
        layers = f"{full - rotating} of the {full} full-attention layers do not rotate their queries and keys (no RoPE)"
        if isinstance(method, RemappingMethod):
            if not method.moves_keys:  # it adds a bias to scores, which every layer gets
                return None
            if method.temperature != "none":
                return f"{layers}: the temperature ({method.temperature}) is all that the method changes there."
        return f"{layers}: the method does not reach them."

    def nothing_to_extend(self) -> UnsupportedModelError:
        """The error for a model whose every layer sees a window; raised where full-attention layers do not rotate."""
        self.check_rotating()
        window = f" of {self.window:,} tokens" if self.window else ""
        return UnsupportedModelError(
            f"every layer of this model has a sliding window{window} and sees no further, whatever the RoPE method; "
            "there is nothing to extend. layers='sliding_attention' (--layers sliding_attention) changes these layers "
            "all the same"
        )


def _listed(indices: set[int]) -> str:
    first = ", ".join(map(str, sorted(indices)[:6]))
    return f"{first}, ..." if len(indices) > 6 else first
