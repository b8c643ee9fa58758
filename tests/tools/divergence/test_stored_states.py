"""Hidden states in the folder of a run: what they hold, how they are written, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rope_ext_hf as rope
from rope_ext_hf.errors import FileError, MethodError, UnsupportedModelError
from rope_ext_hf.eval import Perplexity, divergence, measure, perplexity
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.tools.divergence.states_files import FORMAT, first_checksum, stored_bytes
from rope_ext_hf.tools.divergence.stored_states import StoredStates
from tests.support.commands import run
from tests.support.forks import kill_when, run_command
from tests.support.models import build

LENGTHS = (32, 128)
TARGETS = 9


def document(seed: int) -> Tokens:
    ids = torch.randint(3, 90, (280,), generator=torch.Generator().manual_seed(seed))
    return Tokens(f"text {seed}", ids, tuple(range(1, 281)))


TEXTS = [document(seed) for seed in range(2)]


def stored(model: Any, out: Path, states: str = "model", **options: Any) -> Path:
    question: dict[str, Any] = {"lengths": LENGTHS, "targets": TARGETS, "bos": False, "chunk": 32} | options
    return perplexity(model, TEXTS, store_states=states, out=out, **question).run.folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(build("llama"), tmp_path_factory.mktemp("runs"))


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> Tensor:
    """The decoder's output at each position, by one forward of transformers."""
    states: Tensor = model.model(ids[None], use_cache=False).last_hidden_state[0]
    return states


