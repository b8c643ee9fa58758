"""Measure a model's bits per byte by context length under several methods; the run's folder has a chart.

python examples/measure_and_plot.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from rope_ext_hf.eval import sweep
from rope_ext_hf.reference import path

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
model = AutoModelForCausalLM.from_pretrained(path())
run = sweep(
    model,
    "stdlib",  # held-out modules of Python's library; or a text file, a pattern or hf:OWNER/NAME
    methods=["yarn", "self-extend"],
    factors=[4],
    lengths=[256, 512, 1024],
    max_spans=2,  # more spans give narrower confidence intervals
    out=folder,
)
for result in run.results:
    name = result.method["method"] if result.method else "unpatched"
    print(f"{name:12} {result.length:5} tokens  {result.bits_per_byte:.3f} bits per byte")
print("run folder:", run.folder)  # the same call continues an interrupted run
