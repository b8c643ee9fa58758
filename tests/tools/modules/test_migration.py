"""`migrate_to_rope`: equal to the encoder without positions; rotation, saving, training and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

import rope_ext_hf as rope
from rope_ext_hf.tools import modules
from tests.support.models import VOCABULARY, tokens

LENGTH = 32
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "initializer_range": 0.15}
_BERT = _SIZES | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {  # name of its classes, settings, tokens that it reads
    "bert": ("Bert", _BERT | {"max_position_embeddings": LENGTH}, LENGTH),
    "bert, untied": ("Bert", _BERT | {"max_position_embeddings": LENGTH, "tie_word_embeddings": False}, LENGTH),
    "roberta": ("Roberta", _BERT | {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1}, LENGTH),
    "camembert": ("Camembert", _BERT | {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1}, LENGTH),
    "xlm-roberta": ("XLMRoberta", _BERT | {"max_position_embeddings": LENGTH + 2, "pad_token_id": 1}, LENGTH),
    "electra": ("Electra", _BERT | {"embedding_size": 24, "max_position_embeddings": LENGTH}, LENGTH),
    "distilbert, sinusoidal": (
        "DistilBert",
        _SIZES
        | {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": LENGTH}
        | {"sinusoidal_pos_embds": True},
        LENGTH,
    ),
}
HEADS = ("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")


def build(name: str = "bert", head: str = "ForMaskedLM", **settings: Any) -> Any:
    """Return a small encoder in which every parameter is random."""
    stem, own, _ = FAMILIES[name]
    draws = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{stem}Config")(**own | settings)
        model = getattr(transformers, f"{stem}{head}")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draws))
    return model


@torch.no_grad()
def output(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    first: Tensor = next(iter(model(input_ids=ids, **kwargs).values()))
    return first


def without_positions(model: Any) -> Any:
    """Return a copy whose table of positions is zero, or in RoFormer rotates by nothing."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if name.endswith("position_embeddings.weight"):
            parameter.data.zero_()
        if name.endswith("embed_positions.weight"):
            parameter.data[:, : parameter.shape[1] // 2] = 0.0
            parameter.data[:, parameter.shape[1] // 2 :] = 1.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("encoder", FAMILIES)
def test_everything_but_positions_is_as_before(encoder: str, head: str, tmp_path: Path) -> None:
    source, ids = build(encoder, head), tokens(LENGTH, batch=2)
    before = copy.deepcopy(source.state_dict())
    migrated = modules.migrate_to_rope(source)
    assert type(migrated).__name__ == f"RoFormer{head}"
    assert migrated.config.max_position_embeddings == FAMILIES[encoder][2]
    torch.testing.assert_close(
        output(without_positions(migrated), ids), output(without_positions(source), ids), atol=2e-5, rtol=1e-4
    )
    assert not torch.allclose(output(migrated, ids), output(without_positions(migrated), ids), atol=1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())
    migrated.save_pretrained(tmp_path)
    assert torch.equal(output(type(migrated).from_pretrained(tmp_path), ids), output(migrated, ids))


def test_the_head_of_electra() -> None:
    source, ids = build("electra", "ForSequenceClassification", num_labels=3), tokens(LENGTH)
    migrated = modules.migrate_to_rope(source)
    assert output(migrated, ids).shape == (1, 3)
    torch.testing.assert_close(output(without_positions(migrated), ids), output(without_positions(source), ids))


def test_only_differences_of_positions_count() -> None:
    """Masked tokens at the beginning do not change the output of later ones; in BERT they do."""
    source, ids = build(), tokens(16)
    migrated = modules.migrate_to_rope(source)
    shifted = torch.cat((torch.full((1, 16), 5), ids), 1)
    mask = torch.cat((torch.zeros(1, 16, dtype=torch.int64), torch.ones_like(ids)), 1)
    moved = output(migrated, shifted, attention_mask=mask)[:, 16:]
    torch.testing.assert_close(moved, output(migrated, ids), atol=1e-4, rtol=0)
    assert not torch.allclose(output(source, shifted, attention_mask=mask)[:, 16:], output(source, ids), atol=1e-2)


def test_other_lengths_dtypes_and_modes() -> None:
    source = build().to(torch.bfloat16).train()
    migrated = modules.migrate_to_rope(source, target_length=100)
    assert source.training
    assert migrated.training
    assert migrated.dtype == torch.bfloat16
    assert output(migrated.eval(), tokens(100)).shape == (1, 100, VOCABULARY)
    patched = rope.patch(modules.migrate_to_rope(build()), "ntk", factor=4)
    assert output(patched, tokens(4 * LENGTH)).isfinite().all()
    assert rope.describe(patched).extended_length == 4 * LENGTH


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build("bert", "ForSequenceClassification"),
            r"no head that computes .*migrate_to_rope\(model.bert\)",
        ),
        (lambda: build("bert", "ForPreTraining"), "no head that computes what BertForPreTraining does"),
        (lambda: build("bert", "ForMaskedLM", is_decoder=True), "is a decoder"),
        (lambda: build("roberta", "ForMaskedLM", hidden_act="relu"), "computes something that RoFormer does not"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not an encoder that can be migrated to RoPE; model types that can:"),
        (
            lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)),
            "GPT2LMHeadModel is not an encoder",
        ),
    ],
)
def test_refused_models(make: Any, message: str) -> None:
    with pytest.raises(rope.UnsupportedModelError, match=message):
        modules.migrate_to_rope(make())


def test_refused_arguments() -> None:
    with pytest.raises(rope.MethodError, match="target_length must be a whole number of at least 1, got 0"):
        modules.migrate_to_rope(build(), target_length=0)
    with torch.device("meta"):
        empty = transformers.BertForMaskedLM(transformers.BertConfig(**FAMILIES["bert"][1]))
    with pytest.raises(rope.CheckpointError, match="are not in memory"):
        modules.migrate_to_rope(empty)


def trained(model: Any, steps: int, seed: int) -> float:
    """Train a model to predict the token before each masked one, and return the share that it predicts then."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draws = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(4, VOCABULARY, (32, LENGTH), generator=draws)
        hidden = torch.rand(ids.shape, generator=draws) < 0.2
        hidden[:, 0] = False
        hidden[:, 1:] &= ~hidden[:, :-1]
        labels = ids.roll(1, 1).masked_fill(~hidden, -100)
        return ids.masked_fill(hidden, 3), labels

    model.train()
    for _ in range(steps):
        ids, labels = batch()
        loss = functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    model.eval()
    ids, labels = batch()
    with torch.no_grad():
        is_right = model(input_ids=ids).logits.argmax(-1) == labels
    return float(is_right[labels >= 0].double().mean())


@pytest.mark.thorough
def test_a_migrated_encoder_is_trained_back() -> None:
    """A task that needs positions is lost with them, and learnt again in fewer steps than from the beginning."""
    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    source = transformers.BertForMaskedLM(transformers.BertConfig(**FAMILIES["bert"][1] | no_dropout))
    assert trained(source, 600, seed=0) > 0.9
    migrated = modules.migrate_to_rope(source)
    assert trained(migrated, 0, seed=1) < 0.5
    assert trained(migrated, 200, seed=2) > 0.9
