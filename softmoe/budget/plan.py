"""Plan a training run on many devices before there are any: bytes per device, bytes on the wire, time of a step.

Letters: W devices, E of them own the experts together, S keep the other weights together (softmoe.parallel has the
picture); B images per device, N experts, D width.

Weights, gradients, optimizer state and what is sent are exact: tests/parallel/dry_run.py counts the same in a trace
of the real step. Activations are those of `memory`, buffers those of FSDP, and together they come within a tenth of the
trace (with recomputation they may be a quarter above it). The time is a roofline, whose assumptions are in `Hardware`
and `step_seconds`.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property

from softmoe.budget.count import Cost, cost
from softmoe.budget.memory import OPTIMIZER_STATES, activation_memory
from softmoe.budget.parts import attention_params, checked, mlp_params, routed
from softmoe.models import ViTConfig


@dataclass(frozen=True)
class Hardware:
    """One device and its links. Rates per second, of one device and one direction."""

    name: str
    memory: float
    flops: float
    """Peak of dense products in bfloat16."""
    memory_rate: float
    inside: float
    """Bytes to the devices of the same node."""
    between: float = 25e9
    """Bytes to other nodes; 25e9 is 200 Gbit/s for each device."""
    node: int = 8
    share: float = 0.4
    """The part of the peak that real steps reach."""


DEVICES = {
    "a100-40": Hardware("a100-40", 40e9, 312e12, 1.55e12, 300e9),
    "a100-80": Hardware("a100-80", 80e9, 312e12, 2.0e12, 300e9),
    "h100": Hardware("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9),
}


@dataclass(frozen=True)
class Layout:
    """The numbers of devices: of all, of those that own the experts together, of those that keep the rest together."""

    world: int
    expert: int = 1
    shard: int = 1

    @property
    def pieces(self) -> int:
        """The number of pieces each expert is cut into."""
        return max(1, self.shard // self.expert)

    @property
    def copies(self) -> int:
        """The number of copies of each expert."""
        return self.world // (self.expert * self.pieces)

    def check(self) -> None:
        """Raise ValueError for numbers that no mesh of so many devices can have."""
        W, E, S = self.world, self.expert, self.shard
        for name, value in (("expert", E), ("shard", S)):
            if value < 1 or W % value:
                raise ValueError(
                    f"parallel.{name} must divide the number of processes: got {value} for {W}; "
                    f"possible are {', '.join(map(str, divisors(W)))}"
                )
        if E % S and S % E:
            raise ValueError(
                f"one of parallel.expert and parallel.shard must be a multiple of the other, got {E} and {S}"
            )

    def check_experts(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        """Raise ValueError for experts that cannot be divided evenly among their owners."""
        N, E, pieces = num_experts, self.expert, self.pieces
        if N % E:
            possible = [d for d in divisors(N) if self.world % d == 0]
            raise ValueError(
                f"{N} experts cannot be shared evenly by {E} ranks: with {self.world} processes parallel.expert can be "
                f"{', '.join(map(str, possible))}; parallel.shard cuts the experts further"
            )
        if dim % pieces or hidden_dim % pieces:
            raise ValueError(
                f"experts of width {dim} and hidden width {hidden_dim} cannot be cut in {pieces} equal pieces: "
                "lower parallel.shard, or raise parallel.expert"
            )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True)
class Settings:
    """The settings of training that its memory depends on."""

    batch: int
    """Images per step, on all devices together."""
    weight_bytes: int = 4
    activation_bytes: int = 2
    optimizer: str = "adamw"
    checkpointing: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that one device holds."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Gathered weights, gradients on their way, slots that are exchanged."""

    peak: int
    """The most bytes at once. Gradients come as activations go, so that only the larger of the two counts; but with
    recomputation, where activations come back for a while, both."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that one device puts through each kind of collective in a step: the size of its larger side."""

    all_to_all: int
    gather: int
    reduce: int


@cache
def price(config: ViTConfig) -> Cost:
    """Return the cost of a model, kept because many layouts of one model ask for it."""
    return cost(config)


