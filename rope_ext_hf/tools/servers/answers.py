"""A server's answers about prompts cut from a text, the record of them in a file, and the comparison with a record.

A record holds token ids, the log-probabilities that the server returned, their differences when it is asked again, and
the facts that the server states about itself. `compare_server` later asks about the same ids, without a model beside
the server, and reports what changed and from which length on.
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
_PARTS = 8  # without a model, the shortest prompt is this part of the server's length
_MARGIN = 3.0  # a later answer may differ by this many times the difference between two answers to one question
_SMALLEST = 1e-4  # nats; smaller differences are not significant
_SMALL = 0.1  # nats; another dtype makes differences up to this
_HARMLESS = ("version", "folder")  # stated facts whose change alone changes no answer


class Prompt(NamedTuple):
    """Token ids with a server's answers about them."""

    ids: list[int]
    answers: list[Answer]


@dataclass
class Collected:
    """The answers of a server, with the other contents of a record.

    Attributes:
        server: the serving program with its version.
        prompts: the prompts with their answers, the shortest first.
        refused: the server's message for the first prompt that it did not answer; None: it answered all.
        stated: facts that the server states about itself, by name.
        text: a text.
        tokens: the server's tokens of the text, without special tokens and with them; None: it does not return tokens.
        noise: for each prompt, the difference in nats between the answers when it is asked about twice.
        fingerprint: the fingerprint of the model that is to be served; None: not known.
        left_out: the longest length that was left out as too costly to compute here; None: none was.
        more: a function that asks the server about so many further prompts, as short as the shortest one.
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
        """Write a record as JSON, as `read_answers` reads it."""
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
    """Ask a server about prompts of several lengths, and return its answers.

    Args:
        client: the server's client.
        model: the model that is served: its tokenizer cuts the text, and default lengths are half its context length,
            doubled up to its extended length. None: the server cuts the text, and default lengths are an eighth of its
            own length, doubled up to all of it.
        lengths: lengths of the prompts in tokens; None: the default ones.
        data: the text that prompts are cut from.
        source: `revision` and `trust_remote_code` of the model.
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
                f"{client.title} does not state its context length: give --lengths, or the model that it serves"
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
    """Return lengths that double from the shortest up to one token less than the longest."""
    last = longest - 1  # a server counts the token that it generates as part of the length
    lengths, length = [last], max(16, shortest)
    while length < last:
        lengths.append(length)
        length *= 2
    return lengths


def _text_ids(cut: Callable[[str], list[int]], data: str, count: int) -> list[int]:
    """Return the first `count` tokens of a text, document after document.

    Raises:
        CorpusError: the text has fewer.
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
    """Return how the tokens of a text differ between two places, or None where they do not.

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
    """Read the file that `Collected.write` writes, or one that has only its "prompts".

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
    """Return True if a prompt has answers, all of them finite and about positions in the prompt."""
    return bool(prompt.answers) and all(
        0 < answer.position <= len(prompt.ids) and math.isfinite(answer.logprob) for answer in prompt.answers
    )


def as_text(sentences: Sequence[str], lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> str:
    """Return sentences with a table of differences in nats by length below them."""
    return "\n".join([*map(wrapped, sentences), "", text_table(difference_rows(lengths, differences), "lr")])


def difference_rows(lengths: Sequence[int], differences: Mapping[str, Sequence[float]]) -> Rows:
    """Return a table's head and its rows: differences in nats by length, empty at lengths that were not computed."""
    rows = [("difference in nats", *(f"{length:,}" for length in lengths))]
    for name, values in differences.items():
        rows.append((name, *(f"{value:.4f}" for value in values), *[""] * (len(lengths) - len(values))))
    return rows


