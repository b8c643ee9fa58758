"""The rules for converters, exporters and other programs agree with what the programs computed when they were asked.

docs/results/programs.json has the answers, for published configs, the same with other numbers, and folders of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from checks.programs.record import (
    CONFIGS,
    PROGRAMS,
    RESULT,
    Question,
    folder_questions,
    questions,
    small_questions,
    state_of,
)
from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools.engines.base import NotCheckedError
from rope_ext_hf.tools.engines.other_programs import OtherProgram, OtherRopeError, other_programs
from rope_ext_hf.tools.engines.programs.mlx import MLX
from tests.conformance import formulas

RECORD = json.loads(RESULT.read_text(encoding="utf-8"))["programs"]


@cache
def asked(logits: tuple[str, ...] | None) -> dict[str, list[Question]]:
    """The questions to a program by parts of the record; `logits` are the families of one that gives logits."""
    names, ask_about = (CONFIGS, questions) if logits is None else (logits, small_questions)
    return {
        "states": list(ask_about(names)),
        "changed": list(ask_about(names, changed=True)),
        "folders": list(folder_questions()),
    }


def answers(program: str) -> Iterator[tuple[str, Question, str]]:
    """Yield the part of the record, the question and the answer, where the program was asked."""
    entry = PROGRAMS[program]
    logits = tuple(entry["families"]) if entry.get("logits") else None
    for part, every in asked(logits).items():
        for question in every:
            row = ", ".join(str(value) for value in (question.layer_type, question.length) if value is not None)
            state = RECORD[program][part][question.spelling].get(question.name, {}).get(row, "-")
            if state != "-":
                yield part, question, state


def state_by_rule(program: OtherProgram, question: Question) -> str:
    """The state that the rules of a program expect."""
    try:
        read = program.reads_as(question.config)
    except NotCheckedError:
        return "not checked"
    except OtherRopeError:
        return "something else"
    except ServingError:
        return "refused"
    layer_type = question.layer_type
    if layer_type is None and any(isinstance(value, dict) for value in read["rope_parameters"].values()):
        layer_type = "full_attention"  # a program that gives logits has one answer for all layers
    rope = formulas.read(read, layer_type, question.length)
    given = {"inv_freq": [float(f) for f in rope.inv_freq], "magnitude": float(rope.magnitude)}
    return state_of(question._replace(layer_type=layer_type), given)


@pytest.mark.parametrize("name", other_programs())
def test_rules_agree_with_the_record(name: str) -> None:
    wrong, compared = [], 0
    program = other_programs()[name]
    for part, question, recorded in answers(name):
        if program.reads == "former" and question.layer_type == "sliding_attention":
            continue  # the class of transformers that the rules read with has a theta of its own there (OLMo 3)
        expected = state_by_rule(program, question)
        if expected == "not checked":
            continue
        compared += 1
        kind = recorded.partition(":")[0]
        # Where no config states what a program computes, one layer type of several may still be right. Logits say that
        # something differs, and not how.
        agrees = kind == expected if expected != "something else" else kind != "refused"
        if kind.startswith("logits differ"):
            agrees = expected not in ("right", "refused")
        if not agrees:
            wrong.append((part, question.spelling, question.name, question.layer_type, question.length, kind, expected))
    assert not wrong
    assert compared > 20


@pytest.mark.parametrize("name", other_programs())
def test_nothing_that_is_lost_in_silence_is_left_out(name: str) -> None:
    left_out = {
        (question.config["model_type"], recorded)
        for _, question, recorded in answers(name)
        if state_by_rule(other_programs()[name], question) == "not checked"
        and recorded != "right"
        and not recorded.startswith("refused")
    }
    assert not left_out


@pytest.mark.parametrize("name", other_programs())
def test_versions_are_those_of_the_record(name: str) -> None:
    assert f" {other_programs()[name].version}," in f" {RECORD[name]['version']},"


def test_mlx_agrees_with_the_record() -> None:
    wrong = []
    for part, question, recorded in answers("mlx-lm"):
        if question.layer_type == "sliding_attention" or question.length not in (None, 131072):
            continue  # the engine's rules are for the full-attention layers and long inputs
        if (question.published.get("rope_scaling") or {}).get("rope_type") == "dynamic":
            continue  # and for static scalings
        try:
            computed: Any = MLX().computes(question.config)
        except NotCheckedError:
            continue
        except ServingError:
            state = "refused"
        else:
            given = {"inv_freq": list(computed.inv_freq), "magnitude": computed.attention_factor}
            state = state_of(question, given)
        if state != recorded.partition(":")[0]:
            wrong.append((part, question.spelling, question.name, recorded, state))
    assert not wrong
