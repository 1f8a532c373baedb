"""Arrays on their way to a device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def put(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor there. Nobody waits: a copy from pageable memory would stop until the GPU has caught up."""
    here = torch.as_tensor(np.ascontiguousarray(values), dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
