"""What each serving engine computes from a config: frequencies, magnitude and length, by the engine's own rules.

One file per engine, with its source (repository, version, file) at the top. Nothing here loads a model or an engine.
"""

# Registers the engines.
from rope_ext_hf.engines import hf_transformers, llama_cpp, mlx, sglang, vllm

__all__: list[str] = []

_REGISTERED = (hf_transformers, vllm, sglang, llama_cpp, mlx)
