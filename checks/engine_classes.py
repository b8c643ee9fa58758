"""Do the rotary classes of vLLM, SGLang and ExLlamaV3 compute what rope_ext_hf.tools.engines says they do?

    nox -s engines
    python -m checks.engine_classes --vllm FOLDER --sglang FOLDER --exllamav3 FOLDER

FOLDER holds an unpacked wheel. Only its rotary classes are imported; everything else of the engine is replaced by
stand-ins, so that no GPU is needed. Every method of every family in docs/engines.md is configured with serving_config,
the engine's own class is built from the overrides, and its frequencies and magnitude are compared with the method's;
then again with the plug-in of this package registered, by its own rope type. The result goes to
docs/results/engine-classes.json; the exit status is 1 where a difference exceeds float32.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import logging

from rope_ext_hf.errors import RopeExtError
from rope_ext_hf.tools.engines.base import Engine, find_engine
from rope_ext_hf.tools.engines.programs.vllm import DEEPSEEK_FAMILIES, INTERLEAVED_FAMILIES, VLLM
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.plugins import sglang, vllm
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.support.models import WITH_A_CLASS, small_config
from tests.tools.support.serving_models import SERVED, targets

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "engine-classes.json"
TOLERANCE = 2e-5
"""The largest relative difference of frequencies that float32 tables explain."""
ENTRY = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)
"""The classes that a model file of SGLang is for."""
HOOKS = "sglang.srt.plugins.hook_registry"
OLDER = "Qwen2.5-VL, with the settings of Qwen3-VL"
"""A family whose model files leave the size of the table of M-RoPE positions at its default."""
POSITIONS = 4096
"""Rows of a table that are computed: its second row has the frequencies, whatever its length."""


class Op(torch.nn.Module):
    """Stand-in for the base class of the engines' rotary classes."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    @staticmethod
    def register(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda cls: cls

    @classmethod
    def enabled(cls) -> bool:
        return False


NAMES: dict[str, Any] = {"CustomOp": Op, "PluggableLayer": Op, "BaseFusedOp": Op, "get_device": lambda: "cpu"}
NAMES["get_compiler_backend"] = lambda: "eager"
NAMES["publish_role"] = lambda: None


class StandIn(ModuleType):
    """A module of which every name exists: questions about the hardware are answered with no."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("is_", "cpu_has", "get_bool", "has_")):
            return lambda *_, **__: False
        return NAMES.get(name, MagicMock())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the rotary classes in an unpacked wheel, and stand-ins for all else of the engine."""

    def __init__(self, package: str, real: Sequence[str], folder: Path) -> None:
        self.package, self.real, self.folder = package, real, folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.split(".")[0] != self.package:
            return None
        if any(name == real or name.startswith(f"{real}.") for real in self.real):
            file = self.folder / Path(*name.split("."))
            init = file / "__init__.py"
            file = init if init.exists() else file.with_suffix(".py")
            folders = [str(file.parent)] if file == init else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def engine_settings(target: Target, overrides: Mapping[str, Any] | None, *, merge: bool) -> tuple[dict[str, Any], int]:
    """The rope settings and max_position_embeddings that a model file hands to get_rope."""
    changes = dict(overrides or {})
    changes = changes.get("text_config", changes)
    text = {**target.config, **changes}
    if merge and "rope_parameters" in changes and not target.composite:
        text["rope_parameters"] = {**target.config["rope_parameters"], **changes["rope_parameters"]}
    parameters = text["rope_parameters"]
    settings = dict(parameters if target.layer_type is None else parameters[target.layer_type])
    return settings, int(text["max_position_embeddings"])


def as_vllm(get_rope: Any, target: Target, settings: dict[str, Any], most: int) -> Any:
    """The module that vLLM's model files build: models/llama.py, gpt_oss.py, deepseek_v2.py."""
    if target.model_type == "gpt_oss":
        wanted = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
        settings = {key: settings[key] for key in wanted if key in settings} | {"rope_type": "yarn"}
    if target.model_type in DEEPSEEK_FAMILIES and settings["rope_type"] != "default":
        own = settings.get("attention_factor") == 1.0
        settings["rope_type"] = "deepseek_llama_scaling" if own else "deepseek_yarn"
    half = target.model_type not in INTERLEAVED_FAMILIES
    single = {"mrope_positions_factor": 1} if target.model_type in VLLM.table["single_table"] else {}
    head = round(2 * len(target.inv_freq) / settings.get("partial_rotary_factor", 1.0))
    return get_rope(head, most, half, settings, torch.float32, **single)


def as_sglang(get_rope: Any, target: Target, settings: dict[str, Any], most: int) -> Any:
    """The module that SGLang's model files build: models/llama.py, gpt_oss.py, deepseek_v2.py."""
    dim, half = 2 * len(target.inv_freq), target.model_type not in INTERLEAVED_FAMILIES
    if target.model_type in DEEPSEEK_FAMILIES and settings["rope_type"] != "default":
        settings["rope_type"] = "deepseek_yarn"
    return get_rope(dim, dim, most, settings["rope_theta"], half, settings, torch.float32)


def read_table(module: Any, most: int) -> tuple[torch.Tensor, float]:
    """Frequencies and magnitude, from the rows of positions 0 and 1; of two tables, from the long one."""
    both = getattr(module, "long_short_cos_sin_cache", None)
    table = module.cos_sin_cache if both is None else both[-min(most, POSITIONS) :]
    cos, sin = table[:2].double().chunk(2, dim=-1)
    return torch.atan2(sin[1], cos[1]), float(cos[0, 0])


def differs_on_images(module: Any, target: Target) -> float:
    """The largest difference of queries that three axes of positions rotate, there and in transformers' own class."""
    settings = {
        key: value for key, value in target.patched.items() if key not in ("model_type", "transformers_version")
    }
    own = Qwen3VLTextRotaryEmbedding(AutoConfig.for_model(target.model_type, **settings))
    count, dim = 200, 2 * len(target.inv_freq)
    steps = torch.arange(count)
    positions = torch.stack([steps // 50, steps // 7 + 3, steps % 7 + 11])
    queries = torch.randn(count, 2 * dim, generator=torch.Generator().manual_seed(0))
    there, _ = module.forward_native(positions, queries, queries)
    as_heads = queries.view(1, count, 2, dim).transpose(1, 2)
    here, _ = apply_rotary_pos_emb(as_heads, as_heads, *own(queries, positions[:, None]))
    return float((there.view(count, 2, dim) - here[0].transpose(0, 1)).abs().max())


def register_vllm(home: Any) -> Any:
    """vLLM's get_rope with the plug-in."""
    vllm.register()
    return home.get_rope


def register_sglang(home: Any) -> Any:
    """SGLang's get_rope with the plug-in, put around it by SGLang's own hook registry."""
    sglang.register()
    importlib.import_module(HOOKS).HookRegistry.apply_hooks()
    return home.get_rope


def served_by(engine: Engine, skipped: Sequence[str]) -> Iterator[tuple[dict[str, Any], Target, ServingConfig]]:
    """Every method of every family that an engine serves; families in `skipped` do not go through get_rope."""
    for family, again in (*((family, family) for family in SERVED), (OLDER, "Qwen3-VL")):
        for over in ("own", "original"):
            for method, target in targets(again, over):
                if family == OLDER and isinstance(target, Target):
                    target = replace(target, config={**target.config, "model_type": "qwen2_5_vl_text"})
                if not isinstance(target, Target) or target.model_type in skipped:
                    continue
                try:
                    config = engine.config_for(target)
                except RopeExtError:
                    continue
                row = {"family": family, "over": over, "method": method.name, "encoding": config.encoding}
                yield row, target, config


def classes_of(engine: str, folder: Path) -> set[str]:
    """The model classes that an engine has a file for."""
    if engine == "vllm":
        text = (folder / "vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
        return set(re.findall(r'"([A-Za-z0-9_]+)":\s*\(\s*"(?!transformers")', text))
    texts = (file.read_text(encoding="utf-8") for file in (folder / "sglang/srt/models").glob("*.py"))
    return {name for text in texts for entry in ENTRY.findall(text) for name in re.findall(r"[A-Z]\w+", entry)}


def families_served(engine: Engine, folder: Path, skipped: Sequence[str]) -> Iterator[tuple[Any, Any, Any]]:
    """YaRN on every family of the family table that an engine has a file for and serves."""
    known = classes_of(engine.name, folder) if engine.name != "exllamav3" else None
    tables = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")]
    for family in WITH_A_CLASS:
        names = [table[name] for table in tables for name in (family, family.removesuffix("_text")) if name in table]
        if family in skipped or (known is not None and not known.intersection(names)):
            continue
        try:
            model = Model(family, small_config(family), composite=False, patches=[])
            target = make_target(model, "yarn", factor=4.0)
            config = engine.config_for(target)
        except RopeExtError:
            continue
        yield {"family": family, "over": "own", "method": "yarn", "encoding": config.encoding}, target, config


def exllamav3_rope(home: ModuleType, target: Target, keys: Mapping[str, Any]) -> Any:
    """The module of ExLlamaV3 for a config.json, read as architecture/llama.py, gemma3.py, deepseek_v3.py read it."""
    rope = importlib.import_module("exllamav3.util.rope")
    config = {key: value for key, value in target.config.items() if key != "rope_parameters"}
    config |= keys.get("text_config", keys)
    latent, deepseek = "qk_rope_head_dim" in config, target.model_type == "deepseek_v3"
    head = config.get("qk_rope_head_dim") if latent else config.get("head_dim")
    reader = SimpleNamespace(
        config_dict=config, head_dim=head or config["hidden_size"] // config["num_attention_heads"]
    )
    settings = home.Config.read_rope_settings_default(
        reader, rope.RopeStyle.GPTJ if latent else rope.RopeStyle.NEOX, yarn_mscale_ratio=deepseek
    )
    module = rope.RoPE("cpu", settings)
    module.softmax_scale = rope.yarn_sm_scale_fold(settings.rope_scaling) if deepseek else 1.0
    return module


def compare_exllamav3(folder: Path) -> dict[str, Any]:
    """The classes of ExLlamaV3 beside what each configuration is meant to compute."""
    real = ("exllamav3.util.rope", "exllamav3.util.file", "exllamav3.model.config")
    sys.meta_path.insert(0, Finder("exllamav3", real, folder))
    home, engine = importlib.import_module(real[-1]), find_engine("exllamav3")
    rows: list[dict[str, Any]] = []
    families: list[dict[str, Any]] = []
    for row, target, config in chain(served_by(engine, ()), families_served(engine, folder, ())):
        module = exllamav3_rope(home, target, config.config_keys)
        expected = torch.tensor(target.inv_freq, dtype=torch.float64)
        row["frequencies"] = float(((module.inv_freq.double() - expected).abs() / expected).max())
        row["magnitude"] = abs(module.attn_factor / target.attention_factor - 1)
        row["softmax_scale"] = abs(module.softmax_scale / target.softmax_scale - 1)
        (rows if row["family"] in SERVED or row["family"] == OLDER else families).append(row)
    sys.meta_path.pop(0)
    return {"engine": engine.name, "version": engine.version, "rows": rows, "families": families, "skipped": []}


def compare(
    name: str, folder: Path, real: Sequence[str], build: Any, register: Any, skipped: Sequence[str]
) -> dict[str, Any]:
    """Build every configured module and compare, with and without the plug-in."""
    package, home = real[0].split(".")[0], real[0]
    sys.meta_path.insert(0, Finder(package, real, folder))
    module = importlib.import_module(home)
    stock, engine = module.get_rope, find_engine(name)
    asked: list[tuple[Target, dict[str, Any], int]] = []

    def measure(engine: Engine, get_rope: Any, served: Iterator[Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for row, target, config in served:
            settings, most = engine_settings(target, config.overrides, merge=name == "sglang")
            asked.append((target, dict(settings), most))
            if package == "vllm":
                state = importlib.import_module(f"{home}.phi3_long_rope_scaled_rope")
                state.get_current_vllm_config().model_config.max_model_len = target.length
            built = build(get_rope, target, settings, most)
            inv_freq, magnitude = read_table(built, most)
            expected = torch.tensor(target.inv_freq, dtype=torch.float64)
            if len(inv_freq) != len(expected):
                raise SystemExit(f"{engine.name}: {row['family']} rotates {len(inv_freq)} pairs, not {len(expected)}")
            row["frequencies"] = float(((inv_freq - expected).abs() / expected.where(expected > 0, 1.0)).max())
            row["magnitude"] = abs(magnitude / target.attention_factor - 1)
            if "mrope_section" in settings and row["family"] in SERVED and target.model_type == "qwen3_vl_text":
                row["positions"] = differs_on_images(built, target)
            rows.append(row)
        return rows

    rows = measure(engine, stock, served_by(engine, skipped))
    before = list(asked)
    families = measure(engine, stock, families_served(engine, folder, skipped))
    with_plugin = register(module)
    plugin = measure(engine.with_plugin(), with_plugin, served_by(engine.with_plugin(), skipped))
    by_plugin = families_served(engine.with_plugin(), folder, [*skipped, *(row["family"] for row in families)])
    families += [row | {"plugin": True} for row in measure(engine.with_plugin(), with_plugin, by_plugin)]
    untouched = sum(
        build(with_plugin, target, dict(settings), most) is build(stock, target, dict(settings), most)
        for target, settings, most in before
    )
    sys.meta_path.pop(0)
    return {
        "engine": name, "version": engine.version, "rows": rows, "skipped": list(skipped), "plugin": plugin,
        "families": families,
        "untouched": untouched,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--exllamav3", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    whole = torch.arange

    def arange(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 2:
            return whole(args[0], min(args[1], args[0] + POSITIONS), **kwargs)
        return whole(min(args[0], POSITIONS), **kwargs) if len(args) == 1 else whole(*args, **kwargs)

    torch.arange = arange
    results = [
        compare("vllm", given.vllm, ("vllm.model_executor.layers.rotary_embedding",), as_vllm, register_vllm, ()),
        compare(
            "sglang",
            given.sglang,
            ("sglang.srt.layers.rotary_embedding", HOOKS),
            as_sglang,
            register_sglang,
            ("gemma3_text",),  # whose model file calls the functions of transformers
        ),
        compare_exllamav3(given.exllamav3),
    ]
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    content = {"command": "nox -s engines", "versions": versions, "engines": results}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = 0
    for result in results:
        rows = result["rows"] + result.get("plugin", []) + result["families"]
        far = [
            row
            for row in rows
            if row["frequencies"] > TOLERANCE
            or max(row["magnitude"], row.get("softmax_scale", 0)) > 1e-6
            or row.get("positions", 0) > TOLERANCE
        ]
        wrong += len(far) + (len(result["rows"]) - result["untouched"] if "untouched" in result else 0)
        worst = max(row["frequencies"] for row in rows)
        off = max(row["magnitude"] for row in rows)
        print(
            f"{result['engine']} {result['version']}: {len(result['rows'])} served by its own rope types, "
            f"{len(result.get('plugin', []))} by the plug-in; "
            f"frequencies {worst:.2g}, magnitude {off:.2g}"
        )
        print(*far, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
