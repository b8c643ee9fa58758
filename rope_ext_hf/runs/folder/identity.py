"""The identity of a run: a digest of everything that its numbers depend on, besides the text and how it is scored.

That is the model, its patches, and the code. The name of a run's folder contains the identity, so that a changed model
starts a new run. A needless part of the identity costs a new run at times, but a missing part would give wrong numbers;
so in doubt, a value belongs to it. Two things are left out on purpose:

- the tokenizer, because `Measurement.fingerprint` covers the token ids that are read and the bytes of each;
- the number of tokens per pass through the model. It changes the last digits of a loss, but a run that ran out of
  memory has to continue with fewer.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext_hf import __version__
from rope_ext_hf.errors import FileError
from rope_ext_hf.files.whole import read_json, with_tilde, write_json
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.static import Default
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.tokenizing import prefix_tokens
from rope_ext_hf.runs.conclusions.labels import Method, label, method_key
from rope_ext_hf.runs.folder.model_digest import model_digest
from rope_ext_hf.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["digest_inputs", "results_of_model"]


def provenance(model: Any, data: str) -> dict[str, Any]:
    """Return the settings that say where the numbers of a run come from: model, device, and versions of packages.

    Args:
        model: the model that is measured.
        data: the name of the text.
    """
    parameter = next(model.parameters())
    return {
        "model": with_tilde(model.name_or_path),
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "data": with_tilde(data),
        "python": platform.python_version(),
        "versions": versions_now(),
    }


def versions_now() -> dict[str, str]:
    """Return the installed versions of the packages that results depend on most, by name.

    The version of this package is its `__version__`, because a checkout on PYTHONPATH has no installed version.
    """
    return {"rope-ext-hf": __version__} | {name: version(name) for name in ("torch", "transformers")}


_COMPUTING = ("attention", "eval", "methods", "models", "patches", "reading", "rotary")
"""The folders of this package that compute numbers; the other folders print, compare or serve them."""
_KNOWN_SOURCE = re.compile(rf"(torch|transformers|rope_ext_hf\.({'|'.join(_COMPUTING)}))(\.|$)")
"""Names of modules that need no digest of their own: their package's version, or their folder's digest, covers them."""


def find_basis(rope: ModelRope, methods: Sequence[RopeMethod | None]) -> dict[str, Any]:
    """Return what the methods of a run are applied to, as JSON values: a rotary embedding, and patches underneath.

    Runs are compared only if these are equal. Usually they are those of the model as it is now; if every method is the
    one that the model is patched with already, they are those below this patch.

    Args:
        rope: the rope of the model, patched or not, for patches with the arguments of the run.
        methods: the methods; None stands for the model as it is.
    """
    extends_own = rope.over == "own" and rope.context_length is None
    if rope.is_patched and extends_own and all(method == rope.patches[-1].method for method in methods):
        return basis_of_patches(rope.patches)
    return _basis(rope.rotary, None, rope.below if rope.is_patched else ())


def basis_of_patches(patches: tuple[Patch, ...]) -> dict[str, Any]:
    """Return what the last of a model's patches, all of them bottom first, was applied to; see `find_basis`."""
    return _basis(patches[-1].rotary, patches[-1].layers, patches[:-1])


def _basis(rotary: Rotary, layers: tuple[str | int, ...] | None, below: Sequence[Patch]) -> dict[str, Any]:
    return {"rotary": rotary.to_dict(), "layers": layers, "below": [patch.to_dict() for patch in below]}


def results_of_model(run: Run[Any], model: nn.Module, name: str) -> tuple[Run[Any], Method]:
    """Return a run with only the results of a model's present method and of the unpatched model, and that method.

    The results of the unpatched model are also those of `default`, where that was not measured by its name.

    Args:
        run: a run of the same weights.
        model: patched or not; it may be on the meta device.
        name: the name of the model in messages.

    Raises:
        FileError: the run has no result of this method on this rotary embedding.
    """
    patches, unpatched = active_patches(model), run.settings["loaded"]
    method = patches[-1].method.to_dict() if patches else unpatched
    if len(patches) == 1 and isinstance(patches[-1].method, Default) and not run.select([method]).results:
        method = unpatched  # it changes nothing but the length in the config
    basis = basis_of_patches(patches) if patches else run.settings["basis"]
    chosen = run.select([unpatched, method])
    has_method = any(result.key == method_key(method) for result in chosen.results)
    if not has_method or json.loads(json.dumps(basis)) != json.loads(json.dumps(run.settings["basis"])):
        measured = ", ".join(dict.fromkeys(label(result.method) for result in run.results)) or "nothing yet"
        raise FileError(
            f"the run in {str(run.path)!r} has no result of {label(method)} as {name} carries it; it measured "
            f"{measured}"
        )
    return chosen, method


