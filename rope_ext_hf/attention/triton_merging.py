"""Merging of partial softmaxes as one Triton kernel, which reads each part once, where torch makes several passes."""

from __future__ import annotations

from torch import Tensor

from rope_ext_hf.rotary.triton_rotation import launching_on, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BYTES_PER_PROGRAM = 4096  # bytes of a part that one program of the kernel reads at a time, a power of two


def merge_fused(out: Tensor, lse: Tensor, parts: Tensor, parts_lse: Tensor) -> None:
    """Merge the attention of queries to further keys into `out` and `lse`, in place.

    Args:
        out: the attention so far, (rows, spans, heads, queries, dim), of any strides but with adjacent dims.
        lse: the log-sum-exp of its scores, (rows, spans, heads, queries) float32; -inf where `out` is 0.
        parts: the attention to further keys, (rows x spans x parts, heads, queries, dim), the parts of the same queries
            one after the other, with adjacent dims.
        parts_lse: the log-sum-exp of their scores, (rows x spans x parts, heads, queries) float32.
    """
    rows, spans, heads, queries, dim = out.shape
    width = power_of_two(dim)
    block = max(1, _BYTES_PER_PROGRAM // (width * parts.element_size()))
    with launching_on(out.device):
        _merge[(rows * spans * -(-queries // block) * heads,)](
            out, lse, parts, parts_lse, *out.stride()[:-1], *lse.stride(), *parts.stride()[:-1], *parts_lse.stride(),
            heads, spans, queries, len(parts) // (rows * spans), dim, block, width,
        )  # fmt: skip


if triton is not None:
    _VARYING = ["spans", "queries", "count", "lse_row", "lse_span", "lse_head", "lse_query"]
    _VARYING += ["part_lse_row", "part_lse_head", "part_lse_query"]

    @triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator, unused-ignore]
    def _merge(  # type: ignore[no-untyped-def]
        out, lse, parts, parts_lse,
        out_row, out_span, out_head, out_query, lse_row, lse_span, lse_head, lse_query,
        part_row, part_head, part_query, part_lse_row, part_lse_head, part_lse_query,
        heads, spans, queries, count,
        DIM: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Merge the parts of a block of queries of one head. Offsets are int64: parts may have over 2^31 elements."""
        program = tl.program_id(0)
        head = (program % heads).to(tl.int64)
        blocks = tl.cdiv(queries, QUERIES)
        span = (program // heads // blocks).to(tl.int64)  # the index among the spans of all rows
        query = ((program // heads % blocks) * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
        dim = tl.arange(0, WIDTH)[None]
        present = query < queries
        inside = present[:, None] & (dim < DIM)
        result = out + span // spans * out_row + span % spans * out_span + head * out_head + query[:, None] * out_query
        result_lse = lse + span // spans * lse_row + span % spans * lse_span + head * lse_head + query * lse_query
        part = parts + span * count * part_row + head * part_head + query[:, None] * part_query
        part_lse = parts_lse + span * count * part_lse_row + head * part_lse_head + query * part_lse_query
        highest = tl.load(result_lse, mask=present, other=0.0)
        total = tl.full((QUERIES,), 1.0, tl.float32)  # the sum of the weights, relative to exp(highest)
        merged = tl.load(result + dim, mask=inside, other=0.0).to(tl.float32)
        for _ in range(count):
            score = tl.load(part_lse, mask=present, other=0.0)
            values = tl.load(part + dim, mask=inside, other=0.0).to(tl.float32)
            higher = tl.maximum(highest, score)
            kept, added = tl.exp(highest - higher), tl.exp(score - higher)
            merged = merged * kept[:, None] + values * added[:, None]
            total = total * kept + added
            highest = higher
            part += part_row
            part_lse += part_lse_row
        tl.store(result + dim, (merged / total[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(result_lse, highest + tl.log(total), mask=present)
