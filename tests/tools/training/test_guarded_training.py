"""The guarded training of `finetune`: the rows of a step, its loss, and the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import TrainerState, TrainingArguments

import rope_ext_hf as rope
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.tokenizing import prefix_tokens, tokenize
from rope_ext_hf.tools.training.finetuning import with_defaults
from rope_ext_hf.tools.training.finetuning_options import Finetuning
from rope_ext_hf.tools.training.guarded_training import Budget, Clock, Rows, find_checkpoint, train
from tests.support.byte_tokenizers import SPECIAL, TEMPLATES, byte_tokenizer
from tests.support.models import build, logits, tokens

DOCUMENTS = [torch.arange(10, 60), torch.arange(60, 95)]


def question(**fields: Any) -> Finetuning:
    own: dict[str, Any] = {"model": "m", "method": "linear", "factor": 4, "data": "texts", "learning_rate": 1e-3}
    return with_defaults(Finetuning(**own | {"accumulate": 1} | fields))


class Repeated(Rows):
    """Rows that repeat the first one of others."""

    def __init__(self, rows: Rows) -> None:
        self.__dict__ |= vars(rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(0)


def test_rows_are_windows_of_the_text_and_the_same_in_every_run() -> None:
    rows, same = (Rows(DOCUMENTS, 16, 4, end=2, seed=3) for _ in range(2))
    text = [*range(10, 60), 2, *range(60, 95), 2]
    windows = {tuple(text[start : start + 16]) for start in range(len(text) - 15)}
    drawn = [rows[index] for index in range(500)]
    assert {tuple(row.tolist()) for each in drawn for row in each["long"]} == windows
    assert all(each["short"].shape == (4, 4) for each in drawn)
    assert torch.equal(rows[77]["short"], same[77]["short"])
    assert not torch.equal(rows[77]["long"], Rows(DOCUMENTS, 16, 4, end=2, seed=4)[77]["long"])


@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_and_documents_begin_as_the_tokenizer_begins_a_text(template: str) -> None:
    tokenizer, texts = byte_tokenizer(template), ["Mice pay in kind. ", "", "Nobody counts the cheese."]
    prefix = tokenizer("M")["input_ids"][: TEMPLATES[template]]  # by the definition: what stands before the first byte
    documents = tokenize([Document(text, text) for text in texts], tokenizer)
    rows = Rows(
        [each.ids for each in documents], 20, 5, prefix=prefix_tokens(tokenizer, None), end=tokenizer.eos_token_id,
        seed=0,
    )  # fmt: skip
    plain = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    whole = [token for ids in plain for token in (*prefix, *ids)]
    begins = [at for at in range(len(whole)) if whole[at : at + len(prefix)] == prefix]
    for length, name in ((20, "long"), (5, "short")):
        drawn = {tuple(row.tolist()) for index in range(600) for row in rows[index][name]}
        read = length - len(prefix)
        outside = [at for at in range(len(whole) - read + 1) if not any(0 <= at - b < len(prefix) for b in begins)]
        assert drawn == {(*prefix, *whole[at : at + read]) for at in outside}
    mine = [prefix, [tokenizer.eos_token_id], []]  # nothing that stands behind a text is in the rows
    assert {token for token in rows.text.tolist() if token < len(SPECIAL)} <= {token for ids in mine for token in ids}


@pytest.mark.parametrize("prefix", [(), (5,), (5, 6)])
def test_the_tokens_before_a_row_are_not_predicted(prefix: tuple[int, ...], tmp_path: Path) -> None:
    rows = Rows([tokens(400)[0]], 32, 16, prefix=prefix, end=None, seed=0)
    ids = Rows.collate([rows[0]])["long"]
    likely = logits(build("llama"), ids)[0].double().log_softmax(-1)
    first = max(1, len(prefix))
    by_hand = -sum(float(likely[i - 1, ids[0, i]]) for i in range(first, 32)) / (32 - first)
    ran = train(question(steps=10, guard=0, learning_rate=0.0), build("llama"), None, Repeated(rows), tmp_path, batch=1)
    assert ran["losses"][0]["loss"] == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [0.0, 1.0, 3.0])
def test_the_first_step_follows_the_gradient_of_its_definition(guard: float, tmp_path: Path) -> None:
    rows = Rows([tokens(400)[0]], 64, 16, end=None, seed=0)
    model, teacher = rope.patch(build("llama"), "linear", factor=4), build("llama")
    by_hand = rope.patch(build("llama"), "linear", factor=4)
    batch = Rows.collate([rows[0], rows[1]])
    scores = by_hand(input_ids=batch["long"]).logits[:, :-1]
    loss = functional.cross_entropy(scores.flatten(0, 1), batch["long"][:, 1:].flatten())
    if guard:
        expected = logits(teacher, batch["short"]).softmax(-1)
        predicted = by_hand(input_ids=batch["short"]).logits.log_softmax(-1)
        loss = loss + guard * (expected * (expected.log() - predicted)).sum(-1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3 * 0.04, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.step()
    ran = train(question(steps=1, guard=guard), model, teacher if guard else None, rows, tmp_path, batch=2)
    assert ran["steps"] == 1
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def test_the_rate_rises_falls_and_ends_with_the_budget() -> None:
    by_step, by_time = Clock(Budget(steps=100), 0.0), Clock(Budget(minutes=1.0), 0.0)
    rates = [by_step.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.04)
    assert max(rates) == rates[5] > 0.99
    assert rates[100] == 0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    by_time.seconds = 30.0
    assert by_time.rate(7) == pytest.approx(by_step.rate(50))


class StoppedError(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    rows = Rows([tokens(400)[0]], 64, 16, end=None, seed=0)
    options: dict[str, Any] = {"batch": 2, "save_every": 3}
    whole = rope.patch(build("llama"), "yarn", factor=4)
    train(question(steps=12), whole, None, rows, tmp_path / "whole", **options)

    def stop(step: int, loss: float, used: float) -> None:
        if step == 10:
            raise StoppedError

    cut = rope.patch(build("llama"), "yarn", factor=4)
    with pytest.raises(StoppedError):
        train(question(steps=12), cut, None, rows, tmp_path / "cut", report=stop, **options)
    (tmp_path / "cut" / "checkpoint-11").mkdir()  # as if it had been killed while it wrote this one
    for _ in range(2):  # the second time there is nothing left to train
        again = rope.patch(build("llama"), "yarn", factor=4)
        ran = train(question(steps=12), again, None, rows, tmp_path / "cut", **options)
        assert ran["steps"] == 12
        for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert [entry["step"] for entry in ran["losses"]] == [10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("optimizer.pt", "optimizer.pt changed since it was written"),
        ("model.safetensors", "model.safetensors changed since it was written"),
        ("rng_state.pth", "rng_state.pth changed since it was written"),
        ("scheduler.pt", "scheduler.pt changed since it was written"),
        ("trainer_state.json", "trainer_state.json changed since it was written"),
        ("clock.json", "its clock.json, which is written last, is missing or damaged"),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
@pytest.mark.sampled(5)
def test_a_damaged_checkpoint_is_left_out(file: str, reason: str, damage: str, tmp_path: Path) -> None:
    for number in (3, 6):
        (folder := tmp_path / f"checkpoint-{number}").mkdir()
        for name in ("optimizer.pt", "model.safetensors", "rng_state.pth", "scheduler.pt", "trainer_state.json"):
            (folder / name).write_bytes(f"{name} {number}".encode() * 100)
        clock = Clock(Budget(steps=9), float(number))
        clock.on_save(TrainingArguments(str(tmp_path)), TrainerState(global_step=number), None)
    assert find_checkpoint(tmp_path, pytest.fail) == (tmp_path / "checkpoint-6", 6.0)
    path = tmp_path / "checkpoint-6" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1])}.get(damage, b""))
    if damage == "remove":
        path.unlink()
    lines: list[str] = []
    assert find_checkpoint(tmp_path, lines.append) == (tmp_path / "checkpoint-3", 3.0)
    assert [line for line in lines if f"checkpoint-6 is removed: {reason}" in line] == lines != []
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-3"]
    (tmp_path / "checkpoint-3" / "clock.json").unlink()
    assert find_checkpoint(tmp_path, lines.append) is None


@pytest.mark.slow
def test_a_budget_of_time_ends_the_training(tmp_path: Path) -> None:
    rows = Rows([tokens(400)[0]], 64, 16, end=None, seed=0)
    ran = train(question(minutes=0.005), build("llama"), None, rows, tmp_path, batch=1)
    assert ran["steps"] >= 1
    assert ran["seconds"] >= 0.3
    assert (tmp_path / f"checkpoint-{ran['steps']}").is_dir()
