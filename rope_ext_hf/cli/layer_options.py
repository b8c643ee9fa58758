"""The option that chooses the layers of a patch, on commands that patch one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rope_ext_hf.cli.options import PatchOptions, split_list
from rope_ext_hf.errors import MethodError


@dataclass(frozen=True)
class LayerOptions(PatchOptions):
    """One method with one factor, for the layers that attend to everything or for others."""

    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Layers to change, by layer type or number, e.g. sliding_attention or 0,2; default: those that "
            "attend to everything. Layers that share a rotary embedding change together.",
        ),
    ] = None

    def check_single(self, *, required: bool = False) -> None:
        if self.layers is not None and not self.names:
            raise MethodError("--layers given without a method; add --method")
        super().check_single(required=required)

    @property
    def choice(self) -> dict[str, Any]:
        if self.layers is None:
            return {}
        return {"layers": [int(part) if part.isdigit() else part for part in split_list([self.layers])]}
