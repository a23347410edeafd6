"""Measure what saving and loading a model costs in memory, as a multiple of its weights.

    python tools/measure_load_memory.py [--gigabytes 1] [--folder DIR] [--no-verify]

Makes a Soft MoE of about that size, saves it, then loads it in a fresh process that reads every weight (so that
every mapped page counts) and reports its peak resident memory, less that of a process that only imports softmoe.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PEAK = """
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
"""
IMPORT = f"""{PEAK}
import softmoe, torch
import softmoe.storage.pretrained
torch.ones(64, 64) @ torch.ones(64, 64)
print(peak())
"""
LOAD = f"""{PEAK}
import sys, softmoe
model = softmoe.from_pretrained(sys.argv[1], verify=sys.argv[2] == "verify")
total = sum(float(p.detach().sum()) for p in model.parameters())
print(peak())
"""
SAVE = f"""{PEAK}
import sys, json, softmoe, torch
experts = int(sys.argv[2])
model = softmoe.create_model("soft_s16_8e", num_experts=experts)
before = peak()
softmoe.save_pretrained(model, sys.argv[1])
print(json.dumps([before, peak(), sum(p.nbytes for p in model.parameters())]))
"""
EXPERT_BYTES = 6 * (2 * 384 * 1536 + 384 + 1536 + 384) * 4  # of S/16, in six blocks, with its slot


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--no-verify", action="store_true", help="skip the checksums")
    wanted = parser.parse_args()
    experts = max(1, round(wanted.gigabytes * 1e9 / EXPERT_BYTES))
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        target = str(Path(folder) / "model")
        before, after, weights = json.loads(run(SAVE, target, str(experts)))
        baseline = int(run(IMPORT))
        loaded = int(run(LOAD, target, "trust" if wanted.no_verify else "verify"))
        files = sorted(path.name for path in Path(target).glob("*.safetensors"))
    print(f"weights              {weights / 1e9:8.3f} GB, {experts} experts a layer, {len(files)} file(s)")
    more = (after - before) / weights
    print(f"peak while saving    {after / 1e9:8.3f} GB, {more:.3f} times the weights above holding them")
    print(f"imports alone        {baseline / 1e9:8.3f} GB")
    print(f"peak while loading   {loaded / 1e9:8.3f} GB")
    print(f"loading costs        {(loaded - baseline) / weights:8.3f} times the weights")


if __name__ == "__main__":
    main()
