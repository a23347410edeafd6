"""What a service counts, in the text format of Prometheus."""

import threading
from collections import Counter
from collections.abc import Mapping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Requests by path and status, and how long they took. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * len(SECONDS)
        self._sum, self._count = 0.0, 0

    def add(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            if status != 200:
                return
            self._sum += seconds
            self._count += 1
            for index, limit in enumerate(SECONDS):
                self._buckets[index] += seconds <= limit

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """All of it, with values that others keep."""
        with self._lock:
            lines = ["# TYPE softmoe_requests_total counter"]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'softmoe_requests_total{{path="{path}",status="{status}"}} {count}')
            lines.append("# TYPE softmoe_request_seconds histogram")
            for limit, count in zip(SECONDS, self._buckets, strict=True):
                lines.append(f'softmoe_request_seconds_bucket{{le="{limit}"}} {count}')
            lines.append(f'softmoe_request_seconds_bucket{{le="+Inf"}} {self._count}')
            lines += [f"softmoe_request_seconds_sum {self._sum}", f"softmoe_request_seconds_count {self._count}"]
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE softmoe_{name} {kind}", f"softmoe_{name} {value}"]
        return "\n".join(lines) + "\n"
