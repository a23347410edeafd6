"""A trained model -> another one: fine-tuned, with experts, averaged, or cooled down from a checkpoint."""

from softmoe.transfer.finetune import branch, locked_config, plan_branch, refit_head, transfer_config
from softmoe.transfer.in_place import InPlace, upcycle_
from softmoe.transfer.soup import Soup, greedy_soup, soup
from softmoe.transfer.upcycle import Distance, Upcycled, compare_starts, distance, upcycle

__all__ = [
    "Distance",
    "InPlace",
    "Soup",
    "Upcycled",
    "branch",
    "compare_starts",
    "distance",
    "greedy_soup",
    "locked_config",
    "plan_branch",
    "refit_head",
    "soup",
    "transfer_config",
    "upcycle",
    "upcycle_",
]
