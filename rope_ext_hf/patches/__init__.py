"""The patch: how a method gets into a live model of transformers, and out of it again.

`patching.patch` is the door. The modules of this folder, in the order in which a patch happens:

Plan
    patching: put a method into a live model, take it out, hold one length; the functions that users call.
    planning: work out and check everything that a patch changes, and leave the model as it is.
    geometry: the rotary embedding that a patch starts from.
    config, config_keys, patched_config: read the rotary embedding that a config states, and write a patch into one.
    families, family_settings: what a model type does as no others do (families.toml), and its sizes and pairing.
    layer_types: which layers attend to everything, which rotate, and by which rotary embedding.
    recipes: what publishers state about the context of their models (recipes.toml).
    config_model: plan a patch for a model that is known by its config alone.
    model_classes, small_models: the class for a config, and small random models of it.
    stand_in: try a patch on a small random model, where the weights are not at hand.
    row_probe, score_products, saved_names: find out which rows of a class's weights rotate, by running a small model.

Find slots
    slot_finding: find the rotary modules of a model.
    layout_probe: find out how such a module arranges cos and sin.
    class_angles, class_rotary: measure the frequencies that the model's own class computes.

Put modules in
    applying: change a model as planned, after a trial with a cache where it needs one, and take patches off again.
    slots: the place of a rotary module, and the module that stands there while the model is patched.
    slot_rotary: rotary modules for remapping methods, and for a learned factor of the frequencies.
    angle_tables: the same for a model that keeps cos and sin as a table in its weights (RoFormer).
    patch_state: what a patched model remembers of its patch.
    generation_length: lengths that are stated beside the config.
    held_lengths: the lengths at which `fixed_length` holds a model, whatever patch it has.

Hook the forward (length-dependent and remapping methods; docs/internals.md shows a forward)
    forward_hooks: install hooks around a decoder's forward.
    hooked_forward: run the hooks also where `module.forward(...)` is called directly.
    forward_context: what one forward was called with, and what its hooks worked out.
    decoder_arguments: find the arguments of a decoder's forward in every release of transformers.
    length_hooks: hooks of length-dependent methods, which also rotate the keys in a cache.
    key_layout_probe: find out how a decoder keeps keys in its cache.
    weights_at_hand: find out whether tokens can be run through a model.
    attention_hooks: hooks of remapping methods.
    attention_function: the attention that the layers then run.
    attention_interface: transformers' tables of attention functions and masks.
    temporary: changes of a model that end with a `with` block.
    attention_probe: find out what each attention layer does with its rotary embedding.
    continuation_probe: try once whether a decoder goes on from its cache as it reads in one forward.
    continuous_batching, rotation_kernels: refuse what would run the model without its method.
    training_checks: refuse what would train it without its method, or with the frequencies of a part of a row.

Save
    saving: what `save_pretrained` of a patched model writes beside transformers' own files.
    whole_models: extend the patch of a part to the model around it, before that is saved.
    patch_records: the record of a patch in a config.
    engine_keys: keys of the saved config for other programs.
    loading_code: code in a folder by which plain transformers loads it.
    adapters: the record of a patch in the folder of a PEFT adapter, and loading the adapter.

Load
    loading: load models and adapters with the patch that was saved with them.
    loading_classes: what the code in a folder does when transformers runs it.
    fingerprint: compare what rotates in two models.

Describe
    describing: which method a model runs, what lies underneath, and how it would be saved.
"""
