"""The rope of a model, read once: from a loaded model, from a config alone, or from a checkpoint to be converted.

    rope = ModelRope.of_model(model)
    rope.rotary                           # the rotary embedding that a patch extends
    rope.extending("original").rotary     # the one that a patch with over="original" extends
    rope.pairing                          # "half" or "interleaved"

A patch is planned on it, `describe` prints it, and runs, conversions and the tools for serving ask it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, check_int, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.models.config import ConfigRope, read_rope, rope_by_sizes
from rope_ext_hf.models.config_keys import PAIRING_KEY, PATCH_KEY
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import stated_rotary
from rope_ext_hf.models.layer_types import AttentionLayers, Layers, LayerType
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.models.patch_records import Patch, before_patches, recorded_patches
from rope_ext_hf.models.recipes import published_length
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.patches.rows.row_probe import pairing_of, run_pairing
from rope_ext_hf.patches.slots.patched_slot import Slot, active_patches
from rope_ext_hf.patches.slots.slot_finding import find_slots

__all__ = ["ModelRope"]

_OVER = ("own", "original", "patched")
"""Values of `over`: a patch extends the model as loaded, the model without its own scaling, or the present patch."""


@dataclass(frozen=True, eq=False)
class ModelRope:
    """The rope of a model as its config and its rotary modules state it, without the patches that it has.

    Attributes:
        config: the text config without patches. It is read here, and never changed.
        stated: the rotary embeddings that this config states for the layers that a method is for. There is one in most
            models, and one method needs one.
        layer_types: the types of these layers; [None]: there is one rotary embedding for all layers.
        slots: the places of the rotary modules; none for a config alone.
        patches: the patches that the model has, or that its config records, bottom first.
        is_patched: whether these patches are in the model, and not only in its config.
        model: the model; None for a config alone.
        over, context_length: what a new patch extends, see `extending`.
    """

    config: Any
    stated: tuple[ConfigRope, ...]
    layer_types: tuple[LayerType, ...]
    slots: tuple[Slot, ...] = ()
    patches: tuple[Patch, ...] = ()
    is_patched: bool = False
    model: nn.Module | None = None
    over: str = "own"
    context_length: int | None = None

    @classmethod
    def of_model(cls, model: nn.Module, layers: Layers | None = None) -> ModelRope:
        """Read a model in memory, patched or not.

        Args:
            model: the model; it may be on the meta device.
            layers: the layers that a method is for; None: all that attend to everything before them.

        Raises:
            UnsupportedModelError: the model has no rotary module, or one that cannot be replaced.
            MethodError: `layers` names no layers of this model.
            CheckpointError: the record of a patch in its config is damaged.
        """
        slots = tuple(find_slots(model, layers))
        layer_types = tuple(dict.fromkeys([name for slot in slots for name in slot.scaled_layers]))
        # Where no layer attends to everything there is nothing to extend, but still a rotary embedding to describe.
        places = [(slot, name) for slot in slots for name in (slot.scaled_layers if layer_types else slot.as_loaded)]
        stated = [slot.as_loaded[name] for slot, name in places]
        config, patches = slots[0].config, active_patches(model)
        is_patched = bool(patches)
        # Plain transformers has loaded the model from a folder that was saved patched.
        if any(PATCH_KEY in vars(slot.config) for slot in slots):
            dims = [rope.plain.dim for rope in stated]
            stated = [
                read_rope(before_patches(slot.config), dim, name)
                for (slot, name), dim in zip(places, dims, strict=True)
            ]
            patches = patches or tuple(recorded_patches(config))
            config = before_patches(config)
        return cls(config, tuple(stated), layer_types, slots, patches, is_patched, model)

    @classmethod
    def of_config(cls, config: Any) -> ModelRope:
        """Read a text config that records no patch.

        The number of rotated dims comes from the frequencies of a model without weights. Where the class of the model
        is not installed, it follows from sizes in the config. All else is the same.

        Raises:
            UnsupportedModelError: no layer attends to everything, or the config describes no rotary embedding.
        """
        layers = AttentionLayers(config)
        layer_types = layers.choose(layers.layers_by_embedding(layers.embeddings))
        if not layer_types:
            raise layers.nothing_to_extend()
        slots: list[Slot] = []
        with suppress(CheckpointError, UnsupportedModelError):
            slots = find_slots(empty_model(config))
        dims = {name: rope.plain.dim for slot in slots for name, rope in slot.as_loaded.items()}
        stated = [
            read_rope(config, dims[name], name) if name in dims else rope_by_sizes(config, name) for name in layer_types
        ]
        return cls(config, tuple(stated), layer_types)

    @classmethod
    def of_checkpoint(cls, config: Any, model: nn.Module | None = None) -> ModelRope:
        """Read the rope of weights whose rows are to be reordered; their class need not be one that can be patched.

        Args:
            config: the config of the model.
            model: the model; None: the config settles the rest, with one rotary embedding for all layers and sizes
                under their usual keys, so that its class is not imported.

        Raises:
            UnsupportedModelError: the model has no rotary embedding, or has several.
            CheckpointError: a number in the config is missing or impossible.
        """
        # Families whose models have no rotary module that could be read (ChatGLM, GPT-J): the family table knows them.
        rotary = stated_rotary(config) if hasattr(config, "get_text_config") else None
        if rotary is not None:
            text = config.get_text_config()
            rope = ConfigRope(rotary, Default(), rotary.context_length, "the family table")
            return cls(text, (rope,), (None,), model=model)
        if model is not None:
            return cls.of_model(model)
        return cls(config, (rope_by_sizes(config, None, config.to_dict()),), (None,))

    @cached_property
    def layers(self) -> AttentionLayers:
        """The attention type of each layer, its window, and which layers rotate."""
        return AttentionLayers(self.config)

    @cached_property
    def embedding(self) -> ConfigRope:
        """The rotary embedding of the layers that a method is for.

        Raises:
            UnsupportedModelError: they have several.
        """
        by_rotary = {rope.rotary: rope for rope in self.stated}
        if len(by_rotary) != 1:
            several = "; ".join(map(str, by_rotary))
            raise UnsupportedModelError(
                f"one method needs one rotary embedding over all full-attention layers; this model has {several}. "
                "Choose layers that share one: layers=... (--layers)"
            )
        return next(iter(by_rotary.values()))

    def extending(self, over: str = "own", context_length: Length | None = None) -> ModelRope:
        """Return the same rope, for a new patch with these arguments of `rope_ext_hf.patch`.

        Raises:
            MethodError: `over` or `context_length` is impossible, or there is no present patch to extend.
        """
        context_length = parse_length(context_length)
        if over not in _OVER:
            raise MethodError(f"over must be one of {', '.join(_OVER)}; got {over!r}.{did_you_mean(str(over), _OVER)}")
        if context_length is not None:
            check_int("context_length", context_length)
        if over == "patched":
            self._check_present_patch()
        return replace(self, over=over, context_length=context_length)

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding that a new patch extends, scalings included.

        Its context length is the one that the user gave; else the published one of a known model without a scaling of
        its own; else the one that the config states.

        Raises:
            UnsupportedModelError: the layers have several rotary embeddings.
        """
        return self._extended[0]

    @property
    def rule(self) -> str:
        """The reading of the config that gave the context length, in words for `describe`."""
        return self._extended[1]

    @property
    def below(self) -> tuple[Patch, ...]:
        """The patches underneath a new one, bottom first; none unless it extends a patched model as such."""
        return self.patches if self.over == "patched" else ()

    @cached_property
    def _extended(self) -> tuple[Rotary, str]:
        """The rotary embedding that a new patch extends, and the reading of the config that gave its context length."""
        if self.over == "patched":
            top = self.patches[-1]
            length = self.context_length or top.length or top.rotary.context_length
            rule = "context_length, as given" if self.context_length else "the extended length of the present patch"
            return top.rotary.scaled(top.method, context_length=length), rule
        rotary, rule = self.embedding.rotary, self.embedding.rule
        if self.over == "original":
            rotary, rule = self.embedding.plain, "the original length of the config"
        if self.context_length is not None:
            return _with_context_length(rotary, self.context_length), "context_length, as given"
        if self.over == "own" and rotary.own is None:
            published = published_length(self.config, rotary.context_length)
            if published is not None:
                return _with_context_length(rotary, published), "as published"
        return rotary, rule

    def bind(self, method: RopeMethod, length: int | None, rotary: Rotary | None = None) -> RopeMethod:
        """Return a method with every missing parameter filled in, as `patch` does it.

        Args:
            method: the method; frequency methods are complete as they are.
            length: the length of the inputs in tokens; None: the extended length of the method.
            rotary: the rotary embedding that the method extends; None: that of a new patch.
        """
        if not isinstance(method, RemappingMethod):
            return method
        rotary = rotary or self.rotary
        stated = method.as_stated(self.config, rotary.context_length)
        return stated.bind(rotary, length, own_temperature=family(self.config.model_type).own_temperature)

    def _check_present_patch(self) -> None:
        """Check that over="patched" has something to extend: a live patch, or one that the config records.

        Raises:
            MethodError: there is no patch, or none that another one can be applied over.
        """
        if self.model is None:
            raise MethodError("over='patched' needs the model itself, not its config alone")
        if not self.patches:
            raise MethodError(
                "over='patched' keeps the present patch underneath, and this model has none; leave it out to extend "
                "the model as loaded"
            )
        top = self.patches[-1].method
        if isinstance(top, RemappingMethod):
            raise MethodError(f"no method can be applied over {top.name}: it changes positions, not frequencies")
        if top.drops_rotation and self.patches[-1].layers is not None:
            raise MethodError(
                f"no method can be applied over {top.name} in chosen layers; without over='patched' it takes its place"
            )

    @property
    def slot(self) -> Slot:
        """The first slot whose layers a method is for; without such a slot, the first slot."""
        return next((slot for slot in self.slots if slot.scaled_layers), self.slots[0])

    @cached_property
    def pairing(self) -> str | None:
        """The dims that the class of the model rotates together, "half" or "interleaved"; None: they are unknown."""
        return run_pairing(self.config) if self.model is None else pairing_of(self.model, self.config)

    @property
    def own_length_dependent(self) -> str | None:
        """The name of a scaling of the model itself that follows the length of the input; None: it has none."""
        ropes = [rope for slot in self.slots for rope in slot.as_loaded.values()]
        return next((rope.method.name for rope in ropes if rope.follows_length), None)


def _with_context_length(rotary: Rotary, context_length: int) -> Rotary:
    """Return a rotary embedding with the same frequencies, whose context length is this number of tokens."""
    if rotary.own is None:
        return replace(rotary, trained_length=context_length)
    return rotary.own.rotary.scaled(rotary.own.method, context_length=context_length)


def check_pairing(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights are, by its config, in a pairing that its class does not run."""
    config: Any = getattr(model, "config", None)
    stated = getattr(config, PAIRING_KEY, None)
    if stated is None:  # most configs say nothing about it; conversions write it
        return
    run = pairing_of(model)
    if run is None or run == stated:
        return
    folder = getattr(config, "_name_or_path", None) or "FOLDER"
    raise CheckpointError(
        f"the config of this model states {PAIRING_KEY} {stated!r}, but the {config.model_type!r} class of "
        f"transformers runs {run!r} weights: the model's output would be meaningless. Convert the folder with "
        f"`{command_line('convert', folder, 'NEW', to=run)}`, or the loaded model with rope.convert(model, to={run!r})"
    )
