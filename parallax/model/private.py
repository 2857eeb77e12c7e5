"""What torch tells under private names alone."""

from __future__ import annotations

import torch
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of vmap's or of a functional gradient's, which has no memory of its own."""

operation_number = _get_sequence_nr
"""How many operators this thread has recorded for backward: two tensors that one of them saves see the same number."""
