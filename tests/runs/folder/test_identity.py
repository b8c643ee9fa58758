"""What makes another run of the same text: patches, what they are applied to, the tokenizer, the code."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.measurement_options import Passkey
from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.static import NTK, Linear, Yarn
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.reading.spans import prepare
from rope_ext_hf.reading.text.documents import Document, Tokens
from rope_ext_hf.runs import recorded_run
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.folder import identity
from rope_ext_hf.runs.folder.folder import identifying, read_run
from rope_ext_hf.runs.folder.identity import find_basis, model_key
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.measurement import Listener, RunPlan
from rope_ext_hf.runs.runner import carry_out
from tests.support.models import build

RECORDED = Path(__file__).parents[1] / "recorded" / "run-0.1.0"
"""What version 0.1.0 wrote before the key held the config: a tiny model as loaded and under yarn, two documents."""


def documents(count: int = 2) -> list[Tokens]:
    draws = torch.Generator().manual_seed(0)
    return [Tokens(f"d{i}", torch.randint(3, 90, (130,), generator=draws), tuple(range(1, 131))) for i in range(count)]


def key_as_it_is(model: Any) -> str:
    """The key under which `perplexity` and `passkey` measure a model, its patch left aside: a record says which."""
    patches = active_patches(model)
    methods = [patches[-1].method if patches else None]
    return json.dumps(model_key(model, methods, find_basis(ModelRope.of_model(model), methods), "own"), sort_keys=True)


def key_of_methods(model: Any, over: str = "own", context_length: int | None = None) -> str:
    """The key of `ppl MODEL --method yarn`."""
    methods = [None, Yarn(factor=2.0)]
    basis = find_basis(ModelRope.of_model(model).extending(over, context_length), methods)
    return json.dumps(model_key(model, methods, basis, over), sort_keys=True)


def test_every_argument_of_a_patch_counts() -> None:
    """Those that the method's own record does not have."""
    own = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    method = NTK(factor=2.0)
    keys = {}
    for name, below, arguments in (
        ("none", None, {}),
        ("over", None, {"over": "original"}),
        ("context_length", None, {"context_length": 96}),
        ("native", None, {"native": True}),
        ("below", Linear(factor=2.0), {"over": "patched"}),
        ("below that", Linear(factor=3.0), {"over": "patched"}),
    ):
        model = build("llama", own)
        if below is not None:
            rope.patch(model, below)
        keys[name] = key_as_it_is(rope.patch(model, method, **arguments))
    assert len(set(keys.values())) == len(keys), keys
    meant = [rope.patch(build("llama"), "theta", theta=40_000.0, target_length=each) for each in (None, 256, 300)]
    assert len({key_as_it_is(model) for model in meant}) == 3
    model = build("gemma3")
    layers = [key_as_it_is(rope.patch(model, Yarn(factor=2.0), layers=each)) for each in (None, "full_attention", 0)]
    assert len(set(layers)) == 3


def test_what_the_methods_of_a_run_are_applied_to_counts() -> None:
    model = build("llama")
    plain = key_of_methods(model)
    assert plain == key_of_methods(build("llama"))
    assert len({plain, key_of_methods(model, "original"), key_of_methods(model, "own", 96)}) == 3
    patched = key_of_methods(rope.patch(model, "linear", factor=2.0))  # None is the model with this patch
    over = key_of_methods(model, "patched")
    more = key_of_methods(rope.patch(model, "linear", factor=3.0))
    assert len({plain, patched, over, more, key_of_methods(model, "patched")}) == 5


def test_a_patch_made_before_or_by_the_run_is_the_same() -> None:
    methods = [None, Yarn(factor=2.0)]
    model = build("llama")
    swept = json.dumps(model_key(model, methods, find_basis(ModelRope.of_model(model), methods), "own"), sort_keys=True)
    assert key_as_it_is(model) == swept
    assert key_as_it_is(rope.patch(model, "yarn", factor=2.0)) == swept


@pytest.mark.slow
def test_a_patch_on_another_basis_is_not_taken_for_the_present_one(tmp_path: Path) -> None:
    """Under dynamic-ntk the context length decides when the base grows."""
    text = PerplexityMeasurement(prepare(build("llama"), documents(), lengths=[64, 128], bos=False))
    method = rope.patched(build("llama"), "dynamic-ntk", factor=2.0)
    with method as patched:
        dynamic = active_patches(patched)[-1].method
    model = rope.patch(build("llama"), dynamic, context_length=32)
    plan = RunPlan(text, "d", methods=(dynamic,))
    as_it_is = carry_out(model, plan, out=tmp_path)
    swept = carry_out(build("llama"), plan, out=tmp_path)
    stated = carry_out(build("llama"), replace(plan, context_length=32), out=tmp_path)
    losses = [[result.loss for result in run.results] for run in (as_it_is, swept, stated)]
    assert losses[0] == losses[2] != losses[1]
    assert as_it_is.folder != swept.folder
    with pytest.raises(rope.MethodError, match="give the model without its patch"):
        carry_out(model, replace(plan, methods=(None, dynamic)), out=tmp_path)


