"""Multiple-choice questions of ordinary length, to see whether a method harms short inputs.

The prompts are those of lm-evaluation-harness, without worked examples. A question counts as answered if the right
choice has the highest likelihood per token, which is neither `acc` nor `acc_norm` of lm-eval. The questions are data
sets of the Hugging Face Hub; they are read from the cache of `datasets`, and nothing is downloaded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CorpusError, one_line
from rope_ext_hf.installing import install_command
from rope_ext_hf.models.temporary import set_to
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, TooShortError, register_suite

DATA_SETS: dict[str, tuple[str, str, str | None]] = {
    "arc_easy": ("arc/arc_easy.yaml", "allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("arc/arc_challenge.yaml", "allenai/ai2_arc", "ARC-Challenge"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "Rowan/hellaswag", None),
    "mmlu_miscellaneous": ("mmlu/default/mmlu_miscellaneous.yaml", "cais/mmlu", "miscellaneous"),
    "piqa": ("piqa/piqa.yaml", "baber/piqa", None),
}
"""By task: its file among lm-eval's tasks, its data set on the Hub, and the configuration of the data set."""


@register_suite
class Short(Suite):
    """A suite of short multiple-choice questions, whose choices are ranked by likelihood; no answer is generated."""

    name = "short"
    tasks = tuple(DATA_SETS)
    score_by = "rank"

    def make(self, task: str, settings: PromptSettings) -> list[Sample]:
        questions = _questions(task)
        docs = list(questions.eval_docs)
        random.Random(f"{task} {settings.seed}").shuffle(docs)
        samples: list[Sample] = []
        too_long: list[int] = []  # lengths of the questions that do not fit, in tokens
        for doc in docs:
            if len(samples) == settings.count:
                return samples
            prompt = questions.fewshot_context(doc, num_fewshot=0)
            requests = questions.construct_requests(doc, prompt)
            choices = [request.arguments[1].strip() for request in requests]
            right = choices[int(questions.doc_to_target(doc))]
            wrong = tuple(choice for choice in dict.fromkeys(choices) if choice != right)
            longest = max(settings.tokens(choice) for choice in choices)
            length = settings.tokens(prompt) + longest + 1
            if length > settings.room:
                too_long.append(length)
            elif wrong:
                samples.append(Sample(prompt, "", (right,), longest, length, wrong, closed=True))
        missing = settings.count - len(samples)
        if missing:
            need = settings.reserved + sorted(too_long)[missing - 1] if missing <= len(too_long) else None
            raise TooShortError(
                task,
                settings.length,
                need,
                f"only {len(samples):,} of {len(docs):,} questions of {task!r} have at most {settings.room:,} tokens; "
                "a smaller --samples may fit",
            )
        return samples


def _questions(task: str) -> Any:
    """Return lm-eval's task with this name, with its questions from the cache of `datasets`.

    Raises:
        CorpusError: the questions are not in the cache.
        ImportError: lm-eval is not installed.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(f"the suite short needs lm-eval ({error}): {install_command('eval')}") from error
    import datasets.config
    import huggingface_hub.constants

    file, path, part = DATA_SETS[task]
    with set_to(datasets.config, HF_HUB_OFFLINE=True), set_to(huggingface_hub.constants, HF_HUB_OFFLINE=True):
        try:
            manager = TaskManager(include_defaults=False)
            (loaded,) = manager.load([str(Path(lm_eval.__file__).parent / "tasks" / file)])["tasks"].values()
        except Exception as error:  # datasets raises errors of many classes where data are not in its cache
            arguments = repr(path) if part is None else f"{path!r}, {part!r}"
            raise CorpusError(
                f"the questions of {task!r} are not in the cache of datasets ({one_line(error)}); download them once "
                f'with `python -c "from datasets import load_dataset; load_dataset({arguments})"`, or choose other '
                "tasks with --tasks"
            ) from error
    return loaded
