"""What each engine serves, what goes wrong there, and how the classes of the engines compare."""

from __future__ import annotations

from .registry import Row, figure, markdown_table, names_in_lines, read_result

NO_COLUMN = ("transformers", "gguf")
"""Engines that the table leaves out: transformers serves every static method, and gguf is what ollama runs."""


@figure
def engine_names() -> str:
    from rope_ext_hf.engines.base import list_engines

    return names_in_lines(list_engines())


@figure
def serving_table() -> str:
    from rope_ext_hf.engines.base import Target, find_engine, list_engines
    from rope_ext_hf.errors import ServingError
    from tests.support.serving_models import SERVED as FAMILIES  # the families are those that the tests serve
    from tests.support.serving_models import targets

    def served(engine: str, target: Target) -> str:
        try:
            encoding = find_engine(engine).config_for(target).encoding
        except ServingError:
            return "-"
        return (
            "longrope"
            if encoding.startswith("longrope")
            else encoding.split()[0]
            if "divisors" in encoding
            else encoding
        )

    engines = [name for name in list_engines() if name not in NO_COLUMN]
    rows = []
    for family in FAMILIES:
        for over in ("own", "original"):
            known: dict[tuple[str, ...], list[str]] = {}
            for method, target in targets(family, over):
                if isinstance(target, Target):
                    known.setdefault(tuple(served(engine, target) for engine in engines), []).append(method.name)
            rows += [(family, over, ", ".join(names), *cells) for cells, names in known.items()]
    return markdown_table(["model", "over", "methods", *engines], rows)


@figure
def serving_traps() -> str:
    from rope_ext_hf.engines.base import list_engines

    rows = [
        (name, trap.versions, f"`{trap.key}`" if " " not in trap.key else trap.key, trap.effect, trap.source)
        for name, engine in list_engines().items()
        if name not in ("gguf", "ollama")
        for trap in engine.traps
    ]
    return markdown_table(["engine", "versions", "key", "what happens", "source"], rows)


@figure
def engine_classes() -> str:
    results = read_result("engine-classes")["engines"]
    rows = [
        (
            result["engine"],
            result["version"],
            str(len(result["rows"])),
            f"{max(row['frequencies'] for row in result['rows']):.1e}",
            f"{max(row['magnitude'] for row in result['rows']):.1e}",
            f"{max(row.get('positions', 0.0) for row in result['rows']):.1e}",
            ", ".join(result["skipped"]) or "none",
        )
        for result in results
    ]
    head = ["engine", "version", "configurations", "frequencies, largest relative difference (float32 tables)"]
    return markdown_table([*head, "magnitude", "queries rotated by M-RoPE", "families not built by its factory"], rows)


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
