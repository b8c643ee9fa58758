"""A page for each of the models that people extend most, docs/model-*.md, and the table that leads to them.

Everything is what the commands say of the published config: `extend`, `serve-config`, and which
lengths `need` reads.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.figures.registry import FIGURES, figure, markdown_table

if TYPE_CHECKING:
    from rope_ext_hf.tools.advice.advice import Advice
    from tests.tools.support.serving_models import Published

_SERVE, _LONGEST = "serve with ", 700
"""How goals of commands of engines begin in an advice, and characters of a command that is shown on a page."""
_DTYPES = {"float32": 4, "bfloat16": 2, "8 bits": 1}


def page_name(title: str) -> str:
    """The name of a model's page and of the figure on it: "model-llama-3-1" for "Llama 3.1"."""
    return f"model-{title.lower().replace(' ', '-').replace('.', '-')}"


@contextlib.contextmanager
def _published() -> Iterator[dict[str, Published]]:
    """The models; each has a folder, as long as this lasts, that is called as on the Hub."""
    from tests.tools.support.serving_models import PUBLISHED

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in PUBLISHED.values():
            model.write(Path())
        yield PUBLISHED


@figure
def model_pages() -> str:
    """What each model is extended to, by what, and which engines serve that."""
    rows = []
    with _published() as models:
        for title, model in models.items():
            advice = _advice(title)
            engines = {name for name in advice.served if name not in ("transformers", "gguf")}
            refused = [name for name in _engines() if name not in engines]
            served = f"all but {', '.join(refused)}" if refused else "all engines"
            rows.append(
                [
                    f"[{title}]({page_name(title)}.md)",
                    f"{model.target_length:,}",
                    _extension(model)[0],
                    served if engines else "no engine alone",
                ]
            )
    heads = ("model", "extended to", "`extend` takes", "served by")
    return markdown_table(heads, rows)


@cache
def _advice(title: str) -> Advice:
    from rope_ext_hf.tools.advice.advising import advise
    from tests.tools.support.serving_models import PUBLISHED

    return advise(PUBLISHED[title].name, PUBLISHED[title].target_length)


def _engines() -> list[str]:
    from rope_ext_hf.tools.engines.base import list_engines

    return [name for name in list_engines() if name not in ("transformers", "gguf")]


def _extension(model: Published) -> tuple[str, str]:
    """What `extend` takes, for the first engine that serves it, and the command."""
    from rope_ext_hf.errors import ServingError
    from rope_ext_hf.questions import command_line
    from rope_ext_hf.tools.advice.extending import plan_extension
    from rope_ext_hf.tools.engines.base import usual_server
    from rope_ext_hf.tools.serving.questions import Extending

    for engine in (usual_server(), *_engines()):
        with contextlib.suppress(ServingError):
            asked = Extending(target_length=model.target_length, engine=engine)
            plan = plan_extension(model.name, asked)
            taken = f"{plan.method} x{plan.target_length / plan.context_length:g} for {engine}"
            return taken, f"`{command_line('extend', model.name, **asked.options)}`: {taken}"
    return "nothing", "refused: no engine serves it without the plug-in of this package"


def _model_page(title: str) -> str:
    with _published() as models:
        return "\n\n" + "\n\n".join(filter(None, _sections(title, models[title]))) + "\n\n"


