"""An engine as a value: what it computes from a config, and which config makes it compute what was measured.

>>> engine = find_engine("vllm")
>>> computed = engine.computes({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768,
...                             "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}})
>>> computed.length
131072
"""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import ServingError, UnknownMethodError, did_you_mean


class NotCheckedError(ServingError):
    """A family whose rules in an engine are not written down here."""


Config = Mapping[str, Any]
_EXACT = 1e-6
"""The largest relative difference of frequencies and magnitudes that counts as the same."""
_SLIDING_LAYERS = frozenset({"sliding_attention", "chunked_attention"})


@dataclass(frozen=True)
class Computed:
    """What an engine computes from a config.

    Attributes:
        inv_freq: radians per position of every rotated pair of a full-attention layer.
        attention_factor: what cos and sin are multiplied by.
        length: tokens that the engine serves by default; None: it leaves that to the user.
        table: positions that the engine has angles for; None: as many as asked for.
        softmax_scale: what the attention multiplies its softmax scale by (DeepSeek's mscale_all_dim, squared).
        notes: what the engine passes over in this config.
        by_length: whether these are for inputs of this length alone, and shorter ones get others.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float
    length: int | None
    table: int | None = None
    softmax_scale: float = 1.0
    notes: tuple[str, ...] = ()
    by_length: bool = False

    def difference(self, inv_freq: Sequence[float], attention_factor: float, softmax_scale: float) -> str | None:
        """What differs from these frequencies and magnitudes, as text; None where all agree to 1e-6."""
        if len(inv_freq) != len(self.inv_freq):
            return f"it rotates {len(self.inv_freq)} pairs, not {len(inv_freq)}"
        worst = 0.0
        for a, b in zip(self.inv_freq, inv_freq, strict=True):
            worst = max(worst, abs(a - b) / abs(b) if b else abs(a))
        if worst > _EXACT:
            return f"its frequencies differ by up to {worst:.2g}"
        if not math.isclose(self.attention_factor, attention_factor, rel_tol=_EXACT):
            return f"its magnitude would be {self.attention_factor:.6g} instead of {attention_factor:.6g}"
        if not math.isclose(self.softmax_scale, softmax_scale, rel_tol=_EXACT):
            return f"its softmax scale would be multiplied by {self.softmax_scale:.6g} instead of {softmax_scale:.6g}"
        return None


@dataclass(frozen=True)
class Target:
    """What an engine is to compute: a model with its method, as it was measured.

    Attributes:
        model: the folder or Hub id, for the commands.
        config: the text config before the method, in the spelling of transformers 5.
        patched: the text config with the method in it.
        composite: whether the text config lies under `text_config` of the model's config.
        layer_type: the layers that the method applies to; None: all.
        inv_freq, attention_factor, softmax_scale: what was measured.
        theta, original: the base, and the length in tokens without any scaling.
        length: tokens to serve.
        method: the method, for messages.
        notes: what the method does not reach, and what else a user must hear, whatever the engine.
        remapping: a remapping method and the model's pairing, as JSON text for the plug-in; None: there is none.
    """

    model: str
    config: Config
    patched: Config
    composite: bool
    layer_type: str | None
    inv_freq: tuple[float, ...]
    attention_factor: float
    softmax_scale: float
    theta: float
    original: int
    length: int
    method: str
    notes: tuple[str, ...] = ()
    remapping: str | None = None

    @property
    def model_type(self) -> str:
        """The model type of the text config."""
        return str(self.config.get("model_type", ""))

    @property
    def settings(self) -> dict[str, Any]:
        """The rope settings that transformers would save, of the layers that the method applies to."""
        parameters = self.patched["rope_parameters"]
        settings = dict(parameters if self.layer_type is None else parameters[self.layer_type])
        settings.setdefault("rope_type", settings.get("type", "default"))
        return settings

    @property
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
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of the text config."""


