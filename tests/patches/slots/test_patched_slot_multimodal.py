"""Multimodal RoPE: models whose positions have several axes, with text and with images; every family built small."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.models.families import family
from rope_ext_hf.patches.slots.slot_finding import find_slots
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from tests.support.checkpoint_folders import OTHER, rotate_otherwise
from tests.support.every_model import tiny
from tests.support.model_checks import state
from tests.support.models import PAIRINGS, tokens

IMAGE = 110
TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}
VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "in_channels": 3,
}
SMALL_VISION = VISION | {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32}
QWEN3_VISION = SMALL_VISION | {"num_position_embeddings": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONTIGUOUS = (0, 0, 1, 1, 1, 2, 2, 2)
INTERLEAVED = (0, 1, 2, 0, 1, 2, 0, 1)
# Family: its class less the ending, the text settings, the vision settings, the axis of each pair.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "qwen2_vl": ("Qwen2VL", {"mrope_section": [2, 3, 3]}, VISION | {"embed_dim": 32, "hidden_size": 64}, CONTIGUOUS),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"mrope_section": [2, 3, 3]},
        SMALL_VISION | {"fullatt_block_indexes": [0], "window_size": 16},
        CONTIGUOUS,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"mrope_section": [3, 3, 2]},
        QWEN3_VISION | {"deepstack_visual_indexes": [0]},
        INTERLEAVED,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"mrope_section": [3, 3, 2], **EXPERTS},
        QWEN3_VISION | {"deepstack_visual_indexes": [0]},
        INTERLEAVED,
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, **HYBRID},
        QWEN3_VISION,
        INTERLEAVED[:4],
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
            **HYBRID,
        },
        QWEN3_VISION,
        INTERLEAVED[:4],
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        {
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
            **HYBRID,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        QWEN3_VISION,
        INTERLEAVED[:4],
    ),
    "glm4v": (
        "Glm4v",
        {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0, "pad_token_id": 0},
        SMALL_VISION | {"image_size": 16},
        CONTIGUOUS,
    ),
}
FAMILIES = {name: settings for name, settings in FAMILIES.items() if hasattr(transformers, f"{settings[0]}Config")}
ROPE_KEYS = ("mrope_section", "partial_rotary_factor")
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def build(model_type: str, layers: int = 2, **form: Any) -> Any:
    """Return a seeded model of text and images, with rope settings of transformers beside the family's own."""
    name, text, vision, _ = FAMILIES[model_type]
    settings = {"rope_type": "default", "rope_theta": 1e4} | {key: text[key] for key in ROPE_KEYS if key in text}
    text = {key: value for key, value in text.items() if key not in ROPE_KEYS}
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text | {"num_hidden_layers": layers, "rope_parameters": settings | form},
        vision_config=vision,
        **TOKENS,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def with_image(length: int = 40) -> dict[str, Tensor]:
    """Return the inputs of text around an image of 4 x 4 patches, which become 2 x 2 tokens."""
    ids = tokens(length).clone()
    ids[:, 3:9] = torch.tensor([112, *[IMAGE] * 4, 113])
    pixels = torch.randn(16, 3 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


INPUTS = {"text": {"input_ids": tokens(40)}, "image": with_image()}


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model(**inputs).logits
    return actual


@every_family
def test_each_pair_keeps_the_axis_of_its_family(model_type: str) -> None:
    (slot,) = find_slots(build(model_type))
    assert slot.axis_of_pair == {None: FAMILIES[model_type][-1]}


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("content", INPUTS)
def test_a_patch_equals_the_same_weights_loaded_natively(model_type: str, content: str) -> None:
    model, inputs = build(model_type), INPUTS[content]
    before, as_loaded = state(model), logits(model, **inputs)
    rope.patch(model, "yarn", factor=1)
    torch.testing.assert_close(logits(model, **inputs), as_loaded, atol=1e-5, rtol=0)
    rope.patch(model, "yarn", factor=4)
    form: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    native = build(model_type, **form)
    native.load_state_dict(model.state_dict(), strict=False)
    expected = logits(native, **inputs)
    torch.testing.assert_close(logits(model, **inputs), expected, atol=1e-4, rtol=0)
    assert (expected - as_loaded).abs().max() > 1e-3
    rope.unpatch(model)
    assert state(model) == before
    assert torch.equal(logits(model, **inputs), as_loaded)


def with_video(length: int = 40) -> dict[str, Tensor]:
    """Return the inputs of text around a video of two frames of 4 x 4 patches, which become 2 x 2 tokens each."""
    ids = tokens(length).clone()
    ids[:, 3:13] = torch.tensor([112, *[TOKENS["video_token_id"]] * 8, 113])
    pixels = torch.randn(32, 3 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": 2 * (ids == TOKENS["video_token_id"]).int(),
    }


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_video_is_read_as_natively(model_type: str) -> None:
    """The tokens of a video differ in time as well as in height and width."""
    model, inputs = build(model_type), with_video()
    as_loaded = logits(model, **inputs)
    positions, _ = model.model.get_rope_index(
        **{key: value for key, value in inputs.items() if key != "pixel_values_videos"}
    )
    assert positions[0, 0, 4:12].unique().numel() > 1
    rope.patch(model, "yarn", factor=4)
    native = build(model_type, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    native.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(logits(model, **inputs), logits(native, **inputs), atol=1e-4, rtol=0)
    assert (logits(model, **inputs) - as_loaded).abs().max() > 1e-3
    with pytest.raises(LengthError, match="differ from axis to axis"):
        rope.patch(model, "dynamic-yarn")(**inputs)


@pytest.mark.slow
@every_family
def test_generating_from_an_image_equals_whole_forwards(model_type: str) -> None:
    model, inputs = rope.patch(build(model_type), "ntk", factor=4), with_image()
    with torch.no_grad():
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for at in range(40, 46):
        ids = generated[:, :at]
        whole = logits(model, **inputs | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()})
        assert generated[0, at] == whole[0, -1].argmax()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in ("qwen2_vl", "qwen3_vl", "qwen4_exp")])
