"""A small HTTP service: an image in, classes or an embedding out.

    POST /classify   the image file, or multipart/form-data with one file -> {"classes": [{"class", "probability"}]}
    POST /embed      the same -> {"embedding": [...]}
    GET  /health     200 while it works, 503 while it ends
    GET  /metrics    Prometheus text

Answers other than 200 are {"error": one sentence}: 400 not an image, 408 the body came too slowly, 413 too large,
503 too busy (try again after the seconds in Retry-After) or ending. How bytes become questions and questions answers
is handed in.
"""

import asyncio
import io
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from softmoe.inference.batching import Batcher, Closed, Overloaded
from softmoe.inference.metrics import Metrics

try:
    import python_multipart
    from python_multipart.exceptions import FormParserError
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ValueError(f"the service needs {error.name}: pip install 'softmoe[serve]'") from error


@dataclass(frozen=True)
class Limits:
    max_batch: int = 8
    max_wait: float = 0.005
    """Seconds that a batch waits for others to fill it."""
    max_waiting: int = 32
    """Requests that may wait; further ones get 503."""
    max_bytes: int = 10_000_000
    timeout: float = 30.0
    """Seconds for a request, from its first byte to its answer."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_waiting", "max_bytes", "timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_wait < 0:
            raise ValueError(f"max_wait must not be negative, got {self.max_wait}")


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Service:
    """`read` makes a question of bytes (ValueError: cannot be decoded), `ask` answers a batch of questions, and `show`
    turns an answer into JSON values for a path, by name. `app` is the ASGI application."""

    def __init__(
        self,
        read: Callable[[bytes], Any],
        ask: Callable[[list[Any]], Sequence[Any]],
        show: dict[str, Callable[[Any], dict[str, Any]]],
        *,
        about: dict[str, Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
    ):
        self.read, self.show, self.limits = read, show, limits
        self.about = about or {}
        self.metrics = Metrics()
        self.ending = False
        self.present = 0
        self.decoders = ThreadPoolExecutor(2, thread_name_prefix="softmoe-decode")
        self.batcher = Batcher(
            ask, max_batch=limits.max_batch, max_wait=limits.max_wait, max_waiting=limits.max_waiting
        )
        routes = [Route(f"/{name}", self._answer, methods=["POST"]) for name in show]
        routes += [Route("/health", self._health), Route("/metrics", self._metrics)]
        self.app = Starlette(routes=routes, lifespan=self._life, exception_handlers={404: _plain, 405: _plain})

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self.close()

    def close(self) -> None:
        """Answer what waits and end the threads."""
        self.ending = True
        self.batcher.close()
        self.decoders.shutdown()

    async def _answer(self, request: Request) -> Response:
        begun = time.monotonic()
        name = request.url.path.strip("/")
        try:
            async with asyncio.timeout(self.limits.timeout):
                reply = await self._reply(request)
            response: Response = JSONResponse(self.show[name](reply))
        except Refused as refused:
            response = _refusal(refused.status, refused.reason)
        except TimeoutError:
            response = _refusal(503, f"no answer within {self.limits.timeout:g} seconds: too busy, try again later")
        except ClientDisconnect:
            response = _refusal(400, "the connection was closed before the whole image came")
        except Exception:
            logging.getLogger("softmoe").exception("a request failed")
            response = _refusal(500, "the model failed on this request; the reason is in the service's log")
        self.metrics.add(request.url.path, response.status_code, time.monotonic() - begun)
        return response

    async def _reply(self, request: Request) -> Any:
        body = await self._body(request)
        if self.present >= self.limits.max_waiting + self.limits.max_batch:
            raise Refused(503, "too many requests wait: try again later")
        self.present += 1  # from here on a request costs processor time
        try:
            data = image_bytes(body, request.headers.get("content-type", ""))
            loop = asyncio.get_running_loop()
            question = await loop.run_in_executor(self.decoders, self.read, data)
            return await asyncio.wrap_future(self.batcher.submit(question))
        except ValueError as error:
            raise Refused(400, str(error)) from error
        except Overloaded as error:
            raise Refused(503, "too many requests wait: try again later") from error
        except (Closed, RuntimeError) as error:
            if not self.ending:
                raise
            raise Refused(503, "the service is ending") from error
        finally:
            self.present -= 1

    async def _body(self, request: Request) -> bytes:
        """All of it, or a refusal. What is too large is read to its end (up to eight times the limit) and dropped: a
        client that is still sending would see a broken connection instead of the answer."""
        limit = self.limits.max_bytes
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.timeout):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        chunks.append(chunk)
                    elif size > 8 * limit:
                        break
                    else:
                        chunks.clear()
        except TimeoutError as error:
            raise Refused(408, f"the image did not come within {self.limits.timeout:g} seconds") from error
        if size > limit:
            raise Refused(413, f"the request is larger than {limit} bytes")
        if not size:
            raise Refused(400, "the request is empty: send an image file as its body")
        return b"".join(chunks)

    async def _health(self, _: Request) -> Response:
        status = "ending" if self.ending else "ok"
        return JSONResponse({"status": status, **self.about}, 503 if self.ending else 200)

    async def _metrics(self, _: Request) -> Response:
        gauges = {"waiting": self.batcher.waiting, "requests_present": self.present}
        counters = {"batches_total": self.batcher.batches, "images_total": self.batcher.images}
        return PlainTextResponse(self.metrics.text(gauges, counters), media_type="text/plain; version=0.0.4")


def image_bytes(body: bytes, content_type: str) -> bytes:
    """The body itself, or the one file in a multipart form. ValueError for a form without exactly one."""
    if not content_type.startswith("multipart/form-data"):
        return body
    files: list[bytes] = []

    def keep(file: Any) -> None:
        file.file_object.seek(0)
        files.append(file.file_object.read())
        file.close()

    headers: Any = {"Content-Type": content_type.encode(), "Content-Length": str(len(body)).encode()}
    try:
        python_multipart.parse_form(headers, io.BytesIO(body), lambda field: None, keep)
    except (FormParserError, ValueError) as error:
        raise ValueError("the multipart form cannot be read") from error
    if len(files) != 1:
        raise ValueError(f"the form must hold one file, it holds {len(files)}")
    return files[0]


def _refusal(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status, headers={"Retry-After": "1"} if status == 503 else None)


async def _plain(request: Request, error: Exception) -> Response:
    """404 and 405 in the same form as all others."""
    status = getattr(error, "status_code", 404)
    reason = "use POST with an image as the body" if status == 405 else "there are /classify, /embed, /health, /metrics"
    return JSONResponse({"error": reason}, status)
