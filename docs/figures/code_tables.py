"""Tables of the methods, protocols and families that the code knows."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from docs.figures.measurements import unchanged_share
from docs.figures.registry import FIGURE, ROOT, figure, markdown_table
from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.tools.advice.guidance import guidance_of
from rope_ext_hf.tools.advice.measured import Rise, measured_models, reach, rises_at, rises_for_short_inputs

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import RopeMethod, Rotary
    from rope_ext_hf.tools.advice.guidance import Guidance


@figure
def protocols() -> str:
    from rope_ext_hf.reading.protocols import PROTOCOLS

    rows = []
    for protocol in PROTOCOLS.values():
        used = {"`--targets`": protocol.uses_targets, "`--stride`": protocol.uses_stride}
        options = ", ".join(option for option, takes in used.items() if takes)
        rows.append([f"`{protocol.name}`", protocol.description, options or "–"])
    return markdown_table(["`--protocol`", "what it reads and scores", "options"], rows)


def _parameters(cls: type) -> str:
    import dataclasses

    def text(field: Any) -> str:
        required = field.default is dataclasses.MISSING
        return f"`{field.name}`" if required or field.default is None else f"`{field.name}={field.default!r}`"

    shared = _parameters(RemappingMethod) if issubclass(cls, RemappingMethod) and cls is not RemappingMethod else ""
    texts = ", ".join(map(text, dataclasses.fields(cls)))
    return texts.replace(shared, "...") if shared else texts or "–"


def _guided() -> Iterator[tuple[str, Guidance, list[RopeMethod]]]:
    """Every method that states when to use it, and instances of it with different parameters."""
    from rope_ext_hf import Rotary, list_methods
    from tests.support.method_examples import example_methods

    examples = example_methods(Rotary(dim=128, theta=10000.0, trained_length=4096))
    for name in list_methods():
        known = guidance_of(name)
        if known is not None:
            yield name, known, [method for known, method in examples if known == name]


@figure
def api_methods() -> str:
    """The class of every method of the library, for mkdocstrings."""
    return _classes(tool_box=False)


@figure
def api_tool_methods() -> str:
    """The class of every method of the tool box, for mkdocstrings."""
    return _classes(tool_box=True)


@figure
def plug_in_groups() -> str:
    """The groups of entry points, as the module that reads them has them."""
    from rope_ext_hf import plug_ins

    head, _, *rows = [line.strip("| ").split(" | ") for line in str(plug_ins.__doc__).splitlines() if line[:1] == "|"]
    return markdown_table(head, [[f"`{group}`", *others] for group, *others in rows])


@figure
def floors() -> str:
    """The modules and folders from the lowest floor up, as the contracts of import-linter have them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = []
    for contract in project["tool"]["importlinter"]["contracts"]:
        folder = "".join(f"{each}." for each in contract.get("containers", ())).removeprefix("rope_ext_hf.")
        for layer in reversed(contract.get("layers", ())):
            lines.append(", ".join(f"{folder}{name}" for name in layer.split(" | ")))
    return "\n\n```\n" + "\n".join(lines) + "\n```\n\n"


def _classes(*, tool_box: bool) -> str:
    from rope_ext_hf.methods.registry import list_methods

    names = [f"{cls.__module__}.{cls.__name__}" for cls in list_methods().values()]
    listed = [f"::: {name}" for name in names if name.startswith("rope_ext_hf.tools.") == tool_box]
    return "\n\n" + "\n".join(listed) + "\n\n"


