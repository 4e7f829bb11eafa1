"""The command line, as a user calls it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli import main

RECIPE = str(Path(__file__).parents[1] / "recipes" / "digits_csghmc.yaml")
SHORT = ["--trainer.max_epochs=32", "--trainer.enable_progress_bar=false"]


def test_fit_test_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", RECIPE, *SHORT])
    run = Path("runs/digits_csghmc/version_0")
    printed = capsys.readouterr().out
    assert "mean single sample" in printed
    assert "model average" in printed
    results = json.loads((run / "results.json").read_text())
    assert results["recipe"] == "digits_csghmc"
    assert results["stage"] == "test"
    assert results["seed"] == 0
    values = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    for method in ("single", "bma"):
        assert 0.8 < values[method, "accuracy"] <= 1
        assert 0 < values[method, "nll"] < 1
        assert 0 <= values[method, "ece"] < 0.5
    assert {path.stem for path in run.glob("*.png")} == {
        "schedule",
        "energy",
        "running_accuracy",
        "running_nll",
        "reliability",
    }
    posterior = Posterior.load(run / "samples")
    assert len(posterior) == 24
    assert posterior.model is not None, "the store of a configured network describes it"

    main(["test", "--config", RECIPE, *SHORT])
    again = json.loads(Path("runs/digits_csghmc/version_1/results.json").read_text())
    assert again["rows"] == results["rows"], "another process finds the same samples and figures"

    main(["predict", "--config", RECIPE, *SHORT])
    (file,) = Path("runs/digits_csghmc").glob("*/predictions.safetensors")
    predictions = load_file(file)
    assert predictions["probabilities"].shape == (359, 10)
    assert predictions["mutual_information"].shape == (359,)


def test_configuration_mistakes_say_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"exploration must be in \[0, 1\), got 2"):
        main(
            [
                "fit",
                "--config",
                RECIPE,
                "--trainer.callbacks=lightning_sgmcmc.callbacks.CyclicalSchedule",
                "--trainer.callbacks.exploration=2",
            ]
        )
    with pytest.raises(SystemExit):
        main(["fit", "--config", RECIPE, "--model.init_args.learning_rate=1"])
    assert "learning_rate" in capsys.readouterr().err
