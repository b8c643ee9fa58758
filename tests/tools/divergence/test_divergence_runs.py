"""A model compared with a stored run, against logits of whole forwards in float64 and torch's own kl_div."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, FileError, MethodError, UnsupportedModelError
from rope_ext_hf.eval import (
    Divergence,
    DivergenceResult,
    Perplexity,
    Run,
    compare_runs,
    divergence,
    measure,
    perplexity,
    read_run,
)
from rope_ext_hf.eval.measurement_options import PplOptions
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.through import chunk_check
from rope_ext_hf.tools.divergence.divergence_runs import DivergenceRuns, DivergenceSetting, DocumentDivergence
from tests.support.byte_tokenizers import byte_tokenizer
from tests.support.dispatch import LargestTensor
from tests.support.models import build

LENGTHS = (32, 64, 128)
TARGETS = 9


def document(seed: int, count: int = 150, vocabulary: int = 90) -> Tokens:
    ids = torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    return Tokens(f"text {seed}", ids, tuple(range(1, count + 1)))


TEXTS = [document(seed) for seed in range(3)]


def stored(model: Any, out: Path, states: str = "model", **changed: Any) -> Path:
    """The folder of a run with stored states."""
    options: dict[str, Any] = {"lengths": LENGTHS, "targets": TARGETS, "bos": False, "chunk": 32} | changed
    return perplexity(model, options.pop("corpus", TEXTS), store_states=states, out=out, **options).run.folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of the small Llama model, in float32."""
    return stored(build("llama"), tmp_path_factory.mktemp("stored"))


