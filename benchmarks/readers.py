"""The same perplexity by other readers: time and memory of transformers' page and of lm-eval against this package.

    python benchmarks/readers.py --model MODEL --data 'novels/*.txt' [--length 2048] [--stride 1024] [--tokens 4096]

MODEL is a folder, a Hub id, or "reference". Two ways of reading a text are measured, each by its usual program and by
this package:

- windows of `--length` tokens, `--stride` apart, the first scored whole: the loop of Hugging Face's page on the
  perplexity of fixed-length models, and `perplexity(protocol="sliding-all")`;
- windows of `--length` tokens without overlap: `loglikelihood_rolling` of lm-eval's HFLM, and `protocol="blocks"`.

The beginning of the first text is read, `--tokens` tokens, in float32, on CUDA in bfloat16. Every run is a process of
its own, the programs in turn; time is CPU seconds (on CUDA seconds), memory the process's peak above what it held with
the model loaded. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reading import Peak, resident
from record import benchmark_parser, record
from stock import usual_dtype
from torch import Tensor

from rope_ext_hf.eval import perplexity
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Tokens

Read = Callable[[Any, Any, Tensor, int, int], tuple[float, int]]
"""Takes the model, the tokenizer, the tokens, length and stride; returns a loss in nats per token, and the tokens."""


def page(model: Any, _: Any, ids: Tensor, length: int, stride: int) -> tuple[float, int]:
    """The loop of Hugging Face's page, with the labels' loss of the model's own forward; each token counts alike."""
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        piece = ids[None, begin:end].to(model.device)
        labels = piece.clone()
        labels[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            loss = model(piece, labels=labels).loss
        scored = int((labels[:, 1:] != -100).sum())
        total, count, previous_end = total + float(loss) * scored, count + scored, end
        if end == len(ids):
            break
    return total / count, count


def lm_eval(model: Any, tokenizer: Any, ids: Tensor, length: int, _: int) -> tuple[float, int]:
    """lm-eval's rolling log-likelihood of the text, whose tokens must be those that the tokenizer gives it."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text = tokenizer.decode(ids)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1, softmax_dtype="float32")
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    (likelihood,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return -likelihood / count, count


def _ours(protocol: str) -> Read:
    def read(model: Any, tokenizer: Any, ids: Tensor, length: int, stride: int) -> tuple[float, int]:
        options: dict[str, Any] = {"protocol": protocol, "tokenizer": tokenizer}
        options |= {"stride": stride, "bos": False} if protocol == "sliding-all" else {}
        (result,) = perplexity(model, [Tokens("text", ids, ())], lengths=[length], **options)
        return result.loss, result.tokens

    return read


WAYS: dict[str, dict[str, Read]] = {
    "overlapping windows": {"transformers' page": page, "rope-ext": _ours("sliding-all")},
    "blocks": {"lm-eval": lm_eval, "rope-ext": _ours("blocks")},
}


def one(way: str, program: str, arguments: Any) -> dict[str, Any]:
    """Measure one way of reading by one program, in this process."""
    device = arguments.device
    model = load_model(arguments.model, device=device, dtype=getattr(torch, usual_dtype(device)))
    tokenizer = load_tokenizer(arguments.model)
    text = next(iter(load(arguments.data))).text[: 12 * arguments.tokens]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.tokens])
    text = tokenizer.decode(ids)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])  # as lm-eval will tokenise it
    with torch.no_grad():
        model(ids[None, :64].to(model.device))  # loads kernels
    held = torch.cuda.memory_allocated() if device.startswith("cuda") else resident()
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    started = clock()
    with Peak(device) as peak:
        loss, count = WAYS[way][program](model, tokenizer, ids, arguments.length, arguments.stride)
    return {"loss": loss, "tokens": count, "seconds": clock() - started, "megabytes": (peak.highest - held) / 1e6}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="reference", help="a folder, a Hub id, or reference")
    parser.add_argument("--data", default="stdlib?join=400000", help="the text, as rope-ext ppl --data takes it")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--stride", type=int, default=1024, help="tokens between overlapping windows")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text")
    parser.add_argument("--runs", type=int, default=3, help="runs of every program")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PROGRAM"), help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(*arguments.one, arguments)))
        return
    rows = []
    for way, programs in WAYS.items():
        found: dict[str, list[dict[str, Any]]] = {program: [] for program in programs}
        for _ in range(arguments.runs):
            for program in programs:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", way, program]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[program].append(json.loads(done.stdout.splitlines()[-1]))
                print(way, program, found[program][-1], flush=True)
        other, ours = programs
        ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(found[ours], found[other], strict=True)]
        for program, runs in found.items():
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"way": way, "program": program} | row)
        rows[-1]["time_ratio"] = statistics.median(ratios)
    result = {"benchmark": "readers", "model": Path(arguments.model).name, "rows": rows}
    result |= {key: getattr(arguments, key) for key in ("length", "stride", "tokens", "runs")}
    record(result | {"dtype": usual_dtype(arguments.device)}, arguments)


if __name__ == "__main__":
    main()
