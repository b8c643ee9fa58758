"""llama.cpp's own converter on folders without a tokenizer.

    python checks/llama_cpp_convert.py SOURCE JOBS.json

SOURCE holds llama.cpp's `conversion` and `gguf-py`; each of the jobs names a folder and the GGUF file to write. Files
have no vocabulary, weights in float32, and no layers that draft tokens; the error of one that cannot be written goes to
a .txt beside it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

source, jobs = map(Path, sys.argv[1:])
sys.path[:0] = [str(source), str(source / "gguf-py")]
gguf: Any = importlib.import_module("gguf")  # theirs, not the installed one
conversion: Any = importlib.import_module("conversion")
base = importlib.import_module("conversion.base")


def without_vocabulary(self: Any) -> None:
    self.gguf_writer.add_tokenizer_model("none")
    text = self.hparams.get("text_config") or self.hparams
    self.gguf_writer.add_vocab_size(text["vocab_size"])


def every_subclass(cls: Any) -> list[Any]:
    return [each for sub in cls.__subclasses__() for each in (sub, *every_subclass(sub))]


def convert(folder: Path, out: Path) -> None:
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hparams = base.ModelBase.load_hparams(folder, False) | stated  # as published, where transformers renames
    converter = conversion.get_model_class(base.get_model_architecture(hparams, base.ModelType.TEXT))
    for cls in (*converter.__mro__, *every_subclass(base.TextModel)):
        if "set_vocab" in vars(cls):
            cls.set_vocab = without_vocabulary
        if hasattr(cls, "no_mtp"):
            cls.no_mtp = True
    converter(folder, gguf.LlamaFileType.ALL_F32, out, hparams=hparams).write()


for folder, out in json.loads(jobs.read_text(encoding="utf-8")):
    try:
        convert(Path(folder), Path(out))
    except Exception as error:
        Path(out).unlink(missing_ok=True)
        Path(out).with_suffix(".txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
