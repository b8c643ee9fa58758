"""The state that a cache carries from one forward to the next: rows that move, copies, and caches that are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from tests.support.length_examples import RULES, patched, stock
from tests.support.models import TRAINED, build, logits, tokens

REMAPPING: dict[str, dict[str, Any]] = {
    "self-extend": {"group": 4, "window": 16},
    "rerope": {"window": 32},
    "leaky-rerope": {"window": 32, "factor": 4},
    "dca": {"chunk": 48, "window": 16},
}
FAST, THOROUGH = ("hf", "even", "rerope"), ("pow2", "leaky-rerope")
every_method = pytest.mark.parametrize(
    "which",
    [
        pytest.param(
            which, marks=[pytest.mark.thorough] * (which in THOROUGH) + [pytest.mark.slow] * (which not in FAST)
        )
        for which in [*RULES, "sticky", *REMAPPING]
    ],
)
PROMPTS = (TRAINED + 22, TRAINED - 30, 21)
"""Tokens of the prompts of a batch: below and above the trained length."""


def model_under(which: str, name: str = "llama", **overrides: Any) -> Any:
    if which == "sticky":
        return rope.patch(build(name, **overrides), "dynamic-ntk", growth="even", sticky=True)
    if which in RULES:
        return patched(name, which, **overrides)
    return rope.patch(build(name, **overrides), which, **REMAPPING[which])


def padded() -> tuple[Tensor, Tensor]:
    """Return a batch of prompts with padding on the left, and its mask."""
    longest = max(PROMPTS)
    ids, mask = (torch.zeros(len(PROMPTS), longest, dtype=torch.int64) for _ in range(2))
    for row, length in enumerate(PROMPTS):
        ids[row, longest - length :], mask[row, longest - length :] = tokens(length, seed=row + 1)[0], 1
    return ids, mask


def new_tokens(rows: int, count: int, seed: int) -> Tensor:
    return torch.cat([tokens(count, seed=10 * seed + row) for row in range(rows)])


def extended(mask: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(mask, (0, by), value=1)


MOVES: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "swapped": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "one of them only": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "selected by a mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


def continued(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: bool) -> list[Tensor]:
    """Return the last logits of three parts of new tokens, which differ from row to row, onto a cache."""
    actual = []
    for count, seed in ((1, 5), (14, 6), (1, 7)):
        new = new_tokens(len(ids), count, seed)
        ids, mask = torch.cat((ids, new), 1), extended(mask, count)
        where = {"position_ids": (mask.cumsum(-1) - 1)[:, -count:]} if positions else {}
        actual.append(model(new, attention_mask=mask, past_key_values=cache, **where).logits[:, -1])
    return actual


def alone(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the same logits from forwards of each row without padding and without a cache.

    Each forward runs a copy: in 5.0 transformers' own form of the rule keeps the frequencies of a longer input.
    """
    actual = []
    for count, seed in ((1, 5), (14, 6), (1, 7)):
        ids, mask = torch.cat((ids, new_tokens(len(ids), count, seed)), 1), extended(mask, count)
        rows = zip(ids, mask, strict=True)
        actual.append(torch.cat([logits(copy.deepcopy(model), row[real.bool()][None])[:, -1] for row, real in rows]))
    return actual


def agree(actual: list[Tensor], expected: list[Tensor]) -> None:
    for step, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(step, reference, atol=2e-4, rtol=0)


@every_method
@pytest.mark.parametrize(
    "move", [pytest.param(move, marks=[pytest.mark.slow] * (move not in ("swapped", "selected"))) for move in MOVES]
)
@pytest.mark.sampled(5)
def test_lengths_move_with_the_rows(which: str, move: str) -> None:
    """Rows of several lengths that a beam search, or a selection, puts into another order."""
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    change, order = MOVES[move]
    arguments = {} if move == "swapped" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True, **arguments).past_key_values
        change(cache)
        actual = continued(model, cache, ids[order], mask[order], positions=bool(arguments))
    if which == "hf":  # transformers' own form of this rule, which has no cache to get wrong
        model = stock("hf", num_hidden_layers=1)
    agree(actual, alone(model, ids[order], mask[order]))


