"""Checkpoints from one RoPE layout to another, on disk: every tensor that rotates, streamed, whole or not at all.

    report = convert_checkpoint("path/or/hub-id", "converted", to="interleaved")

The folder is planned and checked first: every tensor that stands in an attention module is either known to rotate,
known to stay, or a reason to stop (`patches/layouts.py`). Then each weight file is copied range by range inside the
kernel, and only the tensors that rotate go through memory, one at a time. Everything is written beside the destination,
into `.NAME.unfinished`, and renamed when it is complete and on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.pairing import PAIRINGS
from rope_ext_hf.patches.layouts import Blocks, Layout, RotatingRows, rotating_rows, runs_pairing
from rope_ext_hf.patches.patching import geometry
from rope_ext_hf.shards import (
    SafetensorsFile,
    TorchFile,
    bytes_of,
    copy_range,
    disk_errors,
    inside,
    read_json,
    write_all,
    write_safetensors,
)

__all__ = ["ConversionReport", "Source", "convert_checkpoint", "read_source"]

PAIRING_KEY = "rope_pairing"
PLAN = "rope-ext-plan.json"
INDEXES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("adapter_model.safetensors.index.json", "adapter_model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ("adapter_model.bin.index.json", "adapter_model.bin"),
)
# Weights in another form, which would be wrong beside converted ones.
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".nemo")

Weights = SafetensorsFile | TorchFile


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, to: the pairings before and after.
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
            lines.append(
                f"  note             transformers runs the other pairing here: {_mend(self.path, self.source)}"
            )
        return "\n".join(lines)


def _mend(path: str, to: str) -> str:
    return f"for it, rope-ext convert {path} NEW --to {to}"


@dataclass(frozen=True)
class Source:
    """A folder of weights, read as far as its headers.

    Attributes:
        folder: where it is.
        config: the Hugging Face config of the model these weights are of.
        files: its weight files by name, in the order of the index.
        index: what the index says beside its weight map, None where there is a single file.
        rows: what rotates.
        pairing: of the weights, as far as the folder says.
    """

    folder: Path
    config: Any
    files: dict[str, Weights]
    index: dict[str, Any] | None
    rows: RotatingRows
    pairing: str | None

    def layouts(self) -> dict[str, Layout | Blocks]:
        """Every tensor that rotates.

        Raises:
            CheckpointError: one that the family table does not know, or whose shape the config contradicts.
        """
        found: dict[str, Layout | Blocks] = {}
        for file in self.files.values():
            for name, entry in file.tensors.items():
                layout = self.rows.find(name, entry.shape)
                if layout is not None:
                    found[name] = layout
        if not found:
            raise CheckpointError(f"no tensor in {str(self.folder)!r} rotates by the names of {self.rows.model_type!r}")
        return found


def read_source(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Read what a folder or Hub repository says of its weights, and check it; no weights are read.

    Raises:
        CheckpointError: missing, contradictory or leading out of the folder.
        UnsupportedModelError: a family that the table says nothing of.
    """
    folder = _folder(path, revision)
    config = _config(folder, trust_remote_code)
    files, index = _files(folder)
    dims = _rotary_dim(config, trust_remote_code)
    said = read_json(folder / "config.json").get(PAIRING_KEY) if (folder / "config.json").is_file() else None
    if said is not None and said not in PAIRINGS:
        raise CheckpointError(f"{PAIRING_KEY} in {str(folder / 'config.json')!r} is {said!r}; known: half, interleaved")
    return Source(folder, config, files, index, rotating_rows(config, dims), said or runs_pairing(config))


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
        return Path(snapshot_download(name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name!r} is neither a folder nor a model on the Hub: {reason}") from error


def _config(folder: Path, trust_remote_code: bool) -> Any:
    from rope_ext_hf.patches.saving import load_config

    where: str | Path = folder
    if not (folder / "config.json").is_file():
        adapter = read_json(inside(folder, "adapter_config.json"))
        where = adapter.get("base_model_name_or_path") or ""
        if not where:
            raise CheckpointError(f"{str(folder)!r} is an adapter that does not name the model it is for")
    try:
        return load_config(where, trust_remote_code=trust_remote_code)[0]
    except (ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the config of {str(where)!r} cannot be used: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _rotary_dim(config: Any, trust_remote_code: bool) -> int:
    """Rotated dims per head, as the model's own rotary module has them."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"no model can be built from this config: {_first_line(error)}") from error
    return geometry(model).dim


def _files(folder: Path) -> tuple[dict[str, Weights], dict[str, Any] | None]:
    for index_name, single in INDEXES:
        kind = SafetensorsFile if single.endswith(".safetensors") else TorchFile
        if (folder / index_name).exists():
            return _sharded(folder, index_name, kind)
        if (folder / single).exists():
            return {single: kind(inside(folder, single))}, None
    known = ", ".join(name for pair in INDEXES for name in pair)
    raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {known}")


def _sharded(
    folder: Path, index_name: str, kind: type[SafetensorsFile] | type[TorchFile]
) -> tuple[dict[str, Weights], dict[str, Any]]:
    index = read_json(inside(folder, index_name))
    where = index.pop("weight_map", None)
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index_name!r} has no weight_map from tensors to files")
    if deep := [name for name in where.values() if Path(name).name != name]:
        raise CheckpointError(f"{deep[0]!r} in {index_name!r} is no name of a file in {str(folder)!r}: refused")
    files = {name: kind(inside(folder, name)) for name in dict.fromkeys(where.values())}
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
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a copy of a checkpoint whose weights are in the other pairing.

    Args:
        src: a folder or Hub id: safetensors or .bin, sharded or not; a model or an adapter (LoRA, DoRA).
        dst: a new folder. Everything else in the source folder comes along; weights in further forms do not.
        to: "half" or "interleaved".
        source: the pairing of the weights now; default: what the config says (`rope_pairing`), else what the family's
            transformers class runs.
        force: convert although the weights are said to be in that pairing already.
        resume: go on after an interruption; finished files are compared with what they should be.
        progress: called with bytes written and bytes in all.

    Raises:
        CheckpointError: anything in the source that is missing, contradictory or unknown (before anything is written),
            weights that are in that pairing already, a destination that exists, a full disk.
        UnsupportedModelError: a family that the table says nothing of.

    Tensors are equal to the source's byte for byte but for the order of their rows; there and back is the identity.
    """
    dst = Path(dst)
    if to not in PAIRINGS or source not in (None, *PAIRINGS):
        raise CheckpointError(f"pairings are half and interleaved, got {to!r}" + (f" and {source!r}" if source else ""))
    if dst.exists():
        raise CheckpointError(f"{str(dst)!r} exists already; give a new folder")
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
    work = _Work(found, found.layouts(), to, dst, progress)
    with work.folder(resume) as unfinished:
        for name, file in found.files.items():
            work.write(name, file, unfinished)
        left_behind = work.copy_the_rest(unfinished)
    runs = runs_pairing(work.config_after()) == to
    report = ConversionReport(
        path=str(dst),
        source="interleaved" if to == "half" else "half",
        to=to,
        converted=len(work.layouts),
        tensors=sum(len(file.tensors) for file in found.files.values()),
        bytes=work.total,
        left_behind=left_behind,
        runs=runs,
    )
    if not runs:
        warnings.warn(
            f"{str(dst)!r} holds {to} weights, which transformers' {found.rows.model_type!r} does not run; "
            + _mend(str(dst), report.source),
            stacklevel=2,
        )
    return report


@dataclass
class _Work:
    """One conversion under way."""

    found: Source
    layouts: dict[str, Layout | Blocks]
    to: str
    dst: Path
    progress: Callable[[int, int], None] | None
    done: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(e.end - e.begin for file in self.found.files.values() for e in file.tensors.values())
        for name, layout in self.layouts.items():
            if isinstance(layout, Blocks):  # whether its blocks can move at all
                try:
                    layout.repaired(torch.zeros(layout.count), self.to)
                except ValueError as error:
                    raise CheckpointError(f"{name!r} cannot be converted exactly: {error}") from error

    def advance(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)

    def plan(self) -> dict[str, Any]:
        """What an interrupted conversion must agree in to be gone on with."""
        files = {
            name: (file.path.stat().st_size, file.path.stat().st_mtime_ns) for name, file in self.found.files.items()
        }
        return json.loads(json.dumps({"source": str(self.found.folder.resolve()), "to": self.to, "files": files}))

    @contextmanager
    def folder(self, resume: bool) -> Iterator[Path]:
        """The unfinished folder; it becomes the destination at the end, and is all there is until then."""
        unfinished = self.dst.with_name(f".{self.dst.name}.unfinished")
        with disk_errors(self.dst):
            self.dst.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.dst.with_name(f".{self.dst.name}.lock"))
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise CheckpointError(f"another process is writing {str(self.dst)!r}") from error
            try:
                self._begin(unfinished, resume)
                yield unfinished
                (unfinished / PLAN).unlink()
                _sync_folder(unfinished)
                unfinished.rename(self.dst)
                _sync_folder(self.dst.parent)
            finally:
                lock.release()
                Path(lock.lock_file).unlink(missing_ok=True)

    def _begin(self, unfinished: Path, resume: bool) -> None:
        if resume and unfinished.is_dir():
            if read_json(unfinished / PLAN) != self.plan():
                raise CheckpointError(f"what {str(unfinished)!r} was begun with has changed; start anew without resume")
        else:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            (unfinished / PLAN).write_text(json.dumps(self.plan()), encoding="utf-8")
        room = shutil.disk_usage(unfinished).free
        written = sum(file.stat().st_size for file in unfinished.iterdir() if file.suffix == ".safetensors")
        if self.total - written > room:
            raise CheckpointError(
                f"{self.total / 1e9:.1f} GB are to be written to {str(self.dst)!r}, where {room / 1e9:.1f} GB are free"
            )

    def write(self, name: str, file: Weights, unfinished: Path) -> None:
        """One weight file, complete and on disk when this returns."""
        target = unfinished / _safetensors_name(name)
        if target.exists():
            if self._same(file, target):
                self.advance(sum(e.end - e.begin for e in file.tensors.values()))
                return
            target.unlink()
        part = target.with_name(f"{target.name}.part")
        if isinstance(file, SafetensorsFile):
            self._copy(file, part)
        else:
            write_safetensors(part, file.tensors, lambda n: self._repaired(file, n), {"format": "pt"}, self.advance)
        part.replace(target)
        _sync_folder(unfinished)

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
                    copy_range(source, target, at, entry.begin, self.advance)
                    write_all(target, bytes_of(self._repaired(file, name)))
                    self.advance(entry.end - entry.begin)
                    at = entry.end
            copy_range(source, target, at, file.path.stat().st_size, self.advance)
            os.fsync(target)
        finally:
            os.close(source)
            os.close(target)

    def _same(self, file: Weights, written: Path) -> bool:
        """Whether a file that was finished before is what it would be now."""
        try:
            there = SafetensorsFile(written)
        except CheckpointError:
            return False
        described = {name: (e.dtype, e.shape) for name, e in file.tensors.items()}
        if {name: (e.dtype, e.shape) for name, e in there.tensors.items()} != described:
            return False
        return all(bytes_of(self._repaired(file, name)) == bytes_of(there.read(name)) for name in file.tensors)

    def config_after(self) -> Any:
        """The config object, with what the conversion changes in it."""
        from rope_ext_hf.patches.families import family

        text = self.found.config.get_text_config()
        switch = family(text.model_type).pairing_switch
        if switch is not None:
            setattr(text, switch, self.to == "interleaved")
        return self.found.config

    def copy_the_rest(self, unfinished: Path) -> tuple[str, ...]:
        """Everything that is not weights; returns what was left behind."""
        folder, left_behind = self.found.folder, []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if any(part in (".git", ".cache", "__pycache__") for part in name.parts) or path.is_dir():
                continue
            if str(name) in self.found.files or str(name) in [index for index, _ in INDEXES]:
                continue
            if path.suffix in WEIGHTS or name.parts[0] == "original":
                left_behind.append(str(name))
                continue
            target = unfinished / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(inside(folder, str(name)), target)
        if self.found.index is not None:
            names = {t: _safetensors_name(n) for n, file in self.found.files.items() for t in file.tensors}
            base = "adapter_model" if any(n.startswith("adapter_model") for n in self.found.files) else "model"
            _write_json(unfinished / f"{base}.safetensors.index.json", self.found.index | {"weight_map": names})
        self._write_config(unfinished)
        for file in unfinished.rglob("*"):
            if file.is_file() and file.suffix != ".safetensors":
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        return tuple(left_behind)

    def _write_config(self, unfinished: Path) -> None:
        from rope_ext_hf.patches.families import family

        path = next(p for p in (unfinished / "config.json", unfinished / "adapter_config.json") if p.exists())
        config = read_json(path)
        switch = family(self.found.rows.model_type).pairing_switch
        if switch is not None and path.name == "config.json":
            text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
            text[switch] = self.to == "interleaved"
        _write_json(path, config | {PAIRING_KEY: self.to})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _safetensors_name(name: str) -> str:
    """pytorch_model-00001-of-00002.bin as model-00001-of-00002.safetensors."""
    if name.endswith(".safetensors"):
        return name
    return name.removesuffix(".bin").replace("pytorch_model", "model", 1) + ".safetensors"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
