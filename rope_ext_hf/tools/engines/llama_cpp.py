"""llama.cpp, and the programs that run its GGUF files: ggml-org/llama.cpp, b11549.

Read: src/llama-context.cpp (constructor of llama_context), src/llama-model.cpp (load_hparams, get_rope_factors),
src/models/llama.cpp, phi3.cpp, gemma3.cpp, deepseek2.cpp, grok.cpp, mistral3.cpp, hunyuan-vl.cpp, and
`ggml_rope_yarn_corr_dims` and `rope_yarn` of ggml; conversion/base.py and hunyuan.py write the keys. Llama, Phi-3 and
Qwen3 were compared with a build: checks/llama_cpp_engine.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.errors import ServingError, short
from rope_ext_hf.patches.config_keys import Config, needed, rope_settings, rotated_dims, text_settings, yarn_magnitude
from rope_ext_hf.tools.engines.base import Engine, NotCheckedError, ServingConfig, Target, engine_table, register_engine
from rope_ext_hf.tools.engines.formulas import alpha_theta, linear, llama3, longrope_magnitude, plain, yarn
from rope_ext_hf.tools.engines.keys import Computed, check_sliding_layers, length_setting, rope_divisors

_FAMILIES = engine_table("llama_cpp")["families"]
ARCHITECTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    model_type: (each["architecture"], tuple(each.get("tensors", ()))) for model_type, each in _FAMILIES.items()
}
"""model_type -> GGUF architecture, and the tensors of divisors that its graph reads."""
_TENSORS = dict(ARCHITECTURES.values())  # the tensors by architecture
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_LOG_MULTIPLIERS = {"deepseek2": 0.1, "mistral3": 1.0}
"""The converter's multiple of mscale_all_dim, by architecture; the magnitude is divided by that of this mscale."""
_READS_LOG_MULTIPLIER = frozenset({*_LOG_MULTIPLIERS, "deepseek32", "glm-dsa"})
_READS_BETAS = frozenset({"mistral3"})  # from the file, whatever flags say; of other graphs in the table flags set them
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # the first one that is there; 0 stands for 1
_ORIGINAL = "rope.scaling.original_context_length"
_ALPHA = "rope.scaling.alpha"
_READS_ALPHA = frozenset({"hunyuan-dense", "hunyuan_vl"})
_WHOLE_HEADS = frozenset(
    {"deci", "falcon", "llama", "llama-embed"}
)  # whose loader stops where a part of a head rotates
_CONVERTED_LENGTH = 256 * 1024  # tokens that the converter states of a HunYuan with alpha, whatever its config has
_FACTOR_LISTS = ("rope_factors_long.weight", "rope_factors_short.weight")
_BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
_UNREAD = (*_BETAS, "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
"""Keys that are read from files of Grok, the betas also from those of Mistral 3, and from no others."""
OF_SLIDING_LAYERS = ("rope.freq_base_swa", "rope.dimension_count_swa")
"""Keys that change sliding-window layers alone."""
_KNOWN = frozenset(
    {
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.attn_factor",
    }
    | {"rope.scaling.finetuned", *_FACTORS, _ALPHA, _ORIGINAL, _LOG_MULTIPLIER, *_UNREAD, *OF_SLIDING_LAYERS}
)
"""The rope keys of LLM_KV_NAMES in src/llama-arch.cpp."""


@dataclass(frozen=True)
class FileRope:
    """The rotary embedding of a GGUF file."""

    architecture: str
    dim: int  # rotated dims per head
    keys: dict[str, Any]  # metadata without the architecture in front: "rope.freq_base", "rope.scaling.type", ...
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)  # divisors by the name of the tensor
    head_dim: int | None = None  # dims per head; None: not stated


