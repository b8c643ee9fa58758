"""RotaryEmbedding: its accuracy at any position and in any dtype, and after models are cast, moved or compiled."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext_hf import Rotary, RotaryEmbedding, list_methods
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.remapping import RemappingMethod
from tests.support.dispatch import HostReads
from tests.support.method_examples import example_method
from tests.support.oracles import (
    by_cycles,
    ntk,
    plain,
)
from tests.support.rotary_examples import (
    AT,
    BOUND,
    DEPENDENT,
    DTYPES,
    REACH,
    SMALL,
    STATIC,
    at_length,
    config_for,
    cos_sin,
    dependent,
    emptied,
    half,
    llama_rotary,
    positions_to_check,
    static,
    worst,
)

REMAPPING = [name for name, cls in list_methods().items() if issubclass(cls, RemappingMethod)]

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
        if method == "mrrope" and dim == 2:
            pytest.skip("the band of MrRoPE needs two pairs")
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
        module = RotaryEmbedding("yarn", SMALL, factor=8, ramp="cycles").to(dtype)
        warmth = 0.1 * math.log(8) + 1
        for actual, exact in zip(
            module(torch.zeros(1, dtype=dtype), positions), cos_sin(positions, by_cycles(SMALL, 8, 1, 32)), strict=True
        ):
            assert actual.dtype == dtype
            # half a unit in the last place of a number below 2, plus what float32 may be off by
            assert float((actual.double() - half(exact) * warmth).abs().max()) <= torch.finfo(dtype).eps / 2 + 2 * BOUND

    def test_int32_positions_do_as_well(self) -> None:
        positions = positions_to_check()
        module = RotaryEmbedding("default", SMALL)
        for left, right in zip(module(torch.zeros(1), positions.int()), module(torch.zeros(1), positions), strict=True):
            assert torch.equal(left, right)

    @static
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_between_two_tokens(
        self, method: str, params: dict[str, Any], formula: Callable[[Rotary], list[float]], warmth: float,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        rotary = Rotary(64, 5e5, SMALL.trained_length)
        module = RotaryEmbedding(method, rotary, layout="bare", **params)
        whole = torch.tensor([0.0, 1, 77, 4095, 131_071, 1_048_575], dtype=dtype)[:, None]
        positions = (whole + torch.tensor([0.0, 0.125, 0.5, 0.875], dtype=dtype)).reshape(1, -1)
        angles = positions[0, :, None].double() * torch.tensor(formula(rotary), dtype=torch.float64)
        cos, sin = module(torch.zeros(1), positions)
        assert float((cos[0].double() - warmth * angles.cos()).abs().max()) <= BOUND * warmth
        assert float((sin[0].double() - warmth * angles.sin()).abs().max()) <= BOUND * warmth

    @pytest.mark.parametrize(("method", "params"), [(name, params) for name, params, _, _ in STATIC] + DEPENDENT)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_whole_numbers_of_a_floating_point_dtype_are_integers(
        self, method: str, params: dict[str, Any], dtype: torch.dtype
    ) -> None:
        module = RotaryEmbedding(method, SMALL, **params)
        positions = torch.cat([torch.arange(3000), torch.arange(5000)])[None]
        for ours, theirs in zip(
            module(torch.zeros(1), positions.to(dtype)), module(torch.zeros(1), positions), strict=True
        ):
            assert torch.equal(ours, theirs)

    def test_a_frequency_of_half_a_turn(self) -> None:
        """Half a turn is the one fraction that signed fixed point cannot hold exactly; whole turns vanish."""
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
        """The tests above can fail: float32 angles at 131k and frequencies after `.to(bfloat16)` miss the bound."""
        rotary = Rotary(128, 1e4, 4096)
        positions = torch.tensor([list(range(131_072 - 64, 131_072))])
        cos, sin = cos_sin(positions, plain(rotary))
        stock = llama_rotary(rotary)
        assert worst(stock(torch.zeros(1), positions), (half(cos), half(sin))) > 1000 * BOUND
        assert worst(stock.to(torch.bfloat16)(torch.zeros(1), positions), (half(cos), half(sin))) > 1.0
        assert worst(RotaryEmbedding("default", rotary)(torch.zeros(1), positions), (half(cos), half(sin))) <= BOUND


# --- what a model expects -----------------------------------------------------------------------------------------


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

    @pytest.mark.parametrize("name", REMAPPING)
    def test_a_method_that_cos_and_sin_cannot_carry_out_is_refused(self, name: str) -> None:
        """A module with the unpatched model's cos and sin would leave attention as it is, without an error."""
        method: Any = example_method(list_methods()[name], SMALL)
        parameters = {key: value for key, value in method.to_dict().items() if key != "method"}
        message = rf"{name} changes what attention does.*frequency method.*rope_ext_hf\.patch\(model, '{name}'\)"
        for given, more in ((name, parameters), (method, {}), (method.bind(SMALL, None), {})):
            with pytest.raises(MethodError, match=message):
                RotaryEmbedding(given, SMALL, **more)

    def test_an_unknown_layout_is_refused(self) -> None:
        with pytest.raises(ValueError, match="hafl"):
            RotaryEmbedding("default", SMALL, layout="hafl")  # type: ignore[arg-type]

    def test_repr_says_what_it_is(self) -> None:
        text = repr(RotaryEmbedding("yarn", SMALL, factor=8, layout="interleaved"))
        assert all(word in text for word in ("yarn", "factor=8", "theta=10000", "interleaved"))


