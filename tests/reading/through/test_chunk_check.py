"""The check of reading in chunks: right readers pass it in every dtype, and ones with a mistake do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rope_ext_hf.models.decoder_arguments import cache_parameter
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.through.chunk_check import try_in_chunks
from rope_ext_hf.reading.through.chunked_reader import ChunkedReader
from rope_ext_hf.reading.through.span_cache import SpanCache
from rope_ext_hf.reference import path
from tests.support.models import build

MODELS = ("reference", "llama", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LaterByOne(ChunkedReader):
    """A reader with a mistake: all chunks but the first are rotated as if a token more stood before them."""

    def hidden(self, ids: Tensor, cache: SpanCache, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        arguments: dict[str, Any] = {cache_parameter(self.decoder): cache}
        for piece in torch.split(ids, self.chunk):
            positions = torch.arange(start, start + len(piece))[None] + (start > 0)
            out = self.decoder(input_ids=piece[None], position_ids=positions, use_cache=True, **arguments)
            yield start, out.last_hidden_state[0]
            start += len(piece)


def load(name: str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path()) if name == "reference" else build(name)
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_right_reader_passes_and_one_that_is_off_by_one_does_not(name: str, dtype: torch.dtype) -> None:
    scorer = TokenScorer(load(name, dtype))
    assert scorer.chunked, scorer.reading
    right = scorer.reader
    wrong = LaterByOne(right.model, decoder=right.decoder, head=right.head, chunk=512, head_bytes=2**20)
    reason = try_in_chunks(wrong, torch.device("cpu"))
    assert reason is not None
    assert "that rounding makes" in reason
