"""Models and texts by Hub id, against a stand-in of the Hub: right results, or one line and nothing half-written."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save

import rope_ext_hf as rope
from rope_ext_hf.reference import path
from tests.support.checkpoint_folders import content, untouched
from tests.support.hub_client import Client, Outcome, client, logits
from tests.support.hub_server import Fault, HubServer
from tests.support.texts import ONE_MODULE

WEIGHTS = "model.safetensors"
ONE_SPAN = ("--lengths", "64", "--max-spans", "1", "--data", ONE_MODULE)
THOROUGH = pytest.mark.thorough  # most wait for a silent Hub, or try again
ONE_TRIAL = ("--lengths", "128", "--trials", "1", "--haystack", ONE_MODULE)
AT_MOST = 90.0  # seconds a command may take, whatever the Hub does; on a machine with other work
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of conversions that transformers does not run
]


@dataclass(frozen=True)
class Hub:
    """A Hub, its models as folders, and a process that asks it."""

    server: HubServer
    folders: dict[str, Path]
    cache: Path
    client: Client

    def run(self, *arguments: str, limit: float = 600.0) -> Outcome:
        return self.client.run(*arguments, limit=limit)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model: in shards, patched in transformers' form and without it, with legacy weights, with layers."""
    root = tmp_path_factory.mktemp("folders")
    folders = {name: root / name for name in ("plain", "sharded", "native", "restored", "legacy", "embedding")}
    for folder in folders.values():
        shutil.copytree(path(), folder, ignore=shutil.ignore_patterns("__*", "*.png"))

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path())

    for name in ("sharded", "legacy"):
        (folders[name] / WEIGHTS).unlink()
    model().save_pretrained(folders["sharded"], max_shard_size="2MB")
    rope.patch(model(), "yarn", factor=4).save_pretrained(folders["native"])
    rope.patch(model(), "dca", target_length=1024).save_pretrained(folders["restored"])
    torch.save(model().state_dict(), folders["legacy"] / "pytorch_model.bin")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}]
    (folders["embedding"] / "modules.json").write_text(json.dumps(modules))
    (folders["embedding"] / "1_Dense").mkdir()
    (folders["embedding"] / "1_Dense" / "config.json").write_text('{"in_features": 256, "out_features": 16}')
    (folders["embedding"] / "1_Dense" / WEIGHTS).write_bytes(save({"linear.weight": torch.ones(16, 256)}))
    return folders


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    cache = tmp_path_factory.mktemp("cache")
    with HubServer() as server:
        for name, folder in folders.items():
            server.add("models", f"some/{name}", content(folder))
        server.add("models", "some/gated", content(folders["plain"]), gated=True)
        config = json.loads((folders["plain"] / "config.json").read_text())
        longer = json.dumps(config | {"max_position_embeddings": 777}).encode()
        server.add("models", "some/plain", content(folders["plain"]) | {"config.json": longer}, branch="longer")
        for name, files in text_repositories().items():
            server.add("datasets", f"some/{name}", files, gated=name == "gated")
        with client(server.environment(cache)) as process:
            yield Hub(server, folders, cache, process)


@pytest.fixture(autouse=True)
def no_faults(hub: Hub) -> None:
    hub.server.faults.clear()
    hub.server.requests.clear()


# --- the same as from a folder --------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["plain", "sharded", "native", "restored", "legacy"])
def test_a_model_by_hub_id_is_the_model_in_its_folder(name: str, hub: Hub) -> None:
    assert hub.client.call(logits, f"some/{name}") == logits(hub.folders[name])
    by_id, by_folder = hub.run("describe", f"some/{name}"), hub.run("describe", str(hub.folders[name]))
    assert (by_id.code, by_id.out, by_id.err) == (0, by_folder.out, ""), by_id


@pytest.mark.parametrize("name", ["plain", "sharded", "legacy", "embedding"])
def test_patching_and_converting_by_hub_id(name: str, hub: Hub, tmp_path: Path) -> None:
    for source, out in ((f"some/{name}", "by-id"), (str(hub.folders[name]), "by-folder")):
        code = hub.run("patch", source, "--method", "yarn", "--factor", "4", "--out", str(tmp_path / f"{out}-patched"))
        assert code.code == 0, code
        code = hub.run("convert", source, str(tmp_path / f"{out}-converted"), "--to", "interleaved", "--verify")
        assert code.code == 0, code
    cards = [(tmp_path / f"{out}-patched" / "README.md").read_text() for out in ("by-id", "by-folder")]
    base = f"base_model: some/{name}\nbase_model_relation: finetune\n"
    assert cards[0].replace(base, "").replace(f"some/{name}", name).replace("by-id", "by-folder") == cards[1]
    (tmp_path / "by-id-patched" / "README.md").write_text(cards[1])
    for step in ("patched", "converted"):
        assert content(tmp_path / f"by-id-{step}") == content(tmp_path / f"by-folder-{step}")
        assert (tmp_path / f"by-id-{step}" / "1_Dense" / WEIGHTS).is_file() == (name == "embedding")


