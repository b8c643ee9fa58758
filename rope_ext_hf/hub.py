"""Configs, models and tokenizers by name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.

    model = load_empty("Qwen/Qwen3-8B")          # on the meta device, patched as its folder records

A folder or Hub id may hold a model or a PEFT adapter. Every failure that a user can cause is a CheckpointError whose
message is one line.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from torch import nn

from rope_ext_hf.errors import CheckpointError, MethodError, entry, one_line, short
from rope_ext_hf.files.downloads import download, hub_answers
from rope_ext_hf.files.model_files import model_file
from rope_ext_hf.files.model_folders import (
    CLASS_FILES,
    CONFIG_FILES,
    WEIGHT_SUFFIXES,
    is_file,
    is_folder,
    loading,
    model_source,
)
from rope_ext_hf.files.other_formats import check_model_files
from rope_ext_hf.files.whole import FileStamps, check_folder, disk_folder, file_stamps, foreign_errors, read_json
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.models.config import EXPECTED_LINES
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.patches.loading import find_config, from_pretrained, restore_patch
from rope_ext_hf.patches.model_rope import check_pairing
from rope_ext_hf.patches.saved.adapters import Adapter, find_adapter, finding_base, tokenizer_source
from rope_ext_hf.patches.saved.fingerprint import Fingerprint, fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "find_device",
    "find_dtype",
    "fingerprint",
    "is_adapter",
    "load_empty",
    "load_model",
    "load_tokenizer",
    "loaded_dtype",
    "loads_by_layer",
    "missing_tokenizer",
    "read_config",
    "tokens_before",
]


_DTYPES: dict[str, torch.dtype | str] = {"auto": "auto"} | {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}

_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.tiktoken", "merges.txt", "*bpe*")
"""Patterns of files of which a folder with a tokenizer has at least one."""
_ALL_OF_A_TOKENIZER = (*_TOKENIZER_FILES, *CLASS_FILES, "*.txt", "tekken.json", "chat_template*")
"""Patterns of all files that loading a tokenizer may read."""

_CACHE_LINE = 64  # bytes; torch begins new tensors on the CPU at a multiple of it


def _locate(
    name: str | Path,
    revision: str | None,
    patterns: Sequence[str],
    *,
    trust_remote_code: bool = False,
    weights: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Return the folder, file or Hub id of a model, and arguments with which transformers loads it from local files.

    The files of a Hub repository are downloaded first; for an adapter, those of its base model as well.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.
        revision: branch, tag or commit on the Hub.
        patterns: patterns of the files that are needed.
        trust_remote_code: whether code that comes with the model may run. It may lie in further repositories, so that
            transformers is then allowed to download as well.
        weights: whether the weights are needed too.
    """

    def download_arguments(source: str, revision: str | None) -> dict[str, Any]:
        if is_file(Path(source)):  # the base model of an adapter may be a GGUF file
            return {}
        if is_folder(Path(source)):
            check_folder(Path(source))
            check_model_files(Path(source))
            return {"revision": revision} if revision else {}
        folder = download(source, revision, patterns=patterns, weights=weights)
        check_folder(folder)
        arguments: dict[str, Any] = {"revision": folder.name}  # the commit
        if not (trust_remote_code and hub_answers(constants.ENDPOINT)):
            arguments["local_files_only"] = True
        return arguments

    source = model_source(name)
    if is_file(Path(source)):
        return source, {}
    arguments = download_arguments(source, revision)
    adapter = find_adapter(source, **arguments)
    if adapter is None:
        return source, arguments
    with finding_base(adapter):
        of_base = download_arguments(model_source(adapter.base), adapter.for_base({}).get("revision"))
    return source, arguments | {key: value for key, value in of_base.items() if key != "revision"}


def read_config(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, dict[str, Any] | None]:
    """Return the config of a model before any patch, and the record of the patch that its folder holds, or None.

    For an adapter they are the config of its base model and the record of the patch that it was trained under.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        CheckpointError: there is no such model, or its config cannot be loaded.
    """
    config, record, _ = _find_config(name, revision, trust_remote_code=trust_remote_code)
    return config, record


