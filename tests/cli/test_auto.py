"""`sgmcmc fit --auto`, as a user calls it."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.cli.exits import Mistake
from tests.support.paths import RECIPE

SHORT = ["--trainer.max_epochs=20", "--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_epoch=10"]
RUNS = Path("runs/digits_csghmc")


def without_pictures(path: Path) -> str:
    """Return a configuration with tables alone: pictures are most of a trial run's time."""
    return path.read_text().replace("{every: end}", "{every: end, figures: [tables]}")


@pytest.mark.slow
def test_auto_writes_the_configuration_that_repeats_it() -> None:
    """The schedule of the configuration is replaced, and `auto.yaml` has every choice: its run has the same draws.

    `test` with the configuration of the fit finds the same samples, weights and figures.
    """
    main(["fit", "--config", RECIPE, *SHORT, "--auto"])
    first = Posterior.load(RUNS / "version_0")
    assert len(first) == 80
    assert 0 < first.weight_efficiency < 0.999
    config = yaml.safe_load((RUNS / "version_0" / "auto.yaml").read_text())
    chosen = [entry for entry in config["trainer"]["callbacks"] if "Schedule" in entry["class_path"]]
    assert not chosen
    assert len(config["trainer"]["callbacks"][0]["init_args"]["prior_scales"][0]) > 3
    main(["fit", "--config", str(RUNS / "version_0" / "auto.yaml")])
    second = Posterior.load(RUNS / "version_1")
    assert first.records == second.records
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
    main(["test", "--config", RECIPE, *SHORT])
    results = [json.loads((RUNS / "version_1" / name).read_text()) for name in ("results.json", "test/results.json")]
    assert results[0]["rows"] == results[1]["rows"]
    assert results[0]["kind"] == "cold ensemble"


@pytest.mark.slow
def test_a_configuration_with_the_callback_is_repeated_too() -> None:
    configuration = str(Path(RECIPE).with_name("digits_auto.yaml"))
    main(["fit", "--config", configuration, "--trainer.max_epochs=10", "--trainer.enable_progress_bar=false"])
    first, second = Path("runs/digits_auto/version_0"), Path("runs/digits_auto/version_1")
    main(["fit", "--config", str(first / "auto.yaml")])
    assert Posterior.load(first).records == Posterior.load(second).records


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget=10m"], "--budget is an option of --auto"),
        (["--auto", "--budget=soon"], "budget must be a time such as"),
        (["--auto", "--trainer.max_epochs=1"], "80 draws do not fit into the 10 steps after the warm-up"),
    ],
)
def test_mistakes(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, Mistake)):
        main(["fit", "--config", RECIPE, *SHORT, *options])
    assert words in capsys.readouterr().err
    assert not RUNS.exists()


RECIPES = sorted(Path(RECIPE).parent.glob("*.yaml"))
CONFIGURATIONS = [path for path in RECIPES if "\ntrainer:" in path.read_text()]


@pytest.mark.by_default("posterior", "contour")  # `RECIPE` is started below, and digits_auto in `test_help.py`
@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_every_configuration_of_the_project_samples_by_itself(path: Path) -> None:
    """What changes the chain is replaced, so that no two callbacks claim the same part of a step."""
    Path("own.yaml").write_text(without_pictures(path))
    main(
        ["fit", "--config", "own.yaml", "--auto", "--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false"]
    )


def test_other_yaml_files_of_recipes_are_refused_before_anything_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().rglob("*"))
    for path in [path for path in RECIPES if path not in CONFIGURATIONS][::5]:
        with pytest.raises((SystemExit, Mistake)):
            main(["fit", "--config", str(path), "--auto"])
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, path
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.by_default("ControlVariates", "MCDropout")
@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("EWSG", None),
        ("ControlVariates", None),
        ("MCDropout", "--auto and MCDropout cannot be combined: both replace a sample by draws of their own; remove"),
    ],
)
def test_callbacks_that_change_the_chain_are_left_out_or_refused(
    added: str, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(without_pictures(Path(RECIPE)))
    config["trainer"]["callbacks"].append({"class_path": f"lightning_sgmcmc.callbacks.{added}"})
    Path("own.yaml").write_text(yaml.safe_dump(config))
    command = ["fit", "--config", "own.yaml", "--auto", "--trainer.fast_dev_run=true"]
    if words is None:
        main(command)
        return
    with pytest.raises((SystemExit, Mistake)):
        main(command)
    assert words in capsys.readouterr().err
    assert not RUNS.exists()


@pytest.mark.slow
def test_baselines_have_the_cost_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """`sgd` and `ensemble` are rows of results.json, each a run of its own with as many gradients as the run."""
    main(["fit", "--config", RECIPE, *SHORT, "--auto", "--baselines"])
    run = RUNS / "version_0"
    results = json.loads((run / "results.json").read_text())
    values = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    for method in ("single", "bma", "sgd", "ensemble"):
        assert 0 < values[method, "nll"] < 1
    steps = Posterior.load(run)[-1].step
    for name, members in (("sgd", 1), ("ensemble", 4)):
        networks = Posterior.load(run / "baselines" / name)
        assert len(networks) == members
        assert {network.step for network in networks} == {steps // members}
    assert "At equal cost" in capsys.readouterr().out
    main(["report", str(RUNS)])
