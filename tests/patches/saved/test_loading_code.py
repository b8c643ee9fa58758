"""Folders that plain transformers loads by code of their own, for methods that no config can state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError
from tests.support.byte_tokenizers import VOCABULARY, byte_tokenizer
from tests.support.every_model import tiny
from tests.support.models import TRAINED, build, logits, tokens


@pytest.fixture(autouse=True)
def own_cache_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code of a folder into a cache, and imports it from there."""
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        if hasattr(sys.modules[module], "HF_MODULES_CACHE"):
            monkeypatch.setattr(sys.modules[module], "HF_MODULES_CACHE", str(tmp_path / "code"))


def published(tmp_path: Path, name: str, method: str, **options: Any) -> Path:
    build(name).save_pretrained(tmp_path / "plain")
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    out = tmp_path / "published"
    arguments = ["patch", str(tmp_path / "plain"), "--method", method, *words, "--out", str(out), "--as-code"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    ("name", "method", "parameters"),
    [("llama", "jet-long", {}), ("qwen3", "self-extend", {"group": 4, "window": 20}), ("gemma3", "dca", {})],
)
def test_plain_transformers_loads_it(tmp_path: Path, name: str, method: str, parameters: dict[str, Any]) -> None:
    out, ids = published(tmp_path, name, method, **parameters), tokens(3 * TRAINED)
    expected = logits(rope.patch(build(name), method, **parameters), ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert type(model) is type(build(name))
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(rope.from_pretrained(out, dtype=torch.float32), ids), expected)
    bare = transformers.AutoModel.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert torch.equal(bare(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    with pytest.raises(KeyError, match=f"rope_ext_hf/{method}"):
        transformers.AutoModelForCausalLM.from_pretrained(out)


def test_settings_given_to_the_auto_class_are_kept(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "rerope")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, use_cache=False, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert model.config.use_cache is False
    assert model.dtype == torch.bfloat16
    assert rope.unpatch(model).config._attn_implementation == "eager"


CODE = {"trust_remote_code": True}
of_peft = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:Unexpected keyword arguments .*rope_ext_hf:UserWarning"
)


def test_every_auto_class_that_knows_the_model_loads_it(tmp_path: Path) -> None:
    out, ids = published(tmp_path, "mistral", "dca"), tokens(3 * TRAINED)
    plain = tmp_path / "plain"
    names = [name for name in dir(transformers) if name.startswith("AutoModel")]
    known = [name for name in names if transformers.MistralConfig in getattr(transformers, name)._model_mapping]
    for name in known:
        torch.manual_seed(0)
        stock = getattr(transformers, name).from_pretrained(plain)
        torch.manual_seed(0)  # for a head that the folder has no weights of
        model = getattr(transformers, name).from_pretrained(out, **CODE)
        assert type(model) is type(stock)
        expected = rope.patch(stock, "dca").eval()(ids)[0]
        assert torch.equal(model.eval()(ids)[0], expected), name
    assert {"AutoModelForSequenceClassification", "AutoModelForTokenClassification"} < {*known}


def test_settings_of_a_head_are_taken_from_the_call(tmp_path: Path) -> None:
    out = tmp_path / "published"
    rope.patch(build("llama", vocab_size=VOCABULARY), "rerope").save_pretrained(out)
    rope.write_loading_code(out)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out, num_labels=5, pad_token_id=0, **CODE)
    assert model(tokens(20, batch=2)).logits.shape == (2, 5)
    model.save_pretrained(tmp_path / "again")
    again, tokenizer = str(tmp_path / "again"), byte_tokenizer("$A")
    classify = transformers.pipeline("text-classification", again, tokenizer=tokenizer, **CODE)
    assert type(classify.model) is type(model)
    assert len(classify("to be or not to be", top_k=None)) == 5


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("method", ["dca", "dynamic-ntk", "jet-long", "temperature"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_a_model_that_is_built_empty_runs_the_method_once_it_has_weights(
    tmp_path: Path, name: str, method: str, buffers: bool
) -> None:
    model, ids = build(name), tokens(3 * TRAINED)
    rope.patch(model, method).save_pretrained(tmp_path / "published")
    rope.write_loading_code(tmp_path / "published")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "published", **CODE)
    with torch.device("meta") if buffers else init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(config, **CODE)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert rope.describe(empty).method == method
    if buffers:
        own = dict(model.named_buffers())
        empty = empty.to_empty(device="cpu")
        for path, buffer in empty.named_buffers():
            if path.endswith("embed_scale"):  # of Gemma's embeddings; no state_dict has it
                buffer.copy_(own[path])
        empty.load_state_dict(model.state_dict())
    else:
        empty.tie_weights()
        empty = load_checkpoint_and_dispatch(empty, tmp_path / "published", device_map="auto")
    assert torch.equal(logits(empty.eval(), ids), logits(model, ids))
    assert torch.equal(logits(rope.unpatch(empty), ids), logits(build(name), ids))


def test_a_model_with_random_weights_is_patched_too(tmp_path: Path) -> None:
    out, ids = published(tmp_path, "llama", "self-extend", group=4, window=20), tokens(3 * TRAINED)
    config = transformers.AutoConfig.from_pretrained(out, **CODE)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **CODE)
    stock = build("llama")
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model.eval(), ids), logits(rope.patch(stock, "self-extend", group=4, window=20), ids))
    assert config.rope_parameters["rope_type"].startswith("rope_ext_hf/self-extend")  # the config stays as it was
    assert rope.unpatch(model).config._attn_implementation == "eager"


