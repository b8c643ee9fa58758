"""Tables and sentences of the records of `make gpu` (docs/results/gpu-*.json, one per device), and computed memory.

A record is read here alone: the tables and the sentences beside them follow from its rows, one table a question, with
what the device could do at best and what the stock model takes.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from docs.figures.registry import PROCESSORS, ROOT, Row, figure, in_bits, markdown_table, read_lines, stamp
from rope_ext_hf.runs.conclusions.statistics import estimate

NOTHING = "\nNothing yet.\n"
FEWEST = 3
"""Fewer texts than this get no interval."""
ALIKE = 1.05
"""A perplexity that is at most this many times another counts as no worse in the sentence below a table."""


@cache
def records() -> tuple[Row, ...]:
    """Every record of a GPU, by the name of its file."""
    files = sorted((ROOT / "docs" / "results").glob("gpu-*.json"))
    return tuple(json.loads(file.read_text(encoding="utf-8")) for file in files)


@figure
def gpu() -> str:
    """The lines of `make bench DEVICE=cuda`, by benchmark and device."""
    lines = [line for line in read_lines() if line["device"] not in PROCESSORS and "rows" in line]
    if not lines:
        return "\nThe benchmarks of this page were measured on CPUs. `make bench DEVICE=cuda` measures them on a GPU.\n"
    last = {(line["benchmark"], line["device"]): line for line in lines}
    text = []
    for (benchmark, _), line in last.items():
        keys = [key for key, value in line["rows"][0].items() if not isinstance(value, (dict, list))]
        rows = ([str(row.get(key, "")) for key in keys] for row in line["rows"])
        text.append(f"\n**{benchmark}**\n{markdown_table(keys, rows, stamp(line, 'make bench DEVICE=cuda'))}")
    return "".join(text)


@figure
def gpu_measured() -> str:
    """All records, each device under a heading of its own."""
    text = [f"\n## {record['device']}\n{record_text(record)}" for record in records() if record["measured"]]
    return "".join(text) or "\nNothing was measured on a GPU yet.\n"


def real_model_record() -> Row:
    """Return the first record in which a real model was measured."""
    return next(record for record in records() if record["measured"] and "unpatched" in losses(record))


def real_model(record: Row) -> tuple[str, int, int]:
    """Return the name of the real model in a record, its trained length, and the number of texts that it read."""
    description = results(record, "real model")[0]
    trained = description["trained"]
    return description["model"].partition(".")[0], trained, len(losses(record)["unpatched"][trained])


def measured_rows() -> list[list[Any]]:
    """Return the rises of a real model's loss as rows of measured.json, see `docs.figures.measurements.measured_file`.

    The same tokens are scored at every length, so that the rise is over the unpatched model at its trained length.
    """
    record = real_model_record()
    _, trained, _ = real_model(record)
    base = losses(record)["unpatched"][trained]
    rows = []
    for label, by_length in losses(record).items():
        method, _, factor = label.partition(" x")
        for scale in (1, int(factor)) if factor else (1, 2, 4, 8):
            change = estimate([loss - short for loss, short in zip(by_length[scale * trained], base, strict=True)])
            rows.append([method, int(factor) if factor else None, float(scale), *in_bits(change)])
    return rows


def real_model_name() -> str:
    """Return the name of the real model that `measured_rows` are of."""
    return real_model(real_model_record())[0]


@figure
def gpu_memory() -> str:
    """Computed: gigabytes that reading takes with Llama 3.1 8B in bfloat16, by length."""
    rows = (
        [
            f"{row['tokens']:,}",
            f"{row['losses']:.1f} GB",
            f"{row['answers']:.1f} GB",
            f"{row['offloading']:.1f} GB + {row['offloading_main']:.0f} GB",
        ]
        for row in fitting_memory()
    )
    return markdown_table(
        ["tokens", "losses (`ppl`)", "answers to prompts (`passkey`)", "`--offload-cache`: GPU + main memory"], rows
    )


@cache
def fitting_memory() -> tuple[Row, ...]:
    import torch

    sys.path.append(str(ROOT / "benchmarks"))
    from gpu_shapes import random_model

    from rope_ext_hf.reading.cost.memory import GPU_WORKING_BYTES, estimate_memory

    model = random_model("8B", "meta", torch.bfloat16)
    rows = []
    for length in (2**17, 2**18, 2**19, 2**20):
        row: Row = {"tokens": length}
        for name in ("losses", "answers", "offloading"):
            estimate = estimate_memory(model, length, by_layer=name == "losses", offload_cache=name == "offloading")
            estimate = replace(estimate, working=GPU_WORKING_BYTES, logits=0)
            row[name] = round(estimate.total / 1e9, 1)
        rows.append(row | {"offloading_main": round(estimate.offloaded / 1e9, 1)})
    return tuple(rows)


# --- one record -------------------------------------------------------------------------------------------------------


def record_text(record: Row) -> str:
    """The machine, then one table a question."""
    parts = {
        "Perplexity beyond the trained length": perplexity_text(record),
        "Reading": reading_text(record),
        "Decoding": decoding_text(record),
        "Kernels": kernels_text(record),
        "A smaller shape, whole and in chunks, padded and not": shapes_text(record),
        "What the run reported at its end": said_text(record),
    }
    notes = "".join(f"\n{note}\n" for note in record.get("notes", ()))
    return machine_text(record) + notes + "".join(f"\n### {title}\n{text}" for title, text in parts.items() if text)


def results(record: Row, step: str) -> list[Row]:
    """The JSON lines of a step; none where it was not run, or in a trial."""
    return list(record["steps"].get(step, {}).get("results", [])) if record["measured"] else []


def machine_text(record: Row) -> str:
    """The machine, its ceilings, and what decides which kernels run; a trial is marked as such."""
    if not record["measured"]:
        return "\nA trial, not a measurement.\n"
    machine = record["machine"]
    known = {
        "compute capability": machine["capability"],
        "driver": machine["driver"],
        "CUDA": machine["cuda"],
        "ROCm": machine["hip"],
        "cuDNN": machine["cudnn"],
        "Triton": machine["triton"],
        "power limit in watts": machine["power_limit_watts"],
        "commit": machine["commit"],
    }
    listed = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    ceilings = (
        f"A large copy moves {machine['bandwidth'] / 1e12:.2f} TB/s, bytes read and written; a large matrix product "
        f"runs at {machine['product'] / 1e12:.0f} TFLOP/s. The floor of an operation is its time at these speeds."
    )
    return f"\n{stamp(record, 'make gpu')} {listed}. Rotations by {machine['rotations']}. {ceilings}\n"


# --- perplexity -------------------------------------------------------------------------------------------------------


def losses(record: Row) -> dict[str, dict[int, list[float]]]:
    """Nats per token by method and length, of the texts that every method has read, in one order."""
    rows = [row for row in results(record, "real model") if "loss" in row]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    read = {
        text: {row["method"] for row in rows if row["text"] == text} for text in dict.fromkeys(r["text"] for r in rows)
    }
    texts = [text for text, by in read.items() if by == set(methods)]
    of = {(row["text"], row["method"]): row["loss"] for row in rows}
    return {
        method: {int(length): [of[text, method][length] for text in texts] for length in of[texts[0], method]}
        for method in methods
        if texts
    }


def perplexity(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(values))


def paired(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float] | None:
    """The mean of paired differences with its 95% interval by Student's t; None: too few pairs."""
    mean, low, high, _ = estimate([one - other for one, other in zip(values, others, strict=True)])
    return None if low is None or high is None else (mean, low, high)


