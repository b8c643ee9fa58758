"""The task suites as tasks for lm-evaluation-harness, named `rope_ruler`, `rope_ruler_vt`, `rope_graphwalks` and so on.

    rope-ext lm-eval DIR --method yarn --factor 4 --tasks rope_ruler

lm-eval finds tasks in folders of YAML files. `write_tasks` writes such a folder, with a file for every suite and every
task; it must exist as long as lm-eval runs. The prompts are those of `rope-ext tasks`, made from a seed and a text
without a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.files.whole import disk_errors, write_text
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import text_of, warn_of_unknown
from rope_ext_hf.tools.suites.base import list_suites, suite
from rope_ext_hf.tools.suites.task_prompts import template_tokens

_SAMPLES = 20  # prompts per task, the default of `rope-ext tasks`
_CLASS = f"!function {__name__}.SuiteTask"


def write_tasks(folder: str | Path) -> Path:
    """Write a YAML file for each suite and each task into a folder, for lm-eval's `--include_path`.

    The folder is returned. Older files of the same names are replaced.
    """
    folder = Path(folder)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, task_suite in list_suites().items():
        prefix = f"rope_{name.replace('-', '_')}"
        tasks = {f"{prefix}_{task}": task for task in task_suite.tasks}
        for title, task in tasks.items():
            text = f"task: {title}\nclass: {_CLASS}\nmetadata: {{suite: {name}, suite_task: {task}}}\n"
            write_text(folder / f"{title}.yaml", text)
        mean_over_tasks = "aggregate_metric_list: [{metric: score, weight_by_size: false}]"
        text = f"group: {prefix}\ntask: [{', '.join(tasks)}]\n{mean_over_tasks}\nmetadata: {{version: 1}}\n"
        write_text(folder / f"{prefix}.yaml", text)
    return folder


class SuiteTask(ConfigurableTask):  # type: ignore[misc]
    """A task of a suite, at one context length, as a task for lm-eval.

    Its settings come from lm-eval's `--metadata` and `--model_args`: `max_seq_lengths` (a list with one length, in
    tokens of prompt and generation together), `tokenizer` or `pretrained`, and `samples`, `seed` and `haystack` as in
    `rope-ext tasks`. If the tokenizer has a chat template, its tokens are subtracted from the length; give
    `--apply_chat_template` then, so that lm-eval applies it.
    """

    def __init__(self, config: Mapping[str, Any], **_: Any) -> None:
        settings = dict(config["metadata"])
        self._suite = suite(settings["suite"])
        super().__init__(
            config={
                "task": config["task"],
                "custom_dataset": self._make,
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "prompt",
                "doc_to_target": "references",
                "gen_prefix": "{{prefix}}",
                "target_delimiter": "",
                "process_results": self._score,
                "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
                "generation_kwargs": {"do_sample": False, "until": []},
                "metadata": settings | {"version": 1},
            }
        )

    def _make(self, **settings: Any) -> dict[str, Dataset]:
        """Make the task's prompts from the settings in lm-eval's metadata, as the only split of a data set."""
        lengths = settings.get("max_seq_lengths")
        source = settings.get("tokenizer") or settings.get("pretrained")
        if not isinstance(lengths, list) or len(lengths) != 1:
            raise MethodError(
                "the tasks rope_... are measured at one length, given as a list: "
                f"""--metadata '{{"max_seq_lengths": [16384]}}'. Got {short(repr(lengths))}. """
                "For several lengths use `rope-ext tasks`"
            )
        if not isinstance(source, str) or not source:
            raise MethodError(
                "no tokenizer is named to count the tokens of prompts; "
                """give it in --metadata, such as '{"tokenizer": "DIR"}'"""
            )
        tokenizer = load_tokenizer(source)
        haystack = load(settings.get("haystack", "stdlib"))
        warn_of_unknown(haystack, tokenizer)
        samples = self._suite.samples(
            settings["suite_task"],
            tokenizer,
            length=int(lengths[0]),
            count=int(settings.get("samples", _SAMPLES)),
            seed=int(settings.get("seed", self._suite.seed)),
            haystack=text_of(haystack, tokenizer),
            reserved=template_tokens(tokenizer),
        )
        return {"test": Dataset.from_list(list(map(asdict, samples)))}

    def _score(self, doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
        return {"score": self._suite.score(results[0], doc["references"], doc["others"])}

    def construct_requests(self, doc: Mapping[str, Any], ctx: Any, **options: Any) -> Instance:
        """Build lm-eval's request for one prompt, which may generate as many tokens as this prompt needs.

        lm-eval itself has one number of tokens for all prompts of a task.
        """
        request: Instance = super().construct_requests(doc, ctx, **options)
        context, generation = request.arguments
        request.arguments = (context, generation | {"max_gen_toks": doc["budget"]})
        return request
