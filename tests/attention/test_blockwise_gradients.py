"""Gradients through the fused kernels: against dense attention in float64, against whole scores, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.attention import blockwise as attending
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, Rotation, RotationTable, ScoreModifiers, TokenPositions
from rope_ext_hf.methods.dual_chunk import DualChunk
from rope_ext_hf.methods.grouped import JetLong, SelfExtend
from rope_ext_hf.methods.remapping import LeakyReRoPE, RemappingMethod, ReRoPE
from rope_ext_hf.methods.stairs import Stairs
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.contracts import THETA
from tests.support.dispatch import LargestTensor
from tests.support.models import build, tokens
from tests.support.oracles import naive_attention, rotate_to, stored_position

COMMON: dict[str, Any] = {"max_distance": 64, "temperature": "llama4"}
EACH = [
    ReRoPE(window=20, **COMMON),
    LeakyReRoPE(window=20, k=8.0, **COMMON),
    SelfExtend(window=20, group=4, **COMMON),
    JetLong(window=19, group=4, beyond_only=True, **COMMON),
    DualChunk(chunk=24, window=8, **COMMON),
    Stairs(window=16, start=8, chunk=20, **COMMON),
]
each_method = pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)

SITUATIONS: dict[str, dict[str, Any]] = {
    "a whole input, keys shared by heads": {},
    "new tokens after others": {"new": 23},
    "a few tokens after many": {"new": 2, "count": 150},
    "padded rows": {"pads": (0, 7, 40)},
    "rows padded alike": {"pads": (9, 9)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "a sliding window": {"sliding": 13},
    "heads of 12 of whose dims 8 rotate, and values of 6": {"width": 12, "value_width": 6},
}
each_situation = pytest.mark.parametrize("situation", SITUATIONS)


UNMODIFIED = ScoreModifiers()
MODIFIERS = {"softcap": ScoreModifiers(softcap=2.0), "dropout": ScoreModifiers(dropout=0.3)}


class Case:
    """The attention of random queries, keys and values, by `attend` and by its definition.

    Args:
        new: the number of queries, those of the last tokens of `count`.
        pads: padded tokens before the first one of each row.
        width, value_width: dims of a head; 8 of them rotate.
    """

    def __init__(
        self, method: RemappingMethod, new: int | None = None, count: int = 70, pads: tuple[int, ...] = (0,),
        sliding: int | None = None, sinks: Tensor | None = None, width: int = 8, value_width: int = 8,
        ordered: bool = True, dtype: torch.dtype = torch.float64, modifiers: ScoreModifiers = UNMODIFIED,
    ) -> None:  # fmt: skip
        self.method, self.new, self.count, self.pads, self.sliding = method, new or count, count, pads, sliding
        self.ordered, self.dtype, self.modifiers = ordered, dtype, modifiers
        generator = torch.Generator().manual_seed(0)
        shapes = (4, self.new, width), (2, count, width), (2, count, value_width)
        made = [torch.randn(len(pads), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
        self.inputs = [*made, *([] if sinks is None else [sinks])]
        self.weight = torch.randn(len(pads), *shapes[0][:2], value_width, generator=generator, dtype=torch.float64)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the output of `attend`, (rows, heads, tokens, dim), without that of queries at padding."""
        at = torch.stack([torch.arange(self.count) - pad for pad in self.pads]).clamp(min=0)
        real = torch.stack([torch.arange(self.count) >= pad for pad in self.pads])
        first = self.count - self.new
        padding = self.pads if self.ordered else None
        call = TokenPositions(at[:, first:], at, padding, real if any(self.pads) else None)
        stored = torch.tensor([[stored_position(self.method, int(n)) for n in row] for row in at]).double()[:, None]
        query, key = (rotate_to(x, stored[..., -x.shape[2] :], 8, THETA) for x in (query, key))
        rule: Any = self.method if self.sliding is None else LocalAttention(self.sliding, self.method)
        rotation = Rotation(RotationTable(THETA ** (-torch.arange(0, 8, 2).double() / 8)), KeyLayout("half", 0, 8))
        query, key, value = (x.to(self.dtype) for x in (query, key, value))
        modifiers = self.modifiers._replace(sinks=None if sinks is None else sinks.to(self.dtype))
        torch.manual_seed(0)  # of dropout
        out = attend(rule, rotation, call, query, key, value, query.shape[-1] ** -0.5, modifiers)
        return out * real[:, None, first:, None]

    def defined(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Return the same from every score, in float64."""
        rows = []
        for q, k, v, pad in zip(query, key, value, self.pads, strict=True):
            absent = max(0, self.new - (self.count - pad))  # queries at padding
            method = self.method if self.sliding is None else None
            out = naive_attention(
                method, q[:, absent:], k[:, pad:], v[:, pad:], 8, THETA, window=self.sliding, sinks=sinks
            )
            rows.append(torch.cat([out.new_zeros(4, absent, v.shape[-1]), out], dim=1))
        return torch.stack(rows)

    def gradients(self, way: Any) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        return list(torch.autograd.grad((way(*inputs).double() * self.weight).sum(), inputs))


def assert_near(actual: list[Tensor], expected: list[Tensor], relative: float = 1e-5) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() <= relative * theirs.norm()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the other way an error."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("whole scores")

    monkeypatch.setattr(attending._Attention, "_eager", refuse)
    monkeypatch.setattr(attending, "_MAX_QUERY_BLOCK", 30)  # several blocks


@pytest.mark.slow
@each_situation
@each_method
def test_gradients_are_those_of_the_definition(method: RemappingMethod, situation: str, fused: None) -> None:
    case = Case(method, **SITUATIONS[situation])
    assert_near(case.gradients(case.attended), case.gradients(case.defined))


@pytest.mark.slow
@each_situation
@each_method
@pytest.mark.sampled(7)
def test_gradients_are_those_of_finite_differences(method: RemappingMethod, situation: str, fused: None) -> None:
    case = Case(method, **SITUATIONS[situation])
    assert torch.autograd.gradcheck(case.attended, [x.clone().requires_grad_() for x in case.inputs], fast_mode=True)


@pytest.mark.parametrize("modifiers", MODIFIERS.values(), ids=MODIFIERS)
@each_method
def test_gradients_of_whole_scores(method: RemappingMethod, modifiers: ScoreModifiers) -> None:
    """No kernel takes soft caps or dropout: the backward computes blocks of scores anew, and gets the same ones."""
    case = Case(method, modifiers=modifiers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attending.SCORE_BYTES, "cpu", 4 * 4 * 70 * 20)  # blocks of 20 queries
        actual = case.gradients(case.attended)
        patch.setattr(attending, "checkpoint", lambda block, *given, **_: block(*given))  # all blocks are kept
        expected = case.gradients(case.attended)
    unmodified = Case(method)
    for ours, theirs, other in zip(actual, expected, unmodified.gradients(unmodified.attended), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert (ours - other).norm() > 0.01 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_method
def test_both_ways_give_the_same_gradients(method: RemappingMethod, dtype: torch.dtype) -> None:
    case, other = (Case(method, count=150, pads=(0, 11), ordered=ordered, dtype=dtype) for ordered in (True, False))
    expected = other.gradients(other.attended)
    assert_near(case.gradients(case.attended), expected, 1e-5 if dtype == torch.float32 else 0.02)


def test_gradients_of_some_inputs_alone(fused: None) -> None:
    case = Case(EACH[0], sinks=SITUATIONS["sinks"]["sinks"])
    expected = case.gradients(case.attended)
    for i, wanted in enumerate(expected):
        inputs = [x.clone().requires_grad_(i == j) for j, x in enumerate(case.inputs)]
        (case.attended(*inputs) * case.weight).sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(inputs[i].grad, wanted)
        assert [x.grad is None for x in inputs] == [i != j for j in range(4)]


def test_second_derivatives_are_refused() -> None:
    case = Case(EACH[0])
    inputs = [x.clone().requires_grad_() for x in case.inputs]
    loss = (case.attended(*inputs) * case.weight).sum() ** 2
    (first, *_) = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()  # type: ignore[no-untyped-call]


@each_method
@pytest.mark.slow
def test_memory_grows_with_the_length_not_its_square(method: RemappingMethod) -> None:
    kept, largest = [], []
    saved: dict[int, int] = {}
    for count in (600, 1200):
        case = Case(method, count=count, dtype=torch.float32)
        saved.clear()

        def keep(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        inputs = [x.clone().requires_grad_() for x in case.inputs]
        with LargestTensor() as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = case.attended(*inputs)
            out.backward(case.weight.to(out.dtype))  # type: ignore[no-untyped-call]
        kept.append(sum(saved.values()))
        largest.append(counter.elements)
    assert kept[1] <= 2.1 * kept[0]
    assert largest[1] <= 2.1 * largest[0]


def gradients_of(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    labels = ids.masked_fill(mask.roll(1, 1) * mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("padded", [False, True])
@each_method
@pytest.mark.sampled(5)
def test_a_model_with_gradient_checkpoints(method: RemappingMethod, padded: bool, monkeypatch: Any) -> None:
    model = rope.patch(build("llama"), method).train()
    ids = tokens(150, batch=2)
    mask = torch.ones_like(ids)
    mask[1, : 40 * padded] = 0
    once = gradients_of(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients_of(model, ids, mask)
    monkeypatch.setattr(attending, "usable_kernel", lambda *_: (False, False))
    for name, expected in gradients_of(model, ids, mask).items():
        for actual in (once, again):
            assert (actual[name] - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["rerope", pytest.param("dca", marks=pytest.mark.thorough)])
def test_a_compiled_model(name: str) -> None:
    ids, mask = tokens(150, batch=2), torch.ones(2, 150, dtype=torch.int64)
    model: Any = rope.patch(build("llama"), name).train()
    expected = gradients_of(model, ids, mask)
    torch.compiler.reset()
    model.compile(backend="aot_eager")
    for key, actual in gradients_of(model, ids, mask).items():
        torch.testing.assert_close(actual, expected[key], atol=1e-6, rtol=1e-4)
    torch.compiler.reset()