@figure
def choosing() -> str:
    from rope_ext_hf import Rotary

    rotary = Rotary(dim=128, theta=10000.0, trained_length=4096)

    rows = []
    for name, guidance, methods in _guided():
        plain = _loads_plainly(methods, rotary)
        method = _bound(methods[0], rotary)
        kept = unchanged_share(method, rotary)
        short = "any length" if method.unchanged_length(rotary) >= UNBOUNDED else kept or "none"
        short += ", bit for bit" if method.keeps_bits else ""
        helped = guidance.unmeasured or _helped(name)
        rows.append([f"`{name}`", guidance.when or "–", plain, _on_real_model(name), helped, short])
    head = [
        "method",
        "take it when",
        "loads plainly",
        _on_real_model_head(),
        "helped small models",
        "same short inputs",
    ]
    note = (
        f"{_on_real_model_note()} *Helped*: up to how many context lengths, on {_small_models()}; a dash was not "
        "measured. *Same short inputs*: up to which share of the context length the output is that of the unpatched "
        "model."
    )
    return markdown_table(head, rows, note)


def _bound(method: RopeMethod, rotary: Rotary) -> RopeMethod:
    """A method with its parameters filled in, for no target length."""
    return method.bind(rotary, None) if isinstance(method, RemappingMethod) else method


README_METHODS = {
    "YaRN": "yarn",
    "NTK-aware scaling": "ntk",
    "Position Interpolation": "linear",
    "Dynamic NTK": "dynamic-ntk",
    "Dual Chunk Attention (DCA)": "dca",
    "Self-Extend": "self-extend",
    "Dynamic Self-Extend": "dynamic-self-extend",
    "ReRoPE": "rerope",
}
"""The methods of the README by the names that people search for."""
_REAL_SCALES = (2, 4, 8)
"""Context lengths at which tables show what a real model reads."""


@figure
def readme_methods() -> str:
    """Return a row per well-known method: its perplexity on a real model, and who loads its folder."""
    from rope_ext_hf import Rotary

    rotary = Rotary(dim=128, theta=10000.0, trained_length=4096)
    instances = {name: methods for name, _, methods in _guided()}
    rows = [["unpatched", "", _on_real_model("unpatched"), "1.00", "yes"]]
    for title, name in README_METHODS.items():
        plain = _loads_plainly(instances[name], rotary)
        rows.append([title, f"`{name}`", _on_real_model(name), _short_on_real_model(name), plain])
    scales = " / ".join([f"{scale}x" for scale in _REAL_SCALES])
    head = [
        "method",
        "name for `patch`",
        f"perplexity at {scales} the context length",
        f"of short inputs, if set for {scales}",
        "plain transformers loads the saved folder",
    ]
    return markdown_table(head, rows, _on_real_model_note())


def _helped(name: str) -> str:
    """Return up to how many context lengths a method helped each small model, as "16x / 8x / 32x"."""
    reached = reach(name)
    return " / ".join([reached.get(model.name, "–") for model in measured_models() if model.is_small])


def _small_models() -> str:
    return ", ".join([model.noun for model in measured_models() if model.is_small])


def _on_real_model_head() -> str:
    return f"perplexity of {_real_model().name} at {' / '.join([f'{scale}x' for scale in _REAL_SCALES])}"


def _on_real_model_note() -> str:
    from docs.figures import gpu, real_models

    entry = real_models.merged_entries()[0]
    lengths = " and ".join([f"{each:g}x" for each in (2, *real_models.further_multiples(entry))])
    on_gpu = gpu.real_model(gpu.real_model_record())[2]
    return (
        f"Perplexities are of {_real_model().name}, divided by that of the unpatched model with only "
        f"{_real_model().context_length:,} tokens before the same text. They are means over up to "
        f"{len(real_models.texts_of(entry))} novels at {lengths}, and over {on_gpu} novels where only the run on a GPU "
        "measured the method. A dash means that nothing was measured."
    )


def _real_model() -> Any:
    """Return the real model that most was measured on."""
    return measured_models()[0]


def _on_real_model(name: str) -> str:
    """Return the perplexities of a real model with a method that is set for each length, as "1.02 / 1.24 / 1.93"."""
    by_scale = {rise.scale: rise for scale in _REAL_SCALES for rise in rises_at(name, scale) if _is_of_real_model(rise)}
    return " / ".join([_ratio(by_scale.get(scale)) for scale in _REAL_SCALES])