@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("which", ["paper", "even", "self-extend"])
def test_rows_move_between_steps(which: str) -> None:
    """Rows move before every step, as in a beam search, in layers that keep all keys and in layers with windows."""
    windows = {} if which == "self-extend" else {"sliding_window": 24}
    model = model_under(which, "mistral" if windows else "llama", num_hidden_layers=1, **windows)
    ids, mask = padded()
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        for seed, order in enumerate(([1, 2, 0], [0, 0, 2], [2, 1, 0])):
            cache.reorder_cache(torch.tensor(order))
            ids, mask = ids[order], mask[order]
            new = new_tokens(3, 9, seed)
            ids, mask = torch.cat((ids, new), 1), extended(mask, 9)
            actual = model(new, attention_mask=mask, past_key_values=cache).logits[:, -1]
            rows = [logits(model, row[real.bool()][None])[:, -1] for row, real in zip(ids, mask, strict=True)]
            torch.testing.assert_close(actual, torch.cat(rows), atol=5e-4, rtol=0)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("which", ["paper", "even"])
@pytest.mark.parametrize("way", COPIES)
def test_copies_follow_their_own_rows(way: str, which: str) -> None:
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        twin, order = COPIES[way](cache), [1, 2, 0]
        if way == "copy":  # which shares its layers with the first
            del cache
        twin.reorder_cache(torch.tensor(order))
        agree(continued(model, twin, ids[order], mask[order], False), alone(model, ids[order], mask[order]))
        if way != "copy":
            agree(continued(model, cache, ids, mask, False), alone(model, ids, mask))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["paper", "even", "self-extend"])
def test_a_cache_is_freed_with_its_last_reference(which: str) -> None:
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            cache.reorder_cache(torch.tensor([1, 0, 2]))
            model(ids[:, :1], attention_mask=extended(mask[[1, 0, 2]], 1), past_key_values=cache)
        keys = weakref.ref(cache.layers[0])
        del cache
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")
@pytest.mark.parametrize("kind", ["static", "windows", "offloaded"])
@pytest.mark.parametrize("which", ["paper", "even"])
def test_rows_move_in_caches_of_other_kinds(which: str, kind: str) -> None:
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    cache: Any = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=140)
    if kind == "windows":
        model = model_under(which, "mistral", num_hidden_layers=1, sliding_window=24)
        cache = transformers.DynamicCache(config=model.config)
    order = [2, 0, 1]
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        if kind == "offloaded":
            cache.offloading = True  # keys are rotated as they are read, in every kind of rule
            cache.update = lambda keys, values, at, *args, **kwargs: cache.layers[at].update(
                keys, values, *args, **kwargs
            )
        cache.reorder_cache(torch.tensor(order))
        agree(continued(model, cache, ids[order], mask[order], False), alone(model, ids[order], mask[order]))


@pytest.mark.slow
@every_method
def test_beam_search_over_a_batch(which: str) -> None:
    """Every row of a padded batch gets the beams that it gets alone."""
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    together = model.generate(ids, attention_mask=mask, **options)
    if which == "sticky":
        rope.reset(model)
        with torch.no_grad():
            model(ids[:1])  # the longest prompt, which decides for all
    for row, length in enumerate(PROMPTS[: 1 if which == "sticky" else None]):
        prompt = tokens(length, seed=row + 1)
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(together[row, max(PROMPTS) :], expected[0, length:])


# --- refusals ------------------------------------------------------------------------------------------------------

LONGER: dict[str, Any] = {"context_length": 2 * TRAINED}
OVER_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED // 2}

