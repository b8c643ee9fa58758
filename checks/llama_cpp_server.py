"""llama.cpp's HTTP server on the loopback address, run in an environment of its own by checks/live_servers.py.

    python checks/llama_cpp_server.py FILE.gguf LENGTH [BITS]

LENGTH is the context that is allocated, `-c` of llama-server, and BITS are those of keys and values, 8 or 4, as
`-ctk q8_0 -ctv q8_0` sets them; everything else is as llama-server sets it. It prints its address, and serves until its
input ends.
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx = sys.argv[1], int(sys.argv[2])
    parameters.cpuparams.n_threads = parameters.n_gpu_layers = 1
    parameters.ui = parameters.warmup = False
    if bits := sys.argv[3:]:
        kind = {"8": xllamacpp.ggml_type.GGML_TYPE_Q8_0, "4": xllamacpp.ggml_type.GGML_TYPE_Q4_0}[bits[0]]
        parameters.cache_type_k = parameters.cache_type_v = kind
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
