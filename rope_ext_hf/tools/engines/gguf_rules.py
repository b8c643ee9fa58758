"""Rules of llama.cpp for RoPE: what its converter writes into a GGUF file, and what its graphs compute from the file.

A graph is llama.cpp's code for one model architecture. The rules are those of ggml-org/llama.cpp, b11549.

They were read in src/llama-context.cpp (constructor of llama_context), src/llama-model.cpp (load_hparams,
get_rope_factors), src/models/llama.cpp, phi3.cpp, gemma3.cpp, deepseek2.cpp, grok.cpp, mistral3.cpp, hunyuan-vl.cpp,
and `ggml_rope_yarn_corr_dims` and `rope_yarn` of ggml; conversion/base.py and hunyuan.py write the keys. Llama, Phi-3
and Qwen3 were compared with a build: checks/llama_cpp_engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rope_ext_hf.errors import ServingError, short
from rope_ext_hf.models.config_keys import Config, needed, rope_settings, rotated_dims, text_settings, yarn_magnitude
from rope_ext_hf.tools.engines.base import NotCheckedError, engine_table
from rope_ext_hf.tools.engines.formulas import alpha_theta, linear, llama3, longrope_magnitude, plain, quotients, yarn
from rope_ext_hf.tools.engines.keys import Computed, check_sliding_layers, length_setting, rope_divisors
from rope_ext_hf.tools.gguf.headers import FileRope

VERSION = "b11549"
"""The build whose source the rules were taken from."""
FAMILIES = engine_table("llama_cpp")["families"]
"""The properties of each family that the rules need, by model_type."""
ARCHITECTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    model_type: (family["architecture"], tuple(family.get("tensors", ()))) for model_type, family in FAMILIES.items()
}
"""model_type -> GGUF architecture, and the names of the tensors of divisors that its graph reads."""
_TENSORS = dict(ARCHITECTURES.values())  # architecture -> those names
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""The mscale by whose magnitude the graph divides that of YaRN."""
_LOG_MULTIPLIERS = {"deepseek2": 0.1, "mistral3": 1.0}
"""architecture -> the number by which the converter multiplies mscale_all_dim to get the log multiplier."""
_READS_LOG_MULTIPLIER = frozenset({*_LOG_MULTIPLIERS, "deepseek32", "glm-dsa"})
_READS_BETAS = frozenset({"mistral3"})
"""Architectures whose graph takes YaRN's betas from the file, whatever flags say; other graphs take those of flags."""
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
"""Keys of the scaling factor; the first that the file has counts, and 0 stands for 1."""
_ORIGINAL = "rope.scaling.original_context_length"
_ALPHA = "rope.scaling.alpha"
_READS_ALPHA = frozenset({"hunyuan-dense", "hunyuan_vl"})
_WHOLE_HEADS = frozenset({"deci", "falcon", "llama", "llama-embed"})
"""Architectures whose loader stops if only a part of each head rotates."""
_CONVERTED_LENGTH = 256 * 1024
"""The context length in tokens that the converter writes for a HunYuan with alpha, whatever its config states."""
FACTOR_LISTS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors with the two lists of LongRoPE."""
BETAS = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
"""The keys of YaRN's betas, with the numbers that count where they are missing."""
UNREAD = (*BETAS, "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
"""Keys that only Grok's graph reads from the file; Mistral 3's graph reads the betas too."""
OF_SLIDING_LAYERS = ("rope.freq_base_swa", "rope.dimension_count_swa")
"""Keys that change only sliding-window layers."""
_KNOWN = frozenset(
    {
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.attn_factor",
    }
    | {"rope.scaling.finetuned", *_FACTORS, _ALPHA, _ORIGINAL, LOG_MULTIPLIER, *UNREAD, *OF_SLIDING_LAYERS}
)
"""The rope keys that llama.cpp knows: LLM_KV_NAMES in src/llama-arch.cpp."""


def converted(config: Config) -> FileRope:
    """Return the RoPE keys and tensors that llama.cpp's converter writes into a GGUF file for a model with this config.

    Raises:
        NotCheckedError: the converter's rules for this family are not known here.
        ServingError: the rope settings of the config are lost in the converter, or when llama.cpp runs the file.
    """
    text = text_settings(config)
    settings, model_type = rope_settings(text), str(text.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise NotCheckedError(f"the GGUF architecture of {model_type!r} is not in the table of this package")
    architecture, tensors = ARCHITECTURES[model_type]
    check_sliding_layers(text, 6, "llama.cpp")
    if "mamba" in FAMILIES[model_type] and text.get("position_embedding_type") == "rope":
        raise ServingError(
            "llama.cpp's converter turns the rotation off in a model with Mamba layers, whatever its config says; "
            "`rope-ext gguf` writes a file that turns it on"
        )
    kind, dim = settings["rope_type"], rotated_dims(text, settings)
    keys: dict[str, Any] = {"context_length": length_setting(text), "rope.freq_base": settings["rope_theta"]}
    if kind == "default" and FAMILIES[model_type].get("scaling") == "none":
        keys["rope.scaling.type"] = "none"
    divisors: dict[str, tuple[float, ...]] = {}
    if kind in ("linear", "yarn"):
        keys |= scaling_keys(settings)
        if kind == "yarn" and settings.get("mscale_all_dim") and architecture in _LOG_MULTIPLIERS:
            keys[LOG_MULTIPLIER] = _LOG_MULTIPLIERS[architecture] * needed(settings, "mscale_all_dim")
    elif kind == "llama3":
        if "rope_freqs.weight" not in tensors:
            raise ServingError(
                f"llama.cpp's code for the architecture {architecture!r} reads no rope_freqs.weight, so llama3's "
                "scaling is lost"
            )
        theta, factor = settings["rope_theta"], needed(settings, "factor")
        low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
        original = needed(settings, "original_max_position_embeddings", 8192)
        scaled = llama3(theta, dim, factor, original, low, high)
        divisors[tensors[0]] = tuple(a / b for a, b in zip(plain(theta, dim), scaled, strict=True))
    elif kind in ("longrope", "su"):
        if architecture not in ("phi3", "phimoe"):
            raise ServingError(
                "llama.cpp's converter does not write the lists long_factor and short_factor of the rope type "
                f"{kind!r} for the architecture {architecture!r}, so the scaling is lost"
            )
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
        raise ServingError(f"llama.cpp's converter ignores the rope type {kind!r}")
    return FileRope(architecture, dim, keys, divisors, head_dim=dim)


def _hunyuan_keys(text: Config, settings: Config, architecture: str, dim: int) -> dict[str, Any]:
    """Return the GGUF keys for a HunYuan model whose dynamic scaling has `alpha`.

    Raises:
        ServingError: the converter refuses these settings.
    """
    theta, length, moe = settings["rope_theta"], length_setting(text), architecture == "hunyuan-moe"
    alpha = needed(settings, "alpha", None if moe else 50.0)
    if theta != 10000 or length not in (32 * 1024, _CONVERTED_LENGTH) or (moe and (alpha, dim) != (1000, 128)):
        raise ServingError(
            "llama.cpp's converter takes only the numbers of published models for a dynamic scaling, and stops at "
            f"alpha {alpha:g}, theta {theta:g}, {dim} dims per head and a length of {length:,} tokens"
        )
    return {
        "context_length": _CONVERTED_LENGTH,
        "rope.freq_base": alpha_theta(theta, dim, alpha),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": _CONVERTED_LENGTH,
    }


def scaling_keys(settings: Config) -> dict[str, Any]:
    """Return the GGUF keys for rope settings of the type linear or yarn; none for the rope type "default"."""
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
    """Compute RoPE frequencies and magnitude from a GGUF file as llama.cpp does.

    Args:
        file: the rotary embedding that the file describes.
        length: the tokens of context that are allocated (`-c`); None: those that the file states.
        by_flags: treat the keys as flags of `llama-server`. Flags have an effect for every architecture, while
            llama.cpp does not read some of the keys from the files of most architectures.

    Raises:
        NotCheckedError: the rules for this architecture are not known here.
        ServingError: llama.cpp does not load the file, or its numbers make no sense.
    """
    keys = file.keys
    kind = keys.get("rope.scaling.type", "linear")
    if file.architecture not in _TENSORS:
        raise NotCheckedError(
            f"this package does not know how llama.cpp computes RoPE for the architecture {file.architecture!r}"
        )
    stated = next((key for key in _FACTORS if key in keys), None)
    scaled = stated is not None and keys[stated] not in (0, 1)
    if file.architecture in ("deepseek2", "deepseek32", "glm-dsa") and kind != "none" and (kind != "linear" or scaled):
        raise NotCheckedError(
            f"llama.cpp puts the attention factor of YaRN into the softmax scale of {file.architecture}, by rules that "
            "change often, so this package cannot say what it computes"
        )
    if file.architecture in _WHOLE_HEADS and file.head_dim not in (None, file.dim):
        raise ServingError(
            f"rope.dimension_count is {file.dim}, but a head has {file.head_dim} dims; for {file.architecture!r} "
            "llama.cpp stops if they differ"
        )
    trained = int(needed(keys, "context_length"))
    theta = needed(keys, "rope.freq_base", 10000.0)
    if file.architecture in _READS_ALPHA and (alpha := keys.get(_ALPHA, 0)) != 0:
        theta = alpha_theta(theta, file.head_dim or file.dim, needed({_ALPHA: alpha}, _ALPHA))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ServingError(f"llama.cpp has no rope scaling of the type {kind!r}")
    factor = needed(keys, stated) if stated and scaled and kind != "none" else 1.0
    original = needed(keys, _ORIGINAL) if keys.get(_ORIGINAL) else trained
    divisors = _divisors(file, kind, long=(length or trained) > original)
    magnitude = needed(keys, "rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        read = by_flags or file.architecture in _READS_BETAS
        fast, slow = [needed(keys, key, usual) if read else usual for key, usual in BETAS.items()]
        inv_freq = yarn(theta, file.dim, factor, original, fast, slow)
        log_multiplier = keys.get(LOG_MULTIPLIER, 0.0) if file.architecture in _READS_LOG_MULTIPLIER else 0.0
        magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, log_multiplier)
    else:
        inv_freq = linear(theta, file.dim, factor)
    notes: tuple[str, ...] = ()
    if not by_flags:
        notes = _notes_on_unread_keys(file, kind, partial(yarn, theta, file.dim, factor, original))
    return Computed(tuple(quotients(inv_freq, divisors)), magnitude, trained, notes=notes)


def _divisors(file: FileRope, kind: str, *, long: bool) -> Sequence[float]:
    """Return the numbers by which llama.cpp divides the frequencies, one for each rotated pair.

    `long` chooses the list for long inputs, where the file has one list for them and one for short inputs.
    """
    names = _TENSORS[file.architecture]  # the loader stops at tensors that the graph does not read
    read = FACTOR_LISTS if names and kind == "longrope" else names
    if stray := [name for name in file.tensors if name not in read]:
        raise ServingError(
            f"llama.cpp does not load this file: it has the tensor {stray[0]}, which a {file.architecture!r} model "
            f"with rope.scaling.type {kind!r} does not have; convert the model again"
        )
    for name, values in file.tensors.items():
        for pair, value in enumerate(values):
            if not 0 < value < math.inf:
                raise ServingError(
                    f"{name} divides the frequency of pair {pair} by {value:g}, which makes every output meaningless; "
                    "divisors must be finite numbers above 0"
                )
    listed = file.tensors.get(FACTOR_LISTS[0] if long else FACTOR_LISTS[1], (1.0,) * (file.dim // 2))
    divisors = file.tensors.get("rope_freqs.weight", listed)
    if len(divisors) != file.dim // 2:
        raise ServingError(f"there must be one divisor for each of {file.dim // 2} rotated pairs, got {len(divisors)}")
    return divisors


def unread_keys(architecture: str) -> tuple[str, ...]:
    """Return the RoPE keys that llama.cpp does not read from GGUF files of this architecture."""
    unread = [key for key in UNREAD if key not in BETAS or architecture not in _READS_BETAS]
    if architecture not in _READS_ALPHA:
        unread.append(_ALPHA)
    if architecture not in _READS_LOG_MULTIPLIER:
        unread.append(LOG_MULTIPLIER)
    return tuple(unread)


def _notes_on_unread_keys(
    file: FileRope, kind: str, yarn_by_betas: Callable[[float, float], Sequence[float]]
) -> tuple[str, ...]:
    """Return sentences on keys of a GGUF file that llama.cpp ignores for its architecture, but that would matter.

    `yarn_by_betas` computes YaRN's frequencies for a beta_fast and a beta_slow, everything else as in the file.
    """
    without_effect = [
        key
        for key in unread_keys(file.architecture)
        if key in file.keys and file.keys[key] != BETAS.get(key, 0) and not (key == LOG_MULTIPLIER and kind != "yarn")
    ]
    if not BETAS.keys().isdisjoint(without_effect):
        stated = [file.keys.get(key, usual) for key, usual in BETAS.items()]
        possible = all(type(value) in (int, float) and 0 < value < math.inf for value in stated)
        # betas change nothing without YaRN, nor where they round to the same ramp
        if possible and (kind != "yarn" or list(yarn_by_betas(*stated)) == list(yarn_by_betas(*BETAS.values()))):
            without_effect = [key for key in without_effect if key not in BETAS]
    unknown = [key for key in file.keys if key.startswith("rope.") and key not in _KNOWN]
    notes = [f"{key} is not a key of llama.cpp {VERSION}." for key in unknown]
    for key in without_effect:
        value = file.keys[key]
        text = f"{value:g}" if isinstance(value, int | float) else short(str(value))
        notes.append(f"{key} is {text}, and not read for {file.architecture!r}.")
    return tuple(notes)
