"""The rotary modules: accuracy at any position and in any dtype, survival of what is done to models, exact rotation."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import random
import shutil
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
from tests.dispatch import HostReads
from tests.oracles import (
    by_cycles,
    divided,
    dynamic_ntk_alpha,
    llama3,
    longrope_attention_factor,
    ntk,
    plain,
    rising_divisors,
)

BOUND = 1e-6  # on cos and sin, before the cast to the model's dtype
REACH = 1 << 24  # below which it holds

SMALL = Rotary(dim=64, theta=1e4, trained_length=256)


# --- an independent float64 reference -----------------------------------------------------------------------------


def cos_sin(positions: Tensor, inv_freq: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """float64 (..., length, dim // 2). p x f is within 2e-9 rad of the true angle at p = 2^24."""
    angle = positions.to(torch.float64)[..., None] * torch.as_tensor(inv_freq, dtype=torch.float64)
    return angle.cos(), angle.sin()


def positions_to_check() -> Tensor:
    rng = random.Random(0)
    edges = [
        0,
        1,
        2,
        255,
        256,
        4095,
        32768,
        131071,
        131072,
        1 << 20,
        (1 << 20) + 1,
        (1 << 23) - 1,
        REACH - 2,
        REACH - 1,
    ]
    return torch.tensor([edges + [rng.randrange(REACH) for _ in range(200)]])


def worst(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return max(float((left.double() - right).abs().max()) for left, right in zip(actual, expected, strict=True))


# (method, parameters, what the paper says, attention factor); every one static
STATIC: list[tuple[str, dict[str, Any], Callable[[Rotary], list[float]], float]] = [
    ("default", {}, plain, 1.0),
    ("linear", {"factor": 8}, lambda r: [value / 8 for value in plain(r)], 1.0),
    ("theta", {"theta": 5e6}, lambda r: plain(Rotary(r.dim, 5e6, r.trained_length)), 1.0),
    ("ntk", {"factor": 8}, lambda r: ntk(r, 8), 1.0),
    ("llama3", {"factor": 8}, lambda r: llama3(r, 8), 1.0),
    ("yarn", {"factor": 8, "ramp": "turns"}, lambda r: by_cycles(r, 8, 1, 32), 0.1 * math.log(8) + 1),
    ("by-parts", {"factor": 3, "ramp": "turns"}, lambda r: by_cycles(r, 3, 1, 32), 1.0),
]
static = pytest.mark.parametrize(("method", "params", "formula", "warmth"), STATIC, ids=[entry[0] for entry in STATIC])

# (method, parameters, alpha or s of the ratio L / L0)
DEPENDENT: list[tuple[str, dict[str, Any]]] = [
    ("dynamic-ntk", {"growth": "paper"}),
    ("dynamic-ntk", {"growth": "hf", "factor": 4}),
    ("dynamic-ntk", {"growth": "even"}),
    ("dynamic-ntk", {"growth": "pow2"}),
    ("dynamic-yarn", {"ramp": "turns"}),
    ("longrope", {"short_factor": rising_divisors(SMALL, 2), "long_factor": rising_divisors(SMALL, 9), "factor": 4}),
]
dependent = pytest.mark.parametrize(
    ("method", "params"), DEPENDENT, ids=[f"{name}-{params.get('growth', '')}" for name, params in DEPENDENT]
)


def at_length(method: str, params: dict[str, Any], length: int) -> tuple[list[float], float]:
    """Inverse frequencies and attention factor of a length-dependent method on SMALL."""
    ratio = length / SMALL.trained_length
    grown = max(1.0, ratio)
    if method == "dynamic-yarn":
        return by_cycles(SMALL, grown, 1, 32), 0.1 * math.log(grown) + 1
    if method == "longrope":
        chosen = params["long_factor" if ratio > 1 else "short_factor"]
        return divided(SMALL, chosen), longrope_attention_factor(SMALL, params["factor"])
    growth = {"growth": params["growth"], "ratio": ratio, "factor": params.get("factor", 1)}
    return ntk(SMALL, dynamic_ntk_alpha(**growth)), 1.0


def half(columns: Tensor) -> Tensor:
    return torch.cat((columns, columns), dim=-1)


def llama_rotary(rotary: Rotary) -> nn.Module:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(config_for(LlamaConfig, rotary))
    assert isinstance(module, nn.Module)
    return module


def config_for(kind: Any, rotary: Rotary, **more: Any) -> Any:
    return kind(
        hidden_size=2 * rotary.dim,
        num_attention_heads=2,
        head_dim=rotary.dim,
        max_position_embeddings=rotary.trained_length,
        rope_parameters={"rope_type": "default", "rope_theta": rotary.theta},
        **more,
    )


# --- accuracy -----------------------------------------------------------------------------------------------------


class TestAccuracy:
    @static
    @pytest.mark.parametrize(
        ("dim", "theta"), [(128, 1e4), (64, 5e5), (80, 1e6), (2, 1e4), (256, 1e7)], ids=lambda value: f"{value:g}"
    )
    def test_at_every_position_below_2_to_the_24(
        self, method: str, params: dict[str, Any], formula: Callable[[Rotary], list[float]], warmth: float, dim: int,
        theta: float,
    ) -> None:  # fmt: skip
        rotary = Rotary(dim, theta, 4096)
        if method == "ntk" and dim == 2:
            pytest.skip("the exponent d/(d-2) of NTK needs four dims")
        positions = positions_to_check()
        cos, sin = RotaryEmbedding(method, rotary, layout="bare", **params)(torch.zeros(1), positions)
        assert cos.dtype == sin.dtype == torch.float32
        assert worst((cos / warmth, sin / warmth), cos_sin(positions, formula(rotary))) <= BOUND

    @static
    @pytest.mark.parametrize(
        "move",
        [
            lambda module: module.to(torch.bfloat16),
            lambda module: module.half(),
            lambda module: module.double(),
            lambda module: module.bfloat16().float(),
            lambda module: nn.Sequential(nn.Linear(2, 2), module).to(torch.bfloat16)[1],
        ],
        ids=["bf16", "half", "double", "bf16-and-back", "inside-a-model"],
    )
    def test_whatever_dtype_the_model_was_moved_to(
        self, method: str, params: dict[str, Any], formula: Callable[[Rotary], list[float]], warmth: float,
        move: Callable[[nn.Module], nn.Module],
    ) -> None:  # fmt: skip
        rotary = Rotary(128, 1e4, 4096)
        positions = positions_to_check()
        module = move(RotaryEmbedding(method, rotary, **params))
        cos, sin = module(torch.zeros(1, dtype=torch.float32), positions)
        expected = cos_sin(positions, formula(rotary))
        assert worst((cos / warmth, sin / warmth), (half(expected[0]), half(expected[1]))) <= BOUND

    @dependent
    def test_of_length_dependent_methods(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, layout="bare", **params).to(torch.bfloat16)
        for length in (200, 256, 257, 5000, 1 << 20, REACH):
            positions = torch.tensor([[0, 1, length // 3, length // 2, length - 2, length - 1]])
            inv_freq, warmth = at_length(method, params, length)
            cos, sin = module(torch.zeros(1), positions)
            assert worst((cos / warmth, sin / warmth), cos_sin(positions, inv_freq)) <= BOUND, length

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_low_precision_x_rounds_the_result_alone(self, dtype: torch.dtype) -> None:
        positions = positions_to_check()
        module = RotaryEmbedding("yarn", SMALL, factor=8, ramp="turns").to(dtype)
        warmth = 0.1 * math.log(8) + 1
        for got, exact in zip(
            module(torch.zeros(1, dtype=dtype), positions), cos_sin(positions, by_cycles(SMALL, 8, 1, 32)), strict=True
        ):
            assert got.dtype == dtype
            # half a unit in the last place of a number below 2, plus what float32 may be off by
            assert float((got.double() - half(exact) * warmth).abs().max()) <= torch.finfo(dtype).eps / 2 + 2 * BOUND

    def test_int32_positions_do_as_well(self) -> None:
        positions = positions_to_check()
        module = RotaryEmbedding("default", SMALL)
        for left, right in zip(module(torch.zeros(1), positions.int()), module(torch.zeros(1), positions), strict=True):
            assert torch.equal(left, right)

    def test_a_frequency_of_half_a_turn(self) -> None:
        """The one fraction of a turn that signed fixed point cannot hold exactly; and whole turns, which vanish."""
        rotary = Rotary(dim=4, theta=1e4, trained_length=256)
        for turns in (0.5, 1.5, 1.0, 2.0):
            factors = [1 / (2 * math.pi * turns), 1.0]
            module = RotaryEmbedding("factors", rotary, layout="bare", factors=factors)
            positions = torch.tensor([[0, 1, 2, 3, 1001]])
            cos, sin = module(torch.zeros(1), positions)
            exact = [math.cos(2 * math.pi * turns * (p % 2)) for p in positions[0].tolist()]
            torch.testing.assert_close(
                cos[0, :, 0].double(), torch.tensor(exact, dtype=torch.float64), rtol=0, atol=BOUND
            )
            assert float(sin[0, :, 0].abs().max()) <= BOUND

    def test_pairs_that_do_not_turn(self) -> None:
        rotary = Rotary(dim=16, theta=1e4, trained_length=256, rotated_pairs=3)
        positions = positions_to_check()
        cos, sin = RotaryEmbedding("ntk", rotary, factor=4, layout="bare")(torch.zeros(1), positions)
        assert (cos[..., 3:] == 1).all()
        assert (sin[..., 3:] == 0).all()
        assert worst((cos[..., :3], sin[..., :3]), cos_sin(positions, ntk(rotary, 4)[:3])) <= BOUND

    def test_the_stock_module_fails_this_bound(self) -> None:
        """So the tests above can fail: float32 angles at 131k, and frequencies rounded by `.to(bfloat16)`."""
        rotary = Rotary(128, 1e4, 4096)
        positions = torch.tensor([list(range(131_072 - 64, 131_072))])
        cos, sin = cos_sin(positions, plain(rotary))
        stock = llama_rotary(rotary)
        assert worst(stock(torch.zeros(1), positions), (half(cos), half(sin))) > 1000 * BOUND
        assert worst(stock.to(torch.bfloat16)(torch.zeros(1), positions), (half(cos), half(sin))) > 1.0
        assert worst(RotaryEmbedding("default", rotary)(torch.zeros(1), positions), (half(cos), half(sin))) <= BOUND


# --- what a model expects -----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AT = torch.tensor([[0, 1, 2, 3, 17, 255], [5, 4, 3, 2, 1, 0]])


class TestOutput:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", ["half", "interleaved", "bare"])
    def test_follows_the_dtype_of_x(self, layout: Any, dtype: torch.dtype) -> None:
        x = torch.zeros(2, 6, 8, dtype=dtype)
        for part in RotaryEmbedding("default", SMALL, layout=layout)(x, AT):
            assert part.dtype == dtype
            assert part.shape == (2, 6, 32 if layout == "bare" else 64)
        for part in RotaryEmbedding("default", SMALL, layout=layout, cast=False)(x, AT):
            assert part.dtype == torch.float32

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_complex_is_complex64_for_every_x(self, dtype: torch.dtype) -> None:
        turned = RotaryEmbedding("default", SMALL, layout="complex")(torch.zeros(1, dtype=dtype), AT)
        assert turned.dtype == torch.complex64
        assert turned.shape == (2, 6, 32)

    @pytest.mark.parametrize(("method", "params"), [(name, params) for name, params, _, _ in STATIC] + DEPENDENT)
    def test_layouts_agree(self, method: str, params: dict[str, Any]) -> None:
        by_layout: dict[str, Any] = {}
        for layout in ("half", "interleaved", "bare", "complex"):
            by_layout[layout] = RotaryEmbedding(method, SMALL, layout=layout, **params)(torch.zeros(1), AT * 100)
        for part, bare in enumerate(by_layout["bare"]):
            assert torch.equal(by_layout["half"][part][..., :32], bare)
            assert torch.equal(by_layout["half"][part][..., 32:], bare)
            assert torch.equal(by_layout["interleaved"][part][..., 0::2], bare)
            assert torch.equal(by_layout["interleaved"][part][..., 1::2], bare)
        assert torch.equal(by_layout["complex"].real, by_layout["bare"][0])
        assert torch.equal(by_layout["complex"].imag, by_layout["bare"][1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("home", "config", "module", "layout", "cast"),
        [
            ("llama", "LlamaConfig", "LlamaRotaryEmbedding", "half", True),
            ("cohere", "CohereConfig", "CohereRotaryEmbedding", "interleaved", True),
            ("gpt_oss", "GptOssConfig", "GptOssRotaryEmbedding", "bare", True),
            ("deepseek_v2", "DeepseekV2Config", "DeepseekV2RotaryEmbedding", "complex", True),
            ("olmo", "OlmoConfig", "OlmoRotaryEmbedding", "half", False),
        ],
    )
    def test_takes_the_place_of_transformers_own(
        self, home: str, config: str, module: str, layout: Any, cast: bool, dtype: torch.dtype
    ) -> None:
        from importlib import import_module

        configs = import_module(f"transformers.models.{home}.configuration_{home}")
        modules = import_module(f"transformers.models.{home}.modeling_{home}")
        more = {"qk_rope_head_dim": SMALL.dim} if home == "deepseek_v2" else {}
        stock = getattr(modules, module)(config_for(getattr(configs, config), SMALL, **more))
        x = torch.zeros(2, 6, 8, dtype=dtype)
        theirs, ours = stock(x, AT), RotaryEmbedding("default", SMALL, layout=layout, cast=cast)(x, AT)
        # float32 angles are off by 2e-5 at position 255; of a bf16 result one rounding may go the other way
        atol = torch.finfo(dtype).eps if cast and layout != "complex" and dtype == torch.bfloat16 else 4e-5
        if layout == "complex":
            theirs, ours = (theirs.real, theirs.imag), (ours.real, ours.imag)
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=atol)  # checks dtype and shape too

    def test_attention_factor_multiplies_cos_and_sin(self) -> None:
        warm = RotaryEmbedding("factors", SMALL, factors=[1.0] * 32, attention_factor=1.5)(torch.zeros(1), AT)
        cold = RotaryEmbedding("default", SMALL)(torch.zeros(1), AT)
        for left, right in zip(warm, cold, strict=True):
            torch.testing.assert_close(left, 1.5 * right, rtol=1e-6, atol=1e-7)

    def test_nothing_to_differentiate(self) -> None:
        x = torch.zeros(2, 6, 8, requires_grad=True)
        assert not any(part.requires_grad for part in RotaryEmbedding("default", SMALL)(x, AT))

    def test_bad_settings_are_refused_when_the_module_is_made(self) -> None:
        with pytest.raises(MethodError, match="yarn"):
            RotaryEmbedding("yarm", SMALL, factor=2)
        with pytest.raises(TypeError, match="factor"):
            RotaryEmbedding(RotaryEmbedding("yarn", SMALL, factor=2).method, SMALL, factor=2)
        with pytest.raises(MethodError, match=r"32.*31"):
            RotaryEmbedding("factors", SMALL, factors=[1.0] * 31)

    def test_an_unknown_layout_is_refused(self) -> None:
        with pytest.raises(ValueError, match="hafl"):
            RotaryEmbedding("default", SMALL, layout="hafl")  # type: ignore[arg-type]

    def test_repr_says_what_it_is(self) -> None:
        text = repr(RotaryEmbedding("yarn", SMALL, factor=8, layout="interleaved"))
        assert all(word in text for word in ("yarn", "factor=8", "theta=10000", "interleaved"))


# --- what is done to models ---------------------------------------------------------------------------------------


def emptied(module: Any) -> Any:
    """`to_empty` that fills what it leaves uninitialised: NaN, or the largest integer, rather than lucky leftovers."""
    torch.use_deterministic_algorithms(True)
    try:
        return module.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def made_on_meta(module: RotaryEmbedding) -> Any:
    with torch.device("meta"):
        made = RotaryEmbedding(module.method, module.rotary)
    return emptied(made)


def saved_and_loaded(module: RotaryEmbedding) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_another_state_dict(module: RotaryEmbedding) -> RotaryEmbedding:
    module.load_state_dict({}, strict=True)
    return module


LIVES: dict[str, Callable[[RotaryEmbedding], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "to_empty": emptied,
    "to meta and back": lambda module: emptied(module.to("meta")),
    "made on meta": made_on_meta,
    "to cpu": lambda module: module.to("cpu"),
    "to bf16": lambda module: module.to(torch.bfloat16),
    "empty state_dict": through_another_state_dict,
    "eval": lambda module: module.eval().requires_grad_(False),
    "share_memory": lambda module: module.share_memory(),
}


class TestLife:
    @pytest.mark.parametrize("life", LIVES)
    @pytest.mark.parametrize(("method", "params"), [("ntk", {"factor": 8}), ("yarn", {"factor": 4}), *DEPENDENT])
    def test_values_survive(self, method: str, params: dict[str, Any], life: str) -> None:
        positions = positions_to_check()
        expected = RotaryEmbedding(method, SMALL, **params)(torch.zeros(1), positions)
        module = LIVES[life](RotaryEmbedding(method, SMALL, **params))
        for left, right in zip(module(torch.zeros(1), positions), expected, strict=True):
            assert torch.equal(left, right)

    @pytest.mark.parametrize("life", ["deepcopy", "pickle", "torch.save", "to_empty", "to bf16"])
    def test_a_fixed_length_survives(self, life: str) -> None:
        module = RotaryEmbedding("dynamic-ntk", SMALL)
        with module.at_length(1024):
            expected = module(torch.zeros(1), AT)
            again = LIVES[life](module)
            for left, right in zip(again(torch.zeros(1), AT), expected, strict=True):
                assert torch.equal(left, right)

    def test_a_copy_is_independent(self) -> None:
        module = RotaryEmbedding("dynamic-ntk", SMALL)
        expected = module(torch.zeros(1), AT)[0]
        other = copy.deepcopy(module)
        with other.at_length(4096):
            assert torch.equal(module(torch.zeros(1), AT)[0], expected)
            assert not torch.equal(other(torch.zeros(1), AT)[0], expected)

    @pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4}), *DEPENDENT])
    def test_the_state_dict_is_empty(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, **params)
        module(torch.zeros(1), AT * 1000)
        assert module.state_dict() == {}
        assert not list(module.parameters())

    @pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4}), DEPENDENT[0]])
    def test_functional_call(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, **params)
        state = dict(module.named_buffers()) | dict(module.named_parameters())
        got = torch.func.functional_call(module, state, (torch.zeros(1), AT * 1000))
        for left, right in zip(got, module(torch.zeros(1), AT * 1000), strict=True):
            assert torch.equal(left, right)

    @pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4}), *DEPENDENT])
    def test_export(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, **params)
        x = torch.zeros(1)
        exported = torch.export.export(module, (x, AT)).module()
        for scale in (1, 50_000):  # within the trained length, as traced, and far beyond
            for left, right in zip(exported(x, AT * scale), module(x, AT * scale), strict=True):
                torch.testing.assert_close(left, right, rtol=0, atol=BOUND)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4, "ramp": "turns"}), *DEPENDENT])
    def test_on_a_gpu(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, layout="bare", **params).to("cuda").to(torch.bfloat16)
        positions = positions_to_check()
        inv_freq, warmth = (
            (by_cycles(SMALL, 4, 1, 32), 0.1 * math.log(4) + 1)
            if method == "yarn"
            else at_length(method, params, int(positions.max()) + 1)
        )
        x, on_gpu = torch.zeros(1, device="cuda"), positions.cuda()
        module(x, on_gpu)
        torch.cuda.set_sync_debug_mode("error")
        try:
            cos, sin = module(x, on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cos.device.type == "cuda"
        assert worst((cos.cpu() / warmth, sin.cpu() / warmth), cos_sin(positions, inv_freq)) <= BOUND


# --- compilation and synchronisation ------------------------------------------------------------------------------


class TestCompiled:
    def test_the_guard_sees_a_synchronisation(self) -> None:
        numbers = torch.tensor([1.0, 2.0])
        for waiting in (lambda: numbers.max().item(), lambda: bool(numbers[0] > 0), lambda: numbers.nonzero()):
            with pytest.raises(AssertionError, match="makes the host wait"), HostReads(refuse=True):
                waiting()

    @pytest.mark.parametrize(
        ("method", "params"),
        [(name, params) for name, params, _, _ in STATIC]
        + DEPENDENT
        + [("dynamic-ntk", {"growth": "even", "sticky": True})],
    )
    @pytest.mark.parametrize("layout", ["half", "interleaved", "bare", "complex"])
    def test_forward_never_waits_for_the_device(self, method: str, params: dict[str, Any], layout: Any) -> None:
        module = RotaryEmbedding(method, SMALL, layout=layout, **params)
        x, positions = torch.zeros(1), AT * 1000
        with HostReads(refuse=True):
            module(x, positions)
            module(x, positions)
        # A meta tensor has no values at all, so whatever looks at one raises; `tolist` escapes the guard above.
        fresh = RotaryEmbedding(method, SMALL, layout=layout, **params)
        turned = fresh(x.to("meta"), positions.to("meta"))
        assert all(part.device.type == "meta" for part in (turned if isinstance(turned, tuple) else (turned,)))

    @static
    @pytest.mark.parametrize("layout", ["half", "interleaved", "bare", "complex"])
    def test_static_methods_compile_to_one_graph(
        self, method: str, params: dict[str, Any], formula: Any, warmth: float, layout: Any
    ) -> None:
        torch._dynamo.reset()
        module = RotaryEmbedding(method, SMALL, layout=layout, **params)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for x in (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)):
            got, expected = compiled(x, positions_to_check()), module(x, positions_to_check())
            for left, right in zip(
                got if isinstance(got, tuple) else (torch.view_as_real(got),),
                expected if isinstance(expected, tuple) else (torch.view_as_real(expected),),
                strict=True,
            ):
                assert left.dtype == right.dtype
                assert torch.equal(left, right)

    def test_a_moved_module_is_compiled_with_its_own_table(self) -> None:
        torch._dynamo.reset()
        module = RotaryEmbedding("ntk", SMALL, factor=8)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        expected = module(torch.zeros(1), AT)[0]
        assert torch.equal(compiled(torch.zeros(1), AT)[0], expected)
        emptied(module).to(torch.bfloat16)
        assert torch.equal(compiled(torch.zeros(1), AT)[0], expected)

    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    def test_inductor_keeps_the_bound(self) -> None:
        """Its integer arithmetic must wrap as eager's does; odd sizes reach its scalar tails."""
        torch._dynamo.reset()
        positions = positions_to_check()
        assert positions.shape[1] % 8
        rotary = Rotary(dim=2 * 37, theta=1e4, trained_length=4096)
        module = RotaryEmbedding("ntk", rotary, factor=8)
        cos, sin = torch.compile(module, fullgraph=True)(torch.zeros(1), positions)
        expected = cos_sin(positions, ntk(rotary, 8))
        assert worst((cos, sin), (half(expected[0]), half(expected[1]))) <= BOUND


