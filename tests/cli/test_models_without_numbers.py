"""A model whose weights are NaN, and texts with nothing to read, through every command that reads text.

Each ends with a right result, or with one sentence and an exit code that is not 0: never with a number by luck.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.test_app import run
from tests.cli.test_lm_eval import TASK
from tests.support.inputs import write_model

TEXT = ("--data", "texts/*.txt", "--device", "cpu")
COMMANDS: dict[str, tuple[str, ...]] = {
    "ppl": (*TEXT, "--lengths", "64", "--max-spans", "2"),
    "sweep": (*TEXT, "--lengths", "64,128", "--method", "linear", "--factor", "2", "--max-spans", "2"),
    "passkey": ("--haystack", "texts/*.txt", "--lengths", "256", "--task", "key-value", "--trials", "2"),
    "lm-eval": ("--tasks", "endings", "--include-path", "."),
    "lm-eval, written": ("--tasks", "written", "--include-path", "."),
}  # fmt: skip
SLOW = ("lm-eval", "sweep")
THOROUGH = ("lm-eval, written",)


def write_model_with_nan(root: Path) -> None:
    """Write a model, one with NaN, and texts, in the folders "model", "nan" and "texts"."""
    write_model(root / "model")
    weights = load_file(write_model(root / "nan") / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, root / "nan" / "model.safetensors", metadata={"format": "pt"})
    (root / "texts").mkdir()
    for number in range(4):
        text = "".join(f"def f{i}(x):\n    return x * {i * number % 97}\n" for i in range(30))
        (root / "texts" / f"{number}.txt").write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a model, one with NaN, texts, and tasks of lm-eval."""
    write_model_with_nan(tmp_path)
    task = TASK.format(folder=tmp_path)
    (tmp_path / "endings.yaml").write_text(task)
    written = task.replace("task: endings", "task: written").replace("loglikelihood", "generate_until")
    (tmp_path / "written.yaml").write_text(
        written.replace("metric: acc", "metric: exact_match")
        + "generation_kwargs: {until: ['.'], max_gen_toks: 8, do_sample: false}\n"
    )
    (tmp_path / "data.json").write_text(json.dumps([{"text": "Mice pay in ", "rest": "kind"}]))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW) + [pytest.mark.thorough] * (each in THOROUGH))
        for each in COMMANDS
    ],
)
def test_a_model_with_nan_has_no_result(name: str, folder: Path) -> None:
    if name.startswith("lm-eval"):
        pytest.importorskip("lm_eval")
    check_refused((name.partition(",")[0], "nan", *COMMANDS[name]), folder)


def check_refused(words: tuple[str, ...], folder: Path) -> None:
    """A command on the model with NaN must end with a sentence, and leave no weights."""
    code, _, err = run(*words)
    assert code in (1, 2), err
    _, begins, sentence = err.rpartition("rope-ext: ")
    assert begins, err
    assert "gives NaN in place of numbers" in sentence or "the loss is not finite" in sentence
    assert not list(folder.glob("*/model/model.safetensors"))
    for file in folder.rglob("results.json"):  # what was measured can be shown again, with the same exit code
        assert run("report", str(file.parent))[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rest", "tokens"), [("", 0), pytest.param("kind" * 40, 160, marks=pytest.mark.thorough)])
def test_an_answer_that_no_model_can_score_is_named(rest: str, tokens: int, folder: Path) -> None:
    pytest.importorskip("lm_eval")
    (folder / "data.json").write_text(json.dumps([{"text": "a", "rest": "b"}, {"text": "Mice", "rest": rest}]))
    code, _, err = run("lm-eval", "model", *COMMANDS["lm-eval"])
    assert code == 2, err
    assert f"task 'endings' asks for the likelihood of an answer of {tokens} tokens (document 1)" in err


CORPORA = {"empty": [""] * 3, "shorter than the span": ["x = 1"] * 3}


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("name", ["ppl", "sweep", "run"])
def test_texts_without_anything_to_read_are_refused(name: str, corpus: str, folder: Path) -> None:
    (folder / "file.yaml").write_text("run: ppl\nmodel: model\ndata: texts/*.txt\nlengths: 64\n")
    check_nothing_to_read(("run", "file.yaml") if name == "run" else (name, "model", *COMMANDS[name]), corpus, folder)


def check_nothing_to_read(words: tuple[str, ...], corpus: str, folder: Path) -> None:
    """A command on texts with nothing to read must end with one line."""
    for number, text in enumerate(CORPORA[corpus]):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "texts" / "3.txt").unlink()
    code, _, err = run(*words)
    assert code == 2, err
    assert err.strip().splitlines()[-1].startswith("rope-ext: "), err


@pytest.mark.parametrize("extra", ["", "x = 1"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the same command was run before:UserWarning")
def test_an_empty_or_short_document_changes_no_number_of_others(extra: str, folder: Path) -> None:
    (folder / "file.yaml").write_text("run: ppl\nmodel: model\ndata: texts/*.txt\nlengths: 64\ndevice: cpu\n")
    code, out, err = run("run", "file.yaml", "--json")
    assert code == 0, err
    (folder / "texts" / "extra.txt").write_text(extra)
    code, again, err = run("run", "file.yaml", "--json")
    assert code == 0, err
    losses = [[each["loss"] for each in json.loads(said)["results"]] for said in (out, again)]
    assert losses[0] == losses[1]
