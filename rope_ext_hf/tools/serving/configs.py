"""`serving_config`: how to have a serving engine compute what was measured, from a model's config alone.

print(serving.serving_config("Qwen/Qwen3-8B", "vllm", "yarn", factor=4))
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, UnsupportedModelError, short, size_text
from rope_ext_hf.files import read_json
from rope_ext_hf.hub import foreign_errors, load_empty, model_folder, model_source, read_config
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import list_methods, registered_name, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.adapters import find_adapter
from rope_ext_hf.patches.config_writing import config_encoding, softmax_scale, write_settings
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.geometry import base_rope_of_config, before_patches, bind_to, rope_of_config, stated_length
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.patches.loading import empty_model
from rope_ext_hf.patches.patch_records import SAVED_KEYS, PatchSpec, recorded_specs, saved_specs
from rope_ext_hf.patches.recipes import recipe_warning
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.questions import command_line
from rope_ext_hf.reading.cache_size import cached_bytes
from rope_ext_hf.tools.engines.base import Engine, find_engine
from rope_ext_hf.tools.engines.keys import length_setting
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory, gpu_memory
from rope_ext_hf.tools.serving.questions import GPUServer

_LARGE_CACHE = 16 * 10**9  # bytes of keys and values of one input from which a note gives them
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Keys by which configs state layers that draft tokens (multi-token prediction), such as DeepSeek's."""


class Model:
    """A model as its config describes it, without the patch that it may carry."""

    def __init__(
        self,
        name: str,  # the folder or Hub id; "MODEL" for a model in memory
        config: Any,  # its text config
        *,
        composite: bool,  # whether that lies under `text_config`
        specs: list[PatchSpec],  # the patches recorded in it, bottom first
        whole: Callable[[], Any] | None = None,  # makes the whole model, on the meta device if it is not in memory
        given: str = "",  # the name as the user gave it
        mistral_format: bool = False,  # whether its folder holds params.json beside config.json
    ) -> None:
        self.name = self.folder = name  # the first as an engine takes it
        self.given, self.mistral_format = given or name, mistral_format
        self.config, self.composite, self.specs = config, composite, specs
        self.whole = whole or partial(empty_model, config)
        self.layers = AttentionLayers(config)
        # the rotary embedding of the layers that a method applies to, and their types; [None]: all layers
        slots = []
        with suppress(CheckpointError, UnsupportedModelError):  # a class that is not here, or whose module stays
            slots = find_slots(empty_model(config))
        self.described, self.layer_types = rope_of_config(self.layers, slots)

    @cached_property
    def saved(self) -> dict[str, Any] | None:
        """What the config.json of its folder states; None: it has none."""
        file = Path(self.folder) / "config.json"
        return read_json(file) if file.is_file() else None


def open_model(
    model: nn.Module | str | Path | Model, *, revision: str | None = None, trust_remote_code: bool = False
) -> Model:
    """Read the config of a model in memory, a folder, a Hub id or "reference"; no weights are read."""
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        config = find_slots(model)[0].config
        top: Any = getattr(model, "config", config)
        specs = list(present_specs(model)) or recorded_specs(config)
        config = before_patches(config)
        composite = getattr(top, "text_config", None) is not None
        name = getattr(top, "_name_or_path", "") or "MODEL"
        twice = Path(name, "params.json").is_file()
        return Model(name, config, composite=composite, specs=specs, whole=lambda: model, mistral_format=twice)
    folder = model_folder(model, revision=revision, weights=False)
    refuse_adapter(model, folder)
    whole, record = read_config(model, revision=revision, trust_remote_code=trust_remote_code)
    with foreign_errors(f"the config of {str(model)!r} could not be read"):
        text = whole.get_text_config()
        specs = saved_specs(record) if record is not None else []
        load = partial(load_empty, model, revision=revision, trust_remote_code=trust_remote_code)
        of_folder: dict[str, Any] = {"given": str(model), "mistral_format": (folder / "params.json").is_file()}
        return Model(model_source(model), text, composite=text is not whole, specs=specs, whole=load, **of_folder)


