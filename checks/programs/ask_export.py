"""Exports of one program, read again, in its own environment: python ask_export.py PORT QUESTIONS.json ANSWERS.json

A question is {"base": ..., "folder": ..., "method": ..., "live": ..., "loads": ..., "one_shape": ..., "hold": ...,
"example": ..., "rows": ...}. With `live`, the folder `base` is loaded and patched by a method; else the patched
`folder` is read by transformers, if `loads`, or by the program itself. The model is exported for `example`, token ids,
or for an example of the program's own, and reads each of `rows`. The answer has the logits of the last token of each
row, or the error that refused it.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "ports"), str(HERE.parents[1])]

Json = dict[str, Any]


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and those that it came from, the first one last."""
    return [] if error is None else [error, *chain(error.__cause__ or error.__context__)]


def refusal(error: BaseException) -> Json:
    """Return the first line of an error, and of the error of this package that it came from."""
    said: Json = {"refused": line(error)}
    ours = [each for each in chain(error) if "rope_ext_hf" in type(each).__module__ or "rope_ext_hf" in str(each.args)]
    return said | {"ours": line(ours[-1])} if ours else said


def line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:400]}"


def source_of(question: Json) -> tuple[Any, Any]:
    """Return what a question exports, and what is to be entered around the export."""
    if not question["live"]:
        folder = Path(question["folder"])
        return (AutoModelForCausalLM.from_pretrained(folder).eval() if question["loads"] else folder), nullcontext()
    import rope_ext_hf as rope  # not where transformers alone reads a folder

    model = AutoModelForCausalLM.from_pretrained(question["base"]).eval()
    rope.patch(model, question["method"]["name"], **question["method"]["options"])
    return model, rope.fixed_length(model, question["hold"]) if question["hold"] else nullcontext()


def answer(port: Any, question: Json) -> Json:
    """Return the answer to one question: a refusal, or for each row its logits or a refusal."""
    rows: list[Json] = []
    try:
        source, held = source_of(question)
        example = (question["example"], question["one_shape"]) if question["loads"] else ()
        with held, torch.no_grad(), port.opened(source, *example) as read:
            for row in question["rows"]:
                try:
                    rows.append({"logits": [float(number) for number in read(row)]})
                except Exception as error:  # whatever a program may raise
                    rows.append(refusal(error))
    except Exception as error:
        return refusal(error)
    return {"rows": rows}


def main() -> None:
    name, questions, answers = sys.argv[1:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    port = importlib.import_module(f"{name}_port")
    given = [answer(port, question) for question in json.loads(Path(questions).read_text(encoding="utf-8"))]
    Path(answers).write_text(json.dumps({"version": port.version(), "answers": given}), encoding="utf-8")


if __name__ == "__main__":
    main()
