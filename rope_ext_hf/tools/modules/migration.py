"""Move an encoder with added positions, learned or sinusoidal, to RoPE: into the RoFormer class of transformers.

    model = BertForMaskedLM.from_pretrained("bert-base-uncased")
    rotating = modules.migrate_to_rope(model, target_length=1024)      # a RoFormerForMaskedLM
    ...                                                             # fine-tune it for some hundred steps
    rotating.save_pretrained("bert-rope")                           # loads with plain transformers

RoFormer (Su et al. 2021, arXiv 2104.09864) is BERT without its added positions and with rotated queries and keys, so
every other weight has a place in it, and patching, extension and conversion work as for any RoPE model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.bounds import Length, parse_length, whole
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.files import package_table
from rope_ext_hf.patches.attention_interface import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEADS = ("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
_MORE_HEADS = {"electra": ("ForSequenceClassification",)}
"""Ends of the names of classes: with these heads RoFormer computes the same as all encoders, and as some."""

_LEFT_BEHIND = re.compile(r"(^|\.)(embeddings\.(position_embeddings\.weight|position_ids|token_type_ids)|pooler\..*)")
_TABLES = package_table("rope_ext_hf.tools.modules", "migration.toml")
_RENAMES: dict[str, dict[str, str]] = _TABLES["renames"]
_SETTINGS: dict[str, list[str]] = _TABLES["settings"]


def migrate_to_rope(model: nn.Module, *, target_length: Length | None = None) -> PreTrainedModel:
    """Give an encoder rotary positions in place of those that it adds to its embeddings.

    The new model has every weight of the old one but its positions, and the pooler of a model without a head. Until it
    is trained again it reads worse than before: its weights have never met rotated queries and keys.

    Args:
        model: a BERT, RoBERTa, CamemBERT, XLM-RoBERTa, ELECTRA or DistilBERT of transformers, without a head or for
            masked language modelling, token classification or question answering (ELECTRA: for sequence classification
            as well). It is not changed.
        target_length: tokens of the longest input that the table of angles is saved for; default: those of `model`.
            `rope_ext_hf.patch` makes it longer.

    Returns:
        A RoFormer model of transformers with the same head, dtype, device and mode. It saves and loads without this
        package.

    Raises:
        MethodError: a `target_length` below 1.
        UnsupportedModelError: another model, a decoder, a head that RoFormer computes otherwise, or an encoder that,
            its positions left out, RoFormer does not compute.
        CheckpointError: weights that are not in memory.
    """
    import transformers

    model_type, head = _family_and_head(model)
    target_length = parse_length(target_length)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(f"the weights of this {type(model).__name__} are not in memory; load the whole model")
    positions = _positions(model)
    rows, padding = positions.num_embeddings, positions.padding_idx
    first = 0 if padding is None else padding + 1  # the first position of RoBERTa
    length = rows - first if target_length is None else whole("target_length", target_length)
    config = transformers.RoFormerConfig(**_settings(model.config), max_position_embeddings=length)
    migrated = getattr(transformers, f"RoFormer{head}")(config)
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    migrated.to(device=like.device, dtype=like.dtype)
    _load(migrated, _renamed(model, _RENAMES[model_type]))
    _check_without_positions(model, positions, migrated)
    rotating: PreTrainedModel = migrated.train(model.training)
    return rotating


def _family_and_head(model: nn.Module) -> tuple[str, str]:
    """The model type of an encoder, and the end of the name of its class."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    name = type(model).__name__
    if model_type not in _RENAMES:
        raise UnsupportedModelError(
            f"{name} is not an encoder that can be migrated to RoPE; model types that can: {', '.join(_RENAMES)}"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"this {name} is a decoder (is_decoder in its config); encoders can be migrated")
    heads = (*_HEADS, *_MORE_HEADS.get(model_type, ()))
    head = name[name.index("For") :] if "For" in name else "Model"
    if head not in heads:
        raise UnsupportedModelError(
            f"RoFormer has no head that computes what {name} does; migrate its encoder, and train a new head: "
            f"migrate_to_rope(model.{getattr(model, 'base_model_prefix', 'base_model')}), or load it into a class with "
            f"one of these: {', '.join(heads)}"
        )
    return model_type, head


def _positions(model: nn.Module) -> nn.Embedding:
    match [module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings")]:
        case [nn.Embedding() as table]:
            return table
    raise UnsupportedModelError(f"{type(model).__name__} adds no table of positions to its embeddings")


def _settings(config: Any) -> dict[str, Any]:
    given = {
        key: [getattr(config, name) for name in names if hasattr(config, name)] for key, names in _SETTINGS.items()
    }
    # DistilBERT has no type_vocab_size; a row of zeros adds nothing.
    return {"type_vocab_size": 1} | {key: each[0] for key, each in given.items() if each and each[0] is not None}


def _renamed(model: nn.Module, renames: dict[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in model.state_dict().items():
        if not _LEFT_BEHIND.search(name):
            for pattern, replacement in renames.items():
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
    return renamed


def _load(migrated: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model, each of whose tensors must get one, or share its memory with one that does."""
    missing, unexpected = migrated.load_state_dict(weights, strict=False)
    own = migrated.state_dict()
    filled = {own[name].data_ptr() for name in weights.keys() & own.keys()}
    for name in [name for name in missing if name.endswith("token_type_embeddings.weight")]:
        own[name].zero_()
        missing.remove(name)
    left = [name for name in missing if own[name].data_ptr() not in filled and "embed_positions" not in name]
    if unexpected or left:
        names = ", ".join(map(repr, [*unexpected, *left][:3]))
        raise UnsupportedModelError(f"these weights are missing in RoFormer, or in this model: {names}")


def _check_without_positions(model: nn.Module, positions: nn.Embedding, migrated: nn.Module) -> None:
    """Check that both models compute the same where neither has positions."""
    tokens = min(8, positions.num_embeddings // 2)
    like = next(migrated.parameters())
    ids = torch.arange(5, 5 + tokens, device=like.device)[None] % migrated.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    table = next(module for name, module in migrated.named_modules() if name.endswith("embed_positions"))
    hooks = [
        positions.register_forward_hook(lambda _, args, rows: torch.zeros_like(rows)),
        table.register_forward_hook(lambda _, args, rows: _no_rotation(rows)),
    ]
    try:
        with evaluating(model), evaluating(migrated), torch.no_grad():
            both = (each(input_ids=ids, attention_mask=torch.ones_like(ids)) for each in (model, migrated))
            expected, computed = (next(iter(outputs.values())).float() for outputs in both)
    finally:
        for hook in hooks:
            hook.remove()
    gap = float((expected - computed).abs().max() / expected.std().clamp(min=1e-30))
    if not gap <= (1e-3 if like.dtype == torch.float32 else 0.2):
        raise UnsupportedModelError(
            f"{type(model).__name__} does more than RoFormer can: with the positions of both left out, their outputs "
            f"differ by {gap:.1e} standard deviations"
        )


def _no_rotation(rows: Tensor) -> Tensor:
    """Rows [sin | cos] of position 0."""
    sin, cos = rows.chunk(2, -1)
    return torch.cat((torch.zeros_like(sin), torch.ones_like(cos)), -1)
