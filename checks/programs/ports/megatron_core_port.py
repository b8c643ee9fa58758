"""Megatron Core: a model of one layer as its training scripts build it from the arguments of their command line.

It reads no config.json: a user types the settings. Megatron Core asks for Python 3.12, of which it uses a decorator.
"""

from __future__ import annotations

import json
import sys
import typing
from functools import cache
from importlib.metadata import version as installed
from typing import Any
from unittest.mock import patch

import rope_settings
import torch

names: Any = typing
names.override = getattr(typing, "override", lambda method: method)
cuda: Any = torch.cuda
cuda.current_device = lambda: "cpu"

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.arguments import parse_args, validate_args  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder  # noqa: E402

backends.DotProductAttention = IdentityOp  # DeepSeek's needs Transformer Engine, which needs CUDA
distributed: Any = torch.distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_oss", "deepseek_v3")
SMALL = (
    "--num-layers 1 --seq-length 8 --vocab-size 64 --micro-batch-size 1 --use-cpu-initialization "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion"
)
LATENT = "--multi-latent-attention --position-embedding-type rope --rope-type yarn"
"""The arguments that choose yarn for DeepSeek's attention."""
SCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("--position-embedding-type rope", {}),
    "linear": ("--position-embedding-type rope", {"factor": "rotary-seq-len-interpolation-factor"}),
    "llama3": ("--position-embedding-type rope --use-rope-scaling", {"factor": "rope-scaling-factor"}),
    "yarn": (
        "--position-embedding-type yarn",
        {
            "factor": "rotary-scaling-factor",
            "original_max_position_embeddings": "yarn-original-max-position-embeddings",
            "beta_fast": "yarn-beta-fast",
            "beta_slow": "yarn-beta-slow",
            "mscale": "mscale",
            "mscale_all_dim": "mscale-all-dim",
        },
    ),
}
"""The arguments that choose each scaling, and those of its settings."""


def version() -> str:
    return f"megatron-core {installed('megatron-core')}, torch {torch.__version__}"


def _words(config: dict[str, Any]) -> list[str]:
    """Return the words of the command line for a config."""
    rope = rope_settings.read(config)
    if config["model_type"] not in FAMILIES or rope["rope_type"] not in SCALINGS:
        raise NotImplementedError
    chosen, names = SCALINGS[rope["rope_type"]]
    values = {names[key]: rope[key] for key in names if key in rope} | {
        "rotary-base": rope["rope_theta"],
        "hidden-size": config["hidden_size"],
        "num-attention-heads": config["num_attention_heads"],
        "max-position-embeddings": config["max_position_embeddings"],
        "kv-channels": config["head_dim"],
    }
    words = f"{SMALL} {chosen}".split()
    if config["model_type"] == "deepseek_v3":
        words += ["--qk-pos-emb-head-dim", str(config["head_dim"]), *LATENT.split()]
    if rope.get("truncate") is False:
        words.append("--no-yarn-correction-range-round-to-int")
    for name, value in values.items():
        words += [f"--{name}", str(int(value) if value == int(value) else value)]
    return words


@cache
def _rotation(written: str) -> tuple[Any, float]:
    """Return the angles of position 1, (pairs,), and the magnitude."""
    with patch.object(sys, "argv", ["pretrain_gpt.py", *_words(json.loads(written))]):
        arguments = parse_args()
    validate_args(arguments)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(gpt_config_from_args(arguments)).build_model(groups, pre_process=True, post_process=True)
    attention = model.decoder.layers[0].self_attention
    rotary = getattr(model, "rotary_pos_emb", None) or attention.rotary_pos_emb
    made = rotary(2)
    angles, factor = made if isinstance(made, tuple) else (made, 1.0)
    return angles[1, 0, 0, : angles.shape[-1] // 2].double().tolist(), factor


def inv_freq(config: dict[str, Any]) -> Any:
    return _rotation(json.dumps(config))[0]


def magnitude(config: dict[str, Any]) -> float:
    return _rotation(json.dumps(config))[1]
