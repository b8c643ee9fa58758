from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rope_ext_hf.errors import MethodError
from rope_ext_hf.reading.protocols import (
    PROTOCOLS,
    ProtocolOptions,
    Span,
    check_lengths,
    protocol_help,
    register_protocol,
    resolve_protocol,
)

# name -> (tokens, lengths, plan, spans worked out by hand); other protocols have the tests of properties below
GOLDEN = {
    "matched": (
        17,
        [4, 8],
        ProtocolOptions(targets=2),
        [(4, 4, 8, 6, 8, 4), (8, 0, 8, 6, 8, 8), (4, 12, 16, 14, 16, 4), (8, 8, 16, 14, 16, 8)],
    ),
    "same-start": (
        17,
        [4, 8],
        ProtocolOptions(targets=2),
        [(4, 0, 4, 2, 4, 4), (8, 0, 8, 6, 8, 8), (4, 8, 12, 10, 12, 4), (8, 8, 16, 14, 16, 8)],
    ),
    "sliding": (
        10,
        [4, 8],
        ProtocolOptions(targets=1, stride=2),
        [
            (4, 0, 4, 2, 4, 4),
            (4, 2, 6, 4, 6, 4),
            (4, 4, 8, 6, 8, 4),
            (4, 6, 10, 8, 10, 4),
            (8, 0, 8, 6, 8, 8),
            (8, 2, 10, 8, 10, 8),
        ],
    ),
    "sliding-all": (
        9,
        [4, 6],
        ProtocolOptions(targets=1, stride=2),
        [
            (4, 0, 4, 1, 4, 4),
            (4, 2, 6, 4, 6, 4),
            (4, 4, 8, 6, 8, 4),
            (4, 6, 9, 8, 9, 4),
            (6, 0, 6, 1, 6, 6),
            (6, 2, 8, 6, 8, 6),
            (6, 4, 9, 8, 9, 6),
        ],
    ),
    "truncate": (9, [4, 8], ProtocolOptions(targets=1), [(4, 0, 4, 1, 4, 4), (8, 0, 8, 1, 8, 8)]),
    "stream": (
        9,
        [4],
        ProtocolOptions(targets=1, stride=2),
        [(4, 0, 4, 1, 4, 4), (4, 2, 6, 3, 6, 4), (4, 4, 8, 5, 8, 4)],
    ),
    "blocks": (10, [4], ProtocolOptions(targets=1), [(4, -1, 4, 0, 4, 4), (4, 3, 8, 4, 8, 4), (4, 5, 10, 8, 10, 4)]),
    "position": (
        9,
        [2, 4, 8],
        ProtocolOptions(targets=1),
        [(2, 0, 8, 1, 2, 8), (4, 0, 8, 2, 4, 8), (8, 0, 8, 4, 8, 8)],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    tokens, lengths, plan, spans = GOLDEN[name]
    assert list(PROTOCOLS[name].spans(tokens, lengths, plan)) == [Span(*span) for span in spans]


def test_a_stride_beyond_the_length_scores_all_but_the_first_token() -> None:
    spans = list(PROTOCOLS["sliding"].spans(9, [4], ProtocolOptions(targets=1, stride=5)))
    assert spans == [Span(4, 0, 4, 1, 4, 4), Span(4, 5, 9, 6, 9, 4)]


def test_blocks_are_those_of_lm_eval() -> None:
    from lm_eval.utils import get_rolling_token_windows

    for tokens in (1, 3, 4, 5, 8, 9, 23):
        ids = list(range(tokens))
        theirs = list(get_rolling_token_windows(token_list=ids, prefix_token=-1, max_seq_len=4, context_len=1))
        ours = []
        for span in PROTOCOLS["blocks"].spans(tokens, [4], ProtocolOptions(targets=1)):
            read = list(range(span.start, span.stop))
            ours.append((read[:-1], ids[span.score_from : span.score_to]))
        assert ours == [(list(given), list(wanted)) for given, wanted in theirs]


@pytest.mark.parametrize(("stride", "first"), [(2, 6), (7, 1), (8, 1), (9, 1), (100, 1)])
def test_sliding_scores_no_token_that_has_none_before_it(stride: int, first: int) -> None:
    """A stride of a span's length or more scores all but the span's first token."""
    spans = list(PROTOCOLS["sliding"].spans(8, [8], ProtocolOptions(targets=1, stride=stride)))
    assert spans == [Span(8, 0, 8, first, 8, 8)]
    spans = list(PROTOCOLS["sliding"].spans(24, [8], ProtocolOptions(targets=1, stride=8)))
    assert [(span.start, span.score_from) for span in spans] == [(0, 1), (8, 9), (16, 17)]


def test_a_protocol_says_what_it_is_in_its_docstring() -> None:
    with pytest.raises(ValueError, match="'matched' is registered already; choose another name"):
        register_protocol("matched")(PROTOCOLS["sliding"].spans)

    def silent(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
        yield from ()

    with pytest.raises(ValueError, match="'silent' has no docstring"):
        register_protocol("silent")(silent)
    assert "silent" not in PROTOCOLS
    assert all(f"{protocol.name}: {protocol.description}" in protocol_help() for protocol in PROTOCOLS.values())


def test_an_unknown_protocol_gets_the_nearest_name() -> None:
    with pytest.raises(MethodError, match=r"unknown protocol 'blcks'\. Did you mean 'blocks'\? Known"):
        resolve_protocol("blcks")


def test_prefix_and_stride_are_stated() -> None:
    known = {name: PROTOCOLS[name] for name in GOLDEN}
    assert [name for name, protocol in known.items() if protocol.prefix == "document"] == ["blocks"]
    assert [name for name, protocol in known.items() if protocol.uses_stride] == ["sliding", "sliding-all", "stream"]
    assert [name for name, protocol in known.items() if protocol.uses_targets] == ["matched", "same-start"]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_options_that_are_not_used_change_nothing(name: str) -> None:
    protocol = PROTOCOLS[name]

    def spans(targets: int = 2, stride: int = 3) -> list[Span]:
        return list(protocol.spans(50, [4, 16], ProtocolOptions(targets, stride)))

    for option, changed in (("targets", spans(targets=3)), ("stride", spans(stride=2))):
        used = bool(getattr(protocol, f"uses_{option}"))
        assert (changed != spans()) == used, (
            f"the spans of {name!r} {'do not depend' if used else 'depend'} on options.{option}: register it with "
            f"uses_{option}={not used}"
        )


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_same_targets_are_scored_at_every_length_where_that_is_stated(name: str) -> None:
    scored: dict[int, set[tuple[int, int]]] = {4: set(), 16: set()}
    for span in PROTOCOLS[name].spans(50, [4, 16], ProtocolOptions(targets=2, stride=3)):
        scored[span.length].add((span.score_from, span.score_to))
    same = scored[4] == scored[16]
    assert same or not PROTOCOLS[name].same_targets, (
        f"{name!r} scores other tokens at 4 than at 16: register it without same_targets"
    )


@pytest.mark.parametrize("name", PROTOCOLS)
def test_spans_come_out_the_same_every_time(name: str) -> None:
    """A run that is continued after an interruption generates its spans anew."""
    runs = [list(PROTOCOLS[name].spans(50, [4, 16], ProtocolOptions(targets=2, stride=3))) for _ in range(2)]
    assert runs[0], f"{name!r} yields no span for 50 tokens at lengths 4 and 16"
    assert runs[0] == runs[1], f"{name!r} must be a pure function of tokens, lengths and options"


lengths_lists = st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.sampled_from(sorted(PROTOCOLS)), st.integers(0, 300), lengths_lists, st.integers(1, 80), st.data())
def test_windows_lie_in_the_document(
    name: str, tokens: int, lengths: list[int], stride: int, data: st.DataObject
) -> None:
    targets = data.draw(st.integers(1, lengths[0] - 1))
    for span in PROTOCOLS[name].spans(tokens, lengths, ProtocolOptions(targets, stride)):
        assert -1 <= span.start < span.score_from < span.score_to <= span.stop <= tokens, (
            f"{name!r} yields {span} for {tokens} tokens: a span lies in the document, what it scores in the span, "
            "and a token with nothing before it is not scored"
        )
        assert span.length in lengths, f"{name!r} yields {span}: its length must be one of {lengths}"
        assert span.stop - span.start <= span.context + 1, (  # + 1: the last target is not read
            f"{name!r} yields {span}: it reads more than `context` tokens"
        )


@given(st.integers(0, 300), lengths_lists, st.data())
def test_matched_scores_the_same_targets_at_every_length(tokens: int, lengths: list[int], data: st.DataObject) -> None:
    targets = data.draw(st.integers(1, lengths[0] - 1))
    spans = list(PROTOCOLS["matched"].spans(tokens, lengths, ProtocolOptions(targets)))
    scored = {n: [range(w.score_from, w.score_to) for w in spans if w.length == n] for n in lengths}
    assert all(spans == scored[lengths[0]] for spans in scored.values())
    assert len(scored[lengths[0]]) == tokens // lengths[-1]
    assert all(w.score_to - w.score_from == targets and w.stop - w.start == w.length for w in spans)


@given(st.integers(0, 300), st.integers(2, 64))
def test_blocks_score_every_token_once(tokens: int, length: int) -> None:
    spans = PROTOCOLS["blocks"].spans(tokens, [length], ProtocolOptions(targets=1))
    assert [i for span in spans for i in range(span.score_from, span.score_to)] == list(range(tokens))


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 64))
def test_sliding_all_scores_every_token_but_the_first_once(tokens: int, length: int, stride: int) -> None:
    length = min(length, tokens)
    spans = PROTOCOLS["sliding-all"].spans(tokens, [length], ProtocolOptions(targets=1, stride=min(stride, length - 1)))
    assert [i for span in spans for i in range(span.score_from, span.score_to)] == list(range(1, tokens))


@pytest.mark.parametrize("name", ["matched", "sliding", "sliding-all", "truncate", "position"])
def test_short_documents_are_left_out_at_every_length(name: str) -> None:
    assert list(PROTOCOLS[name].spans(7, [4, 8], ProtocolOptions(targets=2))) == []


def test_lengths_are_sorted_and_targets_default_to_half_the_shortest() -> None:
    assert check_lengths([1024, 256, 256], None) == ([256, 1024], 128)


@pytest.mark.parametrize(("lengths", "targets"), [([], None), ([1], None), ([4, 8], 4), ([4], 0), ([-4], None)])
def test_impossible_lengths_are_refused(lengths: list[int], targets: int | None) -> None:
    with pytest.raises(MethodError, match="must be"):
        check_lengths(lengths, targets)
