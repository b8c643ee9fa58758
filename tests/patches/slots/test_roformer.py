"""RoFormer, whose angles are a table in its weights: patched, saved and loaded plainly, unpatched, refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import RoFormerConfig, RoFormerForCausalLM, RoFormerForMaskedLM

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from tests.support.models import TRAINED, VOCABULARY, static_cases, tokens

CASES = static_cases("llama")  # of heads of 16 dims, as here
CLASSES = [
    "RoFormerModel",
    "RoFormerForMaskedLM",
    "RoFormerForSequenceClassification",
    "RoFormerForTokenClassification",
    "RoFormerForQuestionAnswering",
    "RoFormerForCausalLM",
]


def build(cls: str = "RoFormerForMaskedLM", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    config = RoFormerConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=TRAINED,
        initializer_range=0.15,
        is_decoder=cls.endswith("CausalLM"),
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, cls)(config).to(dtype).eval()


@torch.no_grad()
def output(model: Any, ids: Tensor) -> Tensor:
    first: Tensor = next(iter(model(input_ids=ids).values()))
    return first


def table_of(form: dict[str, Any], rows: int) -> Tensor:
    """Return [sin | cos] of every position, by the frequencies of transformers' Llama with these rope settings."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=4 * TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0} | copy.deepcopy(form),
    )
    rotary: Any = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * rotary.inv_freq.double()
    table: Tensor = torch.cat((angles.sin(), angles.cos()), -1) * rotary.attention_scaling
    return table.float()


def with_table(model: Any, table: Tensor) -> Any:
    """Return a copy of an unpatched model, with this table."""
    model = copy.deepcopy(model)
    encoder = getattr(model, "roformer", model).encoder
    encoder.embed_positions = type(encoder.embed_positions)(*table.shape)
    encoder.embed_positions.weight.data = table
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_patched_model_is_one_with_the_table_of_transformers_frequencies(case: str, tmp_path: Path) -> None:
    """The inputs are longer than the table was; and plain loading of the saved model gives the same."""
    method, params, form = CASES[case].method, CASES[case].params, CASES[case].form
    stock, ids = build(), tokens(3 * TRAINED, batch=2)
    expected = output(with_table(stock, table_of(form, 4 * TRAINED)), ids)
    target: dict[str, Any] = {} if "factor" in params else {"target_length": 4 * TRAINED}
    model = rope.patch(copy.deepcopy(stock), method, **params, **target)
    torch.testing.assert_close(output(model, ids), expected, atol=1e-4, rtol=0)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["roformer.encoder.embed_positions.weight"].shape == (256, 16)
    plain = RoFormerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(output(plain, ids), output(model, ids))
    described, loaded = rope.describe(model), rope.describe(plain)
    assert (loaded.method, loaded.extended_length) == (described.method, 4 * TRAINED)
    assert loaded.wavelengths == pytest.approx(described.wavelengths)
    again = rope.from_pretrained(tmp_path)
    assert torch.equal(output(again, ids), output(model, ids))
    rope.unpatch(again)
    assert torch.equal(output(again, ids[:, :TRAINED]), output(stock, ids[:, :TRAINED]))
    assert again.state_dict().keys() == stock.state_dict().keys()
    assert again.config.to_dict().keys() - {"architectures"} == stock.config.to_dict().keys() - {"architectures"}
    assert again.config.max_position_embeddings == TRAINED


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_patched_and_unpatched(cls: str, tmp_path: Path) -> None:
    stock, ids = build(cls), tokens(2 * TRAINED)
    with pytest.raises(IndexError):
        output(stock, ids)
    model = copy.deepcopy(stock)
    before = model.config.to_dict()
    rope.patch(model, "yarn", factor=4)
    expected = output(with_table(stock, table_of(CASES["yarn"].form, 4 * TRAINED)), ids)
    torch.testing.assert_close(output(model, ids), expected, atol=1e-4, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(type(model).from_pretrained(tmp_path), ids), output(model, ids))
    rope.unpatch(model)
    assert torch.equal(output(model, ids[:, :TRAINED]), output(stock, ids[:, :TRAINED]))
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert model.config.to_dict() == before | {"architectures": [cls], "dtype": "float32"}


