"""A recipe made to fit a shorter run or a small set."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from softmoe import recipes
from softmoe.data import open_source
from softmoe.train import TrainConfig, train
from softmoe.train.fit import fit, new_run, with_decay, with_epochs, with_mixing
from softmoe.train.folder import RunFolder, free_name
from softmoe.train.preview import memory_needed, preview

SMALL_RECIPES = [
    name for name in recipes.names() if name not in ("contrastive", "lit", "lit_small")
]  # those need pairs


@pytest.mark.parametrize("name", SMALL_RECIPES)
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_every_recipe_takes_few_steps(name: str, steps: int):
    """`--steps 60` works with any recipe: warm-up and cooldown fit, there are ten lines of metrics or one a step."""
    recipe = recipes.load(name)
    made, said = fit(replace(recipe, steps=steps), recipe)
    made.check()
    assert made.schedule.warmup + made.schedule.cooldown <= steps
    assert steps // made.log.every >= min(steps, 10)
    assert made.checkpoint.every <= max(1, -(-steps // 4))
    assert said.startswith(f"a run of {steps} steps, the recipe has {recipe.steps}: ")
    assert f"schedule.warmup {made.schedule.warmup} (was {recipe.schedule.warmup})" in said


def test_what_was_given_stays():
    """A key that the user set is not scaled, a run of the recipe's length or longer is not touched."""
    recipe = recipes.load("quickstart")
    short = replace(recipe, steps=60)
    made, said = fit(short, recipe, {"schedule.warmup", "log.every"})
    assert (made.schedule.warmup, made.log.every) == (recipe.schedule.warmup, recipe.log.every)
    assert "warmup" not in said
    for steps in (recipe.steps, 2 * recipe.steps):
        same = replace(recipe, steps=steps)
        assert fit(same, recipe) == (same, "")


def test_a_batch_of_pairs_is_at_most_half_the_set(tmp_path: Path):
    """Captions are told apart within a batch: of 30 pairs a batch has 8 and not 1,024; classes may repeat."""
    (tmp_path / "train").mkdir()
    for number in range(30):
        (tmp_path / "train" / f"{number}.jpg").write_bytes(b"x")
    recipe = recipes.load("lit")
    config = replace(recipe, data=replace(recipe.data, train=f"pairs:{tmp_path}"))
    made, said = fit(config, recipe)
    assert made.data.batch_size == 8
    assert said == "made to fit: data.batch_size 8 (was 1024)"
    assert fit(config, recipe, {"data.batch_size"}) == (config, "")


def test_long_runs_mix_their_images():
    """A run that sees each image often mixes them where the recipe says so, and tells of it; what is given stays."""
    recipe = recipes.load("small_data")
    data = replace(recipe.data, batch_size=4, mix_after=10)
    few, many = (replace(recipe, steps=steps, data=data) for steps in (10, 11))
    assert with_mixing(few, 4) == (few, "")
    mixed, said = with_mixing(many, 4)
    assert (mixed.data.transform.mixup, mixed.data.transform.cutmix) == (0.2, 1.0)
    assert said.startswith("each image is seen 11 times, so images are mixed; without: --data.transform.mixup 0 ")
    assert with_mixing(many, 4, {"data.transform.cutmix"}) == (many, "")
    assert with_mixing(mixed, 4) == (mixed, "")  # a recipe that mixes keeps its own shares
    never = replace(many, data=replace(data, mix_after=None))
    assert with_mixing(never, 4) == (never, "")


def test_decay_by_the_number_of_images():
    """Decay brings a matrix to 1 / e in so many epochs at the highest rate, by at most 0.5; what is given stays."""
    base = recipes.load("small_data")
    recipe = replace(
        base,
        data=replace(base.data, batch_size=2),
        optim=replace(base.optim, decay_epochs=500.0),
        schedule=replace(base.schedule, peak=0.01),
    )
    made, said = with_decay(recipe, 4)
    assert made == replace(recipe, optim=replace(recipe.optim, kernel_decay=0.1))
    left = (1 - made.schedule.peak * made.optim.kernel_decay) ** (500 * 2)
    assert left == pytest.approx(1 / math.e, rel=1e-3)
    assert said == "weight decay is 0.1, by the number of training images; another: --optim.kernel-decay"
    assert with_decay(made, 4)[0] == made
    assert with_decay(recipe, 4, {"optim.kernel_decay"}) == (recipe, "")
    fast = replace(recipe, optim=replace(recipe.optim, decay_epochs=3.0))
    assert with_decay(fast, 4)[0].optim.kernel_decay == 0.5
    never = replace(recipe, optim=replace(recipe.optim, decay_epochs=None))
    assert with_decay(never, 4) == (never, "")
    with pytest.raises(ValueError, match="decay_epochs is a number of epochs above 0, or None; got 0"):
        replace(recipe, optim=replace(recipe.optim, decay_epochs=0.0)).check()


def test_a_new_run_counts_its_images(tmp_path: Path):
    """Both follow from the photos of the folder, and the run's own words say so."""
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / f"{name}.jpg").write_bytes(b"x")
    base = recipes.load("small_data")
    recipe = replace(
        base,
        steps=300,
        data=replace(base.data, train=f"folder:{tmp_path}", mix_after=10),
        optim=replace(base.optim, decay_epochs=3.0),
        runs=str(tmp_path),
    )
    made, said = new_run(recipe, recipe, ())
    assert (made.data.transform.mixup, made.data.transform.cutmix, made.optim.kernel_decay) == (0.2, 1.0, 0.5)
    assert [sentence.split(",")[0] for sentence in said] == ["each image is seen 4800 times", "weight decay is 0.5"]


