"""`RotaryEmbedding`, the module that takes the place of a rotary module in a model.

    rope = RotaryEmbedding("yarn", Rotary(dim=128, theta=10000.0, trained_length=4096), factor=8)
    cos, sin = rope(x, position_ids)          # (batch, length, 128) each, in x's dtype

Angles are computed in fixed point: a frequency is an integer number of 2^-64 cycles per position, and position x
frequency in wrapping 64-bit arithmetic is the angle modulo one cycle, exact to 2^-41 cycles at position 2^24. A float32
product would be off by 3e-2 rad at a position of a million, and by 160 rad at 131 thousand once `model.to(bfloat16)`
has rounded the frequencies. No such cast reaches integers, and they need no float64, which some devices lack. Graphs
that are traced or exported for other programs have tables instead, see `rotary.exported`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary, constant, may_keep_tensors
from rope_ext_hf.methods.registry import method_from_dict, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.exported import is_exporting, outside_trace, rotation_at
from rope_ext_hf.rotary.forward_state import ForwardState, state_of_table
from rope_ext_hf.rotary.phase import fixed_point, phase_at, phase_to_radians
from rope_ext_hf.rotary.row_lengths import lengths_over_axes, row_lengths

__all__ = ["Layout", "RotaryEmbedding", "arrange"]

Layout = Literal["half", "interleaved", "bare", "complex"]
"""The arrangement of cos and sin that a model reads.

