"""Every path on a simulated CUDA device: no tensors of two devices, values as on the CPU, and few launches and copies.

What the device itself refuses and counts comes first, because the other tests rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.attention import triton_attention
from rope_ext_hf.reading.larger.waiting_states import Place
from rope_ext_hf.reading.scorer import TokenScorer
from tests import test_gpu
from tests.support.models import build, tokens
from tests.support.simulated_cuda import FIRST, CudaTensor, SimulatedCuda, no_waits, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {"factor": 4}),
    "dynamic-ntk": ("dynamic-ntk", {}),
    "dynamic-ntk even": ("dynamic-ntk", {"growth": "even"}),
    "dynamic-ntk sticky": ("dynamic-ntk", {"growth": "even", "sticky": True}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "rerope": ("rerope", {}),
    "leaky-rerope": ("leaky-rerope", {}),
    "self-extend": ("self-extend", {}),
    "stairs": ("stairs", {}),
    "dca": ("dca", {}),
    "dynamic-self-extend": ("dynamic-self-extend", {}),
    "jet-long": ("jet-long", {}),
    "dca beyond": ("dca", {"beyond_only": True}),
}
FAMILIES = [
    "llama",
    "gemma3",
    "deepseek_v3",
    "phi3",
    "gpt_neox",
    "qwen2",
    "gemma2",
    "glm",
    "gpt_oss",
    "llama4",
    "cohere",
]

CASES = [
    (family, method)
    for i, family in enumerate(FAMILIES)
    for j, method in enumerate(METHODS)
    if family == "llama" or (i + j) % 5 == 0
]
"""Every method on Llama and every fifth on the others."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedCuda]:
    """A simulated device, of the capability and count that a test asks for by an indirect parameter."""
    with SimulatedCuda(**getattr(request, "param", {})) as simulated:
        yield simulated


# --- the device itself -----------------------------------------------------------------------------------------------


def test_tensors_hold_values_and_name_their_device(device: SimulatedCuda) -> None:
    x = torch.arange(6.0).to("cuda").view(2, 3)
    assert isinstance(x, CudaTensor)
    assert x.device == torch.device("cuda", 0)
    assert torch.equal((x @ x.T).cpu(), torch.tensor([[5.0, 14.0], [14.0, 50.0]]))
    assert torch.equal(x[:, :1].cpu(), torch.tensor([[0.0], [3.0]]))


def test_devices_do_not_mix(device: SimulatedCuda) -> None:
    x = torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="cuda:1")
    assert float((x + torch.tensor(1.0)).sum().cpu()) == 6  # a scalar of the host is an argument of the kernel


def test_launches_waits_and_copies_are_counted(device: SimulatedCuda) -> None:
    x = torch.ones(3).to("cuda")
    y = torch.empty_like(x)
    y.copy_(x)  # one launch
    y += x.view(3)  # another
    assert (device.launches, device.waits, device.to_device, device.to_host) == (2, 0, 1, 0)
    assert y.sum().item() == 6
    assert y.cpu().tolist() == [2, 2, 2]
    assert (device.launches, device.waits, device.to_device, device.to_host) == (3, 1, 1, 1)
    with no_waits(device), pytest.raises(RuntimeError, match="synchronizing"):
        bool(y[0] > 1)


def test_bytes_are_counted(device: SimulatedCuda) -> None:
    x = torch.zeros(1000, device="cuda")
    y = x + 1
    assert (device.live, device.peak) == (8000, 8000)
    del y
    assert (device.live, device.peak) == (4000, 8000)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x[..., 1:33], "16 bytes"),
        (lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), "last dim"),
        (lambda x: x[..., :36], "multiple of 8"),
        (lambda x: x[:, :, :0], "empty"),
    ],
)
def test_kernels_refuse_what_the_real_ones_do(device: SimulatedCuda, change: Any, problem: str) -> None:
    x = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    flash(x, x, x)
    with pytest.raises(RuntimeError, match=problem):
        flash(change(x), change(x), change(x))


@pytest.mark.parametrize("device", [{"capability": (7, 5)}], indirect=True)
def test_turing_has_no_flash_attention_and_no_bfloat16(device: SimulatedCuda) -> None:
    x = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Ampere"):
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    with pytest.raises(RuntimeError, match=r"8\.0"):
        torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True)


# --- families and methods --------------------------------------------------------------------------------------------


IDS = tokens(150, batch=2)
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[1, :50] = 0


