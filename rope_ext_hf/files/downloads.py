"""Downloads of models from the Hugging Face Hub, and uploads to it.

huggingface_hub downloads into its cache; what arrives is compared with the Hub's checksums. Every failure is a
CheckpointError whose message is one line.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub as hub  # its names are imported when they are first used, which takes a while
from huggingface_hub import constants, errors

from rope_ext_hf.errors import CheckpointError, did_you_mean, one_line, short
from rope_ext_hf.files.other_formats import format_on_hub
from rope_ext_hf.files.whole import MISTRAL_FORMAT, layer_folders, read_json

WEIGHT_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("safetensors", "bin", "pth", "pt", "ckpt", "gguf", "ggml", "h5", "msgpack", "onnx", "ot", "nemo"),
        *("distcp", "npz", "npy", "pkl", "pickle", "tar"),
    )
)
"""Suffixes of files with weights, in any format."""
WEIGHT_FILES = (("model.safetensors", "pytorch_model.bin"), ("adapter_model.safetensors", "adapter_model.bin"))
"""Names of the weight file of a model, and of an adapter, each in the order in which transformers looks for them."""
_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_TRIALS = 60.0
_CONFIGS = ("config.json", "adapter_config.json")
_trials: dict[str, tuple[float, bool]] = {}
"""For the address of each Hub, the time of the last trial to reach it, and whether it answered."""


def download(
    name: str, revision: str | None = None, *, patterns: Sequence[str] = ("*",), weights: bool = False
) -> Path:
    """Return the folder in huggingface_hub's cache that holds a model's files, after downloading those it lacks.

    Where the Hub cannot be reached, it is the folder as it is in the cache.

    Args:
        name: the Hub id of the model.
        revision: branch, tag or commit; None: the main branch.
        patterns: patterns of the files that are needed. Files with weights, and a copy of the model in Meta's format
            under original/, are left out.
        weights: whether to download weights too: those that would be loaded, in one of their formats.

    Raises:
        CheckpointError: there is no such model, it may not be read, or it cannot be downloaded.
    """
    revision = revision or constants.DEFAULT_REVISION
    with _hub_errors(name, revision):
        info = _model_info(name, revision)
        if info is None:
            return _cached_folder(name, revision)
        fetch = partial(_fetch, name, revision, info.sha)
        files = [file.rfilename for file in info.siblings or ()]
        own = [file for file in files if not file.startswith("original/")]
        chosen = [file for file in _matching(own, patterns) if Path(file).suffix not in WEIGHT_SUFFIXES]
        if weights:
            of_transformers = [file for names in WEIGHT_FILES for file in _weight_files(names, files, fetch)]
            held = of_transformers or _matching(own, ("consolidated.*.pth", *MISTRAL_FORMAT))
            known = "" if held else format_on_hub(name, files)
            if known:
                raise CheckpointError(f"{name!r} on the Hub holds no weights that transformers loads. {known}")
            chosen += held
            layers = layer_folders(fetch(["modules.json"])) if "modules.json" in files else ()
            chosen += _matching(own, [f"{escape(layer)}/*" for layer in layers])
            chosen = list(dict.fromkeys(chosen))
        if not chosen:
            raise CheckpointError(f"{name!r} on the Hub holds no files of a model")
        return fetch(chosen)


def _cached_folder(name: str, revision: str) -> Path:
    """Return the folder of a model in the cache, without asking the Hub."""
    try:
        # With one pattern, huggingface_hub does not miss files that were never needed here.
        folder = hub.snapshot_download(name, revision=revision, allow_patterns="config.json", local_files_only=True)
    except errors.LocalEntryNotFoundError as error:
        raise _unreached(name) from error
    return Path(folder)


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the file names that match at least one of the patterns."""
    return [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]


def _weight_files(names: Iterable[str], files: Sequence[str], fetch: Callable[[list[str]], Path]) -> list[str]:
    """Return the names of the weight files to download: one file, or an index and the shards that it lists.

    Args:
        names: names that a weight file may have; the first one that the repository has, whole or in shards, is taken.
        files: the files of the repository.
        fetch: downloads files and returns their folder; it is called for an index.
    """
    for name in names:
        index = f"{name}.index.json"
        if name in files:
            return [name]
        if index in files:
            weight_map = read_json(fetch([index]) / index).get("weight_map")
            shards = weight_map.values() if isinstance(weight_map, dict) else ()
            return [index, *sorted({shard for shard in shards if shard in files})]
    return []


def _fetch(name: str, revision: str, commit: str | None, files: list[str]) -> Path:
    """Download the files of a commit that the cache lacks, and return the folder in the cache that holds the commit."""
    cached = {file: str(hub.try_to_load_from_cache(name, file, revision=revision)) for file in files}
    lacking = [file for file, path in cached.items() if commit not in Path(path).parts]
    if not lacking:
        return Path(cached[files[0]].removesuffix(files[0]))
    patterns = list(map(escape, files))
    folder = Path(
        hub.snapshot_download(name, revision=revision, allow_patterns=patterns, etag_timeout=_SECONDS_TO_ANSWER)
    )
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{file!r} of {name!r} could not be downloaded from the Hub. Try again")
    _check_arrived(name, folder, lacking)
    return folder


