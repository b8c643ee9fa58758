"""The options of LongPPL, on commands that measure perplexity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.cli.console import print_note
from rope_ext_hf.cli.options import EvalOptions
from rope_ext_hf.errors import MethodError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
    from rope_ext_hf.runs.kinds import Run, RunPlan


@dataclass(frozen=True)
class KeyOptions:
    """What finds the key tokens, and with which short context."""

    PANEL: ClassVar[str] = "Text"

    keys_by: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|FILE",
            help="Measure LongPPL, too: the model that finds the key tokens, or the keys.json that such a run wrote.",
        ),
    ] = None
    key_window: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="The short context that key tokens are hard to predict with. Default: an eighth of the longest "
            "length, at most 4k.",
        ),
    ] = None

    @property
    def window(self) -> int | None:
        """--key-window in tokens.

        Raises:
            MethodError: it is given without --keys-by.
        """
        if self.key_window is None:
            return None
        if self.keys_by is None:
            raise MethodError("--key-window is the short context of what --keys-by names; give --keys-by, too")
        return parse_length(self.key_window)

    def mark(
        self,
        plan: RunPlan[PerplexityMeasurement],
        load: EvalOptions,
        find: Callable[[PreTrainedModel, str, RunPlan[Any]], Run[Any]],
        *,
        first: bool,
    ) -> RunPlan[PerplexityMeasurement]:
        """The plan with the key tokens of a file, or of a model, which finds them before the measured one is loaded.

        Args:
            plan: what is measured.
            load: how the model is loaded.
            find: runs a plan with the model of this name, which is on the meta device, too.
            first: whether this process is the one that prints and writes.
        """
        from rope_ext_hf.eval.key_token_runs import KEYS_FILE, keys_of_run, mark_keys, plan_keys
        from rope_ext_hf.eval.key_tokens import is_file, read_keys

        window, source = self.window, self.keys_by
        if source is None:
            return plan
        if is_file(source):
            return mark_keys(plan, read_keys(source, window))
        empty, tokenizer, read = load.empty_model(source), load.tokenizer(source), plan.measurement.plan
        of_keys = plan_keys(empty, read, tokenizer=tokenizer, data=plan.data, window=window, **load.reading)
        run = find(empty, source, of_keys)
        keys = keys_of_run(run, of_keys, write=first)
        if first:
            (found,) = run.results
            text = f"{found.keys:,} of {found.compared:,} tokens are key tokens: {found.setting}"
            print_note("keys", f"{text}. They are in {run.folder / KEYS_FILE}")
        return mark_keys(plan, keys)
