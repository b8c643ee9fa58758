"""Traps of transformers: each is shown in plain transformers first, so that a test fails once it is mended there."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from tests.support.every_model import tiny
from tests.support.model_checks import CHANGED, TOLERANCE, difference
from tests.support.models import TRAINED, build, build_config, from_config, logits, tokens
from tests.support.wrapped_text import unwrapped

PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LISTS = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": TRAINED} | LISTS
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}


def line(model: Any, words: str) -> str:
    """The one note of `describe` with these words; printing shows it too."""
    seen = rope.describe(model)
    (note,) = [note for note in seen.notes if words in note]
    assert note in unwrapped(seen)
    return note


def has_line(model: Any, words: str) -> bool:
    return any(words in note for note in rope.describe(model).notes)


def continued(model: Any, ids: Tensor, count: int, **kwargs: Any) -> Any:
    """Greedy tokens after a prompt, with the logits of each."""
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": count}
    returned = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **greedy, **returned, **kwargs)


# --- settings that nothing reads --------------------------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A folder of transformers 5 with theta 500,000, to whose config somebody has added `rope_scaling`."""
    build("llama", PLAIN).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}))
    return tmp_path


def test_rope_scaling_beside_rope_parameters_loses_theta(edited: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(edited)
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    note = line(model, "rope_parameters is not read here")
    assert "rope_theta 500000.0 (10000.0)" in note
    with pytest.warns(UserWarning, match="rope_parameters is not read here"):
        rope.patch(model, "linear", factor=2)
    assert line(model, "rope_parameters is not read here") == note


def test_the_command_says_it_once(edited: Path) -> None:
    from rope_ext_hf.cli.folders import described
    from rope_ext_hf.cli.options import SourceOptions

    source = SourceOptions()
    notes = described(source.empty_model(str(edited)), str(edited), source).notes
    assert len([note for note in notes if "rope_parameters is not read here" in note]) == 1


def test_rope_scaling_with_its_theta_loses_nothing(edited: Path) -> None:
    config = json.loads((edited / "config.json").read_text())
    config["rope_parameters"] = config["rope_scaling"] | {"rope_theta": 500_000.0}
    (edited / "config.json").write_text(json.dumps(config | {"rope_theta": 500_000.0}))
    model = AutoModelForCausalLM.from_pretrained(edited)
    assert model.config.rope_parameters["rope_theta"] == 500_000.0
    assert not has_line(model, "is not read")


def test_of_a_config_given_while_loading_the_folder_says_nothing(edited: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(edited, config=build_config("llama", PLAIN))
    assert model.config.rope_parameters["rope_theta"] == 500_000.0
    assert not has_line(model, "is not read")


def test_audit_names_the_theta_that_is_lost(edited: Path) -> None:
    serving = pytest.importorskip("rope_ext_hf.tools.serving")
    assert any("rope_theta 500000.0 (10000.0)" in problem for problem in serving.audit(edited).problems)


def test_rope_theta_of_a_config_has_no_effect() -> None:
    config = build_config("llama")
    config.rope_theta = 500_000.0
    model, before = from_config(config), logits(build("llama"), tokens(TRAINED))
    assert torch.equal(logits(model, tokens(TRAINED)), before)
    assert "rope.patch(model, 'theta', theta=500000)" in line(model, "config.rope_theta = 500000 has no effect")
    with pytest.warns(UserWarning, match="config.rope_theta = 500000 has no effect"):
        rope.patch(model, "yarn", factor=2)
    del config.rope_theta
    rope.patch(rope.unpatch(model), "yarn", factor=2)  # warnings are errors here
    assert not has_line(model, "has no effect")


def test_truncate_inside_nested_settings_has_no_effect() -> None:
    def nested(inside: bool, beside: bool) -> Any:
        config = build_config("gemma3")
        sliding = {"rope_type": "default", "rope_theta": 1_000.0}
        full = YARN | {"truncate": inside}
        config.rope_parameters = {"full_attention": full, "sliding_attention": sliding, "truncate": beside}
        return from_config(copy.deepcopy(config))

    def frequencies(model: Any) -> Tensor:
        inv_freq: Tensor = model.model.rotary_emb.full_attention_inv_freq
        return inv_freq

    assert torch.equal(frequencies(nested(False, True)), frequencies(nested(True, True)))
    assert not torch.equal(frequencies(nested(False, False)), frequencies(nested(True, True)))
    model = nested(False, True)
    assert "rope_parameters['truncate'] = False" in line(model, "truncate = False in the yarn settings")
    assert has_line(rope.patch(model, "linear", factor=2), "truncate = False in the yarn settings")
    assert not has_line(nested(False, False), "truncate")


NOMIC = {"rotary_emb_base": 1000, "n_embd": 64, "max_trained_positions": 64}


@torch.no_grad()
@pytest.mark.parametrize(
    ("factor", "call", "method"),
    [
        (2, "'dynamic', factor=2", {"method": "dynamic", "factor": 2}),
        (None, "'dynamic-ntk'", {"method": "dynamic-ntk"}),
    ],
)
def test_nothing_reads_the_scaling_of_nomic_bert(factor: float | None, call: str, method: dict[str, Any]) -> None:
    ids = tokens(200) % 90 + 3

    def model(**keys: Any) -> Any:
        return tiny("nomic_bert", max_position_embeddings=64, hidden_size=64, num_attention_heads=4, **keys)

    published = model(**NOMIC, n_positions=8192, rotary_scaling_factor=factor)
    assert published.config.n_positions == 8192
    assert torch.equal(published(ids).logits, model()(ids).logits)  # it runs unscaled
    assert published.config.rope_parameters == {"rope_theta": 1000.0, "rope_type": "default"}
    note = line(published, "transformers reads nothing of this in its config")
    assert f"rope.patch(model, {call})" in note
    patched = rope.patch(published, **method)
    assert not has_line(patched, "reads nothing")
    # As the model's own code: base (s L / C - (s - 1))^(d / (d - 2)), with s = 1 where there is no factor.
    s, dim = factor or 1, published.config.head_dim
    theta = 1000.0 * (s * 200 / 64 - (s - 1)) ** (dim / (dim - 2))
    scaled = model(rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert difference(patched(ids).logits, scaled(ids).logits) <= TOLERANCE
    assert not has_line(model(**NOMIC, n_positions=64), "reads nothing")


def test_the_trained_length_of_nomic_bert_is_the_context_length() -> None:
    model = tiny("nomic_bert", max_position_embeddings=8192, max_trained_positions=2048, rotary_scaling_factor=2)
    assert "rope.patch(model, 'dynamic', factor=2, context_length=2048)" in line(model, "reads nothing of this")


@pytest.mark.parametrize("model_type", ["modernbert", "modernbert-decoder"])
def test_rope_scaling_of_modernbert_reaches_its_windows(model_type: str) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64}
    model = tiny(model_type, rope_parameters="none", rope_scaling=scaling, **layers)
    settings = model.config.rope_parameters
    assert settings["sliding_attention"]["factor"] == settings["full_attention"]["factor"] == 4.0
    assert build_config("gemma3", rope_scaling=scaling).rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert "a patch leaves these layers alone" in line(
        model, "The sliding_attention layers are scaled as well (linear)"
    )
    patched = rope.patch(tiny(model_type, rope_parameters="none", **layers), "linear", factor=4)
    assert patched.config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert not has_line(patched, "scaled as well")


def test_frequencies_in_the_weights_of_esm_win_over_its_config(tmp_path: Path) -> None:
    sizes = {"position_embedding_type": "rotary", "vocab_size": 40}
    model = tiny("esm", **sizes)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    scaled = {"rope_theta": 1e6, "rope_parameters": YARN}
    file.write_text(json.dumps(json.loads(file.read_text()) | scaled))
    again = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert torch.equal(again.rotary_embeddings.inv_freq, model.esm.rotary_embeddings.inv_freq)
    for refused in (model, tiny("esm", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, **sizes)):
        with pytest.raises(UnsupportedModelError, match=r"keeps its frequencies \(inv_freq\) in the weights"):
            rope.patch(refused, "yarn", factor=4)


def test_a_folder_of_transformers_5_lacks_the_keys_of_transformers_4(tmp_path: Path) -> None:
    """docs/results/programs.json has what transformers 4 makes of it: theta 10,000 and no scaling, without a word."""
    model = build("llama", YARN | {"rope_theta": 500_000.0})
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not {"rope_theta", "rope_scaling"} & config.keys()
    assert "transformers 4 reads none of it" in rope.describe(model).save_route
    rope.patch(model, "default").save_pretrained(tmp_path / "patched")
    config = json.loads((tmp_path / "patched" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]["rope_type"]) == (500_000.0, "yarn")
    assert "transformers 4.57" in rope.describe(model).save_route
    assert rope.describe(build("llama")).save_route == "it is now (rope_type default)"  # theta is 10,000 there too


# --- states that transformers keeps -----------------------------------------------------------------------------------


def test_dynamic_keeps_the_frequencies_of_a_longer_input() -> None:
    def fresh() -> Any:
        return build("llama", DYNAMIC)

    for length, kept in ((TRAINED - 1, False), (TRAINED, True), (TRAINED + 1, True)):
        model, ids = fresh(), tokens(length)
        logits(model, tokens(3 * TRAINED))
        assert (difference(logits(model, ids), logits(fresh(), ids)) > CHANGED) == kept
        patched = rope.patch(fresh(), "dynamic", factor=4)
        logits(patched, tokens(3 * TRAINED))
        assert difference(logits(patched, ids), logits(fresh(), ids)) <= TOLERANCE
    assert "rope.patch(model, 'dynamic', factor=4)" in line(fresh(), "later inputs of 64 tokens and more")
    assert not has_line(rope.patch(fresh(), "dynamic", factor=4), "later inputs")


def test_longrope_leaves_keys_of_the_other_list_in_the_cache() -> None:
    """Tokens past the original length, against the same text read at once: Phi-3 alone reads it again, and agrees."""

    def stale(model: Any) -> float:
        run, start = continued(model, tokens(60), 20), 60
        whole = logits(model, run.sequences)[0, start - 1 :]
        return max(difference(run.logits[step][0], whole[step]) for step in range(TRAINED + 1 - start, 20))

    phi3 = build("phi3", LONGROPE, max_position_embeddings=256)
    llama = build("llama", LONGROPE, max_position_embeddings=256)
    assert stale(phi3) <= TOLERANCE
    assert stale(llama) > CHANGED
    words = "leaves in the cache the keys that short_factor rotated"
    assert not has_line(phi3, words)
    assert "generation passes 64 tokens" in line(llama, words)
    patched = rope.patch(llama, "default")
    assert not has_line(patched, words)
    with rope.fixed_length(patched, 80):
        assert stale(patched) <= TOLERANCE
    saved = rope.patch(build("llama"), "longrope", factor=4, **LISTS)
    assert line(saved, words).startswith("Loaded from the saved folder by plain transformers")
    assert not has_line(rope.patch(build("llama"), "yarn", factor=4), words)


@pytest.mark.slow
def test_assisted_generation_changes_what_a_dynamic_model_says() -> None:
    ids, assistant = tokens(60), build("llama", seed=3)

    def changed(model: Any, again: Any) -> bool:
        alone = continued(model, ids, 24).sequences
        return not torch.equal(alone, continued(again, ids, 24, assistant_model=assistant).sequences)

    def static() -> Any:
        return build("llama", YARN)

    def dynamic() -> Any:
        return build("llama", DYNAMIC)

    assert not changed(static(), static())
    assert changed(dynamic(), dynamic())
    words = "Assisted generation (assistant_model, prompt_lookup_num_tokens) may give another output"
    assert not has_line(static(), words)
    assert line(dynamic(), words).endswith("both agree, once the model is patched.")
    patched = rope.patch(dynamic(), "dynamic", factor=4)
    assert changed(patched, patched)
    assert line(patched, words).endswith("both agree.")
    with rope.fixed_length(patched, 100):
        assert not changed(patched, patched)
    assert not has_line(rope.patch(tiny("nomic_bert"), "dynamic-ntk"), words)  # it generates nothing


# --- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["modernbert", "nomic_bert", "eurobert"])
def test_of_an_encoder_nothing_is_said_about_perplexity(model_type: str) -> None:
    ids = tokens(32) % 90 + 3
    model, other = tiny(model_type), torch.cat([ids[:, :-1], ids[:, :1]], 1)
    with torch.no_grad():  # the last token changes what comes before it, so that there is no perplexity
        assert difference(model(ids).logits[:, :-1], model(other).logits[:, :-1]) > CHANGED
    text = unwrapped(rope.describe(rope.patch(model, "yarn", factor=4)))
    assert "change as well, and mostly get worse. Take the smallest factor" in text
    assert "ppl" not in text
    assert "perplexity" not in text
    causal = unwrapped(rope.describe(rope.patch(build("llama").model, "yarn", factor=4)))
    assert "`rope-ext ppl` measures by how much" in causal