def test_an_image_from_the_image_processor_is_read_as_natively(model_type: str) -> None:
    """The processors themselves need torchvision; this is the part of them that reads images."""
    processing = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    )  # newer than the oldest
    image = Image.effect_noise((40, 24), 80).convert("RGB")
    processor = processing.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=960
    )
    read = processor([image], return_tensors="pt")
    count = int(read["image_grid_thw"].prod()) // 4
    assert count == 15  # 6 x 10 patches, four to a token
    ids = torch.cat([tokens(5), torch.tensor([[112, *[IMAGE] * count, 113]]), tokens(20)], dim=1)
    inputs = {**read, "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    model = rope.patch(build(model_type), "yarn", factor=4)
    native = build(model_type, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    native.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(logits(model, **inputs), logits(native, **inputs), atol=1e-4, rtol=0)
    with torch.no_grad():
        generated = [patched.generate(**inputs, max_new_tokens=8, do_sample=False) for patched in (model, native)]
    assert torch.equal(*generated)


@pytest.mark.slow
@every_family
def test_a_saved_model_loads_plainly(model_type: str, tmp_path: Path) -> None:
    model = rope.patch(build(model_type), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    for inputs in INPUTS.values():
        torch.testing.assert_close(logits(loaded, **inputs), logits(model, **inputs), atol=1e-4, rtol=0)
    with pytest.warns(UserWarning, match="256 tokens become 128"):
        again = rope.patch(loaded, "yarn", factor=2)
    assert "4.0" not in str(again.config.get_text_config().rope_parameters)
    assert again.config.get_text_config().max_position_embeddings == 128


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn"])
def test_decoding_of_text_follows_the_length(model_type: str, method: str) -> None:
    """With more than one layer of attention, hidden states would keep the frequencies that they were computed with."""
    layers = 2 if model_type == "qwen3_5" else 1  # the first of two is linear attention
    model, ids = rope.patch(build(model_type, layers), method), tokens(128)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :64], use_cache=True).past_key_values
        for at in range(64, 128):
            step = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(step.logits[:, -1], logits(model, input_ids=ids)[:, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        (name, method)
        for name in FAMILIES
        for method in ("dynamic-yarn", "dca")
        if (name, method) != ("qwen4_exp", "dca")
    ],
)
def test_positions_that_differ_between_axes_are_refused_at_the_call(model_type: str, method: str) -> None:
    model = build(model_type)
    as_loaded = logits(model, **INPUTS["text"])
    rope.patch(model, method)
    torch.testing.assert_close(logits(model, **INPUTS["text"]), as_loaded, atol=1e-4, rtol=0)
    with pytest.raises(LengthError, match="differ from axis to axis"):
        model(**INPUTS["image"])
    torch.testing.assert_close(logits(model, **INPUTS["text"]), as_loaded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_under_a_fixed_length_images_are_read_by_length_dependent_methods(model_type: str) -> None:
    model = build(model_type)
    as_loaded = logits(model, **INPUTS["image"])
    rope.patch(model, "dynamic-yarn")
    with rope.fixed_length(model, 64):
        torch.testing.assert_close(logits(model, **INPUTS["image"]), as_loaded, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_remapping_method_reads_text_beyond_its_reach(model_type: str) -> None:
    model, ids = rope.patch(build(model_type), "rerope", window=32), tokens(200)
    whole = logits(model, input_ids=ids)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :150], use_cache=True).past_key_values
        rest = model(input_ids=ids[:, 150:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 150:], atol=1e-4, rtol=0)


CONVERTED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "mistral4", "muse_glimmer", "muse_spark"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONVERTED)
def test_conversion_moves_the_rows_of_the_text_model_alone(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(model_type), tokens(24)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected, now = logits(model, input_ids=ids), PAIRINGS[model.config.get_text_config().model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rope.convert(model, OTHER[now])
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert moved
    assert all("layers." in name and "visual" not in name and "vision" not in name for name in moved)
    switch = family(model.config.get_text_config().model_type).pairing_switch
    if switch is None:
        assert (logits(model, input_ids=ids) - expected).abs().max() > 1e-2
        rotate_otherwise(monkeypatch, model_type, OTHER[now], importlib.import_module(type(model).__module__))
    torch.testing.assert_close(logits(model, input_ids=ids), expected, atol=1e-4, rtol=0)
    rope.convert(model, now)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


class TestModule:
    """`RotaryEmbedding` with an axis for each pair."""

    rotary = Rotary(16, 1e4, 64)
    axes = (0, 1, 2, 0, 1, 2, 0, 0)

    def positions(self) -> Tensor:
        return torch.randint(0, 5000, (3, 2, 7), generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize("layout", ["half", "interleaved", "bare"])
    def test_each_pair_has_the_angle_of_its_axis(self, layout: Any) -> None:
        merged = RotaryEmbedding("yarn", self.rotary, factor=4, layout="bare", axis_of_pair=self.axes)
        plain = RotaryEmbedding("yarn", self.rotary, factor=4, layout="bare")
        actual, positions = merged(torch.zeros(1), self.positions()), self.positions()
        for pair, axis in enumerate(self.axes):
            for ours, theirs in zip(actual, plain(torch.zeros(1), positions[axis]), strict=True):
                assert torch.equal(ours[..., pair], theirs[..., pair])
        arranged = RotaryEmbedding("yarn", self.rotary, factor=4, layout=layout, axis_of_pair=self.axes)
        cos, _ = arranged(torch.zeros(1), positions)
        expected = {"half": actual[0].repeat(1, 1, 2), "interleaved": actual[0].repeat_interleave(2, -1)}
        assert torch.equal(cos, expected.get(layout, actual[0]))

    def test_positions_of_too_few_axes_are_refused(self) -> None:
        module = RotaryEmbedding("yarn", self.rotary, factor=4, axis_of_pair=self.axes)
        with pytest.raises(LengthError, match=r"\(2, 2, 7\) have 2 axes, and this model rotates by 3: give"):
            module(torch.zeros(1), self.positions()[:2])

    @pytest.mark.parametrize("method", ["yarn", "dynamic-ntk"])
    def test_equal_axes_are_plain_rope_bit_for_bit(self, method: str) -> None:
        parameters: dict[str, Any] = {"factor": 4} if method == "yarn" else {}
        merged = RotaryEmbedding(method, self.rotary, axis_of_pair=self.axes, **parameters)
        plain = RotaryEmbedding(method, self.rotary, **parameters)
        positions = torch.arange(300).expand(2, -1)
        for position_ids in (positions, positions[None], positions.expand(3, -1, -1)):
            for ours, theirs in zip(
                merged(torch.zeros(1), position_ids), plain(torch.zeros(1), positions), strict=True
            ):
                assert torch.equal(ours, theirs)

    def test_the_length_of_a_row_is_its_largest_position_over_all_axes(self) -> None:
        module = RotaryEmbedding("dynamic-ntk", self.rotary, axis_of_pair=self.axes)
        positions = torch.zeros(3, 1, 4, dtype=torch.int64)
        positions[1, 0, 2] = 299
        actual = module(torch.zeros(1), positions)
        with module.at_length(300):
            for ours, theirs in zip(actual, module(torch.zeros(1), positions), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

    def test_it_moves_with_its_model(self) -> None:
        module = RotaryEmbedding("yarn", self.rotary, factor=4, axis_of_pair=self.axes)
        before = module(torch.zeros(1), self.positions())
        emptied = torch.nn.ModuleList([module]).to("meta").to_empty(device="cpu")[0]
        for ours, theirs in zip(emptied(torch.zeros(1), self.positions()), before, strict=True):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("axes", [(0,) * 7, (-1, *(0,) * 7)])
    def test_impossible_axes_are_refused(self, axes: tuple[int, ...]) -> None:
        with pytest.raises(
            MethodError, match="axis_of_pair must have the index of an axis, 0 or larger, for each of 8 pairs"
        ):
            RotaryEmbedding("default", self.rotary, axis_of_pair=axes)