def test_detecting_by_hub_id(hub: Hub) -> None:
    outcome = hub.run("detect", "some/sharded", "--json")
    assert json.loads(outcome.out)["pairing"] == "half"


def test_an_adapter_whose_model_is_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    rows = {"q_proj": 256, "k_proj": 128}
    names = {f"base_model.model.model.layers.0.self_attn.{module}": size for module, size in rows.items()}
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 256) for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.arange(2.0 * size).view(size, 2) for name, size in names.items()}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "some/base"}
    files = {"adapter_model.safetensors": save(tensors), "adapter_config.json": json.dumps(config).encode()}
    hub.server.add("models", "some/base", content(hub.folders["plain"]))
    hub.server.add("models", "some/adapter", files)
    convert = ["convert", "some/adapter", str(tmp_path / "out"), "--to", "interleaved"]
    hub.server.faults["/api/models/some/base/*"] = Fault(status=500)
    outcome = hub.run(*convert)
    assert outcome.code == 2
    assert_last_line(outcome, "'some/base' is neither a folder here nor a model in the Hub's cache")
    hub.server.faults.clear()
    assert hub.run(*convert).code == 0
    written = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert len(written) == len(files["adapter_model.safetensors"]) != 0
    (tmp_path / "folder").mkdir()
    for name, data in files.items():
        (tmp_path / "folder" / name).write_bytes(data)
    ppl = [
        hub.run("ppl", name, *ONE_SPAN, "--json", "--out", str(tmp_path / str(number)))
        for number, name in enumerate(("some/adapter", str(tmp_path / "folder"), "some/base"))
    ]
    assert [outcome.code for outcome in ppl] == [0, 0, 0], ppl
    losses = [json.loads(outcome.out)["results"][0]["loss"] for outcome in ppl]
    assert losses[0] == losses[1] != losses[2]
    assert written != files["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("ppl", ["--method", "yarn", "--factor", "2", *ONE_SPAN]),
        pytest.param("sweep", ["--method", "yarn", "--factor", "2", *ONE_SPAN]),
        pytest.param("passkey", ["--task", "key-value", *ONE_TRIAL], marks=THOROUGH),
    ],
)
def test_measuring_by_hub_id(command: str, options: list[str], hub: Hub, tmp_path: Path) -> None:
    results = []
    for source, out in (("some/sharded", "by-id"), (str(hub.folders["sharded"]), "by-folder")):
        outcome = hub.run(command, source, *options, "--json", "--out", str(tmp_path / out))
        assert outcome.code == 0, outcome
        results.append(json.loads(outcome.out))
    by_id, by_folder = ([without_times(result) for result in run["results"]] for run in results)
    assert by_id == by_folder
    assert results[0]["provenance"]["model"] == "some/sharded"


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if not key.startswith(("seconds", "tokens_per", "cost"))}


# --- revisions, caches, redirects -----------------------------------------------------------------------------------


def test_revisions(hub: Hub) -> None:
    commit = hub.server.add("models", "some/revised", content(hub.folders["plain"]))
    files = content(hub.folders["plain"])
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps(config | {"max_position_embeddings": 777}).encode()
    hub.server.add("models", "some/revised", files, branch="longer")
    for revision, length in (("main", 256), ("longer", 777), (commit, 256)):
        described = json.loads(hub.run("describe", "some/revised", "--revision", revision, "--json").out)
        assert described["context_length"] == length
    outcome = hub.run("describe", "some/revised", "--revision", "nope")
    assert (outcome.code, outcome.err) == (
        2,
        "rope-ext: 'some/revised' on the Hub has no branch, tag or commit 'nope'\n",
    )


