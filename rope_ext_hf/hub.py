"""A model by name: a folder or Hub id, of a model or of a PEFT adapter, or "reference" for the bundled model.

    model = load_empty("Qwen/Qwen3-8B")          # on the meta device, patched as its folder records

Every failure a user can cause is a CheckpointError of one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from torch import nn

from rope_ext_hf.downloads import download, hub_answers
from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError, entry, one_line, short
from rope_ext_hf.files import check_full, read_json
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.patches.adapters import ADAPTER_CONFIG, find_adapter, finding_base, tokenizer_source
from rope_ext_hf.patches.config import UNKNOWN_TYPE
from rope_ext_hf.patches.fingerprint import Fingerprint, fingerprint_of
from rope_ext_hf.patches.geometry import check_pairing
from rope_ext_hf.patches.loading import empty_model, find_config, from_pretrained, restore_patch
from rope_ext_hf.reference import folder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_DTYPES: dict[str, torch.dtype | str] = {"auto": "auto"} | {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}

_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.tiktoken", "merges.txt", "*bpe*")
_CLASS_FILES = ("config.json", ADAPTER_CONFIG, "*.py")
_CONFIG_FILES = (*_CLASS_FILES, "generation_config.json", "params.json")
_ALL_OF_A_TOKENIZER = (*_TOKENIZER_FILES, *_CLASS_FILES, "*.txt", "tekken.json", "chat_template*")

_FILE_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".json")


def model_source(name: str | Path) -> str:
    """What transformers' `from_pretrained` takes for this name."""
    source = str(folder_of(name))
    if not source:
        raise CheckpointError("an empty name is no model; give a folder, a Hub id or 'reference'")
    path = Path(source).expanduser()
    if _is_folder(path):
        return str(path)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source:
        hint = "; it is a file, give the folder it is in" if _exists(path) else ""
        raise CheckpointError(f"no such model folder: {short(source)!r}{hint}")
    if _exists(path) or ("/" not in source and path.suffix in _FILE_SUFFIXES):
        there = "is a file" if _exists(path) else "is the name of a file, and there is none here"
        raise CheckpointError(f"{short(source)!r} {there}; give the folder of the model, which holds its config")
    return source


