"""The memory of a patched model in copies and pickles."""

from __future__ import annotations

import pickle

import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.slots.patched_slot import patch_state
from tests.support.models import build


def test_a_pickle_of_another_version_is_refused_in_one_sentence() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    assert patch_state(pickle.loads(pickle.dumps(model))) is not None
    state = vars(patch_state(model))
    state["spec"] = state.pop("patch")  # its former name
    with pytest.raises(UnsupportedModelError, match="pickled by another version of rope_ext_hf: save it there"):
        pickle.loads(pickle.dumps(model))
