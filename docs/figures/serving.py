"""What each engine serves, what goes wrong there, and how the classes of the engines compare."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING

from rope_ext_hf.engines.base import Target, find_engine, list_engines
from rope_ext_hf.errors import ServingError
from tests.support.serving_models import SERVED, targets

from .registry import FIGURES, ROOT, Row, figure, markdown_table, names_in_lines, read_result

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod


@figure
def engine_names() -> str:
    return names_in_lines(list_engines())


ON_THE_PAGE_OF = {"gguf": "llama.cpp"}
"""Engines that share a page: a GGUF file is what llama.cpp reads."""


def page_of(engine: str) -> str:
    """The page of an engine."""
    return f"engine-{ON_THE_PAGE_OF.get(engine, engine).replace('.', '-')}.md"


def _has_page(engine: str) -> bool:
    return (ROOT / "docs" / page_of(engine)).exists()


@cache
def _targets() -> list[tuple[str, str, RopeMethod, Target]]:
    """Model, base, method and what an engine is to compute, for every method on every published config."""
    return [
        (family, over, method, target)
        for family in SERVED  # the families that the tests serve
        for over in ("own", "original")
        for method, target in targets(family, over)
        if isinstance(target, Target)
    ]


@cache
def _served_ways(engine: str) -> list[str | None]:
    """How an engine serves each of these; None where it is refused."""

    def encoding(target: Target) -> str | None:
        try:
            name = find_engine(engine).config_for(target).encoding
        except ServingError:
            return None
        return "longrope" if name.startswith("longrope") else "divisors" if "divisors" in name else name

    return [encoding(target) for *_, target in _targets()]


@figure
def engines() -> str:
    """Every engine with its version, its page, and how many of the configurations it serves."""
    rows = []
    for name, engine in list_engines().items():
        served = _served_ways(name)
        page = f"[{engine.title or name}]({page_of(name)})" if _has_page(name) else engine.title or name
        rows.append((f"`{name}`", page, engine.version, f"{sum(each is not None for each in served)} of {len(served)}"))
    return markdown_table(["`--engine`", "page", "rules read in", "methods of these models served"], rows)


@figure
def drafts() -> str:
    """What reaches the draft of speculative decoding, by engine."""
    rows = [(engine.title or name, engine.drafts) for name, engine in list_engines().items() if engine.drafts]
    return markdown_table(["engine", "speculative decoding"], rows)


@figure
def engines_without_a_page() -> str:
    """The tables of an engine that nobody has written a page for yet."""
    parts = [f"## {name}{_served_table(name)}{_traps_table(name)}" for name in list_engines() if not _has_page(name)]
    return "\n\n" + "".join(parts) if parts else "\n"


def _served_table(engine: str) -> str:
    """One row for each way to write methods; model and base stand in the first of theirs."""
    ways = ("as published", "native", "longrope", "divisors", None)
    cells: dict[tuple[str, str], dict[str | None, list[str]]] = {}
    for (family, over, method, _), way in zip(_targets(), _served_ways(engine), strict=True):
        cells.setdefault((family, over), {}).setdefault(way, []).append(method.name)
    rows = []
    for key, cell in cells.items():
        lines = [(way or "refused", ", ".join(cell[way])) for way in ways if way in cell]
        rows += [[*(key if index == 0 else ("", "")), *line] for index, line in enumerate(lines)]
    return markdown_table(["model", "over", "how", "methods"], rows)


def _traps_table(engine: str) -> str:
    traps = tomllib.loads((ROOT / "rope_ext_hf" / "engines" / "traps.toml").read_text(encoding="utf-8"))
    rows = [
        (trap["versions"], f"`{key}`" if " " not in (key := trap["key"]) else key, trap["effect"], trap["source"])
        for trap in traps.get(find_engine(engine).rules_of or engine, [])
    ]
    return markdown_table(["versions", "key", "what happens", "source"], rows) if rows else "\n\nNone is known.\n\n"


def _example(engine: str) -> str:
    """What `rope-ext serve-config` prints for the bundled model under yarn x4."""
    from rope_ext_hf.reference import path
    from rope_ext_hf.serving.configs import as_text, serving_config

    printed = as_text(serving_config("reference", engine, "yarn", factor=4)).replace(str(path()), "MODEL")
    return f"\n\n```\n{printed}\n```\n\n"


for _engine in filter(_has_page, list_engines()):
    _parts = {"example": _example} | (
        {} if _engine in ON_THE_PAGE_OF else {"served": _served_table, "traps": _traps_table}
    )
    for _part, _make in _parts.items():
        FIGURES[f"engine-{_engine.replace('.', '-')}-{_part}"] = partial(_make, _engine)


def _classes(result: Row) -> str:
    """How the rotary classes of an engine compare with what its configurations are meant to compute."""
    plugin = result.get("plugin", [])
    every = result["rows"] + plugin
    rows = {
        "frequencies, largest relative difference (float32 tables)": max(row["frequencies"] for row in every),
        "magnitude, largest relative difference": max(row["magnitude"] for row in every),
    }
    for key, name in (
        ("softmax_scale", "softmax scale, largest relative difference"),
        ("positions", "queries rotated by M-RoPE, largest difference"),
    ):
        if measured := [row[key] for row in every if key in row]:
            rows[name] = max(measured)
    cells = [("configurations by its own rope types", str(len(result["rows"])))]
    if plugin:
        cells.append(("of these, the same module with the plug-in registered", str(result["untouched"])))
        cells.append(("configurations by the plug-in", str(len(plugin))))
    cells += [(name, f"{value:.1e}") for name, value in rows.items()]
    cells.append(("families not built by its factory", ", ".join(result["skipped"]) or "none"))
    return markdown_table([f"{result['engine']} {result['version']}", "measured by `make test-engines`"], cells)


for _each in read_result("engine-classes")["engines"]:
    FIGURES[f"engine-classes-{_each['engine']}"] = partial(_classes, _each)


@figure
def mlx_lm() -> str:
    result = read_result("other-engines")
    by_rope_type: dict[str, list[Row]] = {}
    for row in result["served"]:
        by_rope_type.setdefault(row["method"], []).append(row)

    def cells(rows: list[Row]) -> tuple[str, str]:
        measured = [row["difference"] for row in rows if "difference" in row]
        ways = ", ".join(dict.fromkeys(row["by"] for row in rows))
        return ways, f"{max(measured):.0e}" if measured else "–"

    engine = next(row["engine"] for row in result["rows"] if row["engine"].startswith("mlx"))
    return markdown_table(
        ["rope type", "by", f"{engine}, largest difference of a logit"],
        ((rope_type, *cells(rows)) for rope_type, rows in by_rope_type.items()),
        f"*In standard deviations of the logits, over {result['lengths']['long']} tokens. Measured by "
        f"`{result['command']}` with transformers {result['versions']['transformers']} here.*",
    )


@figure
def llama_cpp() -> str:
    result = read_result("llama-cpp")
    by_name: dict[str, dict[str, list[Row]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], {}).setdefault(row["model"], []).append(row)
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))

    def cell(rows: list[Row]) -> str:
        measured = [row for row in rows if "difference" in row]
        if not measured:
            return "–" if not rows else "not loaded" if "error" in rows[0] else "refused"
        worst = max(value for row in measured for value in row["difference"].values())
        text = f"{worst:.0e}" if worst <= result["agree"] else f"**{worst:.2g}**"
        ways = dict.fromkeys(
            row["encoding"].split()[0].replace("as", "as published") for row in measured if "encoding" in row
        )
        return " ".join([*ways, text])

    least = min(row["without"] for row in result["rows"] if row.get("without", 0) > 0.01)
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        "*The largest difference of a logit over both lengths, by file and by flags, in standard deviations of the "
        f"logits; passing over what is written makes {least:.1f} or more. Measured by `{result['command']}` with "
        f"{versions}.*"
    )
    table = ((name, *(cell(rows.get(model, [])) for model in models)) for name, rows in by_name.items())
    return markdown_table(["method or metadata", *models], table, note)


@figure
def vllm_logprobs() -> str:
    result = read_result("vllm")
    by_method: dict[tuple[str, str], dict[tuple[str, bool], Row]] = {}
    other = {each["family"]: each for each in result["stock"] if each.get("largest_difference", 0) > result["agree"]}
    for row in (*result["rows"], *result["classes"]):
        if row["family"] not in other:
            by_method.setdefault((row["family"], row["over"]), {})[row["method"], row["plugin"]] = row
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))

    def cell(row: Row | None) -> str:
        if row is None or "refused" in row:
            return "refused" if row else ""
        return "**does not run**" if "failed" in row else f"{row['largest_difference']:.0e}"

    table = [
        (family, over, way, *(cell(rows.get((method, plugin))) for method in methods))
        for (family, over), rows in by_method.items()
        for plugin, way in ((False, "stock"), (True, "plug-in"))
        if any(key[1] == plugin for key in rows)
    ]
    equal = all(each["bit_equal"] for each in result["stock"])
    moved = [row["moved_by"] for row in result["rows"] if "moved_by" in row]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    by_class = " and ".join(dict.fromkeys(row["family"] for row in result["classes"]))
    unlike = "".join(
        f" {name} is left out: without any method this vLLM differs from transformers by "
        f"{each['largest_difference']:.1g} nats."
        for name, each in other.items()
    )
    note = (
        f"*The largest difference of {result['tokens'] - 1} log-probabilities in nats, float32, CPU; the methods move "
        f"them by {min(moved):.2g} to {max(moved):.2g}. Without a method, vLLM with the plug-in installed is "
        f"{'bit-equal to' if equal else '**not** bit-equal to'} vLLM without. {by_class}: rotated queries "
        f"of vLLM's class and of transformers.{unlike} Measured by "
        f"`make test-vllm` with {versions}.*"
    )
    return markdown_table(["model", "over", "by", *(f"`{method}`" for method in methods)], table, note)


@figure
def vllm_remapping() -> str:
    """How far a real vLLM under remapping methods lies from the patched model, in each way of reading the prompts."""
    result = read_result("vllm_remapping")
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    by_model: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["rows"]:
        by_model.setdefault((row["model"], row["method"]), {})[row["way"]] = row

    def cell(row: Row | None) -> str:
        if row is None or "failed" in row:
            return "**does not run**" if row else ""
        return f"{row['largest_difference']:.0e}"

    moved = [row["moved_by"] for row in result["rows"]]
    longest, *others = result["lengths"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        f"*The largest difference in nats, float32, CPU, of the log-probabilities of a prompt of {longest} tokens, of "
        f"{', '.join(map(str, others))} more beside it where there are four, and of the {result['generated']} tokens "
        "generated after each; where a prefix is cached, of the latter. The models are for 256 tokens, and the methods "
        f"move the former by {min(moved):.2g} to {max(moved):.2g}. Measured by `{result['command']}` with {versions}.*"
    )
    table = [
        (model, f"`{method}`", *(cell(rows.get(way)) for way in ways)) for (model, method), rows in by_model.items()
    ]
    return markdown_table(["model", "method", *ways], table, note)


@figure
def vllm_perplexity() -> str:
    """Perplexity of the bundled model by a real vLLM and by transformers."""
    result = read_result("vllm_perplexity")
    table = [
        (row["dtype"], row["method"], f"{row['length']:,}", *(f"{row[by]:.4f}" for by in ("vllm", "transformers")))
        for row in result["rows"]
    ]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = f"*`{result['command']}` on a CPU. Measured by `make test-vllm` with {versions}.*"
    return markdown_table(["dtype", "method", "tokens", "vLLM", "transformers"], table, note)


@figure
def vllm_drafts() -> str:
    """What a real vLLM's drafts rotate by, where the model got its settings in each way."""
    result = read_result("vllm_drafts")

    def cell(row: Row, which: str) -> str:
        if "failed" in row:
            return "**does not run**"
        return "the same" if row[which] < 1e-5 else f"off by up to {100 * row[which]:.0f}%"

    table = [(row["case"], f"`{row['way']}`", cell(row, "model"), cell(row, "draft")) for row in result["rows"]]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        "*The frequencies in the tables of a running vLLM, compared with those that were asked for (by-parts x4). "
        f"Measured by `{result['command']}` with {versions}.*"
    )
    return markdown_table(["model and draft", "settings in", "model", "draft"], table, note)


