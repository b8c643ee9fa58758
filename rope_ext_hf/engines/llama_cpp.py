"""llama.cpp, and the programs that run its GGUF files: ggml-org/llama.cpp, b11549.

Read: src/llama-context.cpp (constructor of llama_context), src/llama-model.cpp (load_hparams, get_rope_factors),
src/models/llama.cpp, phi3.cpp, gemma3.cpp, deepseek2.cpp, grok.cpp, and `ggml_rope_yarn_corr_dims` and `rope_yarn` of
ggml; conversion/base.py writes the keys. Llama, Phi-3 and Qwen3 were compared with a build: tests/llama_cpp_engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.config_keys.computed import Computed
from rope_ext_hf.config_keys.formulas import llama3, longrope_magnitude, plain, yarn, yarn_magnitude
from rope_ext_hf.config_keys.keys import (
    length_setting,
    needed,
    rope_divisors,
    rope_settings,
    rotated_dims,
    text_settings,
)
from rope_ext_hf.engines.base import Engine, NotCheckedError, ServingConfig, Target, register_engine
from rope_ext_hf.errors import ServingError, short

ARCHITECTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ("rope_freqs.weight",)),
    "mistral": ("llama", ("rope_freqs.weight",)),
    "mixtral": ("llama", ("rope_freqs.weight",)),
    "phi3": ("phi3", ("rope_factors_long.weight", "rope_factors_short.weight")),
    "qwen2": ("qwen2", ()),
    "qwen3": ("qwen3", ()),
    "gemma3_text": ("gemma3", ()),
    "gpt_oss": ("gpt-oss", ()),
    "qwen3_vl_text": ("qwen3vl", ()),
    "deepseek_v2": ("deepseek2", ()),
    "deepseek_v3": ("deepseek2", ()),
}
"""model_type -> GGUF architecture, and the tensors of divisors that its graph reads."""
_FACTOR_LISTS = ("rope_factors_long.weight", "rope_factors_short.weight")
_BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
_UNREAD = (*_BETAS, "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
"""Keys that are read from files of Grok, some from those of Mistral 3, and from no others; flags set the betas."""


@dataclass(frozen=True)
class FileRope:
    """The rotary embedding of a GGUF file.

    Attributes:
        architecture: `general.architecture`.
        dim: rotated dims per head.
        keys: metadata without the architecture in front: "rope.freq_base", "rope.scaling.type", ...
        tensors: divisors by the name of the tensor.
    """

    architecture: str
    dim: int
    keys: dict[str, Any]
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)


def converted(config: Mapping[str, Any]) -> FileRope:
    """What llama.cpp's converter writes into a GGUF for a config.

    Raises:
        ServingError: a family whose architecture is not in the table, or a rope type that the converter passes over.
    """
    text = text_settings(config)
    settings, model_type = rope_settings(text), str(text.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise NotCheckedError(f"the GGUF architecture of {model_type!r} is not in the table of this package")
    architecture, tensors = ARCHITECTURES[model_type]
    kind, dim = settings["rope_type"], rotated_dims(text, settings)
    keys: dict[str, Any] = {"context_length": length_setting(text), "rope.freq_base": settings["rope_theta"]}
    divisors: dict[str, tuple[float, ...]] = {}
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": needed(settings, "factor")}
    elif kind == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": needed(settings, "factor"),
            "rope.scaling.original_context_length": int(needed(settings, "original_max_position_embeddings")),
        }
        for key in ("beta_fast", "beta_slow"):
            if settings.get(key) is not None:
                keys[f"rope.scaling.yarn_{key}"] = needed(settings, key)
        if settings.get("mscale_all_dim") and architecture == "deepseek2":
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * needed(settings, "mscale_all_dim")
    elif kind == "llama3":
        if not tensors:
            raise ServingError(f"the graph of {architecture!r} reads no rope_freqs.weight, so llama3 is lost")
        theta, factor = settings["rope_theta"], needed(settings, "factor")
        low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
        original = needed(settings, "original_max_position_embeddings", 8192)
        scaled = llama3(theta, dim, factor, original, low, high)
        divisors[tensors[0]] = tuple(a / b for a, b in zip(plain(theta, dim), scaled, strict=True))
    elif kind in ("longrope", "su"):
        if architecture != "phi3":
            raise ServingError(f"the converter writes no lists of a longrope for {architecture!r}")
        original = int(needed(settings, "original_max_position_embeddings"))
        scale = length_setting(text) / original
        keys |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": longrope_magnitude(scale, original),
        }
        for name, key in zip(tensors, ("long_factor", "short_factor"), strict=True):
            divisors[name] = tuple(rope_divisors(settings, key, dim))
    elif kind != "default":
        raise ServingError(f"the converter passes over the rope type {kind!r}")
    return FileRope(architecture, dim, keys, divisors)


def file_computes(file: FileRope, length: int | None = None, *, by_flags: bool = False) -> Computed:
    """What llama.cpp computes from a GGUF file.

    Args:
        length: tokens of context that are allocated (`-c`); None: the file's context length.
        by_flags: whether the keys stand for flags of `llama-server`, which reaches more than a file's keys do.

    Raises:
        ServingError: keys or tensors that llama.cpp refuses, or a graph whose rules are not in this package.
    """
    keys = file.keys
    kind = keys.get("rope.scaling.type", "linear")
    if file.architecture not in {architecture for architecture, _ in ARCHITECTURES.values()}:
        raise NotCheckedError(f"the graph of {file.architecture!r} was not checked")
    if file.architecture == "deepseek2" and keys.get("rope.scaling.type", "none") != "none":
        raise NotCheckedError(
            "the graph of deepseek2 mixes its YaRN into the softmax scale, by rules that changed often"
        )
    trained = int(needed(keys, "context_length"))
    theta = needed(keys, "rope.freq_base", 10000.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ServingError(f"{kind!r} is no type of rope scaling in llama.cpp")
    factor = 1.0 if kind == "none" else needed(keys, "rope.scaling.factor", 1.0)
    original = needed(keys, "rope.scaling.original_context_length", trained)
    read = _tensors_read(file.architecture, kind)
    if stray := [name for name in file.tensors if name not in read]:
        raise ServingError(f"{stray[0]} is no tensor of {file.architecture!r} under {kind!r}; the file is not loaded")
    wanted = _FACTOR_LISTS[0] if (length or trained) > original else _FACTOR_LISTS[1]
    for name, values in file.tensors.items():
        for pair, value in enumerate(values):
            if not 0 < value < math.inf:
                raise ServingError(
                    f"{name} divides the frequency of pair {pair} by {value:g}; divisors must be finite numbers above "
                    "0, and with others every output is meaningless"
                )
    divisors: Sequence[float] = [1.0] * (file.dim // 2)
    for name in ("rope_freqs.weight", wanted):
        if name in file.tensors:
            divisors = file.tensors[name]
            break
    if len(divisors) != file.dim // 2:
        raise ServingError(f"a tensor of {len(divisors)} divisors does not fit {file.dim // 2} rotated pairs")
    magnitude = needed(keys, "rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        fast, slow = (needed(keys, key, usual) if by_flags else usual for key, usual in _BETAS.items())
        inv_freq = yarn(theta, file.dim, factor, original, fast, slow)
        magnitude *= yarn_magnitude(factor)
    else:
        inv_freq = [value / factor for value in plain(theta, file.dim)]
    inv_freq = [value / divisor for value, divisor in zip(inv_freq, divisors, strict=True)]
    notes = (
        () if by_flags else _unread(file, kind, lambda fast, slow: yarn(theta, file.dim, factor, original, fast, slow))
    )
    return Computed(tuple(inv_freq), magnitude, trained, notes=notes)


def _unread(file: FileRope, kind: str, ramp: Callable[[float, float], Sequence[float]]) -> tuple[str, ...]:
    """Sentences on keys that the graph does not read, and that would change what it computes."""
    different = [key for key in _UNREAD if key in file.keys and file.keys[key] != _BETAS.get(key)]
    stated = [file.keys.get(key, usual) for key, usual in _BETAS.items()]
    possible = all(type(value) in (int, float) and 0 < value < math.inf for value in stated)
    if possible and (kind != "yarn" or list(ramp(*stated)) == list(ramp(*_BETAS.values()))):
        different = [key for key in different if key not in _BETAS]
    values = {key: file.keys[key] for key in different}
    shown = {
        key: f"{value:g}" if isinstance(value, int | float) else short(str(value)) for key, value in values.items()
    }
    return tuple(f"{key} is {text}, and not read for {file.architecture!r}." for key, text in shown.items())


def _tensors_read(architecture: str, kind: str) -> tuple[str, ...]:
    """The tensors of divisors that an architecture's loader takes; it stops at others."""
    names = next(tensors for known, tensors in ARCHITECTURES.values() if known == architecture)
    return _FACTOR_LISTS if names and kind == "longrope" else names