def test_what_is_in_the_cache_is_not_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    assert hub.run("convert", "some/sharded", str(tmp_path / "first"), "--to", "interleaved").code == 0
    hub.server.requests.clear()
    assert hub.run("convert", "some/sharded", str(tmp_path / "second"), "--to", "interleaved").code == 0
    assert not [request for request in hub.server.requests if request[0] == "GET" and "/cdn/" in request[1]]
    assert len(hub.server.requests) == 1


def test_no_more_is_downloaded_than_is_read(hub: Hub, tmp_path: Path) -> None:
    files = content(hub.folders["legacy"]) | content(hub.folders["plain"])
    files |= {"original/consolidated.00.pth": bytes(20_000), "model.gguf": bytes(20_001)}
    hub.server.add("models", "some/both", files)
    assert hub.run("describe", "some/both").code == 0
    assert not [request for request in hub.server.requests if "/cdn/" in request[1]]
    assert hub.run("convert", "some/both", str(tmp_path / "out"), "--to", "interleaved").code == 0
    assert len({request[1] for request in hub.server.requests if "/cdn/" in request[1]}) == 1


def test_a_token_opens_a_gated_model_and_does_not_leave_the_hub(hub: Hub, tmp_path: Path) -> None:
    convert = ("convert", "some/gated", str(tmp_path / "out"), "--to", "interleaved")
    for token in (None, "hf_wrong"):
        hub.client.call(set_token, token)
        outcome = hub.run(*convert)
        assert outcome.code == 2
        assert "accept them at http://127.0.0.1" in outcome.err
        assert untouched(tmp_path, "out")
    hub.server.authorized.clear()
    hub.client.call(set_token, hub.server.token)
    try:
        assert hub.run(*convert).code == 0
    finally:
        hub.client.call(set_token, None)
    assert set(hub.server.authorized) == {None}


def set_token(token: str | None) -> None:
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token


# --- transfers that go wrong ----------------------------------------------------------------------------------------


def damaged(files: dict[str, bytes], name: str, at: int) -> bytes:
    """The content of a file with one byte changed, which its size does not show."""
    data = bytearray(files[name])
    data[at] ^= 1
    return bytes(data)


FAILURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "damaged weights": (WEIGHTS, {"replace": "damaged"}, "'model.safetensors' of .* arrived damaged"),
    "damaged config": ("config.json", {"replace": "damaged"}, "'config.json' of .* arrived damaged"),
    "short": (WEIGHTS, {"replace": "short"}, "could not be downloaded .* Consistency check failed.* Try again"),
    "cut off": (WEIGHTS, {"cut": 0}, "could not be downloaded .* peer closed connection"),
    "forbidden": (WEIGHTS, {"status": 403}, "could not be downloaded .* 403 Forbidden"),
    "out of order": (WEIGHTS, {"status": 503}, "could not be downloaded .* '503 Service Unavailable"),
    "silent": (WEIGHTS, {"stall": 30.0}, "could not be downloaded .* timed out"),
    "a broken API": ("/api/*", {"status": 500}, "the Hub cannot be reached or has a fault"),
    "a silent API": ("/api/*", {"stall": 30.0}, "the Hub cannot be reached or has a fault"),
}
WAITING = ("cut off", "silent", "a silent API")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "failure",
    [pytest.param(name, marks=[THOROUGH] * (name in WAITING)) for name in FAILURES],
)
def test_a_transfer_that_fails_is_one_line_and_leaves_nothing(failure: str, hub: Hub, tmp_path: Path) -> None:
    pattern, values, message = FAILURES[failure]
    files = content(hub.folders["plain"])
    name = f"some/{failure.replace(' ', '-')}"
    hub.server.add("models", name, files)
    replace = {"damaged": damaged(files, pattern, -1), "short": files[WEIGHTS][:1000]} if "replace" in values else {}
    commands = {
        "convert": ["convert", name, str(tmp_path / "out"), "--to", "interleaved"],
        "patch": ["patch", name, "--method", "yarn", "--factor", "2", "--out", str(tmp_path / "out")],
        "ppl": ["ppl", name, *ONE_SPAN, "--out", str(tmp_path / "runs")],
    }
    for command, arguments in commands.items():
        hub.server.faults[pattern] = Fault(**values | {key: replace[values[key]] for key in values if key == "replace"})
        outcome = hub.run(*arguments, limit=AT_MOST)
        assert outcome.code == 2, (command, outcome)
        assert_last_line(outcome, message)
        assert untouched(tmp_path, "out")
        assert not list((tmp_path / "runs").glob("*"))
    hub.server.faults.clear()
    assert hub.run(*commands["convert"]).code == 0  # nothing wrong was kept