def test_images_and_text(tmp_path: Path) -> None:
    model, ids = tiny("gemma3"), tokens(3 * TRAINED)
    rope.patch(model, "rerope").save_pretrained(tmp_path / "published")
    rope.write_loading_code(tmp_path / "published")
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "published", **CODE)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "published", **CODE)
    with init_empty_weights():
        empty = transformers.AutoModelForImageTextToText.from_config(config, **CODE)
    empty.tie_weights()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(empty.eval(), ids), logits(model, ids))


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_the_code_travels_with_a_model_that_is_saved_again(
    tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    out, ids = published(tmp_path, name, "jet-long"), tokens(3 * TRAINED)
    recwarn.clear()
    expected = logits(rope.patch(build(name), "jet-long"), ids)
    for number in range(3):
        model = transformers.AutoModelForCausalLM.from_pretrained(out, **CODE)
        with rope.patched(model, "dca"):
            assert not torch.equal(logits(model, ids), expected)
        assert torch.equal(logits(model, ids), expected)
        assert not hasattr(model.config, "auto_map")
        out = tmp_path / f"again-{number}"
        model.save_pretrained(out)
    assert not recwarn.list
    assert torch.equal(logits(rope.from_pretrained(out), ids), expected)


@of_peft
@pytest.mark.parametrize("change", ["unpatched", "yarn", "merged"])
def test_the_code_stays_behind_where_no_folder_needs_it(tmp_path: Path, change: str) -> None:
    out, ids = published(tmp_path, "llama", "jet-long"), tokens(3 * TRAINED)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, **CODE)
    if change == "unpatched":
        rope.unpatch(model)
    elif change == "yarn":
        rope.patch(model, "yarn", factor=4)
    else:
        tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        model = tuned.merge_and_unload()
    model.save_pretrained(tmp_path / "again")
    needs_code = change == "merged"
    assert (tmp_path / "again" / "modeling_rope_ext_hf.py").is_file() is needs_code
    options = CODE if needs_code else {}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", **options)
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=0, atol=1e-3)


@of_peft
def test_an_adapter_on_such_a_folder(tmp_path: Path) -> None:
    out, ids = published(tmp_path, "llama", "dca"), tokens(3 * TRAINED)
    base = transformers.AutoModelForCausalLM.from_pretrained(out, **CODE)
    tuned = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    expected = logits(tuned, ids)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, **CODE)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval(), ids), expected)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", **CODE)
    assert torch.equal(logits(whole.eval(), ids), expected)
    rope.patch(base, "rerope")
    tuned.save_pretrained(tmp_path / "adapter")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", **CODE)
    assert torch.equal(logits(whole.eval(), ids), logits(tuned, ids))


def test_a_length_that_the_patch_states_cannot_be_given(tmp_path: Path) -> None:
    for name in ("llama", "phi3"):
        out = published(tmp_path / name, name, "dca")
        with pytest.raises(CheckpointError, match="max_position_embeddings of a patched folder is set by its patch"):
            transformers.AutoModelForCausalLM.from_pretrained(out, max_position_embeddings=4096, **CODE)


def test_a_release_whose_auto_class_does_not_know_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = published(tmp_path, "llama", "dca")
    config, code = json.loads((out / "config.json").read_text()), (out / "modeling_rope_ext_hf.py")
    config["auto_map"]["AutoModelForMaskedLM"] = "modeling_rope_ext_hf.PatchedAutoModelForMaskedLM"
    (out / "config.json").write_text(json.dumps(config))
    line = code.read_text().splitlines()[-1]
    code.write_text(code.read_text() + line.replace("AutoModelForTokenClassification", "AutoModelForMaskedLM"))
    mapping = transformers.AutoModelForMaskedLM._model_mapping
    monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    with pytest.raises(CheckpointError, match="AutoModelForMaskedLM of transformers"):
        transformers.AutoModelForMaskedLM.from_pretrained(out, **CODE)


def test_no_code_runs_unless_it_is_trusted(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "dca")
    (out / "modeling_rope_ext_hf.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(KeyError, match="rope_ext_hf/dca"):
        transformers.AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(KeyError, match="rope_ext_hf/dca"):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(out))
    rope.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert "rope_ext_hf.loading_class" in (tmp_path / "again" / "modeling_rope_ext_hf.py").read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_without_this_package_the_way_out_is_named(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "jet-long")
    program = (
        "import sys; sys.modules['rope_ext_hf'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "jet-long, which needs the package rope_ext_hf; install it first" in done.stderr


def test_what_needs_no_code_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no patch"):
        rope.write_loading_code(tmp_path / "plain")
    arguments = ["patch", str(tmp_path / "plain"), "--method", "yarn", "--factor", "4", "--as-code"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "it needs no code" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_model_type_that_transformers_does_not_have_is_named(tmp_path: Path) -> None:
    rope.patch(build("llama"), "dca").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    with pytest.raises(CheckpointError, match="transformers has no model type 'mine'"):
        rope.write_loading_code(tmp_path)
