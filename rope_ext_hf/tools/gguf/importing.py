"""Convert a GGUF file into a Hugging Face folder with unpacked weights.

transformers unpacks the weights, and puts rows back into its own order where llama.cpp has permuted them (Llama). It
builds the whole model for that, so a conversion takes the memory of the model in the dtype that is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from rope_ext_hf.checkpoints.pairing.detection import detect_in_weights
from rope_ext_hf.checkpoints.pairing.model_weights import weights_from_model
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.errors import CheckpointError, RopeExtError, entry, one_line, short, size_text
from rope_ext_hf.files.whole import file_stamps, foreign_errors
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.patches.rows.row_probe import pairing_of
from rope_ext_hf.rotary.pairing_names import other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
_MEMORY = 1.2  # of the size of the model
_TEXT = "Chapter 12: the quick brown fox's 3,456 jumps -- naïve?\n\n\tdef f(x_1):  return x_1 ** 2  # 東京"
"""A text for a comparison of tokenizers: letters, digits, spaces, a line end, a tab and other scripts."""


class GGUFImport(Conversion):
    """The conversion of a GGUF file into a Hugging Face folder.

    Args:
        file: the GGUF file.
        dst: the new folder.
        to: the pairing to write, which must be the one that the class of transformers runs; or "hf" for that one.
        dequantize: the dtype of the weights to write, by name.

    Raises:
        CheckpointError: the file is damaged or one of several parts, transformers does not know its architecture, the
            pairing is another one, or memory is too small.
        MethodError: the dtype is unknown.
    """

    def __init__(self, file: Path, dst: Path, to: str, *, dequantize: str) -> None:
        dtype: torch.dtype = entry("dtype", dequantize, _DTYPES)
        self.folder, self.dtype, self.dst = file, dtype, dst
        self.inputs = file_stamps([file])
        model = load_empty(file)
        pairing = pairing_of(model)
        if to == "hf":
            to = pairing or "half"
        self.plan = {"to": to, "dequantize": dequantize}
        if pairing is not None and to != pairing:
            first = command_line("convert", file, "FOLDER", to=pairing, dequantize=dequantize)
            then = f", then `{command_line('convert', 'FOLDER', dst, to=to)}`" if to in ("meta", "interleaved") else ""
            raise CheckpointError(
                f"transformers loads {short(str(file))!r} with {pairing} weights, so they are written as {pairing}: "
                f"`{first}`{then}"
            )
        tensors = {id(tensor): tensor for tensor in model.state_dict().values()}
        size = sum(tensor.numel() for tensor in model.parameters()) * dtype.itemsize
        free = psutil.virtual_memory().available
        if free < _MEMORY * size:
            raise CheckpointError(
                f"unpacking {short(str(file))!r} to {dequantize} takes {size_text(round(_MEMORY * size))} of memory, "
                f"and {size_text(free)} are free; take a dtype of 2 bytes, or a machine with more memory"
            )
        self.report = ConversionReport(
            path=str(dst),
            source="gguf",
            to=to,
            converted=0,
            tensors=len(tensors),
            bytes=size,
            loads_natively=True,
        )
        self.model: PreTrainedModel | None = None

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        self.model = model = load_model(self.folder, dtype=self.dtype, device="cpu")
        weights = replace(weights_from_model(model), path=str(self.folder))
        detected = detect_in_weights(weights)
        source = f"{self.report.to}: transformers restores the order of rows in which its class rotates"
        if detected.pairing == self.report.to:
            source += f", and the weights agree (score {detected.score:+.3f} +- {detected.error:.3f})"
        elif detected.pairing == other_pairing(self.report.to):
            self.warnings += (
                f"the weights of {str(self.folder)!r} look {detected.pairing} after loading, and "
                f"{type(model).__name__} rotates them as {self.report.to}: compare losses with "
                f"`{command_line('detect', self.folder, text='FILE')}` before you use the folder",
            )
        else:
            source += f"; the weights do not show it: {detected.reason}"
        tokenizer, *notes = self._save_tokenizer(staging)
        self.report = replace(
            self.report,
            heads=weights.tensors.head_count("q"),
            key_heads=weights.tensors.head_count("k"),
            tokenizer=tokenizer,
            source_pairing=source,
            notes=(*self.warnings, *notes),
        )
        with foreign_errors(f"the model in {str(self.folder)!r} could not be saved"):
            _unpacked(model).save_pretrained(staging)
        advance(self.report.bytes)
        return ()

    def _save_tokenizer(self, staging: Path) -> list[str]:
        """Save the tokenizer of the file; return what was done, and notes on how the saved one differs."""
        try:
            tokenizer = load_tokenizer(self.folder)
            tokenizer.save_pretrained(staging)
            saved = load_tokenizer(staging)
        except RopeExtError as error:
            missing = f"no tokenizer was written: {one_line(error)}"
            return ["none was written", f"{missing}; copy one from the model that the file was made from"]
        before, after = (each(_TEXT)["input_ids"] for each in (tokenizer, saved))
        written = "tokenizer.json written by transformers from the tokens in the GGUF file"
        if before == after:
            return [written]
        return [
            written,
            "the saved tokenizer splits a text otherwise than the one in the file: copy tokenizer.json and "
            "tokenizer_config.json from the model that the file was made from",
        ]

    def verify(self, staging: Path) -> str:
        assert self.model is not None  # `write` has loaded it
        free = psutil.virtual_memory().available
        if free < _MEMORY * self.report.bytes:
            return f"not compared: that takes {size_text(round(_MEMORY * self.report.bytes))} more of memory"
        saved = load_model(staging, device="cpu")
        expected, tensors = self.model.state_dict(), saved.state_dict()
        for name, tensor in expected.items():
            if name not in tensors or not torch.equal(tensor, tensors[name]):
                raise CheckpointError(f"verification failed: {name!r} differs from the one in {str(self.folder)!r}")
        ids = torch.arange(3, 35)[None] % vocabulary_size(self.model)
        with torch.no_grad():
            logits, copied = (each(ids, use_cache=False).logits for each in (self.model, saved))
        if not torch.equal(logits, copied):
            raise CheckpointError("verification failed: the logits differ from those of the model in the file")
        return f"{len(expected):,} tensors, and logits, identical to those of the model in the file"


def _unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy of a model that shares its weights and no longer knows that it was quantised."""
    unpacked = copy.copy(model)
    unpacked.config = copy.deepcopy(model.config)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(unpacked)
    return unpacked
