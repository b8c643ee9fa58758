"""The suites as tasks of lm-eval, the model by name, and where lm-eval's own RULER is not RULER."""

from __future__ import annotations

import importlib.metadata
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ruler import common_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.lm_eval import lm_eval_tasks
from rope_ext_hf.eval.lm_eval.lm_eval_adapter import RopeHFLM
from rope_ext_hf.eval.lm_eval.lm_eval_tasks import babilong_length, long_suite
from rope_ext_hf.reference import path
from rope_ext_hf.tools.suites import tasks
from rope_ext_hf.tools.suites.base import list_suites, suite
from rope_ext_hf.tools.suites.lm_eval_tasks import write_tasks

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_every_suite_and_task_has_a_name(folder: Path) -> None:
    manager = TaskManager(include_path=folder, include_defaults=False)
    for name, of_name in list_suites().items():
        group = f"rope_{name.replace('-', '_')}"
        assert group in manager.all_groups
        assert {f"{group}_{task}" for task in of_name.tasks} <= set(manager.all_subtasks)


def test_the_entry_point_is_the_model() -> None:
    """As lm-eval reads it: https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/plugins.md."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    point = importlib.metadata.EntryPoint("rope-ext", declared["rope-ext"], "lm_eval.models")
    assert point.load() is model_registry.get("rope-ext") is RopeHFLM


@pytest.mark.slow
def test_prompts_and_scores_are_those_of_the_command_tasks(folder: Path, tokenizer: Any) -> None:
    metadata = {"pretrained": str(path()), "max_seq_lengths": [800], "samples": 2}
    evaluation = simple_evaluate(
        model="rope-ext",
        model_args={"pretrained": str(path()), "method": "yarn", "factor": 4, "dtype": "float32"},
        tasks=["rope_json_kv_kv"],
        task_manager=TaskManager(include_path=folder, include_defaults=False, metadata=metadata),
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    records = evaluation["samples"]["rope_json_kv_kv"]
    samples = suite("json-kv").samples("kv", tokenizer, length=800, count=2, seed=0, haystack="")
    assert [record["arguments"][0][0] for record in records] == [sample.prompt + sample.prefix for sample in samples]
    assert [record["arguments"][0][1]["max_gen_toks"] for record in records] == [sample.budget for sample in samples]
    model = rope.patch(AutoModelForCausalLM.from_pretrained(path(), dtype="float32"), "yarn", factor=4)
    run = tasks(model, lengths=[800], suite="json-kv", samples=2, tokenizer=tokenizer, out=folder / "run").run
    assert evaluation["results"]["rope_json_kv_kv"]["score,none"] == run.results[0].score
    journal = [json.loads(line) for line in (run.folder / "records.0.jsonl").read_text().splitlines()]
    assert [record["resps"][0][0] for record in records] == [record["value"][1] for record in journal]


@pytest.mark.thorough
def test_suites_stand_beside_the_tasks_of_lm_eval(tmp_path: Path) -> None:
    finder = lm_eval_tasks.TaskFinder(tmp_path, None, {}, 2048)
    assert finder.names(["rope_ruler", "niah_single_1"]) == ["rope_ruler", "niah_single_1"]


@pytest.mark.slow
def test_arguments_as_text() -> None:
    lm = RopeHFLM.create_from_arg_string(f"pretrained={path()},method=yarn,factor=4,dtype=float32", {"device": "cpu"})
    assert lm.max_length == 1024
    assert lm.model.dtype.itemsize == 4


@pytest.mark.parametrize("lengths", [None, [512, 1024], "2k", []])
def test_one_length_is_asked_for(lengths: Any, folder: Path) -> None:
    metadata = {"pretrained": str(path()), "max_seq_lengths": lengths}
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    with pytest.raises(MethodError, match="measured at one length"):
        manager.load(["rope_json_kv_kv"])


def test_the_tokenizer_must_be_known(folder: Path) -> None:
    manager = TaskManager(include_path=folder, include_defaults=False, metadata={"max_seq_lengths": [900]})
    with pytest.raises(MethodError, match="no tokenizer is named"):
        manager.load(["rope_json_kv_kv"])


def test_what_long_suites_fetch_and_how_babilong_names_lengths() -> None:
    assert long_suite("longbench2_code") == "recursal/longbench-v2"
    assert "SQuAD" in str(long_suite("ruler"))
    assert long_suite("hellaswag") is None
    assert long_suite("rope_ruler") is None
    assert [babilong_length(n) for n in (1000, 2048, 5000, 2**20)] == ["0k", "2k", "4k", "1024k"]


# --- where lm-eval's RULER is not RULER: if one of these fails, lm-eval has mended it: change the docs ------------


def test_slip_the_share_of_aliases_counts_instead_of_any() -> None:
    """RULER's string_match_part takes the best alias."""
    assert common_utils.string_match_part(["It is Paris."], [["Paris", "the French capital"]]) == 0.5


@pytest.mark.thorough
def test_slip_essays_are_not_repeated(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RULER repeats the essays until the length is filled."""
    from lm_eval.tasks.ruler import prepare_niah  # it pairs all adjectives with all nouns, some seconds

    monkeypatch.setattr(prepare_niah, "cached_sent_tokenize", lambda text: text.split(". "))  # nltk's needs data
    random.seed(0)
    essay = "The sun was low and the road was long. " * 60
    samples = prepare_niah.generate_samples(
        essay.split(),
        TOKENIZER=tokenizer,
        max_seq_length=16_384,
        template="Remember.\n{context}\nWhat is {query}?{type_needle_v}",
        type_haystack="essay",
        type_needle_k="words",
        type_needle_v="numbers",
        num_samples=1,
    )
    assert samples[0]["length"] < 8192  # half of what was asked for


def test_slip_lengths_not_asked_for_are_minus_one() -> None:
    scores = common_utils.process_results({"max_length": 8192, "outputs": ["7"]}, ["7"])
    assert scores == {"4096": -1.0, "8192": 1.0}


def test_slip_the_default_length_is_4096() -> None:
    assert common_utils.DEFAULT_SEQ_LENGTHS == [4096]


def test_slip_common_words_end_with_the_word_list() -> None:
    """Read from its source: importing it pairs all adjectives with all nouns, ten seconds."""
    source = (Path(common_utils.__file__).parent / "cwe_utils.py").read_text()
    assert "if num_words > len(WORDS):\n            num_words = len(WORDS)\n            break" in source
