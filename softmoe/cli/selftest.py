"""`softmoe selftest`: is this machine right, and how fast is it; one page."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Check routers, kernels, training, resuming and speed on this machine, about two minutes. Exit code 0 if nothing
    is wrong, 1 if something is."""

    _: KW_ONLY
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    quick: bool = False
    """Seconds instead of minutes: smaller runs, no torch.compile."""
    output: Path = Path("selftest.md")
    """The page to write; it names the machine and nothing of its user."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "selftest")

    from softmoe.bench.report import facts, page
    from softmoe.bench.selftest import selftest
    from softmoe.machine import choose_device
    from softmoe.storage.files import write_text

    device = choose_device(a.device)
    checks = []
    for check in selftest(device, quick=a.quick):
        checks.append(check)
        print(f"{check.state:<10} {check.name}: {check.said}", flush=True)
    write_text(a.output, page(checks, facts(device), device, quick=a.quick))
    print(f"wrote {a.output}")
    return 1 if any(check.state == "WRONG" for check in checks) else 0
