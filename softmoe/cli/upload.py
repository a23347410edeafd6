"""`softmoe upload MODEL NAME`: a saved model on the Hugging Face Hub, with its card."""

from dataclasses import KW_ONLY, dataclass

from softmoe.cli.parse import parse


@dataclass(frozen=True)
class Arguments:
    """Put a saved model on the Hugging Face Hub, with its card. You must be logged in there: `hf auth login`."""

    model: str
    """Folder of a saved model or of a run that has ended."""
    name: str
    """Its name on the Hub: user/name."""
    _: KW_ONLY
    private: bool = False
    """Show it to yourself only."""


def main(argv: list[str]) -> int:
    a = parse(Arguments, argv, "upload")

    from softmoe.storage import hub, open_saved

    print(hub.upload(open_saved(a.model).folder, a.name, private=a.private))
    return 0
