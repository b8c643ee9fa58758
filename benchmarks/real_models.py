"""Measure how pretrained models read beyond their context length under each method: docs/results/real-models.json.

    python benchmarks/real_models.py [--model MODEL] [--data 'novels/*.txt'] [--device cuda] [--minutes 20]

MODEL is a folder or a Hub id; by default SmolLM2-135M-Instruct reads Python's library. Of every text that is long
enough, one stretch from its middle is read, under the protocol `same-start`: the last tokens before 1, 1.5, 2 and 4
times the context length are scored, and the model as loaded also reads them with no more than its context length before
them. Methods are set for 2 times the context length, and in a second round for 4 times. Then come the answers of
`rope-ext passkey`: the loss of the right one, because small models hardly ever give it exactly.

Every measurement goes into the file as soon as it is made, and the same command goes on where it was stopped. What was
measured on another device or in another dtype stands in an entry of its own. No text and no weight goes into the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import smollm2
import torch
from record import benchmark_parser, with_machine
from stock import usual_dtype

import rope_ext_hf as rope
from rope_ext_hf.eval import passkey, perplexity
from rope_ext_hf.files.whole import write_text
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize

Row = dict[str, Any]
OUT = Path("docs/results/real-models.json")
TARGETS = 8
"""One token of so many is scored: the last eighth of the context length."""
MULTIPLES = (1.0, 1.5, 2.0, 4.0)
METHODS = (
    *("unpatched", "yarn", "dca", "cope", "self-extend", "dynamic-ntk", "dynamic-self-extend"),
    *("ntk", "rerope", "mrrope", "dynamic-yarn", "linear"),
)
"""In the order in which they are measured: the most telling ones first."""
ANSWERS = ("unpatched", "yarn", "dca", "self-extend", "cope")
ANSWER_MULTIPLES = (0.5, 1.0, 1.5, 2.0)


class RealModel:
    """A pretrained model, the stretches of text that it reads, and the entry of the file with its measurements.

    Args:
        name: a folder or Hub id.
        data: the text, as `rope-ext ppl --data` takes it.
        device: what the model runs on.
        dtype: the name of its dtype.
        weights: where its weights are from, for its tables; None: from its publisher.
        entries: the entries of the file; that of this model is added to them, if it is not there.
    """

    def __init__(self, name: str, data: str, device: str, dtype: str, weights: str | None, entries: list[Row]) -> None:
        self.model = load_model(name, device=device, dtype=getattr(torch, dtype))
        self.tokenizer = load_tokenizer(name)
        rotary = ModelRope.of_model(self.model).rotary
        self.context_length = rotary.context_length
        self.data = data
        about = {
            "model": Path(name).name,
            "parameters": self.model.num_parameters(),
            "rotated_dims": rotary.dim,
            "theta": rotary.theta,
            "context_length": self.context_length,
            "dtype": dtype,
            "targets": self.context_length // TARGETS,
            "weights": weights,
        }
        about = with_machine(about, device)
        same = ("model", "device", "dtype", "versions")
        matching = [entry for entry in entries if all(entry[key] == about[key] for key in same)]
        if not matching:
            matching = [about | {"texts": [], "answers": []}]
            entries += matching
        self.entry = matching[0]

    def lengths(self, multiple: float) -> list[int]:
        """The measured lengths, up to a multiple of the context length."""
        return [int(self.context_length * each) for each in MULTIPLES if each <= multiple]

    def stretches(self, longest: int) -> Iterator[Tokens]:
        """Yield of every text that is long enough so many tokens from its middle on."""
        unit = 2 * self.context_length
        for document in tokenize(load(self.data), self.tokenizer):
            start = unit * (len(document.ids) // unit // 2)
            if len(document.ids) >= start + longest:
                yield Tokens(document.name, document.ids[start : start + longest], ())

    def patched(self, method: str, multiple: float) -> AbstractContextManager[Any]:
        if method == "unpatched":
            return nullcontext()
        return rope.patched(self.model, method, target_length=int(self.context_length * multiple))

    def text_row(self, text: Tokens, method: str, multiple: float) -> Row:
        """The losses of one text under one method, in nats per token."""
        lengths = self.lengths(multiple)
        stretch = Tokens(text.name, text.ids[: lengths[-1]], ())
        options: dict[str, Any] = {"protocol": "same-start", "targets": self.entry["targets"]}
        with self.patched(method, multiple):
            results = perplexity(self.model, [stretch], lengths=lengths, tokenizer=self.tokenizer, **options)
        row: Row = {"loss": {str(result.length): round(result.loss, 5) for result in results}}
        recent = {str(r.length): round(r.recent_loss, 5) for r in results if r.recent_loss is not None}
        return row | ({"recent": recent} if recent else {})

    def answer_row(self, method: str, length: int, trials: int, task: str) -> Row:
        """The loss of right answers in prompts of one length, in nats per token, and the share that is exact."""
        with self.patched(method, max(ANSWER_MULTIPLES)):
            options: dict[str, Any] = {"depths": [0.1, 0.5, 0.9], "trials": trials, "task": task}
            results = passkey(self.model, lengths=[length], tokenizer=self.tokenizer, **options)
        scores = [score for result in results for score in result.scores]
        return {"loss": [score.loss for score in scores], "exact": sum(score.exact for score in scores) / len(scores)}


def missing(
    model: RealModel, texts: list[Tokens], methods: list[str], multiples: list[float]
) -> Iterator[tuple[Tokens, str, float]]:
    """Yield what is not in the file yet: a text, a method, and the multiple of the context length it is set for."""
    done = {(row["text"], row["method"], row["multiple"]) for row in model.entry["texts"]}
    for multiple in multiples:
        for text in texts:
            for method in methods:
                if (text.name, method, multiple) not in done:
                    yield text, method, multiple


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(out=OUT)
    parser.add_argument("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct, see smollm2.py")
    parser.add_argument("--data", default="stdlib?join=400000", help="the text, as rope-ext ppl --data takes it")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--weights", help="what the tables say of its weights, if they are not its publisher's")
    parser.add_argument("--texts", type=int, default=8, help="at most so many texts")
    parser.add_argument("--methods", default=",".join(METHODS), help="in the order in which each text is read")
    parser.add_argument(
        "--multiples",
        default="2,4",
        help="what methods are set for, in context lengths; texts are read to the largest of them",
    )
    parser.add_argument(
        "--trials", type=int, default=4, help="prompts at each length and each of three depths; 0: none"
    )
    parser.add_argument("--task", default="passkey", help="of rope-ext passkey; key-value for the bundled model")
    parser.add_argument("--minutes", type=float, default=20, help="nothing new begins after so many minutes")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    record = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {"models": []}
    record |= {"command": "make real-models", "versions": with_machine({}, arguments.device)["versions"]}
    dtype = arguments.dtype or usual_dtype(arguments.device)
    name, weights = arguments.model, arguments.weights
    if name is None:
        name, weights = str(smollm2.fetch()), smollm2.WEIGHTS
    model = RealModel(name, arguments.data, arguments.device, dtype, weights, record["models"])
    multiples = [float(multiple) for multiple in arguments.multiples.split(",")]
    longest = model.lengths(max(multiples))[-1]
    texts = list(model.stretches(longest))[: arguments.texts]
    if not texts:
        raise SystemExit(f"no text has {longest:,} tokens behind its middle; give longer ones by --data")

    def add(table: str, row: Row) -> None:
        model.entry[table].append(row)
        write_text(arguments.out, json.dumps(record, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    for text, method, multiple in missing(model, texts, arguments.methods.split(","), multiples):
        if time.monotonic() > until:
            print(f"stopped after {arguments.minutes:g} minutes; the same command goes on")
            return
        about = {"text": text.name, "method": method, "multiple": int(multiple) if multiple.is_integer() else multiple}
        add("texts", about | model.text_row(text, method, multiple))
    measured = {(row["method"], row["length"]) for row in model.entry["answers"]}
    for length in [int(model.context_length * multiple) for multiple in ANSWER_MULTIPLES if arguments.trials]:
        for method in ANSWERS:
            if (method, length) not in measured and time.monotonic() < until:
                about = {"method": method, "multiple": max(ANSWER_MULTIPLES), "length": length}
                add("answers", about | model.answer_row(method, length, arguments.trials, arguments.task))


if __name__ == "__main__":
    main()
