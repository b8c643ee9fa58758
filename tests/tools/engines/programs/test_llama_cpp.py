"""The rules of llama.cpp, GGUF files and Ollama; checks/llama_cpp_engine.py compares them with a build."""

from __future__ import annotations

import pytest

from rope_ext_hf.errors import (
    ServingError,
)
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.serving.configs import make_target
from tests.tools.support.serving_models import served_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_llama_cpp_reads_the_betas_of_yarn_from_flags_alone() -> None:
    target = make_target(served_model("Mistral"), "yarn", factor=4.0, beta_fast=8.0)
    flags = find_engine("llama.cpp").config_for(target)
    assert flags.encoding == "native"
    assert flags.command[flags.command.index("--yarn-beta-fast") + 1] == "8.0"
    assert find_engine("gguf").config_for(target).encoding == "divisors in rope_freqs.weight"
    with pytest.raises(ServingError, match="reads no tensor of divisors"):
        find_engine("ollama").config_for(make_target(served_model("Qwen3"), "yarn", factor=4.0, beta_fast=8.0))
