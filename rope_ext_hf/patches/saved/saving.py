"""`save_pretrained` of patched models, which writes what transformers' own saving would leave out."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.errors import CheckpointError, warn_caller
from rope_ext_hf.files.model_files import name_way_out
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.models.config import EXPECTED_LINES
from rope_ext_hf.models.config_keys import PATCH_KEY, own_keys
from rope_ext_hf.models.engine_keys import compare_engines, former_spelling
from rope_ext_hf.patches.saved.adapters import modules_with_adapters, record_before_saving
from rope_ext_hf.patches.saved.fingerprint import fingerprint_record
from rope_ext_hf.patches.saved.loading_code import write_loading_code
from rope_ext_hf.patches.slots.patch_state import PatchState, swap_configs
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CHECKPOINT = re.compile(r"checkpoint-\d+")
"""The name of a folder from which a Trainer resumes. It reads the config there with the base class of configs, which
fails on `rope_scaling` because it has no length to complete it with (transformers 5.23)."""


class _RewritingSave:
    """The `save_pretrained` of one patched model, whose config on disk differs from the live one in four ways.

    - On disk the rope settings stand in two spellings, the second for programs that read the one of transformers 4.
    - The live config holds the extended length, which `generate` reads; under a linear scaling the saved one holds the
      length that engines multiply by the factor.
    - Some config classes refuse a rope type of this package (Phi-3). The config is then saved as the class accepts it,
      and rewritten afterwards, so that plain loading stops instead of running the model without the method.
    - A parameter that the method trains goes into the config, with the values it has now, and not into the weights.
    """

    def __init__(self, model: PreTrainedModel, state: PatchState) -> None:
        self.model = model
        self.state = state
        model.__dict__["save_pretrained"] = self

    def remove(self) -> None:
        """Give the model the `save_pretrained` of its class again, and its config as it was.

        A part of the model may be unpatched alone, and the config of the whole must not state the patch then.
        """
        self.model.__dict__.pop("save_pretrained", None)
        swap_configs(self.model, {id(swap.patched): swap.original for swap in self.state.configs})

    def __call__(
        self,
        save_directory: str | Path,
        *args: Any,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the model as its class does, then rewrite its config; warn if plain transformers cannot load it."""
        save = partial(type(self.model).save_pretrained, self.model, save_directory, *args, **kwargs)
        if getattr(self.model, "_hf_peft_config_loaded", False):  # it saves its adapter alone, without a config
            save(push_to_hub=push_to_hub)
            return
        if push_to_hub:
            raise CheckpointError(
                "push_to_hub=True would upload this model before its config is complete; use "
                "model.push_to_hub(repo_id), or save it to a folder and upload that"
            )
        _record_trained_values(self.model)
        with left_out_of_log(*EXPECTED_LINES), _trained_left_out(self.model):
            save()
        is_main_process = args[0] if args else kwargs.get("is_main_process", True)
        folder = Path(save_directory)
        if is_main_process and (folder / "config.json").is_file():  # a class may save the models inside it alone
            _complete(folder, self.model)


def saves_patch(model: PreTrainedModel) -> bool:
    """Return whether the `save_pretrained` of a model writes a patch into its folder."""
    return isinstance(model.__dict__.get("save_pretrained"), _RewritingSave)


def finish_saving(model: PreTrainedModel, folder: Path, *, is_main_process: bool) -> None:
    """Complete a folder into which a model is being saved by its class, which began before the model had its patch.

    Its config.json is written again, and the parameters that the method trains are left out of the weights.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # it saves its adapter alone, without a config
        return
    _record_trained_values(model)
    model._keys_to_ignore_on_save = _without_trained(model)
    if is_main_process:
        with left_out_of_log(*EXPECTED_LINES):
            model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        _complete(folder, model)


def _complete(folder: Path, model: PreTrainedModel) -> None:
    """Complete a folder that transformers has written: its config, and the way to load it."""
    rewrite_config(folder, model)
    state = patched_slots(model)[0].state
    if state.encoding.loads_plainly:
        return
    if any(patch.loading_code for patch in (*state.below, state.patch)):
        write_loading_code(folder)
    else:
        _warn_of_plain_loading(state)


def _warn_of_plain_loading(state: PatchState) -> None:
    """Warn that plain transformers raises an error when it loads the folder that was just saved."""
    method, rotary = state.patch.method, state.patch.rotary
    native = ""
    approximate = method.approximate_rope_parameters(rotary)
    if approximate is not None:
        native = (
            f". patch(..., native=True) saves transformers' own rope type {approximate['rope_type']!r} instead, which "
            "gives other results for batches and caches"
        )
    warn_caller(
        "this folder loads with rope_ext_hf.from_pretrained alone: transformers has no rope type for "
        f"{method.name}, and raises an error{native}"
    )


def attach_saving(model: nn.Module, slot: PatchedRotaryEmbedding) -> None:
    """Make a model, every model inside it, and its adapters save the patch; the hooks of `slot` undo this.

    Adapters are mostly added to a model that is patched already, and this package does not notice. But saving an
    adapter begins with a `state_dict` of the model, and torch calls a hook before that.
    """
    from transformers import PreTrainedModel

    listing = modules_with_adapters(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and saves_patch(module):
            continue
        if isinstance(module, PreTrainedModel):
            name_way_out(module)
            slot.hooks.append(_RewritingSave(module, slot.state))
        if isinstance(module, PreTrainedModel) or module in listing:
            slot.hooks.append(module.register_state_dict_pre_hook(_before_state_dict))  # type: ignore[no-untyped-call]


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    """Record the patch in the settings of a module's adapters, which are about to be saved."""
    if isinstance(getattr(module, "peft_config", None), dict):
        _record_trained_values(module)
    record_before_saving(module)


