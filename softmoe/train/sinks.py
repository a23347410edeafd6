"""TensorBoard and Weights & Biases, imported only when a run asks for them."""

from pathlib import Path
from typing import Protocol

from softmoe.train.config import TrainConfig


class Sink(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def make_sinks(config: TrainConfig, folder: Path, step: int) -> list[Sink]:
    """Those the run asks for; it continues at `step`, and what they were told of later steps no longer holds."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", step))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, folder))
    return sinks


class TensorBoard:
    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError("log.tensorboard needs the extra: pip install softmoe[tensorboard]") from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: TrainConfig, folder: Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ModuleNotFoundError("log.wandb needs the extra: pip install softmoe[wandb]") from error
        self._run = wandb.init(
            project=config.log.wandb, id=config.run_name, dir=str(folder), config=config.to_dict(), resume="allow"
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
