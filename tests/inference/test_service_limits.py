"""The service under hostile clients: bounds on time, memory and connections, over real sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import softmoe

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from services import ask, connect, everything, half_sent, served

SLEEP = b"__import__('time').sleep(600)"
PID = b"str(__import__('os').getpid()).encode()"
FORM = {"Content-Type": "multipart/form-data; boundary=xx"}


def later(work, *arguments) -> tuple[threading.Thread, list]:
    """A thread that calls `work`, and the list its result goes to."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(work(*arguments)), daemon=True)
    thread.start()
    return thread, found


def wait_until(true) -> None:
    """Patience without bound: the time limit of the test is the bound."""
    while not true():
        time.sleep(0.01)


def form(*parts: bytes) -> bytes:
    head = b'--xx\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    return b"".join(head + part + b"\r\n" for part in parts) + b"--xx--\r\n"


def test_slow_images_are_killed():
    """An image that takes too long gets 422 and its process is killed; others are answered before and after."""
    with served(decoders=1, decode_seconds=2.0) as (port, service):
        first = ask(port, "/classify", PID)
        thread, found = later(ask, port, "/classify", SLEEP)
        wait_until(lambda: service.present == 1)
        assert ask(port, "/classify", b"b'quick'") == (200, b'{"said":"quick"}')
        thread.join()
        assert found[0][0] == 422
        assert b"longer than 2 seconds to decode" in found[0][1]
        second = ask(port, "/classify", PID)
        assert (first[0], second[0]) == (200, 200)
        assert first[1] != second[1]
        assert service.reader.killed == 1


def test_few_slow_images_at_a_time():
    """Beyond as many slow images as decoders, the next one is told to come again; quick ones go on."""
    with served(decoders=1) as (port, service):
        slow = connect(port)
        slow.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(SLEEP) + SLEEP)
        wait_until(lambda: service.reader._slow == 1)
        status, text = ask(port, "/classify", SLEEP)
        assert (status, b"take long" in text) == (503, True)
        assert ask(port, "/classify", b"b'quick'")[0] == 200
        slow.close()
        wait_until(lambda: service.present == 0 and service.reader._slow == 0)  # gone with its client
        assert ask(port, "/classify", b"b'quick'")[0] == 200


def test_a_decoder_that_dies():
    """What kills a decoder is refused with a sentence, and the next request has another decoder."""
    with served(decoders=1) as (port, _):
        status, text = ask(port, "/classify", b"__import__('os').kill(__import__('os').getpid(), 9)")
        assert (status, json.loads(text)["error"]) == (
            422,
            "the image cannot be read: the process that decoded it died",
        )
        assert ask(port, "/classify", b"b'fine'")[0] == 200


def test_departed_clients_leave_the_queue():
    """Bodies whose clients went away are not decoded and not held."""
    with served(decoders=1, max_waiting=8) as (port, service):
        request = b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(SLEEP) + SLEEP
        connections = [connect(port) for _ in range(6)]
        for connection in connections:
            connection.sendall(request)
        wait_until(lambda: service.present >= 4)
        for connection in connections:
            connection.close()
        wait_until(lambda: (service.present, service.held) == (0, 0))


def test_forms_are_parsed_by_the_decoders():
    """A multipart form is taken apart in a decoder process, not in the service; one with many parts is refused."""
    with served() as (port, _):
        status, text = ask(port, "/classify", form(PID), **FORM)
        assert status == 200
        assert int(json.loads(text)["said"]) != os.getpid()
        status, text = ask(port, "/classify", form(*[b"x"] * 17), **FORM)
        assert (status, b"16 parts" in text) == (400, True)


