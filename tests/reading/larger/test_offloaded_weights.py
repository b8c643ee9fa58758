"""Offloaded weights come to the device once for all texts, those of the next layer while one computes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.hub import load_empty, load_model
from rope_ext_hf.reading.larger.offloaded_weights import layer_map
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Tokens
from tests.reading.through.test_layer_reader import CHUNK, METHODS, NOT_BY_LAYER, tokens
from tests.support.every_model import tiny
from tests.support.models import FAMILIES, build


class Watched:
    """The weights that accelerate brings to a device, which call a function with each one that is read."""

    def __init__(self, weights: Any, path: str, seen: Callable[[str, Tensor], None]) -> None:
        self.weights, self.path, self.seen = weights, path, seen

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self.weights[name]
        self.seen(f"{self.path}.{name}", value)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self.weights


@contextmanager
def watched(model: nn.Module, seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `seen` with the path and the value of each weight that is read inside the with block."""
    with ExitStack() as undo:
        for path, module in model.named_modules():
            hook: Any = getattr(module, "_hf_hook", None)
            for part in getattr(hook, "hooks", (hook,)):
                if getattr(part, "offload", False):
                    undo.callback(setattr, part, "weights_map", part.weights_map)
                    part.weights_map = Watched(part.weights_map, path, seen)
        yield


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list of the bytes of each weight that is brought to the device inside the with block."""
    sizes: list[int] = []
    with watched(model, lambda path, value: sizes.append(value.nbytes)):
        yield sizes


def offloaded(model: Any, where: str, folder: Path) -> Any:
    """Return a model whose weights are in main memory, on disk as accelerate writes them, or in its own files.

    In its own files are layers only, as `layer_map` places them; `folder` is empty.
    """
    if where == "files":
        model.save_pretrained(folder)
        return load_model(folder, device="cpu", device_map=layer_map(load_empty(folder), 0, 0, 4, torch.device("cpu")))
    return cpu_offload(model) if where == "memory" else disk_offload(model, folder)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("method", [None, "yarn", "rerope"])
def test_offloaded_weights_are_read_once_for_all_texts(method: str | None, where: str, tmp_path: Path) -> None:
    model = build("llama")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    texts = [(tokens(150), 5), (tokens(80, 2), 5), (tokens(120, 3), 5)]
    if method is not None:
        rope.patch(model, method, **METHODS[method])
    expected = TokenScorer(model, chunk=CHUNK).losses_together(texts)
    scorer = TokenScorer(offloaded(model, where, tmp_path), chunk=CHUNK)
    assert scorer.tokens_together > 1000
    with counted(model) as read:
        found = scorer.losses_together(texts)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert size <= sum(read) < 1.01 * size  # buffers come too
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    scorer.reader.layers = None
    with counted(model) as read:
        scorer.losses_together(texts)
    assert sum(read) > 10 * size


def test_a_run_reads_offloaded_weights_once_for_all_documents(tmp_path: Path) -> None:
    def measured(model: Any) -> Any:
        documents = [Tokens(name, tokens(200, seed), ()) for seed, name in enumerate("abc")]
        return perplexity(model, documents, methods=["yarn"], lengths=[64, 128], bos=False, chunk=CHUNK)

    expected = measured(build("llama"))
    model = offloaded(build("llama"), "disk", tmp_path)
    with counted(model) as read:
        TokenScorer(model, chunk=CHUNK)
    of_check = sum(read)
    with counted(model) as read:
        assert measured(model) == expected
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(read) - of_check < 2.02 * size  # unpatched and patched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_check_reads_offloaded_weights_twice(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = TokenScorer(build(family).to(dtype), chunk=CHUNK, longest=CHUNK + 1).reader
    model = build(family).to(dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    head = model.get_output_embeddings().weight.nbytes  # once more if it is tied to the embeddings
    model = offloaded(model, "disk", tmp_path)
    with counted(model) as read:
        scorer = TokenScorer(model, chunk=CHUNK)
    assert 2 * size <= sum(read) <= 2.02 * size + 2 * head
    assert scorer.by_layer
    assert (scorer.reader.scales_logits, scorer.reader.windows) == (plain.scales_logits, plain.windows)


@pytest.mark.parametrize("of_type", NOT_BY_LAYER)
def test_an_offloaded_decoder_that_hands_on_more(of_type: str, tmp_path: Path) -> None:
    expected = TokenScorer(tiny(of_type), chunk=CHUNK).losses(tokens(90), 5)
    scorer = TokenScorer(offloaded(tiny(of_type), "disk", tmp_path), chunk=CHUNK)
    assert scorer.reading == "in chunks of 37 tokens"
    assert torch.equal(scorer.losses(tokens(90), 5), expected)


# --- the next layer while one computes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("gemma3", "disk"),
        ("mixtral", "memory"),
        ("mixtral", "files"),
        ("gpt_oss", "disk"),
        ("deepseek_v3", "files"),
        ("bamba", "memory"),
        *(pytest.param(name, "disk", marks=pytest.mark.slow) for name in ("zamba2", "qwen3_next", "gemma4_text")),
        pytest.param("glm", "files", marks=pytest.mark.slow),
    ],
)
def test_each_weight_of_a_layer_is_read_once(family: str, where: str, tmp_path: Path) -> None:
    def make() -> Any:
        return build(family) if family in FAMILIES else tiny(family)

    texts = [(tokens(150), 5), (tokens(80, 2), 5)]
    model = offloaded(make(), where, tmp_path)
    # products may be rounded in another way where weights begin at other places in memory, as those of files do
    whole = load_model(tmp_path, device="cpu") if where == "files" else make()
    expected = TokenScorer(whole, chunk=CHUNK).losses_together(texts)
    scorer = TokenScorer(model, chunk=CHUNK)
    assert scorer.by_layer
    read: Counter[str] = Counter()
    with watched(model, lambda path, value: read.update([path])):
        found = scorer.losses_together(texts)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    times = {path: count for path, count in read.items() if ".layers." in path}
    assert times
    assert set(times.values()) == {1}


def test_the_next_layer_is_read_while_one_computes(tmp_path: Path) -> None:
    """Each layer waits in its first forward until all weights of the next one are read."""
    model = offloaded(build("llama", num_hidden_layers=4), "disk", tmp_path)
    scorer, layers = TokenScorer(model, chunk=CHUNK), model.model.layers
    weights = len(list(layers[0].parameters()))
    of_layer, of_decoder = (sum(p.nbytes for p in part.parameters()) for part in (layers[0], model.model))
    assert scorer.reader.layers is not None
    assert scorer.reader.layers.coming_bytes(ahead=True) == of_decoder - 2 * of_layer
    read: Counter[int] = Counter()
    has_read = threading.Condition()
    in_memory, waited = [], []

    def seen(path: str, value: Tensor) -> None:
        if ".layers." in path:
            in_memory.append(sum(not any(p.is_meta for p in layer.parameters()) for layer in layers))
            with has_read:
                read[int(path.split(".")[2])] += 1
                has_read.notify()

    def wait(layer: Any, *_: Any) -> None:
        following = layer.self_attn.layer_idx + 1
        if following < len(layers):
            with has_read:
                waited.append(has_read.wait_for(lambda: read[following] == weights, timeout=60))
                assert read[following + 1] == 0

    with watched(model, seen), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(wait))
        scorer.losses_together([(tokens(150), 5), (tokens(80, 2), 5)])
    assert waited
    assert all(waited)
    assert set(in_memory) == {0, 1}  # beside the one that is being read


def test_without_room_for_two_layers_they_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TokenScorer(build("llama", num_hidden_layers=4), chunk=CHUNK).losses(tokens(150), 5)
    model = offloaded(build("llama", num_hidden_layers=4), "disk", tmp_path)
    layers, weights = model.model.layers, len(list(model.model.layers.parameters()))
    scorer = TokenScorer(model, chunk=CHUNK)
    others: list[nn.Module] = []  # layers that are there while another one is read
    read: list[str] = []

    def seen(path: str, value: Tensor) -> None:
        if ".layers." in path:
            index = int(path.split(".")[2])
            rest = [*layers[:index], *layers[index + 1 :]]
            others.extend(layer for layer in rest if not next(layer.parameters()).is_meta)
            read.append(path)

    for free, room_for in ((10**12, 2), (0, 1)):
        monkeypatch.setattr("rope_ext_hf.reading.cost.memory.available", lambda device, free=free: free)
        others.clear()
        read.clear()
        with watched(model, seen):
            assert torch.equal(scorer.losses(tokens(150), 5), expected)
        assert len(set(read)) == len(read) == weights
        assert bool(others) == (room_for == 2)


class Failed(BaseException):
    """An error that no code of the package expects, as the KeyboardInterrupt of Ctrl-C."""


@pytest.mark.parametrize("error", [RuntimeError("a layer failed"), Failed()])
def test_weights_are_freed_after_an_error(error: BaseException, tmp_path: Path) -> None:
    expected = TokenScorer(build("llama", num_hidden_layers=4), chunk=CHUNK).losses(tokens(90), 5)
    model = offloaded(build("llama", num_hidden_layers=4), "disk", tmp_path)
    scorer = TokenScorer(model, chunk=CHUNK)
    read: list[weakref.ref[Tensor]] = []

    def fail(*_: Any) -> Any:
        raise error

    with watched(model, lambda path, value: read.append(weakref.ref(value))):
        with model.model.layers[1].register_forward_hook(fail), pytest.raises(type(error)):
            scorer.losses(tokens(90), 5)
        error.__traceback__ = None
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert read
    assert not [weight for weight in read if weight() is not None]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("next-layer")]
    assert torch.equal(scorer.losses(tokens(90), 5), expected)


def test_an_error_in_the_thread_is_raised(tmp_path: Path) -> None:
    expected = TokenScorer(build("llama"), chunk=CHUNK).losses(tokens(90), 5)
    model = offloaded(build("llama"), "disk", tmp_path)
    scorer = TokenScorer(model, chunk=CHUNK)
    file = tmp_path / "model.layers.1.mlp.down_proj.weight.dat"
    moved = file.rename(tmp_path / "moved")
    computed: list[int] = []
    noted = model.model.layers[0].register_forward_hook(lambda *_: computed.append(0))
    with noted, pytest.raises(FileNotFoundError, match=file.name):
        scorer.losses(tokens(90), 5)
    assert computed  # the layer before it
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    moved.rename(file)
    assert torch.equal(scorer.losses(tokens(90), 5), expected)