# --- purity -------------------------------------------------------------------------------------------------------


class TestPurity:
    @dependent
    def test_an_earlier_longer_call_leaves_no_trace(self, method: str, params: dict[str, Any]) -> None:
        used, fresh = (RotaryEmbedding(method, SMALL, **params) for _ in range(2))
        x = torch.zeros(1)
        for length in (5000, 256, 80, 257):
            positions = torch.arange(length)[None]
            for left, right in zip(
                used(x, positions), RotaryEmbedding(method, SMALL, **params)(x, positions), strict=True
            ):
                assert torch.equal(left, right), length
        for left, right in zip(used(x, AT), fresh(x, AT), strict=True):
            assert torch.equal(left, right)

    @dependent
    def test_rows_do_not_know_of_each_other(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, layout="bare", **params)
        x, length = torch.zeros(1), 1200
        at = torch.arange(length)
        rows = torch.stack([at.clamp(max=39), at, at.clamp(max=256)])
        together = module(x, rows)
        for row, own in enumerate((40, 1200, 257)):
            alone = module(x, rows[row : row + 1])
            inv_freq, warmth = at_length(method, params, own)
            reference = cos_sin(rows[row], inv_freq)
            assert worst((together[0][row] / warmth, together[1][row] / warmth), reference) <= BOUND
            for left, right in zip(together, alone, strict=True):
                torch.testing.assert_close(left[row], right[0], rtol=0, atol=2e-7)

    @dependent
    def test_a_fixed_length_is_what_a_row_of_that_length_would_see(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, layout="bare", **params)
        x, positions = torch.zeros(1), torch.arange(1000)[None]
        whole = module(x, positions)
        with module.at_length(1000):
            assert module.frequencies().attention_factor == module.frequencies(1000).attention_factor
            chunks = [module(x, positions[:, a:b]) for a, b in itertools.pairwise((0, 256, 257, 757, 1000))]
        inv_freq, warmth = at_length(method, params, 1000)
        for part in range(2):
            joined = torch.cat([chunk[part] for chunk in chunks], dim=1)
            torch.testing.assert_close(joined, whole[part], rtol=0, atol=2e-7)
            exact = cos_sin(positions, inv_freq)[part] * warmth
            torch.testing.assert_close(joined.double(), exact, rtol=0, atol=2 * BOUND)

    @dependent
    def test_at_length_is_restored(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, **params)
        x = torch.zeros(1)
        free = module(x, AT)[0]

        def at(length: int) -> Tensor:
            other = RotaryEmbedding(method, SMALL, **params)
            with other.at_length(length):
                got: Tensor = other(x, AT)[0]
            return got

        assert not torch.equal(at(1024), free)
        with module.at_length(1024):
            assert torch.equal(module(x, AT)[0], at(1024))
            with module.at_length(4096):
                assert torch.equal(module(x, AT)[0], at(4096))
            assert torch.equal(module(x, AT)[0], at(1024))
            with pytest.raises(KeyError), module.at_length(2048):
                raise KeyError
            assert torch.equal(module(x, AT)[0], at(1024))
            assert not module.length_dependent
        assert torch.equal(module(x, AT)[0], free)
        assert module.length_dependent

    def test_a_refused_length_leaves_the_module_as_it_was(self) -> None:
        module = RotaryEmbedding("dynamic-ntk", SMALL)
        free = module(torch.zeros(1), AT * 10)[0]
        with pytest.raises(MethodError, match="got 0"), module.at_length(0):
            raise AssertionError("not reached")
        assert module.length_dependent
        assert torch.equal(module(torch.zeros(1), AT * 10)[0], free)

    def test_at_length_means_nothing_to_a_static_method(self) -> None:
        module = RotaryEmbedding("yarn", SMALL, factor=4)
        free = module(torch.zeros(1), AT)[0]
        with module.at_length(9999):
            assert torch.equal(module(torch.zeros(1), AT)[0], free)

    def test_sticky_growth_keeps_the_largest_k(self) -> None:
        module = RotaryEmbedding("dynamic-ntk", SMALL, layout="bare", growth="even", sticky=True)
        x = torch.zeros(1)

        def k_used(length: int) -> int:
            positions = torch.arange(length)[None]
            got = module(x, positions)
            fits = [k for k in (1, 2, 4, 6, 8, 20) if worst(got, cos_sin(positions, ntk(SMALL, k))) <= BOUND]
            assert len(fits) == 1
            return fits[0]

        assert [k_used(length) for length in (200, 300, 200, 1025, 513, 200)] == [1, 2, 2, 6, 6, 6]
        module.reset()
        assert k_used(200) == 1
        assert [k_used(length) for length in (4900, 200)] == [20, 20]

    def test_sticky_growth_spans_the_rows_of_a_batch(self) -> None:
        module = RotaryEmbedding("dynamic-ntk", SMALL, layout="bare", growth="even", sticky=True)
        rows = torch.stack([torch.arange(600) % 100, torch.arange(600)])
        assert worst(module(torch.zeros(1), rows), cos_sin(rows, ntk(SMALL, 4))) <= BOUND

    def test_sticky_memory_is_each_module_s_own(self) -> None:
        first, second = (RotaryEmbedding("dynamic-ntk", SMALL, growth="even", sticky=True) for _ in range(2))
        untouched = second(torch.zeros(1), AT)[0]
        first(torch.zeros(1), AT * 100)
        assert torch.equal(second(torch.zeros(1), AT)[0], untouched)