@dataclass(frozen=True)
class Plan:
    """One layout of one model."""

    config: ViTConfig
    layout: Layout
    settings: Settings

    @property
    def images(self) -> int:
        return self.settings.batch // self.layout.world

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all experts of all layers, where experts are shared out."""
        return price(self.config).parts["experts"].params if self.layout.expert > 1 else 0

    @cached_property
    def other_params(self) -> int:
        return price(self.config).params - self.expert_params

    @property
    def params(self) -> int:
        """Parameters on one device."""
        return self.other_params // self.layout.shard + self.expert_params // (self.layout.expert * self.layout.pieces)

    def memory(self) -> DeviceMemory:
        s = self.settings
        weights = self.params * s.weight_bytes
        again = range(self.config.depth if s.checkpointing else 0)
        activations = activation_memory(self.config, self.images, s.activation_bytes, again)
        if s.activation_bytes < s.weight_bytes:  # autocast keeps its copies of the weights for the backward pass
            used = (
                self._block_params()
                if s.checkpointing
                else self.other_params + self.expert_params // self.layout.expert
            )
            activations += used * s.activation_bytes
        moments, buffers = OPTIMIZER_STATES[s.optimizer] * weights, self.buffers()
        changing = weights + activations if s.checkpointing else max(weights, activations)
        return DeviceMemory(weights, weights, moments, activations, buffers, weights + moments + buffers + changing)

    def buffers(self) -> int:
        """Return the bytes that FSDP has gathered, and twice those of the slots that are exchanged.

        Gathered are the parameters outside the blocks, as they arrive and as they are used; or those, and a block as it
        arrives, as it is used and as a gradient.
        """
        if self.layout.world == 1:
            return 0
        block, outside = self._block_params(), self.other_params - self._all_blocks_params()
        gathered = max(2 * outside, outside + 3 * block)
        return gathered * self.settings.weight_bytes + 2 * self.exchanged()

    def _block_params(self) -> int:
        """Count the parameters of the largest block, as far as it is gathered."""
        D, moe = self.config.width, routed(self.config)
        attention = attention_params(self.config) + 4 * D
        mlp = mlp_params(D, self.config.mlp_dim)
        dense = attention + mlp
        if moe is None:
            return dense
        experts = moe.experts * mlp_params(D, moe.hidden)
        mine = 0 if self.layout.world == self.layout.expert else experts // self.layout.expert
        router = price(self.config).parts["routing"].params // moe.routing
        kept = mlp_params(D, moe.kept) if moe.kept else 0
        return max(attention + kept + router + mine, dense if moe.layers < self.config.depth else 0)

    def _all_blocks_params(self) -> int:
        parts = price(self.config).parts
        experts = 0 if self.layout.expert > 1 else parts["experts"].params
        norms = 4 * self.config.width * self.config.depth
        return parts["attention"].params + parts["mlp"].params + parts["routing"].params + experts + norms

    def exchanged(self) -> int:
        """Return the bytes of the slots of one layer that go to other devices."""
        moe = routed(self.config)
        if moe is None or self.layout.expert == 1:
            return 0
        return round(self.images * moe.rows) * self.config.width * self.settings.activation_bytes

    def placements(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return, of the rest and of the experts, (parameters a rank uses, parts, copies, ranks the parts span)."""
        L = self.layout
        rest = (self.other_params, L.shard, L.world // L.shard, L.shard)
        return rest, (self.expert_params // L.expert, L.pieces, L.copies, L.expert * L.pieces)

    def traffic(self) -> Traffic:
        moe, item = routed(self.config), self.settings.weight_bytes
        layers = moe.layers if moe else 0
        passes = 6 if self.settings.checkpointing else 4  # there and back, forward and backward (and forward again)
        gather = reduce = 0
        for params, cut, copies, _ in self.placements():
            gather += 2 * params * item if cut > 1 else 0  # for the forward and again for the backward pass
            reduce += params * item if cut > 1 else 0
            reduce += params // cut * item if copies > 1 else 0
        return Traffic(layers * passes * self.exchanged(), gather, reduce)

    def step_seconds(self, hardware: Hardware) -> dict[str, float]:
        """Return the seconds of a step by kind.

        Products run at a share of the peak; the optimizer reads and writes its numbers once; all-to-alls hide behind
        nothing; gathers and reductions hide behind the products where those are longer.
        """
        h, L, t, whole = hardware, self.layout, self.traffic(), price(self.config)
        flops = whole.train_flops + (whole.forward_flops if self.settings.checkpointing else 0)
        products = self.images * flops / (h.share * h.flops)
        states = 3 + 2 * (1 + OPTIMIZER_STATES[self.settings.optimizer])
        update = states * self.params * self.settings.weight_bytes / h.memory_rate
        exchange = t.all_to_all * (L.expert - 1) / L.expert / rate(h, L.expert)
        moved = 0.0
        for params, cut, copies, span in self.placements():
            size = params * self.settings.weight_bytes
            moved += 3 * size * (cut - 1) / cut / rate(h, span)  # gathered twice, scattered once
            moved += 2 * size / cut * (copies - 1) / copies / rate(h, L.world)
        return {"products": products, "exchange": exchange, "other links": moved, "update": update}

    def seconds(self, hardware: Hardware) -> float:
        kinds = self.step_seconds(hardware)
        return max(kinds["products"], kinds["other links"]) + kinds["exchange"] + kinds["update"]

    def efficiency(self, hardware: Hardware) -> float:
        """Return the time of the products alone over that of the whole step."""
        return self.step_seconds(hardware)["products"] / self.seconds(hardware)


def rate(hardware: Hardware, ranks: int) -> float:
    """Return the bytes per second among so many consecutive devices: of the node's links while they are in one node."""
    return hardware.inside if ranks <= hardware.node else hardware.between


def layouts(config: ViTConfig, devices: int) -> list[Layout]:
    """List every layout in which softmoe.parallel can put the model on so many devices."""
    moe, numbers = routed(config), divisors(devices)
    found = []
    for layout in (Layout(devices, expert, shard) for expert in numbers for shard in numbers):
        with suppress(ValueError):
            layout.check()
            if layout.expert > 1:
                layout.check_experts(moe.experts if moe else 1, config.width, moe.hidden if moe else 0)
            found.append(layout)
    return found


def plans(config: ViTConfig, devices: int, settings: Settings) -> list[Plan]:
    """List all layouts, without and with checkpointing of activations."""
    config = checked(config)
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    if settings.batch < devices or settings.batch % devices:
        raise ValueError(f"a batch of {settings.batch} images cannot be shared evenly by {devices} devices")
    return [
        Plan(config, layout, replace(settings, checkpointing=again))
        for layout in layouts(config, devices)
        for again in (False, True)
    ]


def best_plan(candidates: list[Plan], hardware: Hardware) -> Plan | None:
    """Return the fastest plan that fits; of equally fast ones the smallest."""
    fitting = [plan for plan in candidates if plan.memory().peak <= hardware.memory]
    return min(fitting, key=lambda plan: (plan.seconds(hardware), plan.memory().peak), default=None)


def most_experts(config: ViTConfig, devices: int, settings: Settings, hardware: Hardware) -> int | None:
    """Return the largest power of two of experts that fits; None without experts, 0 if none fits.

    All experts together keep the slots of the model, in whole slots an expert (rounded up, so one at least).
    """
    moe = routed(config)
    if config.moe is None or moe is None:
        return None
    largest, N = 0, 1
    while N <= 1 << 16:
        slots = {"slots_per_expert": -(-moe.slots // N)} if moe.slots else {}  # sparse routers have none
        more = replace(config, moe=config.moe.change(num_experts=N, **slots))
        if best_plan(plans(more, devices, settings), hardware) is not None:
            largest = N
        elif largest:
            break
        N *= 2
    return largest