def test_a_file_that_was_changed_in_the_cache_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    """A file that a user changed there is not taken for one that arrived damaged."""
    hub.server.add("models", "some/edited", content(hub.folders["plain"]))
    assert hub.run("describe", "some/edited").code == 0
    config = next(hub.cache.glob("hub/models--some--edited/snapshots/*/config.json"))
    longer = json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 777})
    config.resolve().write_text(longer)  # its checksum is another one now
    assert hub.run("ppl", "some/edited", *ONE_SPAN, "--out", str(tmp_path)).code == 0  # its tokenizer arrives
    assert config.read_text() == longer


def assert_last_line(outcome: Outcome, message: str) -> None:
    import re

    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("rope-ext: ")
    assert re.search(message, last), last
    assert len(last) < 600


@pytest.mark.parametrize(
    "fault", [{"cut": 1_000_000, "times": 2}, pytest.param({"stall": 3.0, "times": 1}, marks=THOROUGH)]
)
def test_a_transfer_that_is_interrupted_goes_on(fault: dict[str, Any], hub: Hub, tmp_path: Path) -> None:
    name = f"some/interrupted-by-{next(iter(fault))}"
    hub.server.add("models", name, content(hub.folders["plain"]))
    hub.server.faults[WEIGHTS] = Fault(**fault)
    assert hub.run("patch", name, "--method", "yarn", "--factor", "2", "--out", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (hub.folders["plain"] / WEIGHTS).read_bytes()


def test_names_that_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    for name, message in (("some/missing", "nor a model on the Hub"), ("referense", "Did you mean 'reference'")):
        for arguments in (
            ["describe", name],
            ["convert", name, str(tmp_path / "out"), "--to", "half"],
            ["ppl", name, *ONE_SPAN],
        ):
            outcome = hub.run(*arguments)
            assert outcome.code == 2
            assert_last_line(outcome, message)
    assert untouched(tmp_path, "out")


def test_a_repository_in_another_format_is_named_before_anything_is_loaded(hub: Hub, tmp_path: Path) -> None:
    files = {name: data for name, data in content(hub.folders["plain"]).items() if name != WEIGHTS}
    hub.server.add("models", "some/exported", files | {"onnx/model.onnx": b""})
    assert hub.run("describe", "some/exported").code == 0
    for arguments in (["convert", "some/exported", str(tmp_path / "out"), "--to", "hf"], ["detect", "some/exported"]):
        outcome = hub.run(*arguments)
        assert outcome.code == 2
        assert_last_line(outcome, r"'some/exported' on the Hub holds no weights .* an ONNX model in 'onnx'")
    assert untouched(tmp_path, "out")


# --- without a network ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_offline_a_config_is_enough_where_no_more_is_read(hub: Hub, tmp_path: Path) -> None:
    hub.server.add("models", "some/config", content(hub.folders["sharded"]))
    online = hub.run("describe", "some/config")
    with client(hub.server.environment(hub.cache, HF_HUB_OFFLINE="1")) as process:
        assert process.run("describe", "some/config").out == online.out != ""
        outcome = process.run("convert", "some/config", str(tmp_path / "out"), "--to", "interleaved")
    assert outcome.code == 2
    assert_last_line(outcome, "holds no weights; looked for model.safetensors.index.json")


@pytest.mark.thorough
def test_offline_the_cache_serves_what_it_has(hub: Hub, tmp_path: Path) -> None:
    ppl = ["ppl", "some/plain", *ONE_SPAN, "--json", "--out"]
    online = hub.run(*ppl, str(tmp_path / "online"))
    assert hub.run("convert", "some/plain", str(tmp_path / "there"), "--to", "interleaved").code == 0
    hub.server.requests.clear()
    with client(hub.server.environment(hub.cache, HF_HUB_OFFLINE="1")) as process:
        offline = process.run(*ppl, str(tmp_path / "offline"))
        assert offline.code == 0, offline
        assert json.loads(offline.out)["results"][0]["loss"] == json.loads(online.out)["results"][0]["loss"]
        outcome = process.run("convert", "some/plain", str(tmp_path / "out"), "--to", "interleaved")
        assert (outcome.code, content(tmp_path / "out") == content(tmp_path / "there")) == (0, True), outcome
        for arguments in (["describe", "some/never"], ["convert", "some/never", str(tmp_path / "no"), "--to", "half"]):
            outcome = process.run(*arguments)
            assert outcome.code == 2
            assert_last_line(outcome, "neither a folder here nor a model in the Hub's cache")
        outcome = process.run("ppl", "reference", *ONE_SPAN, "--data", "hf:some/lines", "--out", str(tmp_path / "text"))
        assert outcome.code == 2
        assert_last_line(outcome, "the Hub dataset 'some/lines' cannot be read: Couldn't reach")
    assert hub.server.requests == []


# --- texts ----------------------------------------------------------------------------------------------------------

BOOKS = [f"{i}. It was the best of times, it was the worst of times.\n" * 400 for i in range(12)]
TOKENS = [[i, *range(65, 91)] * 200 for i in range(12)]


def text_repositories() -> dict[str, dict[str, bytes]]:
    """A data set of books in JSON lines and in parquet, one of token ids, and one behind a gate."""
    import pyarrow
    from pyarrow import parquet

    def table(**columns: Any) -> bytes:
        file = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), file, row_group_size=4, compression="none")
        return file.getvalue()

    lines = "".join(json.dumps({"title": "a", "text": book}) + "\n" for book in BOOKS).encode()
    train = {"data/train-00000-of-00001.parquet": table(text=["not this one"], title=["a"])}
    return {
        "lines": {"README.md": b"---\nlicense: mit\n---\n", "test.jsonl": lines},
        "books": train | {"data/validation-00000-of-00001.parquet": table(text=BOOKS, title=["a"] * len(BOOKS))},
        "tokens": {"data/test-00000-of-00001.parquet": table(input_ids=TOKENS, length=[len(row) for row in TOKENS])},
        "gated": {"test.jsonl": lines},
    }


