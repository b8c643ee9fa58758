"""The lengths at which `fixed_length` holds a model, whatever patch it has while the block lasts.

A hold is kept by the rotary modules that the model was loaded with. They stay with the model while patches come and go,
so that a patch that is put on inside the block is held as well. Copies and pickles of the model are not held: they may
outlive the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, tables_of


@dataclass(frozen=True, eq=False)
class _Hold:
    """A length in tokens at which rotary modules are held, until the stack of their `at_length` blocks is closed."""

    length: int
    blocks: ExitStack = field(default_factory=ExitStack)

    def add(self, slot: PatchedRotaryEmbedding) -> None:
        """Hold the length-dependent rotary modules of a slot."""
        for table in tables_of([slot]):
            if table.method.depends_on_length(table.rotary):
                self.blocks.enter_context(table.at_length(self.length))


_holds: WeakKeyDictionary[nn.Module, list[_Hold]] = WeakKeyDictionary()
"""The holds under way, the outermost first, by the rotary module that a model was loaded with."""


@contextmanager
def held_at(replaced: Iterable[nn.Module], slots: Iterable[PatchedRotaryEmbedding], length: int) -> Iterator[None]:
    """Hold the slots of a model at a length inside the with block, and those that are patched anew inside it.

    Args:
        replaced: the rotary modules that the model was loaded with.
        slots: the modules that stand in their place; none in an unpatched model.
        length: in tokens.

    Raises:
        LengthError: another thread holds the model.
    """
    modules, hold = list(dict.fromkeys(replaced)), _Hold(length)
    with hold.blocks:
        for slot in slots:
            hold.add(slot)
        for module in modules:
            _holds.setdefault(module, []).append(hold)
        try:
            yield
        finally:
            for module in modules:
                _holds[module].remove(hold)


def hold_again(slots: Iterable[PatchedRotaryEmbedding]) -> None:
    """Hold slots that were patched inside `fixed_length` at its length."""
    for slot in slots:
        for hold in _holds.get(slot.replaced, ()):
            hold.add(slot)
