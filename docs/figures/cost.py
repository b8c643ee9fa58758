"""Time and memory, as ratios to what transformers, or a copy of the files, takes."""

from __future__ import annotations

from docs.figures.registry import (
    Row,
    figure,
    last_line,
    lines_of,
    markdown_table,
    ratio_with_interval,
    read_result,
    rows_of,
    stamp,
)
from rope_ext_hf.errors import capital

ATTENTION_TRAINED = 4096
"""The trained length of benchmarks/attention.py; rules by length read rows up to there as loaded."""


@figure
def patch_milliseconds() -> str:
    """The shortest time of all measurements: other work on the machine can only make it longer."""
    return f"{min(line['patch_32_layers_ms'] for line in lines_of('overhead')):.0f}"


@figure
def flash_attention_by_counting() -> str:
    counted = read_result("flash-attention-by-counting")
    (low, high), (fewest, most) = counted["memory"], counted["launches"]
    return (
        f"{low:.2f} to {high:.2f} times the memory of one call of flash attention, the same number of products, and "
        f"{fewest} to {most} launches in a model's first layer"
    )


@figure
def overhead() -> str:
    """Time and memory of a forward by method: of the two models measured by default, and of each pretrained one.

    A pretrained model has a table for each processor and dtype.
    """
    lines = {
        (line["model"], line["dtype"], line.get("processor")) if "model" in line else None: line
        for line in lines_of("overhead")
    }
    return "".join(map(overhead_table, lines.values()))


def overhead_table(line: Row) -> str:
    """One measurement of benchmarks/overhead.py: a column for each model and kind of forward."""
    measured = {(row["model"], row["what"], row["method"]): row for row in line["rows"]}
    forwards = dict.fromkeys((model, what) for model, what, _ in measured)
    methods = dict.fromkeys(method for *_, method in measured)
    first = {forward: next(row for key, row in measured.items() if key[:2] == forward) for forward in forwards}
    head = ["patched / unpatched: time, memory"]
    head += [f"{model}, {row['parameters'] / 1e6:.1f}M, {what}" for (model, what), row in first.items()]
    rows = [["unpatched", *(f"{1000 * row['stock_seconds']:.1f} ms" for row in first.values())]]
    for method in methods:
        cells = (measured.get((*forward, method)) for forward in forwards)
        rows.append([f"`{method}`", *(f"{ratio_with_interval(c)}, {c['memory']:.2f}" if c else "–" for c in cells)])
    command = f"benchmarks/overhead.py{line.get('options', '')} --methods {','.join(methods)}"
    where = f", {line['processor']}" if "processor" in line else ""
    return markdown_table(head, rows, f"In {line['dtype']}{where}. {stamp(line, command)}")


@figure
def dynamic_cost() -> str:
    measured = rows_of("dynamic", "rule", "key heads", "tokens", dtype="float32")
    settings = sorted({key[1:] for key in measured})
    rules = list(dict.fromkeys(key[0] for key in measured))
    rows = ([f"`{rule}`", *(f"{measured[rule, *setting]['ratio']:.2f}" for setting in settings)] for rule in rules)
    head = ["`growth`", *(f"{heads} key heads, {tokens:,} cached" for heads, tokens in settings)]
    return markdown_table(head, rows, stamp(last_line("dynamic"), "benchmarks/dynamic.py"))


@figure
def dynamic_memory() -> str:
    measured = rows_of("dynamic", "rule", "key heads", "tokens", "dtype")
    most = {
        even: max(row["memory"] for key, row in measured.items() if (key[0] == "even") is even)
        for even in (True, False)
    }
    return f"{most[True]:.2f} times under `even` and {most[False]:.2f} times under the others"


@figure
def dynamic_text() -> str:
    line = last_line("dynamic text")
    rows = (
        [
            f"{row['factor']:g}",
            row["positions"],
            f"{row['stock']:.2f}",
            "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["interval"]),
        ]
        for row in line["rows"]
        if not row["positions"].startswith("0x")  # both are as loaded there
    )
    head = ["factor", "positions", "transformers", "this package less that"]
    return markdown_table(head, rows, stamp(line, f"benchmarks/dynamic.py --text --documents {line['documents']}"))


