"""`record_server` and `compare_server`: whether a server still answers as it did, without a model beside it.

A record holds token ids, the log-probabilities that the server gave, how much they differ when it is asked again, and
what it states of itself. Later the same ids are asked about: what changed is named, and the length at which it begins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import ServingError
from rope_ext_hf.files import check_destination
from rope_ext_hf.hub import fingerprint
from rope_ext_hf.patches.fingerprint import Fingerprint
from rope_ext_hf.servers.answers import Collected, as_text, collect, differing_tokens, read_answers
from rope_ext_hf.servers.clients import Answer, connect

_MARGIN = 3.0  # how many times the difference between two answers to one question a later answer may differ
_SMALLEST = 1e-4  # nats, below which a difference says nothing
_SMALL = 0.1  # nats, up to which another dtype makes them
_HARMLESS = ("version", "folder")  # of what a server states


@dataclass(frozen=True)
class BaselineReport:
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"agrees": self.agrees, "begins": self.begins}

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
