"""Put a method into a live model, and take it out again.

Everything that a patch changes is planned first, by `planning`, and then changed by `applying`. For a method such as
YaRN:

- its formula is in `methods.static`: from the rotary embedding of the model to inverse frequencies and a factor. In a
  model without a scaling of its own, w_i = b^(-2i/d), and C = L0 is max_position_embeddings;
- they are computed during the call of `patch`, when the new `RotaryEmbedding` is made (`rotary.embedding`), and do not
  change afterwards. It keeps them in its attributes `frequency` (integers, and not a buffer) and `attention_factor`,
  and makes cos and sin of them in each forward;
- `slots.patched_slot` has the module that stands where the model's own one stood, such as `model.model.rotary_emb`. It
  holds the `RotaryEmbedding`, as `model.model.rotary_emb.tables["all"]`, and the module that it replaces. Its
  `inv_freq` is worked out when it is read;
- `models.patched_config` writes the settings into a copy of the config, which the model gets with the module. For a
  Llama without a scaling of its own, `rope_parameters` becomes {"rope_type": "yarn", "rope_theta": ..., "factor": 4.0,
  "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "original_max_position_embeddings": ...}; over a scaling of
  its own it becomes a longrope that lists the divisors of all frequencies. max_position_embeddings is multiplied by
  the factor, and the key `rope_ext_hf` records the patch.

A forward of the model passes through nothing else. Saving, and `generate` for its longest length, ask for the record.
Length-dependent and remapping methods also change the forward of the decoder (`forward`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn

from rope_ext_hf.bounds import Length, check_int, parse_length
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.models.layer_types import Layers
from rope_ext_hf.models.patch_records import Patch, replaced_note
from rope_ext_hf.patches.applying import patch_as_planned, reapply, remove_patch
from rope_ext_hf.patches.held_lengths import held_at
from rope_ext_hf.patches.loading import from_pretrained
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.planning import plan_patch
from rope_ext_hf.patches.slots.patched_slot import active_patches, patched_slots, tables_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


M = TypeVar("M", bound=nn.Module)


@overload
def patch(
    model: M,
    method: str | RopeMethod | Mapping[str, Any],
    factor: float | None = None,
    *,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> M: ...
@overload
def patch(
    model: str | Path, method: str | RopeMethod | Mapping[str, Any], factor: float | None = None, **options: Any
) -> PreTrainedModel: ...
def patch(
    model: Any,
    method: str | RopeMethod | Mapping[str, Any],
    factor: float | None = None,
    *,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> Any:
    """Change the RoPE method of a loaded model, in place.

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        rope.patch(model, "yarn", factor=4)

    A model that is patched already gets the new method instead of the old one, unless `over` says "patched". So does a
    model whose folder records a patch; a warning then says which patch is replaced. When an exception is raised, the
    model is as it was before the call.

    Args:
        model: a transformers model with rotary embeddings, alone or inside PEFT or torch.compile; of another wrapper,
            such as DDP, give the model inside (`.module`). Give the whole model: a decoder taken out of it cannot reach
            the config that is saved. A folder, a Hub id or "reference" (the bundled model) is loaded first, by
            `rope_ext_hf.from_pretrained` with its defaults.
        method: a name of `rope_ext_hf.list_methods()`, a method object, or the rope settings of a config, such as
            {"rope_type": "yarn", "factor": 4}, of which every key is used or refused.
        factor: the extended length divided by the context length: with `factor=4`, a model for 8,192 tokens is to
            reach 32,768. A method that has no factor of its own takes the extended length from it, and fits those of
            its parameters that depend on that length.
        target_length: the extended length itself, as a number of tokens or as text ("32k"); give this or `factor`.
        over: what the method extends. "own" is the model as loaded, with the scaling it was trained under, if there is
            one. "original" is the model without that scaling, counted from its original length. "patched" is the model
            with its present patch, for a model that was trained under that patch; the patch may be a live one, or be
            recorded in the folder that the model was loaded from.
        context_length: the length in tokens that the model as loaded is for. Give it where the config states another.
        layers: the layers to change, by layer type ("sliding_attention") or by index from 0, in a model that has
            several rotary embeddings; layers that share one change together. By default the method applies to the
            layers that attend to everything before them.
        native: let `save_pretrained` write a rope type of transformers even where transformers is known to compute
            something else with it than this package does (the type "dynamic").
        **params: further parameters of the method, such as `beta_fast` of yarn.

    Returns:
        The same model. Its config states the method and the extended length from now on, so that `generate`,
        `save_pretrained` and serving engines agree about it. Other models that shared the config keep it unchanged.

    Raises:
        MethodError: the method or a parameter is unknown, a value is impossible, or `layers` names layers that the
            model does not have.
        UnsupportedModelError: the model has no rotary embeddings, or has some that cannot be replaced; or `layers`
            names only some of the layers that share a rotary embedding.
        CheckpointError: the name is not that of a model; or the weights are in another pairing than the class rotates.
    """
    recorded: Sequence[Patch] = ()
    if isinstance(model, (str, Path)):
        model = from_pretrained(model)
        recorded = active_patches(model)
    plan = plan_patch(
        model,
        method,
        factor=factor,
        target_length=target_length,
        over=over,
        context_length=context_length,
        layers=layers,
        native=native,
        **params,
    )
    if recorded and over != "patched":
        replaced = replaced_note(recorded, plan.state.patch)
        if replaced is not None:
            warnings.warn(replaced, stacklevel=2)
    patch_as_planned(plan)
    return model


def unpatch(model: M) -> M:
    """Take the last patch off a model, in place: its modules, its configs and its forwards.

    Afterwards the logits, the config and the keys of the state_dict are bit for bit those of a model that was never
    patched and went through the same `.to` calls. If the patch was put over an earlier one (`over="patched"`), the
    earlier one is in force again. A model that is not patched is left alone.

    Returns:
        The same model.
    """
    below = active_patches(model)[:-1]
    remove_patch(model)
    return reapply(model, below) if below else model


@contextmanager
def patched(
    model: M, method: str | RopeMethod | Mapping[str, Any], factor: float | None = None, **kwargs: Any
) -> Iterator[M]:
    """Patch a model for the length of a `with` block, and restore afterwards whatever it ran before.

        with rope.patched(model, "yarn", factor=4):
            model.generate(...)

    A patch that the model had comes back as well, with what it has remembered and trained, also when the block ends
    with an exception. The arguments and the errors are those of `patch`.
    """
    before, slots = active_patches(model), patched_slots(model)
    patch(model, method, factor, **kwargs)
    try:
        yield model
    finally:
        remove_patch(model)
        if before:
            reapply(model, before, slots)


@contextmanager
def fixed_length(model: M, length: Length) -> Iterator[M]:
    """Hold the frequencies of length-dependent methods at those of an input of `length` tokens, in a `with` block.

        with fixed_length(model, prompt_length + max_new_tokens):
            model.generate(...)

    Every forward inside the block uses these frequencies, however long its input is, also under a patch that is put on
    inside the block. Copies and pickles of the model are not held. Static methods are not affected.

    Raises:
        MethodError: `length` is below 1.
        UnsupportedModelError: the model is not patched, and its own config is length-dependent; patch it first.
    """
    length = check_int("length", parse_length(length))
    slots = patched_slots(model)
    as_loaded = [slot.replaced for slot in slots] or _held_modules(model)
    with held_at(as_loaded, slots, length):
        yield model


def _held_modules(model: nn.Module) -> list[nn.Module]:
    """Return the rotary modules of an unpatched model, in whose places later patches are to be held at a length."""
    rope = ModelRope.of_model(model)
    if rope.own_length_dependent is not None:
        raise UnsupportedModelError(
            f"this model's own {rope.own_length_dependent} follows the length of the input inside transformers, where "
            "it cannot be held at one length; patch it first: rope_ext_hf.patch(model, ...)"
        )
    return [slot.module for slot in rope.slots]


def reset(model: M) -> M:
    """Forget the longest input that a patched model has read under `dynamic-ntk` with `sticky=True`.

    Other methods remember nothing between forwards, so the call changes nothing under them.

    Returns:
        The same model.
    """
    for table in tables_of(patched_slots(model)):
        table.reset()
    return model


def patched_method(model: nn.Module) -> RopeMethod | None:
    """Return the method that `patch` put into a model; None if the model is not patched."""
    patches = active_patches(model)
    return patches[-1].method if patches else None
