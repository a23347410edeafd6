"""The right texts for an image, and the right image for a text, among all.

Letters: n images, t texts, E width of the common space.

Exact: every text is compared with every image, in float64, block by block, so memory does not grow with the data. A
score within TIE of the right one's counts as above it: a model that says the same of all gets nothing.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmoe.data import Captioned, captions_of
from softmoe.evaluate.command import OverFeatures, function
from softmoe.evaluate.features import Progress
from softmoe.evaluate.inputs import open_data, random_subset
from softmoe.evaluate.towers import load_towers

AT = (1, 5, 10)
TIE = 1e-9
_BLOCK = 1024


@dataclass(frozen=True)
class Retrieve(OverFeatures):
    """Recall at 1, 5 and 10 of two towers, both ways, among all images and all captions of the data."""

    model: str | Path
    """Folder of a saved model with two towers or of its run, or a Hub id (user/name)."""
    data: str
    """Source of images with captions: wds:PATTERN, pairs:PATH, hf:NAME, shapes."""
    _: KW_ONLY
    split: str = "val"
    examples: int | None = None
    """Search among so many images only, chosen at random (always the same ones)."""

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Recalls with all captions of every image. Images without a caption are left out."""
        source = Captioned(random_subset(open_data(self.data, self.split), self.examples), self.data)
        towers = load_towers(self.model, device=self.device, image_size=self.image_size)
        image_nE, features = towers.embed_images(source, **self.feature_options(progress))
        texts, owners = [], []
        for row, captions in enumerate(captions_of(source, features.indices)):
            texts += captions
            owners += [row] * len(captions)
        owner_t, number_n = torch.tensor(owners), torch.arange(len(image_nE))
        text_tE = towers.embed_texts(texts)
        return {
            "model": str(towers.saved.folder),
            "model_fingerprint": towers.saved.fingerprint,
            "data": {self.data: source.fingerprint},
            "split": self.split,
            "images": len(image_nE),
            "captions": len(texts),
            "left_out": len(source) - len(image_nE),
            "image_to_text": recalls(ranks(image_nE, number_n, text_tE, owner_t)),
            "text_to_image": recalls(ranks(text_tE, owner_t, image_nE, number_n)),
        }


retrieve = function(Retrieve)


def recalls(rank: Tensor, at: Sequence[int] = AT) -> dict[str, float]:
    """Share of the ranks (from 0) below each k, and the median rank counted from 1."""
    found = {f"recall@{k}": float((rank < k).double().mean()) for k in at}
    return found | {"median_rank": float(rank.double().median()) + 1}


def ranks(rows_rE: Tensor, owner_r: Tensor, others_cE: Tensor, owner_c: Tensor, block: int = _BLOCK) -> Tensor:
    """(r,): for each row, how many others of another owner are at least as near as the nearest of its own.

    From texts to images each row has one such other, from images to texts several.
    """
    found = []
    for row_bE, owner_b in zip(rows_rE.double().split(block), owner_r.split(block), strict=True):
        best_b = torch.full((len(row_bE),), -torch.inf, dtype=torch.float64)
        rank_b = torch.zeros(len(row_bE), dtype=torch.int64)
        for again in (False, True):  # first the nearest of the own, then who is nearer; the same products both times
            for other_cE, owners in zip(others_cE.split(block), owner_c.split(block), strict=True):
                cosine_bc = row_bE @ other_cE.double().T
                own_bc = owner_b[:, None] == owners
                if again:
                    rank_b += ((cosine_bc >= best_b[:, None] - TIE) & ~own_bc).sum(1)
                else:
                    best_b = torch.maximum(best_b, cosine_bc.masked_fill(~own_bc, -torch.inf).amax(1))
        found.append(rank_b)
    return torch.cat(found)
