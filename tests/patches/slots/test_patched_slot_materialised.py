"""Models that are patched on the meta device and get their weights later; averages of models."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.forward import key_layout_probe
from tests.support.models import build, build_known, logits, rotary_of, tokens
from tests.support.tiers import needs_family


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "glm"])
@pytest.mark.parametrize(
    ("method", "params"), [("yarn", {"factor": 4}), ("dynamic-ntk", {}), ("linear", {"factor": 2})]
)
def test_unpatch_after_to_empty(name: str, method: str, params: dict[str, Any]) -> None:
    stock, ids = build(name), tokens(150)
    expected = logits(stock, ids)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    rope.patch(model, method, **params)
    model = model.to_empty(device="cpu").eval()
    for buffer in (
        buffer for path, buffer in model.named_buffers() if "replaced" not in path and "frequency" not in path
    ):
        if buffer.is_floating_point() and buffer.numel() == 1:  # Gemma's scale of embeddings: not of RoPE
            buffer.fill_(float(dict(stock.named_buffers())["model.embed_tokens.embed_scale"]))
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model, ids), logits(rope.patch(stock, method, **params), ids))
    assert torch.equal(logits(rope.unpatch(model), ids), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("method", ["rerope", "dca", "jet-long"])
def test_a_remapping_method_is_at_work_once_weights_are_there(name: str, method: str) -> None:
    stock, ids = build(name), tokens(150)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    rope.patch(model, method)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(stock.state_dict())
    with torch.inference_mode():
        model(ids)
    model(ids).logits.mean().backward()
    assert torch.equal(logits(model, ids), logits(rope.patch(stock, method), ids))
    assert torch.equal(logits(rope.unpatch(model), ids), logits(build(name), ids))


def test_threads_may_share_the_first_forward_with_weights() -> None:
    stock, ids = build("llama"), tokens(150)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    rope.patch(model, "dca")
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(stock.state_dict())
    expected = logits(rope.patch(stock, "dca"), ids)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: logits(model, ids), range(8)):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn", "dca"])
def test_a_patch_inside_init_empty_weights(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch there also finds out how the class keeps its keys, although no module made there has weights."""
    monkeypatch.setattr(key_layout_probe, "_small_layouts", key_layout_probe._small_layouts.__wrapped__)
    stock, ids = build(name), tokens(60)
    with init_empty_weights():
        model = type(stock)(stock.config)
        rope.patch(model, method)
    model.load_state_dict(stock.state_dict(), assign=True)
    model, expected = model.eval(), rope.patch(stock, method)
    new: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **new), expected.generate(ids, **new))


class OlderRotary(nn.Module):
    """A rotary module as Llama's was before it had a config (transformers 4.38), its arguments kept as attributes."""

    persistent = False
    inv_freq: Tensor

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float = 10_000.0, device: Any = None):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=self.persistent)
        self.attention_scaling = 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[..., None].float() * self.inv_freq.float()
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class KeepsNothing(OlderRotary):
    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float = 10_000.0):
        super().__init__(dim, max_position_embeddings, base)
        del self.dim


class KeepsNoBase(OlderRotary):
    """A rotary module that, built anew from its attributes, would have the default base."""

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float = 10_000.0):
        super().__init__(dim, max_position_embeddings, base)
        del self.base


class InWeights(KeepsNothing):
    persistent = True


