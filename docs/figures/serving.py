"""What each engine serves, what goes wrong there, and how the classes of the engines compare."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING

from docs.figures.registry import FIGURES, ROOT, Row, anchor, figure, markdown_table, names_in_lines, read_result
from rope_ext_hf.engines.base import Engine, Target, find_engine, list_engines
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.reading.cache_memory import cached_bytes
from rope_ext_hf.serving.target import Model, make_target
from tests.support.models import WITH_A_CLASS, small_config
from tests.support.serving_models import SERVED, targets

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod


@figure
def engine_names() -> str:
    return names_in_lines(list_engines())


@cache
def _sections() -> dict[str, str]:
    """Where each engine has a section that somebody wrote, as a link: below which heading of which page."""
    found = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        heading = ""
        for title, name in re.findall(
            r"^## (.+)$|^<!-- figure: engine-([a-z0-9-]+) -->$", page.read_text("utf-8"), re.MULTILINE
        ):
            heading = title or heading
            if name:
                found[name] = f"{page.name}#{anchor(heading)}"
    return found


def _figure_of(engine: str) -> str:
    """The name of an engine in the names of figures."""
    return engine.replace(".", "-")


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
    """Every engine with its version, its section, and how many of the configurations it serves."""
    rows = []
    for name, engine in list_engines().items():
        served = _served_ways(name)
        link = _sections().get(_figure_of(name), f"#{anchor(name)}")
        section = f"[{engine.title or name}]({link})"
        count = f"{sum(each is not None for each in served)} of {len(served)}"
        rows.append((f"`{name}`", section, engine.version, count))
    return markdown_table(["`--engine`", "section", "rules read in", "served"], rows)


@figure
def engine_checks() -> str:
    """How the rules of each engine were checked: families that were run, computed by its own classes, or read alone."""
    rows = []
    for name, engine in list_engines().items():
        if not (engine.reference or engine.rules_of):
            table = engine.table
            counts = [len(table["run"]), len(set(table["classes"]) - set(table["run"]))]
            read = [family for family in table["families"] if engine().checked(family) == "read"]
            others = "all others" if not table["families"] else str(len(read))
            rows.append((engine.title or name, engine.version, *map(str, counts), others, table["when"]))
    return markdown_table(["engine", "version", "families run", "by its own classes", "read, not run", "when"], rows)


@figure
def family_runs() -> str:
    """How far small models of every family lie apart in an engine that ran them and here."""
    result = read_result("engine-families")
    rows = []
    for name, title in (("gguf", "llama.cpp, by file"), ("llama.cpp", "llama.cpp, by flags"), ("mlx", "mlx-lm")):
        own = [row for row in result["rows"] if row["engine"] == name and "difference" in row]
        families = {row["family"] for row in own if "4" in row["difference"]}
        worst = max(max(row["difference"].values()) for row in own)
        least = min(row["without"] for row in own if row["method"] != "as published")
        refused = sum("refused" in row for row in result["rows"] if row["engine"] == name)
        remaining = max(max(row.get("imitated", row["difference"]).values()) for row in own)
        rows.append((title, len(families), len(own), refused, f"{worst:.0e}", f"{remaining:.0e}", f"{least:.2g}"))
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        "*Of logits over the context length and over four times that, as published and under linear, ntk, yarn and "
        "llama3 with a factor of 4, in standard deviations; and what remains of it where the engine's own ways, below, "
        f"are imitated here. Measured by `{result['command']}` with {versions}.*"
    )
    heads = ["engine", "families", "configurations", "refused", "largest difference", "remaining", "methods move by"]
    return markdown_table(heads, [tuple(map(str, row)) for row in rows], note)


@figure
def own_ways() -> str:
    """What engines do otherwise that has nothing to do with RoPE, and what lies between them and here then."""
    result = read_result("engine-families")
    rows = []
    for name, title in (("gguf", "llama.cpp"), ("mlx", "mlx-lm")):
        ways: dict[str, list[str]] = {}
        for family, way in result["own_ways"][name].items():
            ways.setdefault(way["cause"], []).append(family)
        for cause, families in ways.items():
            own = [row for row in result["rows"] if row["engine"] == name and row["family"] in families]
            sizes = [
                max(value for row in own for value in row.get(kind, {"": 0.0}).values())
                for kind in ("difference", "imitated")
            ]
            rows.append((title, cause, ", ".join(f"`{each}`" for each in families), *(f"{x:.0e}" for x in sizes)))
    return markdown_table(["engine", "its own way", "families", "difference", "with it imitated"], rows)


_BECAUSE = {
    "is dropped": "its model file hands on theta alone; `theta` and `ntk` are served",
    "is ignored": "its model file hands on theta alone; `theta` and `ntk` are served",
    "stops at the rope type": "its model file stops at this rope type; `theta` and `ntk` are served",
    "duplicate_data": "its table of a yarn holds every angle twice, so that position p gets the angles of floor(p / 2)",
    "mixes its YaRN": "its graph mixes a yarn into the softmax scale, by rules that changed often",
    "softmax scale would be": "its softmax scale does not follow the settings",
    "cannot run longrope": "the magnitude cannot be stated for latent attention",
    "config class of its own": "its model file reads settings of a config class of its own",
    "reads no tensor of divisors": "its graph has no way to be told of these frequencies",
}
"""What the page says of a refusal, by words of its message; else what stands in its brackets."""


@figure
def engine_families() -> str:
    """Families x engine, a row for those that are served alike: YaRN x4 over the model as it is."""
    names = [name for name, engine in list_engines().items() if not (engine.reference or engine.rules_of)]
    reasons: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(WITH_A_CLASS):
        try:
            target = make_target(Model("MODEL", small_config(family), composite=False, specs=[]), "yarn", factor=4.0)
        except RopeExtError:
            continue  # which the page says above
        cells = tuple(_family_cell(name, family, target, reasons) for name in names)
        alike.setdefault(cells, []).append(f"`{family}`")
    notes = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    heads = ["families", *(find_engine(name).title or name for name in names)]
    rows = ([", ".join(families), *cells] for cells, families in alike.items())
    return markdown_table(heads, rows) + f"Refused, or read and not run, because:\n\n{notes}\n"


def _family_cell(name: str, family: str, target: Target, reasons: dict[str, int]) -> str:
    """How an engine serves a family."""
    engine, listed = find_engine(name), read_result("engine-models")["models"]
    has_a_model = family in listed.get(name, (family,))  # an engine whose models were not listed yet may have it
    try:
        engine.config_for(target)
    except ServingError as error:
        if type(engine).with_plugin is not Engine.with_plugin:
            with suppress(ServingError):
                engine.with_plugin().config_for(target)
                return "plug-in"
        message = str(error)
        if "not checked" in message or "not in the table" in message:
            return "unchecked" if has_a_model else "none"
        stated = message.rpartition(" model (")[2].removesuffix(")")
        reason = next((text for words, text in _BECAUSE.items() if words in message), stated)
        return f"refused {reasons.setdefault(reason, len(reasons) + 1)}"
    how = engine.checked(family)
    if how != "read":
        return "exact"
    if why := next((why for why, families in engine.table.get("unrun", {}).items() if family in families), None):
        return f"read {reasons.setdefault(why, len(reasons) + 1)}"
    return "read" if has_a_model else "transformers"


@figure
def drafts() -> str:
    """What reaches the draft of speculative decoding, by engine."""
    rows = [(engine.title or name, engine.drafts) for name, engine in list_engines().items() if engine.drafts]
    return markdown_table(["engine", "speculative decoding"], rows)


@figure
def engines_without_a_section() -> str:
    """Sections of the engines that nobody has written one for yet."""
    missing = [name for name in list_engines() if _figure_of(name) not in _sections()]
    return "\n\n" + "".join(f"## {name}{_section(name)}" for name in missing) if missing else "\n"


def _section(engine: str) -> str:
    """What the engine is given, what it refuses and what it reads otherwise; not repeated of one that runs another."""
    if find_engine(engine).rules_of:
        return _example(engine)
    return _example(engine) + _refused(engine) + _traps(engine)


def _refused(engine: str) -> str:
    """How many configurations are served in which way, and which are refused."""
    by_model: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    ways = _served_ways(engine)
    for (family, over, method, _), way in zip(_targets(), ways, strict=True):
        refused, served = by_model.setdefault(family, {}).setdefault(over, ([], []))
        (refused if way is None else served).append(method.name)

    def cell(refused: list[str], served: list[str]) -> str:
        if refused and len(served) < 3:
            return "all" + f" but {' and '.join(served)}" * bool(served)
        return ", ".join(refused) or "–"

    rows = [
        (family, *(cell(*by_base[over]) for over in ("own", "original")))
        for family, by_base in by_model.items()
        if any(refused for refused, _ in by_base.values())
    ]
    counts = ", ".join(f"{count} {_WAYS[way]}" for way, count in Counter(ways).most_common() if way)
    text = f"{len(ways) - ways.count(None)} of {len(ways)} are served: {counts}."
    if not rows:
        return f"{text}\n\n"
    return f"{text} Refused:" + markdown_table(["model", "over its own scaling", "over its original length"], rows)


_WAYS = {
    "native": "by the engine's own name of the method",
    "longrope": "as two equal lists",
    "divisors": "as divisors",
    "as published": "as published",
}


def _traps(engine: str) -> str:
    """Keys that the engine ignores or reads otherwise, with the versions and the place in its source."""
    traps = tomllib.loads((ROOT / "rope_ext_hf" / "engines" / "traps.toml").read_text(encoding="utf-8")).get(engine, [])
    if not traps:
        return "Keys that are ignored or read otherwise: none is known.\n\n"
    lines = (f"- **{each['key']}** ({each['versions']}): {each['effect']} (`{each['source']}`)\n" for each in traps)
    return f"Keys that are ignored or read otherwise:\n\n{''.join(lines)}\n"


def _example(engine: str) -> str:
    """What `rope-ext serve-config` prints for the bundled model under yarn x4, or linear where yarn is refused."""
    from rope_ext_hf.reference import path
    from rope_ext_hf.serving.configs import serving_config

    try:
        config = serving_config("reference", engine, "yarn", factor=4)
    except ServingError:
        config = serving_config("reference", engine, "linear", factor=4)
    printed = str(config).replace(str(path()), "MODEL")
    return f"\n\n```\n{printed}\n```\n\n"


for _engine in list_engines():
    if _figure_of(_engine) in _sections():
        FIGURES[f"engine-{_figure_of(_engine)}"] = partial(_section, _engine)


@figure
def engine_classes() -> str:
    """How the rotary classes of engines compare with what their configurations are meant to compute."""
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
        "frequencies, largest relative difference (float32 tables)": largest("frequencies"),
        "magnitude, largest relative difference": largest("magnitude"),
        "softmax scale, largest relative difference": largest("softmax_scale"),
        "queries rotated by M-RoPE, largest difference": largest("positions"),
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
    return markdown_table(
        ["rope types", "by", f"{engine}, largest difference of a logit"],
        (("; ".join(some), *cells([row for each in some for row in by_rope_type[each]])) for some in by_way.values()),
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
    alike: dict[tuple[str, ...], list[str]] = {}
    table = []
    for name, rows in by_name.items():
        cells = tuple(cell(rows.get(model, [])) for model in models)
        if any("encoding" in row for of in rows.values() for row in of):
            table.append((name, *cells))
        else:  # metadata: a row for those that are read by the same architectures
            alike.setdefault(tuple("" if each[0].isdigit() else each for each in cells), []).append(name)
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

    table = [
        (family, over, *(cell([row for (_, used), row in rows.items() if used == plugin]) for plugin in (False, True)))
        for (family, over), rows in by_method.items()
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
        f"*The largest difference of {result['tokens'] - 1} log-probabilities in nats, float32, CPU, `theta` only "
        "where it does not have to go over a scaling; the methods move "
        f"them by {min(moved):.2g} to {max(moved):.2g}. Without a method, vLLM with the plug-in installed is "
        f"{'bit-equal to' if equal else '**not** bit-equal to'} vLLM without. {by_class}: rotated queries "
        f"of vLLM's class and of transformers.{unlike} Measured by "
        f"`make test-vllm` with {versions}.*"
    )
    heads = [f"{way}: {', '.join(tried[plugin])}" for way, plugin in (("stock", False), ("plug-in", True))]
    return markdown_table(["model", "over", *heads], table, note)


@figure
def vllm_remapping() -> str:
    """How far a real vLLM under remapping methods lies from the patched model, in each way of reading the prompts."""
    result = read_result("vllm_remapping")
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    by_model: dict[str, dict[str, list[Row]]] = {}
    methods: dict[str, dict[str, None]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], {}).setdefault(row["way"], []).append(row)
        methods.setdefault(row["model"], {})[f"`{row['method']}`"] = None

    def cell(model: str, rows: list[Row]) -> str:
        if failed := [row["method"] for row in rows if "failed" in row]:
            return f"**{', '.join(failed)} does not run**"
        if not rows:
            return "–"
        some = ", ".join(f"`{row['method']}`" for row in rows) if 2 * len(rows) < len(methods[model]) else ""
        return f"{max(row['largest_difference'] for row in rows):.0e}" + f" ({some})" * bool(some)

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
        (model, ", ".join(methods[model]), *(cell(model, rows.get(way, [])) for way in ways))
        for model, rows in by_model.items()
    ]
    return markdown_table(["model", "methods", *ways], table, note)


@figure
def vllm_perplexity() -> str:
    """Perplexity of the bundled model by a real vLLM and by transformers."""
    result = read_result("vllm_perplexity")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        both = f"{row['vllm']:.4f} / {row['transformers']:.4f}"
        cells.setdefault((row["method"], f"{row['length']:,}"), {})[row["dtype"]] = both
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    table = [(*key, *(by_dtype[dtype] for dtype in dtypes)) for key, by_dtype in cells.items()]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = f"*`{result['command']}` on a CPU. Measured by `make test-vllm` with {versions}.*"
    return markdown_table(["method", "tokens", *(f"{dtype}: vLLM / transformers" for dtype in dtypes)], table, note)


@figure
def vllm_drafts() -> str:
    """What a real vLLM's drafts rotate by, where the model got its settings in each way."""
    result = read_result("vllm_drafts")

    def cell(row: Row) -> str:
        if "failed" in row:
            return "**does not run**"
        of = {which: row[which] for which in ("model", "draft")}
        off = [f"{which} off by up to {100 * value:.0f}%" for which, value in of.items() if value >= 1e-5]
        return ", ".join(off) or "both the same"

    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    cells = {(row["case"], row["way"]): cell(row) for row in result["rows"]}
    table = [(case, *(cells[case, way] for way in ways)) for case in dict.fromkeys(case for case, _ in cells)]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        "*The frequencies in the tables of a running vLLM, compared with those that were asked for (by-parts x4). "
        f"Measured by `{result['command']}` with {versions}.*"
    )
    return markdown_table(["model and draft", *(f"settings in `{way}`" for way in ways)], table, note)


