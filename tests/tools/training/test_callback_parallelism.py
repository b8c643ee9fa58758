"""`RopeCallback` calls `check_context_parallel` where rows are spread over devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.training import RopeCallback
from tests.support.models import build


@pytest.mark.parametrize(("context", "sequence"), [(True, False), (False, True), (False, False)])
def test_the_callback_asks_where_rows_are_spread(context: bool, sequence: bool) -> None:
    model = rope.patch(build("llama"), "dynamic-yarn")
    arguments: Any = SimpleNamespace(parallelism_config=SimpleNamespace(cp_enabled=context, sp_enabled=sequence))
    callback = RopeCallback()
    if not (context or sequence):
        callback.on_train_begin(arguments, TrainerState(), TrainerControl(), model=model)
        return
    with pytest.raises(MethodError, match="under context parallelism"):
        callback.on_train_begin(arguments, TrainerState(), TrainerControl(), model=model)
