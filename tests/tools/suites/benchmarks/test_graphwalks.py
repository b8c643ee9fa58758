"""GraphWalks' graphs and answers against networkx, and its score against lm-eval's."""

from __future__ import annotations

import random
import re
from typing import Any

import networkx
import pytest
from lm_eval.tasks.graphwalks.utils import extract_answer_list, process_results

from rope_ext_hf.errors import MethodError
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.tools.suites.base import Sample, count_tokens, suite

LENGTH = 6000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("reference")


def make_samples(task: str, tokenizer: Any, **options: Any) -> list[Sample]:
    given: dict[str, Any] = {"length": LENGTH, "count": 4, "seed": 0, "haystack": ""} | options
    return suite("graphwalks").samples(task, tokenizer, **given)


def graph_of(prompt: str) -> networkx.DiGraph:
    """Return the graph of a prompt, which stands after the example."""
    text = prompt.partition("Here is the graph to operate on:")[2]
    return networkx.DiGraph(re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE))


def answer_of(sample: Sample) -> list[str]:
    (answer,) = sample.references
    return [node for node in answer.removeprefix("Final Answer: [").removesuffix("]").split(", ") if node]


@pytest.mark.slow
def test_nodes_at_a_depth_are_those_of_networkx(tokenizer: Any) -> None:
    depths = set()
    for sample in make_samples("bfs", tokenizer, count=20):
        (start, depth), graph = (
            re.findall(r"BFS from node (\w+) with depth (\d)\.", sample.prompt)[-1],
            graph_of(sample.prompt),
        )
        distances = networkx.single_source_shortest_path_length(graph, start)
        assert sorted(answer_of(sample)) == sorted(n for n, d in distances.items() if d == int(depth))
        depths.add(depth)
    assert len(depths) > 1


def test_parents_are_those_of_networkx(tokenizer: Any) -> None:
    answers = []
    for sample in make_samples("parents", tokenizer):
        node = re.findall(r"parents of node (\w+)\.", sample.prompt)[-1]
        assert sorted(answer_of(sample)) == sorted(graph_of(sample.prompt).predecessors(node))
        answers.append(answer_of(sample))
    assert any(answers)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["bfs", "parents"])
def test_prompts_fill_the_length_and_follow_from_the_seed(task: str, tokenizer: Any) -> None:
    samples = make_samples(task, tokenizer)
    for sample in samples:
        assert LENGTH - 400 < sample.length <= LENGTH
        assert sample.length == count_tokens(tokenizer, sample.prompt) + sample.budget
        assert sample.budget >= count_tokens(tokenizer, sample.references[0])
        assert all(degree >= 1 for _, degree in graph_of(sample.prompt).degree())
    assert samples == make_samples(task, tokenizer)
    assert samples != make_samples(task, tokenizer, seed=1)
    assert max(s.length for s in make_samples(task, tokenizer, reserved=500)) <= LENGTH - 500
    with pytest.raises(MethodError, match="too short for task"):
        make_samples(task, tokenizer, length=2000)


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("Final Answer: [a, b]", "[a, b]", 1.0),
        ("Let me see.\nFinal Answer: [b,a]", "[a, b]", 1.0),
        ("Final Answer: [a]", "[a, b]", 2 / 3),  # precision 1, recall 1/2
        ("Final Answer: [a, b, c, d]", "[a, b]", 2 / 3),  # precision 1/2, recall 1
        ("Final Answer: [c]", "[a, b]", 0.0),
        ("Final Answer: []", "[]", 1.0),
        ("Final Answer: [a]", "[]", 0.0),
        ("Final Answer: []", "[a]", 0.0),
        ("[a, b]", "[a, b]", 0.0),  # not marked as the answer
        ("Final Answer: [a, b]\nThat is all.", "[a, b]", 0.0),  # not in the last line
        ("", "[a]", 0.0),
        ("Final Answer:  ['a', \"b\"]\n\n", "[a, b]", 1.0),
    ],
)
def test_the_score_is_the_f1_of_the_last_line(answer: str, right: str, expected: float) -> None:
    assert suite("graphwalks").score(answer, [f"Final Answer: {right}"], []) == pytest.approx(expected)


def test_the_score_is_that_of_lm_eval_but_for_a_right_empty_set() -> None:
    """lm-eval scores 0 there, so that no answer to such a question is right."""
    rng, empty = random.Random(0), 0
    for _ in range(600):
        right = rng.choice([[], ["a1"], ["a1", "b2"], ["a1", "b2", "c3"]])
        given = rng.sample([*right, "d4", "", "e 5", "a1"], k=rng.randrange(5))
        nodes = ",".join(rng.choice(["{}", "'{}'", '"{}"', " {} ", "' {} '", "{},"]).format(node) for node in given)
        begin = rng.choice(
            ["Final Answer:", "final answer:", "So the Final Answer:", "Final Answer: [x]\nFinal Answer:"]
        )
        blank, end = rng.choice(["", " ", "  ", "\t"]), rng.choice(["", "\n", "\n\n", " ", "\n ", "\r\n"])
        answer = begin + blank + rng.choice(["[{}]", "[{}]", "[{}] .", "[[{}]]", "{}", "[{}"]).format(nodes) + end
        ours = suite("graphwalks").score(answer, [f"Final Answer: [{', '.join(right)}]"], [])
        theirs = process_results({"answer_nodes": right}, [answer])["f1"]
        if not right and extract_answer_list(answer) == ([], False):
            assert (ours, theirs) == (1.0, 0.0)
            empty += 1
        else:
            assert ours == pytest.approx(theirs), answer
    assert empty
