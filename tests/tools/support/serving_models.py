"""Published configs of the families in docs/engines.md, as models that can be served.

>>> served_model("Llama").config.model_type
'llama'
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.models.model_classes import class_to_load
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.support.method_examples import example_method
from tests.support.tiers import needs_family

FOLDER = Path(__file__).parents[3] / "conformance" / "configurations"
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
"""By family, its file in conformance/configurations."""
LAYERS = {
    "Gemma 3": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window_pattern": 6,
    }
}
"""The published pattern of layers, where the file has fewer layers and engines assume the published pattern."""


class Published(NamedTuple):
    """A published model.

    Attributes:
        name: its name on the Hub.
        file: its file in conformance/configurations.
        sizes: the published settings that replace the small ones in that file, as far as they matter here.
        context_length: its context length in tokens: the published one, or for a scaled model that of its config.
        target_length: the length that docs/recipes.md extends it to: the published one, or twice the context length.
    """

    name: str
    file: str
    sizes: dict[str, Any]
    context_length: int
    target_length: int

    def write(self, folder: Path) -> Path:
        """Write the model's config below a folder, under its name on the Hub, and return its folder."""
        config = json.loads((FOLDER / f"{self.file}.json").read_text(encoding="utf-8"))["config"]
        text = config.get("text_config", config)
        text.update(self.sizes)
        out = folder / self.name
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return out

    def write_weights(self, folder: Path, divisor: int) -> Path:
        """Write a small random model of the same class that reads bytes, with all lengths divided by `divisor`."""
        config = json.loads((FOLDER / f"{self.file}.json").read_text(encoding="utf-8"))["config"]
        letters = {letter: number for number, letter in enumerate(["<pad>", "</s>", *ByteLevel.alphabet()])}
        of_bytes = tokenizers.Tokenizer(BPE(letters, []))
        of_bytes.pre_tokenizer, of_bytes.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, pad_token="<pad>", eos_token="</s>")
        text = config.get("text_config", config)
        text.update({name: value for name, value in self.sizes.items() if name == "rope_scaling"})
        text.update(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1, pad_token_id=0)
        for values in (text, text.get("rope_scaling") or {}):
            for key in _LENGTHS & values.keys():
                values[key] = values[key] and max(8, values[key] // divisor)
        small = {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 1,
            "intermediate_size": 16,
            "deepstack_visual_indexes": [0],
        }
        vision = {"vision_config": small | {"out_hidden_size": text["hidden_size"]}} if text is not config else {}
        shape = AutoConfig.for_model(config.pop("model_type"), **config, **vision)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            class_to_load(shape).from_config(shape).save_pretrained(out := folder / self.name)
        tokenizer.save_pretrained(out)
        return out


_LENGTHS = {"max_position_embeddings", "original_max_position_embeddings", "initial_context_length", "sliding_window"}


def _shape(layers: int, hidden: int, heads: int, key_heads: int, **others: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (layers, hidden, heads, key_heads), strict=True)) | others


_K = 1024
PUBLISHED = {
    "Qwen3": Published("Qwen/Qwen3-8B", "qwen3-8b-yarn", _shape(36, 4096, 32, 8, rope_scaling=None), 32 * _K, 128 * _K),
    "Qwen2.5": Published(
        "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-yarn", _shape(28, 3584, 28, 4, rope_scaling=None), 32 * _K, 128 * _K
    ),
    "Qwen3-VL": Published("Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b", _shape(36, 4096, 32, 8), 256 * _K, 768 * _K),
    "Llama 3.1": Published(
        "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1", _shape(32, 4096, 32, 8), 128 * _K, 256 * _K
    ),
    "Llama 3.2": Published(
        "meta-llama/Llama-3.2-1B-Instruct", "llama-3.2", _shape(16, 2048, 32, 8), 128 * _K, 256 * _K
    ),
    "Mistral 7B": Published(
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", _shape(32, 4096, 32, 8), 32 * _K, 64 * _K
    ),
    "Gemma 3": Published(
        "google/gemma-3-4b-it", "gemma-3-4b",
        _shape(34, 2560, 8, 4, layer_types=None, sliding_window_pattern=6), 128 * _K, 256 * _K,
    ),
    "gpt-oss": Published(
        "openai/gpt-oss-20b", "gpt-oss-20b", _shape(24, 2880, 64, 8, layer_types=None), 128 * _K, 256 * _K
    ),
    "Phi-3 128k": Published(
        "microsoft/Phi-3-mini-128k-instruct", "phi-3-mini-128k", _shape(32, 3072, 32, 32), 128 * _K, 256 * _K
    ),
    "DeepSeek-V3": Published(
        "deepseek-ai/DeepSeek-V3", "deepseek-v3", _shape(61, 7168, 128, 128, kv_lora_rank=512), 160 * _K, 320 * _K
    ),
}  # fmt: skip
"""The models that people extend most, by their title in docs/recipes.md."""


def published_config(family: str) -> dict[str, Any]:
    """Return the published config of a family or file, with small sizes where they do not matter."""
    entry: dict[str, Any] = json.loads((FOLDER / f"{SERVED.get(family, family)}.json").read_text(encoding="utf-8"))[
        "config"
    ]
    return entry | LAYERS.get(family, {})


@functools.cache
def served_model(family: str) -> Model:
    """Return a family's model, made from its config alone."""
    settings = published_config(family)
    needs_family(settings["model_type"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    text = config.get_text_config()
    return Model(family, text, composite=text is not config, patches=[])


def methods_for(family: str, over: str) -> list[RopeMethod]:
    """Return one instance of every registered method."""
    described = served_model(family).rope.embedding
    rotary = described.rotary if over == "own" else described.plain
    return [example_method(cls, rotary) for cls in list_methods().values()]


def targets(family: str, over: str) -> list[tuple[RopeMethod, Target | RopeExtError]]:
    """Return every method with the target that an engine would compute, or with the error why none can."""
    result: list[tuple[RopeMethod, Target | RopeExtError]] = []
    for method in methods_for(family, over):
        try:
            result.append((method, make_target(served_model(family), method, over=over)))
        except RopeExtError as error:
            result.append((method, error))
    return result


def serve(engine: str, target: Target) -> tuple[ServingConfig | None, str]:
    """Return the engine's config and an empty string, or None and the message of the refusal."""
    try:
        return find_engine(engine).config_for(target), ""
    except ServingError as error:
        return None, str(error)