def needs_nothing(context_length: int, target_length: int, rule: str) -> str:
    """What is said of a target length that a model is for as it is, in tokens."""
    return f"the model is for {context_length:,} tokens ({rule}); {target_length:,} needs no extension."


def refuse_adapter(name: str | Path, folder: Path) -> None:
    """Raise CheckpointError for a folder of PEFT: an engine is given the whole model."""
    if find_adapter(folder) is not None:
        raise CheckpointError(
            f"{short(str(name))!r} is an adapter of PEFT, without a config of its own; give its base model, or merge "
            "it (merge_and_unload, save_pretrained) and give the result"
        )


def make_target(
    model: Model,
    method: str | RopeMethod | PatchSpec | None = None,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: int | None = None,
    **params: Any,
) -> Target:
    """What an engine is to compute for a model with a method; the arguments are those of `rope_ext_hf.patch`.

    Without a method it is the patch that the model carries, else the model as published.
    """
    config, target_length = model.config, parse_length(target_length)
    if method is None and (factor is not None or target_length is not None or params):
        raise MethodError("a factor, a length or a parameter was given without a method; give the method too")
    if isinstance(method, PatchSpec):
        spec = method
    elif method is None and model.specs and over == "own" and context_length is None:
        spec = model.specs[-1]
    else:
        base = base_rope_of_config(model.described, over, context_length, config)
        rotary = base.rotary
        chosen = method or Default()
        known = isinstance(method, str) and registered_name(method) in list_methods()
        if known and target_length is not None and target_length <= rotary.context_length:
            nothing = needs_nothing(rotary.context_length, target_length, base.rule)
            raise MethodError(f"{nothing} Leave the method out (--method) to serve the model as it is")
        resolved = resolve_method(chosen, rotary, factor=factor, target_length=target_length, **params)
        length = target_length or stated_length(resolved, rotary, factor)
        bound = bind_to(resolved, rotary, config, length)
        spec = PatchSpec(bound, rotary, length or bound.extended_length(rotary))
    label = spec.method.label()
    if isinstance(spec.method, RemappingMethod):
        if not spec.method.moves_keys:
            raise ServingError(
                f"{label} adds to scores by distance; no serving engine runs that. Serve the model with this package "
                "and transformers"
            )
        raise ServingError(
            f"{label} changes the relative positions that queries see; no serving engine runs that. Serve the model "
            "with this package and transformers, or choose a static method"
        )
    if spec.method.length_dependent:
        raise ServingError(
            f"{label} follows the length of every input; serving engines compute one set of frequencies when they "
            "start. Choose a static method with the factor of the longest input, e.g. yarn"
        )
    changes_nothing = method is None and not model.specs and over == "own" and context_length is None
    return _target(model, spec, changes_nothing=changes_nothing)


