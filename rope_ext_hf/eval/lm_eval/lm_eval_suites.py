"""Test suites with long inputs that come with lm-eval: the data that they download, and their names for lengths."""

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
    """Return words for the data that a task downloads if it is from a suite of long inputs; None for other tasks."""
    for prefix, fetched in _LONG_SUITES.items():
        if task.startswith(prefix):
            return fetched
    return None


def babilong_length(tokens: int) -> str:
    """Return the name, such as "2k", of the longest BABILong texts that have at most `tokens` tokens.

    "0k" are texts with only the facts.
    """
    thousands = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    return f"{max((number for number in thousands if number * 1024 <= tokens), default=0)}k"
