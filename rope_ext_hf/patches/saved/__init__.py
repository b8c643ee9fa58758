"""Patched models on disk: folders, adapters, fingerprints, code for loading.

saving: what `save_pretrained` of a patched model writes beside transformers' own files.
loading_code: code in a folder by which plain transformers loads it.
adapters: the record of a patch in the folder of a PEFT adapter, and loading the adapter.
generation_length: lengths that are stated beside the config.
fingerprint: compare what rotates in two models.

The settings in config.json and the record of the patch are in `patched_config` and `patch_records` of
`rope_ext_hf.models`; `rope_ext_hf.patches.loading` reads them back.
"""
