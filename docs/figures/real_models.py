"""Measurements on models larger than those that this package can bring along."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain
from typing import Any

from docs.figures.registry import Row, figure, in_bits, length_heads, markdown_table, read_lines, read_result, stamp
from rope_ext_hf.errors import counted
from rope_ext_hf.runs.conclusions.statistics import FEWEST, Estimate, estimate


@figure
def real_models() -> str:
    """A table for each pretrained model that was measured by benchmarks/real_models.py."""
    return "\n\n" + "".join(section(entry) for entry in entries())


def entries() -> list[Row]:
    """Return the measured models, the one with the most texts first; of equally many, that with the most rows.

    A model that was measured in several dtypes or on several devices has an entry for each.
    """
    complete = [with_short_losses(entry) for entry in read_result("real-models")["models"]]
    return sorted(complete, key=lambda entry: (len(texts_of(entry)), len(entry["texts"])), reverse=True)


def with_short_losses(entry: Row) -> Row:
    """Return an entry with what each row is compared with, and its dtype.

    These are the losses of the model as loaded on the same targets when it reads no more than its context length, by
    length. Up to the context length it reads all of the text before them. Rounding differs with the length that is
    read, so that rows are compared with that of the same multiple where there is one.
    """
    length = str(entry["context_length"])
    unpatched = [row for row in entry["texts"] if row["method"] == "unpatched"]
    short: dict[tuple[str, float], Row] = defaultdict(dict)
    for read in unpatched:
        short[read["text"], read["multiple"]] = {length: read["loss"][length]} | read.get("recent", {})
    smallest = {row["text"]: row["multiple"] for row in sorted(unpatched, key=lambda row: -row["multiple"])}
    rows_with_short = []
    for row in entry["texts"]:
        text = row["text"]
        compared = short[text, smallest[text]] | short[text, row["multiple"]] if text in smallest else {}
        rows_with_short.append(row | {"dtype": entry["dtype"], "short": compared})
    return entry | {"texts": rows_with_short}


def merged_entries() -> list[Row]:
    """Return one entry for each model, in which each method has the rows of the entry that has most of them."""
    by_model: dict[str, list[Row]] = {}
    for entry in entries():
        by_model.setdefault(entry["model"], []).append(entry)
    merged = []
    for same in by_model.values():
        settings = dict.fromkeys((row["method"], row["multiple"]) for entry in same for row in entry["texts"])
        best = [max((rows(entry, *setting) for entry in same), key=len) for setting in settings]
        merged.append(same[0] | {"texts": [*chain.from_iterable(best)]})
    return merged


def texts_of(entry: Row) -> list[str]:
    """Return the names of the texts that a model read."""
    return sorted({row["text"] for row in entry["texts"]})


def first_multiple(entry: Row) -> float:
    """Return the smallest multiple of the context length that methods were set for."""
    smallest: float = min(row["multiple"] for row in entry["texts"])
    return smallest


def further_multiples(entry: Row) -> list[float]:
    """Return the larger multiples that methods were set for with enough texts for an interval."""
    multiples = sorted({row["multiple"] for row in entry["texts"]} - {first_multiple(entry)})
    return [multiple for multiple in multiples if len(rows(entry, "unpatched", multiple)) >= FEWEST]


def rows(entry: Row, method: str, multiple: float) -> list[Row]:
    """Return the rows of a method that was set for a multiple of the context length, one for each text."""
    return [row for row in entry["texts"] if (row["method"], row["multiple"]) == (method, multiple)]


def rise(entry: Row, method: str, multiple: float, length: int) -> Any:
    """Return by how much the loss of a method is above that of the model as loaded on the same targets.

    The model as loaded reads no more than its context length. Texts are compared one by one. The result is an
    `Estimate`; None: the method was not measured.
    """
    at = str(length)
    known = [row for row in rows(entry, method, multiple) if at in row["loss"] and at in row["short"]]
    changes = [row["loss"][at] - row["short"][at] for row in known]
    return estimate(changes, [1.0] * len(changes)) if changes else None


def measured_rows(entry: Row) -> list[list[Any]]:
    """Return the rises of a model's loss as rows of measured.json, see `docs.figures.measurements.measured_file`."""
    from rope_ext_hf.methods.registry import accepts_factor

    rises = []
    for method, multiple in dict.fromkeys((row["method"], row["multiple"]) for row in entry["texts"]):
        factor = multiple if method != "unpatched" and accepts_factor(method) else None
        for scale in (1, multiple):
            if scale == 1 and factor is None and multiple > first_multiple(entry):
                continue  # as under the first multiple
            change = rise(entry, method, multiple, int(scale * entry["context_length"]))
            if change is not None:
                rises.append([method, factor, float(scale), *in_bits(change)])
    return rises


def _weights(entry: Row) -> str:
    """Return what is said of a model's weights where they are not those of its publisher."""
    return f"{entry['weights']}, " if entry.get("weights") else ""


