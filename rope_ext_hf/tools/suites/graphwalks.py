"""GraphWalks: sets of nodes of a directed graph, after OpenAI's data set (huggingface.co/datasets/openai/graphwalks).

Instructions follow the data set's card (MIT), with its correction of February 2026 (nodes at exactly the depth; a node
is not its own parent); graphs are made anew, as large as the length takes, four edges a node as in published prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial

from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, fill, register_suite, wordings

_EDGES = 4  # from every node
_DEPTHS = (1, 2, 3)
_SMALLEST = 8  # nodes
_ROOM = 32  # tokens that an answer may have beyond the right one
_PROMPT: str = wordings("graphwalks")["prompt"]


@register_suite
class GraphWalks(Suite):
    """`bfs` and `_parents`; an answer's score is the F1 of its set of nodes."""

    name = "graphwalks"
    tasks = ("bfs", "parents")

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        return fill(task, wanted, partial(_sample, task, wanted), _SMALLEST, 2 * _SMALLEST)

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """F1 of the set in the last line of an answer, as lm-eval's graphwalks has it; 1 where both sets are empty."""
        found, right = (_nodes(text) for text in (answer, references[0]))
        if found is None or right is None:
            return 0.0
        if not found and not right:
            return 1.0
        return 2 * len(found & right) / (len(found) + len(right))


def _nodes(text: str) -> set[str] | None:
    """The nodes after "Final Answer:" in the last line, quotes left out; None where no such list stands there."""
    listed = re.search(r"Final Answer:\s*\[(.*)\]", text.rstrip("\n").split("\n")[-1])
    return None if listed is None else {node.strip().strip("'\"") for node in listed[1].split(",") if node.strip()}


def _sample(task: str, wanted: PromptSettings, index: int, count: int) -> Sample:
    rng = random.Random(f"{task} {wanted.seed} {index}")
    nodes = list(dict.fromkeys(f"{rng.getrandbits(40):010x}" for _ in range(count)))
    start, depth = rng.random(), rng.choice(_DEPTHS)
    reached = {node: rng.choices([other for other in nodes if other != node], k=_EDGES) for node in nodes}
    node = nodes[int(start * len(nodes))]
    if task == "bfs":
        operation, right = f"Perform a BFS from node {node} with depth {depth}.", _at_depth(reached, node, depth)
    else:
        right = [one for one, others in reached.items() if node in others]
        operation = f"Find the parents of node {node}."
    edges = "\n".join(f"{one} -> {other}" for one, others in reached.items() for other in others)
    answer = f"Final Answer: [{', '.join(right)}]"
    prompt = _PROMPT.format(edges=edges, operation=operation)
    budget = wanted.tokens(answer) + _ROOM
    return Sample(prompt, "", (answer,), budget, wanted.tokens(prompt) + budget)


def _at_depth(reached: Mapping[str, Sequence[str]], start: str, depth: int) -> list[str]:
    """The nodes whose shortest path from a node has so many edges, in the order in which they are found."""
    seen, frontier = {start}, [start]
    for _ in range(depth):
        frontier = list(dict.fromkeys(other for node in frontier for other in reached[node] if other not in seen))
        seen.update(frontier)
    return frontier
