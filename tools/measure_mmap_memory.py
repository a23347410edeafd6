"""Measure the memory of inference from mapped weights, beside the size of the weights.

    python tools/measure_mmap_memory.py [--gigabytes 2] [--folder DIR] [--batch 1]

Makes a Soft MoE of about that size, saves it, and runs it in a fresh process by softmoe.inference.open_mapped. A thread
reads the process's memory every few milliseconds: "anonymous" is what it owns and the system cannot take back, "mapped
pages" are those of the file, which it can drop at any time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SAVE = """
import sys, softmoe
softmoe.save_pretrained(softmoe.create_model("soft_s16_8e", num_experts=int(sys.argv[2])), sys.argv[1])
"""
RUN = """
import json, sys, threading, time, torch, softmoe
from softmoe.inference import open_mapped

def memory():
    rows = (line.split() for line in open("/proc/self/status"))
    return {row[0]: int(row[1]) * 1024 for row in rows if row[0] in ("RssAnon:", "RssFile:")}

images = torch.randn(int(sys.argv[2]), 3, 224, 224)
torch.ones(64, 64) @ torch.ones(64, 64)
before = peak = memory()
done = False

def watch():
    global peak
    while not done:
        now = memory()
        peak = {key: max(peak[key], now[key]) for key in peak}
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
model = open_mapped(sys.argv[1])
with torch.inference_mode():
    outputs = model(images)
    begun = time.perf_counter()
    model(images)
    seconds = time.perf_counter() - begun
done = True
thread.join()
layer = max(sum(p.nbytes for p in block.parameters()) for block in model.encoder.blocks)
weights = sum(p.nbytes for p in model.parameters())
assert outputs.isfinite().all()
grown = [peak[key] - before[key] for key in ("RssAnon:", "RssFile:")]
print(json.dumps([weights, layer, *grown, seconds]))
"""
EXPERT_BYTES = 6 * (2 * 384 * 1536 + 384 + 1536 + 384) * 4  # of S/16, in six blocks, with its slot


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--batch", type=int, default=1)
    wanted = parser.parse_args()
    experts = max(1, round(wanted.gigabytes * 1e9 / EXPERT_BYTES))
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        target = str(Path(folder) / "model")
        run(SAVE, target, str(experts))
        weights, layer, anonymous, file, seconds = json.loads(run(RUN, target, str(wanted.batch)))
    print(
        f"weights              {weights / 1e9:8.3f} GB, {experts} experts a layer, largest block {layer / 1e9:.3f} GB"
    )
    print(f"peak anonymous       {anonymous / 1e9:8.3f} GB, {anonymous / weights:.3f} of the weights")
    print(f"peak mapped pages    {file / 1e9:8.3f} GB, {file / layer:.2f} of the largest block")
    print(f"seconds a batch      {seconds:8.3f}, batch {wanted.batch}")


if __name__ == "__main__":
    main()
