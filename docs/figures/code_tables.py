"""Tables of the methods, protocols and families that the code knows."""

from __future__ import annotations

import inspect
from typing import Any

from .registry import figure, markdown_table


@figure
def protocols() -> str:
    from rope_ext_hf.eval.protocols import PROTOCOLS

    return markdown_table(
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
    return markdown_table(
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
    return markdown_table(["pairing", "`model_type`"], rows)
