"""Files of weights: safetensors, torch files, and what else lies beside them.

weight_folders: the weight files of a folder, checked to be whole.
weight_files, torch_files: read and write them, one tensor at a time; `numbers` has their bits and values.
tensor_names: the names of tensors, taken apart.
other_files: which other files a copy gets: texts, code and kinds that are known, and no file that may hold weights.
tokenizer_files: what became of the tokenizer.
"""
