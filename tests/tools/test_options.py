"""Questions of the tool box as options: what is printed is parsed back to the same value."""

from __future__ import annotations

from pathlib import Path

import pytest

from rope_ext_hf.options.arguments import Options
from rope_ext_hf.options.method_choice import PatchChoice
from rope_ext_hf.tools.serving.serving_options import Extending
from rope_ext_hf.tools.suites.suite_options import Gain, Tasks
from rope_ext_hf.tools.training.finetuning_options import Finetuning
from tests.cli.test_dataclass_options import check_help, check_printed_command

QUESTIONS: list[tuple[str, Options]] = [
    ("tasks", Tasks(lengths="16k", suite="json-kv", tasks="kv", samples=4, score="rank", chat_template="never")),
    ("gain", Gain(lengths="4k,8k", distances="1k,2k", data="rows.jsonl", samples=8, haystack="books")),
    ("finetune", Finetuning(model="m", method="yarn", factor=4, data="books/*.txt", minutes=2.5, train_all=True)),
    ("finetune", Finetuning(model="m", method="yarn", target_length=4096, data="b", steps=10, control=True, guard=0.5)),
    ("extend", Extending(target_length="128k", engine="sglang", out="a folder", measure=False, anyway=True)),
    ("serve-config", PatchChoice(method="theta", target_length="1M")),
    ("serve-config", PatchChoice(method="yarn", factor=16 / 3)),
    ("finetune", Finetuning(model="m", method="yarn", factor=4, data="b", minutes=1.234567, guard=0.0123456789)),
]
REQUIRED = {"serve-config": " --engine vllm", "finetune": " --out o"}


@pytest.mark.parametrize(("command", "question"), QUESTIONS, ids=lambda value: getattr(type(value), "__name__", value))
def test_a_printed_command_is_the_same_question_again(command: str, question: Options) -> None:
    check_printed_command(command, question, REQUIRED.get(command, ""))


def test_what_is_given_as_text_and_as_a_value_is_the_same() -> None:
    assert Extending(target_length="2k", out="a") == Extending(target_length=2048, out=Path("a"))


def test_help_lists_the_fields_once() -> None:
    check_help({type(question) for _, question in QUESTIONS})
