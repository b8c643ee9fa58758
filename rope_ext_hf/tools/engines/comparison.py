"""Comparison of two engines: do they compute the same numbers from a config, both for short and for long inputs?"""

from __future__ import annotations

from rope_ext_hf.models.config_keys import Config
from rope_ext_hf.tools.engines.base import Engine
from rope_ext_hf.tools.engines.keys import Computed

Expected = tuple[tuple[int, Computed], ...]
"""The numbers of the reference, each with the input length in tokens that they are for.

Long inputs come first. Short inputs follow if they get other numbers.
"""
_FLOAT32 = 4e-6
"""The largest relative difference that computing frequencies in float32 leaves, as classes of transformers do."""


def expected_numbers(reference: Engine, config: Config) -> Expected:
    """Compute a config by the reference engine's rules: for the longest inputs, and for short ones if they differ."""
    longest = reference.computes(config)
    assert longest.length is not None
    if longest.depends_on_total_length:
        return (longest.length, longest), (1, reference.computes(config, 1))
    return ((longest.length, longest),)


def engine_difference(engine: Engine, expected: Expected, config: Config) -> str | None:
    """Return a clause on how an engine's numbers for a config differ from the expected ones.

    It is None if they agree up to the rounding of float32.
    """
    ours = engine.computes(config, expected[0][0])
    if ours.depends_on_total_length and len(expected) == 1:  # this engine follows the input, and the reference does not
        expected = (*expected, (1, expected[0][1]))
    for index, (tokens, theirs) in enumerate(expected):
        short_inputs = index == 1
        if short_inputs and engine.follows_input:
            ours = engine.computes(config, tokens)
        difference = ours.difference(theirs.inv_freq, theirs.attention_factor, theirs.softmax_scale, within=_FLOAT32)
        if difference is not None:
            return f"for short inputs {difference}" if short_inputs else difference
    return None
