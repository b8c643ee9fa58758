"""An engine as a value: its numbers for a config, and the config by which it computes the measured ones.

>>> engine = find_engine("vllm")
>>> computed = engine.computes({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768,
...                             "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}})
>>> computed.length
131072
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError, UnknownMethodError, entry, short
from rope_ext_hf.files import package_table
from rope_ext_hf.patches.config_keys import GEOMETRY_KEYS, Config
from rope_ext_hf.terminal import Rows, ShownAsTables, wrapped
from rope_ext_hf.tools.engines import formulas
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys


class NotCheckedError(ServingError):
    """A family whose rules in an engine are not written down here."""


@functools.cache
def engine_table(file: str) -> dict[str, Any]:
    """The table of an engine in `file`.toml: which families it runs, and how each of them was checked.

    `families` holds what the engine's rules need of a family, by model_type; `refused` the model types that it does not
    run, by the reason; `run` and `classes` those that were run in it, or computed by its own rotary classes. The rules
    of all others were read in its source; `unrun` holds those that could not be run, by the reason. `usual` has the
    numbers that the engine takes for missing keys, by rope type.
    """
    nothing: dict[str, Any] = {key: {} for key in ("families", "refused", "unrun", "usual")}
    nothing |= {"run": [], "classes": [], "when": ""}
    return nothing | (package_table("rope_ext_hf.tools.engines", f"{file}.toml") if file else {})


@dataclass(frozen=True, eq=False)
class Target:
    """A model with its method, as it was measured and as an engine is to compute it; two targets are never equal."""

    model: str  # the folder or Hub id, for the commands
    config: Config  # the text config before the method, in the spelling of transformers 5
    patched: Config  # the text config with the method in it
    composite: bool  # whether the text config lies under `text_config` of the model's config
    layer_type: str | None  # the layers that the method applies to; None: all
    inv_freq: tuple[float, ...]  # measured, as the next two, see `Computed`
    attention_factor: float
    softmax_scale: float
    theta: float  # the base
    original: int  # tokens, the length without any scaling
    length: int  # tokens to serve
    method: str  # for messages
    notes: tuple[str, ...] = ()  # the layers that the method does not reach, and what else a user must hear
    mistral_format: bool = False  # whether its folder holds params.json, Mistral's own format, beside config.json

    @functools.cached_property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The rope settings that transformers would save, of the layers that the method applies to."""
        parameters = self.patched["rope_parameters"]
        settings = dict(parameters if self.layer_type is None else parameters[self.layer_type])
        settings.setdefault("rope_type", settings.get("type", "default"))
        return settings

    @functools.cached_property
    def divisors(self) -> list[float]:
        """theta_i divided by the measured frequencies."""
        dim = 2 * len(self.inv_freq)
        return [float(self.theta) ** (-2 * i / dim) / value for i, value in enumerate(self.inv_freq)]

    def placed(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Keys of the text config where the model's config has them: under `text_config` in a composite one."""
        return {"text_config": keys} if self.composite and keys else keys

    def with_settings(self, settings: Config) -> dict[str, Any]:
        """`rope_parameters` with these settings in the layers that the method applies to."""
        if self.layer_type is None:
            return dict(settings)
        layers = {key: value for key, value in self.patched["rope_parameters"].items() if isinstance(value, Mapping)}
        return layers | {self.layer_type: dict(settings)}


@dataclass(frozen=True)
class Encoding:
    """One way to write a method for an engine: rope settings, and how they are named in a report."""

    name: str
    settings: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)  # further keys of the text config


