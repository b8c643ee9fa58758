"""What a server answers about prompts cut from a text: asked for, kept in a file, and read from one."""

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
from rope_ext_hf.files import atomic_file, read_json
from rope_ext_hf.hub import fingerprint, load_empty, load_tokenizer
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.spans import encode
from rope_ext_hf.servers.clients import Answer, Client
from rope_ext_hf.terminal import Rows, text_table, wrapped

_SAMPLE = 2000  # characters of a text whose tokens are compared
_PARTS = 8  # of the length of a server, of which prompts are one, two, four and eight


class Prompt(NamedTuple):
    """Token ids, and what a server answered about them."""

    ids: list[int]
    answers: list[Answer]


@dataclass
class Collected:
    """The answers of a server, and what a record of them keeps beside."""

    server: str
    prompts: list[Prompt]  # the shortest first
    refused: str | None = None  # the server's words on the first prompt that it did not answer; None: it answered all
    stated: dict[str, Any] = field(default_factory=dict)
    # text, tokens: a text, and the server's tokens of it without special ones and with them; None: it gives none
    text: str = ""
    tokens: list[list[int]] | None = None
    # in nats, how much answers differ when each prompt is asked about again
    noise: list[float] = field(default_factory=list)
    fingerprint: dict[str, Any] | None = None  # of the model that is to be served; None: not known
    left_out: int | None = None  # the longest length that was left out as too costly to compute here; None: none was
    # asks about so many further prompts as short as the shortest
    more: Callable[[int], list[Prompt]] = field(default=lambda count: [], repr=False)

    def write(self, path: Path) -> None:
        values = {name: value for name, value in vars(self).items() if name != "more"}
        with atomic_file(path) as part:
            part.write_text(json.dumps(values | {"prompts": [prompt._asdict() for prompt in self.prompts]}))


def collect(
    client: Client,
    model: str | Path | None,
    lengths: Sequence[Length] | None,
    data: str,
    source: Mapping[str, Any],
    affordable: Callable[[int], bool] = lambda length: True,  # where no lengths are given, beside the shortest
) -> Collected:
    """Ask a server about prompts of every length, cut by the tokenizer here, or without a model by the server's."""
    lengths = parse_lengths(lengths) if lengths else None
    text = next(iter(load(data))).text[:_SAMPLE]
    made = Collected(client.title, [], stated=client.stated(), text=text)
    cut: Callable[[str], list[int]] = partial(client.tokens, special=False)
    with contextlib.suppress(ServingError):
        made.tokens = [client.tokens(text, special) for special in (False, True)]
    if model is None:
        longest = made.stated.get("length", 0)
        first = max(16, longest // _PARTS)
        if not longest and not lengths:
            raise ServingError(f"{client.title} does not state its length: give --lengths, or the model it serves")
    else:
        tokenizer, empty = load_tokenizer(model, **source), load_empty(model, **source)
        cut = partial(encode, tokenizer)
        made.fingerprint, described = fingerprint(empty).to_dict(), describe(empty)
        longest, first = described.extended_length or described.context_length, max(16, described.context_length // 2)
    last = longest - 1  # a server takes a prompt with the token that it generates
    doubled = [first << n for n in range(max(0, last).bit_length()) if first << n < last]
    first, *longer = sorted(set(lengths or (*doubled, last)))
    wanted = [first, *(length for length in longer if lengths or affordable(length))]
    made.left_out = longer[-1] if longer and longer[-1] > wanted[-1] else None
    ids = _text_ids(cut, data, wanted[-1])
    for length in wanted:
        try:
            made.prompts.append(Prompt(ids[:length], client.answers(ids[:length])))
        except ServingError as error:
            if not made.prompts:
                raise
            made.refused = str(error)
            break

    def more(count: int) -> list[Prompt]:
        longer = _text_ids(cut, data, (count + 1) * wanted[0])
        parts = (longer[at : at + wanted[0]] for at in range(wanted[0], len(longer), wanted[0]))
        return [Prompt(part, client.answers(part)) for part in parts]

    made.more = more
    return made


def _text_ids(cut: Callable[[str], list[int]], data: str, count: int) -> list[int]:
    """The first tokens of a text, document after document; raises CorpusError for too short a text."""
    ids: list[int] = []
    for document in load(data):
        ids += cut(document.text)
        if len(ids) >= count:
            return ids[:count]
    raise CorpusError(
        f"the text {data!r} has {len(ids):,} tokens, and prompts of {count:,} are asked for; give a longer one"
    )


def differing_tokens(
    theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], there: str, here: str
) -> str | None:
    """How the tokens of a text differ in two places, without special ones and with them; None: they do not."""
    for what, one, other in zip(("a text", "a text with special tokens"), theirs, ours, strict=True):
        if one != other:
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
            at = sum(1 for _ in equal)
            sides = ((one, there), (other, here))
            parts = (f"{len(ids):,} {where}, from {at:,} on {ids[at : at + 3]}" for ids, where in sides)
            return f"{what} has {'; '.join(parts)}"
    return None


def read_answers(path: Path) -> Collected:
    """The file that `Collected.write` writes, or one with its "prompts" alone; raises ServingError for any other."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        saved = read_json(path)
        prompts = [
            Prompt(list(map(int, prompt["ids"])), [Answer(int(p), int(t), float(x)) for p, t, x in prompt["answers"]])
            for prompt in saved["prompts"]
        ]
        if prompts and all(
            answers and all(0 < each.position <= len(ids) and math.isfinite(each.logprob) for each in answers)
            for ids, answers in prompts
        ):
            others = {item.name: saved[item.name] for item in fields(Collected) if item.name in saved}
            read = Collected(**others | {"server": str(saved.get("server") or path.name), "prompts": prompts})
            read.prompts.sort(key=lambda prompt: len(prompt.ids))
            return read
    raise ServingError(
        f"{str(path)!r} does not hold answers of a server: JSON with 'prompts', each with 'ids' and with 'answers' "
        "[position, token, logprob]"
    )


def as_text(sentences: Sequence[str], lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> str:
    """Sentences, and a table of differences in nats by length."""
    return "\n".join([*map(wrapped, sentences), "", text_table(difference_rows(lengths, differences), "lr")])


def difference_rows(lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> Rows:
    """A head, and differences in nats by length; those that were not computed come last."""
    rows = [("difference in nats", *(f"{length:,}" for length in lengths))]
    for name, values in differences.items():
        rows.append((name, *(f"{value:.4f}" for value in values), *[""] * (len(lengths) - len(values))))
    return rows
