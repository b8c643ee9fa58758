"""PEFT adapters of patched models: the record of the patch in their folders, and loading them.

An adapter fits the model that it was trained on, its patch included. The patch is recorded in adapter_config.json,
under a key that tells what to do, because PEFT warns of every key that it does not know, by name:

    "rope_ext_hf: load with rope_ext_hf.from_pretrained": {"method": {...}, "rotary": {...}, ...}
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import nn

from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.files.model_folders import ADAPTER_CONFIG
from rope_ext_hf.files.other_formats import check_format
from rope_ext_hf.files.whole import read_json
from rope_ext_hf.models.config_keys import PAIRING_KEY, PATCH_KEY
from rope_ext_hf.models.patch_records import checked_patches
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.patches.rows.row_probe import pairing_of, published_pairing
from rope_ext_hf.patches.saved.fingerprint import FINGERPRINT_KEY, fingerprint_record
from rope_ext_hf.patches.slots.patched_slot import patch_state
from rope_ext_hf.rotary.pairing_names import PAIRINGS, other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_KEY = f"{PATCH_KEY}: load with rope_ext_hf.from_pretrained"
"""The key of adapter_config.json that holds the record of a patch."""
SAVE_ROUTE = f"a record in {ADAPTER_CONFIG}; load with rope_ext_hf.from_pretrained"
"""The words of `describe` for the way in which an adapter is saved."""
_RECORDED_KEYS = ("method", "rotary", "target_length", "native", "layers", "loading_code", "below", FINGERPRINT_KEY)
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")
"""Arguments of from_pretrained that say where on the Hub, or in its cache, a file is."""
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Names of files that hold the weights of a whole model."""
_EVENTS = ("gated_repo", "missing_entries", "connection_errors")
"""Events in which `cached_file` of transformers raises an error, unless it is told not to."""
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""The class that loads the base model for a task of PEFT. The config of a base model names its own class only, which is
mostly one for language modelling; a task that is missing here is loaded with that one."""


# --- saving --------------------------------------------------------------------------------------------------------


def _to_dict(settings: Any, additions: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's settings as PEFT saves them, plus `additions`; this replaces their `to_dict`."""
    return {**type(settings).to_dict(settings), **additions}


