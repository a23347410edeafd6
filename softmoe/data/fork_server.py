"""The server that worker processes are forked from, so that each starts quickly and Ctrl-C does not reach it."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from softmoe.machine import interrupts_blocked


def fork_server(preload: Sequence[str]) -> Any:
    """Start the server, unless it runs already, and return the context whose processes are forked from it.

    It imports the modules `preload` once for all. Ctrl-C reaches every process of a terminal, and the main one decides
    what to do: the server starts with the signal blocked, and its children inherit that. If they ignored the signal
    themselves, it could come before they do so and end in a traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # before the signal is blocked: its start lets the signal through again
    with interrupts_blocked():
        forkserver.ensure_running()
    return context