@dataclass(frozen=True)
class ServingConfig:
    """How to have an engine serve what was measured.

    Attributes:
        engine, version: the engine, and the version whose source its rules were taken from.
        encoding: "native" where the engine's own name of the method does it, else how the frequencies are written.
        method: the method, for messages.
        length: tokens served.
        command: the command line, one argument each.
        environment: variables to set for it.
        overrides: the JSON that the command line carries.
        config_keys: keys to write into config.json instead, or where the engine takes no overrides.
        gguf_keys: metadata to write into the GGUF file.
        gguf_tensors: float32 tensors to write into it, by name.
        gguf_removed: tensors to leave out of it.
        computed: what the engine computes then.
        notes: further remarks.
        shorter: for length profiles, an instance of the engine for each but the longest, shortest first.
    """

    engine: str
    version: str
    encoding: str
    method: str
    length: int
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] | None = None
    config_keys: dict[str, Any] = field(default_factory=dict)
    gguf_keys: dict[str, Any] = field(default_factory=dict)
    gguf_tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    gguf_removed: tuple[str, ...] = ()
    computed: Computed | None = None
    notes: tuple[str, ...] = ()
    shorter: tuple[ServingConfig, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Engine(ABC):
    """Base of all engines; `computes` holds the rules of one version of the engine."""

    name: ClassVar[str] = ""
    version: ClassVar[str]
    """The version whose source the rules were taken from."""
    title: ClassVar[str] = ""
    """The engine as its makers write it; empty: its name."""
    follows_input: ClassVar[bool] = False
    """Whether it chooses frequencies for every input, and not once when it starts."""
    oldest: ClassVar[tuple[str, str] | None] = None
    """The first version that takes such a configuration, and why an older one does not."""
    reference: ClassVar[bool] = False
    """Whether the others are compared with it."""
    usual_server: ClassVar[bool] = False
    """Whether commands are for it where no engine is named; one has it."""
    drafts: ClassVar[str] = ""
    """What of such a configuration reaches a draft of speculative decoding, in sentences; empty: not known."""
    former: ClassVar[type[Engine] | None] = None
    """A former major version that is still in use, with rules of its own."""
    rules_of: ClassVar[str] = ""
    """The engine whose program this one runs, so that a comparison need not list both; empty: its own."""
    remaps: ClassVar[bool] = False
    """Whether it runs remapping methods."""
    file_suffix: ClassVar[str] = ".json"
    """Suffix of the file that holds what it reads."""

    @property
    def label(self) -> str:
        """The engine with its version."""
        return f"{self.title or self.name} {self.version.removesuffix('.0')}"

    @abstractmethod
    def computes(self, config: Config, length: int | None = None) -> Computed:
        """What the engine computes from a config.json.

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
        """This engine with the plug-in of this package loaded.

        Raises:
            ServingError: there is none for it.
        """
        having = ", ".join(name for name, engine in _ENGINES.items() if engine.with_plugin is not Engine.with_plugin)
        raise ServingError(f"there is no plug-in of this package for {self.name}; there is one for {having}")

    def serving(self, target: Target, encoding: str, computed: Computed, **how: Any) -> ServingConfig:
        """What `config_for` returns: how to start the engine (`how`), beside what is stated alike for every engine."""
        return ServingConfig(self.name, self.version, encoding, target.method, target.length, computed=computed, **how)

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
        return (f"These rules were read in {self.name} {self.version}; whether {version} has them was not checked.",)


class ConfigEngine(Engine):
    """Base of the engines that read a config.json: encodings of a method are tried until one computes the same."""

    def encodings(self, target: Target) -> Iterator[Encoding]:
        """Ways to write the method, in order of preference; the first that computes the same is taken."""
        yield Encoding("native", target.settings)
        if all(target.inv_freq):  # no list divides a frequency to zero, as Gemma 4 has it for pairs that do not rotate
            yield Encoding("longrope with equal lists", self.universal(target))

    def published(self, target: Target) -> Iterator[Encoding]:
        """The config as it is, where the method changes nothing in it."""
        unchanged = target.patched["rope_parameters"] == target.config["rope_parameters"]
        if unchanged and target.length <= length_setting(target.config):
            yield Encoding("as published", target.settings)

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

    @abstractmethod
    def config(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        """The config that the engine reads when it is started with an encoding."""

    @abstractmethod
    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        """Commands and keys for an encoding that computes the same."""

    def config_for(self, target: Target) -> ServingConfig:
        reasons: dict[str, list[str]] = {}
        for encoding in self.encodings(target):
            try:
                computed = self.computes(self.config(target, encoding), target.length)
            except (ServingError, ArithmeticError) as error:
                reasons.setdefault(str(error), []).append(encoding.name)
                continue
            reason = computed.difference(target.inv_freq, target.attention_factor, target.softmax_scale)
            if reason is None and computed.table is not None and computed.table < target.length:
                reason = f"its table of angles ends at position {computed.table:,}"
            if reason is None:
                served = self.served(target, encoding, computed)
                lists = encoding.name == "native" and target.settings["rope_type"] == "longrope"
                named = target.method.startswith("longrope")  # else the engine has no such method by name
                return replace(served, encoding="longrope") if lists and not named else served
            reasons.setdefault(reason, []).append(encoding.name)
        stated = "; ".join(f"{' and '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())
        raise ServingError(
            f"{self.name} {self.version} cannot serve {target.method} on this {target.model_type!r} model as measured "
            f"({stated})"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:3]]


GEOMETRY_KEYS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_ENGINES: dict[str, type[Engine]] = {}


def register_engine(name: str) -> Callable[[type[Engine]], type[Engine]]:
    """Register a class as the engine of a name.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[Engine]) -> type[Engine]:
        if name in _ENGINES:
            raise ValueError(f"an engine is registered as {name!r} already")
        cls.name = name
        _ENGINES[name] = cls
        return cls

    return register


