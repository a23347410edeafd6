"""Processes that decode images for a service."""

import asyncio

from softmoe.data.decoders import Decoders


class SlowToLoad:
    """Takes a second to arrive in another process, where it is `eval`."""

    def __reduce__(self):
        return eval, ("(__import__('time').sleep(1), eval)[1]",)

    def __call__(self, data: bytes) -> bytes:
        raise AssertionError("it is another thing where it is called")


def test_starting_is_no_image_s_time():
    """A process that is slow to start is not replaced as one whose image is slow to decode."""

    async def decode() -> bytes:
        decoders = Decoders(SlowToLoad(), count=1)
        await decoders.open()
        try:
            before = set(decoders._all)
            pixels = await decoders.read(b"b'pixels'")
            assert decoders._all == before
            return pixels
        finally:
            decoders.close()

    assert asyncio.run(decode()) == b"pixels"
