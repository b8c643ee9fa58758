"""Collators of positions: draws as in the papers, and the intended attention for a model that reads a batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.training import MixedWindowsCollator, PoSECollator, RandomPositionsCollator, RopeCallback
from tests.support.models import TRAINED, build, logits, tokens

LONG = 4 * TRAINED


def document(length: int, seed: int = 1) -> dict[str, Any]:
    return {"input_ids": tokens(length, seed=seed)[0].tolist()}


def pose_of_upstream(tokens_given: int, row: int, target: int) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every row that dwzhu-pku/PoSE, src/train_pose.py, may make of a document: its tokens and positions."""
    outcomes = set()
    len_chunk = min(tokens_given, row)
    ids = list(range(tokens_given))
    for rt1 in range(1, (len_chunk + 1) // 2 + 1):
        for rt2 in range(len_chunk, tokens_given + 1):
            lt2 = rt2 - (len_chunk - rt1)
            for rt in range(target - len_chunk + 1):
                positions = [i if i < rt1 else i + rt for i in range(len_chunk)]
                outcomes.add((tuple(ids[:rt1] + ids[lt2:rt2]), tuple(positions)))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("length", "row", "target"), [(7, 5, 9), (4, 4, 6), (6, 2, 4)])
def test_pose_draws_what_its_code_draws_and_uniformly(length: int, row: int, target: int) -> None:
    collator = PoSECollator(length=row, target_length=target)
    drawn = Counter(
        (tuple(chosen.tolist()), tuple(positions.tolist()))
        for seed in range(4000)
        for chosen, positions in [collator.place(length, torch.Generator().manual_seed(seed))]
    )
    assert set(drawn) == pose_of_upstream(length, row, target)
    outcomes = (row + 1) // 2 * (length - row + 1) * (target - row + 1)
    if len(drawn) == outcomes:  # no two draws make the same row
        mean = 4000 / outcomes
        assert sum((count - mean) ** 2 / mean for count in drawn.values()) < outcomes + 5 * (2 * outcomes) ** 0.5


def test_random_positions_are_a_sorted_sample_of_all() -> None:
    collator = RandomPositionsCollator(length=3, target_length=5)
    drawn = Counter(tuple(collator.place(9, torch.Generator().manual_seed(seed))[1].tolist()) for seed in range(2000))
    assert set(drawn) == {(a, b, c) for a in range(5) for b in range(a + 1, 5) for c in range(b + 1, 5)}
    assert min(drawn.values()) > 120  # 200 each on average


COLLATORS: dict[str, Any] = {
    "PoSE": PoSECollator(length=TRAINED, target_length=LONG),
    "random": RandomPositionsCollator(length=TRAINED, target_length=LONG),
}


