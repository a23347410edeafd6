"""The service over real connections: answers, refusals, overload, and a clean end."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from saved_models import NAMES, tiny

import softmoe
from softmoe.cli import main
from softmoe.evaluate import predict

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from services import ask, served

from softmoe.inference.batching import Limits


def encoded(kind: str = "PNG", size=(40, 36)) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def bomb() -> bytes:
    """A few hundred kilobytes that unpack to 300 MB."""
    out = io.BytesIO()
    Image.new("1", (20_000, 15_000)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """`softmoe serve` in a process of its own, on a free port; (port, model folder). SIGTERM ends it with code 0."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    softmoe.save_pretrained(tiny(), folder / "model", classes=NAMES)
    command = [sys.executable, "-m", "softmoe", "serve", str(folder / "model"), "--port", "0", "--weights", "int8"]
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = ["--max-bytes", "400000", "--max-pixels", "1000000", "--max-batch", "4"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield int(line.rsplit(":", 1)[1]), folder / "model"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_classes_are_those_of_predict(running, kind, tmp_path):
    """The same image in a file and in a request gets the same classes and probabilities."""
    port, model = running
    (tmp_path / "image").write_bytes(encoded(kind))
    status, text = ask(port, "/classify", encoded(kind))
    assert status == 200
    found = [(row["class"], row["probability"]) for row in json.loads(text)["classes"]]
    (expected,), _ = predict(model, tmp_path / "image", weights="int8")
    assert [name for name, _ in found] == [name for name, _ in expected.top]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected.top], abs=1e-5)


def test_embedding_and_forms(running):
    """The vector before the head; a multipart form is as good as a plain body."""
    port, model = running
    _, text = ask(port, "/embed", encoded())
    plain = json.loads(text)["embedding"]
    assert len(plain) == 32
    parts = [b"--xx", b'Content-Disposition: form-data; name="image"; filename="a.png"', b"", encoded(), b"--xx--", b""]
    body = b"\r\n".join(parts)
    status, text = ask(port, "/embed", body, **{"Content-Type": "multipart/form-data; boundary=xx"})
    assert status == 200
    assert json.loads(text)["embedding"] == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"no image", {}, 400, "not an image"),
        (b"", {}, 400, "is empty"),
        (encoded("JPEG")[:1500], {}, 400, "cannot be read"),
        (encoded("PNG")[:2000], {}, 400, "cannot be read"),
        (bomb(), {}, 400, "too many pixels"),
        (b"x" * 500_000, {}, 413, "larger than 400000 bytes"),
        (b"--xx\r\n", {"Content-Type": "multipart/form-data; boundary=xx"}, 400, "form"),
        (b"abc", {"Content-Type": "multipart/form-data"}, 400, "form"),
    ],
    ids=["text", "empty", "cut jpeg", "cut png", "bomb", "large", "cut form", "no boundary"],
)
def test_refusals(running, body, headers, status, words):
    """What cannot be decoded, or is too large, gets a sentence and a status of 4xx."""
    found, text = ask(running[0], "/classify", body, **headers)
    assert (found, words in json.loads(text)["error"]) == (status, True), text


def test_other_paths(running):
    """Unknown paths and wrong methods say what there is; health and metrics are there."""
    port, _ = running
    assert ask(port, "/nothing")[0] == 404
    assert ask(port, "/classify", method="GET")[0] == 405
    status, text = ask(port, "/health")
    assert (status, json.loads(text)["status"], json.loads(text)["weights"]) == (200, "ok", "int8")
    ask(port, "/classify", encoded())
    status, text = ask(port, "/metrics")
    lines = text.decode().splitlines()
    assert status == 200
    counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert counted['softmoe_requests_total{path="/classify",status="200"}'] >= 1
    assert counted["softmoe_images_total"] >= counted["softmoe_batches_total"] >= 1
    assert counted['softmoe_request_seconds_bucket{le="+Inf"}'] == counted["softmoe_request_seconds_count"]


def test_overload_is_clean():
    """With all places taken, everyone else gets 503 and a sentence; those who have a place get their answers."""
    gate = threading.Event()

    def slow(questions: list[bytes]) -> list[bytes]:
        gate.wait()
        return questions

    found: list[tuple[int, bytes]] = []
    lock = threading.Lock()
    refused = threading.Semaphore(0)

    def one(port: int) -> None:
        answer = ask(port, "/classify", b"b'hello'")
        with lock:
            found.append(answer)
        if answer[0] == 503:
            refused.release()

    with served(slow, max_batch=2, max_wait_ms=0.0, max_waiting=4, timeout=300.0) as (port, service):
        threads = [threading.Thread(target=one, args=(port,)) for _ in range(60)]
        for thread in threads:
            thread.start()
        for _ in range(60 - 6):
            assert refused.acquire(timeout=120)
        gate.set()
        for thread in threads:
            thread.join()
    assert sorted({status for status, _ in found}) == [200, 503]
    assert all(json.loads(text)["error"].startswith("too many") for status, text in found if status == 503)
    answered = [text for status, text in found if status == 200]
    assert len(answered) in (5, 6)  # four that waited, and one or two in the batch at work
    assert set(answered) == {b'{"said":"hello"}'}
    assert service.present == 0


def test_too_slow():
    """A request that is not answered in time is told so."""
    gate = threading.Event()

    def stuck(questions: list[bytes]) -> list[bytes]:
        gate.wait()
        return questions

    with served(stuck, max_batch=1, max_wait_ms=0.0, timeout=0.2) as (port, _):
        status, text = ask(port, "/classify", b"b'slow'")
        gate.set()
    assert status in (408, 503)  # 408 if this machine was too busy to bring the few bytes over in time
    assert b"within 0.2 seconds" in text


def test_a_failing_model():
    """An error in the model is not the client's, and does not end the service."""

    def model(questions: list[bytes]) -> list[bytes]:
        if b"fail" in questions:
            raise RuntimeError("broken")
        return questions

    with served(model, max_batch=1, max_wait_ms=0.0, timeout=300.0) as (port, _):
        assert ask(port, "/classify", b"b'fail'")[0] == 500
        assert ask(port, "/classify", b"b'fine'")[0] == 200


def test_a_port_in_use(tmp_path, capsys, monkeypatch):
    """A port that is taken is one line and exit code 2, before the model is loaded; loading it is said."""

    def loading(*_, **__):
        raise ValueError("the model was loaded")

    monkeypatch.setattr("softmoe.evaluate.load", loading)
    softmoe.save_pretrained(tiny(), tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"loading {tmp_path / 'model'}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(tmp_path / "model"), "--port", str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "cannot listen at 127.0.0.1" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [{"max_batch": 0}, {"timeout": 0.0}, {"max_bytes": -1}, {"max_wait_ms": -1.0}, {"max_held_bytes": 10}]
)
def test_limits(wrong):
    """Limits that make no sense are refused."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


EARLY = """
import os, signal, sys
from softmoe.data.decoders import Decoders
from softmoe.inference.service import Service
from softmoe.inference.serving import serve

serve(Service(Decoders(eval), list, {}), "127.0.0.1", 0, lambda _: os.kill(os.getpid(), getattr(signal, sys.argv[1])))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_told_to_end_at_once(name):
    """A signal that comes before the first connection could be taken ends the service as any other does."""
    environment = os.environ | {"PYTHONPATH": str(Path(softmoe.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", EARLY, name], env=environment, timeout=100).returncode == 0
