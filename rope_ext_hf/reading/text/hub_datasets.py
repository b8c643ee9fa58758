"""Data sets of the Hugging Face Hub, streamed by the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CorpusError
from rope_ext_hf.models.temporary import set_to
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.rows import read_rows
from rope_ext_hf.reading.text.text_files import optional_package, reason

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_STREAM_RETRIES = 2
"""Retries of a read. Each lasts half a minute within huggingface_hub, and its default of 20 looks like a hang."""


def read_hub_dataset(name: str, *, config: str | None, split: str | None, column: str | None) -> Iterator[Document]:
    """Yield the documents in a data set on the Hub, one per row, as they are downloaded.

    Args:
        name: OWNER/NAME.
        config: the configuration; None: the default one.
        split: the split; None: "test", or the only one.
        column: the column of the text; None: see `rope_ext_hf.reading.text.rows.choose_column`.

    Raises:
        CorpusError: the name is not OWNER/NAME, or the data set cannot be read.
    """
    # `datasets` takes a bare name or an existing folder for local files, and some of its readers unpickle these.
    if not _HUB_ID.fullmatch(name) or Path(name).exists():
        raise CorpusError(
            f"hf:{name} is not a dataset of the Hub: write hf:OWNER/NAME?config=...&split=...&column=..., "
            "and a folder of your own without hf:"
        )
    datasets = optional_package("datasets", "datasets of the Hub")
    retries = {
        setting: min(getattr(datasets.config, setting), _STREAM_RETRIES)
        for setting in ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
    }
    try:
        with set_to(datasets.config, **retries):
            rows = datasets.load_dataset(
                name,
                name=config,
                split=split,
                streaming=True,
                trust_remote_code=False,  # even if an environment variable allows it
            )
            if isinstance(rows, dict):
                rows = _default_split(rows, name)
            for place, content in read_rows(enumerate(rows, 1), f"hf:{name}", column):
                yield Document.from_content(name + place, content)
    except CorpusError:
        raise
    except Exception as error:  # of any kind: not found, not reachable, no such configuration, a damaged remote file
        raise CorpusError(f"the Hub dataset {name!r} cannot be read: {reason(error)}") from error


def _default_split(splits: dict[str, Any], name: str) -> Any:
    """Return the split named "test" of a data set, or its only split; `name` is for the error message."""
    if "test" in splits:
        return splits["test"]
    if len(splits) != 1:
        raise CorpusError(f"hf:{name} has no split 'test'; choose one with ?split=NAME: {', '.join(splits)}")
    return next(iter(splits.values()))
