"""Results of engines, their classes and running servers, beside what was measured."""

from __future__ import annotations

from dataclasses import fields

from docs.figures.registry import Row, figure, made_by, markdown_table, read_result
from rope_ext_hf.reading.cost.memory import cached_bytes


@figure
def engine_classes() -> str:
    """Return a table that compares the rotary classes of engines with what they are configured to compute."""
    results = read_result("engine-classes")["engines"]
    columns = [_classes(result) for result in results]
    rows = ([name, *(column.get(name, "–") for column in columns)] for name in columns[0])
    return markdown_table(["", *(f"{result['engine']} {result['version']}" for result in results)], rows)


def _classes(result: Row) -> dict[str, str]:
    plugin = result.get("plugin", [])
    every = result["rows"] + plugin

    def largest(key: str) -> str:
        measured = [row[key] for row in every if key in row]
        return f"{max(measured):.1e}" if measured else "–"

    return {
        "configurations by its own rope types": str(len(result["rows"])),
        "of these, the same module with the plug-in registered": str(result["untouched"]) if plugin else "–",
        "configurations by the plug-in": str(len(plugin)) if plugin else "–",
        "largest relative difference of frequencies (float32 tables)": largest("frequencies"),
        "of the magnitude": largest("magnitude"),
        "of the softmax scale": largest("softmax_scale"),
        "largest difference of queries rotated by M-RoPE": largest("positions"),
        "families not built by its factory": ", ".join(result["skipped"]) or "none",
    }


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
    by_way: dict[str, list[str]] = {}
    for rope_type, rows in by_rope_type.items():
        by_way.setdefault(cells(rows)[0], []).append(rope_type)
    largest = {way: cells([row for each in some for row in by_rope_type[each]])[1] for way, some in by_way.items()}
    lines = (
        f"- {way}: {'; '.join(some)}" + f" ({largest[way]})" * (largest[way] != "–") + "\n"
        for way, some in by_way.items()
    )
    note = f"*The largest difference of a logit of {engine} over {result['lengths']['long']} tokens"
    return f"\n\n{''.join(lines)}\n{note}, in standard deviations. {made_by(result)}*\n\n"


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
    note = (
        "*The largest difference of a logit over both lengths, by file and by flags, in standard deviations of the "
        f"logits; passing over what is written makes {least:.1f} or more. {made_by(result)}*"
    )
    alike: dict[tuple[str, ...], list[str]] = {}
    table = []
    for name, rows in by_name.items():
        cells = tuple(cell(rows.get(model, [])) for model in models)
        ways = (each.rpartition(" ")[0] if each[-1].isdigit() else each for each in cells)
        alike.setdefault(tuple(ways), []).append(name)  # a row for those that are given or read alike
    for names in alike.values():
        of_model = ([row for name in names for row in by_name[name].get(model, [])] for model in models)
        table.append(("; ".join(names), *map(cell, of_model)))
    return markdown_table(["method or metadata", *models], table, note)


@figure
def vllm_logprobs() -> str:
    result = read_result("vllm")
    by_method: dict[tuple[str, str], dict[tuple[str, bool], Row]] = {}
    other = {each["family"]: each for each in result["stock"] if each.get("largest_difference", 0) > result["agree"]}
    for row in (*result["rows"], *result["classes"]):
        if row["family"] not in other:
            by_method.setdefault((row["family"], row["over"]), {})[row["method"], row["plugin"]] = row

    tried = {
        plugin: list(dict.fromkeys(row["method"] for row in result["rows"] if row["plugin"] == plugin))
        for plugin in (False, True)
    }

    def cell(rows: list[Row]) -> str:
        if failed := [row["method"] for row in rows if "failed" in row]:
            return f"**{', '.join(failed)} does not run**"
        of_plugin = {row["method"] for row in rows if row["plugin"]}
        left = [f"{name} not tried" for name in tried[True] if of_plugin and name not in {*of_plugin, "theta"}]
        measured = [row["largest_difference"] for row in rows if "refused" not in row]
        refused = [f"{row['method']} refused" for row in rows if "refused" in row]
        return ", ".join([*([f"{max(measured):.0e}"] if measured else []), *refused, *left]) or "–"

    by_family: dict[str, list[tuple[str, ...]]] = {}  # a cell for each base, the model's own scaling first
    for (family, _), rows in by_method.items():
        of = (cell([row for (_, used), row in rows.items() if used == plugin]) for plugin in (False, True))
        by_family.setdefault(family, []).append(tuple(of))
    table = [(family, *map(" / ".join, zip(*bases, strict=True))) for family, bases in by_family.items()]
    equal = all(each["bit_equal"] for each in result["stock"])
    moved = [row["moved_by"] for row in result["rows"] if "moved_by" in row]
    by_class = " and ".join(dict.fromkeys(row["family"] for row in result["classes"]))
    unlike = "".join(
        f" {name} is left out: without any method this vLLM differs from transformers by "
        f"{each['largest_difference']:.1g} nats."
        for name, each in other.items()
    )
    note = (
        f"*The largest difference of {result['tokens'] - 1} log-probabilities in nats, float32, CPU, over the model's "
        "own scaling / its original length, `theta` only where it does not have to go over a scaling; the methods move "
        f"them by {min(moved):.2g} to {max(moved):.2g}. Without a method, vLLM with the plug-in installed is "
        f"{'bit-equal to' if equal else '**not** bit-equal to'} vLLM without. {by_class}: rotated queries "
        f"of vLLM's class and of transformers.{unlike} {made_by(result)}*"
    )
    heads = [f"{way}: {', '.join(tried[plugin])}" for way, plugin in (("stock", False), ("plug-in", True))]
    return markdown_table(["model", *heads], table, note)


