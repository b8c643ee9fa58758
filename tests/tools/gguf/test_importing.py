"""A GGUF file becomes a folder that plain transformers loads as the same model, in the pairing that its class runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, MethodError
from tests.support.models import logits, tokens
from tests.tools.support.gguf_models import write_llama

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "small.gguf"


@pytest.fixture
def model(file: Path) -> LlamaForCausalLM:
    """The model that is in `file`."""
    return write_llama(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_transformers_loads_the_same_model(dtype: str, file: Path, model: LlamaForCausalLM) -> None:
    out = file.with_name("out")
    report = rope.convert_checkpoint(file, out, "half", dequantize=dtype, verify=True)
    assert "identical to those of the model in the file" in str(report.verified)
    assert "and the weights agree" in report.source_pairing
    assert not report.notes
    assert "unpacked; " in str(report)
    copy: Any = AutoModelForCausalLM.from_pretrained(out)
    assert copy.dtype == getattr(torch, dtype)
    assert not hasattr(copy.config, "quantization_config")
    for name, tensor in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor.to(copy.dtype))
    ids = tokens(40) % 250
    if dtype == "float32":
        assert torch.equal(logits(copy, ids), logits(model, ids))
    assert AutoTokenizer.from_pretrained(out)("thx y").input_ids[0] == 259
    assert rope.detect_pairing(out).pairing == rope.detect_pairing(file).pairing == "half"
    saved = rope.from_pretrained(out, "yarn", factor=2.0)
    saved.save_pretrained(file.with_name("patched"))
    assert rope.describe(rope.from_pretrained(file.with_name("patched"))).method == "yarn"


def test_the_scaling_of_a_file_is_kept(file: Path) -> None:
    write_llama(file, keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 256})
    out = file.with_name("out")
    rope.convert_checkpoint(file, out, "half", dequantize="float32")
    assert not rope.fingerprint(file).differences(rope.fingerprint(out))
    assert rope.describe(rope.from_pretrained(out)).method == "yarn"


def test_what_cannot_be_written_is_an_error(
    file: Path, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    line = f"`rope-ext convert {file} {out} --to hf --dequantize bfloat16`"
    with pytest.raises(CheckpointError, match="GGUF file") as caught:
        rope.convert_checkpoint(file, out, "half")
    assert line in str(caught.value)
    with pytest.raises(
        CheckpointError, match=r"written as half: .*--to half --dequantize float16`, then .*interleaved"
    ):
        rope.convert_checkpoint(file, out, "interleaved", dequantize="float16")
    with pytest.raises(CheckpointError, match="leave out the source pairing"):
        rope.convert_checkpoint(file, out, "half", dequantize="float16", source_pairing="interleaved")
    with pytest.raises(MethodError, match="unknown dtype 'int4'"):
        rope.convert_checkpoint(file, out, "half", dequantize="int4")
    with pytest.raises(CheckpointError, match="dequantize is for GGUF files"):
        rope.convert_checkpoint("reference", out, "interleaved", dequantize="float16")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(CheckpointError, match=r"takes .* of memory, and 1\.0 kB are free"):
        rope.convert_checkpoint(file, out, "half", dequantize="float32")
    assert not out.exists()


def test_detection_reads_a_text(file: Path, model: LlamaForCausalLM) -> None:
    report = rope.detect_pairing(file, text="so many words. " * 400)
    assert report.text is not None
    assert report.path == str(file)
