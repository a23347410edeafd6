"""One update of the weights."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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
    run.optimizer.zero_grad(set_to_none=True)
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
    losses, auxiliaries = [], []
    for part in parts:
        run.tap.clear()
        with run.tap, autocast(run):
            loss, _ = run.objective(run.forward, part)
        auxiliary = run.tap.auxiliary_loss()
        if auxiliary is not None:
            auxiliary = run.config.objective.auxiliary_weight * auxiliary
            loss = loss + auxiliary
        if run.in_backward is None or loss.isfinite():  # such a loss must not reach the weights
            (loss / len(parts)).backward()
        losses.append(loss.detach())
        auxiliaries.append(torch.zeros_like(losses[-1]) if auxiliary is None else auxiliary.detach())
    return torch.stack(losses).mean(), torch.stack(auxiliaries).mean()


def autocast(run: Run) -> AbstractContextManager:
    return nullcontext() if run.autocast is None else torch.autocast(run.device.type, dtype=run.autocast)
