"""Engines that read top-level `rope_theta` and `rope_scaling`, as transformers 4 wrote them, and take no overrides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.patches.config_keys import Config, text_settings
from rope_ext_hf.tools.engines.base import ConfigEngine, Encoding, NotCheckedError, ServingConfig, Target
from rope_ext_hf.tools.engines.formulas import longrope_magnitude
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys


class FormerSpellingEngine(ConfigEngine):
    """Base of engines for which the keys are written into a copy of the folder."""

    where: ClassVar[str] = "Write these keys into config.json of a copy of the model, FOLDER."

    def encodings(self, target: Target) -> Iterator[Encoding]:
        self.check_family(target)
        for encoding in super().encodings(target):
            settings = {key: value for key, value in encoding.settings.items() if key != "rope_theta"}
            theta = encoding.settings["rope_theta"]
            changed: dict[str, Any] = {"max_position_embeddings": target.length, "rope_theta": theta}
            if "partial_rotary_factor" in settings:
                changed["partial_rotary_factor"] = settings["partial_rotary_factor"]
            if settings["rope_type"] == "yarn":
                self.write_yarn(target, settings, changed)
            magnitude = target.attention_factor
            if encoding.name != "native" and magnitude >= 1:  # the original length from which it computes this
                reach = target.length ** (1 / magnitude**2)
                settings["original_max_position_embeddings"] = int(reach) if reach == int(reach) else reach
            yield Encoding(encoding.name, settings, changed)

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        """Change the settings of a yarn, and the further keys, so that the engine computes the target's magnitude."""

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        return {**target.config, "rope_parameters": None, **changes}

    def changes(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        kind = encoding.settings["rope_type"]
        if self.table["families"].get(target.model_type, {}).get("rope_parameters") is True:  # and nothing else
            settings = encoding.settings | {"rope_theta": encoding.config["rope_theta"]}
            return {"max_position_embeddings": target.length, "rope_parameters": settings}
        scaling = None if kind == "default" else encoding.settings | {"type": kind}
        local = {}
        if target.layer_type is not None:
            sliding = target.patched["rope_parameters"].get("sliding_attention")
            local = {"rope_local_base_freq": sliding["rope_theta"]} if sliding else {}
        return encoding.config | local | {"rope_scaling": scaling}

    def command(self, target: Target) -> tuple[str, ...]:
        """The command line that serves FOLDER; empty where another program serves it."""
        return ()

    def served(self, target: Target, encoding: Encoding, changes: dict[str, Any], computed: Computed) -> ServingConfig:
        return self.serving(
            target,
            encoding.name,
            computed,
            command=self.command(target),
            config_keys=target.placed(changes),
            notes=(*computed.notes, self.where),
        )

    def known_text(self, config: Config) -> tuple[dict[str, Any], str]:
        """The text config and its model type; NotCheckedError for an unknown family."""
        text = text_settings(config)
        model_type = str(text.get("model_type"))
        if model_type not in self.table["families"]:
            raise NotCheckedError(f"which keys its file for {model_type!r} reads was not checked")
        inside, read = text.get("rope_parameters") or {}, self.table["families"][model_type].get("rope_parameters")
        if read is True:
            text |= {"rope_scaling": inside, "rope_theta": None}
        elif read == "else":
            scaling, theta = text.get("rope_scaling") or inside, text.get("rope_theta") or inside.get("rope_theta")
            text |= {"rope_scaling": scaling, "rope_theta": theta}
        return text, model_type

    def reached(self, model_type: str, kind: str) -> tuple[str, tuple[str, ...]]:
        """The rope type that reaches the rotary class of a family's file, with a note where it is another one."""
        types = self.table["families"][model_type].get("types")
        if types is None or kind in types or kind == "default":
            return kind, ()
        if self.table["families"][model_type].get("stops"):
            raise ServingError(f"its file for {model_type!r} stops at the rope type {kind!r}")
        return "default", (f"{model_type}: the rope type {kind} is dropped.",)

    def longrope(self, rope: RopeKeys) -> Computed:
        """One list for every input."""
        original = rope.number("original_max_position_embeddings")
        notes: tuple[str, ...] = ()
        inv_freq = rope.divided("long_factor")
        if rope.settings.get("short_factor") != rope.settings["long_factor"]:
            notes = ("longrope: the long list for every input.",)
        return rope.computed(inv_freq, longrope_magnitude(rope.most / original, original), *notes)


def later_factor(settings: Config, changed: dict[str, Any]) -> None:
    """State the length from which an engine gets a yarn's factor: it divides by the original length."""
    reach = settings["factor"] * settings["original_max_position_embeddings"]
    if reach == int(reach):
        changed["max_position_embeddings"] = int(reach)
