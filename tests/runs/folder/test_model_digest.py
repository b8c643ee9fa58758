"""What changes the digest of a model, drawn from its own configs, modules and tensors; and what does not."""

from __future__ import annotations

import copy
import hashlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.runs.folder import model_digest as module
from rope_ext_hf.runs.folder.model_digest import BLOCK_BYTES, model_digest
from tests.support.models import ROTATING, build, build_known, logits, tokens

WHERE_FROM = {"_name_or_path", "_commit_hash", "_auto_class", "auto_map", "transformers_version", "architectures"}
DTYPE = {"dtype", "torch_dtype", "_post_init_done"}
"""What cannot change a number; every other field of a config must change the digest."""

Place = tuple[Any, str]


def perturbed(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return math.nextafter(value, math.inf)
        case str():
            return value + "x"
        case dict():
            return value | {"one more": 1}
        case list() | tuple():
            return [*value, 1]
        case set():
            return value | {"one more"}
        case None:
            return 1
    return None


def fields(config: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Every (mapping, key) of a config that holds a value, those of nested configs and dicts too; is it to count?"""
    for key, value in list(vars(config).items()):
        counts = key not in WHERE_FROM | DTYPE
        if hasattr(value, "model_type"):
            yield from fields(value)
        elif perturbed(value) is not None:
            yield vars(config), key, counts
            if isinstance(value, dict):
                yield from ((value, inner, counts) for inner in list(value) if perturbed(value[inner]) is not None)


def check_fields(model: Any) -> int:
    plain, count = model_digest(model), 0
    for mapping, key, counts in list(fields(model.config)):
        before = mapping[key]
        mapping[key] = perturbed(before)
        assert (model_digest(model) != plain) == counts, key
        mapping[key] = before
        count += counts
    assert model_digest(model) == plain
    return count


def flip(tensor: Tensor, index: int) -> None:
    """Change the lowest bit of one byte."""
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[index] ^= 1


def check_tensors(model: Any) -> int:
    plain, draws = model_digest(model), torch.Generator().manual_seed(3)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        index = int(torch.randint(tensor.nbytes, (), generator=draws))
        flip(tensor, index)
        assert model_digest(model) != plain, name
        flip(tensor, index)
    assert model_digest(model) == plain
    return len(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_every_field_of_the_config_counts(name: str) -> None:
    assert check_fields(build(name)) > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_every_bit_of_every_parameter_and_buffer_counts(name: str) -> None:
    """DeepSeek's e_score_correction_bias and the inverse frequencies, which are not saved, among them."""
    model = build(name)
    assert check_tensors(model) > 20
    assert name != "deepseek_v3" or any(key.endswith("e_score_correction_bias") for key, _ in model.named_buffers())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROTATING)
def test_every_field_and_tensor_of_every_family_counts(name: str) -> None:
    model = build_known(name)
    ids, plain = tokens(24), model_digest(model)
    check_fields(model)
    check_tensors(model)
    logits(model, ids)
    assert model_digest(model) == plain


@pytest.mark.slow
def test_every_setting_of_every_module_counts() -> None:
    model = build("llama")
    plain, skipped, internal = model_digest(model), [], set(vars(nn.Module()))
    for name, part in model.named_modules():
        for key, value in list(vars(part).items()):
            if key in internal or perturbed(value) is None:
                continue
            vars(part)[key] = perturbed(value)
            if model_digest(model) == plain:
                skipped.append(key)
            vars(part)[key] = value
        part.training = not part.training  # dropout
        assert model_digest(model) != plain, name
        part.training = not part.training
    assert set(skipped) <= {"name_or_path", "_is_hf_initialized"}


@pytest.mark.slow
def test_it_is_the_same_for_the_same_model(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "one")
    build("llama").save_pretrained(tmp_path / "elsewhere" / "two")
    one, again, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "one", "elsewhere/two")
    )
    assert model_digest(one) == model_digest(again) == model_digest(two)
    program = (
        "import sys; from transformers import AutoModelForCausalLM as A; "
        "from rope_ext_hf.runs.folder.model_digest import model_digest as d; print(d(A.from_pretrained(sys.argv[1])))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "elsewhere" / "two")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == model_digest(one)
    logits(one, tokens(200))
    assert model_digest(one) == model_digest(again)
    assert model_digest(copy.deepcopy(one)) == model_digest(one)


@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "rerope", "self-extend", "dca"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.sampled(3)
def test_a_patch_does_not_count_but_what_its_user_changed_does(name: str, method: str) -> None:
    model = build(name)
    plain = model_digest(model)
    rope.patch(model, method, factor=4)
    logits(model, tokens(100))
    assert model_digest(model) == plain
    for key in ("rms_norm_eps", "max_position_embeddings"):
        before = getattr(model.config, key)
        setattr(model.config, key, perturbed(before))
        assert model_digest(model) != plain, key
        setattr(model.config, key, before)
    model.config.rope_parameters["more"] = 1
    assert model_digest(model) != plain
    del model.config.rope_parameters["more"]
    assert model_digest(rope.unpatch(model)) == plain


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_input_do_not_count_but_those_they_begin_with_do(form: str) -> None:
    rest = (
        {"factor": 4.0} if form == "dynamic" else {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    )
    settings = {"rope_type": form, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = build("llama", settings | rest)
    plain = model_digest(model)
    before = model.model.rotary_emb.inv_freq.clone()
    logits(model, tokens(200))
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)  # or the test would show nothing
    assert model_digest(model) == plain
    flip(model.model.rotary_emb.original_inv_freq, 0)
    assert model_digest(model) != plain


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_counts_and_whether_it_is_in_use() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), config)
    plain = model_digest(model)
    assert plain != model_digest(build("llama"))
    with model.disable_adapter():
        assert model_digest(model) != plain
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling["default"] *= 2
    assert model_digest(model) != plain
    layer.scaling["default"] /= 2
    assert model_digest(model) == plain
    flip(layer.lora_B["default"].weight, 5)
    assert model_digest(model) != plain


