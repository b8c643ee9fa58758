"""Methods x factors x lengths on one loaded model, in a folder that survives being killed.

    from rope_ext_hf.eval import sweep
    run = sweep(model, "stdlib", methods=["ntk", "yarn"], factors=[2, 4, 8], lengths=[256, 1024, 2048], out="runs")
    print(run.folder)

A run's folder is named after everything that its numbers depend on (weights, text, protocol, versions), so that a
changed setting starts another run. In it, `losses*.jsonl` gets one line per method, length and document, on disk
before it is reported; the same call goes on after the last whole line. Tables, pictures and the report are made from
the folder alone.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.eval.measuring import score_document
from rope_ext_hf.eval.plan import EvalPlan, prepare
from rope_ext_hf.eval.results import Cost, DocumentLoss, Result, Setting, difference, label, provenance
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, resolve_method
from rope_ext_hf.patches.geometry import bind, patch_geometry
from rope_ext_hf.patches.patching import patched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Run", "SweepPlan", "expand", "plan_sweep", "read_run", "run_sweep", "sweep"]

# Methods a sweep can build from a factor alone, or from nothing.
DEFAULT_METHODS = ("linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "llama3")


_COLUMNS = (
    *("method", "length", "perplexity", "loss_nats", "low_nats", "high_nats", "bits_per_token", "bits_per_byte"),
    *(
        "tokens",
        "spans",
        "documents",
        "loss_increase_at_trained_length_nats",
        "tokens_per_second",
        "gpu_bytes",
        "parameters",
    ),
)


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        folder: where it is.
        trained_length: of the model, in tokens.
        settings: everything the numbers depend on, provenance among it.
        results: per method and length that is complete, methods in the order of the sweep.
    """

    folder: Path
    trained_length: int
    settings: dict[str, Any]
    results: list[Result]

    def loss_increase(self, method: dict[str, Any] | None) -> tuple[float, float, float] | None:
        """What a method loses at the trained length: nats per token above the model as loaded, with a 95% interval."""
        at = {str(r.method): r for r in self.results if r.length == self.trained_length}
        plain, found = at.get("None"), at.get(str(method))
        return difference(found, plain) if plain and found and method is not None else None

    def write_csv(self) -> Path:
        """results.csv: one row per method and length."""
        path = self.folder / "results.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(_COLUMNS)
            for r in self.results:
                increase = self.loss_increase(r.method)
                row = [label(r.method), r.length, r.perplexity, r.loss, r.low, r.high, r.bits_per_token]
                row += [r.bits_per_byte, r.tokens, r.spans, len(r.documents), increase[0] if increase else ""]
                out.writerow([*row, r.tokens_per_second, r.gpu_bytes, json.dumps(r.method)])
        return path


