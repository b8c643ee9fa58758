"""`ConfigEngine`, the base class of the engines that read a model's config.json.

They share the search for config keys with which the engine computes what it should.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import GEOMETRY_KEYS, Config, rotated_dims
from rope_ext_hf.tools.engines import formulas
from rope_ext_hf.tools.engines.base import Engine, list_engines
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Encoding, Target


class ConfigEngine(Engine):
    """Base class of the engines that read a config.json.

    To serve a method, it tries several ways to write the method in the config ("encodings"), and takes the first one
    from which the engine computes the right numbers. A subclass says how its engine reads a config (`read`), and
    overrides the rope types that the engine computes in its own way.
    """

    aliases: ClassVar[Mapping[str, str]] = {"su": "longrope"}
    """Rope types that the engine treats as another one: name -> name of the other one."""
    unknown_type: ClassVar[str] = "has no static rope type {!r}"
    """The predicate of the error on a rope type that the engine does not run; it is filled with the rope type."""

    @abstractmethod
    def read(self, config: Config, length: int | None) -> RopeKeys:
        """Return the rope keys of a config as the engine reads them; arguments and errors are those of `computes`."""

    def computes(self, config: Config, length: int | None = None) -> Computed:
        return self.by_type(self.read(config, length))

    def by_type(self, rope: RopeKeys) -> Computed:
        """Compute frequencies and magnitude by the rule that the engine has for the rope type of `rope`.

        Raises:
            ServingError: the engine has no such rope type, or its settings are missing or wrong.
        """
        kind = self.aliases.get(str(rope.kind), str(rope.kind))
        if kind == "default":
            return rope.computed(formulas.plain(rope.theta, rope.dim))
        rules = {"linear": self.linear, "llama3": self.llama3, "yarn": self.yarn, "longrope": self.longrope}
        return rules.get(kind, self.other)(rope)

    def linear(self, rope: RopeKeys) -> Computed:
        """Compute frequencies by position interpolation (Chen et al. 2023)."""
        return rope.computed(formulas.linear(rope.theta, rope.dim, rope.number("factor")))

    def llama3(self, rope: RopeKeys) -> Computed:
        """Compute frequencies by Llama 3.1's scaling."""
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor")
        low, high, original, factor = map(rope.number, keys)
        return rope.computed(formulas.llama3(rope.theta, rope.dim, factor, original, low, high))

    @abstractmethod
    def yarn(self, rope: RopeKeys) -> Computed:
        """Compute frequencies and magnitude by YaRN (Peng et al. 2023), as the engine implements it."""

    @abstractmethod
    def longrope(self, rope: RopeKeys) -> Computed:
        """Compute frequencies and magnitude by LongRoPE (Ding et al. 2024), as the engine implements it."""

    def other(self, rope: RopeKeys) -> Computed:
        """Compute frequencies by a rope type that only this engine has; by default raise ServingError."""
        raise ServingError(f"{self.title} {self.version} {self.unknown_type.format(rope.kind)}")

    def encodings(self, target: Target) -> Iterator[Encoding]:
        """Yield the ways in which the target's method can be written in a config, the preferred one first.

        The first one from which the engine computes the right numbers is taken.
        """
        yield Encoding("native", target.settings)
        lists = self.equal_lists(target)
        if all(target.inv_freq) or _has_each_pair(target, lists):
            yield Encoding("longrope with equal lists", lists)

    def equal_lists(self, target: Target) -> dict[str, Any]:
        """Return rope settings of the type longrope that give the target's frequencies and magnitude.

        Both lists of divisors are the same, so that the engine computes the same at every length. Any frequencies can
        be written this way.
        """
        kept = {key: value for key, value in target.settings.items() if key in GEOMETRY_KEYS}
        magnitude = target.attention_factor
        return kept | {
            "rope_type": "longrope",
            "rope_theta": target.theta,
            "short_factor": target.divisors,
            "long_factor": target.divisors,
            "factor": max(1.0, target.length / target.original),
            "attention_factor": magnitude,
            "short_mscale": magnitude,
            "long_mscale": magnitude,
            "original_max_position_embeddings": target.original,
        }

    def changes(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        """Return the keys of the text config that must change to write a method in this encoding, with new values."""
        written = {"rope_parameters": target.with_settings(encoding.settings)} | encoding.config
        return {key: value for key, value in written.items() if target.config.get(key) != value}

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the text config that the engine reads when it is started with these changed keys."""
        return {**target.config, **changes}

    @abstractmethod
    def served(self, target: Target, encoding: Encoding, changes: dict[str, Any], computed: Computed) -> ServingConfig:
        """Return the serving config, with command and keys, for an encoding that gives the right numbers."""

    def config_for(self, target: Target) -> ServingConfig:
        encodings_by_reason: dict[str, list[str]] = {}
        for encoding in self.encodings(target):
            try:
                changes = self.changes(target, encoding)
                computed = self.computes(self.config(target, changes), target.length)
            except (ServingError, ArithmeticError) as error:
                encodings_by_reason.setdefault(str(error), []).append(encoding.name)
                continue
            reason = self._refusal(target, encoding, computed)
            if reason is not None:
                encodings_by_reason.setdefault(reason, []).append(encoding.name)
                continue
            served = self.served(target, encoding, changes, computed)
            is_longrope = encoding.name == "native" and target.settings["rope_type"] == "longrope"
            if is_longrope and not target.method.startswith("longrope"):
                return replace(served, encoding="longrope")  # the engine does not know the method itself by name
            return served
        reasons = "; ".join(
            f"{' and '.join(dict.fromkeys(encodings))}: {reason}" for reason, encodings in encodings_by_reason.items()
        )
        raise ServingError(
            f"{self.name} {self.version} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({reasons})"
        )

    def _refusal(self, target: Target, encoding: Encoding, computed: Computed) -> str | None:
        """Return a clause on why the numbers that an encoding gives do not serve the target; None: they do."""
        reason = computed.difference(target.inv_freq, target.attention_factor, target.softmax_scale)
        if reason is None and computed.table is not None and computed.table < target.length:
            reason = f"its table of angles ends at position {computed.table:,}"
        if reason is None and target.layer_type is not None:
            reason = self.moved_theta(target, {**encoding.settings, **encoding.config}["rope_theta"])
        if reason is None or not computed.notes:
            return reason
        return f"{reason} ({' '.join(computed.notes).rstrip('.')})"


def _has_each_pair(target: Target, lists: Config) -> bool:
    """Return whether an engine rotates as many pairs under these settings as the target has; not so in Gemma 4."""
    with suppress(ServingError):  # a config that states no size of its heads
        return rotated_dims(target.config, lists) == 2 * len(target.inv_freq)
    return False


def other_engines() -> list[Engine]:
    """Return the engines to compare with the reference, transformers 5.

    They are all others that read a config.json, and former major versions such as transformers 4.
    """
    engines: list[Engine] = []
    for cls in list_engines().values():
        if not issubclass(cls, ConfigEngine):
            continue
        if cls.former is not None:
            engines.append(cls.former())
        if not cls.reference:
            engines.append(cls())
    return engines
