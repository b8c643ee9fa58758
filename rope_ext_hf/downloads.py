"""Repositories of the Hugging Face Hub, downloaded file by file into huggingface_hub's cache, and checked.

    repository = open_repository("Qwen/Qwen3-8B")            # None where the Hub cannot be reached
    folder = repository.download(repository.weights())

Every request has a time limit, every file that arrives is compared with the Hub's checksum, and every failure is a
CheckpointError of one line. huggingface_hub itself compares sizes alone, and waits without limit for some answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CheckpointError, did_you_mean, one_line, short
from rope_ext_hf.files import read_json

__all__ = ["WEIGHT_SUFFIXES", "open_repository"]

# Formats that weights may be in.
WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".nemo"}
)
_WEIGHTS = (("model.safetensors", "pytorch_model.bin"), ("adapter_model.safetensors", "adapter_model.bin"))
"""Files of weights of a model, of an adapter, each in the order in which transformers looks for them."""
_SECONDS_TO_ANSWER = 5.0
_BLOCK = 2**20  # bytes hashed at a time


@dataclass(frozen=True)
class Repository:
    """A model repository on the Hub at one commit.

    Attributes:
        name: OWNER/NAME.
        revision: branch, tag or commit that was asked for.
        commit: the commit that this is now.
        files: the names of its files.
    """

    name: str
    revision: str
    commit: str
    files: tuple[str, ...]

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """The files whose names match one of these patterns, less those that belong to Meta's format."""
        patterns = tuple(patterns)
        return [name for name in self.files if not _is_original(name) and any(fnmatch(name, p) for p in patterns)]

    def weights(self) -> list[str]:
        """The files of weights that would be loaded, with their index: of a model, of an adapter, of Meta's format."""
        names = [name for singles in _WEIGHTS for name in self._first_of(singles)]
        return names or self.matching(["consolidated.*.pth"])

    def _first_of(self, singles: Iterable[str]) -> list[str]:
        """The first of these files, or its index and the files that this names."""
        for single in singles:
            index = f"{single}.index.json"
            if single in self.files:
                return [single]
            if index in self.files:
                shards = read_json(self.download([index]) / index).get("weight_map")
                named = shards.values() if isinstance(shards, dict) else ()
                return [index, *sorted({name for name in named if name in self.files})]
        return []

    def others(self) -> list[str]:
        """All files but weights."""
        return [name for name in self.files if not (_is_original(name) or Path(name).suffix in WEIGHT_SUFFIXES)]

    def download(self, names: Iterable[str]) -> Path:
        """Return the folder of the cache that holds these files, after downloading those that were not there.

        Raises:
            CheckpointError: not admitted, interrupted, or not what the Hub announced.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        names = list(names)
        if not names:
            raise CheckpointError(f"{self.name!r} on the Hub holds no files of a model")
        with _hub_errors(self.name, self.revision):
            paths = [self._fetch(name) for name in names]
            if try_to_load_from_cache(self.name, names[0], revision=self.revision) != paths[0]:
                # The cache then knows which commit this branch was, for use offline.
                hf_hub_download(self.name, names[0], revision=self.revision, etag_timeout=_SECONDS_TO_ANSWER)
        folder = Path(paths[0])
        return folder.parents[len(Path(names[0]).parts) - 1]

    def _fetch(self, name: str) -> str:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        known = try_to_load_from_cache(self.name, name, revision=self.commit)
        if isinstance(known, str):
            return known
        path = hf_hub_download(self.name, name, revision=self.commit, etag_timeout=_SECONDS_TO_ANSWER)
        blob = Path(path).resolve()
        if not _is_intact(blob):
            Path(path).unlink()
            blob.unlink(missing_ok=True)
            raise CheckpointError(
                f"{name!r} of {self.name!r} arrived damaged: its checksum is not the one that the Hub states. Try again"
            )
        return path


def open_repository(name: str, revision: str | None = None) -> Repository | None:
    """Ask the Hub for a repository; None where the Hub cannot be reached.

    Args:
        name: OWNER/NAME.
        revision: branch, tag or commit; default: the branch main.

    Raises:
        CheckpointError: no such repository or revision, or one that needs a login.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if not _answers(constants.ENDPOINT):
        return None
    revision = revision or constants.DEFAULT_REVISION
    with _hub_errors(name, revision):
        try:
            info = HfApi().model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
        except HfHubHTTPError as error:
            if error.response.status_code >= 500:
                return None
            raise
        except ValueError:
            raise
        except Exception:  # which HTTP library it is, and so which errors there are, depends on the version
            return None
    return Repository(name, revision, info.sha or revision, tuple(file.rfilename for file in info.siblings or ()))


@cache
def _answers(endpoint: str) -> bool:
    """Whether the Hub can be reached: asked once, without the retries that take half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(endpoint, timeout=_SECONDS_TO_ANSWER)
    except Exception:  # as in open_repository
        return False
    return True


def _is_original(name: str) -> bool:
    """Whether a file of a repository in transformers' format is in the folder of a copy in Meta's."""
    return name.startswith("original/")


def _is_intact(blob: Path) -> bool:
    """Whether a file of the cache has the checksum that it is named after: SHA-256, or git's for a small file."""
    algorithm: Any = {64: hashlib.sha256, 40: hashlib.sha1}.get(len(blob.name))
    if algorithm is None:  # a cache without links has no such names
        return True
    digest = algorithm(b"blob %d\0" % blob.stat().st_size if len(blob.name) == 40 else b"")
    with blob.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return bool(digest.hexdigest() == blob.name)


@contextmanager
def _hub_errors(name: str, revision: str) -> Iterator[None]:
    """Inside, an error of the Hub is one line with what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{constants.ENDPOINT}/{name}"
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name!r} on the Hub is for those who accepted its conditions: accept them at {where}, then sign in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{short(name)!r} is neither a folder here nor a model on the Hub.{did_you_mean(name, ['reference'])} "
            "For a private one, sign in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name!r} on the Hub has no branch, tag or commit {short(revision)!r}") from error
    except HFValidationError as error:
        raise CheckpointError(f"{short(name)!r} is neither a folder here nor a Hub id: {one_line(error)}") from error
    except Exception as error:  # of the HTTP library, and of the disk
        reason = short((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), 300)
        raise CheckpointError(f"{name!r} could not be downloaded from the Hub: {reason}. Try again") from error
