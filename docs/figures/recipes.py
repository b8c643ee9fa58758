"""Statements of publishers about the context of their models, and the entries that extend it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from docs.figures.registry import figure, markdown_table

if TYPE_CHECKING:
    from rope_ext_hf.models.recipes import Recipe


@figure
def recipe_table() -> str:
    from rope_ext_hf.models.recipes import recipes

    def cells(recipe: Recipe) -> tuple[str, ...]:
        extended = f"{recipe.extended_length:,}" if recipe.extended_length else "–"
        given = recipe.arguments(recipe.stated_length)
        arguments = "<br>".join(f"`{name}={value!r}`" for name, value in given.items()) or "–"
        return f"[{recipe.name}]({recipe.source})", f"{recipe.context_length:,}", extended, arguments

    return markdown_table(["models", "context", "with the entry", "arguments of `patch`"], map(cells, recipes()))


@figure
def recipe_entries() -> str:
    from rope_ext_hf.models.recipes import recipes

    rows = ((recipe.name, f"`{json.dumps(recipe.entry)}`") for recipe in recipes() if recipe.entry)
    return markdown_table(["models", "entry"], rows)


def published_config(recipe: Recipe) -> Any:
    """A text config with the published values of the models of a recipe that has an entry."""
    from transformers import AutoConfig

    values = {key: value[0] if isinstance(value, list) else value for key, value in recipe.where.items()}
    kept = {key: value for key, value in (recipe.entry or {}).items() if key not in _SCALING}
    rope = {key: values.pop(key) for key in ("rope_theta", "rope_type")} | kept
    config = AutoConfig.for_model(recipe.model_types[0], **values, rope_parameters=rope)
    config.head_dim = getattr(config, "head_dim", None) or 128  # of Qwen2.5, whose class divides sizes
    return config


_SCALING = ("rope_type", "factor", "original_max_position_embeddings")
