"""`softmoe export MODEL --to FORMAT`: a file that runs without softmoe."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Write a model as one file that runs without softmoe, for any batch size, and compare it with the model."""

    model: str
    """Folder of a saved model or of a run, or a Hub id (user/name)."""
    _: KW_ONLY
    to: Literal["torch-export", "onnx", "aoti"]
    """torch-export: any torch; onnx: ONNX Runtime and others; aoti: compiled for this kind of processor or GPU."""
    out: Path | None = None
    """File to write; the model's name with .pt2 or .onnx if not given. Beside it: the same
    name with .json added, for its classes and crop, and preprocess.py, which reads images for it."""
    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given. It is fixed in the file."""
    features: bool = False
    """Give the vector before the head instead of the logits."""
    overwrite: bool = False
    """Replace files that are there already."""
    device: str = "cpu"
    """cpu or cuda: where a file of torch-export or aoti will run."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "export")

    import torch

    from softmoe.evaluate import load
    from softmoe.inference.export import SUFFIX, export

    loaded = load(a.model, device=a.device, image_size=a.image_size)
    model = loaded.model.float()
    if a.features:
        model.head = torch.nn.Identity()
    out = a.out or Path(Path(a.model).resolve().name + SUFFIX[a.to])
    classes = None if a.features else loaded.saved.classes
    made = export(model, out, a.to, preprocessing=loaded.preprocessing, classes=classes, overwrite=a.overwrite)
    print(f"{made.path}  {made.bytes / 1e6:.1f} MB")
    for batch, difference in made.differences.items():
        print(f"batch {batch}: outputs differ from the model's by {difference:.1e} of the largest")
    return 0