# --- rotation -----------------------------------------------------------------------------------------------------


def naive(x: Tensor, positions: Sequence[int], inv_freq: Sequence[float]) -> Tensor:
    """x (batch, length, heads, head_dim) turned pair by pair as complex numbers; float64."""
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
        got = apply_rotary_pos_emb(x, cos, sin)
        torch.testing.assert_close(got.double(), naive(x, positions, plain(SMALL)), rtol=0, atol=1e-5)

    def test_each_row_has_its_own_positions(self) -> None:
        x = random_x(2, 3, 2, 64)
        rows = [[0, 1, 2], [900, 901, 902]]
        got = apply_rotary_pos_emb(x, *RotaryEmbedding("default", SMALL)(x, torch.tensor(rows)))
        for row, positions in enumerate(rows):
            expected = naive(x[row : row + 1], positions, plain(SMALL))
            torch.testing.assert_close(got[row : row + 1].double(), expected, rtol=0, atol=1e-5)

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
        got = apply_rotary_pos_emb(x, *RotaryEmbedding("default", SMALL)(x, torch.tensor([positions])))
        assert got.shape == x.shape
        assert torch.equal(got[..., 64:], x[..., 64:])
        expected = naive(x[..., :64], positions, plain(SMALL))
        torch.testing.assert_close(got[..., :64].double(), expected, rtol=0, atol=1e-5)

    def test_computes_in_the_wider_dtype_and_answers_in_that_of_x(self) -> None:
        x = random_x(1, 6, 2, 64, dtype=torch.bfloat16)
        cos, sin = RotaryEmbedding("default", SMALL, cast=False)(x, AT[:1])
        got = apply_rotary_pos_emb(x, cos, sin)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, naive(x, AT[0].tolist(), plain(SMALL)).to(torch.bfloat16))

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
        got = NTKAwareRoPE(16, 20, k=k)(x, offset=offset)
        assert got.shape == x.shape
        expected = naive(x, range(offset, offset + 5), ntk(Rotary(16, 1e4, 20), k))
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forward_answers_in_the_dtype_of_x(self, dtype: torch.dtype) -> None:
        x = random_x(2, 5, 3, 16, dtype=dtype)
        got = NTKAwareRoPE(16, 32, k=2)(x)
        assert got.dtype == dtype
        assert got.device == x.device
        expected = naive(x, range(5), ntk(Rotary(16, 1e4, 32), 2))
        torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)

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
        ("k", "length", "taken"), [(1, 11, 2), (1, 20, 2), (1, 21, 4), (2, 21, 4), (3, 31, 4), (4, 41, 6), (1, 95, 10)]
    )
    def test_beyond_the_tables(self, k: int, length: int, taken: int, dynamic: bool, offsets: bool) -> None:
        trained = Rotary(16, 1e4, 10)
        module = NTKAwareRoPE(16, 10, k=k, dynamic=dynamic)
        x = random_x(1, length, 1, 16)
        offset = length - 1 if offsets else 0
        expected = naive(x[:, offset:], range(offset, length), ntk(trained, taken))
        torch.testing.assert_close(module(x[:, offset:], offset=offset).double(), expected, rtol=0, atol=1e-5)
        kept = taken if dynamic else k
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
        ("arguments", "said"),
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
    def test_impossible_arguments_are_refused(self, arguments: dict[str, Any], said: str) -> None:
        with pytest.raises(MethodError, match=said):
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
    """x (64,) at a position; float64, of angles good to the bound."""
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
