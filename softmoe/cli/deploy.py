"""`softmoe export`, `upload` and `serve`: a trained model out in the world."""

import os
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from softmoe.cli.habits import check_model
from softmoe.cli.parse import parse
from softmoe.evaluate.api import OnDevice, OneModel, Storage
from softmoe.inference.batching import Limits


@dataclass(frozen=True)
class ExportArguments(OneModel, OnDevice):
    """Write a model as one file that runs without softmoe, for any batch size, and compare it with the model."""

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
    """cpu or cuda: where a file of torch-export or aoti will run. An ONNX file computes in float32."""


def export_command(argv: list[str]) -> int:
    a = parse(ExportArguments, argv, "export")

    import torch

    from softmoe.evaluate import load
    from softmoe.inference.export import SUFFIX, export

    loaded = load(
        a.model, device=a.device, image_size=a.image_size, precision="exact", foreign_options=a.foreign_options
    )
    model = loaded.model.float()
    if a.features:
        model.head = torch.nn.Identity()
    place = loaded.saved.folder
    out = a.out or Path((place.stem if place.is_file() else Path(a.model).resolve().name) + SUFFIX[a.to])
    classes = None if a.features else loaded.saved.classes
    about = {"preprocessing": loaded.preprocessing, "classes": classes, "overwrite": a.overwrite}
    made = export(model, out, a.to, precision=a.precision, **about)
    print(f"{made.path}  {made.bytes / 1e6:.1f} MB")
    for batch, difference in made.differences.items():
        print(f"batch {batch}: outputs differ from the model's by {difference:.1e} of the largest")
    return 0


@dataclass(frozen=True)
class UploadArguments:
    """Put a saved model on the Hugging Face Hub, with its card. You must be logged in there: `hf auth login`."""

    model: str
    """Folder of a saved model or of a run that has ended."""
    name: str
    """Its name on the Hub: user/name."""
    _: KW_ONLY
    private: bool = False
    """Show it to yourself only."""


def upload_command(argv: list[str]) -> int:
    a = parse(UploadArguments, argv, "upload")
    check_model("upload", [a.model, a.name])

    from softmoe.storage import hub, open_saved

    print(hub.upload(open_saved(a.model).folder, a.name, private=a.private))
    return 0


@dataclass(frozen=True)
class ServeArguments(OneModel, OnDevice, Limits):
    """Answer images sent over HTTP with their classes (POST /classify) or embeddings (POST /embed)."""

    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    weights: Storage = "float32"
    """How experts are stored; mapped: left in their file, for models larger than the memory."""
    top: int = 5
    """Classes in an answer."""
    max_pixels: int = 50_000_000
    """Largest image."""
    decoders: int = 2
    """Processes that decode images."""
    decode_seconds: float = 5.0
    """Seconds to decode an image; then its process is killed, and the answer is 422."""
    image_size: int | tuple[int, int] | None = None
    """Pixels, or HEIGHTxWIDTH; the size the model was saved with if not given."""


def serve_command(argv: list[str]) -> int:
    a = parse(ServeArguments, argv, "serve")
    if os.name == "nt":
        raise ValueError("softmoe serve limits what its processes may use, which needs Linux or macOS")
    if not 0 <= a.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {a.port}")

    from softmoe.inference.serving import listen, serve

    listen(a.host, a.port).close()  # a port in use shall not wait for the model
    print(f"loading {a.model}", file=sys.stderr, flush=True)

    from softmoe.data.decoders import Decoders, pixel_reader
    from softmoe.evaluate import load
    from softmoe.evaluate.classify import Predictor
    from softmoe.inference.service import Service

    loaded = load(
        a.model,
        device=a.device,
        image_size=a.image_size,
        weights=a.weights,
        precision=a.precision,
        foreign_options=a.foreign_options,
    )
    predictor = Predictor(loaded, top=a.top)
    decoders = Decoders(pixel_reader(loaded.transform, a.max_pixels), a.decoders, a.decode_seconds)
    show = {
        "classify": lambda prediction: {"classes": prediction.classes()},
        "embed": lambda prediction: {"embedding": prediction.features.tolist()},
    }
    if not predictor.names:
        del show["classify"]
    about = {"model": loaded.saved.folder.name, "fingerprint": loaded.saved.fingerprint, "weights": a.weights}
    service = Service(decoders, predictor.predict_pixels, show, about=about, limits=a)
    serve(service, a.host, a.port, lambda address: print(f"serving {a.model} at {address}", flush=True))
    return 0
