"""Models in GGUF files: where the file is, which RoPE it states, and how a model from it can be saved.

`GGUFFile` is the plug-in by which the library loads a model from a GGUF file, instead of a folder.

transformers rebuilds a config from the keys of a GGUF file, but not the scaling of the rotary embedding, and neither
theta nor the number of rotated dims for every architecture. `_file_config` adds them, and `check_rotation` compares the
model with the file, because the model would otherwise run with another RoPE than the one it was trained with.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.bounds import NO_ROTATION
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError, short
from rope_ext_hf.files.model_files import ModelFile, loaded_from
from rope_ext_hf.files.whole import foreign_errors, resolve_inside
from rope_ext_hf.hub import fingerprint
from rope_ext_hf.models.family_settings import check_stated
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.tools.gguf.headers import FileRope, read_file_rope
from rope_ext_hf.tools.gguf.importing import GGUFImport

if TYPE_CHECKING:
    from rope_ext_hf.checkpoints.report import ConversionReport
    from rope_ext_hf.patches.saved.fingerprint import Fingerprint

_GGUF_FILE = "gguf_file"
"""The argument of transformers' from_pretrained for the name of a GGUF file."""
_LOCATION = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
_DEFAULT_THETA = 10_000.0  # of llama.cpp, where a file states none
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of all published Llama 3.1 to 3.3 beside the factor; llama.cpp's converter keeps only the divisors."""
_TOLERANCE = 1e-4  # relative; files hold float32
_TRANSLATED = {
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
}
"""The keys of a scaling that `_scaling` reads."""