@dataclass(frozen=True)
class BaselineReport(Report):
    """A server's answers compared with an earlier record.

    Attributes:
        url: the server's address.
        server: the serving program with its version.
        lengths: lengths of the prompts, in tokens.
        differences: the root mean square difference of log-probabilities in nats, at each length that is answered.
        allowed: three times the difference between two answers to the same prompt, then or now, at each length.
        refused: the server's message for the first prompt that it answered then and does not answer now.
        changed: differences from the record in the server's stated facts, its tokens and the model, a sentence each.
        notes: such differences in the server's version and folder, which change no answer by themselves.
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
        """The shortest length at which answers differ, in tokens; None: they differ at no length."""
        for length, difference, allowed in zip(self.lengths, self.differences, self.allowed, strict=False):
            if difference > allowed:
                return length
        return None

    @property
    def agrees(self) -> bool:
        """True if the server answers as recorded at every length, and nothing else that matters has changed."""
        return self.begins is None and self.refused is None and not self.changed

    def __str__(self) -> str:
        sentences = [f"{self.server} at {self.url} {self._verdict()}", *self.changed, *self.notes]
        if self.refused is not None:
            sentences.append(f"it no longer answers {self.lengths[len(self.differences)]:,} tokens: {self.refused}")
        return as_text(sentences, self.lengths, {"from the record": self.differences, "allowed": self.allowed})

    def _verdict(self) -> str:
        if self.agrees:
            return "answers as recorded"
        if self.begins is None:
            return "answers as recorded, but something else has changed"
        index = self.lengths.index(self.begins)
        if index:
            cause = (
                f"while up to {self.lengths[index - 1]:,} it does: this suggests a method or an option for long "
                "inputs, or keys that are dropped"
            )
        elif max(self.differences) < _SMALL:
            cause = (
                "by as little as another dtype of weights or of keys and values, or another kernel, would change them"
            )
        else:
            cause = "by as much as another method, factor or theta, an adapter or other weights would change them"
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
    """Write a server's answers to a file, for `compare_server` and `check_server(from_file=...)`.

    No weights are read here. The arguments that are not listed are as in `check_server`.

    Args:
        url: the server's address.
        path: the file, which must not exist yet.
        model: the model that is served: it gives the tokenizer, the fingerprint and the default lengths. None: the
            server cuts the text, and the default lengths are an eighth, a quarter, a half and all of its own length.

    Returns:
        The contents of the file.

    Raises:
        ServingError: the server does not answer, or returns no log-probabilities; the message has the server's words.
        FileError: the file exists, or it cannot be written.
    """
    check_destination(Path(path))
    client = connect(url, served_name, seconds, anew=True)
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    collected = collect(client, model, lengths, data, source)
    collected.noise = [_difference(prompt.answers, client.answers(prompt.ids)) for prompt in collected.prompts]
    collected.write(Path(path))
    return collected


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
    """Ask a server about the prompts of a record, and compare its answers with the recorded ones.

    Neither weights nor a tokenizer are read here. The arguments that are not listed are as in `check_server`.

    Args:
        url: the server's address.
        path: the file that `record_server` wrote.
        model: the folder or Hub id that is to be served; its fingerprint is compared with the recorded one. None: no
            fingerprint is compared.

    Raises:
        ServingError: the server does not answer, or the file holds no answers.
        CheckpointError: the model does not exist or is damaged.
    """
    then, client = read_answers(Path(path)), connect(url, served_name, seconds, anew=True)
    changed, notes = _changed_facts(then.stated, client.stated())
    if then.tokens is not None:
        now: list[list[int]] = [[], []]
        with contextlib.suppress(ServingError):  # a server that no longer returns tokens has none
            now = [client.tokens(then.text, special) for special in (False, True)]
        differing = differing_tokens(then.tokens, now, "then", "now")
        if differing is not None:
            changed.append(f"tokens: {differing}")
    if model is not None and then.fingerprint is not None:
        present = fingerprint(model, revision=revision, trust_remote_code=trust_remote_code)
        differences = Fingerprint.from_dict(then.fingerprint).differences(present)
        changed += [f"method: {difference}" for difference in differences]
    answers: list[list[Answer]] = []
    refused = None
    for prompt in then.prompts:
        try:
            answers.append(client.answers(prompt.ids))
        except ServingError as error:
            refused = str(error)
            break
    noises = []  # a record from a file of prompts alone has no noise
    for prompt, noise, answer in zip(then.prompts, then.noise or [0.0] * len(then.prompts), answers, strict=False):
        noises.append(max(noise, _difference(answer, client.answers(prompt.ids))))
    return BaselineReport(
        url=str(url),
        server=client.title,
        lengths=tuple(len(prompt.ids) for prompt in then.prompts),
        differences=tuple(
            _difference(prompt.answers, answer)
            for prompt, answer, _ in zip(then.prompts, answers, noises, strict=False)
        ),
        allowed=tuple(max(_SMALLEST, _MARGIN * noise) for noise in noises),
        refused=refused,
        changed=tuple(changed),
        notes=tuple(notes),
    )


def _changed_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return sentences on what a server states otherwise than then: the ones that matter, and the harmless ones."""
    changed, harmless = list[str](), list[str]()
    if not then:  # the record has none
        return changed, harmless
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            sentences = harmless if name in _HARMLESS else changed
            sentences.append(f"{name}: {then.get(name)} then, {now.get(name)} now")
    return changed, harmless


def _difference(then: Sequence[Answer], now: Sequence[Answer]) -> float:
    """Return the root mean square difference of log-probabilities in nats."""
    logprobs = {(answer.position, answer.token): answer.logprob for answer in now}
    least: dict[int, float] = {}  # by position, the least log-probability that the server returns now
    for answer in now:
        least[answer.position] = min(answer.logprob, least.get(answer.position, math.inf))
    squares = []
    for position, token, logprob in then:
        current = logprobs.get((position, token))
        if current is None and position in least:
            # The server lists the likeliest tokens. One that it leaves out is at most as likely as the last of them.
            current = min(logprob, least[position])
        if current is None:
            raise ServingError(f"the server no longer returns log-probabilities at position {position:,} of a prompt")
        squares.append((logprob - current) ** 2)
    return math.sqrt(math.fsum(squares) / len(squares))
