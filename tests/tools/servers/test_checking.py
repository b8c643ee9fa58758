"""`check_server` against servers on the loopback address that run a model of transformers, right or with a mistake."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import MethodError, ServingError
from rope_ext_hf.reference import path as reference_folder
from rope_ext_hf.tools import servers
from rope_ext_hf.tools.servers import checking
from rope_ext_hf.tools.servers.baselines import record_server
from tests.support.byte_tokenizers import SPECIAL, TEMPLATES, VOCABULARY, byte_tokenizer
from tests.support.models import build
from tests.support.wrapped_text import unwrapped
from tests.tools.support.model_servers import KINDS, logprobs, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model under YaRN x4, saved with its tokenizer."""
    patched_folder: Path = tmp_path_factory.mktemp("served") / "reference-yarn"
    assert (
        CliRunner()
        .invoke(app, ["patch", "reference", "--method", "yarn", "--factor", "4", "--out", str(patched_folder)])
        .exit_code
        == 0
    )
    return patched_folder


def plain(dtype: torch.dtype = torch.float32, **rope_parameters: Any) -> Any:
    """Return the bundled model as stock transformers builds it from rope settings."""
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
@pytest.mark.sampled(3)
def test_a_right_server_of_each_kind(kind: str, folder: Path) -> None:
    with serving(kind, plain(**YARN)) as url:
        report = servers.check_server(url, folder, lengths=[64, 300])
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
        report = servers.check_server(url, folder, lengths=[100, 400])
    assert not report.agrees
    assert report.runs == name, str(report)


def through_gguf(weight: torch.Tensor, kind: Any = gguf.GGMLQuantizationType.Q8_0) -> torch.Tensor:
    """Return a weight as the gguf package writes it and reads it back."""
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
        report = servers.check_server(url, folder, lengths=[100, 400], dtype=dtype)
    assert report.agrees, str(report)
    assert report.precision in ("bfloat16", "8-bit weights")


def test_weights_of_few_bits() -> None:
    """Eight bits are those of the gguf package; four are within half a step for the largest number of each block."""
    from rope_ext_hf.tools.servers.roundings import rounded_to_bits

    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    torch.testing.assert_close(rounded_to_bits(weight, 8, 32), through_gguf(weight), rtol=0, atol=0)
    blocks, rounded = weight.view(-1, 32), rounded_to_bits(weight, 4, 32).view(-1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    assert bool(((rounded - blocks).abs() <= largest / 14 * 1.001).all())
    assert all(len(block.unique()) <= 15 for block in rounded)


@pytest.mark.slow
def test_coarser_weights_are_allowed_where_they_are_stated(folder: Path) -> None:
    model = quantised(gguf.GGMLQuantizationType.Q4_0)
    with serving("vLLM 0.33.0", model) as url:
        unstated, stated = (servers.check_server(url, folder, lengths=[100], weight_bits=bits) for bits in (8, 4))
    assert (unstated.runs, unstated.closest) == (None, "as measured")
    assert (stated.runs, stated.precision) == ("as measured", "4-bit weights")
    with pytest.raises(MethodError, match="from 2 to 32, got 1"):
        servers.check_server("http://127.0.0.1:9", folder, weight_bits=1)


FP8 = "float8 keys and values"


def in_float8(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Compute transformers' attention over keys and values that were rounded to float8."""
    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)


@pytest.fixture
def coarse_keys() -> Iterator[Any]:
    AttentionInterface.register(FP8, in_float8)
    AttentionMaskInterface.register(FP8, sdpa_mask)
    model = plain(**YARN)
    model.set_attn_implementation(FP8)
    yield model
    for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registered._global_mapping.pop(FP8)


@pytest.mark.slow
def test_coarse_keys_and_values_are_allowed_where_they_are_stated(coarse_keys: Any, folder: Path) -> None:
    with serving("vLLM 0.33.0", coarse_keys) as url:
        unstated, stated = (servers.check_server(url, folder, lengths=[100, 400], kv_bits=bits) for bits in (16, 8))
    assert (unstated.runs, unstated.closest) == (None, "as measured")
    assert "8-bit keys and values" in unstated.suggested
    assert "check again with --weight-bits or --kv-bits" in unwrapped(unstated)
    assert stated.agrees
    assert stated.precision == "float32 or float16, 8-bit keys and values"
    with pytest.raises(MethodError, match="4, 8 or 16, got 5"):
        servers.check_server("http://127.0.0.1:9", folder, kv_bits=5)


def scaled(ratio: float, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = plain(dtype, **YARN)
    for layer in model.model.layers:
        layer.self_attn.scaling *= ratio
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "runs"),
    [
        pytest.param(1.0, "as measured", marks=pytest.mark.thorough),
        (1.01, r"with a softmax scale [01]\.\d% too large"),
        pytest.param(0.98, r"with a softmax scale [12]\.\d% too small", marks=pytest.mark.thorough),
    ],
)
def test_a_strict_check_tells_an_error_of_a_hundredth(ratio: float, runs: str, folder: Path) -> None:
    """The server computes in bfloat16, whose rounding changes one answer more than the error does."""
    with serving("vLLM 0.33.0", scaled(ratio)) as url:
        report = servers.check_server(url, folder, lengths=[100], strict=True)
    assert re.fullmatch(runs, report.runs or ""), str(report)
    assert report.agrees is (ratio == 1.0)
    assert report.smallest_errors["bfloat16"][0] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "runs"), [(1.01, r"1\.0% too large"), (1.03, r"[23]\.\d% too large"), (0.99, r"1\.0% too small")]
)
def test_an_error_of_a_hundredth_in_float32_is_named(ratio: float, runs: str, folder: Path) -> None:
    """Rounding of bfloat16 could explain the error; but without it, the rest is within the rounding of float32."""
    with serving("vLLM 0.33.0", scaled(ratio, torch.float32)) as url:
        report = servers.check_server(url, folder, lengths=[100, 300], strict=True)
    assert re.fullmatch(f"with a softmax scale {runs}", report.runs or ""), str(report)
    assert report.precision == "float32 or float16"
    assert not report.agrees
    assert not report.too_coarse


