from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from training_prompts import WORDINGS
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, MethodError, UnsupportedModelError
from rope_ext_hf.eval import Passkey, passkey, read_run
from rope_ext_hf.eval.retrieval.retrieval_prompts import make_trials, shared_trials
from rope_ext_hf.eval.retrieval.retrieval_runs import Retrieval, RetrievalRuns
from rope_ext_hf.eval.retrieval.statements import RETRIEVALS
from rope_ext_hf.patches.patching import fixed_length
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reference import path
from rope_ext_hf.runs.run import Run
from tests.support.models import build, build_config

TEXT = "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. " * 40
HAY = [Document("hay", TEXT)]


def byte_tokenizer() -> Any:
    return ByT5Tokenizer(extra_ids=0)


def merging_tokenizer(bos: bool = False) -> Any:
    """Byte-level BPE learnt here, whose numbers have two to four tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = " ".join(str(n) for n in range(100, 1000))
    tokenizer.train_from_iterator(
        [TEXT, *(wording.question for task in RETRIEVALS.values() for wording in task.held_out), numbers], trainer
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {"bytes": byte_tokenizer, "bpe": merging_tokenizer}


def asked(results: list[Retrieval]) -> list[tuple[int, float]]:
    return [(result.length, result.depth) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("task", RETRIEVALS)
@pytest.mark.parametrize("keys", [1, 3])
def test_prompt_and_answer_fill_the_context_and_the_statement_stands_at_its_depth(
    name: str, task: str, keys: int
) -> None:
    if task == "passkey" and keys > 1:
        pytest.skip("has one key")
    tokenizer = TOKENIZERS[name]()
    chosen = RETRIEVALS[task]
    hay = torch.tensor(tokenizer(chosen.filler or TEXT[:400], add_special_tokens=False)["input_ids"])
    for trial in make_trials(chosen, tokenizer, trials=4, distractors=4, keys=keys):
        answer = tokenizer.decode(trial.answers[0])
        assert len(trial.statements) == keys
        for depth in (0, 0.25, 0.5, 1):
            length = 700
            prompt = trial.prompt(hay, length, depth)
            assert len(prompt) + len(trial.answers[0]) == length
            text = tokenizer.decode(torch.cat([prompt, trial.answers[0]]))
            assert text.startswith(chosen.head)
            asked, *others = (tokenizer.decode(statement) for statement in trial.statements)
            assert answer.strip() in asked
            assert text.endswith(tokenizer.decode(torch.cat([trial.question, trial.answers[0]])))
            assert all(text.count(statement) == 1 for statement in (asked, *others))
            assert not any(answer.strip() in statement for statement in others)
            # the haystack before the statement, counted in tokens
            at = next(
                i for i in range(length) if torch.equal(prompt[i : i + len(trial.statements[0])], trial.statements[0])
            )
            before = sum(
                len(ids) for ids, other in zip(trial.statements[1:], trial.depths, strict=True) if other < depth
            )
            filled = length - trial.wording
            assert at - len(trial.head) - before == pytest.approx(depth * filled, abs=0.5)


@pytest.mark.parametrize("task", ["key-value", "quote"])
@pytest.mark.parametrize("keys", [3, 4])
def test_with_a_key_for_every_depth_prompts_of_a_trial_differ_in_their_question_only(task: str, keys: int) -> None:
    tokenizer, depths, length = byte_tokenizer(), (0.0, 0.5, 1.0), 700
    hay = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    by_depth = shared_trials(
        lambda **given: make_trials(RETRIEVALS[task], tokenizer, trials=4, distractors=4, keys=keys, **given), depths
    )
    for same in zip(*by_depth, strict=True):
        prompts = [trial.prompt(hay, length, depth) for trial, depth in zip(same, depths, strict=True)]
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        answers = [tokenizer.decode(trial.answers[0]).strip() for trial in same]
        before = {prompt[: len(prompt) - len(t.question)] for prompt, t in zip(texts, same, strict=True)}
        assert len(before) == 1
        (before_all,) = before
        assert len(set(answers)) == 3
        assert [before_all.index(answer) for answer in answers] == sorted(before_all.index(a) for a in answers)
        assert before_all.count("\n" + tokenizer.decode(same[0].statements[0]).strip()) == 1
        tails = [trial.tail for trial in same]
        assert max(len(p) + len(t.answers[0]) for p, t in zip(prompts, same, strict=True)) == length
        assert [len(p) - len(t.question) + max(tails) for p, t in zip(prompts, same, strict=True)] == [length] * 3


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "dynamic-yarn", "rerope"])
@pytest.mark.sampled(2)
def test_a_prompt_that_is_read_once_and_asked_three_times_scores_as_three_prompts(method: str | None) -> None:
    model, tokenizer = build("llama", vocab_size=259), byte_tokenizer()
    read: list[int] = []
    with rope.patched(model, method) if method else nullcontext():
        question = Passkey(lengths=[150, 250], depths=[0, 0.5, 1], trials=2, keys=3, task="key-value", haystack=HAY)
        plan = question.plan(model, tokenizer=tokenizer).measurement
        scorer = TokenScorer(model, chunk=32)
        for item in range(2):
            cells = plan.cells(item)
            together = list(plan.readings(scorer, item, cells))
            apart = [reading for cell in cells for reading in plan.readings(scorer, item, [cell])]
            read += [reading.tokens for reading in together]
            scores = [plan.score(scorer, reading) for reading in together]
            assert scores == [plan.score(scorer, reading) for reading in apart]
    assert sorted(read) == sorted(plan.passes)
    assert read.count(250) == read.count(150) == 2
    assert sum(read) < 2 * (150 + 250) + 4 * 2 * 30


@pytest.mark.parametrize("name", TOKENIZERS)
def test_distractors_are_other_numbers_of_as_many_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    sizes = set()
    for trial in make_trials(RETRIEVALS["assignment"], tokenizer, trials=12, distractors=9):
        numbers = [int(tokenizer.decode(ids)) for ids in trial.answers]
        assert trial.answers.shape[0] == len(set(numbers)) == 10
        assert all(10_000 <= number < 100_000 for number in numbers)
        sizes.add(trial.answers.shape[1])
    assert sizes == {5} if name == "bytes" else len(sizes) > 1  # the merges do make numbers of different lengths


@pytest.mark.parametrize("task", WORDINGS)
def test_every_task_has_as_many_distractors_as_a_default_run_asks_for(task: str) -> None:
    for trial in make_trials(RETRIEVALS[task], byte_tokenizer(), trials=20, distractors=19):
        assert len({tuple(ids) for ids in trial.answers.tolist()}) == 20


def test_answers_to_the_other_keys_are_among_the_distractors() -> None:
    tokenizer = byte_tokenizer()
    for trial in make_trials(RETRIEVALS["key-value"], tokenizer, trials=6, distractors=5, keys=4):
        others = [tokenizer.decode(statement) for statement in trial.statements[1:]]
        for ids, statement in zip(trial.answers[1:4], others, strict=True):
            assert tokenizer.decode(ids) in statement


def test_a_tokenizer_that_begins_with_bos_is_given_one() -> None:
    (with_bos,) = make_trials(RETRIEVALS["passkey"], merging_tokenizer(bos=True), trials=1, distractors=2)
    (without,) = make_trials(RETRIEVALS["passkey"], merging_tokenizer(), trials=1, distractors=2)
    assert with_bos.head.tolist() == [0, *without.head.tolist()]
    assert (with_bos.statements[0] == 0).sum() == (with_bos.question == 0).sum() == 0


@pytest.mark.slow
def test_trials_depend_on_the_seed_alone() -> None:
    tokenizer = byte_tokenizer()
    task = RETRIEVALS["key-value"]
    five = make_trials(task, tokenizer, trials=5, distractors=3, seed=1)
    two = make_trials(task, tokenizer, trials=2, distractors=3, seed=1)
    other = make_trials(task, tokenizer, trials=2, distractors=3, seed=2)
    assert all(torch.equal(a.answers, b.answers) and a.start == b.start for a, b in zip(five, two, strict=False))
    assert not torch.equal(two[0].answers, other[0].answers)
    assert len({str(trial.answers[0]) for trial in five}) == len({trial.start for trial in five}) == 5

    model = build("llama", vocab_size=259)
    settings: dict[str, Any] = {
        "lengths": [120],
        "depths": [0.5],
        "tokenizer": tokenizer,
        "task": "key-value",
        "haystack": HAY,
    }
    once = passkey(model, trials=3, seed=1, **settings)
    assert passkey(model, trials=3, seed=1, **settings) == once
    assert passkey(model, trials=3, seed=2, **settings) != once


def naive(model: Any, prompt: Tensor, answers: Tensor) -> tuple[bool, float, float]:
    """Exact match by decoding greedily, the rank by one full forward per answer, and the loss of the right answer."""
    ids = prompt
    scores = []
    with torch.no_grad():
        for _ in answers[0]:
            ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
        for answer in answers:
            whole = torch.cat([prompt, answer])
            chances = model(whole[None], use_cache=False).logits[0].double().softmax(-1)
            scores.append(math.fsum(math.log(chances[len(prompt) - 1 + i, t]) for i, t in enumerate(answer)))
    rank = 1 + sum(score > scores[0] for score in scores)
    return torch.equal(ids[len(prompt) :], answers[0]), rank, -scores[0] / len(answers[0])


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_loss_of_the_answer_is_that_of_the_logits_of_transformers(tokenizer: Callable[[], Any]) -> None:
    """The mean over the answer's tokens of the log-softmax in float64, then over prompts; answers differ in length."""
    model, words = build("llama", vocab_size=420), tokenizer()
    hay = torch.tensor(words(TEXT, add_special_tokens=False)["input_ids"])
    settings: dict[str, Any] = {
        "lengths": [200], "depths": [0.3, 1], "trials": 5, "distractors": 3, "task": "assignment", "haystack": HAY,
    }  # fmt: skip
    results = passkey(model, tokenizer=words, chunk=32, **settings)
    trials = Passkey(**settings).plan(model, tokenizer=words).measurement.trials
    sizes = set()
    for result in results:
        expected = []
        for trial in trials[result.depth]:
            prompt, answer = trial.prompt(hay, 200, result.depth), trial.answers[0]
            with torch.no_grad():
                logits = model(torch.cat([prompt, answer])[None], use_cache=False).logits[0].double()
            chances = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            nats = [-float(chances[place, token]) for place, token in enumerate(answer)]
            expected.append(math.fsum(nats) / len(answer))
            sizes.add(len(answer))
        assert [score.loss for score in result.scores] == pytest.approx(expected, abs=1e-5)
        assert result.loss == pytest.approx(statistics.fmean(expected), abs=1e-5)
        assert result.loss is not None
        half = 2.776445 * statistics.stdev(expected) / math.sqrt(5)  # Student's t of 4 degrees of freedom
        ends = (result.loss - half, result.loss + half)
        assert (result.loss_low, result.loss_high) == pytest.approx(ends, abs=1e-4)
    assert len(sizes) == (1 if tokenizer is byte_tokenizer else 2)
    assert len({result.loss for result in results}) == 2


