"""Fill every figure of README.md and the pages in, from the files that hold the measurements and from the code.

    python docs/make_figures.py                # rewrite README.md and docs/*.md
    python docs/make_figures.py --check        # exit with 1 if a page is out of date
    python docs/make_figures.py --pictures     # also draw docs/pictures/*.png

A figure stands between two comments, `<!-- figure: NAME -->` and `<!-- /figure -->`, in a line or as a block. NAME is a
function of this file. Measurements come from benchmarks/results.jsonl (`make bench` appends to it; the last line of a
kind counts) and from docs/results/*.json (older ones, with the version they were measured with); tables of methods,
protocols and families come from the code.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FIGURES", "fill", "pages"]

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
PROCESSORS = ("x86_64", "aarch64", "arm64", "AMD64")
"""What `device` is in a line that was measured on a CPU."""

FIGURES: dict[str, Callable[[], str]] = {}
"""Every figure by name."""

_FIGURE = re.compile(r"(<!-- figure: ([a-z0-9-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)

Row = dict[str, Any]


def figure(make: Callable[[], str]) -> Callable[[], str]:
    """Register a function as the figure of its name, with dashes."""
    FIGURES[make.__name__.replace("_", "-")] = make
    return make


# --- measurements ---------------------------------------------------------------------------------------------------


@cache
def _lines() -> tuple[Row, ...]:
    text = (ROOT / "benchmarks" / "results.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@cache
def _older(name: str) -> Row:
    """A measurement that `make bench` does not repeat."""
    result: Row = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _measured(benchmark: str) -> list[Row]:
    """The lines of a benchmark on a CPU, oldest first."""
    return [line for line in _lines() if line["benchmark"] == benchmark and line["device"] in PROCESSORS]


def _rows(benchmark: str, *keys: str, **values: Any) -> dict[tuple[Any, ...], Row]:
    """All rows of a benchmark with these values, by their keys; the row measured last counts."""
    return {
        tuple(row[key] for key in keys): row
        for line in _measured(benchmark)
        for row in line["rows"]
        if all(row.get(key) == value for key, value in values.items())
    }


def _stamp(line: Row, command: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in line["versions"].items())
    count = line.get("threads")
    threads = f", {count} thread{'' if count == 1 else 's'}" if count else ""
    return f"*Measured by `{command}` with {versions}, on {line['device']}{threads}.*"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], after: str = "") -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n\n" + "\n".join(lines) + "\n\n" + (f"{after}\n\n" if after else "")


def _interval(row: Row) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


# --- the bundled model ----------------------------------------------------------------------------------------------

IN_SHORT = ("as loaded", "linear", "ntk", "yarn", "dynamic-yarn", "rerope", "self-extend", "dca")
"""The methods of the table in README.md."""


def _named(row: Row) -> str:
    """The method of a row, with its temperature."""
    temperature = row["temperature"]
    return str(
        row["method"] if temperature is None or temperature in row["method"] else f"{row['method']} {temperature}"
    )


def _reference(wanted: Sequence[str] = ()) -> str:
    result = _measured("reference")[-1]
    lengths = list(dict.fromkeys(row["length"] for row in result["rows"]))
    trained = result["context_length"]
    methods: dict[str, list[Row]] = {}
    for row in result["rows"]:
        methods.setdefault(_named(row), []).append(row)
    best = {
        length: min(row["bits_per_byte"] for row in result["rows"] if row["length"] == length) for length in lengths
    }
    shown = {
        name: [
            f"**{row['bits_per_byte']:.2f}**"
            if round(row["bits_per_byte"], 2) == round(best[row["length"]], 2)
            else f"{row['bits_per_byte']:.2f}"
            for row in rows
        ]
        for name, rows in methods.items()
        if not wanted or name in wanted or name.split()[0] in wanted
    }
    head = ["bits per byte at", *(f"{length:,} ({length // trained}x)" for length in lengths)]
    return _table(head, ([name, *cells] for name, cells in shown.items()))


@figure
def reference_short() -> str:
    return _reference(IN_SHORT)


@figure
def reference() -> str:
    result = _measured("reference")[-1]
    command = f"benchmarks/reference.py --spans {result['spans']}"
    return _reference() + f"{_stamp(result, command)}\n\n"


@figure
def reference_setting() -> str:
    result = _measured("reference")[-1]
    return (
        f"{result['parameters'] / 1e6:.1f} million parameters, trained at {result['context_length']} bytes; the same "
        f"{result['scored_tokens']:,} bytes of held-out Python scored at every length"
    )


@figure
def reference_increase() -> str:
    """The difference to the model as loaded at its context length, with intervals."""
    result = _measured("reference")[-1]
    lengths = list(dict.fromkeys(row["length"] for row in result["rows"]))
    names = list(dict.fromkeys(map(_named, result["rows"])))
    cell = {
        (_named(r), r["length"]): f"{r['increase']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]" for r in result["rows"]
    }
    rows = ([name, *(cell[name, length] for length in lengths)] for name in names)
    return _table(["increase at", *(f"{length:,}" for length in lengths)], rows)


@figure
def remapping() -> str:
    """Bits per byte by length, and the difference to the model as loaded at its context length."""
    line = [line for line in _measured("remapping") if not line.get("temperatures")][-1]
    loaded, *rows = line["rows"]
    lengths = sorted({row["length"] for row in rows})
    cell = {(row["method"], row["length"]): row for row in rows}
    text = {
        key: f"{row['bits_per_byte']:.3f} ({row['increase']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}])"
        for key, row in cell.items()
    }
    table = (
        [f"`{method}`", *(text[method, length] for length in lengths)] for method in dict.fromkeys(m for m, _ in cell)
    )
    head = ["bits per byte at", *(f"{length:,} ({length // line['context_length']}x)" for length in lengths)]
    note = (
        f"The bundled model over {line['spans']} windows of {line['targets']} bytes in {line['documents']} documents, "
        f"the same bytes at every length; in brackets the difference to the model as loaded at "
        f"{line['context_length']} ({loaded['bits_per_byte']:.3f}), with its 95% interval over the documents. "
    )
    return _table(head, table, note + _stamp(line, f"benchmarks/remapping.py --spans {line['spans']}"))


@figure
def temperature_choice() -> str:
    return _temperatures("temperature-choice")


@figure
def temperature_confirmation() -> str:
    return _temperatures("temperature-confirmation")


def _temperatures(name: str) -> str:
    older = _older(name)
    rows = (
        [f"`{row['method']}`", row["temperature"], *("–" if x is None else f"{x:.3f}" for x in row["bits_per_byte"])]
        for row in older["rows"]
    )
    head = ["method", "temperature", *(f"{scale}x" for scale in older["scales"])]
    return _table(head, rows, f"*{older['note']}*")


@figure
def novels() -> str:
    older = _older("novels")
    rows = ([f"`{row['method']}`", *(f"{x:.3f}" for x in row["bits_per_byte"])] for row in older["rows"])
    return _table(["bits per byte at", *(f"{scale}x" for scale in older["scales"])], rows, f"*{older['note']}*")


@figure
def retrieval() -> str:
    lines = _measured("retrieval")
    if not lines:
        return "\n\n`benchmarks/retrieval.py` measures it; its figures are not among the results yet.\n\n"
    cells = {(row["name"], row["task"], row["keys"], row["length"]): row for row in lines[-1]["rows"]}
    lengths = sorted({key[-1] for key in cells})
    rows = (
        [f"`{name}`, {task}, {keys} stated"]
        + [
            "{:.2f} [{:.2f}, {:.2f}]".format(cell["exact"], *cell["interval"]) if cell else "–"
            for cell in (cells.get((name, task, keys, length)) for length in lengths)
        ]
        for name, task, keys in dict.fromkeys(key[:-1] for key in cells)
    )
    head = ["answered exactly at", *(f"{length:,}" for length in lengths)]
    return _table(head, rows, _stamp(lines[-1], "benchmarks/retrieval.py"))


# --- cost -----------------------------------------------------------------------------------------------------------


@figure
def patch_milliseconds() -> str:
    return f"{_measured('overhead')[-1]['patch_32_layers_ms']:.0f}"


@figure
def float32_angle_error() -> str:
    row = next(row for row in _measured("angles")[-1]["rows"] if row["position"] == 2**17)
    return f"{row['transformers, float32']:.0e} at position 131,072".replace("e-0", "e-")


@figure
def angles() -> str:
    line = _measured("angles")[-1]
    keys = [key for key in line["rows"][0] if key != "position"]
    rows = ([f"{row['position']:,}", *(f"{row[key]:.1e}" for key in keys)] for row in line["rows"])
    return _table(["below position", *keys], rows, _stamp(line, "benchmarks/angles.py"))


@figure
def readers() -> str:
    result = _older("readers")
    programs = list(dict.fromkeys(row["reader"] for row in result["rows"]))
    forms = list(dict.fromkeys(row["form"] for row in result["rows"]))
    worst = {
        (form, program): max(
            row["difference"] for row in result["rows"] if (row["form"], row["reader"]) == (form, program)
        )
        for form in forms
        for program in programs
    }
    cells = {key: f"{value:.0e}" if value <= result["agree"] else f"**{value:.2f}**" for key, value in worst.items()}
    families = sorted({row["model"] for row in result["rows"]} - {"reference"})
    least = min(row["without"] for row in result["rows"])
    note = (
        f"*The largest difference of a logit there and here over {result['lengths']['long']} tokens, or "
        f"{result['lengths']['short']} inside the original length, in standard deviations of the logits; bold: another "
        f"model. Of the bundled model and of small random {', '.join(families)} models, "
        f"whichever differs most. A program that passes over the method is off by {least:.1f} or more. Measured by "
        f"`{result['command']}` with transformers {result['versions']['transformers']} here.*"
    )
    return _table(["form", *programs], ([form, *(cells[form, each] for each in programs)] for form in forms), note)


@figure
def flash_attention_by_counting() -> str:
    older = _older("flash-attention-by-counting")
    low, high = older["memory"]
    return (
        f"{low:.2f} to {high:.2f} times the memory of one call of flash attention, the same number of products, and "
        f"about {older['launches']} launches in a model's first layer"
    )


@figure
def overhead() -> str:
    line = _measured("overhead")[-1]
    rows = (
        [
            f"{row['model']}, {row['parameters'] / 1e6:.1f}M",
            row["what"],
            f"{1000 * row['stock_seconds']:.1f} ms",
            _interval(row),
        ]
        for row in line["rows"]
    )
    head = ["model", "forward", "stock", "patched / stock"]
    return _table(head, rows, _stamp(line, "benchmarks/overhead.py"))


@figure
def dynamic_cost() -> str:
    measured = _rows("dynamic", "rule", "key heads", "tokens", dtype="float32")
    settings = sorted({key[1:] for key in measured})
    rules = list(dict.fromkeys(key[0] for key in measured))
    rows = ([f"`{rule}`", *(f"{measured[rule, *setting]['ratio']:.2f}" for setting in settings)] for rule in rules)
    head = ["`growth`", *(f"{heads} key heads, {tokens:,} cached" for heads, tokens in settings)]
    return _table(head, rows, _stamp(_measured("dynamic")[-1], "benchmarks/dynamic.py"))


@figure
def dynamic_memory() -> str:
    measured = _rows("dynamic", "rule", "key heads", "tokens", "dtype")
    most = {
        even: max(row["memory"] for key, row in measured.items() if (key[0] == "even") is even)
        for even in (True, False)
    }
    return f"{most[True]:.2f} times under `even` and {most[False]:.2f} times under the others"


@figure
def dynamic_text() -> str:
    line = _measured("dynamic text")[-1]
    rows = (
        [
            f"{row['factor']:g}",
            row["positions"],
            f"{row['stock']:.2f}",
            f"{row['ours']:.2f}",
            "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["interval"]),
        ]
        for row in line["rows"]
    )
    head = ["factor", "positions", "transformers", "this package", "difference"]
    return _table(head, rows, _stamp(line, "benchmarks/dynamic.py --text"))


@figure
def attention() -> str:
    line = _measured("attention")[-1]
    measured = {(row["what"], row["way"], row["tokens"]): row for row in line["rows"]}
    ways = list(dict.fromkeys(row["way"] for row in line["rows"] if row["way"] not in ("plain", "eager")))
    lengths = [length for length in sorted({row["tokens"] for row in line["rows"]}) if length >= 4096]
    rows = [
        [f"{title}, `{way}`", *(f"{measured[what, way, length][key]:.2f}" for length in lengths)]
        for title, what, key in (
            ("prefill, time", "prefill", "time"),
            ("prefill, memory", "prefill", "memory"),
            ("decode step, time", "decode", "time"),
        )
        for way in ways
    ]
    head = ["times plain attention", *(f"{length:,}" for length in lengths)]
    return _table(head, rows, _stamp(line, "benchmarks/attention.py"))


@figure
def attention_eager() -> str:
    rows = [row for row in _measured("attention")[-1]["rows"] if row["way"] == "eager"]
    longest = max(rows, key=lambda row: row["tokens"])
    return (
        f"{longest['time']:.1f} times as long at {longest['tokens']:,} tokens, and {longest['memory']:.0f} times the "
        "memory"
    )


@figure
def linear_attention() -> str:
    lines = _measured("linear attention")
    if not lines:
        return "\n\n`benchmarks/linear_attention.py` measures it; its figures are not among the results yet.\n\n"
    measured = {(row["what"], row["kernel"], row["tokens"]): row for row in lines[-1]["rows"]}
    lengths = sorted({row["tokens"] for row in lines[-1]["rows"]})
    rows = [
        [f"{what}, {key}, `{kernel}`", *(f"{cell[key]:.2f}" if cell else "–" for cell in cells)]
        for what, key in dict.fromkeys((what, key) for what, _, _ in measured for key in ("time", "memory"))
        for kernel in dict.fromkeys(row["kernel"] for row in lines[-1]["rows"])
        for cells in [[measured.get((what, kernel, length)) for length in lengths]]
    ]
    head = ["times softmax attention", *(f"{length:,}" for length in lengths)]
    return _table(head, rows, _stamp(lines[-1], "benchmarks/linear_attention.py"))


@figure
def linear_attention_text() -> str:
    lines = _measured("linear attention text")
    if not lines:
        return "\n\n`benchmarks/linear_attention.py --text` measures it; its figures are not among the results yet.\n\n"
    line = lines[-1]
    lengths = [key for key in line["rows"][0] if key.isdigit()]
    rows = ([row["attention"], *(f"{row[length]:.2f}" for length in lengths)] for row in line["rows"])
    head = ["bits per byte at", *(f"{int(n):,} ({int(n) // line['trained_length']}x)" for n in lengths)]
    setting = (
        f"*{line['parameters'] / 1e6:.1f} million parameters, {line['steps']} steps of {line['batch']} x "
        f"{line['trained_length']} bytes; {line['scored_bytes']:,} bytes scored.* "
    )
    return _table(head, rows, setting + _stamp(line, f"benchmarks/linear_attention.py --text --steps {line['steps']}"))


@figure
def reading() -> str:
    lines = _measured("reading")
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
    return _table(head, rows, _stamp(lines[-1], "benchmarks/reading.py"))


@figure
def position_ratio() -> str:
    row = [row for line in _measured("reading") for row in line["rows"] if "position" in row][-1]
    *shorter, longest = (f"{length:,}" for length in row["lengths"])
    return f"{row['ratio']:.2f} times the time of one pass for each of {', '.join(shorter)} and {longest}"


@figure
def conversion() -> str:
    line = _measured("conversion")[-1]
    return (
        f"{line['gigabytes']:.1f} GB in {line['parts']} files took {line['ratio']:.2f} times as long as `cp -r` and "
        f"`sync` (median of {len(line['ratios'])} pairs, {min(line['ratios']):.2f} to {max(line['ratios']):.2f}, "
        f"imports aside), and {line['convert_megabytes']} MB of memory, where loading the model takes "
        f"{line['load_megabytes'] / 1000:.1f} GB"
    )


@figure
def trained_scaling() -> str:
    lines = _measured("trained_scaling")
    if not lines:
        return "\n\n`benchmarks/trained_scaling.py` compares the two; its figures are not among the results yet.\n\n"
    measured = lines[-1]["bits_per_byte"]
    lengths = list(dict.fromkeys(length for row in measured.values() for length in row))
    rows = (
        [name, *(f"{row[length]:.3f}" if length in row else "–" for length in lengths)]
        for name, row in measured.items()
    )
    head = ["bits per byte at", *(f"{int(length):,}" for length in lengths)]
    return _table(head, rows, _stamp(lines[-1], "benchmarks/trained_scaling.py"))


def _detection() -> tuple[list[list[str]], int, str]:
    """Rows, the number of random initialisations, and where both come from."""
    if lines := _measured("detection"):
        rows: dict[str, dict[str, str]] = {}
        for row in lines[-1]["rows"]:
            rows.setdefault(row["model"], {})[row["weights"]] = f"{row['score']:.3f} ± {row['error']:.3f}"
        models = [[name, row["half"], row["interleaved"]] for name, row in rows.items()]
        return models, lines[-1]["random"]["models"], _stamp(lines[-1], "benchmarks/detection.py")
    older = _older("detection")
    models = [[row["model"], row["half"], row["interleaved"]] for row in older["rows"]]
    return models, older["random_initialisations"], f"*{older['note']}*"


@figure
def detection() -> str:
    rows, _, note = _detection()
    return _table(["model", "half paired", "interleaved"], rows, note)


@figure
def random_initialisations() -> str:
    return str(_detection()[1])


@figure
def gpu() -> str:
    lines = [line for line in _lines() if line["device"] not in PROCESSORS and "rows" in line]
    if not lines:
        return "\nNo figure here was measured on a GPU. `make bench DEVICE=cuda` measures one.\n"
    last = {(line["benchmark"], line["device"]): line for line in lines}
    text = []
    for (benchmark, _), line in last.items():
        keys = [key for key, value in line["rows"][0].items() if not isinstance(value, (dict, list))]
        rows = ([str(row.get(key, "")) for key in keys] for row in line["rows"])
        text.append(f"\n**{benchmark}**\n{_table(keys, rows, _stamp(line, 'make bench DEVICE=cuda'))}")
    return "".join(text)


# --- tables of the code ---------------------------------------------------------------------------------------------


@figure
def protocols() -> str:
    from rope_ext_hf.eval.protocols import PROTOCOLS

    return _table(
        ["`--protocol`", "what it reads and scores", "options"],
        (
            [
                f"`{protocol.name}`",
                protocol.description,
                ", ".join(
                    option
                    for option, used in (
                        ("`--targets`", protocol.uses_targets),
                        ("`--stride`", protocol.uses_stride),
                    )
                    if used
                )
                or "–",
            ]
            for protocol in PROTOCOLS.values()
        ),
    )


def _parameters(cls: type) -> str:
    import dataclasses

    def text(field: Any) -> str:
        required = field.default is dataclasses.MISSING
        return f"`{field.name}`" if required or field.default is None else f"`{field.name}={field.default!r}`"

    return ", ".join(map(text, dataclasses.fields(cls))) or "–"


@figure
def methods() -> str:
    from rope_ext_hf import list_methods

    summaries = {name: (inspect.getdoc(cls) or "").splitlines()[0] for name, cls in list_methods().items()}
    return _table(
        ["name", "what it is", "parameters"],
        ([f"[`{name}`](#{name})", summaries[name], _parameters(cls)] for name, cls in list_methods().items()),
    )


def _families() -> dict[str, str]:
    """The pairing of every family that can be converted and has a class in transformers."""
    from rope_ext_hf.patches.families import families as table

    return {
        name: entry.pairing
        for name, entry in sorted(table().items())
        if entry.pairing and entry.rotated and not entry.remote_attention
    }


@figure
def family_count() -> str:
    return str(len(_families()))


@figure
def families() -> str:
    rows = (
        [f"`{pairing}`", ", ".join(f"`{name}`" for name, runs in _families().items() if runs == pairing)]
        for pairing in ("half", "interleaved")
    )
    return _table(["pairing", "`model_type`"], rows)


# --- pictures -------------------------------------------------------------------------------------------------------

DRAWN: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8},
    "theta": {"theta": 1_000_000.0},
    "ntk": {"factor": 8},
    "dynamic-ntk": {"growth": "even"},
    "by-parts": {"factor": 8},
    "yarn": {"factor": 8},
    "dynamic-yarn": {},
    "llama3": {"factor": 8},
    "rerope": {},
    "leaky-rerope": {},
    "self-extend": {},
    "dca": {},
}
"""Methods with a picture, and their parameters; a model like Llama 2, 4,096 tokens extended to 32,768."""


def draw_pictures() -> None:
    """One picture for each method, one with the frequency methods over one another, and those of the laws."""
    from rope_ext_hf.eval.results import label
    from rope_ext_hf.eval.rope_plots import draw
    from rope_ext_hf.methods import Rotary, resolve_method
    from rope_ext_hf.methods.remapping import RemappingMethod

    rotary, extended = Rotary(dim=128, theta=10_000.0, trained_length=4096), 32_768
    drawn = {}
    for name, parameters in DRAWN.items():
        method = resolve_method(name, rotary, **parameters)
        if isinstance(method, RemappingMethod):
            method = method.bind(rotary, extended)
        drawn[name] = (label(method.to_dict()), method)
    together = {name: drawn[name] for name in ("linear", "ntk", "yarn", "llama3")}
    PICTURES.mkdir(exist_ok=True)
    for name, shown in [("methods", together), *((name, {name: drawn[name]}) for name in drawn)]:
        file = PICTURES / f"{name}.png"
        draw(
            file,
            rotary,
            dict(shown.values()),
            extended_length=extended,
            title=name,
        )
        _shrink(file)
    draw_laws(rotary, dict(together.values()), extended)


def draw_laws(rotary: Any, methods: Any, extended: int) -> None:
    """The pictures of docs/rope.md; those of trained queries and keys come from the bundled model."""
    import torch

    from rope_ext_hf.eval.attention_vectors import spectra
    from rope_ext_hf.eval.law_plots import draw_angles, draw_bound, draw_rotated, draw_scores, draw_similarity
    from rope_ext_hf.eval.results import label
    from rope_ext_hf.eval.stdlib_corpus import stdlib_held_out
    from rope_ext_hf.eval.sweeps import expand
    from rope_ext_hf.hub import load_model, load_tokenizer
    from rope_ext_hf.patches.geometry import patch_geometry

    model = load_model("reference")
    own = patch_geometry(model)
    ids = load_tokenizer("reference")(stdlib_held_out()[0].text[:8000], add_special_tokens=False).input_ids
    trained = spectra(model, torch.tensor(ids[: own.context_length]))
    over_own = {label(method.to_dict()): method for method in expand(["linear", "ntk", "yarn"], [8.0], own)}
    for name, draw in {
        "angles": lambda file: draw_angles(file, rotary),
        "similarity": lambda file: draw_similarity(file, rotary, methods, extended),
        "bound": lambda file: draw_bound(file, rotary, methods, extended),
        "scores": lambda file: draw_scores(file, own, over_own, 8 * own.context_length, trained=trained),
        "rotated": lambda file: draw_rotated(file, rotary),
    }.items():
        draw(file := PICTURES / f"rope-{name}.png")
        _shrink(file)


def _shrink(file: Path) -> None:
    """A quarter of the bytes, and no difference to the eye."""
    from PIL import Image

    with Image.open(file) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(file, optimize=True)


# --- serving --------------------------------------------------------------------------------------------------------

SERVED = ("vllm", "sglang", "mlx", "llama.cpp", "ollama")
"""The engines of the table; transformers serves every static method, and gguf is what ollama runs."""


@figure
def serving_table() -> str:
    sys.path.insert(0, str(ROOT))  # the families are those that the tests serve
    from rope_ext_hf.engines.base import Target, find_engine
    from rope_ext_hf.errors import ServingError
    from tests.serving_models import SERVED as FAMILIES
    from tests.serving_models import targets

    def served(engine: str, target: Target) -> str:
        try:
            form = find_engine(engine).config_for(target).form
        except ServingError:
            return "-"
        return "longrope" if form.startswith("longrope") else form.split()[0] if "divisors" in form else form

    rows = []
    for family in FAMILIES:
        for over in ("own", "original"):
            known: dict[tuple[str, ...], list[str]] = {}
            for method, target in targets(family, over):
                if isinstance(target, Target):
                    known.setdefault(tuple(served(engine, target) for engine in SERVED), []).append(method.name)
            rows += [(family, over, ", ".join(names), *cells) for cells, names in known.items()]
    return _table(["model", "over", "methods", *SERVED], rows)


@figure
def serving_traps() -> str:
    from rope_ext_hf.engines.base import list_engines

    rows = [
        (name, trap.versions, f"`{trap.key}`" if " " not in trap.key else trap.key, trap.effect, trap.source)
        for name, engine in list_engines().items()
        if name not in ("gguf", "ollama")
        for trap in engine.traps
    ]
    return _table(["engine", "versions", "key", "what happens", "source"], rows)


@figure
def engine_classes() -> str:
    results = _older("engine-classes")["engines"]
    rows = [
        (
            result["engine"],
            result["version"],
            str(len(result["rows"])),
            f"{max(row['frequencies'] for row in result['rows']):.1e}",
            f"{max(row['magnitude'] for row in result['rows']):.1e}",
            ", ".join(result["skipped"]) or "none",
        )
        for result in results
    ]
    head = ["engine", "version", "configurations", "frequencies, largest relative difference (float32 tables)"]
    return _table([*head, "magnitude", "families not built by its factory"], rows)


# --- pages ----------------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """README.md and every page."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(page: str) -> str:
    """The text of a page with its figures made anew.

    Raises:
        KeyError: a figure of a name that is not in FIGURES.
    """
    return _FIGURE.sub(lambda match: match[1] + FIGURES[match[2]]() + match[4], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--pictures", action="store_true", help="also draw the pictures of the methods")
    arguments = parser.parse_args()
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (made := fill(text)) != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not arguments.check:
                page.write_text(made, encoding="utf-8")
    if arguments.pictures:
        draw_pictures()
    if arguments.check and stale:
        sys.exit(f"out of date, run `make figures`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
