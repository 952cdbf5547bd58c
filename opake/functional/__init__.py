"""Call models functionally and take gradients one example at a time."""

from opake.functional.batching import with_batch_dim
from opake.functional.clipping import clipped_grad_sum
from opake.functional.model import make_functional
from opake.functional.per_example import per_example_grads

__all__ = ["clipped_grad_sum", "make_functional", "per_example_grads", "with_batch_dim"]
