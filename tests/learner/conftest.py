"""One thread each: the machine is shared, and a tiny model is slower with more."""

import torch

torch.set_num_threads(1)
