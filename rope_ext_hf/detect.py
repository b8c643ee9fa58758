"""Which pairing a checkpoint's weights are in, told from the weights alone; or that they do not tell.

    print(detect_pairing("path/or/hub-id"))

Training makes the rows of W_q and W_k that turn at like frequencies alike: in W_q W_k^T of one head, the entries that
join the two dims of a turning pair have several times the energy (square) of others. But neighbouring frequencies are
alike too, which raises adjacent dims in half-paired weights. So a reading is judged by all entries, not by those of its
pairs alone: it gives every dim a frequency, hence every two dims a likeness, 1 for a pair, and a head's score is how
much better the energies go with the likenesses of the half reading than with those of the interleaved one (correlations
off the diagonal, less the means of rows and columns, so that dims with large weights do not count as alike).

The verdict is the mean score over heads against its standard error, by how much heads differ or, if that is more, by
how much entries in any order would. It takes `SURE` of these and `AGREE` of the layers; else it cannot be told.

Measured on bytes of Python's standard library, models of 1.6 to 1.8 million parameters after 9 minutes of training
(`benchmarks/detection.py`), score and standard error, all said rightly, by a text too; 555 random initialisations of 20
families had at most 3.4 standard errors:

    model                          half paired        interleaved
    bundled (3.8M, 36 minutes)     0.099 +- 0.004    -0.100 +- 0.012
    qwen2, biases                  0.235 +- 0.014    -0.235 +- 0.017
    qwen3, norms of q and k        0.173 +- 0.009    -0.189 +- 0.008
    glm, half of a head rotates    0.132 +- 0.013    -0.129 +- 0.022
    cohere, norms of q and k       0.075 +- 0.010    -0.167 +- 0.011

The energies of pairs alone, half over interleaved, left half-paired qwen3 (log ratio 0.13 +- 0.13) and cohere
(0.01 +- 0.09) undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoint import read_source
from rope_ext_hf.errors import CheckpointError, CorpusError, UnsupportedModelError
from rope_ext_hf.pairing import PAIRINGS
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.layouts import Blocks, Layout, RotatingRows, rotating_rows, runs_pairing, stated_rotary
from rope_ext_hf.patches.patching import fixed_length, geometry, rotation
from rope_ext_hf.patches.slots import patched_slots
from rope_ext_hf.scaling import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LayerScore", "PairingReport", "TextLosses", "detect_pairing", "scores"]

SURE = 4.5  # standard errors; chance alone goes beyond that seven times in a million
AGREE = 0.75  # of the layers; some models have a few without rotation
LAYERS = 8  # looked at, evenly over the depth
REACH = (256, 1024, 4096)  # tokens; each alone has the right sign on every model above, and none is best on all
WINDOW, WINDOWS = 256, 8  # tokens of text that are read at a time, and how many times
MARGIN = 0.1  # nats per token: how much better than the other reading, and than knowing nothing, the better one must be

_INPUT_NORMS = ("input_layernorm", "ln_attn", "operator_norm", "ln_1", "norm_1", "attn_norm")
_LATENT = {"q_b_proj": ("q_a_proj", "q_a_layernorm")}  # queries that are made from a latent, and what makes that
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")


@dataclass(frozen=True)
class LayerScore:
    """What one layer says.

    Attributes:
        name: of its attention module.
        heads: of its queries.
        half, interleaved: how the energies go with the likenesses of either reading, correlations, means over heads.
    """

    name: str
    heads: int
    half: float
    interleaved: float


@dataclass(frozen=True)
class TextLosses:
    """What a text says: nats per token under either reading.

    Attributes:
        error: standard error of their difference, over windows.
        tokens: that were predicted.
        pairing: the one that is clearly better; None where neither is, or the model knows nothing of such text.
    """

    half: float
    interleaved: float
    error: float
    tokens: int
    pairing: str | None


@dataclass(frozen=True)
class PairingReport:
    """What `detect_pairing` found.

    Attributes:
        pairing: "half", "interleaved", or None: cannot tell.
        confidence: that the difference between the readings is no chance.
        score: mean over heads, half less interleaved.
        error: its standard error.
        layers: those that were looked at.
        stated: the pairing that the config or the family says.
        reason: why it cannot be told.
        text: what the text said, if one was given.
    """

    path: str
    pairing: str | None
    confidence: float
    score: float
    error: float
    layers: tuple[LayerScore, ...]
    stated: str | None
    reason: str | None = None
    text: TextLosses | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        sure = "above 0.9999" if self.confidence > 0.9999 else f"{self.confidence:.4f}"
        lines = [f"{self.path}: " + (f"{self.pairing}, confidence {sure}" if self.pairing else "cannot tell")]
        if self.reason:
            lines.append(f"  because          {self.reason}")
        if self.pairing and self.stated and self.stated != self.pairing:
            lines.append(f"  contradiction    by its config or family it is {self.stated}")
        if self.layers:
            lines.append(
                f"  score            {self.score:+.3f} +- {self.error:.3f} (half above, interleaved below zero)"
            )
            width = max(len(layer.name) for layer in self.layers)
            lines += [
                f"  {layer.name:{width}}  half {layer.half:+.3f}  interleaved {layer.interleaved:+.3f}"
                for layer in self.layers
            ]
        if self.text:
            text = self.text
            lines.append(
                f"  loss on text     half {text.half:.3f}, interleaved {text.interleaved:.3f} nats per token, "
                f"difference +- {text.error:.3f}, {text.tokens:,} tokens: {text.pairing or 'cannot tell'}"
            )
        return "\n".join(lines)


def detect_pairing(
    path_or_model: str | Path | nn.Module,
    *,
    text: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PairingReport:
    """Say from its weights which pairing a model is in; "cannot tell" (None) where they do not clearly say.

    Args:
        path_or_model: a folder or Hub id (safetensors or .bin, read a tensor at a time; Meta's format too), or a loaded
            model, patched or under PEFT or not.
        text: a few thousand tokens of what the model was trained on: the losses under both readings are compared as
            well. A folder's model is loaded for that; a loaded one has its weights reordered meanwhile and put back,
            bit for bit, with any adapter it has.
        tokenizer: for the text; default: the one beside the weights.

    Raises:
        CheckpointError: a folder that is missing or contradicts itself; a text for weights in Meta's format, or of a
            family that transformers has no class of.
        CorpusError: a text that is too short, or no tokenizer to read it with.
        UnsupportedModelError: a family that the table of what rotates says nothing of.

    Weights that are packed, or an adapter by itself, do not tell; nor does a model that has learned next to nothing.
    """
    if isinstance(path_or_model, nn.Module):
        weights = _of_model(path_or_model)
    else:
        weights = _of_folder(path_or_model, revision, trust_remote_code)
    report = _by_weights(weights)
    if text is None:
        return report
    return _with_text(report, _by_text(weights, text, tokenizer))


def scores(query: Tensor, key: Tensor, inv_freq: Tensor) -> Tensor:
    """How each head's energies go with the likenesses of its dims under either reading.

    Args:
        query: (heads, dims, width), rows that rotate.
        key: (key heads, dims, width); each is of as many query heads, in order.
        inv_freq: (dims / 2,).

    Returns:
        (heads, 2): correlations with the half and with the interleaved reading, over all entries off the diagonal.
    """
    shared = len(query) // len(key)
    grouped = query.reshape(len(key), shared * query.shape[1], -1)
    energy = (grouped @ key.mT).view(*query.shape[:2], -1).square()
    found = _centred(energy).flatten(1)
    return nn.functional.normalize(found, dim=1) @ _expected(inv_freq).to(found).T


def _expected(inv_freq: Tensor) -> Tensor:
    """How alike two dims are under the half and the interleaved reading, (2, dims * dims), each of length 1.

    Two frequencies are as alike as their turns stay together where attention falls off as e^(-distance / reach).
    """
    of_dims = torch.stack([torch.cat([inv_freq, inv_freq]), inv_freq.repeat_interleave(2)])
    apart = of_dims[:, :, None] - of_dims[:, None]
    alike = torch.stack([1 / (1 + (apart * reach).square()) for reach in REACH]).sum(0)
    return nn.functional.normalize(_centred(alike).flatten(1), dim=1)


def _chance(inv_freq: Tensor) -> float:
    """The standard deviation of one head's score if its entries stood in any order."""
    half, interleaved = _expected(inv_freq)
    return float((half - interleaved).norm()) / math.sqrt(max(1, len(half) - 2 * len(inv_freq)))


def _centred(table: Tensor) -> Tensor:
    """(..., n, n) without its diagonal and without what its rows and columns have as a whole."""
    diagonal = torch.eye(table.shape[-1], dtype=torch.bool, device=table.device)
    for _ in range(4):  # without the diagonal, taking out rows brings a little back into columns
        for dim in (-1, -2):
            table = table.masked_fill(diagonal, 0.0)
            table = table - table.sum(dim, keepdim=True) / (table.shape[-1] - 1)
    return table.masked_fill(diagonal, 0.0)


def _by_weights(weights: _Weights) -> PairingReport:
    names = weights.attentions()
    chosen = [names[i] for i in _evenly(len(names), LAYERS)]
    inv_freq = weights.rotary.inv_freq()
    layers: list[LayerScore] = []
    heads: list[Tensor] = []
    report = PairingReport(weights.path, None, 0.0, 0.0, 0.0, (), weights.stated)
    try:
        if not names:
            raise CheckpointError(f"no tensor rotates by the names of {weights.rows.model_type!r}")
        for name in chosen:
            found = scores(*weights.queries_and_keys(name), inv_freq).cpu().double()
            half, interleaved = found.mean(0).tolist()
            layers.append(LayerScore(name, len(found), half, interleaved))
            heads.append(found[:, 0] - found[:, 1])
    except CheckpointError as unread:
        return replace(report, reason=str(unread))
    every = torch.cat(heads)
    spread = float(every.std()) if len(every) > 1 else 0.0
    score, error = float(every.mean()), max(spread, _chance(inv_freq)) / math.sqrt(len(every))
    report = replace(report, score=score, error=error, layers=tuple(layers), confidence=_confidence(score, error))
    agree = sum((layer.half - layer.interleaved) * score > 0 for layer in layers)
    if abs(score) < SURE * error or not error:
        return replace(report, reason="chance could make such a difference between the readings")
    if agree < AGREE * len(layers):
        return replace(report, reason=f"{len(layers) - agree} of {len(layers)} layers say the contrary of the others")
    return replace(report, pairing="half" if score > 0 else "interleaved")


def _evenly(count: int, most: int) -> list[int]:
    """At most so many of 0..count - 1, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _confidence(difference: float, error: float) -> float:
    """That so large a difference, either way, is no chance; errors are taken to be normal."""
    return math.erf(abs(difference) / error / math.sqrt(2)) if error else 0.0


# --- what a text says ----------------------------------------------------------------------------------------------


def _with_text(report: PairingReport, text: TextLosses) -> PairingReport:
    """The verdict of both; each may leave it to the other, and where they contradict each other there is none."""
    report = replace(report, text=text)
    if text.pairing is None or text.pairing == report.pairing:
        return report
    if report.pairing is None:
        certainty = _confidence(text.half - text.interleaved, text.error)
        return replace(report, pairing=text.pairing, confidence=certainty, reason=None)
    return replace(
        report, pairing=None, confidence=0.0, reason=f"the weights say {report.pairing}, the text says {text.pairing}"
    )


def _by_text(weights: _Weights, text: str, tokenizer: PreTrainedTokenizerBase | None) -> TextLosses:
    from rope_ext_hf.eval.perplexity import own_tokenizer, prefix_token

    model = weights.load()
    runs = runs_pairing(model.config)
    if runs is None:
        raise UnsupportedModelError(f"which pairing {weights.rows.model_type!r} runs is not in the family table")
    try:
        tokenizer = tokenizer or own_tokenizer(model, needed=True)
    except (OSError, ValueError) as missing:
        raise CorpusError(f"no tokenizer for the text beside {weights.path!r}; give one (tokenizer=...)") from missing
    assert tokenizer is not None  # it was needed
    enough = text[: 20 * WINDOW * WINDOWS]  # no need to take a whole book apart
    ids = tokenizer(enough, add_special_tokens=False, return_tensors="pt").input_ids[0]
    length = min(WINDOW, weights.rotary.trained_length)
    windows = ids[: len(ids) // length * length].view(-1, length)[:WINDOWS]
    if len(windows) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least {2 * length} are needed")
    first = prefix_token(tokenizer, None, "matched")
    if first is not None:
        windows = torch.cat([windows.new_full((len(windows), 1), first), windows], 1)
    with _evaluating(model), torch.no_grad():
        losses = {runs: _losses(model, windows)}
        with _reordered(model, weights.rows, runs):
            losses[_other(runs)] = _losses(model, windows)
    half, interleaved = float(losses["half"].mean()), float(losses["interleaved"].mean())
    apart = losses["half"] - losses["interleaved"]
    error = float(apart.std()) / math.sqrt(len(apart))
    clear = abs(half - interleaved) >= max(MARGIN, SURE * error)
    learned = min(half, interleaved) <= math.log(model.get_input_embeddings().weight.shape[0]) - MARGIN
    better = "half" if half < interleaved else "interleaved"
    return TextLosses(half, interleaved, error, windows[:, 1:].numel(), better if clear and learned else None)


def _losses(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """(windows, length) -> (windows,) float64: nats per token, of all but the first token."""
    device = model.get_input_embeddings().weight.device
    held = fixed_length(model, windows.shape[1]) if patched_slots(model) else nullcontext()
    with held:
        logits = (model(input_ids=window[None].to(device), use_cache=False).logits[0, :-1] for window in windows)
        pairs = zip(logits, windows, strict=True)
        found = [nn.functional.cross_entropy(made.float(), ids[1:].to(made.device)) for made, ids in pairs]
    return torch.stack([loss.cpu().double() for loss in found])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _reordered(model: nn.Module, rows: RotatingRows, runs: str) -> Iterator[None]:
    """With weights as if they had been in the pairing that the model does not run, and were mended."""
    moving = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layout = rows.find(name, tensor.shape)
        if layout is not None:
            if tensor.is_meta or hasattr(tensor, "quant_state"):
                raise CheckpointError(
                    f"{name!r} is packed or offloaded; its rows cannot be moved to try them on a text"
                )
            moving.append((tensor, layout))
    moved: list[tuple[Tensor, Layout | Blocks]] = []
    try:
        for tensor, layout in moving:
            moved.append((tensor, layout))
            tensor.copy_(layout.repaired(tensor.detach(), runs))
        yield
    finally:
        for tensor, layout in moved:
            tensor.copy_(layout.repaired(tensor.detach(), _other(runs)))


def _other(pairing: str) -> str:
    return next(name for name in PAIRINGS if name != pairing)


# --- where the weights come from -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """Tensors by name, wherever they come from.

    Attributes:
        path: what the report calls them.
        rows: what rotates.
        rotary: the geometry of that.
        norms: a module of each kind of norm, by the last part of its name, for what it does with its weight.
        shapes: of all tensors.
        read: one of them.
        stated: the pairing that the config or the family says.
        load: the model itself.
    """

    path: str
    rows: RotatingRows
    rotary: Rotary
    norms: dict[str, nn.Module]
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str], Tensor]
    stated: str | None
    load: Callable[[], PreTrainedModel]

    def attentions(self) -> list[str]:
        """The names of the modules that hold queries and keys, in order."""
        found = dict.fromkeys(self._attention(name) for name in self.shapes)
        return sorted((name for name in found if name is not None), key=_by_number)

    def _attention(self, name: str) -> str | None:
        parts = self.rows.parts(name)
        return None if parts is None else ".".join(filter(None, parts[:2]))

    def queries_and_keys(self, attention: str) -> tuple[Tensor, Tensor]:
        """The rows of one layer that rotate: (heads, dims, width) and (key heads, dims, width), float32.

        With the norms before and behind the projections in them, so that W_q W_k^T is what the scores are made with.
        Where queries are made from a latent, what makes that is in the keys.

        Raises:
            CheckpointError: packed, missing or not finite.
        """
        sides: dict[str, Tensor] = {}
        gains: dict[str, Tensor] = {}
        latent: tuple[str, str] | None = None
        for module, layout in self.rows.layouts.items():
            weight = self._weight(f"{attention}.{module}")
            if weight is None:
                continue
            a_norm = weight.numel() == layout.rows
            if a_norm:
                weight = self._gain(module, weight).reshape(layout.rows, 1)
            else:
                latent = _LATENT.get(module, latent)
            for side, part in _rotating(weight, layout):
                (gains if a_norm else sides)[side] = part
        if not {"q", "k"} <= set(sides):
            raise CheckpointError(f"{attention!r} has no weights that can be read: packed, or those of an adapter")
        query, key = (sides[side] * gains.get(side, 1.0) for side in ("q", "k"))
        for name in _INPUT_NORMS:
            weight = self._weight(f"{attention.rpartition('.')[0]}.{name}")
            if weight is not None:
                key = key * self._gain(name, weight).square()
        if latent is not None:
            down, norm = (self._needed(f"{attention}.{name}") for name in latent)
            key = key @ down.mT * self._gain(latent[1], norm)
        if not (query.isfinite().all() and key.isfinite().all()):
            raise CheckpointError(f"{attention!r} has weights that are not finite")
        return query, key

    def _weight(self, module: str) -> Tensor | None:
        """Of a module, float32: also where an adapter wraps it, or where it is a number of few bits times a scale."""
        path = next((p for p in (module, f"{module}.base_layer") if f"{p}.weight" in self.shapes), None)
        if path is None:
            return None
        weight = self.read(f"{path}.weight")
        scale = next((self.read(name) for s in _SCALES if (name := f"{path}.{s}") in self.shapes), None)
        if weight.is_meta:
            raise CheckpointError(f"'{path}.weight' is offloaded to disk; give the folder instead of the model")
        if not weight.is_floating_point() and (weight.dtype != torch.int8 or scale is None):
            raise CheckpointError(f"'{path}.weight' is packed into {weight.dtype}")
        self.rows.find(f"{path}.weight", weight.shape)  # whether config and weights agree
        return weight.float() if scale is None else _scaled(weight.float(), scale.float())

    def _needed(self, module: str) -> Tensor:
        weight = self._weight(module)
        if weight is None:
            raise CheckpointError(f"'{module}.weight' is missing")
        return weight

    def _gain(self, name: str, weight: Tensor) -> Tensor:
        """What a norm with this weight multiplies each dim by, in some families (Gemma) 1 + the weight."""
        norm = self.norms.get(name)
        if norm is None:
            return weight
        signs = 1.0 - 2.0 * (torch.arange(weight.numel(), device=weight.device) % 2).view(weight.shape)
        parameters = {key: torch.zeros(p.shape, device=weight.device) for key, p in norm.named_parameters()}
        gain: Tensor = torch.func.functional_call(norm, parameters | {"weight": weight}, (signs,)) * signs
        return gain


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """By one scale, one for each row, or one for each block of rows and columns."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    scale = scale.reshape(len(scale), -1)
    for dim, size in enumerate(weight.shape):
        if scale.shape[dim] > 1:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scale


def _rotating(weight: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Whose heads rotate, and the rows of them that do: (heads, dims, width)."""
    groups = weight.view(layout.groups, -1, weight.shape[1])
    at = 0
    for piece in layout.pieces:
        part = groups.narrow(1, at, piece.count * piece.size)
        at += part.shape[1]
        if piece.rotary:
            heads = part.reshape(layout.groups * piece.count, piece.size, -1)
            yield piece.side, heads.narrow(1, piece.start, piece.rotary)


def _of_model(model: Any) -> _Weights:
    rotary = rotation(model)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return _Weights(
        path=model.name_or_path or type(model).__name__,
        rows=rotating_rows(model.config, rotary.dim),
        rotary=rotary,
        norms=_norms(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
        stated=getattr(model.config, PAIRING_KEY, None) or runs_pairing(model.config),
        load=lambda: model,
    )


def _of_folder(path: str | Path, revision: str | None, trust_remote_code: bool) -> _Weights:
    from transformers import AutoModelForCausalLM

    from rope_ext_hf.meta import is_meta

    folder = Path(path).expanduser()
    if folder.is_dir() and is_meta(folder):
        return _of_meta(folder)
    found = read_source(path, revision=revision, trust_remote_code=trust_remote_code)
    files = {name: file for file in found.files.values() for name in file.tensors}
    model_type = found.rows.model_type
    with_own_code = family(model_type).own_code is not None

    def load() -> PreTrainedModel:
        if with_own_code:
            raise CheckpointError(f"transformers has no class of {model_type!r} to run on a text; give no text")
        settings = {"config": found.config, "dtype": "auto", "trust_remote_code": trust_remote_code}
        return AutoModelForCausalLM.from_pretrained(found.folder, **settings)

    twin = None if with_own_code else _twin(found.config, trust_remote_code)
    rotary = stated_rotary(found.config) if twin is None else rotation(twin)
    assert rotary is not None  # the table has it for every family with code of its own
    return _Weights(
        path=str(path),
        rows=found.rows,
        rotary=rotary,
        norms={} if twin is None else _norms(twin),
        shapes={name: file.tensors[name].shape for name, file in files.items()},
        read=lambda name: files[name].read(name),
        stated=found.pairing,
        load=load,
    )


def _of_meta(folder: Path) -> _Weights:
    from rope_ext_hf.meta import read_meta

    source = read_meta(folder)
    weights = {weight.hf: weight for weight in source.weights()}
    config = source.llama.config("interleaved", torch.float32, None)

    def load() -> PreTrainedModel:
        raise CheckpointError("weights in Meta's format cannot be run here: convert them first, or give no text")

    twin = _twin(config, False)
    rotary = geometry(twin)
    return _Weights(
        path=str(folder),
        rows=rotating_rows(config, rotary.dim),
        rotary=rotary,
        norms=_norms(twin),
        shapes={name: weight.shape for name, weight in weights.items()},
        read=lambda name: source.read(weights[name]),
        stated="interleaved",
        load=load,
    )


def _twin(config: Any, trust_remote_code: bool) -> nn.Module:
    """The model of a config without any numbers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config.get_text_config(), trust_remote_code=trust_remote_code
        )
    return model


def _norms(model: nn.Module) -> dict[str, nn.Module]:
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    return {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}
