"""What a server answers about prompts cut from a text: asked for, kept in a file, and compared with such a record.

A record holds token ids, the log-probabilities that the server gave, how much they differ when it is asked again, and
what it states of itself. `compare_server` asks about the same ids again, without a model beside the server: what
changed is named, and the length at which it begins.
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
from rope_ext_hf.files import atomic_file, check_destination, read_json
from rope_ext_hf.hub import fingerprint, load_empty, load_tokenizer, tokens_before
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.fingerprint import Fingerprint
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.spans import encode, prefix_tokens
from rope_ext_hf.terminal import Report, Rows, text_table, wrapped
from rope_ext_hf.tools.servers.clients import Answer, Client, connect

_SAMPLE = 2000  # characters of a text whose tokens are compared
_PARTS = 8  # of the length of a server, of which prompts are one, two, four and eight
_MARGIN = 3.0  # how many times the difference between two answers to one question a later answer may differ
_SMALLEST = 1e-4  # nats, below which a difference says nothing
_SMALL = 0.1  # nats, up to which another dtype makes them
_HARMLESS = ("version", "folder")  # of what a server states


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
    prefix: tuple[int, ...] = ()
    with contextlib.suppress(ServingError):
        made.tokens = [client.tokens(text, special) for special in (False, True)]
        prefix = tokens_before(made.tokens[1], made.tokens[0]) or ()
    if model is None:
        longest = made.stated.get("length", 0)
        first = max(16, longest // _PARTS)
        if not longest and not lengths:
            raise ServingError(f"{client.title} does not state its length: give --lengths, or the model it serves")
    else:
        tokenizer, empty = load_tokenizer(model, **source), load_empty(model, **source)
        cut, prefix = partial(encode, tokenizer), prefix_tokens(tokenizer, None)
        made.fingerprint, described = fingerprint(empty).to_dict(), describe(empty)
        longest, first = described.extended_length or described.context_length, max(16, described.context_length // 2)
    last = longest - 1  # a server takes a prompt with the token that it generates
    doubled = [first << n for n in range(max(0, last).bit_length()) if first << n < last]
    first, *longer = sorted(set(lengths or (*doubled, last)))
    wanted = [first, *(length for length in longer if lengths or affordable(length))]
    made.left_out = longer[-1] if longer and longer[-1] > wanted[-1] else None
    ids = [*prefix, *_text_ids(cut, data, wanted[-1] - len(prefix))]
    for length in wanted:
        try:
            made.prompts.append(Prompt(ids[:length], client.answers(ids[:length])))
        except ServingError as error:
            if not made.prompts:
                raise
            made.refused = str(error)
            break

    def more(count: int) -> list[Prompt]:
        each = wanted[0] - len(prefix)  # tokens of the text in a prompt
        longer = _text_ids(cut, data, (count + 1) * each)
        parts = ([*prefix, *longer[at : at + each]] for at in range(each, len(longer), each))
        return [Prompt(part, client.answers(part)) for part in parts]

    made.more = more
    return made


def _text_ids(cut: Callable[[str], list[int]], data: str, count: int) -> list[int]:
    """The first tokens of a text, document after document; raises CorpusError for too short a text."""
    ids: list[int] = []
    for document in load(data):
        ids += cut(document.text[: 64 * count])  # a token has fewer characters, and a text may have millions
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


@dataclass(frozen=True)
class BaselineReport(Report):
    """How a server answers, against a record.

    Attributes:
        url, server: the address, and the program with its version.
        lengths: of the prompts, in tokens.
        differences: the root mean square difference of log-probabilities in nats, at each length that is answered.
        allowed: three times what asking again changed, then or now, at each length.
        refused: the server's words on the first prompt that it does not answer now and did then.
        changed: how what the server states of itself, its tokens and the model differ from the record; a sentence each.
        notes: such differences of its version and its folder, which change no answer by themselves.
    """

    also = ("agrees", "begins")
    url: str
    server: str
    lengths: tuple[int, ...]
    differences: tuple[float, ...]
    allowed: tuple[float, ...]
    refused: str | None
    changed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def begins(self) -> int | None:
        """The shortest length at which answers differ, in tokens; None: they do at none."""
        pairs = zip(self.lengths, self.differences, self.allowed, strict=False)
        return next((length for length, difference, allowed in pairs if difference > allowed), None)

    @property
    def agrees(self) -> bool:
        """Whether the server answers as recorded, at every length, and states nothing else that matters."""
        return self.begins is None and self.refused is None and not self.changed

    def __str__(self) -> str:
        sentences = [f"{self.server} at {self.url} {self._verdict()}", *self.changed, *self.notes]
        if self.refused is not None:
            sentences.append(f"it no longer answers {self.lengths[len(self.differences)]:,} tokens: {self.refused}")
        return as_text(sentences, self.lengths, {"from the record": self.differences, "allowed": self.allowed})

    def _verdict(self) -> str:
        if self.begins is None:
            return "answers as recorded" + ("" if self.agrees else ", but not all is as it was")
        cause = "by as much as another method, factor or theta, an adapter or other weights make"
        if at := self.lengths.index(self.begins):
            cause = (
                f"and up to {self.lengths[at - 1]:,} it does: a method or an option for long inputs, or dropped keys"
            )
        elif max(self.differences) < _SMALL:
            cause = "by as little as another dtype of weights or of keys and values, or another kernel, makes"
        return f"does not answer as recorded from {self.begins:,} tokens on, {cause}"


def record_server(
    url: str,
    path: str | Path,
    model: str | Path | None = None,
    *,
    lengths: Sequence[Length] | None = None,
    data: str = "stdlib",
    served_name: str | None = None,
    seconds: float = 300.0,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Collected:
    """Write what a server answers, for `compare_server` and `check_server(from_file=...)`; no weights are read here.

    Args:
        path: the file, which must not exist yet.
        model: what it serves, for its tokenizer, its fingerprint and the lengths; None: the server cuts the text, and
            lengths are an eighth, a quarter and a half of its own, and all of it. Others: as `check_server` takes them.

    Raises:
        ServingError: nothing there, or no log-probabilities; the message has the server's words.
        FileError: the file exists, or the disk refuses it.
    """
    check_destination(Path(path))
    client = connect(url, served_name, seconds, anew=True)
    made = collect(client, model, lengths, data, {"revision": revision, "trust_remote_code": trust_remote_code})
    made.noise = [_difference(prompt.answers, client.answers(prompt.ids)) for prompt in made.prompts]
    made.write(Path(path))
    return made


def compare_server(
    url: str,
    path: str | Path,
    model: str | Path | None = None,
    *,
    served_name: str | None = None,
    seconds: float = 300.0,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> BaselineReport:
    """Ask a server again what a record holds; neither weights nor a tokenizer are read here.

    Args:
        path: what `record_server` wrote.
        model: the folder or Hub id that is to be served, to compare its fingerprint with the recorded one; None: the
            record is compared with the server alone.

    Raises:
        ServingError: nothing there, or a file that holds no answers.
        CheckpointError: no such model.
    """
    then, client = read_answers(Path(path)), connect(url, served_name, seconds, anew=True)
    stated = client.stated()
    changed: list[str] = []
    notes: list[str] = []
    for name in sorted({*then.stated, *stated} if then.stated else ()):
        before, now = then.stated.get(name), stated.get(name)
        if before != now:
            (notes if name in _HARMLESS else changed).append(f"{name}: {before} then, {now} now")
    if then.tokens is not None:
        given: list[list[int]] = [[], []]
        with contextlib.suppress(ServingError):
            given = [client.tokens(then.text, special) for special in (False, True)]
        differing = differing_tokens(then.tokens, given, "then", "now")
        changed += [] if differing is None else [f"tokens: {differing}"]
    if model is not None and then.fingerprint is not None:
        now_serving = fingerprint(model, revision=revision, trust_remote_code=trust_remote_code)
        changed += [f"method: {each}" for each in Fingerprint.from_dict(then.fingerprint).differences(now_serving)]
    answers: list[list[Answer]] = []
    refused = None
    for prompt in then.prompts:
        try:
            answers.append(client.answers(prompt.ids))
        except ServingError as error:
            refused = str(error)
            break
    asked = list(zip(then.prompts, then.noise or [0.0] * len(then.prompts), answers, strict=False))
    noises = [max(noise, _difference(given, client.answers(prompt.ids))) for prompt, noise, given in asked]
    return BaselineReport(
        url=str(url),
        server=client.title,
        lengths=tuple(len(prompt.ids) for prompt in then.prompts),
        differences=tuple(_difference(prompt.answers, given) for prompt, _, given in asked),
        allowed=tuple(max(_SMALLEST, _MARGIN * noise) for noise in noises),
        refused=refused,
        changed=tuple(changed),
        notes=tuple(notes),
    )


def _difference(then: Sequence[Answer], now: Sequence[Answer]) -> float:
    """The root mean square difference of log-probabilities in nats."""
    given = {(each.position, each.token): each.logprob for each in now}
    least: dict[int, float] = {}
    for each in now:
        least[each.position] = min(each.logprob, least.get(each.position, math.inf))
    squares = []
    for position, token, logprob in then:
        other = given.get((position, token))
        if other is None and position in least:
            other = min(logprob, least[position])  # what it left out is at most as likely as the last that it gives
        if other is None:
            raise ServingError(f"the server no longer gives log-probabilities at position {position:,} of a prompt")
        squares.append((logprob - other) ** 2)
    return math.sqrt(math.fsum(squares) / len(squares))
