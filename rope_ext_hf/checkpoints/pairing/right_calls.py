"""The calls that mend a mislabelled checkpoint: its config states one pairing, and its weights are in the other."""

from __future__ import annotations

from collections.abc import Callable

from rope_ext_hf.checkpoints.pairing.pairing_report import PairingReport
from rope_ext_hf.models.config_keys import PAIRING_KEY
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.rotary.pairing_names import other_pairing

Call = Callable[[str, str], str]
"""Returns the call of a conversion, as text in backticks, given the pairing to write and the present one."""


def right_call(actual: str, to: str, call: Call, *, has_config: bool = True) -> str:
    """Return advice for weights that are in the pairing `actual`, with the call to type, for an error message.

    Args:
        actual: the pairing of the weights.
        to: the pairing that is wanted.
        call: returns the call of a conversion.
        has_config: whether the weights lie beside a config.json that can state their pairing, or are in Meta's format.
    """
    if actual != to or not has_config:
        return f"to convert them: {call(to, actual)}"
    other = other_pairing(to)
    return (
        f'they need no conversion to {to}: write "{PAIRING_KEY}": "{to}" into their config.json; for code that runs '
        f"{other}: {call(other, actual)}"
    )


def remedy(report: PairingReport, runs: str | None, call: Call, *, has_config: bool = True) -> str | None:
    """Return what to do with a model whose config contradicts its weights; None: it does not, or it is unknown.

    Args:
        report: the pairing that was detected.
        runs: the pairing that the model's class in transformers runs.
        call, has_config: as for `right_call`.
    """
    if report.contradiction is None or report.pairing is None or runs is None:
        return None
    return right_call(report.pairing, runs, call, has_config=has_config)


def folder_call(src: object, dst: object, revision: str | None = None) -> Call:
    """Return the function that returns the command for the conversion of one folder or Hub id into a new folder."""
    return lambda to, now: f"`{command_line('convert', src, dst, to=to, **{'from': now, 'revision': revision})}`"


def model_call(to: str, now: str) -> str:
    """Return the call for the conversion of a live model."""
    return f"`rope.convert(model, to={to!r}, source_pairing={now!r})`"
