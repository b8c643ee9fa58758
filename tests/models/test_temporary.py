"""Changes that end with a `with` block."""

from __future__ import annotations

import pytest
from torch import nn

from rope_ext_hf.models.temporary import evaluating


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
