"""`serving_config`: how to have a serving engine compute what was measured.

print(rope.serving_config("Qwen/Qwen3-8B", "vllm", "yarn", factor=4))
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.engines.base import Engine, ServingConfig, Target, find_engine
from rope_ext_hf.errors import ServingError, size_text
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.config import SAVED_KEYS
from rope_ext_hf.questions import command_line
from rope_ext_hf.reading.preflight import cached_bytes
from rope_ext_hf.serving.gpu_memory import GPUMemory, gpu_memory
from rope_ext_hf.serving.questions import GPUServer
from rope_ext_hf.serving.target import Model, make_targets, open_model

_LARGE_CACHE = 16 * 10**9  # bytes of keys and values of one input from which a note gives them
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Keys by which configs state layers that draft tokens (multi-token prediction), such as DeepSeek's."""


@foreign_errors("this model cannot be configured for the engine")
def serving_config(
    model: nn.Module | str | Path,
    engine: str,
    method: str | RopeMethod | None = None,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    engine_version: str | None = None,
    plugin: bool = False,
    server: GPUServer | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **params: Any,
) -> ServingConfig:
    """How to have a serving engine compute what this model with this method computes here.

    The configuration is put through the engine's own rules (`rope_ext_hf.engines`) before it is returned: its
    frequencies and magnitude agree with the method's to 1e-6.

    Args:
        model: a model in memory, patched or not; or a folder, a Hub id or "reference". No weights are read.
        engine: a name that `rope-ext serve-config --help` lists, such as vllm.
        method: as in `patch`, with factor, target_length, over, context_length and params; None: the patch that the
            model carries, else the model as published.
        engine_version: the version that will run it.
        plugin: for an engine that loads a plug-in of this package: any frequencies, by one rope type.
        server: the GPUs that options are computed for. Without a method a length that does not fit is shortened.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        ServingError: the engine cannot compute the same, or the length does not fit; the message gives the reason.
        MethodError: an unknown engine or method, or impossible parameters.
        CheckpointError: no such model.
    """
    chosen = find_engine(engine).with_plugin() if plugin else find_engine(engine)
    notes = chosen.check_version(engine_version)
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    asked: dict[str, Any] = {"factor": factor, "target_length": target_length, **params}
    length = parse_length(context_length)
    targets = make_targets(opened, method, over=over, context_length=length, remaps=chosen.remaps, **asked)
    by_folder = None
    if isinstance(method, str) and not isinstance(model, nn.Module):
        asked = {"method": method, **asked, "revision": revision}
        asked |= {"over": over if over != "own" else None, "context_length": context_length}
        by_folder = partial(_by_folder, chosen, model=str(model), asked=asked)
    return configure(chosen, opened, targets, method=method, notes=notes, server=server, by_folder=by_folder)


def configure(
    engine: Engine,
    opened: Model,
    targets: list[Target],
    *,
    method: str | RopeMethod | None = None,
    notes: tuple[str, ...] = (),
    server: GPUServer | None = None,
    by_folder: Callable[..., tuple[str, ...]] | None = None,
) -> ServingConfig:
    """`serving_config` of a model that was opened, whose targets are known.

    `by_folder`: makes the commands by which a folder needs no overrides, of a target and options.
    """
    if opened.described.rotary.length_dependent:
        notes += (
            f"Inputs of up to {targets[-1].original:,} tokens have frequencies of their own here; the engine gives "
            "every input those of long ones, or changes them for keys that are cached already.",
        )
    configs = []
    for each in targets:
        target, options, remarks = each, tuple[str, ...](), notes
        if server is not None and server.gpus:
            target, memory = _fitting(each, opened.whole(), server, shorten=method is None)
            options, remarks = engine.options_on(memory.options), (*notes, *memory.sentences)
        elif engine.on_gpus and (size := cached_bytes(opened.config, each.length)) > _LARGE_CACHE:
            cost = f"An input of {each.length:,} tokens takes {size_text(size)} of keys and values in 16 bits"
            remarks = (*notes, f"{cost}, beside the weights: --gpus and --gpu-memory say what fits.")
        config = engine.config_for(target)
        if (as_saved := _as_saved(opened, target)) is None:
            if opened.specs and config.overrides is None and opened.name in config.command:
                command = tuple(["MODEL" if each == opened.name else each for each in config.command])
                note = f"MODEL is the model as it was published: {opened.name} carries a patch that this is without."
                config = replace(config, command=command, notes=(*config.notes, note))
        elif config.overrides and method is None:
            without = engine.config_for(as_saved)
            if without.overrides is None:  # the folder's own config.json is enough
                config = replace(without, encoding="as the folder's config.json has it")
        if config.overrides and by_folder is not None and len(targets) == 1:
            config = replace(config, by_folder=by_folder(target, options=options))
        command = (*config.command, *options)
        configs.append(replace(config, command=command, notes=(*config.notes, *target.notes, *remarks)))
    if [key for key in _DRAFT_KEYS if getattr(opened.config, key, None)] and (method is not None or opened.specs):
        notes = (f"This model has draft layers. {engine.drafts}",) if engine.drafts else ()
        configs = [replace(config, notes=(*config.notes, *notes)) for config in configs]
    *shorter, longest = configs
    return replace(longest, shorter=tuple(shorter))


def _fitting(target: Target, model: Any, server: GPUServer, *, shorten: bool) -> tuple[Target, GPUMemory]:
    """The target, of the longest length that fits where it may be shortened, and the memory that it takes."""
    kv_bits = (16, 8) if target.remapping is None else (16,)  # all that the attention of the plug-in reads
    memory = gpu_memory(model, target.length, server, kv_bits=kv_bits)
    if memory.kv_bits is not None:
        return target, memory
    if not shorten or not memory.longest[16]:
        raise ServingError(str(memory))
    note = f"{memory.sentences[-1]} The server is started for {memory.longest[16]:,} tokens."
    target = replace(target, length=memory.longest[16], notes=(*target.notes, note))
    return target, gpu_memory(model, target.length, server, kv_bits=kv_bits)


def _by_folder(
    engine: Engine, target: Target, model: str, asked: dict[str, Any], options: tuple[str, ...]
) -> tuple[str, ...]:
    """The commands that write a patched folder and serve it with options, where the engine needs no overrides."""
    folder, stated = f"{Path(model).name}-{target.length}", json.loads(json.dumps(target.patched))
    try:
        config = engine.config_for(replace(target, model=folder, config=stated, patched=stated))
    except ServingError:
        return ()
    if config.overrides is not None or not config.command:
        return ()
    return command_line("patch", model, **asked, out=folder), shlex.join((*config.command, *options))


def _as_saved(opened: Model, target: Target) -> Target | None:
    """The target with what a saved folder states taken for its config; None where the folder states something else."""
    text = opened.saved.get("text_config") if opened.saved and target.composite else opened.saved
    stated = json.loads(json.dumps(target.patched))
    if not isinstance(text, dict) or [key for key in SAVED_KEYS if text.get(key) != stated.get(key)]:
        return None
    return replace(target, config=stated, patched=stated)