def _find_config(
    name: str | Path, revision: str | None, *, trust_remote_code: bool
) -> tuple[Any, dict[str, Any] | None, Adapter | None]:
    """Return what `read_config` does, and the adapter if `name` is one."""
    source, arguments = _locate(name, revision, CONFIG_FILES, trust_remote_code=trust_remote_code)
    with loading(f"the config of {short(str(name))!r}"):
        return find_config(source, trust_remote_code=trust_remote_code, **arguments)


def load_empty(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model on the meta device, without weights, patched as its folder records.

    For an adapter it is its base model, patched as the adapter's folder records. The arguments and the errors are those
    of `read_config`.
    """
    config, record, adapter = _find_config(name, revision, trust_remote_code=trust_remote_code)
    with loading(f"the model {short(str(name))!r}"):
        model = empty_model(config, trust_remote_code=trust_remote_code)
        check_pairing(model)
        if adapter is not None:
            adapter.check_pairing(model)
        return model if record is None else restore_patch(model, record)


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a model with its weights, patched as its folder records, in evaluation mode.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model. An adapter is loaded onto its base
            model, as a `peft.PeftModel`.
        dtype: the dtype of the weights, as torch has it or by its name; "auto": as they are saved.
        device: the name of a device; "auto": the GPU if there is one, else the CPU.
        device_map: a device map of transformers, or a name that it has for one; it is used instead of `device`. If
            parts of the model are to stay on disk, those of their weights that transformers converts while it reads
            them are written to a temporary folder, which is removed with the model.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        MethodError: the dtype is unknown, or the device cannot be used.
        CheckpointError: there is no such model, it cannot be loaded, or its files change in the meantime.
    """
    torch_dtype = find_dtype(dtype) if isinstance(dtype, str) else dtype
    torch_device = find_device(device)
    source, arguments = _locate(name, revision, CONFIG_FILES, trust_remote_code=trust_remote_code, weights=True)
    if device_map is not None:
        arguments["device_map"] = device_map
    elif torch_device.type != "cpu":  # each tensor is read onto its device, without a copy of the model in main memory
        arguments["device_map"] = {"": torch_device}
    with loading(f"the model {short(str(name))!r}"), ExitStack() as unless_loaded:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            # transformers writes weights there that it converts while it reads them, one at a time; the experts of
            # most mixtures are such weights, and all others stay in the files of the model
            converted = TemporaryDirectory(prefix="rope-ext-converted-", dir=disk_folder(), ignore_cleanup_errors=True)
            unless_loaded.callback(converted.cleanup)
            arguments["offload_folder"] = converted.name
        stamps = _weight_stamps(source)
        model = from_pretrained(source, dtype=torch_dtype, trust_remote_code=trust_remote_code, **arguments)
        if "device_map" not in arguments:
            _take_out_of_files(model)
        if _weight_stamps(source) != stamps:
            raise CheckpointError(
                f"the weights in {source!r} changed while they were read; load them once they are complete"
            )
        check_pairing(model)
        kept = unless_loaded.pop_all()
        weakref.finalize(model, kept.close)  # when nothing refers to the model any more, and when the process ends
    return model.eval()


def _weight_stamps(source: str) -> FileStamps:
    """Return the stamps of the weight files of a model; none for a Hub id, whose files in the cache never change."""
    folder = Path(source)
    if is_file(folder):
        return file_stamps([folder])
    return file_stamps(sorted(path for suffix in WEIGHT_SUFFIXES for path in folder.glob(f"*{suffix}")))


def _take_out_of_files(model: nn.Module) -> None:
    """Copy the weights of a model on the CPU into memory of their own.

    transformers leaves them in the files, mapped into memory: a file that is written anew during a measurement would
    change the model, and one that becomes shorter would end the process (SIGBUS).
    """
    apply: Any = model._apply  # torch declares no types
    apply(_own_copy)


def _own_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a plain tensor that begins at the same place of a cache line; other tensors as they are.

    Products may be rounded in another way where weights begin elsewhere, and results would change in the last digit.
    """
    if type(value) not in (torch.Tensor, nn.Parameter):
        return value
    begin = value.data_ptr() % _CACHE_LINE
    if begin % value.element_size() or not value.is_contiguous():
        return value.clone()
    room = torch.empty(begin + value.nbytes, dtype=torch.uint8)
    return room[begin:].view(value.dtype).view(value.shape).copy_(value)


def loads_by_layer(name: str | Path, empty: PreTrainedModel) -> bool:
    """Return whether weights of a model may stay on disk, and be read layer by layer.

    Those of GGUF files, of adapters, of quantised models and of files other than safetensors are all read at once.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.
        empty: the same model, without its weights.
    """
    source = model_source(name)
    if is_file(Path(source)) or getattr(empty.config, "quantization_config", None) is not None or is_adapter(source):
        return False
    return not is_folder(Path(source)) or any(Path(source).glob("*.safetensors"))


def is_adapter(name: str | Path, *, revision: str | None = None) -> bool:
    """Return whether a folder or Hub id holds an adapter of PEFT instead of a model."""
    source = model_source(name)
    if is_file(Path(source)):
        return False
    if is_folder(Path(source)):  # whose base model need not be here
        return find_adapter(source) is not None
    source, arguments = _locate(source, revision, CONFIG_FILES)
    return find_adapter(source, **arguments) is not None


def find_dtype(name: str) -> torch.dtype | str:
    """Return the torch dtype with this name, or "auto" (as the weights are saved) unchanged; else raise MethodError."""
    return entry("dtype", name, _DTYPES)


def loaded_dtype(empty: PreTrainedModel, name: str) -> torch.dtype:
    """Return the torch dtype of a model's weights after it is loaded with dtype=`name`, such as "auto" or "bfloat16".

    `empty` is the model without weights; its config states the dtype for "auto".
    """
    dtype = find_dtype(name)
    if not isinstance(dtype, str):
        return dtype
    saved: torch.dtype = getattr(empty.config, "dtype", None) or empty.dtype
    return saved


def find_device(name: str) -> torch.device:
    """Return the torch device with this name; "auto" is the GPU if there is one, else the CPU.

    Raises:
        MethodError: torch has no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MethodError(f"device {short(name)!r} cannot be used here: {one_line(error, 120)}") from error
    return device


def missing_tokenizer(folder: str | Path) -> str:
    """Return what is said of a folder that holds no tokenizer; empty where it holds one, or is not a folder."""
    path = Path(folder)
    if not is_folder(path) or any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return ""
    return (
        f"there is no tokenizer in {str(folder)!r}; copy tokenizer.json and tokenizer_config.json there from the model "
        "it was made from"
    )


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder of a model; for an adapter without one, that of its base model.

    The arguments are those of `read_config`.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not str(name):
        raise CheckpointError(
            "this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=..."
        )
    source, arguments = _locate(name, revision, _ALL_OF_A_TOKENIZER, trust_remote_code=trust_remote_code)
    if model_file(source) is None:
        source, arguments = tokenizer_source(source, **arguments)  # the base model of an adapter may be a model file
    file = model_file(source)
    if file is not None:
        source, arguments = str(file.path.parent), file.tokenizer_arguments()
    else:
        missing = missing_tokenizer(source)
        if missing:
            raise CheckpointError(missing)
    with left_out_of_log(*EXPECTED_LINES), loading(f"the tokenizer of {short(str(name))!r}"):
        _check_token_settings(source, arguments)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **arguments
        )
        if file is not None:
            tokenizer.name_or_path = str(file.path)
        tokenizer("a")  # a damaged tokenizer may load, and fail at the first text
    return tokenizer


