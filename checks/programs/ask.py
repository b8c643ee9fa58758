"""Questions to a port, asked in the environment of its program: python ask.py PORT QUESTIONS.json ANSWERS.json

A question is {"config": ..., "layer_type": ..., "length": ..., "context_length": ..., "original_length": ...}, where a
user asks the program for `context_length` tokens, and the model was trained for `original_length`. For programs that
give logits it is {"config": ..., "folder": ..., "rows": [...]}: `folder` holds a small model with this config and
random weights, and `rows` token ids for it. An answer has what the port gives: "inv_freq", a list, "magnitude", and
"table", the number of positions that have angles; or "logits", of the last token of each row. "refused" is the error by
which the program refuses the config, and "missing" that the port does not ask the program about such configs.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KIT = HERE.parents[1] / "conformance"
sys.path[:0] = [str(HERE / "ports"), str(KIT / "examples"), str(KIT)]

from kit import call  # noqa: E402

Json = dict[str, Any]


def answer(port: Any, question: Json) -> Json:
    """Return the answer of a port to one question."""
    config = json.loads(json.dumps(question["config"]))  # a port may change it
    optional = {name: question.get(name) for name in ("layer_type", "length", "context_length", "original_length")}
    try:
        if not hasattr(port, "inv_freq"):
            last = port.logits(Path(question["folder"]), question["rows"])
            return {"logits": [[float(number) for number in row] for row in last]}
        given: Json = {"inv_freq": [float(f) for f in call(port.inv_freq, config, **optional)]}
        for name, number in (("magnitude", float), ("table", int)):
            if hasattr(port, name):
                given[name] = number(call(getattr(port, name), config, **optional))
        return given
    except NotImplementedError as error:
        # Raised by a port: it does not ask about such configs. Raised by the program: it refuses this one.
        here = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(port.__file__).parent
        return {"missing": True} if here else {"refused": said(error)}
    except SystemExit:
        return {"refused": "its command line refuses an argument"}
    except Exception as error:  # whatever a program may raise
        return {"refused": said(error)}


def said(error: Exception) -> str:
    """Return the type of an error and the beginning of its message, without folders of this machine."""
    message = re.sub(r" \(/\S+\)", "", " ".join(str(error).split()))[:200]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def main() -> None:
    name, questions, answers = sys.argv[1:]
    port = importlib.import_module(f"{name}_port")
    given = [answer(port, question) for question in json.loads(Path(questions).read_text(encoding="utf-8"))]
    Path(answers).write_text(json.dumps({"version": port.version(), "answers": given}), encoding="utf-8")


if __name__ == "__main__":
    main()
