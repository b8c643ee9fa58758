"""`check_server` against servers on the loopback address that run a model of transformers, right or with a mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError, ServingError
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.servers.baselines import record_server
from tests.support.model_servers import KINDS, logprobs, serving
from tests.support.wrapped_text import unwrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model under YaRN x4, saved with its tokenizer."""
    made: Path = tmp_path_factory.mktemp("served") / "reference-yarn"
    assert (
        CliRunner()
        .invoke(app, ["patch", "reference", "--method", "yarn", "--factor", "4", "--out", str(made)])
        .exit_code
        == 0
    )
    return made


def plain(dtype: torch.dtype = torch.float32, **rope_parameters: Any) -> Any:
    """The bundled model as stock transformers builds it from rope settings."""
    config = {"rope_type": "default", "rope_theta": 10000.0} | rope_parameters
    return AutoModelForCausalLM.from_pretrained(reference_folder(), dtype=dtype, rope_parameters=config).eval()


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_server_of_each_kind(kind: str, folder: Path) -> None:
    with serving(kind, plain(**YARN)) as url:
        report = rope.check_server(url, folder, lengths=[64, 300])
    assert report.agrees
    assert (report.server, report.lengths) == (kind, (64, 300))
    assert max(report.differences["as measured"]) < 1e-3
    assert "serves what was measured: yarn x4" in unwrapped(report)


def squared(module: Any) -> None:
    module.attention_scaling **= 2


def rounded(module: Any) -> None:
    module.inv_freq = module.inv_freq.bfloat16().float()


def twice(module: Any) -> None:
    module.inv_freq = module.inv_freq**2 / plain().model.rotary_emb.inv_freq


def changed(change: Callable[[Any], None]) -> Any:
    model = plain(**YARN)
    change(model.model.rotary_emb)
    return model


MISTAKES: dict[str, Callable[[], Any]] = {
    "without the patch": plain,
    "with no attention factor": lambda: plain(**YARN, attention_factor=1.0),
    "with the attention factor applied twice": lambda: changed(squared),
    "with the scaling applied twice": lambda: changed(twice),
    "with the extended length as the original one": lambda: plain(**YARN | {"original_max_position_embeddings": 1024}),
    "with interleaved weights rotated as half": lambda: wrongly_paired(),
    "with frequencies rounded to bfloat16": lambda: changed(rounded),
    "with linear x4 in place of yarn x4": lambda: plain(rope_type="linear", factor=4.0),
    "with yarn x2 in place of yarn x4": lambda: plain(**YARN | {"factor": 2.0}),
}


def wrongly_paired() -> Any:
    with pytest.warns(UserWarning, match="interleaved now"):
        return rope.convert(plain(**YARN), to="interleaved")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("vLLM 0.33.0", name) for name in MISTAKES), ("llama.cpp b1", "with no attention factor")],
)
def test_a_mistake_is_named(kind: str, name: str, folder: Path) -> None:
    with serving(kind, MISTAKES[name]()) as url:
        report = rope.check_server(url, folder, lengths=[100, 400])
    assert not report.agrees
    assert report.runs == name, str(report)


def through_gguf(weight: torch.Tensor, kind: Any = gguf.GGMLQuantizationType.Q8_0) -> torch.Tensor:
    """A weight as the gguf package writes it, and reads it back."""
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))


def quantised(kind: Any = gguf.GGMLQuantizationType.Q8_0) -> Any:
    model = plain(**YARN)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(through_gguf(parameter.detach(), kind))
    return model


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [lambda: plain(torch.bfloat16, **YARN), quantised], ids=["bfloat16", "Q8_0"])
def test_a_server_of_another_dtype_is_right_too(model: Callable[[], Any], dtype: str, folder: Path) -> None:
    with serving("vLLM 0.33.0", model()) as url:
        report = rope.check_server(url, folder, lengths=[100, 400], dtype=dtype)
    assert report.agrees, str(report)
    assert report.precision in ("bfloat16", "8-bit weights")