def section(entry: Row) -> str:
    """Return the table of one model: the rise of the loss of every method at every length."""
    context_length, first = entry["context_length"], first_multiple(entry)
    columns = [(first, int(scale * context_length)) for scale in (1, 1.5, 2) if scale <= first]
    further = [(4.0, context_length), (4.0, 4 * context_length)]
    columns += [column for column in further if any(row["multiple"] == 4 for row in entry["texts"])]
    methods = dict.fromkeys(row["method"] for row in entry["texts"])
    texts = texts_of(entry)
    table = []
    for method in methods:
        cells = [_gap(rise(entry, method, multiple, length)) for multiple, length in columns]
        name = f"`{method}`" if method != "unpatched" else method
        count = len({row["text"] for row in entry["texts"] if row["method"] == method})
        if count < len(texts):
            name += f" ({count} of {len(texts)} texts)"
        table.append([name, *cells])
    heads = [f"{length:,} ({length / context_length:g}x), set for {multiple:g}x" for multiple, length in columns]
    note = (
        f"{len(texts)} {'text' if len(texts) == 1 else 'texts'} ({', '.join(texts)}), {entry['targets']:,} tokens "
        "of each scored at every length. " + stamp(entry, "make real-models")
    )
    size = f"{entry['parameters'] / 1e9:.3g} billion parameters, {_weights(entry)}context length {context_length:,}"
    rises = f"**{entry['model']}** in {entry['dtype']}, {size}:" + markdown_table(["method", *heads], table, note)
    return rises + (answers_table(entry) if entry["answers"] else "")


def answers_table(entry: Row) -> str:
    """Return the table of a model's answers to prompts that hide a passkey, by method and length of the prompt."""
    cells = {(row["method"], row["length"]): row for row in entry["answers"]}
    methods, lengths = (dict.fromkeys(names) for names in zip(*cells, strict=True))
    table = []
    for method in methods:
        row = [f"`{method}`" if method != "unpatched" else method]
        for length in lengths:
            answer = cells.get((method, length))
            loss = answer and estimate(answer["loss"], [1.0] * len(answer["loss"]))
            row.append(f"{loss.text('{:.2f}'.format)}, {answer['exact']:.0%}" if answer and loss else "–")
        table.append(row)
    first = entry["answers"][0]
    note = (
        "Loss of the right answer in nats per token with its 95% interval over prompts, and the share of prompts that "
        f"are answered exactly; {len(first['loss'])} prompts a cell, methods set for {first['multiple']:g}x."
    )
    return f"Its answers:{markdown_table(['method', *length_heads(lengths, entry['context_length'])], table, note)}"


@figure
def chosen_real_models() -> str:
    """A table of every real model: its perplexity under each method, as a multiple of that of short inputs."""
    return "".join([_ratio_table(entry) for entry in merged_entries()])


def _ratio_table(entry: Row) -> str:
    context_length, texts, multiple = entry["context_length"], texts_of(entry), first_multiple(entry)
    columns = [(multiple, scale) for scale in (1.0, 1.5, 2.0) if scale <= multiple]
    by_first = len(columns)
    columns += [(further, further) for further in further_multiples(entry)]
    by_method = {
        method: [rise(entry, method, set_for, int(scale * context_length)) for set_for, scale in columns]
        for method in dict.fromkeys(row["method"] for row in entry["texts"])
    }
    patched = sorted(by_method.keys() - {"unpatched"})  # by name, where two read equally well
    best_first = sorted(patched, key=lambda method: by_method[method][by_first - 1].value)
    table = []
    for method in ["unpatched", *best_first]:
        name = method if method == "unpatched" else f"`{method}`"
        read = len(rows(entry, method, multiple))
        cells = [_ratio_cell(change) for change in by_method[method]]
        for index, (set_for, _) in enumerate(columns[by_first:], by_first):
            if (fewer := len(rows(entry, method, set_for))) not in (0, read):
                cells[index] += f", {counted(fewer, 'novel')}"
        table.append([name, *cells, str(read)])
    heads = [f"{int(scale * context_length):,} tokens ({scale:g}x)" for _, scale in columns]
    factors = f"the factor {multiple:g}" + "".join([f", and {each:g} at {each:g}x" for each, _ in columns[by_first:]])
    by_dtype: dict[str, dict[str, None]] = defaultdict(dict)
    for row in entry["texts"]:
        if row["multiple"] == multiple:
            by_dtype[row["dtype"]][row["method"]] = None
    dtypes = "; ".join([f"{', '.join(methods)} in {dtype}" for dtype, methods in by_dtype.items()])
    measured = dtypes if len(by_dtype) > 1 else f"in {entry['dtype']}"
    for further, _ in columns[by_first:]:
        measured += f"; at {further:g}x in {rows(entry, 'unpatched', further)[0]['dtype']}"
    size = f"{entry['parameters'] / 1e6:,.0f} million parameters, {_weights(entry)}context length {context_length:,}"
    about = (
        f"**{entry['model']}** ({size}) on {counted(len(texts), 'novel')}: perplexity divided by that of the unpatched "
        f"model when it reads no more than {context_length:,} tokens before the same text, with its 95% interval over "
        f"novels where at least {FEWEST} were read. Static methods have {factors}. Measured {measured}."
    )
    return f"\n\n{about}\n{markdown_table(['method', *heads, 'novels'], table)}\n\n"


