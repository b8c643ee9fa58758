"""The rotary classes of vLLM, SGLang and ExLlamaV3 as ports, out of their wheels, with everything else stood in for.

Each gets what its model file hands to it for a config. Families that an engine runs by the classes of transformers, or
has no model file for, are not offered.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from checks.engine_classes import Finder, exllamav3_rope
from checks.llama_cpp_engine import write_gguf
from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools.engines.base import engine_table, find_engine
from rope_ext_hf.tools.engines.gguf_rules import ARCHITECTURES, converted
from rope_ext_hf.tools.engines.programs.exllamav3 import ExLlamaV3
from rope_ext_hf.tools.engines.programs.llama_cpp import LlamaCpp
from rope_ext_hf.tools.engines.programs.vllm import DEEPSEEK_FAMILIES, INTERLEAVED_FAMILIES
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.gguf.rewriting import rewrite
from tests.conformance import models

Config = dict[str, Any]
TABLE = 1 << 17
"""Positions of which tables are computed, whatever their length."""
INTERLEAVED = INTERLEAVED_FAMILIES | {"llama4_text", "glm4v_text", "mistral4"}
NOT_IN_SGLANG = frozenset({"ministral3", "mistral4", "internlm3", "cohere", "hunyuan_v1_dense", "gemma3_text"})
"""Families whose model file does not call get_rope there as the others do, or that it does not have."""
ALONE = frozenset({"gpt_neox", "phi", "stablelm", "gemma2", "granite"})
"""Families whose model files hand theta and the rotated dims on, in SGLang."""


def text_of(config: Config) -> Any:
    given = json.loads(json.dumps(config))
    return AutoConfig.for_model(given.pop("model_type"), **given).get_text_config()


class _Classes:
    """A get_rope and the modules that it builds."""

    def __init__(self, engine: str, folder: Path, real: tuple[str, ...]) -> None:
        self.engine, package = engine, real[0].split(".")[0]
        sys.meta_path.insert(0, Finder(package, real, folder))
        self.home = importlib.import_module(real[0])

    def version(self) -> str:
        engine = find_engine(self.engine)
        return f"{engine.title} {engine.version}"

    def module(self, config: Config, layer_type: str | None, length: int | None) -> tuple[Any, int]:
        """The module of a layer, and the positions that it has angles for."""
        raise NotImplementedError

    def rows(self, config: Config, layer_type: str | None, length: int | None) -> Any:
        """cos and sin of all positions, (positions, pairs) each."""
        module, _ = self.module(config, layer_type, length)
        both = getattr(module, "long_short_cos_sin_cache", None)
        if both is None:
            return module.cos_sin_cache.double().chunk(2, dim=-1)
        skipped = module.original_max_position_embeddings if module.use_long_rope else 0
        return both[skipped:].double().chunk(2, dim=-1)

    def table(self, config: Config, layer_type: str | None = None, length: int | None = None) -> int:
        return min(self.module(config, layer_type, length)[1], len(self.rows(config, layer_type, length)[0]))

    def inv_freq(self, config: Config, layer_type: str | None = None, length: int | None = None) -> list[float]:
        cos, sin = self.rows(config, layer_type, length)
        return list(torch.atan2(sin[1], cos[1]).tolist())

    def magnitude(self, config: Config, layer_type: str | None = None, length: int | None = None) -> float:
        return float(self.rows(config, layer_type, length)[0][0, 0])

    def cos_sin(
        self, config: Config, positions: list[Any], layer_type: str | None = None, length: int | None = None
    ) -> Any:
        module, _ = self.module(config, layer_type, length)
        if not isinstance(positions[0], list):
            cos, sin = self.rows(config, layer_type, length)
            return cos[positions].tolist(), sin[positions].tolist()
        pairs, head = module.rotary_dim // 2, module.head_size
        step = 1 if not module.is_neox_style else pairs
        members = [2 * i if step == 1 else i for i in range(pairs)]
        x = torch.eye(head)[members][:, None].expand(-1, len(positions), -1)  # (pairs, positions, head)
        heads = x.transpose(0, 1).reshape(len(positions), -1).contiguous()
        turned, _ = module.forward_native(torch.tensor(positions).T, heads, heads.clone())
        turned = turned.view(len(positions), pairs, head).double()
        cos = torch.stack([turned[:, i, m] for i, m in enumerate(members)], 1)
        sin = torch.stack([turned[:, i, m + step] for i, m in enumerate(members)], 1)
        return cos.tolist(), sin.tolist()

    def rotate(
        self,
        config: Config,
        vector: list[float],
        position: int,
        layer_type: str | None = None,
        length: int | None = None,
    ) -> list[float]:
        module, _ = self.module(config, layer_type, length)
        if hasattr(module, "long_short_cos_sin_cache"):
            raise NotImplementedError
        at = torch.tensor([position])
        turned, _ = module.forward_native(at, torch.tensor([vector]), torch.tensor([vector]))
        return list(turned.double().flatten().tolist())


class VLLM(_Classes):
    def __init__(self, folder: Path) -> None:
        super().__init__("vllm", folder, ("vllm.model_executor.layers.rotary_embedding",))

    def module(self, config: Config, layer_type: str | None, length: int | None) -> tuple[Any, int]:
        text = text_of(config)
        kind, family = text.rope_parameters, text.model_type
        if family in engine_table("vllm")["run_by_transformers"]:
            raise NotImplementedError
        settings = dict(kind[layer_type] if layer_type else kind)
        original = getattr(text, "original_max_position_embeddings", None)
        if original and settings["rope_type"] == "longrope":
            settings["original_max_position_embeddings"] = original
            state = importlib.import_module(f"{self.home.__name__}.phi3_long_rope_scaled_rope")
            state.get_current_vllm_config().model_config.max_model_len = length
        elif length is not None and length > text.max_position_embeddings:
            raise NotImplementedError  # one table for all inputs
        head = width(text, layer_type)
        if family == "gpt_oss":
            wanted = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
            settings = {key: settings[key] for key in wanted if key in settings} | {"rope_type": "yarn"}
        if family in DEEPSEEK_FAMILIES | {"mistral4"} and settings["rope_type"] != "default":
            settings["rope_type"] = "deepseek_yarn"
            settings.pop("partial_rotary_factor", None)
        more = {"mrope_positions_factor": 1} if family in engine_table("vllm")["single_table"] else {}
        most = text.max_position_embeddings
        self.home._ROPE_DICT.clear()  # a key of it does not say for which length
        made = self.home.get_rope(head, most, family not in INTERLEAVED, settings, torch.float32, **more)
        return made, most


class SGLang(_Classes):
    def __init__(self, folder: Path) -> None:
        super().__init__("sglang", folder, ("sglang.srt.layers.rotary_embedding",))

    def module(self, config: Config, layer_type: str | None, length: int | None) -> tuple[Any, int]:
        text = text_of(config)
        family, kind = text.model_type, text.rope_parameters
        if family in NOT_IN_SGLANG or "gemma" in family or family == "olmo3":
            raise NotImplementedError
        settings = dict(kind[layer_type] if layer_type else kind)
        original = getattr(text, "original_max_position_embeddings", None)
        if original and settings["rope_type"] == "longrope":
            settings["original_max_position_embeddings"] = original
        if length is not None:
            raise NotImplementedError  # it follows the longest input of a batch, on a GPU
        head, part = width(text, layer_type), settings.get("partial_rotary_factor", 1.0)
        if "qk_rope_head_dim" in config and settings["rope_type"] != "default":
            settings["rope_type"], part = "deepseek_yarn", 1.0
        given = None if family in ALONE else settings
        made = self.home.get_rope(
            head, int(head * part), text.max_position_embeddings, settings["rope_theta"], family not in INTERLEAVED,
            given, torch.float32,
        )  # fmt: skip
        return made, text.max_position_embeddings


class ExLlama:
    """ExLlamaV3, which computes angles in its kernels from frequencies and a magnitude."""

    def __init__(self, folder: Path) -> None:
        real = ("exllamav3.util.rope", "exllamav3.util.file", "exllamav3.model.config")
        sys.meta_path.insert(0, Finder("exllamav3", real, folder))
        self.home = importlib.import_module(real[-1])

    def version(self) -> str:
        return f"{ExLlamaV3.title} {ExLlamaV3.version}"

    def _module(self, config: Config, layer_type: str | None, length: int | None) -> Any:
        text = config.get("text_config", config)
        known = text["model_type"] in ExLlamaV3.table["families"]
        if not known or layer_type == "sliding_attention" or length is not None:
            raise NotImplementedError
        return exllamav3_rope(self.home, SimpleNamespace(config=text, model_type=text["model_type"]), text)  # type: ignore[arg-type]

    def inv_freq(self, config: Config, layer_type: str | None = None, length: int | None = None) -> list[float]:
        return list(self._module(config, layer_type, length).inv_freq.double().tolist())

    def magnitude(self, config: Config, layer_type: str | None = None, length: int | None = None) -> float:
        return float(self._module(config, layer_type, length).attn_factor)


class LlamaCppPort:
    """llama.cpp on the tiny models, as GGUF files with the metadata that its converter writes."""

    def __init__(self, python: str) -> None:
        self.python, self.folder = python, tempfile.TemporaryDirectory()

    def version(self) -> str:
        return f"{LlamaCpp.name} {LlamaCpp.version}"

    def file(self, folder: Path) -> Path:
        """The GGUF file of a folder."""
        made = Path(self.folder.name) / f"{folder.name}.gguf"
        if made.exists():
            return made
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in (
            "llama",
            "phi3",
            "qwen3",
        ):  # write_gguf has no others but Gemma 3 with six layers
            raise NotImplementedError
        plain = made.with_suffix(".plain.gguf")
        try:
            rope = converted(config)
        except ServingError:  # a rope type that the converter passes over
            config = config | {"rope_scaling": None}
            rope = converted(config)
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        write_gguf(models.load(config, torch.float32), plain, tokens=[word.encode() for word in vocabulary])
        architecture = ARCHITECTURES[config["model_type"]][0]
        keys = {f"{architecture}.{key}": value for key, value in rope.keys.items()}
        rewrite(plain, made, ServingConfig("gguf", "", "", "", 0, gguf_keys=keys, gguf_tensors=rope.tensors))
        return made

    def logits(self, folder: Path, rows: list[list[int]], chunks: list[int] | None = None) -> Any:
        out, longest = Path(self.folder.name) / "logits.npy", max(map(len, rows))
        job = {"file": str(self.file(folder)), "rows": rows, "positions": longest, "context": {}, "overrides": {}}
        file = out.with_suffix(".json")
        file.write_text(json.dumps(job | {"chunks": chunks, "out": str(out)}), encoding="utf-8")
        script = Path(__file__).parents[1] / "llama_cpp_logits.py"
        subprocess.run([self.python, str(script), str(file)], capture_output=True, check=True)
        found = np.load(out)
        return found[[sum(map(len, rows[: i + 1])) - 1 for i in range(len(rows))]]


def width(text: Any, layer_type: str | None) -> int:
    """Dims of a head, those of latent attention that rotate."""
    apart = getattr(text, "per_layer_config", None)
    if layer_type and "head_dim" in (getattr(text, "per_layer_attributes", None) or ()):
        return int(apart[text.layer_types.index(layer_type)].head_dim)  # type: ignore[index]
    stated = getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None)
    return int(stated or text.hidden_size // text.num_attention_heads)
