"""One span read by several processes, each with a part of its tokens: context parallelism.

A span is cut into 2 x processes pieces; process r has pieces r and 2 x processes - 1 - r, so that all of them have as
many pairs of query and key to compute. Positions and targets go with the tokens. In each layer every process gathers
the keys and values of all tokens, by `torch.distributed.all_gather`, and attends from its own queries. torch's own
`context_parallel` is not used: torch 2.13 has it for CUDA kernels and full causal attention alone, while this runs
wherever collectives do, with windows, softcaps and sinks, by the attention that spans are read with otherwise.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from transformers.cache_utils import DynamicLayer

from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.attention_interface import attending
from rope_ext_hf.patches.decoder_arguments import cache_parameter
from rope_ext_hf.patches.patching import check_context_parallel
from rope_ext_hf.reading.chunked_attention import MaskRule, NotReadInChunksError, chunked_attention, mask_rule
from rope_ext_hf.reading.head_losses import negative_log_likelihoods_
from rope_ext_hf.reading.scorer import CHECKED, TokenScorer, rounding_tolerance
from rope_ext_hf.reading.span_cache import FULL, SLIDING, SpanCache, count_queries
from rope_ext_hf.runs.kinds import RunPlan
from rope_ext_hf.runs.workers import LONGEST_WAIT, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = "rope_ext_hf.context_parallel"
_SHARE: ContextVar[Share | None] = ContextVar("rope_ext_hf_share", default=None)


@dataclass(frozen=True)
class Share:
    """The part of a span that one of several processes reads: pieces of `size` tokens; the last may end beyond it."""

    rank: int
    count: int
    size: int

    @property
    def pieces(self) -> tuple[int, int]:
        """This process's pieces, in the order of their tokens."""
        return self.rank, 2 * self.count - 1 - self.rank

    def places(self, device: torch.device) -> Tensor:
        """The indices of this process's tokens, (2 x size,) int64."""
        return torch.cat([torch.arange(p * self.size, (p + 1) * self.size, device=device) for p in self.pieces])

    def gathered(self, own: Tensor, group: Any) -> Tensor:
        """Keys or values (rows, heads, 2 x count x size, dim) of all pieces in their order, from this process's."""
        every = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(every, own.contiguous(), group=group)
        first, last = zip(*(torch.split(each, self.size, dim=-2) for each in every), strict=True)
        return torch.cat([*first, *reversed(last)], dim=-2)


class _GatheredLayer(DynamicLayer):  # type: ignore[misc]
    """Keeps nothing; `update` hands out the keys and values of all processes."""

    def __init__(self, share: Share, group: Any) -> None:
        super().__init__()
        self.share, self.group = share, group

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.share.gathered(key_states, self.group), self.share.gathered(value_states, self.group)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        return count_queries(queries) * self.share.count, 0


class _GatheredCache(SpanCache):
    """Takes the place of a cache, where the keys that a token sees come from other processes."""

    def __init__(self, config: Any, share: Share, group: Any) -> None:
        self.share, self.group = share, group
        super().__init__(config, capacity=0)
        self.layer_class_to_replicate = lambda: self._layer(DynamicLayer())

    def _layer(self, stock: Any) -> Any:
        if (kind := type(stock).__name__) not in (FULL, SLIDING):
            raise NotReadInChunksError(
                f"its cache has layers of the class {kind}, with a state that goes from token to token"
            )
        return _GatheredLayer(self.share, self.group)


def _spread_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: MaskRule | None, **given: Any
) -> tuple[Tensor, None]:
    """Causal attention of this process's queries to the keys of all; arguments as of `chunked_attention`."""
    share = _SHARE.get()
    assert share is not None
    rule = MaskRule(None, None, 0, key.shape[-2]) if attention_mask is None else attention_mask
    parts = []
    for piece, queries in zip(share.pieces, torch.split(query, share.size, dim=-2), strict=True):
        start, stop = piece * share.size, (piece + 1) * share.size
        here = replace(rule, past=start, keys=stop)
        parts.append(chunked_attention(module, queries, key[:, :, :stop], value[:, :, :stop], here, **given)[0])
    return torch.cat(parts, dim=1), None