def test_addresses_share_the_places():
    """An address that holds all places gives some to one that has none: its newest request gets 503 instead."""
    gate = threading.Event()

    def slow(questions: list[bytes]) -> list[bytes]:
        gate.wait()
        return questions

    with served(slow, max_batch=1, max_wait_ms=0.0, max_waiting=3, timeout=300.0) as (port, service):
        flood = []
        for count in range(1, 5):
            flood.append(later(ask, port, "/classify", b"b'flood'"))
            wait_until(lambda count=count: service.present == count)
        assert ask(port, "/classify", b"b'flood'")[0] == 503
        others = []
        for count in (1, 2):
            others.append(later(lambda: ask(port, "/classify", b"b'good'", **{"X-Forwarded-For": "192.0.2.1"})))
            wait_until(lambda count=count: list(service._places.values()).count("192.0.2.1") == count)
        assert ask(port, "/classify", b"b'good'", **{"X-Forwarded-For": "192.0.2.1"})[0] == 503  # two and two: even
        gate.set()
        for thread, _ in flood + others:
            thread.join()
        assert [found[0][0] for _, found in flood] == [200, 200, 503, 503]
        assert [found for _, found in others] == [[(200, b'{"said":"good"}')]] * 2
        assert b"too many requests wait" in flood[3][1][0][1]
        assert service.present == 0


def test_half_sent_bodies():
    """A body that comes to a halt gets 408, all bodies together hold no more than allowed, and others are answered."""
    limits = {
        "max_bytes": 1_000_000,
        "max_held_bytes": 2_000_000,
        "body_idle_seconds": 3.0,
        "keep_alive_seconds": 1.0,
        "header_seconds": 1.0,
    }
    with served(**limits) as (port, service):
        halted = []
        for _ in range(8):
            halted.append(half_sent(port, 1_000_000, 900_000))
            assert service.held <= 2_000_000
        wait_until(lambda: service.held >= 900_000)
        assert ask(port, "/classify", b"b'fine'".ljust(500_000))[0] == 200
        answers = [everything(connection) for connection in halted]
        assert all(answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 503")) for answer in answers if answer)
        assert sum(b"no more of the image came" in answer for answer in answers) >= 1
        assert service.held == 0


def test_lengths_are_checked_first():
    """A length that is too large, missing, or zero is refused by the header, before any of the body is read."""
    with served(max_bytes=1000) as (port, _):
        for length, status in ((b"Content-Length: 1001", b"413"), (b"Transfer-Encoding: chunked", b"411")):
            connection = connect(port)
            connection.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)
            connection.close()
        assert ask(port, "/classify", b"x" * 100_000)[0] == 413  # also for a client that sends all before it reads


def test_headers_have_a_time_limit():
    """Headers that do not end get 408, however steadily they come; a connection without a request is closed."""
    with served(header_seconds=1.0) as (port, _):
        nothing, slow = connect(port), connect(port)
        slow.sendall(b"POST /classify HTTP/1.1\r\n")
        thread, found = later(everything, slow)
        for k in range(1000):
            try:
                slow.sendall(b"X-%d: y\r\n" % k)
            except OSError:
                break
            time.sleep(0.05)
        assert everything(nothing) == b""
        thread.join()
        assert found[0] == b"" or found[0].startswith(b"HTTP/1.1 408")  # lost if more was sent after it


def test_connections_are_bounded():
    """At the limit, the longest idle connection makes room; those that wait for an answer are kept."""
    gate = threading.Event()

    def slow(questions: list[bytes]) -> list[bytes]:
        gate.wait()
        return questions

    with served(slow, max_connections=3) as (port, service):
        thread, found = later(ask, port, "/classify", b"b'kept'")
        wait_until(lambda: service.present == 1)
        idle = [connect(port) for _ in range(3)]
        assert b"503" in everything(idle[0]).split(b"\r\n")[0]
        gate.set()
        thread.join()
        assert found == [(200, b'{"said":"kept"}')]
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("host", [b"a]b[", b"[::1", b'x"}\x7f', b"", b"evil.example/metrics?x=1"])
def test_strange_host_headers(host):
    """A Host header changes neither the answer nor the names of what is counted; nothing is redirected to it."""
    with served() as (port, _):
        body = b"b'fine'"
        for path, status in ((b"/classify", b"200"), (b"/classify/", b"404"), (b"//x", b"404")):
            connection = connect(port)
            head = b"POST %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % (path, host, len(body)) + body)
            assert everything(connection).startswith((b"HTTP/1.1 " + status, b"HTTP/1.1 400"))
        text = ask(port, "/metrics")[1].decode()
        assert {line.split("path=")[1].split(",")[0] for line in text.splitlines() if "path=" in line} <= {
            '"/classify"'
        }


