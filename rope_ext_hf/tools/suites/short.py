"""A guard for short inputs: multiple-choice questions, as lm-evaluation-harness asks them, in a suite of tasks.

A method must not lose here what it gains at length. The questions are data sets of the Hugging Face Hub; they are read
from the cache of `datasets`, and nothing is downloaded. There are no worked examples, and the right answer should have
the highest likelihood per token among a question's choices, which is neither acc nor acc_norm of lm-eval.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CorpusError, one_line
from rope_ext_hf.installing import install_command
from rope_ext_hf.reading.temporary_attributes import set_to
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, TooShortError, register_suite

DATA_SETS: dict[str, tuple[str, str, str | None]] = {
    "arc_easy": ("arc/arc_easy.yaml", "allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("arc/arc_challenge.yaml", "allenai/ai2_arc", "ARC-Challenge"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "Rowan/hellaswag", None),
    "mmlu_miscellaneous": ("mmlu/default/mmlu_miscellaneous.yaml", "cais/mmlu", "miscellaneous"),
    "piqa": ("piqa/piqa.yaml", "baber/piqa", None),
}
"""By task: its file among lm-eval's, its data set, and which part of it."""


@register_suite
class Short(Suite):
    """Questions that any model of its length reads whole; only ranked."""

    name = "short"
    tasks = tuple(DATA_SETS)
    score_by = "rank"

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        questions = _questions(task)
        docs = list(questions.eval_docs)
        random.Random(f"{task} {wanted.seed}").shuffle(docs)
        made: list[Sample] = []
        too_long: list[int] = []
        for doc in docs:
            if len(made) == wanted.count:
                return made
            prompt = questions.fewshot_context(doc, num_fewshot=0)
            requests = questions.construct_requests(doc, prompt)
            choices = [request.arguments[1].strip() for request in requests]
            right = choices[int(questions.doc_to_target(doc))]
            wrong = tuple(choice for choice in dict.fromkeys(choices) if choice != right)
            longest = max(wanted.tokens(choice) for choice in choices)
            length = wanted.tokens(prompt) + longest + 1
            if length > wanted.room:
                too_long.append(length)
            elif wrong:
                made.append(Sample(prompt, "", (right,), longest, length, wrong, closed=True))
        if missing := wanted.count - len(made):
            few = f"only {len(made):,} of {len(docs):,} questions of {task!r} have at most {wanted.room:,} tokens"
            need = wanted.reserved + sorted(too_long)[missing - 1] if missing <= len(too_long) else None
            raise TooShortError(task, wanted.length, need, f"{few}; fewer samples need less")
        return made


def _questions(task: str) -> Any:
    """The task of lm-eval, with its data from the cache; CorpusError: they are not there."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(f"the suite short needs lm-eval ({error}): {install_command('eval')}") from error
    import datasets.config
    import huggingface_hub.constants as of_hub

    file, path, part = DATA_SETS[task]
    with set_to(datasets.config, HF_HUB_OFFLINE=True), set_to(of_hub, HF_HUB_OFFLINE=True):  # nothing is fetched
        try:
            manager = TaskManager(include_defaults=False)
            (found,) = manager.load([str(Path(lm_eval.__file__).parent / "tasks" / file)])["tasks"].values()
        except Exception as error:  # datasets raises anything on data that are not there
            arguments = repr(path) if part is None else f"{path!r}, {part!r}"
            raise CorpusError(
                f"the questions of {task!r} are not in the cache of datasets ({one_line(error)}); fetch them once with "
                f'`python -c "from datasets import load_dataset; load_dataset({arguments})"`, or choose others with '
                "--tasks"
            ) from error
    return found
