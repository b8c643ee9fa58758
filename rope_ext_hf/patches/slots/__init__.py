"""The rotary modules of a model: finding them, and the modules that a patch puts in their place.

slot_finding, slot_refusals: find the rotary modules of a model, or say why there are none.
layout_probe: find out how such a module arranges cos and sin.
class_angles: measure the frequencies that the model's own class computes.
patched_slot: the place of a rotary module, and the module that stands there while the model is patched.
slot_rotary: rotary modules for remapping methods, and for a learned factor of the frequencies.
roformer: the same for a model that keeps cos and sin as a table in its weights (RoFormer).
patch_state: what a patched model remembers of its patch.
"""