@figure
def vllm_lora() -> str:
    return f"{max(read_result('vllm_lora')['differences'].values()):.0e}"


@figure
def vllm_memory() -> str:
    """Inputs that a real vLLM has room for, by its own report and as computed here, and its processes compared."""
    from transformers import AutoConfig

    result = read_result("vllm_memory")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        settings = dict(result["models"][row["model"]])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        width = 1 if row["keys"] == "fp8" else 4
        ahead = result["step"] + result["block"]  # a window does not begin where a block does
        size = cached_bytes(config, result["length"], width=width, gpus=row["gpus"], ahead=ahead)
        reported = "does not run" if "failed" in row else f"{row['inputs']:.2f}"
        computed = f"{result['bytes'] / size:.2f}"
        of = cells.setdefault((row["model"], str(row["gpus"])), {})
        of[row["keys"]] = reported if reported == computed else f"**{reported}**, computed {computed}"
        if "difference" in row:
            of["same"] = f"{row['difference']:.0e}"
    table = [(*key, *(of.get(each, "–") for each in ("auto", "fp8", "same"))) for key, of in cells.items()]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        f"*Inputs of {result['length']:,} tokens that fit into {result['bytes'] // 2**20} MiB of keys and values in "
        "each process, CPU, small models: as vLLM reports, and as computed here where one number stands; the largest "
        "difference in nats of 899 log-probabilities (float32) of "
        f"two processes and one. Measured by `{result['command']}` with {versions}.*"
    )
    head = ["model", "processes", "float32", "float8", "two processes against one"]
    return markdown_table(head, table, note)


