"""GGUF files that carry a method: small real files, rewritten, read back, and damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError, FileError, ServingError
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.formulas import llama3, plain
from rope_ext_hf.tools.engines.gguf_rules import file_computes
from rope_ext_hf.tools.gguf.headers import read_file_rope
from rope_ext_hf.tools.gguf.rewriting import rewrite
from rope_ext_hf.tools.serving.configs import make_target
from tests.support.commands import run
from tests.support.wrapped_text import unwrapped
from tests.tools.support.gguf_models import LENGTH, write_llama
from tests.tools.support.serving_models import served_model

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Mistral of one tensor, with the keys that its converter writes."""
    path = tmp_path / "in.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32768)
    writer.add_embedding_length(512)
    writer.add_head_count(4)
    writer.add_rope_dimension_count(128)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.weight", np.arange(64, dtype=np.float32).reshape(4, 16))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "by-parts", "llama3"])
def test_a_rewritten_file_computes_what_was_measured(source: Path, tmp_path: Path, method: str) -> None:
    target = make_target(served_model("Mistral"), method, factor=4.0)
    before, out = source.read_bytes(), tmp_path / "out.gguf"
    rewrite(source, out, find_engine("gguf").config_for(target))
    assert source.read_bytes() == before
    file = read_file_rope(out)
    computed = file_computes(file, target.length)
    assert file.keys["context_length"] == 4 * 32768
    np.testing.assert_allclose(computed.inv_freq, target.inv_freq, rtol=2e-5)
    assert computed.attention_factor == pytest.approx(target.attention_factor, rel=1e-6)
    reader = gguf.GGUFReader(out)
    weights = {tensor.name: tensor.data for tensor in reader.tensors}
    np.testing.assert_array_equal(weights["blk.0.weight"], np.arange(64, dtype=np.float32).reshape(4, 16))
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    again = tmp_path / "again.gguf"
    plain = find_engine("gguf").config_for(make_target(served_model("Mistral"), "theta", theta=2e6))
    rewrite(out, again, plain)  # a method over a file that carries one replaces it
    restored = read_file_rope(again)
    assert restored.keys.get("rope.scaling.factor") is None
    assert "rope_freqs.weight" not in restored.tensors
    with pytest.raises(FileError, match="exists"):
        rewrite(source, out, plain)


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "by-parts", "llama3"])
def test_a_rewritten_file_loads_with_what_it_computes(method: str, tmp_path: Path) -> None:
    """transformers alone reads no scaling from a GGUF file, and loads the model without it."""
    source, out = tmp_path / "small.gguf", tmp_path / "out.gguf"
    write_llama(source)
    assert run("gguf", source, out, "--method", method, "--factor", 4)[0] == 0
    file = read_file_rope(out)
    computed = file_computes(file, 4 * LENGTH)
    layer = rope.fingerprint(out).layers["all"]
    np.testing.assert_allclose(layer.inv_freq, computed.inv_freq, rtol=2e-5)
    assert layer.attention_factor == pytest.approx(computed.attention_factor, rel=1e-6)
    assert rope.from_pretrained(out).config.max_position_embeddings == 4 * LENGTH


def test_a_file_of_llama_3_loads_with_its_scaling(tmp_path: Path) -> None:
    config = {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}
    divisors = np.asarray(plain(5e5, 16)) / llama3(5e5, 16, 32.0, 8192, 1.0, 4.0)
    keys = {"rope.freq_base": 5e5, "context_length": 131072}
    write_llama(tmp_path / "small.gguf", keys=keys, tensors={"rope_freqs.weight": divisors.tolist()})
    described = rope.describe(rope.from_pretrained(tmp_path / "small.gguf"))
    assert (described.method, described.params["factor"]) == ("llama3", config["factor"])


