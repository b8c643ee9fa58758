"""Embedding models of sentence-transformers, which calls `model.forward(...)` and keeps a length of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import rope_ext_hf as rope
from rope_ext_hf.reference import path

pytestmark = pytest.mark.filterwarnings("default")  # it warns of names of its own
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0},
    "dynamic-yarn": {},
    "dynamic-ntk": {},
    "rerope": {},
    "self-extend": {"factor": 4},
    "jet-long": {},
}
LONG, SHORT = "import os\n" * 60, "def f():\n    return 1\n"


@pytest.fixture
def model() -> Any:
    transformer = Transformer(str(path()), model_args={"dtype": "float32"})
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    pooling = Pooling(transformer.model.config.hidden_size, "mean")
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


@pytest.mark.parametrize("whole", [True, False], ids=["the whole model", "the model inside"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_text_has_one_embedding_whatever_stands_beside_it(method: str, whole: bool, model: Any) -> None:
    rope.patch(model if whole else model[0].auto_model, method, **METHODS[method])
    model.max_seq_length = 1024
    beside = model.encode([LONG, SHORT], batch_size=2)
    for row, text in zip(beside, (LONG, SHORT), strict=True):
        alone = model.encode([text])[0]
        assert np.abs(row - alone).max() < 1e-4 * alone.std()


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_its_length_follows_the_patch_of_the_whole_model(method: str, model: Any) -> None:
    assert model.max_seq_length == 256
    rope.patch(model, method, target_length=1024)
    assert model.max_seq_length == 1024
    assert model[0].tokenizer.model_max_length == 1024
    rope.patch(model, method, target_length=512)
    assert model.max_seq_length == 512
    assert rope.unpatch(model).max_seq_length == 256


def test_a_length_that_its_user_chose_stays(model: Any) -> None:
    model.max_seq_length = 100
    rope.patch(model, "yarn", factor=4.0)
    assert model.max_seq_length == 100
    model.max_seq_length = 700
    assert rope.unpatch(model).max_seq_length == 700