@pytest.mark.parametrize(
    ("dtype", "states", "kept"),
    [
        (torch.float32, "model", torch.float32),
        (torch.bfloat16, "model", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_the_states_are_the_outputs_of_the_decoder(
    dtype: torch.dtype, states: str, kept: torch.dtype, tmp_path: Path
) -> None:
    model = build("llama").to(dtype)
    folder = stored(model, tmp_path, states)
    for item, text in enumerate(TEXTS):
        for length in LENGTHS:
            (file,) = (folder / "states").glob(f"*.{item}.{length}.safetensors")
            found = load_file(file)["states"]
            right = [outputs(model, text.ids[end - length : end])[-TARGETS - 1 : -1] for end in (128, 256)]
            assert found.dtype == kept
            tolerance = 2e-5 if dtype == torch.float32 and kept == dtype else 0.05
            torch.testing.assert_close(found.float(), torch.cat(right).float(), atol=tolerance, rtol=tolerance)
    assert torch.equal(load_file(folder / "states" / "head.safetensors")["weight"], model.lm_head.weight)
    sizes = sum(path.stat().st_size for path in (folder / "states").iterdir())
    plan = StoredStates.open(folder).plan
    told = stored_bytes(model, plan, states, dtype, 1)
    assert told <= sizes <= told + 10_000  # headers, spans and states.json


def test_bfloat16_is_stored_without_loss(tmp_path: Path) -> None:
    """The same bits, whichever of the two dtypes holds them."""
    model = build("llama").to(torch.bfloat16)
    both = [stored(model, tmp_path / name, name) / "states" for name in ("model", "float32")]
    for path in both[0].glob("*.*.*.safetensors"):
        narrow, wide = (load_file(folder / path.name)["states"] for folder in both)
        assert torch.equal(narrow.float(), wide)


def test_a_state_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
        model.lm_head.weight.mul_(1e-5)
    with pytest.raises(MethodError, match="is too large for float16; give store_states='model' or 'float32'"):
        stored(model, tmp_path, "float16")
    assert stored(model, tmp_path, "float32")


def test_states_need_a_folder() -> None:
    with pytest.raises(MethodError, match="store_states needs the folder of a run"):
        perplexity(build("llama"), TEXTS, lengths=[32], store_states="model", bos=False)
    with pytest.raises(MethodError, match="store_states must be 'model' or 'float16' or 'float32', got 'int8'"):
        Perplexity(lengths=[32], store_states="int8")


def test_a_head_that_is_more_than_a_layer_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        pass

    model = build("llama")
    model.lm_head = Doubled(64, 97, bias=False)
    with pytest.raises(UnsupportedModelError, match="has a head of the class Doubled, so its hidden states cannot be"):
        Perplexity(lengths=[32], data=TEXTS, store_states="model", bos=False).plan(model)


def test_a_run_without_states_is_another_run(folder: Path, tmp_path: Path) -> None:
    plain = perplexity(build("llama"), TEXTS, lengths=LENGTHS, targets=TARGETS, bos=False, chunk=32, out=tmp_path).run
    assert plain.folder.name != folder.name
    assert not (plain.folder / "states").exists()
    losses = [[result.loss for result in run.results] for run in (plain, read_run(folder))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# --- interrupted runs ---------------------------------------------------------------------------------------------


def files_of_records(folder: Path) -> set[str]:
    """The file of each record in the journal, as far as it names document and length."""
    lines = [json.loads(line) for line in (folder / "records.0.jsonl").read_text().splitlines()]
    assert len({json.dumps(line["method"]) for line in lines}) <= 1
    return {f"{line['item']}.{line['cell'][0]}" for line in lines}


def present(folder: Path) -> dict[str, Path]:
    return {".".join(path.name.split(".")[1:3]): path for path in (folder / "states").glob("*.*.*.safetensors")}


def test_an_interrupted_run_goes_on_and_has_no_record_without_states(folder: Path, tmp_path: Path) -> None:
    whole = folder
    question = Perplexity(
        lengths=LENGTHS, targets=TARGETS, bos=False, data=TEXTS, store_states="model", data_name="documents"
    )
    for passes in (3, 6):  # of 8

        def stop(method: str, tokens: int, left: list[None] = [None] * passes) -> None:
            left.pop()
            if not left:
                raise KeyboardInterrupt

        out = tmp_path / str(passes)
        with pytest.raises(KeyboardInterrupt):
            measure(build("llama"), question, out=out, chunk=32, progress=stop)
        (begun,) = out.iterdir()
        before = {name: path.stat().st_mtime_ns for name, path in present(begun).items()}
        assert files_of_records(begun) <= before.keys()
        with pytest.raises(FileError, match=r"is not finished|has no result yet"):
            StoredStates.open(begun)
        assert stored(build("llama"), out) == begun
        assert files_of_records(begun) == present(begun).keys() == {f"{i}.{n}" for i in (0, 1) for n in LENGTHS}
        untouched = [name for name in before if present(begun)[name].stat().st_mtime_ns == before[name]]
        assert untouched
        for name, path in present(begun).items():
            assert path.read_bytes() == present(whole)[name].read_bytes()
        assert not list((begun / "states").glob("*.part"))


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    command = ["ppl", "reference", "--lengths", "128,256", "--max-spans", "12", "--dtype", "float32"]
    command += ["--tokens-per-pass", "64", "--store-states", "float32", "--out", str(tmp_path / "runs")]

    def begun() -> bool:
        return len(list(tmp_path.glob("runs/*/states/*.*.*.safetensors"))) >= 2

    kill_when(begun, run_command, command, folder=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert files_of_records(folder) <= present(folder).keys()
    code, _, err = run(*command)
    assert code == 0, err
    assert files_of_records(folder) == present(folder).keys()
    model = rope.from_pretrained("reference", dtype=torch.float32)
    assert [result.kl for result in divergence(model, folder)] == pytest.approx([0, 0], abs=1e-6)


def test_a_full_disk_is_an_error_before_and_while_states_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5_000})
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(
            FileError, match=r"18\.4 kB are to be written to .*, where 5\.0 kB are free; make room, and"
        ):
            stored(build("llama"), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "records.0.jsonl").read_text()
    assert stored(build("llama"), tmp_path) == folder


# --- folders that come from somebody else -------------------------------------------------------------------------


def damage(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def one_of(states: Path, pattern: str) -> Path:
    return sorted(states.glob(pattern))[0]


def shorten(states: Path) -> None:
    path = one_of(states, "*.0.32.*")
    path.write_bytes(path.read_bytes()[:-8])


def other_shape(states: Path) -> None:
    save_file({"states": torch.zeros(3, 64)}, one_of(states, "*.0.32.*"), {"crc32": "00000000"})


def described_as(states: Path, **changed: Any) -> None:
    path = states / "states.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def link(states: Path, pattern: str) -> None:
    path = one_of(states, pattern)
    path.rename(states.parent / "elsewhere")
    path.symlink_to(states.parent / "elsewhere")


def linked_folder(states: Path) -> None:
    states.rename(states.parent / "elsewhere")
    states.symlink_to(states.parent / "elsewhere")


def save_checked(tensors: dict[str, Tensor], path: Path, number: int = FORMAT) -> None:
    """Write tensors with a checksum that is right for this place."""
    save_file(tensors, path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    settings = json.loads((path.parent.parent / "run.json").read_text())
    checksum = zlib.crc32(content[start:], first_checksum(settings, path.name, number))
    save_file(tensors, path, {"crc32": f"{checksum:08x}"})


def other_text(states: Path) -> None:
    tensors = load_file(states / "text.safetensors")
    tensors["ids.0"][3] += 1
    save_checked(tensors, states / "text.safetensors")


def whole_numbers(states: Path) -> None:
    save_checked({"weight": torch.zeros(97, 64, dtype=torch.int8)}, states / "head.safetensors")


def other_head(states: Path) -> None:
    draws = torch.Generator().manual_seed(5)
    save_checked({"weight": torch.randn(97, 64, generator=draws)}, states / "head.safetensors")


DAMAGES: dict[str, tuple[Any, str]] = {
    "no folder": (shutil.rmtree, "is missing; measure the run again"),
    "a folder that is a link": (linked_folder, "is not a folder but a link"),
    "no states": (lambda states: one_of(states, "*.0.32.*").unlink(), "is missing; measure the run again"),
    "states that are a link": (partial(link, pattern="*.0.32.*"), "is not a plain file"),
    "a head that is a link": (partial(link, pattern="head*"), "is not a plain file"),
    "short states": (shorten, "is damaged: .* is not a valid safetensors file"),
    "other states": (other_shape, "is damaged: it does not hold 18 states of 64 numbers"),
    "a flipped bit of states": (lambda states: damage(one_of(states, "*.0.32.*")), "its content has changed"),
    "a flipped bit of the head": (lambda states: damage(states / "head.safetensors"), "its content has changed"),
    "a flipped bit of the text": (lambda states: damage(states / "text.safetensors"), "its content has changed"),
    "another text": (other_text, "has other tokens than the run read"),
    "another head": (other_head, "do not give the loss that the run recorded for 'text 0' at 32 tokens"),
    "a head of whole numbers": (whole_numbers, "its weight and bias do not fit together"),
    "the description of another run": (partial(described_as, text="0"), "are those of another text than run.json's"),
    "no description": (lambda states: (states / "states.json").unlink(), "is missing"),
    "a description of nothing": (partial(described_as, finishing=[]), "does not describe stored states"),
    "a later format": (partial(described_as, format=FORMAT + 1), "is of a later version of this package"),
    "a step that is no number": (
        partial(described_as, finishing={"factor": "2", "divisor": None, "cap": None}),
        "does not describe stored states",
    ),
    "another step": (
        partial(described_as, finishing={"factor": 4.0, "divisor": None, "cap": None}),
        "do not give the loss that the run recorded for 'text 0' at 32 tokens",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_damaged_is_an_error_that_says_so(name: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    harm, message = DAMAGES[name]
    harm(copy / "states")
    with pytest.raises(FileError, match=message):
        divergence(build("llama", seed=1), copy)


@pytest.mark.parametrize("seed", [0, 1])
def test_states_are_those_of_their_place_alone(seed: int, folder: Path, tmp_path: Path) -> None:
    """Two files of one run, of one size, change places; or files of another model stand in their place."""
    source = folder if seed == 0 else stored(build("llama", seed=seed), tmp_path / "other")
    copy = shutil.copytree(folder, tmp_path / folder.name)
    sizes: dict[int, list[Path]] = {}
    for path in sorted((source / "states").glob("*.*.*.safetensors")):
        sizes.setdefault(path.stat().st_size, []).append(path)
    first, second = next(paths for paths in sizes.values() if len(paths) > 1)[:2]
    for taken, place in ((first, second), (second, first)) if seed == 0 else ((first, first), (second, second)):
        shutil.copy(taken, copy / "states" / place.name)
    with pytest.raises(FileError, match="or it is another file's"):
        divergence(build("llama"), copy)


def test_states_of_the_first_format_are_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    for path in (copy / "states").glob("*.safetensors"):
        save_checked(load_file(path), path, 1)
    described_as(copy / "states", format=1)
    assert divergence(build("llama"), copy)[0].kl == divergence(build("llama"), folder)[0].kl
    damage(one_of(copy / "states", "*.0.32.*"))
    with pytest.raises(FileError, match="its content has changed"):
        divergence(build("llama"), copy)


def test_a_link_in_the_place_of_states_is_not_written_through(tmp_path: Path) -> None:
    folder = stored(build("llama"), tmp_path)
    target = tmp_path / "target"
    target.write_text("kept")
    (folder / "records.0.jsonl").write_text("")
    for path in [*(folder / "states").glob("*.*.*.safetensors")]:
        path.unlink()
        path.symlink_to(target)
        path.with_name(f"{path.name}.part").symlink_to(target)
    assert stored(build("llama"), tmp_path) == folder
    assert target.read_text() == "kept"
    assert all(path.is_file() and not path.is_symlink() for path in (folder / "states").iterdir())
    linked_folder(folder / "states")
    (folder / "records.0.jsonl").write_text("")
    with pytest.raises(FileError, match="is not a folder but a link"):
        stored(build("llama"), tmp_path)


def test_states_of_two_methods_have_files_of_their_own(tmp_path: Path) -> None:
    question = Perplexity(lengths=LENGTHS, targets=TARGETS, bos=False, data=TEXTS, store_states="model")
    run = measure(build("llama"), question, methods=["yarn"], factors=2, out=tmp_path)
    loaded, patched = (StoredStates.open(run.folder, name) for name in run.names.values())
    assert [method_key(states.method) for states in (loaded, patched)] == [*run.names]
    span = loaded.plan.documents[0][1][0]
    assert not torch.equal(loaded.rows(0, span, 0, 5), patched.rows(0, span, 0, 5))


def test_memory_follows_from_the_tokens_that_are_read_and_not_from_their_places(folder: Path, tmp_path: Path) -> None:
    """The spans of a text begin behind a trillion tokens that no span reads."""
    copy = shutil.copytree(folder, tmp_path / folder.name)
    tensors = load_file(copy / "states" / "text.safetensors")
    tensors["spans.0"] += torch.tensor([0, *4 * [10**12], 0])
    save_checked(tensors, copy / "states" / "text.safetensors")
    sha = hashlib.sha256(b"()")
    for item in range(len(TEXTS)):
        spans = [tuple(row) for row in tensors[f"spans.{item}"].tolist()]
        sha.update(tensors[f"ids.{item}"].numpy().tobytes() + repr(spans).encode())
    described_as(copy / "states", tokens=sha.hexdigest())
    states, usual = StoredStates.open(copy), StoredStates.open(folder)
    assert [len(text.ids) for text, _ in states.plan.documents] == [len(text.ids) for text, _ in usual.plan.documents]
    assert divergence(build("llama"), copy)[0].kl == divergence(build("llama"), folder)[0].kl


def test_gaps_between_spans_are_left_out(tmp_path: Path) -> None:
    ids = torch.randint(3, 90, (2000,), generator=torch.Generator().manual_seed(0))
    question: dict[str, Any] = {"lengths": [16, 32], "targets": 8, "bos": False, "max_spans": 3}
    text = [Tokens("long", ids, tuple(range(1, 2001)))]
    run = perplexity(build("llama"), text, store_states="model", out=tmp_path, **question).run
    ((document, spans),) = StoredStates.open(run.folder).plan.documents
    assert len(document.ids) == 3 * 32
    read = [document.ids[span.start : span.stop] for span in spans if span.length == 32]
    places = [next(i for i in range(2000) if torch.equal(ids[i : i + 32], part)) for part in read]
    assert places == sorted(places)
    assert places[-1] > 1000
    assert [result.kl for result in divergence(build("llama"), run.folder)] == pytest.approx([0, 0], abs=1e-6)
