from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval import perplexity, sweep
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.reading.protocols import PROTOCOLS
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path
from rope_ext_hf.runs.folder.folder import read_run
from tests.support.dispatch import LargestTensor
from tests.support.models import FAMILIES, build, from_config
from tests.support.oracles import NAIVE_PROTOCOLS, nats

TEXT = "import os\n" * 40


def tokens(name: str, count: int, seed: int) -> Tokens:
    ids = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))
    return Tokens(name, ids, tuple(range(1, count + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_equals_a_naive_computation(protocol: str) -> None:
    model = build("llama").double()
    corpus = [tokens("a", 150, 1), tokens("b", 70, 2), tokens("short", 63, 3)]
    for result in perplexity(
        model, corpus, lengths=[16, 32, 64], protocol=protocol, targets=7, stride=5, bos=False, chunk=16
    ):
        parts = [
            part
            for d in corpus
            for part in NAIVE_PROTOCOLS[protocol](model, d.ids, result.length, 64, targets=7, stride=5)
        ]
        expected = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        assert result.tokens == sum(part[1] for part in parts)
        assert result.loss == pytest.approx(expected, abs=1e-6)
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
        assert result.bits_per_token == pytest.approx(expected / math.log(2), abs=2e-6)
        assert result.bits_per_byte == pytest.approx(result.bits_per_token)  # here a token is a byte
        if len(result.documents) < 3:
            assert (result.low, result.high) == (None, None)
        else:
            assert result.low is not None
            assert result.high is not None
            assert result.low <= result.loss <= result.high


@pytest.mark.slow
def test_blocks_equal_lm_eval() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path())
    text = "def add(first, second):\n    return first + second\n" * 12
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256, batch_size=1, add_bos_token=False)
    (theirs,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    (ours,) = perplexity(model, [Document("a", text)], lengths=[256], protocol="blocks", tokenizer=tokenizer)
    assert ours.tokens == len(text)
    assert -ours.loss * ours.tokens == pytest.approx(theirs, abs=1e-2)  # of hundreds of nats
    assert ours.loss == pytest.approx(-theirs / len(text), abs=1e-5)


def granite() -> Any:
    from transformers import GraniteConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return from_config(GraniteConfig(vocab_size=97, logits_scaling=3.0, initializer_range=0.3, **sizes))


READ: dict[str, Callable[[], Any]] = {
    **{name: partial(build, name) for name in FAMILIES},
    "soft cap": lambda: build("gemma2", final_logit_softcapping=2.0, attn_logit_softcapping=3.0),
    "factor": lambda: build("cohere", logit_scale=0.25),
    "divisor": granite,
    "window": lambda: build("mistral", sliding_window=24),
}


@pytest.mark.parametrize("name", READ)
def test_reading_in_chunks_changes_nothing(name: str) -> None:
    """Any family, whatever its attention is and whatever stands behind its head; losses token by token."""
    model = READ[name]()
    ids = tokens("a", 150, 1).ids
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[4:-1].float(), ids[5:], reduction="none")
    implementation = model.config._attn_implementation
    scorer = TokenScorer(model, chunk=37)
    torch.testing.assert_close(scorer.losses(ids, 5), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(scorer.losses(ids[:60], 5), expected[:55], atol=2e-5, rtol=0)  # the cache used again
    assert model.config._attn_implementation == implementation
    assert scorer.chunked


@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn"])
def test_chunks_change_nothing_under_a_length_dependent_method(method: str) -> None:
    model = rope.patch(build("llama"), method)
    ids = tokens("a", 300, 1).ids
    with torch.no_grad(), rope.fixed_length(model, 300):
        logits = model(ids[None], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
    losses = TokenScorer(model, chunk=64).losses(ids, 1)
    torch.testing.assert_close(losses, expected, atol=2e-5, rtol=0)
    assert losses.mean().item() == pytest.approx(expected.mean().item(), abs=1e-5)


@pytest.mark.thorough
def test_bfloat16_in_chunks_is_near_one_shot() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.bfloat16).eval()
    rope.patch(model, "yarn", factor=4)
    (document,) = tokenize(load("stdlib")[:1], AutoTokenizer.from_pretrained(path()))
    scorer = TokenScorer(model, chunk=100)
    assert scorer.chunked
    gaps = []
    for window in torch.split(document.ids[: 16 * 1024], 1024):
        with torch.no_grad():
            whole = torch.nn.functional.cross_entropy(model(window[None]).logits[0, :-1].float(), window[1:])
        gaps.append(scorer.losses(window, 1).mean().item() - whole.item())
    assert abs(fmean(gaps)) < 1e-3


def test_offloaded_keys_and_values_change_nothing() -> None:
    model = build("llama")
    prompt, answers = tokens("a", 150, 1).ids, tokens("b", 6, 2).ids.reshape(2, 3)
    scorer = TokenScorer(model, chunk=37, offload_cache=True)
    losses, likeliest = scorer.candidates(prompt, answers)
    expected_losses, expected_likeliest = TokenScorer(model, chunk=37).candidates(prompt, answers)
    assert torch.equal(losses, expected_losses)
    assert torch.equal(likeliest, expected_likeliest)
    assert scorer.chunked
    assert scorer.reader.cache is not None
    assert all(layer.offload and layer.keys.device.type == "cpu" for layer in scorer.reader.cache.layers)
    document = tokens("a", 150, 1)
    found = perplexity(model, [document], lengths=[64], bos=False, offload_cache=True)
    assert found == perplexity(model, [document], lengths=[64], bos=False)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_taken_apart_along_the_vocabulary(bias: bool) -> None:
    """Many parts, the last one narrower; targets in each of them; one loss at a time from float64 logits."""
    model = build("llama", vocab_size=5000)
    if bias:
        model.lm_head = torch.nn.Linear(64, 5000)
    ids = torch.randint(3, 5000, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].double()
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").float()
    for size in (1, 10**9):
        scorer = TokenScorer(model, chunk=64, head_bytes=size)
        assert scorer.chunked
        torch.testing.assert_close(scorer.losses(ids, 1), expected, atol=2e-5, rtol=0)


def test_a_head_that_is_more_than_a_layer_runs_whole() -> None:
    """A hook, as of a device map, or another class, as of an adapter, is not passed by."""
    model = build("llama")
    ids = tokens("a", 100, 1).ids
    with torch.no_grad():
        logits = 2 * model(ids[None], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    scorer = TokenScorer(model, chunk=37, head_bytes=4000)
    assert scorer.chunked
    torch.testing.assert_close(scorer.losses(ids, 1), expected, atol=4e-5, rtol=0)


def test_memory_does_not_grow_with_the_vocabulary_times_the_length() -> None:
    """No tensor the scorer makes is as large as (length, vocabulary)."""
    model = build("llama", vocab_size=5000)
    ids = tokens("a", 512, 1).ids
    scorer = TokenScorer(model, chunk=64, head_bytes=64 * 1024 * 4)
    with LargestTensor() as seen:
        scorer.losses(ids, 1)
    assert scorer.chunked
    assert 64 * 1024 <= seen.elements < 512 * 5000 / 4


def test_a_head_that_cannot_be_run_apart_is_measured_through_the_whole_model() -> None:
    model = build("llama")
    model.register_forward_hook(lambda module, args, output: output | {"logits": 2 * output.logits})
    document = tokens("a", 64, 5)
    (result,) = perplexity(model, [document], lengths=[64], targets=7, bos=False)
    assert not TokenScorer(model).chunked
    assert result.loss == pytest.approx(nats(model, document.ids, range(57, 64)) / 7, abs=1e-5)


def test_a_scale_that_the_forward_of_a_model_leaves_out_is_left_out() -> None:
    """As Aya Vision does, whose text part has one."""
    model = build("llama")
    model.config.logit_scale = 2.0
    document = tokens("a", 64, 5)
    (result,) = perplexity(model, [document], lengths=[64], targets=7, bos=False)
    assert TokenScorer(model).chunked
    assert result.loss == pytest.approx(nats(model, document.ids, range(57, 64)) / 7, abs=1e-5)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + pair / 4 for pair in range(8)],
    "original_max_position_embeddings": 64,
}
FOLLOWING: dict[str, dict[str, Any]] = {
    "llama": {"form": {"rope_type": "dynamic", "factor": 4.0}},
    "phi3": {"form": LONGROPE, "max_position_embeddings": 256, "original_max_position_embeddings": 64},
}
"""Models whose own scaling follows the length of each forward."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLLOWING)
def test_a_model_whose_own_scaling_follows_the_input_is_read_in_chunks_as_under_a_patch(name: str) -> None:
    model = build(name, **FOLLOWING[name])
    document = tokens("a", 256, 6)
    scorer = TokenScorer(model, chunk=32)
    assert scorer.reading == "in chunks of 32 tokens, layer by layer"
    assert scorer.depends_on_total_length
    results = perplexity(model, [document], lengths=[64, 256], targets=7, bos=False, chunk=32)
    assert scorer.unpatched
    for result in results:
        fresh = build(name, **FOLLOWING[name])
        expected = nats(fresh, document.ids[256 - result.length :], range(result.length - 7, result.length)) / 7
        assert result.loss == pytest.approx(expected, abs=1e-5)
    with rope.patched(model, "dynamic-yarn", factor=2):
        assert scorer.reading == "in chunks of 32 tokens, layer by layer"


def test_length_dependent_methods_run_at_the_context_length() -> None:
    model = rope.patch(build("llama"), "dynamic-ntk")
    document = tokens("a", 256, 6)
    for result in perplexity(model, [document], lengths=[64, 256], targets=7, bos=False):
        with rope.fixed_length(model, result.length):
            expected = nats(model, document.ids[256 - result.length :], range(result.length - 7, result.length)) / 7
        assert result.loss == pytest.approx(expected, abs=1e-5)


def test_a_loss_that_is_not_finite_is_named_not_averaged_away() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = math.nan
    bad = tokens("bad", 64, 7)
    bad.ids[3] = 95
    (result,) = perplexity(model, [tokens("good", 64, 8), bad], lengths=[64], bos=False)
    assert math.isnan(result.loss)
    assert math.isnan(result.perplexity)
    assert result.nonfinite == ("bad",)


def test_a_document_is_cut_as_if_it_began_with_bos() -> None:
    class Tokenizer:
        bos_token_id, unk_token_id = 2, None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [2, 5] if add_special_tokens else [5]}

    model = build("llama")
    document = tokens("a", 64, 9)
    tokenizer: Any = Tokenizer()
    (result,) = perplexity(model, [document], lengths=[64], targets=7, tokenizer=tokenizer)
    ids = torch.cat([torch.tensor([2]), document.ids[:63]])
    assert result.setting.bos
    assert result.loss == pytest.approx(nats(model, ids, range(57, 64)) / 7, abs=1e-5)
    (without,) = perplexity(model, [document], lengths=[64], targets=7, tokenizer=tokenizer, bos=False)
    assert not without.setting.bos
    assert without.loss != result.loss


def test_fewer_windows_are_taken_evenly() -> None:
    model = build("llama")
    (result,) = perplexity(model, [tokens(n, 160, 1) for n in "abc"], lengths=[16], max_spans=3, bos=False)
    assert [(document.name, document.spans) for document in result.documents] == [("a", 1), ("b", 1), ("c", 1)]


def test_refusals() -> None:
    from transformers import AutoTokenizer

    model, tokenizer = build("llama"), AutoTokenizer.from_pretrained(path())
    with pytest.raises(rope.CorpusError, match=r"no document has 128 tokens.*has 64"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[128], bos=False)
    with pytest.raises(rope.CorpusError, match=r"no document has any text"):
        perplexity(model, [], lengths=[128], bos=False)
    with pytest.raises(rope.CorpusError, match=r"token id 400 is outside the model's vocabulary of 97"):
        perplexity(model, [Tokens("a", torch.full((64,), 400), tuple(range(64)))], lengths=[64], bos=False)
    odd: Any = [-1, 2**31, 2**63, 10**400, 97, True, 1.5, None]
    for token in odd:
        with pytest.raises(rope.CorpusError, match=r"a: .*(is not a token id|outside the model's vocabulary of 97)"):
            perplexity(model, [Document("a", "", [token] * 64)], lengths=[64], tokenizer=tokenizer)
    for ids in (torch.full((64,), -1), torch.zeros(64), torch.zeros(2, 32, dtype=torch.int64)):
        with pytest.raises(rope.CorpusError, match="a: token id"):
            perplexity(model, [Tokens("a", ids, tuple(range(64)))], lengths=[64], bos=False)
    with pytest.raises(rope.CorpusError, match="a: not text: surrogates not allowed at character 1"):
        perplexity(model, [Document("a", "x\ud800")], lengths=[64], tokenizer=tokenizer)
    for lengths in (["1"], [4.0], [True], [None]):
        with pytest.raises(rope.MethodError, match="lengths must be"):
            perplexity(model, [tokens("a", 64, 1)], lengths=lengths, bos=False)
    for chunk in (-5, 0, 1.5, "64"):
        with pytest.raises(rope.MethodError, match="chunk must be"):
            perplexity(model, [tokens("a", 64, 1)], lengths=[64], bos=False, chunk=chunk)
    with pytest.raises(rope.MethodError, match=r"unknown protocol 'slidng'. Did you mean 'sliding'"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[64], protocol="slidng", bos=False)
    with pytest.raises(rope.MethodError, match="stride must be a whole number of at least 1"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[64], protocol="sliding", stride=0, bos=False)
    with pytest.raises(rope.MethodError, match="targets must be"):
        perplexity(model, [tokens("a", 64, 1)], lengths=[64], targets=64, bos=False)
    with pytest.raises(rope.CorpusError, match="give tokenizer"):
        perplexity(model, [Document("a", "text")], lengths=[64])


def test_bytes_are_counted_where_characters_are_longer_than_one() -> None:
    from transformers import AutoTokenizer

    text = "naïve Grüße 漢字 " * 3
    (document,) = tokenize([Document("a", text)], AutoTokenizer.from_pretrained(path()))
    assert document.ends[-1] == len(text.encode("utf-8")) == len(document.ids)
    assert document.bytes_between(2, 4) == 2


def test_bytes_of_a_tokenizer_with_offsets() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "Grüße": 1, "漢字": 2, "a": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (document,) = tokenize([Document("x", "a Grüße 漢字")], PreTrainedTokenizerFast(tokenizer_object=words))
    assert document.ids.tolist() == [3, 1, 2]
    assert document.ends == (1, 9, 16)  # "a" ends at 1; " Grüße" is 8 bytes, " 漢字" is 7


def test_a_model_in_train_mode_is_measured_in_eval_mode(tmp_path: Path) -> None:
    """With dropout, and with each module's own mode afterwards, also where a patch gives way to another."""
    model = rope.patch(build("gpt_neox", attention_dropout=0.5, hidden_dropout=0.5), "yarn", factor=2)
    options: dict[str, Any] = {"lengths": [32, 64], "bos": False}
    text = [tokens("a", 150, 1)]
    expected = [result.loss for result in perplexity(model.eval(), text, **options)]
    model.train()
    model.get_decoder().layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert [result.loss for result in perplexity(model, text, **options)] == expected
    assert {name: module.training for name, module in model.named_modules()} == modes
    run = sweep(model, text, lengths=[64], methods="linear", factors=2, bos=False, out=tmp_path)
    assert len({result.loss for result in run.results}) > 1
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize("function", [perplexity, sweep])
def test_a_misspelt_argument_names_the_nearest_one(function: Any) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'method'\. Did you mean 'methods'\? Known: .*lengths"):
        function("reference", [TEXT], lengths=256, method="yarn")
    with pytest.raises(TypeError, match="Did you mean 'max_spans'"):
        function("reference", [TEXT], lengths=256, max_span=1)


def test_lengths_and_methods_as_users_write_them(tmp_path: Path) -> None:
    model, text = build("llama"), [tokens("a", 3000, 1)]

    def lengths(given: Any) -> list[int]:
        return [result.length for result in perplexity(model, text, lengths=given, bos=False, max_spans=1)]

    assert lengths(256) == [256]
    assert lengths("2k") == [2048]
    assert lengths(["1k", 64, "128"]) == lengths("64,128,1k") == [64, 128, 1024]
    with pytest.raises(rope.MethodError, match="not a length in tokens: '2q'"):
        lengths(["2q"])
    one = sweep(model, text, lengths="256", methods="yarn", factors=4, bos=False, max_spans=1, out=tmp_path)
    same = sweep(model, text, lengths=[256], methods=Yarn(factor=4.0), bos=False, max_spans=1, out=tmp_path)
    assert [result.method for result in one.results] == [result.method for result in same.results]
    assert {result.method and result.method["method"] for result in one.results} == {None, "yarn"}


def test_a_model_by_its_name() -> None:
    (by_name,) = perplexity("reference", [TEXT], lengths=256)
    model = AutoModelForCausalLM.from_pretrained(path())
    assert by_name.loss == perplexity(model, [TEXT], lengths=256)[0].loss
    with pytest.raises(rope.CheckpointError, match="no such model folder"):
        perplexity("./nowhere", [TEXT], lengths=256)


def test_the_same_text_however_it_is_given(tmp_path: Path) -> None:
    """The losses of a text, of its file, and of its token ids, which only do not say how many bytes each stands for."""
    tokenizer = AutoTokenizer.from_pretrained(path())
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    given: list[Any] = [[TEXT], tmp_path / "a.txt", str(tmp_path / "a.txt"), ids, [ids], torch.tensor([ids])]
    results = [perplexity("reference", each, lengths=[128], tokenizer=tokenizer) for each in given]
    assert len({result[0].loss for result in results}) == 1
    assert [result.run.settings["data"] for result in results[:3]] == ["documents", *[str(tmp_path / "a.txt")] * 2]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    """A model that was built in memory: the loss is that of its own forward; bytes are not known."""
    model, ids = build("llama").eval(), [list(range(3, 60)), list(range(5, 62)), list(range(1, 58))]
    assert not model.name_or_path
    results = perplexity(model, ids, lengths=[16, 32], targets=8, out=tmp_path)
    for result in results:
        losses = []
        for document in ids:
            span = torch.tensor(document[32 - result.length : 32])[None]
            with torch.no_grad():
                logits = model(span).logits[0, -9:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, span[0, -8:]).item())
        assert result.loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert result.perplexity == pytest.approx(math.exp(result.loss))
        assert result.bits_per_byte is None
    for tensors in (torch.tensor(ids), [torch.tensor(each) for each in ids]):
        assert [r.loss for r in perplexity(model, tensors, lengths=[16, 32], targets=8)] == [r.loss for r in results]
    (folder,) = tmp_path.iterdir()
    read = read_run(folder)
    assert [r.bits_per_byte for r in read.results] == [None, None]
    assert (folder / "results.csv").read_text().splitlines()[1].count(",") > 5
    with pytest.raises(MethodError, match=r"bits per byte need the text of the token ids.*give tokenizer="):
        perplexity(model, ids, lengths=[16, 32], unit="bits")
    with pytest.raises(MethodError, match="bits per byte need the text of the token ids"):
        read.in_unit("bits").table()
    with pytest.raises(CorpusError, match="its tokenizer is unknown; give tokenizer="):
        perplexity(model, [*ids, "a text"], lengths=[16, 32])
