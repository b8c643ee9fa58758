from __future__ import annotations

import importlib
import json
import logging
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.lm_eval.lm_eval_adapter import RopeHFLM
from rope_ext_hf.eval.lm_eval.lm_eval_tasks import evaluate
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reference import path
from tests.support.models import build

CODE = "def add(first, second):\n    return first + second\n\n\nclass Shape:\n    def area(self):\n        return 0\n\n"
# context, continuation; in bytes, which are the model's tokens: 4 to 800
PAIRS = [
    ("def f", "(x):\n"),
    ("def f", "unction(x):\n"),
    ("import os\nimport ", "sys\n"),
    ("", "import os\n"),
    ("x = 1 ", "+ 2\n"),
    (CODE * 3, "def add(first, third):"),
    (CODE * 7, "class Shape:"),
    (CODE * 7, "class Thing:"),
]
TEXTS = [CODE * 2, CODE * 6, CODE * 12]
LM_EVAL = Path(lm_eval.__file__).parent / "tasks"
METHODS: dict[str, dict[str, Any] | None] = {
    "unpatched": None,
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic-ntk": {"method": "dynamic-ntk", "target_length": 1024},
}


class FewWords:
    """RULER pairs all adjectives with all nouns when imported, 10 s; these do."""

    _categories: ClassVar = {kind: ["apple", "brave", "cloud", "dance"] for kind in ("nouns", "adjectives", "verbs")}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Hub, no cache of an earlier run; both libraries read the environment once, when imported."""
    import datasets
    import huggingface_hub
    import lm_eval.evaluator
    import lm_eval.tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # asks pip and the GPU driver
    monkeypatch.setattr("nltk.download", lambda name: False)
    monkeypatch.setattr("wonderwords.RandomWord", FewWords)
    mine = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # reading its own 13,000 files takes 8 s
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", mine)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


def load(method: str = "unpatched", **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32, **options).eval()
    chosen = METHODS[method]
    return rope.patch(model, **chosen) if chosen else model


def harness(model: Any, tokenizer: Any, **options: Any) -> RopeHFLM:
    return RopeHFLM(model, tokenizer=tokenizer, **options)


def scored(lm: RopeHFLM) -> list[float]:
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    return [answer for answer, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def rolled(lm: RopeHFLM) -> list[float]:
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(TEXTS)]
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def written(lm: RopeHFLM, prompts: list[str], room: int = 24) -> list[str]:
    settings = {"until": ["\n\n"], "max_gen_toks": room, "do_sample": False}
    requests = [Instance("generate_until", {}, (prompt, settings), i) for i, prompt in enumerate(prompts)]
    return lm.generate_until(requests, disable_tqdm=True)


def ours(model: Any, tokenizer: Any, context: str, continuation: str, length: int | None = None) -> float:
    """The same by our own scorer, which knows nothing of lm-eval; `length`: held, else the input's own."""
    stripped = context.rstrip()  # lm-eval counts white space at the end of the context to the continuation
    before, after = ([*text.encode()] for text in (stripped, context[len(stripped) :] + continuation))
    ids = torch.tensor([byte + 3 for byte in before + after])  # what ByT5 calls them
    if not before:
        ids = torch.cat([torch.tensor([tokenizer.eos_token_id]), ids])
    window = ids[-(rope.describe(model).extended_length or 1024) - 1 :]
    losses = TokenScorer(model).losses(window, len(window) - len(after), length=length or len(window) - 1)
    return -float(losses.double().sum())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk"])
