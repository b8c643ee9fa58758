"""Model families for which each engine has a model of its own, by the engine's own list.

    nox -s engines
    python -m checks.engine_models --engines FOLDER --llama-cpp FOLDER --mlx-lm FOLDER

The folders hold the unpacked wheels of vLLM, SGLang and ExLlamaV3, the sources of llama.cpp, and the package mlx_lm.
Families are those of docs/models.md, looked up by their classes in transformers. The result goes to
docs/results/engine-models.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto

from checks.engine_classes import classes_of
from rope_ext_hf.tools.engines.base import find_engine
from tests.support.models import WITH_A_CLASS

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "engine-models.json"
TENSORRT_LLM = (
    "Afmoe Cohere2 DeepseekV3 DeepseekV32 DeepseekV4 Exaone4 Exaone4_5_ ExaoneMoE Gemma3 Gemma4 Gemma4Unified Glm4Moe "
    "GlmMoeDsa GptOss HunYuanDenseV1 HunYuanMoEV1 KimiLinear Laguna Llama4 Llama MiniMaxM2 MiniMaxM3Sparse Mistral3 "
    "Mistral Mixtral Nemotron NemotronH Phi3 Phi4MM Qwen2 Qwen2Moe Qwen2VL Qwen2_5_VL Qwen3 Qwen3Moe Qwen3Next Qwen3VL "
    "Qwen3VLMoe Qwen3_5 Qwen3_5Moe SeedOss Starcoder2"
)
"""Models for text in tensorrt_llm/_torch/models/_arch_index.py of NVIDIA/TensorRT-LLM at 065ff9e9, later than the
version whose rules were read; its wheels hold no such list, and need a GPU."""
KINDS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
GENERATES = ("CausalLM", "ConditionalGeneration")


def names_of(family: str) -> set[str]:
    """The classes of a family, for text and with images."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in KINDS]
    return {table[name] for table in tables for name in (family, family.removesuffix("_text")) if name in table}


def spelled(name: str) -> str:
    """A name of a class, however it divides its words."""
    return name.replace("_", "").lower()


def assigned(file: Path, name: str) -> Any:
    """The value of a literal that a module assigns to a name."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value: Any = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name:
            return ast.literal_eval(value)
    raise SystemExit(f"{file} assigns nothing to {name}")


def exllamav3_classes(folder: Path) -> set[str]:
    files = (folder / "exllamav3" / "architecture").glob("*.py")
    return {name for file in files for name in re.findall(r'arch_string\s*=\s*"(\w+)"', file.read_text("utf-8"))}


def mlx_types(folder: Path) -> set[str]:
    files = {file.stem for file in (folder / "models").glob("*.py")}
    renamed = assigned(folder / "utils.py", "MODEL_REMAPPING")
    return files | {name for name, file in renamed.items() if file in files}


def with_a_model(given: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Each engine, and the families that it has a model of its own for."""
    classes = {
        "vllm": classes_of("vllm", given.engines),
        "sglang": classes_of("sglang", given.engines),
        "exllamav3": exllamav3_classes(given.engines),
        "llama.cpp": set(assigned(given.llama_cpp / "conversion" / "__init__.py", "TEXT_MODEL_MAP")),
        "tensorrt-llm": {f"{name}For{kind}" for name in TENSORRT_LLM.split() for kind in GENERATES},
    }
    for engine, known in classes.items():
        plain = {spelled(name) for name in known}
        yield engine, sorted(family for family in WITH_A_CLASS if plain & set(map(spelled, names_of(family))))
    types = mlx_types(given.mlx_lm)
    yield "mlx", sorted(family for family in WITH_A_CLASS if types & {family, family.removesuffix("_text")})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--engines", "--llama-cpp", "--mlx-lm"):
        parser.add_argument(name, required=True, type=Path, metavar="FOLDER")
    found = dict(with_a_model(parser.parse_args()))
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    versions |= {name: find_engine(name).version for name in found}
    content = {"command": "nox -s engines", "versions": versions, "models": found}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, families in found.items():
        known = find_engine(name).table
        if strange := {*known["families"], *known["run"], *known["classes"]} - {*families}:
            print(f"{name}: not in its list, though checked: {', '.join(sorted(strange))}")
        print(f"{name}: {len(families)} of {len(WITH_A_CLASS)}")


if __name__ == "__main__":
    main()
