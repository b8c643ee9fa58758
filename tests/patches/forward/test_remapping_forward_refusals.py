"""Models and calls that remapping methods refuse, each with its reason; masks of models with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import LocalAttention, TokenPositions
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.patches.forward import attention_function
from rope_ext_hf.rotary.forward_state import running
from tests.support.models import TRAINED, build, build_known, logits, tokens


@pytest.mark.parametrize(
    ("model_type", "method", "reason"),
    [
        ("falcon", "dca", "does not go through transformers' attention interface"),
        ("deepseek_v32", "self-extend", "an index with rotated keys of its own"),
        ("glm_moe_dsa", "self-extend", "an index with rotated keys of its own"),
        ("doge", "self-extend", "a mask of its own, which adds to the scores"),
    ],
)
def test_the_reason_is_the_models_own(model_type: str, method: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        rope.patch(build_known(model_type, sliding_window=4096), method)  # no window in every layer, as doge has


@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe"])
def test_a_window_that_is_in_the_mask_alone_counts(model_type: str) -> None:
    """These classes do not pass their window on to the attention function."""
    layers = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2} if model_type == "qwen2_moe" else {}
    model = build_known(model_type, sliding_window=32, **layers)
    reason = "every layer of this model has a sliding window" if model_type == "phimoe" else "attends to everything"
    with pytest.raises(UnsupportedModelError, match=reason):
        rope.patch(model, "rerope", window=16)


def test_weights_that_are_not_numbers_are_named() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModelError, match="LlamaAttention are not finite numbers"):
        rope.patch(model, "dca")


def test_sharded_weights_are_named() -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = build("llama")
        fully_shard(model)
        with pytest.raises(UnsupportedModelError, match=r"sharded .* patch it first, then shard it"):
            rope.patch(model, "dca")
    finally:
        distributed.destroy_process_group()


def test_attention_weights_are_refused() -> None:
    model, ids = rope.patch(build("llama"), "dca"), tokens(20)
    with pytest.raises(UnsupportedModelError, match="without output_attentions=True"):
        model(ids, output_attentions=True)
    assert logits(model, ids).isfinite().all()


def test_attention_outside_a_forward_is_refused() -> None:
    model = rope.patch(build("llama"), "dca")
    x, attention = torch.zeros(1, 4, 2, 16), model.model.layers[0].self_attn
    with pytest.raises(UnsupportedModelError, match="outside a forward of its decoder"):
        attention_function.remapped_attention(attention, x, x, x, None)


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize(("name", "overrides"), [("llama", {}), ("mistral", {"sliding_window": None}), ("gemma2", {})])
def test_transformers_own_masks_take_the_fast_path(
    name: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of (tokens, tokens) would mean that the mask function was not recognised."""
    masks: list[Any] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        masks.append(attention_mask)
        return plain(module, query, key, value, attention_mask, **kwargs)

    plain = attention_function.remapped_attention
    monkeypatch.setattr(attention_function, "remapped_attention", spy)
    model, ids = rope.patch(build(name, **overrides), "dca"), tokens(100, batch=2)
    padding = torch.ones_like(ids)
    padding[1, :30] = 0
    for mask in (None, padding):
        logits(model, ids, attention_mask=mask)
    monkeypatch.undo()
    attention_function.register()
    assert any(mask is not None for mask in masks)
    assert all(mask is None or mask.ndim == 2 for mask in masks)


@pytest.mark.parametrize("padded", [0, 3])
def test_the_sliding_window_of_the_score_path_is_exact(padded: int) -> None:
    """Query m sees the keys m - w + 1 to m and no others: each key has a value of its own, which tells."""
    window, count = 4, 12
    keys = (torch.arange(count)[None] - padded).clamp(min=0)
    mask = (torch.arange(count) >= padded)[None] if padded else None
    positions = TokenPositions(keys, keys, None, mask)  # no left padding known: not the kernels
    query, key = torch.zeros(1, 1, count, 8), torch.zeros(1, 1, count, 8)
    value = torch.eye(count)[None, None]
    out = attend(LocalAttention(window), None, positions, query, key, value, 1.0)[0, 0]
    for m in range(padded, count):
        visible = [n for n in range(count) if out[m, n] > 0]
        assert visible == list(range(max(padded, m - window + 1), m + 1))


