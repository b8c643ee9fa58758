"""The Triton kernel as Triton compiles it, without a GPU: the resources it needs on each device, and its variants.

`nox -s kernels` installs Triton beside the environment: torch for CPUs comes without it, and it is large.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from tests.support.models import build, tokens
from tests.support.simulated_cuda import SimulatedCuda, why_unavailable

pytest.importorskip("triton")

from rope_ext_hf.rotary import triton_rotation
from rope_ext_hf.rotary.triton_rotation import rotate_fused
from tests.support.triton_compiler import TARGETS, WithoutDevice, resources

BUDGETS = tomllib.loads(Path(__file__).with_name("triton_rotation_budgets.toml").read_text(encoding="utf-8"))["case"]
KERNEL = triton_rotation._rotate


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", BUDGETS, ids=lambda case: case["name"])
def test_the_kernel_keeps_its_budget(case: dict[str, Any], target: str) -> None:
    x = torch.zeros(1, 8, 1041, case["width"], dtype=getattr(torch, case["dtype"]))
    cos, sin = torch.zeros(2, 1, 1, 1041, case["dim"] // 2)
    with WithoutDevice(target, KERNEL) as device:
        half, in_place = case["pairing"] == "half", int(case.get("in_place", False))
        rotate_fused(x, cos, sin, start=case.get("start", 0), half=half, in_place=in_place)
    assert device.launches == 1
    (variant,) = device.variants
    taken = resources(variant)
    assert taken.registers <= case["amd" if target.startswith("gfx") else "nvidia"], taken
    assert not taken.spilled, taken
    assert taken.shared <= case.get("shared", 0), taken
    assert min(taken.loads | taken.stores) >= case["narrowest"], taken


def test_one_variant_serves_any_number_of_tokens() -> None:
    """The keys come from caches, projections and slices, and one angle may serve all tokens."""
    with WithoutDevice("sm_90", KERNEL) as device:
        for count in (1, 2, 3, 7, 16, 31, 32, 100, 199):
            for rows in (1, 2):
                cos, sin = torch.zeros(2, rows, 1, count, 64)
                cached = torch.zeros(2, 8, count + 5, 128, dtype=torch.bfloat16)
                projected = torch.zeros(2, count, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
                for x in (cached[:, :, :count].contiguous(), cached[:, :, 5:], projected):
                    rotate_fused(x, cos, sin, start=0, half=True)
                    rotate_fused(x, cos[:, :, :1], sin[:, :, :1], start=0, half=True)
    assert device.launches == 9 * 2 * 3 * 2
    assert len(device.variants) == 1


class CompilingCuda(SimulatedCuda):  # type: ignore[no-untyped-call, unused-ignore]
    """A simulated device that computes each launch of the kernel, and also has Triton compile it."""

    def _rotate_fused(self, x: Any, cos: Any, sin: Any, **options: Any) -> Any:
        rotate_fused(x.held.detach(), cos.held, sin.held, **options)
        return super()._rotate_fused(x, cos, sin, **options)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn", "rerope", "self-extend", "stairs", "dca"])
def test_prompts_and_steps_of_a_model_take_two_variants(method: str) -> None:
    """At most one variant is for reading and one for decoding steps, whatever the length.

    The heads have a multiple of 32 dims, as in models. For narrower heads Triton distinguishes strides, and `stairs`
    takes one variant more.
    """
    with WithoutDevice("sm_90", KERNEL) as device, CompilingCuda(), torch.no_grad():
        model = rope.patch(build("llama", head_dim=32).to("cuda", torch.bfloat16), method)
        for length in (100, 153, 7):
            ids = tokens(length + 20).cuda()
            cache = model(ids[:, :length], use_cache=True).past_key_values
            for at in range(length, length + 20):
                model(ids[:, at : at + 1], past_key_values=cache)
    assert device.launches
    assert len(device.variants) <= 2


def test_every_kernel_of_the_package_is_compiled_here() -> None:
    """Kernels are found as the functions that call `program_id`; a new kernel needs a budget here."""
    root = Path(__file__).parents[2]
    kernels = [
        node.name
        for folder in ("rope_ext_hf", "patches", "eval")
        for path in (root / folder).rglob("*.py")
        if not path.is_symlink()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and "tl.program_id(" in ast.unparse(node)
    ]
    assert sorted(kernels) == ["_attend_zones", "_merge", "_merge_parts", "_rotate"]
