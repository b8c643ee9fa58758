"""Lets a torchvision that was built for CUDA be imported on a CPU: the operators that its Python looks up, undone.

`nox -s vllm` and `nox -s sglang` put it beside torchvision as sitecustomize.py.
"""

from typing import Any

import torch

library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
