"""Names that torch does not promise: where they stand, and what breaks without each."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch

import softmoe
from softmoe.accelerate.torch_private import multiply_all_

ROOT = Path(softmoe.__file__).parent
BREAKS = {
    "torch._C._len_torch_dispatch_stack": "a compiled pass does not know that someone traces or counts",
    "torch._C._are_functorch_transforms_active": "a compiled pass does not know that someone transforms",
    "torch._C._functorch.is_legacy_batchedtensor": "a compiled backward pass does not know that gradients are batched",
    "torch._C._storage_Use_Count": "a view of a kept gradient is not seen",
    "torch._fused_adamw_": "there is no AdamW with moments in bfloat16",
    "torch._foreach_add_": "AdamW with moments in bfloat16 cannot count its steps",
    "torch._foreach_sub_": "AdamW with moments in bfloat16 cannot take back a step that is skipped",
    "torch._foreach_copy_": "AdamW cannot round its moments to bfloat16",
    "torch._foreach_mul_": "gradients are clipped one by one",
    "torch.ops.aten._softmax_backward_data": "the compiled routing has no backward pass",
    "torch.ops.mkldnn._linear_pointwise": "linear layers are torch's own",
    "torch.nn.modules.module._global_forward_hooks": "hooks for all modules are not seen",
    "torch.nn.modules.module._global_backward_pre_hooks": "hooks for all modules are not seen",
    "torch.distributed.distributed_c10d._set_pg_timeout": "ranks wait half an hour, on torch without the public name",
    "torch._inductor.aoti_compile_and_package": "no export to aoti",
    "torch._inductor.aoti_load_package": "no export to aoti",
    "torch._inductor.exc.InvalidCxxCompiler": "no sentence that says that g++ is missing",
}


def private_names(path: Path) -> set[str]:
    """All names under torch with a part that begins with one underscore: in attributes, getattr and imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            found.add(f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}".replace("'", ""))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name for name in found if name.startswith("torch.") and "._" in name.replace(".__", ".")}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stand_in_accelerate_and_are_listed(path: Path) -> None:
    """Elsewhere torch is used by its public names, so that a new version breaks one room at most."""
    names = private_names(path)
    assert not names or path.parent.name == "accelerate", names
    assert names <= BREAKS.keys(), "say above what breaks without it"


def test_the_list_has_no_name_that_nobody_uses() -> None:
    used = set().union(*(private_names(path) for path in (ROOT / "accelerate").glob("*.py")))
    assert {name for name in BREAKS if "module._global_" not in name} <= used  # those names are put together


@pytest.mark.parametrize("name", BREAKS)
def test_torch_has_it(name: str) -> None:
    """Where this fails after an update of torch, BREAKS says what is lost."""
    parts = name.split(".")
    place: object = import_module("torch._inductor.exc") if "_inductor.exc" in name else torch
    if name.startswith("torch.distributed"):
        place = import_module("torch.distributed.distributed_c10d")
    for part in parts[-1:] if place is not torch else parts[1:]:
        place = getattr(place, part)
    assert place is not None, BREAKS[name]


def test_multiplying_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the public operator, with torch's private one and without it."""
    tensors = [torch.randn(3, 4), torch.randn(5)]
    expected = [tensor * 0.3 for tensor in tensors]
    for missing in (False, True):
        if missing:
            monkeypatch.delattr(torch, "_foreach_mul_")
        found = [tensor.clone() for tensor in tensors]
        multiply_all_(found, torch.tensor(0.3))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
