"""Losses read layer by layer are those with all layers on each chunk, in the memory of one layer's keys and values."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer, loads_by_layer
from rope_ext_hf.reading.larger.offloaded_weights import LayerWeights, layer_map
from rope_ext_hf.reading.scorer import TokenScorer
from tests.support.every_model import tiny
from tests.support.models import FAMILIES, build

CHUNK = 37
TYPES = [
    "bailing_hybrid",
    "bamba",
    "beam",
    "chameleon",
    "falcon_h1",
    "gemma4_text",
    "granitemoehybrid",
    "lfm2_moe",
    "longcat_flash",
    "olmo_hybrid",
    "phimoe",
    "qwen3_next",
    "zamba2",
]
"""States and convolutions, two attentions in a layer, embeddings for each layer, another list of layers (a tower)."""
NOT_BY_LAYER = ["gemma3n_text", "hrm_text", "zaya"]
"""Several hidden states for each token, layers that run again and again, and layers that hand on two tensors."""
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic-ntk": {},
    "rerope": {"window": 32},
    "self-extend": {"group": 4, "window": 32},
    "dca": {"target_length": 512},
}


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed))


def both_orders(model: Any, *texts: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses of texts layer by layer, and with all layers on each chunk."""
    scorer = TokenScorer(model, chunk=CHUNK, **options)
    assert scorer.reading == "in chunks of 37 tokens, layer by layer"
    spans = [(ids, 5) for ids in texts]
    by_layer = scorer.losses_together(spans, length=200)
    scorer.reader.layers = None
    return by_layer, scorer.losses_together(spans, length=200)


