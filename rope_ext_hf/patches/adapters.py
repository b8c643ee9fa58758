"""PEFT adapters of patched models: what their folders record, and loading them.

The patch that an adapter was trained under is recorded in adapter_config.json, in a key that PEFT warns of by name:

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
from rope_ext_hf.files import read_json
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.fingerprint import FINGERPRINT_KEY, fingerprint_record
from rope_ext_hf.patches.patch_records import PATCH_KEY, checked_specs
from rope_ext_hf.patches.slots import patch_state
from rope_ext_hf.questions import command_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_KEY = f"{PATCH_KEY}: load with rope_ext_hf.from_pretrained"
SAVE_ROUTE = f"a record in {ADAPTER_CONFIG}; load with rope_ext_hf.from_pretrained"
_RECORDED_KEYS = ("method", "rotary", "target_length", "native", "below", FINGERPRINT_KEY)
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# What a task of PEFT is loaded with where the architectures of the base model do not have it.
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


# --- saving --------------------------------------------------------------------------------------------------------


def _to_dict(settings: Any, record: dict[str, Any]) -> dict[str, Any]:
    return with_record(type(settings).to_dict(settings), record)


def with_record(settings: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an adapter, with the record in the config of its patched base model in place of any other."""
    kept = {key: value for key, value in settings.items() if not _is_record(key)}
    return kept | {ADAPTER_KEY: {key: copy.deepcopy(record[key]) for key in _RECORDED_KEYS if key in record}}


def _is_record(key: str) -> bool:
    return key.partition(":")[0] == PATCH_KEY


def record_patch(model: nn.Module) -> None:
    """Record the patch of a model with the adapters that it lists, whose settings are about to be saved."""
    if (state := patch_state(model)) is not None:
        record = state.record | fingerprint_record(model)
        for settings in getattr(model, "peft_config", {}).values():
            settings.__dict__["to_dict"] = partial(_to_dict, settings, record)


def stop_recording(model: nn.Module) -> None:
    """Save the adapters of a model without a record again."""
    for module in modules_with_adapters(model):
        for settings in module.peft_config.values():
            settings.__dict__.pop("to_dict", None)


def modules_with_adapters(model: nn.Module) -> list[Any]:
    """The modules, of PEFT or inside PEFT, that list settings of adapters by name as `peft_config`."""
    if "peft" not in sys.modules:  # without it nothing can have added an adapter
        return []
    return [module for module in model.modules() if isinstance(getattr(module, "peft_config", None), dict)]


# --- loading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder or on the Hub."""

    path: str  # the folder or Hub id
    base: str  # the folder or Hub id of the model that it was trained on
    settings: dict[str, Any]  # those of PEFT, without the keys of this package
    record: Mapping[str, Any] | None  # the patch of that model; None: the folder of the base model decides
    pairing: str | None  # of the adapter's weights, where they were converted
    hub: dict[str, Any]  # arguments that find `path` on the Hub
    subfolder: str  # inside `path`; empty: `path` itself

    def for_base(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that find the adapter on the Hub, as those for its base model: of the revision that it states."""
        revision = self.settings.get("revision")
        others = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        return others | ({"revision": revision} if isinstance(revision, str) else {})

    @property
    def auto_class(self) -> str | None:
        """The class of transformers that the adapter's task asks for; None: the one that the base model names."""
        import transformers

        name = _CLASSES.get(str(self.settings.get("task_type")))
        mapping = self.settings.get("auto_mapping")
        if name is None and isinstance(mapping, dict):
            name = str(mapping.get("base_model_class"))
        return name if name is not None and hasattr(transformers, name) else None

    def load_onto(self, base: PreTrainedModel, **arguments: Any) -> Any:
        """Load the weights onto the base model, which is patched already; a peft.PeftModel with the adapter's name.

        `arguments` are those of `peft.PeftModel.from_pretrained`: adapter_name, is_trainable.
        """
        runs = getattr(base.config, PAIRING_KEY, None) or class_pairing(base.config)
        if self.pairing is not None and runs not in (None, self.pairing):
            raise CheckpointError(
                f"the adapter {short(self.path)!r} is {self.pairing}, its base model {short(self.base)!r} {runs}; "
                f"convert one of them: {command_line('convert', short(self.path), 'NEW', to=runs)}"
            )
        try:
            from peft import PeftConfig, PeftModel
            from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
        except ImportError as error:
            raise CheckpointError(f"{short(self.path)!r} is a PEFT adapter; install peft to load it") from error
        kind = self.settings.get("peft_type")
        if kind not in list(PEFT_TYPE_TO_CONFIG_MAPPING):
            raise CheckpointError(f"{short(self.path)!r} is an adapter of type {short(str(kind))!r}, unknown to PEFT")
        settings = PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**self.settings))
        folder = self._folder()
        _resize_embeddings(base, folder)
        model = PeftModel.from_pretrained(base, str(folder), config=settings, **arguments)
        model.name_or_path = self.path
        return model

    def _folder(self) -> Path:
        from transformers.utils import cached_file

        where = {"subfolder": self.subfolder, "_raise_exceptions_for_missing_entries": False, **self.hub}
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            if (file := cached_file(self.path, name, **where)) is not None:
                return Path(file).parent
        raise CheckpointError(f"the adapter {short(self.path)!r} has no weights: no adapter_model.safetensors or .bin")


