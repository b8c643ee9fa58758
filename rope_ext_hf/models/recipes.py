"""The statements of publishers about the context of their models (`recipes.toml`), and patches compared with them."""

# Annotations are not postponed: `strict` checks values against the types themselves.
from dataclasses import dataclass
from functools import cache
from typing import Any

from huggingface_hub.dataclasses import strict

from rope_ext_hf.files.whole import package_table
from rope_ext_hf.methods.base import RopeMethod, Rotary

__all__ = ["Recipe", "find_recipe", "recipe_note", "recipe_warning"]


@strict
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The context of a model and its extension, as the publisher states them; recipes.toml explains the attributes."""

    name: str
    example: str
    model_types: list[str]
    where: dict[str, Any]
    context_length: int
    source: str
    entry: dict[str, Any] | None = None
    extended_length: int | None = None

    def fits(self, config: Any) -> bool:
        """Return whether a text config describes the model that this recipe is about.

        The config has no patches, and one of the model types of the recipe.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        values = config.to_dict() | rope.get("full_attention", rope)
        for key, stated in self.where.items():
            if values.get(key) not in (stated if isinstance(stated, list) else [stated]):
                return False
        return True

    @property
    def stated_length(self) -> int:
        """The `max_position_embeddings` of the published config; of several configs, the largest one."""
        stated = self.where["max_position_embeddings"]
        return int(max(stated) if isinstance(stated, list) else stated)

    def arguments(self, stated_length: int) -> dict[str, Any]:
        """Return the arguments of `patch` that give the published result for a config that states `stated_length`."""
        arguments: dict[str, Any] = {}
        if self.entry is not None:
            arguments["method"] = self.entry["rope_type"]
        if stated_length != self.context_length:
            arguments["context_length"] = self.context_length
        if self.entry is not None and self._length_is_exact:
            arguments["target_length"] = self.extended_length
        elif self.entry is not None:
            arguments["factor"] = self.entry["factor"]
        return arguments

    @property
    def _length_is_exact(self) -> bool:
        """True if the extended length is the factor times the context length; publishers may round it."""
        return self.entry is not None and self.entry["factor"] * self.context_length == self.extended_length

    def reaches(self, length: int) -> bool:
        """Return whether a target length lies above the published context length, and within the extended length.

        False where the published extended length is rounded. `length`: in tokens.
        """
        return self._length_is_exact and self.context_length < length <= (self.extended_length or 0)

    def equals(self, method: RopeMethod, rotary: Rotary) -> bool:
        """Return whether a method over this rotary embedding is the extension that the publisher states."""
        return (
            self.entry is not None
            and rotary.own is None
            and rotary.context_length == self.context_length
            and (method.name, getattr(method, "factor", None)) == (self.entry["rope_type"], self.entry["factor"])
        )


@cache
def recipes() -> tuple[Recipe, ...]:
    """Return the recipes of recipes.toml, in its order."""
    return tuple([Recipe(**values) for values in package_table("rope_ext_hf.models", "recipes.toml")["recipe"]])


def find_recipe(config: Any) -> Recipe | None:
    """Return the recipe for the model of a text config without patches; None where nothing is published."""
    for recipe in recipes():
        if config.model_type in recipe.model_types and recipe.fits(config):
            return recipe
    return None


def published_length(config: Any, stated: int) -> int | None:
    """Return the published context length in tokens, which a patch extends, where the config states another length.

    It holds for target lengths beyond the published extended length too.

    Args:
        config: the text config without patches.
        stated: the length in tokens that the model is for by its config.
    """
    recipe = find_recipe(config)
    return None if recipe is None or recipe.context_length == stated else recipe.context_length


def recipe_note(config: Any, rotary: Rotary, method: RopeMethod | None = None) -> str | None:
    """Return a line on what is published about the context of a model, with the arguments of `patch` that give it.

    None where nothing is published, or the model as loaded is already as published.

    Args:
        config: the text config without patches.
        rotary: the rotary embedding that is extended.
        method: the method of the patch; None: the model runs as loaded.
    """
    recipe = find_recipe(config)
    if recipe is None:
        return None
    if method is not None and recipe.equals(method, rotary):
        return f"This is as published for {recipe.name}: {recipe.source}"
    stated = config.max_position_embeddings
    arguments = ", ".join(f"{name}={value!r}" for name, value in recipe.arguments(stated).items())
    if recipe.entry is not None:
        rope_type, factor = recipe.entry["rope_type"], recipe.entry["factor"]
        published = (
            f"{rope_type} with factor {factor:g} over {recipe.context_length:,} tokens, for "
            f"{recipe.extended_length:,}. To get that: {arguments}."
        )
    elif recipe.context_length in (stated, rotary.context_length):
        return None
    else:
        published = (
            f"{recipe.context_length:,} tokens; its config states {stated:,}. To extend from there: {arguments}."
        )
    return f"Published for {recipe.name}: {published} {recipe.source}"


def recipe_warning(config: Any, rotary: Rotary, method: RopeMethod, length: int | None) -> str | None:
    """Return a warning where a patch could be mistaken for the published one but is not; None for other patches.

    Such a patch has the published method with other parameters. The warning is given if the factor or the extended
    length is the published one, or if the patch extends another context length than the published patch.

    Args:
        config: the text config without patches.
        rotary: the rotary embedding that the method extends.
        method: the method of the patch.
        length: its extended length in tokens; None: it has none.
    """
    recipe = find_recipe(config)
    if recipe is None or recipe.entry is None or recipe.equals(method, rotary):
        return None
    if method.name != recipe.entry["rope_type"]:
        return None
    same_extent = length == recipe.extended_length or getattr(method, "factor", None) == recipe.entry["factor"]
    another_context = rotary.own is None and rotary.context_length != recipe.context_length
    if not (same_extent or another_context):
        return None
    return f"this patch is not the published one. {recipe_note(config, rotary, method)}"