class SpreadScorer(TokenScorer):
    """Losses of spans that several processes read together; all of them make the same calls and get the same results.

    The backend of `group` takes tensors on the model's device. `options` are those of `TokenScorer`, tokens per pass
    those of a process's share. UnsupportedModelError: a model that needs more of earlier tokens than keys and values.
    """

    def __init__(self, model: PreTrainedModel, *, rank: int, count: int, group: Any = None, **options: Any) -> None:
        self.rank, self.count, self.group = rank, count, group
        super().__init__(model, **options)
        because = self.whole_because or self._why_not_spread()
        if because is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be read by several processes together: {because}"
            )

    @property
    def reading(self) -> str:
        return f"together, by {self.count} processes that have a part of every span each"

    def _losses(self, ids: Tensor, first: int) -> Tensor:
        check_context_parallel(self.model)
        return self._spread(ids, first)

    def _spread(self, ids: Tensor, first: int) -> Tensor:
        inputs, targets = ids[:-1], ids[1:]  # shifted before they are spread
        share = Share(self.rank, self.count, -(-len(inputs) // (2 * self.count)))
        places = share.places(ids.device)
        # Beyond the end stands the last token again, which no other one sees.
        kept = places.clamp(max=len(inputs) - 1)
        cache = _GatheredCache(self.decoder.config, share, self.group)
        with attending(self.model, _ATTENTION, _spread_attention, mask_rule, _SHARE, share):
            given: dict[str, Any] = {cache_parameter(self.decoder): cache}
            out = self.decoder(input_ids=inputs[kept][None], position_ids=kept[None], use_cache=True, **given)
        scored = (places >= first - 1) & (places < len(inputs))
        losses = torch.zeros(len(ids) - first, device=ids.device)
        if len(mine := places[scored]):
            losses[mine - (first - 1)] = self._head.losses(out.last_hidden_state[0, scored], targets[mine])
        distributed.all_reduce(losses, group=self.group)  # all but one of the terms of each sum are zero
        return losses.cpu()

    def _why_not_spread(self) -> str | None:
        """Why a few tokens do not get the losses of an ordinary forward; None: they do."""
        ids = torch.arange(3, 4 + max(CHECKED, 4 * self.count), device=self._device)
        with torch.inference_mode():
            wanted = negative_log_likelihoods_([self._last_logits(ids, len(ids) - 1)], ids[1:]).cpu()
            try:
                difference = float((self._spread(ids, 1) - wanted).square().mean().sqrt())
            except NotReadInChunksError as error:
                return str(error)
        if difference <= rounding_tolerance(self.model.dtype) * max(1e-3, float(wanted.std())):
            return None
        return f"together its losses are off by {difference:.2g} nats per token, more than rounding may make"


def _in_a_group(model: PreTrainedModel, **options: Any) -> SpreadScorer:
    """A scorer of the processes that were launched, which meet here: once they agree on what is measured."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
    backend = "nccl" if model.device.type == "cuda" else "gloo"
    return SpreadScorer(model, group=distributed.new_group(backend=backend, timeout=LONGEST_WAIT), **options)


def spread_over(
    empty: PreTrainedModel, plan: RunPlan[Any], workers: Workers
) -> tuple[RunPlan[Any], Workers, str | None]:
    """A plan of perplexity whose spans are each read by all processes; `empty` is the model on the meta device.

    Returns:
        The plan, its processes, and why it is without the model as loaded where that takes the length from each part.
    """
    if workers.count == 1:
        raise MethodError(
            "--parallel context needs several processes: torchrun --nproc-per-node N -m rope_ext_hf ppl ..."
        )
    if plan.offload_cache:
        raise MethodError("--parallel context keeps no cache; leave out --offload-cache")
    for method in plan.methods:
        if isinstance(method, RemappingMethod):
            raise MethodError(
                f"--parallel context gives each process a part of every span, and {method.name} needs all keys at "
                "their places; leave out --parallel, so that whole spans are dealt out among the processes"
            )
    left_out = None
    try:
        check_context_parallel(empty)
    except MethodError as error:
        if plan.methods in ((), (None,)):
            raise
        left_out = f"the model as loaded: {error}"
        plan = replace(plan, methods=tuple(method for method in plan.methods if method is not None))
    scorer = partial(_in_a_group, rank=workers.rank, count=workers.count)
    reader = {"parallel": f"context, {workers.count} processes"}
    return replace(plan, scorer=scorer, reader=reader), replace(workers, together=True), left_out
