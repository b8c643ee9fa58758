"""Cards of folders: what they keep of others' cards, how they say to load and serve, and the results of runs."""

from __future__ import annotations

import html
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

import rope_ext_hf as rope
from rope_ext_hf.errors import FileError, ServingError
from rope_ext_hf.eval import Passkey, Perplexity, measure
from rope_ext_hf.hub import load_model
from rope_ext_hf.reference import path as reference
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.conclusions.measures import perplexity_text
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.terminal import as_wide_as
from rope_ext_hf.tools.serving.configs import serving_config
from rope_ext_hf.tools.serving.model_card import CARD, CARD_COLUMNS, RESULTS, write_card
from tests.support.commands import run
from tests.support.hub_client import client
from tests.support.hub_server import HubServer
from tests.support.inputs import write_model

YARN = ("--method", "yarn", "--factor", "4")
TEXT = "\n# A model\n\n{{ 7 * 7 }} <b>bold</b>\n\n<!-- rope-ext: card -->later<!-- rope-ext: end of the card -->\n"
HEAD = """---
license: other
license_name: model-terms
language: [en, de]
tags: [chat, yarn]
base_model: some/base
model-index:
- name: a
  results: []
---
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "source")
    (folder / CARD).write_text(HEAD + TEXT, encoding="utf-8")
    (folder / "LICENSE.txt").write_text("terms", encoding="utf-8")
    (folder / RESULTS).mkdir()
    (folder / RESULTS / "old.yaml").write_text("[]", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def longer(source: Path) -> Path:
    out = source.parent / "longer"
    code, _, err = run("patch", source, *YARN, "--out", out)
    assert (code, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def measured(source: Path) -> Path:
    """The folder of a run of the source, as loaded and with the method."""
    kept = measure(
        load_model(source, dtype="float32"),
        Perplexity(data="stdlib", lengths=[64, 256], max_spans=8),
        methods=["yarn", "linear"],
        factors=4,
        out=source.parent / "runs",
    )
    return kept.folder


def card_of(folder: Path) -> Any:
    return ModelCard.load(folder / CARD)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_card_and_the_licence_of_the_source_are_kept(longer: Path) -> None:
    card = card_of(longer)
    values = card.data.to_dict()
    assert values == {
        "license": "other",
        "license_name": "model-terms",
        "language": ["en", "de"],
        "tags": ["chat", "yarn", "rope", "long-context"],
        "base_model": "some/base",
        "library_name": "transformers",
    }
    assert card.text.endswith(TEXT)
    assert (longer / "LICENSE.txt").read_text() == "terms"
    assert not (longer / RESULTS).exists()


def test_the_part_written_here_is_replaced_and_nothing_else(longer: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(longer, tmp_path / "named"))
    before = card_of(folder).text
    for _ in range(2):
        write_card(folder, base_model="some/model")
    assert card_of(folder).text == before.replace("# longer", "# named").replace("longer", "named").replace(
        "The weights come from source. ", "The weights come from some/model. "
    )
    values = card_of(folder).data.to_dict()
    assert (values["base_model"], values["base_model_relation"]) == ("some/model", "finetune")


BROKEN = {
    "no end": "---\nlicense: mit\n",
    "no YAML": "---\nlicense: [mit\n---\n",
    "no names": "---\n- mit\n---\n",
    "a number for a name": "---\n1: mit\n---\n",
    "a method for a name": "---\nto_yaml: mit\n---\n",
    "aliases": "---\na: &a [x, x]\nb: [*a, *a]\n---\n",
    "nested too deeply": f"---\na: {'[' * 5000}\n---\n",
}


@pytest.mark.filterwarnings("default:the metadata at the beginning of:UserWarning")
@pytest.mark.parametrize("head", BROKEN.values(), ids=BROKEN)
def test_broken_metadata_cost_one_sentence(head: str, source: Path, tmp_path: Path) -> None:
    broken, out = Path(shutil.copytree(source, tmp_path / "broken")), tmp_path / "out"
    (broken / CARD).write_text(head + "# Text\n", encoding="utf-8")
    code, _, err = run("patch", broken, *YARN, "--out", out)
    assert code == 0
    assert len(err.splitlines()) == 1
    assert "the metadata at the beginning of" in err
    assert "license" not in card_of(out).data.to_dict()
    assert card_of(out).text.endswith("# Text\n")
    with pytest.raises(FileError, match="correct them, or remove the file"):
        write_card(broken)
    assert (broken / CARD).read_text() == head + "# Text\n"


# --- how it is loaded and served --------------------------------------------------------------------------------------


def told_of(engine: str) -> str:
    """What serve-config prints for the folder `longer`, or why the engine refuses it."""
    try:
        with as_wide_as(CARD_COLUMNS):
            return f"```sh\n{serving_config('longer', engine)}\n```"
    except ServingError as error:
        return html.escape(str(error), quote=False)


def test_engines_are_told_as_serve_config_does(longer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(longer.parent)
    text = card_of(longer).text
    for engine in ("vllm", "sglang", "llama.cpp", "gguf", "ollama", "mlx", "tensorrt-llm", "exllamav3"):
        assert told_of(engine) in text
    assert told_of("vllm").startswith("```sh")
    assert "vllm serve longer" in text
    assert rope.fingerprint(longer).digest in text


@pytest.mark.parametrize(
    ("method", "options", "loads"),
    [("yarn", (), "AutoModelForCausalLM.from_pretrained("), ("rerope", (), "rope.from_pretrained("),
     ("rerope", ("--as-code",), "trust_remote_code=True")],
)  # fmt: skip
def test_the_code_that_loads_it_runs(
    method: str, options: tuple[str, ...], loads: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("patch", source, "--method", method, "--target-length", "256", "--out", "made", *options)
    assert code == 0, err
    python = card_of(tmp_path / "made").text.partition("```python\n")[2].partition("```")[0]
    assert loads in python
    names: dict[str, Any] = {}
    exec(python, names)
    assert rope.fingerprint(names["model"]).digest == rope.fingerprint(tmp_path / "made").digest


# --- what was measured ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_by_length_stand_in_the_card_and_in_files(longer: Path, measured: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(longer, tmp_path / "longer"))
    asked = Passkey(lengths=[128, 256], task="key-value", trials=4, keys=2, depths=[0.5])
    retrieval = measure(load_model(folder, dtype="float32"), asked, out=tmp_path / "runs")
    code, out, err = run("card", folder, measured, retrieval.folder)
    assert code == 0, err
    assert [line.rpartition("/")[2] for line in out.splitlines()] == [
        CARD, "rope-ext-passkey-2.yaml", "rope-ext-perplexity-1.yaml",
    ]  # fmt: skip
    results = [each for each in read_run(measured).results if label(each.method) == "yarn x4"]
    text = card_of(folder).text
    assert "The weights come from source. Written by" in text  # as the card before said
    for each in results:
        assert each.low is not None
        assert each.high is not None
        value, low, high = map(perplexity_text, (each.perplexity, math.exp(each.low), math.exp(each.high)))
        interval = f"{value} ({low} to {high})"
        assert f"| {each.length:,} | {interval} |" in text
    entries = parse_eval_result_entries(yaml.safe_load((folder / RESULTS / "rope-ext-perplexity-1.yaml").read_text()))
    assert [(each.task_id, each.value) for each in entries] == [
        (f"perplexity_{each.length}", pytest.approx(each.perplexity, abs=1e-6)) for each in results
    ]
    assert {each.dataset_id for each in entries} == {"text:stdlib"}
    exact = parse_eval_result_entries(yaml.safe_load((folder / RESULTS / "rope-ext-passkey-2.yaml").read_text()))
    assert {each.task_id.rpartition("_")[2] for each in exact} == {"128", "256"}
    both = read_run(measured).select([None, results[0].method])
    assert str(both.conclusion) in text.replace("&gt;", ">")
    findings = both.findings
    loss, key, loaded = findings.ordered[0], json.dumps(results[0].method), json.dumps(None)
    change = loss.change((key, 256), (loaded, 256))
    assert change is not None
    assert loss.change_text(change) in text
    assert "linear" not in text.partition("## Measured")[2].partition("<!--")[0]

    write_card(folder)  # no run: what was measured stays
    assert card_of(folder).text == text
    assert run("card", folder, measured)[0] == 0
    assert [each.name for each in (folder / RESULTS).iterdir()] == ["rope-ext-perplexity-1.yaml"]


@pytest.mark.slow
def test_a_run_of_another_model_or_method_is_refused(
    longer: Path, source: Path, measured: Path, tmp_path: Path
) -> None:
    model = rope.patch(load_model(source), "yarn", factor=4)
    model.get_input_embeddings().weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "out")
    before = (longer / CARD).read_bytes()
    code, _, err = run("card", tmp_path / "out", measured)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "measured other weights than those in" in err
    assert run("patch", source, "--method", "ntk", "--factor", "4", "--out", tmp_path / "ntk")[0] == 0
    code, _, err = run("card", tmp_path / "ntk", measured)
    assert code == 2
    assert "has no result of ntk x4 as" in err
    assert "it measured unpatched, yarn x4, linear x4" in err
    assert (longer / CARD).read_bytes() == before


# --- the Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.slow
def test_a_folder_goes_to_the_hub_private_and_whole(hub: HubServer, tmp_path: Path) -> None:
    out, token = tmp_path / "longer", {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": hub.token}
    command = ("patch", str(reference()), *YARN, "--out", str(out), "--push-to-hub", "me/longer")
    with client(hub.environment(tmp_path / "cache", **token)) as process:
        assert "give --yes" in process.run(*command).err
        assert not out.exists()
        ended = process.run(*command, "--yes")
        assert ended.code == 0, ended
        assert "to the private repository me/longer:" in ended.err
        assert all(f"{name}, " in ended.err for name in files_of(out))
        assert hub.files("me/longer") == files_of(out)
        assert hub.is_private("me/longer")
        assert b"vllm serve me/longer" in hub.files("me/longer")[CARD]
        hub.add("models", "me/public", {})
        refused = process.run("card", str(out), "--push-to-hub", "me/public", "--yes")
        assert (refused.code, "public; give --public, or another name" in refused.err) == (2, True), refused
        assert process.run("card", str(out), "--push-to-hub", "me/public", "--public", "--yes").code == 0
        assert hub.files("me/public") == files_of(out)
        assert "; it contains" not in ended.err
        shutil.copytree(reference(), model := tmp_path / "model")
        extending = ("extend", str(model), "--target-length", "512", "--no-measure", "--out", str(tmp_path / "512"))
        extended = process.run(*extending, "--push-to-hub", "me/512", "--yes")
        assert extended.code == 0, extended
        (of_run,) = (line for line in extended.err.splitlines() if "run.yaml, " in line)
        assert of_run.endswith(f"; it contains paths of this machine: {model}, {tmp_path / '512'}")
        wrong = process.run("card", str(out), "--push-to-hub", "a/b/c", "--yes")
        assert (wrong.code, "cannot be uploaded to the Hub: Repo id must be" in wrong.err) == (2, True), wrong


@pytest.mark.slow
def test_nobody_signed_in_is_one_sentence_before_any_work(hub: HubServer, tmp_path: Path) -> None:
    with client(hub.environment(tmp_path / "cache", HF_TOKEN="")) as process:
        ended = process.run(
            "patch", str(reference()), *YARN, "--out", str(tmp_path / "out"), "--push-to-hub", "me/x", "-y"
        )
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended
    assert "'me/x' cannot be uploaded to the Hub: " in ended.err
    assert "`hf auth login`" in ended.err
    assert not (tmp_path / "out").exists()
