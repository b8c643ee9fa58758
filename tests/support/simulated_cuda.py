"""A simulated CUDA device for a torch without CUDA.

    with SimulatedCuda() as device:
        model.to("cuda")(ids.to("cuda"))
    device.launches, device.waits, device.to_device, device.to_host

Its tensors say that they are on "cuda:N" and hold real values on the CPU, so that results can be compared. As a real
device does, it refuses operations between devices and whatever a kernel of attention does not take. It counts kernel
launches, waits of the host and copies, and says which line of the project or of transformers they come from.

It has no backward, because the autograd engine asks for streams; no torch.compile; `torch.inference_mode` becomes
`torch.no_grad`, because inference tensors cannot be wrapped. Kernels themselves are not simulated: only what they
demand of their arguments, and what they return.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rope_ext_hf.attention import blockwise, tile_batches, triton_attention
from rope_ext_hf.attention.triton_attention import ZonedAttention
from rope_ext_hf.rotary import key_rotation, rotating_cache
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from tests.support.dispatch import NO_KERNEL
from tests.support.zoned_attention import attend_zoned

FIRST = torch.device("cuda", 0)

WAITING = frozenset(
    (
        *("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"),
        *("_unique2", "unique_consecutive", "unique_dim"),
    )
)
"""Operators that make the host wait for a value or a size on the device."""

TAKES_CPU_INDEX = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))

CALLERS = ("/rope_ext_hf/", "/patches/", "/eval/", "/transformers/", "/accelerate/")
"""Folders whose lines are named as the places of waits and copies."""

MAX_GRID = 65_535
"""Rows and heads that a kernel of attention takes at a time."""


# --- the device guard ------------------------------------------------------------------------------------------------


@functools.cache
def why_unavailable() -> str | None:
    """Why there can be no simulated device here; None: there can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch has a CUDA of its own"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "a simulated CUDA device needs a C++ compiler (g++, or what CXX names)"
    source = Path(__file__).with_suffix(".cpp")
    folder = source.parents[2] / "build" / "simulated-cuda"
    library = folder / f"guard-{torch.__version__}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        installed = Path(torch.__file__).parent
        unfinished = library.with_suffix(f".{os.getpid()}.so")  # processes of one test run may compile at once
        command = [compiler, "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(unfinished)]
        command += [f"-I{installed / 'include'}", f"-L{installed / 'lib'}", "-lc10", f"-Wl,-rpath,{installed / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{compiler} could not compile {source.name}: {done.stderr.strip()[-500:]}"
        unfinished.replace(library)
    ctypes.CDLL(str(library))
    return None


# --- tensors ---------------------------------------------------------------------------------------------------------


class CudaTensor(Tensor):
    """A tensor on a simulated device; `held` is the CPU tensor with its values, of the same strides."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes parameters by the class of the one that they replace
            return nn.Parameter(held, requires_grad)
        made: CudaTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if SimulatedCuda.running is None:
            raise RuntimeError("a tensor of a simulated device is used when the device is gone")
        return SimulatedCuda.running.run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy: Tensor = self.clone()
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]


def _held(x: Any) -> Any:
    return x.held if isinstance(x, CudaTensor) else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for each in x:
            yield from _tensors(each)


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """An argument or a result of an operator with every leaf changed; torch's own tree_map takes five times as long."""
    if isinstance(x, (tuple, list)):
        return type(x)([_mapped(change, each) for each in x])
    return {key: _mapped(change, each) for key, each in x.items()} if isinstance(x, dict) else change(x)


class _FirstDevice(TorchFunctionMode):
    """Read "cuda" as "cuda:0": torch without CUDA cannot ask which device is the current one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "tolist" and isinstance(args[0], CudaTensor):
            assert SimulatedCuda.running is not None
            SimulatedCuda.running.note("waits", "tolist")
            return args[0].held.tolist()
        if name == "cuda":
            return args[0].to(FIRST)
        if name == "scaled_dot_product_attention" and isinstance(args[0], CudaTensor):
            assert SimulatedCuda.running is not None
            return SimulatedCuda.running.attend(*args, **kwargs)
        if name in ("to", "new_tensor"):
            args = tuple(_with_index(arg) for arg in args)
        if "device" in kwargs:
            kwargs["device"] = _with_index(kwargs["device"])
        return func(*args, **kwargs)


def _with_index(device: Any) -> Any:
    return FIRST if isinstance(device, (str, torch.device)) and str(device) == "cuda" else device


# --- the device ------------------------------------------------------------------------------------------------------


class SimulatedCuda(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A simulated device, while inside.

    Args:
        capability: compute capability: (7, 5) Turing, (8, 0) Ampere, (9, 0) Hopper, (12, 0) Blackwell.
        devices: how many of them there are.
        prefers_cudnn: scaled_dot_product_attention takes cuDNN's kernel first, as on H100 with a recent cuDNN.
        triton: there is Triton, so that rotations are one launch.
        zones: with Triton, attention over all zones is one launch, where the package takes that to be faster.
        memory: bytes of all devices together.

    Attributes:
        launches: kernels launched, copies within a device among them.
        waits: times the host waited for a value.
        to_device, to_host, between: copies from the host, to it, and from one device to another.
        operators: launches by operator.
        places: waits and copies by what they were and the line they came from.
        live, peak: bytes allocated now, and most of them at a time.
    """

    running: SimulatedCuda | None = None

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        devices: int = 1,
        prefers_cudnn: bool = False,
        triton: bool = True,
        zones: bool = True,
        memory: int = 80 * 2**30,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capability, self.devices, self.memory = capability, devices, memory
        self.prefers_cudnn, self.triton, self.zones = prefers_cudnn, triton, zones
        self.depth = 0
        self.refuses_waits = self.warns_of_waits = False
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Count anew."""
        self.launches = self.waits = self.to_device = self.to_host = self.between = 0
        self.operators: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.peak = self.live

    # --- what torch.cuda answers

    def __enter__(self) -> Any:
        self.depth += 1
        if self.depth == 1:
            assert SimulatedCuda.running is None, "one simulated device at a time"
            with ExitStack() as undo:
                self._replace_answers(undo)
                SimulatedCuda.running = self
                self.undo = undo.pop_all()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> Any:
        self.depth -= 1
        result = super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if not self.depth:
            SimulatedCuda.running = None
            self.undo.close()
        return result

    def _replace_answers(self, undo: ExitStack) -> None:
        properties = SimpleNamespace(
            name="simulated",
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.memory,
            multi_processor_count=132,
            uuid="00000000-0000-0000-0000-000000000000",
        )
        answers: dict[str, Callable[..., Any]] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: self.capability[0] >= 8,
            "device_count": lambda: self.devices,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: "simulated",
            "get_device_capability": lambda *_: self.capability,
            "get_device_properties": lambda *_: properties,
            "synchronize": lambda *_: self.note("waits", "torch.cuda.synchronize"),
            "memory_allocated": lambda *_: self.live,
            "memory_reserved": lambda *_: self.live,
            "max_memory_allocated": lambda *_: self.peak,
            "max_memory_reserved": lambda *_: self.peak,
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak", self.live),
            "mem_get_info": lambda *_: (self.memory - self.live, self.memory),
            "empty_cache": lambda: None,
            "is_current_stream_capturing": lambda: False,
            "set_sync_debug_mode": self._set_sync_debug_mode,
            "Stream": _Stream,
            "default_stream": _Stream,
            "current_stream": _Stream,
            "stream": lambda _: self._in_this_thread(),
        }
        for name, answer in answers.items():
            _replace(undo, torch.cuda, name, answer)
        if self.triton:
            for module in (key_rotation, rotating_cache, blockwise, tile_batches):
                _replace(undo, module, "can_fuse", lambda x: isinstance(x, CudaTensor) and not x.requires_grad)
            _replace(undo, key_rotation, "rotate_fused", self._rotate_fused)
            _replace(undo, tile_batches, "merge_fused", self._merge_fused)
        if self.triton and self.zones:
            _replace(undo, triton_attention, "can_fuse", lambda x: isinstance(x, CudaTensor) and not x.requires_grad)
            _replace(undo, blockwise, "attend_fused", self._attend_fused)
        _replace(undo, torch.inference_mode, "__enter__", _enter_no_grad)
        _replace(undo, torch.inference_mode, "__exit__", lambda mode, *exception: mode.instead.__exit__(*exception))
        undo.enter_context(_FirstDevice())
        torch._C._set_only_lift_cpu_tensors(True)
        undo.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)

    @contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        """Run operators of this thread on the device; torch keeps modes by thread, and all streams are one here."""
        if threading.current_thread() is threading.main_thread():
            yield
        else:
            with _FirstDevice(), _ToRunning():  # type: ignore[no-untyped-call, unused-ignore]
                yield

    def _set_sync_debug_mode(self, mode: str) -> None:
        self.refuses_waits, self.warns_of_waits = mode == "error", mode == "warn"

    # --- operators

    def launch(self, name: str) -> None:
        """Count a kernel. A profiler finds it under the name of CUDA's function that launches one."""
        self.launches += 1
        self.operators[name] += 1
        with torch._C._profiler._RecordFunctionFast("cudaLaunchKernel"):
            pass

    def note(self, what: str, name: str, blocking: bool = True) -> None:
        """Count a wait or a copy, under the line it comes from."""
        if blocking and what != "between":
            if self.refuses_waits:
                raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
            if self.warns_of_waits:
                warnings.warn(f"called a synchronizing CUDA operation: {name}", stacklevel=2)
        setattr(self, what, getattr(self, what) + 1)
        for frame in reversed(traceback.extract_stack()[:-1]):
            if any(folder in frame.filename for folder in CALLERS):
                self.places[f"{what} {name} {frame.filename}:{frame.lineno} {frame.line}"] += 1
                break

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        if _is_composite(func.name()):  # composite operators arrive whole under inference mode
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if name in ("_pin_memory", "pin_memory"):
            return args[0]
        if name == "is_pinned":
            return False
        tensors = list(_tensors((*args, *kwargs.values())))
        ours = [x for x in tensors if isinstance(x, CudaTensor)]
        asked = None if kwargs.get("device") is None else _with_index(torch.device(kwargs["device"]))
        if not ours and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(name, func, args, kwargs, asked)
        if name in WAITING or func.name() == "aten::repeat_interleave.Tensor":
            self.note("waits", name)
        if name == "_local_scalar_dense":
            return func(args[0].held)
        place = self._one_device(name, tensors, ours, asked)
        plain_args, plain_kwargs = _mapped(_held, args), _mapped(_held, kwargs)
        if asked is not None:
            plain_kwargs["device"] = torch.device("cpu")
            if asked.type == "cpu":
                return func(*plain_args, **plain_kwargs)
        if name == "_fused_sdp_choice":
            return self._torch_choice(*args, **kwargs)
        if not func.is_view and name not in NO_KERNEL:
            self.launch(name)
        if name in _KERNELS:
            return self._wrap(_KERNELS[name](self, *plain_args, **plain_kwargs), place)
        result = _on_cpu(func, name, plain_args, plain_kwargs)
        if _writes_first(func):
            return args[0]
        if isinstance(kwargs.get("out"), Tensor):
            return kwargs["out"]
        return self._wrap(result, place)

    def _one_device(
        self, name: str, tensors: list[Tensor], ours: list[CudaTensor], asked: torch.device | None
    ) -> torch.device:
        """The one device of an operator's tensors.

        Raises:
            RuntimeError: there are several, as on a real device. Scalars on the CPU and, for an index, positions there
                are taken.
        """
        if asked is not None:  # a new tensor, of which others give the shape alone
            return asked
        places = {x.device for x in ours}
        on_cpu = [x for x in tensors if not isinstance(x, CudaTensor) and x.ndim]
        if len(places) > 1 or (on_cpu and name not in TAKES_CPU_INDEX | {"set_", "detach"}):
            what = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} was given {what}")
        if on_cpu:
            self.note("to_device", f"{name} with an index on the CPU")
        return next(iter(places))

    def _copy(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], asked: torch.device | None) -> Any:
        """Copies within a device, to another and to the host; conversions between dtypes among them."""
        if name == "copy_":
            target, source = args[:2]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._note_copy(name, source, target.device, blocking)
            _held(target).copy_(_held(source))
            return target
        (source,) = args
        place = source.device if asked is None else asked
        if place.type == "meta":
            return func(_held(source), **kwargs)
        self._note_copy(name, source, place, not kwargs.get("non_blocking", False))
        copy = func(_held(source), **({**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs))
        if copy.untyped_storage()._cdata == _held(source).untyped_storage()._cdata:
            copy = copy.clone()
        return self._wrap(copy, place) if place.type == "cuda" else copy

    def _note_copy(self, name: str, source: Tensor, place: torch.device, blocking: bool) -> None:
        if not source.numel():
            return  # torch returns before it asks the device for anything
        if source.device == place:
            self.launch(name)
        else:
            what = "to_device" if source.device.type == "cpu" else "to_host" if place.type == "cpu" else "between"
            self.note(what, f"{name} {tuple(source.shape)}", blocking)

    def _wrap(self, x: Any, place: torch.device) -> Any:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, CudaTensor):
                return leaf
            self._hold(leaf)
            return CudaTensor(leaf, place)

        return _mapped(one, x)

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            if self.live + size > self.memory:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
            self.sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    # --- attention

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """scaled_dot_product_attention by the kernel that torch would run; torch's own operators where it is none."""
        choice = self._torch_choice(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        aten, widths = torch.ops.aten, {query.shape[-1], key.shape[-1], value.shape[-1]}
        if choice == SDPBackend.MATH.value or len(widths) > 1 or query.shape[-1] % 8:
            options: Any = {"scale": scale, "enable_gqa": enable_gqa}
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        if choice == SDPBackend.FLASH_ATTENTION.value:
            out: Tensor = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return out
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        kernel = "efficient" if choice == SDPBackend.EFFICIENT_ATTENTION.value else "cudnn"
        run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        result: Tensor = run(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
        return result

    def _torch_choice(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> int:  # fmt: skip
        """The kernel of scaled_dot_product_attention, in torch's order; cuDNN's with a mask is not simulated."""
        if not query.numel() or query.shape[-1] > 256 or dropout:
            return int(SDPBackend.MATH.value)
        half = query.dtype in (torch.float16, torch.bfloat16) and self.capability[0] >= 8
        grouped = query.shape[1] != key.shape[1]
        allowed: Any = torch.backends.cuda
        if half and mask is None and self.prefers_cudnn and query.shape[-1] <= 128 and allowed.cudnn_sdp_enabled():
            return int(SDPBackend.CUDNN_ATTENTION.value)
        if half and mask is None and allowed.flash_sdp_enabled():
            return int(SDPBackend.FLASH_ATTENTION.value)
        if (
            not grouped
            and (half or query.dtype in (torch.float16, torch.float32))
            and allowed.mem_efficient_sdp_enabled()
        ):
            return int(SDPBackend.EFFICIENT_ATTENTION.value)
        return int(SDPBackend.MATH.value)

    def _rotate_fused(
        self, x: CudaTensor, cos: Tensor, sin: Tensor, *, start: int, half: bool, in_place: int = 0
    ) -> Tensor:
        """The Triton kernel that rotates, by what it is compared with: torch's operators on the CPU."""
        self._one_device("rotate_fused", [x, cos, sin], [x], None)
        self.launch("rotate_fused")
        layout = KeyLayout("half" if half else "interleaved", start, 2 * cos.shape[-1])
        plain = _held(x).detach()
        rotated = KeyRotation(_held(cos), _held(sin)).apply(plain, layout)
        if in_place:
            stored, returned = (part[..., plain.shape[-2] - in_place :, :] for part in (plain, rotated))
            before = stored.clone()
            stored.copy_(returned)
            returned.copy_(before)
        result: Tensor = self._wrap(rotated, x.device)
        return result

    def _merge_fused(self, out: CudaTensor, lse: Tensor, parts: Tensor, parts_lse: Tensor) -> None:
        """The Triton kernel that merges, by the softmax over the parts."""
        self._one_device("merge_fused", [out, lse, parts, parts_lse], [out], None)
        self.launch("merge_fused")
        into, total, parts, parts_lse = map(_held, (out, lse, parts, parts_lse))
        several = (x.reshape(*total.shape[:2], -1, *x.shape[1:]) for x in (parts.float(), parts_lse))
        values, scores = (
            torch.cat([x[:, :, None], more], 2) for x, more in zip((into.float(), total), several, strict=True)
        )
        into.copy_((scores.softmax(2)[..., None] * values).sum(2))
        total.copy_(scores.logsumexp(2))

    def _attend_fused(
        self, zoned: ZonedAttention, query: CudaTensor, near: Tensor, far: Tensor, value: Tensor, scale: float,
        *, sinks: Tensor | None, softcap: float | None, parts: int,
    ) -> Tensor:  # fmt: skip
        """The Triton kernels of attention over all zones, by their definition."""
        turns = (zoned.to_near, zoned.to_far, zoned.near_keys, zoned.far_keys)
        given = [zoned.padding, zoned.temperature, sinks, *(y for x in turns if x is not None for y in (x.cos, x.sin))]
        tensors = [query, near, far, value, *(x for x in given if x is not None)]
        self._one_device("attend_fused", tensors, [query], None)
        for name in ("attend_fused", "merge_parts")[: 1 + (parts > 1)]:
            self.launch(name)
        with torch._C._profiler._RecordFunctionFast("_attend_zones"):  # the kernel's name on a device
            pass
        to_near, to_far, near_keys, far_keys = (x and KeyRotation(_held(x.cos), _held(x.sin)) for x in turns)
        held = ZonedAttention(
            zoned.edges, _held(zoned.padding), zoned.total, to_near, to_far, near_keys, far_keys, zoned.layout,
            _held(zoned.temperature),
        )  # fmt: skip
        out = attend_zoned(
            held, _held(query), _held(near), _held(far), _held(value), scale, _held(sinks), softcap
        )  # fmt: skip
        result: Tensor = self._wrap(out, query.device)
        return result

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False,
        debug: bool = False, *, scale: float | None = None, bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, got {query.dtype}")
        if self.capability[0] < 8:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        _check_kernel_arguments(query, key, value)
        if query.shape[1] % key.shape[1] or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise RuntimeError("flash attention: head counts or widths do not fit")
        out, lse = _attention(query, key, value, causal, scale, bias)
        seed = torch.empty(0, dtype=torch.int64)
        return out, lse, None, None, query.shape[2], key.shape[2], seed, seed.clone(), seed.clone()

    def _flash_by_windows(
        self, query: Tensor, key: Tensor, value: Tensor, query_ends: None, key_ends: None, queries: int, keys: int,
        dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        """Tokens before heads, no causality; a window is counted from the key of a query, the last two side by side."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if (queries, keys, causal) != (query.shape[2], key.shape[2], False):
            raise RuntimeError("flash attention: lengths do not fit")
        distance = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)
        hidden = (distance > window_size_left) | (-distance > window_size_right)
        if hidden.all(-1).any():
            raise RuntimeError("flash attention: the log-sum-exp of a query without a key is +inf")
        bias = torch.zeros(queries, keys).masked_fill(hidden, -math.inf)
        out, lse, *others = self._flash(query, key, value, dropout, scale=scale, bias=bias)
        return out.transpose(1, 2), lse, *others[-3:]

    def _efficient(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        if query.dtype == torch.bfloat16 and self.capability[0] < 8:
            raise RuntimeError("Expected query to have dtype float or half before compute capability 8.0")
        _check_kernel_arguments(query, key, value)
        if not query.shape[1] == key.shape[1] == value.shape[1]:
            raise RuntimeError("memory-efficient attention: query and key must have as many heads")
        out, lse = _attention(query, key, value, causal, scale, bias)
        # The real kernel rounds the number of queries up to a multiple of 32.
        lse = nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf) if with_lse else lse[..., :0]
        seed = torch.empty(0, dtype=torch.int64)
        return out, lse, seed, seed.clone()

    def _cudnn(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0,
        causal: bool = False, debug: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        if query.dtype not in (torch.float16, torch.bfloat16) or self.capability[0] < 8:
            raise RuntimeError(f"cuDNN attention takes float16 and bfloat16 from Ampere on, got {query.dtype}")
        _check_kernel_arguments(query, key, value)
        if causal and query.shape[-2] != key.shape[-2]:
            raise RuntimeError("cuDNN attention: causal is told from the upper left corner")
        out, lse = _attention(query, key, value, causal, scale)
        seed = torch.empty(0, dtype=torch.int64)
        return out, lse[..., None], None, None, query.shape[2], key.shape[2], seed, seed.clone(), seed.clone()


_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": SimulatedCuda._flash,
    "_flash_attention_forward": SimulatedCuda._flash_by_windows,
    "_scaled_dot_product_efficient_attention": SimulatedCuda._efficient,
    "_scaled_dot_product_cudnn_attention": SimulatedCuda._cudnn,
}


def _check_kernel_arguments(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What all CUDA kernels of attention demand of memory and sizes.

    Raises:
        RuntimeError: naming the tensor and what is wrong with it.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"attention in several dtypes: {query.dtype}, {key.dtype}, {value.dtype}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        size = x.element_size()
        steps = [step * size for step, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]
        problems = {
            "its last dim is not contiguous": x.stride(-1) != 1,
            "it does not begin at a multiple of 16 bytes": x.storage_offset() * size % 16 != 0,
            "its strides are no multiples of 16 bytes": any(step % 16 for step in steps),
            "its heads are no multiple of 8 wide, or wider than 256": x.shape[-1] % 8 != 0 or x.shape[-1] > 256,
            "it has too many rows or heads for a grid": max(x.shape[:2]) > MAX_GRID,
            "it is empty": not x.numel(),
        }
        for problem, given in problems.items():
            if given:
                raise RuntimeError(f"attention kernel: {name} {tuple(x.shape)}, strides {x.stride()}: {problem}")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output, laid out as the kernels do, and log-sum-exp; causal from the lower right corner."""
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.float() @ wide_key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + key.shape[-2] - query.shape[-2])
        scores = scores.masked_fill(later, -math.inf)
    # A query whose keys are all masked gets zeros, as from the kernels.
    weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    out = (weights @ wide_value).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


# --- helpers ---------------------------------------------------------------------------------------------------------


class _Stream:
    """A CUDA stream; everything runs at once here."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _ToRunning(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """The simulated device in a thread that has not entered it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert SimulatedCuda.running is not None
        return SimulatedCuda.running.run(func, args, kwargs or {})


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `undo` is closed."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _enter_no_grad(mode: Any) -> None:
    mode.instead = torch.no_grad() if mode.mode else nullcontext()
    mode.instead.__enter__()


@functools.cache
def _is_composite(name: str) -> bool:
    composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return composite


@functools.cache
def _writes_first(func: Any) -> bool:
    """Whether an operator writes to its first argument and returns it."""
    name, arguments = func._schema.name, func._schema.arguments
    in_place = name.endswith("_") and not name.endswith("__") and bool(arguments)
    return in_place and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _on_cpu(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An operator on the CPU, also where it takes something there that it takes on CUDA alone."""
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name == "_grouped_mm":
        return _grouped_mm(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_mm(x: Tensor, weights: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """(tokens, out) from (tokens, in) and (experts, in, out); the tokens of expert i end at ends[i]."""
    parts, begin = [], 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        parts.append(x[begin:end] @ weight)
        begin = end
    return torch.cat([*parts, x.new_zeros(x.shape[0] - begin, weights.shape[-1])])


@contextmanager
def no_waits(device: SimulatedCuda) -> Iterator[None]:
    """Any wait of the host inside is an error."""
    device.refuses_waits = True
    try:
        yield
    finally:
        device.refuses_waits = False
