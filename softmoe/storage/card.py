"""The model card: README.md of a saved model, made from its facts and from nothing else."""

from typing import Any

from softmoe.moe import SoftConfig
from softmoe.storage.saved import SavedModel

_LISTED = 20  # class names shown


def model_card(saved: SavedModel, parameters: int) -> str:
    config, p = saved.config, saved.preprocessing
    kind = "a dense vision transformer"
    rows: dict[str, Any] = {
        "parameters": f"{parameters:,}",
        "image": f"{config.image_shape[0]} x {config.image_shape[1]} pixels, patches of {config.patch_size}",
        "transformer": f"{config.depth} blocks, width {config.width}, {config.heads} heads, MLP {config.mlp_dim}",
        "pooling, positions": f"{config.pool}, {config.positions}",
        "outputs": "features (no head)" if config.num_classes is None else f"{config.num_classes} classes",
    }
    if config.moe:
        kind = f"a vision transformer with {config.moe.router.name.replace('_', ' ')} mixtures of experts"
        router = config.moe.router
        slots = f", {router.slots_per_expert} slots each" if isinstance(router, SoftConfig) else ""
        blocks = ", ".join(map(str, config.moe_blocks))
        rows["experts"] = f"{config.moe.num_experts} ({router.name}{slots}) in blocks {blocks}"
    if saved.towers:
        t = saved.towers.text
        kind = f"two towers, for images and texts; that for images is {kind}"
        rows["text"] = (
            f"{t.depth} blocks, width {t.width}, {t.heads} heads, up to {t.length} of {t.vocab_size:,} tokens"
        )
        rows["outputs"] = f"vectors of {saved.towers.embed_dim or config.width} numbers, for images and texts alike"
    if saved.dtypes:
        rows["weights"] = ", ".join(f"{dtype} ({count} tensors)" for dtype, count in saved.dtypes.items())
    crop = {
        "central": f"shorter side to {p.central_ratio:.4g} times the size, middle cut out",
        "resize": "stretched to the size",
    }[p.crop]
    preprocessing = f"RGB, {crop}, {p.image_size[0]} x {p.image_size[1]} pixels, values from -1 (black) to 1 (white)."
    sections = [
        "---\nlibrary_name: softmoe\npipeline_tag: "
        + task(saved)
        + "\ntags: [softmoe, vision-transformer, mixture-of-experts]\n---",
        f"# {saved.folder.name}",
        f"This is {kind}, saved by softmoe.",
        _table(rows),
        "## Use",
        use(saved),
        f"Images: {preprocessing}",
        "## Where it comes from",
        _table(_flat(saved.provenance)),
    ]
    if saved.classes:
        shown = ", ".join(saved.classes[:_LISTED])
        more = f", and {len(saved.classes) - _LISTED} more in config.json" if len(saved.classes) > _LISTED else ""
        sections += ["## Classes", f"{shown}{more}."]
    files = {name: f"{facts.bytes:,} bytes, SHA-256 `{facts.sha256}`" for name, facts in saved.files.items()}
    sections += ["## Files", _table(files)]
    return "\n\n".join(sections) + "\n"


def task(saved: SavedModel) -> str:
    """What the Hub calls it."""
    if saved.towers:
        return "zero-shot-image-classification"
    return "image-feature-extraction" if saved.config.num_classes is None else "image-classification"


def use(saved: SavedModel) -> str:
    name = saved.folder.name
    python = f'import softmoe\n\nmodel = softmoe.from_pretrained("{name}")'
    shell = f"softmoe predict {name} IMAGES..."
    if saved.towers:
        python = f'from softmoe.evaluate import load_towers\n\ntowers = load_towers("{name}")'
        shell = f'softmoe search {name} "a red car" FOLDER\nsoftmoe zeroshot {name} DATA'
    return f"```python\n{python}\n```\n\n```sh\n{shell}\n```"


def _table(rows: dict[str, Any]) -> str:
    cells = [(name, str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def _flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
