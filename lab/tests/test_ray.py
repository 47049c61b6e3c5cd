import sys

import pytest
from test_paper import Squares

from spingrad_lab.cli import main
from spingrad_lab.runs import Lab, read_lines

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster on this machine, gone after the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "RAY_worker_niceness", "0"
        )  # 15 unless told: on a busy machine tests would wait for ever
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[Squares.__module__])
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.slow
def test_an_experiment_on_ray_resumes_and_equals_one_on_this_machine(tmp_path):
    experiment = Squares()
    experiment.plan(Lab("squares", experiment, tmp_path / "ray", workers="ray", seeds=2))
    path = tmp_path / "ray" / "squares.jsonl"
    before = path.read_text()
    experiment.plan(Lab("squares", experiment, tmp_path / "ray", workers="ray", seeds=4))
    experiment.plan(Lab("squares", experiment, tmp_path / "here", workers=0, seeds=4))
    lines, here = read_lines(path), read_lines(tmp_path / "here" / "squares.jsonl")
    assert path.read_text().startswith(before)
    assert sorted((x.job["seed"], str(x.metrics)) for x in lines) == [
        (x.job["seed"], str(x.metrics)) for x in here
    ]


def test_an_address_without_ray_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "karate", "--out", str(tmp_path), "--address", "127.0.0.1:6379"])
    assert "add --workers ray" in capsys.readouterr().err
