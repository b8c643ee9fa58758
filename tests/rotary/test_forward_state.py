"""State that lives for one forward: several threads on one model, nothing left behind, nothing kept from a trace."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rope_ext_hf as rope
from rope_ext_hf import NTKAwareRoPE, Rotary, RotaryEmbedding
from rope_ext_hf.errors import LengthError
from rope_ext_hf.methods.base import constant
from rope_ext_hf.rotary.embedding import override_angles
from rope_ext_hf.rotary.forward_state import ForwardState, running, state_of_table
from tests.support.models import TRAINED, build, logits, tokens

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0},
    "dynamic-ntk": {},
    "dynamic-yarn": {},
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "attention_factor": 1.2,
    },
    "rerope": {},
    "leaky-rerope": {},
    "self-extend": {},
    "dca": {},
}
each_method = pytest.mark.parametrize("method", METHODS)
DEPENDENT = ["dynamic-ntk", "dynamic-yarn", "longrope"]
REMAPPING = ["rerope", "leaky-rerope", "self-extend", "dca"]


def patched(method: str, **overrides: Any) -> Any:
    return rope.patch(build("llama", **overrides), method, **METHODS[method])


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls that run at the same time, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


# --- threads -------------------------------------------------------------------------------------------------------


@each_method
def test_two_forwards_that_meet_inside_one_model(method: str) -> None:
    """Each forward waits for the other between its rotary module and its layers, and again before the last layer."""
    model = patched(method)
    mask = torch.ones(1, 150, dtype=torch.int64)
    mask[0, :60] = 0
    calls = [(tokens(40), None), (tokens(150, seed=1), mask)]
    alone = [logits(model, ids, attention_mask=given) for ids, given in calls]
    barrier = threading.Barrier(2)

    def meet(*_: Any) -> None:
        barrier.wait(timeout=20)

    for module in (model.model.rotary_emb, *model.model.layers):
        module.register_forward_pre_hook(meet)
    together = in_threads(*(lambda c=call: logits(model, c[0], attention_mask=c[1]) for call in calls))
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1][mask.bool()], alone[1][mask.bool()])


@pytest.mark.slow
@each_method
@pytest.mark.sampled(3)
def test_generate_in_threads(method: str) -> None:
    """The prompts lie on both sides of the trained length, and one of them passes it while it decodes."""
    model = patched(method)
    prompts = [tokens(length, seed=length) for length in (20, TRAINED - 5, 150)]

    def generate(ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        out: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
        return out

    alone = [generate(ids) for ids in prompts]
    for _ in range(2):
        together = in_threads(*(lambda i=ids: generate(i) for ids in prompts))
        assert all(map(torch.equal, together, alone))


def test_a_length_fixed_in_one_thread_holds_in_all() -> None:
    model, ids = patched("dynamic-ntk"), tokens(40)
    free = logits(model, ids)
    with rope.fixed_length(model, 300):
        held = logits(model, ids)
        assert torch.equal(in_threads(lambda: logits(model, ids))[0], held)
    assert not torch.equal(held, free)


def test_a_second_thread_that_fixes_a_length_is_refused() -> None:
    model = patched("dynamic-ntk")

    def hold() -> None:
        with rope.fixed_length(model, 400):
            pass

    with rope.fixed_length(model, 300):
        with pytest.raises(LengthError, match=r"another thread holds this model at a fixed length of 300 .* at 400"):
            in_threads(hold)
        with rope.fixed_length(model, 200):
            pass
        assert logits(model, tokens(8)).isfinite().all()
    in_threads(hold)


# --- the stack -----------------------------------------------------------------------------------------------------


def test_the_innermost_forward_of_a_module_is_read() -> None:
    first, second, third = (nn.Identity() for _ in range(3))
    with ForwardState(tables=(first, second)) as outer:
        with ForwardState(tables=(second,)) as inner:
            assert [state_of_table(table) for table in (first, second, third)] == [outer, inner, None]
        assert state_of_table(second) is outer
    assert not list(running())


def test_an_interrupted_forward_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched("dynamic-ntk", num_hidden_layers=1), tokens(TRAINED + 2)
    expected = logits(model, ids)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = model(ids[:, :-2], use_cache=True).past_key_values
        model(ids[:, -2:-1], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.norm, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, -1:], past_key_values=cache)
    assert not list(running())
    assert not [layer for layer in cache.layers if "update" in vars(layer)]
    assert torch.equal(logits(model, ids), expected)


def test_overridden_angles_reach_this_thread_and_these_modules_alone() -> None:
    rotary = Rotary(dim=16, theta=10_000.0, trained_length=TRAINED)
    one, other = (RotaryEmbedding("dynamic-ntk", rotary, layout="bare") for _ in range(2))
    x, positions = torch.zeros(1), torch.arange(3)[None]
    free = one(x, positions)[0]
    with override_angles([one], torch.full((8,), 0.5), 2.0):
        cos, sin = one(x, positions)
        expected = 0.5 * torch.arange(3.0)[None, :, None].expand(1, 3, 8)
        torch.testing.assert_close((cos, sin), (2 * expected.cos(), 2 * expected.sin()), atol=2e-6, rtol=0)
        assert torch.equal(other(x, positions)[0], free)
        assert torch.equal(in_threads(lambda: one(x, positions)[0])[0], free)
        assert one.fixed_length is None
    assert torch.equal(one(x, positions)[0], free)


# --- tensors that outlive a call -----------------------------------------------------------------------------------


def test_constants_are_kept_for_plain_calls_alone() -> None:
    numbers, device = (1.5, -2.0, 3.25), torch.device("cpu")
    with FakeTensorMode():
        fake = constant(numbers, device)
    with torch.inference_mode():
        kept = constant(numbers, device)
    assert type(fake) is not Tensor
    assert type(kept) is Tensor
    assert not kept.is_inference()
    assert constant(numbers, device) is kept
    with FakeTensorMode():
        assert type(constant(numbers, device)) is not Tensor


class _Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.model(ids, use_cache=False).logits
        return result


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_export_before_the_first_forward_leaves_the_model_as_it_was(method: str) -> None:
    constant.__globals__["_kept"].cache_clear()
    ids = tokens(150)
    model = patched(method)
    with rope.fixed_length(model, 150) if method in DEPENDENT else nullcontext():
        exported = torch.export.export(_Logits(model), (ids,), strict=False)
    actual = logits(model, ids)
    assert torch.equal(actual, logits(patched(method), ids))
    torch.testing.assert_close(exported.module()(ids), actual, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_export_of_a_static_method_takes_any_length() -> None:
    model, length = patched("yarn"), torch.export.Dim("length", min=2, max=512)
    shapes = {"ids": {1: length}}
    exported = torch.export.export(_Logits(model), (tokens(150),), dynamic_shapes=shapes, strict=False).module()
    for count in (40, 100, 200):
        torch.testing.assert_close(exported(tokens(count)), logits(model, tokens(count)), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "dca")) for name in REMAPPING]
)
def test_an_export_of_a_remapping_method_with_a_length_that_varies_is_refused(method: str) -> None:
    """The tiles follow from the length."""
    shapes = {"ids": {1: torch.export.Dim("length", min=2, max=512)}}
    with pytest.raises(Exception, match="reads inputs of the shape of its example alone"):
        torch.export.export(_Logits(patched(method)), (tokens(150),), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_first_forward_in_inference_mode_does_not_break_training(method: str) -> None:
    constant.__globals__["_kept"].cache_clear()
    model, ids = patched(method), tokens(100)
    with torch.inference_mode():
        model(ids)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_length_fixed_in_inference_mode_does_not_stay_an_inference_tensor() -> None:
    model = patched("dynamic-ntk")
    with torch.inference_mode(), rope.fixed_length(model, 300):
        pass
    assert not any(buffer.is_inference() for buffer in model.buffers())


def test_tables_that_grow_in_inference_mode_do_not_break_later_calls() -> None:
    x = torch.ones(1, 40, 1, 16)
    module = NTKAwareRoPE(16, 10, dynamic=True)
    with torch.inference_mode():
        module(x)
    assert module.k == 4
    module(x.requires_grad_()).sum().backward()
    assert x.grad is not None


def test_an_export_that_is_refused_is_not_the_longest_input_met() -> None:
    rotary = Rotary(dim=16, theta=10_000.0, trained_length=TRAINED)
    module = RotaryEmbedding("dynamic-ntk", rotary, growth="even", sticky=True)
    x, long = torch.zeros(1), torch.arange(300)[None]
    with pytest.raises(LengthError):
        torch.jit.trace(module, (x, long))  # type: ignore[no-untyped-call]
    with pytest.raises(LengthError):
        torch.export.export(module, (x, long), strict=False)
    fresh = RotaryEmbedding("dynamic-ntk", rotary, growth="even", sticky=True)
    assert torch.equal(module(x, long[:, :40])[0], fresh(x, long[:, :40])[0])
    module(x, long)
    moved = module.to(torch.bfloat16)
    assert int(moved.longest_seen) == 300


# --- whole models in files -----------------------------------------------------------------------------------------


@each_method
def test_a_patched_model_in_a_file(method: str, tmp_path: Path) -> None:
    model, ids = patched(method), tokens(150)
    expected = logits(model, ids)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids), expected)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(again, ids), expected)
    assert rope.describe(again).to_dict() == rope.describe(model).to_dict()
    rope.unpatch(again)
    assert torch.equal(logits(again, ids), logits(build("llama"), ids))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_with_a_remapping_method_loads_in_a_new_process(tmp_path: Path) -> None:
    model, ids = patched("dca"), tokens(150)
    torch.save(model, tmp_path / "model.pt")
    torch.save((ids, logits(model, ids)), tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "ids, expected = torch.load(sys.argv[2])\n"
        "with torch.no_grad():\n"
        "    assert torch.equal(model(ids).logits, expected)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "expected.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
