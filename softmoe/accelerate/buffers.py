"""Use the memory of the experts' gradients again, and let updates run while the backward pass still does.

The gradients of stacked experts are hundreds of megabytes, allocated anew at every step, and the system clears the
pages of each before they are written once. A buffer is used again only if it was handed out here before and nobody
else refers to it.
"""

import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from softmoe.accelerate.guards import Off, is_async, skipped_where
from softmoe.moe import Experts

MAX_IN_FLIGHT = 2
"""Gradients of one shape that are written or used up at the same time."""
WAITING = 64 << 20
"""Bytes of small gradients that updates in the backward pass let wait for each other."""
_Kind = tuple[torch.Size, torch.dtype, torch.device]
_POOLS: "weakref.WeakSet[GradientBuffers]" = weakref.WeakSet()


def switch_on(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    if optimizer is None:
        raise Off("no optimizer was given")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise Off("for one process")
    if not any(isinstance(module, Experts) for module in model.modules()):
        raise Off("no experts in this model")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise Off("not on a CPU")  # elsewhere torch's own allocator keeps memory for the next gradient
    buffers = GradientBuffers.of(optimizer) or GradientBuffers(optimizer, model)
    return f"{len(buffers.parameters)} gradients"


def acquire(weight: Tensor) -> Tensor:
    """Return memory for the gradient of a weight: that of an earlier gradient, or new one."""
    pool = _pool_of(weight)
    return torch.empty_like(weight, memory_format=torch.contiguous_format) if pool is None else pool.acquire(weight)


def remember_squares(weight: Tensor, gradient: Tensor, squares: float) -> None:
    """Keep the sum of a gradient's squares, which was added up when it was written, for `total_norm`."""
    pool = _pool_of(weight)
    if pool is not None:
        pool.remember(weight, gradient, squares)


def _pool_of(weight: Tensor) -> "GradientBuffers | None":
    return next((pool for pool in _POOLS if any(p.data_ptr() == weight.data_ptr() for p in pool.parameters)), None)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together. Those whose sum of squares is known are not read again."""
    known = {pointer: squares for pool in _POOLS for pointer, squares in pool.known_squares()}
    if not known:
        return torch.nn.utils.get_total_norm(gradients)
    norm = torch.nn.utils.get_total_norm([g for g in gradients if g.data_ptr() not in known])
    found = [known[g.data_ptr()] for g in gradients if g.data_ptr() in known]
    return norm if not found else (norm.square() + sum(found)).sqrt()


class GradientBuffers:
    """Replaces an optimizer's `zero_grad`: releases the gradients, and keeps the memory of those of experts.

    It lives as long as the optimizer. What it holds is never more than what was handed out and came back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        stacks = (module for module in model.modules() if isinstance(module, Experts))
        self.parameters = [p for experts in stacks for p in (experts.w1, experts.w2) if p in trained]
        self._optimizer = weakref.ref(optimizer)
        self._free: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        self._busy: defaultdict[_Kind, deque[tuple[Tensor, Future[None]]]] = defaultdict(deque)
        self._handed_out: Counter[_Kind] = Counter()
        self._squares: dict[int, tuple[Tensor, int, float] | None] = {}
        """By the address of a weight: its gradient, the gradient's version and the sum of its squares; None if it got
        several gradients."""
        optimizer.zero_grad = self.zero_grad
        _POOLS.add(self)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> "GradientBuffers | None":
        owner = getattr(optimizer.zero_grad, "__self__", None)
        return owner if isinstance(owner, GradientBuffers) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self.release()
        self._squares.clear()
        optimizer = self._optimizer()
        assert optimizer is not None
        type(optimizer).zero_grad(optimizer, set_to_none=set_to_none)

    def release(self, after: Future[None] | None = None) -> None:
        """Take the experts' gradients from their parameters. They are free at once, or when `after` is done."""
        self._squares.clear()
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            box, parameter.grad = [parameter.grad], None
            kind = _kind(box[0])
            fits = box[0].is_contiguous() and box[0].data_ptr() % 64 == 0
            if self._handed_out[kind] > 0 and fits and _only_reference(box, others=int(after is not None)):
                self._handed_out[kind] -= 1
                if after is None:
                    self._free[kind].append(box[0])
                else:
                    self._busy[kind].append((box[0], after))

    def acquire(self, like: Tensor) -> Tensor:
        """Return memory for a gradient. If MAX_IN_FLIGHT of its kind are in use, wait for the first of them."""
        kind = _kind(like)
        free, busy = self._free[kind], self._busy[kind]
        while busy and (busy[0][1].done() or (not free and len(busy) >= MAX_IN_FLIGHT)):
            gradient, done = busy.popleft()
            done.exception()  # wait; an error is raised by whoever started the update
            free.append(gradient)
        self._handed_out[kind] += 1
        return free.pop() if free else torch.empty_like(like, memory_format=torch.contiguous_format)

    def bytes_held(self) -> int:
        """Count the bytes that are kept for later gradients."""
        busy = (gradient for waiting in self._busy.values() for gradient, _ in waiting)
        return sum(g.nbytes for g in (*busy, *(g for free in self._free.values() for g in free)))

    def remember(self, weight: Tensor, gradient: Tensor, squares: float) -> None:
        first = weight.data_ptr() not in self._squares
        # detached, since autograd copies a gradient that somebody else has
        self._squares[weight.data_ptr()] = (gradient.detach(), gradient._version, squares) if first else None

    def known_squares(self) -> Iterator[tuple[int, float]]:
        """Yield address and sum of squares of each gradient that was not changed since it was written."""
        for gradient, version, squares in filter(None, self._squares.values()):
            if gradient._version == version:
                yield gradient.data_ptr(), squares


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _only_reference(box: list[Tensor], others: int) -> bool:
    """True if nobody but the list and `others` refers to its one tensor, and no other tensor shares its memory.

    Where torch cannot count the users of memory none is assumed, since the optimizer released the gradient.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = box[0].untyped_storage()  # kept until it is counted: some versions of torch count it, others would not
    shared = count is not None and count(storage._cdata) > 2  # the tensor and this one
    return not shared and sys.getrefcount(box[0]) <= 2 + others  # the list and the argument


class InBackward:
    """Hands gradients to the optimizer as soon as WAITING bytes of them wait, so that never all are there at once.

    The compiled update, most of whose time is waiting for memory, runs beside the rest of the pass, with half of the
    threads.

    Gradients that are not finite are dropped, and their parameters stay as they are; what was updated earlier in the
    same pass is not taken back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._waiting = 0
        self._norms: list[Tensor] = []
        compiled = getattr(optimizer, "in_one_pass", False)  # by optimizer.py; it needs few threads
        self._beside = ThreadPoolExecutor(1, "update") if compiled and torch.get_num_threads() > 1 else None
        self._running: list[Future[None]] = []
        self._spoiled: Tensor | None = None
        """On CUDA: whether the loss is not finite."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._on_grad_ready)

    def may_begin(self, loss: Tensor) -> bool:
        """Tell if the backward pass of this loss may begin. A GPU is not asked: it will skip all updates itself."""
        self._spoiled = ~loss.detach().isfinite() if is_async(loss.device) else None
        return self._spoiled is not None or bool(loss.isfinite())

    def _on_grad_ready(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._waiting += parameter.grad.nbytes
        if self._waiting >= WAITING:
            self._update()

    def _update(self) -> None:
        ready = {p: p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._waiting = 0
        if not ready:
            return
        norm = total_norm(list(ready.values()))
        self._norms.append(norm)
        if self._spoiled is not None:
            with skipped_where(self.optimizer, self._spoiled | ~norm.isfinite()):
                done = self._step(ready)
        else:
            done = self._step(ready) if norm.isfinite() else None
        ready.clear()
        buffers = GradientBuffers.of(self.optimizer)
        if buffers is not None:
            buffers.release(done)
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, gradients: dict[Tensor, Tensor]) -> Future[None] | None:
        """Update, and return the future if the update runs in a thread beside the backward pass."""
        if self._beside is None:
            return self.optimizer.step()
        optimizer: Any = self.optimizer
        self._running.append(self._beside.submit(optimizer.update, dict(gradients), torch.get_num_threads() // 2))
        return self._running[-1]

    def finish(self) -> Tensor:
        """Update what still waits after the backward pass, and return the norm of the whole gradient."""
        self._update()
        running, self._running = self._running, []
        for update in running:
            update.result()
        norms, self._norms = self._norms, []
        return torch.stack(norms).norm() if norms else torch.zeros(())
