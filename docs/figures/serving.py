"""Methods that each engine serves, and settings that go wrong there."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from docs.figures.registry import FIGURES, ROOT, anchor, figure, made_by, markdown_table, names_in_lines, read_result
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.files.whole import package_table
from rope_ext_hf.tools.engines.base import Engine, find_engine, list_engines
from rope_ext_hf.tools.engines.target import Target
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.support.models import WITH_A_CLASS, small_config
from tests.tools.support.serving_models import SERVED, targets

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod


@figure
def engine_names() -> str:
    return names_in_lines(list_engines())


@cache
def _sections() -> dict[str, str]:
    """Return a link to the section that somebody wrote for each engine: page and heading."""
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
    """Return how an engine serves each target; None if it refuses the target."""

    def encoding(target: Target) -> str | None:
        try:
            name = find_engine(engine).config_for(target).encoding
        except ServingError:
            return None
        return "longrope" if name.startswith("longrope") else "divisors" if "divisors" in name else name

    return [encoding(target) for *_, target in _targets()]


@figure
def engines() -> str:
    """Every engine: its section, how many of the configurations it serves, and how its rules were checked.

    Checked by families that were run, computed by the engine's own classes, or read alone.
    """
    rows = []
    for name, engine in list_engines().items():
        served = _served_ways(name)
        link = _sections().get(_figure_of(name), f"#{anchor(name)}")
        section = f"[{engine.title or name}]({link})"
        count = str(sum(each is not None for each in served))
        rows.append((f"`{name}`", section, engine.version, count, *_checks(engine)))
    heads = ["`--engine`", "section", "version", f"served of {len(_targets())}", "families run"]
    heads += ["by its own classes", "read, not run"]
    dates = {engine.table["when"] for engine in list_engines().values() if not (engine.reference or engine.rules_of)}
    return markdown_table(heads, rows, f"Checked on {' and '.join(sorted(dates))}.")


def _checks(engine: type[Engine]) -> tuple[str, ...]:
    if engine.reference or engine.rules_of:
        return "–", "–", "–"
    table = engine.table
    read = [family for family in table["families"] if engine().checked(family) == "read"]
    counts = len(table["run"]), len(set(table["classes"]) - set(table["run"]))
    return *map(str, counts), "all others" if not table["families"] else str(len(read))


@figure
def family_runs() -> str:
    """Return by how much the logits of small models of every family differ between an engine and this package."""
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
    note = (
        "*Of logits over the context length and over four times that, as published and under linear, ntk, yarn and "
        "llama3 with a factor of 4, in standard deviations; and what remains of it where the engine's own ways, below, "
        f"are imitated here. {made_by(result)}*"
    )
    heads = ["engine", "families", "configurations", "refused", "largest difference", "remaining", "methods move by"]
    return markdown_table(heads, [tuple(map(str, row)) for row in rows], note)


@figure
def own_ways() -> str:
    """Return what engines compute differently apart from RoPE, and the difference before and after imitating it."""
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
    "puts the attention factor of YaRN": "its graph puts a factor of yarn into the softmax scale",
    "softmax scale would be": "its softmax scale does not follow the settings",
    "cannot run longrope": "the magnitude cannot be stated for latent attention",
    "config class of its own": "its model file reads settings of a config class of its own",
    "reads no tensor of divisors": "its graph has no way to be told of these frequencies",
}
"""What the page says of a refusal, by words of its message; else what stands in its brackets."""


@figure
def engine_families() -> str:
    """For each engine its families, by how it serves them: YaRN x4 over the model as it is."""
    lists = []
    for name, engine in list_engines().items():
        if engine.reference or engine.rules_of:
            continue
        ways: dict[str, list[str]] = {}
        for family, target in _families().items():
            ways.setdefault(_way(name, family, target), []).append(family)
        ways.pop("none", None)
        whole = sum(map(len, ways.values())) == len(_families())  # no family is missing
        if not whole:  # an engine that has no model of a family counts as unchecked
            ways.pop("unchecked", None)
        order = sorted(ways.items(), key=lambda item: (_ORDER.index(item[0].partition(",")[0]), -len(item[1])))
        lines = (
            f"- *{way}*: "
            + ("every other family" if whole and way == "transformers" else ", ".join(f"`{each}`" for each in some))
            + "\n"
            for way, some in order
        )
        lists.append(f"**{engine.title or name}**\n\n{''.join(lines)}\n")
    return "\n\n" + "".join(lists)


_ORDER = ("exact", "plug-in", "read", "transformers", "refused", "unchecked")


@cache
def _families() -> dict[str, Target]:
    """Return what an engine must compute for each family that takes the method."""
    found = {}
    for family in sorted(WITH_A_CLASS):
        with suppress(RopeExtError):  # those that take none are on the page, too
            model = Model("MODEL", small_config(family), composite=False, patches=[])
            found[family] = make_target(model, "yarn", factor=4.0)
    return found


def _way(name: str, family: str, target: Target) -> str:
    """Return how an engine serves a family, or why it does not."""
    engine, listed = find_engine(name), read_result("engine-models")["models"]
    has_a_model = family in listed.get(name, (family,))  # an engine whose models were not listed yet may have it
    try:
        engine.config_for(target)
    except ServingError as error:
        if engine.has_plugin():
            with suppress(ServingError):
                engine.with_plugin().config_for(target)
                return "plug-in"
        message = str(error)
        if "this package does not know" in message or "not in the table" in message:
            return "unchecked" if has_a_model else "none"
        stated = message.rpartition(" model (")[2].removesuffix(")")
        return f"refused, because {next((text for words, text in _BECAUSE.items() if words in message), stated)}"
    how = engine.checked(family)
    if how != "read":
        return "exact"
    if why := next((why for why, families in engine.table.get("unrun", {}).items() if family in families), None):
        return f"read, because {why}"
    return "read" if has_a_model else "transformers"


@figure
def drafts() -> str:
    """Return what the draft of speculative decoding needs, by engine."""
    rows = [(engine.title or name, engine.drafts) for name, engine in list_engines().items() if engine.drafts]
    return markdown_table(["engine", "speculative decoding"], rows)


@figure
def engines_without_a_section() -> str:
    """Sections of the engines that nobody has written one for yet."""
    missing = [name for name in list_engines() if _figure_of(name) not in _sections()]
    return "\n\n" + "".join(f"## {name}{_section(name)}" for name in missing) if missing else "\n"


def _section(engine: str) -> str:
    """Return an engine's example, refusals and ignored keys; an engine that runs another does not repeat them."""
    if rules := find_engine(engine).rules_of:
        alike = [name for name, each in list_engines().items() if each.rules_of == rules]
        shown, metadata, _ = _example(engine).partition("# GGUF metadata")
        return _example(engine) if engine == alike[0] else f"{shown}{metadata} and tensors as above\n```\n\n"
    example = "\n\n" if find_engine(engine).reference else _example(engine)  # docs/checkpoint-format.md shows its keys
    return example + _refused(engine) + _traps(engine)


