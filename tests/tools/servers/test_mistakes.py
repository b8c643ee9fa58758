"""The frequencies of common serving mistakes."""

from __future__ import annotations

import pytest
import torch

from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.clipping import Cope
from rope_ext_hf.methods.dropping import Nope
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.tools.servers.mistakes import different_frequencies

ROTARY = Rotary(dim=64, theta=500_000.0, trained_length=256)


@pytest.mark.parametrize("method", [Yarn(factor=4.0), Cope(), Cope(clip=8, hard=True)])
def test_mistakes_are_known_of_methods_that_stop_pairs_too(method: RopeMethod) -> None:
    mistakes = dict(different_frequencies(method, ROTARY, 1024))
    assert torch.equal(mistakes["no scaling at all"].inv_freq, ROTARY.inv_freq())
    assert {"theta 10,000", "frequencies rounded to bfloat16"} <= mistakes.keys()
    twice = method.frequencies(ROTARY).inv_freq ** 2 / ROTARY.inv_freq()
    if "the scaling applied twice" in mistakes:
        torch.testing.assert_close(mistakes["the scaling applied twice"].inv_freq, twice)
    else:  # pairs that are stopped twice are stopped
        torch.testing.assert_close(method.frequencies(ROTARY).inv_freq, twice)
    assert all(inv_freq.isfinite().all() for inv_freq, _ in mistakes.values())


def test_without_a_rotation_a_scaling_can_only_be_lost() -> None:
    names = [name for name, _ in different_frequencies(Nope(), ROTARY, 1024)]
    assert names[0] == "no scaling at all"
    assert all(name.endswith("in place of nope") for name in names[1:])
