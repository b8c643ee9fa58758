"""The tokenizer in a converted folder: the files that were copied, and the programs that read them."""

from __future__ import annotations

from pathlib import Path

from rope_ext_hf.checkpoints.files.other_files import is_sentencepiece
from rope_ext_hf.errors import listed
from rope_ext_hf.files.whole import disk_errors

_NAMES = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tokenizer_config.json"),
)
_SAMPLE = 1024  # bytes


def tokenizer_text(folder: Path, staging: Path, to: str) -> str:
    """Return a sentence that says what became of the tokenizer in a conversion.

    Args:
        folder: the source.
        staging: the new folder.
        to: the layout that was written.
    """
    copied = [name for name in _NAMES if (staging / name).is_file()]
    left = [name for name in _NAMES if (folder / name).is_file() and name not in copied]
    if not copied and not left:
        return "none; the source has none"
    parts = [f"{listed(copied)} copied as {'it is' if len(copied) == 1 else 'they are'}"] if copied else []
    if left:
        parts.append(f"{listed(left)} not copied")
    if to == "meta" and "tokenizer.model" not in copied:
        parts.append("Meta's code reads tokenizer.model, which must come from elsewhere")
    elif to != "meta" and "tokenizer.model" in copied and "tokenizer.json" not in copied:
        parts.append(_reader(staging / "tokenizer.model"))
    return "; ".join(parts)


def _reader(file: Path) -> str:
    """Return a clause that says how transformers reads a tokenizer.model without a tokenizer.json beside it."""
    with disk_errors(file), file.open("rb") as opened:
        sample = opened.read(_SAMPLE)
    if is_sentencepiece(sample):
        return "transformers reads it with the packages sentencepiece and protobuf"
    return (
        "it lacks the special tokens and the chat template: copy tokenizer.json and tokenizer_config.json of the "
        "released model beside it"
    )
