"""`serving_config`: the command and keys with which a serving engine computes the RoPE that a model was measured with.

They are worked out from the config of a model alone.

print(serving.serving_config("Qwen/Qwen3-8B", "vllm", "yarn", factor=4))
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, short, size_text
from rope_ext_hf.files.model_folders import model_folder, model_source
from rope_ext_hf.files.whole import foreign_errors, read_json
from rope_ext_hf.hub import is_adapter, load_empty, missing_tokenizer, read_config
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import list_methods, registered_name
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.patch_records import SAVED_KEYS, Patch
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.reading.cost.memory import cached_bytes
from rope_ext_hf.tools.engines.base import Engine, find_engine
from rope_ext_hf.tools.engines.keys import length_setting
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.gguf.models import is_gguf, way_out
from rope_ext_hf.tools.serving.config_model import ConfigModel
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory, gpu_memory
from rope_ext_hf.tools.serving.serving_options import GPUServer

_LARGE_CACHE = 16 * 10**9  # bytes of keys and values of one input from which a note mentions them
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Keys by which configs state layers that draft tokens (multi-token prediction), such as DeepSeek's."""


class Model(ConfigModel):
    """A model to serve: its config without the patches that it carries, and its name for engines.

    Attributes:
        name: the folder or Hub id as an engine takes it; "MODEL" for a model in memory without a name.
        folder: the folder or Hub id that it was read from; `name` may be changed.
        given_name: the name that the user gave.
        composite: whether the text config lies under `text_config` of the model's config.
        mistral_format: whether the folder holds params.json, Mistral's own format, beside config.json.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        *,
        composite: bool,
        patches: list[Patch],
        whole: Callable[[], Any] | None = None,
        given_name: str = "",
        mistral_format: bool = False,
    ) -> None:
        super().__init__(config, patches, whole)
        self.name = self.folder = name
        self.given_name, self.composite, self.mistral_format = given_name or name, composite, mistral_format

    @cached_property
    def saved(self) -> dict[str, Any] | None:
        """The contents of config.json in the model's folder; None if the folder has no such file."""
        file = Path(self.folder) / "config.json"
        return read_json(file) if file.is_file() else None


