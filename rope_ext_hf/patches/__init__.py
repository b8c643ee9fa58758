"""The patch: how a method gets into a live model of transformers, and out of it again.

Modules that other packages call:
    patching: put a method into a live model, take it out, hold one length; the functions that users call.
    planning: work out and check everything that a patch changes, and leave the model as it is.
    chosen_layers: plan the method that is put into layers one by one.
    applying: change a model as planned, after a trial with a cache where it needs one, and take patches off again.
    loading, loading_classes: load models and adapters with the patch that was saved with them.
    describing: which method a model runs, what lies underneath, and how it would be saved.
    model_rope: read once what a model, its config or a checkpoint says of its rope (`ModelRope`).
    held_lengths: the lengths at which `fixed_length` holds a model, whatever patch it has.
    whole_models: extend the patch of a part to the model around it, before that is saved.
    small_replica: try a patch on a small random model, where the weights are not at hand.

Folders that these modules use:
    slots: the rotary modules of a model, and what stands in their place.
    forward: one forward of a patched decoder, under length-dependent and remapping methods.
    rows: which rows of a weight rotate.
    trials: tests that run once before a patch is accepted, and refusals.
    saved: patched models on disk.

`rope_ext_hf.models` reads what a model, its config and its class state about RoPE.
"""
