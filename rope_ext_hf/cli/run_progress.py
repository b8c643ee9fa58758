"""The progress of runs in the terminal: a bar with the time left, and notes on how the text is read."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.cli.console import print_note, progress_bar
from rope_ext_hf.cli.planned_runs import pass_seconds, speed_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.patches.model_rope import ModelRope
    from rope_ext_hf.runs.measurement import Listener, RunPlan
    from rope_ext_hf.runs.workers import Workers


def shown_progress(workers: Workers | None = None) -> Listener:
    """Return a listener that shows the progress of runs on standard error, with a bar and the time left.

    If several processes share a run, only the first one shows it.
    """
    # torch is imported with the base class, so that the class cannot stand at the top of this module
    from rope_ext_hf.reading.cost.memory import estimate_memory, estimate_whole_memory
    from rope_ext_hf.reading.scorer import TokenScorer
    from rope_ext_hf.runs.measurement import Listener
    from rope_ext_hf.runs.workers import Workers

    processes = workers or Workers()
    first = processes.rank == 0

    class ShownProgress(Listener):
        closing = ExitStack()

        def planned(self, model: PreTrainedModel, plan: RunPlan[Any], rope: ModelRope) -> None:
            self.bar = self.closing.enter_context(progress_bar("unpatched", show=first))
            self.model, self.plan, self.passes = model, plan, plan.passes(rope)
            speed = speed_for(model, plan, model.device, model.dtype)
            self.work = cache(partial(pass_seconds, model, plan.measurement, speed))
            self.bar.left.total = self.work(*self.passes) / processes.count
            self.bar.left.largest = self.work(max(self.passes, default=0))
            self.bar.left.count = len(self.passes) / processes.count

        def started(self, folder: Path, done: int, units: int) -> None:
            remaining = 1 - done / max(1, units)  # there may be no unit for this process
            self.bar.left.total *= remaining
            self.bar.left.count *= remaining
            if first:
                self.bar.set_total(round(sum(self.passes) / processes.count))
                print_note("run", f"{folder}{f' ({done} of {units} parts were done before)' if done else ''}")

        def reading(self, scorer: Any) -> None:
            if first:
                in_the_library = isinstance(scorer, TokenScorer) and self.passes
                losses_alone = self.plan.measurement.by_layer and not self.plan.measurement.takes_outputs
                if in_the_library and losses_alone and scorer.reads_at_once(max(self.passes)):
                    print_note("read", "each text at once")
                else:
                    print_note("read", scorer.reading)
                    if in_the_library:
                        self.needed_after_all(scorer)
                self.bar.left.begin()

        def needed_after_all(self, scorer: TokenScorer) -> None:
            """Print the memory that is needed, if the model cannot be read in the way that was planned."""
            longest, measurement = max(self.passes), self.plan.measurement
            if not scorer.chunked:
                scored = measurement.scored // max(1, len(measurement.passes))
                needed, because = estimate_whole_memory(self.model, longest, scored), "texts are read whole"
            elif measurement.by_layer and not scorer.by_layer:
                needed = estimate_memory(self.model, longest, offload_cache=self.plan.offload_cache)
                because = "this model is not read layer by layer"
            else:
                return
            if not needed.is_ample(self.model.device):
                print_note("needs", f"{needed}, because {because}")

        def passed(self, method: str, tokens: int) -> None:
            timed = "engine" not in self.plan.reader  # an engine starts within the first pass of each method
            self.bar.advance(method, tokens, self.work(tokens) if timed else 0.0)

        def close(self) -> None:
            self.closing.close()

    return ShownProgress()
