"""The commands of the tool box that take a model, on every kind of folder, with default options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_app_folders import KINDS, check_answer, write_folders

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # the command line prints them
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # of PEFT
]
COMMANDS: dict[str, list[str]] = {
    "serve-config": ["--engine", "vllm"],
    "audit": [],
    "extend": ["--target-length", "1k", "--dry-run"],
}
NO_ENGINE = "no serving engine does that"
ANSWERS = {
    ("serve-config", "restored"): (2, NO_ENGINE),
    ("serve-config", "adapter"): (2, "merge it"),
    ("extend", "adapter"): (2, "merge it"),
    ("audit", "restored"): (1, ""),  # no engine runs dca
    ("audit", "adapter"): (
        2,
        "is a PEFT adapter, without a config of its own; give its base model, or merge the adapter",
    ),
    # The config of the bundled model is plain, without the former spelling that mlx-lm reads: engines disagree on it.
    ("audit", "plain"): (1, ""),
    ("audit", "converted"): (1, ""),
}
"""Exit code and part of the error line, where a command cannot do what it is asked on a kind of folder."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_on_every_kind_of_folder(command: str, kind: str, folders: dict[str, Path]) -> None:
    check_answer([command, str(folders[kind]), *COMMANDS[command]], *ANSWERS.get((command, kind), (0, "")))
