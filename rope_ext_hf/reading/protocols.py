"""Evaluation protocols: the tokens that are read in one pass, and those of them that are scored.

    >>> list(resolve_protocol("matched").spans(8, [4, 8], ProtocolOptions(targets=2)))
    [Span(length=4, start=4, stop=8, score_from=6, score_to=8, context=4),
     Span(length=8, start=0, stop=8, score_from=6, score_to=8, context=8)]

A protocol is a pure generator of spans. Its arguments are the number of tokens of a document, the context lengths
(ascending) and `ProtocolOptions`. Position -1 stands for the prefix (BOS) before a document, see `Protocol`. To add a
protocol, write the generator and decorate it with `register_protocol`: the command line, its help, tables, reports and
the contract tests read the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rope_ext_hf.bounds import Length, parse_lengths
from rope_ext_hf.errors import MethodError, entry

__all__ = ["PROTOCOLS", "ProtocolOptions", "Span", "register_protocol", "resolve_protocol"]


class Span(NamedTuple):
    """A stretch of tokens in a document that is read in one pass, and the part of it that is scored.

    Attributes:
        length: the context length that the score counts for.
        start, stop: the first token of the document that is read in the pass, and the one after the last.
        score_from, score_to: the first token that is scored, and the one after the last.
        context: the length at which length-dependent methods are held.
    """

    length: int
    start: int
    stop: int
    score_from: int
    score_to: int
    context: int


@dataclass(frozen=True)
class ProtocolOptions:
    """Options of the protocols, in tokens.

    Attributes:
        targets: the number of tokens that are scored per span, a stretch of text read at once.
        stride: the number of tokens between the starts of spans.
        prefix: the number of tokens that position -1 stands for, for which a protocol with a prefix before the document
            may have to make room.
    """

    targets: int
    stride: int = 256
    prefix: int = 1


DefaultPrefix = Literal["added", "bos", "bos or eos", "none"]
_Spans = Callable[[int, Sequence[int], ProtocolOptions], Iterable[Span]]


@dataclass(frozen=True)
class Protocol:
    """A named way to read a document at several context lengths.

    Attributes:
        name: the name in Python and on the command line.
        spans: the function that cuts a document: (tokens of the document, ascending lengths, options) -> spans.
        description: one line for help texts and tables.
        prefix: the place of the prefix, the tokens before a text, which are most often BOS. "span": first in every
            span; a document is cut as if it began with them, and a span from its middle has them in place of its first
            tokens. "document": once, before the first token.
        default_prefix: the prefix by default. "added": the tokens that the tokenizer puts before every text; "bos": the
            same, or BOS if there are none and the tokenizer has BOS; "bos or eos": the same, or EOS if there is no BOS
            either; "none": no tokens.
        uses_targets: whether it uses `options.targets`.
        uses_stride: whether it uses `options.stride`.
        same_targets: whether the scored tokens are the same at every length.
        one_pass: whether all lengths are read in one pass over the longest, so that no input of a shorter length is
            measured.
        recent: whether the model as loaded is also measured on the same targets with no more than its context length
            to read. A method has to do better than this reference.
    """

    name: str
    spans: _Spans
    description: str
    prefix: Literal["span", "document"] = "span"
    default_prefix: DefaultPrefix = "added"
    uses_targets: bool = False
    uses_stride: bool = False
    same_targets: bool = False
    one_pass: bool = False
    recent: bool = False


PROTOCOLS: dict[str, Protocol] = {}
"""All protocols by name; `register_protocol` adds to it."""


def register_protocol(name: str, **attributes: Any) -> Callable[[_Spans], _Spans]:
    """Register a generator of spans as a protocol; the first line of its docstring is the protocol's description.

    Args:
        name: the name in Python and on the command line.
        **attributes: attributes of `Protocol` that differ from their default, such as uses_targets=True.

    Raises:
        ValueError: the name is taken, or the generator has no docstring.
    """

    def register(spans: _Spans) -> _Spans:
        if name in PROTOCOLS:
            raise ValueError(f"a protocol {name!r} is registered already; choose another name")
        if not (spans.__doc__ or "").strip():
            raise ValueError(f"protocol {name!r} has no docstring; its first line is shown in help texts")
        description = (spans.__doc__ or "").strip().splitlines()[0].rstrip(".")
        PROTOCOLS[name] = Protocol(name, spans, description, **attributes)
        return spans

    return register


def resolve_protocol(name: str) -> Protocol:
    """Return the evaluation protocol with this name; raise a MethodError if there is none."""
    return entry("protocol", name, PROTOCOLS)


def protocol_help() -> str:
    """Return every protocol with its description, for the help text of an option."""
    return "; ".join(f"{protocol.name}: {protocol.description}" for protocol in PROTOCOLS.values())


def check_lengths(lengths: Length | Sequence[Length], targets: int | None) -> tuple[list[int], int]:
    """Return the lengths in ascending order and the number of targets, by default half the shortest length."""
    ordered = sorted(set(parse_lengths(lengths, least=2)))
    scored = ordered[0] // 2 if targets is None else targets
    if not isinstance(scored, int) or not 1 <= scored < ordered[0]:
        raise MethodError(f"targets must be between 1 and {ordered[0] - 1} (below the shortest length), got {scored!r}")
    return ordered, scored


@register_protocol("matched", uses_targets=True, same_targets=True)
def matched(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterable[Span]:
    """The same targets at every length, each length with its own amount of context.

    A document is cut into disjoint runs of the longest length; the last `targets` tokens of each run are scored. At
    length N they are read after N - targets tokens of context. The remainder of a document is not used, and a document
    shorter than the longest length yields nothing.
    """
    longest = lengths[-1]
    return [
        Span(length, stop - length, stop, stop - options.targets, stop, length)
        for stop in range(longest, tokens + 1, longest)
        for length in lengths
    ]


@register_protocol("same-start", uses_targets=True, recent=True)
def same_start(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterable[Span]:
    """The last targets of each length, all lengths from the same beginning: one pass under most methods.

    A document is cut into disjoint runs of the longest length, and length N is the first N tokens of a run. A method
    that treats a token the same whatever follows it reads the longest length once, and all others are scored on the
    way; one that follows the length of the input reads each length by itself. The scored tokens differ between lengths,
    so compare methods at one length, and each with the model as loaded that reads only the last tokens before the same
    targets.
    """
    longest = lengths[-1]
    return [
        Span(length, start, start + length, start + length - options.targets, start + length, length)
        for start in range(0, tokens - longest + 1, longest)
        for length in lengths
    ]


@register_protocol("sliding", uses_stride=True)
def sliding(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """Spans of N tokens, `stride` apart, the last `stride` tokens of each scored (PI and YaRN papers: 256).

    The first N - stride tokens of a document are never scored. A stride of N or more scores all but the first token of
    a span, which has no token before it. Documents shorter than the longest length are left out. `sliding-all` scores
    the first span whole as well.
    """
    for length in lengths if tokens >= lengths[-1] else ():
        for stop in range(length, tokens + 1, options.stride):
            start = stop - length
            yield Span(length, start, stop, max(start + 1, stop - options.stride), stop, length)


@register_protocol("sliding-all", uses_stride=True)
def sliding_all(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """As sliding, but every token is scored once: the first span whole, the last one shorter (transformers' page).

    These are the loops of Hugging Face's page on the perplexity of fixed-length models (its texts joined, bos=False)
    and of YaRN's code without --truncate. Here every token has the same weight; the page counts one token less of every
    later span, and YaRN's code gives all spans the same weight. The last span, if it is shorter, is read under
    length-dependent methods held at N. Documents shorter than the longest length are left out.
    """
    for length in lengths if tokens >= lengths[-1] else ():
        scored = 1
        for start in range(0, tokens, options.stride):
            stop = min(start + length, tokens)
            yield Span(length, start, stop, max(start + 1, scored), stop, length)
            scored = stop
            if stop == tokens:
                break


@register_protocol("truncate", default_prefix="bos")
def truncate(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """The first N tokens of each document in one pass, all scored (YaRN's code with --truncate).

    With BOS these are BOS and the first N - 1 tokens. As in YaRN's code, BOS is used if the tokenizer has one, and
    documents shorter than the longest length are left out at every length, as by its --dataset-min-tokens. This is not
    YaRN's evaluation on GovReport: its eval.sh reads documents of at least 16,384 tokens in spans of 32,768, scores the
    first span whole and gives every span the same weight, whatever its number of tokens; here every token has the same.
    """
    for length in lengths if tokens >= lengths[-1] else ():
        yield Span(length, 0, length, 1, length, length)


@register_protocol("stream", default_prefix="none", uses_stride=True)
def stream(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """Spans of N tokens, `stride` apart, all tokens scored (LongLoRA, ChunkLlama); meant for joined documents.

    As in the code of both, no span gets a BOS token, whatever the tokenizer does; bos=True gives each span one. Their
    code leaves out the last span or two of the text.
    """
    for length in lengths:
        for start in range(0, tokens - length + 1, options.stride):
            yield Span(length, start, start + length, start + 1, start + length, length)


@register_protocol("blocks", prefix="document", default_prefix="bos or eos")
def blocks(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """Every token scored once, in disjoint runs of N targets after one token of context (lm-evaluation-harness).

    The first run begins after the prefix. The last one, if it is shorter, gets earlier tokens up to N of input. A
    prefix of several tokens (GLM) leaves the first run fewer targets. If a tokenizer adds BOS itself, the harness reads
    and scores that BOS after its own prefix; `rope-ext lm-eval` does not.
    """
    for length in lengths:
        room = length + 1 - options.prefix  # targets of the first run
        for first in [0, *range(room, tokens, length)] if tokens else ():
            stop = min(first + length if first else room, tokens)
            yield Span(length, max(0, stop - length - 1) if first else -1, stop, first, stop, length)


@register_protocol("position", one_pass=True)
def position(tokens: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """One pass over the longest length; the loss of positions between two lengths counts for the upper one.

    This gives the whole length curve of a static method from a single forward: the entry at N is the mean loss at
    positions from the next shorter length up to N. Documents shorter than the longest length are left out. A
    length-dependent method is held at the longest length throughout, so that no entry is the loss of an input of N
    tokens.
    """
    longest = lengths[-1]
    if tokens >= longest:
        for before, length in zip((1, *lengths), lengths, strict=False):
            yield Span(length, 0, longest, before, length, longest)
