"""vLLM's attention backend CUSTOM, for remapping methods: an experiment, in plain torch.

    vllm serve MODEL --attention-backend CUSTOM --hf-overrides '...'    (as rope-ext serve-config --plugin prints it)

vLLM imports this module where that backend is chosen; the plug-in registers it (vllm.py). Queries and keys come
rotated to where the method stores keys, which depends on their position alone: prefix caching and chunked prefill need
nothing of their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout

from rope_ext_hf.plugins.paged_attention import PagedAttention, requests_of, store


class RemappingBackend(AttentionBackend):  # type: ignore[misc]
    """The backend; its base class refuses MLA, sliding windows, sinks, and attention of other types."""

    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[_RemappingImpl]:
        return _RemappingImpl

    @staticmethod
    def get_builder_cls() -> type[_StepBuilder]:
        return _StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)


class _StepBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the values of a step that all layers share: its requests, and where their new keys go."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        step = common_attn_metadata
        starts, lengths = step.query_start_loc_cpu.tolist(), step.seq_lens.tolist()
        requests = list(requests_of(starts, lengths, step.block_table_tensor, self.kv_cache_spec.block_size))
        return SimpleNamespace(tokens=step.num_actual_tokens, slots=step.slot_mapping, requests=requests)


class _RemappingImpl(AttentionImpl):  # type: ignore[misc]
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        config = get_current_vllm_config()
        present = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            f"a cache in {kv_cache_dtype}": kv_cache_dtype not in RemappingBackend.supported_kv_cache_dtypes,
            "a softcap of scores": logits_soft_cap,
            f"attention of the type {attn_type}": attn_type != "decoder",
            "layers that share keys": kv_sharing_target_layer_name,
            "speculative decoding": config.speculative_config,
            "several processes for one model": config.parallel_config.world_size > 1,
            **{name: value is not None for name, value in more.items()},
        }
        if refused := [name for name, value in present.items() if value]:
            raise ValueError(
                f"the attention backend CUSTOM of rope-ext-hf, an experiment, does not run with {', '.join(refused)}"
            )
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype
        self.attention = PagedAttention(config.model_config.hf_text_config.rope_parameters or {})

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values, and write the attention of the new tokens into `output`.

        Args:
            query, key, value, output: (tokens, heads, head_size); tokens beyond those of the step are padding.
            kv_cache: (blocks, kv_heads, block_size, 2 x head_size).
            attn_metadata: from `_StepBuilder`; None while vLLM measures its memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the attention backend CUSTOM of rope-ext-hf does not quantise its output")
        if attn_metadata is None:
            return output.zero_()
        count = attn_metadata.tokens
        store(kv_cache, key[:count], value[:count], attn_metadata.slots[:count])
        self.attention.run(query, kv_cache, attn_metadata.requests, self.scale, output)
        return output
