"""Load `softmoe serve` with all that strangers can do to it at once, and measure what good clients notice of it.

    python tools/load_test_serve.py [--seconds 300] [--model NAME] [--weights int8] [--batch 8] [--json FILE]

Makes a model with random weights, runs the service and finds the rate at which three batches of clients get answers.
Then, for `--seconds`, from one address and a process of its own: 200 idle connections, 50 half-sent bodies, bodies that
come byte by byte, images that take long to decode (many scans, many pixels, on both sides of the limits), and ten times
the rate it can answer. Beside this, good clients ask at a steady rate, some from that address and some from one of
their own. Last, SIGTERM while all this goes on. Everything stays on this machine (Linux: 127.0.0.1, and 127.0.0.2 for
the second address).
"""

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from PIL import Image

IDLE, HALF_SENT, SLOW_BODIES, BOMBERS, CLIENTS = 200, 50, 10, 8, 100  # connections of each kind
TIMES = 10  # the load, over what the service can answer
GOOD_RATE = 2.0  # requests a second of good clients, from each of the two addresses
STRANGER, NEIGHBOR = "127.0.0.1", "127.0.0.2"

MAKE = """
import sys, torch, softmoe
model = softmoe.create_model(sys.argv[2], num_classes=1000)
torch.nn.init.normal_(model.head.weight)
softmoe.save_pretrained(model, sys.argv[1])
"""


def jpeg(height: int = 240, width: int = 320, **options: bool) -> bytes:
    noise = np.random.default_rng(0).normal(128, 40, (30, 40, 3)).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90, **options)
    return out.getvalue()


def bombs() -> list[bytes]:
    """Small files that take long to decode, or would if they were not refused."""
    progressive = jpeg(64, 64, progressive=True).replace(b"JFIF", b"Exif")
    frame, scan = progressive.index(b"\xff\xc2"), progressive.rindex(b"\xff\xda")

    def scans(count: int, side: int) -> bytes:
        sized = progressive[: frame + 5] + struct.pack(">HH", side, side) + progressive[frame + 9 : scan]
        return sized + progressive[scan:-2] * count + progressive[-2:]

    made = [scans(5000, 64), scans(80, 3000), scans(10, 7000)]  # refused; as much as is allowed, twice
    for side in (20_000, 7000):
        out = io.BytesIO()
        Image.new("1", (side, side)).save(out, "PNG")
        made.append(out.getvalue())
    return made


def head(length: int) -> bytes:
    return f"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


class Client:
    """One kept connection. An answer is its status, or the name of what went wrong with the connection."""

    def __init__(self, port: int, address: str = STRANGER):
        self.port, self.address = port, address
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, *parts: bytes, pause: float = 0.0) -> str:
        """Send the parts with pauses between them, and wait for an answer."""
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection(STRANGER, self.port, local_addr=(self.address, 0))
            reader, writer = self.streams
            answer = asyncio.ensure_future(self._answer(reader))
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    if pause and (await asyncio.wait({answer}, timeout=pause))[0]:
                        break
                return await answer
            finally:
                answer.cancel()
        except (OSError, asyncio.IncompleteReadError, EOFError) as error:
            self.close()
            return type(error).__name__

    async def _answer(self, reader: asyncio.StreamReader) -> str:
        text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(text.split("content-length:")[1].split()[0]))
        if "connection: close" in text:
            self.close()
        return text.split()[1]

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


@dataclass
class Heard:
    """What clients of one kind were answered, and the seconds that the answers with status 200 took."""

    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    async def add(self, asking: Awaitable[str]) -> str:
        begun = time.perf_counter()
        answer = await asking
        self.answers[answer] += 1
        if answer == "200":
            self.seconds.append(time.perf_counter() - begun)
        return answer

    def facts(self) -> dict[str, object]:
        cut = statistics.quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [float("nan")] * 99
        share = self.answers["200"] / max(1, self.answers.total())
        return {"answers": dict(self.answers), "share_200": share, "p50": cut[49], "p99": cut[98]}