SERVICE = """
import sys, time
from softmoe.data.decoders import Decoders
from softmoe.inference.batching import Limits
from softmoe.inference.service import Service
from softmoe.inference.serving import serve

def model(questions):
    if b"stuck" in questions:
        time.sleep(600)
    return questions

def show(answer):
    if answer == b"loop":
        print("the event loop is stuck", flush=True)
        time.sleep(600)
    return {"said": answer.decode()}

service = Service(Decoders(eval), model, {"classify": show}, limits=Limits(max_batch=1))
serve(service, "127.0.0.1", 0, lambda address: print(address, flush=True))
print("returned", flush=True)
"""


@pytest.fixture
def process(tmp_path):
    """A service in a process of its own that may open 230 files; (port, process, its log)."""
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1])}
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = ["bash", "-c", 'ulimit -n 230; exec "$0" -c "$1"', sys.executable, SERVICE]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment, text=True)
    assert made.stdout is not None
    try:
        yield int(made.stdout.readline().rsplit(":", 1)[1]), made, log
    finally:
        made.kill()
        made.wait()
        made.stdout.close()


def test_end_whatever_is_under_way(process):
    """SIGTERM ends the service with code 0 within its time, with a stuck batch, stuck decoders and half-sent bodies."""
    port, made, log = process
    held = [connect(port), half_sent(port, 1_000_000, 1000)]
    assert ask(port, "/classify", b"str('torch' in __import__('sys').modules).encode()")[1] == b'{"said":"False"}'
    for body in (b"b'stuck'", SLEEP, SLEEP):
        held.append(half_sent(port, len(body), 0))
        held[-1].sendall(body)
    wait_until(lambda: b"softmoe_requests_present 3\n" in ask(port, "/metrics")[1])
    made.send_signal(signal.SIGTERM)
    assert made.wait(timeout=60) == 0  # the load test states the time
    for connection in held:
        connection.close()
    assert (made.stdout.read(), log.read_text()) == ("", "")  # it did not wait for the batch in order to return


def test_end_with_a_stuck_event_loop(process):
    """SIGTERM ends the service with code 0 even if its event loop never comes back, and its decoders with it."""
    port, made, _ = process
    decoder = int(json.loads(ask(port, "/classify", PID)[1])["said"])
    stuck = half_sent(port, 7, 0)
    stuck.sendall(b"b'loop'")
    assert made.stdout.readline() == "the event loop is stuck\n"
    made.send_signal(signal.SIGTERM)
    assert made.wait(timeout=60) == 0
    stuck.close()
    assert made.stdout.read() == ""
    wait_until(lambda: not Path(f"/proc/{decoder}").exists())


def test_end_of_an_idle_service(process):
    """SIGTERM lets `serve` return to its caller where nothing is stuck."""
    port, made, _ = process
    assert ask(port, "/classify", b"b'fine'")[0] == 200
    made.send_signal(signal.SIGTERM)
    assert made.wait(timeout=60) == 0
    assert made.stdout.read() == "returned\n"


def test_more_connections_than_files(process):
    """Far more connections than the system allows files: requests are answered, and the log stays short."""
    port, made, log = process
    many = []
    for _ in range(400):
        many.append(connect(port))
    assert ask(port, "/classify", b"b'fine'") == (200, b'{"said":"fine"}')
    for connection in many:
        connection.close()
    assert ask(port, "/classify", b"b'fine'")[0] == 200
    made.send_signal(signal.SIGTERM)
    assert made.wait(timeout=60) == 0
    assert len(log.read_text().splitlines()) <= 2


def test_strangers_write_nothing_into_the_log(process):
    """Bodies that are not HTTP, and forms that are none, are refused without a line in the log, however many come."""
    port, made, log = process
    chunked = b"POST /classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for body in (b"f" * 40 + b"\r\n", b"1;" + b"a" * 200_000, b"zz\r\n", b"5\r\nab"):
        connection = connect(port)
        connection.sendall(chunked + body)
        assert b" 4" in everything(connection)[:12]
    for kind in ("multipart/form-data", "multipart/form-data; boundary=yy"):
        assert ask(port, "/classify", form(b"b'a'"), **{"Content-Type": kind})[0] == 400
    assert ask(port, "/classify", b"b'fine'") == (200, b'{"said":"fine"}')
    made.send_signal(signal.SIGTERM)
    assert made.wait(timeout=60) == 0
    assert log.read_text() == ""
