"""The interfaces of timm's vision transformers and of the Hugging Face Hub's models, so that code for those takes ours.

Letters: B images, M tokens, D width.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

from torch import Tensor, nn

from softmoe.models.heads import Head

POOLS = {"avg": "mean", "token": "class", "map": "attention"}
"""Our names of pools, by timm's."""
NO_MATRIX = re.compile(r"(?:^|\.)(?:positions\.\w+|class_token|registers|phi|probe|b1|b2|center|log_width|queries)$")


def public(name: str) -> Any:
    """Return what the package offers under this name. It is looked up when called: models need no other room."""
    return getattr(import_module("softmoe"), name)


class HubInterface(nn.Module):
    """The methods of huggingface_hub's PyTorchModelHubMixin: each is the function `softmoe` has under its name."""

    def save_pretrained(self, folder: Any, **facts: Any) -> Any:
        """Write the model into a folder with its config.json and card, as `softmoe.save_pretrained` does."""
        return public("save_pretrained")(self, folder, **facts)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Put the model on the Hub under `user/name`, as `softmoe.push_to_hub` does, and return its address."""
        return public("push_to_hub")(self, name, **options)

    @classmethod
    def from_pretrained(cls, where: Any, *arguments: Any, **options: Any) -> Self:
        """Load a model from a folder or the Hub, as `softmoe.from_pretrained` does; `num_classes` gives a new head."""
        return public("from_pretrained")(where, *arguments, **options)


def undecayed(model: nn.Module) -> set[str]:
    """Return the parameters of two axes and more that are no matrices: positions, tokens, slots, experts' biases."""
    return {name for name, _ in model.named_parameters() if NO_MATRIX.search(name)}


class TimmInterface(nn.Module):
    """The methods and properties that timm's training and feature code expects of a vision transformer."""

    config: Any
    encoder: Any
    head: nn.Module
    class_token: nn.Parameter | None

    @property
    def num_classes(self) -> int:
        """The number of outputs of the head; 0 without one."""
        return self.config.num_classes or 0

    @property
    def embed_dim(self) -> int:
        """The width of the tokens."""
        return self.config.width

    @property
    def num_features(self) -> int:
        """The width of the tokens that `forward_features` returns."""
        return self.config.width

    @property
    def head_hidden_size(self) -> int:
        """The width of the vector that the head gets, which is the output of a model without one."""
        return self.config.head_width

    @property
    def in_chans(self) -> int:
        """The channels of images."""
        return 3

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for so many classes; 0 removes it."""
        if global_pool is not None and POOLS.get(global_pool, global_pool) != self.config.pool:
            raise ValueError(
                f"the pool of a model stays {self.config.pool!r}, so it cannot become {global_pool!r}; "
                "forward_features returns the tokens that are not pooled yet"
            )
        if num_classes < 0:
            raise ValueError(f"num_classes must be at least 0, which is no head, got {num_classes}")
        like = next(self.parameters())
        self.config = replace(self.config, num_classes=num_classes or None)
        head = Head(self.config.head_width, num_classes) if num_classes else nn.Identity()
        self.head = head.to(device=like.device, dtype=like.dtype).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of each block and compute its inside again in the backward pass."""
        self.encoder.recomputed = range(len(self.encoder.blocks) if enable else 0)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay beside norms and biases, which timm finds by their one axis."""
        return undecayed(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that assign parameters to layers, for layer-wise decay of the learning rate."""
        last = [(r"^encoder\.norm|^pool|^pre_logits", (99999,))]
        return {
            "stem": r"^(?:embed|positions|pre_norm)\.|^(?:class_token|registers)$",
            "blocks": [(r"^encoder\.blocks\.(\d+)", None), *last],
        }

    def embed_images(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the tokens of images and the (rows, columns) of their grid."""
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return (tokens after the last norm, list of the outputs of chosen blocks), or the list alone.

        `indices` are block numbers (negative ones from the end), one number means that many last blocks, None all; the
        outputs come in their order. They are maps (B, D, rows, columns) with output_fmt NCHW, for segmentation and
        detection heads, or tokens (B, M, D) with NLC. With `return_prefix_tokens` each comes with its class token and
        registers, if the model has any. `stop_early` leaves out the blocks after the last one asked for.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        depth = len(self.encoder.blocks)
        taken = self.block_numbers(indices, depth)
        last_map = self.config.last_map
        if output_fmt == "NCHW" and last_map is not None and max(taken) >= last_map:
            raise ValueError(
                f"after block {last_map} tokens are no longer cells of the image, so there are no maps: "
                "take blocks before, or output_fmt='NLC'"
            )
        x_BMD, grid = self.embed_images(x)
        prefix = x_BMD.shape[1] - grid[0] * grid[1]
        stop = max(taken) + 1 if stop_early else depth
        last_BMD, outputs = self.encoder.forward_blocks(x_BMD, grid=grid, taken=taken, depth=stop)

        def as_asked(output_BMD: Tensor) -> Any:
            tokens_BMD = self.encoder.norm(output_BMD) if norm else output_BMD
            cells_BMD = tokens_BMD[:, prefix:]
            value = cells_BMD.transpose(1, 2).unflatten(2, grid) if output_fmt == "NCHW" else cells_BMD
            return (value, tokens_BMD[:, :prefix]) if return_prefix_tokens and prefix else value

        found = dict(zip(sorted(set(taken)), map(as_asked, outputs), strict=True))
        intermediates = [found[number] for number in taken]
        return intermediates if intermediates_only else (self.encoder.norm(last_BMD), intermediates)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> tuple[Any, ...]:
        """Return the outputs of the last `n` blocks, or of the blocks `n`: tokens, or maps with `reshape`."""
        form = "NCHW" if reshape else "NLC"
        found = self.forward_intermediates(x, n, return_prefix_tokens, norm, output_fmt=form, intermediates_only=True)
        return tuple(found)

    @staticmethod
    def block_numbers(indices: int | Sequence[int] | None, depth: int) -> list[int]:
        """Return block numbers from 0. ValueError for blocks that do not exist."""
        if indices is None:
            return list(range(depth))
        if isinstance(indices, int):
            if not 1 <= indices <= depth:
                raise ValueError(f"the model has {depth} blocks, so not the last {indices} of them")
            return list(range(depth - indices, depth))
        wrong = [index for index in indices if not -depth <= index < depth]
        if wrong or not indices:
            raise ValueError(f"the model has the blocks 0 to {depth - 1}, not {wrong or 'none'}")
        return [index % depth for index in indices]
