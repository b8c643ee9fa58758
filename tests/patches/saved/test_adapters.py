"""PEFT adapters of patched models: the record of the patch in their folders, and loading them again."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.hub import load_empty, load_model, load_tokenizer
from rope_ext_hf.patches.saved.adapters import ADAPTER_KEY, find_adapter, tokenizer_source
from rope_ext_hf.reference import path as reference
from tests.support.model_checks import CHANGED, LONG, TOLERANCE, difference
from tests.support.models import TRAINED, build, logits, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic-yarn": {},
    "dca": {"target_length": LONG},
}
"""A static, a length-dependent and a remapping method."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def lora(**settings: Any) -> Any:
    import peft

    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        | settings
    )


def adapted(model: Any, **settings: Any) -> Any:
    """Return the model with a random adapter, which changes its logits."""
    import peft

    torch.manual_seed(3)
    return peft.get_peft_model(model, lora(**settings)).eval()


def settings_of(folder: Path) -> dict[str, Any]:
    """Return an adapter's settings, with names of modules in order: PEFT keeps them in a set."""
    values: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    names = values.get("target_modules")
    return values | {"target_modules": sorted(names)} if isinstance(names, list) else values


def change(folder: Path, **values: Any) -> None:
    """Write other values into an adapter's settings."""
    (folder / "adapter_config.json").write_text(json.dumps(settings_of(folder) | values))


# --- saved and loaded again -----------------------------------------------------------------------------------------


def test_an_adapter_of_a_model_that_is_patched_in_named_layers(tmp_path: Path) -> None:
    build("gemma3").save_pretrained(tmp_path / "base")
    model = rope.from_pretrained(tmp_path / "base", "yarn", factor=4, layers="sliding_attention")
    tuned = adapted(model)
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, tokens(LONG)), logits(tuned, tokens(LONG)))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["patched first", "adapter first"])
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_keeps_the_patch(method: str, order: str, base: Path, tmp_path: Path) -> None:
    import peft

    model = plain(base)
    if order == "patched first":
        rope.patch(model, method, **METHODS[method])
    model = adapted(model)
    if order == "adapter first":
        rope.patch(model, method, **METHODS[method])
    model.save_pretrained(tmp_path / "adapter")
    assert settings_of(tmp_path / "adapter")[ADAPTER_KEY]["method"]["method"] == method
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert isinstance(loaded, peft.PeftModel)
    assert loaded.name_or_path == str(tmp_path / "adapter")
    assert not any(p.requires_grad for p in loaded.parameters())
    for length in (TRAINED // 2, LONG):
        expected = logits(model, tokens(length))
        assert torch.equal(logits(loaded, tokens(length)), expected)
    assert difference(expected, logits(adapted(plain(base)), tokens(LONG))) >= CHANGED  # the patch matters,
    with loaded.disable_adapter():  # and so does the adapter
        assert difference(expected, logits(loaded, tokens(LONG))) >= CHANGED
    assert str(rope.describe(loaded)) == str(rope.describe(model))
    assert "load with rope_ext_hf.from_pretrained" in rope.describe(loaded).save_route


def test_plain_reloading_names_this_package(base: Path, tmp_path: Path) -> None:
    import peft

    adapted(rope.patch(plain(base), "yarn", factor=4)).save_pretrained(tmp_path / "adapter")
    for load in (
        peft.AutoPeftModelForCausalLM.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
        lambda folder: peft.PeftModel.from_pretrained(plain(base), folder),
    ):
        with pytest.warns(UserWarning, match=r"rope_ext_hf: load with rope_ext_hf\.from_pretrained"):
            load(str(tmp_path / "adapter"))


def test_an_adapter_of_an_unpatched_model_loads_as_it_is(base: Path, tmp_path: Path) -> None:
    model = adapted(plain(base))
    model.save_pretrained(tmp_path / "adapter")
    assert ADAPTER_KEY not in settings_of(tmp_path / "adapter")
    loaded = rope.from_pretrained(str(tmp_path / "adapter"), dtype="auto")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    assert not rope.describe(loaded).patched


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_patch_of_a_saved_base_model_is_applied_once(method: str, base: Path, tmp_path: Path) -> None:
    rope.patch(plain(base), method, **METHODS[method]).save_pretrained(tmp_path / "patched")
    model = adapted(rope.from_pretrained(tmp_path / "patched"))
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    assert rope.describe(loaded).underneath == ()
    stock = logits(adapted(plain(base)), tokens(LONG))
    assert torch.equal(logits(rope.unpatch(loaded), tokens(LONG)), stock)


def test_a_base_model_loaded_plainly_from_a_patched_folder(base: Path, tmp_path: Path) -> None:
    """No patch of ours is live, so the adapter gets no record: the folder of the base model holds the patch."""
    import peft

    rope.patch(plain(base), "yarn", factor=4).save_pretrained(tmp_path / "patched")
    model = adapted(plain(tmp_path / "patched"))
    model.save_pretrained(tmp_path / "adapter")
    assert ADAPTER_KEY not in settings_of(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert difference(logits(loaded, tokens(LONG)), logits(model, tokens(LONG))) <= TOLERANCE
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(again, tokens(LONG)), logits(model, tokens(LONG)))


def test_a_stack_of_patches(base: Path, tmp_path: Path) -> None:
    rope.patch(plain(base), "linear", factor=2).save_pretrained(tmp_path / "patched")
    model = adapted(rope.patch(plain(tmp_path / "patched"), "yarn", factor=4, over="patched"))
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    assert [scaling.method for scaling in rope.describe(loaded).underneath] == ["linear"]
    assert rope.describe(rope.unpatch(loaded)).method == "linear"


def test_what_is_saved_follows_the_patch_of_the_moment(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base), "yarn", factor=4))

    def saved(name: str) -> str | None:
        model.save_pretrained(tmp_path / name)
        record = settings_of(tmp_path / name).get(ADAPTER_KEY)
        return None if record is None else record["method"]["method"]

    assert saved("first") == "yarn"
    with rope.patched(model, "linear", factor=2):
        assert saved("second") == "linear"
    assert saved("third") == "yarn"
    rope.unpatch(model)
    assert saved("fourth") is None
    assert "to_dict" not in vars(model.peft_config["default"])