def _check_arrived(name: str, folder: Path, files: list[str]) -> None:
    """Compare files that were just downloaded with the Hub's checksums, and delete the damaged ones.

    Files that were in the cache before are not read again: a user may have changed them.

    Raises:
        CheckpointError: a file is damaged.
    """
    with TemporaryDirectory() as arrived:
        for file in files:
            link = Path(arrived, file)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((folder / file).resolve())
        result = hub.HfApi().verify_repo_checksums(name, revision=folder.name, local_dir=arrived)
    damaged = [file["path"] for file in result.mismatches]
    for file in damaged:
        (folder / file).resolve().unlink()
        (folder / file).unlink(missing_ok=True)  # the link in the cache that led to it
    if damaged:
        raise CheckpointError(
            f"{damaged[0]!r} of {name!r} arrived damaged: its checksum is not the one that the Hub states. Try again"
        )


def _model_info(name: str, revision: str) -> hub.ModelInfo | None:
    """Return what the Hub states about a model; None if the Hub cannot be reached or has an internal error."""
    if not hub_answers(constants.ENDPOINT):
        return None
    try:
        return hub.HfApi().model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
    except errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            return None
        raise
    except ValueError:  # the name is not a valid Hub id
        raise
    except Exception:  # errors of the HTTP library, which is another one in other versions of huggingface_hub
        return None


def _unreached(name: str) -> CheckpointError:
    """Return the error for a model that is not in the cache while the Hub cannot be reached."""
    return CheckpointError(
        f"{short(name)!r} is neither a folder here nor a model in the Hub's cache, and the Hub cannot be reached or "
        f"has a fault.{did_you_mean(name, ['reference'])} The bundled model is called 'reference'"
    )


def only_cached(name: str | Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"local_files_only": True} for transformers' from_pretrained if the Hub does not answer, else {}.

    Without this argument transformers would try to reach the Hub six times for every file.

    Args:
        name: a folder or a Hub id.
        arguments: the other arguments of from_pretrained (revision, cache_dir, subfolder).

    Raises:
        CheckpointError: the Hub does not answer, and the model is not in the cache.
    """
    name = str(name)
    is_path = not name or name[0] in "./~" or name.count("/") > 1 or os.path.isdir(name)  # noqa: PTH112
    if is_path or arguments.get("local_files_only") or hub_answers(constants.ENDPOINT):
        return {}
    where = {key: arguments[key] for key in ("revision", "cache_dir") if arguments.get(key)}
    subfolder = arguments.get("subfolder")
    files = [f"{subfolder}/{file}" if subfolder else file for file in _CONFIGS]
    try:
        cached = any(isinstance(hub.try_to_load_from_cache(name, file, **where), str) for file in files)
    except ValueError:  # the name is not a valid Hub id, which transformers refuses without asking the Hub
        return {}
    if not cached:
        raise _unreached(name)
    return {"local_files_only": True}


def hub_answers(endpoint: str) -> bool:
    """Return whether the Hub at an address can be reached.

    It is tried at most once a minute, with a time limit, which snapshot_download does not have.
    """
    last_trial, answers = _trials.get(endpoint, (-math.inf, False))
    if time.monotonic() - last_trial > _SECONDS_BETWEEN_TRIALS:
        try:
            hub.get_session().head(endpoint, timeout=_SECONDS_TO_ANSWER)
            answers = True
        except Exception:  # errors of the HTTP library, as in _model_info, or of offline mode
            answers = False
        _trials[endpoint] = time.monotonic(), answers
    return answers


def check_upload(name: str, *, private: bool = True) -> None:
    """Check that a model can be uploaded to the Hub under this name, before there is anything to upload.

    Raises:
        CheckpointError: the user is not signed in, the name is not valid, or a public repository of that name exists
            and `private` is set.
    """
    with _upload_errors(name):
        hub.HfApi().whoami()
        try:
            public = not hub.HfApi().model_info(name, timeout=_SECONDS_TO_ANSWER).private
        except errors.RepositoryNotFoundError:
            return
    if private and public:
        raise CheckpointError(f"{name!r} is on the Hub already, and public; give --public, or another name")


def upload(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload a folder to a repository of the Hub, which is created if there is none; return its address.

    Raises:
        CheckpointError: the upload fails.
    """
    with _upload_errors(name):
        url = hub.HfApi().create_repo(name, private=private, exist_ok=True)
        hub.HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model by rope-ext")
    return str(url)


@contextmanager
def _upload_errors(name: str) -> Iterator[None]:
    """Turn an error of an upload, in a `with` block, into a CheckpointError of one line."""
    try:
        yield
    except Exception as error:  # of the HTTP library, of the disk, or of the name
        raise CheckpointError(f"{short(name)!r} cannot be uploaded to the Hub: {one_line(error)}") from error


@contextmanager
def _hub_errors(name: str, revision: str) -> Iterator[None]:
    """Turn an error of a download, in a `with` block, into a CheckpointError of one line that says what to do."""
    where = f"{constants.ENDPOINT}/{name}"
    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name!r} on the Hub is for those who accepted its conditions: accept them at {where}, then sign in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{short(name)!r} is neither a folder here nor a model on the Hub.{did_you_mean(name, ['reference'])} "
            "For a private one, sign in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name!r} on the Hub has no branch, tag or commit {short(revision)!r}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{short(name)!r} is neither a folder here nor a Hub id: {one_line(error)}") from error
    except Exception as error:  # of the HTTP library, and of the disk
        reason = short((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), 300)
        raise CheckpointError(f"{name!r} could not be downloaded from the Hub: {reason}. Try again") from error
