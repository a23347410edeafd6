"""The sets by name, and what share of the inputs each gets."""

from fuzzing.archives import ARCHIVES
from fuzzing.cases import Set
from fuzzing.http import HTTP
from fuzzing.images import IMAGES
from fuzzing.lines import LINES
from fuzzing.models import MODELS
from fuzzing.planted import PLANTED
from fuzzing.runs import CHECKPOINTS, RUNS
from fuzzing.tokenizers import TOKENIZERS
from fuzzing.weights import WEIGHTS

SETS: dict[str, Set] = {
    "images": IMAGES,
    "archives": ARCHIVES,
    "models": MODELS,
    "checkpoints": CHECKPOINTS,
    "runs": RUNS,
    "weights": WEIGHTS,
    "tokenizers": TOKENIZERS,
    "lines": LINES,
    "http": HTTP,
}
# share of the inputs by set: cheap ones get more
SHARES = {
    "images": 30, "archives": 15, "models": 10, "checkpoints": 8, "runs": 8, "weights": 10, "tokenizers": 10,
    "lines": 4, "http": 5,
}  # fmt: skip


def find_set(name: str) -> Set:
    return PLANTED if name == "planted" else SETS[name]