def read_in_every_way(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Logits of a whole input, a padded one, onto a cache in parts, onto a static cache, and what is generated."""
    from transformers import StaticCache

    full, real = torch.ones_like(mask), mask.bool().cpu()
    with torch.no_grad():
        found = {
            "whole": model(ids, use_cache=False).logits,
            "padded": model(ids, attention_mask=mask, use_cache=False).logits.cpu()[real],
        }
        for name, given in (("cache", full), ("padded cache", mask)):
            cache = model(ids[:, :100], attention_mask=given[:, :100], use_cache=True).past_key_values
            parts = [
                model(ids[:, 100:149], attention_mask=given[:, :149], past_key_values=cache).logits,
                model(ids[:, 149:], attention_mask=given, past_key_values=cache).logits,
            ]
            found[name] = torch.cat(parts, dim=1)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        found["generated"] = model.generate(ids, attention_mask=mask, **options)
        if not model.config.model_type.startswith("llama4"):
            static = StaticCache(config=model.config, max_cache_len=160)
            for begin, end in ((0, 100), (100, 101), (101, 102)):
                at = torch.arange(begin, end, device=ids.device)[None]
                out = model(ids[:, begin:end], position_ids=at, past_key_values=static, use_cache=True)
            found["static cache"] = out.logits
    return {name: value.float().cpu() for name, value in found.items()}


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("zones", [False, True], ids=["tiles", "zones"])
@pytest.mark.parametrize(("family", "method"), CASES)
def test_values_are_those_of_the_cpu(family: str, method: str, zones: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "_DTYPES", [torch.float32])  # its rounding does not hide a difference
    name, params = METHODS[method]
    expected = read_in_every_way(rope.patch(build(family), name, **params), IDS, LEFT_PADDED)
    with SimulatedCuda(zones=zones):
        found = read_in_every_way(rope.patch(build(family).to("cuda"), name, **params), IDS.cuda(), LEFT_PADDED.cuda())
    for way, wanted in expected.items():
        assert float((found[way] - wanted).norm() / wanted.norm()) < 2e-3, way


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "rerope", "dca"])
@pytest.mark.parametrize(
    ("capability", "dtype", "options"),
    [
        ((7, 5), torch.float16, {}),
        ((8, 0), torch.bfloat16, {"zones": False}),
        ((9, 0), torch.bfloat16, {"prefers_cudnn": True, "zones": False}),
        ((9, 0), torch.bfloat16, {"prefers_cudnn": True}),
        ((12, 0), torch.bfloat16, {"triton": False}),
        ((9, 0), torch.float32, {}),
    ],
    ids=["turing", "ampere, tiles", "hopper, cuDNN", "hopper, zones", "blackwell, no Triton", "float32"],
)
def test_every_generation(
    capability: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], method: str
) -> None:
    """Kernels are given what they take, through inputs long enough for cuDNN's."""
    ids = tokens(300)
    name, params = METHODS[method]
    tolerance = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}[dtype]

    def read(model: Any, ids: Tensor) -> Tensor:
        rope.patch(model, name, **params)
        cache = model(ids[:, :297], use_cache=True).past_key_values
        last: Tensor = model(ids[:, 297:], past_key_values=cache).logits.float().cpu()
        return last

    with torch.no_grad():
        wanted = read(build("llama"), ids)
        with SimulatedCuda(capability, **options) as device:
            found = read(build("llama").to("cuda", dtype), ids.cuda())
    assert (found - wanted).norm() / wanted.norm() < tolerance
    if method == "rerope":
        if capability == (7, 5) or dtype == torch.float32:
            kernel = "_scaled_dot_product_efficient_attention"
        elif options.get("zones", True) and options.get("triton", True):
            kernel = "attend_fused"
        else:
            windows = capability in ((8, 0), (12, 0))
            kernel = "_flash_attention_forward" if windows else "_scaled_dot_product_cudnn_attention"
        assert device.operators[kernel]


def test_what_the_user_has_turned_off_is_not_used(device: SimulatedCuda) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = rope.patch(build("llama").to("cuda", torch.bfloat16), "rerope")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(tokens(100).cuda(), use_cache=False)
    assert not [name for name in device.operators if name.startswith("_scaled_dot_product")]


# --- budgets ---------------------------------------------------------------------------------------------------------


