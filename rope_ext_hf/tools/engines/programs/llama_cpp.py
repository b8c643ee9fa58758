"""Serving with llama.cpp, and with Ollama and other programs that run its GGUF files.

`gguf_rules` has the rules by which they compute RoPE, and names their source.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, yarn_magnitude
from rope_ext_hf.tools.engines.base import Engine, engine_table, register_engine
from rope_ext_hf.tools.engines.gguf_rules import (
    ARCHITECTURES,
    BETAS,
    FACTOR_LISTS,
    FAMILIES,
    LOG_MULTIPLIER,
    UNREAD,
    VERSION,
    converted,
    file_computes,
    scaling_keys,
    unread_keys,
)
from rope_ext_hf.tools.engines.keys import Computed, check_sliding_layers
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.gguf.headers import FileRope


@dataclass(frozen=True)
class _ServedFile:
    """A possible GGUF file for a target: from it, llama.cpp may compute the frequencies that the target should have.

    The context length that the file states is the length to serve.
    """

    name: str  # the name of the encoding, for reports
    file: FileRope
    removed: tuple[str, ...]  # tensors of the model's own file that this one must not have
    flags: tuple[str, ...] | None  # of llama-server, that have the same effect on the model's own file; None: none do

    @functools.cached_property
    def computed(self) -> Computed:
        return file_computes(self.file)


class _GGUFEngine(Engine):
    """Base class of the programs that run GGUF files with llama.cpp's code."""

    version = VERSION
    table = engine_table("llama_cpp")
    file_suffix = ".gguf"

    def computes(self, config: Config, length: int | None = None) -> Computed:
        return file_computes(converted(config), length)

    def config_for(self, target: Target) -> ServingConfig:
        self.check_family(target)
        reasons: list[str] = []
        if target.model_type not in ARCHITECTURES:
            reasons.append(f"the GGUF architecture of {target.model_type!r} is not in the table of this package")
        else:
            for candidate in _candidates(target):
                try:
                    computed = self.computed(candidate)
                except (ServingError, ArithmeticError) as error:
                    reasons.append(f"{candidate.name}: {error}")
                    continue
                reason = self._refusal(target, candidate, computed)
                if reason is None:
                    return self.served(target, candidate, computed)
                reasons.append(f"{candidate.name}: {reason}")
            architecture, tensors = ARCHITECTURES[target.model_type]
            if not tensors:
                reasons.append(f"llama.cpp's code for the architecture {architecture!r} reads no tensor of divisors")
        raise ServingError(
            f"{self.name} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({'; '.join(dict.fromkeys(reasons))})"
        )

    def _refusal(self, target: Target, candidate: _ServedFile, computed: Computed) -> str | None:
        """Return a clause on why the numbers that a GGUF file gives do not serve the target; None: they do."""
        reason = computed.difference(target.inv_freq, target.attention_factor, 1.0)
        if reason is not None:
            return reason
        if target.softmax_scale != 1:
            return "the rules here do not cover the softmax scale of this family"
        if target.layer_type is None:
            return None
        if "rope.scaling.attn_factor" in candidate.file.keys:
            return "the magnitude would reach the sliding-window layers too"
        return self.moved_theta(target, candidate.file.keys["rope.freq_base"])

    def computed(self, candidate: _ServedFile) -> Computed:
        """Return the frequencies, magnitude and length that this program computes when it runs the candidate file."""
        return candidate.computed

    def served(self, target: Target, candidate: _ServedFile, computed: Computed) -> ServingConfig:
        """Return the serving config for a suitable file: its keys and tensors, and the command that runs it."""
        file = candidate.file
        return self.serving(
            target,
            candidate.name,
            computed,
            gguf_keys={
                f"{file.architecture}.{key}": value
                for key, value in file.keys.items()
                if key not in unread_keys(file.architecture)
            },
            gguf_tensors=file.tensors,
            gguf_removed=candidate.removed,
            command=self.command(target),
            notes=(*computed.notes, *self.notes(target)),
        )

    def command(self, target: Target) -> tuple[str, ...]:
        """Return the command that starts the program on the rewritten file."""
        return ("llama-server", "-m", "OUT.gguf", "-c", str(target.length))

    def notes(self, target: Target) -> tuple[str, ...]:
        """Return sentences on how the rewritten file is made and used."""
        return ("rope-ext gguf writes the keys and tensors into a copy of the model's GGUF file, OUT.gguf.",)


