"""Latent attention, whose softmax scale is a part of the scaling."""

from __future__ import annotations

import pytest

from rope_ext_hf.models.families import families
from rope_ext_hf.tools.engines.hf_transformers import MLA_FAMILIES, NTK_ALPHA_FAMILIES
from rope_ext_hf.tools.engines.programs.vllm import DEEPSEEK_FAMILIES
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support.every_model import tiny
from tests.tools.support.serving_models import serve

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_families_with_a_softmax_scale_are_those_of_the_family_table() -> None:
    of_remote_code = {"kimi_k2"}
    assert MLA_FAMILIES - of_remote_code == {name for name, known in families().items() if known.softmax_mscale}
    assert DEEPSEEK_FAMILIES < MLA_FAMILIES
    assert {name for name, known in families().items() if known.alpha_is_ntk} == NTK_ALPHA_FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    # but for remote code, a config that states no length, and the text parts of models that also read images
    sorted(MLA_FAMILIES - {"kimi_k2", "bailing_hybrid", "mistral_large4_text", "hy_v4_vl_text"}),
)
def test_latent_attention_is_served_with_its_softmax_scale_or_refused(model_type: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    models = [tiny(model_type, rope_parameters=each) for each in (plain, yarn | {"mscale": 1.0, "mscale_all_dim": 0.5})]
    before, after = (
        next(
            float(part.scaling)
            for part in model.modules()
            if hasattr(part, "scaling") and hasattr(part, "kv_lora_rank")
        )
        for model in models
    )
    target = make_target(open_model(models[1]))
    for engine, served in (("transformers", True), ("vllm", model_type in DEEPSEEK_FAMILIES)):
        config, refusal = serve(engine, target)
        assert (config is not None) is served, refusal
        if config is not None and config.computed is not None:
            assert config.computed.softmax_scale == pytest.approx(after / before, rel=1e-5)
    if model_type == "mistral4":  # without a scaling its class rotates twice the dims that its attention has for it
        return
    config, refusal = serve("vllm", make_target(open_model(models[0]), "llama3", factor=4))
    assert (config is None) is (model_type in DEEPSEEK_FAMILIES), refusal
