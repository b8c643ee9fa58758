"""The same perplexity by other readers: transformers' page, lm-eval and llama.cpp against this package.

    python benchmarks/readers.py --model MODEL --data 'novels/*.txt' [--length 2048] [--stride 1024] [--tokens 4096]
    python benchmarks/readers.py --ways "second halves" --gguf FILE.gguf --llama-cpp build/llama-cpp/bin/python

MODEL is a folder, a Hub id, or "reference". Three ways of reading a text are measured, each by its usual program and by
this package:

- windows of `--length` tokens, `--stride` apart, the first scored whole: the loop of Hugging Face's page on the
  perplexity of fixed-length models, and `perplexity(protocol="sliding-all")`;
- windows of `--length` tokens without overlap: `loglikelihood_rolling` of lm-eval's HFLM, and `protocol="blocks"`;
- the tokens after the first half of such windows: llama.cpp's perplexity (llama_cpp_perplexity.py) of a GGUF file, and
  `protocol="matched"` on the same file. `nox -s llama-cpp` installs llama.cpp; without `--gguf` and
  `--llama-cpp` the row says that it was not measured.

The beginning of the first text is read, `--tokens` tokens, in float32, on CUDA in bfloat16. Every run is a process of
its own, the programs in turn; time is CPU seconds (on CUDA seconds), memory the process's peak above what it held with
the model loaded. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
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
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import load

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
        options |= {"targets": length - length // 2 - 1} if protocol == "matched" else {}
        (result,) = perplexity(model, [Tokens("text", ids, ())], lengths=[length], **options)
        return result.loss, result.tokens

    return read


OF_GGUF = "second halves"
WAYS: dict[str, dict[str, Read | None]] = {  # None: a program in an environment of its own
    "overlapping windows": {"transformers' page": page, "rope-ext": _ours("sliding-all")},
    "blocks": {"lm-eval": lm_eval, "rope-ext": _ours("blocks")},
    OF_GGUF: {"llama.cpp": None, "rope-ext": _ours("matched")},
}


def text_ids(tokenizer: Any, arguments: Any) -> Tensor:
    """The tokens of the text that is read, as lm-eval will tokenise it."""
    text = next(iter(load(arguments.data))).text[: 12 * arguments.tokens]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.tokens]
    return torch.tensor(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"])


def one(way: str, program: str, arguments: Any) -> dict[str, Any]:
    """Measure one way of reading by one program, in this process."""
    device, name = arguments.device, arguments.gguf if way == OF_GGUF else arguments.model
    before = torch.cuda.memory_allocated() if device.startswith("cuda") else resident()
    model = load_model(name, device=device, dtype=getattr(torch, usual_dtype(device)))
    tokenizer = load_tokenizer(name)
    ids = text_ids(tokenizer, arguments)
    with torch.no_grad():
        model(ids[None, :64].to(model.device))  # loads kernels
    held = torch.cuda.memory_allocated() if device.startswith("cuda") else resident()
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    read = WAYS[way][program]
    assert read is not None
    started = clock()
    with Peak(device) as peak:
        loss, count = read(model, tokenizer, ids, arguments.length, arguments.stride)
    memory = {"megabytes": (peak.highest - held) / 1e6, "model_megabytes": (held - before) / 1e6}
    return {"loss": loss, "tokens": count, "seconds": clock() - started} | memory


def llama_cpp(arguments: Any) -> list[str]:
    """The command that reads the GGUF file by llama.cpp; it prints what `one` returns."""
    tokens = Path(tempfile.mkdtemp()) / "tokens.json"
    tokens.write_text(json.dumps(text_ids(load_tokenizer(arguments.gguf), arguments).tolist()))
    script = Path(__file__).with_name("llama_cpp_perplexity.py")
    return [arguments.llama_cpp, str(script), arguments.gguf, str(tokens), str(arguments.length)]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="reference", help="a folder, a Hub id, or reference")
    parser.add_argument("--data", default="stdlib?join=400000", help="the text, as rope-ext ppl --data takes it")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--stride", type=int, default=1024, help="tokens between overlapping windows")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text")
    parser.add_argument("--runs", type=int, default=3, help="runs of every program")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--gguf", help="the GGUF file that llama.cpp reads")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has xllamacpp and llama-cpp-py-sync")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PROGRAM"), help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(*arguments.one, arguments)))
        return
    rows, versions, load_before = list[dict[str, Any]](), dict[str, str](), os.getloadavg()[0]
    for way in arguments.ways.split(","):
        programs = WAYS[way]
        if way == OF_GGUF and not (arguments.gguf and arguments.llama_cpp):
            rows.append({"way": way, "program": "llama.cpp", "not_measured": "without --gguf and --llama-cpp"})
            continue
        found: dict[str, list[dict[str, Any]]] = {program: [] for program in programs}
        for _ in range(arguments.runs):
            for program, read in programs.items():
                command = [sys.executable, __file__, *sys.argv[1:], "--one", way, program]
                if read is None:
                    command = llama_cpp(arguments)
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                run = json.loads(done.stdout.splitlines()[-1])
                versions |= {program: run.pop("version")} if "version" in run else {}
                found[program].append(run)
                print(way, program, run, flush=True)
        other, ours = programs
        ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(found[ours], found[other], strict=True)]
        for program, runs in found.items():
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"way": way, "program": f"{program} {versions.get(program, '')}".strip()} | row)
        rows[-1]["time_ratio"] = statistics.median(ratios)
    result = {"benchmark": "readers", "model": Path(arguments.model).name, "rows": rows}
    if arguments.gguf:
        result["gguf"] = Path(arguments.gguf).name
    result |= {key: getattr(arguments, key) for key in ("length", "stride", "tokens", "runs")}
    result["load"] = [round(load_before, 1), round(os.getloadavg()[0], 1)]  # other programs on the same processor
    record(result | {"dtype": usual_dtype(arguments.device)}, arguments)


if __name__ == "__main__":
    main()
