"""Base class of the engines that read config.json as transformers 4 wrote it, and take no overrides of it.

transformers 4 wrote `rope_theta` and `rope_scaling` at the top level; transformers 5 writes `rope_parameters`. Since
these engines have no option that overrides the config, the keys are written into a copy of the model's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, text_settings
from rope_ext_hf.tools.engines.base import NotCheckedError
from rope_ext_hf.tools.engines.config_engine import ConfigEngine
from rope_ext_hf.tools.engines.formulas import longrope_magnitude
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Encoding, Target


class FormerSpellingEngine(ConfigEngine):
    """Base class of the engines that are given a method by changing config.json in a copy of the model's folder.

    They read the keys as transformers 4 wrote them: `rope_theta` and `rope_scaling`.
    """

    loads_config = False
    where: ClassVar[str] = "Write these keys into config.json in a copy of the model's folder, FOLDER."

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
            if encoding.name != "native" and magnitude >= 1:
                # `longrope_magnitude` solved for the original length: the engine computes the magnitude from it
                original = target.length ** (1 / magnitude**2)
                settings["original_max_position_embeddings"] = int(original) if original == int(original) else original
            yield Encoding(encoding.name, settings, changed)

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        """Change YaRN's rope settings and other config keys in place, so that the engine gets the target's magnitude.

        By default nothing is changed. `settings` become `rope_scaling`, and `changed` are keys at the top level of the
        config.
        """

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        return {**target.config, "rope_parameters": None, **changes}

    def changes(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        kind = encoding.settings["rope_type"]
        if self.table["families"].get(target.model_type, {}).get("rope_parameters") is True:  # the only key it reads
            settings = encoding.settings | {"rope_theta": encoding.config["rope_theta"]}
            return {"max_position_embeddings": target.length, "rope_parameters": settings}
        scaling = None if kind == "default" else encoding.settings | {"type": kind}
        local = {}
        if target.layer_type is not None:
            sliding = target.patched["rope_parameters"].get("sliding_attention")
            local = {"rope_local_base_freq": sliding["rope_theta"]} if sliding else {}
        return encoding.config | local | {"rope_scaling": scaling}

    def command(self, target: Target) -> tuple[str, ...]:
        """Return the command line that serves the changed copy of the model's folder, called FOLDER.

        By default it is empty: another program serves the folder.
        """
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
        """Return the text config with the rope keys where the engine looks for them, and the model type.

        Raises:
            NotCheckedError: the engine's table does not have this family.
        """
        text = text_settings(config)
        model_type = str(text.get("model_type"))
        if model_type not in self.table["families"]:
            raise NotCheckedError(f"this package does not know which keys the engine's code for {model_type!r} reads")
        parameters = text.get("rope_parameters") or {}
        reads_parameters = self.table["families"][model_type].get("rope_parameters")
        if reads_parameters is True:
            text |= {"rope_scaling": parameters, "rope_theta": None}
        elif reads_parameters == "else":  # only for what the older keys do not state
            text["rope_scaling"] = text.get("rope_scaling") or parameters
            text["rope_theta"] = text.get("rope_theta") or parameters.get("rope_theta")
        return text, model_type

    def passed_type(self, model_type: str, kind: str) -> tuple[str, tuple[str, ...]]:
        """Return the rope type that the engine really uses for a model family, given the type `kind` of the config.

        Some families ignore the config's type; the second value then is a note that says so, else it is empty.

        Raises:
            ServingError: the engine's code for this family refuses the rope type.
        """
        types = self.table["families"][model_type].get("types")
        if types is None or kind in types or kind == "default":
            return kind, ()
        if self.table["families"][model_type].get("stops"):
            raise ServingError(f"the engine's code for {model_type!r} stops at the rope type {kind!r}")
        return "default", (f"{model_type}: the rope type {kind} is ignored.",)

    def longrope(self, rope: RopeKeys) -> Computed:
        """Compute LongRoPE as engines do that use the list `long_factor` for every input, however short."""
        original = rope.number("original_max_position_embeddings")
        notes: tuple[str, ...] = ()
        inv_freq = rope.divided("long_factor")
        if rope.settings.get("short_factor") != rope.settings["long_factor"]:
            notes = ("longrope: every input gets the long list.",)
        return rope.computed(inv_freq, longrope_magnitude(rope.most / original, original), *notes)


def set_length_for_factor(settings: Config, changed: dict[str, Any]) -> None:
    """Set max_position_embeddings to YaRN's factor times the original length.

    Some engines take the quotient of these two lengths as the factor.
    """
    length = settings["factor"] * settings["original_max_position_embeddings"]
    if length == int(length):
        changed["max_position_embeddings"] = int(length)