def test_a_model_that_answers_nothing_is_judged_by_the_loss_of_the_answer(tmp_path: Path) -> None:
    model = build("llama", vocab_size=259)
    settings: dict[str, Any] = {"lengths": [100], "trials": 4, "distractors": 2, "task": "key-value", "haystack": HAY}
    run = passkey(model, tokenizer=byte_tokenizer(), out=tmp_path, **settings).run
    assert not any(result.exact_match for result in run.results)
    nats = statistics.fmean(score.loss or math.nan for result in run.results for score in result.scores)
    assert f"loss of the answer (key-value) {nats:.3f} nats per token" in str(run.conclusion)
    assert "mean rank, loss of the answer" in str(run)
    assert f"({run.results[0].loss_low:.2f} to {run.results[0].loss_high:.2f})" in run._repr_html_()
    assert "in parentheses: its 95% confidence interval" in run._repr_html_()
    again = read_run(run.folder)
    assert again.results == run.results
    lines = (run.folder / "records.0.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(len(json.loads(line)["value"]) == 3 for line in lines)
    first = run.results[0]
    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    assert [float(row[name]) for name in ("loss", "loss_low", "loss_high")] == [
        first.loss, first.loss_low, first.loss_high
    ]  # fmt: skip
    stored = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))["results"][0]
    assert stored["loss"] == first.loss
    assert stored["scores"] == [list(score) for score in first.scores]


