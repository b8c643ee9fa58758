"""`check_server`: whether a running server computes what was measured, by the log-probabilities that it gives.

print(rope.check_server("http://localhost:8000", "my-model-yarn/"))

Token ids go to the server, short prompts first, and its log-probabilities are compared with those of the model here.
Where they differ, the likely mistakes are computed here too, and the one that fits is named.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, ServingError
from rope_ext_hf.files import atomic_file, check_destination, read_json
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.servers.clients import Answer, connect
from rope_ext_hf.servers.mistakes import AS_MEASURED, configurations
from rope_ext_hf.serving.target import open_model
from rope_ext_hf.terminal import text_table, wrapped

_CERTAIN = 6.0
"""Standard errors by which a configuration fits worse than another before it is excluded."""
_MARGIN = 3.0
"""How many times the rounding of a dtype here explains in a server, whose sums run in another order."""
_RESOLUTION = 1e-6  # of a log-probability in float32, in nats
_BLOCK = 32  # weights with one scale


class _Prompt(NamedTuple):
    """Token ids, and what a server answered about them."""

    ids: list[int]
    answers: list[Answer]


class _Collected(NamedTuple):
    """The answers of a server.

    Attributes:
        server: the program with its version.
        prompts: the shortest first.
        refused: the server's words on the first prompt that it did not answer; None: it answered all.
    """

    server: str
    prompts: list[_Prompt]
    refused: str | None


@dataclass(frozen=True)
class ServerReport:
    """The configuration that a server runs.

    Attributes:
        url, server: the address, and the program with its version.
        method: the method that was measured.
        runs: the configuration that the server agrees with: "as measured", or the name of a mistake; None: none.
        closest: the configuration with the smallest difference, whether the server agrees with it or not.
        precision: the dtype whose rounding explains the difference that is left; None: none does.
        alike: configurations that these answers do not tell from `closest`.
        refused: the server's words on the shortest prompt that it does not answer; None: it answers all.
        lengths: of the prompts, in tokens.
        differences: by configuration, the root mean square difference of log-probabilities in nats, at each length up
            to the one that excludes it.
        explained: by dtype, the largest such difference that its rounding explains.
    """

    url: str
    server: str
    method: str
    runs: str | None
    closest: str
    precision: str | None
    alike: tuple[str, ...]
    refused: str | None
    lengths: tuple[int, ...]
    differences: dict[str, tuple[float, ...]]
    explained: dict[str, tuple[float, ...]]

    @property
    def agrees(self) -> bool:
        """Whether the server computes what was measured, at every length asked for."""
        return self.runs == AS_MEASURED and self.refused is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        if self.runs == AS_MEASURED:
            reach = "" if self.refused is None else f" up to {self.lengths[-1]:,} tokens"
            verdict = f"serves what was measured{reach}: {self.method}"
        elif self.runs is not None:
            verdict = f"does not serve what was measured ({self.method}): it runs the model {self.runs}"
        else:
            verdict = (
                f"serves neither what was measured ({self.method}) nor the model with a likely mistake; the closest, "
                f"{self.closest}, differs by more than rounding explains"
            )
        sentences = [f"{self.server} at {self.url} {verdict}"]
        if self.precision is not None:
            sentences.append(f"the difference that is left is within the rounding of {self.precision}")
        if self.alike:
            sentences.append(f"these answers do not tell that from the model {', '.join(self.alike)}")
        if self.refused is not None:
            sentences.append(f"it does not answer a longer prompt: {self.refused}")
        differences = self.differences | {f"allowed for {name}": values for name, values in self.explained.items()}
        rows = [("difference in nats", *(f"{length:,}" for length in self.lengths))]
        for name, values in differences.items():  # a configuration that is excluded has no values at longer lengths
            cells = [f"{value:.4f}" for value in values]
            rows.append((name, *cells, *[""] * (len(self.lengths) - len(cells))))
        return "\n".join([*map(wrapped, sentences), "", text_table(rows, "lr")])


def check_server(
    url: str,
    model: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    data: str = "stdlib",
    served_name: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    seconds: float = 300.0,
    weight_bits: int = 8,
    from_file: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ServerReport:
    """Compare what a running server computes with the model here.

    Args:
        url: the server's address, e.g. http://localhost:8000: vLLM, SGLang, llama.cpp, or a program with OpenAI's
            completions that gives the log-probabilities of a prompt. An API key is taken from ROPE_EXT_API_KEY.
        model: the folder or Hub id that it serves, patched or not; its weights are loaded here.
        lengths: of prompts in tokens; default: half the context length, and doubled up to the extended length.
        data: the text that prompts are cut from, as `rope_ext_hf.eval.perplexity` takes it.
        served_name: the name of the model on the server; default: the first that it lists.
        dtype, device: of the model here.
        seconds: that an answer may take.
        weight_bits: of the weights on the server, 2 to 32; what coarser weights would explain is not allowed. Above
            16, the rounding of float16 is.
        from_file: answers collected elsewhere, in place of the server's: JSON with {"prompts": [{"ids": [...],
            "answers": [[position, token, logprob], ...]}]}, of a token given the tokens before the position.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.
        progress: called with the tokens of prompts that were computed here, and of all of them.

    Raises:
        ServingError: nothing there, or no log-probabilities; the message has the server's words.
        CheckpointError, CorpusError, MethodError: as other functions raise them.
    """
    if not 2 <= weight_bits <= 32:
        raise MethodError(f"weight_bits must be from 2 to 32, got {weight_bits}")
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if from_file is not None:
        collected = _read_answers(Path(from_file))
    else:
        collected = _collect(url, model, lengths, data, served_name, seconds, source)
    prompts = collected.prompts
    loaded = load_model(model, dtype=dtype, device=device, **source)
    size = loaded.get_input_embeddings().weight.shape[0]
    asked = [token for ids, answers in prompts for token in (*ids, *(answer.token for answer in answers))]
    if foreign := [token for token in asked if not 0 <= token < size]:
        raise ServingError(f"token {foreign[0]} is outside this model's vocabulary of {size}; another model is served")
    made = configurations(loaded, open_model(model, **source).described.rotary)
    theirs = [torch.tensor([a.logprob for a in prompt.answers], dtype=torch.float64) for prompt in prompts]
    ours: dict[str, list[Tensor]] = {name: [] for name in made}
    left, done, total = list(made), 0, sum(len(prompt.ids) for prompt in prompts)
    progress(done, total)
    for prompt in prompts:  # the shortest first: what it excludes is not computed for the longer ones
        for name in left:
            with made[name]():
                ours[name].append(_logprobs(loaded, prompt))
        closest = min(left, key=lambda name: math.hypot(*_distances(theirs, ours[name])))
        left = [name for name in left if name == AS_MEASURED or not _excluded(theirs, ours[name], ours[closest])]
        progress(done := done + len(prompt.ids), total)
    alike = [name for name in left if name != closest and not _excluded(theirs, ours[name], ours[closest])]
    if AS_MEASURED in alike:
        alike[alike.index(AS_MEASURED)], closest = closest, AS_MEASURED
    specs, precision, explained = present_specs(loaded), None, {}
    with made[closest]():  # a model beyond its length is more sensitive to rounding than one that is extended
        for name, spread in _spreads(loaded, prompts, ours[closest], weight_bits):
            explained[name] = tuple(_MARGIN * value for value in spread)
            if all(a <= b for a, b in zip(_distances(theirs, ours[closest]), explained[name], strict=True)):
                precision = name
                break
    return ServerReport(
        url=str(url),
        server=collected.server,
        method=specs[-1].method.label() if specs else "the model as published",
        runs=closest if precision else None,
        closest=closest,
        precision=precision,
        alike=tuple(alike),
        refused=collected.refused,
        lengths=tuple(len(prompt.ids) for prompt in prompts),
        differences={name: _distances(theirs, values) for name, values in ours.items()},
        explained=explained,
    )


def save_answers(
    url: str,
    model: str | Path,
    path: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    data: str = "stdlib",
    served_name: str | None = None,
    seconds: float = 300.0,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write what a server answers into a file for `check_server(from_file=...)`; no weights are read here.

    Args:
        model: its config and its tokenizer are read.
        path: the file; the other arguments are those of `check_server`.

    Raises:
        ServingError: nothing there, or no log-probabilities; the message has the server's words.
        FileError: the file exists, or the disk refuses it.
        CheckpointError, CorpusError: as other functions raise them.
    """
    destination = Path(path)
    check_destination(destination)
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    collected = _collect(url, model, lengths, data, served_name, seconds, source)
    with atomic_file(destination) as part:
        part.write_text(json.dumps(collected._asdict() | {"prompts": [p._asdict() for p in collected.prompts]}))