@functools.lru_cache(maxsize=1)  # llama.cpp, GGUF and Ollama are configured for the same target one after the other
def _candidates(target: Target) -> tuple[_ServedFile, ...]:
    """Return the GGUF files from which llama.cpp may compute the target's frequencies, the preferred one first."""
    check_sliding_layers(target.config, 6, "llama.cpp")
    try:
        own = converted(target.config)
    except ServingError:
        own = None
    architecture, tensors = ARCHITECTURES[target.model_type]
    dim, settings = 2 * len(target.inv_freq), target.settings
    base = {"context_length": target.length}
    files: list[tuple[str, FileRope, tuple[str, ...]]] = []
    if own is not None:  # the model's own file, as it is and with a linear scaling on top
        files.append(("as published", FileRope(architecture, dim, own.keys | base, own.tensors), ()))
        scaled = "factor" in settings or target.method.startswith("linear")
        if scaled and (ratio := _ratio(own, target)) is not None:
            keys = own.keys | base | {"rope.scaling.type": "linear", "rope.scaling.factor": ratio}
            files.append(("native", FileRope(architecture, dim, keys, own.tensors), ()))
    plain_keys = base | {"rope.freq_base": settings["rope_theta"], "rope.scaling.type": "none"}
    if settings["rope_type"] in ("default", "linear", "yarn"):
        keys = plain_keys | scaling_keys(settings)
        if settings["rope_type"] == "yarn":
            ratio = target.attention_factor / yarn_magnitude(keys["rope.scaling.factor"])
            keys |= {} if math.isclose(ratio, 1.0) else {"rope.scaling.attn_factor": ratio}
        files.append(("native", FileRope(architecture, dim, keys), tensors))
    if tensors:
        keys = plain_keys | {"rope.freq_base": target.theta}
        if tensors == FACTOR_LISTS:
            keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": target.original}
        if target.attention_factor != 1.0:
            keys["rope.scaling.attn_factor"] = target.attention_factor
        divisors = dict.fromkeys(tensors, tuple(target.divisors))
        files.append((f"divisors in {tensors[0]}", FileRope(architecture, dim, keys, divisors), ()))
    # flags leave the sliding-window layers of this family as the file has them, but the method is for these layers too
    beyond_flags = FAMILIES[target.model_type].get("sliding") == "file" and target.layer_type is None
    return tuple(
        [
            _ServedFile(name, file, removed, _flags(own, file, removed, beyond_flags=beyond_flags))
            for name, file, removed in files
        ]
    )


def _ratio(own: FileRope, target: Target) -> float | None:
    """Return the factor by which all frequencies of the target are lower than those of the model's own GGUF file.

    It is None if they are not lower by one and the same factor, or if the file's own frequencies are not known.
    """
    try:
        unscaled = FileRope(own.architecture, own.dim, own.keys | {"rope.scaling.type": "none"}, own.tensors)
        before = file_computes(unscaled, target.length)
    except ServingError:
        return None
    if not all(target.inv_freq):  # some pairs do not rotate at all
        return None
    ratios = [a / b for a, b in zip(before.inv_freq, target.inv_freq, strict=True)]
    return ratios[0] if max(ratios) - min(ratios) < 1e-9 * max(ratios) and ratios[0] > 1 else None


@register_engine("llama.cpp")
class LlamaCpp(_GGUFEngine):
    """llama.cpp, served with flags of llama-server if they are enough, else with a rewritten GGUF file."""

    drafts = (
        "The flags go to the model of --model-draft as well (params_dft of tools/server/server-context.cpp); what the "
        "GGUF file carries must be in the draft's file, too."
    )

    def computed(self, candidate: _ServedFile) -> Computed:
        if candidate.flags is None or candidate.file.keys.keys().isdisjoint(UNREAD):
            return candidate.computed
        return file_computes(candidate.file, by_flags=True)  # flags reach graphs that do not read these keys

    def served(self, target: Target, candidate: _ServedFile, computed: Computed) -> ServingConfig:
        if candidate.flags is None:
            return super().served(target, candidate, computed)
        command = ("llama-server", "-m", "MODEL.gguf", "-c", str(target.length), *candidate.flags)
        notes = (*computed.notes, "MODEL.gguf is the model as llama.cpp's converter writes it.")
        return self.serving(target, candidate.name, computed, command=command, notes=notes)


def _flags(
    own: FileRope | None, file: FileRope, removed: tuple[str, ...], *, beyond_flags: bool
) -> tuple[str, ...] | None:
    """Return flags of llama-server with which the model's own file, `own`, computes the same as another file, `file`.

    Return None if flags cannot do it: because the tensors differ or a key differs that no flag sets, or because flags
    do not reach layers in which the rope keys must change (`beyond_flags`). `removed` names the tensors that must not
    be there.
    """
    if own is None or file.tensors != own.tensors or not own.tensors.keys().isdisjoint(removed):
        return None
    if file.keys.get(LOG_MULTIPLIER) != own.keys.get(LOG_MULTIPLIER):
        return None
    keys, arch = file.keys, file.architecture
    before = {key: value for key, value in own.keys.items() if key not in unread_keys(arch)}
    before |= {key: usual for key, usual in BETAS.items() if key not in before}
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
    if flags and beyond_flags:
        return None
    if keys.get("rope.scaling.attn_factor") != own.keys.get("rope.scaling.attn_factor"):
        value = keys.get("rope.scaling.attn_factor", 1.0)
        flags += ["--override-kv", f"{arch}.rope.scaling.attn_factor=float:{value!r}"]
    if keys["context_length"] > own.keys["context_length"]:  # builds before #28030 serve no more than the file states
        flags += ["--override-kv", f"{arch}.context_length=int:{keys['context_length']}"]
    return tuple(flags)


@register_engine("gguf")
class GGUF(_GGUFEngine):
    """A GGUF file that carries the method, for llama.cpp, LM Studio and every other program that runs such files."""

    rules_of = LlamaCpp.name


@register_engine("ollama")
class Ollama(_GGUFEngine):
    """Ollama, which has no options for RoPE: the GGUF file carries the method, and the Modelfile states the length."""

    rules_of = LlamaCpp.name

    def command(self, target: Target) -> tuple[str, ...]:
        return ("ollama", "create", "NAME", "-f", "Modelfile")

    def notes(self, target: Target) -> tuple[str, ...]:
        modelfile = f"The Modelfile has two lines: `FROM ./OUT.gguf` and `PARAMETER num_ctx {target.length}`."
        return (*super().notes(target), modelfile)
