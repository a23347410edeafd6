"""A small HTTP service takes an image and answers with classes or an embedding.

    POST /classify   the image file, or multipart/form-data with one file -> {"classes": [{"class", "probability"}]}
    POST /embed      the same -> {"embedding": [...]}
    GET  /health     200 while it works, 503 while it ends
    GET  /metrics    Prometheus text

Answers other than 200 are {"error": one sentence}: 400 not an image, 408 the body came too slowly, 411 no
Content-Length, 413 too large, 422 takes too long to decode, 503 too busy (try again after the seconds in Retry-After)
or ending. How bodies become questions and questions answers is handed in; connections are limited in serving.py.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from softmoe.inference.batching import ENDING, Batcher, Closed, Limits, Metrics, Overloaded

try:
    import python_multipart  # noqa: F401  # used by the decoders
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ValueError(f"the service needs {error.name}: pip install 'softmoe-vit[serve]'") from error


class Refused(Exception):
    """Raised to answer a request with another status than 200."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Reader(Protocol):
    """Makes questions of bodies. A ValueError says what is wrong; its `status` is the answer's, 400 if it has none."""

    killed: int

    async def open(self) -> None: ...

    def close(self) -> None: ...

    async def read(self, body: bytearray, content_type: str) -> Any: ...


class Service:
    """Answers requests; `app` is the ASGI application.

    `reader` makes a question of a body, `ask` answers a batch of questions, and `show` has for each path the function
    that turns an answer into JSON values.
    """

    def __init__(
        self,
        reader: Reader,
        ask: Callable[[list[Any]], Sequence[Any]],
        show: dict[str, Callable[[Any], dict[str, Any]]],
        *,
        about: dict[str, Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
    ):
        self.reader, self.show, self.limits = reader, show, limits
        self.about = about or {}
        self.metrics = Metrics()
        self.ending = False
        self.ended = False
        """Closed, with nothing left at work."""
        self._places: dict[asyncio.Timeout, str] = {}  # requests that are decoded or answered, and their addresses
        self._complete = 0  # bytes of bodies that wait to be decoded
        self._arriving: dict[asyncio.Timeout, int] = {}  # bytes of bodies that still come
        self._under_way: set[asyncio.Timeout] = set()
        self.batcher = Batcher(ask, limits)
        # a request's name is its route's: neither its path nor its Host header, which a stranger chooses
        routes = [Route(f"/{name}", partial(self._answer, name), methods=["POST"], name=name) for name in show]
        routes += [Route("/health", self._health), Route("/metrics", self._metrics)]
        self.app = Starlette(routes=routes, lifespan=self._life, exception_handlers={404: _plain, 405: _plain})
        self.app.router.redirect_slashes = False  # a redirect repeats the Host header

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        await self.reader.open()
        yield
        self.close()

    @property
    def present(self) -> int:
        """Count the requests that have a place."""
        return len(self._places)

    @property
    def held(self) -> int:
        """Count the bytes of bodies in memory."""
        return self._complete + sum(self._arriving.values())

    def close(self) -> None:
        """Kill the decoders and end the model's thread, unless it is within a long batch."""
        self.ending = True
        self.reader.close()
        self.ended = self.batcher.close(1.0)

    def end(self) -> None:
        """Give the requests under way a moment to be answered, before `close`."""
        self.ending = True
        at = asyncio.get_running_loop().time() + ENDING
        for limit in self._under_way:
            if not limit.expired():
                limit.reschedule(min(at, limit.when() or at))

    async def _answer(self, name: str, request: Request) -> Response:
        begun = time.monotonic()
        limit = asyncio.timeout(self.limits.timeout)
        try:
            async with limit:
                self._under_way.add(limit)
                reply = await self._reply(request, limit)
            response: Response = JSONResponse(self.show[name](reply))
        except Refused as refused:
            response = _refusal(refused.status, refused.reason)
        except TimeoutError:
            late = f"no answer within {self.limits.timeout:g} seconds: too busy, try again later"
            response = _refusal(503, "the service is ending" if self.ending else late)
        except ClientDisconnect:
            response = _refusal(400, "the connection was closed before the answer")
        except Exception:
            logging.getLogger("softmoe").exception("a request failed")
            response = _refusal(500, "the model failed on this request; the reason is in the service's log")
        finally:
            self._under_way.discard(limit)
        self.metrics.add(f"/{name}", response.status_code, time.monotonic() - begun)
        return response

    async def _reply(self, request: Request, limit: asyncio.Timeout) -> Any:
        address = request.client.host if request.client else ""
        self._find_place(address)
        async with self._body(request) as body:
            self._take_place(limit, address)  # from here on a request costs processor time
            try:
                reading = self.reader.read(body, request.headers.get("content-type", ""))
                question = await _while_connected(request, reading)
            except ValueError as error:
                self._places.pop(limit, None)
                raise Refused(getattr(error, "status", 400), str(error)) from error
            except BaseException:
                self._leave_place(limit)
                raise
        try:
            return await _while_connected(request, self._ask(question))
        finally:
            self._leave_place(limit)

    async def _ask(self, question: Any) -> Any:
        try:
            return await asyncio.wrap_future(self.batcher.submit(question))
        except Overloaded as error:
            raise Refused(503, "too many requests wait: try again later") from error
        except Closed as error:
            raise Refused(503, "the service is ending") from error

    def _find_place(self, address: str) -> asyncio.Timeout | None:
        """Refuse the request if there is no place for it. Return the time limit of the request that it would replace.

        Places are shared among addresses: while one has fewer than another it gets its place from that one, so that a
        flood from one address keeps only that address out.
        """
        if self.ending:
            raise Refused(503, "the service is ending")
        if self.present < self.limits.most_waiting + self.limits.max_batch:
            return None
        counts = Counter(self._places.values())
        greediest, most = counts.most_common(1)[0]
        if most <= counts[address] + 1:
            raise Refused(503, "too many requests wait: try again later")
        return next(limit for limit in reversed(self._places) if self._places[limit] == greediest)

    def _take_place(self, limit: asyncio.Timeout, address: str) -> None:
        if (other := self._find_place(address)) is not None:
            del self._places[other]
            if not other.expired():
                other.reschedule(asyncio.get_running_loop().time())
        self._places[limit] = address

    def _leave_place(self, limit: asyncio.Timeout) -> None:
        if self._places.pop(limit, None) is None:
            raise Refused(503, "too many requests wait: try again later")

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the whole body, or refuse it. It counts as held until it is let go.

        What is refused early is still read, and dropped, by the server: a client that is still sending would otherwise
        see a broken connection instead of the answer.
        """
        self._check_length(request.headers)
        body = bytearray()
        limit = asyncio.timeout(self.limits.body_idle_seconds)
        complete = 0
        try:
            async with limit:
                self._arriving[limit] = 0
                async for chunk in request.stream():
                    self._make_room(len(chunk), limit)
                    body += chunk
                    limit.reschedule(asyncio.get_running_loop().time() + self.limits.body_idle_seconds)
            complete = self._arriving.pop(limit)
            self._complete += complete
        except TimeoutError as error:
            idle = f"no more of the image came within {self.limits.body_idle_seconds:g} seconds"
            raise Refused(
                408, idle if limit in self._arriving else "the image came too slowly for a busy service"
            ) from error
        finally:
            self._arriving.pop(limit, None)
        try:
            yield body
        finally:
            self._complete -= complete

    def _check_length(self, headers: Headers) -> None:
        if "transfer-encoding" in headers:
            raise Refused(411, "send the image with a Content-Length, not in chunks")
        length = int(headers.get("content-length", 0))
        if not length:
            raise Refused(400, "the request is empty: send an image file as its body")
        if length > self.limits.max_bytes:
            raise Refused(413, f"the request is larger than {self.limits.max_bytes} bytes")
        if self._complete + length > self.limits.max_held_bytes:
            raise Refused(503, "too many images wait: try again later")

    def _make_room(self, size: int, limit: asyncio.Timeout) -> None:
        """Give up the largest unfinished bodies, until `size` more bytes may be held: small ones go first."""
        if limit not in self._arriving:
            raise TimeoutError
        self._arriving[limit] += size
        while self.held > self.limits.max_held_bytes:
            largest = max(self._arriving, key=self._arriving.__getitem__)
            if largest is limit:
                raise Refused(503, "too many images wait: try again later")
            del self._arriving[largest]
            if not largest.expired():
                largest.reschedule(asyncio.get_running_loop().time())

    async def _health(self, _: Request) -> Response:
        status = "ending" if self.ending else "ok"
        return JSONResponse({"status": status, **self.about}, 503 if self.ending else 200)

    async def _metrics(self, _: Request) -> Response:
        gauges = {"waiting": self.batcher.waiting, "requests_present": self.present, "held_bytes": self.held}
        counters = {
            "batches_total": self.batcher.batches,
            "images_total": self.batcher.images,
            "decoders_killed_total": self.reader.killed,
        }
        return PlainTextResponse(self.metrics.text(gauges, counters), media_type="text/plain; version=0.0.4")


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`, which is cancelled when the client goes away."""
    task, gone = asyncio.create_task(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _refusal(status: int, reason: str) -> Response:
    headers = {503: {"Retry-After": "1"}, 408: {"Connection": "close"}, 411: {"Connection": "close"}}
    return JSONResponse({"error": reason}, status, headers=headers.get(status))


async def _plain(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the same form as all others."""
    status = getattr(error, "status_code", 404)
    reason = "use POST with an image as the body" if status == 405 else "there are /classify, /embed, /health, /metrics"
    return JSONResponse({"error": reason}, status)