@pytest.mark.parametrize("value", [[True, 1.0], [False, 2.5, 0.25], [False, 3.0, math.inf]])
def test_scores_are_stored_and_read_back(value: list[Any]) -> None:
    score = RetrievalRuns().parse("trial 0", value)
    assert score.to_record() == value
    assert score.loss == (value[2] if len(value) == 3 else None)


@pytest.mark.parametrize(
    "value",
    [[True], [1, 1.0], [True, 0.5], [True, 1.0, True], [True, 1.0, math.nan], [True, 1.0, "2"], [True, 1, 2, 3]],
)
def test_what_is_no_score_is_refused(value: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"expected a score \[exact, rank, loss\], or \[exact, rank\] as earlier"):
        RetrievalRuns().parse("trial 0", value)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("method", [None, pytest.param("yarn", marks=pytest.mark.thorough), "dynamic-ntk"])
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.sampled(3)
def test_equals_decoding_and_whole_forwards(method: str | None, tokenizer: Callable[[], Any], keys: int) -> None:
    model, words = build("llama", vocab_size=420), tokenizer()
    params = {"factor": 2.0} if method == "yarn" else {}
    hay = torch.tensor(words(TEXT, add_special_tokens=False)["input_ids"])
    settings: dict[str, Any] = {
        "lengths": [120, 200], "depths": [0.3, 1], "trials": 3, "distractors": 7, "tokenizer": words, "keys": keys,
        "task": "assignment", "haystack": HAY,
    }  # fmt: skip
    with rope.patched(model, method, **params) if method else nullcontext():
        results = passkey(model, chunk=32, **settings)
        tokenizer = settings.pop("tokenizer")
        trials = Passkey(**settings).plan(model, tokenizer=tokenizer).measurement.trials
        assert asked(results) == [(120, 0.3), (120, 1), (200, 0.3), (200, 1)]
        for result in results:
            expected = []
            for trial in trials[result.depth]:
                prompt = trial.prompt(hay, result.length, result.depth)
                with fixed_length(model, result.length):  # the prompt alone is shorter than the context
                    expected.append(naive(model, prompt, trial.answers))
            assert result.exact_match == statistics.fmean(exact for exact, _, _ in expected)
            assert result.rank == pytest.approx(statistics.fmean(rank for _, rank, _ in expected))
            assert result.loss == pytest.approx(statistics.fmean(loss for _, _, loss in expected), abs=1e-5)
            assert result.top1 == statistics.fmean(rank == 1 for _, rank, _ in expected)
            assert (result.method or {}).get("method") == method
    assert len({result.rank for result in results}) > 1  # not the same number everywhere


