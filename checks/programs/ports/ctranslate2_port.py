"""CTranslate2: its converter for folders of transformers, and its generator in float32 on a CPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import transformers
from ctranslate2.converters import TransformersConverter

transformers.logging.set_verbosity_error()


def version() -> str:
    return f"CTranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}"


def logits(folder: Path, rows: list[list[int]]) -> Any:
    """Return the logits of the last token of each row, (rows, vocabulary)."""
    with tempfile.TemporaryDirectory() as made:
        TransformersConverter(str(folder)).convert(made, force=True)
        words = json.loads(Path(made, "vocabulary.json").read_text(encoding="utf-8"))
        generator = ctranslate2.Generator(made, device="cpu", compute_type="float32", intra_threads=1)
        read = (generator.forward_batch([[words[i] for i in row]], return_log_probs=False) for row in rows)
        return np.stack([np.array(each)[0, -1] for each in read])
