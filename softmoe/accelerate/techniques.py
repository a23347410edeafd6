"""Switch every technique on for a model, and say what is on, what is off and why.

A technique is a file of this folder with `switch_on(model, optimizer) -> str`: it changes the model from outside and
says what it changed, or raises `Off` with the reason why it does nothing. Files are found, not listed: if one is
deleted the others still work.
"""

import pkgutil
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

import softmoe.accelerate
from softmoe.accelerate import fastest
from softmoe.accelerate.build import turned_off
from softmoe.accelerate.guards import Off, plain_class


@dataclass(frozen=True)
class Technique:
    """One technique: whether it is on, and what it changed or why it is off."""

    name: str
    on: bool
    why: str


@dataclass(frozen=True)
class Report:
    """A list of all techniques: which of them `apply` switched on, and why the others are off.

    Numbers differ in the last places with what is on, so this is a fact of a run.
    """

    techniques: tuple[Technique, ...]

    def on(self) -> list[str]:
        return [t.name for t in self.techniques if t.on]

    def to_dict(self) -> dict[str, str]:
        """Return "on", or why it is off, by the technique's name, as a run's config.json keeps it."""
        return {t.name: "on" if t.on else f"off: {t.why}" for t in self.techniques}

    def timed(self) -> list[str]:
        """List each shape at which a kernel was timed against torch so far: which is used, and both times."""
        return fastest.timings()

    def summary(self) -> str:
        """Say in one line, at the start of a run, what is on and where to read more."""
        if not self.on():
            return "plain torch: nothing that makes it faster is on (softmoe doctor RUN says why)"
        return (
            f"faster code for this device is on for: {', '.join(self.on())}; numbers are the same to rounding "
            "(softmoe doctor RUN says what is off and why, docs/guides/layer.md what this is)"
        )

    def __str__(self) -> str:
        """List in one line what is on, and what is off and why."""
        if turned_off():
            return "accelerate: all off by SOFTMOE_ACCELERATE"
        off = ", ".join(f"{t.name} ({t.why})" for t in self.techniques if not t.on)
        return f"accelerate: {', '.join(self.on()) or 'nothing'} on" + (f"; off: {off}" if off else "")


def apply(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Make a model compute the same numbers sooner on this device: any module, with or without an optimizer.

    Sub-modules keep their parameters, names and hooks; outputs and gradients are those of the plain model within
    rounding. `SOFTMOE_ACCELERATE=off` turns all of it off.
    """
    return Report(tuple(_switch_on(name, model, optimizer) for name in technique_names()))


def remove(model: nn.Module) -> None:
    """Give every module of a model its plain class back."""
    for module in model.modules():
        if type(module) is not plain_class(module):
            module.__class__ = plain_class(module)


def technique_names() -> list[str]:
    """Return the names of the files here that are techniques."""
    names = sorted(info.name for info in pkgutil.iter_modules(softmoe.accelerate.__path__))
    return [name for name in names if hasattr(import_module(f"softmoe.accelerate.{name}"), "switch_on")]


def _switch_on(name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Technique:
    if turned_off():
        return Technique(name, False, "turned off by SOFTMOE_ACCELERATE")
    try:
        return Technique(name, True, import_module(f"softmoe.accelerate.{name}").switch_on(model, optimizer))
    except Off as reason:
        return Technique(name, False, str(reason))
