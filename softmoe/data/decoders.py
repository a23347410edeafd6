"""Decoder processes turn the bodies of requests into pixels, each body within a time limit.

An image of a few kilobytes can keep a decoder busy for minutes, and C code cannot be interrupted from a thread. So
strangers' images are decoded in processes, which are killed when they take too long and replaced. The processes are
copies of one server process that holds the decoder but not torch: each takes 20 MB and is ready within milliseconds.

An image that is not done within `QUICK_SECONDS` goes on at lower priority beside a new process that takes its place,
as long as no more such images than decoders are at work: a few expensive images do not hold up all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

from softmoe.data.decode import MAX_PIXELS, BrokenImage
from softmoe.data.fork_server import fork_server
from softmoe.data.transforms import Transform

QUICK_SECONDS = 0.25
MAX_MEMORY = 2_000_000_000  # bytes of address space in a decoder; an image of 50 million pixels takes up to half of it
MAX_PARTS = 16  # of a multipart form
_MAX_ANSWER = 100_000_000  # bytes
_NICE = 5  # of slow images: a quarter of a busy core
_DONE, _REFUSED, _FAILED = b"+", b"-", b"!"

Read = Callable[[bytes], bytes]
Body = bytes | bytearray


class SlowImage(ValueError):
    """An image was not decoded within the time limit, or its decoder died of it."""

    status = 422  # of HTTP


class TooManySlow(ValueError):
    """More images take long than may at the same time."""

    status = 503


def pixel_reader(transform: Transform, max_pixels: int = MAX_PIXELS) -> Read:
    """Return a function for `Decoders`: an image file -> (H, W, 3) uint8 of the model's size, as bytes."""
    return partial(_read_pixels, transform, max_pixels)


def _read_pixels(transform: Transform, max_pixels: int, data: bytes) -> bytes:
    try:
        return transform.read(data, "image", max_pixels).tobytes()
    except BrokenImage as error:
        raise ValueError(f"the image cannot be read: {error.reason}") from error


def image_in(body: bytes, content_type: str) -> bytes:
    """Return the body itself, or the one file in a multipart form. ValueError for a form without exactly one."""
    if not content_type.lower().startswith("multipart/form-data"):
        return body
    import python_multipart
    from python_multipart.exceptions import FormParserError

    files: list[bytes] = []
    parts = 0

    def count(_) -> None:
        nonlocal parts
        parts += 1
        if parts > MAX_PARTS:
            raise ValueError

    def keep(file) -> None:
        count(file)
        file.file_object.seek(0)
        files.append(file.file_object.read())

    in_memory = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}  # else large files go to disk
    try:
        headers = {"Content-Type": content_type.encode("latin-1")}
        parser = python_multipart.create_form_parser(headers, count, keep, config=in_memory)
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise ValueError(f"the multipart form cannot be read, or has more than {MAX_PARTS} parts") from error
    if len(files) != 1:
        raise ValueError(f"the form must hold one file, it holds {len(files)}")
    return files[0]


