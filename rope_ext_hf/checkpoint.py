"""Checkpoints from one RoPE layout to another, on disk: every tensor that rotates, streamed, whole or not at all.

    report = convert_checkpoint("path/or/hub-id", "converted", to="interleaved")

The folder is planned and checked first: every tensor that stands in an attention module is either known to rotate,
known to stay, or a reason to stop (`patches/layouts.py`). Then each weight file is copied range by range inside the
kernel, and only the tensors that rotate go through memory, one at a time. Everything is written beside the destination,
into `.NAME.unfinished`, and renamed when it is complete and on disk.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CheckpointError, RopeExtError
from rope_ext_hf.pairing import PAIRINGS
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.layouts import (
    Blocks,
    Layout,
    RotatingRows,
    layer_modules,
    rotating_rows,
    runs_pairing,
    set_pairing_switch,
    stated_pairing,
    stated_rotary,
)
from rope_ext_hf.patches.patching import rotation
from rope_ext_hf.shards import (
    TORCH_DTYPES,
    Progress,
    SafetensorsFile,
    TorchFile,
    bytes_of,
    check_destination,
    copy_range,
    files_of,
    holds,
    inside,
    new_folder,
    read_json,
    size_of,
    stamps,
    whole,
    write_all,
    write_json,
    write_safetensors,
)
from rope_ext_hf.verifying import compare_logits, compare_scores

__all__ = ["ConversionReport", "Source", "convert_checkpoint", "read_source"]

INDEXES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("adapter_model.safetensors.index.json", "adapter_model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ("adapter_model.bin.index.json", "adapter_model.bin"),
)
NEVER = ["original/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.nemo", "*.ckpt"]  # downloaded
# Weights in another form, which would be wrong beside converted ones.
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".nemo")

Weights = SafetensorsFile | TorchFile


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, to: the pairings before and after; "meta": Meta's own format, interleaved.
        converted: tensors whose rows moved.
        tensors: of all of them.
        bytes: of the weights.
        left_behind: files of the source folder that hold weights in another form, and were not copied.
        runs: whether the family's transformers class runs the new pairing, so that the folder loads as it is.
        verified: what `verify` compared; None where it was not asked for.
    """

    path: str
    source: str
    to: str
    converted: int
    tensors: int
    bytes: int
    left_behind: tuple[str, ...]
    runs: bool
    verified: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.source} -> {self.to}",
            f"  tensors          {self.converted:,} of {self.tensors:,} rotate, {self.bytes / 1e9:.2f} GB in all",
        ]
        if self.verified:
            lines.append(f"  verified         {self.verified}")
        if self.left_behind:
            lines.append(f"  left behind      {', '.join(self.left_behind)}: weights in another form")
        if not self.runs:
            lines.append(f"  note             transformers runs the other pairing here: {_mend(self.path, self.to)}")
        return "\n".join(lines)


def _mend(path: str, to: str) -> str:
    return f"for it, rope-ext convert {path} NEW --to {'interleaved' if to == 'half' else 'half'}"


@dataclass(frozen=True)
class Source:
    """A folder of weights, read as far as its headers.

    Attributes:
        folder: where it is.
        config: the Hugging Face config of the model these weights are of.
        files: its weight files by name, in the order of the index.
        index: what the index says beside its weight map, None where there is a single file.
        rows: what rotates.
        expected: the modules that rotate in the model of this config, as `rows.place` names them; none for an adapter.
        pairing: of the weights, as far as the folder says.
    """

    folder: Path
    config: Any
    files: dict[str, Weights]
    index: dict[str, Any] | None
    rows: RotatingRows
    expected: frozenset[str]
    pairing: str | None

    @property
    def adapter(self) -> bool:
        """Whether these are an adapter's weights."""
        return _is_adapter(self.files)

    def layouts(self) -> dict[str, Layout | Blocks]:
        """Every tensor that rotates.

        Raises:
            CheckpointError: one that the family table does not know, whose shape the config contradicts, or that is
                missing; two stacks of layers of which either could be the language model.
        """
        found: dict[str, Layout | Blocks] = {}
        stacks: dict[str, set[str]] = {}
        for file in self.files.values():
            for name, entry in file.tensors.items():
                layout = self.rows.find(name, entry.shape)
                if layout is None:
                    continue
                if entry.dtype not in TORCH_DTYPES:
                    raise CheckpointError(f"{name!r} is {entry.dtype}, whose rows cannot be moved here")
                found[name] = layout
                if (place := self.rows.place(name)) is not None:
                    stacks.setdefault(place[0], set()).add(place[1])
        if not stacks:
            raise CheckpointError(f"no tensor in {str(self.folder)!r} rotates by the names of {self.rows.model_type!r}")
        if len(stacks) > 1:
            raise CheckpointError(
                f"attention that rotates stands under {' and '.join(map(repr, stacks))} in {str(self.folder)!r}; which "
                "of them is the language model is not known"
            )
        stack, there = next(iter(stacks.items()))
        if missing := sorted(self.expected - there):
            raise CheckpointError(
                f"{'.'.join([*filter(None, [stack]), missing[0]])!r} is missing in {str(self.folder)!r}"
                + (f", and {len(missing) - 1} more" if missing[1:] else "")
            )
        return found