def test_weights_of_few_bits() -> None:
    """Eight bits as the gguf package makes them; four within half a step of the largest number of each block."""
    from rope_ext_hf.servers.checking import _rounded

    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    torch.testing.assert_close(_rounded(weight, 8, 32), through_gguf(weight), rtol=0, atol=0)
    blocks, rounded = weight.view(-1, 32), _rounded(weight, 4, 32).view(-1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    assert bool(((rounded - blocks).abs() <= largest / 14 * 1.001).all())
    assert all(len(block.unique()) <= 15 for block in rounded)


@pytest.mark.slow
def test_coarser_weights_are_allowed_where_they_are_stated(folder: Path) -> None:
    model = quantised(gguf.GGMLQuantizationType.Q4_0)
    with serving("vLLM 0.33.0", model) as url:
        unstated, stated = (rope.check_server(url, folder, lengths=[100], weight_bits=bits) for bits in (8, 4))
    assert (unstated.runs, unstated.closest) == (None, "as measured")
    assert (stated.runs, stated.precision) == ("as measured", "4-bit weights")
    with pytest.raises(MethodError, match="from 2 to 32, got 1"):
        rope.check_server("http://127.0.0.1:9", folder, weight_bits=1)


@pytest.mark.slow
def test_a_small_unknown_mistake_does_not_hide_where_the_dtype_is_stated(folder: Path) -> None:
    with serving("vLLM 0.33.0", plain(**YARN | {"factor": 3.7})) as url:
        unstated, stated = (rope.check_server(url, folder, lengths=[64, 200], weight_bits=bits) for bits in (8, 32))
    assert unstated.precision == "bfloat16"
    assert (stated.runs, stated.closest) == (None, "as measured")


@pytest.mark.slow
def test_another_model_is_neither_right_nor_a_mistake(folder: Path) -> None:
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(plain().config).eval()
    with serving("vLLM 0.33.0", other) as url:
        report = rope.check_server(url, folder, lengths=[200])
    assert (report.runs, report.precision, report.agrees) == (None, None, False)
    assert f"the closest, {report.closest}, differs by more than rounding explains" in unwrapped(report)


@pytest.mark.slow
def test_what_answers_cannot_tell_apart_is_said(tmp_path: Path) -> None:
    """An attention factor of 1.0005 is below the rounding of bfloat16."""
    folder = tmp_path / "slight"
    factor: dict[str, Any] = {"attention_factor": 1.0005}
    rope.patch(plain(), "yarn", factor=4.0, **factor).save_pretrained(folder)
    for file in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(reference_folder() / file, folder)
    with serving("vLLM 0.33.0", plain(torch.bfloat16, **YARN, **factor)) as url:
        report = rope.check_server(url, folder, lengths=[100, 300])
    assert report.agrees
    assert "with no attention factor" in report.alike
    assert "these answers do not tell that from the model" in unwrapped(report)


@pytest.mark.slow
def test_a_server_that_refuses_long_prompts_is_not_right(folder: Path) -> None:
    """The extended length was not handed to it: what it answers is right."""
    usual = KINDS["vLLM 0.33.0"][2]
    with serving(
        "vLLM 0.33.0", plain(**YARN), lambda m, body: None if len(body["prompt"]) > 256 else usual(m, body)
    ) as url:
        report = rope.check_server(url, folder, lengths=[100, 400])
    assert (report.runs, report.agrees, report.lengths) == ("as measured", False, (100,))
    assert "serves what was measured up to 100 tokens: yarn x4" in unwrapped(report)
    assert "does not answer a longer prompt" in unwrapped(report)
    assert "404" in unwrapped(report)


@pytest.mark.slow
def test_the_patch_is_as_before_after_all_mistakes_were_tried(folder: Path) -> None:
    """Weights and frequencies come back: another model here would call a right server wrong the next time."""
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.servers.mistakes import configurations
    from rope_ext_hf.serving.target import open_model

    model = load_model(folder, dtype="float32", device="cpu")
    before, ids = {k: v.clone() for k, v in model.state_dict().items()}, list(range(5, 205))
    expected = logprobs(model, ids)
    for configuration in configurations(model, open_model(folder).described.rotary).values():
        with configuration():
            pass
    assert torch.equal(logprobs(model, ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="begins with http"):
        rope.check_server("localhost:8000", folder)
    with pytest.raises(ServingError, match="does not answer"):
        rope.check_server("http://127.0.0.1:9", folder, seconds=2.0)
    with (
        serving("vLLM 0.33.0", None, lambda *_: {"choices": [{}]}) as url,
        pytest.raises(ServingError, match="no log-prob"),
    ):
        rope.check_server(url, folder, lengths=[64])
    (wrong := tmp_path / "answers.json").write_text('{"prompts": []}')
    with pytest.raises(ServingError, match="does not hold answers"):
        rope.check_server("none", folder, from_file=wrong)
    wrong.write_text('{"prompts": [{"ids": [1, 99999], "answers": [[1, 2, -1.0]]}]}')
    with pytest.raises(ServingError, match=r"token 99999.* vocabulary of 259"):
        rope.check_server("none", folder, from_file=wrong)


@pytest.mark.slow
def test_answers_collected_elsewhere_and_the_command(folder: Path, tmp_path: Path) -> None:
    ids = [5 + i % 200 for i in range(300)]
    scores = logprobs(plain(**YARN), ids)
    answers = [[i, ids[i], float(scores[i - 1, ids[i]])] for i in range(270, 300)]
    (collected := tmp_path / "answers.json").write_text(json.dumps({"prompts": [{"ids": ids, "answers": answers}]}))
    arguments = ["check-server", "elsewhere", str(folder), "--from-file", str(collected)]
    right = CliRunner().invoke(app, arguments)
    assert right.exit_code == 0, right.output
    wrong = CliRunner().invoke(app, ["check-server", "elsewhere", "reference", "--from-file", str(collected), "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["agrees"] is False


@pytest.mark.slow
def test_answers_are_collected_where_there_are_no_weights(folder: Path, tmp_path: Path) -> None:
    (bare := tmp_path / "bare").mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, bare)
    collected = tmp_path / "answers.json"
    with serving("vLLM 0.33.0", plain(**YARN)) as url:
        arguments = ["check-server", url, str(bare), "--lengths", "64,300", "--record", str(collected)]
        written = CliRunner().invoke(app, arguments)
        assert written.exit_code == 0, written.output
        assert CliRunner().invoke(app, arguments).exit_code == 2  # the file exists
        direct = rope.check_server(url, folder, lengths=[64, 300])
    report = rope.check_server("elsewhere", folder, from_file=collected)
    assert report.agrees
    assert (report.server, report.lengths) == ("vLLM 0.33.0", (64, 300))
    assert report.differences == direct.differences
    with pytest.raises(ServingError, match="does not answer"):
        record_server("http://127.0.0.1:9", tmp_path / "none.json", bare, seconds=2.0)
    assert not (tmp_path / "none.json").exists()
