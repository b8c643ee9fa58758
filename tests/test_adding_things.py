"""Methods, protocols and families that are defined in this file alone, taken through everything that others go through.

Each takes one definition and one registration (a family: one table of families.toml). A test that fails here names a
place outside the registries that knows methods, protocols or families one by one.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval import perplexity, sweep
from rope_ext_hf.methods import registry
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.registry import frequencies, register_method, resolve_method
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.models import families
from rope_ext_hf.reading.protocols import PROTOCOLS, ProtocolOptions, Span, protocol_help, register_protocol
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.runs.conclusions.labels import label
from tests.support import oracles
from tests.support.contracts import MethodContract, assert_close, attend_and_definition
from tests.support.method_checks import GEOMETRY, assert_same
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference
from tests.support.models import TRAINED, build, logits, tokens

# --- the definitions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Terraces(RopeMethod):
    """Position Interpolation in whole steps of the longest input met, by at most `factor` where there is one."""

    factor: float | None = None
    step: float = 1.0

    @property
    def length_dependent(self) -> bool:
        return True

    @property
    def sticky_length(self) -> bool:
        return True

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        scale = (torch.ceil(length / rotary.trained_length / self.step) * self.step).clamp(1, self.factor)
        return rotary.inv_freq(device=length.device) / scale, 1.0


def terraces(rotary: Rotary, length: int, factor: float = math.inf, step: float = 1.0) -> list[float]:
    scale = min(max(1.0, math.ceil(length / rotary.trained_length / step) * step), factor)
    return [value / scale for value in oracles.plain(rotary)]


@dataclass(frozen=True, kw_only=True)
class Thirds(RemappingMethod):
    """Beyond the window, distances grow a third as fast, after a gap of one."""

    window: int | None = None

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        return replace(self, window=self.window or limit // 4)

    @property
    def near(self) -> int:
        assert self.window is not None
        return self.window

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        return (0, self.near), (self.near, UNBOUNDED)

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n, 3.0)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        return RemappedPosition(m, 3.0, self.near * 2 / 3 + 1)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.near).long()


def last_token(count: int, lengths: Sequence[int], options: ProtocolOptions) -> Iterator[Span]:
    """The last token of every length, documents read from their start."""
    for length in lengths:
        if count >= length:
            yield Span(length, 0, length, length - 1, length, length)


class MadeUpConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "made_up"


class MadeUpForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    config_class: ClassVar[type[MadeUpConfig]] = MadeUpConfig


FAMILY = """
[made_up]
like = "llama"
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything above in its registry, and out of it after the test."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    register_method("terraces")(Terraces)
    register_method("thirds")(Thirds)
    monkeypatch.setitem(oracles.STORED_POSITIONS, "thirds", lambda saved, n: n / 3)
    monkeypatch.setitem(
        oracles.FAR_DISTANCES, "thirds", lambda saved, m, n: saved["window"] + (m - n - saved["window"]) / 3 + 1
    )
    register_protocol("last-token")(last_token)
    known = families.families_toml() | tomllib.loads(FAMILY)
    monkeypatch.setattr(families, "families_toml", lambda: known)
    families.family.cache_clear()
    transformers.AutoConfig.register("made_up", MadeUpConfig)
    transformers.AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM)
    yield
    families.family.cache_clear()
    del PROTOCOLS["last-token"]
    del transformers.CONFIG_MAPPING._extra_content["made_up"]
    del transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[MadeUpConfig]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


METHODS = [Terraces(), Terraces(factor=4.0), Terraces(step=2.0), Thirds(window=32, max_distance=512)]


# --- methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=repr)
class TestContract(MethodContract):
    pass


def test_a_method_is_its_formula() -> None:
    for length in (1, 512, 513, 1025, 5000):
        assert_same(frequencies("terraces", GEOMETRY, length=length).inv_freq, terraces(GEOMETRY, length))
        assert_same(frequencies("terraces", GEOMETRY, length=length, factor=3).inv_freq, terraces(GEOMETRY, length, 3))
    assert resolve_method("terraces", GEOMETRY, target_length=1536) == Terraces(factor=3.0)
    with pytest.raises(MethodError, match="Did you mean 'step'"):
        resolve_method("terraces", GEOMETRY, stpe=2)
    with pytest.raises(MethodError, match="Did you mean 'terraces'"):
        resolve_method("terrace", GEOMETRY)


def test_a_method_with_memory_in_a_model() -> None:
    model, short, long = rope.patch(build("llama"), "terraces"), tokens(TRAINED), tokens(LONG)
    plain = logits(build("llama"), short)
    assert difference(logits(model, short), plain) <= TOLERANCE
    linear = rope.patch(build("llama"), "linear", factor=LONG / TRAINED)
    assert difference(logits(model, long), logits(linear, long)) <= TOLERANCE
    assert difference(logits(model, short), logits(linear, short)) <= TOLERANCE  # it keeps the scale of the longest
    assert difference(logits(model, short), plain) >= CHANGED
    rope.reset(model)
    assert difference(logits(model, short), plain) <= TOLERANCE
    with torch.no_grad():
        cache = model(long[:, :-1], use_cache=True).past_key_values
        step = model(long[:, -1:], past_key_values=cache).logits
    assert difference(step, logits(linear, long)[:, -1:]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("tokens_", "past"), [(150, 0), (1, 149), (40, 110)])
def test_a_remapping_method_is_its_definition(tokens_: int, past: int) -> None:
    method = Thirds(window=33, max_distance=64)
    assert_close(*attend_and_definition(method, tokens_, tokens_ + past, pads=(0, 7)))
    places = torch.arange(0, 200, 3)
    expected = [[oracles.distances(method)(int(m), int(n)) if n <= m else 0.0 for n in places] for m in places]
    assert_close(method.distance(places[:, None], places).tril(), torch.tensor(expected, dtype=torch.float64))


