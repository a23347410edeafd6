"""Measure what a soup costs in memory, as a multiple of the weights of one model.

    python tools/measure_soup_memory.py [--gigabytes 1] [--models 3] [--folder DIR]

Makes Soft MoEs of about that size, averages them in a fresh process and reports its peak resident memory, less that of
a process that only imports softmoe.
"""

import argparse
import subprocess
import sys
import tempfile

PEAK = """
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
"""
IMPORT = f"{PEAK}\nimport softmoe.transfer.soups, torch\ntorch.ones(64, 64) @ torch.ones(64, 64)\nprint(peak())"
SOUP = f"{PEAK}\nimport sys\nfrom softmoe.transfer.soups import soup\nsoup(sys.argv[2:], sys.argv[1])\nprint(peak())"
SAVE = """
import sys, softmoe
model = softmoe.create_model("soft_s16_8e", num_experts=int(sys.argv[1]))
for folder in sys.argv[2:]:
    softmoe.save_pretrained(model, folder)
print(sum(p.nbytes for p in model.parameters()))
"""
EXPERT_BYTES = 6 * (2 * 384 * 1536 + 384 + 1536 + 384) * 4  # of S/16, in six blocks, with its slot


def run(code: str, *arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    wanted = parser.parse_args()
    experts = max(1, round(wanted.gigabytes * 1e9 / EXPERT_BYTES))
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        models = [f"{folder}/{index}" for index in range(wanted.models)]
        weights = run(SAVE, str(experts), *models)
        baseline, peak = run(IMPORT), run(SOUP, f"{folder}/soup", *models)
    print(f"weights        {weights / 1e9:8.3f} GB each, {wanted.models} models")
    print(f"imports alone  {baseline / 1e9:8.3f} GB")
    print(f"peak of soup   {peak / 1e9:8.3f} GB")
    print(f"a soup costs   {(peak - baseline) / weights:8.3f} times the weights of one model")


if __name__ == "__main__":
    main()
