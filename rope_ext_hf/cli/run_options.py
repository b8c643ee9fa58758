"""Options that say which processes and which program read the text of a measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from rope_ext_hf.cli.console import print_note
from rope_ext_hf.cli.options import EvalOptions
from rope_ext_hf.errors import MethodError, short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.runs.kinds import RunPlan
    from rope_ext_hf.runs.workers import Workers


@dataclass(frozen=True)
class ProcessOptions:
    """The processes that share a measurement."""

    PANEL: ClassVar[str] = "Processes and engines"

    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop unless N processes were launched, by torchrun.")
    ] = None

    def launched(self, load: EvalOptions) -> tuple[Workers, EvalOptions]:
        """The processes, and how this one loads the model: on a device of its own."""
        import torch

        from rope_ext_hf.runs.workers import Workers

        workers = Workers.from_launcher(self.processes)
        if workers.count > 1 and load.device == "auto":
            own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
            load = replace(load, device=own)
        return workers, load

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> tuple[RunPlan[Any], Workers]:
        """The plan with what reads its text, and its processes; prints what is left out.

        Args:
            model: its name.
            empty: the model on the meta device.
        """
        return plan, workers


@dataclass(frozen=True)
class ReaderOptions(ProcessOptions):
    """The processes, and the engine that reads in place of transformers."""

    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="vllm: losses from vLLM in place of transformers, once both agree on the first span of each length.",
        ),
    ] = None

    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="context: all processes read every span together, each a part of it. Default: spans are dealt out.",
        ),
    ] = None

    def reading(
        self, plan: RunPlan[Any], model: str, empty: PreTrainedModel, load: EvalOptions, workers: Workers
    ) -> tuple[RunPlan[Any], Workers]:
        from rope_ext_hf.hub import is_adapter
        from rope_ext_hf.runs.context_parallel import spread_over
        from rope_ext_hf.servers.vllm_scorer import scored_by_engine

        left_out = None
        if self.parallel is not None:
            if self.parallel != "context" or self.engine is not None or load.device_map is not None:
                raise MethodError(
                    f"--parallel takes context, without --engine and --device-map; got {short(self.parallel)!r}"
                )
            plan, workers, left_out = spread_over(empty, plan, workers)
        elif self.engine is not None:
            if is_adapter(model, revision=load.revision):
                raise MethodError(
                    f"{short(model)!r} is an adapter, and --engine reads whole models: save the merged one "
                    "(merge_and_unload of PEFT) and give that folder, or leave out --engine"
                )
            alone = workers.count == 1 and load.device_map is None
            plan, left_out = scored_by_engine(self.engine, empty, plan, alone=alone, **load.version)
        if left_out is not None and workers.rank == 0:
            print_note("without", left_out)
        return plan, workers