def test_log_likelihoods_equal_ours(method: str, batch_size: int, tokenizer: Any) -> None:
    """Each under the frequencies of its own length, whatever stands beside it in a batch; without EOS."""
    model = load(method)
    expected = [ours(model, tokenizer, *pair) for pair in PAIRS]
    assert scored(harness(model, tokenizer, batch_size=batch_size)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_log_likelihoods_of_a_model_as_loaded_equal_ours(tokenizer: Any) -> None:
    model = load()
    expected = [ours(model, tokenizer, *pair) for pair in PAIRS]
    assert scored(harness(model, tokenizer, batch_size=2)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("method", METHODS)
def test_rolling_equals_blocks(method: str, batch_size: int, tokenizer: Any) -> None:
    """Texts shorter and longer than the window, read under the frequencies of the window."""
    model = load(method)
    lm = harness(model, tokenizer, batch_size=batch_size, max_length=256 if method == "unpatched" else 512)
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    (result,) = perplexity(model, documents, lengths=[lm.max_length], protocol="blocks", tokenizer=tokenizer)
    assert [document.tokens for document in result.documents] == [len(text) for text in TEXTS]
    expected = [-document.nats for document in result.documents]
    assert rolled(lm) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_generation_holds_the_length_of_each_prompt(tokenizer: Any) -> None:
    """One prompt under the trained length, one over it; in one batch or alone, as generate does by itself."""
    model = load("dynamic-ntk")
    prompts = ["def f(x):\n    return ", CODE * 3 + "def add(", CODE * 6 + "class "]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([[byte + 3 for byte in prompt.encode()]])
        with rope.fixed_length(model, ids.shape[1] + 24):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n")[0])
    assert any(expected)
    assert written(harness(model, tokenizer, batch_size=1), prompts) == expected
    assert written(harness(model, tokenizer, batch_size=3), prompts) == expected


@pytest.mark.slow
def test_a_length_held_from_outside_holds_for_everything(tokenizer: Any) -> None:
    model = load("dynamic-ntk")
    lm = harness(model, tokenizer, batch_size=4)
    free = scored(lm)
    with rope.fixed_length(model, 900):
        assert scored(lm) == pytest.approx([ours(model, tokenizer, *pair, length=900) for pair in PAIRS], abs=1e-4)
        assert scored(lm) != pytest.approx(free, abs=1e-4)
        assert written(lm, ["def f(x):\n", "import "]) == [written(lm, [p])[0] for p in ("def f(x):\n", "import ")]


def test_log_softmax_is_in_float32(tokenizer: Any) -> None:
    model = load("yarn").to(torch.bfloat16)
    pair = (CODE.strip(), "\n\nclass Square:")
    context, continuation = pair
    ids = torch.tensor([[byte + 3 for byte in (context + continuation).encode()]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, -len(continuation) :]
    expected = logits.double().log_softmax(-1).gather(1, ids[0, -len(continuation) :, None]).sum()
    (answer,) = harness(model, tokenizer).loglikelihood([Instance("loglikelihood", {}, pair, 0)], disable_tqdm=True)
    assert answer[0] == pytest.approx(float(expected), abs=1e-4)


def test_max_length_is_the_extended_length(tokenizer: Any) -> None:
    assert harness(load(), tokenizer).max_length == 256
    assert harness(load("yarn"), tokenizer).max_length == 1024
    assert harness(load("yarn"), tokenizer, max_length=600).max_length == 600
    assert harness(load("dynamic-ntk"), tokenizer).max_length == 1024
    follows = rope.patch(load(), "dynamic-ntk")  # no extended length of its own: what is asked for
    assert harness(follows, tokenizer).max_length == 256
    assert harness(follows, tokenizer, max_length=3000).max_length == 3000
    baseline = rope.patch(load(), "default", target_length=1024)  # the way out that the refusal names
    assert harness(baseline, tokenizer).max_length == 1024


@pytest.mark.slow
def test_a_path_is_loaded_and_patched(tokenizer: Any) -> None:
    lm = RopeHFLM(path(), method="by-parts", target_length=1024, beta_fast=16.0, loading={"dtype": torch.float32})
    method = rope.describe(lm.model)
    assert (method.method, method.params["beta_fast"], lm.max_length) == ("by-parts", 16.0, 1024)
    assert scored(lm) == pytest.approx([ours(lm.model, tokenizer, *pair) for pair in PAIRS], abs=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", "cpu"])
def test_without_a_gpu_the_cpu_is_taken(device: str | None) -> None:
    """lm-eval's command line names cuda:0 where its user names no device."""
    lm = RopeHFLM.create_from_arg_obj({"pretrained": str(path())}, {"device": device, "batch_size": 1})
    assert lm.device == torch.device("cpu")
    assert lm.model.device == torch.device("cpu")


def test_refusals(tokenizer: Any) -> None:
    with pytest.raises(rope.MethodError, match=r"max_length=2048 is above the 1024 tokens .* with yarn"):
        harness(load("yarn"), tokenizer, max_length=2048)
    with pytest.raises(rope.MethodError, match="at least 2, got 0"):
        harness(load(), tokenizer, max_length=0)
    with pytest.raises(rope.MethodError, match="factor, beta_fast given without a method"):
        harness(load(), tokenizer, factor=4, beta_fast=3.0)
    with pytest.raises(rope.MethodError, match=r"yarn has no parameter 'beta_fats'. Did you mean 'beta_fast'"):
        harness(load(), tokenizer, method="yarn", factor=4, beta_fats=3.0)
    with pytest.raises(rope.MethodError, match="dtype: only for a folder or Hub id"):
        harness(load(), tokenizer, loading={"dtype": "float32"})
    with pytest.raises(rope.UnsupportedModelError, match="patch it first"):
        harness(build("llama", form={"rope_type": "dynamic", "factor": 4.0}), tokenizer)
    with pytest.raises(rope.MethodError, match="give tokenizer"):
        RopeHFLM(build("llama"))
    with pytest.raises(rope.CheckpointError, match="no such model folder"):
        RopeHFLM("./nowhere")
    with pytest.raises(rope.MethodError, match=r"generates up to 256 tokens.* max_length=256"):
        written(harness(load(), tokenizer), ["a"], room=256)


TEMPLATES = {
    "$A": [4],
    "<s> $A": [0, 4],
    "$A </s>": [4],
    "<s> $A </s>": [0, 4],
    "[gMASK] <sop> $A": [5, 6, 4],
    "[CLS] $A [SEP]": [7, 4],
}


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_the_tokenizer_begins_with_and_never_what_it_ends_with(template: str, asked: bool | None) -> None:
    given = TEMPLATES[template]
    lm = harness(build("llama"), words(template), add_bos_token=asked)
    assert lm.tok_encode("a") == given
    assert lm.tok_encode(template.partition("$A")[0] + "a") == given  # as chat templates write it
    assert lm.tok_encode("a a a", left_truncate_len=2) == [4, 4]
    ids, mask = lm.tok_batch_encode(["a", "a a"])
    assert ids.tolist() == [[3, *given], [*given, 4]]
    assert mask.tolist() == [[0, *[1] * len(given)], [1] * (len(given) + 1)]
    assert harness(build("llama"), words(template), add_bos_token=False).tok_encode("a") == [4]


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_token_before_a_text_is_scored(template: str) -> None:
    """Neither BOS a second time (lm-eval #3333) nor GLM's two; by hand, and as `blocks` has it."""
    model, tokenizer = build("llama"), words(template)
    text = " ".join(["a"] * 20)
    before = TEMPLATES[template][:-1] or [0]  # lm-eval's own choice where the tokenizer puts none: BOS
    room = 8 + 1 - len(before)
    windows = [([*before, *[4] * room], len(before)), ([4] * 9, 1), ([4] * 9, 9 - (20 - room - 8))]
    expected = sum(token_log_likelihood(model, ids, first) for ids, first in windows)
    lm = harness(model, tokenizer, max_length=8, batch_size=2)
    (answer,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    assert answer == pytest.approx(expected, rel=1e-5)
    (result,) = perplexity(model, [text], lengths=[8], protocol="blocks", tokenizer=tokenizer)
    assert answer == pytest.approx(-result.documents[0].nats, rel=1e-5)
    (nats, _), (after, _) = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, 0) for pair in (("", "a a"), ("a", " a"))], disable_tqdm=True
    )
    assert nats == pytest.approx(token_log_likelihood(model, [*before, 4, 4], len(before)), rel=1e-5)
    given = TEMPLATES[template]
    assert after == pytest.approx(token_log_likelihood(model, [*given, 4], len(given)), rel=1e-5)


def token_log_likelihood(model: Any, ids: list[int], first: int) -> float:
    """The sum over the tokens from `first` on, in one forward, without any code of this package."""
    with torch.no_grad():
        likely = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(sum(likely[i - 1, ids[i]].item() for i in range(first, len(ids))))


def test_an_empty_text_has_no_loss() -> None:
    lm = harness(build("llama"), words("<s> $A"), max_length=8)
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("", "a")]
    empty, one = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    assert empty == 0.0
    assert one < 0.0


@pytest.mark.parametrize("method", [None, "dynamic-ntk"])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_model_with_nan_has_no_score(kind: str, method: str | None) -> None:
    model = build("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    options: dict[str, Any] = {"method": method, "factor": 2.0} if method else {}
    lm = harness(model, words("<s> $A"), max_length=8, **options)
    given: Any = {"loglikelihood": ("a", " a"), "loglikelihood_rolling": ("a",)}
    request = Instance(kind, {}, given.get(kind, ("a", {"until": ["."], "max_gen_toks": 2})), 0)
    with pytest.raises(rope.UnsupportedModelError, match="the model gives NaN in place of numbers after"):
        getattr(lm, kind)([request], disable_tqdm=True)


@pytest.mark.parametrize(("rest", "tokens"), [("", "0"), (" a a a a a a a a a", "9")])
def test_an_answer_that_cannot_be_scored_is_named(rest: str, tokens: str) -> None:
    lm = harness(build("llama"), words("<s> $A"), max_length=8)
    requests = [
        Instance("loglikelihood", {}, ("a", text), 0, metadata=("endings", n, 1)) for n, text in enumerate((" a", rest))
    ]
    with pytest.raises(rope.MethodError, match=rf"task 'endings' asks .* an answer of {tokens} tokens \(document 1\)"):
        lm.loglikelihood(requests, disable_tqdm=True)


@pytest.mark.slow
def test_the_model_of_lm_eval_scores_the_eos_of_the_bundled_tokenizer(tokenizer: Any) -> None:
    """docs/evaluation.md: contexts end with EOS there, and EOS stands in the place of a continuation's first byte."""
    model = load()
    expected = [ours(model, tokenizer, *pair) for pair in PAIRS if pair[0]]
    stock = [HFLM(pretrained=model, tokenizer=tokenizer, **given) for given in ({}, {"add_bos_token": False})]
    assert stock[0].tok_encode("a") == [100, tokenizer.eos_token_id]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS) if pair[0]]
    by_default, without = ([nats for nats, _ in lm.loglikelihood(requests, disable_tqdm=True)] for lm in stock)
    assert max(abs(a - b) for a, b in zip(by_default, expected, strict=True)) > 5
    assert without == pytest.approx(expected, abs=1e-4)


