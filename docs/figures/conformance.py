"""Programs that agree with the numbers of conformance/."""

from __future__ import annotations

import json

from docs.figures.registry import Row, figure, markdown_table, read_result

_CHECKS = {"inv_freq": "frequencies", "softmax_scale": "softmax scale", "cos_sin": "cos and sin", "on_axes": "M-RoPE"}
_SHOWN = ("model_type", "head_dim", "max_position_embeddings", "original_max_position_embeddings")
_SIGNS = {"agrees": "yes", "differs": "**no**", "-": "–"}


def _programs() -> list[Row]:
    programs: list[Row] = read_result("conformance")["programs"]
    return programs


@figure
def conformance_programs() -> str:
    """Every program with its version, and how many numbers agree."""
    result = read_result("conformance")
    rows = [(each["version"], each["how"], f"{each['agree']}", f"{each['differ']}") for each in _programs()]
    stamp = f"*Version {result['kit']} of the kit, by `{result['command']}` on {result['date']}.*"
    return markdown_table(("program", "what was run", "checks that agree", "that differ"), rows, stamp)


@figure
def conformance_cells() -> str:
    """Every configuration and model, by program."""
    programs = _programs()
    names = list(dict.fromkeys(name for each in programs for name in each["cells"]))
    rows = [(name, *(_SIGNS[each["cells"].get(name, "-")] for each in programs)) for name in names]
    return markdown_table(("", *(each["program"] for each in programs)), rows)


@figure
def conformance_servers() -> str:
    """Return a table of what the runner says about live servers."""
    rows = [
        (each["model"] + "".join(f", without {key}" for key in each["without"]), each["said"])
        for each in read_result("conformance")["servers"]
    ]
    return markdown_table(("served", "what is said"), rows)


@figure
def conformance_differences() -> str:
    """Return the first difference of each configuration and model, program by program."""
    lines = []
    for each in _programs():
        first: dict[str, str] = {}
        for name, check, error in each.get("differences", ()):
            first.setdefault(name, f"{_CHECKS.get(check, check)}: {error}")
        lines += [f"- {each['version']}, {name}: {text}" for name, text in first.items()]
    return "\n\n" + "\n".join(lines) + "\n\n"


@figure
def conformance_smallest() -> str:
    """The smallest configs that show a difference, with what they should give and what they give."""
    parts = []
    versions = {each["program"]: each["version"] for each in _programs()}
    for each in read_result("conformance")["smallest"]:
        length = "" if each["length"] is None else f", for inputs of {each['length']:,} tokens"
        shown = {key: value for key, value in each["config"].items() if "rope" in key or key in _SHOWN}
        lines = [json.dumps(shown)]
        for key in ("expected", "found"):
            numbers = ", ".join(f"{value:.6g}" for value in each[key]["inv_freq"])
            lines.append(f"{key:<8}  magnitude {each[key]['magnitude']:.6f}  inv_freq {numbers}")
        parts.append(f"**{versions[each['program']]}: {each['title']}**{length}\n\n```\n" + "\n".join(lines) + "\n```")
    return "\n\n" + "\n\n".join(parts) + "\n\n"
