"""Positions dropped and clipped: `nope` after short trainings, and `cope` without training."""

from __future__ import annotations

import json

from docs.figures.measurements import factor_lines
from docs.figures.real_models import first_multiple, merged_entries, rise, rows, short_ratio
from docs.figures.registry import Row, figure, length_heads, lines_of, markdown_table, stamp
from rope_ext_hf.reference import path
from rope_ext_hf.runs.conclusions.statistics import estimate

_ORDER = ("default", "yarn", "nope")
"""The methods of benchmarks/recalibration.py as they stand in the table; "default" is the unpatched model."""

_WORSE = "does not help: at {:g}x worse than the unpatched model"


def _lines() -> dict[tuple[str, float], Row]:
    """Return the last line of each method and length of training, in minutes."""
    lines = {(line["method"], line["minutes"]): line for line in lines_of("recalibration")}
    return dict(sorted(lines.items(), key=lambda item: (_ORDER.index(item[0][0]), item[0][1])))


def _pretraining_bytes() -> int:
    """Return the number of bytes in all rows that the bundled model was pretrained on."""
    record = json.loads((path() / "training.json").read_text(encoding="utf-8"))
    steps = [phase["steps"] * (phase["text_rows"] + phase["prompt_rows"]) for phase in record["phases"].values()]
    return int(sum(steps) * record["trained_length"])


@figure
def recalibration() -> str:
    """A table of bits per byte and answers by length, under nope and yarn, by the length of the training."""
    table = []
    for (method, minutes), line in _lines().items():
        name = f"`yarn` x{line['factor']}" if method == "yarn" else f"`{method}`"
        if method == "default":
            name = "unpatched"
        elif minutes:
            name += f", {minutes:g} minutes ({line['tokens'] / 1e6:.1f} million bytes)"
        else:
            name += ", not trained"
        cells = [f"{loss:.2f}, {line['answers'][length][0]:.0%}" for length, loss in line["losses"].items()]
        table.append([name, *cells])
    line = _lines()["nope", 2.0]
    head = ["bits per byte, answers at", *length_heads(map(int, line["losses"]), line["context_length"])]
    note = (
        f"All weights were trained, with a learning rate of up to {line['learning_rate']:g}, on the standard library "
        f"and retrieval prompts. {line['spans']} spans were scored at each length; answers are of {line['trials']} "
        f"{line['task']} prompts at each of five depths. The model was pretrained on {_pretraining_bytes() / 1e6:.1f} "
        "million bytes. A minute is what two cores of an AMD EPYC (Zen 5) read in that time under `nope`; under `yarn` "
        "the model reads as many bytes, in rows of the extended length. "
    )
    return markdown_table(head, table, note + stamp(line, "benchmarks/recalibration.py"))


@figure
def dropped_and_clipped() -> str:
    """A table of what cope and nope do on the models that were measured, with a verdict for each."""
    head = ["method", "model", "at the context length", "beyond it", "verdict"]
    table = [*_cope_on_real_models(), _cope_on_the_bundled_model(), *_nope_on_the_bundled_model()]
    table.append(
        ["`nope`", "large models after billions of tokens", "–", "–", "not known here; its paper reports a gain"]
    )
    return markdown_table(head, table)


def _cope_on_real_models() -> list[list[str]]:
    table = []
    for entry in merged_entries():
        multiple = first_multiple(entry)
        length, longest = entry["context_length"], int(multiple * entry["context_length"])
        if not rows(entry, "cope", multiple):
            continue
        short = rise(entry, "cope", multiple, length)
        beyond = {name: rise(entry, name, multiple, longest) for name in ("cope", "unpatched", "yarn")}
        compared = f"unpatched {short_ratio(beyond['unpatched'])}, `yarn` {short_ratio(beyond['yarn'])}"
        table.append(
            [
                "`cope`, not trained",
                f"{entry['model']}, {len(rows(entry, 'cope', multiple))} novels",
                f"perplexity x {short_ratio(short)}",
                f"at {multiple:g}x: perplexity x {short_ratio(beyond['cope'])} ({compared})",
                _verdict(entry, multiple, longest),
            ]
        )
    return table


def _verdict(entry: Row, multiple: float, length: int) -> str:
    """Return whether cope reads an extended length better than the unpatched model and than yarn, text by text."""
    losses = {
        name: {row["text"]: row["loss"][str(length)] for row in rows(entry, name, multiple)}
        for name in ("cope", "unpatched", "yarn")
    }
    over = {}
    for name in ("unpatched", "yarn"):
        changes = [loss - losses[name][text] for text, loss in losses["cope"].items() if text in losses[name]]
        over[name] = estimate(changes, [1.0] * len(changes))
    if over["unpatched"].low is not None and over["unpatched"].low > 0:
        return _WORSE.format(multiple)
    if over["unpatched"].high is None or over["unpatched"].high >= 0:
        return "does not help"
    lost, kept = (rise(entry, name, multiple, length).value for name in ("unpatched", "cope"))
    than_yarn = ", less than `yarn`" if over["yarn"].low is not None and over["yarn"].low > 0 else ""
    return f"helps{than_yarn}: {1 - kept / lost:.0%} of the rise of the loss goes away"


def _cope_on_the_bundled_model() -> list[str]:
    line = factor_lines()["reference"]
    bits = {(row["method"], row["length"]): row["increase"] for row in line["rows"] if row["factor"] is None}
    length = line["context_length"]
    beyond = ", ".join(
        [
            f"at {times}x {bits['cope', times * length]:+.2f} bits (unpatched {bits['unpatched', times * length]:+.2f})"
            for times in (2, 16)
        ]
    )
    worse = bits["cope", 16 * length] > bits["unpatched", 16 * length]
    verdict = _WORSE.format(16) if worse else "helps little"
    return ["`cope`, not trained", "bundled model", f"{bits['cope', length]:+.2f} bits per byte", beyond, verdict]


def _nope_on_the_bundled_model() -> list[list[str]]:
    table, unpatched = [], _lines()["default", 0.0]["losses"]
    short, *_, long = unpatched
    for (method, minutes), line in _lines().items():
        if method != "nope":
            continue
        losses = line["losses"]
        lost, least, _ = line["rises"][short]
        table.append(
            [
                f"`nope`, {minutes:g} minutes of training",
                "bundled model",
                f"{losses[short]:.2f} bits per byte (unpatched {unpatched[short]:.2f})",
                f"at 16x {losses[long]:.2f} (unpatched {unpatched[long]:.2f})",
                f"does not help: short inputs lose {lost:.2f} bits" if least > 0 else "helps",
            ]
        )
    return table