def _collect(
    url: str,
    model: str | Path,
    lengths: Sequence[int] | None,
    data: str,
    served_name: str | None,
    seconds: float,
    source: Mapping[str, Any],
) -> _Collected:
    client = connect(url, served_name, seconds)
    described = describe(load_empty(model, **source))
    longest = described.extended_length or described.context_length
    # A server takes a prompt with the token that it generates.
    last, first = longest - 1, max(16, described.context_length // 2)
    doubled = [first << n for n in range(last.bit_length()) if first << n < last]
    wanted = sorted(set(lengths or (*doubled, last)))
    ids = _text_ids(load_tokenizer(model, **source), data, wanted[-1])
    prompts: list[_Prompt] = []
    refused = None
    for length in wanted:
        try:
            prompts.append(_Prompt(ids[:length], client.answers(ids[:length])))
        except ServingError as error:
            if not prompts:
                raise
            refused = str(error)
            break
    return _Collected(client.title, prompts, refused)


def _text_ids(tokenizer: Any, data: str, count: int) -> list[int]:
    """The first tokens of a text, document after document.

    Raises:
        CorpusError: too short a text.
    """
    ids: list[int] = []
    for document in load(data):
        ids += tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count:
            return ids[:count]
    raise CorpusError(
        f"the text {data!r} has {len(ids):,} tokens, and prompts of {count:,} are asked for; give a longer one"
    )


def _read_answers(path: Path) -> _Collected:
    usable = False
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        saved = read_json(path)
        prompts = [
            _Prompt(list(map(int, prompt["ids"])), [Answer(int(p), int(t), float(x)) for p, t, x in prompt["answers"]])
            for prompt in saved["prompts"]
        ]
        usable = bool(prompts) and all(
            answers and all(0 < each.position <= len(ids) and math.isfinite(each.logprob) for each in answers)
            for ids, answers in prompts
        )
    if not usable:
        raise ServingError(
            f"{str(path)!r} does not hold answers of a server: JSON with 'prompts', each with 'ids' and with 'answers' "
            "[position, token, logprob]"
        )
    prompts.sort(key=lambda prompt: len(prompt.ids))
    refused = saved.get("refused")
    return _Collected(str(saved.get("server") or path.name), prompts, None if refused is None else str(refused))


@torch.no_grad()
def _logprobs(model: Any, prompt: _Prompt) -> Tensor:
    """Log-probabilities by the model here of the tokens that a server answered about, (answers,) float64."""
    ids, answers = prompt
    first = min(answer.position for answer in answers)
    given = torch.tensor([list(ids)], device=model.device)
    scores = model(given, use_cache=False, logits_to_keep=len(ids) - first + 1).logits[0].float().log_softmax(-1)
    rows, tokens = (torch.tensor(part) for part in zip(*((a.position - first, a.token) for a in answers), strict=True))
    ours: Tensor = scores[rows.to(scores.device), tokens.to(scores.device)]
    return ours.double().cpu()


def _distances(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> tuple[float, ...]:
    """The root mean square difference at each length that was computed, in nats."""
    return tuple(float((a - b).square().mean().sqrt()) for a, b in zip(theirs, ours, strict=False))


def _excluded(theirs: Sequence[Tensor], ours: Sequence[Tensor], best: Sequence[Tensor]) -> bool:
    """Whether one configuration fits worse than the best by more than the scatter about the best can do.

    Under independent scatter s about the best, the difference of the two sums of squares has the mean |ours - best|^2
    and the standard deviation 2 s |ours - best|.
    """
    server, other, first = (torch.cat(list(part[: len(ours)])) for part in (theirs, ours, best))
    scatter = max(float((server - first).square().mean().sqrt()), _RESOLUTION)
    worse = (server - other).square().sum() - (server - first).square().sum()
    return bool(worse > _CERTAIN * 2 * scatter * (other - first).norm())


def _spreads(
    model: Any, prompts: Sequence[_Prompt], exact: Sequence[Tensor], weight_bits: int
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """By dtype, what rounding to it changes at each length, in nats; the model's weights are lost."""

    def changed() -> tuple[float, ...]:
        return _distances(exact, [_logprobs(model, prompt) for prompt in prompts])

    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
        rounded = changed()
        model.to(torch.float32)
        yield "float32 or float16", tuple(value / 8 for value in rounded)  # float16 has three bits more
        if weight_bits <= 16:
            yield "bfloat16", rounded
    for bits in sorted({8, weight_bits}, reverse=True) if weight_bits <= 8 else ():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.shape[-1] % _BLOCK == 0:
                    parameter.copy_(_rounded(parameter.contiguous(), bits))
        yield f"{bits}-bit weights", changed()


def _rounded(weight: Tensor, bits: int) -> Tensor:
    """Weights in few bits, with a scale in float16 for every 32; 8 bits are Q8_0 of llama.cpp."""
    blocks = weight.float().view(-1, _BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    rounded: Tensor = whole * scale.half().float()
    return rounded.view_as(weight)
