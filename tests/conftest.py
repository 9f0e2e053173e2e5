"""What all tests share: one thread, so that sums are taken in one order, and processes on machines with few cores."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.environ["ASKEW_MANY_PROCESSES"] = "1"
