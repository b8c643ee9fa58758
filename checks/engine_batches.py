"""Texts that a real engine reads together and one at a time, run in the engine's environment by engine_perplexity.py.

    python checks/engine_batches.py vllm|sglang RESULT.json [--answers ANSWERS.json]

The bundled model's losses are computed of all texts at once and of one after the other, in turn. The result has the
seconds of both, and by how much the losses differ. ANSWERS.json gets what SGLang was asked, and what it answered.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rope_ext_hf.eval.measurement_options import Perplexity
from rope_ext_hf.hub import load_model
from rope_ext_hf.plug_ins import plug_in

TEXTS, LENGTH, TURNS = 16, 256, 2
PROMPTS = [("The longest text of two, of which every token but the first is scored.", 1), ("The end of a text.", 9)]


def batches(engine: str) -> tuple[Any, dict[str, Any]]:
    """Return the scorer with the running engine, and the result."""
    model = load_model("reference", dtype=torch.float32)
    plan = Perplexity(lengths=[LENGTH], max_spans=TEXTS, data="stdlib").plan(model)
    texts = []
    for document, spans in plan.measurement.plan.documents:
        for span in spans:
            ids, shift = plan.measurement.plan.input_ids(document, span.start, span.stop)
            texts.append((ids, span.score_from - shift))
    plan, _ = plug_in("readers", engine)(model, replace(plan, methods=(None,)), alone=True)
    scorer = plan.scorer(model, chunk=None, offload_cache=False, longest=LENGTH)
    scorer.losses_together(texts)  # starts the engine
    seconds: dict[str, list[float]] = {"together": [], "alone": []}
    for _ in range(TURNS):
        started = time.perf_counter()
        together = scorer.losses_together(texts)
        seconds["together"].append(time.perf_counter() - started)
        started = time.perf_counter()
        alone = [scorer.losses(*text) for text in texts]
        seconds["alone"].append(time.perf_counter() - started)
    difference = max(float((one - other).abs().max()) for one, other in zip(together, alone, strict=True))
    result = {name: statistics.median(each) for name, each in seconds.items()}
    return scorer, {"texts": len(texts), "tokens": LENGTH, "seconds": result, "largest_difference": difference}


def answers(scorer: Any) -> dict[str, Any]:
    """Return what SGLang is asked for two texts, and its answers."""
    engine, asked = scorer.process.engine, dict[str, Any]()
    generate = engine.generate

    def recording(**arguments: Any) -> Any:
        asked.update(arguments=arguments, answers=generate(**arguments))
        return asked["answers"]

    engine.generate = recording
    texts = [([byte + 3 for byte in text.encode()], first) for text, first in PROMPTS]  # the ids of ByT5's tokenizer
    scorer.process.log_probabilities(texts)
    kept = ("input_token_logprobs", "output_token_logprobs", "finish_reason", "prompt_tokens", "cached_tokens")
    for answer in asked["answers"]:
        answer["meta_info"] = {key: answer["meta_info"][key] for key in kept}
    return {"engine": f"sglang {scorer.engine.version()}"} | asked


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("engine")
    parser.add_argument("result", type=Path)
    parser.add_argument("--answers", type=Path)
    arguments = parser.parse_args()
    scorer, result = batches(arguments.engine)
    arguments.result.write_text(json.dumps(result))
    if arguments.answers:
        arguments.answers.write_text(json.dumps(answers(scorer)) + "\n")
    scorer.process.stop()


if __name__ == "__main__":  # engines start processes that import this file
    main()