class _GGUFEngine(Engine):
    """What the programs that run a GGUF file have in common."""

    version = "b11549"
    file_suffix = ".gguf"

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        return file_computes(converted(config), length)

    def config_for(self, target: Target) -> ServingConfig:
        reasons: list[str] = []
        for name, file, removed in _files(target):
            try:
                computed = self.computed(target, file, removed)
            except (ServingError, ArithmeticError) as error:
                reasons.append(f"{name}: {error}")
                continue
            reason = computed.difference(target.inv_freq, target.attention_factor, 1.0)
            if reason is None and target.softmax_scale != 1:
                reason = "the softmax scale of this family is not in these rules"
            if reason is None and target.layer_type is not None and "rope.scaling.attn_factor" in file.keys:
                reason = "the magnitude would reach the sliding-window layers too"
            if reason is None:
                return self.from_file(target, name, file, removed, computed)
            reasons.append(f"{name}: {reason}")
        if target.model_type in ARCHITECTURES and not ARCHITECTURES[target.model_type][1]:
            reasons.append(f"the graph of {ARCHITECTURES[target.model_type][0]!r} reads no tensor of divisors")
        if target.model_type not in ARCHITECTURES:
            reasons = [f"the GGUF architecture of {target.model_type!r} is not in the table of this package"]
        raise ServingError(
            f"{self.name} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({'; '.join(dict.fromkeys(reasons))})"
        )

    def computed(self, target: Target, file: FileRope, removed: tuple[str, ...]) -> Computed:
        """What the program computes when it is started in this way."""
        return file_computes(file, target.length)

    def from_file(
        self, target: Target, name: str, file: FileRope, removed: tuple[str, ...], computed: Computed
    ) -> ServingConfig:
        """How to start the program on a file with these keys and tensors."""
        return self.serving(
            target,
            name,
            computed,
            gguf_keys={f"{file.architecture}.{key}": v for key, v in file.keys.items() if key not in _UNREAD},
            gguf_tensors=file.tensors,
            gguf_removed=removed,
            command=self.command(target),
            notes=(*computed.notes, *self.notes(target)),
        )

    def command(self, target: Target) -> tuple[str, ...]:
        """How to start the program on the rewritten file."""
        return ("llama-server", "-m", "OUT.gguf", "-c", str(target.length))

    def notes(self, target: Target) -> tuple[str, ...]:
        """What to do with the file."""
        return ("Write the keys and tensors into a copy of the model's GGUF file with rope-ext gguf, OUT.gguf.",)