def test_merging_keeps_the_record(base: Path, tmp_path: Path) -> None:
    import peft

    model = adapted(rope.patch(plain(base), "dca", target_length=LONG))
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model, tokens(LONG))
    rope.from_pretrained(tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    loaded = rope.from_pretrained(tmp_path / "merged")
    assert not isinstance(loaded, peft.PeftModel)
    assert rope.describe(loaded).method == "dca"
    assert difference(logits(loaded, tokens(LONG)), expected) <= 10 * TOLERANCE


def test_several_adapters(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base), "yarn", factor=4))
    model.add_adapter("second", lora(r=2))
    model.save_pretrained(tmp_path / "adapters")
    loaded = rope.from_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    model.set_adapter("second")
    expected = logits(model, tokens(LONG))
    for where in ({"path": tmp_path / "adapters" / "second"}, {"path": tmp_path / "adapters", "subfolder": "second"}):
        second = rope.from_pretrained(**where, adapter_name="mine")
        assert list(second.peft_config) == ["mine"]
        assert torch.equal(logits(second, tokens(LONG)), expected)
    with pytest.warns(UserWarning, match="rope_ext_hf"):  # PEFT reads the settings by itself here
        loaded.load_adapter(tmp_path / "adapters" / "second", "second")
    loaded.set_adapter("second")
    assert torch.equal(logits(loaded, tokens(LONG)), expected)


MIXED: dict[str, dict[str, Any]] = METHODS | {
    "dynamic-ntk": {},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)], "factor": 4},
    "dynamic-self-extend": {},
}


