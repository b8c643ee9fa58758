"""Our part of transformers' attention interface: eval mode, and the arguments of mask functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_ext_hf.patches.attention_interface import places_of_queries, tokens_before_queries
from rope_ext_hf.patches.temporary import evaluating


def test_every_module_gets_its_own_mode_back_after_an_error_and_after_a_replacement() -> None:
    frozen = nn.Linear(2, 2)
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), frozen))
    frozen.eval()  # as frozen norms are in a training
    modes = {name: module.training for name, module in model.named_modules()}

    def measure() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            model[0] = nn.Identity().eval()  # as a patch that gives way to another
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        measure()
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_queries_have_the_places_after_the_tokens_before_them() -> None:
    places = places_of_queries(sdpa_mask, 3, 4, torch.device("cpu"))
    mask = sdpa_mask(
        batch_size=1, kv_length=7, mask_function=causal_mask_function, allow_is_causal_skip=False, **places
    )
    assert torch.equal(mask[0, 0], torch.ones(7, 7, dtype=torch.bool).tril()[3:])
    assert tokens_before_queries(places) == 3


@pytest.mark.parametrize("places", [{"q_length": 4, "q_offset": 3}, {"cache_position": torch.arange(3, 7)}])
def test_places_in_both_spellings(places: dict[str, Any]) -> None:
    """The arguments of transformers 5.24, and those of 5.0."""

    def make_mask(cache_position: Any) -> None:
        """A mask function of transformers 5.0."""

    assert tokens_before_queries(places) == 3
    mask_function = make_mask if "cache_position" in places else sdpa_of_today
    arguments = places_of_queries(mask_function, 3, 4, torch.device("cpu"))
    assert arguments.keys() == places.keys()
    assert all(torch.equal(torch.as_tensor(arguments[name]), torch.as_tensor(value)) for name, value in places.items())


def sdpa_of_today(q_length: int, q_offset: int) -> None:
    """A mask function of transformers 5.24."""
