"""Translation of a model between Meta's params.json and a Hugging Face config, with the names of its tensors in both.

The models are Llama 1, 2, 3, 3.1 to 3.3 and Code Llama, after Meta's code (github.com/meta-llama: llama,
llama/model.py; llama-models, models/llama3/args.py, models/llama3/model.py, models/checkpoint.py) and transformers'
convert_llama_weights_to_hf.py; and Mistral, whose own format is Meta's with keys for head_dim and hidden_dim
(github.com/mistralai/mistral-inference, args.py, transformer_layers.py). The settings that params.json lacks are
derived from those that it has:

- max_position_embeddings: see `Llama.context_length`.
- The factor of use_scaled_rope: `rope_scaling_factor`, a key of this package that Meta's code ignores. Without it, 32
  if the embeddings are tied (Llama 3.2 1B and 3B), else 8, which Meta's code uses for all of them
  (github.com/meta-llama/llama-models/issues/241).
- rope_theta of a Llama: 500000 with use_scaled_rope, else 1e4, as in the code of each generation.
- rope_theta of a Mistral: 1e6, or 1e4 beside a sliding window, as in mistral-inference.
- The token ids of begin and end: 128000 and 128001 for a Llama with a vocabulary from 128256 on, else 1 and 2. Chat
  models have further end tokens, which neither params.json nor the weights name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CheckpointError, short
from rope_ext_hf.files.whole import package_table, read_json
from rope_ext_hf.models.config import GUESSED_LENGTH_KEY
from rope_ext_hf.models.config_keys import PAIRING_KEY
from rope_ext_hf.rotary.pairing import to_pairing

LLAMA_3_THETA = 500_000.0  # assumed by Meta's Llama 3 code if params.json has no rope_theta
META_DTYPES = ("F64", "F32", "F16", "BF16")

# Keys of params.json and the type of their values; null counts as missing. Any other key is refused, because it may
# change the model.
_PARAMS: dict[str, type] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of"), int),
    **dict.fromkeys(("max_seq_len", "max_batch_size"), int),  # arguments of Meta's code, not in released files
    **dict.fromkeys(("norm_eps", "rope_theta", "ffn_dim_multiplier", "rope_scaling_factor"), float),
    "use_scaled_rope": bool,
    **dict.fromkeys(("head_dim", "hidden_dim", "sliding_window", "max_position_embeddings"), int),  # Mistral's
    **dict.fromkeys(("use_biases", "tied_embeddings", "causal"), bool),
    "yarn": dict,
    "model_type": str,
}
_REQUIRED = ("dim", "n_layers", "n_heads")
_MISTRAL = ("head_dim", "hidden_dim")  # keys that a params.json of Mistral has, and one of Llama does not
_MISTRAL_VALUES = {"use_biases": False, "causal": True, "model_type": "transformer"}
"""Keys of Mistral's params.json, and the only value that transformers' Mistral can have."""
_YARN = {"factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings"} | {
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
"""The keys of `yarn` in Mistral's params.json, and those in the rope settings of transformers."""

# Settings that both formats have: their names in `Llama`, in params.json and in a config.
_SHARED_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("dim", "dim", "hidden_size"),
    ("layers", "n_layers", "num_hidden_layers"),
    ("heads", "n_heads", "num_attention_heads"),
    ("kv_heads", "n_kv_heads", "num_key_value_heads"),
    ("vocab", "vocab_size", "vocab_size"),
    ("eps", "norm_eps", "rms_norm_eps"),
)

# The tensors of a layer: Meta's name, Hugging Face's, shape, the dimension that parts divide (None: every part holds a
# full copy), and the number of heads in its rotated rows (None: no row rotates).
_LAYER: tuple[tuple[str, str, tuple[str, ...], int | None, str | None], ...] = (
    ("attention.wq", "self_attn.q_proj", ("q_dim", "dim"), 0, "heads"),
    ("attention.wk", "self_attn.k_proj", ("kv_dim", "dim"), 0, "kv_heads"),
    ("attention.wv", "self_attn.v_proj", ("kv_dim", "dim"), 0, None),
    ("attention.wo", "self_attn.o_proj", ("dim", "q_dim"), 1, None),
    ("feed_forward.w1", "mlp.gate_proj", ("ffn", "dim"), 0, None),
    ("feed_forward.w2", "mlp.down_proj", ("dim", "ffn"), 1, None),
    ("feed_forward.w3", "mlp.up_proj", ("ffn", "dim"), 0, None),
    ("attention_norm", "input_layernorm", ("dim",), None, None),
    ("ffn_norm", "post_attention_layernorm", ("dim",), None, None),
)
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
FREQUENCIES = "rope.freqs"  # Llama 1 and 2 saved their inverse frequencies, which follow from rope_theta

