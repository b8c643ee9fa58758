"""apply_rotary_pos_emb and NTKAwareRoPE against complex numbers, and the laws of rotations."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf import NTKAwareRoPE, Rotary, RotaryEmbedding, apply_rotary_pos_emb
from rope_ext_hf.errors import MethodError, RopeExtError
from tests.support.oracles import (
    ntk,
    plain,
)
from tests.support.rotary_examples import (
    AT,
    BOUND,
    DTYPES,
    REACH,
    SMALL,
    STATIC,
    cos_sin,
    emptied,
    half,
    llama_rotary,
    worst,
)

# --- rotation -----------------------------------------------------------------------------------------------------


def naive(x: Tensor, positions: Sequence[int], inv_freq: Sequence[float]) -> Tensor:
    """Rotate x (batch, length, heads, head_dim) pair by pair as complex numbers, in float64."""
    pairs = len(inv_freq)
    turned = x.double().clone()
    for index, position in enumerate(positions):
        for i, frequency in enumerate(inv_freq):
            turn = complex(math.cos(position * frequency), math.sin(position * frequency))
            for batch in range(x.shape[0]):
                for head in range(x.shape[2]):
                    value = complex(float(x[batch, index, head, i]), float(x[batch, index, head, i + pairs])) * turn
                    turned[batch, index, head, i] = value.real
                    turned[batch, index, head, i + pairs] = value.imag
    return turned


def random_x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


class TestApply:
    @pytest.mark.parametrize("batched", [True, False])
    def test_turns_complex_numbers(self, batched: bool) -> None:
        x, positions = random_x(2, 5, 3, 64), [3, 0, 1000, 200_000, 7]
        cos, sin = RotaryEmbedding("default", SMALL)(x, torch.tensor([positions, positions]))
        if not batched:
            cos, sin = cos[0], sin[0]
        actual = apply_rotary_pos_emb(x, cos, sin)
        torch.testing.assert_close(actual.double(), naive(x, positions, plain(SMALL)), rtol=0, atol=1e-5)

    def test_each_row_has_its_own_positions(self) -> None:
        x = random_x(2, 3, 2, 64)
        rows = [[0, 1, 2], [900, 901, 902]]
        actual = apply_rotary_pos_emb(x, *RotaryEmbedding("default", SMALL)(x, torch.tensor(rows)))
        for row, positions in enumerate(rows):
            expected = naive(x[row : row + 1], positions, plain(SMALL))
            torch.testing.assert_close(actual[row : row + 1].double(), expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_transformers_own(self, dtype: torch.dtype) -> None:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_apply

        x, positions = random_x(2, 6, 3, 64, dtype=dtype), AT
        cos, sin = llama_rotary(SMALL)(x, positions)
        theirs, _ = llama_apply(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
        ours = apply_rotary_pos_emb(x, cos, sin)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=0)

    def test_dims_past_the_rotated_ones_stay(self) -> None:
        x, positions = random_x(1, 4, 2, 100), [0, 3, 50, 70]
        actual = apply_rotary_pos_emb(x, *RotaryEmbedding("default", SMALL)(x, torch.tensor([positions])))
        assert actual.shape == x.shape
        assert torch.equal(actual[..., 64:], x[..., 64:])
        expected = naive(x[..., :64], positions, plain(SMALL))
        torch.testing.assert_close(actual[..., :64].double(), expected, rtol=0, atol=1e-5)

    def test_computes_in_the_wider_dtype_and_answers_in_that_of_x(self) -> None:
        x = random_x(1, 6, 2, 64, dtype=torch.bfloat16)
        cos, sin = RotaryEmbedding("default", SMALL, cast=False)(x, AT[:1])
        actual = apply_rotary_pos_emb(x, cos, sin)
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, naive(x, AT[0].tolist(), plain(SMALL)).to(torch.bfloat16))

    def test_x_is_left_alone(self) -> None:
        x = random_x(1, 6, 2, 64)
        before = x.clone()
        apply_rotary_pos_emb(x, *RotaryEmbedding("default", SMALL)(x, AT[:1]))
        assert torch.equal(x, before)

    def test_gradients_turn_back(self) -> None:
        x = random_x(1, 6, 2, 64, dtype=torch.float64).requires_grad_()
        cos, sin = RotaryEmbedding("default", SMALL)(x, AT[:1])
        turned = apply_rotary_pos_emb(x, cos, sin)
        (gradient,) = torch.autograd.grad(turned.square().sum() / 2, x)  # |Rx|^2 / 2, so R^T R x = x
        torch.testing.assert_close(gradient, x.detach(), rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("x", "cos", "sin"),
        [
            ((1, 5, 2, 8), (5, 10), (5, 10)),  # more columns than head_dim
            ((1, 5, 2, 8), (5, 7), (5, 7)),  # an odd number
            ((1, 5, 2, 8), (4, 8), (4, 8)),  # fewer tokens
            ((2, 5, 2, 8), (3, 5, 8), (3, 5, 8)),  # more rows
            ((1, 5, 2, 8), (5, 8), (5, 4)),  # sin is not cos's
            ((1, 5, 2, 8), (5, 8), (5, 1)),
            ((1, 5, 8), (5, 8), (5, 8)),  # no head axis
        ],
    )
    def test_bad_shapes_are_refused(self, x: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
        with pytest.raises((ValueError, RuntimeError)):
            apply_rotary_pos_emb(torch.zeros(x), torch.zeros(cos), torch.zeros(sin))


# --- the standalone module ----------------------------------------------------------------------------------------


class TestNTKAwareRoPE:
    @pytest.mark.parametrize(
        ("head_dim", "length", "k"), [(64, 128, 1), (64, 128, 4), (80, 50, 3), (4, 100, 1.5), (4, 100, 1.15)]
    )
    def test_tables(self, head_dim: int, length: int, k: float) -> None:
        module = NTKAwareRoPE(head_dim, length, base=5e5, k=k)
        reach = round(length * k)  # 100 x 1.15 is 115 positions, though 114.99999999999999 in floating point
        assert module.C.shape == module.S.shape == (reach, head_dim)
        assert module.C.dtype == module.S.dtype == torch.float32
        cos, sin = cos_sin(torch.arange(reach), ntk(Rotary(head_dim, 5e5, length), k))
        assert worst((module.C, module.S), (half(cos), half(sin))) <= BOUND

    @pytest.mark.slow
    def test_long_tables_are_as_exact(self) -> None:
        module = NTKAwareRoPE(4, 1 << 20)
        cos, sin = cos_sin(torch.arange(1 << 20), plain(Rotary(4, 1e4, 1 << 20)))
        assert worst((module.C, module.S), (half(cos), half(sin))) <= BOUND

    def test_tables_are_buffers_that_no_checkpoint_holds(self) -> None:
        module = NTKAwareRoPE(16, 32, k=2)
        assert module.state_dict() == {}
        assert set(dict(module.named_buffers())) == {"C", "S"}
        assert not list(module.parameters())
        module.to(torch.bfloat16)
        assert module.C.dtype == module.S.dtype == torch.bfloat16
        assert module.to("meta").C.device.type == "meta"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_tables_in_another_dtype_are_rounded_once(self, dtype: torch.dtype) -> None:
        module = NTKAwareRoPE(64, 4096, k=2, dtype=dtype, device="cpu")
        assert module.C.dtype == module.S.dtype == dtype
        cos, _ = cos_sin(torch.arange(8192), ntk(Rotary(64, 1e4, 4096), 2))
        assert float((module.C.double() - half(cos)).abs().max()) <= max(torch.finfo(dtype).eps / 2, BOUND)

    def test_device(self) -> None:
        assert NTKAwareRoPE(16, 32, device="meta").C.device.type == "meta"
        assert NTKAwareRoPE(16, 32, device=torch.device("cpu")).C.device.type == "cpu"

    @pytest.mark.parametrize("k", [1, 2, 3.5])
    @pytest.mark.parametrize("offset", [0, 1, 9])
    def test_forward_turns_complex_numbers(self, k: float, offset: int) -> None:
        x = random_x(2, 5, 3, 16)
        actual = NTKAwareRoPE(16, 20, k=k)(x, offset=offset)
        assert actual.shape == x.shape
        expected = naive(x, range(offset, offset + 5), ntk(Rotary(16, 1e4, 20), k))
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forward_answers_in_the_dtype_of_x(self, dtype: torch.dtype) -> None:
        x = random_x(2, 5, 3, 16, dtype=dtype)
        actual = NTKAwareRoPE(16, 32, k=2)(x)
        assert actual.dtype == dtype
        assert actual.device == x.device
        expected = naive(x, range(5), ntk(Rotary(16, 1e4, 32), 2))
        torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)

    def test_forward_is_the_public_function_on_its_tables(self) -> None:
        module, x = NTKAwareRoPE(16, 32, k=2), random_x(2, 5, 3, 16)
        assert torch.equal(module(x, offset=3), rope.apply_rotary_pos_emb(x, module.C[3:8], module.S[3:8]))

    def test_k_of_one_is_plain_rope(self) -> None:
        x = random_x(1, 20, 2, 64)
        plain_cos_sin = llama_rotary(Rotary(64, 1e4, 32))(x, torch.arange(20)[None])
        torch.testing.assert_close(NTKAwareRoPE(64, 32)(x), apply_rotary_pos_emb(x, *plain_cos_sin), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("offsets", [False, True], ids=["one input", "token by token"])
    @pytest.mark.parametrize("dynamic", [True, False])
    @pytest.mark.parametrize(
        ("k", "length", "used"), [(1, 11, 2), (1, 20, 2), (1, 21, 4), (2, 21, 4), (3, 31, 4), (4, 41, 6), (1, 95, 10)]
    )
    def test_beyond_the_tables(self, k: int, length: int, used: int, dynamic: bool, offsets: bool) -> None:
        trained = Rotary(16, 1e4, 10)
        module = NTKAwareRoPE(16, 10, k=k, dynamic=dynamic)
        x = random_x(1, length, 1, 16)
        offset = length - 1 if offsets else 0
        expected = naive(x[:, offset:], range(offset, length), ntk(trained, used))
        torch.testing.assert_close(module(x[:, offset:], offset=offset).double(), expected, rtol=0, atol=1e-5)
        kept = used if dynamic else k
        assert module.k == kept
        assert module.C.shape == module.S.shape == (10 * kept, 16)
        assert set(dict(module.named_buffers())) == {"C", "S"}
        assert module.state_dict() == {}
        short = naive(x[:, :5], range(5), ntk(trained, kept))
        torch.testing.assert_close(module(x[:, :5]).double(), short, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(("k", "length"), [(1, 10), (3, 30), (4, 40), (1.5, 15)])
    def test_up_to_the_tables_nothing_grows(self, k: float, length: int) -> None:
        module = NTKAwareRoPE(16, 10, k=k, dynamic=True)
        x = random_x(1, length, 1, 16)
        expected = naive(x, range(length), ntk(Rotary(16, 1e4, 10), k))
        torch.testing.assert_close(module(x).double(), expected, rtol=0, atol=1e-5)
        assert module.k == k

    def test_growth_keeps_dtype_and_the_tables_of_a_call_alone_are_exact(self) -> None:
        module = NTKAwareRoPE(16, 10, dynamic=True, dtype=torch.float64).to(torch.bfloat16)
        module(random_x(1, 33, 1, 16))
        assert module.C.dtype == module.S.dtype == torch.bfloat16
        assert module.C.shape == (40, 16)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"head_dim": 15}, "15"),
            ({"head_dim": 2}, "2"),
            ({"head_dim": 0}, "0"),
            ({"max_seq_len": 0}, "0"),
            ({"base": 1.0}, "1.0"),
            ({"base": math.nan}, "nan"),
            ({"k": 0.5}, "0.5"),
            ({"k": 0}, "0"),
            ({"k": math.nan}, "nan"),
            ({"k": math.inf}, "inf"),
            ({"dtype": torch.int64}, "int64"),
        ],
    )
    def test_impossible_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(MethodError, match=message):
            NTKAwareRoPE(**{"head_dim": 16, "max_seq_len": 32} | arguments)

    @pytest.mark.parametrize("shape", [(2, 5, 16), (2, 5, 3, 8), (2, 5, 3, 1, 16)])
    def test_an_x_of_another_shape_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="16") as caught:
            NTKAwareRoPE(16, 32)(torch.zeros(shape))
        assert str(tuple(shape)) in str(caught.value)

    def test_a_negative_offset_is_refused(self) -> None:
        with pytest.raises(RopeExtError, match="-1"):
            NTKAwareRoPE(16, 32)(torch.zeros(1, 5, 1, 16), offset=-1)

    @pytest.mark.parametrize(
        "life",
        [
            copy.deepcopy,
            lambda module: pickle.loads(pickle.dumps(module)),
            lambda module: emptied(copy.deepcopy(module).to("meta")),
        ],
        ids=["deepcopy", "pickle", "to meta and back"],
    )
    def test_values_survive(self, life: Callable[[nn.Module], nn.Module]) -> None:
        module, x = NTKAwareRoPE(16, 32, k=2, dynamic=True), random_x(1, 70, 1, 16)
        assert torch.equal(life(module)(x), module(x))
        assert torch.equal(life(module)(x[:, :5]), module(x[:, :5]))


# --- laws ---------------------------------------------------------------------------------------------------------

law = settings(max_examples=40, deadline=None, database=None, derandomize=True)
some_positions = st.integers(0, REACH // 2 - 1)
some_methods = st.sampled_from([(name, params) for name, params, _, warmth in STATIC if warmth == 1.0])


def turn(x: Tensor, position: int, which: tuple[str, dict[str, Any]]) -> Tensor:
    """Rotate x (64,) to a position, in float64, by angles that are exact to the bound."""
    name, params = which
    x = x.double().view(1, 1, 1, -1)
    cos, sin = RotaryEmbedding(name, SMALL, **params)(x, torch.tensor([[position]]))
    return apply_rotary_pos_emb(x, cos, sin).flatten()


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    both = both / both.norm(dim=-1, keepdim=True)
    return both[0], both[1]


@law
@given(position=st.integers(0, REACH - 1), seed=st.integers(0, 1000), which=some_methods)
def test_rotation_keeps_norms(position: int, seed: int, which: tuple[str, dict[str, Any]]) -> None:
    x, _ = vectors(seed)
    assert float(turn(x, position, which).norm()) == pytest.approx(1, abs=2 * BOUND)


@law
@given(m=some_positions, n=some_positions, seed=st.integers(0, 1000), which=some_methods)
def test_rotations_add(m: int, n: int, seed: int, which: tuple[str, dict[str, Any]]) -> None:
    x, _ = vectors(seed)
    twice, once = turn(turn(x, m, which), n, which), turn(x, m + n, which)
    torch.testing.assert_close(twice, once, rtol=0, atol=6 * BOUND)
    assert float((twice - turn(x, m + n + 1, which)).abs().max()) > 1e-3  # one position more is another rotation


@law
@given(m=some_positions, n=some_positions, shift=some_positions, seed=st.integers(0, 1000), which=some_methods)
def test_scores_depend_on_the_distance_alone(
    m: int, n: int, shift: int, seed: int, which: tuple[str, dict[str, Any]]
) -> None:
    q, k = vectors(seed)
    here = float(turn(q, m, which) @ turn(k, n, which))
    there = float(turn(q, m + shift, which) @ turn(k, n + shift, which))
    assert here == pytest.approx(there, abs=8 * BOUND)