def words(template: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("<s>", "</s>", "<unk>", "<pad>", "[gMASK]", "<sop>", "[CLS]", "[SEP]")
    known = {"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3, "a": 4, "[gMASK]": 5, "<sop>": 6, "[CLS]": 7, "[SEP]": 8}
    fast = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, known[name]) for name in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


QUESTIONS: list[dict[str, Any]] = [
    {"text": "import os\nimport", "choices": [" sys\n", " qqz\n"], "label": 0},
    {"text": CODE * 5 + "class", "choices": [" Xkcdq:", " Shape:"], "label": 1},
    {"text": "for i in", "choices": [" range(", " zzzz("], "label": 0},
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of tasks over local files: one to choose, one to read, one to write."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS), encoding="utf-8")

    def write(name: str, file: str, body: str) -> None:
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / file}\n"
        (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{body}metadata:\n  version: 1.0\n")

    metric = "metric_list:\n  - metric: {}\n    aggregation: {}\n    higher_is_better: {}\n"
    write(
        "local_choice",
        "questions.jsonl",
        'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
        'target_delimiter: ""\n' + metric.format("acc", "mean", "true"),
    )
    write(
        "local_rolling",
        "texts.jsonl",
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        + metric.format("byte_perplexity", "weighted_perplexity", "false"),
    )
    write(
        "local_generate",
        "questions.jsonl",
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{choices[label]}}"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 16\n  do_sample: false\n'
        + metric.format("exact_match", "mean", "true"),
    )
    write("local_missing", "nowhere.jsonl", 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\n')
    (folder / "hub.yaml").write_text(
        "task: on_the_hub\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
    )
    return folder


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[pytest.mark.slow, pytest.mark.thorough][each != "yarn"]) for each in METHODS]
)
def test_local_tasks(method: str, tasks: Path, tokenizer: Any) -> None:
    model = load(method)
    reached = 256 if method == "unpatched" else 1024
    # a byte is a token; the last one of a choice is only predicted, and 16 may be written
    too_long = sum(len(q["text"] + choice) - 1 > reached for q in QUESTIONS for choice in q["choices"])
    too_long += sum(len(q["text"]) > reached - 16 for q in QUESTIONS)
    assert bool(too_long) == (method == "unpatched")
    says_so = f"{too_long} inputs were longer than max_length=256" if too_long else None
    with pytest.warns(UserWarning, match=says_so) if says_so else nullcontext():
        found = evaluate(
            model,
            tokenizer,
            tasks=["local_choice", "local_roll*", "local_generate"],
            include_path=tasks,
            batch_size=2,
            log_samples=True,
        )
    assert found["cut"] == too_long
    assert found["max_length"] == reached
    patched = patched_method(model)
    assert found["method"] == (patched.to_dict() if patched else None)
    assert found["provenance"]["parameters"] == model.num_parameters()
    assert set(found["results"]) == {"local_choice", "local_rolling", "local_generate"}
    assert all(f"|{name}" in make_table(found).replace(" ", "") for name in found["results"])

    for sample, question in zip(found["samples"]["local_choice"], QUESTIONS, strict=True):
        expected = [ours(model, tokenizer, question["text"], choice) for choice in question["choices"]]
        assert [answer for answer, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
        assert sample["acc"] == (expected.index(max(expected)) == question["label"])
    (blocks,) = perplexity(
        model, [Document(str(i), t) for i, t in enumerate(TEXTS)], lengths=[reached], protocol="blocks"
    )
    measured = found["results"]["local_rolling"]["byte_perplexity,none"]
    assert math.log2(measured) == pytest.approx(blocks.bits_per_byte, abs=1e-5)
    assert [len(s["filtered_resps"][0]) <= 16 for s in found["samples"]["local_generate"]] == [True] * 3


@pytest.mark.slow
def test_fewer_documents_and_examples(tasks: Path, tokenizer: Any) -> None:
    found = evaluate(load("yarn"), tokenizer, tasks=["local_choice"], include_path=tasks, limit=2)
    assert found["n-samples"]["local_choice"] == {"original": 3, "effective": 2}
    assert "samples" not in found


@pytest.mark.slow
def test_tasks_that_cannot_be_run(tasks: Path, tokenizer: Any) -> None:
    def run(*names: str, **options: Any) -> None:
        evaluate(load(), tokenizer, tasks=list(names), **({"include_path": tasks} | options))

    with pytest.raises(rope.MethodError, match=r"unknown task 'local_chioce'. Did you mean 'local_choice'"):
        run("local_chioce")
    with pytest.raises(rope.CorpusError, match=r"task 'on_the_hub' needs data from the Hugging Face Hub.*nobody/noth"):
        run("local_choice", "on_the_hub")
    with pytest.raises(rope.CorpusError, match=r"task 'niah_single_2' needs data from the Hugging Face Hub.*essays"):
        run("niah_single_2", include_path=LM_EVAL / "ruler")
    with pytest.raises(rope.RopeExtError, match=r"task 'longbench_2wikimqa' .*(jieba|Hub)"):  # its packages come first
        run("longbench_2wikimqa", include_path=LM_EVAL / "longbench")
    with pytest.raises(rope.MethodError, match=r"task 'niah_single_1' cannot be built: Could not generate any sample"):
        run("niah_single_1", include_path=LM_EVAL / "ruler")  # at 256 tokens
    with pytest.raises(rope.CorpusError, match=r"the data of task 'local_missing' cannot be read"):
        run("local_missing")
    with pytest.raises(rope.MethodError, match="include_path must be a folder of tasks"):
        run("local_choice", include_path=tasks / "nowhere")
    with pytest.raises(rope.MethodError, match="tasks must be a list"):
        run()


@pytest.mark.slow
def test_ruler_at_the_extended_length(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The one needle task whose haystack needs no network; sized with the model's own tokenizer."""
    model = load("yarn")
    found = evaluate(
        model, tokenizer, tasks=["niah_single_1"], include_path=LM_EVAL / "ruler", limit=1, log_samples=True
    )
    assert "--metadata" not in caplog.text  # an option of lm_eval, which no command of this package has
    (sample,) = found["samples"]["niah_single_1"]
    (prompt, _), *_ = sample["arguments"]
    assert sample["doc"]["max_length"] == 1024
    assert 700 < len(tokenizer(prompt)["input_ids"]) < 1024 - 128
    assert found["results"]["niah_single_1"]["1024,none"] in (0.0, 1.0)


def test_without_lm_eval_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rope_ext_hf.eval.lm_eval.lm_eval_adapter")
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(ImportError, match=r"lm-eval is needed here .*: pip install"):
        importlib.import_module("rope_ext_hf.eval.lm_eval.lm_eval_adapter")


def test_it_does_not_warn_of_what_is_meant(caplog: pytest.LogCaptureFixture) -> None:
    """That it is given a loaded model; the other lines of lm-eval's log stay."""
    RopeHFLM(build("llama", vocab_size=259), tokenizer=AutoTokenizer.from_pretrained(path()))
    assert "pretrained" not in caplog.text
    logging.getLogger("lm_eval.models.huggingface").warning("another line")
    assert "another line" in caplog.text
