"""`check_server`: whether a running server computes what was measured, by the log-probabilities that it gives.

print(rope.check_server("http://localhost:8000", "my-model-yarn/"))

Token ids go to the server, short prompts first, and its log-probabilities are compared with those of the model here.
Where they differ, the likely mistakes are computed here too, and the one that fits is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.live_model import rotated_parameters
from rope_ext_hf.checkpoints.row_layouts import rotary_tensors
from rope_ext_hf.errors import CorpusError, RopeExtError, ServingError
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.files import read_json
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default, Factors
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.patches.geometry import checkpoint_geometry
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.patches.slots import present_specs
from rope_ext_hf.serving.server_clients import Answer, connect
from rope_ext_hf.serving.target import open_model

__all__ = ["ServerReport", "check_server"]

AS_MEASURED = "as measured"
NOISE = 2e-3
"""The root mean square difference in nats up to which two programs in float32 run one model."""
EXPLAINED = 0.2
"""The largest one that bfloat16 or 8-bit weights explain."""
CLEARLY = 0.7
"""Another configuration is named where its difference is below this share of that of the model as measured."""


@dataclass(frozen=True)
class ServerReport:
    """What a server runs.

    Attributes:
        url, server: the address, and the program with its version.
        method: what was measured.
        runs: the configuration that the server agrees with: "as measured", or the name of a mistake; None: none.
        lengths: of the prompts, in tokens.
        differences: by configuration, the root mean square difference of log-probabilities at each length, in nats.
    """

    url: str
    server: str
    method: str
    runs: str | None
    lengths: tuple[int, ...]
    differences: dict[str, tuple[float, ...]]

    @property
    def agrees(self) -> bool:
        """Whether the server computes what was measured."""
        return self.runs == AS_MEASURED

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        if self.agrees:
            verdict = f"serves what was measured: {self.method}"
        elif self.runs is not None:
            verdict = f"does not serve what was measured ({self.method}): it runs the model {self.runs}"
        else:
            verdict = f"serves neither what was measured ({self.method}) nor the model with a likely mistake"
        width = max(map(len, (*self.differences, "difference in nats")))
        lines = [f"{self.server} at {self.url} {verdict}", ""]
        lines.append(f"{'difference in nats':{width}}" + "".join(f"{length:>10,}" for length in self.lengths))
        for name, values in self.differences.items():
            lines.append(f"{name:{width}}" + "".join(f"{value:>10.4f}" for value in values))
        return "\n".join(lines)


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
    from_file: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ServerReport:
    """Compare what a running server computes with the model here.

    Args:
        url: the server's address, e.g. http://localhost:8000: vLLM, SGLang, llama.cpp, or a program with OpenAI's
            completions that gives the log-probabilities of a prompt. An API key is taken from ROPE_EXT_API_KEY.
        model: the folder or Hub id that it serves, patched or not; its weights are loaded here.
        lengths: of prompts in tokens; default: half the context length, and doubled up to the extended length.
        data: the text that prompts are cut from, as `rope_ext_hf.eval.perplexity` takes it.
        served_name: what the server calls the model; default: the first that it lists.
        dtype, device: of the model here.
        seconds: that an answer may take.
        from_file: answers collected elsewhere, in place of the server's: JSON with {"prompts": [{"ids": [...],
            "answers": [[position, token, logprob], ...]}]}, of a token given the tokens before the position.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        ServingError: nothing there, or no log-probabilities; the message has the server's words.
        CheckpointError, CorpusError, MethodError: as other functions raise them.
    """
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if from_file is not None:
        program, prompts = Path(from_file).name, _read_answers(Path(from_file))
    else:
        client = connect(url, served_name, seconds)
        described = describe(load_empty(model, **source))
        longest = described.extended_length or described.context_length
        # A server takes a prompt with the token that it generates.
        wanted = sorted(set(lengths or _doubling(described.context_length // 2, longest - 1)))
        ids = _text_ids(load_tokenizer(model, **source), data, wanted[-1])
        program, prompts = client.title, [(ids[:length], client.answers(ids[:length])) for length in wanted]
    loaded = load_model(model, dtype=dtype, device=device, **source)
    size = loaded.get_input_embeddings().weight.shape[0]
    if other := [t for given, answers in prompts for t in (*given, *(a.token for a in answers)) if not 0 <= t < size]:
        raise ServingError(f"token {other[0]} is outside this model's vocabulary of {size}; another model is served")
    differences: dict[str, tuple[float, ...]] = {}
    for name, configuration in _configurations(loaded, open_model(model, **source).described.rotary):
        with configuration:
            differences[name] = tuple(_difference(loaded, given, answers) for given, answers in prompts)
        if name == AS_MEASURED and max(differences[name]) <= NOISE:
            break
    return ServerReport(
        url=str(url),
        server=program,
        method=_label(loaded),
        runs=_verdict(differences),
        lengths=tuple(len(given) for given, _ in prompts),
        differences=differences,
    )


def _label(model: Any) -> str:
    specs = present_specs(model)
    return specs[-1].method.label() if specs else "the model as published"


def _doubling(first: int, last: int) -> Iterator[int]:
    length = max(16, first)
    while length < last:
        yield length
        length *= 2
    yield last


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


def _read_answers(path: Path) -> list[tuple[list[int], list[Answer]]]:
    try:
        prompts = [
            (list(map(int, prompt["ids"])), [Answer(int(p), int(t), float(x)) for p, t, x in prompt["answers"]])
            for prompt in read_json(path)["prompts"]
        ]
        usable = prompts and all(
            answers and all(0 < each.position <= len(ids) for each in answers) for ids, answers in prompts
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        usable = False
    if not usable:
        raise ServingError(
            f"{str(path)!r} does not hold answers of a server: JSON with 'prompts', each with 'ids' and with 'answers' "
            "[position, token, logprob]"
        )
    return sorted(prompts, key=lambda prompt: len(prompt[0]))


@torch.no_grad()
def _difference(model: Any, ids: Sequence[int], answers: Sequence[Answer]) -> float:
    """The root mean square difference of a server's log-probabilities and the model's, in nats."""
    first = min(answer.position for answer in answers)
    given = torch.tensor([list(ids)], device=model.device)
    scores = model(given, use_cache=False, logits_to_keep=len(ids) - first + 1).logits[0].float().log_softmax(-1)
    rows, tokens = (torch.tensor(part) for part in zip(*((a.position - first, a.token) for a in answers), strict=True))
    ours = scores[rows.to(scores.device), tokens.to(scores.device)].double().cpu()
    theirs = torch.tensor([answer.logprob for answer in answers], dtype=torch.float64)
    return float((ours - theirs).square().mean().sqrt())


def _verdict(differences: dict[str, tuple[float, ...]]) -> str | None:
    """The configuration that a server runs: the measured one, unless another fits clearly better."""
    total = {name: sum(value * value for value in values) ** 0.5 for name, values in differences.items()}
    best = min(total, key=lambda name: total[name])
    if total[best] > CLEARLY * total[AS_MEASURED]:
        best = AS_MEASURED
    return best if max(differences[best]) <= EXPLAINED else None


def _configurations(model: Any, as_loaded: Rotary) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """The model as measured, and with each likely mistake, by name; a mistake that changes nothing here is left out."""
    yield AS_MEASURED, nullcontext()
    specs = present_specs(model)
    method: RopeMethod = specs[-1].method if specs else Default()
    rotary = specs[-1].rotary if specs else as_loaded
    if specs:
        yield "without the patch", patched(model, Default())
    if not isinstance(method, RemappingMethod):
        made = _frequencies_of_mistakes(method, rotary, specs[-1].target_length if specs else None)
        if specs and as_loaded.own is None:
            made.pop("no scaling at all", None)  # it is the model without the patch
        for name, (inv_freq, factor) in made.items():
            divisors = tuple((rotary.theta_inv_freq() / inv_freq).tolist())
            changed = Factors(factors=divisors, attention_factor=factor)
            yield f"with {name}", patched(model, changed, over="original")
    if class_pairing(model.config) is not None:
        yield "with weights of the other pairing", _other_pairing(model)


def _frequencies_of_mistakes(
    method: RopeMethod, rotary: Rotary, target_length: int | None
) -> dict[str, tuple[Tensor, float]]:
    """Frequencies and attention factor by mistake, those that are as they should be left out."""
    length = target_length or method.extended_length(rotary) or rotary.context_length
    inv_freq, factor = method.frequencies(rotary, length)
    short, short_factor = method.frequencies(rotary, 1)
    plain = rotary.theta_inv_freq()
    made: dict[str, tuple[Tensor, float]] = {
        "no scaling at all": (plain, 1.0),
        "no attention factor": (inv_freq, 1.0),
        "the attention factor applied twice": (inv_freq, factor * factor),
        "the scaling applied twice": (inv_freq * inv_freq / plain, factor),
        "theta 10,000": (inv_freq * rotary.theta_inv_freq(10_000.0) / plain, factor),
        "the frequencies of long inputs for all": (inv_freq, factor),
        "the frequencies of short inputs for all": (short, short_factor),
    }
    try:
        wrong = replace(rotary, trained_length=length, own=None)
        made["the extended length as the original one"] = tuple(method.frequencies(wrong, length))  # type: ignore[assignment]
    except (RopeExtError, ValueError):  # no such combination
        pass
    follows = method.length_dependent
    return {
        name: (frequencies, magnitude)
        for name, (frequencies, magnitude) in made.items()
        if bool((frequencies > 0).all())
        and (follows or not torch.allclose(frequencies, inv_freq, rtol=1e-6) or abs(magnitude - factor) > 1e-6)
    }


@contextmanager
def _other_pairing(model: Any) -> Iterator[None]:
    """The model with the rows of its query and key weights in the order of the pairing that its class does not run."""
    runs = class_pairing(model.config)
    rows = rotated_parameters(model, rotary_tensors(model.config, checkpoint_geometry(model).dim))

    def reorder(to: str) -> None:
        with torch.no_grad():
            for parameter, layout in rows:
                parameter.copy_(layout.to_pairing(parameter.data, to))

    reorder("half" if runs == "interleaved" else "interleaved")
    try:
        yield
    finally:
        assert runs is not None
        reorder(runs)