@figure
def engine_perplexity() -> str:
    """Return by how much perplexities by real engines differ from those of transformers, and what batches save."""
    rows = []
    for engine in ("vllm", "sglang"):
        result = read_result(f"{engine}_perplexity")
        shares = [(row["dtype"], abs(row[engine] / row["transformers"] - 1)) for row in result["rows"]]
        largest = {dtype: f"{max(share for each, share in shares if each == dtype):.0e}" for dtype, _ in shares}
        cells = [largest.get("float32", "–"), largest.get("bfloat16", "–"), "–"]
        if batches := result.get("batches"):  # measured after the perplexities
            faster = batches["seconds"]["alone"] / batches["seconds"]["together"]
            cells[2] = f"{faster:.1f} times as fast ({batches['texts']} of {batches['tokens']} tokens)"
        rows.append([", ".join(f"{name} {result['versions'][name]}" for name in (engine, "transformers")), *cells])
    head = ["engine", "difference in float32", "in bfloat16", "texts together, not one at a time"]
    note = (
        "*The largest difference of a perplexity from that of transformers, as a share: the bundled model with and "
        "without yarn x4, on a CPU. Measured by `nox -s vllm` and `nox -s sglang`.*"
    )
    return markdown_table(head, rows, note)


@figure
def vllm_drafts() -> str:
    """Return how the drafts of a real vLLM rotate, for each way of giving the model its settings."""
    result = read_result("vllm_drafts")

    def cell(row: Row) -> str:
        if "failed" in row:
            return "**does not run**"
        of = {which: row[which] for which in ("model", "draft")}
        off = [f"{which} off by up to {100 * value:.0f}%" for which, value in of.items() if value >= 1e-5]
        return ", ".join(off) or "model and draft the same"

    said: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        said.setdefault((row["way"], cell(row)), []).append(row["case"])
    every = list(dict.fromkeys(row["case"] for row in result["rows"]))
    lines = (
        f"- settings in `{way}`: {text}" + (f" ({'; '.join(cases)})" if cases != every else "") + "\n"
        for (way, text), cases in said.items()
    )
    note = (
        f"*The frequencies in the tables of a running vLLM ({'; '.join(every)}), compared with those that were asked "
        f"for (by-parts x4). {made_by(result)}*"
    )
    return f"\n\n{''.join(lines)}\n{note}\n\n"


@figure
def vllm_lora() -> str:
    return f"{max(read_result('vllm_lora')['differences'].values()):.0e}"


@figure
def vllm_memory() -> str:
    """Inputs that a real vLLM has room for, by its own report and as computed here, and its processes compared."""
    from transformers import AutoConfig

    result = read_result("vllm_memory")
    wrong, differences = [], [0.0]
    for row in result["rows"]:
        settings = dict(result["models"][row["model"]])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        width = 1 if row["keys"] == "fp8" else 4
        ahead = result["step"] + result["block"]  # a window does not begin where a block does
        size = cached_bytes(config, result["length"], width=width, gpus=row["gpus"], ahead=ahead)
        reported = "does not run" if "failed" in row else f"{row['inputs']:.2f}"
        if reported != (computed := f"{result['bytes'] / size:.2f}"):
            wrong.append(f"{row['model']}, {row['gpus']} processes: {reported} for {computed}")
        differences.append(row.get("difference", 0.0))
    but = f", **but for {'; '.join(wrong)}**" if wrong else ""
    models, most = "; ".join(dict.fromkeys(row["model"] for row in result["rows"])), max(differences)
    return (
        f"\n\nA running vLLM has room for as many inputs of {result['length']:,} tokens in "
        f"{result['bytes'] // 2**20} MiB of keys and values per process as is computed here, to two digits, in float32 "
        f"and float8, with one and two processes ({models}){but}. Log-probabilities of two processes and of "
        f"one differ by at most {most:.0e} nats in float32. *Small models on a CPU. {made_by(result)}*\n\n"
    )


