"""The methods of a run on one model, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patched, patched_method
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.runs.conclusions.labels import Method, label, method_key
from rope_ext_hf.runs.folder.identity import basis_of_patches, find_basis
from rope_ext_hf.runs.measurement import RunPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _MeasuredMethod:
    """A method that is measured.

    Attributes:
        method: the method; None: the model as it is.
        saved: `RopeMethod.to_dict` of it, which stands for it in results; None: the model as loaded.
    """

    method: RopeMethod | None
    saved: Method

    @property
    def key(self) -> str:
        """The key of the method in results."""
        return method_key(self.saved)

    @property
    def label(self) -> str:
        """The name of the method for readers, such as "yarn x4"."""
        return label(self.saved)


class MeasuredMethods:
    """The methods that a plan measures on one model; iterating yields them, each once.

    Args:
        model: patched or not.
        plan: the plan.

    Attributes:
        loaded: `RopeMethod.to_dict` of the method that the model is patched with already, if the plan also measures the
            model as it is; else None.
        rope: the rope of the model, for patches with the arguments of the plan.
        basis: what the methods are applied to, see `find_basis`.

    Raises:
        MethodError: the method that the model is patched with would be measured twice, on two different states of the
            model.
    """

    def __init__(self, model: PreTrainedModel, plan: RunPlan[Any]) -> None:
        self.model, self._plan = model, plan
        present = patched_method(model)
        methods = plan.methods or (present,)
        self.loaded: Method = present.to_dict() if present is not None and None in methods else None
        self.rope = ModelRope.of_model(model).extending(plan.over, plan.context_length)
        self.basis = find_basis(self.rope, methods)
        every = [_MeasuredMethod(method, self.loaded if method is None else method.to_dict()) for method in methods]
        self._by_key = {method.key: method for method in every}
        if self.loaded is None or self._by_key[method_key(self.loaded)].method is None:
            return
        if self.basis != basis_of_patches(active_patches(model)):
            raise MethodError(
                f"the model is patched with {label(self.loaded)} already; to measure that method with another over or "
                "context_length, or in other layers, give the model without its patch"
            )

    def __iter__(self) -> Iterator[_MeasuredMethod]:
        return iter(self._by_key.values())

    def applied(self, method: _MeasuredMethod) -> AbstractContextManager[Any]:
        """Patch the model with a method inside the `with` block, unless the model already has it in the same place."""
        patches = active_patches(self.model)
        is_present = bool(patches) and method.method == patches[-1].method and self.basis == basis_of_patches(patches)
        if method.method is None or is_present:
            return nullcontext()
        return patched(self.model, method.method, over=self._plan.over, context_length=self._plan.context_length)
