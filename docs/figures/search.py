"""What a search of ten minutes found for the bundled model, out of docs/results/search.json."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from docs.figures.registry import figure, markdown_table, read_result, stamp


def _percent(nats: Sequence[float]) -> str:
    """Return by how many percent a perplexity is higher, with its interval, for a loss that is higher by this."""
    mean, low, high = (100 * math.expm1(each) for each in nats[:3])
    return f"{mean:.1f}% [{low:.1f}, {high:.1f}]"


def _lower(gain: Sequence[float]) -> str:
    """Return by how many percent a perplexity is lower, for a loss that is lower by this."""
    mean, low, high = (-100 * math.expm1(-each) for each in gain[:3])
    return f"{mean:.1f}% [{low:.1f}, {high:.1f}]"


@figure
def search_begins() -> str:
    """The methods that a search begins with."""
    from rope_ext_hf.training.candidates import fixed_methods

    *names, last = (f"`{name}`" for name in fixed_methods())
    return f"{', '.join(names)} and {last}"


@figure
def search_result() -> str:
    """Losses on the held-out text at the target length, as loaded, of every fixed method and of what was found."""
    result = read_result("search")
    report = result["report"]
    length = report["target_length"]
    heads = [f"perplexity at {length:,} tokens", "", "what was found is lower by"]
    rows = [
        [
            "what was found" if name == "chosen" else name,
            f"{math.exp(losses[str(length)]):.2f}",
            _lower(report["gains"][name]) if name in report["gains"] else "",
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
        f"a perplexity that is {_lower(report['gains'][best])} lower than under `{best}`, the best fixed method, and "
        f"at the context length {_percent(report['lost'])} higher than unpatched, on text that the search did not read"
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
        rows.append([stage, str(len(of_stage)), str(stopped), f"{math.exp(min(trial['loss'] for trial in until)):.3f}"])
    return markdown_table(
        ("stage", "candidates", "stopped early", "lowest perplexity by its end, text searched on"), rows
    )


@figure
def search_longrope() -> str:
    """LongRoPE's own search, given the same time."""
    theirs = read_result("search-longrope")
    return (
        f"read {theirs['candidates']} candidates to the end and came from a perplexity of "
        f"{math.exp(theirs['first_loss']):.2f} to {math.exp(theirs['searched_loss']):.2f} on the text searched on; on "
        f"the held-out text what this search found is {_lower(theirs['gain_of_chosen'])} lower, and LongRoPE's result "
        f"{_percent(theirs['lost'])} higher at the context length than the unpatched model"
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
        f"{report['trials']} candidates in {report['seconds'] / 60:.1f} minutes of a shared machine came to a "
        f"perplexity over key tokens that is {found_against_best(report['key_gains'])} than under `{best}`, the best "
        f"fixed method ({keys[0]} key tokens, in text that was not searched on), and over all tokens "
        f"{found_against_best(report['gains'])}"
    )


def _compared(gain: Sequence[float]) -> str:
    if gain[0] > 0:
        return f"{_lower(gain)} lower"
    return f"{_percent((-gain[0], -gain[2], -gain[1]))} higher"
