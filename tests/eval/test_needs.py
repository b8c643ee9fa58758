"""Whether a model needs extending: what is measured of real models, and of one that answers everything."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval import NeedReport, need, needs
from rope_ext_hf.eval.needs import ALL_TASKS
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.reading.documents import Document
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.reading.spans import tokenize
from rope_ext_hf.runs import runner
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.verdicts import Outcome
from tests.support.models import build


@pytest.fixture(scope="module")
def text() -> list[Document]:
    words = "the quick brown fox jumps over the lazy dog and runs away from it " * 40
    return [Document(name, words[start:] + words) for name, start in (("one", 0), ("two", 7), ("three", 30))]


def small(**settings: Any) -> Any:
    """A random model of bytes for 256 tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {"vocab_size": 259, "max_position_embeddings": 256, "num_key_value_heads": 2, "sliding_window": None}
    config = transformers.MistralConfig(**(sizes | given | settings))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def measure(model: Any, text: list[Document], **options: Any) -> NeedReport:
    return need(model, text, **({"tokenizer": load_tokenizer("reference")} | options))


def words() -> Any:
    """A tokenizer of words: in bytes, no prompt of variable tracking fits, whose example has 500 tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * 9, trainer
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.slow
def test_a_random_model_is_not_cleared(text: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_PROMPTS", (4, 4))
    found = measure(small(), text, target_length=512)
    assert found.rises[512].high is not None
    assert abs(found.rises[512].value) < 0.02  # as flat as a loss can be
    assert found.outcome is Outcome.NOT_MEASURED
    assert found.reads_to is None
    assert "Whether it reads 512 tokens cannot be told from the loss alone" in found.conclusion
    assert "of guessing each token by its share in the text" in found.conclusion
    assert "gains nothing that can be told between a quarter and the whole" in found.conclusion
    assert any(note.startswith("key-value tells nothing here: 0%") for note in found.notes)
    whole = "".join(document.text for document in text)
    entropy = -sum((p := whole.count(c) / len(whole)) * math.log(p) for c in set(whole))
    assert found.loss - found.guessing.value == pytest.approx(entropy, rel=0.05)  # the one is of the scored tokens


@pytest.mark.slow
def test_a_model_whose_every_layer_sees_32_tokens_is_not_cleared(
    text: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_PROMPTS", (4, 4))
    with pytest.warns(UserWarning, match="2 of 2 layers attend to the last 32 tokens only"):
        found = measure(small(sliding_window=32), text, target_length=512)
    assert found.outcome is Outcome.WORSE
    assert found.reads_to is None
    assert "It does not read 512 tokens, whatever its loss is: every layer sees the last 32 tokens" in found.conclusion
    assert "from further back than 63 tokens" in found.conclusion  # 2 layers, 31 tokens back each, and the last one
    some = build("gemma3")  # a layer that attends to everything among those with a window
    assert AttentionLayers(some.config).sliding < some.config.num_hidden_layers


class Oracle:
    """Reads nothing, and answers everything: in place of what scores a model."""

    reading = ""

    def __init__(self, model: Any, **_: Any) -> None:
        self.tokenizer = words()

    def losses(self, ids: Tensor, first: int, **_: Any) -> Tensor:
        return torch.full((len(ids) - first,), 0.5) + 0.5 * (len(ids) < 2048)

    def candidates(self, prompt: Tensor, answers: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """The first answer is the right one."""
        losses = torch.ones(answers.shape)
        losses[0] = 0.0
        return losses, answers[:1].expand(answers.shape)

    def generate(self, prompt: Tensor, count: int, **_: Any) -> Tensor:
        """The variables that were assigned the value that is asked for, directly or by way of others."""
        given = self.tokenizer.decode(prompt)
        asked = re.findall(r"assigned the value (\d+)", given)[-1]
        names = re.findall(rf"VAR (\w+) = {asked}\b", given)
        for name, other in re.findall(r"VAR (\w+) = VAR (\w+)", given):
            names += [name] if other in names else []
        return torch.tensor(self.tokenizer(" ".join(names), add_special_tokens=False).input_ids[:count])

    def take_cost(self) -> Cost:
        return Cost()


@pytest.mark.slow
def test_an_oracle_counts_in_every_task_and_is_cleared(text: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TokenScorer", Oracle)
    monkeypatch.setattr(needs, "_PROMPTS", (16, 16))
    model = small(max_position_embeddings=2048, vocab_size=500)
    found = measure(model, text, target_length=3072, tokenizer=words())
    assert found.known == ["needle", "key-value", "variable tracking", ALL_TASKS]
    assert {score.value for at in found.scores.values() for score in at.values()} == {1.0}
    assert [score.items for score in found.scores[ALL_TASKS].values()] == [48, 48]
    assert found.quarter[:3] == (0.5, 0.5, 0.5)
    assert (found.outcome, found.reads_to) == (Outcome.BETTER, 3072)
    assert "It needs nothing for 3,072 tokens" in found.conclusion


@pytest.mark.slow
def test_too_few_documents_decide_nothing(text: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TokenScorer", Oracle)
    monkeypatch.setattr(needs, "_TASKS", ("key-value",))
    found = measure(small(), text[:1], target_length=512)
    assert found.outcome is Outcome.NO_DIFFERENCE
    assert "1 document gives no interval" in found.conclusion
    found = measure(
        small(), [text[0], *(Document(each.name + each.text[:9], each.text[:700]) for each in text)], target_length=1024
    )
    assert found.notes[0] == "Fewer than 3 documents are long enough for 1,024 tokens."
    assert found.outcome is Outcome.NO_DIFFERENCE
    assert "at 1,024 tokens it was not measured" in found.conclusion


def test_the_architecture_is_counted_by_its_definition() -> None:
    """Bundled model: theta 10,000, 64 rotated dims, 256 tokens, no windows, no norm of queries and keys."""
    model = load_model("reference")
    sentences = needs._architecture(model, rope.describe(model))
    inv_freq = [10_000 ** (-2 * i / 64) for i in range(32)]
    complete = sum(2 * math.pi / value <= 256 for value in inv_freq)
    apart = next(m for m in range(1, 10_000) if sum(math.cos(m * value) for value in inv_freq) < 0) - 1
    assert sentences[0] == "5 of 5 full-attention layers rotate their queries and keys."
    assert f"{complete} of 32 pairs of dims complete a cycle within 256 tokens" in sentences[1]
    assert f"up to a distance of {apart:,} tokens" in sentences[2]
    assert len(sentences) == 3
    qwen = build("qwen3")
    assert any("QK norm" in each for each in needs._architecture(qwen, rope.describe(qwen)))
    windows = build("gemma3")
    assert "see the last" in needs._architecture(windows, rope.describe(windows))[0]


@pytest.mark.slow
def test_the_runs_are_kept_under_the_name_of_the_text(
    text: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_PROMPTS", (4, 4))
    monkeypatch.setattr(needs, "_TASKS", ())
    (tmp_path / "book.txt").write_text(text[0].text)
    found = measure(small(), text, target_length=384, out=tmp_path / "runs")
    [folder] = (tmp_path / "runs").glob("*-perplexity-*")
    assert read_run(folder).settings["data"] == "documents"
    assert measure(small(), text, target_length=384, out=tmp_path / "runs") == found  # continued
    need(small(), str(tmp_path / "book.txt"), tokenizer=load_tokenizer("reference"), out=tmp_path / "other")
    [folder] = (tmp_path / "other").glob("*-perplexity-*")
    assert read_run(folder).settings["data"] == str(tmp_path / "book.txt")


@pytest.mark.thorough
def test_a_patched_model_is_measured_with_its_patch(text: list[Document]) -> None:
    """yarn x4 reads four times as far: docs/choosing.md, 0.0 to 0.3 bits more at 2x and 4x, on other text."""
    it = measure(rope.patch(load_model("reference"), "yarn", factor=2), text, target_length=768)
    assert it.lengths == (512, 768)
    assert it.rises[768].value > 0.02


def test_the_plan(text: list[Document]) -> None:
    documents = [len(each.ids) for each in tokenize(text, load_tokenizer("reference"))]
    assert needs.lengths_to_read(256, None, documents) == ([256, 384, 512, 1024], [])
    assert needs.lengths_to_read(256, 512, documents)[0] == [256, 384, 512]
    assert needs.lengths_to_read(256, 2048, documents)[0] == [256, 384, 512, 1024, 2048]
    assert needs.lengths_to_read(256, 100, documents)[0] == [256, 384, 512, 1024]


def test_every_document_weighs_about_the_same(text: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read most makes an interval as wide as if it were alone."""
    read: dict[str, int] = {}

    class Counting(Oracle):
        def losses(self, ids: Tensor, first: int, **_: Any) -> Tensor:
            name = "long" if 120 in ids else "short"  # "u" as ByT5 counts it; no other document has one
            read[name] = read.get(name, 0) + 1
            return torch.ones(len(ids) - first)

    monkeypatch.setattr(runner, "TokenScorer", Counting)
    monkeypatch.setattr(needs, "_TASKS", ())
    monkeypatch.setattr(needs, "_PROMPTS", (16, 16))
    long = Document("long", "u" * 100_000)
    found = measure(small(), [long, *(Document(str(i), "abc" * 1000) for i in range(3))], target_length=512)
    assert found.rises[512].items == 4
    assert read["short"] >= 2 * read["long"]


def test_impossible_questions_are_refused(text: list[Document]) -> None:
    with pytest.raises(MethodError, match="target_length must be a whole number of at least 1"):
        measure(small(), text, target_length=0)
    with pytest.raises(CorpusError, match="give a text with 3 longer documents"):
        measure(small(), [Document("short", "too short " * 20)])
