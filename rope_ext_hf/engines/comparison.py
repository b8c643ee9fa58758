"""Whether one engine computes what another one does, from the same config."""

from __future__ import annotations

from rope_ext_hf.engines.base import Computed, Config, Engine

__all__ = ["expected_of", "runs_otherwise"]

Expected = tuple[tuple[int, Computed], ...]
"""What a reference computes from a config, for inputs of so many tokens: long ones, then short ones."""


def expected_of(reference: Engine, config: Config) -> Expected:
    """What an engine that follows every input computes from a config, to compare others with.

    Raises:
        ServingError: the reference refuses the config.
    """
    longest = reference.computes(config).length
    assert longest is not None
    return tuple((tokens, reference.computes(config, tokens)) for tokens in (longest, 1))


def runs_otherwise(engine: Engine, expected: Expected, config: Config) -> str | None:
    """How an engine runs short or long inputs otherwise than expected, as text; None where both agree to 1e-6.

    Raises:
        ServingError: the engine refuses the config.
    """
    longest = expected[0][0]
    for name, (tokens, theirs) in zip(("", "for short inputs "), expected, strict=True):
        ours = engine.computes(config, tokens if engine.follows_input else longest)
        reason = ours.difference(theirs.inv_freq, theirs.attention_factor, theirs.softmax_scale)
        if reason is not None:
            return name + reason
    return None
