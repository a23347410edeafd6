"""What people type out of habit, in the words of our settings.

The last part of a key is enough where only one key has it (--batch-size is --data.batch-size), other libraries' names
are known (--lr is --schedule.peak), a switch needs no value (--compile is --compile True), and what is done in another
way here gets the sentence that says how.
"""

from collections.abc import Collection

SAME = {
    "arch": "model.name",
    "bs": "data.batch_size",
    "clip_grad": "optim.clip_norm",
    "data": "data.train",
    "dataset": "data.train",
    "depth": "model.depth",
    "experts": "model.num_experts",
    "gradient_accumulation_steps": "accumulate",
    "image_size": "data.transform.image_size",
    "img_size": "data.transform.image_size",
    "learning_rate": "schedule.peak",
    "lr": "schedule.peak",
    "mlp_dim": "model.mlp_dim",
    "model": "model.name",
    "name": "run_name",
    "num_experts": "model.num_experts",
    "num_workers": "data.workers",
    "opt": "optim.name",
    "optimizer": "optim.name",
    "save_every": "checkpoint.every",
    "scale_init": "model.scale_init",
    "slots": "model.slots_per_expert",
    "slots_per_expert": "model.slots_per_expert",
    "smoothing": "objective.label_smoothing",
    "warmup_steps": "schedule.warmup",
    "width": "model.width",
    "workers": "data.workers",
}
HOW = {
    "config": "the settings file is the recipe: softmoe train FILE.py, or softmoe train runs/NAME",
    "resume": "a stopped run continues by itself: give the same command again, or softmoe train runs/NAME",
    "weight_decay": "weight decay has a key for each kind of weight: --optim.kernel-decay (matrices), "
    "--optim.head-decay and --optim.scale-decay",
    "wd": "weight decay has a key for each kind of weight: --optim.kernel-decay (matrices), "
    "--optim.head-decay and --optim.scale-decay",
    "amp": "the precision is a key: --precision bfloat16",
    "bf16": "the precision is a key: --precision bfloat16",
    "fp16": "the precision is a key: --precision",
    "gpus": "one process a GPU: torchrun --nproc-per-node N -m softmoe train ...",
    "out": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "output": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "output_dir": "a run goes to the folder RUNS/RUN_NAME: set --run-name (and --runs)",
    "pretrained": "to start from a trained model: softmoe finetune MODEL DATA",
    "eval": "to evaluate a trained model: softmoe evaluate MODEL DATA",
}


def translate(argv: list[str], keys: Collection[str], switches: Collection[str]) -> tuple[list[str], set[str]]:
    """Return the words with whole keys in them, and the keys. ValueError where a word may mean two of them."""
    found: list[str] = []
    given: set[str] = set()
    for index, word in enumerate(argv):
        if not word.startswith("--") or word == "--":
            found.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        key = whole_key(name.replace("-", "_"), keys)
        given.add(key)
        found.append(f"--{key.replace('_', '-')}{equals}{value}" if key in keys else word)
        alone = not equals and (index + 1 == len(argv) or argv[index + 1].startswith("--"))
        if key in switches and alone:
            found.append("True")
    return found, given


def whole_key(name: str, keys: Collection[str]) -> str:
    """Return the key that is meant, or the name as it is if it is like none: the parser then says what is near."""
    if name in keys:
        return name
    if name in SAME:
        return SAME[name]
    if name in HOW:
        raise ValueError(f"there is no --{name.replace('_', '-')}: {HOW[name]}")
    ends = sorted(key for key in keys if key.endswith(f".{name}"))
    if len(ends) > 1:
        words = " or ".join(f"--{key.replace('_', '-')}" for key in ends)
        raise ValueError(f"--{name.replace('_', '-')} may mean {words}: write the whole key")
    return ends[0] if ends else name
