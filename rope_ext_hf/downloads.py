"""Models on the Hugging Face Hub, downloaded by huggingface_hub into its cache and compared with the Hub's checksums.

Every failure is a CheckpointError of one line.
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

from huggingface_hub import HfApi, ModelInfo, constants, errors, get_session, snapshot_download, try_to_load_from_cache

from rope_ext_hf.errors import CheckpointError, did_you_mean, one_line, short
from rope_ext_hf.files import read_json

# Formats that weights may be in.
WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".nemo"}
)
WEIGHT_FILES = (("model.safetensors", "pytorch_model.bin"), ("adapter_model.safetensors", "adapter_model.bin"))
"""Files of weights of a model, of an adapter, each in the order in which transformers looks for them."""
_MISTRAL_FORMAT = ("params.json", "consolidated*.safetensors", "consolidated*.safetensors.index.json")
_SECONDS_TO_ANSWER, _SECONDS_UNTIL_ASKED = 5.0, 60.0
_CONFIGS = ("config.json", "adapter_config.json")
_asked: dict[str, tuple[float, bool]] = {}  # when a Hub was asked last, and whether it answered


def download(
    name: str, revision: str | None = None, *, patterns: Sequence[str] = ("*",), weights: bool = False
) -> Path:
    """The folder of huggingface_hub's cache with a model's files, after downloading those that it lacks where it can.

    The files by `patterns`, weights and a copy of the model in Meta's format aside; with `weights` also those that
    would be loaded, in one of their formats.
    """
    revision = revision or constants.DEFAULT_REVISION
    with _hub_errors(name, revision):
        info = _model_info(name, revision)
        if info is None:
            try:
                return Path(
                    # with this pattern, it does not ask for files that were never needed here
                    snapshot_download(name, revision=revision, allow_patterns="config.json", local_files_only=True)
                )
            except errors.LocalEntryNotFoundError as error:
                raise _unreached(name) from error
        fetch = partial(_fetch, name, revision, info.sha)
        files = [file.rfilename for file in info.siblings or ()]
        own = [file for file in files if not file.startswith("original/")]  # a copy in Meta's format
        chosen = [file for file in own if any(fnmatch(file, pattern) for pattern in patterns)]
        chosen = [file for file in chosen if Path(file).suffix not in WEIGHT_SUFFIXES]
        if weights:
            known = [file for singles in WEIGHT_FILES for file in _first_of(singles, files, fetch)]
            patterns = ("consolidated.*.pth", *_MISTRAL_FORMAT)
            chosen += known or [file for file in own if any(fnmatch(file, pattern) for pattern in patterns)]
            chosen = list(dict.fromkeys(chosen))
        if not chosen:
            raise CheckpointError(f"{name!r} on the Hub holds no files of a model")
        return fetch(chosen)


def mistral_format_files(folder: Path) -> list[str]:
    """Return the names of a folder's files in Mistral's own format, which some programs read before config.json."""
    return sorted({file.name for pattern in _MISTRAL_FORMAT for file in folder.glob(pattern)})


def _first_of(singles: Iterable[str], files: Sequence[str], fetch: Callable[[list[str]], Path]) -> list[str]:
    """The first of these files of weights that a repository has, or its index and the files that this names."""
    for single in singles:
        index = f"{single}.index.json"
        if single in files:
            return [single]
        if index in files:
            shards = read_json(fetch([index]) / index).get("weight_map")
            named = shards.values() if isinstance(shards, dict) else ()
            return [index, *sorted({file for file in named if file in files})]
    return []


def _fetch(name: str, revision: str, commit: str | None, files: list[str]) -> Path:
    """Return the folder of the cache that holds these files; those that arrive have the Hub's checksums."""
    cached = {file: str(try_to_load_from_cache(name, file, revision=revision)) for file in files}
    arriving = [file for file, path in cached.items() if commit not in Path(path).parts]
    if not arriving:
        return Path(cached[files[0]].removesuffix(files[0]))
    patterns = list(map(escape, files))
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, etag_timeout=_SECONDS_TO_ANSWER))
    if missing := next((file for file in files if not (folder / file).is_file()), None):
        raise CheckpointError(f"{missing!r} of {name!r} could not be downloaded from the Hub. Try again")
    with TemporaryDirectory() as arrived:  # what was there before is neither read again nor held to be damaged
        for file in arriving:
            link = Path(arrived, file)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((folder / file).resolve())
        result = HfApi().verify_repo_checksums(name, revision=folder.name, local_dir=arrived)
    damaged = [file["path"] for file in result.mismatches]
    for file in damaged:
        (folder / file).resolve().unlink()
        (folder / file).unlink(missing_ok=True)  # the link to it
    if damaged:
        raise CheckpointError(
            f"{damaged[0]!r} of {name!r} arrived damaged: its checksum is not the one that the Hub states. Try again"
        )
    return folder


