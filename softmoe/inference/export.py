"""Export a model to one file that runs without softmoe: torch.export, ONNX, or a compiled AOTInductor package.

Soft MoE exports well: static shapes, no sorting, no dropped tokens, only products and softmaxes. The written file is
run at two batch sizes and compared with the model; a file that differs is removed.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softmoe.accelerate.torch_private import compile_package
from softmoe.inference.prepared import prepare
from softmoe.machine import Precision, choose_precision
from softmoe.paths import home_path
from softmoe.storage.files import path_in_errors, whole_file, write_json, write_text
from softmoe.storage.preprocessing import Preprocessing

FORMATS = ("torch-export", "onnx", "aoti")
logger = logging.getLogger("softmoe")
Format = Literal["torch-export", "onnx", "aoti"]
SUFFIX = {"torch-export": ".pt2", "onnx": ".onnx", "aoti": ".pt2"}
BATCHES = (1, 3)
TOLERANCE = 1e-3
"""The allowed difference, relative to the largest output. Float32 sums in another order differ by about 1e-6."""
PREPROCESS = Path(__file__).with_name("preprocess.py")
DECODING = (
    "preprocess.py is the exact form: EXIF orientation applied; JPEG decoded at 1/2, 1/4 or 1/8 of its size if the "
    "crop still has the pixels it needs; transparent pixels on white; grays of 16 bits or float scaled to 8; the crop "
    "cut to whole pixels, then Pillow's BOX filter where a central crop shrinks, else bilinear; value * 2 / 255 - 1"
)
_ONNX_LIMIT = 1_500_000_000  # bytes; an ONNX file holds less than 2 GB, larger weights lie beside it


@dataclass(frozen=True)
class Exported:
    """An exported file, and how far its outputs are from the model's."""

    path: Path
    format: str
    bytes: int
    differences: dict[int, float]
    """Batch size -> largest difference, relative to the largest output."""


def export(
    model: nn.Module,
    path: str | Path,
    to: Format,
    *,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None = None,
    precision: Precision = "float32",
    overwrite: bool = False,
) -> Exported:
    """Write `model` ((B, 3, height, width) in [-1, 1] -> (B, outputs)) for any batch size, and check the file.

    The file runs on the kind of device that the model is on, with products of that precision. Beside it are written a
    .json of the same name with the size and crop of its images and the names of its classes, and preprocess.py, which
    makes inputs of image files. ValueError if one of the files exists, unless `overwrite`.
    """
    if to not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {to!r}")
    target = home_path(path)
    if not target.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {target.resolve().parent} to write {target.name} into")
    if target.suffix != SUFFIX[to]:
        raise ValueError(f"a file of {to} must end in {SUFFIX[to]}, got {target.name}")
    beside, helper = Path(f"{target}.json"), target.with_name("preprocess.py")
    if not overwrite:
        _check_free(target, beside, helper)
    device = next(model.parameters()).device
    if to == "onnx" and device.type != "cpu":
        raise ValueError(f"an ONNX file is traced on the CPU, and the model is on {device}: move it with model.cpu()")
    dtype = choose_precision(precision, device, logger.warning)
    if to == "onnx" and dtype is not None:
        raise ValueError("an ONNX file computes in float32: leave out --precision")
    plain = prepare(model, copy_weights=False)
    plain = plain if dtype is None else ComputeIn(plain, dtype)
    height, width = preprocessing.image_size
    draw = torch.Generator().manual_seed(0)
    inputs = {batch: (torch.rand(batch, 3, height, width, generator=draw) * 2 - 1).to(device) for batch in BATCHES}
    written = (target, Path(f"{target}.data"))
    with torch.no_grad(), warnings.catch_warnings(), whole_or_none(*written):
        warnings.simplefilter("ignore")  # exporters warn about their own internals
        run = {"torch-export": _torch_export, "onnx": _onnx, "aoti": _aoti}[to](plain, inputs[BATCHES[1]], target)
        differences = {batch: _difference(run(images), plain(images)) for batch, images in inputs.items()}
        worst = max(differences.values())
        if not worst <= TOLERANCE:
            raise ValueError(f"{target} was removed: its outputs differ from the model's by {worst:.1e} of the largest")
    facts = {
        "format": to,
        "device": device.type,
        "precision": "float32" if dtype is None else str(dtype).removeprefix("torch."),
        "input": "images",
        "preprocessing": asdict(preprocessing) | {"decoding": DECODING},
        "classes": classes,
    }
    write_json(beside, facts, indent=1)
    write_text(helper, PREPROCESS.read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in written if path.exists())
    return Exported(target, to, size, differences)


@contextmanager
def whole_or_none(target: Path, data: Path) -> Iterator[None]:
    """Remove what an exporter wrote if it ends early, as on a full disk; an error of the system then names the file."""
    before = {path: path.stat() for path in (target, data) if path.exists()}
    try:
        with path_in_errors(target, data):
            yield
    except BaseException:
        for left in (target, data):
            if left.exists() and left.stat() != before.get(left):
                left.unlink()
        raise


class ComputeIn(nn.Module):
    """A model with products in another type, which an exported file keeps; its outputs stay float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model.eval(), dtype

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=self.dtype):
            return self.model(images).float()


def _check_free(target: Path, beside: Path, helper: Path) -> None:
    taken = [path for path in (target, beside) if path.exists()]
    if helper.exists() and helper.read_bytes() != PREPROCESS.read_bytes():
        taken.append(helper)
    if taken:
        names = " and ".join(path.name for path in taken)
        raise ValueError(f"{target.resolve().parent} has {names} already: write elsewhere, or add --overwrite")


Run = Callable[[Tensor], Tensor]


def trace(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """Trace `model` on its own device, for any batch size."""
    return torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _torch_export(model: nn.Module, images: Tensor, target: Path) -> Run:
    whole = io.BytesIO()  # on a full disk torch's writer would end the process
    torch.export.save(trace(model, images), whole)
    with whole_file(target) as file:
        file.write(whole.getbuffer())
    return torch.export.load(target).module()


def _aoti(model: nn.Module, images: Tensor, target: Path) -> Run:
    return compile_package(trace(model, images), target)


def _onnx(model: nn.Module, images: Tensor, target: Path) -> Run:
    try:
        import onnx  # noqa: F401  # all three are needed; the first two by torch's exporter
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"export to ONNX needs {error.name}: pip install 'softmoe-vit[export]'") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    torch.onnx.export(
        trace(model, images),
        f=str(target),
        input_names=["images"],
        output_names=["outputs"],
        dynamo=True,
        external_data=size > _ONNX_LIMIT,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        outputs: Any = session.run(None, {"images": images.numpy()})
        return torch.from_numpy(outputs[0])

    return run


def _difference(ours: Tensor, plain: Tensor) -> float:
    if ours.shape != plain.shape:
        return float("inf")
    return float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-12))
