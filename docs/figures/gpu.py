"""What was measured on a GPU, and what is computed for one: docs/results/gpu.json, which `make gpu` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from docs.figures.registry import PROCESSORS, Row, figure, markdown_table, read_lines, read_result, stamp

NOTHING = "\nNothing yet.\n"


@figure
def gpu() -> str:
    lines = [line for line in read_lines() if line["device"] not in PROCESSORS and "rows" in line]
    if not lines:
        return "\nNo figure here was measured on a GPU. `make bench DEVICE=cuda` measures one.\n"
    last = {(line["benchmark"], line["device"]): line for line in lines}
    text = []
    for (benchmark, _), line in last.items():
        keys = [key for key, value in line["rows"][0].items() if not isinstance(value, (dict, list))]
        rows = ([str(row.get(key, "")) for key in keys] for row in line["rows"])
        text.append(f"\n**{benchmark}**\n{markdown_table(keys, rows, stamp(line, 'make bench DEVICE=cuda'))}")
    return "".join(text)


@figure
def gpu_measured() -> str:
    """The machine, prompts, decoding steps, and what the run named at its end."""
    record = read_result("gpu")
    if not record["measured"]:
        return machine_text(record)
    tables = f"Prompts:{prompts_table(record)}Decoding steps:{steps_table(record)}{said_text(record)}"
    return f"{machine_text(record)}\n{tables}"


@figure
def gpu_memory() -> str:
    rows = (
        [
            f"{row['tokens']:,}",
            f"{row['gpu']:.1f} GB",
            f"{row['offloading_gpu']:.1f} GB + {row['offloading_main']:.0f} GB",
        ]
        for row in read_result("gpu")["memory"]
    )
    return markdown_table(["tokens", "all on the GPU", "`--offload-cache`: GPU + main memory"], rows)


# --- of a record, which a test makes on a simulated device ------------------------------------------------------------


def machine_text(record: Row) -> str:
    """The machine and what decides which kernels run; a trial is no measurement."""
    if not record["measured"]:
        return "\nComputed, not measured: `make gpu` measures it, and fills this page in.\n"
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
    return f"\n{stamp(record, 'make gpu')} {listed}. Rotations by {machine['rotations']}.\n"


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
    """What failed, is wrong, was skipped or is slower than predicted, one list each."""
    if not record["measured"]:
        return NOTHING
    return "".join(f"\n{title}: {_bullets(sentences)}" for title, sentences in record["said"].items())


def _bullets(sentences: Sequence[str]) -> str:
    return "\n\n" + "".join(f"- {' '.join(each.split())}\n" for each in sentences) if sentences else "nothing.\n"


def _measured(record: Row) -> Iterator[Row]:
    """Rows with values; none of a trial."""
    if record["measured"]:
        yield from (row for row in record["rows"] if "predicted" in row)


def _named(row: Row) -> list[str]:
    """The first two cells of a row: its model and method, its tokens."""
    without = "" if row["cudnn"] else ", without cuDNN"
    batch = "" if row["rows"] == 1 else f"{row['rows']} padded rows of up to "
    return [f"{row['shape']} {row['method']}{without}", f"{batch}{row['tokens']:,}"]