@dataclass(frozen=True, repr=False)
class ServingConfig(ShownAsTables):
    """How to have an engine serve what was measured; as text it is a block to copy.

    Attributes:
        engine, version: the engine, and the version whose source its rules were taken from.
        encoding: "native" where the engine's own name of the method does it, else how the frequencies are written.
        method: the method, for messages.
        length: tokens served.
        command: the command line, one argument each.
        overrides: the JSON that the command line carries.
        config_keys: keys to write into config.json instead, or where the engine takes no overrides.
        gguf_keys: metadata to write into the GGUF file.
        gguf_tensors: float32 tensors to write into it, by name.
        gguf_removed: tensors to leave out of it.
        computed: the numbers that the engine computes then.
        notes: further remarks.
        by_folder: two command lines that do the same by a patched folder, which the engine reads as it is; empty: it
            does not, or the command line needs no overrides.
    """

    engine: str
    version: str
    encoding: str
    method: str
    length: int
    command: tuple[str, ...] = ()
    overrides: dict[str, Any] | None = None
    config_keys: dict[str, Any] = field(default_factory=dict)
    gguf_keys: dict[str, Any] = field(default_factory=dict)
    gguf_tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    gguf_removed: tuple[str, ...] = ()
    computed: Computed | None = None
    notes: tuple[str, ...] = ()
    by_folder: tuple[str, ...] = field(default=(), compare=False)

    @property
    def _heading(self) -> str:
        return f"{self.method}, {self.length:,} tokens, {self.engine} {self.version}: {self.encoding}"

    @property
    def _command(self) -> str:
        words = map(shlex.quote, self.command)
        return " ".join([f"\\\n  {word}" if word.startswith("--") else word for word in words])

    @property
    def _files(self) -> Rows:
        """What goes into files, each under a name."""
        keys = self.config_keys if self.config_keys != self.overrides else {}
        tensors = (
            (f"GGUF tensor {name}, {len(values)} x float32", short(", ".join(map(str, values)), 60))
            for name, values in self.gguf_tensors.items()
        )
        named = [
            ("Shorter, a folder that carries the method", "\n".join(self.by_folder)),
            ("config.json", json.dumps(keys, indent=2) if keys else ""),
            ("GGUF metadata", "\n".join([f"{key} = {value}" for key, value in self.gguf_keys.items()])),
            *tensors,
            ("GGUF tensors to leave out, where they are there", ", ".join(self.gguf_removed)),
        ]
        return [(name, text) for name, text in named if text]

    def tables(self) -> Sequence[Rows]:
        command = [("command", self._command)] if self.command else []
        return [[("serves", self._heading), *(("note", note) for note in self.notes), *command, *self._files]]

    def __str__(self) -> str:
        blocks = [f"# {name}:\n{text}" if "\n" in text else _remark(f"{name}: {text}") for name, text in self._files]
        return "\n".join(filter(None, [*map(_remark, (self._heading, *self.notes)), self._command, *blocks]))


def _remark(text: str) -> str:
    return wrapped(text, "# ", "# ")


