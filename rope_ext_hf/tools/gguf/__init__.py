"""GGUF files, the model files of llama.cpp: reading, loading, converting and rewriting them.

headers: the header of a file, and the rotary embedding that it describes.
models: `GGUFFile`, by which the library loads models from such files.
importing: convert a file into a folder.
rewriting: copy a file with another method.
"""
