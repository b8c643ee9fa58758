"""`fingerprint` of a model, a folder or a config, to compare what a trainer, a folder and a server rotate.

print(rope.fingerprint("my-model/").digest)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.files import read_json
from rope_ext_hf.hub import empty_model, foreign_errors, load_empty
from rope_ext_hf.patches.fingerprint import Fingerprint, fingerprint_of


@foreign_errors("this model has no fingerprint")
def fingerprint(
    model: nn.Module | str | Path | Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Fingerprint:
    """What rotates how in a model: `fingerprint(a).differences(fingerprint(b))` are sentences, none where both agree.

    Args:
        model: a model in memory, patched or not, of which the rotary modules are read; or a folder, a Hub id,
            "reference", or a config of transformers, of which no weights are read; or a JSON file of
            `Fingerprint.to_dict`.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether the Python code that comes with the model may run.

    Raises:
        CheckpointError: no such model, or a file that holds no fingerprint.
        UnsupportedModelError: a model without rotary modules.
    """
    if isinstance(model, nn.Module):
        return fingerprint_of(model)
    if isinstance(model, (str, Path)) and Path(model).suffix == ".json" and Path(model).is_file():
        return Fingerprint.from_dict(read_json(Path(model)))
    if isinstance(model, (str, Path)):
        return fingerprint_of(load_empty(model, revision=revision, trust_remote_code=trust_remote_code))
    return fingerprint_of(empty_model(model, trust_remote_code=trust_remote_code))
