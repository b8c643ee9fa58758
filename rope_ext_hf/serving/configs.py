"""`serving_config`: how to have a serving engine compute what was measured.

print(rope.serving_config("Qwen/Qwen3-8B", "vllm", "yarn", factor=4))
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length
from rope_ext_hf.engines.base import Engine, ServingConfig, Target, find_engine
from rope_ext_hf.errors import ServingError
from rope_ext_hf.files import read_json
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.config import SAVED_KEYS
from rope_ext_hf.questions import command_line
from rope_ext_hf.serving.target import make_targets, open_model

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
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        ServingError: the engine cannot compute the same; the message gives the reason.
        MethodError: an unknown engine or method, or impossible parameters.
        CheckpointError: no such model.
    """
    chosen = find_engine(engine).with_plugin() if plugin else find_engine(engine)
    notes = chosen.check_version(engine_version)
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    targets = make_targets(
        opened,
        method,
        factor=factor,
        target_length=target_length,
        over=over,
        context_length=context_length,
        remaps=chosen.remaps,
        **params,
    )
    if opened.described.rotary.length_dependent:
        notes += (
            f"Inputs of up to {targets[-1].original:,} tokens have frequencies of their own here; the engine gives "
            "every input those of long ones, or changes them for keys that are cached already.",
        )
    configs = []
    for target in targets:
        config = chosen.config_for(target)
        if (as_saved := _as_saved(target)) is None:
            if opened.specs and config.overrides is None and opened.name in config.command:
                command = tuple("MODEL" if each == opened.name else each for each in config.command)
                note = f"MODEL is the model as it was published: {opened.name} carries a patch that this is without."
                config = replace(config, command=command, notes=(*config.notes, note))
        elif config.overrides and method is None:
            without = chosen.config_for(as_saved)
            if without.overrides is None:  # the folder's own config.json is enough
                config = replace(without, encoding="as the folder's config.json has it")
        if config.overrides and isinstance(method, str) and not isinstance(model, nn.Module) and len(targets) == 1:
            asked = {"method": method, "factor": factor, "target_length": target_length, **params, "revision": revision}
            asked |= {"over": over if over != "own" else None, "context_length": context_length}
            config = replace(config, by_folder=_by_folder(chosen, target, str(model), asked))
        configs.append(replace(config, notes=(*config.notes, *target.notes, *notes)))
    if any(getattr(opened.config, key, None) for key in _DRAFT_KEYS) and (method is not None or opened.specs):
        notes = (f"This model has draft layers. {chosen.drafts}",) if chosen.drafts else ()
        configs = [replace(config, notes=(*config.notes, *notes)) for config in configs]
    *shorter, longest = configs
    return replace(longest, shorter=tuple(shorter))


def _by_folder(engine: Engine, target: Target, model: str, asked: dict[str, Any]) -> tuple[str, ...]:
    """The commands that write a patched folder and serve it, where the engine needs no overrides for that."""
    folder, stated = f"{Path(model).name}-{target.length}", json.loads(json.dumps(target.patched))
    try:
        config = engine.config_for(replace(target, model=folder, config=stated, patched=stated))
    except ServingError:
        return ()
    if config.overrides is not None or not config.command:
        return ()
    return command_line("patch", model, **asked, out=folder), shlex.join(config.command)


def _as_saved(target: Target) -> Target | None:
    """The target with what a saved folder states taken for its config; None where the folder states something else."""
    path = Path(target.model) / "config.json"
    if not path.is_file():
        return None
    saved = read_json(path)
    text = saved.get("text_config") if target.composite else saved
    stated = json.loads(json.dumps(target.patched))
    if not isinstance(text, dict) or any(text.get(key) != stated.get(key) for key in SAVED_KEYS):
        return None
    return replace(target, config=stated, patched=stated)
