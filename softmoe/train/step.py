"""One update of the weights."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from softmoe.train.contrastive import Contrastive, joined, with_gradient
from softmoe.train.optim import gradients, set_learning_rate
from softmoe.train.parts import random_seed, split_batch
from softmoe.train.run import Run


def train_step(run: Run, batch: Any, *, keep_routing: bool = False) -> tuple[float, float]:
    """One update, or none if loss or gradient are not finite. Returns the loss and the learning rate."""
    done, config = run.done, run.config
    rate = run.schedule(done.step)
    set_learning_rate(run.optimizer, rate)
    torch.manual_seed(random_seed(config.seed, "step", done.step, *run.team.seed))
    run.model.train()
    run.optimizer.zero_grad()
    loss, auxiliary = forward_backward(run, batch)
    if run.in_backward is None:
        norm = run.team.clip(gradients(run.optimizer), config.optim.clip_norm)
    else:
        norm = run.in_backward.finish()
    values = run.team.mean(torch.stack([loss.double(), auxiliary.double(), norm.double()])).tolist()  # the one wait
    done.step += 1
    if math.isfinite(values[0]) and math.isfinite(values[2]):
        if run.in_backward is None:
            run.optimizer.step()
        if run.average is not None:
            run.average.update()
        done.loss_sum += values[0]
        done.auxiliary_sum += values[1]
        done.norm_sum += values[2]
        done.good_steps += 1
        done.bad_in_a_row = 0
    else:
        done.skipped += 1
        done.bad_in_a_row += 1
    if not keep_routing:
        run.tap.clear()
    return values[0], rate


def forward_backward(run: Run, batch: Any) -> tuple[Tensor, Tensor]:
    """Gradients of the whole batch, part by part. Returns its loss (balance losses included) and the balance losses."""
    parts = split_batch(batch, run.config.accumulate)
    if isinstance(run.objective, Contrastive) and len(parts) > 1:
        return joint_backward(run, run.objective, parts)
    losses, auxiliaries = [], []
    for part in parts:
        run.tap.clear()
        with run.tap, autocast(run):
            loss, _ = run.objective(run.forward, part)
        auxiliary = balance_loss(run)
        loss = loss if auxiliary is None else loss + auxiliary
        if run.in_backward is None or loss.isfinite():  # such a loss must not reach the weights
            (loss / len(parts)).backward()
        losses.append(loss.detach())
        auxiliaries.append(torch.zeros_like(losses[-1]) if auxiliary is None else auxiliary.detach())
    return torch.stack(losses).mean(), torch.stack(auxiliaries).mean()


def joint_backward(run: Run, objective: Contrastive, parts: list[Any]) -> tuple[Tensor, Tensor]:
    """The same for a loss that compares all examples of the batch: embeddings of all parts without gradients, then the
    loss and its gradient in them, then every part once more to carry that on into the weights. Memory is that of one
    part, and the gradient that of the whole batch, for each part draws the same random numbers again."""
    found, states = [], []
    for part in parts:
        states.append(random_state(run.device))
        with torch.no_grad(), autocast(run):
            found.append(objective.embed(run.forward, part))
    whole = joined(found)
    loss, _ = objective.join(whole)
    loss.backward()
    auxiliaries, start = [], 0
    for part, state in zip(parts, states, strict=True):
        set_random_state(run.device, state)
        run.tap.clear()
        with run.tap, autocast(run):
            again = objective.embed(run.forward, part)
        surrogate, auxiliary = with_gradient(again, whole, start), balance_loss(run)
        (surrogate if auxiliary is None else surrogate + auxiliary / len(parts)).backward()
        auxiliaries.append(torch.zeros_like(loss) if auxiliary is None else auxiliary.detach())
        start += len(part.images)
    balance = torch.stack(auxiliaries).mean()
    return loss.detach() + balance, balance


def balance_loss(run: Run) -> Tensor | None:
    auxiliary = run.tap.auxiliary_loss()
    return None if auxiliary is None else run.config.objective.auxiliary_weight * auxiliary


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Of dropout and routing noise, on the CPU and on the accelerator."""
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def autocast(run: Run) -> AbstractContextManager:
    return nullcontext() if run.autocast is None else torch.autocast(run.device.type, dtype=run.autocast)