def expand(names: Sequence[str | RopeMethod], factors: Sequence[float], rotary: Rotary) -> list[RopeMethod]:
    """Method objects for names and factors: one per factor where a method takes one, else one.

    Raises:
        MethodError: an unknown method, or one that needs more than a factor; give an object for that.
    """
    found: list[RopeMethod] = []
    for name in names:
        if isinstance(name, RopeMethod):
            found.append(resolve_method(name, rotary))
            continue
        if accepts_factor(name):
            found += [resolve_method(name, rotary, factor=factor) for factor in factors]
        else:
            found.append(resolve_method(name, rotary))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep will do: methods (None: as loaded), what each reads, and what to call the text."""

    methods: tuple[RopeMethod | None, ...]
    plan: EvalPlan
    data: str


def plan_sweep(
    model: PreTrainedModel,
    corpus: Any,
    *,
    lengths: Sequence[int],
    methods: Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: Sequence[float] | None = None,
    data: str | None = None,
    **reading: Any,
) -> SweepPlan:
    """The first half of `sweep`, whose arguments these are: load and tokenise the text, check, plan.

    The model may be on the meta device: no weights are read.
    """
    rotary = patch_geometry(model)
    wanted = sorted({*lengths, *([rotary.trained_length] if rotary.trained_length < max(lengths) else [])})
    chosen = expand(methods, factors or [max(1.0, wanted[-1] / rotary.trained_length)], rotary)
    chosen = [bind(model, method, max(wanted[-1], rotary.trained_length)) for method in chosen]
    name = data or (corpus if isinstance(corpus, str) else "documents")
    return SweepPlan((None, *chosen), prepare(model, corpus, lengths=wanted, **reading), name)


def sweep(
    model: PreTrainedModel,
    corpus: Any,
    *,
    lengths: Sequence[int],
    methods: Sequence[str | RopeMethod] = DEFAULT_METHODS,
    factors: Sequence[float] | None = None,
    data: str | None = None,
    out: str | Path = "rope-ext-results",
    chunk: int | None = None,
    offload_cache: bool = False,
    progress: Callable[[str, int], None] | None = None,
    **reading: Any,
) -> Run:
    """Measure the model as loaded and under every method, patched and unpatched in place, and keep all of it on disk.

    Args:
        model: a causal language model, not patched.
        corpus, lengths, **reading: as `perplexity` takes them; the trained length is added where it is below the
            longest, to show what a method costs there.
        methods: names or method objects.
        factors: for names that take one; default: what the longest length needs.
        out: the folder in which runs are kept, each in one of its own.
        data: what to call the corpus in the report; default: `corpus`, if that is a name.
        chunk, offload_cache: as `perplexity` takes them.
        progress: called with the method's label and the tokens read, after each pass.

    Raises:
        CheckpointError: another process is writing this run.
        CorpusError, MethodError: as `perplexity` does.
    """
    plan = plan_sweep(model, corpus, lengths=lengths, methods=methods, factors=factors, data=data, **reading)
    return run_sweep(model, plan, out=out, chunk=chunk, offload_cache=offload_cache, progress=progress)


def run_sweep(
    model: PreTrainedModel,
    plan: SweepPlan,
    *,
    out: str | Path = "rope-ext-results",
    chunk: int | None = None,
    offload_cache: bool = False,
    rank: int = 0,
    world: int = 1,
    wait: Callable[[], object] | None = None,
    progress: Callable[[str, int], None] | None = None,
    started: Callable[[Path, int, int], None] | None = None,
) -> Run:
    """The second half of `sweep`: do what is planned and not done yet.

    Args:
        model: the model of the plan, with its weights.
        rank, world: which of how many processes this is; documents are dealt out among them.
        wait: called when this process has done its part; returns when all have.
        started: called with the run's folder, and how many of how many methods x documents x lengths are done.

    Returns:
        The run; complete where `wait` waited for all processes.

    Raises:
        CheckpointError: another process is writing this run.
    """
    reading = plan.plan
    settings = _settings(model, reading, plan.data, patch_geometry(model))
    folder = Path(out) / f"{Path(settings['model']).name or 'model'}-{_digest(settings)}"
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder, rank):
        _write_atomically(folder / "run.json", json.dumps(settings, indent=1) + "\n", rank)
        done = _done(folder)
        mine = [(i, item) for i, item in enumerate(reading.documents) if i % world == rank]
        keys = [json.dumps(method.to_dict() if method else None) for method in plan.methods]
        units = [(key, i, n) for key in keys for i, item in mine for n in _lengths_of(item)]
        if started is not None:
            started(folder, sum(unit in done for unit in units), len(units))
        scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache)
        if chunk is None:
            _agree_on_chunks(folder, scorer)
        with _journal(folder / f"losses.{rank}.jsonl") as write:
            for method in plan.methods:
                saved = method.to_dict() if method else None
                key = json.dumps(saved)
                with patched(model, method) if method else nullcontext():
                    report = None if progress is None else partial(progress, label(saved))
                    for index, (document, spans) in mine:
                        left = [span for span in spans if (key, index, span.length) not in done]
                        for length, loss, cost in score_document(scorer, reading, document, left, report):
                            record = {"method": saved, "document": index, "length": length}
                            write(record | {"loss": list(loss), "cost": list(cost)})
    if wait is not None:
        wait()
    return read_run(folder, [m.to_dict() if m else None for m in plan.methods])


def _agree_on_chunks(folder: Path, scorer: TokenScorer) -> None:
    """All processes of a run, and those that take it up again, read in the same chunks, and so to the same last digit.

    The sizes come from the free memory of whichever process is first.
    """
    path, mine = folder / "chunks.json", folder / f"chunks.{os.getpid()}.unfinished"
    mine.write_text(json.dumps([scorer.chunk, scorer.head_bytes]), encoding="utf-8")
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            mine.replace(path)
    mine.unlink(missing_ok=True)
    scorer.chunk, scorer.head_bytes = json.loads(path.read_text(encoding="utf-8"))


def read_run(folder: str | Path, order: Sequence[dict[str, Any] | None] | None = None) -> Run:
    """A run from its folder; methods in the order given, else in the order they were first finished.

    Raises:
        CheckpointError: not the folder of a run.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        records = list(_records(folder))
        setting = Setting(**settings["setting"])
        per_length = {int(length): count for length, count in settings["per_length"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(folder)!r} is not the folder of a sweep: {error}") from error
    found: dict[tuple[str, int], dict[int, DocumentLoss]] = {}
    costs: dict[tuple[str, int], Cost] = {}
    for record in records:
        key = (json.dumps(record["method"]), record["length"])
        found.setdefault(key, {})[record["document"]] = DocumentLoss(*record["loss"])
        costs[key] = costs.get(key, Cost()).plus(Cost(*record["cost"]))
    keys = [json.dumps(method) for method in order] if order is not None else list(dict.fromkeys(k for k, _ in found))
    results = [
        Result.from_documents(json.loads(key), setting, length, list(losses.values()), costs[key, length])
        for key in keys
        for length in sorted(per_length)
        if len(losses := found.get((key, length), {})) == per_length[length]
    ]
    return Run(folder, settings["trained_length"], settings, results)


def _lengths_of(item: Any) -> list[int]:
    """The lengths one document counts for."""
    return sorted({span.length for span in item[1]})


def _settings(model: PreTrainedModel, plan: EvalPlan, data: str, rotary: Rotary) -> dict[str, Any]:
    """Everything the numbers depend on."""
    text = hashlib.sha256()
    for document, spans in plan.documents:
        text.update(document.ids.numpy().tobytes())
        text.update(repr(spans).encode())
    labels = [length for item in plan.documents for length in _lengths_of(item)]
    return provenance(model, data) | {
        "weights": _fingerprint(model),
        "text": text.hexdigest(),
        "trained_length": rotary.trained_length,
        "lengths": list(plan.lengths),
        "setting": asdict(plan.setting),
        "documents": [document.name for document, _ in plan.documents],
        "per_length": {str(length): labels.count(length) for length in plan.lengths},
        "tokens": plan.tokens,
    }


def _fingerprint(model: PreTrainedModel) -> str:
    """A digest of a few numbers of every parameter: enough to tell two checkpoints apart, quick for any size."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)][:64]
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


@contextmanager
def _exclusive(folder: Path, rank: int) -> Iterator[None]:
    """The operating system lets go of the lock when its process ends, however it ends."""
    lock = FileLock(folder / f"run.{rank}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(
            f"another process is writing {str(folder)!r}; wait for it, or give another --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _journal(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that appends a line and returns when it is on disk; half a line left by a kill is cut off first."""
    with path.open("a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield write


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("losses.*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is half a line
            yield json.loads(line)


def _done(folder: Path) -> set[tuple[str, int, int]]:
    return {(json.dumps(record["method"]), record["document"], record["length"]) for record in _records(folder)}


def _write_atomically(path: Path, text: str, rank: int) -> None:
    unfinished = path.with_suffix(f".{rank}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
