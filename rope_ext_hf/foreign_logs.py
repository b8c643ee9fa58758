"""Lines that other packages log about our own work, left out while we do it; the loggers stay as they are.

with left_out_of_log("transformers.modeling_rope_utils", "'rope_type'='rope_ext_hf/"):
    model.save_pretrained(folder)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_out_of_log(logger: str, *texts: str) -> Iterator[None]:
    """Inside, this logger (not those below it) leaves out the lines that contain one of these texts."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in texts)

    chosen = logging.getLogger(logger)
    chosen.addFilter(keep)
    try:
        yield
    finally:
        chosen.removeFilter(keep)
