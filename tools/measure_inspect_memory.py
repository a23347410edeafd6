"""Measure the peak memory of `softmoe inspect` for a few and for many images.

    python tools/measure_inspect_memory.py [--layers 32] [--slots 256] [--pixels 128] [--images 250 2000]

A Soft MoE of that many layers and slots with random weights and a token for every 16 x 16 pixels, narrow, so that its
own size does not matter, on scenes of `shapes`. Each number of images is a fresh process.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import softmoe

INSPECT = """
import resource, sys
from softmoe.cli import main
code = main(["inspect", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
raise SystemExit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--images", type=int, nargs="+", default=[250, 2000])
    wanted = parser.parse_args()
    shape = {"width": 32, "mlp_dim": 32, "heads": 2, "depth": wanted.layers, "blocks": tuple(range(wanted.layers))}
    model = softmoe.create_model(f"soft_s16_{wanted.slots}e", num_classes=10, image_size=wanted.pixels, **shape)
    with tempfile.TemporaryDirectory() as folder:
        softmoe.save_pretrained(model, Path(folder) / "model")
        for images in wanted.images:
            arguments = [f"{folder}/model", "shapes?size=32", "--examples", str(images), "--out", f"{folder}/{images}"]
            start = time.monotonic()
            done = subprocess.run([sys.executable, "-c", INSPECT, *arguments], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            peak = int(done.stderr.split()[-1]) / 1024
            print(f"{images:6,} images: {peak:6.0f} MiB at most, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
