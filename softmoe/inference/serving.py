"""Run a service until it is told to end."""

import signal
import socket
from collections.abc import Callable

from softmoe.inference.service import Service

try:
    import uvicorn
except ImportError as error:
    raise ValueError(f"the service needs {error.name}: pip install 'softmoe[serve]'") from error


def serve(service: Service, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve at `host` and `port` (0: any free one) until SIGTERM or SIGINT; then answer what waits and return.

    `started` gets the address once connections are taken.
    """
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except (OSError, OverflowError) as error:
        service.close()
        raise ValueError(f"cannot listen at {host}, port {port}: {error}") from error
    config = uvicorn.Config(
        service.app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(service.limits.timeout) + 1,
        timeout_keep_alive=30,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when all is done: that is no news then
        signal.signal(number, lambda *_: None)
    started(f"http://{host}:{listener.getsockname()[1]}")
    with listener:
        server.run(sockets=[listener])