def test_offloaded_weights_are_read_where_they_are() -> None:
    model = build("llama")
    plain = model_digest(model)
    offloaded = cpu_offload(model, torch.device("cpu"))
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
    assert model_digest(offloaded) == plain
    weights = offloaded.model.layers[1].mlp.down_proj._hf_hook.weights_map
    flip(weights["weight"], 7)
    assert model_digest(offloaded) != plain
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}


def test_an_offloaded_buffer_counts_in_a_module_without_parameters() -> None:
    """As the learned multiplier of a rotary embedding is, with `offload_buffers=True`."""

    def with_buffer(value: float) -> Any:
        model = build("llama")
        model.model.rotary_emb.register_buffer("scale", torch.tensor([value]))
        return model

    one, two = (cpu_offload(with_buffer(value), torch.device("cpu"), offload_buffers=True) for value in (1.0, 2.0))
    assert one.model.rotary_emb.scale.is_meta
    assert model_digest(one) == model_digest(with_buffer(1.0)) != model_digest(two)


def test_scales_that_a_quantised_parameter_carries_count() -> None:
    """As bitsandbytes does: the codes are the parameter, what they stand for hangs on it."""

    class State:
        def __init__(self) -> None:
            self.absmax, self.blocksize = torch.ones(4), 64

    model = build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.quant_state = State()
    plain = model_digest(model)
    weight.quant_state.absmax[2] = 1.5
    assert model_digest(model) != plain


# --- tensors ----------------------------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    return module._digest_of_tensor(tensor, WeakTensorKeyDictionary())


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.int32, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, BLOCK_BYTES // 4 + 3])
def test_the_place_of_every_element_counts_in_every_dtype(dtype: torch.dtype, count: int) -> None:
    raw = torch.randint(0, 2, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    tensor = raw.view(dtype)
    plain = digest(tensor)
    assert digest(tensor.clone()) == plain
    assert digest(tensor[None]) != plain  # the shape
    assert digest(raw) != plain or dtype is torch.uint8
    for index in (0, len(raw) // 2, len(raw) - 1):
        raw[index] ^= 1
        assert digest(tensor) != plain
        raw[index] ^= 1
    if count > 7:
        assert digest(tensor.roll(1)) != plain


@pytest.mark.slow
def test_swapped_signs_count() -> None:
    """Words that differ in their highest bit alone: a plain sum of multiples would be the same."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.ones(64, 64, dtype=dtype)
        weight[:, -1] = -1
        for column in range(63):
            swapped = weight.clone()
            swapped[:, [column, 63]] = weight[:, [63, column]]
            assert digest(swapped) != digest(weight)
        assert digest(weight.T.contiguous()) != digest(weight)
        assert digest(weight.T) == digest(weight.T.contiguous())


def test_slices_of_a_larger_tensor_and_empty_ones_are_read() -> None:
    whole = torch.randn(1001)
    for start in range(1, 5):
        assert digest(whole[start:]) == digest(whole[start:].clone())
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.eye(3).to_sparse()) != digest(2 * torch.eye(3).to_sparse())


def test_a_large_tensor_is_read_whole_block_by_block() -> None:
    """Other blocks in the same places, and the same blocks in other places, are another tensor."""
    whole = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.int32)
    first, *others = torch.split(whole, BLOCK_BYTES // 4)
    assert digest(torch.cat([*others, first])) != digest(whole)
    assert digest(torch.cat([first, first, others[1]])) != digest(whole)
    hashed = hashlib.sha256()
    for part in ("shape", "[", "", "'torch.int32'", "", str(len(whole)), "shape", "]"):
        hashed.update(f"{len(part)}:{part}".encode())
    for block in (first, *others):
        hashed.update(hashlib.sha256(block.numpy().tobytes()).digest())
    assert digest(whole) == hashed.hexdigest()
