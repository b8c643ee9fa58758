"""The perplexity of llama.cpp's own tool, on its C interface; run by readers.py in an environment with llama.cpp.

    ENV/bin/python benchmarks/llama_cpp_perplexity.py FILE.gguf TOKENS.json LENGTH

As tools/perplexity/perplexity.cpp reads a text: windows of LENGTH tokens without overlap, the first token of each
replaced by BOS if the file says so; the tokens after the first LENGTH / 2 + 1 of each window are scored. The settings
are those of the tool (up to 2,048 tokens at a time, in steps of 512, keys and values in float16), on one thread. The
last line is JSON: nats per token, scored tokens, CPU seconds, and the peak of memory above what the process held with
the model loaded.

The tool itself is in no package of the index; xllamacpp has the library, and llama-cpp-py-sync its declarations.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_py_sync._cffi_bindings import ffi

STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    """Bytes of memory that this process holds (VmRSS), or held at most (VmHWM)."""
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def loss(logits: Any, target: int) -> float:
    """The loss of a token in nats, from logits (vocabulary,) float32."""
    highest = logits.max()
    return float(highest - logits[target] + np.log(np.exp(logits - highest).sum(dtype=np.float64)))


def main() -> None:
    file, tokens, length = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), int(sys.argv[3])
    library = next(file for file in files("xllamacpp") or () if file.name == "xllamacpp.abi3.so")
    lib: Any = ffi.dlopen(str(library.locate()))
    lib.llama_backend_init()
    before = memory("VmRSS")
    loading = lib.llama_model_default_params()
    loading.n_gpu_layers = 0
    loading.load_mode = lib.LLAMA_LOAD_MODE_NONE  # not mapped: the model is in memory before the peak is taken
    model = lib.llama_model_load_from_file(file.encode(), loading)
    if model == ffi.NULL:
        sys.exit("error: the file is not loaded")
    vocabulary = lib.llama_model_get_vocab(model)
    size, most, first = lib.llama_vocab_n_tokens(vocabulary), min(2048, length), length // 2
    held = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
    started = time.process_time()
    running = lib.llama_context_default_params()
    running.n_ctx, running.n_batch, running.n_ubatch = length, most, min(512, most)
    running.n_threads = running.n_threads_batch = 1
    context = lib.llama_init_from_model(model, running)
    if context == ffi.NULL:
        sys.exit("error: no context is made")
    total, count = 0.0, 0
    for start in range(0, len(tokens) - length + 1, length):
        window = list(tokens[start : start + length])
        if lib.llama_vocab_get_add_bos(vocabulary):
            window[0] = lib.llama_vocab_bos(vocabulary)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        for begin in range(0, length, most):
            positions = range(begin, min(begin + most, length))
            batch = lib.llama_batch_init(len(positions), 0, 1)
            batch.n_tokens = len(positions)
            for index, at in enumerate(positions):
                batch.token[index], batch.pos[index], batch.n_seq_id[index] = window[at], at, 1
                batch.seq_id[index][0], batch.logits[index] = 0, at >= first
            if lib.llama_decode(context, batch) != 0:
                sys.exit("error: the tokens are not decoded")
            lib.llama_batch_free(batch)
            for at in range(max(begin, first), min(begin + most, length - 1)):
                buffer = ffi.buffer(lib.llama_get_logits_ith(context, at - begin), 4 * size)
                total, count = total + loss(np.frombuffer(buffer, np.float32), window[at + 1]), count + 1
    seconds, peak = time.process_time() - started, memory("VmHWM")
    result = {"loss": total / count, "tokens": count, "seconds": seconds, "megabytes": (peak - held) / 1e6}
    result["model_megabytes"] = (held - before) / 1e6
    print(json.dumps(result | {"version": "b" + version("xllamacpp").rpartition(".")[2]}))


if __name__ == "__main__":
    main()
