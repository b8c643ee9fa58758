"""Perplexity and retrieval of the bundled model, and of models trained beside it."""

from __future__ import annotations

from collections.abc import Sequence

from docs.figures.measurements import NAMES
from docs.figures.registry import (
    Row,
    figure,
    last_line,
    length_heads,
    length_table,
    lines_of,
    markdown_table,
    read_result,
    stamp,
)

LUCK = 0.05
"""The share of right answers that rank first among 20 by luck."""


def _row_name(method: str) -> str:
    """Return how a row of a table names a method; the records call the unpatched model "as-loaded"."""
    return "unpatched" if method == "as-loaded" else f"`{method}`"


@figure
def reference_setting() -> str:
    result = last_line("reference")
    return (
        f"{result['parameters'] / 1e6:.1f} million parameters, trained at {result['context_length']} bytes; the same "
        f"{result['scored_tokens']:,} bytes of held-out Python scored at every length"
    )


@figure
def first_run() -> str:
    """Return what `make demo` prints, as benchmarks/first_run.py recorded it."""
    return f"\n\n```text\n{read_result('first-run')['text']}```\n\n"


@figure
def first_run_time() -> str:
    """Return how long `make demo` measures, as benchmarks/first_run.py recorded it."""
    return f"about {round(read_result('first-run')['seconds'], -1)} seconds on one core"


@figure
def temperatures() -> str:
    """Bits per byte at 8 times the context length and more, by method and temperature, of both sets of documents."""
    line = [line for line in lines_of("remapping") if line.get("temperatures")][-1]
    rows = [row for row in line["rows"] if row["length"] >= 8 * line["context_length"]]
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["method"], row["temperature"], row["length"]): row for row in rows}
    table = (
        [
            f"`{method}`",
            temperature,
            *("{choice:.3f} / {confirmation:.3f}".format(**cells[method, temperature, length]) for length in lengths),
        ]
        for method, temperature in dict.fromkeys(key[:2] for key in cells)
    )
    head = ["method", "temperature", *(f"{length // line['context_length']}x" for length in lengths)]
    note = (
        "*Over the four held-out modules that the default was chosen on (`_pydecimal`, `inspect`, `pydoc_data/topics`, "
        "`turtle`) / over the other four.* "
    )
    command = f"benchmarks/remapping.py --spans {line['spans']} --temperatures {line['temperatures']}"
    return markdown_table(head, table, note + stamp(line | {"rows": []}, command))  # the table has no intervals


@figure
def novels() -> str:
    older = read_result("novels")
    rows = ([f"`{row['method']}`", *(f"{x:.3f}" for x in row["bits_per_byte"])] for row in older["rows"])
    return markdown_table(["bits per byte at", *(f"{scale}x" for scale in older["scales"])], rows, f"*{older['note']}*")


def retrieval_cells(model: str = "reference") -> tuple[dict[tuple[str, int, int], Row], list[int], Row]:
    """The cells of a model by method, keys and length, each as it was measured last; all lengths; a line."""
    lines = [line for line in lines_of("retrieval") if line.get("model", "reference") == model]
    cells = {(row["name"], row["keys"], row["length"]): row for line in lines for row in line["rows"]}
    return cells, sorted({length for _, _, length in cells}), lines[-1]


@figure
def retrieval() -> str:
    """The share of exact answers by length, of one key and of one of several, of every model that answers."""
    return "".join(map(_retrieval, {line.get("model", "reference"): None for line in lines_of("retrieval")}))


