"""Rows that a probe of the class finds: for families without rows in the table, and for a class made up here."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.rows.head_blocks import HeadBlock, RowLayout
from rope_ext_hf.checkpoints.rows.row_layouts import ProbedLayouts, RotaryTensors
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.families import families, family
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.rows.row_gradients import Recording
from rope_ext_hf.patches.rows.row_probe import probe_rows, run_pairing
from tests.support.checkpoint_folders import OTHER
from tests.support.every_model import tiny
from tests.support.models import PAIRINGS, ROTATING, small_config

# --- a class that no table knows ----------------------------------------------------------------------------------

HEADS, KEY_HEADS, DIM, ROTARY = 4, 2, 16, 8


class OddConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "odd_names"


class OddMixer(nn.Module):
    """Attention with one fused weight, [q q k v] for each key head, whose heads rotate by half, interleaved."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.number = number
        self.wide = nn.Linear(config.hidden_size, (HEADS + 2 * KEY_HEADS) * DIM, bias=True)
        self.back = nn.Linear(HEADS * DIM, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        groups = self.wide(x).view(rows, tokens, KEY_HEADS, HEADS // KEY_HEADS + 2, DIM)
        queries, keys, values = groups[..., :-2, :], groups[..., -2:-1, :], groups[..., -1:, :]
        queries, keys = (rotated(part, cos[:, :, None, None], sin[:, :, None, None]) for part in (queries, keys))
        scores = torch.einsum("btghd,bugkd->bghtu", queries, keys) / DIM**0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.back(torch.einsum("bghtu,bugkd->btghd", weights, values).reshape(rows, tokens, -1))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, rest = x[..., :ROTARY], x[..., ROTARY:]
    cos, sin = (part[..., : ROTARY // 2] for part in (cos, sin))
    first, second = turning[..., 0::2], turning[..., 1::2]
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((both, rest), -1)


class OddBlock(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.before, self.mixer = nn.RMSNorm(config.hidden_size), OddMixer(config, number)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.mixer(self.before(x), cos, sin)  # type: ignore[no-any-return]


class OddForCausalLM(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = OddConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([OddBlock(config, number) for number in range(config.num_hidden_layers)])
        self.rotary_emb = PhiRotaryEmbedding(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Any:
        x = self.words(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        cos, sin = self.rotary_emb(x, position_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(x))


transformers.AutoConfig.register("odd_names", OddConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(OddConfig, OddForCausalLM, exist_ok=True)
transformers.AutoModel.register(OddConfig, OddForCausalLM, exist_ok=True)


def odd() -> Any:
    torch.manual_seed(0)
    config = OddConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=DIM,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": ROTARY / DIM},
    )
    return OddForCausalLM(config).eval()


FUSED = RowLayout(2, (HeadBlock(2, DIM, ROTARY), HeadBlock(1, DIM, ROTARY), HeadBlock(1, DIM)))


def test_a_class_that_nobody_knows_is_patched_and_converted(tmp_path: Path) -> None:
    model, ids = odd(), torch.arange(3, 40)[None]
    expected = model(ids).logits
    weight = model.blocks[1].mixer.wide.weight.detach().clone()
    rope.patch(model, "yarn", factor=4)
    assert not torch.equal(model(ids).logits, expected)
    rope.unpatch(model)
    assert torch.equal(model(ids).logits, expected)
    assert rope.describe(model).pairing == "interleaved"
    with pytest.warns(UserWarning, match="rotates in the interleaved pairing"):
        rope.convert(model, "half")
    converted = model.blocks[1].mixer.wide.weight
    order = [*range(0, ROTARY, 2), *range(1, ROTARY, 2), *range(ROTARY, DIM)]  # of one head
    heads = [head for head in range(HEADS + 2 * KEY_HEADS) if head % 4 != 3]  # all but values
    for head in range(HEADS + 2 * KEY_HEADS):
        rows = [head * DIM + row for row in (order if head in heads else range(DIM))]
        assert torch.equal(converted[head * DIM : (head + 1) * DIM], weight[rows])
    rope.convert(model, "interleaved")
    assert torch.equal(model(ids).logits, expected)


def test_a_folder_of_a_class_that_nobody_knows(tmp_path: Path) -> None:
    odd().save_pretrained(tmp_path / "source")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = rope.convert_checkpoint(tmp_path / "source", tmp_path / "half", "half", verify=True)
    assert report.converted == 4  # weights and biases of two layers
    assert not report.loads_natively
    with pytest.raises(rope.CheckpointError, match="runs 'interleaved' weights"):
        rope.from_pretrained(tmp_path / "half", "yarn", factor=2)
    rope.convert_checkpoint(tmp_path / "half", tmp_path / "back", "interleaved")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    assert len(rope.detect_pairing(tmp_path / "source").layers) == 2


def test_a_norm_over_all_heads_hides_no_row() -> None:
    """Olmo 3 has norms over all heads. A row far larger than the others used to be missed, and only the norm moved."""
    rows = probe_rows(small_config("olmo3"))
    modules = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
    assert [set(layer.rotated) for layer in rows.layers] == [modules] * 2


def test_a_rotated_norm_whose_projection_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To move the rows of the norm alone would be wrong."""
    targets = Recording.targets
    monkeypatch.setattr(
        Recording, "targets", lambda self: [each for each in targets(self) if not each.name.endswith("q_proj")]
    )
    config = small_config("olmo3")
    config.rms_norm_eps = 1e-3  # not the config of another test, whose result is kept
    with pytest.raises(UnsupportedModelError, match="has a row for every rotated dim of its queries"):
        probe_rows(config)


def test_its_rows_are_found() -> None:
    model = odd()
    rows = RotaryTensors(model.config, ROTARY)
    assert rows.pairing == "interleaved"
    assert rows.find("blocks.0.mixer.wide.weight", (128, 64)) == FUSED
    assert rows.find("blocks.0.mixer.wide.bias", (128,)) == FUSED
    assert rows.find("blocks.0.mixer.back.weight", (64, 64)) is None
    with pytest.raises(rope.CheckpointError, match="neither its class nor the family table has such a tensor"):
        rows.find("blocks.0.mixer.other.weight", (64, 64))


def test_rows_that_make_something_else_too_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the keys go into the output as they are, beside the scores."""
    attend = OddMixer.forward

    def leak(self: OddMixer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return attend(self, x, cos, sin) + self.back(self.wide(x)[..., : HEADS * DIM])  # type: ignore[no-any-return]

    monkeypatch.setattr(OddMixer, "forward", leak)
    config = odd().config
    config.rms_norm_eps = 1e-5  # not the config of another test, whose result is kept
    with pytest.raises(rope.UnsupportedModelError, match="something else than queries and keys"):
        RotaryTensors(config, ROTARY)


def test_layers_that_skip_the_rotation_by_a_rule_of_the_class_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first of four layers rotates, and the third one does not, which the config does not say."""
    attend = OddMixer.forward

    def skipping(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return attend(self, x, *((torch.ones_like(cos), 0 * sin) if self.number == 2 else (cos, sin)))

    monkeypatch.setattr(OddMixer, "forward", skipping)
    config = odd().config
    config.num_hidden_layers, config.rms_norm_eps = 4, 1e-4  # not the config of another test, whose result is kept
    rows = RotaryTensors(config, ROTARY)
    found = [rows.find(f"blocks.{number}.mixer.wide.weight", (128, 64)) for number in range(4)]
    assert found == [FUSED, FUSED, None, FUSED]


# --- families without rows in the table -----------------------------------------------------------------------------

NEW = ["exaone", "sarvam_moe", "sarvam_mla", "dory", "lara_mini", "apertus1p5_text", "hy_v4_vl", "hy_v4", "axk2"]
NEW = [name for name in NEW if name in transformers.CONFIG_MAPPING]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "exaone" else [pytest.mark.slow]) for n in NEW])
def test_a_family_without_rows_in_the_table(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / "source")
    now = str(rope.describe(model).pairing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = rope.convert_checkpoint(tmp_path / "source", tmp_path / "converted", OTHER[now], verify=True)
        rope.convert_checkpoint(tmp_path / "converted", tmp_path / "back", now, verify=True)
    assert "logits of both folders: " in str(report.verified)
    weights = "model.safetensors"
    assert (tmp_path / "back" / weights).read_bytes() == (tmp_path / "source" / weights).read_bytes()
    assert (tmp_path / "converted" / weights).read_bytes() != (tmp_path / "source" / weights).read_bytes()
    rope.detect_pairing(tmp_path / "source")


# --- the table and the probe ------------------------------------------------------------------------------------------

NOT_PROBED = {"gptj": "computes angles in its attention", "codegen": "as gptj", "roformer": "a table of angles"}
LISTED = [name for name in ROTATING if family(name).rotated and name not in NOT_PROBED]
UNLISTED = [name for name in ROTATING if not family(name).rotated]
SAMPLE = {"llama", "falcon", "cohere", "qwen3_next", "olmo3", "deepseek_v32", "glm", "longcat_flash"}


def order(layout: RowLayout) -> list[int]:
    return layout.to_pairing(torch.arange(layout.rows), "interleaved").tolist()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in LISTED])
def test_the_table_and_the_probe_agree(name: str) -> None:
    """The table lists rows of some layers that do not rotate; to move queries and keys alike changes nothing there."""
    config = small_config(name)
    listed = RotaryTensors(config, ModelRope.of_checkpoint(config, empty_model(config)).rotary.dim)
    rows = probe_rows(config)
    probed = ProbedLayouts(rows)
    assert rows.pairing == families()[name].pairing
    assert any(probed.layers)
    # longcat_flash has two attention modules in a layer
    for expected, found, layer in zip(listed.layers, probed.layers, rows.layers, strict=False):
        of_heads = {re.sub(r"\.norms\.\d+$", "", module): layout for module, layout in found.items()}
        assert not of_heads.keys() - expected.keys()
        for module, layout in of_heads.items():
            assert order(layout) == order(expected[module]), module
            assert layout.pairing == expected[module].pairing, module
            sides = [{block.side for block in each.blocks if block.rotary} for each in (layout, expected[module])]
            assert sides[0] == sides[1], module
        held = {module for module in expected if any(f".{module}." in f".{tensor}" for tensor in layer.names)}
        assert not found or held <= of_heads.keys(), f"the probe misses {held - of_heads.keys()}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in UNLISTED])
def test_the_probe_finds_the_pairing_with_all_heads_and_with_few(name: str) -> None:
    """That the rows are the right ones is shown by logits, in test_conversion_families.py."""
    config = small_config(name)
    assert [probe_rows(config).pairing, run_pairing(config)] == [PAIRINGS[name]] * 2


# --- a permutation of transformers' own ----------------------------------------------------------------------------


def test_permute_for_rope_takes_keys_for_as_many_heads_as_queries() -> None:
    """8 query and 2 key heads of 8 dims: its keys come out as they were; ours move as the queries do."""
    permuting = pytest.importorskip("transformers.core_model_loading")
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    queries, keys = (torch.arange(float(rows))[:, None].expand(rows, 3) for rows in (64, 16))
    theirs = permuting.PermuteForRope()
    layouts = RotaryTensors(config, 8).layers[0]
    assert torch.equal(theirs._permute_for_rope(queries, config), layouts["q_proj"].to_pairing(queries, "half"))
    assert torch.equal(theirs._permute_for_rope(keys, config), keys)
    assert not torch.equal(layouts["k_proj"].to_pairing(keys, "half"), keys)


@pytest.mark.parametrize("model_type", ["nemotron_h", "blt"])
def test_a_class_without_rotary_modules_is_refused_with_that_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no rotary position embedding that can be replaced"):
        rope.convert(tiny(model_type), to="interleaved", source_pairing="half")


def test_a_config_without_a_number_of_layers_has_no_pairing() -> None:
    """Nemotron H lists its layers, and states no number of them."""
    assert run_pairing(tiny("nemotron_h").config) is None
