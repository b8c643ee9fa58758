"""Published configs of the families in docs/engines.md, as models that can be served.

>>> served_model("Llama").config.model_type
'llama'
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rope_ext_hf.engines.base import ServingConfig, Target, find_engine
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.serving.target import Model, make_target
from tests.support.method_examples import example_method

FOLDER = Path(__file__).parents[2] / "conformance" / "configurations"
SERVED = {
    "Llama": "llama-3.1",
    "Qwen3": "qwen3-8b-yarn",
    "Mistral": "mistral-7b-v0.3",
    "Phi-3": "phi-3-mini-128k",
    "Gemma 3": "gemma-3-4b",
    "gpt-oss": "gpt-oss-20b",
    "DeepSeek": "deepseek-v3",
    "Qwen3-VL": "qwen3-vl-8b",
}
"""Family -> file in conformance/configurations."""
LAYERS = {
    "Gemma 3": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window_pattern": 6,
    }
}
"""The pattern of layers as published, where the file has fewer layers and engines take the pattern for given."""


def published_config(family: str) -> dict[str, Any]:
    """The config of a family or file as published, with small sizes where they do not matter."""
    entry: dict[str, Any] = json.loads((FOLDER / f"{SERVED.get(family, family)}.json").read_text(encoding="utf-8"))[
        "config"
    ]
    return entry | LAYERS.get(family, {})


@functools.cache
def served_model(family: str) -> Model:
    """A family's model, from its config alone."""
    settings = published_config(family)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    text = config.get_text_config()
    return Model(family, text, composite=text is not config, specs=[])


def methods_for(family: str, over: str) -> list[RopeMethod]:
    """One instance of every registered method."""
    described = served_model(family).described
    rotary = described.rotary if over == "own" else described.plain
    return [example_method(cls, rotary) for cls in list_methods().values()]


def targets(family: str, over: str) -> list[tuple[RopeMethod, Target | RopeExtError]]:
    """Every method with what an engine is to compute, or with the reason why none could."""
    result: list[tuple[RopeMethod, Target | RopeExtError]] = []
    for method in methods_for(family, over):
        try:
            result.append((method, make_target(served_model(family), method, over=over)))
        except RopeExtError as error:
            result.append((method, error))
    return result


def serve(engine: str, target: Target) -> tuple[ServingConfig | None, str]:
    """The config, or the message of the refusal."""
    try:
        return find_engine(engine).config_for(target), ""
    except ServingError as error:
        return None, str(error)
