"""Reading of texts by a serving engine in place of transformers, for `rope-ext ppl --engine NAME`.

This module holds what all engines have in common. Each engine is a `ReadingEngine` in a file of its own, and joins by
an entry point of the group `rope_ext_hf.readers`:

    class MyEngine(ReadingEngine): ...
    read_by_my_engine = partial(read_by_engine, MyEngine)

An engine is started for each method, with the overrides that `rope-ext serve-config` prints. Before it scores anything,
it reads the first text ("span") of each length, and its losses are compared with those of the patched model in
transformers. Then it gets many texts at once, of all lengths, and batches them itself.
"""

from __future__ import annotations

import gc
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError, ServingError, one_line
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.cost.memory import GPU_WORKING_BYTES
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.tools.engines.overrides import OverridingEngine
from rope_ext_hf.tools.serving.configs import open_model, serving_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
    from rope_ext_hf.reading.spans import EvalPlan
    from rope_ext_hf.tools.engines.serving_config import ServingConfig

_EQUAL = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The root mean square difference of losses, in nats per token, up to which an engine counts as computing the same.

With the bundled model in vLLM, rounding makes differences of 1e-6, 0.003 and 0.03. yarn x4.5 in place of x4 makes a
difference of 0.08 at 256 tokens and of 0.27 at 1,024.
"""
_STEP = 4096  # tokens per step of an engine: more make prefill hardly faster, and need more memory for activations
_STEPS_TOGETHER = 16  # the last of the steps in which texts are read together is half empty on average: 3% of them
_MOST_TEXTS = 256  # as vLLM by default: each takes memory for the logits of the token that follows it
_LOGIT_BYTES = 12  # for each logit of a step: itself in float32, and two copies while the log-softmax is computed
_MODULES = (__name__, "rope_ext_hf.tools.serving.configs")
"""The modules that configure every engine and read its answers."""
_Configs = Mapping[RopeMethod | None, "ServingConfig"]


@dataclass(frozen=True)
class EngineSettings:
    """The settings with which an engine is started.

    Attributes:
        model: the folder or Hub id of the model.
        config: the command and the overrides of config.json with which the engine computes the method.
        dtype: the dtype of weights and activations, such as "bfloat16".
        shortest, longest: the lengths of the texts that it will read, in tokens.
        step: the most tokens that it computes at once, of one text or of several.
        logit_rows: the most tokens whose logits it should hold at once, where this is another number than `step`.
        gpus: the number of GPUs that share the model.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
    """

    model: str
    config: ServingConfig
    dtype: str
    shortest: int
    longest: int
    step: int
    logit_rows: int
    gpus: int = 1
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def texts_in_step(self) -> int:
        """The most texts of which a step computes tokens: the shortest ones, and one that was begun before."""
        return min(_MOST_TEXTS, self.step // self.shortest + 1)


class ReadingEngine(ABC):
    """An engine that is running, and that returns log-probabilities of the tokens of its prompts.

    Attributes:
        rules: the rules by which the engine computes RoPE; they have its name and title.
        packages: the packages that provide it, for the message where it is not installed.
        environment: variables that are set before the engine is imported, unless the user has set them.
        logits_of_step: whether it makes the logits of all tokens of a step at once, so that the steps are made shorter
            for a large vocabulary.
    """

    rules: ClassVar[type[OverridingEngine]]
    packages: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = {}
    logits_of_step: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Import the engine and return its version; raise ImportError if it is not installed."""

    @abstractmethod
    def __init__(self, settings: EngineSettings) -> None:
        """Start the engine; raise any error if it does not start."""

    @abstractmethod
    def log_probabilities(self, texts: Sequence[tuple[list[int], int]]) -> list[Sequence[float]]:
        """Return the log-probabilities of the last tokens of texts, in nats, in the order of the texts.

        Args:
            texts: the token ids of each text, and the position of its first token that is scored, at least 1.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the engine and its processes, and free their memory."""


