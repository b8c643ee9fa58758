"""Measurements that are planned and not begun: the memory, time and disk space that they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.cli.console import print_note
from rope_ext_hf.cli.options import EvalOptions
from rope_ext_hf.errors import CorpusError, count_text, duration, size_text
from rope_ext_hf.eval.measurement_options import MeasurementOptions, Passkey, Perplexity
from rope_ext_hf.options.arguments import option_words
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.text.documents import Document, Documents, Tokens
from rope_ext_hf.reading.text.load import load

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rope_ext_hf.reading.cost.forecast import Forecast
    from rope_ext_hf.reading.cost.memory import MemoryEstimate
    from rope_ext_hf.reading.cost.operations import ReadingSpeed
    from rope_ext_hf.runs.measurement import Measurement, RunPlan
    from rope_ext_hf.runs.workers import Workers


@dataclass(frozen=True)
class PlannedRun:
    """A measurement that is planned on a model without its weights.

    Attributes:
        name: the model, as the command line has it.
        empty: the model, without its weights.
        load: the options for loading it.
        plan: the plan of the measurement.
        workers: the processes that share the run; the first one prints.
        options: the options of the measurement, which may be changed to take less time; None: there are none.
    """

    name: str
    empty: PreTrainedModel
    load: EvalOptions
    plan: RunPlan[Any]
    workers: Workers
    options: MeasurementOptions | None = None

    @cached_property
    def device(self) -> torch.device:
        """The device that reads."""
        from rope_ext_hf.hub import find_device

        return find_device(self.load.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the model once it is loaded."""
        from rope_ext_hf.hub import loaded_dtype

        return loaded_dtype(self.empty, self.load.dtype)

    def memory(self, *, check: bool = True) -> MemoryEstimate:
        """Return the memory that the measurement needs.

        `check`: whether to raise an error if less is free.
        """
        from rope_ext_hf.runs.preflight import run_memory

        spread = self.load.device_map is not None
        return run_memory(self.name, self.empty, self.plan, self.dtype, self.device, spread=spread, check=check)

    def loaded(self, needed: MemoryEstimate) -> PreTrainedModel:
        """Return the model with its weights; those that do not fit the device wait in main memory or on disk.

        `needed` is the result of `memory`.
        """
        from rope_ext_hf.reading.cost.memory import weight_places

        return self.load.model(self.name, weight_places(self.empty, needed, self.dtype, self.device))

    def print_needs(self, needed: MemoryEstimate, out: Path | None = None) -> None:
        """Print the memory and time that the measurement needs.

        Args:
            needed: the memory.
            out: the folder for results; given where anything besides results is written there.
        """
        from rope_ext_hf.reading.cost.forecast import free_bytes

        seconds, moving = self._seconds, self._moving_seconds(needed)
        if self.workers.rank != 0:
            return
        if not needed.is_ample(self.device):
            print_note("needs", f"{needed}{f'; moving them takes about {duration(moving)}' if moving else ''}")
        passes = self.plan.measurement.passes
        all_passes = sum(self._passes)
        if all_passes == max(1, len(self.plan.methods)) * sum(passes):
            tokens = f"{count_text(sum(passes))} tokens{_readers_clause(self.plan)}"
        else:  # some methods need fewer passes
            tokens = f"{count_text(all_passes)} tokens in all"
        print_note("reads", f"{tokens}: about {duration(seconds + moving)}")
        if out is not None and self._stored_bytes:
            free = size_text(free_bytes(out))
            print_note("writes", f"{size_text(self._stored_bytes)} of hidden states into {out}, where {free} are free")
        if faster := self._faster:
            print_note("faster", faster)
        if too_short := getattr(self.plan.measurement.setting, "left_out", 0):
            are = "document is" if too_short == 1 else "documents are"
            print_note("without", f"{too_short} {are} too short and left out")
        if most_spans := getattr(self.options, "max_spans", None):
            print_note("spans", f"at most {most_spans} per length; --max-spans all reads the whole text")

    def forecast(self, needed: MemoryEstimate, out: Path) -> Forecast:
        """Return the time, memory and disk space that the measurement would take.

        The arguments are those of `print_needs`.
        """
        import torch

        from rope_ext_hf.reading.cost.forecast import Forecast
        from rope_ext_hf.reading.cost.memory import estimate_memory
        from rope_ext_hf.runs.conclusions.labels import label

        plan = self.plan
        longest, gpu = max(plan.measurement.passes), torch.device("cuda")
        how: dict[str, Any] = {"offload_cache": plan.offload_cache, "by_layer": plan.measurement.by_layer}
        how["further_weights"] = plan.measurement.weight_bytes
        methods = [label(method.to_dict() if method else None) for method in plan.methods] or ["unpatched"]
        lengths = sorted({int(cell[0]) for cell in plan.measurement.contents.counts})
        at = ", ".join(f"{length:,}" for length in lengths)
        return Forecast(
            does=(f"measure {plan.measurement.kind} of {plan.data} at {at} tokens: {', '.join(methods)}",),
            tokens=sum(self._passes),
            seconds=self._seconds + self._moving_seconds(needed),
            device=self.device,
            memory=needed,
            gpu=estimate_memory(self.empty, longest, self.dtype, device=gpu, **how),
            disk=self._stored_bytes,
            folder=str(out),
            faster=self._faster,
        )

    @cached_property
    def _passes(self) -> list[int]:
        """For each pass of the measurement, with all of its methods, the number of tokens."""
        from rope_ext_hf.patches.model_rope import ModelRope

        return self.plan.passes(ModelRope.of_model(self.empty).extending(self.plan.over, self.plan.context_length))

    @cached_property
    def _seconds(self) -> float:
        """The seconds that the measurement takes."""
        return self._seconds_in(self.load.dtype)

    def _seconds_in(self, dtype: str) -> float:
        """Estimate the seconds that the measurement takes in a dtype, from the measured speed of the device."""
        from rope_ext_hf.hub import loaded_dtype

        speed = speed_for(self.empty, self.plan, self.device, loaded_dtype(self.empty, dtype))
        return pass_seconds(self.empty, self.plan.measurement, speed, *self._passes) / self.workers.count

    def _moving_seconds(self, needed: MemoryEstimate) -> float:
        """Estimate the seconds of moving hidden states to their waiting place and back, from measured speeds."""
        from rope_ext_hf.reading.cost.operations import moving_seconds

        longest = max(self.plan.measurement.passes)
        seconds = moving_seconds(self.empty, self._passes, longest, needed, self.device)
        return seconds / self.workers.count

    @cached_property
    def _stored_bytes(self) -> int:
        """The bytes that the measurement writes besides results."""
        size: int = self.plan.measurement.stored_bytes(self.empty, self.dtype, max(1, len(self.plan.methods)))
        return size

    @cached_property
    def _faster(self) -> str:
        """Options with which the measurement takes minutes, and how long it takes then; empty if it does already.

        They are fewer spans of text or prompts, and float32 where the CPU is at least twice as fast in it.
        """
        from rope_ext_hf.reading.cost.operations import MINUTES

        options, seconds = self.options, self._seconds
        option = "trials" if isinstance(options, Passkey) else "max_spans"
        if seconds <= MINUTES or not hasattr(options, option):
            return ""
        changed: dict[str, Any] = {}
        if self.device.type == "cpu":
            in_float32 = self._seconds_in("float32")
            if in_float32 < seconds / 2:
                changed["dtype"], seconds = "float32", in_float32
        spans = isinstance(options, Perplexity)
        per_cell = self.plan.measurement.plan.most_spans if spans else getattr(options, option)
        count = min(per_cell, max(1, int(per_cell * MINUTES / seconds)))
        if count < per_cell:
            changed[option] = count
        least = seconds * count / per_cell
        advice = "; shorter --lengths or a GPU take less" if least > 2 * MINUTES else ""
        if not changed:
            return advice.removeprefix("; ")
        return f"with {option_words(**changed)} about {duration(least)}{advice}"