_MAX_ADDED_TOKENS = 1_000_000
_TOKEN_COUNTS = frozenset({"extra_ids", "offset", "num_madeup_words"})
"""Settings that are a number of tokens, which tokenizers of transformers (T5, ByT5, Pegasus, XGLM) make on loading."""


def _check_token_settings(source: str, arguments: dict[str, Any]) -> None:
    """Raise CheckpointError for settings of a tokenizer that are unsafe to load.

    Those are names with control characters, which transformers would print on the terminal, and numbers of tokens that
    would take all memory.
    """
    from transformers.utils import cached_file

    where = {key: value for key, value in arguments.items() if key in ("revision", "local_files_only")}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        cached = cached_file(source, file, **where, _raise_exceptions_for_missing_entries=False)
        settings = {} if cached is None else read_json(Path(cached))
        for token in _token_settings(settings):
            for key in token:
                if not key.isprintable():
                    raise CheckpointError(f"{file}: {short(repr(key))} is not a setting of a token")
        for key in sorted(_TOKEN_COUNTS & settings.keys()):
            count = settings[key]
            if isinstance(count, int) and count > _MAX_ADDED_TOKENS:
                raise CheckpointError(
                    f"{file}: {key} asks for {short(str(count))} tokens; at most {_MAX_ADDED_TOKENS:,} are allowed"
                )