# --- what is done to models ---------------------------------------------------------------------------------------


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

    @pytest.mark.parametrize("life", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_has_no_fixed_length(self, life: str) -> None:
        """It may outlive the block in which it was made."""
        module = RotaryEmbedding("dynamic-ntk", SMALL)
        expected = module(torch.zeros(1), AT)[0]
        with module.at_length(1024):
            again = LIVES[life](module)
            assert torch.equal(again(torch.zeros(1), AT)[0], expected)
            assert not torch.equal(module(torch.zeros(1), AT)[0], expected)
            with again.at_length(1024):
                assert torch.equal(again(torch.zeros(1), AT)[0], module(torch.zeros(1), AT)[0])
        assert torch.equal(again(torch.zeros(1), AT)[0], expected)

    @pytest.mark.parametrize("life", ["to_empty", "to bf16"])
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
        actual = torch.func.functional_call(module, state, (torch.zeros(1), AT * 1000))
        for left, right in zip(actual, module(torch.zeros(1), AT * 1000), strict=True):
            assert torch.equal(left, right)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4, "ramp": "cycles"}), *DEPENDENT])
    def test_on_a_gpu(self, method: str, params: dict[str, Any]) -> None:
        module = RotaryEmbedding(method, SMALL, layout="bare", **params).to("cuda").to(torch.bfloat16)
        positions = positions_to_check().sort(-1).values  # ascending: one input, and one length
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


OTHER_LAYOUTS = ("interleaved", "bare", "complex")


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
            module(x, positions + 0.5)
        # A meta tensor has no values at all, so whatever looks at one raises; `tolist` escapes the guard above.
        fresh = RotaryEmbedding(method, SMALL, layout=layout, **params)
        turned = fresh(x.to("meta"), positions.to("meta"))
        assert all(part.device.type == "meta" for part in (turned if isinstance(turned, tuple) else (turned,)))

    @pytest.mark.slow
    @static
    @pytest.mark.parametrize(
        "layout", ["half", *(pytest.param(other, marks=pytest.mark.thorough) for other in OTHER_LAYOUTS)]
    )
    def test_static_methods_compile_to_one_graph(
        self, method: str, params: dict[str, Any], formula: Any, warmth: float, layout: Any
    ) -> None:
        torch._dynamo.reset()
        module = RotaryEmbedding(method, SMALL, layout=layout, **params)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        between = torch.arange(100)[None] * 0.75
        for x, positions in itertools.product(
            (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)), (positions_to_check(), between)
        ):
            actual, expected = compiled(x, positions), module(x, positions)
            for left, right in zip(
                actual if isinstance(actual, tuple) else (torch.view_as_real(actual),),
                expected if isinstance(expected, tuple) else (torch.view_as_real(expected),),
                strict=True,
            ):
                assert left.dtype == right.dtype
                assert torch.equal(left, right)

    @pytest.mark.slow
    def test_a_moved_module_is_compiled_with_its_own_table(self) -> None:
        torch._dynamo.reset()
        module = RotaryEmbedding("ntk", SMALL, factor=8)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        expected = module(torch.zeros(1), AT)[0]
        assert torch.equal(compiled(torch.zeros(1), AT)[0], expected)
        emptied(module).to(torch.bfloat16)
        assert torch.equal(compiled(torch.zeros(1), AT)[0], expected)

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    @pytest.mark.thorough
    def test_inductor_keeps_the_bound(self) -> None:
        """Inductor's integer arithmetic must wrap as eager's does; odd sizes reach its scalar tails."""
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
                actual: Tensor = other(x, AT)[0]
            return actual

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
            actual = module(x, positions)
            fits = [k for k in (1, 2, 4, 6, 8, 20) if worst(actual, cos_sin(positions, ntk(SMALL, k))) <= BOUND]
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