def _short_on_real_model(name: str) -> str:
    """Return the perplexities of inputs of one context length, with a method that is set for each longer length.

    A method without a factor has one value.
    """
    rises = [rise for scale in _REAL_SCALES for rise in rises_for_short_inputs(name, scale) if _is_of_real_model(rise)]
    by_factor = {rise.factor: rise for rise in rises}
    if None in by_factor:
        return _ratio(by_factor[None])
    return " / ".join([_ratio(by_factor.get(factor)) for factor in _REAL_SCALES])


def _is_of_real_model(rise: Rise) -> bool:
    return bool(rise.model == _real_model())


def _ratio(rise: Rise | None) -> str:
    """Return by what the perplexity is multiplied, from the rise of the loss in bits; a dash if it is not known."""
    if rise is None:
        return "–"
    ratio = 2**rise.increase
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _loads_plainly(methods: Iterable[RopeMethod], rotary: Rotary) -> str:
    """Return whether plain transformers loads what is saved under a method, for all of its parameters."""
    answers = {method.rope_parameters(rotary) is not None for method in methods}
    return "by its parameters" if len(answers) > 1 else "yes" if answers.pop() else "no"


@figure
def reported_by_papers() -> str:
    """Return what papers report, in a row for each table of a paper."""
    from rope_ext_hf.tools.advice.reported import reported

    rows = []
    for table in reported():
        numbers = "; ".join(f"{_code(method)} {table.numbers(method)}" for method in table.values)
        by = f"[{table.source}]({table.url}), {table.place.replace('as others quote it', 'quoted')}"
        unit = re.sub("^(perplexity), lower is better$|, higher is better$", r"\1", table.unit)
        numbers = numbers.replace(" / ", ", ")
        rows.append([table.model, f"{table.benchmark} ({unit})", ", ".join(table.lengths), numbers, by])
    note = "Higher is better, but for a perplexity. *quoted*: as others quote it, the source itself was not at hand."
    return markdown_table(["model", "benchmark", "at", "numbers", "reported by"], rows, note)


def _code(method: str) -> str:
    from rope_ext_hf import list_methods

    return f"`{method}`" if method in list_methods() else method


@figure
def methods_without_a_section() -> str:
    """The docstring of each method, where the page has no section written for it."""
    from rope_ext_hf import list_methods

    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    written = re.findall(r"^## (\S+)$", FIGURE.sub("", page), flags=re.MULTILINE)
    sections = []
    for name, cls in list_methods().items():
        if name not in written:
            sections.append(f"## {name}\n\n{inspect.getdoc(cls)}\n\n")
    return "\n\n" + "".join(sections) if sections else "\n"


@figure
def methods() -> str:
    from rope_ext_hf import list_methods

    rows = ([f"[`{name}`](#{name})", _parameters(cls)] for name, cls in list_methods().items())
    note = f"... stands for what all remapping methods and score biases take: {_parameters(RemappingMethod)}."
    return markdown_table(["name", "parameters"], rows, note)


@figure
def methods_cost() -> str:
    """Return a list of the reasons why a token takes more time than without a method, with the methods of each."""
    from rope_ext_hf.tools.advice.guidance import NOTHING

    slower: dict[str, list[str]] = {}
    for name, guidance, _ in _guided():
        if guidance.decode != NOTHING:
            slower.setdefault(guidance.decode, []).append(f"`{name}`")
    return "\n\n" + "".join(f"- {', '.join(names)}: {reason}\n" for reason, names in slower.items()) + "\n"


def _families() -> dict[str, str]:
    """The pairing of every family whose conversion is tested and that has a class in transformers."""
    from tests.support.models import PAIRINGS

    return dict(sorted(PAIRINGS.items()))


@figure
def family_count() -> str:
    return str(len(_families()))


@figure
def interleaved_families() -> str:
    """The families that are not `half` paired."""
    return ", ".join(f"`{name}`" for name, pairing in _families().items() if pairing == "interleaved")