def _token_settings(value: dict[str, Any] | list[Any]) -> list[dict[str, Any]]:
    """Return the settings of each special token in a JSON value: all dicts in it that have a "content"."""
    tokens = []
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            tokens += _token_settings(inner)
    if isinstance(value, dict) and "content" in value:
        tokens.append(value)
    return tokens


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before every text: BOS, `[CLS]`, `[gMASK]<sop>` of GLM; often none."""
    return added_tokens(tokenizer)[0]


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before every text, and those that it puts after every text."""
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    text = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    before = tokens_before(whole, text)
    if before is not None:
        return before, tuple(whole[len(before) + len(text) :])
    # Beside special tokens the text gets other tokens, so that only BOS and EOS can be recognised.
    starts_with_bos = tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id]
    ends_with_eos = tokenizer.eos_token_id is not None and whole[-1:] == [tokenizer.eos_token_id]
    return tuple(whole[:1] if starts_with_bos else ()), tuple(whole[-1:] if ends_with_eos else ())


def tokens_before(whole: Sequence[int], text: Sequence[int]) -> tuple[int, ...] | None:
    """Return the special tokens that a tokenizer has put before a text.

    Args:
        whole: the tokens of the text with special tokens.
        text: the tokens of the text alone.

    Returns:
        The tokens in `whole` before those in `text`; None if the text is empty, or `whole` does not contain it.
    """
    for start in range(len(whole)):
        if text and [*whole[start : start + len(text)]] == [*text]:
            return tuple(whole[:start])
    return None


@foreign_errors("this model has no fingerprint")
def fingerprint(
    model: nn.Module | str | Path | Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Fingerprint:
    """Return the fingerprint of a model's rotary embeddings, by which two models can be compared.

        rope.fingerprint("trained-model").differences(rope.fingerprint("converted-model"))

    returns sentences on how the second model rotates differently from the first; the list is empty if they agree.

    Args:
        model: a model in memory, patched or not, whose rotary modules are read; or a folder, a Hub id, "reference" or a
            config of transformers (no weights are read for these); or a JSON file with the values of
            `Fingerprint.to_dict`.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether Python code that comes with the model may run.

    Raises:
        CheckpointError: there is no such model, or the file does not hold a fingerprint.
        UnsupportedModelError: the model has no rotary modules.
    """
    if isinstance(model, nn.Module):
        return fingerprint_of(model)
    if not isinstance(model, (str, Path)):
        return fingerprint_of(empty_model(model, trust_remote_code=trust_remote_code))
    if Path(model).suffix == ".json" and Path(model).is_file():
        return Fingerprint.from_dict(read_json(Path(model)))
    return fingerprint_of(load_empty(model, revision=revision, trust_remote_code=trust_remote_code))
