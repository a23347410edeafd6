"""What is wrong with a saved model is found and named, and nothing in it is run."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import edit, refused, restate, tiny

import softmoe


def test_truncated(saved):
    """A file that was cut is named with both sizes."""
    path = saved / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    refused(saved, f"{size - 100} bytes instead of {size}")


def test_truncated_and_restated(saved):
    """Even if the sizes are made to agree, the header tells that bytes are missing."""
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    restate(saved)
    refused(saved, "is not a readable safetensors file")


@pytest.mark.parametrize("place", [20, 5000, -1])
def test_flipped_byte(saved, place):
    """One changed bit anywhere is found."""
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    refused(saved, "SHA-256")


def test_verify_can_be_skipped(saved):
    """Without checksums a flipped weight is not seen: that is what was asked for."""
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    softmoe.from_pretrained(saved, verify=False)


def test_swapped_config(saved, tmp_path):
    """The config.json of another model of the same shapes is refused, with and without checksums."""
    other = tiny(heads=4, qk_norm=False)
    softmoe.save_pretrained(other, tmp_path / "other")
    (saved / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    refused(saved, "bytes instead of")
    restate(saved)
    refused(saved, "is not the one these weights were saved with")
    refused(saved, "is not the one these weights were saved with", verify=False)


def test_edited_heads(saved):
    """A change that fits every shape is found, because the weights remember what they were saved with."""
    softmoe.save_pretrained(tiny("vit_ti8", qk_norm=False), saved)
    edit(saved, lambda values: values["architecture"].update(heads=4))
    refused(saved, "heads = 4, the weights say 2")


def test_wrong_number_of_experts(saved):
    """The number in config.json and the number in the file are both named."""
    edit(saved, lambda values: values["architecture"]["moe"].update(num_experts=8))
    refused(saved, "moe.num_experts = 8, the weights say 4")


def test_wrong_number_of_experts_in_foreign_files(saved):
    """Files without our note are judged by the shapes."""
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors")
    edit(saved, lambda values: values["architecture"]["moe"].update(num_experts=8))
    restate(saved)
    refused(saved, "do not fit its config.json", "(32, 4, 1)", "(32, 8, 1)")


def test_missing_and_extra_tensors(saved):
    """Names must be exactly the model's."""
    tensors = load_file(saved / "model.safetensors")
    bias = tensors.pop("head.bias")
    save_file(tensors, saved / "model.safetensors")
    restate(saved)
    refused(saved, "head.bias is missing")
    save_file(tensors | {"head.bias": bias, "stranger": bias.clone()}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "stranger is not part of the model")


def test_wrong_type(saved):
    """Integers are not weights, and other types than stated are refused."""
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | {"head.bias": torch.zeros(5, dtype=torch.int32)}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "head.bias", "floating-point")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, saved / "model.safetensors")
    restate(saved)
    refused(saved, "float16", "config.json says", "float32")


def test_missing_shard(sharded):
    """The shard is named."""
    (sharded / sorted(p.name for p in sharded.glob("model-00002*"))[0]).unlink()
    refused(sharded, "model-00002-of-", "is missing")


def test_exchanged_shards(sharded):
    """Two shards under each other's names are found."""
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    first.rename(sharded / "aside")
    second.rename(first)
    (sharded / "aside").rename(second)
    refused(sharded, "bytes instead of")
    restate(sharded)
    refused(sharded, "index.json does not match")


def test_missing_index(sharded):
    """Shards without their index are refused."""
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "index.json cannot be read")


def test_the_same_tensor_twice(sharded):
    """A tensor in two shards is ambiguous."""
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    restate(sharded)
    refused(sharded, "is in two files")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["torch", "pickle", "old torch"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_pickle_is_not_opened(saved, tmp_path, how, verify):
    """A pickle under the name of a weight file is refused by its first bytes and nothing in it runs."""
    path = saved / "model.safetensors"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    else:
        torch.save(Bomb(tmp_path / "exploded"), path, _use_new_zipfile_serialization=how == "torch")
    restate(saved)
    refused(saved, "is a pickle", "not opened", verify=verify)
    assert not (tmp_path / "exploded").exists()


def test_a_random_file(saved):
    """Bytes that are nothing at all are refused too."""
    (saved / "model.safetensors").write_bytes(b"no weights here, only words" * 9)
    restate(saved)
    refused(saved, "is not a readable safetensors file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(colour=1), ("unknown key 'colour'",)),
        (lambda v: v["architecture"].update(widht=3), ("unknown key 'architecture.widht'", "'architecture.width'")),
        (lambda v: v["architecture"]["moe"].update(slots=3), ("architecture.moe.slots",)),
        (lambda v: v["preprocessing"].update(mean=0), ("preprocessing.mean",)),
        (lambda v: v["preprocessing"].update(crop="five"), ("central or resize",)),
        (lambda v: v["preprocessing"].update(value_range=[0, 1]), ("value_range",)),
        (lambda v: v["preprocessing"].update(image_size=[3]), ("image_size",)),
        (lambda v: v["architecture"].update(width="wide"), ("does not describe a model",)),
        (lambda v: v["architecture"].update(pool="max"), ("pool must be one of",)),
        (lambda v: v["architecture"].update(moe="many"), ("architecture.moe must be an object",)),
        (lambda v: v.pop("classes"), ("'classes' is missing",)),
        (lambda v: v.update(classes=["a"]), ("names 1 classes", "5 outputs")),
        (lambda v: v.update(classes=[1, 2, 3, 4, 5]), ("list of names",)),
        (lambda v: v.update(kind="text"), ("'text'",)),
        (lambda v: v.pop("kind"), ("the kind of model is None, expected 'vit' or 'two_tower'",)),
        (lambda v: v.update(format_version=1), ("format version 1", "reads version 2")),
        (lambda v: v["weights"].update(files={}), ("no weight file",)),
        (lambda v: v["weights"].update(files={"../x.safetensors": {}}), ("is not the name of a weight file",)),
        (lambda v: v["weights"].update(files={"model.safetensors": {}}), ("does not describe a model",)),
    ],
)
def test_bad_config(saved, change, words):
    """Unknown keys, wrong values and missing parts of config.json are errors that name the key."""
    edit(saved, change)
    refused(saved, "config.json", *words)


def test_config_is_not_json(saved):
    """A config.json that was cut is said to be no JSON, by its path."""
    (saved / "config.json").write_text('{"format": "softmoe"')
    refused(saved, "config.json is not valid JSON")
