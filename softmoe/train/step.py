"""One update of the weights, given to the device without waiting for it.

On a CPU the numbers of a step are read at once. On a GPU the host only hands out work: whether an update is skipped is
decided on the device, and the numbers of a step are read in the next one (`count_pending_step`), when they have long
arrived.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from softmoe.accelerate.guards import is_async, skipped_where
from softmoe.train.data import split_batch
from softmoe.train.objectives import Contrastive, join_parts, with_gradient
from softmoe.train.optim import gradients, set_learning_rate
from softmoe.train.run import Pending, Run, random_seed


def train_step(run: Run, batch: Any, *, keep_routing: bool = False) -> None:
    """Do one update, or none if loss or gradient are not finite."""
    done, config = run.done, run.config
    set_learning_rate(run.optimizer, run.schedule(done.step))
    torch.manual_seed(random_seed(config.seed, "step", done.step, *run.team.seed))
    run.model.train()
    run.optimizer.zero_grad()
    if run.in_backward is not None and run.average is not None:
        count_pending_step(run)  # its weights go into the average before the backward pass changes them
    loss, auxiliary, numbers = forward_backward(run, batch)
    if run.in_backward is None:
        norm = run.team.clip(gradients(run.optimizer), config.optim.clip_norm)
    else:
        norm = run.in_backward.finish()
    names = sorted(numbers)  # an objective gives the same on all ranks
    found = [loss, auxiliary, norm, *(numbers[name] for name in names)]
    wide = torch.float64 if run.device.type == "cpu" else torch.float32  # some devices have no float64
    values = run.team.mean(torch.stack([value.to(wide) for value in found]))
    count_pending_step(run)  # the step before, with the average of its weights
    done.step += 1
    run.pending = Pending(done.step, names, values)
    if run.in_backward is None:
        update(run, values)
    if not is_async(run.device):
        count_pending_step(run)
    if not keep_routing:
        run.recording.clear()


def update(run: Run, values: Tensor) -> None:
    """Let the optimizer step if loss and norm are finite.

    A GPU is not waited for: there the fused update looks at a flag on the device.
    """
    judged = values[0:3:2]
    if is_async(run.device):
        with skipped_where(run.optimizer, ~judged.isfinite().all()):
            run.optimizer.step()
    elif all(map(math.isfinite, judged.tolist())):
        run.optimizer.step()


def count_pending_step(run: Run) -> None:
    """Read the numbers of the last step, if they were not read yet, and count the step.

    They are added to the sums for the next line of metrics, and the weights to their average; or the step was skipped.
    """
    pending, run.pending = run.pending, None
    if pending is None:
        return
    done, values = run.done, pending.read()
    run.loss = values[0]
    if not (math.isfinite(values[0]) and math.isfinite(values[2])):
        done.skipped += 1
        done.bad_in_a_row += 1
        run.bad_steps.append((pending.step, values[0]))
        return
    if run.average is not None:
        run.average.update()
    done.loss_sum += values[0]
    done.auxiliary_sum += values[1]
    done.norm_sum += values[2]
    for name, value in zip(pending.names, values[3:], strict=True):
        done.objective_sums[name] = done.objective_sums.get(name, 0.0) + value
    done.good_steps += 1
    done.bad_in_a_row = 0


def forward_backward(run: Run, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the gradients of the whole batch, part by part.

    Returns its loss (balance losses included), the balance losses, and the objective's own numbers.
    """
    parts = split_batch(batch, run.config.accumulate)
    if isinstance(run.objective, Contrastive) and len(parts) > 1:
        return joint_backward(run, run.objective, parts)
    losses, auxiliaries = [], []
    numbers: list[dict[str, Tensor]] = []
    for count, part in enumerate(parts, 1):
        run.team.reduce(run.model, now=count == len(parts))
        run.recording.clear()
        with run.recording, autocast(run):
            loss, found = run.objective(run.forward, part)
        auxiliary = balance_loss(run)
        loss = loss if auxiliary is None else loss + auxiliary
        # updates in the backward pass: a loss that is not finite must not reach the weights
        if run.in_backward is None or run.in_backward.may_begin(loss):
            (loss / len(parts)).backward()
        losses.append(loss.detach())
        numbers.append(found)
        auxiliaries.append(torch.zeros_like(losses[-1]) if auxiliary is None else auxiliary.detach())
    return torch.stack(losses).mean(), torch.stack(auxiliaries).mean(), means(numbers, run.device)


def joint_backward(run: Run, objective: Contrastive, parts: list[Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Do `forward_backward` for a loss that compares all examples of the batch, in the memory of one part.

    First come the embeddings of all parts, without gradients; then the loss and its gradient in the embeddings; then
    every part once more, to carry that gradient on into the weights. Each part draws the same random numbers again, so
    the gradient is exactly that of the whole batch.
    """
    found, states = [], []
    for part in parts:
        states.append(random_state(run.device))
        with torch.no_grad(), autocast(run):
            found.append(objective.embed(run.forward, part))
    whole = join_parts(found)
    loss, numbers = objective.join(whole)
    loss.backward()
    auxiliaries, start = [], 0
    for part, state in zip(parts, states, strict=True):
        run.team.reduce(run.model, now=part is parts[-1])
        set_random_state(run.device, state)
        run.recording.clear()
        with run.recording, autocast(run):
            again = objective.embed(run.forward, part)
        surrogate, auxiliary = with_gradient(again, whole, start), balance_loss(run)
        (surrogate if auxiliary is None else surrogate + auxiliary / len(parts)).backward()
        auxiliaries.append(torch.zeros_like(loss) if auxiliary is None else auxiliary.detach())
        start += len(part.images)
    balance = torch.stack(auxiliaries).mean()
    return loss.detach() + balance, balance, means([numbers], run.device)


def means(numbers: list[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Return the mean over the parts of a batch of each number that the objective gave."""
    names = numbers[0]
    return {name: torch.stack([number_on(device, n[name]) for n in numbers]).mean() for name in names}


def number_on(device: torch.device, value: Tensor | float) -> Tensor:
    """Put a number of an objective on the device. One of the host is filled in there, which nobody waits for."""
    if isinstance(value, Tensor) and value.device.type == device.type:
        return value.detach()
    return torch.full((), float(value), device=device)


def balance_loss(run: Run) -> Tensor | None:
    auxiliary = run.recording.auxiliary_loss()
    return None if auxiliary is None else run.config.objective.auxiliary_weight * auxiliary


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of the generators of dropout and routing noise, on the CPU and on the accelerator."""
    states = (torch.get_rng_state(),)
    if device.type == "mps":
        return (*states, torch.mps.get_rng_state())
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state[1])


def autocast(run: Run) -> AbstractContextManager:
    return nullcontext() if run.autocast is None else torch.autocast(run.device.type, dtype=run.autocast)