@pytest.mark.parametrize("method", MIXED)
def test_each_row_of_a_batch_has_an_adapter_of_its_own(method: str) -> None:
    """PEFT then counts the rows of every forward; after it each adapter generates by itself as before."""
    model = adapted(rope.patch(build("llama"), method, **MIXED[method]))
    model.add_adapter("other", lora())
    ids, every = tokens(TRAINED - 2, batch=3), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    names = ["default", "other", "__base__"]
    mixed = model.eval().generate(input_ids=ids, attention_mask=mask, adapter_names=names, **every)
    for row, name in enumerate(names[:2]):
        model.set_adapter(name)
        alone = model.generate(input_ids=ids[row : row + 1], attention_mask=mask[:1], **every)
        assert torch.equal(alone[0], mixed[row])
    with model.disable_adapter():
        alone = model.generate(input_ids=ids[2:], attention_mask=mask[:1], **every)
    assert torch.equal(alone[0], mixed[2])


def test_training_goes_on_after_loading(base: Path, tmp_path: Path) -> None:
    adapted(rope.patch(plain(base), "yarn", factor=4)).save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter", is_trainable=True)
    loaded(input_ids=tokens(LONG), labels=tokens(LONG)).loss.backward()
    assert {name for name, p in loaded.named_parameters() if p.grad is not None} == {
        name for name, p in loaded.named_parameters() if "lora" in name
    }
    loaded.save_pretrained(tmp_path / "again")
    assert settings_of(tmp_path / "again")[ADAPTER_KEY] == settings_of(tmp_path / "adapter")[ADAPTER_KEY]


@pytest.mark.slow
def test_checkpoints_of_the_trainer(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base), "dynamic-yarn"))
    row = tokens(LONG)[0]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True, save_steps=1
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}]).train()
    loaded = rope.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert rope.describe(loaded).method == "dynamic-yarn"
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model.eval(), tokens(LONG)))


@pytest.mark.parametrize("method", ["yarn", "dca"])
def test_adapters_that_transformers_adds_and_saves(method: str, base: Path, tmp_path: Path) -> None:
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:  # this transformers asks for a newer PEFT than is installed
        pytest.skip(str(error))
    model = rope.patch(plain(base), method, target_length=LONG)
    torch.manual_seed(3)
    model.add_adapter(lora())
    model.eval().save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    assert rope.describe(loaded).method == method


def test_a_classifier(base: Path, tmp_path: Path) -> None:
    head = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = adapted(rope.patch(head, "dca", target_length=LONG), task_type="SEQ_CLS")
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter", num_labels=3)
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))


def test_an_adapter_without_a_task_names_its_class(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base).model, "yarn", factor=4), task_type=None)
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert type(loaded.get_base_model()).__name__ == "LlamaModel"
    with torch.no_grad():
        outs = [peft_model(input_ids=tokens(LONG)).last_hidden_state for peft_model in (loaded, model)]
    assert torch.equal(*outs)


def test_tokens_that_were_added(base: Path, tmp_path: Path) -> None:
    model = plain(base)
    model.resize_token_embeddings(100)
    model = adapted(rope.patch(model, "yarn", factor=4))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, tokens(LONG) + 3), logits(model, tokens(LONG) + 3))


def test_prompts_are_recorded_where_the_patch_comes_last(base: Path, tmp_path: Path) -> None:
    import peft

    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = rope.patch(peft.get_peft_model(plain(base), settings).eval(), "yarn", factor=4)
    model.save_pretrained(tmp_path / "adapter")
    loaded = rope.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))
    assert rope.describe(loaded).method == "yarn"


