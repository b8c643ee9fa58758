"""SGLang as a reader, for `rope-ext ppl --engine sglang`: its log-probabilities of the tokens of prompts.

What the engine is asked for, and what it answers, follows the source of SGLang 0.5.23: `entrypoints/engine.py`,
`managers/tokenizer_manager.py` and `scheduler_components/logprob_result_processor.py` (the answers),
`layers/logprob_processor.py` (their computation, in parts of SGLANG_LOGPROB_CHUNK_SIZE tokens; by default since pull
request 31498 of July 2026). `nox -s sglang` runs it on a CPU.

If one of its processes dies while it reads, SGLang ends this process as well, after a message; the same command then
continues the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from rope_ext_hf.errors import ServingError
from rope_ext_hf.tools.engines.programs.sglang import SGLang
from rope_ext_hf.tools.servers.engine_reader import EngineSettings, ReadingEngine, read_by_engine

_BEYOND = 7
"""Tokens by which the length to serve must exceed the longest prompt: `get_worker_info` of managers/tp_worker.py
keeps one token and five more, and `validate_input_length` refuses a prompt that reaches the rest."""


class SGLangReader(ReadingEngine):
    """A running SGLang, in processes of its own."""

    rules = SGLang
    packages = SGLang.name
    environment: ClassVar[Mapping[str, str]] = {
        # The length to serve exceeds the model's by a few tokens; nothing is computed at their positions.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }

    @classmethod
    def version(cls) -> str:
        import sglang

        return str(sglang.__version__)

    def __init__(self, settings: EngineSettings) -> None:
        import sglang

        # its usual attention on a CPU needs Intel's AMX instructions, and kernels that are built for them
        on_cpu = {"device": "cpu", "attention_backend": "torch_native"}
        os.environ.setdefault("SGLANG_LOGPROB_CHUNK_SIZE", str(settings.logit_rows))
        self.engine = sglang.Engine(
            model_path=settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            json_model_override_args=json.dumps(settings.config.overrides or {}),
            context_length=settings.longest + _BEYOND,
            chunked_prefill_size=settings.step,
            max_running_requests=settings.texts_in_step,
            # the keys and values of a long text, of a step, and as many more; else they would fill the memory
            max_total_tokens=2 * (settings.longest + settings.step),
            tp_size=settings.gpus,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            disable_cuda_graph=True,  # graphs are for tokens that are generated
            custom_sigquit_handler=_child_failed,
            **({} if torch.accelerator.is_available() else on_cpu),
        )

    def log_probabilities(self, texts: Sequence[tuple[list[int], int]]) -> list[Sequence[float]]:
        answers: list[dict[str, Any]] = self.engine.generate(
            input_ids=[ids for ids, _ in texts],
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            # logits are computed from this position on, and give the log-probability of the token after it
            logprob_start_len=[first - 1 for _, first in texts],
        )
        # (log-probability, token id, None) for each token from there on; the first has nothing before it, and is None
        return [
            [log_probability for log_probability, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
            for answer in answers
        ]

    def stop(self) -> None:
        self.engine.shutdown()  # it ends all processes that this process has started, and there are no others


def _child_failed(_signal: int, _frame: object) -> None:
    """Raise an error in place of ending this process, as SGLang does when one of its processes fails to start."""
    raise ServingError("one of its processes failed; its error is printed above")


read_by_sglang = partial(read_by_engine, SGLangReader)
"""The plan of a perplexity run, read by SGLang: `read_by_engine` for the group of plug-ins "readers"."""
