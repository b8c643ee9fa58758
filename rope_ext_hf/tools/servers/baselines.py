"""`record_server` writes a server's answers to a file, and `compare_server` later compares the server with that file.

`compare_server` asks the server for the log-probabilities of the recorded prompts again; it needs no model of its own.
It reports the changes and the length at which they begin.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.bounds import Length
from rope_ext_hf.errors import ServingError
from rope_ext_hf.files.whole import check_destination
from rope_ext_hf.hub import fingerprint
from rope_ext_hf.patches.saved.fingerprint import Fingerprint
from rope_ext_hf.terminal import Report
from rope_ext_hf.tools.servers.answers import Collected, as_text, collect, differing_tokens, read_answers
from rope_ext_hf.tools.servers.clients import Answer, connect

_MARGIN = 3.0  # a later answer may differ by this many times the difference between two answers to one question
_SMALLEST = 1e-4  # nats; smaller differences are not significant
_SMALL = 0.1  # nats; another dtype makes differences up to this
_HARMLESS = ("version", "folder")  # stated facts whose change alone changes no answer


@dataclass(frozen=True)
class BaselineReport(Report):
    """Result of comparing a server's log-probabilities with an earlier record of them.

    Attributes:
        url: the server's address.
        server: the serving program with its version.
        lengths: lengths of the prompts, in tokens.
        differences: the root mean square difference of log-probabilities in nats, at each length that is answered.
        allowed: at each length, three times the difference between two answers to the same prompt, then or now.
        refused: the server's message for the first prompt that it answered then and does not answer now.
        changed: a sentence on each difference from the record that matters: in the server's stated facts, its tokens or
            the model.
        notes: a sentence on each difference that changes no answer by itself: in the server's version or folder.
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
        """The shortest length, in tokens, at which the server's answers differ from the record; None: at no length."""
        for length, difference, allowed in zip(self.lengths, self.differences, self.allowed, strict=False):
            if difference > allowed:
                return length
        return None

    @property
    def agrees(self) -> bool:
        """True if the server's answers are as recorded at every length, and nothing else that matters has changed."""
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
    """Ask a server for log-probabilities and write them to a file.

    `compare_server` and `check_server(from_file=...)` read the file. No weights are read here. The arguments that are
    not listed are as in `check_server`.

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
    """Ask a server for the log-probabilities of recorded prompts again, and compare them with the recorded ones.

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
    """Return sentences on changes in the facts that a server states about itself.

    The first list has the changes that matter, the second has the harmless ones.
    """
    changed, harmless = list[str](), list[str]()
    if not then:  # the record has none
        return changed, harmless
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            sentences = harmless if name in _HARMLESS else changed
            sentences.append(f"{name}: {then.get(name)} then, {now.get(name)} now")
    return changed, harmless


def _difference(then: Sequence[Answer], now: Sequence[Answer]) -> float:
    """Return the root mean square difference in nats between the log-probabilities of two lists of answers."""
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
