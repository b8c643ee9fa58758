"""A filter that hides misleading log lines: those that other packages write about the work of this package.

with left_out_of_log("transformers.modeling_rope_utils", "'rope_type'='rope_ext_hf/"):
    model.save_pretrained(folder)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_out_of_log(logger: str, *texts: str) -> Iterator[None]:
    """Inside the block, keep a logger from logging lines that contain one of these texts.

    Its child loggers are not affected. After the block, it logs everything again.
    """

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in texts)

    filtered = logging.getLogger(logger)
    filtered.addFilter(keep)
    try:
        yield
    finally:
        filtered.removeFilter(keep)
