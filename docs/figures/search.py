"""What a search of ten minutes found for the bundled model, out of docs/results/search.json."""

from __future__ import annotations

import re
from collections.abc import Sequence

from docs.figures.registry import figure, markdown_table, read_result, stamp


def _interval(values: Sequence[float]) -> str:
    mean, low, high = values[:3]
    return f"{mean:.4f} [{low:.4f}, {high:.4f}]"


@figure
def search_begins() -> str:
    """The methods that a search begins with."""
    from rope_ext_hf.tools.training.candidates import fixed_methods

    *names, last = (f"`{name}`" for name in fixed_methods())
    return f"{', '.join(names)} and {last}"


@figure
def search_result() -> str:
    """Losses on the held-out text at the target length, as loaded, of every fixed method and of what was found."""
    result = read_result("search")
    report = result["report"]
    length = report["target_length"]
    heads = [f"nats per token at {length:,}", "", "what was found is lower by"]
    rows = [
        [
            "what was found" if name == "chosen" else name,
            f"{losses[str(length)]:.4f}",
            _interval(report["gains"][name]) if name in report["gains"] else "",
        ]
        for name, losses in report["losses"].items()
    ]
    return markdown_table(heads, rows, stamp(result, result["command"]))


@figure
def search_summary() -> str:
    """The gain over the best fixed method, and the price at the context length."""
    result = read_result("search")
    report, best = result["report"], result["best_fixed"]
    return (
        f"{_interval(report['gains'][best])} nats per token below `{best}`, the best fixed method, and at the context "
        f"length {_interval(report['lost'])} above the model as loaded, on text that the search did not read"
    )


@figure
def search_cost() -> str:
    report = read_result("search")["report"]
    return (
        f"{report['trials']} candidates in {report['seconds'] / 60:.1f} minutes of a shared machine, "
        f"{report['cpu_seconds']:.0f} seconds of one core; {report['stopped']} were stopped early"
    )


@figure
def search_stages() -> str:
    """How far each stage came."""
    trials = read_result("search")["trials"]
    rows = []
    for stage in dict.fromkeys(trial["stage"] for trial in trials):
        of_stage = [trial for trial in trials if trial["stage"] == stage]
        until = [t for t in trials[: trials.index(of_stage[-1]) + 1] if not t["stopped"] and t["lost"] <= 0.02]
        stopped = sum(trial["stopped"] for trial in of_stage)
        rows.append([stage, str(len(of_stage)), str(stopped), f"{min(trial['loss'] for trial in until):.4f}"])
    return markdown_table(("stage", "candidates", "stopped early", "lowest loss by its end, text searched on"), rows)


@figure
def search_longrope() -> str:
    """LongRoPE's own search, given the same time."""
    theirs = read_result("search-longrope")
    return (
        f"read {theirs['candidates']} candidates to the end and came from {theirs['first_loss']:.4f} to "
        f"{theirs['searched_loss']:.4f} on the text searched on; on the held-out text what this search found is "
        f"{_interval(theirs['gain_of_chosen'])} nats lower, and LongRoPE's result loses {_interval(theirs['lost'])} at "
        "the context length"
    )


@figure
def search_keys() -> str:
    """What a search by the loss of key tokens found: against the best fixed method over these, and over all tokens."""
    result = read_result("search-key-tokens")
    report, best = result["report"], result["best_fixed"]
    keys = re.search(r"\d+", report["keys_by"])
    assert keys is not None

    def found_against_best(gains: dict[str, list[float]]) -> str:
        if "found" not in gains:  # what was found was written, and gains are over that
            return _compared(gains[best])
        mean, low, high, *_ = gains["found"]  # of the best fixed method, which was written
        return _compared((-mean, -high, -low))

    return (
        f"{report['trials']} candidates in {report['seconds'] / 60:.1f} minutes of a shared machine came to "
        f"{found_against_best(report['key_gains'])} `{best}`, the best fixed method, per key token ({keys[0]} of them, "
        f"in text that was not searched on), and to {found_against_best(report['gains'])} it over all tokens"
    )


def _compared(gain: Sequence[float]) -> str:
    mean, low, high = gain[:3] if gain[0] > 0 else (-gain[0], -gain[2], -gain[1])
    return f"{_interval((mean, low, high))} nats {'below' if gain[0] > 0 else 'above'}"
