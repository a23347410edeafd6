"""CUDA tensors without CUDA: torch traces shapes and devices with fake tensors, and every wait of the host is noted.

Not imported by tests themselves: the library must be loaded before torch is, so each test starts a process (see
test_traces.py). `load` does that; `fake_cuda` is the context in which tensors on "cuda" are fake and waits are noted.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "softmoe"


def torch_folder() -> Path:
    """Where torch is installed, found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def why_not() -> str | None:
    """The reason why this machine cannot build the library, or None."""
    if not sys.platform.startswith("linux"):
        return "the fake device is built for Linux"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this build of torch has a CUDA device of its own, beside which there can be no fake one"
    return None if shutil.which("g++") else "no C++ compiler (g++) to build the fake device with"


def build(folder: Path) -> Path:
    """Compile the device into `folder`."""
    made, torch = folder / "fake_cuda.so", torch_folder()
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(HERE / "fake_cuda.cpp"), f"-I{torch / 'include'}"]
    subprocess.run([*command, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(made)], check=True)
    return made


def load(library: str) -> None:
    """Load the device. torch asks once what devices there are, so it must not be imported yet."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Tensors are fake in here, on the CPU and on "cuda". Yields the list of waits, which grows: what and where."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    waits: list[str] = []

    def is_cuda(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "cuda"

    class Waits(TorchDispatchMode):
        """Notes what makes the host wait for the device, and answers reads with a number so that the step goes on."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = func.name()
            if name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"):  # the last in inference mode
                if is_cuda(args[0]):
                    waits.append(f"read {place()}")
                return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
            if name == "aten::_pin_memory":
                return pinned(args[0])
            if name.startswith("aten::_fused_sgd_"):
                return None  # torch has no fake form of it
            made = func(*args, **kwargs)
            if is_cuda(made) and made.dtype == torch.float64:
                waits.append(f"float64, which not every device has, {place()}")
            if name in ("aten::_to_copy", "aten::copy_") or name.startswith("aten::to."):  # the last in inference mode
                given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
                source = args[1] if name == "aten::copy_" else args[0]
                blocks = not given.get("non_blocking") or (is_cuda(made) and not hasattr(source, "pinned"))
                if blocks and is_cuda(source) != is_cuda(made):
                    waits.append(f"copy from {source.device.type} to {made.device.type} {place()}")
            return made

    with ExitStack() as stack:
        for name, value in stand_ins(waits).items():
            stack.enter_context(patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Waits())
        yield waits


def pinned(tensor: Any) -> Any:
    """The tensor, in pinned memory from now on: a copy from other memory blocks, whatever it is told."""
    tensor.pinned = True
    return tensor


def place() -> str:
    """The innermost line of the package that is being run."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
    last = frames[-1] if frames else None
    return "outside of softmoe" if last is None else f"at {Path(last.filename).relative_to(PACKAGE)}:{last.lineno}"


def stand_ins(waits: list[str]) -> dict[str, Any]:
    """What torch.cuda answers where there is a device; a wait for all of its work is noted."""

    class Stream:
        def __init__(self, *_: Any, **__: Any):
            self.device_index = 0

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

        def wait_event(self, event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> "Event":
            return event or Event()

    class Event:
        """`synchronize` waits for one point that lies a step back: the loop decides when, and the tests of it look."""

        def __init__(self, *_: Any, **__: Any):
            pass

        def record(self, stream: Any = None) -> None:
            if stream is None and "/torch/" not in sys._getframe(1).f_code.co_filename:
                waits.append(f"event of whichever device is the current one {place()}")

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    import torch

    swap = torch.utils.swap_tensors
    return {
        # of a parameter that stays as it is: fake ones cannot be swapped
        "torch.utils.swap_tensors": lambda one, other: None if one.device == other.device else swap(one, other),
        "torch.nn.init.trunc_normal_": lambda weight, **_: weight,  # draws until it reads that all fit
        "torch.nn.Module.to": moved,
        "torch.Tensor.record_stream": lambda tensor, stream: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0),
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.synchronize": lambda *_: waits.append(f"synchronize {place()}"),
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda.Stream": Stream,
        "torch.cuda.Event": Event,
        "torch.cuda.stream": lambda stream: stream,
        "torch.cuda.current_stream": Stream,
    }


def moved(model: Any, device: Any) -> Any:
    """As `Module.to`, which refuses fake tensors: parameters and buffers made anew on the device."""
    import torch

    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            copy = torch.nn.Parameter(value.detach().to(device), requires_grad=value.requires_grad)
            module.register_parameter(name, copy)
        for name, value in list(module.named_buffers(recurse=False)):
            setattr(module, name, value.to(device))
    return model
