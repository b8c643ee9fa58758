"""Run every benchmark: some hours, most of them training. Each appends a JSON line to benchmarks/results.jsonl.

    .venv/bin/nox -s bench -- [--device cuda]         # `make bench` is the same
    python benchmarks/bench.py --llama-cpp PYTHON [--device cuda] [--only factors,bands]

PYTHON is that of an environment with llama.cpp, which the session of nox installs.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import smollm2

FOLDER = Path(__file__).parent
COMMANDS = """
first_run.py
intervals.py
reference.py
factors.py
factors.py {further}
docstring_model.py --folder {docstring_model}
factors.py --model {docstring_model} --data '{docstring_model}/held-out/*.txt'
factors.py --model {docstring_model} --data '{docstring_model}/held-out/*.txt' {further}
train_reference.py --recipe wide-heads --out {wide_heads_model}
factors.py --model {wide_heads_model} --longest 8 --spans 8
factors.py --model {wide_heads_model} {further} --factors 16,32 --spans 4
bands.py --folder {bench}/bands
bands.py --model {docstring_model} --data '{docstring_model}/held-out/*.txt' --bands 16:1,8:1 --folder
    {bench}/bands
bands.py --model {wide_heads_model} --factors 4 --bands 16:1 --spans 8 --folder {bench}/bands
angles.py
retrieval.py --runs {bench}/retrieval
retrieval.py --runs {bench}/retrieval --model {wide_heads_model} --questions 20 --keys 1 --lengths 1024
    --methods as-loaded
retrieval.py --runs {bench}/retrieval --tasks key-value,assignment,quote,copy --methods
    as-loaded,rerope,self-extend --lengths 256,2048,8192 --keys 1
retrieval.py --runs {bench}/retrieval --score rank --tasks passkey --keys 1 --questions 40 --lengths
    256,512,1024,2048 --methods as-loaded,yarn,mrrope,rerope,self-extend,dynamic-self-extend,jet-long,dca
retrieval.py --runs {bench}/retrieval --model {wide_heads_model} --score rank --tasks passkey --keys 1
    --questions 40 --lengths 1024 --methods as-loaded
retrieval.py --runs {bench}/retrieval --model {docstring_model} --score rank --tasks passkey --keys 1
    --questions 40 --lengths 128 --methods as-loaded
overhead.py --methods {costs}
overhead.py --model {smollm2} --layers 2 --tokens 16384 --dtype bfloat16 --methods {costs}
attention.py {plot}
remapping.py --folder {bench}/remapping --spans 200 --methods "self-extend,rerope,rerope window=192"
remapping.py --folder {bench}/remapping --spans 16 --methods self-extend,rerope,dca --temperatures
    none,log-n,llama4
linear_attention.py
linear_attention.py --text
reference.py --biases
learnable.py
measures.py --docstring-model {docstring_model} --wide-heads-model {wide_heads_model} --folder {bench}/measures
gain.py --models reference {docstring_model} {wide_heads_model} --folder {bench}/gain
finetuning.py --method rerope --steps 100 --folder {bench}/finetuning-rerope
finetuning.py --method self-extend --steps 100 --folder {bench}/finetuning-self-extend
finetuning.py --method yarn --steps 100 --folder {bench}/finetuning-yarn --against {bench}/finetuning-rerope
    {bench}/finetuning-self-extend
recalibration.py --method default --minutes 0
recalibration.py --method yarn --minutes 0
recalibration.py --method yarn --minutes 2 --folder {bench}/recalibration
recalibration.py --method nope --minutes 2 --folder {bench}/recalibration
recalibration.py --method nope --minutes 10 --folder {bench}/recalibration
encoders.py
dynamic.py
dynamic.py --text
reading.py
reading.py --position 1024,2048,4096,8192
readers.py --model {smollm2} --gguf {gguf} --llama-cpp {llama_cpp}
conversion.py
detection.py --folder {bench}/detection
trained_scaling.py --folder {bench}/trained-scaling
trained_scaling.py --scaling yarn --folder {bench}/trained-scaling
"""
"""One command of benchmarks/ per line; an indented line goes on with the one above."""

FURTHER = "--longest 32 --factors 32 --methods yarn,mrrope,rerope,self-extend,dynamic-self-extend,jet-long,dca"
"""Arguments of the benchmarks that are repeated at 32 times the context length."""
COSTS = "yarn,mrrope,dynamic-yarn,rerope,self-extend,dynamic-self-extend,jet-long,dca"
"""The methods whose cost in time and memory is measured."""

WITHOUT_OUT = ("first_run.py", "docstring_model.py", "train_reference.py")
"""Scripts that append no line; two train the models that others measure."""
WITHOUT_DEVICE = ("first_run.py", "intervals.py", "conversion.py")


def commands(llama_cpp: str, device: str = "cpu") -> list[list[str]]:
    """Return the name of a script and its arguments, for every command."""
    values = {
        "further": FURTHER,
        "costs": COSTS,
        "bench": "build/bench",
        "docstring_model": "build/bench/docstring-model",
        "wide_heads_model": "build/bench/wide-heads-model",
        "smollm2": smollm2.FOLDER,
        "gguf": smollm2.GGUF,
        "llama_cpp": llama_cpp,
        "plot": "--plot docs/attention.png" if device == "cpu" else "",
    }
    listed = []
    for line in re.sub(r"\n +", " ", COMMANDS.strip()).format_map(values).splitlines():
        script, *arguments = shlex.split(line)
        arguments += [] if script in WITHOUT_DEVICE else ["--device", device]
        arguments += [] if script in WITHOUT_OUT else ["--out", "benchmarks/results.jsonl"]
        listed.append([script, *arguments])
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--llama-cpp", required=True, metavar="PYTHON", help="of an environment with llama.cpp")
    parser.add_argument("--device", default="cpu", help="what models run on")
    parser.add_argument("--only", help="names of scripts, without .py")
    arguments = parser.parse_args()
    only = arguments.only and {f"{name}.py" for name in arguments.only.split(",")}
    smollm2.fetch()
    for script, *options in commands(arguments.llama_cpp, arguments.device):
        trained = "--recipe" in options and (Path(options[options.index("--out") + 1]) / "model.safetensors").exists()
        if trained or (only and script not in only):
            continue
        print(shlex.join([script, *options]), flush=True)
        subprocess.run([sys.executable, FOLDER / script, *options], check=True)


if __name__ == "__main__":
    main()
