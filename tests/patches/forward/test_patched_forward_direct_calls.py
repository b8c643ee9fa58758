"""Every way into a patched model: `model(...)`, `model.forward(...)`, and what other libraries make of them.

A short row that is padded beside a long one must give what it gives alone.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import rope_ext_hf as rope
from tests.support.models import build, tokens

LONG, SHORT = 150, 40
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0], "factor": 4}
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0},
    "dynamic-ntk": {},
    "dynamic-yarn": {},
    "longrope": LONGROPE,
    "rerope": {},
    "self-extend": {"factor": 4},
    "dca": {},
    "stairs": {},
    "dynamic-self-extend": {},
    "jet-long": {},
}


def patched(method: str, family: str = "llama") -> Any:
    return rope.patch(build(family), method, **METHODS[method])


@torch.no_grad()
def error_of_padded_row(run: Callable[..., Any], alone: Callable[..., Any]) -> float:
    """Return the difference of a padded row from the same row alone, in standard deviations of the output."""
    ids, mask = tokens(LONG, batch=2), torch.ones(2, LONG, dtype=torch.int64)
    mask[1, SHORT:] = 0
    row = run(input_ids=ids, attention_mask=mask)[0][1, :SHORT]
    expected = alone(input_ids=ids[1:, :SHORT])[0][0]
    return float((row - expected).abs().max() / expected.std())


@pytest.mark.parametrize("part", ["decoder", "causal"])
@pytest.mark.parametrize("method", METHODS)
def test_forward_gives_what_a_call_gives(method: str, part: str) -> None:
    model = patched(method)
    module = model.model if part == "decoder" else model
    assert error_of_padded_row(module.forward, module) < 1e-4
    assert error_of_padded_row(module, module.forward) < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox", "deepseek_v3", "phi3"])
@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_forward_in_families_of_other_shapes(method: str, family: str) -> None:
    model = patched(method, family)
    assert error_of_padded_row(model.forward, model) < 1e-4


@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope", "jet-long"])
def test_a_forward_onto_a_cache(method: str) -> None:
    model, ids = patched(method), tokens(100)
    last: list[Tensor] = []
    with torch.no_grad():
        for run in (model, model.forward):
            first = run(input_ids=ids[:, :90], use_cache=True)
            last.append(run(input_ids=ids[:, 90:], past_key_values=first.past_key_values).logits)
    assert torch.equal(*last)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_adalora_which_calls_forward(method: str) -> None:
    from peft import AdaLoraConfig, get_peft_model

    config = AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=10)
    model = get_peft_model(patched(method), config).eval()
    assert error_of_padded_row(model, patched(method)) < 1e-4


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_accelerate_puts_a_forward_of_its_own_around(method: str, order: str) -> None:
    model = build("llama")
    if order == "before":
        cpu_offload(model)
    rope.patch(model, method)
    if order == "after":
        cpu_offload(model)
    assert error_of_padded_row(model.forward, patched(method)) < 1e-4
    assert error_of_padded_row(model.model.forward, patched(method).model) < 1e-4
    rope.unpatch(model)
    expected = build("llama")(tokens(LONG)).logits
    assert torch.equal(model.forward(input_ids=tokens(LONG)).logits, expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model.forward(input_ids=tokens(LONG)).logits, expected)


@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_mixed_precision_of_accelerate_and_its_unwrapping(method: str) -> None:
    model = patched(method)
    AcceleratorState._reset_state(reset_partial_state=True)  # of a test before this one
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    assert error_of_padded_row(prepared.forward, prepared) < 0.1  # bfloat16
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert error_of_padded_row(plain.forward, patched(method)) < 1e-4
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("part", ["decoder", "causal"])
@pytest.mark.parametrize("method", METHODS)
def test_hooks_of_accelerate_may_come_and_go(method: str, part: str) -> None:
    """Hooks that were there before the patch leave it in place when they go, and hooks that came after it, too."""
    model = build("llama")
    module = model.model if part == "decoder" else model
    add_hook_to_module(module, ModelHook())
    rope.patch(model, method, **METHODS[method])
    right = patched(method)
    right = right.model if part == "decoder" else right
    assert error_of_padded_row(module.forward, right) < 1e-4
    add_hook_to_module(module, ModelHook(), append=True)
    assert error_of_padded_row(module.forward, right) < 1e-4
    remove_hook_from_module(module)
    assert error_of_padded_row(module.forward, right) < 1e-4
    assert error_of_padded_row(module, right) < 1e-4
    add_hook_to_module(module, ModelHook())
    rope.unpatch(model)
    expected = build("llama")(tokens(LONG)).logits
    assert torch.equal(model.forward(tokens(LONG)).logits, expected)
    remove_hook_from_module(module)
    assert torch.equal(model.forward(tokens(LONG)).logits, expected)
    assert torch.equal(model(tokens(LONG)).logits, expected)


@pytest.mark.parametrize("first", ["patch", "offload"])
@pytest.mark.parametrize("method", METHODS)
def test_hooks_that_offload_may_go(method: str, first: str) -> None:
    """A rotary module that a patch has replaced keeps the hook that brings its tensors."""
    model = build("llama")
    if first == "offload":
        cpu_offload(model, torch.device("cpu"))
    rope.patch(model, method, **METHODS[method])
    if first == "patch":
        cpu_offload(model, torch.device("cpu"))
    model(tokens(LONG))
    remove_hook_from_submodules(model)
    assert torch.equal(model(tokens(LONG)).logits, patched(method)(tokens(LONG)).logits)
    assert torch.equal(rope.unpatch(model)(tokens(LONG)).logits, build("llama")(tokens(LONG)).logits)


@pytest.mark.parametrize("first", ["unwrap", "unpatch"])
@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "dynamic-yarn", "rerope", "jet-long"])
def test_a_patch_of_a_prepared_model_outlives_its_mixed_precision(method: str, first: str) -> None:
    """`unwrap_model` removes the forward that `prepare` made, also where the model was patched in between."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of a test before this one
    accelerator, ids = Accelerator(mixed_precision="bf16", cpu=True), tokens(LONG)
    with torch.no_grad():
        model = rope.patch(accelerator.prepare(build("llama")), method, **METHODS[method])
        expected, unpatched = patched(method)(ids).logits, build("llama")(ids).logits
        assert 1e-4 < (model(ids).logits - expected).abs().max() < 0.2 * expected.std()  # bfloat16
        if first == "unwrap":
            plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            assert torch.equal(plain(ids).logits, expected)
            assert error_of_padded_row(plain.forward, patched(method)) < 1e-4
            assert torch.equal(rope.unpatch(plain)(ids).logits, unpatched)
        else:
            plain = accelerator.unwrap_model(rope.unpatch(model), keep_fp32_wrapper=False)
            assert torch.equal(plain(ids).logits, unpatched)
        assert torch.equal(plain.forward(ids).logits, unpatched)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_copies_run_their_own_modules(method: str, copied: Callable[[Any], Any]) -> None:
    model = patched(method)
    other = copied(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        assert other.forward(input_ids=tokens(LONG)).logits.abs().max() == 0
        assert model.forward(input_ids=tokens(LONG)).logits.abs().max() > 0
    assert error_of_padded_row(other.model.forward, model.model) < 1e-4
    rope.unpatch(other)
    assert error_of_padded_row(model.model.forward, model.model) < 1e-4


def replica_of(module: nn.Module) -> nn.Module:
    """Return a copy of a model's modules around the same weights, as `torch.nn.DataParallel` makes for each device."""
    replica: Any = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica._parameters, replica._buffers = dict(module._parameters), dict(module._buffers)
    replica._modules = {name: replica_of(child) for name, child in module._modules.items() if child is not None}
    return replica  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_a_replica_runs_its_own_modules(method: str) -> None:
    model = patched(method)
    replica: Any = replica_of(model)
    replica.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert replica(tokens(LONG)).logits.abs().max() == 0
    assert error_of_padded_row(replica.model, model.model) < 1e-4


@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_after_an_exception_the_next_call_is_right(method: str) -> None:
    model = patched(method)

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook that fails")

    for module in (model, model.model):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a hook that fails"):
            module(tokens(LONG))
        handle.remove()
        assert error_of_padded_row(module.forward, patched(method).model if module is model.model else model) < 1e-4


@pytest.mark.parametrize("method", ["dynamic-yarn", "rerope"])
def test_forward_looks_as_before_and_comes_back(method: str) -> None:
    model = build("llama")
    before = inspect.signature(model.forward), inspect.signature(model.model.forward)
    attributes = sorted(vars(model)), sorted(vars(model.model))
    rope.patch(model, method)
    assert (inspect.signature(model.forward), inspect.signature(model.model.forward)) == before
    rope.patch(model, "dynamic-ntk")
    rope.patch(model, "yarn", factor=4.0)
    assert "forward" not in vars(model) | vars(model.model)
    rope.unpatch(model)
    assert (sorted(vars(model)), sorted(vars(model.model))) == attributes


@pytest.mark.parametrize("when", ["before the patch", "after the patch"])
@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope"])
def test_arguments_that_a_hook_of_the_user_changes_are_those_that_count(method: str, when: str) -> None:
    model = build("llama") if when == "before the patch" else patched(method)
    ids, mask = tokens(LONG, batch=2), torch.ones(2, LONG, dtype=torch.int64)
    mask[1, SHORT:] = 0

    def give_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": mask}

    handle = model.model.register_forward_pre_hook(give_mask, with_kwargs=True)
    if when == "before the patch":
        rope.patch(model, method, **METHODS[method])
    with torch.no_grad():
        actual = model(ids).logits
        handle.remove()
        assert torch.equal(actual, model(ids, attention_mask=mask).logits)


def test_a_static_method_leaves_forward_alone() -> None:
    model = patched("yarn")
    assert "forward" not in vars(model) | vars(model.model)


@pytest.mark.slow
def test_a_compiled_forward() -> None:
    model = patched("dynamic-yarn")
    expected = model(tokens(LONG), use_cache=False).logits
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    for run in (model, model.forward):
        result: Tensor = run(input_ids=tokens(LONG), use_cache=False).logits
        assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn", "rerope", "self-extend"])
def test_a_forward_that_is_replaced_after_the_patch_is_noticed(method: str) -> None:
    model, ids = patched(method), tokens(LONG)
    with torch.no_grad():
        expected = model(ids).logits
    decoder = model.model
    decoder.forward = MethodType(type(decoder).forward, decoder)
    with pytest.raises((rope.LengthError, rope.UnsupportedModelError), match="was replaced after the patch"):
        model(ids)
    del decoder.__dict__["forward"]
    rope.unpatch(model)
    decoder.forward = MethodType(type(decoder).forward, decoder)  # before the patch it may be replaced
    rope.patch(model, method, **METHODS[method])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_a_rotary_module_may_be_called_by_itself() -> None:
    model = patched("dynamic-ntk")
    positions = torch.arange(LONG)[None]
    cos, _ = model.model.rotary_emb(torch.zeros(1, 1), positions)
    assert cos.shape[1] == LONG
