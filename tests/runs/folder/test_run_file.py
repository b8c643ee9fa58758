"""Run files: what is written is read back, in Python too; a mistake is a sentence with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import rope_ext_hf as rope
from rope_ext_hf.errors import FileError
from rope_ext_hf.eval import Perplexity, perplexity
from rope_ext_hf.hub import load_model
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.options.arguments import Options
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.runs.folder.run_file import RUN_FILE, read_run_files, run_file
from tests.support.texts import ONE_MODULE

RECORDED = Path(__file__).parents[1] / "recorded"


def test_what_is_asked_in_python_is_read_back(tmp_path: Path) -> None:
    asked = Perplexity(lengths="1k,2k", data="a b: c.txt", targets=8)
    methods = MethodChoice(method=["ntk", Yarn(factor=2.0)], parameters={"beta_fast": 16.0})
    written = run_file(asked, "reference", methods, out=tmp_path, device="cpu")
    written.write(tmp_path)
    (read,) = read_run_files(tmp_path)
    assert (read.command, read.model, read.versions) == ("ppl", "reference", written.versions)
    assert Perplexity(**{name: read.options[name] for name in asked.arguments if name in read.options}) == asked
    assert read.options["method"] == ["ntk", Yarn(factor=2.0)]
    assert read.options["beta_fast"] == 16.0
    assert "revision" not in read.options  # of a folder


def test_runs_of_other_methods_stand_beside_each_other_once(tmp_path: Path) -> None:
    asked = Perplexity(lengths=64)
    one, other = (run_file(asked, "reference", MethodChoice(method=name)) for name in ("ntk", Yarn(factor=2.0)))
    for each in (one, other, one):
        each.write(tmp_path, beside_others=True)
    assert [file.request for file in read_run_files(tmp_path)] == [other.request, one.request]
    (tmp_path / RUN_FILE).write_text("[")
    one.write(tmp_path, beside_others=True)
    one.write(tmp_path)
    assert read_run_files(tmp_path / RUN_FILE) == [one]


@pytest.mark.slow
def test_a_model_in_memory_is_called_by_its_folder_where_that_holds_it(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lengths": 64, "max_spans": 1}
    model = load_model("reference", dtype="float32", device="cpu")
    perplexity(model, ONE_MODULE, out=tmp_path / "plain", **asked)
    rope.patch(model, "yarn", factor=2).save_pretrained(tmp_path / "saved")
    perplexity(model, ["a text of one's own. " * 9], out=tmp_path / "patched", **asked)
    saved = rope.from_pretrained(tmp_path / "saved")
    made = {each.parent.parent.name: read_run_files(each)[0] for each in tmp_path.glob("*/*/run.yaml")}
    assert made["plain"].model == "reference"
    assert (made["plain"].options["dtype"], made["plain"].options["data"]) == ("float32", ONE_MODULE)
    assert "with a patch" in made["patched"].model["in_memory"]
    assert made["patched"].options["data"] == {"in_memory": "documents"}
    assert run_file(Perplexity(lengths=64), saved).model == str(tmp_path / "saved")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: ppl\nmodel: [reference", "line 2: this YAML cannot be read"),
        ("run: ppl\n- a", "line 2: this YAML cannot be read"),
        ("- run: ppl", "line 1: a run file has a key and a value in each line"),
        ("run: ppl\n---\n", "line 1: there is no key 'model'"),
        ("ruin: ppl\nmodel: reference", "line 1: there is no key 'run'. Did you mean 'ruin'?"),
        ("run: ppl\nmodel: a\nmodel: b", "line 3: 'model' is given twice, first in line 2"),
        ("run: ppl\nmodel: a\nformat: 2", "line 3: format 2 is of a later version of this package"),
        ("run: ppl\nmodel: a\nversions: 3", "line 3: 'versions' must hold names and versions"),
        ("run: &a ppl\nmodel: *a", "line 2: this YAML cannot be read: an alias stands here; write the value out"),
        ("run: !!python/name:os.system ''\nmodel: a", "line 1: this YAML cannot be read: could not determine"),
        ("run: ppl\nmodel: a\nmethod: [{method: yarrn, factor: 2}]", "line 3: unknown method 'yarrn'"),
        ("run: ppl\nmodel: a\nmethod: [{method: string}]", "line 3: the method 'string' was removed; the last version"),
        ("run: ppl\nmodel: a\nmethod: [{method: profiles, factor: 4}]", "version of this package that has it is 0.1.0"),
        ("[" * 10_000, "line 1: this YAML cannot be read"),
        ("run: ppl\nmodel: \0", "line 1: this YAML cannot be read"),
    ],
)
def test_a_mistake_has_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(FileError) as refused:
        read_run_files(tmp_path)
    assert said in str(refused.value)
    assert str(tmp_path / RUN_FILE) in str(refused.value)


def test_a_file_of_the_first_format_is_read() -> None:
    """As version 0.1.0 wrote it."""
    first, second = read_run_files(RECORDED / "format-1.yaml")
    assert (first.command, first.model, first.options["revision"]) == ("sweep", "org/name", "a" * 40)
    assert first.options["method"] == [Yarn(factor=4.0), "ntk"]
    assert first.versions == {"rope-ext-hf": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}
    assert (second.command, second.options["minutes"]) == ("finetune", 10.0)


def test_every_kind_of_run_names_its_command() -> None:
    def below(kind: type[Options]) -> set[type[Options]]:
        return {each for one in kind.__subclasses__() for each in ({one} | below(one))}

    own = [each for each in below(Options) if "command" in vars(each)]
    # a Divergence has the command of Perplexity, which with --against compares distributions
    names = [each.command for each in own if getattr(each, "kind", "") != "divergence"]
    assert len(names) == len(set(names))
    assert {"ppl", "sweep", "passkey"} <= set(names)


def test_the_text_of_a_file_is_plain_yaml(tmp_path: Path) -> None:
    run_file(Perplexity(lengths=[64, 128]), "reference").write(tmp_path)
    values = yaml.safe_load((tmp_path / RUN_FILE).read_text())
    assert values["lengths"] == [64, 128]
    assert values["max_spans"] == "all"  # the default in Python, and not of the command
    assert values["format"] == 1
