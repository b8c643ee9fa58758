"""Convert a checkpoint on disk between RoPE layouts: half, interleaved, and Meta's own format.

    report = convert_checkpoint("path/or/hub-id", "converted", to="interleaved")

The folder is checked first: the conversion stops at a tensor of an attention module that is neither known to rotate
nor known not to. Everything is written into a hidden folder beside the destination, which is renamed once it is
complete and on disk. A usual folder is copied while its queries and keys are examined; if they contradict its config,
the copy is removed. Weight files are copied in ranges of bytes inside the kernel; rows that rotate go through memory,
a few heads at a time. Rows are moved as bytes: torch is imported only where the class of a model has to be asked, for
files of torch.save, for Meta's format, and to verify the copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

from rope_ext_hf.bounds import check_int
from rope_ext_hf.checkpoints.files.numbers import Bits, size_of
from rope_ext_hf.checkpoints.files.other_files import copy_other_files
from rope_ext_hf.checkpoints.files.weight_files import (
    SafetensorsFile,
    TensorView,
    WeightFile,
    file_matches,
    write_safetensors,
)
from rope_ext_hf.checkpoints.files.weight_folders import safetensors_name
from rope_ext_hf.checkpoints.opening import Opened, open_checkpoint
from rope_ext_hf.checkpoints.pairing.detection import detect_in_consumers
from rope_ext_hf.checkpoints.pairing.source_pairing import pairing_of_source
from rope_ext_hf.checkpoints.pairing.source_weights import weights_from_source
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.files.model_files import model_file
from rope_ext_hf.files.model_folders import ADAPTER_CONFIG
from rope_ext_hf.files.whole import atomic_file, check_destination, copy_mode, copy_range, read_json, write_json
from rope_ext_hf.models.config_keys import PAIRING_KEY
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import class_pairing
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.rotary.pairing_names import PAIRINGS, other_pairing


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    source_pairing: str | None = None,
    force: bool = False,
    resume: bool = False,
    verify: bool = False,
    model_parallel: int = 1,
    context_length: int | None = None,
    dequantize: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a copy of a checkpoint with its weights in another RoPE layout.

    Tensors keep every bit; only the order of rows changes. Converting back gives the source's bytes again.

    Args:
        src: a folder or Hub id with safetensors or .bin files, sharded or not; a model or an adapter (LoRA, DoRA); a
            Llama in Meta's format (params.json); or a GGUF file.
        dst: the new folder. All other files of the source are copied, except for those that hold or may hold
            weights as well, which the report names.
        to: "half", "interleaved", "hf" for the one of them that the model's class in transformers runs, or "meta" for a
            Llama in Meta's format.
        source_pairing: the pairing of the weights now; default: the config's `rope_pairing`, else the one that the
            family's transformers class runs, unless the weights themselves contradict it (see `detect_pairing`).
        force: convert although the weights, by the config, are already in that pairing.
        resume: continue an interrupted conversion; finished files are compared with what they should be.
        verify: before the folder gets its name, compare the attention scores of a few layers of source and copy, each
            rotated in its pairing, and if two models fit into memory their logits. If the weights leave the pairing of
            the source open, the report says so.
        model_parallel: the number of parts to write, for "meta".
        context_length: the length in tokens that a source in Meta's format is for. Default: max_seq_len of its
            params.json, else that of the released model with its sizes, else a guess, with a warning.
        dequantize: the dtype in which the weights of a GGUF file are written: "bfloat16", "float16" or "float32", which
            alone is exact. The model is in memory meanwhile, in that dtype.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: as in transformers.
        progress: called with the bytes written so far and all bytes.

    Returns:
        A report. A warning is given if transformers does not run the new pairing of this family.

    Raises:
        CheckpointError: something in the source is missing, contradictory or unknown (before anything is written), the
            weights are in that pairing already, they contradict the config, or the verification failed. What was
            written until then is removed.
        FileError: a destination that exists or lies in the source, a source that changes meanwhile, a full disk.
        UnsupportedModelError: a family that the table does not list.
    """
    dst = Path(dst)
    if to not in (*PAIRINGS, "hf", "meta"):
        raise CheckpointError(f"weights can be converted to {', '.join(PAIRINGS)}, hf or meta, got to={to!r}")
    if source_pairing not in (None, *PAIRINGS):
        raise CheckpointError(f"source_pairing must be one of {', '.join(PAIRINGS)}, got {source_pairing!r}")
    check_destination(dst)  # before anything is downloaded
    file = model_file(src)
    if file is not None:
        report: ConversionReport = file.convert(
            dst,
            to,
            dequantize=dequantize,
            source_pairing=source_pairing,
            force=force,
            resume=resume,
            verify=verify,
            progress=progress,
        )
        return report
    if dequantize is not None:
        raise CheckpointError(f"dequantize is for GGUF files, and {short(str(src))!r} is not one; leave it out")
    source = open_checkpoint(src, revision=revision, trust_remote_code=trust_remote_code)
    if to == "hf":
        to = _pairing_of_class(source)
    if not isinstance(source, Source):
        if to == "meta":
            raise CheckpointError(f"{str(src)!r} is in Meta's format already")
        if context_length is not None:
            check_int("context_length", context_length, error=CheckpointError)
    elif context_length is not None:
        raise CheckpointError(
            f"context_length is for weights in Meta's format; {str(src)!r} states its own as max_position_embeddings "
            "in config.json"
        )
    settle = partial(pairing_of_source, source, src, dst, to, stated=source_pairing, force=force, verify=verify)
    with ThreadPoolExecutor(1) as thread:
        if _is_usual(source) and to != "meta" and not resume:  # a refusal removes the copy, but no earlier one
            settling = thread.submit(copy_context().run, settle)
        else:
            settling = Future()
            settling.set_result(settle())
        conversion: Conversion
        if not isinstance(source, Source):
            from rope_ext_hf.checkpoints.meta.meta_conversion import MetaImport

            now = settling.result().pairing
            conversion = MetaImport(source, dst, to, now=now, context_length=context_length)
        elif to == "meta":
            from rope_ext_hf.checkpoints.meta.meta_conversion import MetaExport

            conversion = MetaExport(source, dst, now=settling.result().pairing, model_parallel=model_parallel)
        else:
            conversion = _PairingConversion(source, dst, to)
        report = conversion.run(resume=resume, verify=verify, progress=progress, check=settling)
    settled = settling.result()
    notes = [*report.notes, *conversion.warnings]
    if settled.is_contradicted:
        notes.append(settled.warning)
        warnings.warn(settled.warning, stacklevel=2)
    verified = f"{report.verified}; {settled.limits}" if verify else report.verified
    return replace(report, source_pairing=str(settled), notes=tuple(dict.fromkeys(notes)), verified=verified)