class _Decoder:
    """One child process. It answers in bytes, not pickles: a child that a hostile image took over stays harmless."""

    def __init__(self, read: Read, seconds: float):
        context = fork_server(["softmoe.data.decoders", "python_multipart"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_decode_requests, args=(theirs, read, seconds), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv_bytes(0)  # it is ready: no image's time goes into its start
        self.extra = False
        """Another has taken its place: it ends after this image."""

    def ask(self, body: Body, content_type: str) -> bytes:
        """Wait for the pixels: ValueError for what is no image, EOFError or OSError if the child is killed."""
        self.pipe.send_bytes(content_type.encode("latin-1"))
        self.pipe.send_bytes(body)
        answer = self.pipe.recv_bytes(_MAX_ANSWER)
        kind, rest = answer[:1], answer[1:]
        if kind == _DONE:
            return rest
        raise (ValueError if kind == _REFUSED else RuntimeError)(rest.decode(errors="replace"))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _decode_requests(pipe: Connection, read: Read, seconds: float) -> None:
    """Serve the parent from a child process: answer each body with the pixels of its image, or a sentence.

    The alarm ends the child if nobody is left who could.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff and the form's parser would let strangers fill the log
    if sys.platform == "linux":  # macOS refuses this limit; the size in pixels and the time are bounded there too
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(b"")
        while True:
            content_type, body = pipe.recv_bytes().decode("latin-1"), pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, seconds + 1)
            try:
                answer = _DONE + read(image_in(body, content_type))
            except ValueError as error:
                answer = _REFUSED + str(error).encode()
            except Exception as error:
                answer = _FAILED + f"{type(error).__name__}: {error}".encode()
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(answer)


class Decoders:
    """Has `count` processes call `read` (picklable) on images, each for `seconds` at most; used in one event loop."""

    def __init__(self, read: Read, count: int = 2, seconds: float = 5.0):
        if count < 1 or seconds <= 0:
            raise ValueError(f"at least one decoder and a time above 0 are needed, got {count} and {seconds}")
        self.seconds, self.count = seconds, count
        self.killed = 0
        self._new = partial(_Decoder, read, seconds)
        self._all: set[_Decoder] = set()
        self._idle: asyncio.Queue[_Decoder] = asyncio.Queue()
        self._slow = 0
        self._starting: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(4 * count, thread_name_prefix="softmoe-decode")
        self._closed = False

    async def open(self) -> None:
        await asyncio.gather(*(self._start() for _ in range(self.count)))

    def close(self) -> None:
        """Kill all processes, whatever they do."""
        self._closed = True
        for decoder in list(self._all):
            decoder.process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, body: Body, content_type: str = "") -> bytes:
        """Return what `read` makes of the image: its ValueError, or SlowImage or TooManySlow, where it is refused.

        A call that is cancelled leaves the queue, and its process is killed if it had begun.
        """
        decoder = await self._idle.get()
        asked = asyncio.get_running_loop().run_in_executor(self._threads, decoder.ask, body, content_type)
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits for it any more
        try:
            await asyncio.wait({asked}, timeout=QUICK_SECONDS)
            if not asked.done():
                await self._go_on_slowly(decoder, asked)
            return asked.result()
        except (EOFError, OSError) as error:
            raise SlowImage("the image cannot be read: the process that decoded it died") from error
        finally:
            failed = not asked.done() or isinstance(asked.exception(), EOFError | OSError)
            self._release(decoder, alive=not failed)

    async def _go_on_slowly(self, decoder: _Decoder, asked: asyncio.Future[bytes]) -> None:
        if self._slow >= self.count:
            raise TooManySlow("too many images that take long to decode: try again later")
        decoder.extra = True
        self._replace()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, decoder.process.pid or 0, _NICE)
        self._slow += 1
        try:
            await asyncio.wait({asked}, timeout=max(0.0, self.seconds - QUICK_SECONDS))
        finally:
            self._slow -= 1
        if not asked.done():
            raise SlowImage(f"the image takes longer than {self.seconds:g} seconds to decode")

    def _release(self, decoder: _Decoder, alive: bool) -> None:
        if alive and not decoder.extra:
            self._idle.put_nowait(decoder)
            return
        self._all.discard(decoder)
        if self._closed:
            return
        self.killed += not alive
        self._threads.submit(decoder.kill)
        if not decoder.extra:
            self._replace()

    def _replace(self) -> None:
        task = asyncio.get_running_loop().create_task(self._start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        while not self._closed:
            try:
                decoder = await asyncio.get_running_loop().run_in_executor(self._threads, self._new)
            except (OSError, EOFError) as error:  # no files or processes left
                logging.getLogger("softmoe").error("a decoder cannot be started, next try in a second: %s", error)
                await asyncio.sleep(1)
                continue
            self._all.add(decoder)
            self._idle.put_nowait(decoder)
            return
