"""Patched models traced and exported, run as by a runtime without 64-bit numbers, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.forward_state import running
from tests.support.dispatch import NarrowRuntime
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference, every_family
from tests.support.models import build, dynamic_cases, logits, static_cases, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # torch.jit reads all attributes
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # torch's own, in run_decompositions
]
REMAPPING = [name for name, cls in rope.list_methods().items() if issubclass(cls, RemappingMethod)]


class Logits(nn.Module):
    """The logits of a model for token ids, and for a second input that has this name."""

    def __init__(self, model: nn.Module, second: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.second = second

    def forward(self, ids: Tensor, *second: Tensor) -> Tensor:
        named = {} if self.second is None else {self.second: second[0]}
        out: Tensor = self.model(input_ids=ids, use_cache=False, **named).logits
        return out


def traced(model: nn.Module, *args: Tensor, second: str | None = None) -> Any:
    return torch.jit.trace(Logits(model, second), args, check_trace=False)  # type: ignore[no-untyped-call]


def exported(model: nn.Module, *args: Tensor, second: str | None = None) -> Any:
    return torch.export.export(Logits(model, second), args).module()


WAYS = {"trace": traced, "export": exported}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
Way = Callable[..., Any]


def run(graph: Any, ids: Tensor) -> Tensor:
    """Return what a graph computes in a runtime without 64-bit numbers."""
    optimized: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
    with torch.no_grad(), optimized(False):
        graph(ids)  # a traced graph is compiled in its first run, which compares constants
        with NarrowRuntime():
            out: Tensor = graph(ids)
    return out


@each_way
@pytest.mark.parametrize("which", static_cases("llama"))
def test_a_static_method_is_that_of_the_native_model(which: str, way: Way) -> None:
    case, ids = static_cases("llama")[which], tokens(LONG)
    model = rope.patch(build("llama"), case.method, **case.params)
    native = logits(build("llama", case.form), ids)
    assert difference(run(way(model, ids), ids), native) <= TOLERANCE
    with NarrowRuntime():  # in which products overflow; without a rotation there are none
        assert (difference(logits(model, ids), native) > CHANGED) is (which != "nope")


@pytest.mark.slow
@pytest.mark.sampled(3)
@each_way
@pytest.mark.parametrize("method", ["yarn", "dca"])
@every_family
def test_a_family(name: str, method: str, way: Way) -> None:
    if name == "gpt_oss" and (method, way) == ("dca", traced):
        pytest.skip("its layers with a window cannot be traced under a remapping method")
    model, ids = rope.patch(build(name), method, target_length=LONG), tokens(LONG)
    expected = logits(model, ids)
    assert difference(run(way(model, ids), ids), expected) <= TOLERANCE


@each_way
@pytest.mark.parametrize("which", dynamic_cases("llama"))
def test_a_length_dependent_method_needs_a_fixed_length(which: str, way: Way) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(150)
    with pytest.raises(LengthError, match=r"with rope_ext_hf\.fixed_length\(model, length\):"):
        way(model, ids)
    assert not list(running())
    with rope.fixed_length(model, LONG):
        graph, expected = way(model, ids), logits(model, ids)
    assert difference(run(graph, ids), expected) <= TOLERANCE


class Continued(nn.Module):
    """The logits of a model for token ids after keys and values of earlier tokens, as converters trace decoding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *keys_and_values: Tensor) -> Tensor:
        cache = DynamicCache()
        for layer, kept in enumerate(zip(keys_and_values[::2], keys_and_values[1::2], strict=True)):
            cache.update(*kept, layer)
        past = keys_and_values[0].shape[-2]
        mask = torch.ones(1, ids.shape[1] + past, dtype=torch.int64)
        out: Tensor = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
        return out


@pytest.mark.parametrize("which", dynamic_cases("llama"))
def test_a_held_length_is_traced_with_keys_that_no_forward_stored(which: str) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(150)
    with rope.fixed_length(model, LONG), torch.no_grad():
        expected = logits(model, ids)
        cache = model(ids[:, :100]).past_key_values
        kept = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        graph = torch.jit.trace(  # type: ignore[no-untyped-call]
            Continued(model), (ids[:, :20], *(torch.randn_like(x[:, :, :7]) for x in kept)), check_trace=False
        )
        assert difference(graph(ids[:, 100:], *kept), expected[:, 100:]) <= TOLERANCE


each_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dca")) for name in REMAPPING]
)


@each_method
def test_a_remapping_method(method: str) -> None:
    """A trace keeps the tiles of its example, which serve shorter inputs as well."""
    model, ids = rope.patch(build("llama"), method), tokens(150)
    expected = logits(model, ids)
    if method != "stairs":  # it reads values
        assert difference(run(exported(model, ids), ids), expected) <= TOLERANCE
    if method in ("dynamic-self-extend", "jet-long"):
        with pytest.raises(UnsupportedModelError, match=r"torch\.jit\.trace"):
            traced(model, ids)
        return
    graph = traced(model, ids)
    for length in (150, 70, 1):
        assert difference(run(graph, ids[:, :length]), logits(model, ids[:, :length])) <= TOLERANCE
    if method != "temperature":
        with pytest.raises(RuntimeError, match=r"200"):
            graph(tokens(200))


@each_method
def test_a_graph_under_a_remapping_method_holds_core_operations(method: str) -> None:
    """ExecuTorch knows no others, and OpenVINO few."""
    if method == "stairs":
        pytest.skip("it reads values")
    model, ids = rope.patch(build("llama"), method), tokens(150)
    program = torch.export.export(Logits(model), (ids,)).run_decompositions()
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    checked = {target for target in called if isinstance(target, torch._ops.OpOverload)}
    assert len(checked) > 10
    others = {target for target in checked if torch.Tag.core not in target.tags}
    assert others <= {torch.ops.aten._assert_tensor_metadata.default}  # exporters drop it


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "tokens"])
@pytest.mark.parametrize("method", ["dca", "temperature"])
def test_a_remapping_method_is_exported_for_one_shape(method: str, dim: int) -> None:
    model, ids = rope.patch(build("llama"), method, target_length=LONG), tokens(100).expand(2, -1)
    shapes = ({dim: torch.export.Dim.DYNAMIC},)
    with pytest.raises(UnsupportedModelError, match=r"without dynamic_shapes or dynamic_axes, or patch it with"):
        torch.export.export(Logits(model), (ids,), dynamic_shapes=shapes)
    assert not list(running())


def test_the_error_of_a_strict_export_names_the_other_way() -> None:
    model, ids = rope.patch(build("llama"), "dca", target_length=LONG), tokens(100)
    with pytest.raises(RuntimeError, match=r"torch\.export takes it with strict=False"):
        torch.export.export(Logits(model), (ids,), strict=True)


@each_way
@pytest.mark.parametrize("method", ["dca", "temperature"])
def test_a_remapping_method_cannot_follow_padding_or_positions(method: str, way: Way) -> None:
    model, ids = rope.patch(build("llama"), method, target_length=LONG), tokens(100)
    counted = torch.arange(100)[None]
    for second, example in (("attention_mask", torch.ones_like(ids)), ("position_ids", counted)):
        with pytest.raises(UnsupportedModelError, match=r"cannot follow an attention_mask or position_ids: export"):
            way(model, ids, example, second=second)
    assert not list(running())