def list_engines() -> dict[str, type[Engine]]:
    """Every engine by name."""
    return dict(_ENGINES)


def find_engine(name: str) -> Engine:
    """The engine of a name.

    Raises:
        UnknownMethodError: there is none.
    """
    if name not in _ENGINES:
        raise UnknownMethodError(
            f"unknown engine {name!r}.{did_you_mean(name, _ENGINES)} Known engines: {', '.join(_ENGINES)}"
        )
    return _ENGINES[name]()


# --- reading a config ------------------------------------------------------------------------------------------------


def text_settings(config: Config) -> dict[str, Any]:
    """The text config of a config, itself where it is not composite.

    Raises:
        ServingError: `text_config` is no object.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ServingError(f"text_config must be an object, got {type(text).__name__}")
    return dict(text)


def rope_settings(text: Config) -> dict[str, Any]:
    """The rope settings of the full-attention layers, as transformers 5 standardises them.

    Both spellings are read: `rope_parameters`, and `rope_theta` beside `rope_scaling`, which wins where both stand.

    Raises:
        ServingError: no rope settings, or some of a wrong type.
    """
    parameters = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ServingError(f"the rope settings must be an object, got {type(parameters).__name__}")
    if dict in map(type, parameters.values()):
        nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
        wanted = next((key for key in nested if key not in _SLIDING_LAYERS), next(iter(nested)))
        settings = dict(nested[wanted])
        settings["_shared_truncate"] = parameters.get("truncate", True)
    else:
        settings = dict(parameters)
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is None and text.get(key) is not None:
            settings[key] = text[key]
    if settings["rope_type"] in ("yarn", "longrope", "su", "llama3") and text.get("original_max_position_embeddings"):
        settings["original_max_position_embeddings"] = text["original_max_position_embeddings"]
    settings["rope_theta"] = needed(settings, "rope_theta", above=1.0)
    return settings


def needed(settings: Config, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A number of the settings.

    Raises:
        ServingError: missing where there is no default, or not a finite number above `above`.
    """
    value = settings.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
        given = "is missing" if value is None else f"is {value!r}"
        raise ServingError(f"{key} must be a number above {above:g} and {given}")
    return float(value)


def length_setting(text: Config) -> int:
    """max_position_embeddings in tokens.

    Raises:
        ServingError: missing, or no length.
    """
    length = text.get("max_position_embeddings")
    if not isinstance(length, (int, float)) or isinstance(length, bool) or not 0 < length <= MOST_TOKENS:
        given = "is missing" if length is None else f"is {length!r}"
        raise ServingError(f"max_position_embeddings must be a length in tokens and {given}")
    return int(length)


def rotated_dims(text: Config, settings: Config) -> int:
    """Rotated dims per head.

    Raises:
        ServingError: the sizes are missing or impossible.
    """
    latent: Any = text.get("qk_rope_head_dim")  # latent attention rotates a part of its own
    dims = latent or text.get("head_dim")
    if dims is None:
        dims = int(needed(text, "hidden_size") // needed(text, "num_attention_heads"))
    numeric = isinstance(dims, (int, float)) and not isinstance(dims, bool)
    if numeric and not latent and "partial_rotary_factor" in settings:
        dims = int(dims * needed(settings, "partial_rotary_factor"))
    if not numeric or not 2 <= dims <= 65536 or dims % 2:
        raise ServingError(f"an even number of dims per head rotates; the config gives {dims!r}")
    return int(dims)


def rope_divisors(settings: Mapping[str, Any], key: str, dim: int) -> list[float]:
    """One of the lists of a longrope, a number for each rotated pair.

    Raises:
        ServingError: missing, of another length, or with numbers that are not above 0.
    """
    values = settings.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        raise ServingError(f"{key} must be a list of {dim // 2} numbers")
    if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in values):
        raise ServingError(f"every number in {key} must be above 0")
    return list(values)


def merged(config: Config, changes: Config) -> dict[str, Any]:
    """A config with keys replaced, at the top level."""
    return copy.deepcopy(dict(config)) | copy.deepcopy(dict(changes))