def speed_for(model: PreTrainedModel, plan: RunPlan[Any], device: torch.device, dtype: torch.dtype) -> ReadingSpeed:
    """Return the measured speed of a device at the passes of a plan."""
    from rope_ext_hf.reading.cost.operations import measure_speed

    return measure_speed(model, device, dtype, few_tokens=plan.measurement.short_passes > 0)


def pass_seconds(model: PreTrainedModel, measurement: Measurement, speed: ReadingSpeed, *passes: int) -> float:
    """Estimate the seconds that passes through a model take, with the answers that follow each pass.

    `passes` are the numbers of tokens of the passes.
    """
    scored = measurement.scored * len(passes) // len(measurement.passes)
    return speed.seconds(model, passes, scored, measurement.short_passes * len(passes))


def _readers_clause(plan: RunPlan[Any]) -> str:
    """Return a clause on how often the text is read: ", unpatched and patched", or ", with each of 3 methods"."""
    patched = sum(method is not None for method in plan.methods)
    unpatched = ", unpatched" if None in plan.methods else ""
    if not patched:
        return unpatched
    with_methods = "patched" if patched == 1 else f"with each of {patched} methods"
    return f"{unpatched} and {with_methods}" if unpatched else f", {with_methods}"


# --- forecasts of runs that are only planned ----------------------------------------------------------------------