class Copier(LlamaForCausalLM):  # type: ignore[misc]
    """A model that looks up what followed the same six tokens before; it answers right if the secret is readable."""

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        ids = input_ids[0].tolist()
        logits = torch.zeros(1, len(ids), self.config.vocab_size)
        seen: dict[tuple[int, ...], int] = {}
        for end in range(6, len(ids) + 1):
            last = tuple(ids[end - 6 : end])
            if last in seen:
                logits[0, end - 1, seen[last]] = 10.0
            if end < len(ids):
                seen.setdefault(last, ids[end])
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


@pytest.mark.slow
def test_a_model_that_looks_it_up_finds_every_secret() -> None:
    model = Copier(build_config("llama", vocab_size=259)).eval()
    found = passkey(model, lengths=[300, 400], depths=[0, 0.5, 1], trials=5, tokenizer=byte_tokenizer())
    assert len(found) == 6
    assert all((r.exact_match, r.rank, r.top1, r.above_chance) == (1.0, 1.0, 1.0, True) for r in found)
    assert {r.chance for r in found} == {0.05}
    assert {r.chance_rank for r in found} == {10.5}
    # and not where the number it reads is another one
    settings: dict[str, Any] = {"tokenizer": byte_tokenizer(), "haystack": HAY}
    (worse,) = passkey(model, lengths=[120], depths=[0], trials=3, task="assignment", **settings)
    assert worse.exact_match == 0.0  # " == 0x" stands nowhere before
    # of several keys it finds the one asked for, where their last six tokens differ
    (one_of_three,) = passkey(model, lengths=[400], depths=[1], trials=5, keys=3, seed=1, task="key-value", **settings)
    assert (one_of_three.exact_match, one_of_three.rank, one_of_three.keys) == (1.0, 1.0, 3)


def test_a_model_that_tells_nothing_apart_has_the_middle_rank() -> None:
    model = build("llama", vocab_size=259)
    given: dict[str, Any] = {"lengths": [100], "depths": [0.5], "trials": 2, "distractors": 9, "task": "key-value"}
    given |= {"tokenizer": byte_tokenizer(), "haystack": HAY}
    torch.nn.init.zeros_(model.lm_head.weight)
    (result,) = passkey(model, **given)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(UnsupportedModelError, match="gives NaN in place of numbers after 100 tokens"):
        passkey(model, **given)
    assert (result.exact_match, result.rank, result.top1, result.above_chance) == (0.0, 5.5, 0.0, False)


