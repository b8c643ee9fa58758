"""What two processes do with a patched model: accelerate, FSDP2, tensor parallelism. On CPUs, with gloo.

    TEST_FOLDER=$(mktemp -d) torchrun --standalone --nproc-per-node 2 -m tests.support.two_processes
    torchrun --standalone --nproc-per-node 2 -m tests.support.two_processes sticky

The second line checks sticky growth alone. Run by tests/patches/test_patching_trainers.py. Every check is against one
process, which this script computes as well.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import distributed
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from tests.support.models import build, logits, tokens

STATIC = ("yarn", {"factor": 4})
BY_LENGTH: tuple[str, dict[str, Any]] = ("dynamic-yarn", {})
REMAPPED: tuple[str, dict[str, Any]] = ("self-extend", {})


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return value


def gradients_are_those_of_one_process(accelerator: Accelerator, method: str, params: dict[str, Any]) -> None:
    rows = [tokens(150, seed=1), tokens(100, seed=2)]
    whole = rope.patch(build("llama"), method, **params).train()
    torch.stack([loss(whole, ids) for ids in rows]).mean().backward()  # type: ignore[no-untyped-call]
    model = accelerator.prepare(rope.patch(build("llama"), method, **params).train())
    accelerator.backward(loss(model, rows[accelerator.process_index]))
    assert any(name.startswith("module.") for name, _ in model.named_parameters()), "not wrapped: one process"
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    assert rope.describe(accelerator.unwrap_model(model)).method == method


def sticky_growth_stays_in_its_process(accelerator: Accelerator) -> None:
    """DistributedDataParallel hands the buffers of the first process to the others before each forward."""
    sticky: dict[str, Any] = {"growth": "even", "sticky": True}
    alone = rope.patch(build("llama"), "dynamic-ntk", **sticky)
    model = accelerator.prepare(rope.patch(build("llama"), "dynamic-ntk", **sticky))
    for lengths in ((150, 70), (70, 250), (80, 80)):
        ids = tokens(lengths[accelerator.process_index])
        torch.testing.assert_close(logits(model, ids), logits(alone, ids), atol=1e-5, rtol=0)
    fresh = rope.patch(build("llama"), "dynamic-ntk", **sticky)
    assert (logits(model, tokens(80)) - logits(fresh, tokens(80))).abs().max() > 1e-3, "nothing was remembered"


def sharded_models_give_the_same_logits(method: str, params: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    ids = tokens(150)
    model = rope.patch(build("llama"), method, **params)
    expected = logits(copy.deepcopy(model), ids)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert "DTensor" in type(next(model.parameters())).__name__
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=0)
    loss(model.train(), ids).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
    rope.unpatch(model.eval())
    torch.testing.assert_close(logits(model, ids), logits(build("llama"), ids), atol=1e-5, rtol=0)


def patched_after_sharding() -> None:
    from torch.distributed.fsdp import fully_shard

    ids, model = tokens(150), build("llama")
    fully_shard(model)
    rope.patch(model, "yarn", factor=4)
    expected = logits(rope.patch(build("llama"), "yarn", factor=4), ids)
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=0)


def heads_are_split_over_processes(folder: Path) -> None:
    """A tensor-parallel plan of transformers, by which each process loads some heads of every layer."""
    ids = tokens(150)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert "DTensor" in type(model.model.layers[0].self_attn.q_proj.weight).__name__
    before = logits(model, ids)
    for method, params in (STATIC, BY_LENGTH, ("dca", {}), ("self-extend", {})):
        expected = logits(rope.patch(build("llama"), method, **params), ids)
        torch.testing.assert_close(logits(rope.patch(model, method, **params), ids), expected, atol=1e-4, rtol=0)
        rope.unpatch(model)
        assert torch.equal(logits(model, ids), before)
    for method in {"alibi"} & rope.list_methods().keys():  # of the tool box
        with pytest.raises(rope.UnsupportedModelError, match="alibi has a bias for each head"):
            rope.patch(model, method)
    assert "is packed or sharded" in str(rope.detect_pairing(model).reason)
    expected = rope.convert(build("llama"), "interleaved").state_dict()
    for name, value in rope.convert(model, "interleaved").state_dict().items():
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, expected[name]), name


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # that a class runs the other pairing
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == distributed.get_world_size() == 2 == int(os.environ["WORLD_SIZE"])
    sticky_growth_stays_in_its_process(accelerator)
    if sys.argv[1:] != ["sticky"]:
        all_others(accelerator)
    print(f"process {accelerator.process_index} of {accelerator.num_processes}: equal", flush=True)
    accelerator.end_training()


def all_others(accelerator: Accelerator) -> None:
    for method, params in (STATIC, BY_LENGTH, REMAPPED):
        gradients_are_those_of_one_process(accelerator, method, params)
        sharded_models_give_the_same_logits(method, params)
    patched_after_sharding()
    folder = Path(os.environ["TEST_FOLDER"])
    if accelerator.is_main_process:
        build("llama").save_pretrained(folder)
    accelerator.wait_for_everyone()
    heads_are_split_over_processes(folder)


if __name__ == "__main__":
    main()
