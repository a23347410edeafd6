"""Run a service until it is told to end, with bounds on its connections.

uvicorn bounds neither the number of connections nor the time for a request's headers, nor that of a client that does
not read its answer. `Connection` adds these to uvicorn's h11 protocol, the one that is always used here. Where the
longest idle connection can be closed for a new one, it is: connections that do nothing keep nobody out.
"""

import asyncio
import errno
import functools
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from softmoe.inference.batching import ENDING, Limits
from softmoe.inference.service import Service

try:
    import uvicorn
    from h11 import LocalProtocolError
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ValueError(f"the service needs {error.name}: pip install 'softmoe-vit[serve]'") from error

BACKLOG = 128  # connections that the system may hold before they are taken, and that are taken at once
_FILES = BACKLOG + 64  # open files that are not connections kept
_READ_SIZE = 65_536  # bytes; asyncio's own 262,144 in chunks of one byte keep the event loop busy for seconds
_HEADER_BYTES = 16_384
_CLOSING = 1.5  # seconds, after those for requests under way, until the process ends whatever it does


class Connection(H11Protocol):
    """One connection, which is never without a time limit: for the next request's headers, or for the answer."""

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.began = False
        """Some bytes of the next request have come."""
        self.answering = False
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        transport.max_size = _READ_SIZE  # pyright: ignore[reportAttributeAccessIssue]
        self._expire_after(self.limits.header_seconds)
        if len(self.connections) > self.limits.max_connections:
            others: list[Any] = [c for c in self.connections if c is not self and not c.answering]  # pyright: ignore[reportAttributeAccessIssue]
            min(others, key=lambda c: c._since, default=self).give_up(503, "too many connections: try again later")

    def data_received(self, data: bytes) -> None:
        self.began = True
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if not self.answering and self.cycle is not None and not self.cycle.response_complete:
            self.answering = True
            self._expire_after(self.limits.timeout + self.limits.header_seconds)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP. If they are the body of a request, that request is answered by it."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # an answer is already on its way
            self.transport.abort()

    def on_response_complete(self) -> None:
        self.began = self.answering = False
        self._expire_after(self.limits.keep_alive_seconds + self.limits.header_seconds)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def give_up(self, status: int, reason: str) -> None:
        """Close the connection; with an answer, if it is free to take one."""
        if not self.answering and not self.transport.is_closing():
            body = json.dumps({"error": reason})
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\nretry-after: 1\r\n\r\n{body}".encode())
            self.transport.close()
        self.connections.discard(self)
        self.loop.call_later(1.0, self.transport.abort)  # if the client does not even take that

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except Exception:  # h11 is in a state from which nothing can be sent
            self.transport.abort()

    def _expire_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.answering or not self.began:
            self.transport.abort()
        else:
            self.give_up(408, f"no whole request came within {self.limits.header_seconds:g} seconds")


class Server(uvicorn.Server):
    """Serves `service` until it is told to end.

    Then requests under way get a moment to be answered, and are refused after it; at last the process ends, even if the
    event loop is stuck.
    """

    def __init__(self, service: Service):
        limits = replace(service.limits, max_connections=possible_connections(service.limits.max_connections))
        config = uvicorn.Config(
            service.app,
            http=functools.partial(Connection, limits=limits),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=int(ENDING) + 1,
            timeout_keep_alive=max(1, int(limits.keep_alive_seconds)),
        )
        super().__init__(config)
        self.service = service
        self.deadline = threading.Timer(ENDING + _CLOSING, exit_now, [service])
        self.deadline.daemon = True
        self._silent_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.deadline.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.end()
        await super().shutdown(sockets)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log once a minute that no files are left for connections, which asyncio would report for each of them."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + 60
            logging.getLogger("softmoe").error("no files are left for new connections; the next are taken in a second")


def possible_connections(wanted: int) -> int:
    """Return as many connections as the limit of open files allows, after raising it as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + _FILES:
        soft = wanted + _FILES if hard == resource.RLIM_INFINITY else min(wanted + _FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wanted = min(wanted, soft - _FILES)
    if wanted < 1:
        raise ValueError(f"the service needs more than {_FILES} open files, but the limit is {soft}: see ulimit -n")
    return wanted


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; ValueError where another program does, or the address is not ours."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error}") from error


def serve(service: Service, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve at `host` and `port` (0: any free one) until SIGTERM or SIGINT; then answer what waits and return.

    `started` gets the address once connections are taken. A batch that takes longer than all of this may ends with the
    process, which then does not return.
    """
    try:
        listener = listen(host, port)
    except ValueError:
        service.close()
        raise
    server = Server(service)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn takes them later, and raises them again when all is done
        signal.signal(number, server.handle_exit)
    started(f"http://{host}:{listener.getsockname()[1]}")
    with listener:
        server.run(sockets=[listener])
    server.deadline.cancel()
    if not service.ended:
        exit_now(service)


def exit_now(service: Service) -> None:
    """End the process and its decoders, whatever the other threads do."""
    service.reader.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
