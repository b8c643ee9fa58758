"""Convert a checkpoint on disk between RoPE layouts: half, interleaved, and Meta's own format.

    report = convert_checkpoint("path/or/hub-id", "converted", to="interleaved")

The folder is read and checked first (`source`, `meta_source`). Everything is written into a hidden folder beside the
destination, which is renamed once it is complete and on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rope_ext_hf.bounds import whole
from rope_ext_hf.checkpoints.meta_export import MetaExport
from rope_ext_hf.checkpoints.meta_import import MetaImport
from rope_ext_hf.checkpoints.meta_source import MetaSource, open_checkpoint
from rope_ext_hf.checkpoints.pairing_conversion import PairingConversion
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import check_destination
from rope_ext_hf.rotary.pairing import PAIRINGS


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
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a copy of a checkpoint with its weights in another RoPE layout.

    Args:
        src: a folder or Hub id with safetensors or .bin files, sharded or not; a model or an adapter (LoRA, DoRA); or a
            Llama in Meta's format (params.json).
        dst: the new folder. All other files of the source are copied, except weights in further formats.
        to: "half", "interleaved", or "meta" for a Llama in Meta's format.
        source_pairing: pairing of the weights now; default: the config's `rope_pairing`, else what the family's
            transformers class runs.
        force: convert although the weights are already in that pairing by the config.
        resume: continue an interrupted conversion; finished files are compared with what they should be.
        verify: before the folder gets its name, compare the attention scores of a few layers of source and copy, each
            under the rotation of its pairing, and if two models fit into memory their logits.
        model_parallel: parts to write, for "meta".
        context_length: the length in tokens that a source in Meta's format is for. Default: max_seq_len of its
            params.json, else that of the released model with its sizes, else a guess, which is warned of.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: as in transformers.
        progress: called with bytes written and bytes in all.

    Returns:
        What was written. A warning is given if transformers does not run the new pairing of this family.

    Raises:
        CheckpointError: something in the source is missing, contradictory or unknown (before anything is written), the
            weights are in that pairing already, or the verification failed.
        FileError: a destination that exists or lies in the source, a source that changes meanwhile, a full disk.
        UnsupportedModelError: a family that the table does not list.

    Tensors keep every bit; only the order of rows changes. Converting back gives the source's bytes again.
    """
    dst = Path(dst)
    if to not in (*PAIRINGS, "meta"):
        raise CheckpointError(f"weights can be converted to {', '.join(PAIRINGS)} or meta, got to={to!r}")
    if source_pairing not in (None, *PAIRINGS):
        raise CheckpointError(f"source_pairing must be one of {', '.join(PAIRINGS)}, got {source_pairing!r}")
    check_destination(dst)  # before anything is downloaded
    source = open_checkpoint(src, revision=revision, trust_remote_code=trust_remote_code)
    if isinstance(source, MetaSource):
        if to == "meta":
            raise CheckpointError(f"{str(src)!r} is in Meta's format already")
        if source_pairing not in (None, "interleaved"):
            raise CheckpointError(f"weights in Meta's format are interleaved, got source_pairing={source_pairing!r}")
        if context_length is not None:
            whole("context_length", context_length, error=CheckpointError)
        conversion: Conversion = MetaImport(source, dst, to, context_length=context_length)
    elif context_length is not None:
        raise CheckpointError(
            f"context_length is for weights in Meta's format; {str(src)!r} states its own as max_position_embeddings "
            "in config.json"
        )
    elif to == "meta":
        conversion = MetaExport(source, dst, model_parallel=model_parallel, source_pairing=source_pairing)
    else:
        conversion = PairingConversion(source, dst, to, source_pairing=source_pairing, force=force)
    return conversion.run(resume=resume, verify=verify, progress=progress)