def gemma3_with_images(**text: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=build("gemma3").config.to_dict() | text,
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=90, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn", "dca"])
def test_a_mask_that_the_model_prepares_itself_is_no_mask_of_the_user(method: str) -> None:
    model = rope.patch(gemma3_with_images(), method)
    ids, short = tokens(2 * TRAINED) % 90, tokens(TRAINED // 2, seed=2) % 90
    alone = [logits(model, row)[0] for row in (ids, short)]
    assert model(ids, labels=ids).loss.isfinite()
    batch, mask = torch.full((2, 2 * TRAINED), 3), torch.ones(2, 2 * TRAINED, dtype=torch.int64)
    batch[0], batch[1, : TRAINED // 2], mask[1, TRAINED // 2 :] = ids[0], short[0], 0
    together = logits(model, batch, attention_mask=mask)
    for row, expected, real in zip(together, alone, mask.bool(), strict=True):
        torch.testing.assert_close(row[real], expected, atol=1e-4, rtol=0)


def test_a_prepared_mask_of_the_user_is_still_refused_in_a_model_with_images() -> None:
    model, ids = rope.patch(gemma3_with_images(), "dynamic-ntk"), tokens(80) % 90
    whole = torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()
    with pytest.raises(LengthError, match="prepared attention mask"):
        logits(model, ids, attention_mask={"full_attention": whole, "sliding_attention": whole})


REMAPPING_OVER_64: dict[str, dict[str, Any]] = {
    "rerope": {}, "leaky-rerope": {}, "dca": {}, "stairs": {}, "self-extend": {"factor": 4}, "jet-long": {},
}  # fmt: skip
_ADAPTERS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def with_adaption_prompt(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
    return peft.get_peft_model(model, config).eval()


@_ADAPTERS
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("order", ["patch-first", "adapter-first"])
@pytest.mark.parametrize("method", REMAPPING_OVER_64)
def test_adapters_that_rotate_queries_of_their_own_are_refused(method: str, order: str, family: str) -> None:
    """PEFT's AdaptionPrompt rotates queries by the layer's cos and sin, half of a rotation under remapping."""
    model, parameters = build(family), REMAPPING_OVER_64[method]
    refused = pytest.raises(UnsupportedModelError, match=r"AdaptedAttention wraps the attention of .*self_attn")
    if order == "patch-first":
        rope.patch(model, method, **parameters)
        model(tokens(70))
        adapted = with_adaption_prompt(model)
        with refused:
            adapted(tokens(70))
        assert next(running(), None) is None  # nothing is left of the forward that stopped
    else:
        adapted = with_adaption_prompt(model)
        with refused:
            rope.patch(adapted, method, **parameters)


@_ADAPTERS
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_adapters_that_rotate_queries_of_their_own_run_under_frequency_methods(method: str) -> None:
    results = []
    for order in ("patch-first", "adapter-first"):
        model = build("llama")
        if order == "patch-first":
            rope.patch(model, method, target_length=256)
        model = with_adaption_prompt(model)
        if order == "adapter-first":
            rope.patch(model, method, target_length=256)
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "adaption" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draws))
            results.append(model(tokens(150)).logits)
    assert torch.equal(*results)


class PassedOn(nn.Module):
    """A module that calls another one, as wrappers of torch.compile and of checkpointing do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_modules_around_attention_without_weights_are_let_through() -> None:
    model = rope.patch(build("llama"), "rerope")
    expected = model(tokens(150)).logits
    for layer in model.model.layers:
        layer.self_attn = PassedOn(layer.self_attn)
    assert torch.equal(model(tokens(150)).logits, expected)
    assert torch.equal(rope.patch(rope.unpatch(model), "rerope")(tokens(150)).logits, expected)


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "rerope", "dca"])
def test_weights_that_are_partitioned_over_processes(method: str) -> None:
    """DeepSpeed ZeRO-3 leaves parameters empty, and keeps their shape as `ds_shape`, until a forward gathers them."""
    model, ids = build("llama"), tokens(150)
    whole = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    parameters = {"factor": 4.0} if method == "yarn" else {}
    if method in ("rerope", "dca"):
        with pytest.raises(UnsupportedModelError, match=r"partitioned over processes \(DeepSpeed ZeRO-3\)"):
            rope.patch(model, method, **parameters)
    else:
        rope.patch(model, method, **parameters)
        for name, parameter in model.named_parameters():
            parameter.data = whole[name]
        assert torch.equal(model(ids).logits, rope.patch(build("llama"), method, **parameters)(ids).logits)
