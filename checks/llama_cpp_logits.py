"""The logits of one GGUF file by llama.cpp, run in an environment of its own by checks/llama_cpp_engine.py.

    python checks/llama_cpp_logits.py JOB.json

The job, or each job of a list, names the file, the token ids and the positions to allocate, and the flags of `llama-
server` in the fields that those set: `context` of llama_context_params, `overrides` of metadata (name -> [type,
value]). It may state `rows`, token ids of several sequences, in place of the file of ids, and the sizes of `chunks` to
decode one after another. The logits go to a .npy file, (positions, vocabulary) float32, in the order of decoding. An
assertion of llama.cpp ends this process, and no other.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_py_sync._cffi_bindings import ffi

# llama.cpp's C interface: its library is that of xllamacpp, its declarations are those of llama-cpp-py-sync, whose own
# library needs a newer glibc than many machines have.
library = next(file for file in files("xllamacpp") or () if file.name == "xllamacpp.abi3.so")
lib: Any = ffi.dlopen(str(library.locate()))


def overrides(given: dict[str, list[str]]) -> object:
    """An array of llama_model_kv_override, its end marked by an empty key."""
    array = ffi.new("struct llama_model_kv_override[]", len(given) + 1)
    for each, (key, (kind, value)) in zip(array, given.items(), strict=False):
        each.key = key.encode()
        if kind == "int":
            each.tag, each.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, int(value)
        else:
            each.tag, each.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, float(value)
    return array


def compute(job: dict[str, Any]) -> None:
    """Write the logits of one job."""
    rows = job.get("rows") or [np.load(job["ids"]).ravel().tolist()]
    longest = max(map(len, rows))
    loading = lib.llama_model_default_params()
    loading.n_gpu_layers = 0
    kept = overrides(job["overrides"])
    loading.kv_overrides = kept if job["overrides"] else ffi.NULL
    model = lib.llama_model_load_from_file(job["file"].encode(), loading)
    if model == ffi.NULL:
        sys.exit("error: the file is not loaded")
    running = lib.llama_context_default_params()
    most = sum(map(len, rows))
    running.n_ctx, running.n_batch, running.n_ubatch = job["positions"] * len(rows), most, most
    running.n_seq_max = len(rows)
    running.n_threads = running.n_threads_batch = 1
    running.type_k = running.type_v = 0  # float32
    running.flash_attn_type = 0
    running.offload_kqv = running.op_offload = False
    for name, value in job["context"].items():
        setattr(running, name, value)
    context = lib.llama_init_from_model(model, running)
    if context == ffi.NULL:
        sys.exit("error: no context is made")
    size, found, start = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)), [], 0
    for count in job.get("chunks") or [longest]:
        placed = [(row, at) for row, ids in enumerate(rows) for at in range(start, min(start + count, len(ids)))]
        batch = lib.llama_batch_init(len(placed), 0, 1)
        batch.n_tokens, start = len(placed), start + count
        for index, (row, at) in enumerate(placed):
            batch.token[index], batch.pos[index], batch.n_seq_id[index], batch.logits[index] = rows[row][at], at, 1, 1
            batch.seq_id[index][0] = row
        if lib.llama_decode(context, batch) != 0:
            sys.exit("error: the tokens are not decoded")
        for index in range(len(placed)):
            buffer = ffi.buffer(lib.llama_get_logits_ith(context, index), 4 * size)
            found.append(np.frombuffer(buffer, np.float32).copy())
        lib.llama_batch_free(batch)
    np.save(job["out"], np.stack(found))
    lib.llama_free(context)
    lib.llama_model_free(model)


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lib.llama_backend_init()
    for job in given if isinstance(given, list) else [given]:
        compute(job)
    print("b" + version("xllamacpp").rpartition(".")[2])


if __name__ == "__main__":
    main()