def test_in_bfloat16(tmp_path: Path) -> None:
    """The table is computed exactly and rounded once."""
    model, ids = rope.patch(build(dtype=torch.bfloat16), "linear", factor=4), tokens(2 * TRAINED)
    exact = table_of(CASES["linear"].form, 4 * TRAINED)
    stock = with_table(build(dtype=torch.bfloat16), exact.bfloat16())
    assert torch.equal(output(model, ids), output(stock, ids))
    model.save_pretrained(tmp_path)
    plain = RoFormerForMaskedLM.from_pretrained(tmp_path, dtype="auto")
    assert plain.dtype == torch.bfloat16
    assert torch.equal(output(plain, ids), output(model, ids))


def test_a_folder_whose_table_has_as_many_rows_as_before(tmp_path: Path) -> None:
    """The size of the table does not tell that it is that of a patch."""
    stock, ids = build(), tokens(TRAINED)
    rope.patch(copy.deepcopy(stock), "theta", theta=500.0).save_pretrained(tmp_path)
    loaded = rope.from_pretrained(tmp_path)
    assert not torch.equal(output(loaded, ids), output(stock, ids))
    assert torch.equal(output(rope.unpatch(loaded), ids), output(stock, ids))


@pytest.mark.filterwarnings("ignore:the folder of this model records:UserWarning")
def test_a_plainly_loaded_folder_can_be_patched_anew(tmp_path: Path) -> None:
    """The new patch starts from the model before the recorded patch; unpatching gives the loaded model."""
    stock, ids = build(), tokens(3 * TRAINED)
    rope.patch(copy.deepcopy(stock), "linear", factor=4).save_pretrained(tmp_path)
    plain = RoFormerForMaskedLM.from_pretrained(tmp_path)
    as_loaded = output(plain, ids)
    rope.patch(plain, "ntk", factor=4)
    assert torch.equal(output(plain, ids), output(rope.patch(stock, "ntk", factor=4), ids))
    assert torch.equal(output(rope.unpatch(plain), ids), as_loaded)


def test_a_cache_continues() -> None:
    model = rope.patch(build("RoFormerForCausalLM"), "yarn", factor=4)
    ids = tokens(2 * TRAINED, batch=2)
    with torch.no_grad():
        past = model(input_ids=ids[:, :100], use_cache=True).past_key_values
        parts = [
            model(input_ids=ids[:, i : i + 1], past_key_values=past, use_cache=True).logits for i in range(100, 128)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), output(model, ids)[:, 100:], atol=1e-4, rtol=0)
    generated = model.generate(ids[:, :60], max_new_tokens=10, do_sample=False)
    assert generated.shape == (2, 70)


def test_state_dicts_go_in_and_out() -> None:
    """The table in a state_dict that is loaded is ignored: the method decides."""
    model, ids = rope.patch(build(), "linear", factor=4), tokens(TRAINED)
    expected = output(model, ids)
    state = model.state_dict()
    assert state.keys() == build().state_dict().keys()
    torch.testing.assert_close(
        state["roformer.encoder.embed_positions.weight"],
        table_of(CASES["linear"].form, 4 * TRAINED),
        atol=1e-6,
        rtol=0,
    )
    model.load_state_dict(state | {"roformer.encoder.embed_positions.weight": torch.zeros(3, 16)})
    assert torch.equal(output(model, ids), expected)
    copied = copy.deepcopy(model)
    assert torch.equal(output(copied, ids), expected)
    assert torch.equal(output(rope.unpatch(copied), ids), output(build(), ids))


def test_learnable_frequencies_get_gradients_and_are_saved(tmp_path: Path) -> None:
    model, ids = rope.patch(build(), "learnable"), tokens(TRAINED)
    trained = model.roformer.encoder.embed_positions.tables["all"].trained
    model(input_ids=ids, labels=ids).loss.backward()
    assert trained.grad.abs().sum() > 0
    with torch.no_grad():
        trained -= 0.1 * torch.arange(8)
    model.save_pretrained(tmp_path)
    plain = RoFormerForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(output(plain, ids), output(model, ids), atol=1e-5, rtol=0)
    again = rope.from_pretrained(tmp_path)
    torch.testing.assert_close(output(again, ids), output(model, ids), atol=1e-5, rtol=0)