@pytest.mark.slow
def test_a_changed_config_is_measured_anew(tmp_path: Path) -> None:
    """The same command after an edit of config.json; and continued where nothing that counts has changed."""
    build("llama").save_pretrained(tmp_path / "m")
    options: dict[str, Any] = {"lengths": [64, 128], "bos": False, "out": tmp_path / "out"}

    def measured(folder: str = "m", **changed: Any) -> list[Any]:
        path = tmp_path / folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        for key, value in changed.items():
            (config["rope_parameters"] if key in config["rope_parameters"] else config)[key] = value
        path.write_text(json.dumps(config), encoding="utf-8")
        read: list[int] = []
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        results = perplexity(model, documents(), progress=read.append, **options)
        assert results == perplexity(model, documents(), lengths=[64, 128], bos=False)
        return [bool(read), *(result.loss for result in results)]

    first = measured()
    again = measured()
    assert (first[0], again[0]) == (True, False)
    assert first[1:] == again[1:]
    shutil.copytree(tmp_path / "m", tmp_path / "elsewhere" / "m")
    assert measured("elsewhere/m") == again
    theta = measured(rope_theta=40_000.0)
    norm = measured(rms_norm_eps=1e-2)
    assert (theta[0], norm[0]) == (True, True)
    assert len({first[1], theta[1], norm[1]}) == 3
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_the_text_and_the_prefix_count_not_only_the_ids_that_are_read() -> None:
    """Another tokenizer may give the same ids to more bytes, or begin with another token."""
    model, given = build("llama"), documents()

    def fingerprint(given: list[Tokens], prefix: tuple[int, ...] = ()) -> str:
        plan = prepare(model, given, lengths=[64, 128], bos=False)
        return PerplexityMeasurement(replace(plan, prefix=prefix)).fingerprint()

    wider = [replace(document, ends=tuple(2 * end for end in document.ends)) for document in given]
    assert len({fingerprint(given), fingerprint(wider), fingerprint(given, (1,)), fingerprint(given, (2,))}) == 4
    assert fingerprint(given) == fingerprint(documents())


@pytest.mark.filterwarnings("ignore:the tokenizer drops:UserWarning")  # of shifted ids
def test_the_tokenizer_of_a_prompt_counts() -> None:
    model = build("llama", vocab_size=400)
    options: dict[str, Any] = {"lengths": [128], "depths": [0, 1], "trials": 2, "distractors": 3, "task": "key-value"}

    def fingerprint(extra: int, **changed: Any) -> str:
        hay = [Document("hay", "some text " * 50)]
        tokenizer = ByT5Tokenizer(extra_ids=0, **changed)
        plan = Passkey(haystack=hay, **options).plan(model, tokenizer=tokenizer)
        return str(plan.measurement.fingerprint())

    class Shifted(ByT5Tokenizer):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            found = super().__call__(*args, **kwargs)
            found["input_ids"] = [token + 100 for token in found["input_ids"]]
            return found

    hay = [Document("hay", "some text " * 50)]
    shifted = Passkey(haystack=hay, **options).plan(model, tokenizer=Shifted(extra_ids=0)).measurement.fingerprint()
    assert fingerprint(0) == fingerprint(0) != shifted