async def sustained(port: int, body: bytes, clients: int, seconds: float) -> tuple[float, Heard]:
    """Images a second: every client asks again as soon as it is answered."""
    heard = Heard()
    begun = time.perf_counter()

    async def one(client: Client) -> None:
        while time.perf_counter() < begun + seconds:
            await heard.add(client.ask(head(len(body)) + body))
        client.close()

    await asyncio.gather(*(one(Client(port)) for _ in range(clients)))
    return heard.answers["200"] / (time.perf_counter() - begun), heard


async def steady(port: int, body: bytes, rate: float, address: str, heard: Heard) -> None:
    """Good requests at a fixed rate, whether or not answers come: half on kept connections, half on new ones."""
    free: list[Client] = []

    async def one(number: int) -> None:
        client = free.pop() if number % 2 and free else Client(port, address)
        await heard.add(client.ask(head(len(body)) + body))
        free.append(client) if number % 2 else client.close()

    async with asyncio.TaskGroup() as group:
        number = 0
        while True:
            group.create_task(one(number))
            number += 1
            await asyncio.sleep(1 / rate)


def attack(port: int, rate: float, stop: Event, results: multiprocessing.Queue) -> None:
    """Everything at once, from one process, until `stop`; then the answers of each kind."""
    body, heard = jpeg(), {kind: Heard() for kind in ("idle", "half-sent", "slow", "bombs", "load")}
    half, made = head(5_000_000) + bytes(2_500_000), bombs()

    async def again(kind: str, ask: Callable[[Client], Awaitable[str]], at_least: float) -> None:
        """One client that begins anew as soon as it is answered or thrown out, but not before its time."""
        client = Client(port)
        await asyncio.sleep(at_least * np.random.default_rng(id(client)).random())
        while True:
            pause = asyncio.create_task(asyncio.sleep(at_least))
            answer = await heard[kind].add(ask(client))
            if kind != "load" or not answer.isdigit():
                client.close()
            await pause

    async def run() -> None:
        letters = [bytes([letter]) for letter in body]
        tasks = [again("idle", lambda c: c.ask(), 0.5) for _ in range(IDLE)]
        tasks += [again("half-sent", lambda c: c.ask(half), 0.5) for _ in range(HALF_SENT)]
        tasks += [again("slow", lambda c: c.ask(head(len(body)), *letters, pause=1.0), 0.5) for _ in range(SLOW_BODIES)]
        for k in range(BOMBERS):
            bomb = made[k % len(made)]
            tasks.append(again("bombs", lambda c, bomb=bomb: c.ask(head(len(bomb)) + bomb), 0.5))
        ask_good = lambda c: c.ask(head(len(body)) + body)  # noqa: E731
        tasks += [again("load", ask_good, CLIENTS / (TIMES * rate)) for _ in range(CLIENTS)]
        under_way = [asyncio.create_task(task) for task in tasks]
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    asyncio.run(run())
    results.put({kind: each.facts() for kind, each in heard.items()})


def descendants(pid: int) -> list[int]:
    children = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return children + [further for child in children for further in descendants(child)]


