"""A model that is known by its config alone: what a patch would extend, and the config that it would be saved with.

Planning needs no weights: which engines serve a method, and which methods a model takes, follows from its config.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method, stated_length
from rope_ext_hf.models.config import rope_by_sizes, rope_dict
from rope_ext_hf.models.families import family
from rope_ext_hf.models.layer_types import SLIDING
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.models.patch_records import Patch, saved_patches
from rope_ext_hf.models.patched_config import config_encoding, softmax_scale, write_settings
from rope_ext_hf.models.recipes import Recipe, find_recipe, recipe_note, recipe_warning
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.planning import plan_patch
from rope_ext_hf.patches.small_replica import refusal, small_replica

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ConfigModel:
    """A model as its text config describes it, without the patches that it carries.

    Attributes:
        config: the text config without patches.
        patches: the patches that the model carries, bottom first.
        rope: what this config says of the rope.
        whole: a function that makes the whole model, on the meta device if it is not in memory.
    """

    def __init__(
        self, config: Any, patches: Sequence[Patch] = (), whole: Callable[[], nn.Module] | None = None
    ) -> None:
        """Read a text config that has no patch recorded in it; `whole` defaults to a model of that config.

        Raises:
            UnsupportedModelError: a model without rotary embeddings, or with several.
        """
        self.config, self.patches = config, list(patches)
        self.whole: Callable[[], Any] = whole or self.empty_model
        self.rope = ModelRope.of_config(config)
        _ = self.rope.embedding  # raises the error for several

    @staticmethod
    def parts_of(model: nn.Module) -> tuple[Any, list[Patch]]:
        """Return the text config of a model in memory without its patches, and these patches, bottom first."""
        rope = ModelRope.of_model(model)
        return rope.config, list(rope.patches)

    @classmethod
    def of_record(cls, config: Any, record: Mapping[str, Any] | None, **arguments: Any) -> Self:
        """Return the model that a text config describes, with the patches in the record that its folder holds."""
        return cls(config=config, patches=[] if record is None else saved_patches(record), **arguments)

    def planned_patch(
        self,
        method: str | RopeMethod,
        *,
        factor: float | None = None,
        target_length: Length | None = None,
        over: str = "own",
        context_length: Length | None = None,
        **params: Any,
    ) -> Patch:
        """Return the patch that `rope_ext_hf.patch` would apply, with every parameter of the method filled in."""
        rope, target = self.rope.extending(over, context_length), parse_length(target_length)
        resolved = resolve_method(method, rope.rotary, factor=factor, target_length=target, **params)
        length = target or stated_length(resolved, rope.rotary, factor)
        bound = rope.bind(resolved, length)
        return Patch(bound, rope.rotary, length or bound.extended_length(rope.rotary))

    def patched_config(self, patch: Patch) -> Any:
        """Return a copy of the text config as the patched model would be saved.

        Raises:
            UnsupportedModelError: no full-attention layer rotates, and the patch is for these.
        """
        self.rope.layers.check_method(patch.method, patch.layers)
        encoding = config_encoding(self.config, patch, self.rope.layer_types[0])
        patched = copy.deepcopy(self.config)
        write_settings(patched, encoding, list(self.rope.layer_types))
        patched.max_position_embeddings = encoding.saved_length
        return patched

    @property
    def softmax_scale(self) -> float:
        """The number that attention multiplies its softmax scale by, in DeepSeek and its relatives; else 1."""
        return softmax_scale(family(self.config.model_type), rope_dict(self.config, self.rope.layer_types[0]))

    @property
    def recipe(self) -> Recipe | None:
        """The publisher's statement about the context length; None if no statement is known."""
        return find_recipe(self.config)

    def published_note(self, rotary: Rotary, method: RopeMethod | None = None) -> str | None:
        """Return what the publisher states about the model's context in a sentence, see `recipe_note`; else None."""
        return recipe_note(self.config, rotary, method)

    def notes_on(self, patch: Patch) -> tuple[str, ...]:
        """Return notes on layers that a patch does not reach, and on a published setting that it differs from."""
        notes = (
            self.rope.layers.unrotated_note(patch.method),
            recipe_warning(self.config, patch.rotary, patch.method, patch.target_length),
        )
        return tuple([note for note in notes if note])

    def sliding_note(self, length: int) -> str | None:
        """Return a sentence on what a patch for a length in tokens does to sliding-window layers; None: nothing."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        for layer_type, settings in parameters.items():
            if layer_type in SLIDING and isinstance(settings, Mapping):
                return self.rope.layers.sliding_note(rope_by_sizes(self.config, layer_type), length)[0]
        return self.rope.layers.sliding_note(None, length)[0]

    @cached_property
    def can_be_tried(self) -> bool:
        """True if a small model of its class can be built, to try there what `patch` refuses."""
        return small_replica(self.config.to_json_string(use_diff=False)) is not None

    def refusal(self, method: str | RopeMethod, **arguments: Any) -> RopeExtError | None:
        """Return the error with which `patch` would refuse a method on this model.

        The whole model is asked, which may have more rotary modules than its text config tells, and then a small one,
        which computes. None: the patch would be accepted, or it could not be tried.

        The arguments are those of `rope_ext_hf.patch`.
        """
        if self._whole_model is not None:
            try:
                with warnings.catch_warnings(action="ignore"):
                    plan_patch(self._whole_model, method, **arguments)
            except (MethodError, UnsupportedModelError) as error:
                return error
        return refusal(self.config, method, **arguments)

    @cached_property
    def _whole_model(self) -> Any:
        """The whole model; None if its class is not installed."""
        try:
            return self.whole()
        except (CheckpointError, UnsupportedModelError):
            return None

    def empty_model(self) -> PreTrainedModel:
        """Return a model of the config on the meta device; CheckpointError if its class is not installed."""
        return empty_model(self.config)
