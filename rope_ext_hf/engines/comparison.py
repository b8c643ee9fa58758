"""Whether one engine computes what another one does, from the same config."""

from __future__ import annotations

from rope_ext_hf.engines.base import Computed, Config, ConfigEngine, Engine, list_engines

_Expected = tuple[tuple[int, Computed], ...]
"""What a reference computes from a config, for inputs of so many tokens: long ones, then short ones if those differ."""


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


def expected_of(reference: Engine, config: Config) -> _Expected:
    """What an engine that follows every input computes from a config, to compare others with.

    Raises:
        ServingError: the reference refuses the config.
    """
    longest = reference.computes(config)
    assert longest.length is not None
    short = ((1, reference.computes(config, 1)),) if longest.by_length else ()
    return (longest.length, longest), *short


def runs_otherwise(engine: Engine, expected: _Expected, config: Config) -> str | None:
    """How an engine runs short or long inputs otherwise than expected, as text; None where both agree to 1e-6.

    Raises:
        ServingError: the engine refuses the config.
    """
    ours = engine.computes(config, expected[0][0])
    if ours.by_length and len(expected) == 1:  # it follows the input, and the reference does not
        expected = (*expected, (1, expected[0][1]))
    for name, (tokens, theirs) in zip(("", "for short inputs "), expected, strict=False):
        if name and engine.follows_input:
            ours = engine.computes(config, tokens)
        reason = ours.difference(theirs.inv_freq, theirs.attention_factor, theirs.softmax_scale)
        if reason is not None:
            return name + reason
    return None