def counts_of_a_step(
    name: str | None, params: dict[str, Any], layers: int, triton: bool, with_positions: bool
) -> tuple[int, int, int, int]:
    """Launches, waits, copies to the device and to the host of one warm decoding step of Llama in bfloat16."""
    with SimulatedCuda(triton=triton) as device, torch.no_grad():
        model = build("llama", num_hidden_layers=layers).to("cuda", torch.bfloat16)
        if name is not None:
            rope.patch(model, name, **params)
        ids, positions = tokens(153).cuda(), torch.arange(153, device="cuda")[None]
        calls: list[dict[str, Any]] = [{"input_ids": ids[:, part]} for part in STEPS]
        if with_positions:
            calls = [call | {"position_ids": positions[:, part]} for call, part in zip(calls, STEPS, strict=True)]
        cache = model(**calls[0], use_cache=True).past_key_values
        for call in calls[1:]:
            device.reset()
            model(**call, past_key_values=cache)
        return device.launches, device.waits, device.to_device, device.to_host


STEPS = slice(150), slice(150, 151), slice(151, 152), slice(152, 153)

LAUNCHES = {  # per layer with Triton and without, and once per step; transformers' own model: 40 and 22
    "yarn": (40, 40, 23),
    "dynamic-ntk": (41, 44, 69),
    "dynamic-ntk even": (40, 40, 46),
    "dynamic-yarn": (41, 44, 98),
    "rerope": (40, 50, 69),
    "leaky-rerope": (40, 50, 61),
    "self-extend": (40, 50, 71),
    "stairs": (40, 56, 54),
    "dca": (40, 52, 69),
    "dynamic-self-extend": (40, 49, 88),
    "jet-long": (40, 48, 68),
}


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("method", LAUNCHES)
def test_launches_of_a_decoding_step(method: str, triton: bool, with_positions: bool) -> None:
    name, params = METHODS[method]
    two, four = (counts_of_a_step(name, params, layers, triton, with_positions) for layers in (2, 4))
    per_layer = (four[0] - two[0]) / 2
    fused, unfused, once = LAUNCHES[method]
    assert per_layer <= (fused if triton else unfused)
    assert two[0] - 2 * per_layer <= once
    # Under growth in steps, positions alone may have gaps, and the host has to know whether a row passes a step.
    waits = int(with_positions and method == "dynamic-ntk even")
    assert four[1:] == (waits, 0, 0)