def _files(target: Target) -> list[tuple[str, FileRope, tuple[str, ...]]]:
    """Files that may compute what was measured, in order of preference; the tensors that must go from each."""
    if target.model_type not in ARCHITECTURES:
        return []
    architecture, tensors = ARCHITECTURES[target.model_type]
    dim = 2 * len(target.inv_freq)
    base = {"context_length": target.length}
    settings = target.settings
    result: list[tuple[str, FileRope, tuple[str, ...]]] = []
    try:  # the model's own file, and a linear scaling on top of what is in it
        own = converted(target.config)
        result.append(("as published", FileRope(architecture, dim, own.keys | base, own.tensors), ()))
        if "factor" in settings or target.method.startswith("linear"):
            factor = _ratio(own, target)
            if factor is not None:
                linear = {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
                result.append(("native", FileRope(architecture, dim, own.keys | base | linear, own.tensors), ()))
    except ServingError:
        pass
    plain_keys = base | {"rope.freq_base": settings["rope_theta"], "rope.scaling.type": "none"}
    kind, removed = settings["rope_type"], tensors
    if kind == "default":
        result.append(("native", FileRope(architecture, dim, plain_keys), removed))
    elif kind == "linear":
        keys = plain_keys | {"rope.scaling.type": "linear", "rope.scaling.factor": settings["factor"]}
        result.append(("native", FileRope(architecture, dim, keys), removed))
    elif kind == "yarn":
        factor = float(settings["factor"])
        keys = plain_keys | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": int(settings["original_max_position_embeddings"]),
            "rope.scaling.yarn_beta_fast": float(settings.get("beta_fast") or 32.0),
            "rope.scaling.yarn_beta_slow": float(settings.get("beta_slow") or 1.0),
        }
        if not math.isclose(target.attention_factor, yarn_magnitude(factor)):
            keys["rope.scaling.attn_factor"] = target.attention_factor / yarn_magnitude(factor)
        result.append(("native", FileRope(architecture, dim, keys), removed))
    if tensors:
        keys = plain_keys | {"rope.freq_base": target.theta}
        if architecture == "phi3":
            keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": target.original}
        if target.attention_factor != 1.0:
            keys["rope.scaling.attn_factor"] = target.attention_factor
        divisors = dict.fromkeys(tensors, tuple(target.divisors))
        result.append((f"divisors in {tensors[0]}", FileRope(architecture, dim, keys, divisors), ()))
    return result


