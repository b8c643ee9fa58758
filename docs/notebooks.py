"""Run the notebooks of examples/ and write what their cells show into them.

    python -m docs.notebooks                # rewrite examples/*.ipynb
    python -m docs.notebooks examples/measure_in_a_notebook.ipynb

Cells run in one process without a kernel, in a folder of their own. What is printed, and the value that ends a cell,
are kept as a notebook shows them: as HTML, a picture or text; times and the folder are left out. tests/test_examples.py
checks that what is committed is what comes out, numbers within a few percent.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
_TIME = re.compile(r"\b[\d.]+ (?=seconds|minutes|CPU seconds|tokens per second|s\b)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, which run in the working directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "code":
            cell = cell | {"execution_count": number, "outputs": _outputs("".join(cell["source"]), names, number)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    names["_"] = None
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name("_", ast.Store())], last.value)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.fix_missing_locations(tree), f"cell {number}", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if (value := names["_"]) is not None:
        data: dict[str, Any] = {"text/plain": _lines(repr(value))}
        if shown := getattr(value, "_repr_html_", lambda: None)():
            data["text/html"] = _lines(shown)
        if hasattr(value, "savefig"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", dpi=60)
            data["image/png"] = base64.b64encode(picture.getvalue()).decode()
        kind = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append({"data": data, **kind})
    return outputs


def _lines(text: str) -> list[str]:
    """Text as a notebook keeps it, without times, the folder it ran in, and that of the bundled model."""
    from rope_ext_hf.reference import path

    for folder, name in ((Path.cwd(), "FOLDER"), (path(), "reference")):
        text = text.replace(str(folder), name)
    return _TIME.sub("… ", text).splitlines(keepends=True)


def differences(committed: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Return where the outputs of two runs differ. Numbers may differ by a few percent, pictures in any way."""
    found = []
    for one, other in zip(committed["cells"], made["cells"], strict=True):
        texts = [_texts(cell.get("outputs", [])) for cell in (one, other)]
        if texts[0].keys() != texts[1].keys():
            found.append(f"{''.join(one['source'])!r} shows {sorted(texts[0])}, and now {sorted(texts[1])}")
        for kind in texts[0].keys() & texts[1].keys():
            words = [_NUMBER.split(each[kind]) for each in texts]
            numbers = [[float(n.replace(",", "")) for n in _NUMBER.findall(each[kind])] for each in texts]
            close = all(abs(a - b) <= 0.03 * (1 + abs(a)) for a, b in zip(*numbers, strict=False))
            if words[0] != words[1] or not close:
                found.append(f"{''.join(one['source'])!r} showed {texts[0][kind]!r}, and now {texts[1][kind]!r}")
    return found


def _texts(outputs: list[dict[str, Any]]) -> dict[str, str]:
    shown: dict[str, str] = {}
    for each in outputs:
        for kind, data in each.get("data", {"stdout": each.get("text")}).items():
            shown[kind] = "" if kind == "image/png" else "".join(data)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        file = path.resolve()
        made = json.loads(file.read_text(encoding="utf-8"))
        with TemporaryDirectory() as folder, contextlib.chdir(folder):
            made = run(made)
        file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    main()
