"""Weights by the reference's names, into our modules and back."""

import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from routers import moe_of

from softmoe.convert import from_vmoe, to_vmoe
from softmoe.convert.vmoe import read_npz
from softmoe.models import MoEConfig, VisionTransformer, ViTConfig, create_model
from softmoe.moe import Experts, IdentityRouter, MoE, SoftMoE, SoftRouter
from softmoe.moe.config import ROUTERS

TINY = ViTConfig(
    image_size=(8, 12), patch_size=4, width=16, depth=2, mlp_dim=24, heads=2, num_classes=5
)  # 2 x 3 patches: no two axes of equal length by accident


def model(**changes: object) -> VisionTransformer:
    return VisionTransformer(ViTConfig(**{**TINY.__dict__, **changes}))  # type: ignore[arg-type]


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    router = draw(st.sampled_from([None, *(name for name in ROUTERS if name != "placed")]))
    moe = router and moe_of(
        router,
        num_experts=3,
        slots_per_expert=2,
        blocks=(draw(st.integers(0, 1)),),
        normalize=draw(st.booleans()),
    )
    changes = {
        "pool": draw(st.sampled_from(["mean", "class", "attention"])),
        "positions": draw(st.sampled_from(["learned", "sincos", "none"])),
        "qk_norm": draw(st.booleans()),
        "representation_size": draw(st.sampled_from([None, 7])),
        "num_classes": draw(st.sampled_from([None, 5])),
        "moe": moe or None,
    }
    return ViTConfig(**{**TINY.__dict__, **changes})  # type: ignore[arg-type]


@given(configs(), st.sampled_from([torch.float32, torch.float64]))
def test_round_trip_is_bit_exact(config: ViTConfig, dtype: torch.dtype) -> None:
    """For every pool, position kind and router: out of one model, into another, out again is the same, bit for bit."""
    source, target = VisionTransformer(config).to(dtype), VisionTransformer(config).to(dtype)
    arrays = to_vmoe(source)
    from_vmoe(arrays, target)
    again = to_vmoe(target)
    assert again.keys() == arrays.keys()
    assert all(again[name].tobytes() == arrays[name].tobytes() for name in arrays)
    state = source.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())


def test_names_and_shapes_of_a_soft_model() -> None:
    """The tree that the reference's own code builds for soft-s16 (its JFT settings)."""
    with torch.device("meta"):
        big = create_model("soft_s16_128e", num_classes=29593)
    shapes = {name: tuple(view.shape) for name, view in meta_views(big).items()}
    block = "Encoder/encoderblock_6"
    assert shapes["embedding/kernel"] == (16, 16, 3, 384)
    assert shapes["Encoder/posembed_input/pos_embedding"] == (1, 196, 384)
    assert shapes[f"{block}/SelfAttention/query/kernel"] == (384, 6, 64)
    assert shapes[f"{block}/SelfAttention/query/bias"] == (6, 64)
    assert shapes[f"{block}/SelfAttention/out/kernel"] == (6, 64, 384)
    assert shapes[f"{block}/SelfAttention/query_ln/scale"] == (64,)
    assert shapes[f"{block}/Moe/Mlp/Dense_0/kernel"] == (128, 384, 1536)
    assert shapes[f"{block}/Moe/Mlp/Dense_0/bias"] == (128, 1536)
    assert shapes[f"{block}/Moe/Mlp/Dense_1/kernel"] == (128, 1536, 384)
    assert shapes[f"{block}/Moe/Mlp/Dense_1/bias"] == (128, 384)
    assert shapes[f"{block}/Moe/Router/mu"] == (384, 128, 1)
    assert shapes[f"{block}/Moe/Router/scale"] == ()
    assert shapes["Encoder/encoderblock_0/Mlp/Dense_0/kernel"] == (384, 1536)
    assert shapes["head/kernel"] == (384, 29593)
    assert not {"cls", "pre_logits/kernel", f"{block}/Mlp/Dense_0/kernel"} & shapes.keys()
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 933_709_471


