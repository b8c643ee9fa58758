"""The card of an adapter that `patch` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.patches.saved.test_adapters import bundled  # noqa: F401 (a fixture)
from tests.support.commands import run

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # the command line prints them
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # of PEFT
]


def test_the_card_of_an_adapter(bundled: Path, tmp_path: Path) -> None:  # noqa: F811
    assert run("patch", bundled, "--method", "yarn", "--factor", "4", "--out", tmp_path / "new")[0] == 0
    card: Any = ModelCard.load(tmp_path / "new" / "README.md")
    assert card.data.to_dict()["library_name"] == "peft"
    assert 'rope.from_pretrained("new")' in card.text
    assert "is a PEFT adapter, without a config of its own" in card.text  # no engine serves it