def model_key(
    model: nn.Module, methods: Sequence[RopeMethod | None], basis: Mapping[str, Any], over: str, *measuring: str
) -> dict[str, Any]:
    """Return the settings that the numbers of a run depend on: digests of the weights and of the code, and the patches.

    Args:
        model: patched or not.
        methods: the methods; None stands for the model with its present patches.
        basis: what the methods are applied to, see `find_basis`.
        over: as `rope_ext_hf.patch` takes it.
        measuring: the names of the Python modules whose code measures.
    """
    patches = active_patches(model)
    measures_present_patch = None in methods or (patches and basis == basis_of_patches(patches))
    return {
        "weights": model_digest(model),
        "over": over,
        "basis": basis,
        "patches": [patch.to_dict() for patch in patches] if None in methods else [],
        "of_patch": _further_arguments(patches[-1]) if patches and measures_present_patch else {},
        "code": code_digest(model, *measuring),
    }


def _further_arguments(patch: Patch) -> dict[str, Any]:
    """Return those arguments of a patch that are not defaults and that its method and its basis do not show."""
    arguments: dict[str, Any] = {}
    if patch.target_length not in (None, patch.method.extended_length(patch.rotary)):
        arguments["target_length"] = patch.target_length
    if patch.native:
        arguments["native"] = True
    return arguments


def code_digest(model: nn.Module, *measuring: str) -> str:
    """Return a digest of the source code that computes the numbers.

    It covers the folders of this package that compute, the code that came with the model, and the code of plug-ins.

    Args:
        model: the model; the classes of its modules say which code came with it.
        measuring: the names of the Python modules whose code measures.
    """
    # The package's version would not do: a checkout from git has the same version for months.
    digest = _own_source().copy()
    classes = {*map(type, model.modules()), *list_methods().values()}
    for name in sorted({*(cls.__module__ for cls in classes), *measuring}):
        if _KNOWN_SOURCE.match(name):
            continue
        path = getattr(sys.modules.get(name), "__file__", None)
        digest.update(name.encode())
        if path is not None and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


@cache
def _own_source() -> hashlib._Hash:
    """Return a SHA-256 of the code and tables in the folders of this package that compute."""
    package = Path(str(files("rope_ext_hf")))
    paths = [path for name in _COMPUTING for path in sorted((package / name).rglob("*"))]
    return _files_digest(path for path in paths if path.suffix in (".py", ".toml"))


def _files_digest(paths: Iterable[Any]) -> hashlib._Hash:
    """Return a SHA-256 of the names and contents of files, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest


_HOW_LOADED = ("is_local", "local_files_only", "name_or_path")
"""Keys of a saved tokenizer that say from where it was loaded, and not what it does."""


def digest_inputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *texts: Sequence[Tokens]
) -> dict[str, str]:
    """Return digests of a model, its tokenizer and texts, by the names that messages use for them.

    Each weight is read once, at about 1.4 GB/s per core. If the tokenizer puts tokens such as BOS before every text,
    they are a part of the result, because earlier releases read texts without them.

    Args:
        model: the model.
        tokenizer: the tokenizer; its saved files are read, without the keys that say from where it was loaded.
        texts: each a sequence of documents as token ids.
    """
    text_digest = hashlib.sha256()
    for documents in texts:
        text_digest.update(b"text")
        for document in documents:
            text_digest.update(f"{len(document.ids)} ".encode() + document.ids.numpy().tobytes())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "tokenizer_config.json"
        kept = {name: value for name, value in read_json(config).items() if name not in _HOW_LOADED}
        write_json(config, kept)
        tokenizer_digest = _files_digest(path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    digests = {
        "the model (weights, config or adapter)": model_digest(model),
        "the tokenizer": tokenizer_digest.hexdigest(),
        "the text": text_digest.hexdigest(),
    }
    prefix = prefix_tokens(tokenizer, None)
    if prefix:
        digests["what every text begins with"] = repr(prefix)
    return digests