def config_as_saved(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config that records a patch, with rope settings and length where every program reads them.

    The record then lists, under "former", the keys that repeat the rope settings for transformers 4.
    """
    record = config[PATCH_KEY]
    settings = {"rope_parameters": record["rope_parameters"]}
    length_key = own_keys(config["model_type"]).get("max_position_embeddings", "max_position_embeddings")
    if length_key in config:
        settings[length_key] = record["max_position_embeddings"]
    saved = config | settings
    former = former_spelling(saved, record["layer_types"])
    return saved | former | {PATCH_KEY: record | {"former": sorted(former)}}


def _record_trained_values(model: nn.Module) -> None:
    """Bring the record of a patch, and the rope settings beside it, up to date with the parameter that it trains."""
    for slot in patched_slots(model):
        if not slot.state.patch.method.trainable:
            continue
        patch = slot.present_patch
        divisors = patch.method.longrope_parameters(patch.rotary)
        for config in (swap.patched for swap in slot.state.configs):
            record = vars(config).get(PATCH_KEY)
            if record is None:
                continue
            parameters = copy.deepcopy(config.rope_parameters)
            for layer_type in record["layer_types"]:
                settings = parameters if layer_type is None else parameters[layer_type]
                if settings.get("rope_type") == "longrope":
                    settings |= {key: divisors[key] for key in ("short_factor", "long_factor")}
            config.rope_parameters = parameters
            record |= patch.to_dict() | {"rope_parameters": copy.deepcopy(parameters)}


@contextmanager
def _trained_left_out(model: PreTrainedModel) -> Iterator[None]:
    """Make `save_pretrained` leave out the parameters that a model's method trains, in a `with` block."""
    before = model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = _without_trained(model)
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = before


def _without_trained(model: PreTrainedModel) -> set[str]:
    """Return the names of tensors that a model leaves out of its folder, those that its method trains among them."""
    trained = {id(parameter) for slot in patched_slots(model) for parameter in slot.tables.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in trained]
    return {*(model._keys_to_ignore_on_save or ()), *names}


def rewrite_config(
    folder: Path, model: nn.Module, *, name: Path | None = None, more: Mapping[str, Any] | None = None
) -> None:
    """Put the rope settings and the length of a patch where every program reads them in the config.json of a folder.

    Warn if serving engines are known to load the folder and to run another model from it.

    Args:
        folder: the folder, whose config.json has the record of the patch.
        model: the patched model; its fingerprint goes into the record.
        name: the name that the folder gets later, for the warning; None: it has its name.
        more: what else goes into the record.
    """
    file = folder / "config.json"
    additions = fingerprint_record(model) | dict(more or {})
    resumed_from = _CHECKPOINT.fullmatch(folder.name) is not None
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in [config, *config.values()]:
        if not isinstance(part, dict) or PATCH_KEY not in part:
            continue
        saved = config_as_saved(part)
        disagreeing = compare_engines(saved).disagreeing
        if resumed_from:
            former = saved[PATCH_KEY].pop("former")
            saved = {key: value for key, value in saved.items() if key not in former}
        part |= saved
        part[PATCH_KEY] |= additions
        if disagreeing:
            warn_caller(
                f"{', '.join(disagreeing)} would load {str(name or folder)!r} without an error and run another model: "
                "these programs ignore some of its rope settings"
            )
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