def _is_usual(source: Opened) -> bool:
    """Return whether a folder holds a model in safetensors files whose config alone settles which rows rotate.

    Another thread may read its weights while they are copied, which needs no torch.
    """
    return (
        isinstance(source, Source)
        and source.model is None
        and source.adapter is None
        and all(isinstance(file, SafetensorsFile) for file in source.files.values())
    )


def _pairing_of_class(source: Opened) -> str:
    """Return the pairing that the class of a model in transformers runs; a source in Meta's format becomes a Llama.

    Raises:
        CheckpointError: it is unknown.
    """
    pairing = source.class_pairing if isinstance(source, Source) else "half"
    if pairing is None:
        raise CheckpointError(
            f"it is unknown which pairing the class of the model in {str(source.folder)!r} runs; give --to half or "
            "--to interleaved"
        )
    return pairing


class _PairingConversion(Conversion):
    """A conversion that writes a copy of a checkpoint with its weights in the other pairing."""

    def __init__(self, source: Source, dst: Path, to: str) -> None:
        self.source, self.to, self.layouts = source, to, source.layouts()
        self.folder, self.inputs, self.plan = source.folder, source.inputs, {"to": to}
        runs = class_pairing(source.config, after=to) or source.tensors.pairing
        loads_natively = runs == to
        if not loads_natively:
            self.warnings = (
                f"{str(dst)!r} holds weights in the {to} pairing, with which transformers does not run "
                f"{source.tensors.model_type!r} models; to use it there, convert it back: "
                f"{command_line('convert', dst, 'NEW', to=other_pairing(to))}",
            )
        weights = weights_from_source(source, str(source.folder))
        self.warnings += tuple(
            f"the weights of the {consumer.path} of {str(source.folder)!r} look {consumer.pairing}, but were read as "
            f"{consumer.stated}; `{command_line('detect', source.folder)}` shows the scores"
            for consumer in detect_in_consumers(weights, other_pairing(to))
            if consumer.contradiction
        )
        _, kept = weights.indexers()
        notes = self.warnings
        if kept is not None:
            notes += (f"indexers stay {kept}, in which their class rotates them",)
        if not source.is_adapter and family(source.tensors.model_type).pairing_switch is not None:
            line = command_line("convert", "ADAPTER", "NEW", to=to, **{"from": other_pairing(to)})
            notes += (f"an adapter that was trained before must be converted as well: {line}",)
        self.report = ConversionReport(
            path=str(dst),
            source=other_pairing(to),
            to=to,
            converted=len(self.layouts),
            tensors=len(source.view.tensors),
            bytes=size_of(source.view.tensors),
            loads_natively=loads_natively,
            heads=source.tensors.head_count("q"),
            key_heads=source.tensors.head_count("k"),
            notes=notes,
        )

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        for name, file in self.source.files.items():
            target, read = staging / safetensors_name(name), partial(self._converted_bits, file)
            if file_matches(target, file.tensors, read, header=file.header):  # by an interrupted conversion
                advance(size_of(file.tensors))
                continue
            with atomic_file(target, fsync=False) as part:
                if isinstance(file, SafetensorsFile):
                    self._copy_by_ranges(file, part, advance)
                else:
                    write_safetensors(part, file.tensors, read, advance)
            copy_mode(file.path, target)
        config_name = ADAPTER_CONFIG if self.source.is_adapter else "config.json"
        skipped = copy_other_files(self.source.folder, staging, [*self.source.files, config_name])
        if self.source.index is not None:
            weight_map = {t: safetensors_name(n) for n, file in self.source.files.items() for t in file.tensors}
            stem = "adapter_model" if self.source.is_adapter else "model"
            write_json(staging / f"{stem}.safetensors.index.json", self.source.index | {"weight_map": weight_map})
        self._write_config(config_name, staging)
        return skipped

    def verify(self, staging: Path) -> str:
        from rope_ext_hf.checkpoints.verification import compare_logits, compare_scores

        written = TensorView.from_files(SafetensorsFile(staging / safetensors_name(name)) for name in self.source.files)
        scores = compare_scores(self.source.tensors, self.source.view, written, self.to)
        if self.source.is_adapter:
            return scores
        logits = compare_logits(self.folder, other_pairing(self.to), staging, self.to, self.report.bytes)
        return f"{scores}; {logits}"

    def _converted_bits(self, file: WeightFile, name: str) -> Bits:
        """Read the numbers of a tensor from a file; if its rows rotate, return them in the new pairing."""
        bits = file.read_bits(name)
        return self.layouts[name].to_pairing(bits, self.to) if name in self.layouts else bits

    def _copy_by_ranges(self, file: SafetensorsFile, part: Path, advance: Callable[[int], None]) -> None:
        """Write a copy of a weight file with the tensors that rotate in the new pairing.

        All other bytes are copied in ranges, inside the kernel where it can.
        """
        with file.path.open("rb") as source, part.open("wb") as target:
            target.write(file.header)
            at = len(file.header)
            for name, info in file.tensors.items():
                if name in self.layouts:
                    copy_range(source, target, at, info.begin, advance)
                    for rows in file.moved_rows(name, self.layouts[name].order(self.to)):
                        target.write(rows)
                        advance(len(rows))
                    at = info.end
            copy_range(source, target, at, file.path.stat().st_size, advance)

    def _write_config(self, name: str, staging: Path) -> None:
        """Write the config with the new pairing, also in the family's own switch and in the fingerprints of patches."""
        config = read_json(self.source.folder / name)
        model_type = self.source.tensors.model_type
        switch = family(model_type).pairing_switch
        if switch is not None and not self.source.is_adapter:
            parts = [part for part in config.values() if isinstance(part, dict)]
            text = next((part for part in parts if part.get("model_type") == model_type), config)
            text[switch] = self.to == "interleaved"
        if switch is not None:
            from rope_ext_hf.patches.saved.fingerprint import FINGERPRINT_KEY, with_pairing

            for part in (part for part in [config, *config.values()] if isinstance(part, dict)):
                for key, value in part.items():
                    if isinstance(value, dict) and FINGERPRINT_KEY in value:
                        part[key] = with_pairing(value, self.to)
        write_json(staging / name, config | {PAIRING_KEY: self.to})
        copy_mode(self.source.folder / name, staging / name)
