"""Does a better solution of the projection problem train a better network?"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad import QPSBGD, convert
from spingrad.solvers import BlockDescentSolver, SignSolver
from spingrad_lab.beyond.controlled import WAYS, Checked, ControlledSolver, Measured, Way
from spingrad_lab.data import Split, mnist
from spingrad_lab.methods import Method, Params, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Duel, Paired, Verdict, estimate, judged
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.small import AdultTwoLayers, Digits17, mlp, pair_points
from spingrad_lab.tasks.text import Shakespeare, Transformer
from spingrad_lab.tasks.training import Task, VectorTask, train
from spingrad_lab.trials import ACCURACY, TUNING_SEED, Score, best_trial, current_finals, matched

DISTANCES = (0.001, 0.01, 0.05, 0.2)
EXACT, DEFAULT, SIGN = "exact", "default solver", "sign of the field"


def _controlled(distance: float, way: Way, steps: int) -> ControlledSolver:
    return ControlledSolver(distance, way)


SOLVERS: dict[str, Callable[[int], Any]] = {
    EXACT: lambda steps: Checked(steps),
    **{f"{100 * d:g} %, {way}": partial(_controlled, d, way) for d in DISTANCES for way in WAYS},
    DEFAULT: lambda steps: Measured(BlockDescentSolver(), 10),
    SIGN: lambda steps: Measured(SignSolver(), 10),
}
"""What solves the problems of a run, by its name in tables; made from the number of steps."""
LOSS = Score("test_loss", "loss on held-out data", higher_is_better=False)
TRAINING = Score("train_loss", "training loss", higher_is_better=False, margin=0.01)


class Pair(Digits17):
    """The paper's network on the paper's features; fewer epochs of larger batches."""

    epochs, batch = 6, 25


class AdultTwo(AdultTwoLayers):
    """The paper's network; fewer epochs."""

    epochs = 4


