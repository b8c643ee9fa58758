"""LongPPL against the algorithm of its authors' package (PKU-ML/LongPPL, longppl/longppl.py), written anew.

The oracle reads with whole forwards and transformers' own loss. It begins windows with BOS and reads the measured model
with BOS, which the package does not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CorpusError, FileError
from rope_ext_hf.eval import sweep
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path as reference
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.tools.suites.key_tokens import (
    KeyRanges,
    KeySetting,
    find_key_tokens,
    key_setting,
    merged,
    read_keys,
)
from tests.support.dispatch import LargestTensor
from tests.support.models import build
from tests.support.oracles import naive_key_tokens, token_losses

LENGTH, WINDOW = 256, 32
TEXT = (reference() / "README.md").read_text(encoding="utf-8")
TEXTS = {f"{i}.txt": TEXT[300 * i :].encode()[:LENGTH].decode() for i in range(4)}


def naive_longppl(model: Any, evaluator: Any, ids: Tensor) -> tuple[float, int]:
    """`compute_longppl` there, where both models have one tokenizer: the sum of losses, and key tokens."""
    keys = naive_key_tokens(evaluator, ids, WINDOW, WINDOW // 4, 2.0, -2.0, None)
    of_all = token_losses(model, ids)
    return float(sum(of_all[token - 1] for token in keys)), len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("bos", [None, 5])
@pytest.mark.parametrize(("count", "window", "stride"), [(120, 16, 4), (97, 24, 8), (65, 48, 16), (40, 40, 8)])
def test_key_tokens_are_those_of_the_papers_code(count: int, window: int, stride: int, bos: int | None) -> None:
    """Also where the last window predicts one token, on which the paper's code fails."""
    model = build("llama")
    ids = torch.randint(6, 90, (count,), generator=torch.Generator().manual_seed(count))
    setting = KeySetting(window, stride, gain=-0.02, likely=-4.6)
    expected = naive_key_tokens(model, ids, window, stride, -0.02, -4.6, bos)
    for first in (1, window, count - 7):
        prefix = () if bos is None else (bos,)
        is_key = find_key_tokens(TokenScorer(model, chunk=16), ids, first, setting, prefix=prefix, length=count)
        assert [first + place for place in is_key.nonzero()[:, 0].tolist()] == [t for t in expected if t >= first]
    assert bool(expected) == (window < count)


@pytest.mark.slow
def test_no_tensor_grows_with_length_times_vocabulary() -> None:
    model = build("llama", vocab_size=4096)
    ids = torch.randint(6, 90, (512,))
    scorer = TokenScorer(model, chunk=16, head_bytes=2**16)
    with LargestTensor() as largest:
        find_key_tokens(scorer, ids, 1, KeySetting(64, 16), length=512)
    assert largest.elements < 512 * 4096 / 4


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(reference(), dtype=torch.float32).eval()


def corpus() -> list[Document]:
    return [Document(name, text) for name, text in TEXTS.items()]


def measured(model: Any, keys_by: Any, out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"methods": ["linear"], "factors": [2.0], "protocol": "truncate", "data": "texts"} | options
    return sweep(model, given.pop("corpus", corpus()), lengths=[LENGTH], keys_by=keys_by, out=out, **given)


