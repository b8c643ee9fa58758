"""Statements of a model, its config.json and its class about rope settings, layers and weights.

config, config_keys: the rotary embedding that a config states.
patched_config, patch_records, engine_keys: a patch in a config: its record, and its settings for each program.
families, family_settings: the peculiarities of each model type (families.toml), and its sizes and pairing.
layer_types: which layers attend to everything, which rotate, and by which rotary embedding.
recipes: what publishers state about the context of their models (recipes.toml).
model_classes, small_models: the class for a config, and small random models of it.
decoder_arguments: the arguments of a decoder's forward in every release of transformers.
weights_at_hand: whether tokens can be run through a model.
temporary: changes of a model that end with a `with` block.
"""
