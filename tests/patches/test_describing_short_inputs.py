"""Inputs within the context length: what `describe` says of them, held to the logits of the unpatched model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.model_rope import ModelRope
from tests.support.method_examples import example_method
from tests.support.models import THETA, TRAINED, build, build_config, from_config, logits, rotary_of, tokens

ROOT = Path(__file__).parent.parent.parent
MOST_ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 0.03}
"""Root mean squares of differences, in standard deviations of the logits; measured here are 3e-7 and 0.007."""
LONG = 4 * TRAINED
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": THETA}
SENTENCE = re.compile(
    r"Inputs of up to ([\d,]+) tokens give the output of the unpatched model(, bit for bit| up to rounding)\."
)

EVERY_LENGTH = [
    *[(name, {}) for name in list_methods()],
    *[
        (name, {"beyond_only": True})
        for name, cls in list_methods().items()
        if issubclass(cls, RemappingMethod) and not cls.scales_queries_only
    ],
    ("dynamic-ntk", {"growth": "hf", "factor": 4}),
    ("dynamic-ntk", {"growth": "even"}),
    ("dynamic-ntk", {"growth": "pow2"}),
]


@pytest.mark.parametrize("dtype", MOST_ROUNDING)
@pytest.mark.parametrize(("name", "parameters"), EVERY_LENGTH)
def test_what_is_said_of_short_inputs_holds(name: str, parameters: dict[str, Any], dtype: torch.dtype) -> None:
    # Loaded in a dtype, a model keeps the frequencies of its rotary module in float32.
    model = build("llama")
    inv_freq = rotary_of(model).inv_freq
    model = model.to(dtype)
    rotary_of(model).inv_freq = inv_freq
    example = example_method(list_methods()[name], ModelRope.of_model(model).rotary, **parameters)
    try:
        method = ModelRope.of_model(model).bind(example, LONG)
    except MethodError:  # without a parameter that follows from the target, some do not reach so far
        method = ModelRope.of_model(model).bind(example, TRAINED)
    with rope.patched(model, method):
        said = SENTENCE.search(" ".join(rope.describe(model).short_inputs))
    kept = method.unchanged_length(ModelRope.of_model(model).rotary)
    assert (said is not None) == (0 < kept <= LONG)
    if said is None:
        return
    ids = tokens(int(said[1].replace(",", "")))
    assert ids.shape[1] == kept
    before = logits(model, ids)
    with rope.patched(model, method):
        after = logits(model, ids)
    if said[2] == ", bit for bit":
        assert torch.equal(after, before)
    change = (after.float() - before.float()).square().mean().sqrt() / before.float().std()
    assert change <= MOST_ROUNDING[dtype]


def test_only_methods_that_take_the_path_of_the_loaded_model_are_said_to_change_no_bit() -> None:
    rotary = ModelRope.of_model(build("llama")).rotary
    exact = {name for name, cls in list_methods().items() if example_method(cls, rotary).keeps_bits}
    assert exact == {"dynamic-self-extend", "jet-long", "temperature"}


def test_the_page_states_the_rounding_that_is_held_here() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    bounds = [f"{bound:g}" for bound in MOST_ROUNDING.values()]
    assert "to {} standard deviations of the logits in float32 and to {} in bfloat16".format(*bounds) in page


def cos_at(model: Any, length: int) -> Tensor:
    cos: Tensor = rotary_of(model)(torch.zeros(1), torch.arange(length)[None])[0]
    return cos


# A method with rules by length reads short rows by the module that the model was loaded with. Where that module rotates
# otherwise than the patch does beyond, a row that grows, or that is longer, would mix two rotations.
each_rule = pytest.mark.parametrize("method", ["dynamic-self-extend", "jet-long"])


@each_rule
@pytest.mark.parametrize("length", [TRAINED, LONG])
def test_short_rows_over_the_original_model_have_its_frequencies(method: str, length: int) -> None:
    model = build("llama", YARN, max_position_embeddings=LONG)
    rope.patch(model, method, over="original")
    torch.testing.assert_close(cos_at(model, length), cos_at(build("llama"), length), atol=1e-4, rtol=0)
    ids = tokens(TRAINED)
    torch.testing.assert_close(logits(model, ids), logits(build("llama"), ids), atol=1e-4, rtol=0)
    assert rope.describe(model).short_inputs == (
        f"Inputs of up to {TRAINED} tokens keep the frequencies that this patch extends, not those of the unpatched "
        "model.",
    )


@each_rule
def test_short_rows_over_another_patch_have_its_frequencies(method: str) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    expected, ids = cos_at(model, 2 * LONG), tokens(LONG)
    read = logits(model, ids)
    rope.patch(model, method, over="patched")
    torch.testing.assert_close(cos_at(model, 2 * LONG), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits(model, ids), read, atol=1e-4, rtol=0)
    (text,) = rope.describe(model).short_inputs
    assert text.startswith(f"Inputs of up to {LONG} tokens keep the frequencies that this patch extends, not")


@each_rule
def test_a_module_that_follows_the_length_does_not_rotate_short_parts_of_long_rows(method: str) -> None:
    form = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": THETA}
    model = rope.patch(build("llama", form), method)
    torch.testing.assert_close(cos_at(model, LONG), cos_at(build("llama"), LONG), atol=1e-4, rtol=0)
    (text,) = rope.describe(model).short_inputs
    assert text.endswith(" tokens give the output of the unpatched model up to rounding.")


@each_rule
@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_a_cast_of_the_model_rounds_no_angle(method: str, cast_first: bool, back: bool) -> None:
    def cast(model: Any) -> Any:
        return model.to(torch.bfloat16).float() if back else model.to(torch.bfloat16)

    model = build("llama")
    model = rope.patch(cast(model), method) if cast_first else cast(rope.patch(model, method))
    torch.testing.assert_close(cos_at(model, LONG), cos_at(build("llama"), LONG), atol=1e-4, rtol=0)
    (text,) = rope.describe(model).short_inputs
    assert text.endswith(" keep the frequencies that this patch extends, not those of the unpatched model.")


@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn"])
def test_what_extends_the_original_model_is_not_said_to_keep_the_output_of_the_loaded_one(method: str) -> None:
    config = build_config("llama", YARN, max_position_embeddings=LONG)
    model = rope.patch(from_config(config), method, over="original")
    (text,) = rope.describe(model).short_inputs
    assert text.startswith(f"Inputs of up to {TRAINED} tokens keep the frequencies that this patch extends, not")
    ids = tokens(TRAINED)
    torch.testing.assert_close(logits(model, ids), logits(build("llama"), ids), atol=1e-4, rtol=0)