def resident(pid: int) -> float:
    """Megabytes; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


async def watch(pid: int, memory: list[tuple[float, float]]) -> None:
    while True:
        memory.append((resident(pid), sum(resident(child) for child in descendants(pid))))
        await asyncio.sleep(1)


async def under_attack(
    pid: int, port: int, body: bytes, seconds: float
) -> tuple[Heard, Heard, list[tuple[float, float]]]:
    own, shared, memory = Heard(), Heard(), []
    good = (steady(port, body, GOOD_RATE, NEIGHBOR, own), steady(port, body, GOOD_RATE, STRANGER, shared))
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*good, watch(pid, memory))
    return own, shared, memory


@dataclass
class Ended:
    seconds: float
    code: int
    processes_left: int
    lines_logged: int


def end(server: subprocess.Popen[str], log: Path) -> Ended:
    """SIGTERM: how long the service took to end, and what it left behind."""
    children = descendants(server.pid)
    begun = time.perf_counter()
    server.terminate()
    code = server.wait()
    took = time.perf_counter() - begun
    time.sleep(2)
    left = sum(resident(child) > 0 for child in children)
    return Ended(took, code, left, len(log.read_text().splitlines()))


def python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def measure(a: argparse.Namespace, folder: str, temporary: Path) -> dict[str, object]:
    body = jpeg()
    command = [sys.executable, "-m", "softmoe", "serve", folder, "--port", "0", "--weights", a.weights]
    log = temporary / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--max-batch", str(a.batch)], stdout=subprocess.PIPE, stderr=file, text=True
        )
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    attacker = None
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        asyncio.run(sustained(port, body, 3 * a.batch, 2.0))
        rate, calm = asyncio.run(sustained(port, body, 3 * a.batch, a.rate_seconds))
        attacker = context.Process(target=attack, args=(port, rate, stop, results), daemon=True)
        attacker.start()
        own, shared, memory = asyncio.run(under_attack(server.pid, port, body, a.seconds))
        ended = end(server, log)
        stop.set()
        strangers = results.get(timeout=300)
    finally:
        server.kill()
        if attacker is not None:
            attacker.kill()
    third = len(memory) // 3
    thirds = [
        {"service": statistics.mean(m[0] for m in part), "children": statistics.mean(m[1] for m in part)}
        for part in (memory[:third], memory[-third:])
    ]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "seconds": a.seconds,
        "rate": rate,
        "clients": 3 * a.batch,
        "calm": calm.facts(),
        "good": {"own_address": own.facts(), "address_of_the_load": shared.facts()},
        "strangers": strangers,
        "memory_thirds": thirds,
        "memory_peak": max(sum(m) for m in memory),
        "memory": memory[:: max(1, len(memory) // 30)],
        "end": asdict(ended),
    }


def show(facts) -> None:
    """Print the table of docs/security.md."""
    load = sum(facts["strangers"]["load"]["answers"].values()) / facts["seconds"]
    print(f"rate before the attack    {facts['rate']:.1f} images/s with {facts['clients']} clients")
    print(f"load                      {load:.0f} requests/s, {load / facts['rate']:.1f} times that")
    for name, heard in {"before the attack": facts["calm"], **facts["good"], **facts["strangers"]}.items():
        answers = ", ".join(f"{answer}: {count}" for answer, count in sorted(heard["answers"].items()))
        times = f"p50 {heard['p50']:.2f} s, p99 {heard['p99']:.2f} s" if heard["answers"].get("200") else ""
        print(f"{name.replace('_', ' '):25} {100 * heard['share_200']:5.1f} % answered  {times:27}  {answers}")
    first, last = facts["memory_thirds"]
    print(f"memory of the service     {first['service']:.0f} MB in the first third, {last['service']:.0f} in the last")
    children = f"{first['children']:.0f} MB, {last['children']:.0f}"
    print(f"and of its children       {children}; peak {facts['memory_peak']:.0f} of all")
    print(f"SIGTERM                   exit code {facts['end']['code']} after {facts['end']['seconds']:.1f} s")
    print(f"processes left            {facts['end']['processes_left']}")
    print(f"lines in its log          {facts['end']['lines_logged']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="soft_ti16_16e")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack")
    parser.add_argument("--rate-seconds", type=float, default=5.0, help="in which the rate of the service is found")
    parser.add_argument("--folder", default=None, help="a saved model to use; default: make one")
    parser.add_argument("--json", default=None, help="a file for all figures")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or str(Path(temporary) / "model")
        if a.folder is None:
            python(MAKE, folder, a.model)
        facts = measure(a, folder, Path(temporary))
    show(facts)
    if a.json:
        Path(a.json).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