def _ratio_cell(change: Estimate | None) -> str:
    """Return what a change of the loss in nats multiplies the perplexity by, with its interval if it has a width."""
    if change is None:
        return "–"
    if change.low == change.high:
        return _ratio_text(change.value)
    return change.text(_ratio_text)


def _ratio_text(nats: float) -> str:
    ratio = math.exp(nats)
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


@figure
def real_model_line() -> str:
    """Return the sentence of the README on a real model, at twice and four times its context length."""
    entry = _read_furthest()
    context_length, texts = entry["context_length"], len(rows(entry, "dca", 4))
    (dtype,) = {row["dtype"] for row in rows(entry, "dca", 4)}
    return (
        f"{entry['model']}, trained at {context_length:,} tokens, reads {2 * context_length:,} and "
        f"{4 * context_length:,} with `dca`: on {texts} novels, its perplexity is {_at_twice_and_four_times('dca')} "
        f"times that of the unpatched model with only {context_length:,} tokens before the same text. Unpatched it is "
        f"{_at_twice_and_four_times('unpatched')} times as high (measured on a CPU in {dtype})."
    )


@figure
def real_model_choice() -> str:
    """Return the numbers by which docs/choosing.md recommends a method without training."""
    entry = _read_furthest()
    context_length, texts = entry["context_length"], len(rows(entry, "unpatched", 4))
    parts = []
    for multiple in (2, 4):
        listed = []
        for method in ("dca", "dynamic-self-extend", "self-extend", "rerope", "unpatched"):
            if change := rise(entry, method, multiple, multiple * context_length):
                listed.append(f"{method if method == 'unpatched' else f'`{method}`'} {short_ratio(change)}")
        parts.append(f"{', '.join(listed)} at {multiple * context_length:,} tokens")
    return (
        f"Perplexity of {entry['model']} on {texts} novels, divided by that of the unpatched model with only "
        f"{context_length:,} tokens before the same text: {'; '.join(parts)}"
    )


def _read_furthest() -> Row:
    """Return the entry of the first model with enough texts at four times its context length."""
    return next(entry for entry in merged_entries() if 4 in further_multiples(entry))


def _at_twice_and_four_times(method: str) -> str:
    """Return the perplexities at these lengths, with a method set for each, over that of short inputs."""
    entry = _read_furthest()
    changes = [rise(entry, method, multiple, multiple * entry["context_length"]) for multiple in (2, 4)]
    return " and ".join(map(short_ratio, changes))


def short_ratio(change: Estimate) -> str:
    ratio = math.exp(change.value)
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


@figure
def ruler_tables() -> str:
    """RULER of each model and device that was measured last, beside what papers report of the model."""
    lines = {(line["model"], line["device"]): line for line in read_lines() if line["benchmark"] == "ruler table"}
    return (
        "\n\n" + "".join(map(ruler_section, lines.values())) if lines else "\n\n**No model has been measured yet.**\n\n"
    )


def ruler_section(line: Row) -> str:
    """The scores of one model by method and length, their mean, and the mean that a paper reports."""
    from rope_ext_hf.tools.advice.reported import reported

    tables = [each for each in reported() if each.model == line["model"].rpartition("/")[2] and len(each.lengths) == 1]
    lengths = list(dict.fromkeys(row["length"] for row in line["rows"] if row["length"]))
    cells = {(row["label"], row["length"]): row for row in line["rows"]}
    rows = []
    for label, method in dict.fromkeys((row["label"], row["method"]) for row in line["rows"]):
        mean = cells[label, None]
        published = [each.numbers(method) for each in tables if method in each.values]
        scores = [f"{cells[label, length]['score']:.1f}" for length in lengths]
        value, low, high = mean["over_as_loaded"]
        change = Estimate(value, low, high, line["samples"])
        gap = "" if label == "unpatched" else f" ({_gap(change, digits=1)})"
        rows.append([f"`{label}`", *scores, f"{mean['score']:.1f}{gap}", ", ".join(published) or "–"])
    of = f" ({', '.join(f'{each.source}, {each.lengths[0]}' for each in tables)})" if tables else ""
    head = ["RULER, %", *length_heads(lengths, line["context_length"]), "mean, measured here", f"reported{of}"]
    note = (
        f"{len(line['tasks'])} tasks, {line['samples']} prompts each, {line['dtype']}; in brackets the difference to "
        "the model as loaded with its 95% interval. "
    )
    note += stamp(line, f"benchmarks/ruler_table.py --model {line['model']}")
    return f"### RULER: {line['model']}\n\n{markdown_table(head, rows, note)}\n\n"


def _gap(change: Estimate | None, digits: int = 3) -> str:
    """Return a difference with its interval, where there are items enough for one; a dash where it was not measured."""
    if change is None:
        return "–"
    middle, *ends = ("" if end is None else f"{end:+.{digits}f}" for end in change[:3])
    return middle if change.low is None else f"{middle} [{', '.join(ends)}]"