class GGUFFile(ModelFile):
    """A model in a GGUF file; `rope_ext_hf.files.model_files.ModelFile` says what each method is for."""

    title = "GGUF file"

    def __init__(self, path: Path) -> None:
        self.name = path  # as the user wrote it, for messages
        self.path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100  # links keep their names

    @classmethod
    def find(cls, path: str | Path, name: Any, arguments: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        if name is None:
            cls(Path(path)).check_exists()
            file = cls(Path(path)).path
        elif not isinstance(name, (str, Path)) or not str(name):
            raise CheckpointError(f"gguf_file must be the name of a file, got {short(repr(name))}")
        else:
            file = _file_in(path, str(name), arguments)
        return file, {key: value for key, value in arguments.items() if key not in _LOCATION}

    @property
    def way_out(self) -> str:
        return way_out(self.name)

    def check_exists(self) -> None:
        if not os.path.isfile(self.path):  # noqa: PTH113  # a path that is too long does not exist
            raise CheckpointError(
                f"no such GGUF file: {short(str(self.name))!r}; one on the Hub is downloaded first: `hf download "
                "OWNER/NAME FILE.gguf` prints its path"
            )

    def config(self) -> Any:
        """Return the config of the model, after a comparison of its RoPE with the one that the file states."""
        config, rope = _file_config(self.path)
        with suppress(UnsupportedModelError):  # a model without rotary modules
            check_rotation(fingerprint(empty_model(config)), rope, self.path)
        return config

    def loading_arguments(self) -> dict[str, Any]:
        return {**_dequantizing(), _GGUF_FILE: str(self.path)}

    def tokenizer_arguments(self) -> dict[str, Any]:
        _file_config(self.path)  # an error for a damaged file, which others might read on and on
        return {_GGUF_FILE: str(self.path)}

    def convert(
        self,
        dst: Path,
        to: str,
        *,
        dequantize: str | None,
        source_pairing: str | None,
        force: bool,
        resume: bool,
        verify: bool,
        progress: Callable[[int, int], None] | None,
    ) -> ConversionReport:
        if source_pairing is not None or force:
            raise CheckpointError(
                f"{str(self.name)!r} is a GGUF file, whose rows transformers puts into the order that its class "
                "rotates; leave out the source pairing (--from) and force (--force)"
            )
        if dequantize is None:
            line = command_line("convert", self.name, dst, to="hf", dequantize="bfloat16")
            raise CheckpointError(
                f"{short(str(self.name))!r} is a GGUF file, whose weights are unpacked in a folder of safetensors, and "
                f"take several times the space; to do so: `{line}` (float32 is exact, and takes twice the space)"
            )
        conversion = GGUFImport(self.name.expanduser(), dst, to, dequantize=dequantize)
        return conversion.run(resume=resume, verify=verify, progress=progress)

    @classmethod
    def name_way_out(cls, model: Any) -> None:
        """Make `save_pretrained` of a model whose weights are still packed say how to keep the model.

        transformers asks the object that holds the settings of the quantisation, which belongs to this model alone,
        whether the model can be saved. Models that were loaded with `loading_arguments` are ordinary models.
        """
        if not isinstance(getattr(model.hf_quantizer.quantization_config, _GGUF_FILE, None), str):
            return
        file = loaded_from(model)

        def is_serializable(*_: Any, **__: Any) -> bool:
            raise CheckpointError(
                "this model still belongs to its GGUF file and cannot be saved. Load it with "
                f"rope_ext_hf.from_pretrained({str(file)!r}), which unpacks its weights, and save that; or: "
                f"{way_out(Path(file))}"
            )

        model.hf_quantizer.is_serializable = is_serializable

    @classmethod
    def loading_note(cls, model: Any, files: list[Path]) -> str | None:
        """Return a sentence on a scaling that may be missing.

        From a GGUF file transformers reads rope.freq_base, but a scaling only for gpt-oss (integrations/ggml.py,
        modeling_gguf_pytorch_utils.py).
        """
        if model.config.model_type == "gpt_oss":
            return None
        names = ", ".join(file.name for file in files)
        return (
            f"This model was loaded from a GGUF file ({names}), and transformers drops a linear or yarn scaling of "
            "such a file. `rope-ext audit FILE.gguf` shows whether it has one; if so, load the model from a "
            "config.json."
        )


def is_gguf(path: str | Path) -> bool:
    """Return whether a path has the suffix of a GGUF file, and no folder has this name."""
    return str(path).lower().endswith(".gguf") and not os.path.isdir(path)  # noqa: PTH112


def _file_in(path: str | Path, name: str, arguments: Mapping[str, Any]) -> Path:
    """Return the absolute path of a GGUF file in a folder, or in a Hub repository after downloading it."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        inner = folder / (arguments.get("subfolder") or "")
        absolute = Path(name)
        if absolute.is_absolute() and absolute.parent == Path(os.path.abspath(inner)):  # noqa: PTH100
            name = absolute.name
        return Path(os.path.abspath(resolve_inside(inner, name)))  # noqa: PTH100
    from transformers.utils import cached_file

    with foreign_errors(f"the GGUF file {short(name)!r} of {short(str(path))!r} could not be found"):
        where = {key: arguments[key] for key in _LOCATION if arguments.get(key)}
        return Path(os.path.abspath(str(cached_file(str(path), name, **where))))  # noqa: PTH100


def _dequantizing() -> dict[str, Any]:
    """Return the argument of from_pretrained by which the weights of a GGUF file become ordinary tensors.

    Without it transformers would fetch kernels from the Hub where the package `kernels` is installed, and keep the
    weights packed. Older versions of transformers always unpack them, and have no such argument.
    """
    import transformers

    settings = getattr(transformers, "GgufConfig", None)
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _file_config(file: Path) -> tuple[Any, FileRope]:
    """Return the config of the model in a GGUF file, with the RoPE that the file states, and that RoPE itself.

    Raises:
        CheckpointError: the file is damaged or one of several parts, transformers does not know its architecture, or
            no rope type of transformers is what it states.
    """
    from transformers import AutoConfig

    failure = f"the GGUF file {short(str(file))!r} could not be loaded by transformers"
    GGUFFile(file).check_exists()
    status = file.stat()
    values, rope = _header(str(file), status.st_size, status.st_mtime_ns)
    with foreign_errors(failure):
        values = copy.deepcopy(values)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        _add_rope(config, rope, file)
    return config, rope


@functools.lru_cache(maxsize=4)
def _header(path: str, size: int, changed: int) -> tuple[dict[str, Any], FileRope]:
    """Return the values of the config that transformers makes from a GGUF file, and the RoPE that the file states.

    Reading the vocabulary in the header takes seconds, and a command needs the config several times. `size` and
    `changed` (the time of the last change) tell a file from an earlier one of the same name.
    """
    from transformers.configuration_utils import PreTrainedConfig

    file = Path(path)
    rope = read_file_rope(file)
    if rope.parts > 1:
        raise CheckpointError(
            f"{short(str(file))!r} is one of {rope.parts} files of a split GGUF model, which transformers cannot load; "
            "join them with llama.cpp (`llama-gguf-split --merge FIRST.gguf WHOLE.gguf`), and give the whole file"
        )
    with foreign_errors(f"the GGUF file {short(str(file))!r} could not be loaded by transformers"):
        values, _ = PreTrainedConfig.get_config_dict(file.parent, gguf_file=str(file))
        check_stated(values)
    return {key: value for key, value in values.items() if key != "_model_name_or_path"}, rope


def _add_rope(config: Any, rope: FileRope, file: Path) -> None:
    """Write theta, the share of rotated dims and the scaling of a file into a config made from the same file."""
    text = config.get_text_config()
    settings = getattr(text, "rope_parameters", None)
    if not isinstance(settings, dict):
        return  # the model has no rotary embedding
    scaling = _scaling(rope, file)
    by_layer_type = isinstance(settings.get("full_attention"), dict)  # others are sliding-window layers
    own = settings["full_attention"] if by_layer_type else settings
    own = own | scaling
    if "rope.freq_base" in rope.keys:
        own["rope_theta"] = float(rope.keys["rope.freq_base"])
    if rope.head_dim and rope.dim != rope.head_dim and "partial_rotary_factor" not in own:
        own["partial_rotary_factor"] = rope.dim / rope.head_dim
    text.rope_parameters = settings | {"full_attention": own} if by_layer_type else own


def _scaling(rope: FileRope, file: Path) -> dict[str, Any]:
    """Return the scaling that a file states, as rope settings of transformers; empty if there is none."""
    keys = rope.keys
    kind = keys.get("rope.scaling.type")
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    length = keys.get("context_length")
    original = keys.get("rope.scaling.original_context_length") or length
    unread = {key for key in keys if key.startswith("rope.scaling.")} - _TRANSLATED
    if kind is None and factor != 1.0:
        kind = "linear"  # as llama.cpp takes it
    if kind in (None, "none", "linear", "yarn", "longrope") and not unread:
        magnitude = keys.get("rope.scaling.attn_factor")
        if rope.tensors:
            if kind in (None, "none"):
                return _from_divisors(rope, length)
            if kind == "longrope" and {*rope.tensors} == {"rope_factors_long.weight", "rope_factors_short.weight"}:
                return {
                    "rope_type": "longrope",
                    "long_factor": [*rope.tensors["rope_factors_long.weight"]],
                    "short_factor": [*rope.tensors["rope_factors_short.weight"]],
                    "original_max_position_embeddings": original,
                    **({} if magnitude is None else {"attention_factor": float(magnitude)}),
                }
        elif kind == "linear" and magnitude in (None, 1.0):
            return {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            settings = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            if magnitude is not None:  # llama.cpp multiplies YaRN's own by it
                settings["attention_factor"] = float(magnitude) * (1 + 0.1 * math.log(factor))
            return settings
        elif kind in (None, "none"):
            return {}
    stated = ", ".join(
        [f"{key} {short(str(keys[key]), 20)}" for key in sorted(keys) if "scal" in key] + [*rope.tensors]
    )
    raise CheckpointError(
        f"{short(str(file))!r} states a scaling of RoPE that no rope type of transformers is known to compute "
        f"({stated}), so the model would run without it; give the folder that the file was made from"
    )


def _from_divisors(rope: FileRope, length: Any) -> dict[str, Any]:
    """Return rope settings whose frequencies are those of a file with divisors: llama3's, or lists of a longrope."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = next(iter(rope.tensors.values()))
    if len(rope.tensors) > 1 or 2 * len(divisors) != rope.dim:
        raise CheckpointError(f"the file has {len(divisors)} divisors of frequencies for {rope.dim // 2} rotated pairs")
    llama3 = {"rope_type": "llama3", "factor": round(max(divisors), 4), **_LLAMA3}
    theta = float(rope.keys.get("rope.freq_base", _DEFAULT_THETA))
    config = LlamaConfig(
        head_dim=rope.dim, max_position_embeddings=length or 8192, rope_parameters=llama3 | {"rope_theta": theta}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if _close(scaled.tolist(), _frequencies(theta, rope.dim, divisors)):
        return llama3
    lists = {"long_factor": [*divisors], "short_factor": [*divisors]}
    return {"rope_type": "longrope", **lists, "original_max_position_embeddings": length, "attention_factor": 1.0}


def _frequencies(theta: float, dim: int, divisors: tuple[float, ...]) -> list[float]:
    """Return theta^(-2i/dim) over the divisor of each pair i, and 0 for a pair that the divisor stops."""
    return [
        theta ** (-2 * pair / dim) / divisor if divisor < NO_ROTATION else 0.0 for pair, divisor in enumerate(divisors)
    ]


def _without_zeros(inv_freq: Iterable[float]) -> list[float]:
    return [value for value in inv_freq if value]


def _close(values: list[float], others: list[float]) -> bool:
    return len(values) == len(others) and all(
        abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(values, others, strict=True)
    )


def check_rotation(rotation: Fingerprint, rope: FileRope, file: Path) -> None:
    """Compare the rotation of a model with the one that its GGUF file states.

    YaRN and LongRoPE are compared by theta and the number of rotated dims, everything else by all frequencies.

    Raises:
        CheckpointError: they differ.
    """
    theta = float(rope.keys.get("rope.freq_base", _DEFAULT_THETA))
    divisors: tuple[float, ...] = (1.0,) * (rope.dim // 2)
    kind = rope.keys.get("rope.scaling.type")
    if kind not in ("yarn", "longrope"):
        factor = float(rope.keys.get("rope.scaling.factor") or rope.keys.get("rope.scale_linear") or 1.0)
        divisors = next(iter(rope.tensors.values()), divisors)
        divisors = tuple(divisor * (1.0 if kind == "none" else factor) for divisor in divisors)
    for layer in rotation.layers.values():
        rotated = _without_zeros(layer.inv_freq)  # the rest of a head may be kept as pairs that do not rotate
        if kind in ("yarn", "longrope"):
            same = len(rotated) == rope.dim // 2 and _close([layer.theta], [theta])
        else:
            same = _close(rotated, _without_zeros(_frequencies(theta, rope.dim, divisors)))
        if same:
            return
    layers = [f"theta {layer.theta:g}, {2 * len(layer.inv_freq)} dims" for layer in rotation.layers.values()]
    raise CheckpointError(
        f"transformers reads another RoPE from {short(str(file))!r} ({'; '.join(layers)}) than the file states (theta "
        f"{theta:g}, {rope.dim} dims); give the folder that the file was made from"
    )


def way_out(file: Path) -> str:
    """Return sentences with the two commands that keep a model from a GGUF file, with or without a method."""
    rewrite = command_line("gguf", file, "OUT.gguf", method="NAME")
    convert = command_line("convert", file, "FOLDER", to="hf", dequantize="bfloat16")
    return (
        f"`{rewrite}` writes a GGUF file with a method. `{convert}` writes a folder with unpacked weights, which can "
        "be patched and saved like any other"
    )