@figure
def servers() -> str:
    """Every server that check-server was tried on, and how far it lies from the configuration it was taken for."""
    result = read_result("servers")
    columns = sorted(dict.fromkeys((row["engine"], row["dtype"]) for row in result["rows"]), key=lambda each: each[0])
    by_case: dict[tuple[bool, str, str], dict[tuple[str, str], Row]] = {}
    for row in result["rows"]:
        right = row["expected"] == "as measured"
        name = "weights of the other pairing" if " weights " in row["expected"] else row["expected"]
        by_case.setdefault((not right, row["measured"], name), {})[row["engine"], row["dtype"]] = row

    def cell(row: Row | None) -> str:
        if row is None:
            return "–"
        if not row.get("right"):
            return f"**{row.get('runs') or 'not said'}**"
        alike = f" ({len(row['alike'])})" if row["alike"] else ""
        return f"{max(row['differences'][row['closest']]):.0e}{alike}"

    counts = [sum(bool(row.get("right")) for row in result["rows"]), len(result["rows"])]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        f"*The largest root mean square difference in nats from the configuration that the server was taken for, over "
        f"prompts of {result['lengths'][0]} to {result['lengths'][-1]} tokens, of models for 256; in brackets, how "
        f"many others were named as not told apart from it. {counts[0]} of {counts[1]} verdicts are right. Measured by "
        f"`{result['command']}` with {versions}.*"
    )
    table = (
        (measured, name, *(cell(rows.get(column)) for column in columns))
        for (_, measured, name), rows in sorted(by_case.items(), key=lambda item: item[0][0])
    )
    return markdown_table(["measured", "served", *(f"{engine} {dtype}" for engine, dtype in columns)], table, note)


def _report(expected: str) -> str:
    """What check-server says of one of the servers of llama.cpp in Q8_0."""
    from rope_ext_hf.servers.checking import ServerReport

    row = next(
        row
        for row in read_result("servers")["rows"]
        if (row["engine"], row["dtype"], row["measured"], row["expected"])
        == ("llama.cpp", "Q8_0", "Llama, yarn", expected)
    )
    values = {item.name: row[item.name] for item in fields(ServerReport) if item.name in row}
    return f"\n\n```\n{ServerReport(url='http://localhost:8080', **values)}\n```\n\n"


@figure
def check_server_right() -> str:
    return _report("as measured")


@figure
def check_server_wrong() -> str:
    return _report("with no attention factor")