def _retrieval(model: str) -> str:
    cells, lengths, line = retrieval_cells(model)
    counts = sorted({keys for _, keys, _ in cells})
    options = "" if model == "reference" else f" --model build/bench/{model}"
    measured = stamp(line, f"benchmarks/retrieval.py{options}")
    if len(cells) == 1:
        (only,) = cells.values()
        low, high = only["interval"]
        return (
            f"The unpatched {NAMES[model]} answers {only['exact']:.0%} [{low:.0%}, {high:.0%}] of {only['trials']} "
            f"questions exactly at {lengths[0]:,} tokens (1x). {measured}\n\n"
        )

    def cell(name: str, length: int) -> str:
        rows = [cells[name, keys, length] for keys in counts if (name, keys, length) in cells]
        return " / ".join(f"{row['exact']:.0%}" for row in rows) or "–"

    rows = (
        [_row_name(name), *(cell(name, n) for n in lengths)] for name in dict.fromkeys(name for name, _, _ in cells)
    )
    head = [f"{NAMES[model]}: answered exactly at", *length_heads(lengths, line["context_length"])]
    kinds = " / ".join("one key" if keys == 1 else f"one of {keys}" for keys in counts)
    if any((name, 1, n) in cells and (name, counts[-1], n) not in cells for name, _, n in cells):
        kinds += "; a single number is for one key"
    questions = f"{next(iter(cells.values()))['trials']} questions per cell"
    ends = (abs(end - row["exact"]) for row in cells.values() for end in row["interval"])
    questions += f", 95% confidence intervals reach up to {100 * max(ends):.0f} points to either side"
    return markdown_table(head, rows, f"*{kinds}; {questions}.* {measured}")


@figure
def retrieval_tasks() -> str:
    """By task, of one key, each cell as it was measured last."""
    lines = lines_of("retrieval by task", "retrieval by form")
    cells = {(row["name"], row["length"]): row for line in lines for row in line["rows"] if row["keys"] == 1}
    lengths = sorted({length for _, length in cells})
    tasks = list(next(iter(cells.values()))["exact_by"]["task"])
    rows = (
        [
            _row_name(name),
            *(
                " / ".join(
                    f"{cell['exact_by']['task'][task]:.0%}" if (cell := cells.get((name, length))) else "–"
                    for length in lengths
                )
                for task in tasks
            ),
        ]
        for name in dict.fromkeys(name for name, _ in cells)
    )
    head = [f"one key, at {' / '.join(length_heads(lengths, lines[-1]['context_length']))}", *tasks]
    questions = next(iter(cells.values()))["trials"] // len(tasks)
    command = f"benchmarks/retrieval.py --tasks {','.join(tasks)}"
    return markdown_table(head, rows, f"*{questions} questions per cell.* {stamp(lines[-1], command)}")