@pytest.mark.slow
def test_longppl_is_that_of_the_papers_code(model: Any, tmp_path: Path) -> None:
    run = measured(model, reference(), tmp_path)
    ids = [
        torch.tensor(load_tokenizer("reference")(text, add_special_tokens=False)["input_ids"])
        for text in TEXTS.values()
    ]
    for result in run.results:
        patched = AutoModelForCausalLM.from_pretrained(reference(), dtype=torch.float32).eval()
        if result.method is not None:
            rope.patch(patched, "linear", factor=2.0)
        parts = [naive_longppl(patched, model, each) for each in ids]
        count = sum(part[1] for part in parts)
        assert result.key_tokens == count > 5
        assert result.longppl == pytest.approx(math.exp(sum(part[0] for part in parts) / count), rel=1e-5)
        assert result.longppl_low <= result.longppl <= result.longppl_high


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_with_keys_shows_them_everywhere_and_is_taken_up_again(model: Any, tmp_path: Path) -> None:
    run = measured(model, reference(), tmp_path)
    (keys_folder,) = tmp_path.glob("*-keys-*")
    row = run.rows()[0]
    assert (row["longppl"], row["key_tokens"]) == (run.results[0].longppl, run.results[0].key_tokens)
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "LongPPL" in page
    assert f"{run.results[0].longppl:.2f}" in page
    assert "gain above 2, log-probability above -2, windows of 32 tokens every 8" in page
    assert json.loads((run.folder / "results.json").read_text())["results"][0]["longppl"] == row["longppl"]
    assert "Key tokens" in (keys_folder / "report.html").read_text(encoding="utf-8")
    read: list[int] = []
    assert measured(model, reference(), tmp_path, progress=lambda name, tokens: read.append(tokens)) == run
    assert not read
    by_file = measured(model, keys_folder / "keys.json", tmp_path)
    assert by_file == run  # the same keys are the same run
    saved = json.loads((keys_folder / "keys.json").read_text())
    saved["documents"][0]["ranges"] = saved["documents"][0]["ranges"][1:]
    (tmp_path / "other.json").write_text(json.dumps(saved))
    other = measured(model, tmp_path / "other.json", tmp_path)
    assert other.folder != run.folder
    assert other.results[0].key_tokens < run.results[0].key_tokens
    assert measured(model, None, tmp_path).results[0].key_tokens is None


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_finds_keys_and_reads_them_again(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [
        "ppl", "reference", "--data", str(tmp_path / "*.txt"), "--lengths", "128,256", "--protocol", "position",
        "--out", str(tmp_path / "out"), "--dtype", "float32", "--device", "cpu",
    ]  # fmt: skip
    first = CliRunner().invoke(app, [*command, "--keys-by", "reference"])
    assert first.exit_code == 0, first.output
    assert "LongPPL" in first.stdout
    keys = re.sub(r"\s", "", first.stderr.rpartition("They are in ")[2].partition("keys.json")[0]) + "keys.json"
    again = CliRunner().invoke(app, [*command, "--keys-by", keys, "--json"])
    assert again.exit_code == 0, again.output
    answer = json.loads(again.stdout)
    assert {each["length"] for each in answer["results"] if each["longppl"]} == {128, 256}
    assert len(list((tmp_path / "out").glob("*-perplexity-*"))) == 1
    for arguments, message in (
        (["--key-window", "16"], "give --keys-by, too"),
        (["--keys-by", keys, "--key-window", "16"], "were found with windows of 32 tokens"),
        (["--keys-by", "reference", "--key-window", "256"], "between 1 and 255 tokens"),
        (["--keys-by", "x" * 5000], "is neither a folder"),
    ):
        refused = CliRunner().invoke(app, [*command, *arguments])
        assert refused.exit_code
        assert message in re.sub(r"\s+", " ", refused.output)


@pytest.mark.slow
def test_without_a_key_token_the_message_says_so(tmp_path: Path) -> None:
    for_noise = build("llama", vocab_size=259, max_position_embeddings=LENGTH)
    for_noise.save_pretrained(tmp_path / "noise")
    load_tokenizer("reference").save_pretrained(tmp_path / "noise")
    with pytest.raises(CorpusError, match=r"none of the scored tokens is a key token \(noise: gain above 2"):
        measured(for_noise, tmp_path / "noise", tmp_path, tokenizer=load_tokenizer("reference"))


def pairs() -> PreTrainedTokenizerFast:
    """A tokenizer of two characters each, all unknown to its vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,2}"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def naive_overlap(offsets: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """`cal_overlap` there: the tokens inside a range (it numbers losses, each one less than its token)."""
    return [i for i, (a, b) in enumerate(offsets) if any(start <= a and b <= stop for start, stop in ranges)]


@pytest.mark.parametrize("text", ["plain text of 31 characters....", "Über 😀 naïve Zoë — „quoted“ …!"])
def test_ranges_are_for_any_tokenizer(text: str) -> None:
    ranges = ((0, 3), (4, 9), (12, 13), (16, 24))
    document = Document("one", text)
    for tokenizer in (pairs(), load_tokenizer("reference")):
        (tokens,) = tokenize([document], tokenizer)
        offsets = [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        keys = KeyRanges("x", KeySetting(2, 1), {_digest(text): ("one", ranges)})
        assert keys.mask(tokens).nonzero()[:, 0].tolist() == naive_overlap(offsets, ranges) != []


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:100% of the tokens are the tokenizer's unknown token:UserWarning")
def test_an_evaluator_may_have_another_tokenizer(model: Any, tmp_path: Path) -> None:
    """Tokens of two characters count where both characters are keys of an evaluator that reads single ones."""
    options: dict[str, Any] = {"lengths": [LENGTH // 2], "protocol": "truncate", "tokenizer": pairs(), "methods": []}
    run = sweep(build("llama"), corpus(), keys_by=reference(), key_window=WINDOW, out=tmp_path, **options)
    expected = 0
    for text in TEXTS.values():
        (tokens,) = tokenize([Document("", text)], load_tokenizer("reference"))
        keys = naive_key_tokens(model, tokens.ids, WINDOW, WINDOW // 4, 2.0, -2.0, None)
        offsets = [(i, i + 2) for i in range(0, len(text), 2)]
        expected += len(naive_overlap(offsets, merged([(token, token + 1) for token in keys])))
    assert run.results[-1].key_tokens == expected > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"documents": [{"name": "a", "sha256": "0", "ranges": [[3, 2]]}]}, "ascending; got"),
        ({"documents": [{"name": "a", "sha256": "0", "ranges": [[0, 2], [1, 3]]}]}, "ascending; got"),
        ({"documents": [{"name": "a", "sha256": "0", "ranges": [[0, 2.5]]}]}, "ascending; got"),
        ({"documents": [{"name": "a", "sha256": "0", "ranges": {"0": 1}}]}, "ascending; got"),
        ({"documents": [{"name": "a", "ranges": []}]}, "'sha256' is missing"),
        ({"documents": [{"name": 3, "sha256": "0", "ranges": []}]}, "needs a name"),
        ({"documents": 5}, "does not hold key tokens"),
        ({"setting": {"window": 0, "stride": 1}}, "window and stride, and finite numbers as gain"),
        ({"setting": {"window": 4, "stride": 1, "gain": math.nan}}, "window and stride, and finite numbers as gain"),
        ({"setting": {"window": 4, "stride": 1, "gain": 10**400}}, "too large"),
        ({"setting": {"window": 4, "stride": 1, "more": 1}}, "more"),
        ({"setting": []}, "does not hold key tokens"),
        ({"evaluator": ["x"]}, "named by a string"),
    ],
)
def test_a_damaged_file_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = {"evaluator": "x", "setting": {"window": 4, "stride": 1}, "documents": []}
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(whole))
    assert read_keys(file).setting == KeySetting(4, 1)
    file.write_text(json.dumps(whole | changed))
    with pytest.raises(FileError, match=re.escape(message)) as caught:
        read_keys(file)
    assert "keys.json" in str(caught.value)


def test_keys_of_another_text_are_refused() -> None:
    (tokens,) = tokenize([Document("one", "abc")], load_tokenizer("reference"))
    with pytest.raises(CorpusError, match="is not the one in which key tokens were found"):
        KeyRanges("x", KeySetting(2, 1), {"0": ("one", ((0, 1),))}).mask(tokens)
    with pytest.raises(CorpusError, match="ends after the text"):
        KeyRanges("x", KeySetting(2, 1), {_digest("abc"): ("one", ((0, 9),))}).mask(tokens)
    with pytest.raises(CorpusError, match="came as token ids; give text"):
        KeyRanges("x", KeySetting(2, 1), {}).mask(Tokens("ids", torch.tensor([3, 4]), (1, 2)))
    assert not KeyRanges("x", KeySetting(2, 1), {"0": ("another", ((0, 1),))}).mask(tokens).any()


@pytest.mark.slow
def test_an_evaluator_beyond_its_length_is_warned_of(model: Any, tmp_path: Path) -> None:
    long = [Document("long", TEXT[:512])]
    with pytest.warns(UserWarning, match="is made for 256 tokens and reads 512"):
        sweep(model, long, lengths=[512], methods=[], protocol="truncate", keys_by=reference(), out=tmp_path)


@pytest.mark.thorough
@pytest.mark.slow
def test_documents_that_were_not_searched_are_warned_of(model: Any, tmp_path: Path) -> None:
    """One that was searched and has no key tokens is none of them."""
    known, short, new = (
        Document(name, TEXT[at : at + count]) for name, at, count in (("a", 0, 256), ("b", 300, 40), ("c", 500, 256))
    )
    options: dict[str, Any] = {"methods": [], "lengths": [20, 200], "max_spans": 9, "out": tmp_path}

    def keys(documents: list[Document], by: Any) -> Any:
        return sweep(model, documents, protocol="stream", keys_by=by, **options)

    searched = keys([known, short], reference())
    (folder,) = tmp_path.glob("*-keys-*")
    saved = json.loads((folder / "keys.json").read_text())["documents"]
    assert [(each["name"], bool(each["ranges"])) for each in saved] == [("a", True), ("b", False)]
    assert keys([known, short], folder / "keys.json") == searched
    with pytest.warns(UserWarning, match="not searched for in 1 of 3 documents, such as 'c'"):
        assert keys([known, short, new], folder / "keys.json").results[-1].key_tokens == searched.results[-1].key_tokens


def test_the_interval_is_over_documents_that_have_keys() -> None:
    setting = Setting("matched", 5, 256, False, 0, "x")
    documents = [
        DocumentLoss("a", 9.0, 10, 10, 1, 4.0, 4),
        DocumentLoss("b", 9.0, 10, 10, 1),
    ]
    result = PerplexityRuns().result(None, setting, (64,), documents)
    assert result.longppl == pytest.approx(math.e)
    assert (result.longppl_low, result.longppl_high) == (None, None)  # one document has keys
    assert result.key_tokens == 4
    for document in documents:
        assert PerplexityRuns().parse(document.name, document.to_record()) == document
    with pytest.raises(ValueError, match="expected a loss"):
        PerplexityRuns().parse("a", [9.0, 10, 10, 1, 4.0, 11])
    assert PerplexityRuns().result(None, setting, (64,), documents[1:]).longppl is None


@pytest.mark.parametrize(("longest", "window", "stride"), [(2**15, 4096, 1024), (2**20, 4096, 1024), (2048, 256, 64)])
def test_windows_are_those_of_the_paper_or_an_eighth(longest: int, window: int, stride: int) -> None:
    assert key_setting(longest) == KeySetting(window, stride, 2.0, -2.0)


def test_ranges_are_merged_where_they_touch() -> None:
    assert merged([(4, 5), (0, 2), (2, 3), (7, 7), (4, 5), (5, 8)]) == ((0, 3), (4, 8))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_read(model: Any, tmp_path: Path) -> None:
    run = measured(model, None, tmp_path)
    settings = json.loads((run.folder / "run.json").read_text())
    del settings["setting"]["keys"]
    (run.folder / "run.json").write_text(json.dumps(settings))
    assert read_run(run.folder).results == run.results