def _target(model: Model, spec: PatchSpec, *, changes_nothing: bool) -> Target:
    """The target of a static method; under `changes_nothing` the model is to run as published."""
    layer_type, config = model.layer_types[0], model.config
    patched = copy.deepcopy(config)
    values = config.to_dict()
    if "rope_parameters" not in values:
        raise ServingError(f"the config of {config.model_type!r} has no rope settings, so no engine reads any from it")
    length = spec.target_length or spec.method.extended_length(spec.rotary) or spec.rotary.context_length
    if not changes_nothing:
        model.layers.check_rotating(spec.layers)
        encoding = config_encoding(config, spec, layer_type)
        write_settings(patched, encoding, model.layer_types)
        patched.max_position_embeddings = encoding.saved_length
    inv_freq, attention_factor = spec.method.frequencies(spec.rotary, length)
    notes = (
        model.layers.unrotated_note(spec.method),
        recipe_warning(config, spec.rotary, spec.method, spec.target_length),
    )
    settings = values["rope_parameters"] if layer_type is None else values["rope_parameters"][layer_type]
    return Target(
        model=model.name,
        config=values,
        patched=patched.to_dict(),
        composite=model.composite,
        layer_type=layer_type,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
        softmax_scale=softmax_scale(family(config.model_type), settings),
        theta=spec.rotary.theta,
        original=spec.rotary.trained_length,
        length=max(length, length_setting(values)) if changes_nothing else length,
        method="the model as published" if changes_nothing else spec.method.label(),
        notes=() if changes_nothing else tuple([note for note in notes if note]),
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
    """How to have a serving engine compute what this model with this method computes here.

    The configuration is put through the engine's own rules (`rope_ext_hf.tools.engines`) before it is returned: its
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
    target = make_target(opened, method, over=over, context_length=length, **asked)
    by_folder = None
    if isinstance(method, str) and not isinstance(model, nn.Module):
        asked = {"method": method, **asked, "revision": revision}
        asked |= {"over": over if over != "own" else None, "context_length": context_length}
        by_folder = partial(_by_folder, chosen, model=str(model), asked=asked)
    return configure(chosen, opened, target, method=method, notes=notes, server=server, by_folder=by_folder)


def configure(
    engine: Engine,
    opened: Model,
    target: Target,
    *,
    method: str | RopeMethod | None = None,
    notes: tuple[str, ...] = (),
    server: GPUServer | None = None,
    by_folder: Callable[..., tuple[str, ...]] | None = None,
) -> ServingConfig:
    """`serving_config` of a model that was opened, whose target is known.

    `by_folder`: makes the commands by which a folder needs no overrides, of a target and options.
    """
    if opened.described.rotary.length_dependent:
        notes += (
            f"Inputs of up to {target.original:,} tokens have frequencies of their own here; the engine gives "
            "every input those of long ones, or changes them for keys that are cached already.",
        )
    options, remarks = tuple[str, ...](), notes
    if server is not None and server.gpus:
        target, memory = _fitting(target, opened.whole(), server, shorten=method is None)
        options, remarks = engine.gpu_options(memory.options), (*notes, *memory.sentences)
    elif engine.on_gpus and (size := cached_bytes(opened.config, target.length)) > _LARGE_CACHE:
        cost = f"An input of {target.length:,} tokens takes {size_text(size)} of keys and values in 16 bits"
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
    if config.overrides and by_folder is not None:
        config = replace(config, by_folder=by_folder(target, options=options))
    drafts: tuple[str, ...] = ()
    if any(getattr(opened.config, key, None) for key in _DRAFT_KEYS) and (method is not None or opened.specs):
        drafts = (f"This model has draft layers. {engine.drafts}",) if engine.drafts else ()
    command = (*config.command, *options)
    return replace(config, command=command, notes=(*config.notes, *target.notes, *remarks, *drafts))


def _fitting(target: Target, model: Any, server: GPUServer, *, shorten: bool) -> tuple[Target, GPUMemory]:
    """The target, of the longest length that fits where it may be shortened, and the memory that it takes."""
    memory = gpu_memory(model, target.length, server)
    if memory.kv_bits is not None:
        return target, memory
    if not shorten or not memory.longest[16]:
        raise ServingError(str(memory))
    note = f"{memory.sentences[-1]} The server is started for {memory.longest[16]:,} tokens."
    target = replace(target, length=memory.longest[16], notes=(*target.notes, note))
    return target, gpu_memory(model, target.length, server)


def _by_folder(
    engine: Engine, target: Target, model: str, asked: dict[str, Any], options: tuple[str, ...]
) -> tuple[str, ...]:
    """The commands that write a patched folder and serve it with options, where the engine needs no overrides."""
    folder, stated = f"{Path(model).name}-{target.length}", json.loads(json.dumps(target.patched))
    try:
        patched = {"config": stated, "patched": stated, "mistral_format": False}  # `patch` leaves those files out
        config = engine.config_for(replace(target, model=folder, **patched))
    except ServingError:
        return ()
    if config.overrides is not None or not config.command:
        return ()
    return command_line("patch", model, **asked, out=folder), shlex.join((*config.command, *options))


def _as_saved(opened: Model, target: Target) -> Target | None:
    """The target with what a saved folder states taken for its config; None where the folder states something else."""
    text = opened.saved.get("text_config") if opened.saved and target.composite else opened.saved
    stated = json.loads(json.dumps(target.patched))
    saved = {key: text.get(key) for key in SAVED_KEYS} if isinstance(text, dict) else None
    if saved != {key: stated.get(key) for key in SAVED_KEYS}:
        return None
    return replace(target, config=stated, patched=stated)
