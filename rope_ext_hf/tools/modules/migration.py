"""Migration to RoPE for encoders that add learned or sinusoidal positions to their embeddings.

    model = BertForMaskedLM.from_pretrained("bert-base-uncased")
    migrated = modules.migrate_to_rope(model, target_length=1024)      # a RoFormerForMaskedLM
    ...                                                                # fine-tune it for some hundred steps
    migrated.save_pretrained("bert-rope")                              # loads with stock transformers

RoFormer (Su et al. 2021, arXiv 2104.09864) of transformers is BERT without added positions and with rotated queries and
keys. So every other weight has a place in it, and patching and conversion work as for any RoPE model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.bounds import Length, check_int, parse_length
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.files.whole import package_table
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.models.temporary import trying

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEADS = ("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
"""Ends of class names: heads that RoFormer computes as all of the encoders do."""
_FURTHER_HEADS = {"electra": ("ForSequenceClassification",)}
"""Heads that RoFormer computes as some of the encoders do, by model type."""

_LEFT_BEHIND = re.compile(r"(^|\.)(embeddings\.(position_embeddings\.weight|position_ids|token_type_ids)|pooler\..*)")
_TABLES = package_table("rope_ext_hf.tools.modules", "migration.toml")
_RENAMES: dict[str, dict[str, str]] = _TABLES["renames"]
_SETTINGS: dict[str, list[str]] = _TABLES["settings"]


def migrate_to_rope(model: nn.Module, *, target_length: Length | None = None) -> PreTrainedModel:
    """Return a RoFormer with the weights of an encoder, and rotary positions in place of the added positions.

    The new model has all weights of the encoder except its positions and, without a head, its pooler. Until it is
    fine-tuned it performs worse than before, because its weights were not trained with rotated queries and keys.

    Args:
        model: a BERT, RoBERTa, CamemBERT, XLM-RoBERTa, ELECTRA or DistilBERT of transformers, without a head or for
            masked language modelling, token classification or question answering (ELECTRA: also for sequence
            classification). It is not changed.
        target_length: the longest input that the new config states, in tokens; default: that of `model`.
            `rope_ext_hf.patch` extends it.

    Returns:
        A RoFormer model of transformers with the same head, dtype, device and mode. It saves and loads without this
        package.

    Raises:
        MethodError: `target_length` is below 1.
        UnsupportedModelError: the model is of another type, is a decoder, has a head that RoFormer computes otherwise,
            or computes something else than RoFormer even without positions.
        CheckpointError: the weights are not in memory.
    """
    import transformers

    model_type, head = _family_and_head(model)
    target_length = parse_length(target_length)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(f"the weights of this {type(model).__name__} are not in memory; load the whole model")
    positions = _positions(model)
    rows, padding = positions.num_embeddings, positions.padding_idx
    first = 0 if padding is None else padding + 1  # the first position of RoBERTa
    length = rows - first if target_length is None else check_int("target_length", target_length)
    config = transformers.RoFormerConfig(**_settings(model.config), max_position_embeddings=length)
    migrated = getattr(transformers, f"RoFormer{head}")(config)
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    migrated.to(device=like.device, dtype=like.dtype)
    _load(migrated, _renamed(model, _RENAMES[model_type]))
    _check_without_positions(model, positions, migrated)
    in_same_mode: PreTrainedModel = migrated.train(model.training)
    return in_same_mode


def _family_and_head(model: nn.Module) -> tuple[str, str]:
    """Return the model type of an encoder, and its head as the end of its class name; raise for any other model."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    name = type(model).__name__
    if model_type not in _RENAMES:
        raise UnsupportedModelError(
            f"{name} is not an encoder that can be migrated to RoPE; model types that can: {', '.join(_RENAMES)}"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"this {name} is a decoder (is_decoder in its config); encoders can be migrated")
    heads = (*_HEADS, *_FURTHER_HEADS.get(model_type, ()))
    head = name[name.index("For") :] if "For" in name else "Model"
    if head not in heads:
        raise UnsupportedModelError(
            f"RoFormer has no head that computes what {name} does; migrate its encoder, and train a new head: "
            f"migrate_to_rope(model.{getattr(model, 'base_model_prefix', 'base_model')}), or load it into a class with "
            f"one of these: {', '.join(heads)}"
        )
    return model_type, head


def _positions(model: nn.Module) -> nn.Embedding:
    """Return the table of positions that a model adds to its embeddings."""
    match [module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings")]:
        case [nn.Embedding() as table]:
            return table
    raise UnsupportedModelError(
        f"{type(model).__name__} has no table of absolute positions (embeddings.position_embeddings), which RoPE would "
        "replace, so it cannot be migrated"
    )


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings of RoFormer that follow from the config of an encoder."""
    settings: dict[str, Any] = {"type_vocab_size": 1}  # DistilBERT has none; one row of zeros adds nothing
    for key, names in _SETTINGS.items():
        values = [getattr(config, name) for name in names if hasattr(config, name)]
        if values and values[0] is not None:
            settings[key] = values[0]
    return settings


def _renamed(model: nn.Module, renames: dict[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a model by the names that RoFormer gives them, without those that it does not have."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        if not _LEFT_BEHIND.search(name):
            for pattern, replacement in renames.items():
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
    return renamed


def _load(migrated: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model; raise an error if a weight has no tensor there, or a tensor gets no weight.

    A tensor that shares its memory with one that gets a weight needs none of its own.
    """
    missing, unexpected = migrated.load_state_dict(weights, strict=False)
    tensors = migrated.state_dict()
    filled = {tensors[name].data_ptr() for name in weights.keys() & tensors.keys()}
    unfilled = []
    for name in missing:
        if name.endswith("token_type_embeddings.weight"):
            tensors[name].zero_()  # the encoder has no token types
        elif tensors[name].data_ptr() not in filled and "embed_positions" not in name:
            unfilled.append(name)
    if unexpected or unfilled:
        names = ", ".join(map(repr, [*unexpected, *unfilled][:3]))
        raise UnsupportedModelError(f"these weights exist only in this model, or only in RoFormer: {names}")


def _check_without_positions(model: nn.Module, positions: nn.Embedding, migrated: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the models differ in their outputs even with positions switched off in both."""
    tokens = min(8, positions.num_embeddings // 2)
    like = next(migrated.parameters())
    ids = torch.arange(5, 5 + tokens, device=like.device)[None] % vocabulary_size(migrated)
    table = next(module for name, module in migrated.named_modules() if name.endswith("embed_positions"))
    hooks = [
        positions.register_forward_hook(lambda _, args, rows: torch.zeros_like(rows)),
        table.register_forward_hook(lambda _, args, rows: _no_rotation(rows)),
    ]
    try:
        with trying(model), trying(migrated), torch.no_grad():
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            expected = next(iter(model(**inputs).values())).float()
            computed = next(iter(migrated(**inputs).values())).float()
    finally:
        for hook in hooks:
            hook.remove()
    gap = float((expected - computed).abs().max() / expected.std().clamp(min=1e-30))
    if not gap <= (1e-3 if like.dtype == torch.float32 else 0.2):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something that RoFormer does not: even without positions, their outputs "
            f"differ by {gap:.1e} standard deviations"
        )


def _no_rotation(rows: Tensor) -> Tensor:
    """Return rows [sin | cos] as for position 0, which rotate nothing, in the shape of `rows`."""
    sin, cos = rows.chunk(2, -1)
    return torch.cat((torch.zeros_like(sin), torch.ones_like(cos)), -1)
