"""Hidden states wait between two layers on the device, in main memory or in a file, and losses are the same."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.files.whole import disk_folder
from rope_ext_hf.hub import load_empty
from rope_ext_hf.reading.cost import memory as reading_memory
from rope_ext_hf.reading.cost.memory import check_memory, estimate_memory, place_of_states, state_bytes, waiting_bytes
from rope_ext_hf.reading.cost.operations import moving_seconds
from rope_ext_hf.reading.larger import waiting_states
from rope_ext_hf.reading.larger.waiting_states import Place, WaitingStates, measure_moving
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.text.documents import Tokens
from tests.reading.through.test_layer_reader import CHUNK, METHODS, saved, tokens
from tests.support.commands import run
from tests.support.models import build

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLACES: tuple[Place, ...] = get_args(Place)
GB = 10**9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("rope_ext_hf.files.whole._is_in_memory", lambda folder: False)
    return folder


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt_oss", "deepseek_v3"))]
)
def test_losses_are_equal_bit_for_bit_in_each_place(family: str, method: str | None, folder: Path) -> None:
    model = build(family)
    if method is not None:
        rope.patch(model, method, **METHODS[method])
    scorer = TokenScorer(model, chunk=CHUNK)
    texts = [(tokens(150), 5), (tokens(80, 2), 5), (tokens(38, 3), 5)]
    expected = scorer.losses_together(texts)
    for place in PLACES:
        scorer.reader.place = place
        for one, other in zip(scorer.losses_together(texts), expected, strict=True):
            assert torch.equal(one, other)


def test_states_in_bfloat16(folder: Path) -> None:
    scorer = TokenScorer(build("llama").bfloat16(), chunk=CHUNK)
    expected = scorer.losses(tokens(150), 5)
    for place in PLACES:
        scorer.reader.place = place
        assert torch.equal(scorer.losses(tokens(150), 5), expected)


@pytest.mark.parametrize("place", PLACES)
def test_states_of_another_dtype(place: Place, folder: Path) -> None:
    """A layer may return another dtype than it is given; the chunks that it has not seen yet keep theirs."""
    states = WaitingStates(place, 5)
    first, second = torch.randn(1, 3, 8), torch.randn(1, 2, 8)
    states.put(0, first)
    states.put(3, second)
    states.put(0, first.bfloat16())
    assert torch.equal(states.take(0), first.bfloat16())
    assert torch.equal(states.take(3), second)
    states.put(3, second.bfloat16())
    assert torch.equal(states.take(0), first.bfloat16())
    assert torch.equal(states.take(3), second.bfloat16())


def mapped(folder: Path) -> list[str]:
    """Return the files in a folder that are mapped into the memory of this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.skipif(sys.platform != "linux", reason="mapped files are listed in /proc")
def test_the_file_has_no_name_and_is_gone_after_an_error(folder: Path) -> None:
    """A file without a name needs nobody to remove it, so that no error and no signal leaves it behind."""
    model = build("llama")
    scorer = TokenScorer(model, chunk=CHUNK, longest=150)
    scorer.reader.place = "disk"
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        seen.append((len(mapped(folder)), len(list(folder.iterdir()))))
        if len(seen) > 2:
            raise RuntimeError("a layer failed")

    with model.model.layers[1].register_forward_hook(look), pytest.raises(RuntimeError, match="a layer failed"):
        scorer.losses(tokens(150), 5)
    assert seen == [(1, 0)] * 3
    assert not mapped(folder)
    scorer.losses(tokens(150), 5)
    assert not mapped(folder)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no room for a file")
def test_a_full_disk_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    scorer = TokenScorer(build("llama"), chunk=CHUNK, longest=150)
    scorer.reader.place = "disk"
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(rope.FileError, match=r"temporary' is full .* set TMPDIR to a folder on a larger disk"):
        scorer.losses(tokens(150), 5)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the system has no /dev/shm")
def test_files_are_not_kept_in_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert disk_folder() == Path("/var/tmp")


# --- the choice of a place --------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free bytes of a GPU, of the main memory and of a disk; a test may change them."""
    free = {"cuda": 1000 * GB, "cpu": 1000 * GB, "disk": 100 * GB}
    monkeypatch.setattr(reading_memory, "available", lambda device: free[device.type])
    monkeypatch.setattr(reading_memory, "free_on_disk", lambda: free["disk"])
    monkeypatch.setattr("rope_ext_hf.reading.cost.operations.available", lambda device: free[device.type])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return free


@pytest.mark.parametrize("device", [CPU, GPU])
def test_states_wait_where_there_is_room(free: dict[str, int], device: torch.device) -> None:
    model = build("llama")
    states, longest = 40 * GB, 40 * GB // state_bytes(model.config, 1, 4)
    how: dict[str, Any] = {"by_layer": True, "fetch": True}

    def checked() -> tuple[Any, Place]:
        needed = check_memory(model, longest, torch.float32, device, **how)
        place, _ = place_of_states(model.config, longest, longest, torch.float32, device, coming=[needed.weights])
        assert (needed.place, needed.fetched) == (place, 0)
        return needed, place

    plain = estimate_memory(model, longest, device=device, by_layer=True)
    needed, place = checked()
    assert place == "device"
    assert needed == plain
    free[device.type] = plain.total - 20 * GB
    needed, place = checked()
    assert place == ("disk" if device == CPU else "memory")
    assert needed.moved == pytest.approx(states, rel=0.01)
    assert needed.total == plain.total - needed.moved
    free["cpu"] = 30 * GB if device == GPU else free["cpu"]
    needed, place = checked()
    assert place == "disk"
    free["disk"] = 30 * GB
    with pytest.raises(rope.CheckpointError, match=r"TMPDIR set to a folder on a disk with 40.0 GB free") as refused:
        checked()
    fitting = int(str(refused.value).split("up to ")[1].split(" tokens")[0].replace(",", ""))
    assert check_memory(model, fitting, torch.float32, device, **how).on_disk <= 30 * GB
    assert fitting > longest // 2