def test_refusals() -> None:
    model, tokenizer = build("llama", vocab_size=259), byte_tokenizer()
    given: dict[str, Any] = {"lengths": [100], "tokenizer": tokenizer, "task": "key-value", "trials": 2}
    least = max(trial.wording for trial in make_trials(RETRIEVALS["key-value"], tokenizer, trials=10, distractors=1))
    with pytest.raises(MethodError, match=rf"length {least - 1} is too short.* {least} tokens"):
        passkey(model, **given | {"lengths": [100, least - 1]}, haystack=HAY)
    assert len(passkey(model, **given | {"lengths": [least]}, haystack=HAY, depths=[0])) == 1
    with pytest.raises(CorpusError, match="empty"):
        passkey(model, **given, haystack=[])
    with pytest.raises(CorpusError, match="no such text file"):
        passkey(model, **given, haystack="no-such-file.txt")
    with pytest.raises(MethodError, match="Did you mean 'needle'"):
        passkey(model, **given | {"task": "needel"})
    with pytest.raises(MethodError, match="number from 0 to 1"):
        passkey(model, **given, depths=[1.5])
    for wrong in ({"trials": 0}, {"keys": 0}):
        with pytest.raises(MethodError, match="whole number from 1"):
            passkey(model, **given | wrong)
    with pytest.raises(MethodError, match="no names by which 2 keys could differ"):
        passkey(model, **given | {"task": "passkey", "keys": 2})
    with pytest.raises(CorpusError, match="vocabulary of 97"):
        passkey(build("llama"), **given, haystack=HAY)
    with pytest.raises(CorpusError, match="tokenizer"):
        passkey(model, **given | {"tokenizer": None})


def test_progress_counts_the_tokens_read() -> None:
    read: list[int] = []
    passkey(
        build("llama", vocab_size=259), lengths=[128, 64], depths=[0, 1], trials=2, distractors=1, task="key-value",
        tokenizer=byte_tokenizer(), haystack=HAY, progress=read.append,
    )  # fmt: skip
    assert sorted(read) == [64] * 4 + [128] * 4


def result(method: dict[str, Any] | None, length: int, depth: float, first: float, rank: float) -> Retrieval:
    return Retrieval(method, length, "key-value", 1, depth, 10, 19, first, rank, first, 0.05, ())


@pytest.mark.slow
def test_picture_and_table(tmp_path: Path) -> None:
    yarn = {"method": "yarn", "factor": 8.0}
    results = [result(m, n, d, 0.9, 1.25) for m in (None, yarn) for n in (256, 2048) for d in (0, 0.5, 1)]
    results += [result(None, 4096, 0.5, 0.05, 10.25)]  # one method measured further than the other
    settings = {
        "kind": "passkey",
        "context_length": 256,
        "loaded": None,
        "model": "reference",
        "data": "task key-value",
    }
    Run(None, settings, results, RetrievalRuns()).plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")

    console = Console(width=120)
    with console.capture() as captured:
        console.print(Run(None, settings, results, RetrievalRuns()).table())
    text = captured.get()
    assert [line.split()[0] for line in text.splitlines() if "unpatched" in line or "yarn" in line] == [
        "unpatched",
        "yarn",
    ]
    assert text.count("90%  1.2") == 12
    assert text.count(" 5% 10.2") == 1
    assert "1 is best, 10.5 is luck" in " ".join(text.split())
    assert [r.above_chance for r in results] == [True] * 12 + [False]


@pytest.mark.slow
def test_the_bundled_model_finds_the_answer_within_its_trained_length_and_not_beyond() -> None:
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval()
    module = load("stdlib")[:1]
    near, far = passkey(model, lengths=[256, 1024], depths=[0.5], trials=10, task="key-value", haystack=module)
    assert near.above_chance
    assert near.top1 >= 0.5
    assert not far.above_chance


def test_the_answers_count_in_estimates_of_time() -> None:
    """After each prompt, every answer is read; of short prompts they are most of the work."""
    options: dict[str, Any] = {"depths": [0.5], "trials": 1, "distractors": 3, "task": "key-value"}
    hay = [Document("hay", "some text " * 50)]
    question = Passkey(lengths=[128], haystack=hay, **options)
    plan = question.plan(build("llama", vocab_size=259), tokenizer=ByT5Tokenizer(extra_ids=0))
    assert plan.measurement.short_passes == 4