def test_copies_keep_recording(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base), "yarn", factor=4))
    model.save_pretrained(tmp_path / "first")
    for name, twin in {"copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}.items():
        twin.save_pretrained(tmp_path / name)
        assert settings_of(tmp_path / name) == settings_of(tmp_path / "first")
        rope.unpatch(twin)
    model.save_pretrained(tmp_path / "again")
    assert settings_of(tmp_path / "again") == settings_of(tmp_path / "first")


# --- folders, the Hub's cache and commands --------------------------------------------------------------------------


def test_from_the_cache_of_the_hub(base: Path, tmp_path: Path) -> None:
    model = adapted(rope.patch(plain(base), "yarn", factor=4))
    repository = tmp_path / "cache" / "models--me--adapter"
    model.save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    loaded = rope.from_pretrained("me/adapter", cache_dir=tmp_path / "cache", local_files_only=True)
    assert loaded.name_or_path == "me/adapter"
    assert torch.equal(logits(loaded, tokens(LONG)), logits(model, tokens(LONG)))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an adapter of the patched bundled model; it has no tokenizer."""
    folder = tmp_path_factory.mktemp("bundled") / "adapter"
    model = AutoModelForCausalLM.from_pretrained(reference(), dtype=torch.float32)
    adapted(rope.patch(model, "dca", target_length=512)).save_pretrained(folder)
    return folder


def test_a_folder_by_name(bundled: Path, tmp_path: Path) -> None:
    assert rope.describe(load_empty(bundled)).method == "dca"
    assert rope.describe(load_model(bundled)).method == "dca"
    assert tokenizer_source(bundled) == (str(reference()), {})
    text = load_tokenizer(bundled)("a")["input_ids"]
    own = Path(shutil.copytree(bundled, tmp_path / "own"))
    for file in reference().glob("*token*"):
        shutil.copyfile(file, own / file.name)
    assert tokenizer_source(own) == (str(own), {})
    assert load_tokenizer(own)("a")["input_ids"] == text


def test_patching_a_folder(bundled: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    arguments = ["patch", str(bundled), "--method", "yarn", "--factor", "4", "--out", str(new)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "saved as          a record in adapter_config.json" in result.stdout
    files = {file.name for file in new.iterdir()} - {"README.md"}  # a card may be added
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    rest = {key: value for key, value in settings_of(bundled).items() if key != ADAPTER_KEY}
    assert {key: value for key, value in settings_of(new).items() if key != ADAPTER_KEY} == rest
    loaded = rope.from_pretrained(new, dtype=torch.float32)
    expected = logits(rope.patch(rope.from_pretrained(bundled, dtype=torch.float32), "yarn", factor=4), tokens(LONG))
    assert torch.equal(logits(loaded, tokens(LONG)), expected)


@pytest.mark.slow
def test_measuring_prints_no_advice_for_programmers(bundled: Path, tmp_path: Path) -> None:
    arguments = ["ppl", str(bundled), "--lengths", "64", "--max-spans", "1", "--out", str(tmp_path), "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["reads", "spans", "run", "read"]
    run = next(tmp_path.glob("adapter-perplexity-*/run.json"))
    assert json.loads(run.read_text())["model"] == str(bundled)


def test_detecting_says_that_adapters_have_no_weights_to_look_at(bundled: Path) -> None:
    result = CliRunner().invoke(app, ["detect", str(bundled)])
    assert result.exit_code == 0, result.stderr
    assert "undecided" in result.stdout
    assert "no readable query and key weights: they are packed, or of an adapter" in result.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*holds weights in the interleaved pairing:UserWarning")
def test_a_converted_adapter_keeps_its_record(bundled: Path, tmp_path: Path) -> None:
    rope.convert_checkpoint(bundled, tmp_path / "there", to="interleaved")
    assert settings_of(tmp_path / "there")[ADAPTER_KEY] == settings_of(bundled)[ADAPTER_KEY]
    with pytest.raises(CheckpointError, match=r"in the interleaved pairing, its .* in the half pairing; convert one"):
        rope.from_pretrained(tmp_path / "there")
    rope.convert_checkpoint(tmp_path / "there", tmp_path / "back", to="half")
    loaded, first = (rope.from_pretrained(folder, dtype=torch.float32) for folder in (tmp_path / "back", bundled))
    assert torch.equal(logits(loaded, tokens(LONG)), logits(first, tokens(LONG)))


def test_an_adapter_on_a_model_that_rotates_otherwise_is_refused(base: Path, tmp_path: Path) -> None:
    adapted(rope.patch(plain(base), "yarn", factor=4)).save_pretrained(tmp_path / "adapter")
    record = settings_of(tmp_path / "adapter")[ADAPTER_KEY]
    record["rotary"]["theta"] = 5e5
    change(tmp_path / "adapter", **{ADAPTER_KEY: record})
    with pytest.raises(rope.FingerprintError, match="theta is 500,000 instead of 10,000"):
        rope.from_pretrained(tmp_path / "adapter")


# --- folders of others ----------------------------------------------------------------------------------------------


def without_a_base(folder: Path) -> None:
    change(folder, base_model_name_or_path=None)


def of_a_missing_folder(folder: Path) -> None:
    change(folder, base_model_name_or_path="/no/such/folder")


def of_itself(folder: Path) -> None:
    change(folder, base_model_name_or_path=str(folder))


def of_another_model(folder: Path) -> None:
    build("qwen3", head_dim=32).save_pretrained(folder / "other")
    change(folder, base_model_name_or_path=str(folder / "other"))


def of_a_type_that_is_none(folder: Path) -> None:
    change(folder, peft_type="LORAX")


def with_a_module_to_import(folder: Path) -> None:
    change(folder, megatron_config={"a": 1}, megatron_core="antigravity")


def with_an_unknown_method(folder: Path) -> None:
    record = settings_of(folder)[ADAPTER_KEY]
    change(folder, **{ADAPTER_KEY: record | {"method": {"method": "mine"}}})


def with_a_damaged_record(folder: Path) -> None:
    change(folder, **{ADAPTER_KEY: {"method": "yarn"}})


def with_a_record_that_is_a_list(folder: Path) -> None:
    change(folder, **{ADAPTER_KEY: [1]})


def with_stacked_records_that_are_none(folder: Path) -> None:
    record = settings_of(folder)[ADAPTER_KEY]
    change(folder, **{ADAPTER_KEY: record | {"below": [3]}})


def that_is_no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_base, "an adapter without the name of its model"),
        (of_a_missing_folder, r"the model that the adapter '.*' was trained on could not be found: no such model"),
        (of_itself, "could not be found: .* is an adapter itself; merge it"),
        (of_another_model, "for 16 rotated dims per head, and this model has 32"),
        (of_a_type_that_is_none, "an adapter of type 'LORAX', which the installed PEFT does not know"),
        (with_a_module_to_import, r"names a module to import \(megatron_core\)"),
        (with_an_unknown_method, "records a patch whose method cannot be used here"),
        (with_a_damaged_record, "the 'rope_ext_hf' record of the adapter .* is damaged"),
        (with_a_record_that_is_a_list, "the 'rope_ext_hf' record of the adapter .* is damaged"),
        (with_stacked_records_that_are_none, "the 'rope_ext_hf' record of the adapter .* is damaged"),
        (that_is_no_json, "adapter_config.json' cannot be read"),
    ],
)
def test_refused(damage: Callable[[Path], None], message: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    adapted(rope.patch(plain(base), "yarn", factor=4)).save_pretrained(folder)
    damage(folder)
    with pytest.raises(rope.RopeExtError, match=message):
        rope.from_pretrained(folder)
    result = CliRunner().invoke(app, ["ppl", str(folder), "--lengths", "64"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr


def test_no_code_of_an_adapter_runs(base: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    folder = tmp_path / "adapter"
    adapted(plain(base)).save_pretrained(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Payload()}, folder / "adapter_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        rope.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()


def test_peft_is_asked_for(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(plain(base)).save_pretrained(tmp_path / "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CheckpointError, match="PEFT is not installed: pip install peft"):
        rope.from_pretrained(tmp_path / "adapter")


def test_a_model_with_an_adapter_beside_it_is_the_business_of_transformers(base: Path, tmp_path: Path) -> None:
    import peft

    adapted(plain(base)).save_pretrained(base)
    assert find_adapter(base) is None
    assert not isinstance(rope.from_pretrained(base), peft.PeftModel)
