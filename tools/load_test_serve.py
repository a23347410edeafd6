"""Load `softmoe serve` from this machine: sustained load, then ten times what it can answer, watching its memory.

    python tools/load_test_serve.py [--model NAME] [--weights int8] [--batch 8] [--seconds 20] [--overload-seconds 10]

Makes a model with random weights, times the prepared model alone at the same batch (before and after, in a process
of its own), then runs the service and sends it JPEGs of 320 x 240 over kept connections: first as fast as three batches
of clients get answers, then at ten times that rate whether or not answers come.
"""

import argparse
import asyncio
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

MAKE = """
import sys, torch, softmoe
model = softmoe.create_model(sys.argv[2], num_classes=1000)
torch.nn.init.normal_(model.head.weight)
softmoe.save_pretrained(model, sys.argv[1])
"""
BARE = """
import sys, time, torch
from softmoe.evaluate import load
loaded = load(sys.argv[1], weights=sys.argv[2])
batch, seconds = int(sys.argv[3]), float(sys.argv[4])
images = torch.randn(batch, 3, *loaded.preprocessing.image_size)
with torch.inference_mode():
    loaded.model(images)
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        loaded.model(images)
        done += batch
    print(done / (time.perf_counter() - begun))
"""

TURNS = 10  # of sustained load; memory is read after each


def jpeg() -> bytes:
    noise = np.random.default_rng(0).normal(128, 40, (30, 40, 3)).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


class Client:
    """One kept connection. An answer is its status, or the name of what went wrong with the connection."""

    def __init__(self, port: int, body: bytes):
        self.port = port
        self.request = f"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> str:
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            writer.write(self.request)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length:")[1].split()[0]))
            return head.split()[1]
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            return type(error).__name__

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def sustained(port: int, body: bytes, clients: int, seconds: float) -> tuple[float, list[float], Counter[str]]:
    """Images a second, the seconds each took, and the answers: every client asks again as soon as it is answered."""
    took: list[float] = []
    answers: Counter[str] = Counter()
    end = time.perf_counter() + seconds

    async def one(client: Client) -> None:
        while (begun := time.perf_counter()) < end:
            answers[await client.ask()] += 1
            took.append(time.perf_counter() - begun)
        client.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one(Client(port, body)) for _ in range(clients)))
    return answers["200"] / (time.perf_counter() - begun), took, answers


async def overload(port: int, body: bytes, rate: float, seconds: float) -> Counter[str]:
    """Requests at a fixed rate; each takes a free connection or opens another."""
    free: list[Client] = []
    answers: Counter[str] = Counter()

    async def one() -> None:
        client = free.pop() if free else Client(port, body)
        answers[await client.ask()] += 1
        free.append(client)

    tasks = []
    begun = time.perf_counter()
    while (now := time.perf_counter() - begun) < seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return answers


def resident(pid: int) -> float:
    """Megabytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="soft_s16_16e")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--overload-seconds", type=float, default=10.0)
    parser.add_argument("--folder", default=None, help="a saved model to use; default: make one")
    a = parser.parse_args()
    body = jpeg()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or str(Path(temporary) / "model")
        if a.folder is None:
            python(MAKE, folder, a.model)
        alone = (BARE, folder, a.weights, str(a.batch), str(min(10.0, a.seconds / 4)))
        bare = [float(python(*alone))]
        command = [sys.executable, "-m", "softmoe", "serve", folder, "--port", "0", "--weights", a.weights]
        server = subprocess.Popen([*command, "--max-batch", str(a.batch)], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            asyncio.run(sustained(port, body, 3 * a.batch, 2.0))
            memory, rates, took, answers = [resident(server.pid)], [], [], Counter()
            for _ in range(TURNS):
                rate, more, heard = asyncio.run(sustained(port, body, 3 * a.batch, a.seconds / TURNS))
                rates.append(rate)
                took += more
                answers += heard
                memory.append(resident(server.pid))
            rate = statistics.mean(rates)
            flood = asyncio.run(overload(port, body, 10 * rate, a.overload_seconds))
            memory.append(resident(server.pid))
        finally:
            server.terminate()
            code = server.wait()
        bare.append(float(python(*alone)))
    cut = statistics.quantiles(took, n=100)
    print(f"bare model, batch {a.batch}     {bare[0]:8.1f} and {bare[1]:.1f} images/s (before, after)")
    print(
        f"service, {3 * a.batch} clients     {rate:8.1f} images/s, {rate / statistics.mean(bare):.2f} of the bare model"
    )
    print(f"latency               {1e3 * cut[49]:8.0f} ms median, {1e3 * cut[98]:.0f} ms p99; answers {dict(answers)}")
    print(f"ten times the load    {sum(flood.values()):8d} requests; answers {dict(flood)}")
    during = " ".join(f"{megabytes:.0f}" for megabytes in memory[1:-1])
    print(f"memory of the service {memory[0]:8.0f} MB at first, {during} under load, {memory[-1]:.0f} at the end")
    print(f"exit code             {code:8d}")


if __name__ == "__main__":
    main()
