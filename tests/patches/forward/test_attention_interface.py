"""Our part of transformers' attention interface: the arguments of mask functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_ext_hf.patches.forward.attention_interface import places_of_queries, tokens_before_queries


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