def model_folder(name: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a model; a Hub repository is downloaded, its weights too unless its config is enough."""
    source = model_source(name)
    if _is_folder(Path(source)):
        return Path(source)
    return download(source, revision, weights=True) if weights else download(source, revision, patterns=_CONFIG_FILES)


def folder_and_hub_id(name: str | Path, *, revision: str | None = None) -> tuple[Path, str | None]:
    """Return `model_folder` of a name, with weights, and its id on the Hub; None: it names a folder."""
    folder = model_folder(name, revision=revision)
    return folder, None if folder == Path(model_source(name)) else str(name)


def model_commit(name: str | Path, *, revision: str | None = None) -> str | None:
    if _is_folder(Path(model_source(name))):
        return None
    return model_folder(name, revision=revision, weights=False).name


def _locate(
    name: str | Path,
    revision: str | None,
    patterns: Sequence[str],
    *,
    trust_remote_code: bool = False,
    weights: bool = False,
) -> tuple[str, dict[str, Any]]:
    """`model_source` of a name, and arguments that make transformers find it; what is on the Hub is downloaded before.

    Of an adapter the base model is found too. `patterns` are the files that are needed; code that comes with the model
    may be in further repositories.
    """

    def find(source: str, revision: str | None) -> dict[str, Any]:
        if _is_folder(Path(source)):
            return {"revision": revision} if revision else {}
        commit = download(source, revision, patterns=patterns, weights=weights).name
        code_too = trust_remote_code and hub_answers(constants.ENDPOINT)
        return {"revision": commit} | ({} if code_too else {"local_files_only": True})

    source = model_source(name)
    options = find(source, revision)
    adapter = find_adapter(source, **options)
    if adapter is None:
        return source, options
    with finding_base(adapter):
        of_base = find(model_source(adapter.base), adapter.for_base({}).get("revision"))
    return source, options | {key: value for key, value in of_base.items() if key != "revision"}


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises where a name is too long for a path


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - as above


def read_config(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, dict[str, Any] | None]:
    """The config of a folder or Hub id before any patch, and the record of the patch; of an adapter its base's."""
    source, options = _locate(name, revision, _CONFIG_FILES, trust_remote_code=trust_remote_code)
    with loading(f"the config of {short(str(name))!r}"):
        config, record, _ = find_config(source, trust_remote_code=trust_remote_code, **options)
    return config, record


def load_empty(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder or Hub id on the meta device, patched as the folder records; of an adapter its base."""
    config, record = read_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with loading(f"the model {short(str(name))!r}"):
        model = empty_model(config, trust_remote_code=trust_remote_code)
        check_pairing(model)
        return model if record is None else restore_patch(model, record)


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a folder or Hub id with its weights, patched as its folder records, in evaluation mode.

    An adapter stands on its base model, in a peft.PeftModel. A device map of transformers decides over `device`.
    """
    kind, place = find_dtype(dtype) if isinstance(dtype, str) else dtype, find_device(device)
    source, options = _locate(name, revision, _CONFIG_FILES, trust_remote_code=trust_remote_code, weights=True)
    if device_map is not None:
        options["device_map"] = device_map
    elif place.type != "cpu":  # each tensor is read onto its device, without a copy of the model in main memory
        options["device_map"] = {"": place}
    with loading(f"the model {short(str(name))!r}"):
        model = from_pretrained(source, dtype=kind, trust_remote_code=trust_remote_code, **options)
        check_pairing(model)
    return model.eval()


def model_by_name(model: PreTrainedModel | str | Path) -> PreTrainedModel:
    """A model that is given by its name, loaded by `load_model`; a model in memory as it is."""
    return load_model(model) if isinstance(model, (str, Path)) else model


def is_adapter(name: str | Path, *, revision: str | None = None) -> bool:
    """Whether a folder or Hub id holds an adapter of PEFT and no model."""
    source, options = _locate(name, revision, _CONFIG_FILES)
    return find_adapter(source, **options) is not None


def find_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of that name; "auto" (as saved) stays as it is."""
    return entry("dtype", name, _DTYPES)


def loaded_dtype(empty: PreTrainedModel, name: str) -> torch.dtype:
    """The torch dtype that the weights of a model would have, loaded in that of this name."""
    dtype = find_dtype(name)
    own: torch.dtype = getattr(empty.config, "dtype", None) or empty.dtype
    return own if isinstance(dtype, str) else dtype


def find_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is the GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MethodError(f"device {short(name)!r} cannot be used here: {one_line(error, 120)}") from error
    return device


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model's weights; of an adapter without one, its base model's."""
    from transformers import AutoTokenizer

    if not str(name):
        raise CheckpointError(
            "this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=..."
        )
    source, options = _locate(name, revision, _ALL_OF_A_TOKENIZER, trust_remote_code=trust_remote_code)
    source, options = tokenizer_source(source, **options)
    if _is_folder(folder := Path(source)) and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(
            f"there is no tokenizer in {str(folder)!r}; copy tokenizer.json and tokenizer_config.json there from the "
            "model it was made from"
        )
    with left_out_of_log(*UNKNOWN_TYPE), loading(f"the tokenizer of {short(str(name))!r}"):
        _check_token_settings(source, options)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **options
        )
        tokenizer("a")  # a damaged tokenizer may load, and fail at the first text
    return tokenizer


_MAX_ADDED_TOKENS = 1_000_000
_TOKEN_COUNTS = frozenset({"extra_ids", "offset", "num_madeup_words"})
"""Settings by which tokenizers of transformers (T5, ByT5, Pegasus, XGLM) make so many tokens when they are loaded."""


def _check_token_settings(source: str, options: dict[str, Any]) -> None:
    """Refuse names of settings that would bring control characters to the terminal, and too many tokens."""
    from transformers.utils import cached_file

    where = {key: value for key, value in options.items() if key in ("revision", "local_files_only")}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        cached = cached_file(source, file, **where, _raise_exceptions_for_missing_entries=False)
        settings = {} if cached is None else read_json(Path(cached))
        for key in (key for token in _token_settings(settings) for key in token if not key.isprintable()):
            raise CheckpointError(f"{file}: {short(repr(key))} is no setting of a token")
        for key in sorted(_TOKEN_COUNTS & settings.keys()):
            if isinstance(settings[key], int) and settings[key] > _MAX_ADDED_TOKENS:
                raise CheckpointError(
                    f"{file}: {key} asks for {short(str(settings[key]))} tokens; at most {_MAX_ADDED_TOKENS:,} are made"
                )


def _token_settings(value: dict[str, Any] | list[Any]) -> list[dict[str, Any]]:
    """The settings of each special token in a JSON value."""
    inner = [each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, (dict, list))]
    tokens = [token for each in inner for token in _token_settings(each)]
    return [*tokens, value] if isinstance(value, dict) and "content" in value else tokens


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that a tokenizer puts before every text: BOS, `[CLS]`, `[gMASK]<sop>` of GLM; often none."""
    whole, text = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
    if (before := tokens_before(whole, text)) is None:  # with its special tokens the text is cut differently
        return tuple(whole[: int(tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id])])
    return before


def tokens_before(whole: Sequence[int], text: Sequence[int]) -> tuple[int, ...] | None:
    """The tokens in `whole`, a text with its special tokens, before those of the text; None: these are not in it."""
    starts = (at for at in range(len(whole)) if text and [*whole[at : at + len(text)]] == [*text])
    return None if (start := next(starts, None)) is None else tuple(whole[:start])


@contextmanager
def foreign_errors(failure: str) -> Iterator[None]:
    """Inside, every exception but ours becomes a CheckpointError of one line that begins with what failed.

    For files that others made: readers of configs, tokenizers and weights, and model classes, raise anything on damage.
    """
    try:
        yield
    except (RopeExtError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust code, such as tokenizers, is no Exception
        if isinstance(error, OSError):
            check_full(error, Path(error.filename) if error.filename else None)
        plain = isinstance(error, (OSError, ValueError, RuntimeError)) or not str(error)
        reason = one_line(error) if plain else f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{failure}: {reason}") from error


def loading(what: str) -> AbstractContextManager[None]:
    return foreign_errors(f"{what} could not be loaded")


@foreign_errors("this model has no fingerprint")
def fingerprint(
    model: nn.Module | str | Path | Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Fingerprint:
    """What rotates how in a model: `fingerprint(a).differences(fingerprint(b))` are sentences, none where both agree.

    Args:
        model: a model in memory, patched or not, of which the rotary modules are read; or a folder, a Hub id,
            "reference", or a config of transformers, of which no weights are read; or a JSON file of
            `Fingerprint.to_dict`.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        CheckpointError: no such model, or a file that holds no fingerprint.
        UnsupportedModelError: a model without rotary modules.
    """
    if isinstance(model, nn.Module):
        return fingerprint_of(model)
    if not isinstance(model, (str, Path)):
        return fingerprint_of(empty_model(model, trust_remote_code=trust_remote_code))
    if Path(model).suffix == ".json" and Path(model).is_file():
        return Fingerprint.from_dict(read_json(Path(model)))
    return fingerprint_of(load_empty(model, revision=revision, trust_remote_code=trust_remote_code))
