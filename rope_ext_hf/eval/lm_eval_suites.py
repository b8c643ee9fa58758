"""lm-eval's own suites of long inputs: what they fetch from the network, and how they name lengths."""

from __future__ import annotations

_LONG_SUITES = {
    "ruler": "essays and the data sets SQuAD and HotpotQA, and punkt of nltk; niah_single_1 fetches nothing",
    "niah": "essays, and punkt of nltk; niah_single_1 fetches nothing",
    "longbench2": "recursal/longbench-v2",
    "longbench": "the data sets of LongBench",
    "babilong": "RMT-team/babilong-1k-samples",
    "graphwalks": "openai/graphwalks",
    "infinitebench": "the data sets of InfiniteBench",
    "mrcr": "openai/mrcr",
}
"""lm-eval's own suites of long inputs, by how their tasks' names begin, and what they fetch from the network."""


def long_suite(task: str) -> str | None:
    """The data that a task of lm-eval's own long suites fetches; None for other tasks."""
    return next((fetched for prefix, fetched in _LONG_SUITES.items() if task.startswith(prefix)), None)


def babilong_length(tokens: int) -> str:
    """The longest of lm-eval's BABILong texts of at most so many tokens, such as "2k"; "0k" is facts alone."""
    return f"{max((n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if n * 1024 <= tokens), default=0)}k"