def test_epochs():
    """Steps that see each image so often."""
    config = replace(TrainConfig(), data=replace(TrainConfig().data, train="shapes?size=32", batch_size=64))
    assert with_epochs(config, 0.001, ()).steps >= 1
    assert with_epochs(config, 2, ()).steps == pytest.approx(2 * with_epochs(config, 1, ()).steps, abs=1)
    with pytest.raises(ValueError, match="above 0, got -1"):
        with_epochs(config, -1, ())


def test_second_runs_get_numbers(tmp_path: Path):
    """The same settings go on in their folder, others get the next number, and a chosen name is refused with what the
    user changed."""
    recipe = TrainConfig(run_name="mine", runs=str(tmp_path))
    assert free_name(recipe, recipe, named=False) == (recipe, "")
    RunFolder.of(recipe).path.mkdir()
    RunFolder.of(recipe).begin(recipe, {})
    assert free_name(recipe, recipe, named=False) == (recipe, "")
    other = replace(recipe, seed=5)
    made, said = free_name(other, recipe, named=False)
    assert made == replace(other, run_name="mine_2")
    assert "seed: 0 -> 5" in said
    assert f"so this one is {RunFolder.of(made).path}" in said
    RunFolder.of(made).path.mkdir()
    RunFolder.of(made).begin(made, {})
    assert free_name(other, recipe, named=False)[0] == made
    changed = replace(recipe, seed=7, data=replace(recipe.data, batch_size=3))
    RunFolder.of(recipe).begin(replace(recipe, steps=5, optim=replace(recipe.optim, beta1=0.5)), {})
    with pytest.raises(ValueError, match=r"seed: 0 -> 7\n  data.batch_size: 64 -> 3\n  and 1 more\nuse another --run-"):
        free_name(changed, recipe, named=True)


def test_what_follows_the_steps_is_not_counted(tmp_path: Path):
    """The refusal names the steps and the data that the user changed, not the warm-up that was made to fit."""
    recipe = TrainConfig(run_name="mine", runs=str(tmp_path), steps=60)
    recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=12, cooldown=6))
    RunFolder.of(recipe).path.mkdir()
    RunFolder.of(recipe).begin(recipe, {})
    (RunFolder.of(recipe).checkpoints / "step_00000060").mkdir(parents=True)
    other, _ = fit(replace(recipe, steps=10, data=replace(recipe.data, train="digits")), recipe)
    assert other.schedule.warmup == 2
    said = free_name(other, recipe, named=False)[1]
    assert "holds another run (steps: 60 -> 10, data.train: shapes -> digits), so" in said


def test_a_head_of_another_size():
    """More outputs than classes are remarked on, fewer are refused, in a dry run too."""
    source = open_source("shapes?size=16", "train")
    for outputs, said in ((len(source.classes), False), (len(source.classes) + 1, True)):
        config = replace(TrainConfig(), model=replace(TrainConfig().model, num_classes=outputs))
        config = replace(config, data=replace(config.data, train="shapes?size=16"))
        assert (f"the head has {outputs} outputs" in preview(config)) == said
    few = replace(config, model=replace(config.model, num_classes=2))
    with pytest.raises(ValueError, match="some outside the model's head, which has 2 classes"):
        preview(few)


@pytest.mark.parametrize(
    ("size", "cut"), [(16, []), (18, ["height and width"]), ((18, 16), ["height"]), ((22, 18), ["height", "width"])]
)
def test_pixels_that_no_patch_has(make_config, capsys: pytest.CaptureFixture, size, cut: list[str]):
    """A run and its dry run say of each side how many pixels are cut off, and the nearest sizes where none are."""
    config = make_config(steps=1, **{"data.transform.image_size": size})
    train(config)
    for said in (preview(config), capsys.readouterr().err):
        lines = [line.strip() for line in said.splitlines() if "not seen" in line]
        assert len(lines) == len(cut)
        for line, side in zip(lines, cut, strict=True):
            assert line.startswith("the last 2 of the ")
            assert f"pixels of the {side} are not seen, since patches have 4 a side; " in line
        if size == 18:
            assert lines[0].endswith("; 16 and 20 are whole")


def test_more_memory_than_there_is(make_config):
    """A dry run warns, and says what to lower: the batch if that helps, else the model."""
    model = {"model.name": "soft_s16_128e", "model.width": 384, "data.transform.image_size": 224}
    batch = make_config(**model, **{"data.batch_size": 10**9})
    experts = make_config(**model, **{"model.num_experts": 10**6})
    assert "the device has" not in preview(make_config())
    assert "the device has: raise accumulate, set activation_gb or gradient_checkpointing, or lower" in preview(batch)
    assert "the device has: take a smaller model" in preview(experts)


def test_weights_that_stay_have_no_gradients(make_config):
    """The memory of a run with frozen blocks counts gradients and moments of the other weights only."""
    whole, part = (
        memory_needed(c, c.model.resolve(10, 16)) for c in (make_config(), make_config(**{"optim.freeze": 0.5}))
    )
    for kind in ("gradients", "optimizer"):
        assert 0 < part[kind] < whole[kind]
    assert part["weights"] == whole["weights"]
    assert part["sum"] < whole["sum"]