def by_hand(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of one row in which every token attends to all earlier ones, whatever their positions."""
    count = ids.shape[-1]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    return logits(model, ids[None], position_ids=positions[None], attention_mask=mask)[0]


@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize(("method", "params"), [("yarn", {"factor": 4}), ("dynamic-yarn", {})])
def test_every_token_attends_over_the_jump_and_padding_changes_nothing(
    name: str, method: str, params: dict[str, Any]
) -> None:
    batch = COLLATORS[name]([document(3 * TRAINED, seed=1), document(20, seed=2)])
    assert batch["position_ids"].diff(dim=-1).amax() > 1
    model = rope.patch(build("llama"), method, **params)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with rope.fixed_length(model, LONG):
        together = logits(model, inputs.pop("input_ids"), **inputs)
        for row, count in ((0, TRAINED), (1, 20)):
            ids, positions = batch["input_ids"][row, :count], batch["position_ids"][row, :count]
            torch.testing.assert_close(together[row, :count], by_hand(model, ids, positions), atol=1e-5, rtol=0)
    labels = batch["labels"]
    assert torch.equal(labels != -100, batch["attention_mask"] == 1)
    assert torch.equal(labels[labels != -100], batch["input_ids"][labels != -100])


def test_without_the_mask_transformers_would_cut_the_row_at_the_jump() -> None:
    batch = COLLATORS["PoSE"]([document(3 * TRAINED)])
    model = rope.patch(build("llama"), "yarn", factor=4)
    expected = by_hand(model, batch["input_ids"][0], batch["position_ids"][0])
    cut = logits(model, batch["input_ids"], position_ids=batch["position_ids"])[0]
    assert float((cut - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", COLLATORS)
def test_draws_follow_from_the_seed_and_the_example_alone(name: str) -> None:
    examples = [document(2 * TRAINED, seed=seed) for seed in range(5)]
    together, alone = COLLATORS[name](examples), [COLLATORS[name]([each]) for each in reversed(examples)]
    for key, value in together.items():
        assert torch.equal(value, torch.cat([each[key] for each in reversed(alone)]))
    assert len({tuple(row.tolist()) for row in together["position_ids"]}) == 5
    other = type(COLLATORS[name])(length=TRAINED, target_length=LONG, seed=1)(examples)
    assert not torch.equal(other["position_ids"], together["position_ids"])


def test_labels_and_padding_of_an_example_stay_with_their_tokens() -> None:
    given = document(2 * TRAINED)
    given["labels"] = [-100] * 10 + given["input_ids"][10:]
    padded = {
        "input_ids": given["input_ids"] + [0] * 7,
        "labels": given["labels"] + [-100] * 7,
        "attention_mask": [1] * 2 * TRAINED + [0] * 7,
    }
    ours, same = COLLATORS["PoSE"]([given]), COLLATORS["PoSE"]([padded])
    for key, value in ours.items():
        assert torch.equal(value, same[key])
    kept = ours["labels"] != -100
    assert int((~kept).sum()) == min(10, int((ours["position_ids"].diff() == 1).long().cumprod(-1).sum()) + 1)
    assert torch.equal(ours["labels"][kept], ours["input_ids"][kept])


def test_mixed_windows_have_the_frequencies_of_their_own_length() -> None:
    model, stock = rope.patch(build("llama"), "dynamic-yarn"), build("llama")
    rows = [document(LONG, seed=seed) for seed in range(8)]
    collator = MixedWindowsCollator(length=LONG, target_length=LONG, short_length=TRAINED)
    batch = collator(rows)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    together = logits(model, batch["input_ids"], position_ids=batch["position_ids"])
    shorts = [int(positions.max()) < TRAINED for positions in batch["position_ids"]]
    assert 0 < sum(shorts) < len(shorts)
    for row, is_short in enumerate(shorts):
        ids = batch["input_ids"][row : row + 1]
        if is_short:
            expected = torch.cat([logits(stock, window) for window in torch.split(ids, TRAINED, dim=-1)], dim=1)
        else:
            expected = logits(model, ids)
        torch.testing.assert_close(together[row : row + 1], expected, atol=1e-5, rtol=0)
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_padding_of_mixed_windows_is_a_window_without_labels() -> None:
    collator = MixedWindowsCollator(length=LONG, target_length=LONG, short_length=TRAINED, short_share=0.0)
    batch = collator([document(LONG), document(100, seed=2)])
    model = rope.patch(build("llama"), "yarn", factor=4)
    together = logits(model, batch["input_ids"], position_ids=batch["position_ids"])
    expected = logits(model, batch["input_ids"][1:, :100])
    torch.testing.assert_close(together[1:, :100], expected, atol=1e-5, rtol=0)
    assert batch["position_ids"][1, 100:].tolist() == list(range(LONG - 100))
    assert (batch["labels"][1] != -100).sum() == 100


def test_impossible_settings_and_examples_are_refused() -> None:
    with pytest.raises(MethodError, match="from 2 to target_length, got 9 with target_length=8"):
        PoSECollator(length=9, target_length=8)
    with pytest.raises(MethodError, match="short_length must be from 2 to length=8"):
        MixedWindowsCollator(length=8, target_length=8)
    with pytest.raises(MethodError, match="short_share from 0 to 1"):
        MixedWindowsCollator(length=8, target_length=8, short_length=4, short_share=2)
    collator = COLLATORS["PoSE"]
    with pytest.raises(MethodError, match="position_ids of its own, as packed documents do"):
        collator([document(9) | {"position_ids": list(range(9))}])
    with pytest.raises(MethodError, match="as many labels"):
        collator([document(9) | {"labels": [1]}])
    with pytest.raises(MethodError, match="as many labels"):
        collator([{"input_ids": []}])


class Seen(RopeCallback):
    """A callback that records the largest position that the model was trained at."""

    largest = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self.largest = max(self.largest, int(kwargs["position_ids"].max()))

        kwargs["model"].register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    model, seen = rope.patch(build("llama"), "yarn", factor=4), Seen()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = [document(2 * TRAINED, seed=seed) for seed in range(8)]
    Trainer(model, arguments, train_dataset=rows, data_collator=COLLATORS["PoSE"], callbacks=[seen]).train()
    assert TRAINED < seen.largest < LONG


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_sft_trainer(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from rope_ext_hf.hub import load_tokenizer

    model, seen = rope.patch(build("llama", vocab_size=300), "yarn", factor=4), Seen()
    arguments = SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, bf16=False, max_length=None, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([document(2 * TRAINED, seed=seed) for seed in range(8)])
    SFTTrainer(
        model, args=arguments, train_dataset=rows, data_collator=COLLATORS["PoSE"], callbacks=[seen],
        processing_class=load_tokenizer("reference"),
    ).train()  # fmt: skip
    assert TRAINED < seen.largest < LONG
