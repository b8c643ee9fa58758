"""What engines are to compute for published recipes is what transformers computes from their entries."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.models.test_recipes import BY_NAME, published

pytestmark = pytest.mark.filterwarnings("ignore:Unrecognized keys")


@pytest.mark.parametrize("name", [name for name, recipe in BY_NAME.items() if recipe.entry])
def test_the_arguments_give_what_transformers_computes_from_the_entry(name: str) -> None:
    recipe = BY_NAME[name]
    assert recipe.entry is not None
    config = published(recipe)
    target = make_target(
        Model("MODEL", copy.deepcopy(config), composite=False, patches=[]),
        **recipe.arguments(config.max_position_embeddings),
    )
    config.rope_parameters = config.rope_parameters | recipe.entry
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(target.inv_freq), inv_freq, rtol=2e-6, atol=0)
    assert target.attention_factor == pytest.approx(magnitude, rel=1e-6)
    assert target.length == recipe.entry["factor"] * recipe.context_length