def test_names_of_the_other_parts() -> None:
    """Class token, attention pool, tanh layer and sparse router carry the reference's names and shapes."""
    moe = MoEConfig.of("tokens_choice", num_experts=3, blocks=(1,))
    shapes = {k: v.shape for k, v in to_vmoe(model(pool="class", representation_size=7, moe=moe)).items()}
    assert shapes["cls"] == (1, 1, 16)
    assert shapes["Encoder/posembed_input/pos_embedding"] == (1, 7, 16)
    assert shapes["pre_logits/kernel"] == (16, 7)
    assert shapes["head/kernel"] == (7, 5)
    assert shapes["Encoder/encoderblock_1/Moe/Router/dense/kernel"] == (16, 3)
    shapes = {k: v.shape for k, v in to_vmoe(model(pool="attention")).items()}
    assert shapes["MapHead/probe"] == (1, 1, 16)
    assert shapes["MapHead/MultiHeadDotProductAttention/value/kernel"] == (16, 2, 8)
    assert shapes["MapHead/MultiHeadDotProductAttention/key_ln/scale"] == (8,)
    assert shapes["MapHead/LayerNorm/bias"] == (16,)
    assert shapes["MapHead/Mlp/Dense_1/kernel"] == (24, 16)


def test_heads_and_packed_matrix_by_plain_loops() -> None:
    """Entry (d, a, e) of the key kernel is row D + a*E + e, column d of our packed matrix; biases and output alike."""
    dense = model()
    arrays = to_vmoe(dense)
    attention = dense.encoder.blocks[0].attention
    key = arrays["Encoder/encoderblock_0/SelfAttention/key/kernel"]
    bias = arrays["Encoder/encoderblock_0/SelfAttention/value/bias"]
    out = arrays["Encoder/encoderblock_0/SelfAttention/out/kernel"]
    for a in range(2):
        for e in range(8):
            assert bias[a, e] == attention.qkv.bias[2 * 16 + a * 8 + e]
            for d in range(16):
                assert key[d, a, e] == attention.qkv.weight[16 + a * 8 + e, d]
                assert out[a, e, d] == attention.out.weight[d, a * 8 + e]


def test_one_layer_and_prefix_and_file(tmp_path: Path) -> None:
    """A single MoE layer has names without a parent; "params/" before all names and an .npz path work the same."""
    source, target = SoftMoE(16, 3, 2, hidden_dim=24), SoftMoE(16, 3, 2, hidden_dim=24)
    arrays = to_vmoe(source)
    assert arrays.keys() == {
        "Mlp/Dense_0/kernel", "Mlp/Dense_0/bias", "Mlp/Dense_1/kernel", "Mlp/Dense_1/bias", "Router/mu", "Router/scale",
    }  # fmt: skip
    path = tmp_path / "weights.npz"
    np.savez(path, allow_pickle=False, **{f"params/{name}": array for name, array in arrays.items()})
    from_vmoe(path, target)
    x = torch.randn(2, 5, 16)
    assert torch.equal(source(x), target(x))


def test_all_faults_are_listed_and_nothing_is_copied() -> None:
    """Missing, unexpected, mis-shaped and non-numeric arrays come in one error; the module stays as it was."""
    layer = SoftMoE(16, 3, 2, hidden_dim=24)
    before = to_vmoe(layer)
    arrays = {name: array + 1 for name, array in before.items()}
    arrays["Router/nu"] = arrays.pop("Router/mu")
    arrays["Mlp/Dense_0/kernel"] = arrays["Mlp/Dense_0/kernel"].swapaxes(1, 2)
    arrays["Router/scale"] = np.array("one")
    with pytest.raises(ValueError, match="4 arrays do not fit the SoftMoE") as error:
        from_vmoe(arrays, layer)
    for part in (
        "missing Router/mu (16, 3, 2)",
        "unexpected Router/nu (16, 3, 2)",
        "Mlp/Dense_0/kernel has shape (3, 24, 16), expected (3, 16, 24)",
        "Router/scale has dtype <U3",
    ):
        assert part in str(error.value)
    after = to_vmoe(layer)
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_numbers_that_are_not_finite_are_refused() -> None:
    """One NaN is named, and nothing is copied."""
    target = SoftMoE(8, 2)
    arrays = to_vmoe(target)
    name = next(iter(arrays))
    arrays[name].flat[0] = np.nan
    before = to_vmoe(target)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is not finite"):
        from_vmoe(arrays, target)
    assert all(np.array_equal(before[n], value) for n, value in to_vmoe(target).items())


