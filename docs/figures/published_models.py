"""The table of the models that people extend most, with what the commands do with their published configs."""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from docs.figures.registry import figure, markdown_table

if TYPE_CHECKING:
    from tests.tools.support.serving_models import Published

_BFLOAT16 = 2
"""Bytes of a key or a value."""


@contextlib.contextmanager
def _published() -> Iterator[dict[str, Published]]:
    """Yield the models; while this lasts, each has a folder below the working directory with its name on the Hub."""
    from tests.tools.support.serving_models import PUBLISHED

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in PUBLISHED.values():
            model.write(Path())
        yield PUBLISHED


@figure
def published_models() -> str:
    """Return a row per model: its lengths, its own scaling, what `extend` chooses, who serves that, and its memory."""
    from rope_ext_hf.reading.cost.memory import cached_bytes
    from rope_ext_hf.tools.advice.advising import advise
    from rope_ext_hf.tools.serving.configs import open_model

    rows = []
    with _published() as models:
        for model in models.values():
            advice, config = advise(model.name, model.target_length), open_model(model.name).config
            served = [name for name in _engines() if name in advice.served]
            refused = [name for name in _engines() if name not in advice.served]
            rows.append(
                [
                    f"`{model.name}`",
                    f"{advice.context_length:,}",
                    ", ".join(re.findall(r"^[\w-]+", "\n".join(advice.extended_by), re.MULTILINE)) or "–",
                    f"{model.target_length:,}",
                    _method_of_extend(model),
                    ", ".join(refused) if served and refused else "–" if served else "all",
                    f"{cached_bytes(config, model.target_length, width=_BFLOAT16) / 1e9:.1f} GB",
                ]
            )
    heads = ("model", "context length", "its own scaling", "target", "`extend` takes", "engines that cannot serve it")
    return markdown_table(
        (*heads, "keys and values of one input, bfloat16"),
        rows,
        "An engine in the sixth column serves none of the recommended methods at the target length. "
        "`--dry-run --all` says why.",
    )


def _engines() -> list[str]:
    from rope_ext_hf.tools.engines.base import list_engines

    return [name for name in list_engines() if name not in ("transformers", "gguf")]


def _method_of_extend(model: Published) -> str:
    """Return what `extend` takes, for the first engine that serves it."""
    from rope_ext_hf.errors import ServingError
    from rope_ext_hf.tools.advice.extending import plan_extension
    from rope_ext_hf.tools.engines.base import usual_server
    from rope_ext_hf.tools.serving.serving_options import Extending

    for engine in (usual_server(), *_engines()):
        with contextlib.suppress(ServingError):
            plan = plan_extension(model.name, Extending(target_length=model.target_length, engine=engine))
            return f"`{plan.method}` x{plan.target_length / plan.context_length:g}, for {engine}"
    return "nothing"