def read_by_engine(
    engine: type[ReadingEngine],
    empty: PreTrainedModel,
    plan: RunPlan[Any],
    *,
    alone: bool,
    gpus: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[RunPlan[Any], str | None]:
    """Return the plan of a perplexity run changed so that an engine reads the text; no weights are read.

    Args:
        engine: the engine.
        empty: the model on the meta device, as its folder describes it.
        plan: the plan for transformers.
        alone: whether one process measures, on one device.
        gpus: the number of GPUs that share the model in the engine.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Returns:
        The plan, and the reason why it leaves out the unpatched model; None if it does not.

    Raises:
        MethodError: several processes or devices measure.
        ServingError: the engine is not installed, or cannot run a method at all lengths of the plan.
    """
    name = engine.rules.name
    if not alone:
        raise MethodError(f"--engine {name} runs from one process, without --device-map; it starts its own processes")
    for variable, value in engine.environment.items():
        os.environ.setdefault(variable, value)
    try:
        version = engine.version()
    except ImportError as error:
        raise ServingError(
            f"--engine {name} needs {engine.rules.title} in this environment ({one_line(error)}): install "
            f"{engine.packages}, then this package: {install_command()}"
        ) from error
    configs = dict[RopeMethod | None, "ServingConfig"]()
    left_out = None
    methods = plan.methods or (None,)
    for method in methods:
        try:
            configs[method] = _config(engine.rules, empty, method, plan)
        except ServingError as error:
            if method is not None or len(methods) == 1:
                raise
            left_out = f"the unpatched model: {error}"
    source = {
        "model": open_model(empty).name,
        "gpus": gpus,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    scorer = partial(EngineScorer, engine=engine, measurement=plan.measurement, configs=configs, source=source)
    reader = {"engine": f"{name} {version}"}
    modules = (*_MODULES, engine.__module__, engine.rules.__module__)
    return replace(plan, methods=tuple(configs), scorer=scorer, reader=reader, reader_modules=modules), left_out


def _config(
    rules: type[OverridingEngine], empty: PreTrainedModel, method: RopeMethod | None, plan: RunPlan[Any]
) -> ServingConfig:
    """Return the serving config with which an engine runs a method at all lengths of a plan.

    It uses the engine's own rope types if they are enough, else this package's plug-in.
    """
    lengths = [int(cell[0]) for cell in plan.measurement.contents.counts]
    longest = max(plan.measurement.passes)
    base: dict[str, Any] = {"over": plan.over, "context_length": plan.context_length}
    settings: list[dict[str, Any]] = [base | {"method": method}]
    if method is None:
        # the engine may lack nothing but a table of angles that reaches the longest length: "default" gives one
        settings = [{}, {"method": "default", "target_length": longest}]
    config, last_error = None, None
    for method_settings, plugin in product(settings, (False, True)):
        try:
            config = serving_config(empty, rules.name, plugin=plugin, **method_settings)
        except ServingError as error:
            last_error = error
            continue
        if config.length >= longest:
            if open_model(empty).name not in config.command:
                raise ServingError(f"{rules.title} cannot read {_name(method)} from this folder. {config.notes[-1]}")
            _check_lengths(rules, empty, method, lengths, base)
            return config
    if config is None:
        assert last_error is not None
        raise last_error
    raise ServingError(
        f"{rules.title} would serve {config.length:,} tokens with {_name(method)}, and the longest length is "
        f"{longest:,}; give --target-length {longest}, or shorter lengths"
    )


def _check_lengths(
    rules: type[OverridingEngine],
    empty: PreTrainedModel,
    method: RopeMethod | None,
    lengths: list[int],
    base: dict[str, Any],
) -> None:
    """Raise ServingError if the frequencies of a method are not the same at all of these lengths."""
    if method is None:
        ropes = [
            (rope.method, rope.plain) for slot in ModelRope.of_model(empty).slots for rope in slot.as_loaded.values()
        ]
    else:
        ropes = [(method, ModelRope.of_model(empty).extending(**base).rotary)]
    for rope_method, rotary in ropes:
        first, *others = (rope_method.frequencies(rotary, length).inv_freq for length in lengths)
        if not all(torch.equal(other, first) for other in others):
            raise ServingError(
                f"{_name(method)} has other frequencies for inputs of {min(lengths):,} tokens than for "
                f"{max(lengths):,}, and {rules.title} uses one set for all inputs; measure each of these lengths in a "
                "run of its own"
            )


def _name(method: RopeMethod | None) -> str:
    return label(None if method is None else method.to_dict())


class EngineScorer:
    """A scorer that computes losses with an engine, in place of `TokenScorer`, under the model's present patch.

    The losses of the model in transformers are compared with the engine's on the first text ("span") of each length. On
    a GPU, the model is kept in main memory while an engine runs.

    Args:
        model: the model, patched or not; it may be patched and unpatched later.
        chunk: the most tokens that the engine computes at once; None: 4,096, or fewer for a large vocabulary if the
            engine makes the logits of all of them at once.
        offload_cache: refused, since engines have no such option.
        longest: the length of the longest text, in tokens.
        engine: the engine.
        measurement: what is measured; it has the texts of the comparison.
        configs: the config of the engine for each method; None is the model as loaded.
        source: further settings of the engine: `model`, `gpus`, `revision` and `trust_remote_code` of
            `EngineSettings`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int | None,
        offload_cache: bool,
        longest: int,
        engine: type[ReadingEngine],
        measurement: PerplexityMeasurement,
        configs: _Configs,
        source: Mapping[str, Any],
    ) -> None:
        if offload_cache:
            raise MethodError(f"{engine.rules.title} keeps keys and values itself; leave out --offload-cache")
        self.model, self.longest, self.configs, self.source = model, longest, configs, source
        self.device, self.loaded = model.device, active_patches(model)
        self.engine, self.title = engine, engine.rules.title
        self.shortest = min(measurement.passes)
        self.head_bytes = GPU_WORKING_BYTES
        self.chunk = chunk or (min(_STEP, self.logit_rows) if engine.logits_of_step else _STEP)
        self.spans = _first_spans(measurement.plan)
        self.running: Any = None  # the patches that the running engine has
        self.process: ReadingEngine | None = None
        self.cost = Cost()

    @property
    def logit_rows(self) -> int:
        """The number of tokens, a power of two, whose logits fit into the memory for logits."""
        vocabulary = vocabulary_size(self.model)
        return 1 << max(0, (self.head_bytes // (_LOGIT_BYTES * vocabulary)).bit_length() - 1)

    @property
    def reading(self) -> str:
        """The way in which texts are read: "by vLLM in steps of 4,096 tokens"."""
        return f"by {self.title} in steps of {self.chunk:,} tokens"

    @property
    def depends_on_total_length(self) -> bool:
        """False: engines compute a token alike whatever follows it, so that a longer text scores shorter ones too."""
        return False

    @property
    def unpatched(self) -> bool:
        """True if the engine runs the model as it was loaded."""
        return not active_patches(self.model)

    @property
    def tokens_together(self) -> int:
        """The number of tokens in texts that `losses_together` had better be given at once: those of 16 steps.

        A text that is longer fills the steps of the engine by itself.
        """
        return _STEPS_TOGETHER * self.chunk

    def losses(self, ids: Tensor, first: int, *, length: int | None = None) -> Tensor:
        """Return losses as `TokenScorer.losses` does."""
        return self.losses_together([(ids, first)], length=length)[0]

    def losses_together(self, texts: Sequence[tuple[Tensor, int]], *, length: int | None = None) -> list[Tensor]:
        """Return losses as `TokenScorer.losses_together` does, for texts of any lengths.

        Raises:
            ServingError: the engine does not start, differs from transformers, or fails.
        """
        process = self.process
        if process is None or self.running != active_patches(self.model):
            process = self._start()
        started = time.perf_counter()
        losses = self._read(process, texts)
        tokens = sum(len(ids) for ids, _ in texts)
        self.cost = self.cost.plus(Cost(tokens, time.perf_counter() - started, 0))
        return losses

    def take_cost(self) -> Cost:
        cost, self.cost = self.cost, Cost()
        return cost

    @contextmanager
    def without_cost(self) -> Iterator[None]:
        """Leave what is read inside the with block out of the cost, as `TokenScorer.without_cost` does."""
        cost = self.cost
        yield
        self.cost = cost

    def _read(self, process: ReadingEngine, texts: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Return the engine's negative log-likelihoods of the last tokens of texts, (tokens - first,) float32 each."""
        try:
            answers = process.log_probabilities([(ids.tolist(), first) for ids, first in texts])
        except Exception as error:  # errors of any class come from the engine's processes
            raise ServingError(f"{self.title} failed while it was reading: {one_line(error)}") from error
        losses = [-torch.tensor(answer, dtype=torch.float32) for answer in answers]
        expected = [len(ids) - first for ids, first in texts]
        if [len(each) for each in losses] != expected:
            raise ServingError(
                f"{self.title} returned log-probabilities of {sum(map(len, losses)):,} tokens, and {sum(expected):,} "
                "are scored; this version of it may return them otherwise"
            )
        return losses

    def _start(self) -> ReadingEngine:
        """Start an engine for the model's present patch, compare it with transformers, and return it.

        They are compared on the first text of each length.
        """
        self._stop()
        patches = active_patches(self.model)
        method = None if patches == self.loaded and None in self.configs else patches[-1].method
        expected = self._transformers_losses()
        self.process = self._new_process(self.configs[method])
        self._compare(self._read(self.process, [(ids, 1) for ids, _ in self.spans]), expected, method)
        self.running = patches
        return self.process

    def _stop(self) -> None:
        """Stop the engine that runs, if any, and free its memory."""
        if self.process is not None:
            self.process.stop()
            self.process = None
            gc.collect()

    def _transformers_losses(self) -> list[Tensor]:
        """Return the losses of the first text of each length in transformers, and free the GPU's memory."""
        scorer = TokenScorer(self.model.to(self.device), longest=self.longest)
        losses = [scorer.losses(ids, 1, length=length) for ids, length in self.spans]
        del scorer
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()
        return losses

    def _compare(self, served: list[Tensor], expected: list[Tensor], method: RopeMethod | None) -> None:
        """Raise ServingError if the engine's losses differ from the expected ones by more than rounding explains.

        Both are losses of the first text of each length; the expected ones are those of transformers.
        """
        allowed = _EQUAL[self.model.dtype]
        for (_, length), here, exact in zip(self.spans, served, expected, strict=True):
            difference = float((here - exact).square().mean().sqrt())
            if not difference <= allowed:
                raise ServingError(
                    f"{self.title} does not compute {_name(method)} as transformers does: the first span of "
                    f"{length:,} tokens has a loss of {here.mean():.4f} nats per token in {self.title} and "
                    f"{exact.mean():.4f} in transformers; the losses of tokens differ by {difference:.2g} (root mean "
                    f"square), where {self.model.dtype} allows {allowed:g}. rope-ext check-server can name what a "
                    "server computes instead"
                )

    def _new_process(self, config: ServingConfig) -> ReadingEngine:
        settings = EngineSettings(
            config=config,
            dtype=str(self.model.dtype).removeprefix("torch."),
            shortest=self.shortest,
            longest=self.longest,
            step=self.chunk,
            logit_rows=self.logit_rows,
            **self.source,
        )
        try:
            return self.engine(settings)
        except Exception as error:  # errors of any class come from the engine's processes
            raise ServingError(
                f"{self.title} did not start with {json.dumps(config.overrides)}: {one_line(error)}"
            ) from error


def _first_spans(plan: EvalPlan) -> list[tuple[Tensor, int]]:
    """Return the first text that a plan reads at each length, as token ids with the length, the shortest first."""
    spans: dict[int, Tensor] = {}
    for document, document_spans in plan.documents:
        for span in document_spans:
            if span.context not in spans:
                spans[span.context], _ = plan.input_ids(document, span.start, span.stop)
    return [(ids, length) for length, ids in sorted(spans.items())]