class Engine(ABC):
    """Base of all engines; `computes` holds the rules of one version of the engine."""

    name: ClassVar[str] = ""
    version: ClassVar[str]  # the version whose source the rules were taken from
    title: ClassVar[str] = ""  # the engine as its makers write it; empty: its name
    follows_input: ClassVar[bool] = False
    """Whether the engine chooses frequencies for every input, and not once when it starts."""
    oldest: ClassVar[tuple[str, str] | None] = None
    """The first version that takes such a configuration, and why an older one does not."""
    newest: ClassVar[tuple[str, str] | None] = None  # the first version with other rules, in words that go on after it
    reference: ClassVar[bool] = False  # whether the others are compared with it
    usual_server: ClassVar[bool] = False  # whether commands are for it where no engine is named; one has it
    drafts: ClassVar[str] = ""
    """The parts of such a configuration that reach a draft of speculative decoding, in sentences; empty: not known."""
    former: ClassVar[type[Engine] | None] = None  # a former major version that is still in use, with rules of its own
    rules_of: ClassVar[str] = ""
    """The engine whose program this one runs, so that a comparison need not list both; empty: its own."""
    on_gpus: ClassVar[str] = ""
    """The options for the GPUs of a server, to be filled with those of `GPUMemory`; empty: not known."""
    file_suffix: ClassVar[str] = ".json"  # suffix of the file that the engine reads
    table: ClassVar[Mapping[str, Any]] = engine_table("")
    """What is known of families in it, see `engine_table`; by default nothing."""

    @property
    def label(self) -> str:
        """The engine with its version."""
        return f"{self.title or self.name} {self.version.removesuffix('.0')}"

    @abstractmethod
    def computes(self, config: Config, length: int | None = None) -> Computed:
        """Compute frequencies and magnitude from a config.json as the engine does.

        Args:
            config: the config as a plain dict; a composite one with its `text_config`.
            length: tokens it is started for; None: its default.

        Raises:
            ServingError: the engine refuses the config, or its rules for this family are unknown.
        """

    @abstractmethod
    def config_for(self, target: Target) -> ServingConfig:
        """How to have this engine serve what was measured.

        Raises:
            ServingError: no encoding that the engine reads computes the same; the message gives the reason.
        """

    def with_plugin(self) -> Engine:
        """This engine with the plug-in of this package loaded; ServingError where there is none for it."""
        having = ", ".join(name for name, engine in _ENGINES.items() if engine.with_plugin is not Engine.with_plugin)
        raise ServingError(f"there is no plug-in of this package for {self.name}; there is one for {having}")

    def serving(self, target: Target, encoding: str, computed: Computed, **how: Any) -> ServingConfig:
        """The result of `config_for`, from the fields that engines fill in differently (`how`)."""
        how["notes"] = (*how.get("notes", ()), *self.caveat(target.model_type))
        return ServingConfig(self.name, self.version, encoding, target.method, target.length, computed=computed, **how)

    def options_on(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """The options for the GPUs of a server, from those of `GPUMemory`; ServingError: they are not known."""
        if not self.on_gpus:
            having = " and ".join(name for name, engine in _ENGINES.items() if engine.on_gpus)
            raise ServingError(f"options for GPUs are known for {having}, not for {self.name}; leave out --gpus")
        return tuple(self.on_gpus.format(**given).split())

    def checked(self, model_type: str) -> str:
        """How the rules for a family were checked: "run", "classes" (the engine's own, computed apart) or "read"."""
        if model_type in self.table["run"]:
            return "run"
        return "classes" if model_type in self.table["classes"] else "read"

    def tried(self) -> bool:
        """Whether any family was run in it, or computed by its own classes."""
        return self.reference or bool(self.table["run"] or self.table["classes"])

    def caveat(self, model_type: str) -> tuple[str, ...]:
        """A sentence where the rules for a family were read in the engine's source, and nothing was run."""
        if self.checked(model_type) != "read":
            return ()
        why = "".join(f": {reason}" for reason, families in self.table["unrun"].items() if model_type in families)
        return (f"The rules for {model_type!r} were read in the source of {self.label}, not run{why}.",)

    def check_family(self, target: Target) -> None:
        """Refuse, by a ServingError, a family that the engine does not run as transformers does."""
        for reason, model_types in self.table["refused"].items():
            if target.model_type in model_types:
                raise ServingError(
                    f"{self.name} {self.version} cannot serve {target.method} on this {target.model_type!r} model "
                    f"({reason})"
                )

    def moved_theta(self, target: Target, theta: float) -> str | None:
        """How a theta changes the sliding-window layers, which the method leaves alone; None: it does not."""
        if self.table["families"].get(target.model_type, {}).get("sliding") != "theta":
            return None
        own = target.config["rope_parameters"][target.layer_type]["rope_theta"]
        return None if theta == own else "it takes one theta for all layers, and the method is for some of them"

    def check_version(self, version: str | None) -> tuple[str, ...]:
        """Notes on serving with this version of the engine; None: the one that the rules were taken from.

        Raises:
            ServingError: a version that takes no such configuration.
        """
        if version is None or version == self.version:
            return ()
        if not re.fullmatch(r"[vb]?[0-9]+(\.[0-9]+)*[a-z0-9.+-]*", version):
            raise ServingError(f"{version!r} is no version; give one such as {self.version}")
        if self.oldest is not None and _numbers(version) < _numbers(self.oldest[0]):
            raise ServingError(f"{self.name} before {self.oldest[0]}: {self.oldest[1]}")
        if self.newest is not None and _numbers(version) >= _numbers(self.newest[0]):
            raise ServingError(f"{self.name} from {self.newest[0]} on: {self.newest[1]}")
        return (f"These rules were read in {self.name} {self.version}; whether {version} has them was not checked.",)


class ConfigEngine(Engine):
    """Base of the engines that read a config.json: encodings of a method are tried until one computes the same.

    An engine says how it reads a config (`read`), and overrides what it computes otherwise for a rope type.
    """

    aliases: ClassVar[Mapping[str, str]] = {"su": "longrope"}
    """Rope types that it runs as another one, by that one's name."""
    unknown_type: ClassVar[str] = "has no static rope type {!r}"
    """What the error on a rope type that the engine does not run says, to be filled with it."""

    @abstractmethod
    def read(self, config: Config, length: int | None) -> RopeKeys:
        """The keys as the engine reads them; the arguments and errors are those of `computes`."""

    def computes(self, config: Config, length: int | None = None) -> Computed:
        return self.by_type(self.read(config, length))

    def by_type(self, rope: RopeKeys) -> Computed:
        """Frequencies and magnitude for the rope type; ServingError: there is none such, or wrong settings."""
        kind = self.aliases.get(str(rope.kind), str(rope.kind))
        if kind == "default":
            return rope.computed(formulas.plain(rope.theta, rope.dim))
        rules = {"linear": self.linear, "llama3": self.llama3, "yarn": self.yarn, "longrope": self.longrope}
        return rules.get(kind, self.other)(rope)

    def linear(self, rope: RopeKeys) -> Computed:
        """Position interpolation."""
        return rope.computed(formulas.linear(rope.theta, rope.dim, rope.number("factor")))

    def llama3(self, rope: RopeKeys) -> Computed:
        """Llama 3.1's scaling."""
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor")
        low, high, original, factor = map(rope.number, keys)
        return rope.computed(formulas.llama3(rope.theta, rope.dim, factor, original, low, high))

    @abstractmethod
    def yarn(self, rope: RopeKeys) -> Computed:
        """YaRN."""

    @abstractmethod
    def longrope(self, rope: RopeKeys) -> Computed:
        """LongRoPE."""

    def other(self, rope: RopeKeys) -> Computed:
        """A rope type with a name of its own."""
        raise ServingError(f"{self.title} {self.version} {self.unknown_type.format(rope.kind)}")

    def encodings(self, target: Target) -> Iterator[Encoding]:
        """Ways to write the method, in order of preference; the first that computes the same is taken."""
        yield Encoding("native", target.settings)
        if all(target.inv_freq):  # no list divides a frequency to zero, as Gemma 4 has it for pairs that do not rotate
            yield Encoding("longrope with equal lists", self.universal(target))

    def universal(self, target: Target) -> dict[str, Any]:
        """The measured frequencies and magnitude as a longrope with two equal lists."""
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
        """The keys of the text config that an encoding changes."""
        written = {"rope_parameters": target.with_settings(encoding.settings)} | encoding.config
        return {key: value for key, value in written.items() if target.config.get(key) != value}

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        """The text config that the engine reads when it is started with these changes."""
        return {**target.config, **changes}

    @abstractmethod
    def served(self, target: Target, encoding: Encoding, changes: dict[str, Any], computed: Computed) -> ServingConfig:
        """Commands and keys for an encoding that computes the same."""

    def config_for(self, target: Target) -> ServingConfig:
        reasons: dict[str, list[str]] = {}
        for encoding in self.encodings(target):
            try:
                changes = self.changes(target, encoding)
                computed = self.computes(self.config(target, changes), target.length)
            except (ServingError, ArithmeticError) as error:
                reasons.setdefault(str(error), []).append(encoding.name)
                continue
            reason = computed.difference(target.inv_freq, target.attention_factor, target.softmax_scale)
            if reason is None and computed.table is not None and computed.table < target.length:
                reason = f"its table of angles ends at position {computed.table:,}"
            if reason is None and target.layer_type is not None:
                reason = self.moved_theta(target, {**encoding.settings, **encoding.config}["rope_theta"])
            if reason is None:
                served = self.served(target, encoding, changes, computed)
                lists = encoding.name == "native" and target.settings["rope_type"] == "longrope"
                named = target.method.startswith("longrope")  # else the engine has no such method by name
                return replace(served, encoding="longrope") if lists and not named else served
            cause = f" ({' '.join(computed.notes).rstrip('.')})" if computed.notes else ""
            reasons.setdefault(reason + cause, []).append(encoding.name)
        stated = "; ".join(f"{' and '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())
        raise ServingError(
            f"{self.name} {self.version} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({stated})"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:3]]


_ENGINES: dict[str, type[Engine]] = {}


def register_engine(name: str) -> Callable[[type[Engine]], type[Engine]]:
    """Register a class as the engine of a name; ValueError where the name is taken."""

    def register(cls: type[Engine]) -> type[Engine]:
        if name in _ENGINES:
            raise ValueError(f"an engine is registered as {name!r} already")
        cls.name = name
        others = {} if not cls.reference else {other: _ENGINES.pop(other) for other in list(_ENGINES)}
        _ENGINES.update({name: cls, **others})
        return cls

    return register


def list_engines() -> dict[str, type[Engine]]:
    """Every engine by name, the reference first."""
    return dict(_ENGINES)


def find_engine(name: str) -> Engine:
    """The engine of a name; UnknownMethodError where there is none."""
    return entry("engine", name, _ENGINES, UnknownMethodError)()


def reference_engine() -> Engine:
    """The engine that the others are compared with."""
    return next(engine() for engine in list_engines().values() if engine.reference)


def usual_server() -> str:
    """The name of the engine that commands are for where none is named."""
    return next(name for name, engine in list_engines().items() if engine.usual_server)


def other_engines() -> list[Engine]:
    """The engines that read a config.json as the reference saves it, and their former versions."""
    engines = [engine for engine in list_engines().values() if issubclass(engine, ConfigEngine)]
    versions = [version for engine in engines for version in (engine.former, None if engine.reference else engine)]
    return [version() for version in versions if version is not None]


# --- whether one engine computes what another one does ---------------------------------------------------------------

Expected = tuple[tuple[int, Computed], ...]
"""Each with the length of inputs in tokens that it is for: long ones, then short ones if those differ."""
_FLOAT32 = 4e-6
"""The largest relative difference that computing frequencies in float32 leaves, as classes of transformers do."""


def expected_of(reference: Engine, config: Config) -> Expected:
    """Compute a config by an engine that follows every input, to compare others with."""
    longest = reference.computes(config)
    assert longest.length is not None
    short = ((1, reference.computes(config, 1)),) if longest.by_length else ()
    return (longest.length, longest), *short


def runs_otherwise(engine: Engine, expected: Expected, config: Config) -> str | None:
    """How an engine runs short or long inputs otherwise than expected, as text; None where both agree to float32."""
    ours = engine.computes(config, expected[0][0])
    if ours.by_length and len(expected) == 1:  # it follows the input, and the reference does not
        expected = (*expected, (1, expected[0][1]))
    for name, (tokens, theirs) in zip(("", "for short inputs "), expected, strict=False):
        if name and engine.follows_input:
            ours = engine.computes(config, tokens)
        reason = ours.difference(theirs.inv_freq, theirs.attention_factor, theirs.softmax_scale, within=_FLOAT32)
        if reason is not None:
            return name + reason
    return None
