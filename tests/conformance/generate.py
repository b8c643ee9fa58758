"""Write the numbers of conformance/ from what is written there by hand, with this package.

    python -m tests.conformance.generate

Each file of conformance/configurations has a config and its source, written by hand; the rows are made here. cos and
sin are those of the exact product of a position and a float64 frequency. tests/conformance/test_tables.py checks the
numbers with code that shares nothing with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import torch
from transformers import AutoConfig
from transformers.utils import logging

from rope_ext_hf.methods.base import Frequencies
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.static import Default, Llama3, Yarn
from rope_ext_hf.models.config import ConfigRope, rope_by_sizes
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import head_dim
from rope_ext_hf.models.patched_config import softmax_scale
from rope_ext_hf.patches.rows.row_probe import run_pairing
from rope_ext_hf.tools.servers.mistakes import different_frequencies
from tests.support.tiers import needs_family

KIT = Path(__file__).parents[2] / "conformance"
POSITIONS = (1, 100, 4095, 131_071, 1_048_575, 16_777_215)
AXES = ((5, 5, 5), (1000, 7, 31), (70_000, 900, 2))
"""Positions of the three axes of M-RoPE: time, height, width."""
ROTATED_AT = 1000
PUBLISHED = frozenset({"linear", "ntk", "yarn", "by-parts", "llama3"})
"""Methods that a port is likely to run in place of another."""
RESOLVED = 1e-4
"""The smallest relative difference of a mistake, five times what float32 tables differ by."""
Json = dict[str, Any]


def vector(count: int) -> list[float]:
    """What is rotated: exact in every dtype."""
    return [((7 * i) % 11 - 5) / 4 for i in range(count)]


def chosen(count: int) -> list[int]:
    """Six pairs of `count`."""
    return sorted({round(k * (count - 1) / 5) for k in range(6)})


def text_config(settings: Json) -> Any:
    """The text config of a config.json."""
    given = json.loads(json.dumps(settings))
    needs_family(given["model_type"])
    return AutoConfig.for_model(given.pop("model_type"), **given).get_text_config()


def layer_types(config: Any) -> list[str | None]:
    """The keys of nested rope settings; [None]: one rotary embedding for all layers."""
    return [key for key, value in config.rope_parameters.items() if isinstance(value, dict)] or [None]


def lengths(described: ConfigRope) -> Sequence[int | None]:
    """Lengths of inputs whose frequencies differ; [None]: all inputs have the same."""
    original, most = described.plain.trained_length, described.context_length
    if isinstance(described.method, LongRoPE):
        return original, most
    return (most, most + 1, 2 * most, 4 * most) if described.method.depends_on_length(described.plain) else (None,)


def axes(settings: Json, pairs: int) -> list[int]:
    """Which axis of the positions rotates each pair."""
    _, height, width = settings["mrope_section"]
    if settings.get("mrope_interleaved"):
        sizes = {1: height, 2: width}
        return [i % 3 if i % 3 and i < 3 * sizes[i % 3] else 0 for i in range(pairs)]
    ends = (pairs - height - width, pairs - width)
    return [sum(i >= end for end in ends) for i in range(pairs)]


def width_of_head(config: Any, described: ConfigRope) -> int:
    """Dims of a vector that is rotated, the unrotated ones of a partial rotation included."""
    apart = getattr(config, "qk_rope_head_dim", None) or getattr(config, "per_layer_attributes", None)
    return described.plain.dim if apart else int(head_dim(config))


def scores_scale(config: Any, described: ConfigRope, settings: Json) -> float:
    """What q·k is multiplied by."""
    width = width_of_head(config, described) + getattr(config, "qk_nope_head_dim", 0)
    stated = getattr(config, "attention_multiplier", None)
    base = stated or getattr(config, "query_pre_attn_scalar", width) ** -0.5
    if config.model_type == "gemma4_text":  # it normalises queries and keys, and scales no scores
        base = 1.0
    return float(base) * softmax_scale(family(config.model_type), settings)


def cos_sin(positions: Sequence[int], inv_freq: Sequence[float]) -> tuple[list[list[float]], list[list[float]]]:
    """Of exact products, for each position and frequency."""
    with mpmath.workdps(40):
        angles = [[mpmath.mpf(each) * mpmath.mpf(f) for f in inv_freq] for each in positions]
        cos, sin = ([[float(part(a)) for a in line] for line in angles] for part in (mpmath.cos, mpmath.sin))
    return cos, sin


def rotated(inv_freq: Sequence[float], magnitude: float, width: int) -> Json:
    """A vector rotated by both pairings, at chosen places."""
    x, pairs = vector(width), len(inv_freq)
    (cos,), (sin,) = cos_sin([ROTATED_AT], inv_freq)
    result: Json = {"position": ROTATED_AT, "width": width}
    for pairing in ("half", "interleaved"):
        values: dict[int, float] = {} if 2 * pairs == width else {width - 1: x[width - 1]}
        for i in chosen(pairs)[:4]:
            a, b = (i, i + pairs) if pairing == "half" else (2 * i, 2 * i + 1)
            values[a] = magnitude * (x[a] * cos[i] - x[b] * sin[i])
            values[b] = magnitude * (x[b] * cos[i] + x[a] * sin[i])
        result[pairing] = {"index": sorted(values), "value": [values[i] for i in sorted(values)]}
    return result


def further_mistakes(described: ConfigRope, config: Any, length: int) -> Iterator[tuple[str, Frequencies]]:
    """Mistakes that ports have made, beside those of check-server."""
    method, plain = described.method, described.plain
    exact = method.frequencies(plain, length)
    factor: Any = getattr(method, "factor", None)
    width = width_of_head(config, described)
    if method.depends_on_length(plain):
        yield "the frequencies of longer inputs", method.frequencies(plain, 4 * described.context_length)
        yield "the frequencies of shorter inputs", method.frequencies(plain, 1)
    if factor is not None and factor > 1:
        yield "the factor in place of theta", Default().frequencies(replace(plain, theta=float(factor)), length)
    if exact.attention_factor > 1:
        again = 0.1 * math.log(exact.attention_factor) + 1
        yield "the magnitude through the logarithm again", Frequencies(exact.inv_freq, again)
    if isinstance(method, Yarn):
        usual = replace(method, attention_factor=None, mscale=None, mscale_all_dim=None)
        yield "attention_factor, mscale and mscale_all_dim ignored", usual.frequencies(plain, length)
        ratio = max(1.0, config.max_position_embeddings / plain.trained_length)
        yield "the factor from max_position_embeddings", replace(method, factor=ratio).frequencies(plain, length)
        quadruple = replace(plain, trained_length=4 * plain.trained_length)
        yield "four times the original length", method.frequencies(quadruple, length)
        other = replace(method, truncate=not method.truncate)
        yield f"truncate {str(other.truncate).lower()}", other.frequencies(plain, length)
        betas = replace(method, beta_fast=32.0, beta_slow=1.0)
        yield "beta_fast and beta_slow ignored", betas.frequencies(plain, length)
    if isinstance(method, (Yarn, Llama3)):
        turned = plain.theta_inv_freq() * (1 + 1 / method.factor) - exact.inv_freq
        yield "the ramp the wrong way round", Frequencies(turned, exact.attention_factor)
    if width > plain.dim:
        stretched = plain.theta_inv_freq() ** (plain.dim / width) * exact.inv_freq / plain.theta_inv_freq()
        yield "head_dim for the rotated dims in the exponent", Frequencies(stretched, exact.attention_factor)


def mistakes(described: ConfigRope, config: Any, layer_type: str | None, length: int) -> list[Json]:
    """Wrong rows by name, with the numbers that differ: frequencies of the chosen pairs, magnitude, softmax scale."""
    method, plain = described.method, described.plain
    exact = method.frequencies(plain, length)
    others = [(key, rope_by_sizes(config, key)) for key in layer_types(config) if key != layer_type]
    wrong = [
        *further_mistakes(described, config, length),
        *different_frequencies(method, plain, length),
        *((f"the settings of {key}", other.method.frequencies(other.plain, length)) for key, other in others),
    ]
    result: list[Json] = []
    for name, (inv_freq, magnitude) in wrong:
        if " in place of " in name and name.split()[0] not in {*PUBLISHED, "the"}:
            continue
        if len(inv_freq) != len(exact.inv_freq) or not torch.isfinite(inv_freq).all():
            continue
        entry: Json = {}
        pairs = chosen(len(inv_freq))
        if not torch.allclose(inv_freq[pairs], exact.inv_freq[pairs], rtol=RESOLVED, atol=0):
            entry["inv_freq"] = rounded(inv_freq[pairs])
        if not math.isclose(magnitude, exact.attention_factor, rel_tol=RESOLVED):
            entry["magnitude"] = float(f"{magnitude:.9g}")
        if entry and entry not in [{k: v for k, v in known.items() if k != "name"} for known in result]:
            result.append({"name": name, **entry})
    return result


def rounded(values: Iterable[float]) -> list[float]:
    """Nine digits, enough to know a mistake by."""
    return [float(f"{float(value):.9g}") for value in values]


def row(config: Any, layer_type: str | None, described: ConfigRope, length: int | None) -> Json:
    """The numbers of one layer type, for inputs of a length; None: of any."""
    method, plain = described.method, described.plain
    tensor, magnitude = method.frequencies(plain, length or described.context_length)
    inv_freq = tensor.tolist()
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    pairs = chosen(len(inv_freq))
    some = [inv_freq[i] for i in pairs]
    positions = [at for at in (*POSITIONS[:-1], (length or POSITIONS[-1] + 1) - 1) if at < (length or at + 1)]
    positions = sorted(set(positions))
    cos, sin = cos_sin(positions, some)
    scale = scores_scale(config, described, settings)
    multiplier = softmax_scale(family(config.model_type), settings)
    made: Json = {"layer_type": layer_type, "length": length, "inv_freq": inv_freq, "magnitude": magnitude}
    made |= {"softmax_scale": scale, "pairs": pairs, "positions": positions, "cos": cos, "sin": sin}
    made["rotated"] = rotated(inv_freq, magnitude, width_of_head(config, described))
    if settings.get("mrope_section"):
        made["axes"] = axes(settings, len(inv_freq))
        by_axis = [cos_sin([at[made["axes"][i]] for i in pairs], some) for at in AXES]
        diagonal = [[[part[k][k] for k in range(len(pairs))] for part in both] for both in by_axis]
        made["on_axes"] = {
            "positions": AXES,
            "cos": [each[0] for each in diagonal],
            "sin": [each[1] for each in diagonal],
        }
    made["mistakes"] = mistakes(described, config, layer_type, length or described.context_length)
    if multiplier != 1.0:
        without, once = scale / multiplier, scale / math.sqrt(multiplier)
        made["mistakes"] += [
            {"name": "mscale_all_dim left out of the softmax scale", "softmax_scale": without},
            {"name": "mscale_all_dim in the softmax scale once, not squared", "softmax_scale": once},
        ]
    return made


WRITTEN = ("source", "method", "context_length", "original_length", "attention_factor", "config")
"""Keys that are written by hand."""


def configuration(entry: Json) -> Json:
    """A file of conformance/configurations with its numbers made anew."""
    config = text_config(entry["config"])
    known = {key: rope_by_sizes(config, key) for key in layer_types(config)}
    kept = {key: entry[key] for key in WRITTEN if key in entry}
    rows = [row(config, key, each, length) for key, each in known.items() for length in lengths(each)]
    return {**kept, "pairing": run_pairing(config), "rows": rows}


def written(entry: Json) -> str:
    """JSON with a line for each key, and for each key of a row."""
    lines = [f' "{key}": {json.dumps(value)}' for key, value in entry.items() if key != "rows"]
    rows = [
        ",\n".join(f'   "{key}": {compact(value)}' for key, value in each.items()) for each in entry.get("rows", ())
    ]
    if rows:
        lines.append(' "rows": [\n  {\n' + "\n  },\n  {\n".join(rows) + "\n  }\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def files() -> dict[Path, str]:
    """Every generated file, with its text."""
    paths = sorted((KIT / "configurations").glob("*.json"))
    return {path: written(configuration(json.loads(path.read_text(encoding="utf-8")))) for path in paths}


def main() -> None:
    from tests.conformance import models

    logging.set_verbosity_error()
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    models.write_weights()
    for path in models.paths():
        path.write_text(models.written(models.model_file(path.stem)), encoding="utf-8")


if __name__ == "__main__":
    main()
