"""MindSpore's dtypes: torch's own."""

from __future__ import annotations

import torch

bool_ = torch.bool
uint8 = torch.uint8
int8 = torch.int8
int16 = torch.int16
int32 = torch.int32
int64 = torch.int64
float16 = torch.float16
float32 = torch.float32
float64 = torch.float64
bfloat16 = torch.bfloat16
complex64 = torch.complex64
complex128 = torch.complex128
