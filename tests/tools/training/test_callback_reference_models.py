"""`RopeCallback` with the reference model of a TRL trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rope_ext_hf.errors import FingerprintError
from rope_ext_hf.tools.training import RopeCallback
from tests.patches.trials.test_refusals import load, trainer

pytestmark = [  # of TRL's own
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:This sequence already has:UserWarning"),
]


@pytest.mark.slow
def test_the_callback_stops_a_model_that_lacks_the_patch_of_its_reference(tmp_path: Path) -> None:
    running = trainer("DPO", load(), tmp_path, ref_model=load("rerope"), callbacks=[RopeCallback()])
    with pytest.raises(FingerprintError, match="rerope instead of none"):
        running.train()
