"""Write patched models and patched copies of folders where transformers' own saving is not enough.

A folder whose method no config can state may get code by which plain transformers loads it:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""

from __future__ import annotations

import copy
import filecmp
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.downloads import mistral_format_files
from rope_ext_hf.errors import CheckpointError, warn_caller
from rope_ext_hf.files import atomic_folder, copy_files, file_stamps, list_files, read_json, write_json
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.patches.adapters import ADAPTER_CONFIG, find_adapter, modules_with_adapters, record_patch, with_record
from rope_ext_hf.patches.config import PATCH_KEY, UNKNOWN_TYPE
from rope_ext_hf.patches.config_keys import own_keys
from rope_ext_hf.patches.engine_keys import EngineAgreement, compare_engines, former_spelling
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.fingerprint import fingerprint_record
from rope_ext_hf.patches.generation_length import GENERATION_CONFIG, extend_generation_file
from rope_ext_hf.patches.patch_state import PatchState
from rope_ext_hf.patches.slots import PatchedSlot, patched_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CHECKPOINT = re.compile(r"checkpoint-\d+")
"""The name of a folder that a Trainer resumes from. It cannot where the former spelling stands in the config: it reads
that with the base class, whose reading of `rope_scaling` fails without a length (transformers 5.23)."""
_CHANGED_COPIES = {
    "tokenizer_config.json": "model_max_length",
    GENERATION_CONFIG: "max_length",
    ADAPTER_CONFIG: PATCH_KEY,
}
"""Files that a patched copy changes, and the key that changes in them."""


class _RewritingSave:
    """`save_pretrained` of one patched model, whose config on disk differs from the live one.

    On disk the rope settings stand in two spellings, the second for programs that read the former one. The live config
    holds the extended length, which `generate` reads; a saved linear scaling has the length that engines multiply by
    the factor. And some config classes refuse a rope type of ours (Phi-3): the config is saved as the class accepts it,
    then rewritten, so that plain loading stops rather than runs without the method. A trainable parameter goes into the
    config as well, with the values it has now, and not into the weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model.__dict__["save_pretrained"] = self

    def remove(self) -> None:
        self.model.__dict__.pop("save_pretrained", None)

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        *args: Any,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        save = partial(type(self.model).save_pretrained, self.model, save_directory, is_main_process, *args, **kwargs)
        if getattr(self.model, "_hf_peft_config_loaded", False):  # it saves its adapter alone, without a config
            save(push_to_hub=push_to_hub)
            return
        if push_to_hub:
            raise CheckpointError(
                "push_to_hub=True would upload this model before its config is complete; use "
                "model.push_to_hub(repo_id), or save it to a folder and upload that"
            )
        _record_trained_values(self.model)
        with left_out_of_log(*UNKNOWN_TYPE), _trained_left_out(self.model):
            save()
        if is_main_process:
            _rewrite_config(Path(save_directory), self.model)
            _warn_of_plain_loading(self.model)


def _warn_of_plain_loading(model: nn.Module) -> None:
    """Warn that plain transformers stops at a folder which was just saved, where it does."""
    state = patched_slots(model)[0].state
    method, rotary = state.spec.method, state.spec.rotary
    if state.encoding.loads_plainly:
        return
    native = ""
    if (approximate := method.approximate_rope_parameters(rotary)) is not None:
        native = (
            f". patch(..., native=True) saves transformers' own rope type {approximate['rope_type']!r} instead, which "
            "gives other results for batches and caches"
        )
    warn_caller(
        "this folder loads with rope_ext_hf.from_pretrained alone: transformers has no rope type for "
        f"{method.name}, and stops{native}"
    )


