"""Update parameters while the backward pass still runs, so that never all gradients are there at once."""

import torch
from torch import Tensor

from softmoe.budget.memory import WAITING
from softmoe.train.optim import gradients

LIMIT = WAITING  # bytes; smaller parameters are updated together


class InBackward:
    """Hands gradients to the optimizer as soon as LIMIT bytes of them wait, and lets them go.

    Gradients that are not finite are dropped, and their parameters stay as they are; what was updated earlier in the
    same pass is not taken back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._waiting = 0
        self._norms: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._waiting += parameter.grad.nbytes
        if self._waiting >= LIMIT:
            self._update()

    def _update(self) -> None:
        arrived = gradients(self.optimizer)
        self._waiting = 0
        if not arrived:
            return
        norm = torch.nn.utils.get_total_norm(arrived)
        self._norms.append(norm)
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> Tensor:
        """Update what still waits, after the pass. Returns the norm of the whole gradient."""
        self._update()
        norms, self._norms = self._norms, []
        return torch.stack(norms).norm() if norms else torch.zeros(())
