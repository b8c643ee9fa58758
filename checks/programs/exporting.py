"""Record of what exported models compute, docs/results/exporting.json.

    nox -s exporting                  # every way of export
    nox -s exporting -- executorch    # some of them; what the record has of the others is kept

A small Llama with random weights is patched, live or as a saved folder, exported for one input, and reads inputs of
other lengths, up to beyond the extended length. The logits of its last tokens are compared with those of the live
patched model, and of the model as it was loaded, to see whether a scaling was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import rope_ext_hf as rope
from checks.programs.record import (
    LOGITS_TOLERANCE,
    ORIGINAL,
    SIZES,
    ask,
    difference,
    row_of,
    small_model,
    tokenizer,
)

HERE = Path(__file__).parent
RESULT = HERE.parents[1] / "docs" / "results" / "exporting.json"
WAYS = tomllib.loads((HERE / "exporting.toml").read_text(encoding="utf-8"))["ways"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXTENDED = 4 * ORIGINAL
EXAMPLE = 40
LONGEST, BEYOND = 250, 300
LENGTHS = (1, 16, EXAMPLE, ORIGINAL, 128, LONGEST, BEYOND)
"""Of the inputs; the last one is beyond the extended length."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A method, and how a model under it is exported."""

    method: str
    options: Json = field(default_factory=dict)
    hold: int | None = None  # the length that is held around the export
    one_shape: bool = False  # exported for `LONGEST` tokens
    folder: bool = True  # also asked of a saved folder


CASES = {
    "yarn": Case("yarn", {"factor": 4.0}),
    "ntk": Case("ntk", {"factor": 4.0}),
    "llama3": Case("llama3", {"factor": 4.0}),
    "dynamic-yarn": Case("dynamic-yarn"),
    "dynamic-yarn, one length held": Case("dynamic-yarn", hold=EXTENDED, folder=False),
    "dca": Case("dca", {"target_length": EXTENDED}),
    "dca, for one shape": Case("dca", {"target_length": EXTENDED}, one_shape=True, folder=False),
}


def patched(base: Path, case: Case) -> Any:
    return rope.patch(AutoModelForCausalLM.from_pretrained(base).eval(), case.method, **case.options)


@torch.no_grad()
def read_by(model: Any, hold: int | None = None) -> list[Any]:
    """Return the logits of the last token of each input."""
    with rope.fixed_length(model, hold) if hold else nullcontext():
        rows = (torch.tensor([row_of(length)]) for length in LENGTHS)
        return [model(row, use_cache=False).logits[0, -1].double().numpy() for row in rows]


def question(base: Path, case: Case, way: Json, *, live: bool) -> Json:
    example = row_of(LONGEST if case.one_shape else EXAMPLE)
    return {
        "base": str(base),
        "folder": str(base.parent / case.method),
        "method": {"name": case.method, "options": case.options},
        "live": live,
        "loads": not way.get("folder", False),
        "one_shape": case.one_shape,
        "hold": case.hold,
        "example": example,
        "rows": [row_of(length) for length in LENGTHS],
    }


def states(answer: Json, expected: list[Any], unscaled: list[Any]) -> Json:
    """Return an answer with the differences of its logits in their place, by the length of the input."""
    if "rows" not in answer:
        return answer
    by_length: Json = {}
    for length, row, right, plain in zip(LENGTHS, answer["rows"], expected, unscaled, strict=True):
        if "logits" in row:
            row = {"difference": difference(row["logits"], right), "from unscaled": difference(row["logits"], plain)}
        by_length[str(length)] = row
    return {"lengths": by_length}


def is_asked(way: Json, case: Case, *, live: bool) -> bool:
    """Return whether a way of export is asked for a case."""
    has_source = way.get("live", True) if live else case.folder
    return has_source and not (case.one_shape and way.get("folder", False))


def record_of(way: str, python: str, base: Path, expected: Json, unscaled: list[Any]) -> Json:
    """Return what is recorded of one way of export."""
    entry = WAYS[way]
    record: Json = {"date": datetime.now(UTC).date().isoformat()}
    for source, live in (("live", True), ("folder", False)):
        asked = {name: case for name, case in CASES.items() if is_asked(entry, case, live=live)}
        if asked:
            questions = [question(base, case, entry, live=live) for case in asked.values()]
            given = ask(python, way.replace("-", "_"), questions, "ask_export.py")
            record["version"] = given["version"]
            answers = zip(asked, given["answers"], strict=True)
            record[source] = {name: states(answer, expected[name], unscaled) for name, answer in answers}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="+", metavar="NAME=PYTHON", help="a way of export and its interpreter")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    content: Json = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"ways": {}}
    content["command"] = "nox -s exporting"
    content["versions"] = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    content["cases"] = {name: asdict(case) for name, case in CASES.items()}
    content |= {"original": ORIGINAL, "extended": EXTENDED, "example": EXAMPLE, "longest": LONGEST, "beyond": BEYOND}
    content["tolerance"] = LOGITS_TOLERANCE
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        unscaled = read_by(small_model(CONFIG, base))
        expected = {}
        for name, case in CASES.items():
            model = patched(base, case)
            expected[name] = read_by(model, case.hold)
            model.save_pretrained(base.parent / case.method)
            tokenizer(SIZES["vocab_size"]).save_pretrained(base.parent / case.method)
        for word in given.ways:
            way, _, python = word.partition("=")
            content["ways"][way] = record_of(way, python, base, expected, unscaled)
            print(way, content["ways"][way]["version"], file=sys.stderr)
            # Written after each way, which may take minutes.
            RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