def read_source(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Read what a folder or Hub repository says of its weights, and check it; no weights are read.

    Raises:
        CheckpointError: missing, contradictory or leading out of the folder.
        UnsupportedModelError: a family that the table says nothing of.
    """
    folder = _folder(path, revision)
    files_of(folder)
    files, index = _files(folder)
    adapter = _is_adapter(files)
    config = _config(folder, adapter, trust_remote_code)
    rows, expected = _rows(config, trust_remote_code)
    said = getattr(config, PAIRING_KEY, None)
    if adapter:
        expected = frozenset()
        said = read_json(inside(folder, "adapter_config.json")).get(PAIRING_KEY, said)
    if said not in (None, *PAIRINGS):
        raise CheckpointError(f"{PAIRING_KEY} in {str(folder)!r} is {said!r}; known: half, interleaved")
    return Source(folder, config, files, index, rows, expected, said or stated_pairing(config))


def _is_adapter(files: dict[str, Weights]) -> bool:
    return next(iter(files)).startswith("adapter_model")


def _folder(path: str | Path, revision: str | None) -> Path:
    name = str(path)
    if name == "reference":
        from rope_ext_hf.reference import path as reference

        return reference()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"no such folder: {name!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=NEVER))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name!r} is neither a folder nor a model on the Hub: {reason}") from error


def _config(folder: Path, adapter: bool, trust_remote_code: bool) -> Any:
    """Of the model, or of the model that an adapter is for."""
    from rope_ext_hf.patches.saving import load_config

    where: str | Path = folder
    if adapter and not (folder / "config.json").is_file():
        said = read_json(inside(folder, "adapter_config.json")).get("base_model_name_or_path")
        if not said or not isinstance(said, str):
            raise CheckpointError(f"{str(folder)!r} is an adapter that does not name the model it is for")
        where = said
    else:
        inside(folder, "config.json")
    try:
        return _own_config(where) or load_config(where, trust_remote_code=trust_remote_code)[0]
    except RopeExtError:
        raise
    except Exception as error:  # whatever the words in a config lead its class into
        raise CheckpointError(f"the config of {str(where)!r} cannot be used: {_in_a_line(error)}") from error


def _own_config(where: str | Path) -> Any | None:
    """What config.json says of a family whose code comes with its checkpoints: none of that code is run."""
    from transformers.configuration_utils import PreTrainedConfig

    said, _ = PreTrainedConfig.get_config_dict(where)
    model_type = said.get("model_type")
    if not isinstance(model_type, str) or family(model_type).own_code is None:
        return None
    return PreTrainedConfig(**said)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _rows(config: Any, trust_remote_code: bool) -> tuple[RotatingRows, frozenset[str]]:
    """What rotates, as the model of this config has it, and which of its modules do."""
    from transformers import AutoModelForCausalLM

    try:
        text = config.get_text_config()
        if family(text.model_type).own_code is not None:
            rotary = stated_rotary(config)
            assert rotary is not None  # the table has it for every such family
            rows = rotating_rows(config, rotary.dim)
            return rows, layer_modules(config, rows)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
        rows = rotating_rows(config, rotation(model).dim)
        places = [rows.place(name) for name in model.state_dict()]
    except RopeExtError:
        raise
    except Exception as error:  # here too
        raise CheckpointError(f"no model can be built from this config: {_in_a_line(error)}") from error
    return rows, frozenset(place[1] for place in places if place is not None)


def _files(folder: Path) -> tuple[dict[str, Weights], dict[str, Any] | None]:
    there = [(index, single) for index, single in INDEXES if (folder / index).exists() or (folder / single).exists()]
    if not there:
        known = ", ".join(name for pair in INDEXES for name in pair)
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {known}")
    if len({single.startswith("adapter_model") for _, single in there}) > 1:
        raise CheckpointError(f"{str(folder)!r} holds a model and an adapter; give each a folder of its own")
    index_name, single = there[0]
    kind = SafetensorsFile if single.endswith(".safetensors") else TorchFile
    if (folder / single).exists():  # as transformers chooses where both are there
        return {single: kind(inside(folder, single))}, None
    return _sharded(folder, index_name, kind)


def _sharded(
    folder: Path, index_name: str, kind: type[SafetensorsFile] | type[TorchFile]
) -> tuple[dict[str, Weights], dict[str, Any]]:
    index = read_json(inside(folder, index_name))
    where = index.pop("weight_map", None)
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index_name!r} has no weight_map from tensors to files")
    names = list(dict.fromkeys(where.values()))
    if deep := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{deep[0]!r} in {index_name!r} is no name of a file in {str(folder)!r}: refused")
    if len({_safetensors_name(name) for name in names}) < len(names):
        raise CheckpointError(f"two files in {index_name!r} would be written under one name: {', '.join(names)}")
    files = {name: kind(inside(folder, name)) for name in names}
    seen: dict[str, str] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            if tensor in seen:
                raise CheckpointError(f"{tensor!r} stands in {seen[tensor]!r} and in {file_name!r}")
            seen[tensor] = file_name
    for tensor, file_name in where.items():
        if seen.get(tensor) != file_name:
            raise CheckpointError(f"{tensor!r} should be in {file_name!r}, by {index_name!r}, and is not")
    if extra := next((tensor for tensor in seen if tensor not in where), None):
        raise CheckpointError(f"{extra!r} in {seen[extra]!r} is not in {index_name!r}")
    return files, index


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    source: str | None = None,
    force: bool = False,
    resume: bool = False,
    verify: bool = False,
    model_parallel: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a copy of a checkpoint whose weights are in the other pairing, or in Meta's own format, or were in it.

    Args:
        src: a folder or Hub id: safetensors or .bin, sharded or not; a model or an adapter (LoRA, DoRA); a Llama in
            Meta's format (params.json), see `rope_ext_hf.meta`.
        dst: a new folder. Everything else in the source folder comes along; weights in further forms do not.
        to: "half", "interleaved", or "meta" for a Llama in Meta's format.
        source: the pairing of the weights now; default: what the config says (`rope_pairing`), else what the family's
            transformers class runs.
        force: convert although the weights are said to be in that pairing already.
        resume: go on after an interruption; finished files are compared with what they should be.
        verify: before the folder gets its name, compare the attention scores of a few layers of source and copy, each
            under the rotation that its weights are for, and with memory for two models their logits.
        model_parallel: parts to write, for "meta".
        progress: called with bytes written and bytes in all.

    Raises:
        CheckpointError: anything in the source that is missing, contradictory or unknown (before anything is written),
            weights that are in that pairing already, a destination that exists, a full disk, a failed verification.
        UnsupportedModelError: a family that the table says nothing of.

    Tensors are equal to the source's byte for byte but for the order of their rows; there and back is the identity.
    """
    from rope_ext_hf.meta import hf_to_meta, is_meta, meta_to_hf

    dst = Path(dst)
    if to not in (*PAIRINGS, "meta") or source not in (None, *PAIRINGS):
        raise CheckpointError(
            f"pairings are half and interleaved, and meta is to be converted to; got {to!r}"
            + (f" and {source!r}" if source else "")
        )
    check_destination(dst)
    if to == "meta":
        return hf_to_meta(
            src,
            dst,
            model_parallel=model_parallel,
            source=source,
            resume=resume,
            verify=verify,
            revision=revision,
            progress=progress,
        )
    if is_meta(folder := _folder(src, revision)):
        return meta_to_hf(folder, dst, to, source=source, resume=resume, verify=verify, progress=progress)
    found = read_source(src, revision=revision, trust_remote_code=trust_remote_code)
    now = source or found.pairing
    if now is None:
        raise CheckpointError(
            f"which pairing {found.rows.model_type!r} runs is not in the family table, and the config does not say; "
            "say which one the weights are in (source)"
        )
    if now == to and not force:
        raise CheckpointError(
            f"the weights in {str(src)!r} are {to} already, {'you say' if source else 'by their config'}; to convert "
            "them all the same, say so (force)"
        )
    check_destination(dst, found.folder)
    size = sum(size_of(file.tensors) for file in found.files.values())
    work = _Work(found, found.layouts(), to, Progress(size, progress))
    verified = None
    with new_folder(dst, {"to": to, "files": stamps(found.files.values())}, size, resume=resume) as unfinished:
        for name, file in found.files.items():
            work.write(name, file, unfinished)
        left_behind = work.copy_the_rest(unfinished)
        if verify:
            written = {name: SafetensorsFile(unfinished / _safetensors_name(name)) for name in found.files}
            verified = compare_scores(found.rows, found.files, written, to)
            if not found.adapter:
                before = "interleaved" if to == "half" else "half"
                verified += "; " + compare_logits(found.folder, before, unfinished, to, size)
    runs = runs_pairing(work.config_after()) == to
    report = ConversionReport(
        path=str(dst),
        source="interleaved" if to == "half" else "half",
        to=to,
        converted=len(work.layouts),
        tensors=sum(len(file.tensors) for file in found.files.values()),
        bytes=size,
        left_behind=left_behind,
        runs=runs,
        verified=verified,
    )
    if not runs:
        warnings.warn(
            f"{str(dst)!r} holds {to} weights, which the code of {found.rows.model_type!r} models does not run; "
            + _mend(str(dst), to),
            stacklevel=2,
        )
    return report


@dataclass
class _Work:
    """One conversion under way."""

    found: Source
    layouts: dict[str, Layout | Blocks]
    to: str
    progress: Progress

    def write(self, name: str, file: Weights, unfinished: Path) -> None:
        """One weight file, complete when this returns; it is on disk when all of them are."""
        target = unfinished / _safetensors_name(name)
        header = file.header if isinstance(file, SafetensorsFile) else None
        if holds(target, file.tensors, lambda n: self._repaired(file, n), header):
            self.progress.advance(size_of(file.tensors))
            return
        with whole(target) as part:
            if isinstance(file, SafetensorsFile):
                self._copy(file, part)
            else:
                advance = self.progress.advance
                write_safetensors(part, file.tensors, lambda n: self._repaired(file, n), {"format": "pt"}, advance)

    def _repaired(self, file: Weights, name: str) -> Tensor:
        tensor = file.read(name)
        return self.layouts[name].repaired(tensor, self.to) if name in self.layouts else tensor

    def _copy(self, file: SafetensorsFile, part: Path) -> None:
        """The same header, the same bytes, but for the tensors that rotate."""
        source = os.open(file.path, os.O_RDONLY)
        target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(target, memoryview(file.header))
            at = len(file.header)
            for name, entry in file.tensors.items():
                if name in self.layouts:
                    copy_range(source, target, at, entry.begin, self.progress.advance)
                    write_all(target, bytes_of(self._repaired(file, name)))
                    self.progress.advance(entry.end - entry.begin)
                    at = entry.end
            copy_range(source, target, at, file.path.stat().st_size, self.progress.advance)
        finally:
            os.close(source)
            os.close(target)

    def config_after(self) -> Any:
        """The config object, with what the conversion changes in it."""
        set_pairing_switch(self.found.config, self.to)
        return self.found.config

    def copy_the_rest(self, unfinished: Path) -> tuple[str, ...]:
        """Everything that is not weights; returns what was left behind."""
        left_behind = copy_others(self.found.folder, unfinished, self.found.files)
        if self.found.index is not None:
            names = {t: _safetensors_name(n) for n, file in self.found.files.items() for t in file.tensors}
            base = "adapter_model" if self.found.adapter else "model"
            write_json(unfinished / f"{base}.safetensors.index.json", self.found.index | {"weight_map": names})
        self._write_config(unfinished)
        return left_behind

    def _write_config(self, unfinished: Path) -> None:
        path = unfinished / ("adapter_config.json" if self.found.adapter else "config.json")
        config = read_json(path)
        switch = family(self.found.rows.model_type).pairing_switch
        if switch is not None and not self.found.adapter:
            parts = [part for part in config.values() if isinstance(part, dict)]
            text = next((part for part in parts if part.get("model_type") == self.found.rows.model_type), config)
            text[switch] = self.to == "interleaved"
        write_json(path, config | {PAIRING_KEY: self.to})


def copy_others(folder: Path, unfinished: Path, known: Collection[str]) -> tuple[str, ...]:
    """Copy everything but weights, indexes and these files; returns the weights in further forms."""
    left_behind = []
    for name in files_of(folder):
        if name in known or name in dict(INDEXES):
            continue
        if Path(name).suffix in WEIGHTS or Path(name).parts[0] == "original":
            left_behind.append(name)
            continue
        target = unfinished / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)
    return tuple(left_behind)


def _safetensors_name(name: str) -> str:
    """pytorch_model-00001-of-00002.bin as model-00001-of-00002.safetensors."""
    if name.endswith(".safetensors"):
        return name
    return name.removesuffix(".bin").replace("pytorch_model", "model", 1) + ".safetensors"