@torch.inference_mode()
def log_probabilities(model: Any, ids: Tensor, length: int) -> Tensor:
    """Of the next token at each position, by one forward of the whole input in float64."""
    patched = rope.describe(model).method
    double = copy.deepcopy(model).double()
    with rope.fixed_length(double, length) if patched else nullcontext():
        logits: Tensor = double(ids[None], use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def expected(reference: Any, model: Any, length: int, texts: list[Tokens] = TEXTS) -> tuple[float, float]:
    """The mean KL divergence and the share of equal likeliest tokens, of the last targets before 128."""
    kls, same = [], []
    for text in texts:
        ids = text.ids[128 - length : 128]
        p, q = (log_probabilities(each, ids, length)[-TARGETS - 1 : -1] for each in (reference, model))
        kls.append(nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    return torch.cat(kls).mean().item(), torch.cat(same).mean().item()


def check(found: list[DivergenceResult], reference: Any, model: Any, tolerance: float = 2e-6) -> None:
    assert [result.length for result in found] == list(LENGTHS)
    for result in found:
        kl, same = expected(reference, model, result.length)
        assert result.kl == pytest.approx(kl, abs=tolerance, rel=1e-5)
        assert result.same_likeliest == pytest.approx(same)
        assert result.tokens == TARGETS * len(TEXTS)


def biased(seed: int) -> Any:
    model = build("llama", seed=seed, vocab_size=1500)  # which no part of 1,024 divides
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.lm_head = nn.Linear(64, 1500)
    return model


PAIRS = {
    "llama": lambda seed: build("llama", seed=seed),
    "soft cap": lambda seed: build("gemma2", seed=seed, final_logit_softcapping=2.0, attn_logit_softcapping=3.0),
    "factor": lambda seed: build("cohere", seed=seed, logit_scale=0.25),
    "bias": biased,
}


@pytest.mark.filterwarnings("ignore:.*layers attend to the last")
@pytest.mark.parametrize("name", PAIRS)
def test_two_models_differ_as_a_whole_forward_says(name: str, tmp_path: Path) -> None:
    reference, model = PAIRS[name](0), PAIRS[name](1)
    found = divergence(model, stored(reference, tmp_path), chunk=48)
    check(found, reference, model)
    setting = found[0].setting
    assert setting == DivergenceSetting(
        "model in float32 (unpatched)", setting.reference_run, "model", "matched", 9, 256, False, 0
    )
    plain = perplexity(model, TEXTS, lengths=LENGTHS, targets=TARGETS, bos=False)
    assert [r.perplexity for r in found] == pytest.approx([r.perplexity for r in plain], rel=1e-5)
    of_reference = perplexity(reference, TEXTS, lengths=LENGTHS, targets=TARGETS, bos=False)
    assert [r.reference_perplexity for r in found] == pytest.approx([r.perplexity for r in of_reference], rel=1e-5)


def test_the_bundled_model_and_yarn(tmp_path: Path) -> None:
    """The stored run has both; the model is compared with the one that is chosen, under both."""
    model = rope.from_pretrained("reference", dtype=torch.float32)
    question = Perplexity(lengths=LENGTHS, targets=TARGETS, bos=False, data=TEXTS, store_states="model")
    run = measure(model, question, methods=["yarn"], factors=4, out=tmp_path)
    yarn = rope.patch(copy.deepcopy(model), "yarn", factor=4)
    against = measure(model, Divergence(against=run.folder), methods=["yarn"], factors=4)
    for result in against.results:
        kl, same = expected(model, yarn if result.method else model, result.length)
        assert result.kl == pytest.approx(kl, abs=2e-6, rel=1e-5)
        assert result.same_likeliest == pytest.approx(same)
    assert [result.kl for result in against.results[: len(LENGTHS)]] == pytest.approx([0.0] * len(LENGTHS), abs=1e-6)
    check(divergence(model, run.folder, against_method="yarn x4"), yarn, model)
    with pytest.raises(MethodError, match="no method with the label 'dca'; it has 'unpatched' and 'yarn x4'"):
        divergence(model, run.folder, against_method="dca")


def test_a_run_is_compared_with_by_its_own_method(tmp_path: Path) -> None:
    """A model and the same model patched share a folder."""
    options: dict[str, Any] = {"lengths": [128], "bos": False, "store_states": "model", "out": tmp_path}
    loaded, patched = (
        perplexity(model, TEXTS, **options).run
        for model in (build("llama"), rope.patch(build("llama"), "yarn", factor=2))
    )
    assert loaded.path == patched.path
    of_loaded, of_patched = (divergence(build("llama"), run)[0] for run in (loaded, patched))
    assert of_loaded.kl == pytest.approx(0, abs=1e-6)
    assert of_patched.kl > 1e-3
    assert of_patched.reference_perplexity == pytest.approx(patched.results[0].perplexity, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("states", ["model", "float32"])
def test_a_model_does_not_differ_from_itself(dtype: str, states: str, tmp_path: Path) -> None:
    model = build("llama").to(getattr(torch, dtype))
    found = divergence(model, stored(model, tmp_path, states), chunk=32)
    assert [result.kl for result in found] == pytest.approx([0.0] * len(LENGTHS), abs=1e-6)
    assert {result.same_likeliest for result in found} == {1.0}


def test_a_rounded_copy_is_near_the_original(folder: Path, tmp_path: Path) -> None:
    """Weights of 8 bits, each row with a scale of its own; and states of 16 bits."""
    model = build("llama")
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            scale = parameter.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
            parameter.copy_((parameter / scale).round() * scale)
    found = divergence(rounded, folder)
    check(found, model, rounded)
    assert all(1e-5 < result.kl < 0.1 for result in found)
    half = divergence(rounded, stored(model, tmp_path / "half", "float16"))
    assert [r.kl for r in half] == pytest.approx([r.kl for r in found], rel=0.05)
    assert [r.kl for r in half] != [r.kl for r in found]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope"])
@pytest.mark.parametrize("protocol", ["matched", "same-start", "truncate", "position", "sliding"])
def test_every_protocol_compares_the_tokens_that_it_scores(protocol: str, method: str, tmp_path: Path) -> None:
    """A method for which lengths share no pass, against states of passes that they share, and the other way round."""
    loaded, patched = build("llama"), rope.patch(build("llama"), method)
    options: dict[str, Any] = {"protocol": protocol, "stride": 16}
    for name, reference, model in (("a", loaded, patched), ("b", patched, loaded)):
        found = divergence(model, stored(reference, tmp_path / name, **options), chunk=32)
        for measured, of in ((found, model), (found, reference)):
            plain = perplexity(of, TEXTS, lengths=LENGTHS, targets=TARGETS, bos=False, **options)
            attribute = "perplexity" if of is model else "reference_perplexity"
            assert [getattr(r, attribute) for r in measured] == pytest.approx([r.perplexity for r in plain], rel=1e-5)
            assert [r.tokens for r in measured] == [r.tokens for r in plain]
    if protocol == "truncate":
        result = divergence(patched, stored(loaded, tmp_path / "a", **options), lengths=[64])[0]
        kls = []
        for text in TEXTS:
            p, q = (log_probabilities(each, text.ids[:64], 64)[:-1] for each in (loaded, patched))
            kls.append(nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        assert result.kl == pytest.approx(torch.cat(kls).mean().item(), abs=2e-6, rel=1e-5)


def test_both_orders_of_reading_give_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", seed=1)
    found = divergence(model, folder)
    monkeypatch.setattr(chunk_check, "_equal_by_layer", lambda *arguments: False)  # so that no class is read so
    assert not TokenScorer(model).by_layer
    by_chunk = stored(build("llama"), tmp_path)
    for path in (folder / "states").iterdir():
        assert path.read_bytes() == (by_chunk / "states" / path.name).read_bytes()
    assert [r.kl for r in divergence(model, by_chunk)] == [r.kl for r in found]


def test_memory_does_not_grow_with_the_vocabulary_times_the_length(tmp_path: Path) -> None:
    vocabulary, length = 5000, 2048
    models = [build("llama", seed=seed, vocab_size=vocabulary) for seed in (0, 1)]
    text = [document(1, length, vocabulary)]
    with LargestTensor() as seen:
        folder = stored(models[0], tmp_path, corpus=text, lengths=[length], targets=length - 1, chunk=64)
        question = Divergence(against=folder)
        plan = question.plan(models[1], chunk=64)
        scorer = TokenScorer(models[1], chunk=64, head_bytes=64 * 1024 * 4)
        seen.elements = 0
        plan.measurement.score_together(scorer, plan.measurement.readings(scorer, 0, [(length,)]))
    assert seen.elements == vocabulary * 64 * 4  # the bytes of the head, as they are read from its file
    assert seen.elements < length * vocabulary / 4


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_kept_and_read_again(folder: Path, tmp_path: Path) -> None:
    question = Divergence(against=folder, lengths=[32, 128])
    run: Run[DivergenceResult] = measure(build("llama", seed=1), question, methods=["yarn"], out=tmp_path)
    again = measure(build("llama", seed=1), question, methods=["yarn"], out=tmp_path)
    assert again.path == run.path
    assert again.results == run.results == read_run(run.folder).results
    assert {result.length for result in run.results} == {32, 128}
    text = str(run)
    assert "KL, nats per token" in text
    assert "same likeliest token" in text
    conclusion = " ".join(str(run.conclusion).split())
    first = max(run.results, key=lambda result: (result.method is None, result.length))
    assert conclusion.startswith("At 128 tokens, the KL divergence of the unpatched model from model in float32")
    assert f"{first.same_likeliest:.1%} of {first.tokens} tokens" in conclusion
    table = run.table(detailed=True)
    assert table is not None
    assert str(table.columns[2].header).startswith("32")
    for name in ("results.json", "results.csv", "report.html", "run.yaml"):
        assert (run.folder / name).stat().st_size
    assert "How close is the model to the stored run at 128 tokens?" in (run.folder / "report.html").read_text()
    assert run.to_dataframe()["kl"].tolist() == [result.kl for result in run.results]
    assert run.plot() is not None
    assert [each.name for each in compare_runs([run.folder]).measures] == ["KL divergence"]


def test_an_interrupted_comparison_goes_on(folder: Path, tmp_path: Path) -> None:
    model = build("llama", seed=1)
    whole = measure(model, Divergence(against=folder))
    read: list[int] = []

    def stop(method: str, tokens: int) -> None:
        read.append(tokens)
        if len(read) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, Divergence(against=folder), out=tmp_path, progress=stop)
    run = measure(model, Divergence(against=folder), out=tmp_path, progress=lambda method, tokens: read.append(tokens))
    assert run.results == whole.results
    assert len(read) < 2 * len(LENGTHS) * len(TEXTS)


def test_a_divergence_is_read_back_from_a_journal() -> None:
    value = DocumentDivergence("a", kl=0.25, same=3, nats=5.5, reference_nats=6.0, tokens=4, spans=2)
    assert DivergenceRuns().parse("a", value.to_record()) == value


@pytest.mark.parametrize(
    "record", [None, [0.1, 2], [0.1, 5, 1.0, 1.0, 4, 1], [True, 3, 1.0, 1.0, 4, 1], [0.1, 3, 1.0, "x", 4, 1]]
)
def test_what_is_no_divergence_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match="expected a divergence"):
        DivergenceRuns().parse("a", record)


def test_a_divergence_that_is_not_finite_is_named(folder: Path) -> None:
    model = build("llama", seed=1)
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    run = divergence(model, folder).run
    assert run.kind.not_finite(run)[0] == "unpatched at 128 in text 0"
    assert "not finite" in str(run)


# --- what cannot be compared --------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(CorpusError, match=r"a vocabulary of 96 entries, and the run in .* one of 97"):
        divergence(build("llama", vocab_size=96), folder)


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    """Two tokenizers of bytes, which give them other numbers."""
    models = [build("llama", vocab_size=400, seed=seed) for seed in (0, 1)]
    folder = stored(models[0], tmp_path, corpus=["import os\n" * 40], tokenizer=byte_tokenizer("$A"))
    assert divergence(models[1], folder, tokenizer=byte_tokenizer("<s> $A"))
    with pytest.raises(CorpusError, match="the same numbers stand for other text"):
        divergence(models[1], folder, tokenizer=ByT5Tokenizer())


def test_a_length_that_the_run_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(MethodError, match="no length 48; it has 32, 64 and 128"):
        divergence(build("llama"), folder, lengths=[48, 64])


def test_a_run_without_states_is_refused(folder: Path, tmp_path: Path) -> None:
    run = perplexity(build("llama"), TEXTS, lengths=[64], bos=False, out=tmp_path).run
    with pytest.raises(FileError, match="no stored hidden states; measure it again with --store-states model"):
        divergence(build("llama"), run)
    compared = measure(build("llama"), Divergence(against=folder), out=tmp_path).folder
    with pytest.raises(FileError, match="no stored hidden states"):
        divergence(build("llama"), compared)
    with pytest.raises(FileError, match="is not the folder of a run"):
        divergence(build("llama"), tmp_path / "nothing")


def test_a_model_that_is_read_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    model = build("llama")
    model.register_forward_hook(lambda module, args, output: output | {"logits": 2 * output.logits})
    with pytest.raises(UnsupportedModelError, match="gives no last hidden states to store or to compare"):
        divergence(model, folder)
    with pytest.raises(UnsupportedModelError, match="because it is read whole: in chunks the model's logits are off"):
        stored(model, tmp_path / "other")


def test_options_that_the_run_decides_are_refused() -> None:
    options = PplOptions(against="folder", data="stdlib")
    assert options.chosen({"against"}) == Divergence(against="folder")
    with pytest.raises(MethodError, match="--data, --targets: text, protocol and targets are those of the run"):
        options.chosen({"against", "data", "targets"})
    with pytest.raises(MethodError, match="--lengths is missing"):
        PplOptions()
