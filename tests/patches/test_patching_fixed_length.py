"""Length-dependent methods in whole models: calls and rows apart, and one length for a whole generation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.patches.forward import forward_call
from rope_ext_hf.patches.trials import continuation_probe
from tests.support.model_checks import (
    CHANGED,
    LONG,
    PHI3_LISTS,
    TOLERANCE,
    BoomError,
    difference,
    every_dynamic,
    every_family,
)
from tests.support.models import (
    TRAINED,
    build,
    dynamic_cases,
    logits,
    tokens,
)


def fill(model: Any, ids: Tensor, cut: int) -> Tensor:
    """Logits of a prefill of `cut` tokens and one decode step for each one after it, through a cache."""
    with torch.no_grad():
        out = model(input_ids=ids[:, :cut], use_cache=True)
        parts = [out.logits]
        for at in range(cut, ids.shape[1]):
            out = model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


@every_dynamic
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox"])
def test_calls_do_not_remember_each_other(name: str, which: str) -> None:
    method, params = dynamic_cases(name)[which]
    model = rope.patch(build(name), method, **params)
    fresh = logits(rope.patch(build(name), method, **params), tokens(80))
    logits(model, tokens(LONG))
    assert torch.equal(logits(model, tokens(80)), fresh)
    assert torch.equal(logits(model, tokens(TRAINED)), logits(rope.patch(build(name), method, **params), tokens(64)))


@every_dynamic
def test_the_length_matters(which: str) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(LONG)
    alone, within = logits(model, ids[:, :TRAINED]), logits(model, ids)[:, :TRAINED]
    assert difference(alone, within) >= CHANGED
    with rope.fixed_length(model, LONG):
        assert difference(logits(model, ids[:, :TRAINED]), within) <= TOLERANCE


@every_dynamic
def test_rows_of_a_batch_do_not_touch_each_other(which: str) -> None:
    method, params = dynamic_cases("llama")[which]
    model, ids = rope.patch(build("llama"), method, **params), tokens(60, batch=2)
    positions = torch.stack((torch.arange(60), torch.arange(60) + LONG))
    both = logits(model, ids, position_ids=positions)
    for row in range(2):
        alone = logits(model, ids[row : row + 1], position_ids=positions[row : row + 1])
        assert difference(both[row : row + 1], alone) <= TOLERANCE
    assert difference(both[1:], logits(model, ids[1:])) >= CHANGED


def test_static_methods_decode_and_pad() -> None:
    model, ids = rope.patch(build("llama"), "yarn", factor=4), tokens(80)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    padded = logits(model, ids, attention_mask=mask)[:, 10:]
    assert difference(padded, logits(model, ids[:, 10:])) <= TOLERANCE
    assert difference(fill(model, ids, 70), logits(model, ids)) <= TOLERANCE


# --- fixed_length -------------------------------------------------------------------------------------------------


@every_dynamic
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt_neox", "deepseek_v3"])
def test_prefill_and_decode_under_a_fixed_length(name: str, which: str) -> None:
    method, params = dynamic_cases(name)[which]
    model, ids = rope.patch(build(name), method, **params), tokens(TRAINED + 12)
    one_shot = logits(model, ids)
    with rope.fixed_length(model, TRAINED + 12) as inside:
        assert inside is model
        assert difference(fill(model, ids, TRAINED - 4), one_shot) <= TOLERANCE
        assert difference(fill(model, ids, TRAINED + 4), one_shot) <= TOLERANCE


@pytest.mark.parametrize("method", ["dynamic-ntk", "yarn"])
@every_family
def test_generate_is_greedy_search_without_a_cache(name: str, method: str) -> None:
    params: dict[str, Any] = {"factor": 4} if method == "yarn" else {}
    model, ids, new = rope.patch(build(name), method, **params), tokens(TRAINED - 3), 8
    with rope.fixed_length(model, TRAINED - 3 + new):
        generated = model.generate(
            ids,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = ids
        for step in range(new):
            last = logits(model, expected)[:, -1]
            assert difference(generated.logits[step], last) <= TOLERANCE
            last[:, 2] = -torch.inf  # min_new_tokens keeps the end-of-sequence token out
            expected = torch.cat((expected, last.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generated.sequences, expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic-ntk", "yarn"])
def test_generate_with_a_static_cache_and_with_beams(method: str) -> None:
    params: dict[str, Any] = {"factor": 4} if method == "yarn" else {}
    model, ids = rope.patch(build("llama"), method, **params), tokens(TRAINED - 3, batch=2)
    arguments = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with rope.fixed_length(model, TRAINED + 5):
        expected = model.generate(ids, **arguments)
        assert torch.equal(model.generate(ids, cache_implementation="static", **arguments), expected)
        assert torch.equal(model.generate(ids, use_cache=False, **arguments), expected)
        beams = model.generate(ids, num_beams=3, **arguments)
        assert torch.equal(model.generate(ids, num_beams=3, use_cache=False, **arguments), beams)


def test_left_padding_under_a_fixed_length() -> None:
    model, ids = rope.patch(build("llama"), "dynamic-ntk"), tokens(80, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    with rope.fixed_length(model, 80):
        output = logits(model, ids, attention_mask=mask)
        assert difference(output[:1, 10:], logits(model, ids[:1, 10:])) <= TOLERANCE
        assert difference(output[1:], logits(model, ids[1:])) <= TOLERANCE
        assert model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False).shape == (2, 83)


def test_fixed_length_restores() -> None:
    model, ids = rope.patch(build("gemma3"), "dynamic-ntk"), tokens(LONG)
    plain = logits(model, ids)

    def fail() -> None:
        with rope.fixed_length(model, 1000):
            outer = logits(model, ids)
            assert difference(outer, plain) >= CHANGED
            with rope.fixed_length(model, LONG):
                assert difference(logits(model, ids), plain) <= TOLERANCE
            assert torch.equal(logits(model, ids), outer)
            raise BoomError

    with pytest.raises(BoomError):
        fail()
    assert torch.equal(logits(model, ids), plain)


def test_fixed_length_on_static_and_unpatched_models_changes_nothing() -> None:
    model, ids = build("llama"), tokens(LONG)
    plain = logits(model, ids)
    with rope.fixed_length(model, 1000):
        assert torch.equal(logits(model, ids), plain)
    yarn = logits(rope.patch(model, "yarn", factor=4), ids)
    with rope.fixed_length(model, 1000):
        assert torch.equal(logits(model, ids), yarn)


HELD = ["dynamic-ntk", "dynamic-yarn", "dynamic-self-extend", "jet-long"]
"""Methods that depend on the length: by their frequencies, and by their rule of attention."""


def held_at(method: str, length: int, ids: Tensor) -> Tensor:
    """Return the logits of a model that is patched anew, at a fixed length."""
    model = rope.patch(build("llama"), method)
    with rope.fixed_length(model, length):
        return logits(model, ids)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("method", HELD)
def test_a_copy_made_inside_is_not_held(method: str, copied: Callable[[Any], Any]) -> None:
    model, ids = rope.patch(build("llama"), method), tokens(100)
    expected = logits(model, ids)
    assert difference(held_at(method, 1000, ids), expected) >= CHANGED
    with rope.fixed_length(model, 1000):
        other = copied(model)
        assert torch.equal(logits(other, ids), expected)
        assert torch.equal(logits(model, ids), held_at(method, 1000, ids))
        with rope.fixed_length(other, 500):  # the copy may be held by itself
            assert torch.equal(logits(other, ids), held_at(method, 500, ids))
    assert torch.equal(logits(other, ids), expected)


@pytest.mark.parametrize("method", HELD)
@pytest.mark.parametrize("inside", ["patched", "patch", "patch twice", "unpatch", "patched unpatched"])
def test_a_patch_inside_is_held_to_the_end_of_the_block(inside: str, method: str) -> None:
    first = "yarn" if inside.startswith("patch ") else method
    model, ids = build("llama"), tokens(100)
    if inside != "patched unpatched":
        rope.patch(model, first, **({"factor": 4} if first == "yarn" else {}))
    with rope.fixed_length(model, 1000):
        if inside in ("patched", "patched unpatched"):
            for other in HELD:
                with rope.patched(model, other):
                    assert torch.equal(logits(model, ids), held_at(other, 1000, ids))
        if inside == "patch twice":
            rope.patch(model, next(other for other in HELD if other != method))
        if inside == "unpatch":
            rope.unpatch(model)
        if inside != "patched":
            rope.patch(model, method)
        with rope.fixed_length(model, 500):
            rope.patch(model, method)
            assert torch.equal(logits(model, ids), held_at(method, 500, ids))
        assert torch.equal(logits(model, ids), held_at(method, 1000, ids))
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama"), method), ids))


@pytest.mark.parametrize("method", HELD)
def test_blocks_may_end_in_any_order(method: str) -> None:
    """Two generators that answer requests in turn end in the order in which they began."""
    model, ids = rope.patch(build("llama"), method), tokens(100)
    first, second = rope.fixed_length(model, 1000), rope.fixed_length(model, 500)
    with ExitStack() as stack:
        stack.enter_context(first)
        second.__enter__()
    assert torch.equal(logits(model, ids), held_at(method, 500, ids))
    second.__exit__(None, None, None)
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama"), method), ids))


@pytest.mark.parametrize("length", [0, -1])
def test_fixed_length_refuses(length: int) -> None:
    model = rope.patch(build("llama"), "dynamic-ntk")
    with pytest.raises(MethodError, match=str(length)), rope.fixed_length(model, length):
        pass


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
def test_fixed_length_refuses_what_it_cannot_hold(form: str) -> None:
    if form == "dynamic":
        model = build("llama", {"rope_type": "dynamic", "factor": 4.0})
    else:
        model = build("phi3", {"rope_type": "longrope"} | PHI3_LISTS, max_position_embeddings=LONG)
    with pytest.raises(UnsupportedModelError, match="patch it first"), rope.fixed_length(model, LONG):
        pass


def test_sticky_growth_remembers_until_reset() -> None:
    model, ids = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True), tokens(80)
    first = logits(model, ids)
    logits(model, tokens(LONG))
    grown = logits(model, ids)
    assert difference(grown, first) >= CHANGED
    assert rope.reset(model) is model
    assert torch.equal(logits(model, ids), first)


@pytest.mark.parametrize("inside", ["yarn", "dynamic-ntk", "rerope", "refused"])
def test_sticky_growth_goes_on_after_another_patch(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation_probe, "_tried", set())
    model, ids = rope.patch(build("llama"), "dynamic-ntk", growth="even", sticky=True), tokens(80)
    fresh = logits(model, ids)
    logits(model, tokens(LONG))
    grown = logits(model, ids)
    assert difference(grown, fresh) >= CHANGED
    if inside == "refused":  # and the earlier patch comes back
        monkeypatch.setattr(forward_call, "cache_argument", lambda decoder, call: None)
        with pytest.raises(UnsupportedModelError, match="does not compute the same with a cache"):
            rope.patch(model, "rerope")
    else:
        with rope.patched(model, inside, **({"factor": 4} if inside == "yarn" else {})):
            logits(model, tokens(LONG))
    assert torch.equal(logits(model, ids), grown)
    assert torch.equal(logits(rope.reset(model), ids), fresh)


def test_a_trained_parameter_goes_on_after_another_patch() -> None:
    """An optimizer holds the parameter itself, so that it must be the same one afterwards."""
    model, ids = rope.patch(build("llama"), "learnable", factor=4), tokens(80)
    (parameter,) = (value for name, value in model.named_parameters() if name.endswith(".trained"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trained = logits(model, ids)
    with rope.patched(model, "dca"):
        logits(model, ids)
    assert torch.equal(logits(model, ids), trained)
    step()
    assert not torch.equal(logits(model, ids), trained)
