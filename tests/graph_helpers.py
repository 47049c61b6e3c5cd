"""Random networks of every kind of stage, for exports to agree on."""

import numpy as np

from spingrad.export import PackedModel
from spingrad.export.stages import (
    INPUTS,
    Add,
    Concat,
    Convolution,
    Flatten,
    Flow,
    Linear,
    Pad,
    Pool,
    Rescale,
    Threshold,
    bits_of_spins,
)


class RandomGraph:
    """Draws stages until there are enough, then joins everything that nothing reads yet."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.kind = str(self.random.choice(list(INPUTS)))
        image = self.whole(1, 5), self.whole(1, 9), self.whole(5, 10)
        self.shape = image if self.random.random() < 0.75 else (self.whole(3, 90),)
        self.stages, self.reads = [], []
        self.flows = [Flow(self.kind, (), 1).then(self.shape, INPUTS[self.kind], self.kind)]

    def model(self):
        for _ in range(self.whole(3, 12)):
            self.draw()
        while (open_ends := self.open_ends()) and any(len(self.flows[v].shape) > 1 for v in open_ends):
            self.add(Flatten(), next(v for v in open_ends if len(self.flows[v].shape) > 1))
        ends = []
        for value in self.open_ends():
            inputs = self.flows[value].shape[0]
            if self.flows[value].bound > 1000:
                value = self.add(self.line(inputs, 20), value)
            ends.append(self.add(Linear(self.weight(7, inputs), inputs), value))
        if len(ends) > 1:
            self.add(Concat(), *ends)
        return PackedModel(self.kind, self.shape, tuple(self.stages), tuple(self.reads))

    def open_ends(self):
        return sorted(set(range(len(self.flows))) - {value for read in self.reads for value in read})

    def add(self, stage, *read):
        """The number of the stage's value, or none if it cannot read these values."""
        try:
            flow = stage.flow(*(self.flows[value] for value in read))
        except ValueError:
            return None
        self.stages.append(stage)
        self.reads.append(read)
        self.flows.append(flow)
        return len(self.stages)

    def draw(self):
        value = len(self.stages) if self.random.random() < 0.75 else self.whole(0, len(self.flows))
        shape = self.flows[value].shape
        same = [v for v, flow in enumerate(self.flows) if flow.shape == shape]
        joins = [
            v for v, f in enumerate(self.flows) if f.shape[1:] == shape[1:] and len(f.shape) == len(shape)
        ]
        match self.random.choice(["layer", "layer", "sign", "line", "pool", "flatten", "add", "join", "pad"]):
            case "layer" if len(shape) == 1:
                self.add(Linear(self.weight(self.whole(1, 70), shape[0]), shape[0]), value)
            case "layer":
                self.add(self.convolution(shape[0]), value)
            case "sign":
                self.add(self.sign(shape[0], min(self.flows[value].bound, 2**20)), value)
            case "line":
                self.add(self.line(shape[0], self.whole(0, 20)), value)
            case "pool":
                self.add(
                    Pool(str(self.random.choice(["max", "sum"])), self.pair(1, 3), self.pair(1, 3)), value
                )
            case "flatten" if len(shape) > 1:
                self.add(Flatten(), value)
            case "add":
                read = [int(v) for v in self.random.choice(same, self.whole(1, 4))]
                self.add(Add(tuple(int(m) for m in self.random.choice([1, -1, 3, 200], len(read)))), *read)
            case "join":
                self.add(Concat(), *(int(v) for v in self.random.choice(joins, self.whole(2, 4))))
            case "pad":
                self.add(Pad(self.pair(0, 3), self.pair(0, 3), self.pair(0, 3)), value)

    def convolution(self, channels):
        groups = int(self.random.choice([g for g in (1, 1, 2, channels) if channels % g == 0]))
        kernel, units = self.pair(1, 4), groups * int(self.random.choice([1, 3, 5, 37]))
        weight = self.weight(units, channels // groups * kernel[0] * kernel[1])
        return Convolution(
            weight, channels, kernel, self.pair(1, 3), self.pair(0, 2), self.pair(1, 3), groups
        )

    def sign(self, units, bound):
        if self.random.random() < 0.3:
            return Threshold()
        directions = self.random.choice(np.array([-1, 1], np.int8), units)
        return Threshold(self.random.integers(-bound - 1, bound + 2, units).astype(np.int32), directions)

    def line(self, units, shift):
        multipliers = self.random.integers(-1000, 1000, units).astype(np.int32)
        offsets = self.random.integers(-(10**6), 10**6, units)
        match self.random.choice(["each", "all", "clip"]):
            case "all":
                multipliers[:], offsets[:] = multipliers[0], offsets[0]
            case "clip":
                multipliers[:], offsets[:], shift = 1, 0, 0
        low, high = int(self.random.choice([0, -1, -128])), int(self.random.choice([1, 127, 255, 900]))
        return Rescale(multipliers, offsets, shift, low, high)

    def weight(self, units, fan_in):
        if self.random.random() < 0.6:
            return bits_of_spins(self.random.choice([-1, 1], (units, fan_in)))
        return self.random.integers(-9, 10, (units, fan_in)).astype(np.int8)

    def whole(self, least, end):
        return int(self.random.integers(least, end))

    def pair(self, least, end):
        return self.whole(least, end), self.whole(least, end)