def test_the_code_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This package's, a plug-in's and that of a model's own class; not what only shows results."""
    model = build("llama")
    plain = identity.code_digest(model)
    assert identity.code_digest(build("llama")) == plain

    path = tmp_path / "code_of_its_own.py"
    path.write_text("from torch import nn\nclass Norm(nn.Identity):\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model.model.norm = __import__("code_of_its_own").Norm()
    own = identity.code_digest(model)
    path.write_text(path.read_text(encoding="utf-8").replace("pass", "eps = 1"), encoding="utf-8")
    assert len({plain, own, identity.code_digest(model)}) == 3
    del sys.modules["code_of_its_own"]

    class Listed(Yarn):
        """A method that somebody registers."""

    model = build("llama")
    monkeypatch.setattr(identity, "list_methods", lambda: {**list_methods(), "listed": Listed})
    assert identity.code_digest(model) != plain
    monkeypatch.undo()

    copy = tmp_path / "rope_ext_hf"
    for folder in identity._COMPUTING:
        shutil.copytree(Path(rope.__file__).parent / folder, copy / folder, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(identity, "files", lambda _: copy)
    identity._own_source.cache_clear()
    assert identity.code_digest(model) == plain
    for name in ("methods/static.py", "models/families.toml", "reading/scorer.py", "rotary/phase.py"):
        identity._own_source.cache_clear()
        (copy / name).write_text((copy / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
        changed = identity.code_digest(model)
        assert changed != plain, name
        plain = changed
    identity._own_source.cache_clear()


def test_compiled_code_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plug-in may be an extension module, which has no source file."""
    plug_in, model, digests = ModuleType("compiled_plug_in"), build("llama"), []
    plug_in.__file__ = str(tmp_path / "compiled_plug_in.so")
    monkeypatch.setitem(sys.modules, plug_in.__name__, plug_in)
    for content in (b"one", b"two", b"one"):
        Path(plug_in.__file__).write_bytes(content)
        digests.append(identity.code_digest(model, plug_in.__name__))
    assert digests[0] == digests[2] != digests[1]


def test_a_model_without_a_file_of_its_class_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Typed", (nn.Identity,), {"__module__": "__main__"})
    model = build("llama")
    model.model.norm = kind()
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert identity.code_digest(model)


@pytest.mark.slow
def test_a_folder_of_before_is_read_and_another_one_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "model-perplexity-0123456789"
    shutil.copytree(RECORDED, folder)
    before = read_run(folder)
    assert [(label(r.method), r.length, round(r.loss, 6)) for r in before.results] == [
        *(("unpatched", 64, 5.230536), ("unpatched", 128, 5.265910)),
        *(("yarn x2", 64, 5.206969), ("yarn x2", 128, 5.298696)),
    ]
    write_files(before)
    assert "yarn x2" in (before.folder / "report.html").read_text(encoding="utf-8")
    text = PerplexityMeasurement(prepare(build("llama"), documents(), lengths=[64, 128], bos=False))
    started: list[int] = []

    class Watched(Listener):
        def started(self, folder: Path, done: int, units: int) -> None:
            started.append(done)

    plan = RunPlan(text, "documents", methods=(None,))
    new = carry_out(build("llama"), plan, out=tmp_path / "out", progress=Watched())
    assert new.folder != folder
    assert started == [0]
    assert [r.loss for r in new.results] == pytest.approx([r.loss for r in before.results[:2]], abs=1e-5)


@pytest.mark.slow
def test_a_folder_of_before_that_holds_retrieval_is_read_finished_or_not(tmp_path: Path) -> None:
    shutil.copytree(RECORDED.with_name("passkey-0.1.0"), tmp_path / "run")
    finished = [
        *(("unpatched", 256, 0.0, 1.0, 1.0), ("unpatched", 256, 1.0, 1.0, 1.0)),
        *(("unpatched", 512, 0.0, 0.0, 9.0), ("unpatched", 512, 1.0, 0.0, 6.0)),
        *(("yarn x4", 256, 0.0, 1.0, 1.0), ("yarn x4", 256, 1.0, 1.0, 1.0)),
        *(("yarn x4", 512, 0.0, 1.0, 1.0), ("yarn x4", 512, 1.0, 1.0, 1.0)),
    ]
    journal = tmp_path / "run" / "records.0.jsonl"
    for cut, left in ((0, 8), (10, 7), (400, 6)):  # bytes that a stopped process did not write, results it leaves
        journal.write_bytes(RECORDED.with_name("passkey-0.1.0").joinpath(journal.name).read_bytes()[: -cut or None])
        run = read_run(tmp_path / "run")
        assert [(label(r.method), r.length, r.depth, r.exact_match, r.rank) for r in run.results] == finished[:left]
        assert all(score.loss is None for result in run.results for score in result.scores)
        assert {(r.loss, r.loss_low, r.loss_high) for r in run.results} == {(None, None, None)}
        write_files(run)
        page = (run.folder / "report.html").read_text(encoding="utf-8")
        assert "yarn x4" in page
        assert "loss" not in page
        assert "loss" not in f"{run}{run.conclusion}"


def test_another_path_is_the_same_run_and_a_foreign_run_file_is_refused(tmp_path: Path) -> None:
    settings = json.loads((RECORDED / "run.json").read_text(encoding="utf-8"))
    recorded_run._write_settings(tmp_path, settings)
    recorded_run._write_settings(tmp_path, settings | {"model": "elsewhere"})
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == settings
    assert identifying(settings) == identifying(settings | {"model": "elsewhere"})
    with pytest.raises(rope.FileError, match="describes another run"):
        recorded_run._write_settings(tmp_path, settings | {"weights": "others"})


def test_how_a_tokenizer_was_loaded_does_not_count() -> None:
    """A training that was begun with a network is continued without one."""
    model, tokenizer = build("llama", vocab_size=400), ByT5Tokenizer(extra_ids=0)
    before = identity.digest_inputs(model, tokenizer)
    tokenizer.init_kwargs |= {"local_files_only": True, "is_local": True}
    assert identity.digest_inputs(model, tokenizer) == before
    assert identity.digest_inputs(model, ByT5Tokenizer(extra_ids=3))["the tokenizer"] != before["the tokenizer"]