def _refused(engine: str) -> str:
    """Return how many configurations are served in each way, and a table of the refused ones."""
    by_model: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    ways = _served_ways(engine)
    for (family, over, method, _), way in zip(_targets(), ways, strict=True):
        refused, served = by_model.setdefault(family, {}).setdefault(over, ([], []))
        (refused if way is None else served).append(method.name)

    def cell(refused: list[str], served: list[str]) -> str:
        if refused and len(served) < 3:
            return "all" + f" but {' and '.join(served)}" * bool(served)
        return ", ".join(refused) or "–"

    rows = []
    for family, by_base in by_model.items():
        own, original = (cell(*by_base[over]) for over in ("own", "original"))
        if any(refused for refused, _ in by_base.values()):
            rows.append((family, own, "the same" if own == original and len(own.split()) > 2 else original))
    counts = ", ".join(f"{count} {_WAYS[way]}" for way, count in Counter(ways).most_common() if way)
    table = markdown_table(["refused over", "its own scaling", "its original length"], rows) if rows else "\n\n"
    return f"Served: {counts}.{table}"


_WAYS = {
    "native": "by the engine's own name",
    "longrope": "as two equal lists",
    "divisors": "as divisors",
    "as published": "as published",
}


def _traps(engine: str) -> str:
    """Keys that the engine ignores or reads otherwise, with the versions where they are not the one of its rules."""
    traps = package_table("rope_ext_hf.tools.engines", "traps.toml").get(engine, [])
    if not traps:
        return "Keys ignored or read otherwise: none is known.\n\n"
    version = find_engine(engine).version
    lines = (
        f"- **{each['key']}**" + f" ({each['versions']})" * (each["versions"] != version) + f": {each['effect']}\n"
        for each in traps
    )
    return f"Keys ignored or read otherwise:\n\n{''.join(lines)}\n"


def _example(engine: str) -> str:
    """Return what `rope-ext serve-config` prints for the bundled model under yarn x4, or linear if yarn is refused."""
    from rope_ext_hf.reference import path
    from rope_ext_hf.tools.serving.configs import serving_config

    try:
        config = serving_config("reference", engine, "yarn", factor=4)
    except ServingError:
        config = serving_config("reference", engine, "linear", factor=4)
    printed = str(config).replace(str(path()), "MODEL")
    return f"\n\n```\n{printed}\n```\n\n"


for _engine in list_engines():
    if _figure_of(_engine) in _sections():
        FIGURES[f"engine-{_figure_of(_engine)}"] = partial(_section, _engine)
