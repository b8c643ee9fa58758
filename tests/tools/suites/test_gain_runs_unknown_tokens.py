"""Measurements of gain and of tasks warn of texts that a tokenizer does not know."""

from __future__ import annotations

import pytest

from rope_ext_hf.tools.suites import Gain, Tasks
from tests.reading.text.test_unknown_tokens import DROPPED, FOREIGN, letters
from tests.support.models import build


@pytest.mark.filterwarnings("ignore:nltk's model of English sentences:UserWarning")
def test_gain_and_tasks_warn() -> None:
    model, tokenizer = build("llama", vocab_size=512), letters()
    rows = [
        {
            "context": f"{FOREIGN}{fruit} is ripe. ",
            "evidence": f"{fruit} is ripe",
            "question": f"{fruit}?",
            "answer": "yes",
        }
        for fruit in ("fig", "plum", "pear")
    ]
    with pytest.warns(UserWarning, match=DROPPED):
        Gain(lengths=[256], samples=1, data=rows).plan(model, tokenizer=tokenizer)
    tasks = Tasks(suite="ruler", tasks="niah_single_2", lengths=[1024], samples=1, haystack=[FOREIGN * 100])
    with pytest.warns(UserWarning, match=DROPPED):
        tasks.plan(model, tokenizer=tokenizer)
