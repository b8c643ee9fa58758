"""Angles, other engines that read a patched folder, detection of the pairing."""

from __future__ import annotations

from docs.figures.registry import figure, last_line, lines_of, made_by, markdown_table, read_result, stamp


@figure
def float32_angle_error() -> str:
    row = next(row for row in last_line("angles")["rows"] if row["position"] == 2**17)
    return f"{row['transformers, float32']:.0e} at position 131,072".replace("e-0", "e-")


@figure
def angles() -> str:
    line = last_line("angles")
    keys = [key for key in line["rows"][0] if key != "position"]
    rows = ([f"{row['position']:,}", *(f"{row[key]:.1e}" for key in keys)] for row in line["rows"])
    return markdown_table(["below position", *keys], rows, stamp(line, "benchmarks/angles.py"))


@figure
def other_engines() -> str:
    result = read_result("other-engines")
    programs = list(dict.fromkeys(row["engine"] for row in result["rows"]))
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    worst = {
        (method, program): max(
            row["difference"] for row in result["rows"] if (row["method"], row["engine"]) == (method, program)
        )
        for method in methods
        for program in programs
    }
    cells = {key: f"{value:.0e}" if value <= result["agree"] else f"**{value:.2f}**" for key, value in worst.items()}
    families = sorted({row["model"] for row in result["rows"]} - {"reference"})
    least = min(row["without"] for row in result["rows"])
    note = (
        f"*The largest difference between a logit of the program and of this package over {result['lengths']['long']} "
        f"tokens (or {result['lengths']['short']}, inside the original length), in standard deviations of the logits, "
        f"over the bundled model and small random {', '.join(families)} models. Bold: the program runs "
        f"another model. A program that ignores the method is off by {least:.1f} or more. "
        f"{made_by(result)}*"
    )
    alike: dict[tuple[str, ...], list[str]] = {}  # one row for all methods that every program computes
    for name in methods:
        same = all(worst[name, each] <= result["agree"] for each in programs)
        alike.setdefault(() if same else (name,), []).append(name)
    rows = (
        ["; ".join(names), *(cells[max(names, key=lambda name: worst[name, each]), each] for each in programs)]
        for names in alike.values()
    )
    return markdown_table(["method", *programs], rows, note)


def _detection() -> tuple[list[list[str]], int, str]:
    """Rows, the number of random initialisations, and where both come from."""
    if lines := lines_of("detection"):
        rows: dict[str, dict[str, str]] = {}
        for row in lines[-1]["rows"]:
            rows.setdefault(row["model"], {})[row["weights"]] = f"{row['score']:.3f} ± {row['error']:.3f}"
        models = [[name, row["half"], row["interleaved"]] for name, row in rows.items()]
        return models, lines[-1]["random"]["models"], stamp(lines[-1], "benchmarks/detection.py")
    older = read_result("detection")
    models = [[row["model"], row["half"], row["interleaved"]] for row in older["rows"]]
    return models, older["random_initialisations"], f"*{older['note']}*"


@figure
def detection() -> str:
    rows, _, note = _detection()
    return markdown_table(["model", "half paired", "interleaved"], rows, note)


@figure
def random_initialisations() -> str:
    return str(_detection()[1])
