"""Suites of long-context tasks such as RULER, and a measurement of how much a model uses distant context.

from rope_ext_hf.tools.suites import Gain, Tasks, tasks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.tools.suites.evaluations import tasks as tasks
    from rope_ext_hf.tools.suites.gain_runs import ContextGain as ContextGain
    from rope_ext_hf.tools.suites.suite_options import Gain as Gain
    from rope_ext_hf.tools.suites.suite_options import Tasks as Tasks
    from rope_ext_hf.tools.suites.task_runs import TaskResult as TaskResult

__all__, __getattr__, __dir__ = lazy_names(__name__)
