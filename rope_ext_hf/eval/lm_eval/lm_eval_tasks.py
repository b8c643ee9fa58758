"""Tasks of lm-evaluation-harness on a patched model, at the length that the model was extended to.

from rope_ext_hf.eval.lm_eval.lm_eval_tasks import evaluate
results = evaluate(patch(model, "yarn", factor=8), tokenizer, tasks=["niah_single_1"], limit=50)
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.lm_eval.lm_eval_adapter import RopeHFLM
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.plug_ins import plug_in
from rope_ext_hf.runs.folder.identity import provenance


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    limit: int | float | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    apply_chat_template: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run tasks of lm-eval on a model, patched or not, at its extended length.

    Args:
        tasks: names of tasks, groups or tags, with wildcards, or YAML files. The suites of this package are
            rope_ruler, rope_json_kv, rope_graphwalks and rope_babilong, which fetch nothing.
        include_path: a folder with task definitions of one's own.
        limit: this many documents per task, or this share of them if below 1.
        num_fewshot: worked examples in each prompt; default: as the task has it.
        batch_size, max_length: see `RopeHFLM`.
        metadata: for tasks that make their own data (RULER), in place of the defaults: `max_seq_lengths` is
            [max_length], and tokenizer and model are those given here. RULER loads the tokenizer with
            trust_remote_code=True.
        apply_chat_template: default: true if the tokenizer has a chat template and all tasks are of suites of long
            inputs, which are for models that follow instructions.
        **options: further arguments of `lm_eval.simple_evaluate`; log_samples is off unless given.

    Returns:
        lm-eval's results (for `lm_eval.utils.make_table`), and beside them `provenance`, `method` (None: as loaded),
        `max_length` and `cut` (see `RopeHFLM`). Where an input was cut, a warning says so. The dict is empty in
        processes other than the first.

    Raises:
        MethodError: a task is unknown (the message names the nearest one) or cannot be built, max_seq_lengths is above
            max_length, or `RopeHFLM` refuses the model.
        CorpusError: the data of a task cannot be reached, such as data on the Hugging Face Hub without a network.
    """
    from lm_eval import simple_evaluate

    lm = RopeHFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
    names = {"tokenizer": lm.tokenizer.name_or_path or model.name_or_path, "pretrained": model.name_or_path}
    known_names = {key: name for key, name in names.items() if name}
    all_metadata: dict[str, Any] = {"max_seq_lengths": [lm.max_length], **known_names, **(metadata or {})}
    longest = max(all_metadata["max_seq_lengths"], default=0)
    if longest > lm.max_length:
        raise MethodError(
            f"max_seq_lengths go up to {longest} tokens, above max_length={lm.max_length}; give shorter ones, or "
            "extend the model further"
        )
    if include_path is not None and not Path(include_path).is_dir():
        raise MethodError(f"include_path must be a folder of tasks, and {str(include_path)!r} is not a folder")
    with TemporaryDirectory() as task_folder, left_out_of_log("lm_eval.api.task", "Custom kwargs can be passed"):
        finder = TaskFinder(task_folder, include_path, all_metadata, lm.max_length)
        if apply_chat_template is None:
            long_inputs = all(name.startswith("rope_") or long_suite(name) for name in finder.names(tasks))
            apply_chat_template = long_inputs and bool(getattr(lm.tokenizer, "chat_template", None))
        results = simple_evaluate(
            model=lm,
            tasks=finder.build(tasks),
            task_manager=finder.manager,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            limit=limit,
            apply_chat_template=apply_chat_template,
            **({"log_samples": False} | options),
        )
    if results is None:
        return {}
    if lm.cut:
        warnings.warn(
            f"{lm.cut} inputs did not fit into max_length={lm.max_length}, and their beginning was cut off; extend the "
            "model further for a fair result",
            stacklevel=2,
        )
    method = patched_method(model)
    return dict(results) | {
        "provenance": provenance(model, ", ".join(tasks)),
        "method": method.to_dict() if method else None,
        "max_length": lm.max_length,
        "cut": lm.cut,
    }


class TaskFinder:
    """A catalogue of tasks for lm-eval: its own, those of the tool box, and those in a folder of the user.

    Args:
        task_folder: an empty folder, into which the tool box writes its tasks.
        include_path: a folder with task definitions of one's own; None: there is none.
        metadata: lm-eval's metadata for tasks that make their own data.
        max_length: the longest input in tokens.
    """

    def __init__(
        self, task_folder: str | Path, include_path: str | Path | None, metadata: Mapping[str, Any], max_length: int
    ) -> None:
        from lm_eval.tasks import TaskManager

        write_tasks = plug_in("parts", "lm_eval_tasks")  # of the tool box, which may not be installed
        if write_tasks is not None:
            write_tasks(task_folder)
        paths = [task_folder, *([] if include_path is None else [include_path])]
        self.manager = TaskManager(include_path=paths, metadata=dict(metadata))
        # BABILong names its lengths as "2k", and other tasks in tokens
        babilong_metadata = {**metadata, "max_seq_lengths": babilong_length(max_length)}
        self._babilong_manager = cache(lambda: TaskManager(include_path=paths, metadata=babilong_metadata))

    def names(self, tasks: Sequence[str]) -> list[str]:
        """Return the names of the tasks and groups, or the paths of YAML files, that names with wildcards match.

        Raises:
            MethodError: there is no task, or an unknown one.
        """
        if isinstance(tasks, str) or not tasks:
            raise MethodError(f"tasks must be a list of at least one name, got {tasks!r}")
        names: list[str] = []
        for task in tasks:
            matches = [task] if Path(task).is_file() else self.manager.match_tasks([task])
            if not matches:
                nearest = difflib.get_close_matches(task, self.manager.all_tasks, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise MethodError(
                    f"unknown task {task!r}.{hint} `lm-eval ls tasks` lists all tasks; include_path adds your own"
                )
            names += matches
        return names

    def build(self, tasks: Sequence[str]) -> list[Any]:
        """Return the tasks and groups of these names, ready for `lm_eval.simple_evaluate`.

        Raises:
            MethodError: a task is unknown, cannot be built, or comes twice, alone and in a group.
            CorpusError: the data of a task cannot be reached.
        """
        built: list[Any] = []
        for name in self.names(tasks):
            with _task_errors(name):
                manager = self._babilong_manager() if name.startswith("babilong") else self.manager
                loaded = manager.load([name])
                group = loaded.get("groups", {}).get(name)
                built += [group] if group is not None else loaded["tasks"].values()
        with _task_errors(", ".join(tasks)):
            self.manager.load(built)  # raises an error where a task comes twice
        return built


@contextmanager
def _task_errors(name: str) -> Iterator[None]:
    """Inside the `with` block, turn any error from building a task into one that names the task."""
    try:
        yield
    except (ConnectionError, HfHubHTTPError) as error:
        raise CorpusError(
            f"task {name!r} needs data from the Hugging Face Hub, which cannot be reached: {_first_line(error)}"
        ) from error
    except OSError as error:
        raise CorpusError(f"the data of task {name!r} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # a task runs code of its own, which may raise anything
        raise MethodError(f"task {name!r} cannot be built: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty, or else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- suites of long prompts ---------------------------------------------------------------------------------------


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
