"""Linear attention with RoPE: equal to its definition in every form, and invariances."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import rope_ext_hf as rope
from rope_ext_hf.tools.modules import LinearAttentionState, linear_attention
from tests.support.oracles import naive_linear_attention

KERNELS = ["elu", "relu", "cosine"]
FORMS = ["chunked", "parallel", "recurrent"]
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "yarn": {"factor": 4},  # has an attention factor
    "llama3": {"factor": 4},
    "dynamic-yarn": {},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

kernels = pytest.mark.parametrize("kernel", KERNELS)


attend: Any = functools.partial(linear_attention, eps=0.01)
"""The eps is larger: relu's denominator can be 0, and a division by 1e-6 makes rounding errors large."""


@dataclass(repr=False)
class Case:
    """Inputs of one call: shapes, method and dtype are drawn, numbers come from a seed."""

    query: Tensor
    key: Tensor
    value: Tensor
    angles: Tensor  # (length, rotated dims / 2) float64
    attention_factor: float
    padding_mask: Tensor | None
    chunk_size: int

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def rotation(self, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin as a rotary module does, with the method's attention factor and all positions shifted."""
        angles = self.angles + shift * (self.angles[1] - self.angles[0] if self.length > 1 else self.angles[0])
        both = torch.cat((angles, angles), -1)
        return both.cos() * self.attention_factor, both.sin() * self.attention_factor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value, *self.rotation()

    def run(self, **options: Any) -> Tensor:
        given = {"padding_mask": self.padding_mask, "chunk_size": self.chunk_size}
        out: Tensor = attend(*self.tensors(), **(given | options))
        return out

    def by_definition(self, kernel: Any, causal: bool, eps: float) -> Tensor:
        rows = []
        for row in range(len(self.query)):
            tokens = torch.ones(self.length, dtype=torch.bool) if self.padding_mask is None else self.padding_mask[row]
            seen = tokens.expand(self.length, -1)
            if causal:
                seen = seen.tril()
            each = (self.query[row], self.key[row], self.value[row])
            out = naive_linear_attention(kernel, *each, self.angles, seen=seen, eps=eps)
            rows.append(out * tokens[:, None])
        return torch.stack(rows)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)) -> Case:
    batch, heads, length = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    pairs, after, value_dim = draw(st.integers(2, 6)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    dtype, method = draw(st.sampled_from(dtypes)), draw(st.sampled_from(sorted(METHODS)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query, key, value = (
        torch.randn(batch, heads, length, dim, generator=random, dtype=torch.float64).to(dtype)
        for dim in (2 * pairs + after, 2 * pairs + after, value_dim)
    )
    mask = torch.rand(batch, length, generator=random) < 0.7 if draw(st.booleans()) else None
    begin = draw(st.integers(0, 500))
    actual = rope.frequencies(method, rope.Rotary(2 * pairs, 1e4, 64), length=256, **METHODS[method])
    angles = torch.arange(begin, begin + length, dtype=torch.float64)[:, None] * actual.inv_freq
    return Case(query, key, value, angles, actual.attention_factor, mask, draw(st.integers(1, 30)))


exact = cases(dtypes=(torch.float64,))


# --- definition and forms -------------------------------------------------------------------------------------------


@pytest.mark.slow
@kernels
@given(case=cases(), causal=st.booleans())
@settings(max_examples=40)
def test_every_form_is_the_definition(kernel: Any, case: Case, causal: bool) -> None:
    eps = 0.01 if case.query.dtype == torch.float64 else 0.1
    expected = case.by_definition(kernel, causal, eps)
    limit = TOLERANCE[case.query.dtype]
    for form in FORMS:
        out = case.run(kernel=kernel, causal=causal, form=form, eps=eps)
        assert out.dtype == case.value.dtype
        torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.slow
@kernels
@given(case=exact, causal=st.booleans())
@settings(max_examples=20)
def test_gradients_of_every_form_are_those_of_the_definition(kernel: Any, case: Case, causal: bool) -> None:
    inputs = [case.query, case.key, case.value]
    for x in inputs:
        x.requires_grad_()
    weights = torch.randn_like(case.value)
    expected = torch.autograd.grad((case.by_definition(kernel, causal, 0.01) * weights).sum(), inputs)
    for form in FORMS:
        out = case.run(kernel=kernel, causal=causal, form=form)
        for mine, theirs in zip(torch.autograd.grad((out * weights).sum(), inputs), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@kernels
@given(case=exact, data=st.data())
@settings(max_examples=25)
def test_a_state_goes_on_where_it_ended(kernel: Any, case: Case, data: st.DataObject) -> None:
    expected = case.run(kernel=kernel)
    state, pieces, begin = LinearAttentionState(), [], 0
    while begin < case.length:
        end = data.draw(st.integers(begin + 1, case.length))
        piece = [x[:, :, begin:end] for x in (case.query, case.key, case.value)]
        turned = [x[begin:end] for x in case.rotation()]
        mask = None if case.padding_mask is None else case.padding_mask[:, begin:end]
        form = data.draw(st.sampled_from(FORMS))
        options: dict[str, Any] = {"kernel": kernel, "padding_mask": mask, "state": state, "form": form}
        pieces.append(attend(*piece, *turned, **options))
        begin = end
    torch.testing.assert_close(torch.cat(pieces, 2), expected, rtol=1e-10, atol=1e-10)
    assert state.length == case.length
    assert state.numerator is not None
    features = case.query.shape[-1] + (kernel == "cosine")
    assert state.numerator.shape == (*case.query.shape[:2], features, case.value.shape[-1])


@pytest.mark.slow
@kernels
@given(case=exact, data=st.data())
@settings(max_examples=25)
def test_later_tokens_change_nothing(kernel: Any, case: Case, data: st.DataObject) -> None:
    end = data.draw(st.integers(1, case.length))
    changed = [x.clone() for x in (case.query, case.key, case.value)]
    for x in changed:
        x[:, :, end:] = 7.0
    out = attend(*changed, *case.rotation(), kernel=kernel, padding_mask=case.padding_mask, chunk_size=case.chunk_size)
    torch.testing.assert_close(out[:, :, :end], case.run(kernel=kernel)[:, :, :end], rtol=1e-10, atol=1e-10)


# --- laws -----------------------------------------------------------------------------------------------------------


@kernels
@given(case=exact, shift=st.integers(-300, 300), causal=st.booleans())
@settings(max_examples=25)
def test_positions_matter_by_their_differences_alone(kernel: Any, case: Case, shift: int, causal: bool) -> None:
    cos, sin = case.rotation(shift)
    moved = attend(
        case.query, case.key, case.value, cos, sin, kernel=kernel, causal=causal, padding_mask=case.padding_mask
    )
    torch.testing.assert_close(moved, case.run(kernel=kernel, causal=causal), rtol=1e-9, atol=1e-9)


def weights_of(case: Case, kernel: Any) -> Tensor:
    """Return the weight of each value, (batch, heads, length, length)."""
    value = torch.eye(case.length, dtype=torch.float64).expand(*case.query.shape[:3], -1)
    return linear_attention(case.query, case.key, value, *case.rotation(), kernel=kernel, eps=1e-30)


@given(case=exact)
@settings(max_examples=40)
def test_weights_of_the_cosine_kernel_are_a_mean(case: Case) -> None:
    weights = weights_of(case, "cosine")
    assert float(weights.min()) >= -1e-12
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["elu", "relu"])
@given(case=exact)
@settings(max_examples=25)
def test_denominators_do_not_turn(kernel: Any, case: Case) -> None:
    """The denominator is that without a rotation, where weights add up to 1; for elu it is above 0."""
    still = [torch.ones_like(case.rotation()[0]), torch.zeros_like(case.rotation()[0])]
    constant = torch.ones_like(case.value)
    plain = linear_attention(case.query, case.key, constant, *still, kernel=kernel, eps=1e-30)
    above = plain > 0.5
    torch.testing.assert_close(plain[above], torch.ones_like(plain[above]))
    assert kernel == "relu" or bool(above.all())
    assert not bool(plain[~above].any())  # relu: no feature of the query is one of a key


def test_rotated_products_of_features_are_no_denominator() -> None:
    """For two tokens half a cycle apart, a rotation changes the sign of the product of their features."""
    one = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    both = torch.tensor([0.0, math.pi], dtype=torch.float64)[:, None].expand(2, 2)
    value = torch.eye(2, dtype=torch.float64).expand(1, 1, 2, 2)
    weights = linear_attention(one, one, value, both.cos(), both.sin(), kernel="relu", eps=1e-30)
    torch.testing.assert_close(weights[0, 0], torch.tensor([[1.0, 0.0], [-0.5, 0.5]], dtype=torch.float64))
    assert weights[0, 0, 1].sum() == pytest.approx(0, abs=1e-12)


@kernels
@given(case=exact, causal=st.booleans())
@settings(max_examples=15)
def test_padding_is_as_if_it_were_not_there(kernel: Any, case: Case, causal: bool) -> None:
    mask = torch.zeros(len(case.query), case.length, dtype=torch.bool)
    mask[:, : (case.length + 1) // 2] = True
    mask = mask[:, torch.randperm(case.length, generator=torch.Generator().manual_seed(case.length))]
    kept = mask[0]
    expected = attend(
        *(x[:, :, kept] for x in (case.query, case.key, case.value)),
        *(x[kept] for x in case.rotation()),
        kernel=kernel,
        causal=causal,
    )
    query, key, value = (x.masked_fill(~kept[:, None], math.nan) for x in (case.query, case.key, case.value))
    query.requires_grad_()
    out = attend(query, key, value, *case.rotation(), kernel=kernel, causal=causal, padding_mask=mask)
    torch.testing.assert_close(out[:, :, kept], expected, rtol=1e-10, atol=1e-10)
    assert not bool(out[:, :, ~kept].any())
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert bool(gradient.isfinite().all())


# --- numbers --------------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("form", FORMS)
def test_nothing_overflows(kernel: Any, form: Any) -> None:
    """Inputs are zeros, where relu's denominator and a norm are 0, and numbers as large as models have."""
    table = rope.RotaryEmbedding("default", rope.Rotary(8, 1e4, 64))
    for scale in (0.0, 1e4, -1e4):
        x = (scale * torch.ones(1, 1, 5, 8)).requires_grad_()
        cos, sin = table(x, torch.arange(5)[None])
        out = linear_attention(x, x, x, cos, sin, kernel=kernel, form=form)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert bool(out.isfinite().all())
        assert bool(gradient.isfinite().all())


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(kernel: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, 8, dtype=dtype) for _ in range(3))
    cos, sin = rope.RotaryEmbedding("default", rope.Rotary(8, 1e4, 64))(query, torch.arange(300)[None])
    inputs = (query, key, value, cos, sin)
    wide = linear_attention(*(x.float() for x in inputs), kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_attention(*inputs, kernel=kernel)
    assert out.dtype == dtype
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.slow
@kernels
def test_work_grows_with_the_length_and_a_step_does_not(kernel: Any) -> None:
    def flops(form: Any, length: int, state: LinearAttentionState | None = None) -> int:
        x = torch.randn(1, 1, length, 16)
        cos, sin = torch.ones(length, 16), torch.zeros(length, 16)
        with FlopCounterMode(display=False) as counter:
            linear_attention(x, x, x, cos, sin, kernel=kernel, form=form, state=state)
        return int(counter.get_total_flops())

    assert flops("chunked", 4096) == 4 * flops("chunked", 1024)
    assert flops("parallel", 4096) > 12 * flops("parallel", 1024)
    state, longer = LinearAttentionState(), LinearAttentionState()
    assert flops("chunked", 4096, longer) > flops("chunked", 64, state)
    assert flops("chunked", 1, state) == flops("chunked", 1, longer)


@kernels
def test_memory_grows_with_the_length(kernel: Any) -> None:
    """Memory is measured by the largest tensor of forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // 4 for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.numbers = max(self.numbers, *sizes, 0)
            return out

    def largest(form: Any, length: int) -> int:
        x = torch.randn(1, 1, length, 16, requires_grad=True)
        cos, sin = torch.ones(length, 16), torch.zeros(length, 16)
        with Largest() as seen:  # type: ignore[no-untyped-call]
            out = linear_attention(x, x, x, cos, sin, kernel=kernel, form=form)
            torch.autograd.backward(out.sum())
        return int(seen.numbers)

    assert largest("chunked", 2048) == 4 * largest("chunked", 512) == 2048 * 64
    assert largest("parallel", 512) == 512**2


@pytest.mark.slow
def test_it_compiles_in_one_graph(fresh_compiler: None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 70, 8) for _ in range(3))
    cos, sin = rope.RotaryEmbedding("default", rope.Rotary(8, 1e4, 64))(query, torch.arange(70)[None])
    compiled = torch.compile(linear_attention, backend="eager", fullgraph=True)
    expected = linear_attention(query, key, value, cos, sin, kernel="cosine")
    torch.testing.assert_close(compiled(query, key, value, cos, sin, kernel="cosine"), expected)


# --- refusals -------------------------------------------------------------------------------------------------------


def held(kernel: Any = "elu", dim: int = 8) -> LinearAttentionState:
    return LinearAttentionState(kernel, 3, torch.zeros(1, 2, dim, 8), torch.zeros(1, 2, dim))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "exp"}, "kernel must be one of elu, relu, cosine; got 'exp'"),
        ({"form": "serial"}, "form must be one of chunked, parallel, recurrent; got 'serial'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 token, got 0"),
        ({"query": torch.ones(2, 5, 8)}, r"query must be \(batch, heads, length, head_dim\), got \(2, 5, 8\)"),
        ({"key": torch.ones(1, 1, 5, 8)}, r"must have the shape of query.*\(1, 1, 5, 8\)"),
        ({"value": torch.ones(1, 2, 4, 8)}, r"differ only in its last dimension.*\(1, 2, 4, 8\)"),
        ({"cos": torch.ones(4, 8)}, r"cos and sin must have one shape, got \(4, 8\) and \(5, 8\)"),
        ({"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}, r"cos and sin must both be \(5, rotated\)"),
        ({"padding_mask": torch.ones(1, 5)}, r"padding_mask must be bool \(1, 5\).*torch.float32"),
        ({"padding_mask": torch.ones(1, 4, dtype=torch.bool)}, r"got torch.bool \(1, 4\)"),
        ({"state": held(), "causal": False}, "use causal=True"),
        ({"state": held("relu")}, "kernel 'relu', and cannot be continued with 'elu'"),
        ({"state": held(dim=6)}, r"the state has the shape \(1, 2, 6, 8\).*need \(1, 2, 8, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    x, cos = torch.ones(1, 2, 5, 8), torch.ones(5, 8)
    whole = {"query": x, "key": x, "value": x, "cos": cos, "sin": cos} | options
    with pytest.raises(ValueError, match=message):
        linear_attention(**whole)
