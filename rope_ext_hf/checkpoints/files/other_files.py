"""The files beside the weights that a conversion reads: which of them its copy gets.

Weights that are not converted would be copied in their old order, under names by which programs find them. So a binary
file is copied only where its kind is known: a tokenizer, a picture or the like. All others are left out and named.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Collection
from itertools import chain
from pathlib import Path

from rope_ext_hf.checkpoints.files.weight_folders import index_name
from rope_ext_hf.files.downloads import WEIGHT_FILES, WEIGHT_SUFFIXES
from rope_ext_hf.files.whole import copy_files, disk_errors, layer_folders, list_files, mistral_format_files

_MEDIA = ("image/", "audio/", "video/", "font/", "application/pdf")
_SAMPLE = 2**16  # bytes at the beginning of a file, of which thousands are zero in most files of numbers
_NO_TEXT = re.compile(rb"[^\t-\r\x1b\x20-\xff]")
_SENTENCEPIECE = re.compile(rb"\n[\x04-\x7f]\n(?P<size>[\x00-\x7f])", re.DOTALL)
"""The beginning of a SentencePiece model: its first piece, with the length of its text."""
_SCORE = b"\x15"  # the key of the number that follows the text of a piece


def copy_other_files(folder: Path, staging: Path, written: Collection[str]) -> tuple[str, ...]:
    """Copy all files but weights, their indexes, and those that the conversion itself writes.

    Files in Mistral's own format count as weights: an index would name weights that are not copied, and some programs
    would read params.json in place of the new config.json. Weights of the layers that sentence-transformers puts on top
    of a model are copied, because none of their rows rotate.

    Args:
        folder: the source.
        staging: the new folder.
        written: the names of files that the conversion itself writes.

    Returns:
        The names of the files that were skipped, because they hold weights or may hold some.
    """
    mistral_files, layers = mistral_format_files(folder), layer_folders(folder)
    left_out = {*written, *map(index_name, chain(*WEIGHT_FILES))}
    names = [name for name in list_files(folder) if name not in left_out]
    skipped = [
        name
        for name in names
        if (Path(name).parts[0] == "original" or name in mistral_files or _may_hold_weights(folder / name))
        and layers.isdisjoint(map(str, Path(name).parents))
    ]
    copy_files(folder, [name for name in names if name not in skipped], staging)
    return tuple(skipped)


def _may_hold_weights(path: Path) -> bool:
    """Return whether a file holds weights by its suffix, or is a binary file of a kind that is not known here."""
    if path.suffix in WEIGHT_SUFFIXES:
        return True
    if (mimetypes.guess_type(path.name)[0] or "").startswith(_MEDIA):
        return False
    with disk_errors(path), path.open("rb") as file:
        sample = file.read(_SAMPLE)
    return _NO_TEXT.search(sample) is not None and not is_sentencepiece(sample)


def is_sentencepiece(sample: bytes) -> bool:
    """Return whether a file is a tokenizer model of SentencePiece, judged by its first bytes."""
    first = _SENTENCEPIECE.match(sample)
    return first is not None and sample[first.end() + first["size"][0] :].startswith(_SCORE)
