#!/bin/sh
# OpenVINO's CPU plugin multiplies int64 tensors in 32 bits and says nothing: the output is int64, and its values are wrong.
#
# openvino 2026.4.1 with torch 2.13.0: 2^20 x 2^20 is 0 in place of 1099511627776, and (2^20 + 1)^2 is 2097153 in place of
# 1099513724929, as if the high 32 bits were cut off. PyTorch computes both right. Exits 0 as long as that is so, and 1
# once the product is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 openvino==2026.4.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import openvino
import torch


class Square(torch.nn.Module):
    def forward(self, x):
        return x * x


x = torch.tensor([3, 2**20, 2**20 + 1])
compiled = openvino.Core().compile_model(openvino.convert_model(Square(), example_input=x), "CPU")
actual = torch.from_numpy(compiled([x.numpy()])[0].copy())
print("openvino", openvino.__version__)
print("input   ", x.tolist())
print("PyTorch ", (x * x).tolist())
print("OpenVINO", actual.tolist(), actual.dtype)
sys.exit(0 if actual.dtype == torch.int64 and actual[0] == 9 and actual[1] != 2**40 else 1)
PYTHON
