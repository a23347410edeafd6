"""A trained model -> another one: fine-tuned, with experts, averaged, or cooled down from a checkpoint.

Names are loaded when first used: the options of the commands do without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from softmoe.evaluate.api import OnDevice, OthersWeights
from softmoe.lazy import lazy_names
from softmoe.paths import check_new

if TYPE_CHECKING:
    from softmoe.transfer.finetune import branch, locked_config, plan_branch, transfer_config, write_finished
    from softmoe.transfer.in_place import InPlace, upcycle_
    from softmoe.transfer.soups import Souped, greedy_soup, soup
    from softmoe.transfer.upcycling import Distance, Upcycled, compare_starts, distance, upcycle

_HOMES = {
    "finetune": ("branch", "locked_config", "plan_branch", "transfer_config", "write_finished"),
    "in_place": ("InPlace", "upcycle_"),
    "soups": ("Souped", "greedy_soup", "soup"),
    "upcycling": ("Distance", "Upcycled", "compare_starts", "distance", "upcycle"),
}

__all__ = [
    "Distance",
    "InPlace",
    "Soup",
    "Souped",
    "Upcycle",
    "UpcycleOptions",
    "Upcycled",
    "branch",
    "compare_starts",
    "distance",
    "greedy_soup",
    "locked_config",
    "plan_branch",
    "soup",
    "transfer_config",
    "upcycle",
    "upcycle_",
    "write_finished",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """The options of `upcycle` and of the command: how many experts, where, and how they start."""

    experts: int = 16
    slots: int = 1
    """Slots per expert."""
    blocks: str | tuple[int, ...] = "last_half"
    """last_half, or block numbers as in 6,7,8."""
    router: str = "soft"
    init: str = "beside"
    """beside keeps the MLPs and adds narrow experts whose output begins at zero: nothing is lost. The others put copies
    of the MLPs in their place, with routers that are fresh (copy) or set from the tokens of --data (centers, positions,
    or closest: the better of these, refined). compare tries all, saves none and recommends one."""
    expert_dim: int | None = None
    """Hidden width of each expert; None is a sixteenth of the MLP's beside it, and all of it in its place."""
    redraw: float = 0.0
    """Copies: share of each expert's hidden units that are drawn anew."""
    noise: float = 0.0
    """Copies: added to each expert, relative to the deviation of its weights."""
    capacity_factor: float | None = None
    """Sparse routers: room for tokens."""


@dataclass(frozen=True)
class Upcycle(UpcycleOptions, OthersWeights):
    """Make a model with experts from a dense one, save it, and say how far its output is from the dense one's."""

    dense: str
    """A saved model, a run, a Hub id (user/name), or others' weights: a .safetensors or .npz file, or their folder
    (original ViT, big_vision, timm, Hugging Face, open_clip, torchvision)."""
    _: KW_ONLY
    data: str | None = None
    """Images for the routers and the report: a folder, or a source as in training."""
    split: str = "train"
    images: int = 128
    """Images of --data: so many for the routers, and as many others for the report."""
    out: str | None = None
    """Folder of the new model; None only reports."""
    image_size: int | None = None
    """Image size of others' weights whose positions do not tell."""
    device: str = "auto"
    """auto (a CUDA device if there is one, else the processor), cpu, cuda, cuda:1 or mps."""
    seed: int = 0

    def run(self, report: Callable[[str], None] = lambda line: None) -> Upcycled | str:
        """Return the model and its distance, or with init "compare" the table; both can be printed."""
        check_new(self.out, "--out", a_file=False)

        from softmoe.transfer.upcycling import run_upcycle

        return run_upcycle(self, report)


@dataclass(frozen=True)
class Soup(OnDevice):
    """Average the weights of models that were fine-tuned from the same one: one model, better than each, at no cost."""

    models: tuple[str, ...]
    """Folders of saved models or of runs."""
    _: KW_ONLY
    out: str
    """Folder of the new model; it must be new or empty."""
    greedy: bool = False
    """Best first, and keep only those that do not lower the accuracy on --data."""
    data: str | None = None
    """Greedy: images to choose by (not those the result is later judged by): a folder, or a source as in training."""
    split: str = "val"
    examples: int | None = None
    """Greedy: use this many images only, drawn at random."""
    batch_size: int = 64

    def run(self, report: Callable[[str], None] = lambda line: None) -> Souped:
        """Save the average, and return which models went into it with their scores."""
        if self.greedy != (self.data is not None):
            raise ValueError("--greedy and --data belong together: a greedy soup is chosen by its accuracy on data")
        check_new(self.out, "--out", a_file=False)

        from softmoe.transfer.soups import run_soup

        return run_soup(self, report)