def check_equal(model: Any) -> None:
    for one, other in zip(*both_orders(model, tokens(150), tokens(80, 2), tokens(38, 3)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_losses_are_equal_bit_for_bit(family: str) -> None:
    check_equal(build(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_every_family_are_equal(family: str) -> None:
    check_equal(build(family))


@pytest.mark.slow
@pytest.mark.parametrize("of_type", TYPES)
def test_losses_of_other_kinds_of_layers_are_equal(of_type: str) -> None:
    check_equal(tiny(of_type))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_losses_under_methods_are_equal(family: str, method: str) -> None:
    check_equal(rope.patch(build(family), method, **METHODS[method]))


def test_a_method_that_is_patched_in_later() -> None:
    """A run makes its scorer for the unpatched model, and patches one method after the other."""
    model = build("llama")
    scorer, ids = TokenScorer(model, chunk=CHUNK), tokens(150)
    for method, parameters in METHODS.items():
        with rope.patched(model, method, **parameters):
            found = scorer.losses(ids, 5)
            assert torch.equal(found, TokenScorer(model, chunk=CHUNK).losses(ids, 5))


@pytest.mark.parametrize("of_type", NOT_BY_LAYER)
def test_a_decoder_that_hands_on_more_is_read_chunk_by_chunk(of_type: str) -> None:
    scorer = TokenScorer(tiny(of_type), chunk=CHUNK)
    assert scorer.reading == "in chunks of 37 tokens"
    assert not scorer.by_layer


# --- memory -----------------------------------------------------------------------------------------------------------


def held_by_keys(model: Any, length: int) -> int:
    """Return the bytes that keys and values take while the last layer reads the end of a text."""
    scorer, held = TokenScorer(model, chunk=CHUNK, longest=CHUNK + 1), dict[int, int]()

    def look(*_: Any) -> None:
        cache = scorer.reader.cache
        assert cache is not None
        rooms = [room for layer in cache.layers for room in (layer.keys, layer.values) if room is not None]
        held.clear()
        held.update((room.untyped_storage().data_ptr(), room.untyped_storage().nbytes()) for room in rooms)

    with model.model.layers[-1].register_forward_hook(look):
        scorer.losses(tokens(length), 5)
    return sum(held.values())


def test_keys_and_values_take_the_memory_of_one_layer() -> None:
    config = build("llama").config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4
    for layers in (2, 6):
        model = build("llama", num_hidden_layers=layers)
        assert [held_by_keys(model, length + 1) for length in (64, 256, 1024)] == [
            length * per_token for length in (64, 256, 1024)
        ]


def held_by_tensors(model: Any, length: int, chunk: int) -> int:
    """Return the most bytes that tensors take while a layer has read a chunk of a text, without the weights.

    All tensors that Python knows are counted, whatever they are for.
    """
    scorer, counts = TokenScorer(model, chunk=chunk), list[int]()
    scorer.reader.forget()

    def storages() -> dict[int, int]:
        every = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in every}

    def look(_: Any, args: tuple[Any, ...], __: Any) -> None:
        positions = cache.layers[0].get_seq_length() if (cache := scorer.reader.cache) is not None else 0
        if positions >= length - 1 - chunk:  # only at the end of the text, because looking takes time
            counts.append(sum(size for place, size in storages().items() if place not in before))

    gc.collect()
    ids, before = tokens(length), storages()
    hooks = [layer.register_forward_hook(look) for layer in model.model.layers]
    scorer.losses(ids, length - 1)
    for hook in hooks:
        hook.remove()
    return max(counts)


@pytest.mark.slow
def test_memory_grows_by_the_rate_of_one_layer() -> None:
    """At 4k, 16k and 64k tokens: keys and values of one layer, a hidden state, cos and sin, and the token itself."""
    sizes: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 16}
    model, chunk = build("llama", num_hidden_layers=3, max_position_embeddings=2**16, **sizes), 2048
    keys, state, rotation, token = 2 * 16 * 4, 16 * 4, 2 * 16 * 4, 2 * 8  # a token has an id and a position
    short, middle, long = (held_by_tensors(model, length + 1, chunk) for length in (2**12, 2**14, 2**16))
    for more, added in ((middle - short, 2**14 - 2**12), (long - middle, 2**16 - 2**14)):
        assert (keys + state) * added <= more <= (keys + state + rotation + token) * added * 1.01


def test_less_memory_is_tried_again_with_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("llama"), tokens(150)
    scorer = TokenScorer(model, chunk=64)
    expected, layers = scorer.losses(ids, 5), list(model.model.layers)
    forward = type(layers[1]).forward

    def fail(self: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if states.shape[1] > 40 and self is layers[1]:
            raise torch.OutOfMemoryError("no memory left")
        return forward(self, states, *args, **kwargs)

    monkeypatch.setattr(type(layers[1]), "forward", fail)
    with pytest.warns(UserWarning, match="out of memory with 64 tokens per pass; going on with 32"):
        found = scorer.losses(ids, 5)
    assert scorer.chunk == 32
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert list(model.model.layers) == layers


def test_the_layers_are_in_their_places_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    scorer, layers = TokenScorer(model, chunk=CHUNK, longest=50), list(model.model.layers)

    def fail(*_: Any) -> Any:
        raise RuntimeError("embeddings failed")

    with model.model.embed_tokens.register_forward_hook(fail), pytest.raises(RuntimeError, match="embeddings failed"):
        scorer.losses(tokens(50), 5)
    assert list(model.model.layers) == layers


# --- models that are larger than their device -------------------------------------------------------------------------


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    """Save a model with the tokenizer of the bundled model, and return its folder."""
    build(name, vocab_size=400, **options).save_pretrained(folder)
    load_tokenizer("reference").save_pretrained(folder)
    return folder


CHILD = """
import json, sys
from rope_ext_hf.cli.app import app
from rope_ext_hf.reading.cost import memory

free, *command = sys.argv[1:]
if int(free):
    memory.available = lambda device: int(free)
try:
    app(command)
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(peak.split()[1], file=sys.stderr)
"""
"""Run a command, with this number of free bytes (0: as many as there are), and print the most memory it had, in kB."""


def measured(folder: Path, free: int) -> tuple[list[float], str, int]:
    """Measure the perplexity of a model in a process of its own; return losses, what it printed, and peak bytes.

    `free`: the bytes of memory that the process is told to be free; 0: as many as there are.
    """
    text = folder.parent / "text.txt"
    text.write_text("All that a text of a test has to be is long enough. " * 40, encoding="utf-8")
    out = str(folder.parent / f"runs-{free}")
    options = ["--lengths", "64,128", "--max-spans", "3", "--device", "cpu", "--out", out, "--json"]
    command = [sys.executable, "-c", CHILD, str(free), "ppl", str(folder), "--data", str(text), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    losses = [row["loss"] for row in json.loads(result.stdout)["results"]]
    return losses, " ".join(result.stderr.split()), 1024 * int(result.stderr.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory is read from /proc")
def test_a_model_larger_than_memory_is_read_from_disk(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    folder = saved(tmp_path / "model", num_hidden_layers=16, **sizes)
    size = (folder / "model.safetensors").stat().st_size
    expected, printed, peak = measured(folder, 0)
    assert "layer by layer: the next" not in printed
    found, printed, peak_of_layers = measured(folder, size // 4)
    assert "of weights in main memory or on disk, read layer by layer: the next one while one computes" in printed
    assert found == pytest.approx(expected, abs=1e-5)  # the chunks are smaller
    assert peak - peak_of_layers > size * 6 // 10


def test_places_of_weights() -> None:
    """All but layers is on the device, then layers as long as there is room; then main memory, then disk."""
    with torch.device("meta"):
        model = build("llama", num_hidden_layers=5)
    weights = LayerWeights.of(model)
    layer = weights.layers[0]
    assert weights.outside + sum(weights.layers) == model.num_parameters()
    places = layer_map(model, 4 * (weights.least() + layer), 4 * 2 * layer, 4, torch.device("cuda", 1))
    by_layer = [places.pop(f"model.layers.{index}") for index in range(5)]
    assert by_layer == [1, "cpu", "cpu", "disk", "disk"]
    assert places == dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], 1)
    on_cpu = layer_map(model, 4 * (weights.least() + layer), 4 * 2 * layer, 4, torch.device("cpu"))
    assert [on_cpu[f"model.layers.{index}"] for index in range(5)] == ["cpu", "disk", "disk", "disk", "disk"]


def test_weights_that_are_converted_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in a temporary folder; all others stay in the files of the model."""
    folder, temporary = saved(tmp_path / "model", "mixtral"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("rope_ext_hf.files.whole._is_in_memory", lambda folder: False)
    whole = load_model(folder, device="cpu")
    expected = TokenScorer(whole, chunk=CHUNK).losses(tokens(90), 5)
    places = layer_map(load_empty(folder), 0, 0, 4, torch.device("cpu"))
    model = load_model(folder, device="cpu", device_map=places)
    written = sum(file.stat().st_size for file in temporary.rglob("*.safetensors"))
    experts = sum(weight.nbytes for name, weight in whole.named_parameters() if ".experts." in name)
    assert experts <= written < 1.1 * experts
    assert torch.equal(TokenScorer(model, chunk=CHUNK).losses(tokens(90), 5), expected)
    del model
    gc.collect()
    assert not list(temporary.iterdir())


def test_converted_weights_are_removed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, temporary = saved(tmp_path / "model", "mixtral"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("rope_ext_hf.files.whole._is_in_memory", lambda folder: False)
    places = layer_map(load_empty(folder), 0, 0, 4, torch.device("cpu"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(rope.CheckpointError):
        load_model(folder, device="cpu", device_map=places)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["reference", "gguf", "quantised", "bin"])
def test_files_whose_weights_are_read_all_at_once(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    empty = load_empty(folder)
    assert loads_by_layer(folder, empty)
    if name == "reference":
        assert loads_by_layer(name, load_empty(name))
        return
    if name == "quantised":
        empty.config.quantization_config = {"quant_method": "fp8"}
    elif name == "bin":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    else:
        folder = tmp_path / "model.gguf"
        folder.write_bytes(b"GGUF")
    assert not loads_by_layer(folder, empty)
