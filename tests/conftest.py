"""What all tests share: one thread, so that sums are taken in one order."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
