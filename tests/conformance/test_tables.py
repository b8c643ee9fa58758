"""The numbers of conformance/configurations: those that the package gives, and those of the papers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.conformance import formulas
from tests.conformance.generate import KIT, WRITTEN, configuration, vector, written

PATHS = sorted((KIT / "configurations").glob("*.json"))
EXACT = 1e-14
every_configuration = pytest.mark.parametrize("name", [path.stem for path in PATHS])


def stored(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((KIT / "configurations" / f"{name}.json").read_text(encoding="utf-8"))
    return entry


def same(left: Any, right: Any) -> bool:
    """Equal, numbers to the last digits that another mathematical library may round otherwise."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):  # cos and sin at 16 million follow the last digit of a frequency
        return math.isclose(left, right, rel_tol=1e-14, abs_tol=1e-8)
    return bool(left == right)


@every_configuration
@pytest.mark.sampled(4)
def test_a_file_is_what_the_package_generates(name: str) -> None:
    entry = stored(name)
    made = json.loads(written(configuration(entry)))
    assert made.keys() - {"pairing", "rows"} <= set(WRITTEN)
    assert same(made, entry), (
        f"conformance/configurations/{name}.json is out of date: python -m tests.conformance.generate"
    )


@every_configuration
def test_a_file_is_what_the_papers_say(name: str) -> None:
    entry = stored(name)
    for row in entry["rows"]:
        rope = formulas.read(entry["config"], row["layer_type"], row["length"])
        inv_freq, exact = row["inv_freq"], [float(value) for value in rope.inv_freq]
        assert inv_freq == pytest.approx(exact, rel=EXACT, abs=0)
        for key in ("magnitude", "softmax_scale"):
            assert row[key] == pytest.approx(float(getattr(rope, key)), rel=EXACT)
        assert tuple(row.get("axes", ())) == rope.axes
        points = [*((row, [at] * len(row["pairs"]), k) for k, at in enumerate(row["positions"]))]
        if rope.axes:
            table = row["on_axes"]
            points += [(table, [at[rope.axes[i]] for i in row["pairs"]], k) for k, at in enumerate(table["positions"])]
        for table, positions, k in points:
            turns = [formulas.turned(at, inv_freq[i]) for at, i in zip(positions, row["pairs"], strict=True)]
            assert table["cos"][k] == pytest.approx([turn.real for turn in turns], abs=1e-15)
            assert table["sin"][k] == pytest.approx([turn.imag for turn in turns], abs=1e-15)
        check_rotated(row, rope)


def check_rotated(row: dict[str, Any], rope: formulas.Rope) -> None:
    """A pair of a vector is a complex number, and a rotation a product."""
    given, pairs = row["rotated"], len(row["inv_freq"])
    assert given["width"] == rope.width
    x = vector(rope.width)
    for pairing, step in (("half", pairs), ("interleaved", 1)):
        values: dict[int, float] = dict(enumerate(x))
        for i in range(pairs):
            first = i if pairing == "half" else 2 * i
            product = complex(x[first], x[first + step]) * formulas.turned(given["position"], row["inv_freq"][i])
            product *= row["magnitude"]
            values |= {first: product.real, first + step: product.imag}
        assert len(given[pairing]["index"]) >= 8 or pairs < 4
        assert given[pairing]["value"] == pytest.approx([values[at] for at in given[pairing]["index"]], abs=1e-13)


def test_every_kind_of_scaling_is_there() -> None:
    entries = [stored(path.stem) for path in PATHS]
    assert len(entries) >= 40
    assert {entry["method"] for entry in entries} == {
        *("default", "linear", "ntk", "dynamic-ntk", "yarn", "llama3", "longrope")
    }
    rows = [row for entry in entries for row in entry["rows"]]
    assert {row["layer_type"] for row in rows} == {None, "full_attention", "sliding_attention"}
    assert {entry["pairing"] for entry in entries} == {"half", "interleaved"}
    assert sum("axes" in row for row in rows) >= 5
    assert any(0.0 in row["inv_freq"] for row in rows), "proportional"
    assert max(at for row in rows for at in row["positions"]) == 2**24 - 1
    keys = json.dumps([entry["config"] for entry in entries])
    of_yarn = ("attention_factor", "truncate", "mscale", "mscale_all_dim", "beta_fast", "llama_4_scaling_beta")
    of_others = ("alpha", "mrope_section", "mrope_interleaved", "partial_rotary_factor", "qk_rope_head_dim")
    for key in (*of_yarn, *of_others, "rope_local_base_freq"):
        assert f'"{key}"' in keys, key
    assert '"model_type": "gpt_oss"' in keys, "sinks"


@every_configuration
def test_a_mistake_is_no_rounding(name: str) -> None:
    """A row that is named a mistake differs by more than the float32 tolerance."""
    for row in stored(name)["rows"]:
        right = [row["inv_freq"][i] for i in row["pairs"]]
        for mistake in row["mistakes"]:
            numbers = mistake.keys() - {"name"}
            assert numbers
            for key in numbers:
                ours = right if key == "inv_freq" else [row[key]]
                theirs = mistake[key] if key == "inv_freq" else [mistake[key]]
                worst = max(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(theirs, ours, strict=True))
                assert worst > 0.99e-4, (mistake["name"], key)
