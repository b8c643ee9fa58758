"""Rotary classes of vLLM with the plug-in's tables, run in an environment of its own by checks/vllm_engine.py.

    python checks/vllm_tables.py CASES.json ANSWERS.json

Each case has the arguments of vLLM's `get_rope`, positions, and queries; its answer is the rotated queries.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from rope_ext_hf.tools.plugins.vllm import register


def main() -> None:
    register()
    from vllm.model_executor.layers.rotary_embedding import get_rope

    answers = []
    with set_current_vllm_config(VllmConfig()):
        for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            module = get_rope(**case["arguments"], dtype=torch.float32)
            query = torch.tensor(case["query"])
            rotated, _ = module.forward_native(torch.tensor(case["positions"]), query.flatten(1), query.flatten(1))
            answers.append(rotated.view(query.shape).tolist())
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
