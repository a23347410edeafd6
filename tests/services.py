"""Services with a model and a decoder of one's own, and ways to speak with them."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from softmoe.data.decoders import Decoders
from softmoe.inference.batching import Limits
from softmoe.inference.service import Service
from softmoe.inference.serving import Server


def ask(port: int, path: str, body: bytes | None = None, method: str | None = None, **headers: str):
    """Status and text of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def served(
    ask_model: Callable[[list[bytes]], list[bytes]] = list, decoders: int = 2, decode_seconds: float = 60.0, **limits
) -> Iterator[tuple[int, Service]]:
    """(port, service) of a service in a thread. Its decoders evaluate bodies as Python: a request says what decoding
    it is like."""
    reader = Decoders(eval, decoders, decode_seconds)
    service = Service(reader, ask_model, {"classify": lambda a: {"said": a.decode()}}, limits=Limits(**limits))
    server = Server(service)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                thread.join(0.01)
            yield listener.getsockname()[1], service
        finally:
            server.should_exit = True
            thread.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def half_sent(port: int, claimed: int, sent: int) -> socket.socket:
    """A connection whose request lacks the rest of its body."""
    connection = connect(port)
    connection.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % claimed)
    if sent:
        connection.sendall(b" " * sent)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Read until the connection is closed."""
    text = b""
    with connection:
        while True:
            try:
                more = connection.recv(65536)
            except ConnectionResetError:
                return text
            if not more:
                return text
            text += more
