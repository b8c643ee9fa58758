"""Meta's own format, against Meta's forward written here from its public definition (llama3/model.py), part by part."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import tracemalloc
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.conversion import convert_checkpoint
from rope_ext_hf.checkpoints.meta import meta_conversion
from rope_ext_hf.checkpoints.meta.meta_params import Llama, Weight
from rope_ext_hf.checkpoints.meta.meta_source import MetaSource
from rope_ext_hf.checkpoints.report import ConversionReport
from rope_ext_hf.errors import CheckpointError, FileError
from tests.support.models import build, logits
from tests.support.wrapped_text import unwrapped

Part = dict[str, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:the context length of .* is a guess")  # of models this small
LENGTH = 192  # long enough for the scaling of Llama 3.1 to show in the logits
# --- Meta's model -------------------------------------------------------------------------------------------------


def meta_to_hf(
    src: Path, dst: Path, to: str = "half", *, max_shard_bytes: int = meta_conversion.MAX_SHARD_BYTES, **options: Any
) -> ConversionReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta_conversion, "MAX_SHARD_BYTES", max_shard_bytes)
        return convert_checkpoint(src, dst, to, **options)


def hf_to_meta(src: Path, dst: Path, **options: Any) -> ConversionReport:
    return convert_checkpoint(src, dst, "meta", **options)


def freqs_cis(dim: int, theta: float, factor: float | None) -> Tensor:
    """Return the rotations of all positions, (LENGTH, dim / 2) complex."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    if factor is not None:
        scaled = []
        for freq in freqs.tolist():
            wavelength = 2 * math.pi / freq
            if wavelength < 8192 / 4:
                scaled.append(freq)
            elif wavelength > 8192 / 1:
                scaled.append(freq / factor)
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                scaled.append((1 - smooth) * freq / factor + smooth * freq)
        freqs = torch.tensor(scaled)
    angles = torch.outer(torch.arange(LENGTH).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate x (length, heads, head_dim), in which adjacent dims are one complex number."""
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * cis[:, None]).flatten(2)


def attention(x: Tensor, part: Part, layer: str, heads: int, kv_heads: int, head_dim: int, cis: Tensor) -> Tensor:
    """Return the attention of the heads of one process; x: (length, dim)."""
    q = turned((x @ part[f"{layer}.attention.wq.weight"].T).view(LENGTH, heads, head_dim), cis)
    k = turned((x @ part[f"{layer}.attention.wk.weight"].T).view(LENGTH, kv_heads, head_dim), cis)
    v = (x @ part[f"{layer}.attention.wv.weight"].T).view(LENGTH, kv_heads, head_dim)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    scores = scores + torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return mixed @ part[f"{layer}.attention.wo.weight"].T


def feed_forward(x: Tensor, part: Part, layer: str) -> Tensor:
    w1, w2, w3 = (part[f"{layer}.feed_forward.{name}.weight"] for name in ("w1", "w2", "w3"))
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def embedded(ids: Tensor, parts: list[Part], dim: int) -> Tensor:
    tables = [part["tok_embeddings.weight"] for part in parts]
    if tables[0].shape[1] != dim:
        return torch.cat([table[ids] for table in tables], dim=1)  # Llama 1 and 2: ParallelEmbedding
    rows = tables[0].shape[0]  # Llama 3: VocabParallelEmbedding
    out = torch.zeros(len(ids), dim)
    for i, table in enumerate(tables):
        here = (ids >= i * rows) & (ids < (i + 1) * rows)
        out[here] = table[ids[here] - i * rows]
    return out


@torch.no_grad()
def meta_logits(params: dict[str, Any], parts: list[Part], ids: Tensor, factor: float | None) -> Tensor:
    """Return logits (length, vocabulary), computed part by part as by the processes of Meta's code."""
    dim, heads, eps = params["dim"], params["n_heads"], params["norm_eps"]
    kv_heads, count = params.get("n_kv_heads") or heads, len(parts)
    cis = freqs_cis(dim // heads, params.get("rope_theta", 10000.0), factor if params.get("use_scaled_rope") else None)
    h = embedded(ids, parts, dim)
    for n in range(params["n_layers"]):
        layer = f"layers.{n}"
        for part in parts:
            assert torch.equal(part[f"{layer}.ffn_norm.weight"], parts[0][f"{layer}.ffn_norm.weight"])
        x = rms_norm(h, parts[0][f"{layer}.attention_norm.weight"], eps)
        local = (heads // count, kv_heads // count, dim // heads)
        h = h + sum((attention(x, part, layer, *local, cis) for part in parts), torch.zeros(()))
        x = rms_norm(h, parts[0][f"{layer}.ffn_norm.weight"], eps)
        h = h + sum((feed_forward(x, part, layer) for part in parts), torch.zeros(()))
    x = rms_norm(h, parts[0]["norm.weight"], eps)
    heads_out = [part.get("output.weight", part["tok_embeddings.weight"]) for part in parts]
    return torch.cat([x @ head.T for head in heads_out], dim=1)


# --- models of every generation, written by hand ------------------------------------------------------------------

VOCABULARY, DIM, FFN = 100, 64, 256
SPLIT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


@dataclass(frozen=True)
class Case:
    """A generation of Llama.

    Attributes:
        params: what its params.json says beside the sizes.
        embedding: the dimension its parts divide the embeddings by.
        length: its max_position_embeddings.
        factor: of its scaling.
        tied: None: untied; "absent" or "equal": how its output weights are the embeddings.
    """

    params: dict[str, Any]
    embedding: int
    length: int
    factor: float | None = None
    tied: str | None = None
    extra: Part = field(default_factory=dict)


SCALED: dict[str, Any] = {"n_kv_heads": 4, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
CASES = {
    "1": Case({"norm_eps": 1e-6, "vocab_size": -1}, 1, 2048, extra={"rope.freqs": torch.rand(4)}),
    "2": Case({"norm_eps": 1e-5, "n_kv_heads": 4, "vocab_size": -1}, 1, 4096, extra={"rope.freqs": torch.rand(4)}),
    "code": Case({"norm_eps": 1e-5, "rope_theta": 1000000.0}, 1, 16384),
    "3": Case({"norm_eps": 1e-5, "n_kv_heads": 4, "rope_theta": 500000.0, "vocab_size": VOCABULARY}, 0, 8192),
    "3.1": Case(SCALED | {"vocab_size": VOCABULARY}, 0, 131072, 8.0),
    "3.2": Case(SCALED | {"vocab_size": VOCABULARY}, 0, 131072, 32.0, "absent"),
    "3.2, written out": Case(SCALED | {"vocab_size": VOCABULARY}, 0, 131072, 32.0, "equal"),
    "2, tied": Case({"norm_eps": 1e-5, "n_kv_heads": 4, "vocab_size": -1}, 1, 4096, None, "equal"),
    "own factor": Case(SCALED | {"rope_scaling_factor": 4.0, "vocab_size": VOCABULARY}, 0, 131072, 4.0),
}


def sizes(case: Case) -> dict[str, Any]:
    return {"dim": DIM, "n_layers": 2, "n_heads": 8, "multiple_of": 256} | case.params


def whole(case: Case, dtype: torch.dtype = torch.float32) -> Part:
    """Return every tensor of a model, random."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.15).to(dtype)

    kv = DIM // 8 * case.params.get("n_kv_heads", 8)
    out = {"tok_embeddings.weight": random(VOCABULARY, DIM), "norm.weight": 1 + random(DIM)}
    if case.tied != "absent":
        out["output.weight"] = out["tok_embeddings.weight"] if case.tied else random(VOCABULARY, DIM)
    for n in range(2):
        shapes = {"wq": (DIM, DIM), "wk": (kv, DIM), "wv": (kv, DIM), "wo": (DIM, DIM)}
        out |= {f"layers.{n}.attention.{name}.weight": random(*shape) for name, shape in shapes.items()}
        shapes = {"w1": (FFN, DIM), "w2": (DIM, FFN), "w3": (FFN, DIM)}
        out |= {f"layers.{n}.feed_forward.{name}.weight": random(*shape) for name, shape in shapes.items()}
        out |= {f"layers.{n}.{name}.weight": 1 + random(DIM) for name in ("attention_norm", "ffn_norm")}
    return out


def divided(state: Part, case: Case, count: int) -> list[Part]:
    parts: list[Part] = [{} for _ in range(count)]
    for name, tensor in state.items():
        dim = (SPLIT | {"tok_embeddings": case.embedding}).get(name.split(".")[-2])
        for i, part in enumerate(parts):
            part[name] = (tensor if dim is None else tensor.tensor_split(count, dim)[i]).clone()
    return [part | case.extra for part in parts]


def save_meta(folder: Path, case: Case, count: int = 1, dtype: torch.dtype = torch.float32) -> list[Part]:
    folder.mkdir()
    parts = divided(whole(case, dtype), case, count)
    for i, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{i:02}.pth")
    (folder / "params.json").write_text(json.dumps(sizes(case)))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "checklist.chk").write_text("0  params.json\n")
    return parts


def read_parts(folder: Path) -> tuple[dict[str, Any], list[Part]]:
    """Return the parts as Meta's code finds them: every .pth, sorted."""
    params: dict[str, Any] = json.loads((folder / "params.json").read_text())
    return params, [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pth"))]


def hf_logits(folder: Path, ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return logits(model, ids[None])[0]


def hf_llama(folder: Path, case: Case, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Return a Hugging Face folder of a generation, saved by transformers."""
    form: dict[str, Any] = {"rope_theta": case.params.get("rope_theta", 10000.0)}
    if case.factor:
        ramp = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        form |= {"rope_type": "llama3", "factor": case.factor} | ramp
    settings = {
        "vocab_size": VOCABULARY,
        "num_attention_heads": 8,
        "num_key_value_heads": case.params.get("n_kv_heads", 8),
        "rms_norm_eps": case.params["norm_eps"],
        "max_position_embeddings": case.length,
        "tie_word_embeddings": case.tied is not None,
        "pad_token_id": None,
    }
    model = build("llama", form, **settings | overrides).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that went astray
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return folder


def same_files(one: Path, other: Path) -> bool:
    names = {str(p.relative_to(one)) for p in one.rglob("*") if p.is_file()}
    if names != {str(p.relative_to(other)) for p in other.rglob("*") if p.is_file()}:
        return False
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


IDS = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(2))


# --- equal logits -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_from_meta_the_same_logits(name: str, count: int, tmp_path: Path) -> None:
    case = CASES[name]
    parts = save_meta(tmp_path / "meta", case, count)
    report = meta_to_hf(tmp_path / "meta", tmp_path / "hf", max_shard_bytes=40_000 if count == 2 else 10**9)
    torch.testing.assert_close(
        hf_logits(tmp_path / "hf", IDS), meta_logits(sizes(case), parts, IDS, case.factor), atol=1e-4, rtol=1e-4
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_pairing"]) == (case.length, "half")
    assert (config["vocab_size"], config["intermediate_size"]) == (VOCABULARY, FFN)
    assert config["tie_word_embeddings"] == (case.tied is not None)
    assert config["rope_parameters"].get("factor") == case.factor
    assert (report.source, report.to, report.converted, report.loads_natively) == ("meta", "half", 4, True)
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "tokenizer.model"} <= names
    assert not names & {"params.json", "checklist.chk"}
    assert ("model.safetensors.index.json" in names) == (count == 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("3.2, written out", "own factor")])
def test_to_meta_the_same_logits(name: str, count: int, tmp_path: Path) -> None:
    case = CASES[name]
    source = hf_llama(tmp_path / "hf", case)
    report = hf_to_meta(source, tmp_path / "meta", model_parallel=count)
    params, parts = read_parts(tmp_path / "meta")
    assert len(parts) == count
    assert parts[0]["tok_embeddings.weight"].shape[case.embedding] == (DIM if case.embedding else VOCABULARY) // count
    torch.testing.assert_close(
        meta_logits(params, parts, IDS, case.factor), hf_logits(source, IDS), atol=1e-4, rtol=1e-4
    )
    assert (report.source, report.to, report.loads_natively) == ("half", "meta", False)
    assert sorted(p.name for p in (tmp_path / "meta").glob("*[!h]")) == [
        "generation_config.json",
        "params.json",
        "tokenizer.model",
    ]


def test_the_logits_depend_on_what_is_tested(tmp_path: Path) -> None:
    """The scaling, its factor and the pairing all show at this length."""
    case = CASES["3.1"]
    parts, params = divided(whole(case), case, 1), sizes(case)
    right = meta_logits(params, parts, IDS, 8.0)
    wrong = [meta_logits(params, parts, IDS, factor) for factor in (None, 32.0)]
    assert all((right - other).abs().max() > 2e-3 for other in wrong)
    save_meta(tmp_path / "meta", case)
    with pytest.warns(UserWarning, match="holds weights in the interleaved pairing"):
        meta_to_hf(tmp_path / "meta", tmp_path / "hf", "interleaved")
    assert (hf_logits(tmp_path / "hf", IDS) - right).abs().max() > 0.1


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "count"), [("1", 2), ("3.1", 4), ("3.2", 1), ("2, tied", 2), ("3.2", 2)])
@pytest.mark.sampled(2)
def test_there_and_back_byte_for_byte(name: str, count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES[name], dtype=dtype)
    hf_to_meta(source, tmp_path / "meta", model_parallel=count)
    meta_to_hf(tmp_path / "meta", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape)
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert other.pop("rope_pairing") == "half"
    other.pop("rope_guessed_length", None)  # of a source this small
    assert one | {"initializer_range": 0} == other | {"initializer_range": 0}


@pytest.mark.parametrize("name", CASES)
def test_params_there_and_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    parts = save_meta(tmp_path / "meta", case, 2)
    meta_to_hf(tmp_path / "meta", tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "own factor" else "error")
        hf_to_meta(tmp_path / "hf", tmp_path / "back", model_parallel=2)
    params, back = read_parts(tmp_path / "back")
    assert params == sizes(case) | {"vocab_size": VOCABULARY}
    for part, other in zip(parts, back, strict=True):
        for key in other.keys() & part.keys():
            assert torch.equal(part[key], other[key]), key
        assert other.keys() - part.keys() <= {"output.weight"}  # Meta's code wants them, tied or not
        assert part.keys() - other.keys() <= {"rope.freqs"}


def test_interleaved_folders(tmp_path: Path) -> None:
    """Rows stay where they are in both directions, if the config or the caller says interleaved."""
    save_meta(tmp_path / "meta", CASES["3"], 2)
    with pytest.warns(UserWarning, match="does not run .* models; for use there, convert .*meta' to half"):
        report = meta_to_hf(tmp_path / "meta", tmp_path / "interleaved", "interleaved")
    assert (report.converted, report.loads_natively) == (0, False)
    found = load_file(tmp_path / "interleaved" / "model.safetensors")
    assert torch.equal(
        found["model.layers.1.self_attn.k_proj.weight"], whole(CASES["3"])["layers.1.attention.wk.weight"]
    )
    report = hf_to_meta(tmp_path / "interleaved", tmp_path / "again", model_parallel=2)
    assert (report.source, report.converted) == ("interleaved", 0)
    config = json.loads((tmp_path / "interleaved" / "config.json").read_text())
    (tmp_path / "interleaved" / "config.json").write_text(json.dumps(config | {"rope_pairing": None}))
    hf_to_meta(tmp_path / "interleaved", tmp_path / "said", model_parallel=2, source_pairing="interleaved")
    original = read_parts(tmp_path / "meta")[1]
    for folder in ("again", "said"):
        for part, other in zip(original, read_parts(tmp_path / folder)[1], strict=True):
            assert part.keys() == other.keys()
            assert all(torch.equal(part[key], other[key]) for key in part)


def test_tied_weights_that_are_written_out(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3.2"])
    hf_to_meta(source, tmp_path / "meta")
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(source)
    hf_to_meta(source, tmp_path / "again")
    assert same_files(tmp_path / "meta", tmp_path / "again")


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3.2"])
    hf_to_meta(source, tmp_path / "meta")
    (part,) = read_parts(tmp_path / "meta")[1]
    assert part["output.weight"].data_ptr() == part["tok_embeddings.weight"].data_ptr()
    assert (tmp_path / "meta" / "consolidated.00.pth").stat().st_size < sum(
        tensor.nbytes for name, tensor in part.items() if name != "output.weight"
    ) + 10_000


def test_parts_are_read_tensor_by_tensor(tmp_path: Path) -> None:
    parts = save_meta(tmp_path / "meta", CASES["3"], 2)
    largest = 2 * max(tensor.nbytes for tensor in parts[0].values())
    MetaSource(tmp_path / "meta")
    tracemalloc.start()
    source = MetaSource(tmp_path / "meta")
    assert tracemalloc.get_traced_memory()[1] < 3 * largest < sum(tensor.nbytes for tensor in parts[0].values())
    assert source.view().read("model.embed_tokens.weight").shape == (VOCABULARY, DIM)
    tracemalloc.stop()


# --- the width of feed-forward layers in params.json -----------------------------------------------------------------


@pytest.mark.slow
@given(dim=st.integers(1, 4096).map(lambda n: 2 * n), ffn=st.integers(1, 60_000))
@settings(max_examples=300, deadline=None)
def test_metas_formula_gives_every_size(dim: int, ffn: int) -> None:
    known: dict[str, Any] = {"layers": 1, "heads": 1, "kv_heads": 1, "vocab": 1, "eps": 1e-5, "theta": 1e4}
    params = Llama(dim=dim, ffn=ffn, factor=None, tied=False, **known).to_params()
    hidden = int(2 * (4 * dim) / 3)
    if "ffn_dim_multiplier" in params:
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple_of = params["multiple_of"]
    assert multiple_of * ((hidden + multiple_of - 1) // multiple_of) == ffn


# --- what is refused ----------------------------------------------------------------------------------------------


def edit_params(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        params = json.loads((folder / "params.json").read_text()) | changes
        (folder / "params.json").write_text(json.dumps(params))

    return edit


def edit_part(index: int, change: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / f"consolidated.{index:02}.pth"
        part = torch.load(path, weights_only=True)
        change(part)
        torch.save(part, path)

    return edit


class Code:
    """A class whose pickle would run code."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


W1 = "layers.0.feed_forward.w1.weight"
REFUSED: dict[str, tuple[Any, str]] = {
    "no params": (lambda f: (f / "params.json").unlink(), "'params.json' is missing"),
    "no JSON": (lambda f: (f / "params.json").write_text("{"), "params.json' cannot be read"),
    "no parts": (lambda f: [p.unlink() for p in f.glob("*.pth")], "no weights; looked for consolidated.00.pth"),
    "a gap": (lambda f: (f / "consolidated.01.pth").rename(f / "consolidated.02.pth"), "'consolidated.01.pth' is mis"),
    "not from 0": (lambda f: (f / "consolidated.00.pth").rename(f / "consolidated.02.pth"), "'consolidated.00.pth' is"),
    "another name": (
        lambda f: (f / "consolidated.00.pth").rename(f / "consolidated.0.pth"),
        "'consolidated.00.pth' is missing .* has consolidated.0.pth, consolidated.01.pth",
    ),
    "one part of two": (lambda f: (f / "consolidated.01.pth").unlink(), "has vocab_size 100; .* has 50 rows"),
    "no size": (edit_params(dim=None), "lacks dim"),
    "a size in words": (edit_params(n_heads="8"), "n_heads is '8', not a positive number"),
    "a negative size": (edit_params(n_layers=-1), "n_layers is -1, not a positive"),
    "no bool": (edit_params(use_scaled_rope=1), "use_scaled_rope is 1, not a bool"),
    "no number for a computer": (edit_params(norm_eps=10**400), "norm_eps is 1000"),
    "nan": (edit_params(norm_eps=float("nan")), "norm_eps is nan"),
    "an unknown key": (edit_params(vision_chunk_size=448), "has vision_chunk_size = 448.*known: dim, n_layers"),
    "heads": (edit_params(n_heads=7), "dim 64, n_heads 7 and n_kv_heads 4 contradict"),
    "key heads": (edit_params(n_kv_heads=3), "n_kv_heads 3 contradict"),
    "key heads among parts": (edit_params(n_kv_heads=1), "1 key heads cannot be divided among 2 parts"),
    "other key heads": (
        edit_params(n_kv_heads=2),
        r"attention.wk.weight' .* has shape \(16, 64\).*should have \(8, 64",
    ),
    "vocabulary": (edit_params(vocab_size=128256), "has vocab_size 128256; .* has 100 rows"),
    "too many layers": (edit_params(n_layers=10**12), "'layers.2.attention.wq.weight' is missing"),
    "too few layers": (edit_params(n_layers=1), r"does not have: 'layers.1.attention.*\(9 in all\)"),
    "a factor alone": (edit_params(rope_scaling_factor=8.0), "rope_scaling_factor, but not use_scaled_rope"),
    "no embeddings": (edit_part(0, lambda p: p.pop("tok_embeddings.weight")), "'tok_embeddings.weight' is missing"),
    "a missing tensor": (edit_part(1, lambda p: p.pop("output.weight")), "'output.weight' is missing in .*01.pth"),
    "an unknown tensor": (
        edit_part(1, lambda p: p.update(bias=torch.ones(1))),
        "01.pth' has tensors that a model with this params.json does not have: 'bias'",
    ),
    "another shape": (edit_part(1, lambda p: p.update({W1: p[W1][:-1]})), r"has shape \(127, 64\).*have \(128, 64\)"),
    "a vector": (edit_part(0, lambda p: p.update({W1: p[W1][0]})), r"has shape \(64,\), not two dimensions"),
    "another dtype": (edit_part(1, lambda p: p.update({W1: p[W1].half()})), "is F16, in the first part F32"),
    "whole numbers": (
        edit_part(1, lambda p: p.update({"norm.weight": p["norm.weight"].int()})),
        "is I32, in the first part F32; all parts must have one of F64",
    ),
    "unequal norms": (edit_part(1, lambda p: p["norm.weight"].add_(1)), "'norm.weight' in .*01.pth' differs from"),
    "code": (
        lambda f: (f / "consolidated.01.pth").write_bytes(pickle.dumps({"norm.weight": Code()})),
        "cannot be read as tensors alone",
    ),
    "code in an archive": (
        lambda f: torch.save({"norm.weight": Code()}, f / "consolidated.01.pth"),
        "cannot be read as tensors alone",
    ),
    "half a file": (
        lambda f: (f / "consolidated.01.pth").write_bytes((f / "consolidated.01.pth").read_bytes()[:50_000]),
        "consolidated.01.pth' cannot be read",
    ),
    "no tensors": (lambda f: torch.save([1, 2], f / "consolidated.01.pth"), "does not hold tensors by name"),
    "out of the folder": (
        lambda f: (shutil.move(f / "consolidated.01.pth", f.parent), (f / "consolidated.01.pth").symlink_to("../x")),
        "leads out of the folder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = REFUSED[name]
    save_meta(tmp_path / "meta", CASES["3"], 2)
    change(tmp_path / "meta")
    before = sorted(tmp_path.iterdir())
    with pytest.raises((CheckpointError, FileError), match=message):
        meta_to_hf(tmp_path / "meta", tmp_path / "hf")
    assert sorted(tmp_path.iterdir()) == before


def edit_config(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def edit_tensors(change: Any) -> Any:
    def edit(folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def patched(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    rope.patch(model, "yarn", factor=2).save_pretrained(folder)


RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
UNSAYABLE: dict[str, tuple[Any, str]] = {
    "mistral": (edit_config(model_type="mistral"), "it is a 'mistral', and Meta's code runs only 'llama'"),
    "activation": (edit_config(hidden_act="gelu"), "hidden_act is 'gelu', and Meta's code runs only 'silu'"),
    "biases": (edit_config(attention_bias=True), "attention_bias is True"),
    "mlp biases": (edit_config(mlp_bias=True), "mlp_bias is True"),
    "head_dim": (edit_config(head_dim=16), "head_dim is 16, and Meta's code runs only 8"),
    "linear": (
        edit_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        "rope_type is 'linear', and Meta's code runs only 'default' and 'llama3'",
    ),
    "another ramp": (
        edit_config(
            rope_parameters=RAMP | {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "high_freq_factor": 8.0}
        ),
        "high_freq_factor is 8.0, and Meta's code runs only 4.0",
    ),
    "a patch": (patched, "saved with a patch; unpatch"),
    "adapter": (
        lambda f: (
            (f / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(f.parent / "hf")})),
            (f / "model.safetensors").rename(f / "adapter_model.safetensors"),
        ),
        "it is an adapter; merge",
    ),
    "a missing tensor": (
        edit_tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "'model.layers.1.mlp.up_proj.weight' is missing",
    ),
    "an unknown tensor": (edit_tensors(lambda t: t.update(more=torch.ones(1))), "'more' in .* has no place"),
    "a bias": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.v_proj.bias": torch.ones(32)})),
        "v_proj.bias' in .* has no place in Meta's format",
    ),
    "another shape": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(63)})),
        r"'model.norm.weight' .* of shape \(63,\); by the config it should have shape \(64,\)",
    ),
    "packed numbers": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "is I8 of shape",
    ),
    "said to be tied": (edit_config(tie_word_embeddings=True), "'lm_head.weight' in .* correct the config"),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_metas_format_cannot_say(name: str, tmp_path: Path) -> None:
    change, message = UNSAYABLE[name]
    source = hf_llama(tmp_path / "hf", CASES["3"])
    change(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=message):
        hf_to_meta(source, tmp_path / "meta")
    assert sorted(tmp_path.iterdir()) == before


def test_arguments(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3"])
    save_meta(tmp_path / "meta", CASES["3"])
    new = tmp_path / "new"
    refused: list[tuple[Any, str]] = [
        (lambda: hf_to_meta(source, new, model_parallel=3), "kv_heads 4 cannot be divided among 3 parts"),
        (lambda: hf_to_meta(source, new, model_parallel=0), "must be a whole number of at least 1"),
        (lambda: hf_to_meta(source, new, model_parallel=8), "kv_heads 4 cannot be divided"),
        (lambda: convert_checkpoint(tmp_path / "meta", new, "neox"), "got to='neox'"),
        (lambda: convert_checkpoint(source, new, "meta", source_pairing="neox"), "got 'neox'"),
        (lambda: convert_checkpoint(tmp_path / "meta", new, "meta"), "in Meta's format already"),
        (lambda: convert_checkpoint(tmp_path / "none", new, "half"), "no such model folder"),
        (lambda: convert_checkpoint(tmp_path / "meta", tmp_path / "hf", "half"), "exists already"),
        (lambda: convert_checkpoint(tmp_path / "meta", tmp_path / "meta" / "new", "half"), "lies inside the source"),
        (lambda: convert_checkpoint(source, source / "new", "meta"), "lies inside the source"),
        (lambda: convert_checkpoint(source, tmp_path / "meta", "meta"), "exists already"),
    ]
    for call, message in refused:
        with pytest.raises((CheckpointError, FileError), match=message):
            call()
    assert not new.exists()


@pytest.mark.slow
def test_what_gets_lost_is_warned_of(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["own factor"], max_position_embeddings=32768)
    with pytest.warns(UserWarning, match="Meta's") as caught:
        hf_to_meta(source, tmp_path / "meta")
    messages = [str(warning.message) for warning in caught]
    assert any(
        "no place for max_position_embeddings, 32768 here; readers will assume 131072" in message
        for message in messages
    )
    assert any("this model needs 4, which stands there as rope_scaling_factor" in message for message in messages)
    meta_to_hf(tmp_path / "meta", tmp_path / "back", context_length=32768)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["max_position_embeddings"], back["rope_parameters"]["factor"]) == (32768, 4.0)


# --- the context length -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "given", "length", "note"),
    [
        ({}, 3000, 3000, None),
        ({"max_seq_len": 1024}, 3000, 3000, None),
        ({"max_seq_len": 1024}, None, 1024, r"1,024 tokens is max_seq_len of params.json"),
        (
            {},
            None,
            4096,
            r"4,096 tokens is a guess, by the theta, scaling and norm_eps of Llama 2: .*--context-length",
        ),
    ],
)
def test_the_length_comes_with_where_it_is_from(
    params: dict[str, Any], given: int | None, length: int, note: str | None, tmp_path: Path
) -> None:
    case = Case({"norm_eps": 1e-5} | params, 1, length)
    save_meta(tmp_path / "meta", case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert_checkpoint(tmp_path / "meta", tmp_path / "hf", "half", context_length=given)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["max_position_embeddings"] == length
    if note is None:
        assert report.notes == ()
    else:
        assert re.search(note, report.notes[0])
        assert f"note {report.notes[0]}" in unwrapped(str(report))
    guessed = note is not None and "guess" in note
    assert [str(warning.message) for warning in caught] == [note for note in report.notes if guessed]
    described = rope.describe(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    assert described.context_length == length
    assert ("which is a guess: the weights come from Meta's format" in described.context_rule) == guessed


def test_a_corrected_guess_is_one_no_longer(tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", CASES["2"])
    convert_checkpoint(tmp_path / "meta", tmp_path / "hf", "half")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert rope.describe(model).context_rule == "max_position_embeddings"
    assert rope.describe(rope.patch(model, "linear", factor=2)).extended_length == 65536


@pytest.mark.parametrize("given", [0, -5, 2.5, "4096", True])
def test_an_impossible_length_is_refused(given: Any, tmp_path: Path) -> None:
    save_meta(tmp_path / "meta", CASES["2"])
    with pytest.raises(CheckpointError, match="context_length must be a whole number of at least 1, got"):
        convert_checkpoint(tmp_path / "meta", tmp_path / "hf", "half", context_length=given)
    assert not (tmp_path / "hf").exists()


def test_a_length_for_a_source_that_states_its_own_is_refused(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["2"])
    for to in ("interleaved", "meta"):
        with pytest.raises(CheckpointError, match=r"context_length is for weights in Meta's format; .* its own"):
            convert_checkpoint(source, tmp_path / "new", to, context_length=4096)


# --- interruption, and the one entry point ------------------------------------------------------------------------


class StoppedError(Exception):
    """Run a conversion that is interrupted."""


@pytest.mark.parametrize("direction", ["to Hugging Face", "to Meta"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_interrupted_and_gone_on_with(direction: str, share: float, tmp_path: Path) -> None:
    if direction == "to Meta":
        source, options = hf_llama(tmp_path / "source", CASES["3"]), {"model_parallel": 2}
        convert: Any = hf_to_meta
    else:
        save_meta(tmp_path / "source", CASES["3"], 2)
        source, options, convert = tmp_path / "source", {"max_shard_bytes": 50_000}, meta_to_hf
    convert(source, tmp_path / "whole", **options)

    def stop(done: int, total: int) -> None:
        if done > share * total:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert(source, tmp_path / "new", progress=stop, **options)
    assert not (tmp_path / "new").exists()
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "new", resume=True, progress=lambda *at: seen.append(at), **options)
    assert seen[-1][0] == seen[-1][1]
    assert same_files(tmp_path / "whole", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole", "new"}


def test_interrupted_between_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished part is kept, and a damaged one is written anew; no temporary file is left."""
    source = hf_llama(tmp_path / "source", CASES["3"])
    hf_to_meta(source, tmp_path / "whole", model_parallel=2)
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.name == "consolidated.00.pth":
            raise StoppedError
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(StoppedError):
        hf_to_meta(source, tmp_path / "new", model_parallel=2)
    monkeypatch.undo()
    there = tmp_path / ".new.unfinished" / "consolidated.01.pth"
    shutil.copytree(tmp_path / ".new.unfinished", tmp_path / ".damaged.unfinished")
    stamp = there.stat().st_mtime_ns
    hf_to_meta(source, tmp_path / "new", model_parallel=2, resume=True)
    assert (tmp_path / "new" / there.name).stat().st_mtime_ns == stamp
    damaged = tmp_path / ".damaged.unfinished" / there.name
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    hf_to_meta(source, tmp_path / "damaged", model_parallel=2, resume=True)
    assert same_files(tmp_path / "whole", tmp_path / "new")
    assert same_files(tmp_path / "whole", tmp_path / "damaged")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(FileError, match=r"are to be written to .* are free"):
        hf_to_meta(source, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()


def test_convert_checkpoint_both_ways(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3.1"])
    report = convert_checkpoint(source, tmp_path / "meta", to="meta", model_parallel=2, verify=True)
    assert "half -> meta" in str(report)
    assert str(report.verified).startswith("q.k of 2 of 2 layers, half on the source against interleaved on the copy")
    report = convert_checkpoint(tmp_path / "meta", tmp_path / "back", to="half", verify=True)
    assert "meta -> half" in str(report)
    assert str(report.verified).startswith("q.k of 2 of 2 layers, interleaved on the source against half on the copy")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.warns(UserWarning, match="holds weights in the interleaved pairing"):
        report = convert_checkpoint(tmp_path / "meta", tmp_path / "interleaved", to="interleaved", verify=True)
    assert "to half" in unwrapped(str(report))
    assert "not verified: that the source is in the interleaved pairing" in str(report.verified)
    with pytest.raises(CheckpointError, match="in Meta's format already"):
        convert_checkpoint(tmp_path / "meta", tmp_path / "again", to="meta")


def test_verification_sees_rows_that_did_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_llama(tmp_path / "hf", CASES["3"])
    save_meta(tmp_path / "meta", CASES["3"], 2)
    monkeypatch.setattr(Weight, "to_pairing", lambda self, tensor, now, to: tensor)
    for convert, folder in ((hf_to_meta, source), (meta_to_hf, tmp_path / "meta")):
        with pytest.raises(CheckpointError, match="verification failed"):
            convert(folder, tmp_path / "new", verify=True)
        assert not (tmp_path / "new").exists()


def test_a_hugging_face_folder_with_a_params_json(tmp_path: Path) -> None:
    """The repositories of Mistral have one, although the folder is not in Meta's format."""
    source = hf_llama(tmp_path / "hf", CASES["3"])
    (source / "params.json").write_text(json.dumps({"dim": 64, "hidden_dim": 96}))
    with pytest.warns(UserWarning, match="holds weights in the interleaved pairing"):
        assert convert_checkpoint(source, tmp_path / "new", to="interleaved").source == "half"


def test_old_folders_with_frequencies_and_bin(tmp_path: Path) -> None:
    source = hf_llama(tmp_path / "hf", CASES["2"])
    expected = tmp_path / "expected"
    hf_to_meta(source, expected)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    hf_to_meta(source, tmp_path / "meta")
    assert same_files(expected, tmp_path / "meta")


@pytest.mark.parametrize(("case", "noted"), [("2", True), ("3", False), ("3.1", False)])
def test_a_rope_theta_that_params_json_leaves_out_is_noted(case: str, noted: bool, tmp_path: Path) -> None:
    """Meta's Llama 3 code would assume 500,000 for it."""
    report = hf_to_meta(hf_llama(tmp_path / "hf", CASES[case]), tmp_path / "meta")
    assert ("rope_theta" not in json.loads((tmp_path / "meta" / "params.json").read_text())) == noted
    assert (
        'assumes 500,000: to run this model with it, add "rope_theta": 10000.0 to params.json' in unwrapped(str(report))
    ) == noted