def test_positions_that_contradict_the_cache_are_asserted_on_the_device(device: SimulatedCuda) -> None:
    """So that the host need not wait for them at every step."""
    model, ids = rope.patch(build("llama").to("cuda"), "rerope"), tokens(30).cuda()
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match="do not continue"):
            model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[31]]).cuda())


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("method", [None, "yarn", "dynamic-ntk even", "dynamic-yarn", "self-extend", "dca"])
def test_copies_of_a_span(device: SimulatedCuda, method: str | None, family: str) -> None:
    """The scorer sends ids once and brings losses back once, also where frequencies follow the length that is held."""
    model = build(family).to("cuda")
    if method is not None:
        name, params = METHODS[method]
        rope.patch(model, name, **params)
    scorer, ids = TokenScorer(model, chunk=64), tokens(400)[0]
    first = scorer.losses(ids, 10)
    device.reset()
    torch.testing.assert_close(scorer.losses(ids, 10), first)
    assert (device.to_device, device.to_host) == (1, 1), device.places
    assert not device.waits, device.places


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hidden_states_that_wait_elsewhere(device: SimulatedCuda, place: Place) -> None:
    """Those of each chunk go to the device and back once a layer, beside the ids and losses of the whole text."""
    model = build("llama").to("cuda")
    scorer, ids = TokenScorer(model, chunk=64), tokens(400)[0]
    expected = scorer.losses(ids, 10)
    scorer.reader.place = place
    device.reset()
    assert torch.equal(scorer.losses(ids, 10), expected)
    chunks, layers = -(-399 // 64), model.config.num_hidden_layers
    assert (device.to_device, device.to_host) == (1 + chunks * (layers + 1),) * 2, device.places
    assert not device.waits, device.places


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hidden_states_between_two_devices(place: Place) -> None:
    from accelerate import dispatch_model

    expected = TokenScorer(build("llama"), chunk=64).losses(IDS[0], 5)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    places |= {"model.rotary_emb": 0, "lm_head": 1}
    with SimulatedCuda(devices=2):
        model = dispatch_model(build("llama"), {part: torch.device("cuda", index) for part, index in places.items()})
        scorer = TokenScorer(model, chunk=64)
        scorer.reader.place = place
        torch.testing.assert_close(scorer.losses(IDS[0], 5), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_that_wait_in_main_memory(device: SimulatedCuda, family: str) -> None:
    """A thread copies those of each layer to the device once, and those of two layers are there at a time."""
    from accelerate import cpu_offload

    ids, model = tokens(20)[0], build(family, num_hidden_layers=6, intermediate_size=2048)
    expected = TokenScorer(model, chunk=64).losses(ids, 10)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    others = sum(parameter.nbytes for parameter in model.parameters()) - 6 * layer
    weights = len(list(model.model.layers.parameters()))
    scorer = TokenScorer(cpu_offload(model, FIRST), chunk=64)
    device.reset()
    before = device.live
    torch.testing.assert_close(scorer.losses(ids, 10), expected, atol=1e-3, rtol=0)
    copies = [name for name in device.places.elements() if name.startswith("to_device")]
    in_thread = [name for name in copies if "rope_ext_hf/reading/larger/offloaded_weights.py" in name]
    assert len(in_thread) == weights, device.places
    assert 2 * layer < device.peak - before < 2 * layer + others + layer // 2
    assert device.live - before < layer // 100  # the cache


# --- what is built on models -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "yarn", "dynamic-yarn", "self-extend", "dca"])
@pytest.mark.parametrize("offload", [False, True])
def test_scores_are_those_of_the_cpu(method: str | None, offload: bool) -> None:
    ids = tokens(400)[0]

    def losses(model: Any) -> Tensor:
        if method is not None:
            name, params = METHODS[method]
            rope.patch(model, name, **params)
        scorer = TokenScorer(model, chunk=64, offload_cache=offload)
        of_answers, _ = scorer.candidates(ids[:300], ids[None, 300:310])
        return torch.cat([scorer.losses(ids, 10), of_answers[0]])

    expected = losses(build("llama"))
    with SimulatedCuda():
        found = losses(build("llama").to("cuda"))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk even", "dynamic-yarn", "self-extend", "dca"])
@pytest.mark.parametrize("order", ["patched before", "patched after", "rotary module on the other device"])
def test_layers_on_two_devices(order: str, method: str) -> None:
    from accelerate import dispatch_model

    name, params = METHODS[method]
    expected = read_in_every_way(rope.patch(build("llama"), name, **params), IDS, LEFT_PADDED)
    scored = TokenScorer(rope.patch(build("llama"), name, **params), chunk=64).losses(IDS[0], 5)
    rotary = 1 if "rotary" in order else 0
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    places |= {"model.rotary_emb": rotary, "lm_head": 1}
    with SimulatedCuda(devices=2) as device:
        model = build("llama")
        if order == "patched before":
            rope.patch(model, name, **params)
        model = dispatch_model(model, {part: torch.device("cuda", index) for part, index in places.items()})
        if order != "patched before":
            rope.patch(model, name, **params)
        found = read_in_every_way(model, IDS.cuda(), LEFT_PADDED.cuda())
        found["scored"] = TokenScorer(model, chunk=64).losses(IDS[0], 5).cpu()
    assert device.between
    for way, wanted in (expected | {"scored": scored}).items():
        assert float((found[way].float() - wanted).norm() / wanted.norm()) < 2e-3, way


RUNS_THERE: list[Any] = [
    test_gpu.test_a_static_forward_never_waits_for_the_device,
    test_gpu.test_patching_before_and_after_a_move_is_the_same,
    *(
        pytest.param(
            partial(test_gpu.test_attention_level_methods_give_what_they_give_on_the_cpu, method, "gemma2", dtype),
            marks=pytest.mark.slow if method == "rerope" else pytest.mark.thorough,
        )
        for method in test_gpu.METHODS
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ),
]
"""Tests of test_gpu.py that need neither a backward nor a compiler nor a device's own memory."""


@pytest.mark.parametrize("test", RUNS_THERE)
def test_tests_for_a_gpu_hold_here(device: SimulatedCuda, test: Callable[[], None]) -> None:
    test()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["ppl", "reference", "--lengths", "256", "--max-spans", "2", "--device", "cuda"],
        pytest.param(
            ["passkey", "reference", "--lengths", "256", "--trials", "1", "--device", "cuda"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_command_line_runs_there(
    device: SimulatedCuda, command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from rope_ext_hf.cli.app import app

    # transformers reads weights in threads of its own, and the simulation is one thread's.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.chdir(tmp_path)  # its run may not go on from an earlier one
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