def converted(config: Config) -> FileRope:
    """Keys and tensors that llama.cpp's converter writes into a GGUF for a config; ServingError where it does not."""
    text = text_settings(config)
    settings, model_type = rope_settings(text), str(text.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise NotCheckedError(f"the GGUF architecture of {model_type!r} is not in the table of this package")
    architecture, tensors = ARCHITECTURES[model_type]
    check_sliding_layers(text, 6, "llama.cpp")
    if "mamba" in _FAMILIES[model_type] and text.get("position_embedding_type") == "rope":
        raise ServingError("its converter turns the rotation off beside Mamba layers; a rewritten file turns it on")
    kind, dim = settings["rope_type"], rotated_dims(text, settings)
    keys: dict[str, Any] = {"context_length": length_setting(text), "rope.freq_base": settings["rope_theta"]}
    if kind == "default" and _FAMILIES[model_type].get("scaling") == "none":
        keys["rope.scaling.type"] = "none"
    divisors: dict[str, tuple[float, ...]] = {}
    if kind in ("linear", "yarn"):
        keys |= _scaling_keys(settings)
        if kind == "yarn" and settings.get("mscale_all_dim") and architecture in _LOG_MULTIPLIERS:
            keys[_LOG_MULTIPLIER] = _LOG_MULTIPLIERS[architecture] * needed(settings, "mscale_all_dim")
    elif kind == "llama3":
        if "rope_freqs.weight" not in tensors:
            raise ServingError(f"the graph of {architecture!r} reads no rope_freqs.weight, so llama3 is lost")
        theta, factor = settings["rope_theta"], needed(settings, "factor")
        low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
        original = needed(settings, "original_max_position_embeddings", 8192)
        scaled = llama3(theta, dim, factor, original, low, high)
        divisors[tensors[0]] = tuple(a / b for a, b in zip(plain(theta, dim), scaled, strict=True))
    elif kind in ("longrope", "su"):
        if architecture not in ("phi3", "phimoe"):
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
    elif kind == "dynamic" and architecture.startswith("hunyuan"):
        keys |= _hunyuan_keys(text, settings, architecture, dim)
    elif kind != "default":
        raise ServingError(f"the converter passes over the rope type {kind!r}")
    return FileRope(architecture, dim, keys, divisors, head_dim=dim)


def _hunyuan_keys(text: Config, settings: Config, architecture: str, dim: int) -> dict[str, Any]:
    """The keys of a HunYuan with `alpha`, whose converter stops at other numbers than those of published models."""
    theta, length, moe = settings["rope_theta"], length_setting(text), architecture == "hunyuan-moe"
    alpha = needed(settings, "alpha", None if moe else 50.0)
    if theta != 10000 or length not in (32 * 1024, _CONVERTED_LENGTH) or (moe and (alpha, dim) != (1000, 128)):
        raise ServingError(
            f"its converter stops at a dynamic scaling with alpha {alpha:g}, theta {theta:g}, {dim} dims per head and "
            f"a length of {length:,} tokens, which no published model has"
        )
    return {
        "context_length": _CONVERTED_LENGTH,
        "rope.freq_base": alpha_theta(theta, dim, alpha),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": _CONVERTED_LENGTH,
    }


def _scaling_keys(settings: Config) -> dict[str, Any]:
    """The keys of a linear scaling or a yarn; {} for the rope type "default"."""
    kind = settings["rope_type"]
    if kind == "default":
        return {}
    keys: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": needed(settings, "factor")}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = int(needed(settings, "original_max_position_embeddings"))
        for key in ("beta_fast", "beta_slow"):
            if settings.get(key) is not None:
                keys[f"rope.scaling.yarn_{key}"] = needed(settings, key)
    return keys


def file_computes(file: FileRope, length: int | None = None, *, by_flags: bool = False) -> Computed:
    """Compute frequencies and magnitude from a GGUF file as llama.cpp does, which refuses some with a ServingError.

    `length` tokens of context are allocated (`-c`), by default those of the file. With `by_flags` the keys stand for
    flags of `llama-server`, which reach more than a file's keys do.
    """
    keys = file.keys
    kind = keys.get("rope.scaling.type", "linear")
    if file.architecture not in _TENSORS:
        raise NotCheckedError(f"the graph of {file.architecture!r} was not checked")
    stated = next((key for key in _FACTORS if key in keys), None)
    scaled = stated is not None and keys[stated] not in (0, 1)
    if file.architecture in ("deepseek2", "deepseek32", "glm-dsa") and kind != "none" and (kind != "linear" or scaled):
        raise NotCheckedError(
            f"the graph of {file.architecture} mixes its YaRN into the softmax scale, by rules that changed often"
        )
    if file.architecture in _WHOLE_HEADS and file.head_dim not in (None, file.dim):
        raise ServingError(
            f"rope.dimension_count is {file.dim} and a head has {file.head_dim} dims; for {file.architecture!r} "
            "llama.cpp stops where they differ"
        )
    trained = int(needed(keys, "context_length"))
    theta = needed(keys, "rope.freq_base", 10000.0)
    if file.architecture in _READS_ALPHA and (alpha := keys.get(_ALPHA, 0)) != 0:
        theta = alpha_theta(theta, file.head_dim or file.dim, needed({_ALPHA: alpha}, _ALPHA))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ServingError(f"{kind!r} is no type of rope scaling in llama.cpp")
    factor = needed(keys, stated) if stated and scaled and kind != "none" else 1.0
    original = needed(keys, _ORIGINAL) if keys.get(_ORIGINAL) else trained
    divisors = _divisors(file, kind, long=(length or trained) > original)
    magnitude = needed(keys, "rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        read = by_flags or file.architecture in _READS_BETAS
        fast, slow = [needed(keys, key, usual) if read else usual for key, usual in _BETAS.items()]
        inv_freq = yarn(theta, file.dim, factor, original, fast, slow)
        log_multiplier = keys.get(_LOG_MULTIPLIER, 0.0) if file.architecture in _READS_LOG_MULTIPLIER else 0.0
        magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, log_multiplier)
    else:
        inv_freq = linear(theta, file.dim, factor)
    notes = () if by_flags else _unread(file, kind, lambda *b: yarn(theta, file.dim, factor, original, *b))
    inv_freq = [value / divisor for value, divisor in zip(inv_freq, divisors, strict=True)]
    return Computed(tuple(inv_freq), magnitude, trained, notes=notes)


def _divisors(file: FileRope, kind: str, *, long: bool) -> Sequence[float]:
    """The numbers that the graph divides the frequencies by."""
    names = _TENSORS[file.architecture]  # the loader takes these tensors, and stops at others
    read = _FACTOR_LISTS if names and kind == "longrope" else names
    if stray := [name for name in file.tensors if name not in read]:
        raise ServingError(f"{stray[0]} is no tensor of {file.architecture!r} under {kind!r}; the file is not loaded")
    for name, values in file.tensors.items():
        for pair, value in enumerate(values):
            if not 0 < value < math.inf:
                raise ServingError(
                    f"{name} divides the frequency of pair {pair} by {value:g}; divisors must be finite numbers above "
                    "0, and with others every output is meaningless"
                )
    listed = file.tensors.get(_FACTOR_LISTS[0] if long else _FACTOR_LISTS[1], (1.0,) * (file.dim // 2))
    divisors = file.tensors.get("rope_freqs.weight", listed)
    if len(divisors) != file.dim // 2:
        raise ServingError(f"a tensor of {len(divisors)} divisors does not fit {file.dim // 2} rotated pairs")
    return divisors


def _unread_keys(architecture: str) -> tuple[str, ...]:
    """The keys that the graph of an architecture does not read from its file."""
    read = [*_BETAS] if architecture in _READS_BETAS else []
    unread = [key for key in _UNREAD if key not in read]
    unread += [] if architecture in _READS_ALPHA else [_ALPHA]
    return (*unread, *([] if architecture in _READS_LOG_MULTIPLIER else [_LOG_MULTIPLIER]))


def _unread(file: FileRope, kind: str, ramp: Callable[[float, float], Sequence[float]]) -> tuple[str, ...]:
    """Sentences on keys that the graph does not read, and that would change what it computes."""
    unread = _unread_keys(file.architecture)
    different = [key for key in unread if key in file.keys and file.keys[key] != _BETAS.get(key, 0)]
    if kind != "yarn":
        different = [key for key in different if key != _LOG_MULTIPLIER]
    if not _BETAS.keys().isdisjoint(different):
        stated = [file.keys.get(key, usual) for key, usual in _BETAS.items()]
        possible = all(type(value) in (int, float) and 0 < value < math.inf for value in stated)
        if possible and (kind != "yarn" or list(ramp(*stated)) == list(ramp(*_BETAS.values()))):
            different = [key for key in different if key not in _BETAS]
    strange = [key for key in file.keys if key.startswith("rope.") and key not in _KNOWN]
    notes = [f"{key} is not a key of llama.cpp {_GGUFEngine.version}." for key in strange]
    for key in different:
        value = file.keys[key]
        shown = f"{value:g}" if isinstance(value, int | float) else short(str(value))
        notes.append(f"{key} is {shown}, and not read for {file.architecture!r}.")
    return tuple(notes)


@dataclass(frozen=True)
class _ServedFile:
    """A file that may compute what was measured; its context length is the length to serve."""

    name: str
    file: FileRope
    removed: tuple[str, ...]  # tensors that must go from the model's own file
    flags: tuple[str, ...] | None  # of llama-server, with the model's own file; None where tensors must change

    @functools.cached_property
    def computed(self) -> Computed:
        return file_computes(self.file)


class _GGUFEngine(Engine):
    """Base of the programs that run a GGUF file."""

    version = "b11549"
    table = engine_table("llama_cpp")
    file_suffix = ".gguf"

    def computes(self, config: Config, length: int | None = None) -> Computed:
        return file_computes(converted(config), length)

    def config_for(self, target: Target) -> ServingConfig:
        self.check_family(target)
        if target.model_type not in ARCHITECTURES:
            reasons = [f"the GGUF architecture of {target.model_type!r} is not in the table of this package"]
        else:
            reasons = []
            for candidate in _candidates(target):
                try:
                    computed = self.computed(candidate)
                except (ServingError, ArithmeticError) as error:
                    reasons.append(f"{candidate.name}: {error}")
                    continue
                reason = computed.difference(target.inv_freq, target.attention_factor, 1.0)
                if reason is None and target.softmax_scale != 1:
                    reason = "the softmax scale of this family is not in these rules"
                if reason is None and target.layer_type and "rope.scaling.attn_factor" in candidate.file.keys:
                    reason = "the magnitude would reach the sliding-window layers too"
                if reason is None and target.layer_type is not None:
                    reason = self.moved_theta(target, candidate.file.keys["rope.freq_base"])
                if reason is None:
                    return self.served(target, candidate, computed)
                reasons.append(f"{candidate.name}: {reason}")
            architecture, tensors = ARCHITECTURES[target.model_type]
            if not tensors:
                reasons.append(f"the graph of {architecture!r} reads no tensor of divisors")
        raise ServingError(
            f"{self.name} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({'; '.join(dict.fromkeys(reasons))})"
        )

    def computed(self, candidate: _ServedFile) -> Computed:
        """The numbers that the program computes when it is started in this way."""
        return candidate.computed

    def served(self, target: Target, candidate: _ServedFile, computed: Computed) -> ServingConfig:
        """How to start the program on a file with these keys and tensors."""
        file = candidate.file
        return self.serving(
            target,
            candidate.name,
            computed,
            gguf_keys={
                f"{file.architecture}.{key}": value
                for key, value in file.keys.items()
                if key not in _unread_keys(file.architecture)
            },
            gguf_tensors=file.tensors,
            gguf_removed=candidate.removed,
            command=self.command(target),
            notes=(*computed.notes, *self.notes(target)),
        )

    def command(self, target: Target) -> tuple[str, ...]:
        """How to start the program on the rewritten file."""
        return ("llama-server", "-m", "OUT.gguf", "-c", str(target.length))

    def notes(self, target: Target) -> tuple[str, ...]:
        return ("Write the keys and tensors into a copy of the model's GGUF file with rope-ext gguf, OUT.gguf.",)


@functools.lru_cache(maxsize=1)  # the programs are asked about the same target one after the other
def _candidates(target: Target) -> tuple[_ServedFile, ...]:
    """Files that may compute what was measured, in order of preference."""
    check_sliding_layers(target.config, 6, "llama.cpp")
    try:
        own = converted(target.config)
    except ServingError:
        own = None
    architecture, tensors = ARCHITECTURES[target.model_type]
    dim, settings = 2 * len(target.inv_freq), target.settings
    base = {"context_length": target.length}
    files: list[tuple[str, FileRope, tuple[str, ...]]] = []
    if own is not None:  # the model's own file, and a linear scaling on top of what is in it
        files.append(("as published", FileRope(architecture, dim, own.keys | base, own.tensors), ()))
        scaled = "factor" in settings or target.method.startswith("linear")
        if scaled and (ratio := _ratio(own, target)) is not None:
            keys = own.keys | base | {"rope.scaling.type": "linear", "rope.scaling.factor": ratio}
            files.append(("native", FileRope(architecture, dim, keys, own.tensors), ()))
    plain_keys = base | {"rope.freq_base": settings["rope_theta"], "rope.scaling.type": "none"}
    if settings["rope_type"] in ("default", "linear", "yarn"):
        keys = plain_keys | _scaling_keys(settings)
        if settings["rope_type"] == "yarn":
            ratio = target.attention_factor / yarn_magnitude(keys["rope.scaling.factor"])
            keys |= {} if math.isclose(ratio, 1.0) else {"rope.scaling.attn_factor": ratio}
        files.append(("native", FileRope(architecture, dim, keys), tensors))
    if tensors:
        keys = plain_keys | {"rope.freq_base": target.theta}
        if tensors == _FACTOR_LISTS:
            keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": target.original}
        if target.attention_factor != 1.0:
            keys["rope.scaling.attn_factor"] = target.attention_factor
        divisors = dict.fromkeys(tensors, tuple(target.divisors))
        files.append((f"divisors in {tensors[0]}", FileRope(architecture, dim, keys, divisors), ()))
    by_file = _FAMILIES[target.model_type].get("sliding") == "file" and target.layer_type is None
    return tuple([_ServedFile(*each, _flags(own, each[1], each[2], by_file=by_file)) for each in files])


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

    def computed(self, candidate: _ServedFile) -> Computed:
        alike = candidate.flags is None or not candidate.file.keys.keys() & _UNREAD  # flags reach no more than keys
        return candidate.computed if alike else file_computes(candidate.file, by_flags=True)

    def served(self, target: Target, candidate: _ServedFile, computed: Computed) -> ServingConfig:
        if candidate.flags is None:
            return super().served(target, candidate, computed)
        command = ("llama-server", "-m", "MODEL.gguf", "-c", str(target.length), *candidate.flags)
        notes = (*computed.notes, "MODEL.gguf is the model as llama.cpp's converter writes it.")
        return self.serving(target, candidate.name, computed, command=command, notes=notes)


def _flags(own: FileRope | None, file: FileRope, removed: tuple[str, ...], *, by_file: bool) -> tuple[str, ...] | None:
    """Flags that turn the model's own file into another one; None where tensors must change.

    `by_file`: whether flags would leave sliding-window layers as the file has them, and the method is for these too.
    """
    if own is None or file.tensors != own.tensors or not own.tensors.keys().isdisjoint(removed):
        return None
    keys, arch = file.keys, file.architecture
    before = {key: value for key, value in own.keys.items() if key not in _unread_keys(arch)}
    before |= {key: usual for key, usual in _BETAS.items() if key not in before}
    flags: list[str] = []
    names = {
        "rope.freq_base": "--rope-freq-base",
        "rope.scaling.factor": "--rope-scale",
        "rope.scaling.original_context_length": "--yarn-orig-ctx",
        "rope.scaling.yarn_beta_fast": "--yarn-beta-fast",
        "rope.scaling.yarn_beta_slow": "--yarn-beta-slow",
    }
    kind = keys.get("rope.scaling.type", "linear")
    stated = "rope.scaling.type" in own.keys or len(own.keys) > 2
    if kind != own.keys.get("rope.scaling.type", "linear") and (kind != "none" or stated):
        flags += ["--rope-scaling", kind]
    for key, flag in names.items():
        if key in keys and keys[key] != before.get(key):
            flags += [flag, repr(keys[key])]
    if (flags and by_file) or keys.get(_LOG_MULTIPLIER) != own.keys.get(_LOG_MULTIPLIER):
        return None
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