def with_rotary(cls: type, model: Any) -> Any:
    """Return the model with a rotary module of this class, for base 5000."""
    decoder = getattr(model, "model", None) or model.gpt_neox
    decoder.rotary_emb = cls(2 * decoder.rotary_emb.inv_freq.shape[-1], 64, 5_000.0)
    return model


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Have memory that nothing has filled hold NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def later(cls: type, name: str, method: str, params: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model patched on the meta device that got its weights later, and the model that it got them from."""
    form = {"rope_type": "default", "rope_theta": 5_000.0}
    stock = with_rotary(cls, build(name, form))
    with torch.device("meta"):
        model = with_rotary(cls, type(stock)(stock.config))
        rope.patch(model, method, **params)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(stock.state_dict())
    return model, stock


OLDER_FAMILIES = ("llama", "qwen3", "mistral", "gpt_neox")
OLDER_METHODS = [
    ("yarn", {"factor": 4}),
    ("dynamic-ntk", {}),
    ("rerope", {}),
    ("dynamic-self-extend", {}),
]


def over_older_models(*classes: type) -> Any:
    """Run a test over these rotary classes, in every older family and under every kind of method."""

    def marked(test: Any) -> Any:
        test = pytest.mark.parametrize("cls", classes)(test)
        test = pytest.mark.parametrize(("method", "params"), OLDER_METHODS)(test)
        return pytest.mark.usefixtures("poisoned")(pytest.mark.parametrize("name", OLDER_FAMILIES)(test))

    return marked


@over_older_models(OlderRotary, InWeights)
def test_a_rotary_module_without_a_config_is_built_anew(
    cls: type, method: str, params: dict[str, Any], name: str
) -> None:
    model, stock = later(cls, name, method, params)
    rope.unpatch(model)
    assert torch.equal(logits(model, tokens(80)), logits(stock, tokens(80)))
    assert torch.equal(
        logits(rope.patch(model, method, **params), tokens(80)), logits(rope.patch(stock, method, **params), tokens(80))
    )


@over_older_models(KeepsNothing, KeepsNoBase)
def test_a_rotary_module_that_cannot_be_built_anew_is_not_given_back(
    cls: type, method: str, params: dict[str, Any], name: str
) -> None:
    model, stock = later(cls, name, method, params)
    refused = r"lost its frequencies.* Load the model anew with its weights"
    with pytest.raises(UnsupportedModelError, match=refused):
        rope.unpatch(model)
    with pytest.raises(UnsupportedModelError, match=refused):
        rope.patch(model, "linear", factor=2)
    if method == "yarn":  # whose own frequencies are there
        assert torch.equal(logits(model, tokens(80)), logits(rope.patch(stock, method, **params), tokens(80)))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_a_table_of_angles_is_filled_anew(method: str) -> None:
    needs_family("roformer")
    stock = build_known("roformer")
    with torch.device("meta"):
        model = type(stock)(stock.config)
    rope.patch(model, method, factor=2)
    model = model.to_empty(device="cpu").eval()
    state = stock.state_dict()
    model.load_state_dict(state)
    assert torch.equal(logits(model, tokens(40)), logits(rope.patch(stock, method, factor=2), tokens(40)))
    assert torch.equal(logits(rope.unpatch(model), tokens(40)), logits(rope.unpatch(stock), tokens(40)))


AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.999)},  # type: ignore[no-untyped-call]
    "EMA, one tensor at a time": {"avg_fn": get_ema_avg_fn(0.9)},  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    ("method", "params"), [("yarn", {"factor": 4}), ("dynamic-ntk", {}), ("rerope", {}), ("learnable", {})]
)
def test_an_average_of_models_with_their_buffers_rotates_as_they_do(
    average: str, method: str, params: dict[str, Any]
) -> None:
    model = rope.patch(build("llama"), method, **params)
    averaged = AveragedModel(model, use_buffers=True, **AVERAGES[average])
    for _ in range(5):
        averaged.update_parameters(model)
    far = torch.tensor([[1_000_000, 1_000_001]])
    with rope.fixed_length(model, 2_000_000), rope.fixed_length(averaged.module, 2_000_000):
        expected = rotary_of(model).tables["all"](torch.zeros(1), far)
        actual = rotary_of(averaged.module).tables["all"](torch.zeros(1), far)
    for part, reference in zip(actual, expected, strict=True):
        assert torch.allclose(part, reference, atol=1e-6)


def test_the_tables_are_no_buffers_and_follow_their_module() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    table = rotary_of(model).table("all")
    assert not list(table.buffers())
    assert model.to("meta").model.rotary_emb.table("all").frequency.device.type == "meta"
    assert not table.to_empty(device="cpu").frequency.is_meta
    table.to("meta")
    table(torch.zeros(1), torch.arange(3)[None])  # as where hooks of accelerate run a module elsewhere
    assert not table.frequency.is_meta