def perplexity_text(record: Row) -> str:
    """Perplexity of the same tokens by method and by how much context is before them."""
    by_method = losses(record)
    if not by_method:
        return ""
    (description, *_) = results(record, "real model")
    lengths, trained = description["lengths"], description["trained"]
    (count,) = {len(values) for each in by_method.values() for values in each.values()}
    best = {length: min(perplexity(each[length]) for each in by_method.values()) for length in lengths}
    rows = [
        [
            method,
            *(
                f"**{value:,.2f}**" if value == best[length] else f"{value:,.2f}"
                for length in lengths
                for value in [perplexity(each[length])]
            ),
        ]
        for method, each in by_method.items()
    ]
    head = ["", *(f"{length:,} ({length / trained:g}x)" for length in lengths)]
    about = (
        f"{description['model']}, trained at {trained:,} tokens, in {description['dtype']}: perplexity of the last "
        f"{description['scored']:,} tokens of the first {lengths[-1]:,} of each text, with more and more of the text "
        f"before them. {count} texts{', too few for intervals' if count < FEWEST else ''}; bold: lowest of a column."
    )
    return f"\n{about}\n{markdown_table(head, rows)}{' '.join(perplexity_sentences(record))}\n{speed_text(record)}"


def perplexity_sentences(record: Row) -> list[str]:
    """Return sentences on the table: the unpatched model, the best method, and the methods that lose little."""
    by_method = losses(record)
    if "unpatched" not in by_method:
        return []
    (description, *_) = results(record, "real model")
    trained, lengths = description["trained"], description["lengths"]
    ppl = {method: {length: perplexity(each[length]) for length in lengths} for method, each in by_method.items()}
    unpatched, twice, longest = ppl["unpatched"], 2 * trained, lengths[-1]
    base = unpatched[trained]
    best = min((method for method in ppl if method != "unpatched"), key=lambda method: ppl[method][longest])
    sentences = [
        f"unpatched, perplexity goes from {base:.1f} at {trained:,} tokens to {unpatched[twice]:,.0f} at {twice:,} "
        f"and {unpatched[longest]:,.0f} at {longest:,}; with `{best}` it is {ppl[best][twice]:.1f} and "
        f"{ppl[best][longest]:.1f}."
    ]
    holding = [method for method in ppl if method != "unpatched" and ppl[method][twice] <= ALIKE * base]
    free = [method for method in ppl if method != "unpatched" and ppl[method][trained] <= 1.01 * base]
    sentences.append(
        f"Within 5% of {base:.1f} at {twice:,} tokens: {_listed(holding)}. "
        f"Within 1% of it at {trained:,} tokens: {_listed(free)}."
    )
    return [sentences[0][0].upper() + sentences[0][1:], sentences[1]]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def speed_text(record: Row) -> str:
    """Tokens per second of the last text that every method has read, and the most memory."""
    rows = [row for row in results(record, "real model") if "loss" in row]
    last = [row for row in rows if row["text"] == rows[-1]["text"]]
    (description, *_) = results(record, "real model")
    lengths = description["lengths"]
    cells = (
        [row["method"], *(f"{row['tokens_per_second'][str(length)] / 1000:,.0f}k" for length in lengths)]
        for row in last
    )
    head = ["tokens per second", *(f"{length:,}" for length in lengths)]
    most = max(max(row["gigabytes"].values()) for row in rows)
    return (
        f"\nHow fast the last of these texts was read; kernels and plans that the first text built are there by then. "
        f"At most {most:.1f} GB of the device were in use.\n{markdown_table(head, cells)}"
    )