- "half": (..., dim); columns i and i + dim/2 are equal, those of the pair i.
- "interleaved": (..., dim); columns 2i and 2i + 1 are equal, those of the pair i.
- "bare": (..., dim/2), each angle once.
- "complex": cos + i sin in one complex64 tensor, (..., dim/2).
"""


def arrange(cos: Tensor, sin: Tensor, layout: Layout, dtype: torch.dtype | None) -> tuple[Tensor, Tensor] | Tensor:
    """Return cos and sin in the arrangement that a model reads, see `Layout`.

    Args:
        cos, sin: (batch, length, pairs) float32.
        layout: the arrangement.
        dtype: that of the result; None: float32. The complex layout is complex64 in any case.
    """
    if layout == "complex":
        return torch.complex(cos, sin)
    if dtype is not None:
        cos, sin = cos.to(dtype), sin.to(dtype)
    if layout == "half":
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if layout == "interleaved":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return cos, sin


class RotaryEmbedding(nn.Module):
    """cos and sin of any frequency method, with the call signature of transformers' rotary modules.

    Args:
        method: a name of `rope_ext_hf.list_methods()`, a method object, or the rope settings of a config.
        rotary: the geometry it works on.
        layout: the arrangement of cos and sin, see `Layout`.
        cast: return cos and sin in x's dtype; False: in float32 whatever x is (OLMo).
        axis_of_pair: for multimodal RoPE (Qwen2-VL, arXiv 2409.12191, sec. 2.1), the axis of the positions that each of
            the dim // 2 pairs is rotated by, such as 0 for time, 1 for height, 2 for width; None: there is one axis.
        **params: the method's parameters, when it is given by name.

    cos and sin depend on the positions of the call alone. Under a length-dependent method a row's length is its largest
    position + 1, unless `at_length` fixes it. The errors of cos and sin are below 1e-6 before the cast at every
    position below 2^24, whatever dtype the module or model is moved to.

    Attributes:
        longest_seen: the longest input met, in tokens, an int64 tensor; under a method with sticky growth only.
        trained: the trainable parameter of the method, (dim // 2,) float32 in every dtype of the model; under a method
            that has one (`learnable`) only. Gradients reach it through cos and sin; angles are then products in float64
            (float32 on MPS, where they lose accuracy as positions grow), not in fixed point. `present_method` gives the
            method with its present values.
        frequency: the frequency of each pair in 2^-64 cycles per position, (dim // 2,) int64. It is not a buffer, so
            that casts and averages of the model do not change it.
        attention_factor: the factor of cos and sin at the fixed length, else at the context length.
        fixed_length: the length in tokens inside `at_length`; None: outside.

    Raises:
        MethodError: a remapping method or a score bias, which cos and sin cannot carry out, or a layout or axes that
            do not exist.
    """

    beside_attention: ClassVar[bool] = False
    """Whether a remapping method is allowed, because an attention function carries out the rest of it."""

    frequency: Tensor
    axes: Tensor
    longest_seen: Tensor
    attention_factor: float
    fixed_length: int | None

    def __init__(
        self,
        method: str | RopeMethod | Mapping[str, Any],
        rotary: Rotary,
        *,
        layout: Layout = "half",
        cast: bool = True,
        axis_of_pair: Sequence[int] | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        _check_arrangement(rotary, layout, axis_of_pair)
        self.method = resolve_method(method, rotary, **params)
        if isinstance(self.method, RemappingMethod) and not self.beside_attention:
            raise MethodError(
                f"{self.method.name} changes what attention does with queries and keys, and a rotary module gives cos "
                "and sin alone, which would be those of the unpatched model. Give a frequency method, such as yarn; "
                f"rope_ext_hf.patch(model, {self.method.name!r}) puts {self.method.name} into a model of transformers"
            )
        self.rotary = rotary
        self.layout = layout
        self.cast = cast
        self.axis_of_pair = None if axis_of_pair is None else tuple(axis_of_pair)
        self.identity = object()  # the replicas of nn.DataParallel share it, and copies do not
        self.check_outside: Callable[[], None] | None = None  # called in a forward that no `ForwardState` belongs to
        self._holds: dict[object, int] = {}  # the lengths of the `at_length` blocks under way, the outermost first
        self._fixed_by: int | None = None  # the thread inside `at_length`

        # `_integers` holds the frequencies for good, and `frequency` is their copy on a device, see `_place`. That copy
        # is not a buffer: an average of models with their buffers (SWA, EMA) would round its integers as floating-point
        # numbers, and `to_empty` would leave it without values.
        self._integers: tuple[int, ...] = ()
        self._device = torch.device("cpu")
        if self.method.sticky_length:
            # Nor is this a buffer: before each forward DistributedDataParallel sets the buffers of all processes to
            # those of the first one, which has read other inputs.
            self.longest_seen = _no_tokens()
        self._compute_frequencies(None)
        if self.method.trainable:
            self.trained = nn.Parameter(self._initial_values())

    def _initial_values(self) -> Tensor:
        """Return the values that the trainable parameter has before training, (dim // 2,) float32 on the CPU."""
        parameter: tuple[float, ...] = getattr(self.method, self.method.trainable)
        return torch.tensor(parameter or (0.0,) * (self.rotary.dim // 2), dtype=torch.float32, device="cpu")

    @property
    def present_method(self) -> RopeMethod:
        """The method as it is now: if it has a trainable parameter, with the present values of that parameter."""
        if not self.method.trainable or self.trained.device.type == "meta":
            return self.method
        values = tuple(self.trained.tolist())
        if values == tuple(self._initial_values().tolist()):
            return self.method
        return method_from_dict(self.method.to_dict() | {self.method.trainable: values})

    @property
    def length_dependent(self) -> bool:
        """True if the frequencies depend on how long the input of each call is; False inside `at_length`."""
        return self.fixed_length is None and self.method.depends_on_length(self.rotary)

    def frequencies(self, length: int | None = None) -> Frequencies:
        """Return the frequencies and the attention factor for an input of `length` tokens.

        Without a length, they are those at the fixed length inside `at_length`, and at the context length elsewhere.
        """
        return self.present_method.frequencies(self.rotary, self.fixed_length if length is None else length)

    @contextmanager
    def at_length(self, length: int) -> Iterator[None]:
        """Use the frequencies for an input of `length` tokens in every forward inside the with block, in every thread.

        A copy or pickle of the module that is made inside the block has no fixed length, because it may outlive it.

        Raises:
            LengthError: another thread is inside `at_length` of this module.
        """
        if self._fixed_by not in (None, threading.get_ident()):
            raise LengthError(
                f"another thread holds this model at a fixed length of {self.fixed_length} tokens, and it cannot be "
                f"held at {length} as well. Enter fixed_length once, around all threads that run the model"
            )
        hold = object()
        self._holds[hold] = length
        self._compute_frequencies(length)
        self._fixed_by = threading.get_ident()
        try:
            yield
        finally:  # blocks of generators may end before those inside of them
            del self._holds[hold]
            self._compute_frequencies(next(reversed(self._holds.values()), None))
            if not self._holds:
                self._fixed_by = None

    def continue_from(self, earlier: RotaryEmbedding) -> None:
        """Take over what an earlier module of the same method has remembered and trained.

        The parameter `trained` is the same object afterwards, so that an optimizer goes on with it.
        """
        if self.method.sticky_length:
            self.longest_seen = earlier.longest_seen.to(self.longest_seen.device)
        if self.method.trainable:
            earlier.trained.data = earlier.trained.data.to(self.trained.device)
            self.trained = earlier.trained

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle of the module, without the fixed length of a block that it was made inside of."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._holds, self._fixed_by = {}, None
        if self.fixed_length is not None:
            self._compute_frequencies(None)

    def reset(self) -> None:
        """Forget the longest input met so far.

        Only methods with sticky growth, whose frequencies stay those of the longest input, remember it.
        """
        if self.method.sticky_length:
            self.longest_seen.zero_()

    def _compute_frequencies(self, length: int | None) -> None:
        """Compute the frequencies for an input of `length` tokens, and use them from now on.

        None: no length is fixed. Static methods then have the frequencies at the context length.
        """
        inv_freq, self.attention_factor = self._frequencies_at(length)
        self._integers = tuple(fixed_point(inv_freq).tolist())
        self.fixed_length = length
        self._place(self._device)

    def _frequencies_at(self, length: int | None) -> Frequencies:
        """Return the frequencies and the attention factor for a length; a subclass may change the method's own."""
        return self.method.frequencies(self.rotary, length)

    def _multiply(self, inv_freq: Tensor) -> Tensor:
        """Return the inverse frequencies that are used; a subclass multiplies those of the method by something."""
        return inv_freq

    def _place(self, device: torch.device) -> None:
        """Put the integer tables on a device; on the meta device they have no values, like all tensors there."""
        if self.method.sticky_length and self.longest_seen.device != device:
            seen = _no_tokens() if self.longest_seen.device.type == "meta" else self.longest_seen
            self.longest_seen = seen.to(device)
        self._device = device
        self.frequency = constant(self._integers, device, torch.int64)
        if self.axis_of_pair is not None:
            self.axes = constant(self.axis_of_pair, device, torch.int64)

    def _follow(self, device: torch.device) -> None:
        """Put the integer tables on the device of a forward, if nothing else has moved them there (accelerate)."""
        if self._device != device and device.type != "meta" and may_keep_tensors():
            self._place(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move the module to another device, but keep the values and the dtype of `trained`.

        `fn` may be a cast, which would round them, or `to_empty`, which would leave them without values.
        """
        trained = None
        if self.method.trainable:
            on_meta = self.trained.device.type == "meta"
            trained = self._initial_values() if on_meta else self.trained.detach().clone()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if trained is not None and self.trained.device.type != "meta":
            self.trained.data = trained.to(self.trained.device)
        self._place(fn(torch.empty(0, dtype=torch.int64, device=self._device)).device)
        return self

    def phase_per_position(self, lengths: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the fixed-point frequencies and the attention factors for inputs of these lengths.

        Args:
            lengths: (rows,) integers in tokens; where a row holds several inputs, (rows, tokens).

        Returns:
            Frequencies, int64 (rows, 1 or tokens, dim // 2), and attention factors, float32 (rows, 1 or tokens, 1) or
            one number.
        """
        device = lengths.device
        attention_factor: Tensor | float
        wide = lengths.cpu() if device.type == "mps" else lengths  # no float64 there
        inv_freq, attention_factor = self.method.at_lengths(self.rotary, wide.to(torch.float64))
        frequency = fixed_point(self._multiply(inv_freq)).to(device)
        if isinstance(attention_factor, Tensor):
            attention_factor = attention_factor.to(device, torch.float32)
        if lengths.ndim > 1:
            return frequency, attention_factor
        if isinstance(attention_factor, Tensor):
            attention_factor = attention_factor.unsqueeze(-2)
        return frequency.unsqueeze(-2), attention_factor

    def resolve_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths whose frequencies are used for rows with these lengths.

        They are the lengths of the rows themselves. Under a method with sticky growth, they are the longest length met
        so far, these included.
        """
        if not self.method.sticky_length:
            return lengths
        if lengths.device.type == "meta":  # a tensor without values: nothing to remember
            return lengths.amax().expand_as(lengths)
        self.longest_seen.copy_(torch.maximum(lengths.amax().to(self.longest_seen.device), self.longest_seen))
        # Copied, because a cache keeps these lengths while later forwards write to the buffer.
        return self.longest_seen.to(lengths.device, copy=True).expand_as(lengths)

    def of_rows(self, x: Tensor, position_ids: Tensor, lengths: Callable[[], Tensor]) -> Any:
        """Return cos and sin, as `forward` does, for rows whose length does not follow from their positions alone.

        `lengths` returns the lengths of the rows, (rows,) integers in tokens; it is called only under a
        length-dependent method.
        """
        if not self.length_dependent:
            return self(x, position_ids)
        self.check_exportable()
        with ForwardState(tables=(self,), row_lengths=self.resolve_lengths(lengths())):
            return self(x, position_ids)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Return cos and sin of the angles at the positions of one call.

        Args:
            x: any tensor with the dtype and the device of the result.
            position_ids: (batch, length); with `axis_of_pair` also (axes, batch, length), or (1, batch, length) for the
                same positions on every axis. Numbers of a floating-point dtype need not be whole (Qwen3-Omni places the
                frames of a video between tokens).

        Returns:
            cos and sin, each (batch, length, dim), or (batch, length, dim // 2) in the layout "bare"; one complex64
            tensor (batch, length, dim // 2) in the layout "complex".

        Raises:
            LengthError: positions of fewer axes than the model has; or a length-dependent method, and positions of
                something else than the tokens of the input, or a forward that is traced or exported.
            UnsupportedModelError: frequencies that follow from weights, in a forward that torch.export exports.
        """
        self._follow(x.device)
        position_ids = position_ids.to(x.device)
        if self.axis_of_pair is not None and position_ids.ndim > 2 and len(position_ids) == 1:
            position_ids = position_ids[0]
        # The position that each pair is rotated by, (batch, length, dim // 2); the last size is 1 for one axis.
        positions = position_ids[..., None]
        if self.axis_of_pair is not None and position_ids.ndim > 2:
            _check_axes(position_ids, 1 + max(self.axis_of_pair))
            positions = position_ids.index_select(0, self.axes.to(position_ids.device)).movedim(0, -1)
        if is_exporting():
            return self._exported(x, positions)
        attention_factor: Tensor | float = self.attention_factor
        if self.method.trainable:
            angle = self._trainable_angle(positions)
        else:
            frequency, attention_factor = self._frequency_of_call(position_ids, x.device)
            if frequency.ndim > 2 and frequency.shape[-2] not in (1, positions.shape[-2]):
                raise LengthError(
                    f"this model rotates at {positions.shape[-2]} positions beside the {frequency.shape[-2]} tokens of "
                    f"its input (compressed keys, a canvas), and {self.method.name} has frequencies for each token; "
                    "use a static method, or hold one length with rope_ext_hf.fixed_length(model, length)"
                )
            angle = phase_to_radians(phase_at(positions, frequency))
        cos, sin = angle.cos().to(torch.float32), angle.sin().to(torch.float32)
        if isinstance(attention_factor, Tensor) or attention_factor != 1.0:
            cos, sin = cos * attention_factor, sin * attention_factor
        return arrange(cos, sin, self.layout, x.dtype if self.cast else None)

    def _exported(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Return what `forward` returns for these positions, in operations that other runtimes carry out exactly."""
        self.check_exportable()
        cos, sin = rotation_at(positions, self._fixed_frequency())
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return arrange(cos, sin, self.layout, x.dtype if self.cast else None)

    def check_exportable(self) -> None:
        """Check that this forward is not traced or exported under a length-dependent method; else raise LengthError."""
        if is_exporting() and self.length_dependent:
            raise LengthError(
                f"{self.method.name} computes its frequencies from the length of each input, in 64-bit numbers that "
                "the program which runs a traced or exported model may not have. Hold one length around the export, "
                "`with rope_ext_hf.fixed_length(model, length):`, or patch a static method, such as yarn"
            )

    @property
    def _reads_weights(self) -> bool:
        """True if the frequencies follow from weights, which may change between calls."""
        return bool(self.method.trainable)

    def _fixed_frequency(self) -> tuple[int, ...]:
        """Return the frequencies in fixed point, as numbers, for a forward that is traced or exported.

        Raises:
            UnsupportedModelError: they follow from weights, and torch.export does not show the values of weights.
        """
        if not self._reads_weights:
            return self._integers
        if torch.compiler.is_exporting():
            raise UnsupportedModelError(
                "the frequencies of this model follow from weights, whose values torch.export does not show. Save the "
                "model, load the folder with transformers alone, and export that model; or use torch.jit.trace"
            )
        with outside_trace():
            return tuple(fixed_point(self._multiply(self.frequencies().inv_freq)).tolist())

    def _trainable_angle(self, positions: Tensor) -> Tensor:
        """Return the angles of all pairs at these positions, in radians, for a method with a trainable parameter.

        Gradients reach the parameter `trained` through them.
        """
        wide = torch.float32 if positions.device.type == "mps" else torch.float64
        values = self.trained.to(positions.device, wide)
        return positions.to(wide) * self.method.trained_inv_freq(self.rotary, values)

    def _frequency_of_call(self, position_ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor | float]:
        """Return the fixed-point frequencies and the attention factor that one call uses.

        The frequencies are (dim // 2,), or have such a vector for each row or token. Under a length-dependent method
        they come from the state of the forward under way, if there is one, and else from the lengths that follow from
        the positions.
        """
        if not self.length_dependent:
            return self.frequency.to(device), self.attention_factor
        state = state_of_table(self)
        if state is not None and state.frequency is not None:
            return state.frequency.to(device), state.attention_factor
        if state is not None and state.row_lengths is not None:
            return self.phase_per_position(state.row_lengths.to(device))
        if state is None and self.check_outside is not None:
            self.check_outside()
        lengths = row_lengths(position_ids) if position_ids.ndim == 2 else lengths_over_axes(position_ids)
        return self.phase_per_position(self.resolve_lengths(lengths))

    def extra_repr(self) -> str:
        parameters = ", ".join(f"{key}={value}" for key, value in self.method.to_dict().items() if key != "method")
        return f"{self.method.name}({parameters}), {self.rotary}, layout={self.layout!r}"


def _check_arrangement(rotary: Rotary, layout: str, axis_of_pair: Sequence[int] | None) -> None:
    if layout not in get_args(Layout):
        raise MethodError(f"layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")
    if axis_of_pair is not None and (len(axis_of_pair) != rotary.dim // 2 or min(axis_of_pair, default=0) < 0):
        raise MethodError(
            f"axis_of_pair must have the index of an axis, 0 or larger, for each of {rotary.dim // 2} pairs, got "
            f"{list(axis_of_pair)}"
        )


def _check_axes(position_ids: Tensor, axes: int) -> None:
    if len(position_ids) < axes:
        raise LengthError(
            f"position_ids of shape {tuple(position_ids.shape)} have {len(position_ids)} axes, and this model rotates "
            f"by {axes}: give positions of shape ({axes}, rows, tokens), or (rows, tokens) for the same on every axis"
        )


def _no_tokens() -> Tensor:
    """Return the length 0 as an int64 tensor on the CPU.

    It is an ordinary tensor even in inference mode, so that it may be written to later.
    """
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64, device="cpu")


@contextmanager
def override_angles(tables: Sequence[RotaryEmbedding], radians: Tensor, attention_factor: float) -> Iterator[None]:
    """Make length-dependent rotary modules rotate by other angles inside the with block, in this thread.

    Args:
        tables: the rotary modules.
        radians: the angle of each pair per position, (dim // 2,).
        attention_factor: the factor of cos and sin.
    """
    frequency = fixed_point(radians.double())
    with ForwardState(tables=tuple(tables), frequency=frequency, attention_factor=attention_factor):
        yield