@cache
def _shrunk(split: Split, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images of MNIST, shrunk; pixels are centred and have a root mean square of one."""
    whole, own = (
        nn.functional.adaptive_avg_pool2d(mnist(part).pixels().view(-1, 28, 28), shape).flatten(1)
        for part in ("train", split)
    )
    centre = whole.mean(0)
    return (own - centre) / (whole - centre).square().mean().sqrt(), mnist(split).labels


class Shrunk(VectorTask):
    """2,000 images of MNIST, shrunk, of some of the digits; MNIST's own test set, or 2,000 held out."""

    epochs, batch = 3, 50
    shape: tuple[int, int]
    hidden: int
    digits: tuple[int, ...] = tuple(range(10))

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = self._images("train")
        count = 200 if quick else 2_000
        fit, held_out = torch.randperm(len(x))[: 2 * count].split(count)
        self.train = x[fit], y[fit]
        self.test = (x[held_out], y[held_out]) if tuning else self._images("test")
        if quick:
            self.epochs = 1

    def _images(self, split: Split) -> tuple[Tensor, Tensor]:
        x, y = _shrunk(split, self.shape)
        classes = torch.full((10,), -1)
        classes[list(self.digits)] = torch.arange(len(self.digits))
        own = classes[y] >= 0
        return x[own], classes[y[own]]

    def network(self) -> nn.Module:
        return mlp(math.prod(self.shape), self.hidden, len(self.digits))


class PixelPair(Shrunk):
    shape, hidden, digits = (8, 8), 16, (3, 5)


class SmallDigits(Shrunk):
    shape, hidden = (5, 5), 16


class SmallShakespeare(Shakespeare):
    """One layer of width 64, its feed-forward part binary; 100 steps of 8 texts."""

    width, layers, batch = 64, 1, 8
    encoder_lr = 5e-3

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        super().__init__(seed, tuning, quick)
        self.steps, self.scored = (2, 1) if quick else (100, 6)
        self.width, self.layers = 64, 1

    def network(self) -> nn.Module:
        model = Transformer(self.characters, self.width, self.layers)
        return convert(model, keep=("last", nn.MultiheadAttention))

    def scores(self, model: nn.Module) -> dict[str, float]:
        found = {}
        for part, text in {"train": self.train, "test": self.test}.items():
            generator = torch.Generator().manual_seed(0)  # the same texts for every row and seed
            x, y = self._texts(text, 50 * self.scored, generator)
            out = torch.cat([model(own) for own in x.split(50)]).flatten(0, 1)
            found[f"{part}_loss"] = float(nn.functional.cross_entropy(out, y.flatten()))
            found[f"{part}_accuracy"] = float((out.argmax(1) == y.flatten()).float().mean())
        return found


TASKS: dict[str, type[Task]] = {
    "MNIST 1/7, 16-4-2": Pair,
    "Adult, 15-10-1": AdultTwo,
    "digits, 25-16-10": SmallDigits,
    "MNIST 3/5, 64-16-2": PixelPair,
    "transformer, 64-256-64": SmallShakespeare,
}


class SolveQuality(Experiment):
    """The default step, solved to chosen distances from the optimum; a learning rate tuned for each."""

    title = "Does a better solution train a better network?"
    source = "beyond the paper"
    seeds, tuning_seeds = 20, 2
    rates = (1e-3, 3e-3, 1e-2)

    def plan(self, lab: Lab) -> None:
        if not lab.quick:
            pair_points(lab.quick)
        names = list(SOLVERS)[:: 7 if lab.quick else 1]
        for task in list(TASKS)[2::2] if lab.quick else TASKS:
            rates = self.rates[: 1 if lab.quick else None]
            few = lab.quick or TASKS[task] is SmallShakespeare
            tuning = range(TUNING_SEED, TUNING_SEED + (1 if few else self.tuning_seeds))
            trials = lab.run(
                [_job("trial", task, n, {"lr": lr}, seed) for n in names for lr in rates for seed in tuning],
                f"{task}, trials",
            )
            chosen = {name: best_trial(where(trials, method=name), LOSS).settings for name in names}
            seeds = range(2 if lab.quick else lab.seeds or self.seeds)
            lab.run(
                [_job("final", task, name, chosen[name], seed) for seed in seeds for name in names],
                f"{task}, finals",
            )

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = TASKS[job["task"]](job["seed"], job["stage"] == "trial", job["quick"])
            steps = task.epochs * sum(1 for _ in task.batches())
            solver = SOLVERS[job["method"]](steps)

            def make(params: Params, seed: int, lr: float) -> Optimizer:
                return QPSBGD(params, lr, solver=solver, seed=seed)

            metrics = train(task, Method(make, []), job["settings"], job["seed"])
        metrics |= {"reached": round(sum(solver.reached) / len(solver.reached), 7), "steps": steps}
        if isinstance(solver, Checked):
            metrics["above"] = {str(n): [round(v, 7) for v in own] for n, own in solver.above.items()}
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        finals = {task: _finals(where(runs, task=task)) for task in TASKS}
        finals = {task: own for task, own in finals.items() if EXACT in set(own.get("method", ()))}
        pooled = {task: _pooled(own) for task, own in finals.items()}
        tables = [
            *(_differences(pooled, score, "; means of the three ways") for score in (ACCURACY, TRAINING)),
            _differences(
                {task: _at_equal_rates(runs, task) for task in finals},
                TRAINING,
                "; trials with equal learning rates",
            ),
            *(_differences(finals, score) for score in (ACCURACY, TRAINING)),
            _checks(finals),
        ]
        tables += [_table(task, own, where(runs, task=task, stage="trial")) for task, own in finals.items()]
        drawn = Figure("differences", _CAPTION, to_svg(_figure(finals)))
        return Section(list(_NOTES), [table for table in tables if table.rows], [drawn])


Found = dict[str, tuple[Paired, Verdict]]
"""What was found about each row of a task, by its name: the row minus exact."""


def _finals(runs: pd.DataFrame) -> pd.DataFrame:
    return runs if runs.empty else current_finals(runs, ["method"], LOSS)


def _judged(task: str, finals: pd.DataFrame, score: Score) -> Found:
    duels = [
        Duel(
            task,
            score.label,
            (name, EXACT),
            matched(finals, name, EXACT, score=score.name),
            score.higher_is_better,
            score.margin,
        )
        for name, _ in groups(finals, "method")
        if name != EXACT
    ]
    return {duel.names[0]: (test, what) for duel, test, what in judged(duels)}


def _pooled(finals: pd.DataFrame) -> pd.DataFrame:
    """Final runs in which one row stands for the three ways of a distance: the mean of their scores."""
    shown = finals[[ACCURACY.name, TRAINING.name]].astype(float)
    shown["seed"] = finals["seed"]
    shown["method"] = finals["method"].map(lambda name: name.partition(",")[0])
    runs = shown.groupby(["method", "seed"], sort=False)
    means = runs.mean().assign(ways=runs.size()).reset_index()
    needed = means["method"].map(lambda name: len(WAYS) if "%" in name else 1)
    return means[means["ways"] == needed]


def _at_equal_rates(runs: pd.DataFrame, task: str) -> pd.DataFrame:
    """Trials of a network, pooled like final runs; a seed with a learning rate counts as a seed."""
    own = where(runs, task=task, stage="trial")
    rates = (settings["lr"] for settings in own["settings"])
    seeds = [f"{seed}, {lr}" for seed, lr in zip(own["seed"], rates, strict=True)]
    return _pooled(own.assign(seed=seeds))


def _differences(finals: dict[str, pd.DataFrame], score: Score, what: str = "") -> Table:
    """A row for each method, a column for each network."""
    found = {task: _judged(task, own, score) for task, own in finals.items()}
    names = dict.fromkeys(name for own in finals.values() for name in own["method"] if name != EXACT)
    rows = [[name, *(_difference(own.get(name), score) for own in found.values())] for name in names]
    rows.append(["pairs of runs", *(str(len(where(own, method=EXACT))) for own in finals.values())])
    unit = ", in points" if score is ACCURACY else ""
    caption = f"{score.label.capitalize()} minus that of exact solutions{unit}{what}"
    return Table(["solved to", *found], rows, caption)


def _difference(own: tuple[Paired, Verdict] | None, score: Score) -> str:
    if own is None:
        return "–"
    (mean, half), what = own[0].difference, own[1]
    mean, half, digits = (100 * mean, 100 * half, 2) if score is ACCURACY else (mean, half, 3)
    text = f"{mean:+.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
    return f"**{text}**, {what}" if what in ("ahead", "behind") else f"{text}, {what}"


def _checks(finals: dict[str, pd.DataFrame]) -> Table:
    """How good the best known spins are, of units that are too wide to be enumerated."""
    rows = []
    for task, own in finals.items():
        exact = [run["above"] for _, run in where(own, method=EXACT).iterrows() if run["above"]]
        for fan_in in dict.fromkeys(n for run in exact for n in run):
            values = [value for run in exact for value in run.get(fan_in, [])]
            missed = sum(value > 1e-6 for value in values) / len(values)
            mean = sum(values) / len(values)
            by = "proof" if int(fan_in) <= 32 else "annealing, ten times as long"
            rows.append([task, fan_in, by, f"{len(values)}", f"{missed:.2%}", f"{100 * mean:.4f} %"])
    header = ["network", "fan-in", "compared with", "units", "improved", "mean distance above"]
    return Table(header, rows, "The best known spins of units with more than 16 inputs")


def _table(task: str, finals: pd.DataFrame, trials: pd.DataFrame) -> Table:
    accuracy, training = (_judged(task, finals, score) for score in (ACCURACY, TRAINING))
    rows = []
    for name in (name for name in SOLVERS if name in set(finals["method"])):
        own = where(finals, method=name)
        row = [name, f"{100 * own['reached'].mean():.3f} %"]
        for score, found in ((TRAINING, training), (ACCURACY, accuracy)):
            row.append(str(estimate(own[score.name])))
            row.append(f"{found[name][0]}, {found[name][1]}" if name in found else "–")
        chosen = best_trial(where(trials, method=name), LOSS)
        rows.append([*row, str(chosen), str(len(own)), f"{own['run_seconds'].median():.1f}"])
    header = ["solved to", "distance reached", "training loss", "minus exact", "test accuracy", "minus exact"]
    header += ["chosen", "seeds", "seconds of a run"]
    caption = f"{task}: mean ± 95 % interval; Holm over the table; † a learning rate at the end of its grid"
    return Table(header, rows, caption, folded=True)


_COLOURS: dict[str, str] = dict(zip(WAYS, (figures.BLUE, figures.GREEN, figures.ORANGE), strict=True))


def _figure(finals: dict[str, pd.DataFrame]) -> Any:
    """A panel for each network: accuracy minus that of exact solutions, over the distance reached."""
    columns = min(3, len(finals))
    canvas, axes = figures.new(
        3.4 * columns, 2.9 * -(-len(finals) // columns), -(-len(finals) // columns), columns
    )
    for panel, (task, own) in zip(axes.flat, finals.items(), strict=False):
        panel.axhline(0, color=figures.GREY, linewidth=0.8)
        for name, (test, _) in _judged(task, own, ACCURACY).items():
            way = name.partition(", ")[2]
            style = {"color": _COLOURS.get(way, figures.VERMILION), "marker": "o" if way else "s"}
            label = way or name if name.startswith("1 %") or name == DEFAULT else None
            if name != SIGN:
                x, (mean, half) = 100 * where(own, method=name)["reached"].mean(), test.difference
                panel.errorbar(
                    x,
                    100 * mean,
                    yerr=100 * half,
                    linestyle="",
                    markersize=4,
                    capsize=2,
                    label=label,
                    **style,
                )
        panel.set(
            xscale="log", title=task, xlabel="distance from the optimum, %", ylabel="points of accuracy"
        )
    for panel in axes.flat[len(finals) :]:
        panel.set_visible(False)
    figures.legend_below(canvas, axes.flat[0])
    return canvas


def _job(stage: str, task: str, method: str, settings: Settings, seed: int) -> Job:
    return {"stage": stage, "task": task, "method": method, "settings": settings, "seed": seed}


_CAPTION = (
    "Test accuracy minus that of exact solutions, over the distance reached; means and 95 % intervals over "
    "seeds. The sign of the field is worse than random spins and not drawn."
)
_NOTES = (
    "Every row is the class's default step, with another solver of its problems. The distance of a solution "
    "is (E − E*) / (E_random − E*): 0 for the optimum, 100 % for the mean energy of random spins. The rows "
    "ask for a mean over units and steps of 0.1 % to 20 %, reached in three ways. *Temperature*: samples of "
    "a heat bath at one temperature for each layer. *Early stop*: annealing that begins with cold descent "
    "from random spins and stops at the first flip below a threshold, which is drawn for each unit from an "
    "exponential distribution. *Random flips*: the optimum, each spin flipped with the same probability. "
    "Temperatures and thresholds follow the distances of the steps before. *Default solver* is block "
    "descent; the *sign of the field* leaves out the quadratic term, and its energies can be higher than "
    "those of random spins.",
    "Units with up to 16 inputs are solved by enumeration. For wider ones *exact* is the best known: "
    "annealing with 10 reads of 20 sweeps (3 reads for more than 64 inputs), compared at one step of each "
    "run with a proven optimum (up to 32 inputs, where 200,000 nodes prove it) or with annealing of ten "
    "times as many reads. Up to 32 inputs the default step keeps the whole quadratic term; beyond, its 32 "
    "leading directions.",
    "Every row has the same trials: three learning rates, two seeds (one for the transformer), chosen by the "
    "loss on held-out training data; then fresh seeds, which draw data, start and batches and are the same "
    "for every row. Differences are paired by seed and Holm-corrected over the rows of a network. *Level*: a "
    "test of equivalence says that the difference is below 0.3 points of accuracy, or 0.01 of the training "
    "loss. Of a loss, *ahead* means lower.",
    "Sizes: 120 steps of 25 images for the pair 1/7 (16 bits of the paper's features), 128 steps of 16 rows "
    "for Adult, 120 steps of 50 images for the others (2,000 images of MNIST averaged to 5 × 5 and 8 × 8 "
    "pixels), 100 steps of 8 texts of 64 characters for the transformer: one layer of width 64, whose "
    "feed-forward maps, 64 to 256 and 256 to 64, are binary; the rest is real and trained by Adam. Its "
    "accuracy is that of the next character.",
)
SOLVE_QUALITY = SolveQuality()