# Config keys that Meta's code has no setting for, and the one value that it works with.
_REQUIRED_VALUES: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("quantization_config", None),
)
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# multiple_of and ffn_dim_multiplier of published models: 1 and 2; 3.2 1B; 2 and 3 70B; 3.1 405B; 3 8B.
_FFN: tuple[tuple[int, float | None], ...] = ((256, None), (256, 1.5), (4096, 1.3), (4096, 1.2), (1024, 1.3))


@dataclass(frozen=True)
class Weight:
    """One tensor of a model, as Meta's format and Hugging Face's format store it.

    Attributes:
        meta: its name in Meta's format.
        hf: its name in Hugging Face's format.
        shape: the shape of the whole tensor.
        split: the dimension that model-parallel parts divide; None: every part holds a full copy.
        heads: the number of heads in its rotated rows; None: no row rotates.
    """

    meta: str
    hf: str
    shape: tuple[int, ...]
    split: int | None
    heads: int | None

    def part_shape(self, parts: int) -> tuple[int, ...]:
        """Return the shape that this tensor has in each of `parts` model-parallel parts."""
        return tuple(size // parts if dim == self.split else size for dim, size in enumerate(self.shape))

    def part(self, tensor: Tensor, index: int, parts: int) -> Tensor:
        """Return the part with this index, if the whole tensor is divided into `parts` model-parallel parts."""
        return tensor if self.split is None else tensor.chunk(parts, self.split)[index]

    def to_pairing(self, tensor: Tensor, now: str, to: str) -> Tensor:
        """Return the whole tensor in the pairing `to`, from the pairing `now`; it stays as it is if no row rotates."""
        return to_pairing(tensor, to, heads=self.heads) if self.heads and now != to else tensor


class _Generation(NamedTuple):
    """A generation of Llama or Mistral models, with the values that are built into its code."""

    name: str
    length: int  # the trained length, in tokens
    split: int  # the dimension of the embeddings that its code divides among model-parallel parts


class _ContextLength(NamedTuple):
    """The context length of a model, and where it comes from."""

    tokens: int
    note: str  # a sentence that says where it comes from; "" if the caller gave it
    guessed: bool  # it is neither stated nor that of a released model of these sizes


class _Release(NamedTuple):
    """A released Llama model, with the settings in its params.json that identify it."""

    name: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    theta: float
    scaled: bool
    length: int  # the trained length, in tokens
    eps: float | None = None  # None: the other sizes identify it


_RELEASES = [_Release(**row) for row in package_table("rope_ext_hf.checkpoints.meta", "llama_releases.toml")["release"]]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A Llama or Mistral model, described by the settings that Meta's and Hugging Face's formats share.

    Attributes:
        dim: the hidden size.
        layers, heads, kv_heads, vocab: numbers of layers, query heads and key heads, and the size of the vocabulary.
        ffn: the width of the feed-forward layers.
        eps: the epsilon of the norms.
        theta: the base of the rotary embedding.
        factor: the factor of Llama 3.1's scaling; None: it is not scaled.
        tied: the output weights are the embeddings.
        mistral: it is a Mistral. Only a Mistral can have the settings below.
        own_head_dim: dims of a head; None: the hidden size divided by the heads.
        sliding_window: the sliding window in tokens; None: every layer attends to everything.
        yarn: the rope settings of transformers with YaRN; empty: no YaRN.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    eps: float
    theta: float
    factor: float | None
    tied: bool
    mistral: bool = False
    own_head_dim: int | None = None
    sliding_window: int | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """The number of dims in a head."""
        return self.own_head_dim or self.dim // self.heads

    @property
    def q_dim(self) -> int:
        """The number of dims in all query heads together."""
        return self.head_dim * self.heads

    @property
    def kv_dim(self) -> int:
        """The number of dims in all key heads together."""
        return self.head_dim * self.kv_heads

    @property
    def generation(self) -> _Generation:
        """The generation of models that this one belongs to, known by its scaling, else theta, else norm epsilon."""
        if self.mistral:
            return _Generation("Mistral 7B", 32_768, 0)
        if self.factor is not None:
            return _Generation("Llama 3.1", 131_072, 0)
        if self.theta == 1e6:
            return _Generation("Code Llama", 16_384, 1)
        if self.theta != 1e4:
            return _Generation("Llama 3", 8_192, 0)
        return _Generation("Llama 2", 4_096, 1) if self.eps == 1e-5 else _Generation("Llama 1", 2_048, 1)

    @property
    def release(self) -> _Release | None:
        """The released Llama of the same sizes, theta and scaling; None: there is none."""
        if self.mistral:
            return None
        sizes = (self.dim, self.layers, self.heads, self.kv_heads, self.theta, self.factor is not None)
        for release in _RELEASES:
            known = (release.dim, release.layers, release.heads, release.kv_heads, release.theta, release.scaled)
            if known == sizes and release.eps in (None, self.eps):
                return release
        return None

    def context_length(self, chosen: int | None = None, stated: int | None = None) -> _ContextLength:
        """Return the context length of the model, and where it comes from.

        It is the length that the caller chose, else the one in params.json, else that of the released model with these
        sizes, else a guess by the generation of the model.

        Args:
            chosen: the length that the caller chose, in tokens.
            stated: the length in params.json: max_seq_len, or Mistral's max_position_embeddings.
        """
        if chosen is not None:
            return _ContextLength(chosen, "", False)
        if stated is not None:
            key = "max_position_embeddings" if self.mistral else "max_seq_len"
            return _ContextLength(stated, f"the context length of {stated:,} tokens is {key} of params.json", False)
        release = self.release
        if release is not None:
            like = f"that of {release.name}, which has these sizes, theta and scaling"
            note = f"the context length of {release.length:,} tokens is {like}; params.json states none"
            return _ContextLength(release.length, note, False)
        name, length, _ = self.generation
        return _ContextLength(
            length,
            f"the context length of {length:,} tokens is a guess, by the theta, scaling and norm_eps of {name}: "
            "params.json states none, and no released model has these sizes. Factors count from it; if the model was "
            "trained for another length, give context_length (--context-length)",
            True,
        )

    def weights(self, split: int) -> Iterator[Weight]:
        """Yield every tensor of the model, including the output weights even if they are tied to the embeddings.

        `split`: the dimension of the embeddings that is divided among model-parallel parts.
        """
        yield Weight(EMBEDDING, HF_EMBEDDING, (self.vocab, self.dim), split, None)
        for layer in range(self.layers):
            for meta, hf, sizes, dim, heads in _LAYER:
                names = (f"layers.{layer}.{meta}.weight", f"model.layers.{layer}.{hf}.weight")
                shape = tuple(getattr(self, size) for size in sizes)
                yield Weight(*names, shape, dim, getattr(self, heads) if heads else None)
        yield Weight("norm.weight", "model.norm.weight", (self.dim,), None, None)
        yield Weight(OUTPUT, HF_EMBEDDING if self.tied else HF_OUTPUT, (self.vocab, self.dim), 0, None)

    def to_params(self) -> dict[str, Any]:
        """Return the content of params.json for this model, without keys that its generation's code does not accept."""
        multiple_of, multiplier = _ffn_numbers(self.dim, self.ffn)
        scaled = self.factor is not None
        known = {meta: getattr(self, ours) for ours, meta, _ in _SHARED_FIELDS} | {
            "n_kv_heads": self.kv_heads if self.kv_heads != self.heads else None,
            "multiple_of": multiple_of,
            "ffn_dim_multiplier": multiplier,
            # The code of Llama 1 and 2 takes no such key; a note of `MetaExport` says so.
            "rope_theta": self.theta if scaled or self.theta != 1e4 else None,
            "use_scaled_rope": scaled or None,
            "rope_scaling_factor": self.factor if self.factor != _usual_factor(self.tied) else None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def to_config(self, to: str, dtype: torch.dtype, length: _ContextLength) -> Any:
        """Return the Hugging Face config of this model.

        Args:
            to: the pairing of the weights.
            dtype: the dtype of the weights.
            length: the context length; if it is a guess, the config says so.
        """
        from transformers import LlamaConfig, MistralConfig

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta}
        if self.factor is not None:
            rope |= {"rope_type": "llama3", "factor": self.factor} | _SCALING
        rope |= self.yarn
        begin, end = (128_000, 128_001) if self.vocab >= 128_256 and not self.mistral else (1, 2)
        config_class = MistralConfig if self.mistral else LlamaConfig
        return config_class(
            architectures=["MistralForCausalLM" if self.mistral else "LlamaForCausalLM"],
            intermediate_size=self.ffn,
            max_position_embeddings=length.tokens,
            rope_parameters=rope,
            tie_word_embeddings=self.tied,
            bos_token_id=begin,
            eos_token_id=end,
            dtype=str(dtype).removeprefix("torch."),
            **{hf: getattr(self, ours) for ours, _, hf in _SHARED_FIELDS},
            **({"head_dim": self.head_dim, "sliding_window": self.sliding_window} if self.mistral else {}),
            **({GUESSED_LENGTH_KEY: length.tokens} if length.guessed else {}),
            **{PAIRING_KEY: to},
        )

    @classmethod
    def from_params(cls, params: dict[str, Any], vocab: int, ffn: int, tied: bool) -> Llama:
        """Return the model that params.json and the shapes of its weights describe.

        Args:
            params: the settings, as `read_params` returns them.
            vocab: the number of rows in the embeddings.
            ffn: the number of rows in the first feed-forward weight.
            tied: whether the output weights are the embeddings.
        """
        factor = params.get("rope_scaling_factor", _usual_factor(tied)) if params["use_scaled_rope"] else None
        shared = {ours: params[meta] for ours, meta, _ in _SHARED_FIELDS} | {"vocab": vocab}
        own: dict[str, Any] = {"own_head_dim": params.get("head_dim"), "sliding_window": params.get("sliding_window")}
        own |= {"mistral": any(key in params for key in _MISTRAL), "yarn": params.get("yarn", {})}
        return cls(**shared, ffn=ffn, theta=params["rope_theta"], factor=factor, tied=tied, **own)

    @classmethod
    def from_config(cls, config: Any, where: str) -> Llama:
        """Return the model that a Hugging Face config (LlamaConfig) describes.

        Raises:
            CheckpointError: Meta's format cannot express the model; the message begins with `where`.
        """
        if config.model_type != "llama":
            raise CheckpointError(f"{where} it is a {config.model_type!r}, and Meta's code runs only 'llama'")
        rope = config.rope_parameters
        rope_type = rope.get("rope_type", "default")
        rules: list[tuple[str, Any, tuple[Any, ...]]] = [
            *((key, getattr(config, key, value), (value,)) for key, value in _REQUIRED_VALUES),
            ("head_dim", config.head_dim, (config.hidden_size // config.num_attention_heads,)),
            ("rope_type", rope_type, ("default", "llama3")),
            ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
            *((key, rope.get(key), (value,)) for key, value in _SCALING.items() if rope_type == "llama3"),
        ]
        for key, value, allowed in rules:
            if value not in allowed:
                known = " and ".join(map(repr, allowed))
                raise CheckpointError(f"{where} {key} is {value!r}, and Meta's code runs only {known}")
        return cls(
            **{ours: getattr(config, hf) for ours, _, hf in _SHARED_FIELDS},
            ffn=config.intermediate_size,
            theta=float(rope["rope_theta"]),
            factor=float(rope["factor"]) if rope_type == "llama3" else None,
            tied=config.tie_word_embeddings,
        )


def _usual_factor(tied: bool) -> float:
    """Return the factor of Llama 3.1's RoPE scaling for a params.json that turns it on and states no factor.

    It is that of the released models: 32 if the output weights are tied to the embeddings, else 8.
    """
    return 32.0 if tied else 8.0


def _ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the width of the feed-forward layers by the formula in Meta's code (FeedForward in llama3/model.py)."""
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _ffn_numbers(dim: int, ffn: int) -> tuple[int, float | None]:
    """Return the multiple_of and ffn_dim_multiplier that give this feed-forward width in `_ffn_size`.

    They are those of a published model if possible.
    """
    multiple_of = math.gcd(ffn, 256)
    exact = (ffn + 0.5) / int(2 * 4 * dim / 3)  # int() removes the half again, however the product is rounded
    short = ((multiple_of, round(exact, digits)) for digits in range(1, 17))
    return next(pair for pair in (*_FFN, *short, (multiple_of, exact)) if _ffn_size(dim, *pair) == ffn)


def read_params(path: Path) -> dict[str, Any]:
    """Read params.json and check it. Keys that it lacks get the default values of Meta's code.

    Raises:
        CheckpointError: a key or value is unknown, impossible or missing.
    """
    content = read_json(path)
    if isinstance(content.get("model"), dict):  # some releases nest them
        content = content["model"]
    params = {key: value for key, value in content.items() if value is not None}
    where = f"params.json in {str(path.parent)!r}"
    _check_params(params, where)
    dim, heads, scaled = params["dim"], params["n_heads"], params.get("use_scaled_rope", False)
    kv_heads = params.get("n_kv_heads", heads)
    head_dim = params.get("head_dim", dim // heads)
    if ("head_dim" not in params and dim % heads) or head_dim % 2 or heads % kv_heads:
        raise CheckpointError(f"{where}: dim {dim}, n_heads {heads} and n_kv_heads {kv_heads} contradict each other")
    if "rope_scaling_factor" in params and not scaled:
        raise CheckpointError(f"{where} has rope_scaling_factor, but not use_scaled_rope")
    if any(key in params for key in _MISTRAL):
        theta = 1e4 if params.get("sliding_window") else 1e6
    else:
        theta = LLAMA_3_THETA if scaled else 1e4
    if "yarn" in params:
        params["yarn"] = _yarn_settings(params["yarn"], where)
    usual = {"n_kv_heads": heads, "vocab_size": -1, "norm_eps": 1e-5, "rope_theta": theta}
    return usual | {"use_scaled_rope": scaled} | {key: _PARAMS[key](value) for key, value in params.items()}


def _check_params(params: Mapping[str, Any], where: str) -> None:
    """Raise a CheckpointError if a key is unknown or missing, or its value has another type or is impossible."""
    unknown = sorted(set(params) - set(_PARAMS))
    if unknown:
        raise CheckpointError(
            f"{where} has {unknown[0]} = {short(repr(params[unknown[0]]))}, which no text model of Llama 1 to 3.3, nor "
            f"a Mistral without experts, has; known: {', '.join(_PARAMS)}"
        )
    for key, value in params.items():
        kind = _PARAMS[key]
        if key in _MISTRAL_VALUES and value != _MISTRAL_VALUES[key]:
            raise CheckpointError(
                f"{where}: {key} is {value!r}, and transformers' Mistral runs only {_MISTRAL_VALUES[key]!r}"
            )
        if key in ("model_type", "yarn"):
            continue
        if kind is bool:
            if type(value) is not bool:
                raise CheckpointError(f"{where}: {key} is {value!r}, not a bool")
            continue
        is_unknown_size = key == "vocab_size" and value == -1
        if type(value) not in (int, kind) or not (0 < value < 2**63 or is_unknown_size):
            raise CheckpointError(f"{where}: {key} is {value!r}, not a positive number")
    missing = [key for key in _REQUIRED if key not in params]
    if missing:
        raise CheckpointError(f"{where} lacks {missing[0]}")


def _yarn_settings(yarn: Any, where: str) -> dict[str, Any]:
    """Return the rope settings of transformers that correspond to `yarn` in Mistral's params.json."""
    numbers = {key: value for key, value in yarn.items() if key != "apply_scale"} if isinstance(yarn, dict) else None
    known = numbers is not None and {"factor", "original_max_position_embeddings"} <= numbers.keys() <= _YARN.keys()
    if numbers is None or not known or not all(type(value) in (int, float) and value > 0 for value in numbers.values()):
        raise CheckpointError(
            f"{where}: yarn is {short(repr(yarn))}; it must give {', '.join(_YARN)} as numbers above 0"
        )
    settings: dict[str, Any] = {"rope_type": "yarn", **{_YARN[key]: float(value) for key, value in numbers.items()}}
    original = int(settings["original_max_position_embeddings"])
    unscaled = {} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
    return settings | {"original_max_position_embeddings": original} | unscaled
