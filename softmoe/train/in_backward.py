"""What becomes of gradients: their memory is used again, and they may be used up while the backward pass still runs."""

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from softmoe.budget.memory import WAITING
from softmoe.moe import Experts
from softmoe.moe.product import GradientPool
from softmoe.train.adamw import CompactAdamW, kernel
from softmoe.train.optim import gradients

LIMIT = WAITING  # bytes; smaller parameters are updated together


class Released:
    """Lets the gradients of an optimizer go, and keeps the memory of the experts' for their next ones.

    The latter only for a model in one process: what a parameter's gradient is elsewhere is not what the product made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, *, alone: bool = True):
        self.optimizer = optimizer
        self._pool = GradientPool()
        self._pooled: list[nn.Parameter] = []
        for experts in (module for module in model.modules() if alone and isinstance(module, Experts)):
            experts.pool = self._pool
            self._pooled += [experts.w1, experts.w2]

    def __call__(self, after: Future[None] | None = None) -> None:
        """`after` is when the memory of the gradients may be used again; None is now."""
        for parameter in self._pooled:
            if parameter.grad is not None:
                self._pool.give(parameter.grad, after)
        self._pool.forget()
        self.optimizer.zero_grad(set_to_none=True)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return self._pool.norm(gradients)


class InBackward:
    """Hands gradients to the optimizer as soon as LIMIT bytes of them wait, so that never all are there at once.

    The compiled update, most of whose time is waiting for memory, runs beside the rest of the pass, with half of the
    threads.

    Gradients that are not finite are dropped, and their parameters stay as they are; what was updated earlier in the
    same pass is not taken back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, release: Released):
        self.optimizer, self.release = optimizer, release
        self._waiting = 0
        self._norms: list[Tensor] = []
        self._beside = ThreadPoolExecutor(1, "update") if _waits_for_memory(optimizer) else None
        self._running: list[Future[None]] = []
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
        norm = self.release.norm(arrived)
        self._norms.append(norm)
        del arrived
        self.release(self._step() if norm.isfinite() else None)

    def _step(self) -> Future[None] | None:
        """When it will be done, if it is not yet."""
        if self._beside is None:
            return self.optimizer.step()
        assert isinstance(self.optimizer, CompactAdamW)
        self._running.append(
            self._beside.submit(self.optimizer.update, self.optimizer.arrived(), torch.get_num_threads() // 2)
        )
        return self._running[-1]

    def finish(self) -> Tensor:
        """Update what still waits, after the pass. Returns the norm of the whole gradient."""
        self._update()
        running, self._running = self._running, []
        for update in running:
            update.result()
        norms, self._norms = self._norms, []
        return torch.stack(norms).norm() if norms else torch.zeros(())


def _waits_for_memory(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update is the compiled one, and there are threads to share."""
    on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    compiled = isinstance(optimizer, CompactAdamW) and on_cpu and isinstance(kernel(), ctypes.CDLL)
    return compiled and torch.get_num_threads() > 1