@figure
def attention() -> str:
    """Time and memory beside plain attention, each cell as it was measured last."""
    lines = {(row["what"], row["way"], row["tokens"]): line for line in lines_of("attention") for row in line["rows"]}
    measured = rows_of("attention", "what", "way", "tokens")
    ways = list(dict.fromkeys(way for _, way, _ in measured if way not in ("plain", "eager")))
    lengths = sorted({tokens for *_, tokens in measured if tokens >= ATTENTION_TRAINED})

    def cell(what: str, way: str, length: int) -> str:
        if row := measured.get((what, way, length)):
            return f"{row['time']:.2f}, {row['memory']:.2f}"
        return "unpatched" if length <= ATTENTION_TRAINED else "–"

    rows = [
        [f"{title}, `{way}`", *(cell(what, way, length) for length in lengths)]
        for title, what in (("prefill", "prefill"), ("decode step", "decode"))
        for way in ways
    ]
    used = {stamp(line, "benchmarks/attention.py"): None for (*_, n), line in lines.items() if n >= ATTENTION_TRAINED}
    return markdown_table(
        ["time, memory / plain attention", *(f"{length:,}" for length in lengths)], rows, " ".join(used)
    )


@figure
def attention_eager() -> str:
    rows = rows_of("attention", "way", "tokens", what="prefill")
    longest = max((row for (way, _), row in rows.items() if way == "eager"), key=lambda row: row["tokens"])
    return (
        f"{longest['time']:.1f} times as long at {longest['tokens']:,} tokens, and {longest['memory']:.0f} times the "
        "memory"
    )


@figure
def reading() -> str:
    lines = lines_of("reading")
    rows = []
    for (lengths,), row in sorted(
        {(tuple(row["lengths"]),): row for line in lines for row in line["rows"] if "chunks" in row}.items()
    ):
        ordinary, fits = row["ordinary"], row["ratio"] is not None
        rows.append(
            [
                f"{lengths[0]:,}",
                f"{row['chunks']['seconds']:.0f} s, {row['chunks']['megabytes']:,} MB",
                f"{ordinary['seconds']:.0f} s, {ordinary['megabytes']:,} MB" if fits else "does not fit in 24 GB",
                f"{row['ratio']:.2f}" if fits else "–",
            ]
        )
    head = ["tokens", "in chunks", "`model(ids, labels=ids)`", "time, chunks / ordinary"]
    return markdown_table(head, rows, stamp(lines[-1], "benchmarks/reading.py"))


@figure
def readers() -> str:
    """Return the time, memory and loss of other programs and of this one, reading the same windows of the same text."""
    lines = {row["way"]: line for line in lines_of("readers") for row in line["rows"]}  # the last line of each way
    rows, notes = [], dict[str, list[str]]()
    for way, line in lines.items():
        for row in line["rows"]:
            if row["way"] == way:
                rows.append([f"{way} of {line['length']:,}", row["program"], *_reader_cells(row)])
        load = f", beside programs that kept the processor busy (load {max(line['load']):g})" if "load" in line else ""
        note = (
            f"{line.get('gguf', line['model'])}, {line['dtype']}, {line['tokens']:,} tokens, medians of "
            f"{line['runs']} runs in turn{load}. {stamp(line, 'benchmarks/readers.py')}"
        )
        notes.setdefault(note, []).append(f"{way} {line['stride']:,} apart" if "overlapping" in way else way)
    head = ["read", "by", "nats per token", "CPU time", "of the other's", "memory above the model"]
    text = "\n\n".join(f"{capital(', '.join(ways))}: {note}" for note, ways in notes.items())
    return markdown_table(head, rows, text)


def _reader_cells(row: Row) -> list[str]:
    """Return the cells of the loss, the time, its ratio to the other program's, and the memory."""
    if "not_measured" in row:
        return [f"not measured {row['not_measured']}", "", "", ""]
    model = f" (model {row['model_megabytes']:,.0f} MB)" if "model_megabytes" in row else ""
    ratio = f"{row['time_ratio']:.2f}" if "time_ratio" in row else ""
    return [f"{row['loss']:.6f}", f"{row['seconds']:.1f} s", ratio, f"{row['megabytes']:,.0f} MB{model}"]


@figure
def position_ratio() -> str:
    row = [row for line in lines_of("reading") for row in line["rows"] if "position" in row][-1]
    *shorter, longest = (f"{length:,}" for length in row["lengths"])
    return f"{row['ratio']:.2f} times the time of one pass for each of {', '.join(shorter)} and {longest}"


@figure
def conversion() -> str:
    line = last_line("conversion")
    return (
        f"{line['gigabytes']:.2f} GB in {line['parts']} files took {line['convert_seconds']:.1f} s with the start of "
        f"Python, {line['ratio']:.2f} times as long as `cp -r` and `sync` (least of {line['rounds']} runs each, in "
        f"turn), {line['convert_cpu']:.2f} s of the processor (`cp` {line['copy_cpu']:.2f}; `rope-ext detect` "
        f"{line['detect_cpu']:.2f}), and {line['convert_megabytes']} MB of memory of its own"
    )
