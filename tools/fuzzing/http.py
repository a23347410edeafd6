"""Damaged HTTP requests, to a service in a process of its own."""

import contextlib
import ctypes
import random
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fuzzing.cases import Case, Set, Wrong, built, encoded, pictures
from fuzzing.models import save_models
from fuzzing.mutations import mutate_bytes
from PIL import Image

SOCKET_SECONDS = 40  # longer than the service waits for the rest of a request


@dataclass
class Served:
    port: int
    requests: list[bytes]
    process: subprocess.Popen


def end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def http_seeds(work: Path) -> Served:
    model = built(work, "models", save_models) / "soft_ti8_4e"
    command = [sys.executable, "-m", "softmoe", "serve", str(model), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=end_with_parent
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rsplit(":", 1)[1])
    image = encoded(Image.fromarray(pictures()[0]), "JPEG")
    form = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n' + image + b"\r\n--xx--\r\n"
    head = "POST /{} HTTP/1.1\r\nHost: x\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n"
    found = [head.format(p, "image/jpeg", len(image)).encode() + image for p in ("classify", "embed")]
    found += [head.format("classify", "multipart/form-data; boundary=xx", len(form)).encode() + form]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (image[:500], image[500:])) + b"0\r\n\r\n"
    found += [b"POST /classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks]
    found += [b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % p for p in (b"health", b"metrics", b"x")]
    return Served(port, found, process)


def http_make(rng: random.Random, seeds: Served) -> Case:
    request = rng.choice(seeds.requests)
    head, end, body = request.partition(b"\r\n\r\n")
    match rng.randrange(3):
        case 0:
            request = mutate_bytes(rng, head) + end + body
        case 1:
            request = head + end + mutate_bytes(rng, body)
        case _:
            request = mutate_bytes(rng, request)
    return Case({"request": request})


def http_run(case: Case, _: Path, seeds: Served) -> str:
    request = case.files["request"]
    answer = exchange(seeds.port, request)
    if not answer and is_whole(request):  # or the machine stood still meanwhile
        answer = exchange(seeds.port, request)
    if seeds.process.poll() is not None:
        raise Wrong(f"the service ended with {seeds.process.returncode}")
    if not answer:
        if is_whole(request):
            raise Wrong("a whole request got no answer")
        return "right"
    status = int(answer.split(b" ", 2)[1])
    if status == 500 or not 100 <= status < 600:
        raise Wrong(f"status {status}: {answer[:300]!r}")
    if b"Traceback" in answer:
        raise Wrong("a traceback in the answer")
    if status >= 400:
        raise ValueError(f"status {status}")
    return "right"


def is_whole(request: bytes) -> bool:
    """Tell whether the request has all of its body, as far as this is easily told."""
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length:[ \t]*(\d{1,9})[ \t]*\r?$", head)
    if length:
        return len(body) >= int(length[1])
    return bool(end) and (b"chunked" not in head or body.endswith(b"\r\n0\r\n\r\n"))


def exchange(port: int, request: bytes) -> bytes:
    """Send a request and return its answer. One that is not whole is ended at once: nobody waits for the rest of it.

    To the service a connection that was ended is a client who has gone away and gets no answer, so a whole request
    leaves it open.
    """
    found = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS) as link,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        link.sendall(request)
        if not is_whole(request):
            link.shutdown(socket.SHUT_WR)
        while not is_whole(found) and (chunk := link.recv(65536)):
            found += chunk
    return found


HTTP = Set(http_seeds, http_make, http_run, seconds=60)
