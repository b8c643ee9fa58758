"""What the tool box prints, and what notebooks show of its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rope_ext_hf import reference
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.advice import advise
from rope_ext_hf.tools.servers.server_report import ServerReport
from tests.test_terminal import HOSTILE, check_cells, check_notebook


def test_what_commands_print_is_readable_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    advice = str(advise("reference", 4096))
    assert len(advice.splitlines()) < 140
    config = str(serving.serving_config("reference", "vllm", "yarn", factor=4))
    remarks = "\n".join(line for line in config.splitlines() if line.startswith("#"))
    for text in (advice, str(serving.audit(reference.path())), remarks):
        assert max(len(line) for line in text.splitlines() if "/" not in line.strip() or " " in line.strip()) <= 80


def answers() -> dict[str, Any]:
    """One answer of each kind that a notebook shows, with a hostile text in it."""
    served = serving.serving_config("reference", "vllm", "yarn", factor=4)
    differences = {HOSTILE: (0.001, 0.002), "the model as loaded": (0.3,)}
    checked = ServerReport("http://here", "vLLM 1", "yarn x4", "as measured", "as measured", None, (), None, (8, 16),
                           differences, {})  # fmt: skip
    return {
        "Advice": replace(advise("reference", 2048), notes=(HOSTILE,)),
        "ServingConfig": replace(served, notes=(HOSTILE,)),
        "Audit": replace(serving.audit("reference"), problems=(HOSTILE,)),
        "ServerReport": checked,
    }


def test_notebooks_show_tables_in_which_names_and_texts_are_text() -> None:
    for kind, answer in answers().items():
        check_notebook(kind, answer)


def test_notebooks_show_what_the_terminal_does() -> None:
    """Of advice, the full text."""
    with as_wide_as(10_000):
        for kind, answer in answers().items():
            check_cells(kind, answer, answer.full_text() if kind == "Advice" else str(answer))
