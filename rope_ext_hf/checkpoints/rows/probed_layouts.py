"""The layouts of rows that rotate, from what `row_probe` found out about a class."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from rope_ext_hf.checkpoints.files.tensor_names import TensorName
from rope_ext_hf.checkpoints.rows.head_blocks import HeadBlock, RowLayout
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.rows.row_heads import ClassRows, LayerRows, ModuleRows
from rope_ext_hf.patches.rows.row_probe import common_path


class ProbedLayouts:
    """The layouts in a class, by the names that tensors have inside attention modules.

    Attributes:
        attentions: the names of its attention modules, if they are not usual ones.
        layers: for each layer the row layouts in its attention module, by the modules inside it; empty without RoPE.
        unrotated: the modules and parameters inside an attention module whose rows do not rotate in any layer.
        parts: for tensors that transformers saves under other names than the class has, the modules that they hold:
            both by the names that they have inside a layer.

    Raises:
        UnsupportedModelError: queries and keys are not computed in a module apart.
    """

    def __init__(self, rows: ClassRows) -> None:
        self.attentions = tuple(dict.fromkeys(name for layer in rows.layers for name in _unusual_names(layer)))
        self.layers = tuple(self._layouts(layer, rows.pairing) for layer in rows.layers)
        self.parts = {name: parts for layer in rows.layers for name, parts in layer.parts.items()}
        rotated = {module for layouts in self.layers for module in layouts}
        names = dict.fromkeys(self._inside(name) for layer in rows.layers for name in layer.names)
        modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names if name)
        self.unrotated = tuple(module for module in modules if module not in rotated)

    def _layouts(self, layer: LayerRows, pairing: str) -> dict[str, RowLayout]:
        layouts: dict[str, RowLayout] = {}
        for name, rows in (layer.rotated | layer.saved).items():
            inside = self._inside(f"{name}.weight").removesuffix(".weight")
            layout = _row_layout(rows, pairing)
            if layouts.setdefault(inside, layout) != layout:
                raise UnsupportedModelError(f"{inside!r} rotates in another way in another attention module of a layer")
        return layouts

    def _inside(self, name: str) -> str:
        """Return the name that a tensor of a layer has inside its attention module; "": it is in none."""
        parts = TensorName.parse(f"layers.0.{name}", self.attentions)
        return "" if parts is None else parts.rest


def _unusual_names(layer: LayerRows) -> list[str]:
    """Return the names of the attention module of a layer, in the class and as it is saved, unless they are usual."""
    names = []
    for modules in (layer.rotated, layer.saved):
        if all(TensorName.parse(f"layers.0.{name}.weight") for name in modules):
            continue
        path = common_path(list(modules))
        if not path:
            raise UnsupportedModelError(
                f"{next(iter(modules))!r} rotates, and stands in the layer itself: only rows inside a module for the "
                "attention are known by their names"
            )
        names.append(".".join(path))
    return names


def _row_layout(rows: ModuleRows, pairing: str) -> RowLayout:
    """Return the row layout of a module: its heads, with those that follow each other several times written once.

    `pairing`: that of the attention. A module in the other one keeps it, whatever a conversion does to the attention.
    """
    heads = rows.heads
    period = next(n for n in range(1, len(heads) + 1) if len(heads) % n == 0 and heads == heads[:n] * (len(heads) // n))
    once = heads if period == 1 else heads[:period]
    blocks = []
    for head, group in groupby(once):
        block = HeadBlock(1, head.size, head.rotary, head.start, side=head.side)
        blocks.append(replace(block, count=len(list(group))))
    own = rows.pairing if rows.pairing not in (None, pairing) else None
    return RowLayout(1 if period == 1 else len(heads) // period, tuple(blocks), own)