def attach_saving(model: nn.Module, slot: PatchedSlot) -> None:
    """Have a model, every model inside it, and its adapters, present or added later, saved with the patch.

    Adapters are most often added to a model that is patched already, and nothing of that reaches this package. But
    saving them begins with `state_dict`, of which a model may announce the beginning. The slot keeps the way back.
    """
    from transformers import PreTrainedModel

    listing = modules_with_adapters(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            slot.hooks.append(_RewritingSave(module))
        if isinstance(module, PreTrainedModel) or module in listing:
            slot.hooks.append(module.register_state_dict_pre_hook(_before_state_dict))  # type: ignore[no-untyped-call]


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    if isinstance(getattr(module, "peft_config", None), dict):  # its adapters are about to be saved
        _record_trained_values(module)
        record_patch(module)


def engine_agreement(state: PatchState, saved: dict[str, Any] | None = None) -> EngineAgreement:
    """What serving engines make of the config that saving a patched model writes (`saved`, where it is at hand)."""
    if state.engines is None:
        if saved is None:
            saved = _as_saved(next(swap.patched for swap in state.configs if PATCH_KEY in vars(swap.patched)).to_dict())
        state.engines = compare_engines(saved)
    return state.engines


def _as_saved(config: dict[str, Any]) -> dict[str, Any]:
    """A config with a record of a patch, with the rope settings and the length where every program reads them."""
    record = config[PATCH_KEY]
    settings = {"rope_parameters": record["rope_parameters"]}
    length = own_keys(config["model_type"]).get("max_position_embeddings", "max_position_embeddings")
    if length in config:
        settings[length] = record["max_position_embeddings"]
    saved = config | settings
    spelled = former_spelling(saved, record["layer_types"])
    return saved | spelled | {PATCH_KEY: record | {"former": sorted(spelled)}}


def _record_trained_values(model: nn.Module) -> None:
    """Bring the record of the patch, and the rope settings beside it, up to date."""
    for slot in patched_slots(model):
        if not slot.state.spec.method.trainable:
            continue
        spec = slot.present_spec
        divisors = spec.method.longrope_parameters(spec.rotary)
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
            record |= spec.to_dict() | {"rope_parameters": copy.deepcopy(parameters)}


@contextmanager
def _trained_left_out(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `save_pretrained` leaves the parameters out that the method of a model trains."""
    trained = {id(parameter) for slot in patched_slots(model) for parameter in slot.tables.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in trained]
    before = model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = {*(before or ()), *names}
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = before


def _rewrite_config(
    folder: Path, model: nn.Module, name: Path | None = None, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Put the rope settings and the length of the record in a config.json where every program reads them.

    The record gets the fingerprint of the model, and `more`. `name`: what warnings, of engines known to run another
    model from it, call the folder, which gets its name later.
    """
    file, state, fingerprint = folder / "config.json", patched_slots(model)[0].state, fingerprint_record(model)
    config = json.loads(file.read_text(encoding="utf-8"))
    former = _CHECKPOINT.fullmatch(folder.name) is None
    for part in [config, *config.values()]:
        if isinstance(part, dict) and PATCH_KEY in part:
            saved = _as_saved(part)
            disagreeing = engine_agreement(state, saved).disagreeing
            if former:
                part |= saved
            else:
                spelled = saved[PATCH_KEY].pop("former")
                part |= {key: value for key, value in saved.items() if key not in spelled}
            part[PATCH_KEY] |= {**fingerprint, **more}
            if disagreeing:
                warnings.warn(
                    f"{', '.join(disagreeing)} would load {str(name or folder)!r} without an error and run another "
                    "model: of these rope settings such programs read a part only",
                    stacklevel=3,
                )
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_patched_folder(
    model: PreTrainedModel,
    source: Path,
    out: Path,
    progress: Callable[[int, int], object] = lambda done, total: None,
    as_code: bool = False,
    finish: Callable[[Path], object] = lambda folder: None,
    keep_mistral_format: bool = False,
) -> None:
    """Write a copy of a model's folder with the config of a patched model, whose weights are not needed.

    The copy of an adapter's folder gets the record of the patch instead. The source's model card and its results, which
    are of another model, are left out, and so are files in Mistral's own format, from which vLLM would run the model
    without the method.

    Args:
        keep_mistral_format: copy those files too.
        progress: called with the bytes that are copied, and those of all files.
        as_code: add code by which plain transformers loads the folder, see `write_loading_code`.
        finish: called with the whole copy before it gets its name, to write its card.

    Raises:
        CheckpointError: a family that keeps its angles in the weights; `as_code` for a folder that needs no code, or
            for that of an adapter.
        FileError: `out` exists or lies inside the source, a file of the source leads out of it or changed while it was
            copied, or the disk refuses; nothing is left of `out` then.
    """
    config = model.config.get_text_config()
    if family(config.model_type).angle_table:
        raise CheckpointError(
            f"{config.model_type!r} keeps its angles in its weights, which are only copied here; load the model, "
            "patch it with rope_ext_hf.patch, and save it with save_pretrained"
        )
    adapter, state = find_adapter(source), patched_slots(model)[0].state
    if as_code and adapter is not None:
        raise CheckpointError("an adapter is loaded by PEFT, which runs no code of its folder; publish a whole model")
    names = _copied_files(source)
    if keep_mistral_format:
        names += [file for file in mistral_format_files(source) if file not in names]
    inputs = file_stamps([source / file for file in names])
    size = sum([size for _, size, _ in inputs.values()])
    with atomic_folder(out, source=source, inputs=inputs, size=size) as staging:
        copied = 0
        progress(copied, size)
        for file in names:
            copy_files(source, [file], staging)
            progress(copied := copied + inputs[str(source / file)][1], size)
        if adapter is None:
            with left_out_of_log(*UNKNOWN_TYPE):
                model.config.save_pretrained(staging)
            _rewrite_config(staging, model, out, extend_generation_file(staging, state))
            _raise_tokenizer_length(staging / "tokenizer_config.json", state.encoding.extended_length)
        for file in names if adapter else ():
            if Path(file).name == ADAPTER_CONFIG:
                record = state.record | fingerprint_record(model)
                write_json(staging / file, with_record(read_json(staging / file), record))
        if as_code:
            write_loading_code(staging)
        finish(staging)


def unlike_copies(source: Path, out: Path) -> list[str]:
    """Names of the files of a model's folder that its patched copy lacks, or has with other bytes.

    Both folders are read, as fast as the disk allows: copying takes as long. A file that `save_patched_folder` changes
    on the way is compared by its JSON, without what is changed there.
    """
    return [name for name in _copied_files(source) if not _is_copy(source / name, out / name)]


def _is_copy(file: Path, copied: Path) -> bool:
    """Whether a file has the same bytes in a patched copy; where the copy changes a key, the same JSON besides."""
    if not copied.is_file() or file.name not in _CHANGED_COPIES:
        return copied.is_file() and filecmp.cmp(file, copied, shallow=False)
    changed = _CHANGED_COPIES[file.name]
    one, two = ({k: v for k, v in read_json(path).items() if k.partition(":")[0] != changed} for path in (file, copied))
    return one == two


def _raise_tokenizer_length(file: Path, extended: int | None) -> None:
    """Raise the length from which a tokenizer warns to the extended one; files without one stay as they are."""
    settings = read_json(file) if file.is_file() and extended else {}
    stated = settings.get("model_max_length")
    if isinstance(stated, int) and extended and stated < extended:
        write_json(file, settings | {"model_max_length": extended})


def _copied_files(source: Path) -> list[str]:
    """Return the names of a folder's files that a patched copy of it has, too."""
    mistral_format = set(mistral_format_files(source))
    apart, folders = {"config.json", "README.md", "__init__.py", "run.yaml"}, {"__pycache__", ".eval_results"}
    return [
        file
        for file in list_files(source)
        if Path(file).name not in apart and folders.isdisjoint(Path(file).parts) and file not in mistral_format
    ]


# --- code by which plain transformers loads a patched folder -------------------------------------------------------

_MODULE = "modeling_rope_ext_hf"
"""The module of that code, made of loading_code.txt."""


def write_loading_code(folder: str | Path) -> None:
    """Add code to a patched folder, by which the Auto classes of transformers load it under `trust_remote_code=True`.

    One small Python file, which needs this package, and its name in config.json.
    """
    import transformers

    file = Path(folder) / "config.json"
    config = read_json(file)
    parts = [part for part in (config, *config.values()) if isinstance(part, dict) and PATCH_KEY in part]
    if not parts:
        raise CheckpointError(f"{str(folder)!r} has no patch; write one with rope-ext patch, or save a patched model")
    method = parts[0][PATCH_KEY]["method"]["method"]
    if f"rope_ext_hf/{method}" not in str(parts[0].get("rope_parameters")):
        raise CheckpointError(f"plain transformers loads {str(folder)!r} with {method} as it is; it needs no code")
    config_class = transformers.AutoConfig.for_model(config["model_type"]).__class__
    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
    autos = [name for name in names if config_class in getattr(transformers, name)._model_mapping]
    template = files("rope_ext_hf.patches").joinpath("loading_code.txt").read_text(encoding="utf-8")
    classes = [f'\n\nclass Patched{name}(Patched):\n    auto_class = "{name}"\n' for name in autos]
    code = Template(template).substitute(method=method, auto=autos[0]) + "".join(classes)
    Path(folder, f"{_MODULE}.py").write_text(code, encoding="utf-8")
    others = config.get("auto_map") or {}
    write_json(file, config | {"auto_map": others | {name: f"{_MODULE}.Patched{name}" for name in autos}})


def without_loading_code(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the names of that code, as a model that is loaded with this package saves it."""
    others = {key: value for key, value in (config.get("auto_map") or {}).items() if _MODULE not in str(value)}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    return plain | ({"auto_map": others} if others else {})
