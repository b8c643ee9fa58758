"""Suites of long inputs that come with lm-eval: the data that they fetch, and their names of lengths."""

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
"""The data that each suite fetches from the network, by the beginning of the names of its tasks."""


def long_suite(task: str) -> str | None:
    """Return the data that a task of such a suite fetches, in words; None for any other task."""
    for prefix, fetched in _LONG_SUITES.items():
        if task.startswith(prefix):
            return fetched
    return None


def babilong_length(tokens: int) -> str:
    """Return the name of the longest BABILong texts of at most so many tokens: "2k"; "0k" has facts alone."""
    thousands = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    return f"{max((number for number in thousands if number * 1024 <= tokens), default=0)}k"