def open_model(
    model: nn.Module | str | Path | Model, *, revision: str | None = None, trust_remote_code: bool = False
) -> Model:
    """Read the config of a model, and no weights.

    `model`: a model in memory, a folder, a Hub id, or "reference" for the bundled model.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        config, patches = Model.parts_of(model)
        whole_config: Any = getattr(model, "config", config)
        name = getattr(whole_config, "_name_or_path", "") or "MODEL"
        return Model(
            name,
            config,
            composite=getattr(whole_config, "text_config", None) is not None,
            patches=patches,
            whole=lambda: model,
            mistral_format=Path(name, "params.json").is_file(),
        )
    folder = None
    if not is_gguf(model):
        folder = model_folder(model, revision=revision, weights=False)
        refuse_adapter(model, folder)
    whole, record = read_config(model, revision=revision, trust_remote_code=trust_remote_code)
    with foreign_errors(f"the config of {str(model)!r} could not be read"):
        text = whole.get_text_config()
        return Model.of_record(
            text,
            record,
            name=model_source(model),
            composite=text is not whole,
            whole=partial(load_empty, model, revision=revision, trust_remote_code=trust_remote_code),
            given_name=str(model),
            mistral_format=folder is not None and (folder / "params.json").is_file(),
        )


def needs_nothing(context_length: int, target_length: int, rule: str) -> str:
    """Return a sentence that says that a model needs no method, since it is for the target length already.

    Lengths are in tokens.
    """
    return f"the model is for {context_length:,} tokens ({rule}); {target_length:,} needs no extension."


def refuse_adapter(name: str | Path, folder: Path) -> None:
    """Raise CheckpointError if a folder holds a PEFT adapter, because engines are given the whole model."""
    if is_adapter(folder):
        raise CheckpointError(
            f"{short(str(name))!r} is a PEFT adapter, without a config of its own; give its base model, or merge the "
            "adapter (merge_and_unload, save_pretrained) and give that folder"
        )


def make_target(
    model: Model,
    method: str | RopeMethod | Patch | None = None,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: int | None = None,
    **params: Any,
) -> Target:
    """Return the target for an engine: the model with the method, and the frequencies that the engine must compute.

    The arguments are those of `rope_ext_hf.patch`. Without a method it is the patch that the model carries, else the
    model as published.

    Raises:
        MethodError: impossible arguments, or a target length that the model is for without a method.
        ServingError: a method that no engine runs, or a patch for chosen layers.
    """
    target_length = parse_length(target_length)
    if method is None and (factor is not None or target_length is not None or params):
        raise MethodError("a factor, a length or a parameter was given without a method; give the method too")
    as_loaded = over == "own" and context_length is None
    if isinstance(method, Patch):
        patch = method
    elif method is None and model.patches and as_loaded:
        patch = model.patches[-1]
    else:
        if isinstance(method, str) and registered_name(method) in list_methods() and target_length is not None:
            base = model.rope.extending(over, context_length)
            if target_length <= base.rotary.context_length:
                reason = needs_nothing(base.rotary.context_length, target_length, base.rule)
                raise MethodError(f"{reason} Leave the method out (--method) to serve the model as it is")
        patch = model.planned_patch(
            method or "default",
            factor=factor,
            target_length=target_length,
            over=over,
            context_length=context_length,
            **params,
        )
    _check_runs_on_engines(patch.method)
    if patch.layers is not None and not model.rope.layers.are_default(patch.layers):
        raise ServingError(
            f"the patch of this model is for chosen layers ({', '.join(map(str, patch.layers))}), and settings are "
            "computed for the layers that attend to everything. Give an engine the saved folder as it is if rope-ext "
            "audit says that it computes the same, and serve the model with this package and transformers if not"
        )
    return _target(model, patch, changes_nothing=method is None and not model.patches and as_loaded)


def _check_runs_on_engines(method: RopeMethod) -> None:
    """Raise a ServingError for a method that no serving engine runs, whatever the model is."""
    label = method.label()
    if isinstance(method, RemappingMethod):
        if not method.moves_keys:
            change = "multiplies queries by a factor" if method.scales_queries_only else "adds to scores by distance"
            raise ServingError(
                f"{label} {change}, and no serving engine does that. Serve the model with this package and transformers"
            )
        raise ServingError(
            f"{label} changes the relative positions that queries see, and no serving engine does that. Serve the "
            "model with this package and transformers, or choose a static method"
        )
    if method.length_dependent:
        raise ServingError(
            f"{label} follows the length of every input, but serving engines compute one set of frequencies when they "
            "start. Choose a static method with the factor of the longest input, e.g. yarn"
        )


def _target(model: Model, patch: Patch, *, changes_nothing: bool) -> Target:
    """Return the target for a method with fixed frequencies.

    With `changes_nothing` the model is to be served as published.
    """
    layer_type = model.rope.layer_types[0]
    config = model.config.to_dict()
    if "rope_parameters" not in config:
        raise ServingError(
            f"the config of {model.config.model_type!r} has no rope settings, so no engine reads any from it"
        )
    length = patch.target_length or patch.method.extended_length(patch.rotary) or patch.rotary.context_length
    inv_freq, attention_factor = patch.method.frequencies(patch.rotary, length)
    return Target(
        model=model.name,
        config=config,
        patched=config if changes_nothing else model.patched_config(patch).to_dict(),
        composite=model.composite,
        layer_type=layer_type,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
        softmax_scale=model.softmax_scale,
        theta=patch.rotary.theta,
        original=patch.rotary.trained_length,
        length=max(length, length_setting(config)) if changes_nothing else length,
        method="the model as published" if changes_nothing else patch.method.label(),
        notes=() if changes_nothing else model.notes_on(patch),
        mistral_format=model.mistral_format,
    )


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
    """Return the command and keys with which a serving engine computes what this model with this method computes here.

    The configuration is put through the engine's own rules (`rope_ext_hf.tools.engines`) before it is returned: its
    frequencies and magnitude agree with the method's to 1e-6.

    Args:
        model: a model in memory, patched or not; or a folder, a GGUF file, a Hub id, or "reference" for the
            bundled model. No weights are read.
        engine: a name that `rope-ext serve-config --help` lists, such as vllm.
        method, factor, target_length, over, context_length, params: as in `patch`. Without a method it is the patch
            that the model carries, else the model as published.
        engine_version: the version of the engine that will run it.
        plugin: whether the engine will load the plug-in of this package, which takes any frequencies.
        server: the GPUs of the server, for its options. Without a method, a length that does not fit is shortened.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        ServingError: the engine cannot compute the same, or the length does not fit; the message gives the reason.
        MethodError: an unknown engine or method, or impossible parameters.
        CheckpointError: no such model.
    """
    rules = find_engine(engine).with_plugin() if plugin else find_engine(engine)
    if isinstance(model, (str, Path)) and is_gguf(model) and rules.file_suffix != ".gguf":
        raise ServingError(
            f"{rules.label} is given a folder here, and {short(str(model))!r} is a GGUF file. {way_out(Path(model))}"
        )
    notes = rules.check_version(engine_version)
    if isinstance(model, (str, Path)) and not is_gguf(model):
        missing = missing_tokenizer(model)
        notes += (f"{rules.label} needs a tokenizer, and {missing}.",) if missing else ()
    opened = open_model(model, revision=revision, trust_remote_code=trust_remote_code)
    arguments: dict[str, Any] = {"factor": factor, "target_length": target_length, **params}
    target = make_target(opened, method, over=over, context_length=parse_length(context_length), **arguments)
    folder_commands = None
    if isinstance(method, str) and not isinstance(model, nn.Module):
        options = {
            "method": method,
            **arguments,
            "revision": revision,
            "over": over if over != "own" else None,
            "context_length": context_length,
        }
        folder_commands = _FolderCommands(rules, str(model), options)
    return configure(rules, opened, target, method=method, notes=notes, server=server, folder_commands=folder_commands)


@dataclass(frozen=True)
class _FolderCommands:
    """Maker of two commands that write a patched folder and serve it.

    They are shorter than a command line with overrides of the config.
    """

    engine: Engine
    model: str  # as the user gave it
    options: dict[str, Any]  # of `rope-ext patch`, by their names in Python

    def commands(self, target: Target, server_options: tuple[str, ...]) -> tuple[str, ...]:
        """Return the two command lines; none if the engine needs overrides even for a patched folder."""
        folder = f"{Path(self.model).name}-{target.length}"
        saved = json.loads(json.dumps(target.patched))
        try:
            # `patch` leaves the files in Mistral's own format out
            config = self.engine.config_for(
                replace(target, model=folder, config=saved, patched=saved, mistral_format=False)
            )
        except ServingError:
            return ()
        if config.overrides is not None or not config.command:
            return ()
        patch = command_line("patch", self.model, **self.options, out=folder)
        return patch, shlex.join((*config.command, *server_options))


def configure(
    engine: Engine,
    opened: Model,
    target: Target,
    *,
    method: str | RopeMethod | None = None,
    notes: tuple[str, ...] = (),
    server: GPUServer | None = None,
    folder_commands: _FolderCommands | None = None,
) -> ServingConfig:
    """Return the serving config for a model that is opened already, with a target that is known; see `serving_config`.

    Args:
        engine: the engine that serves.
        opened: the model.
        target: the method and the length to serve.
        method: the method as it was typed, for commands; None: the one that is patched in.
        notes: remarks to add.
        server: the GPUs to plan memory for.
        folder_commands: makes the commands that write a patched folder, which are offered as a shorter alternative
            where the engine would need overrides of its config.
    """
    remarks = list(notes)
    if opened.rope.embedding.rotary.length_dependent:
        remarks.append(
            f"Inputs of up to {target.original:,} tokens have frequencies of their own here; the engine gives "
            "every input the frequencies of long ones, or changes them for keys that are cached already."
        )
    options: tuple[str, ...] = ()
    if server is not None and server.gpus:
        target, memory = _fitting(target, opened.whole(), server, shorten=method is None)
        options = engine.gpu_options(memory.options)
        remarks += memory.sentences
    elif engine.on_gpus:
        size = cached_bytes(opened.config, target.length)
        if size > _LARGE_CACHE:
            remarks.append(
                f"An input of {target.length:,} tokens takes {size_text(size)} of keys and values in 16 bits, beside "
                "the weights: add --gpus and --gpu-memory to see what fits."
            )
    config = _for_saved_config(engine, opened, target, engine.config_for(target), from_folder=method is None)
    if config.overrides and folder_commands is not None:
        config = replace(config, by_folder=folder_commands.commands(target, options))
    has_draft_layers = any(getattr(opened.config, key, None) for key in _DRAFT_KEYS)
    if has_draft_layers and engine.drafts and (method is not None or opened.patches):
        remarks.append(f"This model has draft layers. {engine.drafts}")
    return replace(config, command=(*config.command, *options), notes=(*config.notes, *target.notes, *remarks))


def _for_saved_config(
    engine: Engine, opened: Model, target: Target, config: ServingConfig, *, from_folder: bool
) -> ServingConfig:
    """Adjust a serving config to the patch that config.json in the model's folder states already, if any.

    `from_folder`: whether the user gave the folder without a method. If the engine then runs its config.json as it is,
    the command needs no overrides.
    """
    as_saved = _as_saved(opened, target)
    if as_saved is not None:
        if config.overrides and from_folder:
            without_overrides = engine.config_for(as_saved)
            if without_overrides.overrides is None:
                return replace(without_overrides, encoding="as the folder's config.json has it")
        return config
    if opened.patches and config.overrides is None and opened.name in config.command:
        command = tuple(["MODEL" if word == opened.name else word for word in config.command])
        note = f"MODEL is the model as it was published: {opened.name} carries a patch, which this command is without."
        return replace(config, command=command, notes=(*config.notes, note))
    return config


def _fitting(target: Target, model: Any, server: GPUServer, *, shorten: bool) -> tuple[Target, GPUMemory]:
    """Return the target and the GPU memory that it takes.

    If it does not fit, and `shorten` is true, its length is shortened to the longest that fits.

    Raises:
        ServingError: it does not fit, and may not be shortened or nothing fits.
    """
    memory = gpu_memory(model, target.length, server)
    if memory.kv_bits is not None:
        return target, memory
    if not shorten or not memory.longest[16]:
        raise ServingError(str(memory))
    note = f"{memory.sentences[-1]} The server is started for {memory.longest[16]:,} tokens."
    target = replace(target, length=memory.longest[16], notes=(*target.notes, note))
    return target, gpu_memory(model, target.length, server)


def _as_saved(opened: Model, target: Target) -> Target | None:
    """Return the target for an engine that reads the folder's config.json as it is.

    It is None if that file states another method or length.
    """
    saved = opened.saved.get("text_config") if opened.saved and target.composite else opened.saved
    if not isinstance(saved, dict):
        return None
    stated = json.loads(json.dumps(target.patched))
    if any(saved.get(key) != stated.get(key) for key in SAVED_KEYS):
        return None
    return replace(target, config=stated, patched=stated)
