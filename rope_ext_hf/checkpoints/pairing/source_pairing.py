"""Decide the pairing of the weights that a conversion reads: it is stated somewhere, and checked against the weights.

A checkpoint may hold interleaved weights although its config says nothing, which means half. A conversion by the config
would then move their rows a second time. So every conversion first reads the queries and keys of a few layers, and
stops if they contradict the config. A pairing that the user states is taken even if the weights contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rope_ext_hf.checkpoints.files.weight_folders import open_weights
from rope_ext_hf.checkpoints.opening import Opened, open_checkpoint
from rope_ext_hf.checkpoints.pairing.detection import detect_in_weights
from rope_ext_hf.checkpoints.pairing.pairing_report import PairingReport
from rope_ext_hf.checkpoints.pairing.right_calls import Call, folder_call, remedy, right_call
from rope_ext_hf.checkpoints.pairing.source_weights import weights_from_source
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.errors import CheckpointError, RopeExtError
from rope_ext_hf.files.whole import foreign_errors
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.rotary.pairing_names import other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _SourcePairing:
    """The pairing that weights are converted from, who states it, and whether the weights themselves agree.

    Attributes:
        pairing: "half" or "interleaved".
        stated_by: a clause that says who states this pairing.
        detected: the pairing that was detected in the weights.
    """

    pairing: str
    stated_by: str
    detected: PairingReport

    @property
    def is_contradicted(self) -> bool:
        """True if the weights themselves are in the other pairing, as far as they show."""
        return self.detected.pairing == other_pairing(self.pairing)

    def __str__(self) -> str:
        return f"{self.pairing}: {self.reasons}"

    @property
    def reasons(self) -> str:
        """A sentence that says who states the pairing, and what the weights show of it."""
        if self.is_contradicted:
            return f"{self.stated_by}, but the weights look {_with_score(self.detected)}"
        if self.detected.pairing is None and self.detected.leaning == other_pairing(self.pairing):
            return (
                f"{self.stated_by}; the weights do not show it clearly, but look more like "
                f"{_with_score(self.detected)}. {self._unsure}"
            )
        if self.detected.pairing is None:
            return f"{self.stated_by}; the weights do not show it: {self.detected.reason}"
        return f"{self.stated_by}, and the weights agree (score {_score(self.detected)})"

    @property
    def _unsure(self) -> str:
        """A sentence that tells the user how to find out the pairing."""
        detect = command_line("detect", self.detected.path, text="FILE")
        return f"Unsure? `{detect}` compares the losses of both pairings on a text"

    def already(self, folder: str, instead: str) -> str:
        """Return the error message for weights that need no conversion.

        Args:
            folder: the folder, as the subject of the sentence.
            instead: the call to make if the weights are in the other pairing after all.
        """
        other, hint = other_pairing(self.pairing), ""
        if self.detected.pairing is None and self._unsure not in self.reasons:
            hint = f"{self._unsure}. "
        return (
            f"{folder} are in the {self.pairing} pairing already: {self.reasons}. {hint}If they are in the {other} "
            f"pairing after all: {instead}"
        )

    @property
    def warning(self) -> str:
        """The warning for weights that contradict the pairing that the user states."""
        return (
            f"the weights of {self.detected.path!r} look {_with_score(self.detected)}; they are read in the "
            f"{self.pairing} pairing, because you stated it"
        )

    @property
    def limits(self) -> str:
        """A clause that says whether a verified copy proves anything about the pairing of the source."""
        if self.detected.pairing == self.pairing:
            return f"the weights agree that the source is in the {self.pairing} pairing"
        return (
            f"not verified: that the source is in the {self.pairing} pairing; {self.stated_by}, and the weights do not "
            "show it"
        )


def settle_pairing(
    detected: PairingReport,
    to: str,
    *,
    stated: str | None,
    configured: str | None,
    by: str = "the config or the model family",
    command: Call,
    has_config: bool = True,
) -> _SourcePairing:
    """Decide which pairing the weights are in.

    Args:
        detected: the pairing that was detected in the weights.
        to: the pairing to convert to; "meta" for Meta's format, which weights of either pairing can be converted to.
        stated: the pairing that the user states; None: the user states none.
        configured: the pairing that the config, the model family or the format states; None: none of them states one.
        by: who states `configured`, for messages.
        command: returns the call to type, given the pairing to convert to and the pairing to state.
        has_config: whether the weights lie beside a config.json, or are in Meta's format.

    Raises:
        CheckpointError: the weights contradict `configured`, or their pairing is not known; the message has the call to
            type.
    """
    pairing, stated_by = (stated, "you stated it") if stated else (configured, f"{by} says so")
    if stated is None and detected.pairing not in (None, configured):
        if configured is None:
            statement = "and neither the config nor the model family says one"
        else:
            statement = f"but {by} says {configured}"
        advice = right_call(detected.pairing, to, command, has_config=has_config)
        if configured is not None and configured != to:
            advice += f". If they are in the {configured} pairing after all: {command(to, configured)}"
        raise CheckpointError(f"the weights of {detected.path!r} look {_with_score(detected)}, {statement}; {advice}")
    if pairing is None:
        raise CheckpointError(
            f"the pairing of the weights of {detected.path!r} is unknown: neither the config nor the model family "
            f"says one, and the weights do not show it ({detected.reason}); state it: {command(to, 'half')}, or "
            "interleaved"
        )
    return _SourcePairing(pairing, stated_by, detected)


def pairing_of_source(
    source: Opened, src: str | Path, dst: Path, to: str, *, stated: str | None, force: bool, verify: bool
) -> _SourcePairing:
    """Decide which pairing the weights of a folder are in, by `settle_pairing`.

    Args:
        source: the opened folder.
        src, dst: the source and the destination, as they were given.
        to: the pairing to convert to, or "meta".
        stated: the pairing that the user states; None: the user states none.
        force: take the weights for the pairing that is not `to`, whatever the config says.
        verify: refuse a stated pairing that the weights contradict, because no comparison could verify the copy.

    Raises:
        CheckpointError: as in `settle_pairing`; or the weights are in the pairing `to` already.
    """

    command = folder_call(src, dst)
    if not isinstance(source, Source):
        configured: str | None = "interleaved"
        by = "Meta's format"
    else:
        configured = source.pairing or ("half" if to == "meta" else None)
        by = "the config or the model family"
    if isinstance(source, Source) and source.adapter is not None and stated is None:
        source.adapter.check_stated(source.config)
    into_other = isinstance(source, Source) and to != "meta"
    if force and into_other and (stated or configured) == to:
        stated = other_pairing(to)
    detected, has_config = _detect(source), isinstance(source, Source)
    settled = settle_pairing(
        detected, to, stated=stated, configured=configured, by=by, command=command, has_config=has_config
    )
    if into_other and settled.pairing == to:
        raise CheckpointError(settled.already(f"the weights in {str(source.folder)!r}", command(to, other_pairing(to))))
    if verify and settled.is_contradicted:
        advice = right_call(str(detected.pairing), to, command, has_config=has_config)
        raise CheckpointError(
            f"the copy could not be verified: the weights of {detected.path!r} look {_with_score(detected)}, but you "
            f"stated {settled.pairing}; {advice}. To convert them as {settled.pairing} all the same, leave out verify "
            "(--verify)"
        )
    return settled


def check_label(model: PreTrainedModel, folder: Path, name: str | Path) -> None:
    """Raise CheckpointError if the weights in a folder contradict the pairing that its model runs.

    The queries and keys of a few layers are read. Nothing is raised where they do not show their pairing, or cannot be
    read, such as packed weights.

    Args:
        model: the model, which may be patched, and on the meta device.
        folder: its folder.
        name: the folder or Hub id, for the message.
    """
    from rope_ext_hf.checkpoints.pairing.model_weights import weights_in_files  # imports torch

    try:
        with foreign_errors(f"the weights of {str(name)!r} could not be read"):
            files, _ = open_weights(folder, {})
            detected = detect_in_weights(weights_in_files(model, files.values(), str(name)))
    except RopeExtError:  # a copy keeps the bytes of such weights
        return
    if detected.contradiction is None:
        return
    raise CheckpointError(
        f"the weights of {str(name)!r} look {_with_score(detected)}, but {detected.contradiction}; "
        f"{remedy(detected, detected.stated, folder_call(name, 'NEW'))}. To write a copy all the same, give force "
        "(`rope-ext patch --force`)"
    )


def _with_score(report: PairingReport) -> str:
    """Return the pairing that the weights fit better, with its score, as text for a message."""
    return f"{report.pairing or report.leaning} (score {_score(report)})"


def _score(report: PairingReport) -> str:
    return f"{report.score:+.3f} +- {report.error:.3f}"


def _detect(source: Opened) -> PairingReport:
    """Detect the pairing of the weights in a folder.

    The pairing of an adapter is that of the model that it was trained with.
    """
    path = str(source.folder)
    if not isinstance(source, Source) or source.adapter is None:
        return detect_in_weights(weights_from_source(source, path))
    base = source.adapter.base
    if source.adapter.lacks_pairing(source.config):
        return PairingReport(path, reason="it is an adapter that states no pairing, and its model was converted")
    if source.adapter.pairing is not None:  # the adapter was converted, and the model that it names perhaps not
        return PairingReport(path, reason="it is an adapter, which was converted apart from its model")
    if Path(base).is_dir():
        try:
            return detect_in_weights(weights_from_source(open_checkpoint(base), base))
        except RopeExtError as unreadable:
            return PairingReport(path, reason=f"it is an adapter, and its model cannot be read: {unreadable}")
    return PairingReport(path, reason=f"it is an adapter; `{command_line('detect', base)}` reads its model")