@figure
def servers() -> str:
    """Every server that check-server was tried on, and how far it lies from the configuration it was taken for."""
    result = read_result("servers")
    columns = sorted(dict.fromkeys((row["engine"], row["dtype"]) for row in result["rows"]), key=lambda each: each[0])
    by_case: dict[str, dict[tuple[str, str], list[Row]]] = {}
    models: dict[str, dict[str, None]] = {}
    for row in sorted(result["rows"], key=lambda row: row["expected"] != "as measured"):
        name = "weights of the other pairing" if " weights " in row["expected"] else row["expected"]
        by_case.setdefault(name, {}).setdefault((row["engine"], row["dtype"]), []).append(row)
        models.setdefault(name, {})[row["measured"]] = None

    def cell(rows: list[Row]) -> str:
        if wrong := [row.get("runs") or "not said" for row in rows if not row.get("right")]:
            return f"**{', '.join(wrong)}**"
        alike = max((len(row["alike"]) for row in rows), default=0)
        differences = [row["differences"][row["closest"]] for row in rows]
        return f"{max(map(max, differences)):.0e}" + f" ({alike})" * bool(alike) if rows else "–"

    counts = [sum(bool(row.get("right")) for row in result["rows"]), len(result["rows"])]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = (
        f"*The largest root mean square difference in nats from the configuration that each was taken for, over "
        f"prompts of {result['lengths'][0]} to {result['lengths'][-1]} tokens, of models for 256; in brackets, how "
        f"many others at most were named as not told apart from it. {counts[0]} of {counts[1]} verdicts are right. "
        f"Measured by `{result['command']}` with {versions}.*"
    )
    alike: dict[tuple[str, ...], list[str]] = {}  # a row for mistakes of one model that were all told right
    for name, cases in by_case.items():
        right = all(row.get("right") and not row["alike"] for rows in cases.values() for row in rows)
        every = len(cases) == len(columns)
        alike.setdefault((*models[name],) if right and every else (*models[name], name), []).append(name)
    table = (
        (
            "; ".join(names),
            "; ".join(models[names[0]]),
            *(cell([row for name in names for row in by_case[name].get(column, [])]) for column in columns),
        )
        for names in alike.values()
    )
    return markdown_table(["served", "of", *(f"{engine} {dtype}" for engine, dtype in columns)], table, note)


@figure
def server_baselines() -> str:
    """What a record of a live server said after each change."""
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
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    note = f"*What the record of a right server says later. Measured by `{result['command']}` with {versions}.*"
    return markdown_table(["what happened", *(f"{engine} {dtype}" for engine, dtype in columns)], table, note)


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
def check_server_wrong() -> str:
    return _report("with no attention factor")
