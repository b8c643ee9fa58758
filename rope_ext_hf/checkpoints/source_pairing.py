"""The pairing of the weights that a conversion reads, by the user, the config or the format, held to the weights.

A checkpoint can hold interleaved weights although its config does not say so, which means half. A conversion by the
config would move their rows a second time. So every conversion first reads the queries and keys of a few layers, and
stops where they contradict the config. A pairing that the user states goes before what the weights show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rope_ext_hf.checkpoints.detection import detect_in_weights
from rope_ext_hf.checkpoints.meta_conversion import MetaSource, open_checkpoint
from rope_ext_hf.checkpoints.pairing_report import PairingReport
from rope_ext_hf.checkpoints.rotated_weights import weights_from_source
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError, RopeExtError
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.questions import command_line
from rope_ext_hf.rotary.pairing import other_pairing


@dataclass(frozen=True)
class _SourcePairing:
    """The pairing that weights are converted from, and what their values show of it."""

    pairing: str
    basis: str  # a clause: who says so
    shown: PairingReport

    @property
    def is_contradicted(self) -> bool:
        return self.shown.pairing == other_pairing(self.pairing)

    def __str__(self) -> str:
        return f"{self.pairing}: {self.reasons}"

    @property
    def reasons(self) -> str:
        """What the pairing rests on, and what the weights show of it."""
        if self.is_contradicted:
            return f"{self.basis}, but the weights look {_with_score(self.shown)}"
        if self.shown.pairing is None and self.shown.leaning == other_pairing(self.pairing):
            return (
                f"{self.basis}; the weights do not show it clearly, but look more like {_with_score(self.shown)}. "
                f"{self._unsure}"
            )
        if self.shown.pairing is None:
            return f"{self.basis}; the weights do not show it: {self.shown.reason}"
        return f"{self.basis}, and the weights agree (score {_score(self.shown)})"

    @property
    def _unsure(self) -> str:
        detect = command_line("detect", self.shown.path, text="FILE")
        return f"Unsure? `{detect}` compares the losses of both pairings on a text"

    def already(self, folder: str, instead: str) -> str:
        """Return an error message for weights that need no conversion; `instead` is the call for the other pairing."""
        other, hint = other_pairing(self.pairing), ""
        if self.shown.pairing is None and self._unsure not in self.reasons:
            hint = f"{self._unsure}. "
        return f"{folder} are {self.pairing} already: {self.reasons}. {hint}If they are {other} after all: {instead}"

    @property
    def warning(self) -> str:
        """A warning of weights that contradict what the user states."""
        return (
            f"the weights of {self.shown.path!r} look {_with_score(self.shown)}; they are read as {self.pairing}, "
            "because you stated it"
        )

    @property
    def limits(self) -> str:
        """What a comparison under this pairing shows of the source."""
        if self.shown.pairing == self.pairing:
            return f"the weights agree that the source is {self.pairing}"
        return f"not verified: that the source is {self.pairing}; {self.basis}, and the weights do not show it"


def settle_pairing(
    shown: PairingReport,
    to: str,
    *,
    stated: str | None,
    configured: str | None,
    by: str = "the config or the model family",
    command: Callable[[str, str], str],
) -> _SourcePairing:
    """Decide which pairing the weights are in, or raise a CheckpointError that names the call that is right.

    Args:
        shown: what the weights show.
        to: the pairing to convert to; "meta" for Meta's format, which takes weights of either pairing.
        stated: the pairing by the user; None: not stated.
        configured: the pairing that `by` says; None: it says none.
        command: returns a call as it is typed, from what to convert to and the pairing to state.
    """
    pairing, basis = (stated, "you stated it") if stated else (configured, f"{by} says so")
    if stated is None and shown.pairing not in (None, configured):
        says = f"but {by} says {configured}" if configured else "and neither the config nor the model family says one"
        advice = _right_call(shown.pairing, to, command)
        if configured is not None and configured != to:
            advice += f". If they are {configured} after all: {command(to, configured)}"
        raise CheckpointError(f"the weights of {shown.path!r} look {_with_score(shown)}, {says}; {advice}")
    if pairing is None:
        raise CheckpointError(
            f"the pairing of the weights of {shown.path!r} is unknown: neither the config nor the model family "
            f"says one, and the weights do not show it ({shown.reason}); state it: {command(to, 'half')}, or "
            "interleaved"
        )
    return _SourcePairing(pairing, basis, shown)


def pairing_of_source(
    source: Source | MetaSource, src: str | Path, dst: Path, to: str, *, stated: str | None, force: bool, verify: bool
) -> _SourcePairing:
    """Decide which pairing the weights of a folder are in, as `settle_pairing`.

    Args:
        force: the weights are taken for the other pairing than `to`, whatever the config says.
        verify: refuse a stated pairing that the weights contradict, because no comparison could verify the copy.
    """

    def command(target: str, pairing: str) -> str:
        return f"`{command_line('convert', src, dst, to=target, **{'from': pairing})}`"

    if isinstance(source, MetaSource):
        configured: str | None = "interleaved"
        by = "Meta's format"
    else:
        configured = source.pairing or ("half" if to == "meta" else None)
        by = "the config or the model family"
    into_other = isinstance(source, Source) and to != "meta"
    if force and into_other and (stated or configured) == to:
        stated = other_pairing(to)
    shown = _shown_by(source)
    settled = settle_pairing(shown, to, stated=stated, configured=configured, by=by, command=command)
    if into_other and settled.pairing == to:
        raise CheckpointError(settled.already(f"the weights in {str(source.folder)!r}", command(to, other_pairing(to))))
    if verify and settled.is_contradicted:
        raise CheckpointError(
            f"the copy could not be verified: the weights of {shown.path!r} look {_with_score(shown)}, but you stated "
            f"{settled.pairing}; {_right_call(str(shown.pairing), to, command)}. To convert them as {settled.pairing} "
            "all the same, leave out verify (--verify)"
        )
    return settled


def _right_call(shown: str, to: str, command: Callable[[str, str], str]) -> str:
    """Return what to type for weights that are in the pairing `shown`."""
    if shown != to:
        return f"to convert them: {command(to, shown)}"
    other = other_pairing(to)
    return (
        f'they need no conversion to {to}: write "{PAIRING_KEY}": "{to}" into their config.json; for code that runs '
        f"{other}: {command(other, shown)}"
    )


def _with_score(report: PairingReport) -> str:
    return f"{report.pairing or report.leaning} (score {_score(report)})"


def _score(report: PairingReport) -> str:
    return f"{report.score:+.3f} +- {report.error:.3f}"


def _shown_by(source: Source | MetaSource) -> PairingReport:
    """Detect the pairing of a source; that of an adapter is the pairing of the model beside which it was trained."""
    path = str(source.folder)
    if isinstance(source, MetaSource) or source.adapter is None:
        return detect_in_weights(weights_from_source(source, path))
    base = source.adapter.base
    if source.adapter.pairing is not None:  # the folder was converted, and the model that it names was perhaps not
        return PairingReport(path, reason="it is an adapter, which was converted apart from its model")
    if Path(base).is_dir():
        try:
            return detect_in_weights(weights_from_source(open_checkpoint(base), base))
        except RopeExtError as unreadable:
            return PairingReport(path, reason=f"it is an adapter, and its model cannot be read: {unreadable}")
    return PairingReport(path, reason=f"it is an adapter; `{command_line('detect', base)}` reads its model")
