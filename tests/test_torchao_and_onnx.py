"""Models quantised by torchao, and patched models as ONNX files and in OpenVINO.

`nox -s exports` installs them beside the environment: with torchao in it, every import of PEFT takes seconds longer.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference
from tests.support.models import THETA, TRAINED, build, logits, static_cases, tokens

pytestmark = pytest.mark.filterwarnings("default")  # both libraries warn of their own future
NATIVE = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": TRAINED}


def quantised(config: str, model: Any | None = None) -> Any:
    """A model whose linear layers torchao has quantised by one of its configs."""
    quantization = pytest.importorskip("torchao.quantization")
    model = build("llama") if model is None else model
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def test_a_patch_is_that_of_the_native_model() -> None:
    """With activations quantised as well, rounding errors of the angles could become steps of an int8."""
    model, ids = quantised("Int8WeightOnlyConfig"), tokens(LONG)
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=4)
    assert "Int8" in type(model.model.layers[0].self_attn.q_proj.weight).__name__
    native = quantised("Int8WeightOnlyConfig", build("llama", NATIVE))
    assert difference(logits(model, ids), logits(native, ids)) <= TOLERANCE
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
class TestQuantised:
    @pytest.mark.parametrize("method", ["dynamic-yarn", "dca", "self-extend"])
    def test_it_may_be_patched_before_or_after(self, config: str, method: str) -> None:
        ids = tokens(LONG)
        after = rope.patch(quantised(config), method)
        before = quantised(config, rope.patch(build("llama"), method))
        assert difference(logits(after, ids), logits(before, ids)) <= TOLERANCE
        assert difference(logits(after, ids), logits(quantised(config), ids)) > CHANGED

    def test_conversion_is_refused(self, config: str) -> None:
        model = quantised(config)
        before = copy.deepcopy(model.config.to_dict())
        with pytest.raises(rope.CheckpointError, match=r"is packed \(\w*Int8\w*\); convert the checkpoint before"):
            rope.convert(model, "interleaved")
        assert "is packed or sharded" in str(rope.detect_pairing(model).reason)
        assert model.config.to_dict() == before


def test_a_quantised_folder_loads_patched(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    build("llama").save_pretrained(tmp_path / "plain")
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    rope.patch(model, "dca", target_length=LONG)
    model.save_pretrained(tmp_path / "patched")
    loaded = rope.from_pretrained(tmp_path / "patched")
    assert rope.describe(loaded).method == "dca"
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    with pytest.raises(rope.CheckpointError, match="so its rows cannot be reordered"):
        rope.convert_checkpoint(tmp_path / "patched", tmp_path / "converted", "interleaved")


class Logits(nn.Module):
    """The logits of a model for token ids (1, length), of a length that varies or does not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return out


@pytest.mark.parametrize(
    ("method", "params", "varies", "lengths"),
    [("yarn", {"factor": 4}, True, (LONG // 3, LONG)), ("dca", {"target_length": LONG}, False, (LONG,))],
)
def test_onnx_computes_the_same(
    method: str, params: dict[str, Any], varies: bool, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    model = rope.patch(build("llama"), method, **params)
    shapes = ({1: torch.export.Dim("length", min=2, max=4 * LONG)},) if varies else None
    program = torch.onnx.export(Logits(model), (tokens(LONG),), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(tmp_path / "model.onnx")
    evaluator = reference.ReferenceEvaluator(onnx.load(tmp_path / "model.onnx"))
    for length in lengths:
        out = evaluator.run(None, {evaluator.input_names[0]: tokens(length).numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(out), logits(model, tokens(length)), atol=1e-4, rtol=0)


class MaskedLogits(nn.Module):
    """The logits of a model for token ids, a padding mask and positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        out: Tensor = self.model(**inputs, use_cache=False).logits
        return out


def converted(model: nn.Module, way: str, folder: Path) -> Any:
    """Return the OpenVINO model of a model, for inputs of any length."""
    openvino = pytest.importorskip("openvino")
    example = tokens(40), torch.ones(1, 40, dtype=torch.int64), torch.arange(40)[None]
    if way == "trace":  # that of OpenVINO's own converter
        return openvino.convert_model(MaskedLogits(model), example_input=example)
    length = torch.export.Dim("length", min=2, max=4 * LONG)
    shapes = ({1: length},) * 3
    if way == "export":
        return openvino.convert_model(torch.export.export(MaskedLogits(model), example, dynamic_shapes=shapes))
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(MaskedLogits(model), example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(folder / "model.onnx")
    return openvino.convert_model(folder / "model.onnx")


@pytest.mark.parametrize(
    ("which", "way"),
    [(which, way) for which in static_cases("llama") for way in ("trace", "onnx")] + [("yarn", "export")],
)
def test_openvino_computes_the_same(which: str, way: str, tmp_path: Path) -> None:
    """Its CPU plugin has no 64-bit integers, and computes int64 products in 32 bits."""
    case = static_cases("llama")[which]
    model = rope.patch(build("llama", num_hidden_layers=1), case.method, **case.params)
    graph = converted(model, way, tmp_path)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    run = pytest.importorskip("openvino").Core().compile_model(graph, "CPU", exact)
    native = build("llama", case.form, num_hidden_layers=1)
    for length, first in ((LONG // 3, 0), (LONG, 0), (50, 100_000)):
        ids, positions = tokens(length), torch.arange(first, first + length)[None]
        out = run([ids.numpy(), torch.ones_like(ids).numpy(), positions.numpy()])[0]
        # Scores depend on distances alone, and transformers' own float32 angles lose accuracy at far positions.
        torch.testing.assert_close(torch.from_numpy(out), logits(native, ids), atol=1e-4, rtol=0)