def _sections(title: str, model: Published) -> Iterator[str]:
    from rope_ext_hf.patches.recipes import find_recipe
    from rope_ext_hf.tools.serving.configs import open_model

    advice, config = _advice(title), open_model(model.name).config
    recipe, target = find_recipe(config), model.target_length
    stated = config.max_position_embeddings
    yield (
        f"How `{model.name}` gets beyond {advice.context_length:,} tokens. All of this is what the commands say of its "
        "published config; no weights were read. For other sizes of the family put their name into the commands."
    )
    differs = "" if stated == advice.context_length else f"; its config states {stated:,}"
    facts = [
        ("context", f"{advice.context_length:,} tokens ({advice.context_rule}){differs}"),
        ("extended by", "; ".join(advice.extended_by) or "nothing"),
    ]
    if recipe is not None:
        longer = f"{recipe.extended_length:,} tokens with the entry below" if recipe.entry else "nothing longer"
        facts.append(("published", f"{recipe.context_length:,} tokens, and {longer} ([source]({recipe.source}))"))
    facts += [
        ("all steps at once", _extension(model)[1]),
    ]
    yield markdown_table(("", ""), facts).strip()
    if recipe is not None and recipe.entry:
        yield f"```json\n{json.dumps(recipe.entry)}\n```"
    yield f"## To {target:,} tokens"
    yield markdown_table(("for", "candidates"), [(k, ", ".join(v)) for k, v in advice.choices.items()]).strip()
    yield "\n".join(f"- {note}" for note in advice.notes) or "[Choosing a method](choosing.md) explains them."
    yield "## Serve it"
    yield from _serving(advice)
    yield "## What it costs"
    yield (
        "Measured on small models ([which, and how](choosing.md)), in bits per byte over the loss as loaded at the "
        f"context length; inputs within {advice.context_length:,} tokens, and inputs of {target:,}:"
    )
    rows = [(f"`{each.method}`", each.kind, each.short_inputs, each.rises) for each in advice.methods if each.fits]
    yield markdown_table(("method", "kind", "short inputs", "at this length"), rows).strip()
    of_type = [each for each in advice.reported if config.model_type in each.model_types]
    yield "\n".join(f"- {each} ([source]({each.url}))" for each in of_type) or (
        "No paper known here reports numbers on models of this type."
    )
    yield "## Memory of keys and values"
    yield _memory(config, advice.context_length, target)


def _serving(advice: Advice) -> Iterator[str]:
    """The commands of each engine, and the engines that do not serve the method that is advised."""
    commands = {goal.removeprefix(_SERVE): lines for goal, lines in advice.commands.items() if goal.startswith(_SERVE)}
    by_file = []
    for first, engines in _alike({name: lines[0].removesuffix(name) for name, lines in commands.items()}).items():
        names = ", ".join(f"`{name}`" for name in engines)
        yield f"```console\n{first}ENGINE\n```\n\nprints what an engine is given ({names}):"
        for name in engines:
            shown = [line for line in commands[name][1:] if len(line) < _LONGEST]
            if len(shown) == len(commands[name]) - 1 > 0:
                text = "\n".join(shown).replace(" --", " \\\n  --")
                yield f"{name}:\n\n```console\n{text}\n```"
            else:
                by_file.append(f"`{name}`")
    if by_file:
        yield f"By keys of a file or long lists, which the command prints: {', '.join(by_file)}."
    chosen = next((name for name in advice.served.values() if name), None)
    refusals = next((each.refusals for each in advice.methods if each.method == chosen), {})
    reasons = {n: text[max(0, text.find("cannot")) :].rstrip(".") for n, text in refusals.items() if n in _engines()}
    yield "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in _alike(reasons).items())


def _alike(texts: dict[str, str]) -> dict[str, list[str]]:
    """The names that have each text."""
    return {text: [name for name, other in texts.items() if other == text] for text in texts.values()}


def _memory(config: Any, shortest: int, longest: int) -> str:
    from rope_ext_hf.reading.cache_size import cached_bytes

    lengths = sorted({shortest // 4, shortest // 2, shortest, longest // 2, longest})
    rows = [
        [f"{length:,}", *(f"{cached_bytes(config, length, width=width) / 1e9:,.2f} GB" for width in _DTYPES.values())]
        for length in lengths
    ]
    note = "Of one input; weights and activations come on top."
    return markdown_table(("tokens", *_DTYPES), rows, note).strip()


def _register() -> None:
    from tests.tools.support.serving_models import PUBLISHED

    for title in PUBLISHED:
        FIGURES[page_name(title)] = lambda title=title: _model_page(title)  # type: ignore[misc]


_register()
