"""GraphWalks: questions about a directed graph whose answer is a set of nodes.

After OpenAI's data set (huggingface.co/datasets/openai/graphwalks, MIT). The instructions follow the data set's card
with its correction of February 2026: the nodes at exactly the given depth, and no node is its own parent. The graphs
are new, as large as the length allows, with four edges from every node as in the published prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial

from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, fill, register_suite, wordings

_EDGES = 4  # from every node
_DEPTHS = (1, 2, 3)
_SMALLEST = 8  # nodes of a graph
_EXTRA = 32  # tokens that may be generated beyond those of the right answer
_PROMPT: str = wordings("graphwalks")["prompt"]


@register_suite
class GraphWalks(Suite):
    """The suite GraphWalks: the task `bfs` asks for the nodes at a depth, the task `parents` for a node's parents.

    An answer's score is the F1 of its set of nodes.
    """

    name = "graphwalks"
    tasks = ("bfs", "parents")

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        return fill(task, settings, partial(_sample, task, settings), _SMALLEST, step=2 * _SMALLEST)

    @staticmethod
    def score(answer: str, references: Sequence[str], others: Sequence[str] = ()) -> float:
        """Return the F1 of the nodes that an answer's last line lists, compared with the right ones.

        It is computed as in lm-eval's graphwalks, and is 1 if both sets are empty.
        """
        answered, right = _nodes(answer), _nodes(references[0])
        if answered is None or right is None:
            return 0.0
        if not answered and not right:
            return 1.0
        return 2 * len(answered & right) / (len(answered) + len(right))


def _nodes(text: str) -> set[str] | None:
    """Return the nodes that are listed after "Final Answer:" in the last line of a text; None if there is no list.

    Quotes around the names are removed.
    """
    match = re.search(r"Final Answer:\s*\[(.*)\]", text.rstrip("\n").split("\n")[-1])
    if match is None:
        return None
    return {node.strip().strip("'\"") for node in match[1].split(",") if node.strip()}


def _sample(task: str, settings: PromptSettings, index: int, count: int) -> Sample:
    """Make prompt number `index` of a task, about a graph with `count` nodes."""
    rng = random.Random(f"{task} {settings.seed} {index}")
    nodes = list(dict.fromkeys(f"{rng.getrandbits(40):010x}" for _ in range(count)))
    start, depth = rng.random(), rng.choice(_DEPTHS)
    children = {node: rng.choices([other for other in nodes if other != node], k=_EDGES) for node in nodes}
    node = nodes[int(start * len(nodes))]
    if task == "bfs":
        operation = f"Perform a BFS from node {node} with depth {depth}."
        right = _at_depth(children, node, depth)
    else:
        operation = f"Find the parents of node {node}."
        right = [parent for parent in nodes if node in children[parent]]
    edges = "\n".join(f"{parent} -> {child}" for parent in nodes for child in children[parent])
    answer = f"Final Answer: [{', '.join(right)}]"
    prompt = _PROMPT.format(edges=edges, operation=operation)
    budget = settings.tokens(answer) + _EXTRA
    return Sample(prompt, "", (answer,), budget, settings.tokens(prompt) + budget)


def _at_depth(children: Mapping[str, Sequence[str]], start: str, depth: int) -> list[str]:
    """Return the nodes whose shortest path from `start` has `depth` edges, in breadth-first order."""
    seen, frontier = {start}, [start]
    for _ in range(depth):
        frontier = list(dict.fromkeys(child for node in frontier for child in children[node] if child not in seen))
        seen.update(frontier)
    return frontier
