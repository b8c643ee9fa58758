"""A patched model keeps being a transformers model: copied, trained, adapted, compiled, exported, offloaded."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rope_ext_hf as rope
from tests.support.dispatch import HostReads
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference, every_family, state
from tests.support.models import (
    TRAINED,
    build,
    build_config,
    logits,
    rotary_of,
    static_cases,
    tokens,
)

# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_a_deep_copy_is_a_model_of_its_own(name: str, method: str) -> None:
    model, ids = build(name), tokens(LONG)
    plain, plain_config = logits(model, ids), copy.deepcopy(model.config.to_dict())
    rope.patch(model, method, factor=4)
    out, patched_config = logits(model, ids), copy.deepcopy(model.config.to_dict())
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, ids), out)
    rope.unpatch(copied)
    assert torch.equal(logits(copied, ids), plain)
    assert copied.config.to_dict() == plain_config
    assert state(copied)["hooks"] == 0
    assert state(copied)["own save"] == []
    assert torch.equal(logits(model, ids), out)
    assert model.config.to_dict() == patched_config
    other = copy.deepcopy(model)
    rope.unpatch(model)
    assert torch.equal(logits(other, ids), out)
    assert torch.equal(logits(model, ids), plain)
    assert model.config.to_dict() == plain_config


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_a_deep_copy_of_a_length_dependent_model_still_knows_its_rows(name: str) -> None:
    copied = copy.deepcopy(rope.patch(build(name), "dynamic", factor=4))
    mask = torch.ones(1, LONG, dtype=torch.int64)
    mask[0, :5] = 0
    expected = logits(rope.patch(build(name), "dynamic", factor=4), tokens(LONG)[:, 5:])
    assert difference(logits(copied, tokens(LONG), attention_mask=mask)[:, 5:], expected) <= TOLERANCE


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_pickling_round_trip(name: str, method: str) -> None:
    model, ids = build(name), tokens(LONG)
    plain = logits(model, ids)
    out = logits(rope.patch(model, method, factor=4), ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(logits(loaded, ids), out)
    assert str(rope.describe(loaded)) == str(rope.describe(model))
    rope.unpatch(loaded)
    assert torch.equal(logits(loaded, ids), plain)
    assert state(loaded)["hooks"] == 0
    assert torch.equal(logits(model, ids), out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "rerope"])
def test_a_forked_process_computes_the_same(method: str) -> None:
    import os

    model, ids = rope.patch(build("llama"), method, target_length=LONG), tokens(LONG)
    expected = logits(model, ids)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.allclose(logits(model, ids), expected, atol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_weights_of_a_patched_model_load_into_a_plain_one_and_back() -> None:
    model, plain, ids = rope.patch(build("llama"), "yarn", factor=4), build("llama", seed=5), tokens(LONG)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(plain, ids), logits(build("llama"), ids))
    model.load_state_dict(build("llama", seed=5).state_dict())
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama", seed=5), "yarn", factor=4), ids))


# --- training -----------------------------------------------------------------------------------------------------


@every_family
def test_gradients_flow(name: str) -> None:
    model, ids = rope.patch(build(name), "yarn", factor=4).train(), tokens(LONG, batch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    query = next(
        p for path, p in model.named_parameters() if any(k in path for k in ("q_proj", "qkv", "query_key", "q_b"))
    )
    assert query.grad is not None
    assert float(query.grad.abs().max()) > 0
    assert losses[1] < losses[0]


def test_gradients_equal_those_of_the_native_model() -> None:
    model, ids = build("llama"), tokens(LONG)
    native = build("llama", {"rope_type": "linear", "factor": 4.0}, max_position_embeddings=LONG)
    rope.patch(model, "linear", factor=4)
    for trained in (model, native):
        trained.train()
        trained(input_ids=ids, labels=ids).loss.backward()
    for (path, ours), (_, theirs) in zip(model.named_parameters(), native.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=path)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # the name all of transformers 5 has
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4).train(), tokens(LONG)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, expected)


# --- adapters and wrappers ----------------------------------------------------------------------------------------


in_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, settings).eval()


@in_peft
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_peft(name: str) -> None:
    ids = tokens(LONG)
    stock = with_lora(build(name))
    plain, before = logits(stock, ids), state(stock.base_model.model)
    assert difference(plain, logits(build(name), ids)) >= CHANGED
    first, then = with_lora(rope.patch(build(name), "yarn", factor=4)), stock
    assert rope.patch(then, "yarn", factor=4) is then
    assert torch.equal(logits(then, ids), logits(first, ids))
    assert difference(logits(then, ids), plain) >= CHANGED
    assert then.base_model.model.config.max_position_embeddings == LONG
    assert then.config.max_position_embeddings == LONG
    assert rope.describe(then).method == "yarn"
    rope.unpatch(then)
    assert torch.equal(logits(then, ids), plain)
    assert state(then.base_model.model) == before
    rope.unpatch(first)
    assert torch.equal(logits(first, ids), plain)


@in_peft
def test_peft_merges_a_patched_model() -> None:
    ids = tokens(LONG)
    model = rope.patch(with_lora(build("llama")), "yarn", factor=4)
    out = logits(model, ids)
    merged = model.merge_and_unload()
    assert difference(logits(merged, ids), out) <= 10 * TOLERANCE
    assert rope.describe(merged).method == "yarn"


class Wrapper(nn.Module):
    """Stands for what data-parallel wrappers do: the model hangs at .module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model
        self.config = model.config