def _ratio(own: FileRope, target: Target) -> float | None:
    """The factor of a linear scaling by which the measured frequencies lie below those of the model's own file."""
    try:
        unscaled = FileRope(own.architecture, own.dim, own.keys | {"rope.scaling.type": "none"}, own.tensors)
        before = file_computes(unscaled, target.length)
    except ServingError:
        return None
    ratios = [a / b for a, b in zip(before.inv_freq, target.inv_freq, strict=True)]
    return ratios[0] if max(ratios) - min(ratios) < 1e-9 * max(ratios) and ratios[0] > 1 else None


@register_engine("llama.cpp")
class LlamaCpp(_GGUFEngine):
    """llama.cpp, by the flags of llama-server where they do, else by rewriting the GGUF file."""

    drafts = (
        "The flags go to the model of --model-draft as well (params_dft of tools/server/server-context.cpp); what the "
        "GGUF file carries must be in the draft's file, too."
    )

    def computed(self, target: Target, file: FileRope, removed: tuple[str, ...]) -> Computed:
        return file_computes(file, target.length, by_flags=_flags(target, file, removed) is not None)

    def from_file(
        self, target: Target, name: str, file: FileRope, removed: tuple[str, ...], computed: Computed
    ) -> ServingConfig:
        config = super().from_file(target, name, file, removed, computed)
        flags = _flags(target, file, removed)
        if flags is None:
            return config
        command = ("llama-server", "-m", "MODEL.gguf", "-c", str(target.length), *flags)
        notes = (*computed.notes, "MODEL.gguf is the model as llama.cpp's converter writes it.")
        kept = {"command": command, "gguf_keys": {}, "gguf_tensors": {}, "gguf_removed": (), "notes": notes}
        return ServingConfig(**{**vars(config), **kept})


def _flags(target: Target, file: FileRope, removed: tuple[str, ...]) -> tuple[str, ...] | None:
    """Flags that turn the model's own file into this one; None where tensors must change."""
    try:
        own = converted(target.config)
    except ServingError:
        return None
    if file.tensors != own.tensors or any(name in own.tensors for name in removed):
        return None
    keys, arch, before = file.keys, file.architecture, own.keys | _BETAS  # those of the file are not read
    flags: list[str] = []
    names = {
        "rope.freq_base": "--rope-freq-base",
        "rope.scaling.factor": "--rope-scale",
        "rope.scaling.original_context_length": "--yarn-orig-ctx",
        "rope.scaling.yarn_beta_fast": "--yarn-beta-fast",
        "rope.scaling.yarn_beta_slow": "--yarn-beta-slow",
    }
    kind = keys.get("rope.scaling.type", "linear")
    if kind != own.keys.get("rope.scaling.type", "linear") and not (kind == "none" and len(own.keys) == 2):
        flags += ["--rope-scaling", kind]
    for key, flag in names.items():
        if key in keys and keys[key] != before.get(key):
            flags += [flag, repr(keys[key])]
    if keys.get("rope.scaling.attn_factor") != own.keys.get("rope.scaling.attn_factor"):
        value = keys.get("rope.scaling.attn_factor", 1.0)
        flags += ["--override-kv", f"{arch}.rope.scaling.attn_factor=float:{value!r}"]
    if keys["context_length"] > own.keys["context_length"]:  # builds before #28030 cap the context at the file's
        flags += ["--override-kv", f"{arch}.context_length=int:{keys['context_length']}"]
    return tuple(flags)


@register_engine("gguf")
class GGUF(_GGUFEngine):
    """A GGUF file that carries the method, for llama.cpp, LM Studio and every other program that runs it."""

    rules_of = LlamaCpp.name


@register_engine("ollama")
class Ollama(_GGUFEngine):
    """Ollama, which has no options for RoPE: the GGUF file carries the method, the Modelfile the length."""

    rules_of = LlamaCpp.name

    def command(self, target: Target) -> tuple[str, ...]:
        return ("ollama", "create", "NAME", "-f", "Modelfile")

    def notes(self, target: Target) -> tuple[str, ...]:
        modelfile = f"Modelfile: FROM ./OUT.gguf, and on a line of its own PARAMETER num_ctx {target.length}."
        return (*super().notes(target), modelfile)