ELSEWHERE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "unpatched, length-dependent": (
        lambda: build("llama"),
        lambda: model_under("paper"),
        r"not stored under this model's dynamic-ntk, but by an unpatched model",
    ),
    "unpatched, remapping": (
        lambda: build("llama"),
        lambda: model_under("rerope"),
        r"not stored under this model's rerope, but by an unpatched model",
    ),
    "static, remapping": (
        lambda: rope.patch(build("llama"), "yarn", factor=4),
        lambda: model_under("dca"),
        r"not stored under this model's dca, but .* under a static method",
    ),
    "another context length": (
        lambda: rope.patch(build("llama"), "dynamic-ntk", **LONGER),
        lambda: rope.patch(build("llama"), "dynamic-ntk"),
        r"stored under dynamic-ntk with .*128.*, and this model is under dynamic-ntk",
    ),
    "over another scaling": (
        lambda: rope.patch(build("llama", OVER_YARN), "dynamic-ntk", over="original"),
        lambda: rope.patch(build("llama", OVER_YARN), "dynamic-ntk"),
        r"stored under dynamic-ntk with no own, and this model is under dynamic-ntk with own=.*yarn",
    ),
    "another growth": (
        lambda: model_under("paper"),
        lambda: model_under("even"),
        r"stored under dynamic-ntk with growth=paper, and this model is under dynamic-ntk with growth=even",
    ),
    "another method, remapping": (
        lambda: model_under("self-extend"),
        lambda: model_under("rerope"),
        r"stored under self-extend.*, and this model is under rerope",
    ),
    "another window": (
        lambda: model_under("rerope"),
        lambda: rope.patch(build("llama"), "rerope", window=24),
        r"stored under rerope with .*window=32.* under rerope with .*window=24",
    ),
    "remapping, length-dependent": (
        lambda: model_under("dca"),
        lambda: model_under("hf"),
        r"stored under dca.*, and this model is under dynamic-ntk",
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_cache_filled_elsewhere_is_refused(case: str) -> None:
    """The model that filled it continues it, and so does a copy of that model."""
    filled, continuing, message = ELSEWHERE[case]
    first, model, ids = filled(), continuing(), tokens(TRAINED + 9)
    with torch.no_grad():
        cache = first(ids[:, :-1], use_cache=True).past_key_values
        with pytest.raises(LengthError, match=message):
            model(ids[:, -1:], past_key_values=cache)
        actual = copy.deepcopy(first)(ids[:, -1:], past_key_values=cache).logits
        cache = first(ids[:, :-1], use_cache=True).past_key_values
        torch.testing.assert_close(actual, first(ids[:, -1:], past_key_values=cache).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("which", ["paper", "even", "longrope"])
def test_an_unpatched_cache_is_refused_inside_fixed_length(which: str) -> None:
    model, ids = model_under(which), tokens(TRAINED + 9)
    with torch.no_grad():
        cache = build("llama")(ids[:, :-1], use_cache=True).past_key_values
        with rope.fixed_length(model, 200), pytest.raises(LengthError, match="but by an unpatched model"):
            model(ids[:, -1:], past_key_values=cache)
        cache.reset()
        with rope.fixed_length(model, 200):
            actual = [model(part, past_key_values=cache).logits for part in (ids[:, :-1], ids[:, -1:])]
            torch.testing.assert_close(torch.cat(actual, 1), logits(model, ids), atol=1e-4, rtol=0)


@every_method
@pytest.mark.parametrize("mask", [None, torch.ones(1, 2 * TRAINED + 1, dtype=torch.int64)], ids=["bare", "masked"])
def test_a_packed_prefill_is_not_continued(which: str, mask: Tensor | None) -> None:
    """A row holds two inputs; which of them the next token continues is not known."""
    if which == "sticky" and mask is not None:
        pytest.skip("the same as without a mask")
    model, ids = model_under(which, num_hidden_layers=1), tokens(2 * TRAINED + 1)
    positions = torch.arange(TRAINED).repeat(2)[None]
    arguments = {} if mask is None else {"attention_mask": mask[:, :-1]}
    with torch.no_grad():
        cache = model(ids[:, :-1], position_ids=positions, use_cache=True, **arguments).past_key_values
        arguments = {} if mask is None else {"attention_mask": mask}
        with pytest.raises(LengthError, match=r"a row of this cache holds several inputs .* one input per row"):
            model(ids[:, -1:], position_ids=torch.tensor([[TRAINED]]), past_key_values=cache, **arguments)


@every_method
def test_positions_that_begin_elsewhere_are_continued(which: str) -> None:
    """A row of one input with positions for its padding is not taken for several inputs."""
    model, (ids, mask) = model_under(which, num_hidden_layers=1), padded()
    for fill in (0, 1):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, position_ids=positions, use_cache=True).past_key_values
            agree(continued(model, cache, ids, mask, True), alone(model, ids, mask))


def test_a_cache_is_filled_anew_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that fails leaves no state of the earlier contents of the cache."""
    model, ids = model_under("paper", num_hidden_layers=1), tokens(80)
    cache = transformers.DynamicCache(config=model.config)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.reset()
        with monkeypatch.context() as patch:
            patch.setattr(model.model.norm, "forward", fail)
            with pytest.raises(RuntimeError, match="broken"):
                model(ids[:, :40], past_key_values=cache)
        with pytest.raises(LengthError, match="not stored under"):
            model(ids[:, 40:], past_key_values=cache)