def test_a_wrapped_model() -> None:
    ids, inner = tokens(LONG), build("llama")
    wrapped = Wrapper(inner)
    rope.patch(wrapped, "yarn", factor=4)
    assert torch.equal(logits(inner, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids))
    assert wrapped.config is inner.config
    rope.unpatch(wrapped)
    assert torch.equal(logits(inner, ids), logits(build("llama"), ids))
    assert wrapped.config is inner.config


def test_the_decoder_alone_can_be_patched() -> None:
    ids, model = tokens(LONG), build("llama")
    rope.patch(model.model, "yarn", factor=4)
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids))
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), logits(build("llama"), ids))
    assert model.config.to_dict() == build("llama").config.to_dict()


# --- compiled and exported ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "method"), [("llama", "yarn"), ("gemma3", "linear"), ("glm", "ntk"), ("olmo", "linear")]
)
@pytest.mark.sampled(2)
def test_compiles_in_one_graph(name: str, method: str) -> None:
    model, ids = rope.patch(build(name), method, factor=4), tokens(LONG)
    expected = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(logits(compiled, ids), expected) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_can_be_patched_and_unpatched() -> None:
    model: Any = torch.compile(build("llama"), backend="eager")
    ids = tokens(LONG)
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=4)
    assert difference(logits(model, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids)) <= TOLERANCE
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.slow
def test_exports() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4), tokens(LONG)
    program = torch.export.export(model, (ids,), {"use_cache": False})
    with torch.no_grad():
        assert difference(program.module()(ids, use_cache=False).logits, logits(model, ids)) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_to_no_more_graphs_than_the_stock_model() -> None:
    from torch._dynamo.testing import CompileCounter

    counts = []
    for model in (build("llama"), rope.patch(build("llama"), "yarn", factor=4)):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for length in (TRAINED, LONG, 100, 101):
            logits(compiled, tokens(length))
        counts.append(counter.frame_count)
    stock, patched = counts
    assert 1 <= patched <= stock


def host_reads(model: Any, length: int = LONG) -> int:
    seen = HostReads()
    with seen:
        logits(model, tokens(length), position_ids=torch.arange(length)[None], attention_mask=None)
    return seen.count


@pytest.mark.parametrize("which", ["linear", "yarn", "llama3", "longrope", "ntk"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3", "glm", "olmo"])
def test_static_methods_never_wait_for_the_device(name: str, which: str) -> None:
    case, model = static_cases(name)[which], build(name)
    stock = host_reads(model)
    assert host_reads(rope.patch(model, case.method, **case.params)) <= stock


def test_the_rotary_module_never_waits_for_the_device() -> None:
    def reads(model: Any) -> int:
        seen = HostReads()
        with seen:
            rotary_of(model)(torch.zeros(1), torch.arange(LONG)[None])
        return seen.count

    assert reads(rope.patch(build("llama"), "yarn", factor=4)) == 0
    assert reads(rope.patch(build("llama"), "dynamic", factor=4)) == 0
    assert reads(build("llama", {"rope_type": "dynamic", "factor": 4.0})) > 0  # so that the count can be anything else


# --- without weights, and offloaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_patched_without_weights_and_filled_later(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build_config(name)).eval()
    rope.patch(model, "yarn", factor=4)
    model.to_empty(device="cpu")
    model.load_state_dict(build(name).state_dict())
    rotary_of(model).replaced.to_empty(device="cpu")
    if name == "gemma3":
        model.model.embed_tokens.embed_scale.fill_(64**0.5)
    expected = rope.patch(build(name), "yarn", factor=4)
    assert torch.equal(logits(model, tokens(LONG)), logits(expected, tokens(LONG)))


DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def offload(model: Any, kind: str, folder: Path) -> Any:
    from accelerate import cpu_offload, disk_offload, dispatch_model

    if kind == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "cpu, buffers too":
        return cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    if kind == "disk":
        return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return dispatch_model(model, DEVICE_MAP, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = ["cpu", "cpu, buffers too", "disk", "map"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_patch_after_dispatch(name: str, kind: str, tmp_path: Path) -> None:
    ids = tokens(LONG)
    plain = logits(build(name), ids)
    expected = logits(rope.patch(build(name), "yarn", factor=4), ids)
    model = offload(build(name), kind, tmp_path)
    assert torch.equal(logits(model, ids), plain)
    rope.patch(model, "yarn", factor=4)
    assert torch.equal(logits(model, ids), expected)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_dispatch_after_patch(name: str, kind: str, tmp_path: Path) -> None:
    ids = tokens(LONG)
    plain = logits(build(name), ids)
    expected = logits(rope.patch(build(name), "yarn", factor=4), ids)
    model = offload(rope.patch(build(name), "yarn", factor=4), kind, tmp_path)
    assert torch.equal(logits(model, ids), expected)
    rope.unpatch(model)
    assert torch.equal(logits(model, ids), plain)
