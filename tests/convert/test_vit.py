"""Arrays in the naming of the original ViT and of big_vision: the same function as the model they came from."""

import numpy as np
import pytest
import torch
from convert.plain import RAW, RENUMBERED, PlainViT, flax_names

from softmoe.convert import from_vit


def check_equal(plain: PlainViT, model: torch.nn.Module) -> None:
    images = torch.randn(2, 3, *plain.image_size, dtype=torch.float64)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("counters", [RAW, RENUMBERED])
@pytest.mark.parametrize("representation", [None, 7])
def test_the_original_names(counters, representation):
    """Raw and renumbered counters, with and without the tanh layer; sizes and heads come from the arrays."""
    plain = PlainViT(representation=representation)
    model = from_vit(flax_names(plain, counters))
    c = model.config
    assert (c.width, c.depth, c.mlp_dim, c.heads, c.patch_size, c.image_size) == (16, 2, 24, 2, 4, 12)
    assert (c.pool, c.num_classes, c.representation_size, c.qk_norm) == ("class", 5, representation, False)
    check_equal(plain, model)


@pytest.mark.parametrize("pool", ["class", "mean", "attention"])
@pytest.mark.parametrize("prefix", ["", "params/", "params/img/", "opt/target/"])
def test_big_vision_names(pool, prefix, tmp_path):
    """Positions at the top, the class token without one, MAPHead_0, any of the prefixes, other towers ignored."""
    plain = PlainViT(pool, class_position=False)
    arrays = {prefix + name: value for name, value in flax_names(plain, RENUMBERED, "pos_embedding").items()}
    if prefix:
        arrays |= {"opt/count": np.zeros(()), "params_of_text/kernel": np.zeros(3)}
    np.savez(tmp_path / "weights.npz", **arrays)
    model = from_vit(tmp_path / "weights.npz")
    assert model.config.pool == pool
    check_equal(plain, model)


def test_older_places():
    """Positions inside the transformer, the pool's parts at the top, blocks stacked by a scan."""
    plain = PlainViT("attention")
    arrays = flax_names(plain, RENUMBERED, "Transformer/pos_embedding")
    arrays = {name.removeprefix("MAPHead_0/"): value for name, value in arrays.items()}
    stacked = {name: value for name, value in arrays.items() if "encoderblock" not in name}
    for name, value in arrays.items():
        if "encoderblock_0/" in name:
            both = [value, arrays[name.replace("encoderblock_0", "encoderblock_1")]]
            stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(both)
    check_equal(plain, from_vit(stacked))


def test_a_grid_that_is_not_square():
    """The table does not tell height from width: the size is asked for, and must fit."""
    plain = PlainViT("mean", grid=(2, 3))
    with pytest.raises(ValueError, match=r"6 positions are not those of a square image: give image_size"):
        from_vit(flax_names(plain))
    with pytest.raises(ValueError, match="2 x 2 patches of 4 pixels, but there are 6 positions"):
        from_vit(flax_names(plain), image_size=8)
    check_equal(plain, from_vit(flax_names(plain), image_size=(8, 12)))


def test_fixed_positions_are_told_by_their_absence():
    """big_vision's sincos2d models store no positions."""
    arrays = flax_names(PlainViT("mean"))
    del arrays["Transformer/posembed_input/pos_embedding"]
    config = from_vit(arrays, image_size=16).config
    assert (config.positions, config.image_size) == ("sincos", 16)


def test_what_does_not_fit_is_refused():
    """Hybrids, other files, rectangular patches and arrays too many are named."""
    arrays = flax_names(PlainViT())
    with pytest.raises(ValueError, match="hybrid model with a ResNet"):
        from_vit(arrays | {"conv_root/kernel": np.zeros(1)})
    with pytest.raises(ValueError, match="there is no embedding/kernel"):
        from_vit({"fc/kernel": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="square patches, got 4 x 2"):
        from_vit(arrays | {"embedding/kernel": np.zeros((4, 2, 3, 16))})
    with pytest.raises(ValueError, match="unexpected extra"):
        from_vit(arrays | {"extra": np.zeros(1)})
    with pytest.raises(ValueError, match="missing Encoder/encoder_norm/scale"):
        from_vit({name: value for name, value in arrays.items() if name != "Transformer/encoder_norm/scale"})


def test_half_precision_is_read_exactly():
    """float16 arrays, and bfloat16 as an .npz keeps it, give a float32 model with the same values."""
    arrays = flax_names(PlainViT())
    half = from_vit({name: value.astype(np.float16) for name, value in arrays.items()})
    assert half.head.weight.dtype == torch.float32
    assert np.array_equal(half.head.bias.detach(), arrays["head/bias"].astype(np.float16))