def with_record(settings: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter with the record of a patch, which replaces a record that they already hold.

    `record`: the record in the config of the patched base model.
    """
    kept = {key: value for key, value in settings.items() if not _is_record(key)}
    return kept | _as_saved(record)


def _as_saved(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of adapter_config.json that holds the record of a patch."""
    return {ADAPTER_KEY: {key: copy.deepcopy(record[key]) for key in _RECORDED_KEYS if key in record}}


def _is_record(key: str) -> bool:
    """Return whether a key of adapter_config.json holds the record of a patch, whatever text follows its colon."""
    return key.partition(":")[0] == PATCH_KEY


def record_patch(model: nn.Module) -> None:
    """Make PEFT save a model's patch and the pairing of its converted weights with the model's adapters from now on.

    Nothing changes for a model that is neither patched nor converted.
    """
    state, pairing = patch_state(model), getattr(getattr(model, "config", None), PAIRING_KEY, None)
    additions = {} if pairing is None else {PAIRING_KEY: pairing}
    if state is not None:
        additions |= _as_saved(state.record | fingerprint_record(model))
    if not additions:
        return
    for settings in getattr(model, "peft_config", {}).values():
        settings.__dict__["to_dict"] = partial(_to_dict, settings, additions)


def record_before_saving(module: nn.Module, *_: Any) -> None:
    """Call `record_patch`; a hook before the `state_dict` of a model, which PEFT takes first when it saves adapters."""
    if isinstance(getattr(module, "peft_config", None), dict):
        record_patch(module)


def keep_pairing(model: nn.Module) -> None:
    """Make PEFT save the pairing of a model's converted weights with the adapters that the model gets later."""
    if getattr(getattr(model, "config", None), PAIRING_KEY, None) is not None:
        model.register_state_dict_pre_hook(record_before_saving)  # type: ignore[no-untyped-call]


def stop_recording(model: nn.Module) -> None:
    """Undo `record_patch`: the adapters of a model are saved without a record again."""
    for module in modules_with_adapters(model):
        for settings in module.peft_config.values():
            settings.__dict__.pop("to_dict", None)


def modules_with_adapters(model: nn.Module) -> list[Any]:
    """Return the modules of a model that have a `peft_config`: settings of adapters by their names."""
    if "peft" not in sys.modules:  # without it nothing can have added an adapter
        return []
    return [module for module in model.modules() if isinstance(getattr(module, "peft_config", None), dict)]


# --- loading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder or on the Hub.

    Attributes:
        path: its folder or Hub id.
        base: the folder or Hub id of the model that it was trained on.
        settings: its adapter_config.json, without the keys of this package.
        record: the patch of the model that it was trained on; None: that model's own folder
            states whether it is patched.
        pairing: the pairing of the dims in its weights, where they were converted; else None.
        hub: the arguments with which `path` is found on the Hub, such as the revision.
        subfolder: where in `path` it is; empty: in `path` itself.
    """

    path: str
    base: str
    settings: dict[str, Any]
    record: Mapping[str, Any] | None
    pairing: str | None
    hub: dict[str, Any]
    subfolder: str

    def for_base(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which transformers finds the base model on the Hub.

        `hub`: the arguments that found the adapter. Its revision and subfolder are left out: the base model has its own
        revision, which the adapter may state.
        """
        revision = self.settings.get("revision")
        others = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        return others | ({"revision": revision} if isinstance(revision, str) else {})

    @property
    def auto_class(self) -> str | None:
        """The class of transformers that loads the base model for the adapter's task.

        None: the class that the config of the base model names.
        """
        import transformers

        name = _CLASSES.get(str(self.settings.get("task_type")))
        mapping = self.settings.get("auto_mapping")
        if name is None and isinstance(mapping, dict):
            name = str(mapping.get("base_model_class"))
        return name if name is not None and hasattr(transformers, name) else None

    @property
    def stated_pairing(self) -> str | None:
        """The pairing of the dims in its weights, stated by a conversion or by the record of a patch; else None."""
        fingerprint = (self.record or {}).get(FINGERPRINT_KEY)
        recorded = fingerprint.get("pairing") if isinstance(fingerprint, Mapping) else None
        return self.pairing or (recorded if isinstance(recorded, str) else None)

    def lacks_pairing(self, config: Any) -> bool:
        """Return whether it is unknown if the adapter was trained before or after its base model was converted.

        `config`: the config of the base model.
        """
        converted = getattr(config, PAIRING_KEY, None)
        return converted in PAIRINGS and self.stated_pairing is None and converted != published_pairing(config)

    def check_stated(self, config: Any) -> None:
        """Raise CheckpointError if the pairing of its weights is unknown; see `lacks_pairing`."""
        if not self.lacks_pairing(config):
            return
        pairing: str = getattr(config, PAIRING_KEY)
        command = command_line("convert", short(self.path), "NEW", to=pairing, **{"from": other_pairing(pairing)})
        raise CheckpointError(
            f"the adapter {short(self.path)!r} does not state the pairing of its weights, and its base model "
            f"{short(self.base)!r} was converted to the {pairing} pairing. If the adapter was trained before that, "
            f'convert it too: `{command}`; if after, write "{PAIRING_KEY}": "{pairing}" into its {ADAPTER_CONFIG}'
        )

    def check_pairing(self, base: PreTrainedModel) -> None:
        """Raise CheckpointError unless the adapter and its base model pair the dims of a head alike.

        Without a statement in the adapter, the pairing is that in which models of the family are published.
        """
        self.check_stated(base.config)
        if self.pairing is None:  # the record of a patch is compared when the patch is restored
            return
        pairing = getattr(base.config, PAIRING_KEY, None) or pairing_of(base)
        if pairing not in (None, self.pairing):
            raise CheckpointError(
                f"the adapter {short(self.path)!r} is in the {self.pairing} pairing, its base model "
                f"{short(self.base)!r} in the {pairing} pairing; convert one of them, for example the adapter: "
                f"{command_line('convert', short(self.path), 'NEW', to=pairing)}"
            )

    def load_onto(self, base: PreTrainedModel, **arguments: Any) -> Any:
        """Load the weights onto the base model, and return a `peft.PeftModel` with the adapter's name.

        Args:
            base: patched already, where the adapter was trained under a patch.
            arguments: of `peft.PeftModel.from_pretrained`: adapter_name, is_trainable.

        Raises:
            CheckpointError: the adapter and the base model pair the dims of a head differently, PEFT is missing, or it
                does not know this type of adapter.
        """
        self.check_pairing(base)
        try:
            from peft import PeftConfig, PeftModel
            from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
        except ImportError as error:
            raise CheckpointError(
                f"{short(self.path)!r} is a PEFT adapter, and PEFT is not installed: pip install peft"
            ) from error
        kind = self.settings.get("peft_type")
        if kind not in list(PEFT_TYPE_TO_CONFIG_MAPPING):
            raise CheckpointError(
                f"{short(self.path)!r} is an adapter of type {short(str(kind))!r}, which the installed PEFT does not "
                "know: correct peft_type, or install a newer PEFT"
            )
        settings = PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**self.settings))
        folder = self._folder()
        _resize_embeddings(base, folder)
        model = PeftModel.from_pretrained(base, str(folder), config=settings, **arguments)
        model.name_or_path = self.path
        return model

    def _folder(self) -> Path:
        """Return the folder of the weights on this machine, after a download where they are on the Hub."""
        from transformers.utils import cached_file

        where = {"subfolder": self.subfolder, "_raise_exceptions_for_missing_entries": False, **self.hub}
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            file = cached_file(self.path, name, **where)
            if file is not None:
                return Path(file).parent
        raise CheckpointError(f"the adapter {short(self.path)!r} has no weights: no adapter_model.safetensors or .bin")