_CHARACTERS = 8  # for each token at first: about twice as many as most tokens have


def forecast_plan(
    options: MeasurementOptions,
    model: PreTrainedModel,
    methods: MethodChoice | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> RunPlan[Any]:
    """Return a plan with passes as long and as many as those of `options.plan`, which takes the same arguments.

    If the options limit the number of spans, only the beginnings of documents are tokenised, as far as they have that
    many spans; a run itself spreads its spans over the whole text. The text around statements is shortened as well.
    """

    def plan(shortened: MeasurementOptions) -> RunPlan[Any]:
        return shortened.plan(model, methods, tokenizer=tokenizer, **settings)

    if isinstance(options, Passkey) and options.haystack is not None:
        haystack = load(options.haystack)
        characters = _CHARACTERS * max(options.lengths)
        return plan(replace(options, haystack=_beginnings(haystack, characters, characters)))
    if not isinstance(options, Perplexity) or options.max_spans is None or options.keys_by is not None:
        return plan(options)
    documents = load(options.data)
    each = _CHARACTERS * max(options.lengths)
    whole = sum(map(_size, documents))
    while (total := each * (options.max_spans + 1)) < whole:
        try:
            made = plan(replace(options, data=_beginnings(documents, each, total)))
        except CorpusError:  # these beginnings are too short, or the text is
            each *= 4
            continue
        spans = Counter(span.length for _, spans in made.measurement.plan.documents for span in spans)
        if min(spans.values()) >= options.max_spans:
            return made
        each *= 4
    return plan(replace(options, data=documents))


def _size(document: Document | Tokens) -> int:
    return len(document.text) if document.ids is None else len(document.ids)


def _beginnings(documents: Documents, each: int, total: int) -> Documents:
    """Return the first `each` characters or token ids of the first documents, about `total` altogether."""
    shortened = Documents()
    shortened.source = documents.source
    for document in documents:
        if isinstance(document, Tokens):
            shortened.append(Tokens(document.name, document.ids[:each], document.ends[:each], document.text))
        else:
            ids = None if document.ids is None else document.ids[:each]
            shortened.append(Document(document.name, document.text[:each], ids))
        total -= _size(shortened[-1])
        if total <= 0:
            break
    return shortened