def _resize_embeddings(base: PreTrainedModel, folder: Path) -> None:
    """Give a model as many token embeddings as the adapter brings along: it may have been trained with tokens added."""
    embeddings, file = base.get_input_embeddings(), folder / "adapter_model.safetensors"
    if not file.is_file():
        return
    name = next((name for name, module in base.named_modules() if module is embeddings), "")
    with safe_open(file, "pt") as tensors:
        key = f"base_model.model.{name}.weight"
        brought = tensors.get_slice(key).get_shape()[0] if key in list(tensors.keys()) else None
    if brought not in (None, len(embeddings.weight)):
        base.resize_token_embeddings(brought)


def find_adapter(path: str | Path, *, subfolder: str = "", **hub: Any) -> Adapter | None:
    """The adapter in a folder or Hub repository; None where there is none.

    A folder that also holds a whole model counts as that model, as in transformers. `hub`: revision, token, cache_dir,
    local_files_only, as transformers takes them; others are left alone.
    """
    from transformers.utils import find_adapter_config_file

    name = str(path)
    hub = {key: hub[key] for key in _HUB_ARGUMENTS if key in hub}
    try:
        file = find_adapter_config_file(name, subfolder=subfolder, **hub)
    except (OSError, ValueError):  # neither a folder nor a Hub id: loading the config reports it
        return None
    if file is None:
        return None
    folder = Path(file).parent
    if Path(name).is_dir() and (folder / "config.json").is_file() and any(any(folder.glob(each)) for each in _WEIGHTS):
        return None
    values = read_json(Path(file))
    base = values.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
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
        checked_specs(record, f"the adapter {short(name)!r}")
    settings = {key: value for key, value in values.items() if key != PAIRING_KEY and not _is_record(key)}
    return Adapter(name, base, settings, record, values.get(PAIRING_KEY), hub, subfolder)


@contextmanager
def finding_base(adapter: Adapter) -> Iterator[None]:
    """Inside, a CheckpointError names the base model of this adapter."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"the model that the adapter {short(adapter.path)!r} was trained on could not be found: {error}"
        ) from error


def tokenizer_source(path: str | Path, **hub: Any) -> tuple[str, dict[str, Any]]:
    """The path, or the base model of an adapter without a tokenizer, and the arguments that find it there."""
    from transformers.utils import cached_file

    adapter = find_adapter(path, **hub)
    if adapter is None:
        return str(path), hub
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    if cached_file(adapter.path, "tokenizer_config.json", **adapter.hub, **quiet) is not None:
        return str(path), hub
    return adapter.base, adapter.for_base(hub)
