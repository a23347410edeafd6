"""What every rank needs, imported once by the fork server."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import softmoe.parallel
import softmoe.train  # noqa: F401
