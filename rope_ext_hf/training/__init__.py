"""What training a patched model needs beside a trainer: positions, weights of the loss, and checks that stop it."""

from rope_ext_hf.patches.parallelism import check_context_parallel
from rope_ext_hf.training.callback import RopeCallback
from rope_ext_hf.training.collators import MixedWindowsCollator, PoSECollator, RandomPositionsCollator
from rope_ext_hf.training.finetuning import FinetuneReport, Finetuning, finetune
from rope_ext_hf.training.longce import longce_weights
from rope_ext_hf.training.search_report import SearchReport
from rope_ext_hf.training.searching import search

__all__ = [
    "FinetuneReport",
    "Finetuning",
    "MixedWindowsCollator",
    "PoSECollator",
    "RandomPositionsCollator",
    "RopeCallback",
    "SearchReport",
    "check_context_parallel",
    "finetune",
    "longce_weights",
    "search",
]