def test_description() -> None:
    model = build()
    assert "it is now (rope_type default)" in str(rope.describe(model))
    described = rope.describe(rope.patch(model, "yarn", factor=4))
    assert (described.pairing, described.theta, described.trained_length) == ("interleaved", 10_000.0, TRAINED)
    assert described.rotating_layers == (2, 2)
    assert described.save_route == "a table of 256 positions in the weights, which every version of transformers reads"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("dynamic-yarn", "rotates all rows of a batch by one table .* use a static method"),
        ("rerope", "does not go through transformers' attention interface, so rerope"),
    ],
)
def test_refused_methods(method: str, message: str) -> None:
    model = build()
    with pytest.raises(rope.UnsupportedModelError, match=message):
        rope.patch(model, method, target_length=4 * TRAINED)
    assert torch.equal(output(model, tokens(TRAINED)), output(build(), tokens(TRAINED)))


def test_rotated_values() -> None:
    """An attention factor would scale the values, and a conversion would have to move columns of the next weight."""
    stock, ids = build(rotary_value=True), tokens(2 * TRAINED)
    with pytest.raises(rope.UnsupportedModelError, match=r"'rotary_value' .* attention factor of yarn would scale"):
        rope.patch(stock, "yarn", factor=4)
    expected = output(with_table(stock, table_of(CASES["ntk"].form, 4 * TRAINED)), ids)
    with pytest.raises(rope.UnsupportedModelError, match=r"takes its values from the projection of the keys"):
        rope.convert(stock, to="half")
    torch.testing.assert_close(output(rope.patch(stock, "ntk", factor=4), ids), expected, atol=1e-4, rtol=0)


def test_another_table_is_refused() -> None:
    """A patch would start from a geometry that the model does not have."""
    with pytest.raises(rope.UnsupportedModelError, match="are not what its config describes"):
        rope.patch(with_table(build(), table_of({"rope_theta": 500.0}, TRAINED)), "linear", factor=2)


def test_a_copy_of_a_folder_would_keep_its_table(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "source")
    rope.patch(model, "linear", factor=2)
    with pytest.raises(rope.CheckpointError, match="keeps its angles in its weights"):
        save_patched_folder(model, tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_conversion_of_a_live_model_and_back() -> None:
    """The expected order of rows is written out, because the class can run one rotation only."""
    model, ids = build("RoFormerForCausalLM"), tokens(TRAINED)
    expected = output(model, ids)
    weight = model.roformer.encoder.layer[0].attention.self.query.weight.clone()
    with pytest.warns(UserWarning, match="RoFormerForCausalLM rotates in the interleaved pairing"):
        rope.convert(model, to="half")
    order = [head * 16 + 2 * pair + member for head in range(4) for member in range(2) for pair in range(8)]
    assert torch.equal(model.roformer.encoder.layer[0].attention.self.query.weight, weight[order])
    assert model.config.rope_pairing == "half"
    rope.convert(model, to="interleaved")
    assert torch.equal(output(model, ids), expected)


def test_offset_law() -> None:
    """Scores depend on differences of positions alone, so that masked tokens at the beginning change nothing."""
    model, ids = rope.patch(build(), "ntk", factor=4), tokens(TRAINED, batch=1)
    shifted = torch.cat((torch.full((1, 100), 5), ids), 1)
    mask = torch.cat((torch.zeros(1, 100, dtype=torch.int64), torch.ones_like(ids)), 1)
    with torch.no_grad():
        moved = model(input_ids=shifted, attention_mask=mask).logits[:, 100:]
    torch.testing.assert_close(moved, output(model, ids), atol=1e-4, rtol=0)
    assert isinstance(model, nn.Module)


def test_perplexity_of_a_causal_model() -> None:
    """Measurements run on this model as on any other."""
    from rope_ext_hf.eval import perplexity
    from rope_ext_hf.reading.text.documents import Tokens

    ids = tokens(600)[0]
    text = [Tokens("text", ids, tuple(range(1, 601)))]
    model = build("RoFormerForCausalLM")
    assert isinstance(model, RoFormerForCausalLM)
    results = perplexity(rope.patch(model, "linear", factor=4), text, lengths=[64, 256], max_spans=2, bos=False)
    with torch.no_grad():
        whole = model(input_ids=ids[None, :256]).logits
    assert whole.shape == (1, 256, VOCABULARY)
    assert [result.length for result in results] == [64, 256]
    assert all(2 < result.perplexity < 10_000 for result in results)
