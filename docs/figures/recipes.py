"""What publishers state about the context of their models, and how each engine is told of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from docs.figures.registry import figure, markdown_table

if TYPE_CHECKING:
    from rope_ext_hf.patches.recipes import Recipe

BY_FLAGS = ("vllm", "sglang", "llama.cpp")
"""Engines whose command is shown: those that take all they need as flags."""
NO_SERVER = ("transformers", "gguf")
"""Engines that are left out: transformers is no server, and gguf is what llama.cpp and ollama run."""


@figure
def recipe_table() -> str:
    from rope_ext_hf.patches.recipes import recipes

    def cells(recipe: Recipe) -> tuple[str, ...]:
        extended = f"{recipe.extended_length:,}" if recipe.extended_length else "–"
        given = recipe.arguments(recipe.stated_length)
        arguments = "<br>".join(f"`{name}={value!r}`" for name, value in given.items()) or "–"
        return f"[{recipe.name}]({recipe.source})", f"{recipe.context_length:,}", extended, arguments

    return markdown_table(["models", "context", "with the entry", "arguments of `patch`"], map(cells, recipes()))


@figure
def recipe_commands() -> str:
    from rope_ext_hf.patches.recipes import recipes

    extending = (
        f"### {recipe.name}\n\n```json\n{json.dumps(recipe.entry)}\n```\n\n{_commands(recipe)}"
        for recipe in recipes()
        if recipe.entry
    )
    return "\n\n" + "\n\n".join(extending) + "\n\n"


def _commands(recipe: Recipe) -> str:
    """The command of each engine that takes flags, and what the others do."""
    from rope_ext_hf.engines.base import list_engines
    from rope_ext_hf.errors import ServingError, one_line
    from rope_ext_hf.serving.target import Model, make_target

    config = published_config(recipe)
    model = Model(recipe.example, config, composite=config.model_type.startswith("qwen3_"), specs=[])
    target = make_target(model, **recipe.arguments(config.max_position_embeddings))
    shown: dict[str, str] = {}
    by_file: list[str] = []
    refused: dict[str, list[str]] = {}
    for name, engine in list_engines().items():
        if name in NO_SERVER:
            continue
        try:
            served = engine().config_for(target)
        except ServingError as error:
            refused.setdefault(one_line(error).partition("cannot serve ")[2], []).append(name)
            continue
        if name in BY_FLAGS:
            shown[name] = str(served)
        else:
            by_file.append(f"`{name}`")
    text = "```console\n" + "\n\n".join(shown[name] for name in BY_FLAGS if name in shown) + "\n```"
    if by_file:
        text += f"\n\nBy keys of a file, which `serve-config` prints: {', '.join(by_file)}."
    return text + "".join(f"\n\n{', '.join(names)} cannot serve {why}." for why, names in refused.items())


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