@figure
def servers() -> str:
    """Every server that check-server was tried on, and how far it lies from the configuration it was taken for."""
    result = read_result("servers")
    rows = sorted(result["rows"], key=lambda row: row["expected"] != "as measured")
    columns = sorted(dict.fromkeys((row["engine"], row["dtype"]) for row in rows), key=lambda each: each[0])
    ran: dict[tuple[str, str], set[tuple[str, str]]] = {}  # by mistake and model, the columns that it ran in
    for row in rows:
        name = "weights of the other pairing" if " weights " in row["expected"] else row["expected"]
        ran.setdefault((name, row["measured"]), set()).add((row["engine"], row["dtype"]))
    tried: dict[str, dict[str, list[str]]] = {}  # by model and columns, the mistakes; what was right, its models
    for (name, model), of in ran.items():
        where = "" if len(of) == len(columns) else "; ".join(_engine_dtypes([each for each in columns if each in of]))
        mistake = name.removeprefix("with ")
        first, second = ("as measured", model) if name == "as measured" else (f"mistakes in {model}", mistake)
        tried.setdefault(first, {}).setdefault(where, []).append(second)
    lines = (
        f"- {first}: "
        + "; ".join("; ".join(_by_family(some)) + f" (in {where})" * bool(where) for where, some in by_where.items())
        for first, by_where in tried.items()
    )
    of_column = [[row for row in rows if (row["engine"], row["dtype"]) == column] for column in columns]
    table = [
        ["verdicts that are right", *(f"{sum(bool(row.get('right')) for row in of)} of {len(of)}" for of in of_column)],
        ["largest difference", *(f"{max(map(_apart, of)):.0e}" for of in of_column)],
        [
            "other configurations that fit as well, at most",
            *(str(max(len(row["alike"]) for row in of)) for of in of_column),
        ],
    ]
    note = (
        "*Differences are root mean squares in nats from the configuration that each server was taken for, over "
        f"prompts of {result['lengths'][0]} to {result['lengths'][-1]} tokens, of models for 256. {made_by(result)}*"
    )
    head = ["", *(f"{engine} {dtype}" for engine, dtype in columns)]
    return "\n\n" + "\n".join(lines).replace("</s>", "`</s>`") + markdown_table(head, table, note)


def _by_family(names: list[str]) -> list[str]:
    """Names, with what several have before their first comma once: "Llama (as it is; yarn)"."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition(", ")[0], []).append(name)
    return [
        some[0] if len(some) == 1 else f"{family} ({'; '.join(each[len(family) + 2 :] or 'as it is' for each in some)})"
        for family, some in families.items()
    ]


def _engine_dtypes(columns: list[tuple[str, str]]) -> list[str]:
    """Engines, each with the dtypes that it ran in."""
    engines = dict.fromkeys(engine for engine, _ in columns)
    return [f"{name} {', '.join(dtype for engine, dtype in columns if engine == name)}" for name in engines]


def _apart(row: Row) -> float:
    """The largest difference of a server from the configuration that it was taken for."""
    return float(max(row["differences"][row["closest"]]))


@figure
def server_baselines() -> str:
    """Return a table of what the record of a live server said after each change."""
    result = read_result("servers")
    rows = result.get("baselines", [])
    if not rows:
        return "\nNothing yet.\n"
    columns = list({row["engine"]: (row["engine"], row["dtype"]) for row in rows}.values())  # the coarsest of each

    def cell(row: Row) -> str:
        said = "as recorded" if row["agrees"] else "; ".join(each.partition(":")[0] for each in row["changed"])
        differs = (
            [] if row["begins"] is None else [f"{max(row['differences']):.2g} nats from {row['begins']} tokens on"]
        )
        return "; ".join([*([said] if said else []), *differs, *(["refuses long prompts"] if row["refused"] else [])])

    cells = {(row["change"], row["engine"], row["dtype"]): cell(row) for row in rows}
    table = (
        (change, *(cells.get((change, *column), "–") for column in columns))
        for change in dict.fromkeys(row["change"] for row in rows)
    )
    note = f"*What the record of a right server says later. {made_by(result)}*"
    return markdown_table(["what happened", *(f"{engine} {dtype}" for engine, dtype in columns)], table, note)


def _report(expected: str) -> str:
    """Return the report of check-server on one of the servers of llama.cpp in Q8_0."""
    from rope_ext_hf.tools.servers.server_report import ServerReport

    row = next(
        row
        for row in read_result("servers")["rows"]
        if (row["engine"], row["dtype"], row["measured"], row["expected"])
        == ("llama.cpp", "Q8_0", "Llama, yarn", expected)
    )
    values = {item.name: row[item.name] for item in fields(ServerReport) if item.name in row}
    return f"\n\n```\n{ServerReport(url='http://localhost:8080', **values)}\n```\n\n"


@figure
def check_server_wrong() -> str:
    return _report("with no attention factor")