def test_weights_are_fetched_before_states_are_moved(free: dict[str, int]) -> None:
    """Weights are read once for a whole text, and hidden states at each layer."""
    with torch.device("meta"):
        model = build("llama", num_hidden_layers=20, hidden_size=4096, intermediate_size=16384, vocab_size=1000)
    longest = 2**16
    whole = estimate_memory(model, longest, torch.float32, by_layer=True)
    free["cpu"] = whole.total - whole.weights // 2
    needed = check_memory(model, longest, torch.float32, CPU, by_layer=True, fetch=True)
    assert needed.fetched
    assert not needed.moved
    free["cpu"] = whole.total - whole.weights // 20 * 18 - whole.waiting // 2
    needed = check_memory(model, longest, torch.float32, CPU, by_layer=True, fetch=True)
    assert needed.fetched
    assert not needed.moved
    assert not needed.ahead  # one layer at a time, which costs less than moving states to disk
    free["cpu"] = whole.total - whole.weights // 20 * 19 - whole.waiting // 2
    needed = check_memory(model, longest, torch.float32, CPU, by_layer=True, fetch=True)
    assert needed.fetched
    assert needed.on_disk == longest * 4096 * 4


@pytest.mark.parametrize(
    ("left", "place", "way"),
    [(30, "device", 0), (15, "device", 1), (5, "memory", 0), (-5, "memory", 1), (-50, "memory", 1)],
)
def test_states_are_moved_last(free: dict[str, int], left: int, place: Place, way: int) -> None:
    """`left`: the gigabytes that are free beside the weights of two layers; one takes 10 less, the states take 20."""
    model = build("llama")
    longest = 20 * GB // waiting_bytes(model.config, 1, 4)
    with_two = estimate_memory(model, longest, device=GPU, by_layer=True)
    free["cuda"] = with_two.cache + with_two.working + with_two.logits + 100 * GB + left * GB
    coming = [100 * GB, 90 * GB]
    assert place_of_states(model.config, longest, longest, torch.float32, GPU, coming=coming) == (place, way)


def test_the_time_of_moving_states(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr("rope_ext_hf.reading.cost.operations.measure_moving", lambda place, device: 1e9)
    longest = 40 * GB // state_bytes(model.config, 1, 4)
    free["cpu"] = estimate_memory(model, longest, by_layer=True).total - 20 * GB
    needed = check_memory(model, longest, torch.float32, CPU, by_layer=True)
    passes = [longest, longest, longest // 4]  # the last one stays in memory
    moves = 2 * (model.config.num_hidden_layers + 1)
    assert moving_seconds(model, passes, longest, needed, CPU) == pytest.approx(2 * moves * 40, rel=0.01)


@pytest.mark.slow
def test_the_speed_of_a_disk_is_measured(folder: Path) -> None:
    assert 1e6 < measure_moving("disk", CPU) < 1e11
    assert measure_moving("memory", CPU) == measure_moving("device", CPU) == float("inf")
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_text_that_is_longer_than_memory_is_read_through_a_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the command, which says so before, and in Python, from a folder and with a model in memory."""
    path, length = saved(tmp_path / "model", num_hidden_layers=1), 2048  # its weights take less than the hidden states
    document = Tokens("text", torch.randint(3, 90, (length,)), tuple(range(length)))
    text = tmp_path / "text.txt"
    text.write_text("All that a text of a test has to be is long enough. " * 900, encoding="utf-8")
    words = ["ppl", str(path), "--data", str(text), "--lengths", str(length), "--max-spans", "1", "--device", "cpu"]
    words += ["--json", "--out"]
    expected = perplexity(path, [document], lengths=[length], bos=False)
    code, printed, err = run(*words, tmp_path / "runs")
    assert code == 0, err
    assert "in a file" not in err
    of_command = json.loads(printed)["results"][0]["loss"]

    files: list[tuple[int, ...]] = []
    in_file = waiting_states._in_file

    def note(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        files.append(shape)
        return in_file(shape, dtype)

    monkeypatch.setattr(waiting_states, "_in_file", note)
    needed, states = estimate_memory(load_empty(path), length, by_layer=True), length * 64 * 4
    others = needed.total - needed.working - needed.logits
    for module in ("memory", "operations"):
        monkeypatch.setattr(
            f"rope_ext_hf.reading.cost.{module}.available", lambda device: (others - states // 10 * 9) * 16 // 15
        )
    found = perplexity(path, [document], lengths=[length], bos=False)
    assert files == [(1, length - 1, 64)]
    assert found[0].loss == pytest.approx(expected[0].loss, abs=1e-5)  # the chunks are smaller
    code, printed, err = run(*words, tmp_path / "other-runs")
    assert code == 0, err
    assert len(files) == 2
    assert json.loads(printed)["results"][0]["loss"] == pytest.approx(of_command, abs=1e-5)
    told = f"524.3 kB of hidden states in a file in {folder}; moving them takes about"
    assert "".join(told.split()) in "".join(err.split())  # a line may end within the path