@pytest.mark.parametrize(("architecture", "run"), [("llama", True), ("qwen35", True), ("llama4", False)])
def test_audit_says_of_a_file_whose_graph_was_read_alone(architecture: str, run: bool, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", architecture)
    writer.add_context_length(4096)
    writer.add_rope_dimension_count(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    result = serving.audit(tmp_path / "in.gguf")
    assert ("not run" in str(result)) is not run
    assert result.engines[0].computed is not None


def test_audit_of_a_file(source: Path, tmp_path: Path) -> None:
    assert serving.audit(source).agrees
    out = tmp_path / "out.gguf"
    config = find_engine("gguf").config_for(make_target(served_model("Mistral"), "yarn", factor=4.0))
    config.gguf_keys["llama.rope.scaling.yarn_ext_factor"] = 4.0  # the factor in the wrong key
    config.gguf_keys["llama.rope.scaling.yarn_beta_fast"] = 8.0
    rewrite(source, out, config)
    betas, ext = sorted(serving.audit(out).problems)
    assert betas == "rope.scaling.yarn_beta_fast is 8, and not read for 'llama'."
    assert ext == "rope.scaling.yarn_ext_factor is 4, and not read for 'llama'."


def field(name: str, kind: int, value: bytes) -> bytes:
    """A key of the header with its value; the count of keys stays what it was."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def changed(whole: bytes, old: bytes, new: bytes) -> bytes:
    """A file with a part of the entry of its tensor replaced."""
    begin = whole.index(b"blk.0.weight")
    where = whole.index(old, begin)
    return whole[:where] + new + whole[where + len(old) :]


def test_damaged_files_are_errors_of_one_line(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()

    def keys(more: int) -> bytes:
        return struct.pack("<Q", struct.unpack_from("<Q", whole, 16)[0] + more)

    config = find_engine("gguf").config_for(make_target(served_model("Mistral"), "yarn", factor=4.0))
    damaged = {
        "empty": b"",
        "magic": b"GGML" + whole[4:],
        "keys": whole[:16] + struct.pack("<Q", 2**60) + whole[24:],
        "tensors": whole[:8] + struct.pack("<Q", 2**60) + whole[16:],
        "some more keys": whole[:16] + struct.pack("<Q", 900_000) + whole[24:],
        "string": whole[:24] + struct.pack("<Q", 2**62) + whole[32:],
        "array": whole[:24] + field("a", 9, struct.pack("<IQ", 4, 2**60)) + whole[24:],
        "array of strings": whole[:24] + field("a", 9, struct.pack("<IQ", 8, 2**60)) + whole[24:],
        "arrays in arrays": whole[:24] + field("a", 9, struct.pack("<IQ", 9, 1) * 5000) + whole[24:],
        "type": whole[:24] + field("a", 77, b"") + whole[24:],
        "alignment": whole[:16] + keys(1) + field("general.alignment", 4, struct.pack("<I", 0)) + whole[24:],
        "twice": whole[:16] + keys(1) + field("llama.context_length", 4, struct.pack("<I", 1)) + whole[24:],
        "offset": changed(whole, struct.pack("<IQ", 0, 0), struct.pack("<IQ", 0, 2**62)),
        "dims": changed(whole, struct.pack("<IQQ", 2, 16, 4), struct.pack("<IQQ", 2, 2**40, 2**40)),
        "number of dims": changed(whole, struct.pack("<IQQ", 2, 16, 4), struct.pack("<IQQ", 2**31, 16, 4)),
        "dtype": changed(whole, struct.pack("<QQIQ", 16, 4, 0, 0), struct.pack("<QQIQ", 16, 4, 9999, 0)),
        "cut": whole[: len(whole) // 2],
        "short": whole[:-8],
    }
    for name, data in damaged.items():
        path, out = tmp_path / f"{name}.gguf", tmp_path / f"{name}-out.gguf"
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            rewrite(path, out, config)
        assert "\n" not in str(caught.value), name
        assert not out.exists()
        assert not list(tmp_path.glob("*.part"))
    with pytest.raises(CheckpointError, match="no such file"):
        serving.audit(tmp_path / "none.gguf")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_divisor_that_no_frequency_can_have_is_found(source: Path, tmp_path: Path, value: float) -> None:
    config = find_engine("gguf").config_for(make_target(served_model("Mistral"), "llama3", factor=4.0))
    (name,) = config.gguf_tensors
    divisors = list(config.gguf_tensors[name])
    config.gguf_tensors[name] = (*divisors[:5], value, *divisors[6:])
    rewrite(source, tmp_path / "out.gguf", config)
    result = serving.audit(tmp_path / "out.gguf")
    assert not result.agrees
    assert f"{name} divides the frequency of pair 5 by {value:g}, which makes every output" in unwrapped(result)
    assert result.to_dict()["engines"][0]["computed"] is None


@pytest.mark.parametrize("key", ["freq_base", "scaling.factor", "scaling.attn_factor", "scaling.yarn_beta_fast"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 3e38, 1e-38])
def test_audit_of_hostile_numbers_ends(source: Path, tmp_path: Path, key: str, value: float) -> None:
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(512)
    writer.add_head_count(4)
    writer.add_string("llama.rope.scaling.type", "yarn")
    writer.add_float32(f"llama.rope.{key}", value)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    result = serving.audit(tmp_path / "in.gguf")
    assert str(result).startswith(str(tmp_path))
    if key == "scaling.factor" and value == 0:
        assert result.agrees  # llama.cpp takes a factor of 0 for 1
    elif key != "scaling.yarn_beta_fast" and not 0 < value < np.inf:
        assert f"rope.{key} must be a number above 0" in unwrapped(result)


SIZES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Phi-3": "phi3",
    "Qwen3": "qwen3",
    "Gemma 3": "gemma3",
    "gpt-oss": "gpt-oss",
}
METHODS: dict[str, dict[str, Any]] = {
    **{name: {"factor": 4.0} for name in ("linear", "ntk", "by-parts", "llama3")},
    "theta": {"theta": 2e6},
    "yarn": {"factor": 4.0},
    "yarn, other ramp": {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, ramp equal by rounding": {"factor": 4.0, "beta_fast": 31.9},
    "yarn, magnitude": {"factor": 4.0, "attention_factor": 1.2},
    "cope": {},
    "nope": {"recalibrated": 1},
}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_audit_finds_nothing_in_what_was_written(family: str, name: str, tmp_path: Path) -> None:
    target = make_target(served_model(family), name.partition(",")[0], over="original", **METHODS[name])
    try:
        config = find_engine("gguf").config_for(target)
    except ServingError:
        return
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", SIZES[family])
    writer.add_context_length(4096)
    writer.add_rope_dimension_count(2 * len(target.inv_freq))
    writer.add_tensor("blk.0.weight", np.zeros((2, 2), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    rewrite(tmp_path / "in.gguf", tmp_path / "out.gguf", config)
    result = serving.audit(tmp_path / "out.gguf")
    assert result.agrees, str(result)
    computed = result.engines[0].computed
    assert computed is not None
    np.testing.assert_allclose(computed.inv_freq, target.inv_freq, rtol=2e-5, atol=1e-38)


def test_betas_that_change_nothing_are_no_problem(source: Path, tmp_path: Path) -> None:
    """A converter writes them; llama.cpp reads none, and 31.9 rounds to the same pairs as 32."""
    config = find_engine("gguf").config_for(make_target(served_model("Mistral"), "yarn", factor=4.0))
    assert not any("beta" in key for key in config.gguf_keys)
    for beta, agrees in ((31.9, True), (8.0, False)):
        config.gguf_keys["llama.rope.scaling.yarn_beta_fast"] = beta
        rewrite(source, tmp_path / f"{beta}.gguf", config)
        assert serving.audit(tmp_path / f"{beta}.gguf").agrees == agrees


# --- every rope key of the library, against llama.cpp's own C++ read by hand -----------------------------------------

_ROPE_KEYS = [value for name, value in vars(gguf.Keys.Rope).items() if name.isupper()] + ["{arch}.rope.scale_linear"]
_ARCHITECTURES = ("llama", "qwen2", "mistral3", "hunyuan-dense", "gemma3", "phi3")
_VALUES: dict[str, list[Any]] = {
    "type": ["none", "linear", "yarn"],
    "finetuned": [True],
    "dimension_count": [128],
    "dimension_sections": [[16, 24, 24, 0]],
    "original_context_length": [0, 8192],
    "freq_base": [0.0, 500_000.0],
}
_SCALINGS: tuple[dict[str, Any], ...] = (
    {},
    {"scaling.factor": 4.0},
    {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 4096},
    {"scaling.type": "none", "scaling.factor": 4.0},
)


def _write(path: Path, architecture: str, keys: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(32768)
    writer.add_embedding_length(512)
    writer.add_head_count(4)
    for name, value in keys.items():
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        kinds.get(type(value), writer.add_float32)(f"{architecture}.rope.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _llama_cpp(architecture: str, keys: dict[str, Any]) -> tuple[list[float], float]:
    """Frequencies and magnitude by load_hparams of llama-model.cpp, the constructor of llama_context and rope_yarn."""
    dim, train = 128, 32768
    base = keys.get("freq_base", 10000.0)
    original = keys.get("scaling.original_context_length", train) or train
    kind = keys.get("scaling.type", "linear")
    ropescale = keys["scaling.factor"] if "scaling.factor" in keys else keys.get("scale_linear", 0.0)
    scale = 1.0 if ropescale == 0 else 1 / ropescale
    alpha = keys.get("scaling.alpha", 0.0)
    if architecture == "hunyuan-dense" and alpha > 0:  # src/models/hunyuan-vl.cpp
        base *= alpha ** (dim / (dim - 2))
    log_multiplier, fast, slow = 0.0, 32.0, 1.0
    if architecture == "mistral3":  # src/models/mistral3.cpp
        log_multiplier = keys.get("scaling.yarn_log_multiplier", 0.0)
        fast, slow = keys.get("scaling.yarn_beta_fast", fast), keys.get("scaling.yarn_beta_slow", slow)
    scale = 1.0 if kind == "none" else scale
    mixed, magnitude, low, high = 0.0, 1.0, 0.0, 0.0
    if kind == "yarn":
        mixed = 1.0

        def mscale(factor: float, number: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * number * np.log(factor) + 1

        factor = 1 / scale
        magnitude = mscale(factor, 1.0) / (mscale(factor, log_multiplier) if log_multiplier else 1.0)
        low, high = (dim * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(base)) for beta in (fast, slow))
        low, high = max(0.0, np.floor(low)), min(dim - 1.0, np.ceil(high))
    magnitude *= keys.get("scaling.attn_factor", 1.0)
    frequencies = []
    for pair in range(dim // 2):
        theta = base ** (-2 * pair / dim)
        ramp = (1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))) * mixed
        frequencies.append(theta * scale * (1 - ramp) + theta * ramp)
    return frequencies, magnitude


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
@pytest.mark.parametrize("key", _ROPE_KEYS)
def test_every_rope_key_of_a_file_moves_our_numbers_as_llama_cpp(key: str, architecture: str, tmp_path: Path) -> None:
    name = key.removeprefix("{arch}.rope.")
    last = name.rpartition(".")[2]
    for number, scaling in enumerate(_SCALINGS):
        for value in _VALUES.get(last, [0.0, 3.0]):
            keys = scaling | {name: value}
            _write(path := tmp_path / f"{number} {value}.gguf", architecture, keys)
            result = serving.audit(path)
            [report] = result.engines
            nothing = name in ("freq_base", "scaling.attn_factor") and value == 0  # an infinite theta; no cos and sin
            beta = architecture == "mistral3" and "beta" in name and keys.get("scaling.type") == "yarn" and value == 0
            if nothing or beta:
                assert f"rope.{name} must be a number above 0" in unwrapped(result)
                continue
            assert report.computed is not None, (keys, str(result))
            frequencies, magnitude = _llama_cpp(architecture, keys)
            np.testing.assert_allclose(report.computed.inv_freq, frequencies, rtol=1e-6, err_msg=str(keys))
            assert report.computed.attention_factor == pytest.approx(magnitude, rel=1e-6), keys


def test_a_key_that_llama_cpp_does_not_have_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "a.gguf", "llama", {"scaling.fator": 4.0, "freq_base_swa": 500.0, "scaling.alpha": 8.0})
    result = serving.audit(tmp_path / "a.gguf")
    assert sorted(result.problems) == [
        "rope.scaling.alpha is 8, and not read for 'llama'.",
        "rope.scaling.fator is not a key of llama.cpp b11549.",
    ]
    assert not result.agrees
    assert result.notes == ("rope.freq_base_swa is 500: it changes sliding-window layers, which are not shown.",)


def test_a_method_over_a_file_with_the_former_name_of_the_factor_replaces_it(tmp_path: Path) -> None:
    _write(tmp_path / "a.gguf", "llama", {"scale_linear": 4.0, "dimension_count": 128})
    assert read_file_rope(tmp_path / "a.gguf").keys["rope.scale_linear"] == 4
    plain = find_engine("gguf").config_for(make_target(served_model("Mistral"), "theta", theta=2e6))
    rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", plain)
    assert "rope.scale_linear" not in read_file_rope(tmp_path / "b.gguf").keys