@figure
def retrieval_ranks() -> str:
    """Return a table of how often the right answer to a passkey is the likeliest of 20, by model, method and length."""
    lines = lines_of("retrieval by rank")
    cells = {(line["model"], row["name"], row["length"]): row for line in lines for row in line["rows"]}
    context = {line["model"]: line["context_length"] for line in lines}
    scales = sorted({length // context[model] for model, _, length in cells})

    def text(cell: Row | None) -> str:
        if cell is None or cell["first"] == 1.0:  # whose interval the note has
            return "–" if cell is None else "1.00"
        return "{first:.2f} [{:.2f}, {:.2f}]".format(*cell["first_interval"], **cell)

    loaded = {model: cells[model, "as-loaded", context[model]] for model in context}
    lucky = [model for model, cell in loaded.items() if cell["first_interval"][0] <= LUCK]
    alike: dict[tuple[str, ...], list[str]] = {}
    for model, name in dict.fromkeys(key[:2] for key in cells):
        if model not in lucky:
            texts = (text(cells.get((model, name, scale * context[model]))) for scale in scales)
            alike.setdefault((NAMES[model], *texts), []).append(_row_name(name))
    rows = ([f"{model}: {', '.join(names)}", *texts] for (model, *texts), names in alike.items())
    task, questions = lines[-1]["tasks"][0], lines[-1]["rows"][0]["trials"]
    exact = max(row["exact"] for row in cells.values())
    note = (
        f"*{questions} questions per cell, of which at most {exact:.0%} were answered exactly. By luck, {LUCK} of the "
        "right answers would rank first.* "
    )
    if all_first := next((row for row in cells.values() if row["first"] == 1.0), None):
        note += "The 95% confidence interval of 1.00 is [{:.2f}, {:.2f}]. ".format(*all_first["first_interval"])
    if lucky:
        listed = " and ".join(f"the {NAMES[model]}, {text(loaded[model])}" for model in lucky)
        note += f"Unpatched at 1x, these are no better than luck, so no methods are compared on them: {listed}. "
    command = f"benchmarks/retrieval.py --score rank --tasks {task} --keys 1 --questions {questions}"
    head = [f"`{task}`: right answer first", *(f"{scale}x" for scale in scales)]
    return markdown_table(head, rows, note + stamp(lines[-1], command))


@figure
def linear_attention() -> str:
    line = last_line("linear attention")
    measured: dict[tuple[str, int], list[Row]] = {}
    for row in line["rows"]:
        measured.setdefault((row["what"], row["tokens"]), []).append(row)
    lengths = sorted({tokens for _, tokens in measured})

    def span(kernels: list[Row], key: str) -> str:
        return "–".join(dict.fromkeys(f"{most(row[key] for row in kernels):.2f}" for most in (min, max)))

    rows = [
        [
            what,
            *(
                f"{span(kernels, 'time')} / {span(kernels, 'memory')}" if (kernels := measured.get((what, n))) else "–"
                for n in lengths
            ),
        ]
        for what in dict.fromkeys(what for what, _ in measured)
    ]
    head = ["time / memory, times softmax attention", *(f"{length:,}" for length in lengths)]
    names = ", ".join(f"`{kernel}`" for kernel in dict.fromkeys(row["kernel"] for row in line["rows"]))
    note = f"*A cell holds the lowest and the highest value of {names}.* "
    return markdown_table(head, rows, note + stamp(line, "benchmarks/linear_attention.py"))


@figure
def linear_attention_text() -> str:
    line = last_line("linear attention text")
    lengths = [key for key in line["rows"][0] if key.isdigit()]
    lengths = [lengths[0], lengths[-1]]
    rows = ([row["attention"], *(f"{row[length]:.2f}" for length in lengths)] for row in line["rows"])
    head = ["bits per byte at", *length_heads(map(int, lengths), line["trained_length"])]
    setting = (
        f"*{line['parameters'] / 1e6:.1f} million parameters, {line['steps']} steps of {line['batch']} x "
        f"{line['trained_length']} bytes; {line['scored_bytes']:,} bytes scored.* "
    )
    return markdown_table(
        head, rows, setting + stamp(line, f"benchmarks/linear_attention.py --text --steps {line['steps']}")
    )


@figure
def trained_scaling() -> str:
    """A table for every scaling that a model was trained under: both bases at every length, and their difference."""
    lines = {line["scaling"]["rope_type"]: line for line in lines_of("trained_scaling")}
    return "".join(map(_extended, lines.values()))


def _extended(line: Row) -> str:
    scaling, context_length = line["scaling"], line["context_length"]
    rows = []
    for part in line["rows"]:
        lengths = ", ".join(f"{length:,}" for length in part["lengths"])
        rows.append([f"unpatched, at {lengths}", *(f"{bits:.2f}" for bits in part["unpatched"])])
        for each in part["methods"]:
            losses = zip(each["own"], each["original"], each["difference"], strict=True)
            cells = (
                f"{own:.2f} / {plain:.2f} ({gap:+.2f} [{low:+.2f}, {high:+.2f}])"
                for own, plain, (gap, low, high) in losses
            )
            rows.append([f"`{each['method']}` x{part['factor']}", *cells])
    note = (
        f"The bundled model, trained further for {line['steps']} steps at {context_length:,} bytes with "
        f"`{scaling['rope_type']}` in its config (factor {scaling['factor']:g}, original length "
        f"{scaling['original_max_position_embeddings']}). Before that training, its loss at the first two lengths was "
        f"{' and '.join(f'{bits:.2f}' for bits in line['not trained'][:2])}. "
        "A cell: over its own scaling / over the original "
        "model, and in brackets how much higher the second is, with its 95% confidence interval; "
        f"{line['rows'][0]['scored_bytes']:,} bytes scored at every length. "
    )
    command = "benchmarks/trained_scaling.py" + f" --scaling {scaling['rope_type']}" * (
        scaling["rope_type"] != "llama3"
    )
    factors = " ".join(str(part["factor"]) for part in line["rows"])
    head = ["bits per byte", f"at {line['rows'][0]['lengths'][0]}", f"at {context_length:,}", "at the extended length"]
    return markdown_table(head, rows, note + stamp(line, f"{command} --factors {factors}"))


@figure
def hybrids() -> str:
    """Bits per byte by length."""
    line = last_line("hybrids")
    note = (
        f"The bundled model, {line['scored_tokens']:,} bytes in {line['documents']} documents, the same bytes at every "
        "length. "
    )
    note += stamp(line | {"rows": []}, f"benchmarks/reference.py --biases --spans {line['spans']}")
    return length_table("bits per byte at", line, "{bits_per_byte:.2f}", after=note)


@figure
def learnable() -> str:
    line = last_line("learnable")
    lengths = list(line["rows"][0]["after"])
    rows = (
        [row["model"], *(f"{row['before'][length]:.2f} → {row['after'][length]:.2f}" for length in lengths)]
        for row in line["rows"]
    )
    head = ["bits per byte at", *length_heads(map(int, lengths), line["context_length"])]
    setting = (
        f"*Before and after {line['steps']} steps of {line['batch']} x {line['length']:,} bytes, the same windows for "
        f"every model; {line['spans']} spans scored at each length.* "
    )
    return markdown_table(head, rows, setting + stamp(line, f"benchmarks/learnable.py --steps {line['steps']}"))


@figure
def finetuning() -> str:
    """Bits per byte before and after `finetune` under several methods, in as many steps, beside the control."""
    lines = {line["method"]: line for line in lines_of("finetuning") if line.get("steps")}
    line = next(line for line in lines.values() if line.get("against"))
    lengths = list(line["losses"]["trained"])

    def row(title: str, losses: Row, gains: Row | None = None, *, sign: int = -1) -> list[str]:
        """Losses by length, with the intervals of gains, or (sign 1) of what is lost."""
        cells = []
        for length in lengths:
            ends = sorted(sign * value for value in gains[length][1:]) if gains else []
            cells.append(f"{losses[length]:.3f}" + (" ({:+.3f} to {:+.3f})".format(*ends) if ends else ""))
        return [title, *cells]

    rows = [row("unpatched", line["losses"]["unpatched"])]
    rows.append(row("trained without a patch", line["losses"]["control"]))
    for method, each in sorted(lines.items(), key=lambda item: item[1] is not line):
        losses, gains = each["losses"], each["gains"]
        rows += [
            row(f"{method}, not trained", losses["patched"], gains["patched"]),
            row(f"trained without a patch, then {method}", losses["control, patched"], gains["control, patched"]),
            row(f"**{method}, trained**", losses["trained"], line["against"].get(method), sign=1),
        ]
        rows += [row(f"{method}, trained, {over} over it", read) for over, read in each["remapped"].items()]
    head = ["bits per byte at", *(f"{int(n):,} ({int(n) // line['context_length']}x)" for n in lengths)]
    answers = (
        f"{each['retrieval']['patched']:.0%} to {each['retrieval']['trained']:.0%} under {method}"
        for method, each in lines.items()
    )
    note = (
        f"The bundled model was trained for {line['steps']} steps on rows of {line['target_length']:,} bytes, and "
        f"without a patch on as many bytes in rows of {line['context_length']}; {line['spans']} spans were scored at "
        "each length. Brackets hold 95% confidence intervals, paired by document. Beside a model that was not trained "
        "under a method, they are of the change that training makes; beside a trained model, of its difference from "
        f"the one trained under {line['method']}. Below 0 is better. Key-value lines answered at "
        f"{line['target_length']:,} bytes, before and after training: {', '.join(answers)}. "
    )
    return markdown_table(head, rows, note + stamp(line, f"benchmarks/finetuning.py --steps {line['steps']}"))


def _encoders(part: str, head: Sequence[str], keys: Sequence[str], note: str) -> str:
    line = last_line("encoders")

    def cell(value: float | str | None) -> str:
        return "–" if value is None else f"{value:.1%}" if isinstance(value, float) else str(value)

    rows = ([cell(row[key]) for key in keys] for row in line[part])
    text = f"*{note.format(**line)}* " + stamp(line, f"benchmarks/encoders.py --steps {line['steps']}")
    return markdown_table(head, rows, text)


@figure
def encoders_lengths() -> str:
    """Return what further training at the longer length gives, beside as much training at the first length."""
    line = last_line("encoders")
    short, *further = line["lengths"]
    at = {row["trained"].rpartition(" at ")[2]: row for row in further}
    steps = line["steps"] // 10
    return (
        f"{short['128']:.1%} of masked bytes, {at['128']['128']:.1%} after {steps} steps more at 128, and "
        f"{at['32']['128']:.1%} after as many at 32"
    )


@figure
def encoders_migration() -> str:
    head = ["model", "masked bytes found at 32", "at 128"]
    return _encoders("migration", head, ["model", "32", "128"], "Trained at {trained_length} bytes throughout.")
