"""A model by name: a folder, a Hub id, or "reference" for the bundled model.

    folder = model_folder("reference")
    model = load_empty("Qwen/Qwen3-8B")          # on the meta device, patched as its folder records
    model = load_model("reference", device="auto")
    tokenizer = load_tokenizer("reference")

Every failure a user can cause is a CheckpointError of one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.errors import CheckpointError, MethodError, RopeExtError, did_you_mean, one_line, short
from rope_ext_hf.patches.geometry import check_pairing
from rope_ext_hf.patches.loading import from_pretrained, load_config, restore_patch
from rope_ext_hf.reference import path as reference_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "empty_model",
    "find_device",
    "find_dtype",
    "load_empty",
    "load_model",
    "load_tokenizer",
    "loading",
    "model_folder",
    "model_source",
]

_DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def model_source(name: str | Path) -> str:
    """What transformers' `from_pretrained` takes for this name."""
    return str(reference_folder()) if str(name) == "reference" else str(name)


def model_folder(name: str | Path, *, revision: str | None = None, ignore: Sequence[str] = ()) -> Path:
    """The local folder of a model; a Hub repository is downloaded.

    Args:
        name: a folder, a Hub id, or "reference".
        revision: branch, tag or commit on the Hub.
        ignore: patterns of files that are not downloaded.

    Raises:
        CheckpointError: no such folder, and no such repository on the Hub.
    """
    source = model_source(name)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CheckpointError(f"no such folder: {source!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, ignore_patterns=list(ignore) or None))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{source!r} is neither a folder nor a model on the Hub: {reason}") from error


def empty_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a config, on the meta device: modules and shapes, no weights.

    Raises:
        CheckpointError: no such model can be built.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except RopeExtError:
        raise
    except Exception as error:  # model classes raise anything on bad values
        raise CheckpointError(f"no causal language model can be built from this config: {one_line(error)}") from error
    return model


def load_empty(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder or Hub id on the meta device, patched as the folder records.

    Raises:
        CheckpointError: no such model, or weights in a pairing that its class does not run.
    """
    options = {"revision": revision} if revision else {}
    config, record = load_config(model_source(name), trust_remote_code=trust_remote_code, **options)
    model = empty_model(config, trust_remote_code=trust_remote_code)
    check_pairing(model)
    return model if record is None else restore_patch(model, record)


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a folder or Hub id with its weights, patched as its folder records, in evaluation mode.

    Args:
        name: a folder, a Hub id, or "reference".
        dtype: see `find_dtype`.
        device: see `find_device`; with a device map, the map decides.
        device_map: as in transformers.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        CheckpointError: no such model, or a damaged one.
        MethodError: an unknown dtype, or a device that cannot be used.
    """
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if device_map is not None:
        options["device_map"] = device_map
    kind, place = find_dtype(dtype), find_device(device)
    with loading(f"the model {str(name)!r}"):
        model = from_pretrained(model_source(name), dtype=kind, trust_remote_code=trust_remote_code, **options)
    check_pairing(model)
    if device_map is None:
        model.to(place)
    return model.eval()


def find_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of that name; "auto" (as saved) stays as it is.

    Raises:
        MethodError: an unknown name.
    """
    if name not in _DTYPES:
        raise MethodError(
            f"unknown dtype {short(name)!r}.{did_you_mean(name, _DTYPES)} Known dtypes: {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def find_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is the GPU if there is one, else the CPU.

    Raises:
        MethodError: a device that cannot be used here.
    """
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
    """The tokenizer beside a model's weights.

    Raises:
        CheckpointError: no name, or no usable tokenizer there.
    """
    from transformers import AutoTokenizer

    if not str(name):
        raise CheckpointError(
            "this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=..."
        )
    options: dict[str, Any] = {"revision": revision} if revision else {}
    with loading(f"the tokenizer of {str(name)!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_source(name), trust_remote_code=trust_remote_code, **options
        )
    return tokenizer


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Inside, whatever transformers raises on a missing or damaged file becomes a CheckpointError of one line."""
    try:
        yield
    except RopeExtError:
        raise
    except Exception as error:  # config, tokenizer and weight readers raise anything on damaged files
        raise CheckpointError(f"{what} could not be loaded: {one_line(error)}") from error
