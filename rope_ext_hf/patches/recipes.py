"""What publishers state about the context of their models, by `recipes.toml`, and how a result compares with it."""

# No postponed annotations: `strict` checks values against the types themselves.
from dataclasses import dataclass
from functools import cache
from typing import Any

from huggingface_hub.dataclasses import strict

from rope_ext_hf.files import package_table
from rope_ext_hf.methods.base import RopeMethod, Rotary


@strict
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long the context of a model is, as its publisher states it; recipes.toml explains the attributes."""

    name: str
    example: str
    model_types: list[str]
    where: dict[str, Any]
    context_length: int
    source: str
    entry: dict[str, Any] | None = None
    extended_length: int | None = None

    def fits(self, config: Any) -> bool:
        """Whether a text config of one of the model types, without patches, is one of these models."""
        rope = getattr(config, "rope_parameters", None) or {}
        values = config.to_dict() | rope.get("full_attention", rope)
        for key, stated in self.where.items():
            if values.get(key) not in (stated if isinstance(stated, list) else [stated]):
                return False
        return True

    @property
    def stated_length(self) -> int:
        """`max_position_embeddings` of the published config, the largest of several."""
        stated = self.where["max_position_embeddings"]
        return int(max(stated) if isinstance(stated, list) else stated)

    def arguments(self, stated_length: int) -> dict[str, Any]:
        """The arguments of `patch` that give the published result where the config states so many tokens."""
        context = {} if stated_length == self.context_length else {"context_length": self.context_length}
        if self.entry is None:
            return context
        extended = {"target_length": self.extended_length} if self._whole else {"factor": self.entry["factor"]}
        return {"method": self.entry["rope_type"]} | context | extended

    @property
    def _whole(self) -> bool:
        """Whether the extended length is the factor times the context length, neither rounded nor for images."""
        return self.entry is not None and self.entry["factor"] * self.context_length == self.extended_length

    def reaches(self, length: int) -> bool:
        """Whether a target length of so many tokens over the published context length is as published."""
        return self._whole and self.context_length < length <= (self.extended_length or 0)

    def equals(self, method: RopeMethod, rotary: Rotary) -> bool:
        """Whether a method over a rotary embedding is the entry."""
        return (
            self.entry is not None
            and rotary.own is None
            and rotary.context_length == self.context_length
            and (method.name, getattr(method, "factor", None)) == (self.entry["rope_type"], self.entry["factor"])
        )


@cache
def recipes() -> tuple[Recipe, ...]:
    return tuple([Recipe(**values) for values in package_table("rope_ext_hf.patches", "recipes.toml")["recipe"]])


def find_recipe(config: Any) -> Recipe | None:
    """The recipe of a text config without patches; None: there is none."""
    return next((each for each in recipes() if config.model_type in each.model_types and each.fits(config)), None)


def published_length(config: Any, stated: int) -> int | None:
    """The published context length in tokens, where it is another than the config states: it is what is extended.

    It holds beyond the published extended length too. `config` is the text config without patches, `stated` the length
    in tokens that the model is for, as its config is read.
    """
    recipe = find_recipe(config)
    return None if recipe is None or recipe.context_length == stated else recipe.context_length


def recipe_note(config: Any, rotary: Rotary, method: RopeMethod | None = None) -> str | None:
    """What is published about the context of a model, with the arguments of `patch` that give it, in one line.

    None where nothing is published, or the model as loaded is what is. `config` is the text config without patches;
    without a method it is for the model as loaded.
    """
    recipe = find_recipe(config)
    if recipe is None:
        return None
    if method is not None and recipe.equals(method, rotary):
        return f"This is as published for {recipe.name}: {recipe.source}"
    read = config.max_position_embeddings
    arguments = ", ".join(f"{name}={value!r}" for name, value in recipe.arguments(read).items())
    if recipe.entry is not None:
        what = f"{recipe.entry['rope_type']} with factor {recipe.entry['factor']:g} over {recipe.context_length:,}"
        extended = f"{what} tokens, for {recipe.extended_length:,}. To get that: {arguments}."
        return f"Published for {recipe.name}: {extended} {recipe.source}"
    if recipe.context_length in (read, rotary.context_length):
        return None
    differs = f"{recipe.context_length:,} tokens; its config states {read:,}. To extend from there: {arguments}."
    return f"Published for {recipe.name}: {differs} {recipe.source}"


def recipe_warning(config: Any, rotary: Rotary, method: RopeMethod, length: int | None) -> str | None:
    """`recipe_note` where a patch is easily taken for what is published: by its factor, length in tokens or base."""
    recipe = find_recipe(config)
    if recipe is None or recipe.entry is None or recipe.equals(method, rotary):
        return None
    same = length == recipe.extended_length or getattr(method, "factor", None) == recipe.entry["factor"]
    another_base = rotary.own is None and rotary.context_length != recipe.context_length
    if method.name != recipe.entry["rope_type"] or not (same or another_base):
        return None
    return f"this patch is not the published one. {recipe_note(config, rotary, method)}"