def _model_info(name: str, revision: str) -> ModelInfo | None:
    """What the Hub has under this name; None where it cannot be reached or has a fault."""
    if not hub_answers(constants.ENDPOINT):
        return None
    try:
        return HfApi().model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
    except errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            return None
        raise
    except ValueError:  # no valid name
        raise
    except Exception:  # which HTTP library it is, and so which errors there are, depends on the version
        return None


def _unreached(name: str) -> CheckpointError:
    return CheckpointError(
        f"{short(name)!r} is neither a folder here nor a model in the Hub's cache, and the Hub cannot be reached or "
        f"has a fault.{did_you_mean(name, ['reference'])} The bundled model is called 'reference'"
    )


def only_cached(name: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """`local_files_only` for transformers where the Hub does not answer; it would try each file six times."""
    name = str(name)
    no_id = not name or name[0] in "./~" or name.count("/") > 1 or os.path.isdir(name)  # noqa: PTH112
    if no_id or given.get("local_files_only") or hub_answers(constants.ENDPOINT):
        return {}
    where = {key: given[key] for key in ("revision", "cache_dir") if given.get(key)}
    files = (f"{given['subfolder']}/{file}" if given.get("subfolder") else file for file in _CONFIGS)
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file, **where), str) for file in files)
    except ValueError:  # no valid name, which transformers refuses at once
        return {}
    if not cached:
        raise _unreached(name)
    return {"local_files_only": True}


def hub_answers(endpoint: str) -> bool:
    """Whether the Hub can be reached: asked once a minute, with a time limit that snapshot_download does not have."""
    asked, answers = _asked.get(endpoint, (-math.inf, False))
    if time.monotonic() - asked > _SECONDS_UNTIL_ASKED:
        try:
            get_session().head(endpoint, timeout=_SECONDS_TO_ANSWER)
            answers = True
        except Exception:  # as in _model_info, or offline mode
            answers = False
        _asked[endpoint] = time.monotonic(), answers
    return answers


def check_upload(name: str, *, private: bool = True) -> None:
    """Refuse what would stop an upload, before there is anything to upload."""
    with _upload_errors(name):
        HfApi().whoami()
        try:
            public = not HfApi().model_info(name, timeout=_SECONDS_TO_ANSWER).private
        except errors.RepositoryNotFoundError:
            return
    if private and public:
        raise CheckpointError(f"{name!r} is on the Hub already, and public; give --public, or another name")


def upload(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload a folder to a repository of the Hub, which is made where there is none; its address."""
    with _upload_errors(name):
        url = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model by rope-ext")
    return str(url)


@contextmanager
def _upload_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the HTTP library, of the disk, of a name
        raise CheckpointError(f"{short(name)!r} cannot be uploaded to the Hub: {one_line(error)}") from error


@contextmanager
def _hub_errors(name: str, revision: str) -> Iterator[None]:
    """Inside, an error of the Hub is one line with what to do."""
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