# --- reading and decoding ---------------------------------------------------------------------------------------------


def measured(record: Row, *ways: str) -> Iterator[Row]:
    """The rows of reading and decoding that have values, of these ways."""
    rows = results(record, "reading and decoding")
    yield from (row for row in rows if row.get("way") in ways and "seconds" in row)


def best_stock(rows: Sequence[Row]) -> dict[tuple[Any, ...], float]:
    """The stock model's seconds by place, with its faster kernel."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["method"] == "stock":
            best[_place(row)] = min(row["seconds"], best.get(_place(row), row["seconds"]))
    return best


def _place(row: Row) -> tuple[Any, ...]:
    return row["layers"], row["tokens"], row["way"], row["chunk"]


def reading_text(record: Row) -> str:
    rows = list(measured(record, "bare", "scored", "read"))
    if not rows:
        return ""
    best = best_stock(rows)
    titles = {"bare": "decoder alone, whole", "scored": "scored", "read": "read, last token scored"}
    cells = [
        [
            f"{row['tokens']:,}",
            titles[row["way"]] + ("" if row["chunk"] is None else f", chunks of {row['chunk']:,}"),
            row["method"] + ("" if row["kernel"] is None else f", {row['kernel']} alone"),
            f"{row['times'] * row['seconds']:.2f} s"
            + ("" if row["times"] == 1 else f" ({row['layers']} of its layers, times {row['times']:g})"),
            f"{row['times'] * row['floor']:.2f} s",
            f"{row['seconds'] / row['floor']:.2f}",
            "–" if _place(row) not in best else f"{row['seconds'] / best[_place(row)]:.2f}",
            row["kernels"].replace("_attention", "").replace("_", " "),
            f"{row['gigabytes']:.1f} GB",
        ]
        for row in rows
    ]
    head = ["tokens", "read", "method", "time", "floor", "times the floor", "times stock", "attention", "memory"]
    about = (
        "Random weights in the shape of Llama 3.1 8B. The decoder alone reads the whole prompt without a cache; an "
        "evaluation (`scored`) reads it in chunks onto a cache and takes the loss of every token."
    )
    return f"\n{about}\n{markdown_table(head, cells)}{reading_sentence(rows, best)}\n"


def reading_sentence(rows: Sequence[Row], best: dict[tuple[Any, ...], float]) -> str:
    """Return a sentence that compares the stock model with its floor, and the methods with the stock model."""
    scored = [row for row in rows if row["way"] == "scored" and row["method"] == "stock"]
    others = [row["seconds"] / best[_place(row)] for row in rows if row["method"] != "stock" and _place(row) in best]
    longest = max(scored, key=lambda row: (row["layers"], row["tokens"]))
    return (
        f"Scoring {longest['tokens']:,} tokens takes {longest['seconds']:.1f} s, "
        f"{longest['seconds'] / longest['floor']:.2f} times the floor. Methods take {min(others):.2f} to "
        f"{max(others):.2f} times as long as the stock model with its faster kernel."
    )


def decoding_text(record: Row) -> str:
    rows = list(measured(record, "step"))
    if not rows:
        return ""
    cells = [
        [
            row["method"],
            f"{row['tokens']:,}",
            f"{1000 * row['seconds']:.1f} ms",
            f"{1000 * row['runs'][0]:.1f} to {1000 * row['runs'][-1]:.1f}",
            f"{1000 * row['floor']:.1f} ms",
            f"{row['seconds'] / row['floor']:.1f}",
            row["kernels"].replace("_attention", "").replace("_", " "),
            *("–" if row[count] is None else f"{row[count]:,}" for count in ("launches", "waits")),
        ]
        for row in rows
    ]
    head = [
        "method",
        "tokens before",
        "step",
        "least to most",
        "floor",
        "times the floor",
        "attention",
        "launches",
        "waits",
    ]
    about = (
        "One token at a time, as `generate` does without compiling: the host's time to launch kernels decides, not the "
        "device. cuDNN's attention builds a plan for every new length of the cache, which a step waits for."
    )
    return f"\n{about}\n{markdown_table(head, cells)}"


# --- kernels and shapes -----------------------------------------------------------------------------------------------


def kernels_text(record: Row) -> str:
    """Rotations beside a copy, and how far windows and gradients are from their definitions."""
    rows = results(record, "kernels")
    turned = [row for row in rows if row.get("question") == "rotation" and "seconds" in row]
    windows = [row for row in rows if row.get("question") == "window" and "difference" in row]
    gradients = [row for row in rows if row.get("question") == "gradient" and "output" in row]
    text = ""
    if turned:
        cells = (
            [row["of"], f"{row['tokens']:,}", f"{row['bandwidth'] / 1e12:.2f} TB/s", f"{row['of_copy']:.0%}"]
            for row in turned
        )
        text += markdown_table(["rotated", "tokens", "bytes read and written", "of a copy's bandwidth"], cells)
    if windows:
        cells = (
            [row["dtype"], f"{row['window']:,}", f"{row['difference']:.1e}", f"{row['log_sum_exp']:.1e}"]
            for row in windows
        )
        head = ["flash attention, dtype", "window", "output: relative difference", "log-sum-exp: largest difference"]
        text += markdown_table(head, cells)
    if gradients:
        keys = ("output", "query", "key", "value")
        cells = ([row["method"], row["dtype"], *(f"{row[key]:.1e}" for key in keys)] for row in gradients)
        head = ["attention of", "dtype", "output", *(f"gradient of {key}" for key in keys[1:])]
        text += markdown_table(head, cells)
    about = (
        "Values are compared with definitions in float64: windows with a masked softmax, attention over remapped "
        "positions with a loop over pairs of tokens. A difference is its norm over the norm of the definition."
    )
    return f"\n{about}\n{text}" if text else ""


def shapes_text(record: Row) -> str:
    prompts, steps = prompts_table(record), steps_table(record)
    return "" if prompts == NOTHING else f"\nPrompts:{prompts}Decoding steps:{steps}"


def prompts_table(record: Row) -> str:
    """Seconds, kernels and memory of reading a prompt, whole and in chunks."""
    cells = []
    for row in _measured(record):
        for way, title in (("whole", "whole"), ("chunks", "in chunks")):
            values = row[way]
            if values is None or "skipped" in values:
                continue
            second = "–" if values["second"] is None else f"{values['second']:.2f} s"
            predicted = row["predicted"][f"{way}_gigabytes"]
            cells.append(
                [
                    *_named(row),
                    title,
                    f"{values['first']:.2f} s",
                    f"{second} ({row['predicted']['prefill']:.2f})",
                    values["kernels"],
                    "–" if values["gigabytes"] is None else f"{values['gigabytes']:.1f} GB ({predicted:.1f})",
                ]
            )
    head = ["model", "tokens", "read", "first run", "second run (predicted)", "attention", "memory (predicted)"]
    return markdown_table(head, cells) if cells else NOTHING


def steps_table(record: Row) -> str:
    """Milliseconds, kernels, launches and waits of a decoding step."""
    cells = [
        [
            *_named(row),
            f"{1000 * step['median']:.1f} ms ({1000 * row['predicted']['decode']:.1f})",
            f"{1000 * step['least']:.1f} to {1000 * step['most']:.1f}",
            step["kernels"],
            *("–" if step[count] is None else f"{step[count]:,}" for count in ("launches", "waits")),
        ]
        for row in _measured(record)
        if (step := row["decode"]) is not None
    ]
    head = ["model", "tokens", "median (predicted)", "least to most", "attention", "launches", "waits"]
    return markdown_table(head, cells) if cells else NOTHING


def said_text(record: Row) -> str:
    """Return four lists: failures, wrong results, skipped steps, and steps slower than expected."""
    if not record["measured"]:
        return NOTHING
    return "".join(f"\n{title}: {_bullets(sentences)}" for title, sentences in record["said"].items())


def _bullets(sentences: Sequence[str]) -> str:
    return "\n\n" + "".join(f"- {' '.join(each.split())}\n" for each in sentences) if sentences else "nothing.\n"


def _measured(record: Row) -> Iterator[Row]:
    """Rows of shapes with values; none of a trial."""
    if record["measured"]:
        yield from (row for row in record["rows"] if "predicted" in row)


def _named(row: Row) -> list[str]:
    """The first two cells of a row: its model and method, its tokens."""
    without = "" if row["cudnn"] else ", without cuDNN"
    batch = "" if row["rows"] == 1 else f"{row['rows']} padded rows of up to "
    return [f"{row['shape']} {row['method']}{without}", f"{batch}{row['tokens']:,}"]
