import re
import shutil
from pathlib import Path

import pytest

from spingrad._files import append_record
from spingrad_lab.cli import main
from spingrad_lab.comparison import Comparison
from spingrad_lab.experiments import BENCHMARKS, EXPERIMENTS
from spingrad_lab.methods import METHODS, NUM_TRIALS, make_solver
from spingrad_lab.paper.small import LOGISTIC_REGRESSION
from spingrad_lab.provenance import commit, fingerprint
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Lab, Line, append_line, read_lines, to_frame, where
from spingrad_lab.trials import Score, best_trial, current_finals

# torch_geometric compiles a few functions with the deprecated torch.jit when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


RESULTS = Path(__file__).parents[1] / "results"


class Squares(Experiment):
    title, source = "Squares", "nowhere"

    def __init__(self, fail_at=None):
        self.computed, self.fail_at = [], fail_at

    def plan(self, lab):
        lab.run([{"seed": seed} for seed in range(lab.seeds or 4)])

    def compute(self, job):
        if job["seed"] == self.fail_at:
            raise KeyboardInterrupt
        self.computed.append(job["seed"])
        return {"square": job["seed"] ** 2}

    def show(self, runs):
        return Section(tables=[Table(["square"], [[str(square)] for square in runs["square"]])])


def lab(experiment, folder, **options):
    return Lab("squares", experiment, folder, workers=0, **options)


def test_a_finished_run_is_never_computed_again(tmp_path):
    experiment = Squares()
    experiment.plan(lab(experiment, tmp_path))
    experiment.plan(lab(experiment, tmp_path, seeds=6))
    assert experiment.computed == [0, 1, 2, 3, 4, 5]
    line = read_lines(tmp_path / "squares.jsonl")[3]
    assert line.metrics == {"square": 9}
    assert line.job == {"seed": 3, "quick": False}
    assert line.versions.keys() == {"spingrad", "torch", "numpy", "python"}
    assert (line.commit, line.threads, line.revision) == (commit(), 1, 1)
    assert line.settings == fingerprint(Squares())


def test_a_stopped_experiment_goes_on_where_it_was(tmp_path):
    stopped, resumed = Squares(fail_at=2), Squares()
    with pytest.raises(KeyboardInterrupt):
        stopped.plan(lab(stopped, tmp_path))
    resumed.plan(lab(resumed, tmp_path))
    assert stopped.computed == [0, 1]
    assert resumed.computed == [2, 3]


def test_a_line_cut_short_is_computed_again(tmp_path):
    experiment = Squares()
    experiment.plan(lab(experiment, tmp_path))
    path = tmp_path / "squares.jsonl"
    torn = path.read_text()[:-20]
    path.write_text(torn)
    assert [line.metrics["square"] for line in read_lines(path)] == [0, 1, 4]
    assert path.read_text() == torn  # reading changes no file
    experiment.plan(lab(experiment, tmp_path))
    assert experiment.computed == [0, 1, 2, 3, 3]
    assert [line.metrics["square"] for line in read_lines(path)] == [0, 1, 4, 9]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "squares.jsonl"
    append_line(path, Line({}, {}, 0.0, {}))
    append_record(path, {"seed": 1})
    with pytest.raises(ValueError, match=r"squares\.jsonl, line 3 is not a finished run"):
        read_lines(path)


