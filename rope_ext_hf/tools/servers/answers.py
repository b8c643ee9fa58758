"""Answers of a server: the log-probabilities that it returns for prompts cut from a text, and a file that records them.

A record holds token ids, the log-probabilities that the server returned, the differences between these and those that
it returns when it is asked again, and the facts that the server states about itself.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from rope_ext_hf.bounds import Length, parse_lengths
from rope_ext_hf.errors import CorpusError, ServingError
from rope_ext_hf.files.whole import atomic_file, read_json
from rope_ext_hf.hub import fingerprint, load_empty, load_tokenizer, tokens_before
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import encode, prefix_tokens
from rope_ext_hf.terminal import Rows, text_table, wrapped
from rope_ext_hf.tools.servers.clients import Answer, Client

_SAMPLE = 2000  # characters of a text whose tokens are compared
_PARTS = 8  # without a model, the shortest prompt is this part of the server's length


class Prompt(NamedTuple):
    """The token ids of a prompt, and the log-probabilities that a server returned for it."""

    ids: list[int]
    answers: list[Answer]


@dataclass
class Collected:
    """The log-probabilities that a server returned for prompts, and facts about the server: the contents of a record.

    Attributes:
        server: the serving program with its version.
        prompts: the prompts with their answers, the shortest first.
        refused: the server's message for the first prompt that it did not answer; None: it answered all.
        stated: facts that the server states about itself, by name.
        text: a text whose tokens on the server are compared with those elsewhere.
        tokens: the server's tokens for that text, without special tokens and with them; None: it does not return
            tokens.
        noise: for each prompt, the difference in nats between the answers when the server is asked about it twice.
        fingerprint: the fingerprint of the model that is to be served; None: not known.
        left_out: the longest length that was left out as too costly to compute here; None: none was.
        more: a function that asks the server about further prompts, as many as its argument says and as short as the
            shortest one.
    """

    server: str
    prompts: list[Prompt]
    refused: str | None = None
    stated: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    tokens: list[list[int]] | None = None
    noise: list[float] = field(default_factory=list)
    fingerprint: dict[str, Any] | None = None
    left_out: int | None = None
    more: Callable[[int], list[Prompt]] = field(default=lambda count: [], repr=False)

    def write(self, path: Path) -> None:
        """Write the record to a JSON file, which `read_answers` reads."""
        values = {name: value for name, value in vars(self).items() if name != "more"}
        with atomic_file(path) as part:
            part.write_text(json.dumps(values | {"prompts": [prompt._asdict() for prompt in self.prompts]}))


def collect(
    client: Client,
    model: str | Path | None,
    lengths: Sequence[Length] | None,
    data: str,
    source: Mapping[str, Any],
    affordable: Callable[[int], bool] = lambda length: True,
) -> Collected:
    """Cut prompts of several lengths from a text, ask a server for log-probabilities, and return its answers.

    Args:
        client: the server's client.
        model: the model that is served: its tokenizer cuts the text, and default lengths are half its context length,
            doubled up to its extended length. None: the server cuts the text, and default lengths are an eighth of its
            own length, doubled up to all of it.
        lengths: lengths of the prompts in tokens; None: the default ones.
        data: the text that prompts are cut from.
        source: the arguments `revision` and `trust_remote_code` with which the model is loaded.
        affordable: returns False for default lengths to leave out; the shortest is always used.

    Raises:
        ServingError: the server does not answer about the shortest prompt.
        CorpusError: the text is too short.
    """
    lengths = parse_lengths(lengths) if lengths else None
    text = next(iter(load(data))).text[:_SAMPLE]
    collected = Collected(client.title, [], stated=client.stated(), text=text)
    prefix: tuple[int, ...] = ()  # token ids that every prompt begins with
    with contextlib.suppress(ServingError):  # a server may not return tokens
        collected.tokens = [client.tokens(text, special) for special in (False, True)]
        prefix = tokens_before(collected.tokens[1], collected.tokens[0]) or ()
    if model is None:
        cut: Callable[[str], list[int]] = partial(client.tokens, special=False)
        longest = collected.stated.get("length", 0)
        shortest = longest // _PARTS
        if not longest and not lengths:
            raise ServingError(
                f"{client.title} does not state its context length: give --lengths, or the folder or Hub id of the "
                "model that it serves"
            )
    else:
        tokenizer, empty = load_tokenizer(model, **source), load_empty(model, **source)
        cut, prefix = partial(encode, tokenizer), prefix_tokens(tokenizer, None)
        described = describe(empty)
        collected.fingerprint = fingerprint(empty).to_dict()
        longest, shortest = described.extended_length or described.context_length, described.context_length // 2
    all_lengths = sorted(set(lengths or _default_lengths(shortest, longest)))
    used = [length for length in all_lengths if lengths or length == all_lengths[0] or affordable(length)]
    if used[-1] < all_lengths[-1]:
        collected.left_out = all_lengths[-1]
    ids = [*prefix, *_text_ids(cut, data, used[-1] - len(prefix))]
    for length in used:
        try:
            collected.prompts.append(Prompt(ids[:length], client.answers(ids[:length])))
        except ServingError as error:
            if not collected.prompts:
                raise
            collected.refused = str(error)
            break

    def more(count: int) -> list[Prompt]:
        text_tokens = used[0] - len(prefix)
        ids = _text_ids(cut, data, (count + 1) * text_tokens)
        # The first part of the text is in the shortest prompt already.
        parts = [[*prefix, *ids[at : at + text_tokens]] for at in range(text_tokens, len(ids), text_tokens)]
        return [Prompt(part, client.answers(part)) for part in parts]

    collected.more = more
    return collected


def _default_lengths(shortest: int, longest: int) -> list[int]:
    """Return `longest` - 1, then `shortest` (at least 16) and its doubles below that length."""
    last = longest - 1  # a server counts the token that it generates as part of the length
    lengths, length = [last], max(16, shortest)
    while length < last:
        lengths.append(length)
        length *= 2
    return lengths


def _text_ids(cut: Callable[[str], list[int]], data: str, count: int) -> list[int]:
    """Return the first `count` tokens of a text, document after document; `cut` returns the token ids of a document.

    Raises:
        CorpusError: the text has fewer tokens.
    """
    ids: list[int] = []
    for document in load(data):
        ids += cut(document.text[: 64 * count])  # no token has 64 characters, and a text may have millions
        if len(ids) >= count:
            return ids[:count]
    raise CorpusError(
        f"the text {data!r} has {len(ids):,} tokens, too few for prompts of {count:,}; give a longer text or shorter "
        "lengths"
    )


def differing_tokens(
    theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], there: str, here: str
) -> str | None:
    """Return a clause on how the tokens of a text differ between two places; None if they do not.

    Args:
        theirs: the token ids at the first place, without special tokens and with them.
        ours: the same for the second place.
        there: the name of the first place, such as "then".
        here: the name of the second place, such as "now".
    """
    for text, first, second in zip(("a text", "a text with special tokens"), theirs, ours, strict=True):
        if first == second:
            continue
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        sides = [
            f"{len(ids):,} {place}, from {equal:,} on {ids[equal : equal + 3]}"
            for ids, place in ((first, there), (second, here))
        ]
        return f"{text} has {'; '.join(sides)}"
    return None


def read_answers(path: Path) -> Collected:
    """Read a server's answers from a file that `Collected.write` wrote, or from one that has only the key "prompts".

    Raises:
        ServingError: the file holds something else.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        saved = read_json(path)
        prompts = [
            Prompt(
                list(map(int, prompt["ids"])),
                [Answer(int(position), int(token), float(logprob)) for position, token, logprob in prompt["answers"]],
            )
            for prompt in saved["prompts"]
        ]
        if prompts and all(map(_is_answered, prompts)):
            prompts.sort(key=lambda prompt: len(prompt.ids))
            others = {item.name: saved[item.name] for item in fields(Collected) if item.name in saved}
            return Collected(**others | {"server": str(saved.get("server") or path.name), "prompts": prompts})
    raise ServingError(
        f"{str(path)!r} does not hold answers of a server: JSON with 'prompts', each with 'ids' and with 'answers' "
        "[position, token, logprob]"
    )


def _is_answered(prompt: Prompt) -> bool:
    """Return True if a prompt has answers, and all are finite log-probabilities for positions within the prompt."""
    return bool(prompt.answers) and all(
        0 < answer.position <= len(prompt.ids) and math.isfinite(answer.logprob) for answer in prompt.answers
    )


def as_text(sentences: Sequence[str], lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> str:
    """Return sentences, and below them a table of the differences between log-probabilities, in nats by length."""
    return "\n".join([*map(wrapped, sentences), "", text_table(difference_rows(lengths, differences), "lr")])


def difference_rows(lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> Rows:
    """Return the head and rows of a table of the differences between log-probabilities, in nats by length.

    Lengths that were not computed have empty cells.
    """
    rows = [("difference in nats", *(f"{length:,}" for length in lengths))]
    for name, values in differences.items():
        rows.append((name, *(f"{value:.4f}" for value in values), *[""] * (len(lengths) - len(values))))
    return rows