def texts(data: str) -> list[str | list[int]]:
    """The texts of a corpus, or what its error is."""
    from rope_ext_hf.reading.text.load import load

    return [document.text if document.ids is None else list(document.ids) for document in load(data)]


def test_texts_are_streamed(hub: Hub) -> None:
    call = hub.client.call
    assert call(texts, "hf:some/lines") == BOOKS
    assert call(texts, "hf:some/books?split=validation") == BOOKS
    assert call(texts, "hf:some/tokens?column=input_ids") == TOKENS
    assert call(texts, "hf:some/tokens") == TOKENS  # it has no text, and token ids under their usual name


def test_a_streamed_text_is_measured(hub: Hub, tmp_path: Path) -> None:
    outcome = hub.run(
        *("ppl", "reference", *ONE_SPAN, "--data", "hf:some/tokens?column=input_ids", "--out", str(tmp_path))
    )
    assert outcome.code == 0, outcome


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("some/missing", "Dataset 'some/missing' doesn't exist on the Hub or cannot be accessed"),
        ("some/gated", "Dataset 'some/gated' is a gated dataset on the Hub. You must be authenticated"),
        ("some/lines?split=nope", "Bad split: nope"),
        ("some/lines?config=nope", "BuilderConfig 'nope' not found"),
        ("some/books", "has no split 'test'; choose one with"),
    ],
)
def test_streams_that_cannot_begin(data: str, message: str, hub: Hub) -> None:
    with pytest.raises(rope.CorpusError, match=message):
        hub.client.call(texts, f"hf:{data}", limit=AT_MOST)


@pytest.mark.parametrize("file", ["test.jsonl", "data/*"])
def test_a_stream_that_is_interrupted_goes_on(file: str, hub: Hub) -> None:
    hub.server.faults[file] = Fault(cut=30_000, times=1)
    data = "hf:some/lines" if file == "test.jsonl" else "hf:some/books?split=validation"
    assert hub.client.call(texts, data, limit=AT_MOST) == BOOKS


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 404}, "404 Not Found"),
        ({"replace": b"{" * 400_000}, "Failed to read|JSON|parse"),
        pytest.param({"status": 503}, "503 Service Unavailable", marks=THOROUGH),
        pytest.param({"cut": 0}, "Server Disconnected|peer closed", marks=THOROUGH),
        pytest.param({"stall": 20.0}, "Server Disconnected|timed out", marks=THOROUGH),
    ],
)
def test_a_stream_that_breaks_off_is_one_error(fault: dict[str, Any], message: str, hub: Hub) -> None:
    hub.server.faults["test.jsonl"] = Fault(**fault)
    with pytest.raises(rope.CorpusError, match=f"the Hub dataset 'some/lines' cannot be read: .*({message})"):
        hub.client.call(texts, "hf:some/lines", limit=3 * AT_MOST)
