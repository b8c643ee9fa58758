"""What publishers state about the context of their models, and how each engine is told of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .registry import figure, markdown_table

if TYPE_CHECKING:
    from rope_ext_hf.patches.recipes import Recipe

NO_SERVER = ("transformers", "gguf")
"""Engines that are left out: transformers is no server, and gguf is what llama.cpp and ollama run."""


@figure
def recipe_table() -> str:
    from rope_ext_hf.patches.recipes import recipes

    def cells(recipe: Recipe) -> tuple[str, ...]:
        entry = f"`{json.dumps(recipe.entry)}`" if recipe.entry else "–"
        extended = f"{recipe.extended_length:,}" if recipe.extended_length else "–"
        given = recipe.arguments(recipe.stated_length)
        arguments = "<br>".join(f"`{name}={value!r}`" for name, value in given.items()) or "–"
        context = f"{recipe.context_length:,}"
        return f"[{recipe.name}]({recipe.source})", context, entry, extended, arguments

    head = ["models", "context as published", "entry to add", "context with it", "arguments of `patch`"]
    return markdown_table(head, map(cells, recipes()))


@figure
def recipe_commands() -> str:
    from rope_ext_hf.patches.recipes import recipes

    extending = (f"### {recipe.name}\n\n{_commands(recipe)}" for recipe in recipes() if recipe.entry)
    return "\n\n" + "\n\n".join(extending) + "\n\n"


def _commands(recipe: Recipe) -> str:
    from rope_ext_hf.engines.base import list_engines
    from rope_ext_hf.errors import ServingError, one_line
    from rope_ext_hf.serving.configs import as_text
    from rope_ext_hf.serving.target import Model, make_target

    config = published_config(recipe)
    model = Model(recipe.example, config, composite=config.model_type.startswith("qwen3_"), specs=[])
    target = make_target(model, **recipe.arguments(config.max_position_embeddings))
    blocks = []
    for name, engine in list_engines().items():
        if name in NO_SERVER:
            continue
        try:
            blocks.append(as_text(engine().config_for(target)))
        except ServingError as error:
            blocks.append(f"# {one_line(error)}")
    return "```console\n" + "\n\n".join(blocks) + "\n```"


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
