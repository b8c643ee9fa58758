"""What is to be served: a model with its method, from its config alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.config_keys.keys import length_setting
from rope_ext_hf.engines.base import Target
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, short
from rope_ext_hf.files import read_json
from rope_ext_hf.hub import foreign_errors, load_empty, model_folder, model_source, read_config
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.adapters import find_adapter
from rope_ext_hf.patches.config import (
    PatchSpec,
    config_encoding,
    recorded_specs,
    saved_specs,
    softmax_scale,
    write_settings,
)
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import base_rope_of_config, before_patches, bind_to, rope_of_config, stated_length
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.patches.loading import empty_model
from rope_ext_hf.patches.recipes import recipe_warning
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import present_specs


class Model:
    """A model as its config describes it, without the patch that it may carry.

    Attributes:
        name: the folder or Hub id, as an engine takes it, "MODEL" for a model in memory; given: as it was given.
        config: its text config; composite: whether that lies under `text_config`.
        specs: the patches recorded in it, bottom first.
        layer_types: the layer types that a method applies to; [None]: all layers.
        described: the rotary embedding of those layers.
        whole: makes the whole model, on the meta device if it is not in memory.
    """

    def __init__(self, name: str, config: Any, *, composite: bool, specs: list[PatchSpec]) -> None:
        self.name, self.config, self.composite, self.specs = name, config, composite, specs
        self.given = name
        self.whole: Callable[[], Any] = lambda: empty_model(config)
        self.layers = AttentionLayers(config)
        self.described, self.layer_types = rope_of_config(self.layers)

    @cached_property
    def saved(self) -> dict[str, Any] | None:
        """What the config.json of its folder states; None: it has none."""
        file = Path(self.name) / "config.json"
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
        opened = Model(getattr(top, "_name_or_path", "") or "MODEL", config, composite=composite, specs=specs)
        opened.whole = lambda: model
        return opened
    refuse_adapter(model, model_folder(model, revision=revision, weights=False))
    whole, record = read_config(model, revision=revision, trust_remote_code=trust_remote_code)
    with foreign_errors(f"the config of {str(model)!r} could not be read"):
        text = whole.get_text_config()
        specs = saved_specs(record) if record is not None else []
        opened = Model(model_source(model), text, composite=text is not whole, specs=specs)
        opened.given = str(model)
        opened.whole = partial(load_empty, model, revision=revision, trust_remote_code=trust_remote_code)
        return opened


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


def make_target(model: Model, method: str | RopeMethod | None = None, **params: Any) -> Target:
    """What an engine is to compute for a model with a method; the arguments are those of `rope_ext_hf.patch`.

    Without a method it is the patch that the model carries, else the model as published.
    """
    target, *longer = make_targets(model, method, **params)
    if longer:
        raise ServingError(
            f"one engine has one set of frequencies, and these profiles are {1 + len(longer)}: serve-config prints an "
            "instance for each"
        )
    return target


def make_targets(
    model: Model,
    method: str | RopeMethod | PatchSpec | None = None,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: int | None = None,
    remaps: bool = False,
    **params: Any,
) -> list[Target]:
    """`make_target` for each length profile, shortest first, else once; `remaps`: the engine runs remapping methods."""
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
        known = isinstance(method, str) and method in list_methods()
        if known and target_length is not None and target_length <= rotary.context_length:
            nothing = needs_nothing(rotary.context_length, target_length, base.rule)
            raise MethodError(f"{nothing} Leave the method out (--method) to serve the model as it is")
        resolved = resolve_method(chosen, rotary, factor=factor, target_length=target_length, **params)
        length = target_length or stated_length(resolved, rotary, factor)
        bound = bind_to(resolved, rotary, config.model_type, length)
        spec = PatchSpec(bound, rotary, length or bound.extended_length(rotary))
    label = spec.method.label()
    if isinstance(spec.method, RemappingMethod):
        if not spec.method.moves_keys:
            raise ServingError(
                f"{label} adds to scores by distance; no serving engine runs that. Serve the model with this package "
                "and transformers"
            )
        if spec.method.by_length:
            raise ServingError(
                f"{label} reads short inputs as loaded and takes its rule from the length of each; no serving engine "
                "runs that, nor does the plug-in. Serve the model with this package and transformers, or choose a "
                "remapping method with one rule for all lengths"
            )
        if not remaps:
            raise ServingError(
                f"{label} changes the relative positions that queries see; no serving engine runs that by itself. "
                "Serve the model with this package and transformers, or choose a static method; as an experiment, vLLM "
                "runs it with the plug-in of this package (serve-config --plugin)"
            )
    if profiles := spec.method.profiles(spec.rotary):
        specs = [replace(spec, method=static, target_length=length) for length, static in profiles]
        return [_target(model, each, changes_nothing=False) for each in specs]
    if spec.method.length_dependent:
        raise ServingError(
            f"{label} follows the length of every input; serving engines compute one set of frequencies when they "
            "start. Choose a static method with the factor of the longest input, e.g. yarn"
        )
    changes_nothing = method is None and not model.specs and over == "own" and context_length is None
    return [_target(model, spec, changes_nothing=changes_nothing)]


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
        notes=() if changes_nothing else tuple(note for note in notes if note),
        remapping=_remapping(model, spec) if isinstance(spec.method, RemappingMethod) else None,
    )


def _remapping(model: Model, spec: PatchSpec) -> str:
    """A remapping method and the pairing of the model, as the plug-in reads them."""
    if spec.target_length is None and spec.method.extended_length(spec.rotary) is None:
        raise ServingError(f"{spec.method.name} has no end: give the method with the length to serve as target_length")
    layers = model.layers
    alike = layers.rotating[0] == model.config.num_hidden_layers and not layers.sliding and model.layer_types == [None]
    if not alike or spec.layers is not None:
        raise ServingError(
            f"{spec.method.name} is served where every layer attends to everything and rotates alike; serve this "
            "model with this package and transformers"
        )
    return json.dumps({"method": spec.method.to_dict(), "pairing": class_pairing(model.config)})
