"""`Engine`, the base class of all serving engines, and the table in which the engines are registered.

An engine class has two tasks. It computes the RoPE frequencies that the real engine would compute from a config. And it
finds the config with which the real engine computes the frequencies that a model was measured with in this package.

>>> engine = find_engine("vllm")
>>> computed = engine.computes({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768,
...                             "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}})
>>> computed.length
131072
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError, UnknownMethodError, entry
from rope_ext_hf.files.whole import package_table
from rope_ext_hf.models.config_keys import Config
from rope_ext_hf.tools.engines.keys import Computed
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Target


class NotCheckedError(ServingError):
    """An error for a family of models for which this package does not know how an engine computes RoPE."""


@functools.cache
def engine_table(file: str) -> dict[str, Any]:
    """Read an engine's table, `file`.toml: the model families that it runs, and how the rules for each were checked.

    Returns:
        A dict with these keys, empty where the file does not have them:

        families: the properties of each family that the engine's rules need, by model_type.
        refused: reason -> the model types that the engine does not run for this reason.
        run: model types that were run in the engine.
        classes: model types whose frequencies were computed by the engine's own rotary classes, apart from the engine.
            The rules for all other families were read in its source.
        unrun: reason -> the model types that could not be run for this reason.
        usual: the numbers that the engine takes for missing keys, by rope type.
        when: the date on which the rules were checked.
    """
    table: dict[str, Any] = {
        "families": {},
        "refused": {},
        "run": [],
        "classes": [],
        "unrun": {},
        "usual": {},
        "when": "",
    }
    if file:
        table |= package_table("rope_ext_hf.tools.engines", f"programs/{file}.toml")
    return table


class Engine(ABC):
    """Base class of the serving engines; a subclass has the rules by which one version of an engine computes RoPE."""

    name: ClassVar[str] = ""
    """The name under which it is registered."""
    title: ClassVar[str] = ""
    """The name as the makers of the engine write it; empty: `name`."""
    version: ClassVar[str]
    """The version whose source the rules were taken from."""
    oldest: ClassVar[tuple[str, str] | None] = None
    """The first version that takes these configurations, and the reason why an older one does not, in a clause."""
    newest: ClassVar[tuple[str, str] | None] = None
    """The first version with other rules, and what is different there, in a clause."""
    former: ClassVar[type[Engine] | None] = None
    """An earlier major version that is still in use and has rules of its own."""
    reference: ClassVar[bool] = False
    """Whether the other engines are compared with this one."""
    usual_server: ClassVar[bool] = False
    """Whether commands are for this engine if the user names none; true for exactly one engine."""
    follows_input: ClassVar[bool] = False
    """Whether the engine chooses frequencies anew for every input, instead of once when it starts."""
    loads_config: ClassVar[bool] = True
    """Whether the engine takes the config as transformers loads it, with the default theta where none is stated."""
    rules_of: ClassVar[str] = ""
    """The engine whose program this one runs, by name, so that a comparison lists only one of them; empty: none."""
    file_suffix: ClassVar[str] = ".json"
    """The suffix of the file that the engine reads."""
    drafts: ClassVar[str] = ""
    """Sentences on the parts of a configuration that reach a draft of speculative decoding; empty: not known."""
    on_gpus: ClassVar[str] = ""
    """A template of the options for the GPUs of a server, filled with `GPUMemory.options`; empty: not known."""
    table: ClassVar[Mapping[str, Any]] = engine_table("")
    """The families that it runs, as `engine_table` returns them; by default none is known."""

    @property
    def label(self) -> str:
        """The engine's title with its version."""
        return f"{self.title or self.name} {self.version.removesuffix('.0')}"

    @abstractmethod
    def computes(self, config: Config, length: int | None = None) -> Computed:
        """Compute frequencies and magnitude from a model's config as the engine does.

        Args:
            config: the contents of config.json; for a composite model with the `text_config` in it.
            length: the length in tokens that the engine is started for; None: its default.

        Raises:
            ServingError: the engine refuses the config, or its rules for this family are unknown.
        """

    @abstractmethod
    def config_for(self, target: Target) -> ServingConfig:
        """Return the command and config keys with which this engine computes the frequencies and magnitude of a target.

        Raises:
            ServingError: the engine cannot be made to compute them; the message gives the reason.
        """

    def with_plugin(self) -> Engine:
        """Return this engine as it computes with this package's plug-in loaded.

        Raises:
            ServingError: this package has no plug-in for the engine.
        """
        names = ", ".join(name for name, engine in _ENGINES.items() if engine.has_plugin())
        raise ServingError(
            f"this package has no plug-in for {self.name}, only for {names}; leave out --plugin, or choose one of these"
        )

    @classmethod
    def has_plugin(cls) -> bool:
        """Return whether this package has a plug-in for the engine."""
        return cls.with_plugin is not Engine.with_plugin

    def serving(self, target: Target, encoding: str, computed: Computed, **fields: Any) -> ServingConfig:
        """Return a serving config for a target: `fields`, and the fields that are filled in alike for all engines."""
        fields["notes"] = (*fields.get("notes", ()), *self.caveat(target.model_type))
        return ServingConfig(
            self.name, self.version, encoding, target.method, target.length, computed=computed, **fields
        )

    def gpu_options(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the words of the command line that tell the engine about the GPUs of the server.

        `values` are those of `GPUMemory.options`.

        Raises:
            ServingError: the options of this engine are not known.
        """
        if not self.on_gpus:
            names = " and ".join(name for name, engine in _ENGINES.items() if engine.on_gpus)
            raise ServingError(f"options for GPUs are known for {names}, not for {self.name}; leave out --gpus")
        return tuple(self.on_gpus.format(**values).split())

    def checked(self, model_type: str) -> str:
        """Return how this package's rules for a model family were checked.

        Returns:
            "run": they were compared with the engine itself. "classes": they were compared with the engine's own rotary
            classes, run apart from it. "read": they were read in its source, and nothing was run.
        """
        if model_type in self.table["run"]:
            return "run"
        return "classes" if model_type in self.table["classes"] else "read"

    @property
    def was_run(self) -> bool:
        """True if the rules for at least one family were checked by running the engine or its rotary classes."""
        return self.reference or bool(self.table["run"] or self.table["classes"])

    def caveat(self, model_type: str) -> tuple[str, ...]:
        """Return a one-sentence warning, as a tuple, if the rules for a family were never run; else an empty tuple."""
        if self.checked(model_type) != "read":
            return ()
        reasons = [reason for reason, families in self.table["unrun"].items() if model_type in families]
        why = "".join(f": {reason}" for reason in reasons)
        return (f"The rules for {model_type!r} were read in the source of {self.label}, not run{why}.",)

    def check_family(self, target: Target) -> None:
        """Raise a ServingError if the engine does not run the target's model family as transformers does."""
        for reason, model_types in self.table["refused"].items():
            if target.model_type in model_types:
                raise ServingError(
                    f"{self.name} {self.version} cannot serve {target.method} on this {target.model_type!r} model "
                    f"({reason})"
                )

    def moved_theta(self, target: Target, theta: float) -> str | None:
        """Return the reason why a `rope_theta` would harm layers that the method leaves alone; None: it would not.

        Engines that take one theta for all layers would apply it to the sliding-window layers too.
        """
        if self.table["families"].get(target.model_type, {}).get("sliding") != "theta":
            return None
        own = target.config["rope_parameters"][target.layer_type]["rope_theta"]
        return None if theta == own else "it takes one theta for all layers, and the method is for some of them"

    def check_version(self, version: str | None) -> tuple[str, ...]:
        """Return notes for a user whose version of the engine differs from the one whose rules are known here.

        Raises:
            ServingError: `version` is not a version number, or that version does not take these configurations.
        """
        if version is None or version == self.version:
            return ()
        if not re.fullmatch(r"[vb]?[0-9]+(\.[0-9]+)*[a-z0-9.+-]*", version):
            raise ServingError(f"{version!r} is not a version number; give one such as {self.version}")
        if self.oldest is not None and _numbers(version) < _numbers(self.oldest[0]):
            raise ServingError(f"{self.name} before {self.oldest[0]}: {self.oldest[1]}")
        if self.newest is not None and _numbers(version) >= _numbers(self.newest[0]):
            raise ServingError(f"{self.name} from {self.newest[0]} on: {self.newest[1]}")
        return (f"The rules are those of {self.name} {self.version}; they were not checked against {version}.",)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:3]]


_ENGINES: dict[str, type[Engine]] = {}


def register_engine(name: str) -> Callable[[type[Engine]], type[Engine]]:
    """Return a class decorator that registers an engine under `name`.

    Raises:
        ValueError: another engine has this name already.
    """

    def register(cls: type[Engine]) -> type[Engine]:
        if name in _ENGINES:
            raise ValueError(f"an engine is registered as {name!r} already")
        cls.name = name
        _ENGINES[name] = cls
        return cls

    return register


def list_engines() -> dict[str, type[Engine]]:
    """Return the classes of all engines by name; the reference engine, transformers, comes first."""
    return dict(sorted(_ENGINES.items(), key=lambda item: not item[1].reference))


def find_engine(name: str) -> Engine:
    """Return the engine with this name.

    Raises:
        UnknownMethodError: no engine has this name.
    """
    return entry("engine", name, list_engines(), UnknownMethodError)()


def reference_engine() -> Engine:
    """Return the engine that all others are compared with: transformers."""
    return next(engine() for engine in list_engines().values() if engine.reference)


def usual_server() -> str:
    """Return the name of the engine that `rope-ext` prints commands for if the user names none."""
    return next(name for name, engine in list_engines().items() if engine.usual_server)