@pytest.mark.slow
def test_a_strict_check_is_as_strict_as_the_server_is_exact(folder: Path) -> None:
    """No further prompts are sent for a coarser dtype than the one that fits the server."""
    with serving("vLLM 0.33.0", scaled(1.0, torch.float32)) as url:
        report = servers.check_server(url, folder, lengths=[100], strict=True)
    assert report.agrees, str(report)
    assert report.precision == "float32 or float16"
    assert (
        report.smallest_scale_error
        == report.smallest_errors["float32 or float16"][0]
        < 1
        < report.smallest_errors["bfloat16"][0]
    )


@pytest.mark.slow
def test_what_would_show_is_what_shows(folder: Path) -> None:
    """An error above the smallest one that a report states is detected; noise well below it passes."""
    with serving("vLLM 0.33.0", scaled(1.0, torch.float32)) as url:
        right = servers.check_server(url, folder, lengths=[100], weight_bits=32)
    ((scale, noise),) = right.smallest_errors.values()
    assert right.agrees
    assert 0 < scale < 1
    with serving("vLLM 0.33.0", scaled(1 + 1.2 * scale / 100, torch.float32)) as url:
        assert "softmax scale" in str(servers.check_server(url, folder, lengths=[100], weight_bits=32).runs)

    def noisy(share: float) -> Any:
        model, draws = plain(**YARN), torch.Generator().manual_seed(1)

        def add(module: Any, given: Any, out: Any) -> Any:
            return out + share * out.square().mean().sqrt() * torch.randn(out.shape, generator=draws)

        model.model.layers[len(model.model.layers) // 2].self_attn.o_proj.register_forward_hook(add)
        return model

    for share, passes in ((0.3 * noise, True), (2 * noise, False)):
        with serving("vLLM 0.33.0", noisy(share / 100)) as url:
            report = servers.check_server(url, folder, lengths=[100], weight_bits=32)
        assert (report.runs == "as measured") is passes, str(report)


# --- what people do most often ---------------------------------------------------------------------------------------


BEFORE: dict[str, Callable[[Any], list[int]]] = {
    "with </s> before the prompt": lambda tokenizer: [1],
    "with </s> twice before the prompt": lambda tokenizer: [1, 1],
    "with the chat template before the prompt": lambda tokenizer: tokenizer("[user] ", add_special_tokens=False)[
        "input_ids"
    ],
}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vLLM 0.33.0", "llama.cpp b1"])
@pytest.mark.parametrize("name", BEFORE)
def test_tokens_before_the_prompt_are_named(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    """A proxy or a template may add them; vLLM then returns log-probabilities of more tokens than were sent."""
    shutil.copytree(folder, served := tmp_path / "served")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, bos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}[user] {{ m.content }} [end]{% endfor %}"
    tokenizer.save_pretrained(served)
    usual, ids = KINDS[kind][2], BEFORE[name](tokenizer)
    with serving(kind, plain(**YARN), lambda m, body: usual(m, body | {"prompt": ids + body["prompt"]})) as url:
        report = servers.check_server(url, served, lengths=[100, 300])
    assert report.runs == name, str(report)
    assert not report.agrees


@pytest.mark.slow
def test_a_patch_that_was_not_measured_is_named() -> None:
    """A common mistake: the unpatched model is measured, and the patched folder is served."""
    with serving("vLLM 0.33.0", plain(**YARN)) as url:
        report = servers.check_server(url, reference_folder(), lengths=[100, 250])
    assert report.runs == "with yarn x4 put in", str(report)


@pytest.mark.slow
def test_another_tokenizer_is_named(folder: Path) -> None:
    ours = AutoTokenizer.from_pretrained(folder)

    def same(text: str, special: bool) -> list[int]:
        ids: list[int] = ours(text, add_special_tokens=special)["input_ids"]
        return ids

    for tokenize, agrees in (
        (same, True),
        (lambda text, special: [1] * special + same(text, special), False),
        (lambda text, special: same(text.lower(), special), False),
    ):
        with serving("vLLM 0.33.0", plain(**YARN), tokenize=tokenize) as url:
            report = servers.check_server(url, folder, lengths=[64])
        assert report.runs == "as measured"
        assert report.agrees is agrees
        assert ("the server's tokenizer differs from the one here" in unwrapped(report)) is not agrees


@pytest.mark.slow
def test_a_small_unknown_mistake_does_not_hide_where_the_dtype_is_stated(folder: Path) -> None:
    with serving("vLLM 0.33.0", plain(**YARN | {"factor": 3.7})) as url:
        unstated, stated = (servers.check_server(url, folder, lengths=[64, 200], weight_bits=bits) for bits in (8, 32))
    assert unstated.precision == "bfloat16"
    assert (stated.runs, stated.closest) == (None, "as measured")


@pytest.mark.slow
def test_another_model_is_neither_right_nor_a_mistake(folder: Path) -> None:
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(plain().config).eval()
    with serving("vLLM 0.33.0", other) as url:
        report = servers.check_server(url, folder, lengths=[200])
    assert (report.runs, report.precision, report.agrees) == (None, None, False)
    assert f"the closest, {report.closest}, differs by more than rounding explains" in unwrapped(report)


@pytest.mark.slow
def test_configurations_that_fit_as_well_are_named(tmp_path: Path) -> None:
    """An attention factor of 1.0005 is below the rounding of bfloat16."""
    folder = tmp_path / "slight"
    factor: dict[str, Any] = {"attention_factor": 1.0005}
    rope.patch(plain(), "yarn", factor=4.0, **factor).save_pretrained(folder)
    for file in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(reference_folder() / file, folder)
    with serving("vLLM 0.33.0", plain(torch.bfloat16, **YARN, **factor)) as url:
        report = servers.check_server(url, folder, lengths=[100, 300])
    assert report.agrees
    assert "with no attention factor" in report.alike
    assert "these answers fit the model" in unwrapped(report)


@pytest.mark.slow
def test_a_server_that_refuses_long_prompts_is_not_right(folder: Path) -> None:
    """The server was started for a shorter length; its answers are right."""
    usual = KINDS["vLLM 0.33.0"][2]
    with serving(
        "vLLM 0.33.0", plain(**YARN), lambda m, body: None if len(body["prompt"]) > 256 else usual(m, body)
    ) as url:
        report = servers.check_server(url, folder, lengths=[100, 400])
    assert (report.runs, report.agrees, report.lengths) == ("as measured", False, (100,))
    assert "serves what was measured up to 100 tokens: yarn x4" in unwrapped(report)
    assert "does not answer a longer prompt" in unwrapped(report)
    assert "404" in unwrapped(report)


@pytest.mark.slow
def test_the_patch_is_as_before_after_all_mistakes_were_tried(folder: Path) -> None:
    """Weights and frequencies are restored; otherwise the next check would call a right server wrong."""
    from rope_ext_hf.hub import load_model
    from rope_ext_hf.tools.servers.mistakes import configurations
    from rope_ext_hf.tools.serving.configs import open_model

    model = load_model(folder, dtype="float32", device="cpu")
    before, ids = {k: v.clone() for k, v in model.state_dict().items()}, list(range(5, 205))
    expected = logprobs(model, ids)
    for configuration in configurations(model, open_model(folder).rope.embedding.rotary).values():
        with configuration():
            pass
    assert torch.equal(logprobs(model, ids), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="begins with http"):
        servers.check_server("localhost:8000", folder)
    with pytest.raises(ServingError, match="does not answer"):
        servers.check_server("http://127.0.0.1:9", folder, seconds=2.0)
    with (
        serving("vLLM 0.33.0", None, lambda *_: {"choices": [{}]}) as url,
        pytest.raises(ServingError, match="no log-prob"),
    ):
        servers.check_server(url, folder, lengths=[64])
    (wrong := tmp_path / "answers.json").write_text('{"prompts": []}')
    with pytest.raises(ServingError, match="does not hold answers"):
        servers.check_server("none", folder, from_file=wrong)
    wrong.write_text('{"prompts": [{"ids": [1, 99999], "answers": [[1, 2, -1.0]]}]}')
    with pytest.raises(ServingError, match=r"token 99999.* vocabulary of 259"):
        servers.check_server("none", folder, from_file=wrong)


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
def test_prompts_that_would_take_too_long_are_left_out_unless_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "COMPUTE_SECONDS", 1e-9)
    with serving("vLLM 0.33.0", plain(**YARN)) as url:
        report = servers.check_server(url, folder)
        assert (report.lengths, report.left_out, report.agrees) == ((128,), 1023, True)
        assert "prompts of up to 1,023 tokens were left out" in unwrapped(report)
        with_lengths = servers.check_server(url, folder, lengths=[64, 300])
    assert (with_lengths.lengths, with_lengths.left_out) == ((64, 300), None)


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
        direct = servers.check_server(url, folder, lengths=[64, 300])
    report = servers.check_server("elsewhere", folder, from_file=collected)
    assert report.agrees
    assert (report.server, report.lengths) == ("vLLM 0.33.0", (64, 300))
    assert report.differences == direct.differences
    with pytest.raises(ServingError, match="does not answer"):
        record_server("http://127.0.0.1:9", tmp_path / "none.json", bare, seconds=2.0)
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("mistaken", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_begin_as_the_tokenizer_begins_a_text(template: str, mistaken: bool, tmp_path: Path) -> None:
    """If a server adds these tokens once more, the mistake is named with all of them."""
    tokenizer, prompts = byte_tokenizer(template), list[list[int]]()
    prefix = tokenizer("H")["input_ids"][: TEMPLATES[template]]  # by the definition: what stands before the first byte
    build("llama", vocab_size=VOCABULARY).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    usual = KINDS["vLLM 0.33.0"][2]

    def answer(model: Any, body: Any) -> Any:
        prompts.append(body["prompt"])
        return usual(model, body | {"prompt": [*(prefix * mistaken), *body["prompt"]]})

    with serving("vLLM 0.33.0", build("llama", vocab_size=VOCABULARY), answer) as url:
        report = servers.check_server(url, tmp_path, lengths=[24, 40], device="cpu")
        record_server(url, tmp_path / "record.json", tmp_path, lengths=[24, 40])
    assert [len(ids) for ids in prompts[:2]] == [24, 40]
    assert all(ids[: len(prefix)] == prefix for ids in prompts)
    assert not [token for ids in prompts for token in ids[len(prefix) :] if token < len(SPECIAL)]
    names = "".join(tokenizer.convert_ids_to_tokens(prefix))
    assert report.runs == (f"with {names} before the prompt" if mistaken and prefix else "as measured"), str(report)


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_of_a_record_begin_as_the_server_begins_a_text(template: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template)
    prefix = tokenizer("H")["input_ids"][: TEMPLATES[template]]

    def tokenize(text: str, special: bool) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    with serving("vLLM 0.33.0", build("llama", vocab_size=VOCABULARY), tokenize=tokenize) as url:
        collected = record_server(url, tmp_path / "record.json", lengths=[24, 40])
        more = collected.more(2)
    assert [len(prompt.ids) for prompt in (*collected.prompts, *more)] == [24, 40, 24, 24]
    text = [ids[len(prefix) :] for ids, _ in more]
    first, second = (prompt.ids[len(prefix) :] for prompt in collected.prompts)
    assert [*first, *text[0], *text[1]][: 40 - len(prefix)] == second
    for ids, _ in (*collected.prompts, *more):
        assert ids[: len(prefix)] == prefix
        assert not [token for token in ids[len(prefix) :] if token < len(SPECIAL)]
