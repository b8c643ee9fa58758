"""Whether a model needs extending: the plan, what is concluded from it, and what `advise` makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, FileError, MethodError
from rope_ext_hf.eval import Need, need, needs
from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.needs import reach_in
from rope_ext_hf.hub import load_model, load_tokenizer
from tests.support.models import build


@pytest.fixture(scope="module")
def text() -> list[Document]:
    words = "the quick brown fox jumps over the lazy dog and runs away from it " * 40
    return [Document("one", words), Document("two", words[7:] + words)]


@pytest.fixture(scope="module")
def found(text: list[Document], tmp_path_factory: pytest.TempPathFactory) -> tuple[Need, Path]:
    folder = tmp_path_factory.mktemp("need")
    return measure(text, out=folder, target_length=512), folder


def measure(text: list[Document], **options: Any) -> Need:
    return need(load_model("reference"), text, tokenizer=load_tokenizer("reference"), name="reference", **options)


@pytest.mark.thorough
def test_the_bundled_model_reads_its_context_length_and_no_more(found: tuple[Need, Path]) -> None:
    it, _ = found
    assert it.context_length == it.reads_to == 256  # docs/choosing.md: as loaded it loses 2 bits at twice the length
    assert list(it.rises) == [256, 384, 512]
    assert it.rises[256] == (0.0, 0.0, 0.0)
    assert it.rises[512][1] > 0.5
    assert it.scores["key-value"][256] > 0.8
    assert it.scores["key-value"][512] < 0.2
    assert "at 384 tokens the loss is" in it.conclusion
    assert it.command == "rope-ext advise reference --target-length 512"
    assert any("needle was not asked" in note for note in it.notes)  # its wording has more bytes than 256


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


@pytest.mark.thorough
def test_a_run_is_kept_and_continued(found: tuple[Need, Path], text: list[Document]) -> None:
    it, folder = found
    assert json.loads((folder / "need.json").read_text()) == json.loads(json.dumps(it.to_dict()))
    assert measure(text, out=folder, target_length=512) == it
    assert reach_in(folder) == 256


@pytest.mark.thorough
def test_a_patched_model_is_measured_with_its_patch(text: list[Document]) -> None:
    """yarn x4 reads four times as far: docs/choosing.md, 0.0 to 0.3 bits more at 2x and 4x, on other text."""
    model = rope.patch(load_model("reference"), "yarn", factor=2)
    it = need(model, text, tokenizer=load_tokenizer("reference"), target_length=768)
    assert (it.context_length, list(it.rises)) == (512, [512, 768])
    assert it.rises[768][0] > 0.02
    assert it.command == "rope-ext advise MODEL --target-length 768"


@pytest.mark.parametrize(
    ("rise", "answered", "target", "reads_to", "sentence", "command"),
    [
        ((0.01, 0.005, 0.015), 0.9, 1024, 1024, "It needs nothing for 1,024 tokens", "rope-ext ppl"),
        ((0.01, 0.005, 0.015), 0.9, None, 1024, "It reads to at least 1,024 tokens as it is, 4 times", "rope-ext need"),
        ((0.30, -0.10, 0.700), 0.9, 1024, 1024, "It needs nothing for 1,024 tokens", "rope-ext ppl"),
        ((0.30, 0.200, 0.400), 0.9, 1024, 512, "at 1,024 tokens the loss is 0.30 nats", "rope-ext advise"),
        ((0.01, 0.005, 0.015), 0.6, 1024, 512, "60% of needle is answered instead of 90%", "rope-ext advise"),
        ((0.01, 0.005, 0.015), 0.9, 4096, 1024, "4,096 were not", "rope-ext advise"),
    ],
)
def test_what_is_concluded(  # the loss and the answers at the longest of three lengths decide
    monkeypatch: pytest.MonkeyPatch,
    text: list[Document],
    tmp_path: Path,
    rise: tuple[float, float, float],
    answered: float,
    target: int | None,
    reads_to: int,
    sentence: str,
    command: str,
) -> None:
    class Stub:
        def __init__(self, length: int) -> None:
            self.length = length

    lengths = [256, 512, 1024]
    monkeypatch.setattr(needs, "perplexity", lambda *_, **__: [Stub(length) for length in lengths])
    monkeypatch.setattr(needs, "_lengths", lambda *_: (lengths, []))
    monkeypatch.setattr(needs, "difference", lambda one, _: rise if one.length == 1024 else (0.0, 0.0, 0.0))
    score = {256: 0.9, 512: 0.9, 1024: answered}
    monkeypatch.setattr(needs, "_retrieval", lambda _, __, at, **___: {length: score[length] for length in at})
    monkeypatch.setattr(needs, "_tracking", lambda _, at, **__: dict.fromkeys(at, 0.1))
    it = measure(text, target_length=target, out=tmp_path)
    assert it.reads_to == reads_to
    assert sentence in it.conclusion
    assert it.command.startswith(command)
    assert it.command.endswith(f"--need {tmp_path}") == (command == "rope-ext advise")
    assert "variable tracking tells nothing here: 10% are answered at 256 tokens." in it.notes
    advice = rope.advise("reference", 1024, reads_to=reach_in(tmp_path))
    assert (str(advice).count("No method is needed") == 1) == (reads_to == 1024)
    assert ("what `rope-ext need` measured" in str(advice)) == (reads_to > 256)


def test_impossible_questions_are_refused(text: list[Document], tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="at least 1 token"):
        measure(text, target_length=0)
    with pytest.raises(CorpusError, match="give a text with a longer document"):
        measure([Document("short", "too short " * 20)])
    for content in ("{}", '{"reads_to": "1024"}', '{"reads_to": 0}', '{"reads_to": true}'):
        (tmp_path / "need.json").write_text(content)
        with pytest.raises(FileError, match="run rope-ext need again"):
            reach_in(tmp_path)
    with pytest.raises(FileError):
        reach_in(tmp_path / "nothing")