def test_broadcastable_shapes_are_refused() -> None:
    """A (1,) scale for a () one, or one expert's bias for all, is an error although copy_ would take it."""
    layer = SoftMoE(16, 3, hidden_dim=24)
    for name, shape in (("Router/scale", (1,)), ("Mlp/Dense_1/bias", (1, 16))):
        arrays = to_vmoe(layer) | {name: np.zeros(shape, np.float32)}
        with pytest.raises(ValueError, match=name):
            from_vmoe(arrays, layer)


def test_bfloat16_of_files() -> None:
    """bfloat16 comes out of .npz as two anonymous bytes; it is read as what it was."""
    layer = SoftMoE(16, 3, hidden_dim=24).bfloat16()
    arrays = {}
    for name, array in to_vmoe(layer).items():  # the upper half of each float32
        arrays[name] = (np.array(array).view(np.uint32) >> 16).astype(np.uint16).view("V2")
    target = SoftMoE(16, 3, hidden_dim=24).bfloat16()
    from_vmoe(arrays, target)
    state = layer.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())


def test_awkward_arrays() -> None:
    """Read-only, reversed, big-endian and float64 arrays are taken, and are not changed or kept."""
    layer = SoftMoE(16, 3, hidden_dim=24)
    arrays = {name: array.astype(">f8") for name, array in to_vmoe(layer).items()}
    arrays["Mlp/Dense_0/bias"] = arrays["Mlp/Dense_0/bias"][::-1]
    expected = arrays["Mlp/Dense_0/bias"].astype(np.float32)
    for array in arrays.values():
        array.setflags(write=False)
    from_vmoe(arrays, layer)
    with torch.no_grad():
        layer.router.phi.zero_()
    assert arrays["Router/mu"].any()
    np.testing.assert_array_equal(layer.experts.b1.detach().numpy(), expected)


def test_gradients_need_a_backward_pass() -> None:
    """Gradients have the names of the values; before backward the error names what has none."""
    layer = SoftMoE(16, 3, hidden_dim=24)
    with pytest.raises(ValueError, match=r"run backward first: router\.phi"):
        to_vmoe(layer, grad=True)
    layer(torch.randn(2, 5, 16)).square().sum().backward()
    gradients = to_vmoe(layer, grad=True)
    np.testing.assert_array_equal(gradients["Mlp/Dense_0/kernel"], layer.experts.w1.grad)
    assert gradients.keys() == to_vmoe(layer).keys()


@pytest.mark.parametrize("kind", ["text", "pickle", "npy", "truncated"])
def test_files_that_are_no_npz(tmp_path: Path, kind: str) -> None:
    """Anything but an .npz of plain arrays is one clear error, and no pickle is loaded."""
    path = tmp_path / "weights.npz"
    layer = SoftMoE(16, 3, hidden_dim=24)
    if kind == "text":
        path.write_text("hello")
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "pickle":
        np.savez(path, allow_pickle=True, **{"Router/mu": np.array([{}], dtype=object)})
    else:
        np.savez(path, allow_pickle=False, **to_vmoe(layer))
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"weights\.npz"):
        from_vmoe(path, layer)