def test_a_file_that_is_not_ours_is_refused_and_untouched(tmp_path):
    path = tmp_path / "karate.jsonl"
    path.write_text('{"my": "data"}')
    for command in (["report", str(tmp_path)], ["run", "karate", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"karate\.jsonl is no file of spingrad's records"):
            main(command)
    assert path.read_text() == '{"my": "data"}'


def test_quick_runs_and_full_ones_are_different_runs(tmp_path):
    experiment = Squares()
    experiment.plan(lab(experiment, tmp_path, quick=True))
    experiment.plan(lab(experiment, tmp_path))
    assert len(experiment.computed) == 8


def test_every_tuned_method_gets_the_same_number_of_trials():
    tuned = {m: len(method.trials) for m, method in METHODS.items() if method.like is None}
    assert tuned.pop("binary layers frozen") == 1
    assert set(tuned.values()) == {NUM_TRIALS}
    for experiment in EXPERIMENTS.values():
        if isinstance(experiment, Comparison):
            own = {m: len(experiment.trials.get(m, METHODS[m].trials)) for m in experiment.methods}
            assert len({own[m] for m in own if m in tuned}) == 1


def trial(lr, seed, loss, stage="trial"):
    job = {"stage": stage, "method": "Bop", "settings": {"lr": lr}, "seed": seed}
    return Line(job, {"test_loss": loss}, 0.0, {})


LOSS = Score("test_loss", "loss", higher_is_better=False)


def test_settings_are_chosen_by_the_mean_over_tuning_seeds():
    losses = {1: (0.0, 3.0), 2: (1.0, 1.0), 3: (9.0, 9.0)}
    found = best_trial(
        to_frame(trial(lr, seed, loss) for lr, own in losses.items() for seed, loss in enumerate(own)), LOSS
    )
    assert (found.settings, found.score, found.worst, found.at_edge) == ({"lr": 2}, 1.0, 9.0, frozenset())


def test_of_equally_good_trials_the_lower_learning_rate_is_chosen_in_any_order():
    trials = [trial(lr, 0, 1.0) for lr in (3, 1, 2)]
    assert best_trial(to_frame(trials), LOSS).settings == {"lr": 1}


def test_a_setting_at_the_edge_of_its_grid_is_marked():
    found = best_trial(to_frame(trial(lr, 0, lr) for lr in (1, 2, 3)), LOSS)
    assert found.at_edge == {"lr"}
    assert str(found) == "lr 1†"


def test_a_selection_without_any_run_keeps_its_columns():
    runs = to_frame([trial(1, 0, 2.0)])
    assert list(where(runs, seed=5, method="Bop").columns) == list(runs.columns)
    assert current_finals(where(runs, seed=5), ["method"], LOSS).empty


def test_final_runs_with_settings_that_are_no_longer_the_best_are_left_out():
    trials = [trial(1, 0, 2.0), trial(2, 0, 1.0)]
    finals = [trial(lr, seed, 0.5, "final") for lr, seed in ((1, 0), (2, 1), (2, 0))]
    found = current_finals(to_frame(trials + finals), ["method"], LOSS)
    assert [(own["lr"], seed) for own, seed in zip(found["settings"], found["seed"], strict=True)] == [
        (2, 0),
        (2, 1),
    ]


def test_the_verdict_compares_with_the_best_baseline_over_the_same_seeds():
    def finals(method, values):
        job = {"stage": "final", "task": "symmetric", "method": method, "settings": {}}
        metrics = {"excess": 0.0}
        return [Line(job | {"seed": i}, metrics | {"train_loss": v}, 0.0, {}) for i, v in enumerate(values)]

    lines = (
        finals("QP-SBGD", [1.0, 2.0, 3.0])
        + finals("Bop", [9.0, 9.0, 9.0])
        + finals("ProxQuant", [1.5, 2.0, 3.1])
    )
    (verdict,) = LOGISTIC_REGRESSION.show(to_frame(lines)).tables[0].rows
    assert verdict[:3] == ["symmetric", "QP-SBGD", "ProxQuant"]
    assert "-0.2000" in verdict[3]


@pytest.mark.parametrize("name", ["block", "sweeps", "exact", "sign", "annealing", "tabu", "feedback"])
def test_solvers_have_names(name):
    assert make_solver(name).solve is not None


def test_an_unknown_solver_or_experiment_is_refused_before_any_run(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "karate", "--solver", "x", "--out", str(tmp_path)])
    assert (
        "--solver is block, sweeps, exact, sign, annealing, tabu or feedback, got 'x'"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="2"):
        main(["run", "nothing", "--out", str(tmp_path)])
    assert "no experiment 'nothing'; choose from: all, logistic" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="holds no finished runs"):
        main(["report", str(tmp_path)])


def test_the_list_names_every_experiment_and_benchmark(capsys):
    main(["list"])
    listed = capsys.readouterr().out
    for name in (*EXPERIMENTS, *BENCHMARKS):
        assert name in listed


def test_a_report_after_a_quick_run_needs_no_folder_and_says_that_it_is_no_result(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    main(["run", "logistic", "--quick", "--workers", "0"])
    main(["report"])
    written = capsys.readouterr().out.split()[-2:]
    assert written == ["lab-results/quick/report.html", "lab-results/quick/report.md"]
    for path in written:
        assert "Quick sizes, not a result" in (tmp_path / path).read_text()


def test_a_report_of_full_runs_has_no_banner(tmp_path):
    shutil.copy(RESULTS / "karate.jsonl", tmp_path)
    main(["report", str(tmp_path)])
    assert "Quick sizes" not in (tmp_path / "report.md").read_text()


def test_another_solver_has_a_folder_of_its_own(tmp_path):
    options = ["--quick", "--seeds", "1", "--workers", "0", "--solver", "annealing", "--out", str(tmp_path)]
    main(["run", "logistic", *options])
    path = tmp_path / "quick" / "solver-annealing" / "logistic.jsonl"
    jobs = [line.job for line in read_lines(path)]
    assert {job["solver"] for job in jobs if job["method"] == "QP-SBGD"} == {"annealing"}
    assert {job["solver"] for job in jobs if job["method"] == "QP-SBGD, exact"} == {"exact"}


def test_tensorboard_gets_the_curves(data_folder, tmp_path):
    main(["run", "karate", "--quick", "--seeds", "1", "--out", str(tmp_path), "--tensorboard"])
    assert list((tmp_path / "quick" / "tensorboard" / "karate").glob("*QP-SBGD*/events.*"))


@pytest.fixture(scope="session")
def quick_results(data_folder, tmp_path_factory):
    return tmp_path_factory.mktemp("paper")


ALIKE = {"adult-small", "adult-ten-layer", "citeseer", "cora-raw", "fashion", "pubmed", "pubmed-raw"}
ALIKE |= {"twenty-epochs"}
"""Experiments that differ from another one in nothing but their data, their depth or their epochs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n in ALIKE else n for n in EXPERIMENTS],
)
def test_every_experiment_runs_quickly_on_real_data(name, quick_results, capsys):
    main(["run", name, "--quick", "--out", str(quick_results)])
    lines = read_lines(quick_results / "quick" / f"{name}.jsonl")
    assert lines
    assert all(line.job["quick"] for line in lines)
    section = EXPERIMENTS[name].show(to_frame(lines))
    assert section.tables
    for figure in section.figures:
        assert figure.svg.startswith("<svg")
    for table in section.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}


@pytest.mark.slow
def test_the_report_is_one_page_that_needs_nothing_else(quick_results):
    folder = quick_results / "quick"
    main(["report", str(folder)])
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    for path in folder.glob("*.jsonl"):
        assert f"spingrad-lab run {path.stem} --quick" in page
        assert f"spingrad-lab run {path.stem} --quick" in text
    for figure in re.findall(r"\]\((figures/.*?)\)", text):
        assert (folder / figure).is_file()
