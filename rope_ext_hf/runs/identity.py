"""What the numbers of a run depend on besides text and protocol: the model, what is patched, and the code.

A run's folder is named after this, so that a changed model starts another run. A value too many costs a run anew, one
too few a wrong number: where in doubt, a value is in. Not in it are the tokenizer, since `Measurement.fingerprint` has
the ids that are read and the bytes of each, and the tokens per pass: these change the last digits of a loss, but a run
that ran out of memory must go on with fewer.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rope_ext_hf import __version__
from rope_ext_hf.files import read_json, write_json
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.patches.geometry import base_rope_of_model
from rope_ext_hf.patches.patch_records import PatchSpec
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.spans import prefix_tokens
from rope_ext_hf.runs.model_digest import model_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def provenance(model: Any, data: str) -> dict[str, Any]:
    parameter = next(model.parameters())
    return {
        "model": model.name_or_path,
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "data": data,
        "python": platform.python_version(),
        "versions": versions_now(),
    }


def versions_now() -> dict[str, str]:
    """Return the versions of the packages that results depend on most.

    That of this package is its own word: a checkout on PYTHONPATH is not installed.
    """
    return {"rope-ext-hf": __version__} | {name: version(name) for name in ("torch", "transformers")}


_COMPUTING = ("attention", "eval", "methods", "patches", "reading", "rotary")
"""The folders of this package that compute numbers; what prints, compares or serves them is in others."""
_KNOWN_SOURCE = re.compile(rf"(torch|transformers|rope_ext_hf\.({'|'.join(_COMPUTING)}))(\.|$)")
"""Modules of packages whose versions a run's settings hold, and of those folders."""


@dataclass(frozen=True)
class Basis:
    """What the methods of a run are applied to; `below` are the live patches that stay underneath, bottom first."""

    rotary: Rotary
    layers: tuple[str | int, ...] | None = None
    below: tuple[PatchSpec, ...] = ()

    @classmethod
    def from_specs(cls, specs: tuple[PatchSpec, ...]) -> Basis:
        """What the last of these patches is applied to."""
        return cls(specs[-1].rotary, specs[-1].layers, specs[:-1])

    def to_dict(self) -> dict[str, Any]:
        return {
            "rotary": self.rotary.to_dict(),
            "layers": self.layers,
            "below": [spec.to_dict() for spec in self.below],
        }


def find_basis(model: nn.Module, methods: Sequence[RopeMethod | None], over: str, context_length: int | None) -> Basis:
    """What methods are applied to, as `patch` takes it; of one that the model has, what it is applied to there."""
    specs = present_specs(model)
    if specs and over == "own" and context_length is None and all(method == specs[-1].method for method in methods):
        return Basis.from_specs(specs)
    under = base_rope_of_model(model, over=over, context_length=context_length)
    return Basis(under.rotary, None, under.live)


def model_key(
    model: nn.Module, methods: Sequence[RopeMethod | None], basis: Basis, over: str, *measuring: str
) -> dict[str, Any]:
    """Return what a run of these methods depends on, as settings.

    The method None is the model with its present patches; `measuring` are the names of modules that measure.
    """
    specs = present_specs(model)
    as_it_is = None in methods or (specs and basis == Basis.from_specs(specs))
    return {
        "weights": model_digest(model),
        "over": over,
        "basis": basis.to_dict(),
        "patches": [spec.to_dict() for spec in specs] if None in methods else [],
        # beyond what the method and its basis say; a patch without these arguments has neither
        "of_patch": _more_of_patch(specs[-1]) if specs and as_it_is else {},
        "code": code_digest(model, *measuring),
    }


def _more_of_patch(spec: PatchSpec) -> dict[str, Any]:
    own = spec.method.extended_length(spec.rotary)
    length = {} if spec.target_length in (None, own) else {"target_length": spec.target_length}
    return length | ({"native": True} if spec.native else {})


def code_digest(model: nn.Module, *measuring: str) -> str:
    """Return a digest of the source that computes the numbers.

    That is this package's, the code that came with a model, and that of plug-ins: of methods, and of the modules that
    measure, by their names.
    """
    digest = _own_source().copy()  # a copy from git has the same version for months
    kinds = {*map(type, model.modules()), *list_methods().values()}
    for name in sorted({*(kind.__module__ for kind in kinds), *measuring}):
        if _KNOWN_SOURCE.match(name):
            continue
        path = inspect.getsourcefile(sys.modules[name]) if hasattr(sys.modules.get(name), "__file__") else None
        digest.update(name.encode())
        if path is not None and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


@cache
def _own_source() -> hashlib._Hash:
    of_folders = [sorted(files("rope_ext_hf").joinpath(name).iterdir(), key=attrgetter("name")) for name in _COMPUTING]
    return _files_digest([path for paths in of_folders for path in paths if path.name.endswith((".py", ".toml"))])


def _files_digest(paths: Iterable[Any]) -> hashlib._Hash:
    """SHA-256 of the names and bytes of files, in this order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest


_HOW_LOADED = ("is_local", "local_files_only", "name_or_path")  # keys of a saved tokenizer: how it was loaded


def digest_inputs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *texts: Sequence[Tokens]
) -> dict[str, str]:
    """Digests of a model, its tokenizer and texts as token ids, by their names in a sentence.

    Each weight is read once, at about 1.4 GB/s a core. Files of the tokenizer are read without what says where it came
    from. The tokens before every text are named where there are any: runs of earlier releases read without them.
    """
    read = hashlib.sha256()
    for documents in texts:
        read.update(b"text")
        for each in documents:
            read.update(f"{len(each.ids)} ".encode() + each.ids.numpy().tobytes())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "tokenizer_config.json"
        kept = {name: value for name, value in read_json(config).items() if name not in _HOW_LOADED}
        write_json(config, kept)
        of_tokenizer = _files_digest(path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    prefix = prefix_tokens(tokenizer, None)
    return {
        "the model (weights, config or adapter)": model_digest(model),
        "the tokenizer": of_tokenizer.hexdigest(),
        "the text": read.hexdigest(),
    } | ({"what every text begins with": repr(prefix)} if prefix else {})
