"""Models that keep the sine and cosine of every position as a table in their weights: RoFormer of transformers.

The table has one row [sin | cos] for each position up to max_position_embeddings (RoFormer, Su et al. 2021, arXiv
2104.09864). While a model is patched, a rotary module that has no largest position stands in the place of the table.
The state_dict then holds a table of the method, with a row for each position up to the extended length, which plain
transformers loads. All rows of a batch are rotated by the same rows of the table, so a method cannot follow the length
of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.families import family
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, Slot
from rope_ext_hf.patches.slots.slot_finding import rotary_modules


def check_table_method(slots: Sequence[Slot], method: RopeMethod, rotary: Rotary) -> None:
    """Check that a method can replace the tables of angles in a model.

    Raises:
        UnsupportedModelError: the method changes attention, rotates rows of different lengths differently, or has an
            attention factor that would scale the values too.
    """
    for slot in slots:
        if not slot.is_table:
            continue
        model_type = slot.config.model_type
        if isinstance(method, RemappingMethod):
            raise UnsupportedModelError(
                f"the attention of {model_type!r} does not go through transformers' attention interface, so "
                f"{method.name} cannot replace it; use a frequency method"
            )
        if method.depends_on_length(rotary):
            raise UnsupportedModelError(
                f"{model_type!r} rotates all rows of a batch by one table of angles, and the frequencies of "
                f"{method.name} follow the length of each row; use a static method, such as yarn"
            )
        values = family(model_type).rotates_values
        if values and getattr(slot.config, values, False) and method.frequencies(rotary).attention_factor != 1.0:
            raise UnsupportedModelError(
                f"this {model_type!r} rotates its values as well ({values!r} in its config), so the attention factor "
                f"of {method.name} would scale them: use by-parts or ntk, or give attention_factor=1.0"
            )


class PatchedTable(PatchedRotaryEmbedding):
    """The module that stands in the place of a table of angles while a model is patched.

    A state_dict holds the table of the patched model, under the name that the model's class reads. A table in a
    state_dict that is loaded is ignored, because this module computes the angles of the method.
    """

    def forward(  # type: ignore[override]
        self, input_ids_shape: torch.Size, past_length: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the rows [sin | cos] of some positions; the arguments are those of the module that is replaced.

        Args:
            input_ids_shape: (batch, length) of the new tokens.
            past_length: tokens in the cache. Without `position_ids`, the new tokens stand right after them.
            position_ids: integers of any shape.

        Returns:
            The rows, in the dtype of the table: (length, head_dim), or the shape of `position_ids` and then head_dim.
        """
        weight = self.replaced.weight
        assert isinstance(weight, Tensor)
        if position_ids is None:
            end = past_length + input_ids_shape[1]
            position_ids = torch.arange(past_length, end, device=weight.device)
        cos, sin = self.table("all")(weight, position_ids.reshape(1, -1))
        return torch.cat((sin, cos), -1).reshape(*position_ids.shape, -1)

    def _tensors_built_anew(self) -> dict[str, Tensor]:
        return {"weight": _plain_table(self.replaced, self.replaced.num_embeddings)}  # type: ignore[arg-type]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return a state_dict whose `weight` is the table of angles under the method, up to the extended length.

        The table that the model was loaded with is left out.
        """
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        del state[f"{prefix}replaced.weight"]
        with torch.no_grad():  # (positions, head_dim), of every position up to the extended length
            state[f"{prefix}weight"] = self(torch.Size((1, self.state.encoding.saved_length)))
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)
        state_dict[f"{prefix}replaced.weight"] = self.replaced.weight
        super()._load_from_state_dict(state_dict, prefix, *args)


def _plain_table(module: nn.Module, positions: int) -> Tensor:
    """Return the table of angles of plain RoPE for a number of positions, on the CPU, as its class makes it."""
    plain: Any
    with torch.device("cpu"), torch.no_grad():
        plain = type(module)(positions, module.embedding_dim)
        weight: Tensor = plain.create_weight()
    return weight


def restore_table(model: nn.Module, positions: int) -> None:
    """Put the table of plain RoPE back into a model that was loaded with the table of a patch in its weights.

    `positions`: the number of rows that the table had before the patch.
    """
    for _, _, module, config in rotary_modules(model):
        table = module.weight
        assert isinstance(table, Tensor)
        plain = _plain_table(module, positions)
        module.weight = nn.Parameter(plain.to(table.device, table.dtype), requires_grad=False)
        module.num_embeddings = positions  # type: ignore[assignment]
        config.max_position_embeddings = positions