def _resize_embeddings(base: PreTrainedModel, folder: Path) -> None:
    """Give a model as many token embeddings as its adapter holds, which may be trained with tokens added."""
    embeddings, file = base.get_input_embeddings(), folder / "adapter_model.safetensors"
    if not file.is_file():
        return
    name = next((name for name, module in base.named_modules() if module is embeddings), "")
    key = f"base_model.model.{name}.weight"
    with safe_open(file, "pt") as tensors:
        if key not in list(tensors.keys()):
            return
        rows = tensors.get_slice(key).get_shape()[0]
    if rows != len(embeddings.weight):
        base.resize_token_embeddings(rows)


def _config_file(name: str, subfolder: str, hub: Mapping[str, Any]) -> Path | None:
    """Return the adapter_config.json of a folder or Hub repository that holds no whole model as well, or None."""
    from transformers.utils import find_adapter_config_file

    try:
        file = find_adapter_config_file(name, subfolder=subfolder, **hub)
    except (OSError, ValueError):  # neither a folder nor a Hub id: loading the config reports it
        return None
    if file is None:
        return None
    folder = Path(file).parent
    has_model = (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return None if Path(name).is_dir() and has_model else Path(file)


def find_adapter(path: str | Path, *, subfolder: str = "", **hub: Any) -> Adapter | None:
    """Return the adapter in a folder or Hub repository; None where there is none.

    A folder that also holds a whole model counts as that model, as in transformers.

    Args:
        path: a folder or Hub id.
        subfolder: where in it the adapter is.
        hub: revision, token, cache_dir and local_files_only, as transformers takes them; others are ignored.

    Raises:
        CheckpointError: its adapter_config.json names no base model, or is not for transformers.
    """
    name = str(path)
    hub = {key: hub[key] for key in _HUB_ARGUMENTS if key in hub}
    file = _config_file(name, subfolder, hub)
    if file is None:
        return None
    values = read_json(file)
    base = values.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        check_format(Path(name))
        raise CheckpointError(
            f"{short(name)!r} is an adapter without the name of its model; add base_model_name_or_path to its "
            f"{ADAPTER_CONFIG}"
        )
    if values.get("megatron_config"):
        raise CheckpointError(
            f"the {ADAPTER_CONFIG} of {short(name)!r} names a module to import (megatron_core), for Megatron's models; "
            "remove megatron_config from it"
        )
    record = next((value for key, value in values.items() if _is_record(key)), None)
    if record is not None:
        checked_patches(record, f"the adapter {short(name)!r}")
    return Adapter(
        path=name,
        base=base,
        settings={key: value for key, value in values.items() if key != PAIRING_KEY and not _is_record(key)},
        record=record,
        pairing=values.get(PAIRING_KEY),
        hub=hub,
        subfolder=subfolder,
    )


@contextmanager
def finding_base(adapter: Adapter) -> Iterator[None]:
    """Add to a CheckpointError that is raised in a `with` block that it is about the base model of an adapter."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"the model that the adapter {short(adapter.path)!r} was trained on could not be found: {error}"
        ) from error


def tokenizer_source(path: str | Path, **hub: Any) -> tuple[str, dict[str, Any]]:
    """Return where the tokenizer of a model or adapter is: a folder or Hub id, and the arguments that find it there.

    That is `path` itself, or the base model of an adapter without a tokenizer of its own. `hub`: as in `find_adapter`.
    """
    from transformers.utils import cached_file

    adapter = find_adapter(path, **hub)
    if adapter is None:
        return str(path), hub
    quiet = dict.fromkeys([f"_raise_exceptions_for_{event}" for event in _EVENTS], False)
    if cached_file(adapter.path, "tokenizer_config.json", **adapter.hub, **quiet) is not None:
        return str(path), hub
    return adapter.base, adapter.for_base(hub)