def test_a_remapping_method_in_a_model() -> None:
    model, ids = rope.patch(build("llama"), "thirds"), tokens(3 * TRAINED)
    whole, parts, cache = logits(model, ids), [], None
    assert difference(whole, logits(build("llama"), ids)) >= CHANGED
    with torch.no_grad():
        for part in torch.split(ids, [50, 1, 77, 64], dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert difference(torch.cat(parts, 1), whole) <= TOLERANCE


@pytest.mark.parametrize(
    ("method", "params"),
    [("terraces", {}), ("terraces", {"factor": 4.0}), ("terraces", {"step": 2.0}), ("thirds", {"window": 20})],
    ids=str,
)
def test_methods_are_described_saved_restored_and_undone(method: str, params: dict[str, Any], tmp_path: Path) -> None:
    stock, ids = build("llama"), tokens(LONG)
    model = rope.patch(build("llama"), method, **params)
    described = rope.describe(model)
    assert described.method == method
    assert described.params.items() >= params.items()
    assert described.extended_length == (LONG if "factor" in params else None)
    out = logits(model, ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=f"rope_ext_hf/{method}"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    restored = rope.from_pretrained(tmp_path)
    assert torch.equal(logits(restored, ids), out)
    assert str(rope.describe(restored)) == str(described)
    assert torch.equal(logits(rope.unpatch(restored), ids), logits(stock, ids))


@pytest.mark.slow
def test_a_sweep_takes_one_factor_after_the_other(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    corpus = [Tokens("a", torch.randint(3, 90, (300,), generator=draws), tuple(range(1, 301)))]
    asked: dict[str, Any] = {"lengths": [64, 128], "bos": False}
    done = sweep(build("llama"), corpus, methods=["terraces", "thirds"], factors=[2.0, 4.0], out=tmp_path, **asked)
    names = list(dict.fromkeys(label(result.method) for result in done.results))
    assert names[:3] == ["unpatched", "terraces x2", "terraces x4"]
    assert names[3].startswith("thirds")
    alone = perplexity(rope.patch(build("llama"), "terraces", factor=4), corpus, **asked)
    together = [result.loss for result in done.results if label(result.method) == "terraces x4"]
    assert together == pytest.approx([result.loss for result in alone], abs=1e-5)


@pytest.mark.slow
def test_methods_on_the_command_line(tmp_path: Path) -> None:
    listed = {entry["method"]: entry for entry in json.loads(run("methods", "--json"))}
    assert listed["terraces"]["parameters"] == {"factor": None, "step": 1.0}
    assert listed["thirds"]["summary"].startswith("Beyond the window")
    arguments = ["reference", "--method", "terraces", "--factor", "2", "--step", "0.5"]
    described = json.loads(run("describe", *arguments, "--json"))
    assert (described["method"], described["params"]) == ("terraces", {"factor": 2.0, "step": 0.5})
    run("patch", *arguments, "--out", str(tmp_path / "patched"))
    assert json.loads(run("describe", str(tmp_path / "patched"), "--json"))["params"] == described["params"]
    measured = run(
        "sweep", "reference", "--method", "terraces,thirds", "--factor", "2,4", "--lengths", "128,512",
        "--max-spans", "1", "--protocol", "last-token", "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    for name in ("terraces x2", "terraces x4", "thirds"):
        assert name in measured


# --- protocols ----------------------------------------------------------------------------------------------------


def test_a_protocol_is_measured_as_defined() -> None:
    model = build("llama").double()
    corpus = [Tokens("a", tokens(150, seed=1)[0], tuple(range(1, 151)))]
    for result in perplexity(model, corpus, lengths=[16, 64], protocol="last-token", bos=False, chunk=16):
        ids = corpus[0].ids[: result.length]
        assert result.tokens == 1
        assert result.loss == pytest.approx(oracles.nats(model, ids, range(result.length - 1, result.length)), abs=1e-6)
    assert "last-token: The last token of every length" in protocol_help()


# --- families -----------------------------------------------------------------------------------------------------


def made_up() -> Any:
    config = MadeUpConfig(**{**build("llama").config.to_dict(), "model_type": "made_up"})
    model = MadeUpForCausalLM(config).eval()
    model.load_state_dict(build("llama").state_dict())
    return model


def test_a_family_is_patched_described_saved_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made_up(), tokens(LONG)
    plain = logits(model, ids)
    rope.patch(model, "yarn", factor=4)
    assert torch.equal(logits(model, ids), logits(rope.patch(build("llama"), "yarn", factor=4), ids))
    assert rope.describe(model).pairing == "half"
    model.save_pretrained(tmp_path / "yarn")
    assert type(rope.from_pretrained(tmp_path / "yarn")) is MadeUpForCausalLM
    assert torch.equal(logits(rope.from_pretrained(tmp_path / "yarn"), ids), logits(model, ids))
    rope.unpatch(model).save_pretrained(tmp_path / "half")
    with pytest.warns(UserWarning, match="does not run"):
        report = rope.convert_checkpoint(tmp_path / "half", tmp_path / "interleaved", "interleaved")
    assert report.to == "interleaved"
    described = json.loads(run("describe", str(tmp_path / "half"), "--json"))
    assert described["model_type"] == "made_up"

    def rotate_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        pairs = cos.shape[-1] // 2
        angles = torch.atan2(sin, cos)[..., :pairs].unsqueeze(unsqueeze_dim)
        return oracles.rotate(q, angles, "interleaved"), oracles.rotate(k, angles, "interleaved")

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_interleaved)
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "interleaved").eval()
    assert difference(logits(converted, ids), plain) <= TOLERANCE
