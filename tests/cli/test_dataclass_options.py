"""Questions as options: what `command_line` prints is parsed back to the same value."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from rope_ext_hf.cli import dataclass_options
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.measurement_options import Passkey, Perplexity, Sweep
from rope_ext_hf.options.arguments import Options, command_line
from rope_ext_hf.options.method_choice import LayerChoice, MethodChoice, PatchChoice

QUESTIONS: list[tuple[str, Options]] = [
    ("ppl", Perplexity(lengths="4k,8k")),
    (
        "ppl",
        Perplexity(
            lengths=[256, 1024], data="my texts/*.txt", protocol="sliding", targets=64, stride=128, max_spans=16,
            bos=False, keys_by="org/model", key_window=128,
        ),
    ),
    ("sweep", Sweep(lengths=512, max_spans=64, bos=True)),
    ("passkey", Passkey(lengths=[128], depths=[0, 0.5], trials=3, keys=2, distractors=5, task="needle", seed=7)),
    ("ppl", MethodChoice(method=["yarn", "self-extend"], factor=[2, 8], over="original", context_length=4096)),
    ("patch", PatchChoice(method="theta", target_length="1M")),
    ("patch", PatchChoice(method="yarn", factor=16 / 3)),
    ("describe", LayerChoice(method="ntk", factor=1.5, layers="sliding_attention,2")),
]  # fmt: skip
REQUIRED = {"ppl": "--lengths 8", "patch": "--out o"}


def parsed(line: str, kind: type[Options]) -> Options:
    """The question of a command as it is typed."""
    name, *words = shlex.split(line)[1:]
    group: Any = typer.main.get_command(app)
    with group.get_command(None, name).make_context(name, words) as context:
        question: Options = dataclass_options._built(kind, context.params | {"context": context})
    return question


@pytest.mark.parametrize(("command", "question"), QUESTIONS, ids=lambda value: getattr(type(value), "__name__", value))
def test_a_printed_command_is_the_same_question_again(command: str, question: Options) -> None:
    needed = "" if "lengths" in question.options else f" {REQUIRED.get(command, '')}"
    check_printed_command(command, question, needed)


def check_printed_command(command: str, question: Options, needed: str) -> None:
    """The command that is printed for a question, with the options that it needs, must ask the same question."""
    assert parsed(command_line(command, "m", **question.options) + needed, type(question)) == question


def test_what_is_given_as_text_and_as_a_value_is_the_same() -> None:
    assert Perplexity(lengths="256,1k", max_spans="all") == Perplexity(lengths=[256, 1024])
    assert MethodChoice(method="yarn, ntk", factor="2,4") == MethodChoice(method=["yarn", "ntk"], factor=(2.0, 4.0))


def test_the_defaults_of_python_and_of_a_command_differ_where_it_is_said() -> None:
    assert Perplexity(lengths=8).max_spans is None
    asked = parsed(command_line("ppl", "m", lengths=8), Perplexity)
    assert asked == Perplexity(lengths=8, max_spans=64)
    assert asked.options == {"lengths": (8,)}
    assert Perplexity(lengths=8).options == {"lengths": (8,), "max_spans": "all"}


def test_help_lists_the_fields_once() -> None:
    check_help({type(question) for _, question in QUESTIONS})


def check_help(questions: set[type[Options]]) -> None:
    """The docstring of each kind of question must have the help of each of its fields once."""
    for question in questions:
        text = question.__doc__ or ""
        for each, how in question.described_fields():
            if each.name in vars(question).get("__annotations__", ()):
                assert text.count(f"    {each.name}: {how.help}") == 1, each.name


@pytest.mark.parametrize("factor", ["", "2,", "a", ["2", ""]])
def test_an_empty_number_is_refused(factor: Any) -> None:
    """Of a script whose variable is empty, say."""
    with pytest.raises(MethodError, match=r"--factor takes numbers, e\.g\. 2,4,8; got '"):
        MethodChoice(method="yarn", factor=factor)
