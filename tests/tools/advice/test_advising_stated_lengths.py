"""Advice, plans, audits and targets take the trained length that dual chunk attention states."""

from __future__ import annotations

from pathlib import Path

import pytest

from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.tools.advice.advising import advise
from rope_ext_hf.tools.serving.auditing import audit_config
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.models.test_config_stated import FAMILIES, stating, write_qwen_1m
from tests.support.commands import run_json

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_takes_the_trained_length(family: str) -> None:
    target = make_target(Model("m", stating(family).config, composite=False, patches=[]), "linear", target_length=1024)
    assert target.original == 256
    assert target.inv_freq[0] == pytest.approx(1 / 4)


def test_advice_and_audit_take_the_trained_length() -> None:
    config = stating("qwen2").config
    advice = advise(empty_model(config), 1000)
    assert (advice.context_length, round(advice.factor, 2)) == (256, 3.91)
    [vllm] = [report for report in audit_config(config.to_dict()).engines if report.engine == "vllm"]
    assert "dual chunk attention" in str(vllm.unknown)


@pytest.mark.slow
def test_a_plan_takes_the_trained_length_of_qwen_1m(tmp_path: Path) -> None:
    folder = write_qwen_1m(tmp_path / "qwen")
    of_engine = ("--engine", "llama.cpp", "--no-measure")  # vLLM, the default, runs dual chunk attention of its own
    planned = run_json("extend", folder, "--target-length", "524288", "--dry-run", *of_engine)["plan"]
    assert (planned["context_length"], planned["target_length"]) == (262144, 524288)
