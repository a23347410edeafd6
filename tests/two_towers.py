"""Small two-tower models, in memory and saved, for tests of several rooms."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from softmoe import save_pretrained
from softmoe.data import Tokenizer, open_source, some_captions, train_tokenizer
from softmoe.models import MoEConfig, TextConfig, TwoTower, TwoTowerConfig, ViTConfig
from softmoe.storage import TokenizerFile

IMAGE = ViTConfig(
    image_size=16,
    patch_size=8,
    width=16,
    depth=2,
    mlp_dim=16,
    heads=2,
    num_classes=None,
    moe=MoEConfig.of(num_experts=2, scale_init=4.0),
)
TEXT = TextConfig(vocab_size=0, length=16, width=16, depth=2, mlp_dim=16, heads=2, mask_padding=True)


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(some_captions(open_source("shapes", "train"), 300), 400)


def shape(**changes) -> TwoTowerConfig:
    return replace(TwoTowerConfig(IMAGE, replace(TEXT, vocab_size=tokenizer().size)), **changes)


def two_towers(seed: int = 0, **changes) -> TwoTower:
    torch.manual_seed(seed)
    return TwoTower(shape(**changes)).eval()


def save(folder: Path, seed: int = 0, **changes) -> Path:
    file = TokenizerFile(tokenizer().name, tokenizer().data)
    save_pretrained(two_towers(seed, **changes), folder, tokenizer=file, preprocessing={"image_size": (16, 16)})
    return folder
