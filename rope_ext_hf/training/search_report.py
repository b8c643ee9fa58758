"""What a search came to, as it is printed and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SearchReport"]

Gain = tuple[float, float, float]
"""A difference in nats per token, and the ends of its 95% interval."""


@dataclass(frozen=True)
class SearchReport:
    """What a search came to. Losses are in nats per token, on documents that the search did not read.

    Attributes:
        settings: the arguments.
        context_length, target_length: in tokens.
        method: `RopeMethod.to_dict` of what was chosen.
        label: in which stage it came up, and from what.
        losses: of the model as loaded, of every fixed method and of the chosen one, by length.
        gains: by how much the chosen one is lower than each at the target length.
        lost: how much higher it is than the model as loaded at the context length.
        key_losses, key_gains: the same over key tokens at the target length; empty where another fitness counted.
        keys_by: what found the key tokens, and how many of the measured tokens they are.
        trials, stopped: how many candidates were read, and how many of them not to the end.
        seconds, cpu_seconds: of the search; those of interrupted runs count, measuring and loading do not.
        folder: of the patched model.
        loads_plainly: whether transformers alone loads it as it is; else it takes `rope_ext_hf.from_pretrained`.
    """

    settings: dict[str, Any]
    context_length: int
    target_length: int
    method: dict[str, Any]
    label: str
    losses: dict[str, dict[str, float]]
    gains: dict[str, Gain]
    lost: Gain
    key_losses: dict[str, dict[str, float]]
    key_gains: dict[str, Gain]
    keys_by: str
    trials: int
    stopped: int
    seconds: float
    cpu_seconds: float
    folder: str
    loads_plainly: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @property
    def best_fixed(self) -> str:
        """The fixed method with the lowest loss at the target length."""
        fixed = [name for name in self.losses if name not in ("as loaded", "chosen")]
        return min(fixed, key=lambda name: self.losses[name][str(self.target_length)])

    def __str__(self) -> str:
        lines = _table("nats per token", self.losses, self.gains)
        if self.key_losses:
            lines += ["", *_table("nats per key token", self.key_losses, self.key_gains), f"key tokens: {self.keys_by}"]
        mean, low, high = self.lost
        factor = f"{self.target_length / self.context_length:g}"
        command = f"rope-ext ppl {self.folder} --lengths {self.context_length},{self.target_length}"
        return "\n".join(
            [
                *lines,
                "",
                f"chosen: {self.label}; it loses {mean:.4f} [{low:.4f}, {high:.4f}] at 1x",
                f"{self.trials} trials, {self.stopped} of them stopped early, in {self.seconds / 60:.1f} minutes "
                f"({self.cpu_seconds:.0f} CPU seconds)",
                f"The model, extended {factor} times, is in {self.folder} and loads "
                f"{'plainly' if self.loads_plainly else 'with rope_ext_hf.from_pretrained'}; measure it on other text "
                f"with `{command} --data TEXT`.",
            ]
        )


def _table(head: str, losses: Mapping[str, Mapping[str, float]], gains: Mapping[str, Gain]) -> list[str]:
    """A line per method: its losses by length, and by how much the chosen one's is lower."""
    lengths = list(next(iter(losses.values())))
    width = max(map(len, (*losses, head))) + 2
    lines = [f"{head:{width}}" + "".join(f"{int(n):>10,}" for n in lengths) + "   chosen is lower by"]
    for name, row in losses.items():
        gain = gains.get(name)
        shown = "" if gain is None else f"   {gain[0]:.4f} [{gain[1]:.4f}, {gain[2]:.4f}]"
        lines.append(f"{name:{width}}" + "".join(f"{row[n]:>10.4f}" for n in lengths) + shown)
    return lines
