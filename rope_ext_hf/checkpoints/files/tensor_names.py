"""The names of tensors in attention modules, taken apart.

    >>> name = TensorName.parse("model.layers.0.self_attn.q_proj.lora_B.default.weight")
    >>> name.prefix, name.layer, name.attention, name.rest
    ('model', 'layers.0', 'self_attn', 'q_proj.lora_B.default.weight')

`rest` is the name of a module inside the attention module ("q_proj"), and of one of its parameters
("lora_B.default.weight"), whose kind `parameter_kind` returns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

_ATTENTION = r"""
    (?:(?P<prefix>.*?)\.)??                            # model; model.language_model; base_model.model.model
    (?:(?P<layer>\w+\.\d+(?:\.norm_attn_norm)?)\.)?    # layers.0; in DBRX blocks.0.norm_attn_norm
    (?P<attention>
        (?:self_attn|self_attention|attention|attn)
        (?:\.\d+)?                                     # self_attn.0, if a layer has several
    )\.
    (?P<rest>.+)                                       # q_proj.weight
    """
_USUAL_NAMES = "self_attn|self_attention|attention|attn"
_OTHER_MODALITIES = re.compile(
    r"""
    (^|\.)(
        vision | visual | audio | speech | image | video        # encoders
        | mm_ | multi_modal | projector | resampler | qformer | perceiver    # what joins them to the language model
        | [va]pm\b | vit\b                                      # encoders of MiniCPM and others
    )
    """,
    re.VERBOSE,
)
"""Parts of a prefix that show that the attention module does not belong to the language model."""
_FURTHER_LAYERS = re.compile(r"(^|\.)(mtp|nextn)")
"""Parts of a name by which a layer predicts further tokens (multi-token prediction)."""

_ParameterKind = Literal["rows", "unrotated", "packed", "unknown"]
_PARAMETERS: tuple[tuple[_ParameterKind, re.Pattern[str]], ...] = (
    (
        "unrotated",
        re.compile(
            r"""
            lora_A(\.\w+)?(\.weight)?                  # its rows are those of the low rank
            | (input|output)_(scale|zero_point)        # of activations
            | (weight|input)_global_scale              # one number for all rows
            | weight_(shape|g_idx|format)              # describe packed weights
            | (q|k|v|kv)_scale                         # of a quantised cache
            | rotary_emb\..*                           # frequencies that old checkpoints saved
            """,
            re.VERBOSE,
        ),
    ),
    (
        "packed",  # several rows share a number
        re.compile(
            r"""
            qweight | qzeros | scales | g_idx                                    # GPTQ, AWQ
            | weight\.(absmax | quant_map | nested\w* | quant_state\..*)         # bitsandbytes
            """,
            re.VERBOSE,
        ),
    ),
    (
        "rows",  # the first dimension is that of the module's output, however the weight is quantised
        re.compile(
            r"""
            (base_layer\.)?(weight|bias)                                         # base_layer: below an adapter
            | lora_B(\.\w+)?(\.(weight|bias))?                                   # \w+: the name of an adapter in PEFT
            | lora_magnitude_vector(\.\w+)?(\.weight)?                           # DoRA
            | weight_scale(_inv)? | weight_zero_point | weight_packed | SCB      # of quantised weights
            """,
            re.VERBOSE,
        ),
    ),
)
"""The kinds of parameters and their names; the first pattern that matches the whole name decides."""


@cache
def _pattern(also: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of names; `also`: other names of attention modules than the usual ones."""
    return re.compile(_ATTENTION.replace(_USUAL_NAMES, "|".join([*map(re.escape, also), _USUAL_NAMES])), re.VERBOSE)


@dataclass(frozen=True)
class TensorName:
    """The name of a tensor in an attention module of a language model, divided into its parts.

    Attributes:
        full: the whole name.
        prefix: the part before the layer; "" if there is none.
        layer: the layer with its number; "" if the attention module is in no numbered layer.
        attention: the attention module.
        rest: the module inside it, and the parameter.
    """

    full: str
    prefix: str
    layer: str
    attention: str
    rest: str

    @classmethod
    def parse(cls, name: str, also: tuple[str, ...] = ()) -> TensorName | None:
        """Divide a name into its parts; None for a tensor outside the attention modules of a language model.

        `also`: names that attention modules of this model have, if they are not usual ones.
        """
        match = _pattern(also).fullmatch(name)
        if match is None or _OTHER_MODALITIES.search(match["prefix"] or ""):
            return None
        return cls(name, match["prefix"] or "", match["layer"] or "", match["attention"], match["rest"])

    @property
    def attention_path(self) -> str:
        """The layer and the attention module: "layers.0.self_attn"."""
        return ".".join(filter(None, (self.layer, self.attention)))

    @property
    def layer_number(self) -> int | None:
        """The number of the layer; None if it has none."""
        match = re.search(r"\.(\d+)", self.layer)
        return None if match is None else int(match[1])

    @property
    def is_named_further(self) -> bool:
        """True if the layer, by its name, is for multi-token prediction (MTP), of tokens after the next one."""
        return _FURTHER_LAYERS.search(f"{self.prefix}.{self.layer}") is not None

    def is_in(self, module: str) -> bool:
        """Return whether the tensor is, or belongs to, this module or parameter inside the attention module."""
        return f"{self.rest}.".startswith(f"{module}.")

    def parameter_of(self, module: str) -> str:
        """Return the name that the tensor has inside this module, such as "weight".

        A parameter that stands in the attention module itself is a weight as well. A norm for several heads numbers its
        parameters: "norms.0.".
        """
        return "weight" if self.rest == module else re.sub(r"norms\.\d+\.", "", self.rest.removeprefix(f"{module}."))


def parameter_kind(parameter: str) -> _ParameterKind:
    """Return the kind of a parameter of a module whose rows rotate.

    Returns:
        "rows": its first dimension is that of the module's output, so that its rows move; "unrotated": its rows have
        nothing to do with heads; "packed": it packs several rows into one number; or "unknown".
    """
    for kind, pattern in _PARAMETERS:
        if pattern.fullmatch(parameter):
            return kind
    return "unknown"


def is_scale(parameter: str) -> bool:
    """Return whether a parameter holds the scales of a quantised weight.

    There may be one scale for all rows, one for each row, or one for each block of rows.
    """
    return parameter in ("weight_scale", "weight_scale_inv")