def test_modules_that_cannot_be_converted() -> None:
    """A plain module, foreign experts and a model without storage are refused with the reason."""
    with pytest.raises(ValueError, match="got Linear"):
        to_vmoe(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="Experts inside, got Identity"):
        to_vmoe(MoE(SoftRouter(16, 3), torch.nn.Identity()))
    with torch.device("meta"):
        empty = SoftMoE(16, 3, hidden_dim=24)
    with pytest.raises(ValueError, match="meta device"):
        from_vmoe(to_vmoe(SoftMoE(16, 3, hidden_dim=24)), empty)


def test_a_router_without_parameters() -> None:
    """The fixed routers add no names."""
    arrays = to_vmoe(MoE(IdentityRouter(16, 3), Experts(16, 24, 3)))
    assert all(name.startswith("Mlp/") for name in arrays)


def meta_views(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    from softmoe.convert.vmoe import reference_views

    return reference_views(module, lambda parameter: parameter.detach())


def npy(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """The bytes of an .npy file, whose header may tell another shape."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": array.dtype.str, "fortran_order": False, "shape": shape or array.shape}
    )
    return out.getvalue() + array.tobytes()


def archive(path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def unreadable(path, *words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(path.name)) as caught:
        read_npz(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_npz_is_read_as_numpy_does(tmp_path):
    """Names, values, types and order of axes come back, stored and compressed."""
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b/c": np.asfortranarray(np.eye(3, dtype=np.float16)),
        "d": np.int64(5),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found = read_npz(tmp_path / "x.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == np.asarray(array).dtype
            assert np.array_equal(found[name], array)


def test_npz_that_unpacks_to_too_much(tmp_path):
    """Zeros of 200 MB in 200 KB are refused by what the headers say, before they are unpacked."""
    path = archive(tmp_path / "bomb.npz", {"a.npy": npy(np.zeros(200_000_000, np.uint8))})
    unreadable(path, "20 times")


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 62, 1 << 62), (3,), (-4,), (2, -2)])
def test_npz_whose_shapes_lie(shape, tmp_path):
    """An array's shape must fit its bytes, or numpy would allocate whatever the header says."""
    unreadable(archive(tmp_path / "x.npz", {"a.npy": npy(np.zeros(4, np.float32), shape)}), "a.npy")


def test_npz_that_numpy_quotes_at_length(tmp_path):
    """A header whose stated length reaches into the numbers: numpy's error quotes them all, ours the first words."""
    path = archive(tmp_path / "x.npz", {"a.npy": b"\x93NUMPY\x01\x00\x00\x20" + bytes(range(128, 256)) * 100})
    with pytest.raises(ValueError, match=r"not a whole \.npz file of plain arrays") as caught:
        read_npz(path)
    assert len(str(caught.value)) < 600


def test_npz_of_objects(tmp_path):
    """Python objects are pickles, and never read."""
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    unreadable(tmp_path / "x.npz", "objects")


def test_damaged_npz(tmp_path):
    """Every cut and every flipped byte is a sentence that names the file, or changes no value."""
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.arange(100.0), b=np.ones(3))
    whole, right = path.read_bytes(), read_npz(path)
    damaged = [whole[:n] for n in range(0, len(whole), 7)]
    damaged += [whole[:n] + bytes([whole[n] ^ 0xFF]) + whole[n + 1 :] for n in range(len(whole))]
    for data in damaged:
        path.write_bytes(data)
        try:
            found = read_npz(path)
        except ValueError:
            unreadable(path)
            continue
        assert found.keys() <= right.keys()  # a list that ends early lacks names, which the converters ask for
        assert all(np.array_equal(array, right[name]) for name, array in found.items())


def test_a_router_with_a_place_is_refused():
    """The paper's code has none: writing its weights without the place would change the model."""
    model = create_model("placed_ti16_4e", image_size=32, width=8, depth=2, heads=2, mlp_dim=8, num_classes=3)
    with pytest.raises(ValueError, match="has no router with a place"):
        to_vmoe(model)
