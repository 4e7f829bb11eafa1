"""The recipe equal_cost: equal budgets, exact scores, paired intervals, resume; its figures are its own affair."""

import functools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import AutoSampling
from lightning_sgmcmc.diagnostics.draws import percentile_interval
from lightning_sgmcmc.diagnostics.scores import gaussian_mixture_crps
from lightning_sgmcmc.recipes import equal_cost
from lightning_sgmcmc.recipes.equal_cost import comparison, limits, methods, pages, problems, scores
from lightning_sgmcmc.recipes.equal_cost.comparison import two_level_means
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))
SETTINGS = read_settings(Settings, Options(Path(), Path()))


def in_turn(function: Any, jobs: Any, options: Options, *shared: Any, **how: Any) -> dict[Any, Any]:
    """Run the jobs in this process, which has imported all that they need."""
    return {job: function(*job, *shared, options) for job in jobs}


def made_up(source: str, root: Path) -> problems.Source:
    """Return 200 data of the kind of a source: a linear target, or its sign."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.1 * torch.randn(200, generator=generator)
    if problems.TABLES.get(source) == "regression":
        return problems.Source(x, 7 + 3 * y)
    return problems.Source(x, (y > 0).long())


def small(**sets: str) -> Settings:
    """Return settings of tiny data sets, by name, with the kinds of the given sources."""
    tiny = {"sizes": [80, 40, 60], "hidden": [8], "batch": 20, "epochs": 8}
    given = {name: {"source": source} | tiny for name, source in sets.items()}
    return replace(SETTINGS, seeds=2, methods=dict(SETTINGS.methods), chosen_sets=tuple(given), sets=given)


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "read", made_up)
    monkeypatch.setattr(equal_cost, "run_jobs", in_turn)


@pytest.mark.slow
@pytest.mark.usefixtures("_made_up")
def test_page_rows_and_picture_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "AutoSampling", functools.partial(AutoSampling, num_draws=4))
    chosen = ("sgd", "ensemble", "auto")
    monkeypatch.setattr(methods, "METHODS", {name: methods.METHODS[name] for name in chosen})
    monkeypatch.setattr(equal_cost, "read_settings", lambda *_: small(pima="pima", energy="energy"))
    rows = equal_cost.run(Options(tmp_path, ROOT))
    page = (tmp_path / "page.md").read_text()
    assert "| sgd_temperature |" in page
    assert "* `auto` has a lower NLL than `ensemble` on " in page
    assert (tmp_path / "nll.png").exists()
    cells = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    order = [(cell["data"], cell["method"], cell["seed"]) for cell in cells]
    assert order == [(data, method, seed) for seed in (0, 1) for data in ("pima", "energy") for method in chosen]
    assert all("loss" not in row for cell in cells for row in cell["rows"].values())
    labels = {row.method for row in rows}
    assert {"pima: sgd", "pima: ensemble_temperature", "energy: sgd_temperature"} <= labels
    assert {row.value for row in rows if row.metric == "gradient evaluations"} == {80 * 8}
    assert "above the budget" not in page


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize("source", ["german", "kin8nm"])
def test_every_method_has_the_same_budget(source: str, tmp_path: Path) -> None:
    """Steps times chains times batch is that of one network in the given epochs: all of it for a method without early
    end, four times as much for ensemble_4x."""
    problem = problems.Problem(source, small(**{source: source}).sets[source], ROOT)
    problem.setup("fit")
    for name, method in methods.METHODS.items():
        setting = methods.setting_of(SETTINGS, source, name)
        fit = method(problem, setting)
        cost = fit.steps * fit.module.chains.num_chains * problem.batch_size
        share = setting.get("length", 1.0) * setting.get("cost", 1)
        assert cost == pytest.approx(80 * 8 * share), name
        assert fit.validates == name.startswith("auto")


def test_every_data_set_has_a_setting_of_every_method() -> None:
    for data in SETTINGS.sets:
        for method in methods.METHODS:
            assert methods.setting_of(SETTINGS, data, method)
    assert set(methods.CALIBRATED) <= set(methods.METHODS)


def test_a_regression_problem_is_split_and_standardised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "read", made_up)
    setting = small(energy="energy").sets["energy"]
    first, again, other = (problems.Problem("energy", setting, ROOT, seed) for seed in (0, 0, 1))
    for problem in (first, again, other):
        problem.setup("fit")
    train, val, test = first.splits
    assert [len(part.targets) for part in first.splits] == [80, 40, 60]
    assert train.inputs.mean(0).abs().max() < 1e-5
    assert float(train.targets.std(correction=0)) == pytest.approx(1, abs=1e-5)
    raw = torch.cat([part.targets for part in first.splits])[:, 0] * first.scale + float(first.target_mean or 0)
    assert len(raw.unique()) == 180  # no datum is in two parts
    assert torch.equal(test.targets, again.splits[2].targets)
    assert not torch.equal(test.targets, other.splits[2].targets)
    assert first.unknown.shape == test.inputs.shape
    assert val.inputs.dtype == torch.float32


def test_the_novel_rows_of_a_table_are_standardised_by_its_training_data(monkeypatch: pytest.MonkeyPatch) -> None:
    novel = torch.tensor([[5.0, 0.0, -5.0], [0.0, 7.0, 1.0]])
    monkeypatch.setattr(problems, "read", lambda source, root: made_up(source, root)._replace(unknown=novel))
    problem = problems.Problem("german", small(german="german").sets["german"], ROOT)
    problem.setup("fit")
    assert problem.input_scaling is not None
    mean, std = problem.input_scaling
    torch.testing.assert_close(problem.unknown.double() * std + mean, novel.double(), rtol=1e-5, atol=1e-5)


# -- images, words and hours ------------------------------------------------------------------------------------------


def problem_of(name: str, root: Path, *sizes: int) -> problems.Problem:
    """Return a data set of the settings, of the files in a folder, with other sizes."""
    problem = problems.Problem(name, {**SETTINGS.sets[name], "sizes": list(sizes), "batch": 10}, root, seed=1)
    problem.setup("fit")
    return problem


def test_small_photographs_are_averaged_and_augmented_in_training_only(tmp_path: Path) -> None:
    """Pixels of 16×16 are the means of four; of the batches only those of the training differ from pass to pass."""
    generator = np.random.default_rng(0)
    x, x_test = (generator.integers(256, size=(size, 32, 32, 3), dtype=np.uint8) for size in (60, 20))
    letters = generator.integers(256, size=(30, 28, 28), dtype=np.uint8)
    for folder, arrays in (
        (
            "cifar10/cifar10",
            {"x_train": x, "y_train": np.arange(60) % 10, "x_test": x_test, "y_test": np.arange(20) % 10},
        ),
        ("notmnist/notmnist_test", {"x": letters, "y": np.arange(30) % 10}),
    ):
        (tmp_path / folder).parent.mkdir()
        np.savez(tmp_path / f"{folder}.npz", **arrays)
    problem = problem_of("cifar_16", tmp_path, 40, 20, 20)
    test = problem.splits[2].inputs
    assert problem.input_scaling is not None
    mean, std = problem.input_scaling
    expected = torch.as_tensor(x_test).permute(0, 3, 1, 2).double().reshape(20, 3, 16, 2, 16, 2).mean((3, 5))
    torch.testing.assert_close(test.double() * std + mean, expected, rtol=0, atol=1e-3)
    assert problem.unknown.shape == (30, 3, 16, 16)
    train, val = problem.train_dataloader(), problem.val_dataloader()
    seen = torch.cat([batch[0] for batch in train])
    assert not any((image == seen).flatten(1).all(1).any() for image in problem.splits[0].inputs[:3])
    torch.testing.assert_close(torch.cat([batch[0] for batch in val]), problem.splits[1].inputs)
    net = problem.net(dropout=0.5)
    assert net(test).shape == (20, 10)
    assert sum(isinstance(layer, torch.nn.Dropout) for layer in net) == 1


def test_messages_are_tokens_and_novelty_has_their_lengths(tmp_path: Path) -> None:
    lines = [f"{'spam' if i % 3 == 0 else 'ham'}\tCall {100 + i} now!{' free' * i}" for i in range(60)]
    (tmp_path / "SMSSpamCollection").write_text("\n".join(lines) + "\n")
    source = problems.read("sms", tmp_path)
    assert source.y.tolist() == [int(i % 3 == 0) for i in range(60)]
    assert torch.equal(source.x[0, :4], source.x[7, :4]), "numbers of one length are one token"
    problem = problem_of("sms", tmp_path, 30, 15, 15)
    test = problem.splits[2].inputs
    assert (problem.num_classes, test.shape) == (2, (15, problems.WORDS))
    assert torch.equal(test > 0, problem.unknown > 0)
    assert not torch.equal(test, problem.unknown)
    net = problem.net()
    torch.testing.assert_close(net(test), net(torch.cat([torch.zeros_like(test), test], 1)))  # 0 is no word
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "SMSSpamCollection").write_text("label\ttext\nham\tHello\n")
    with pytest.raises(ValueError, match="neither ham nor spam"):
        problems.read("sms", tmp_path / "wrong")


def test_hours_are_split_in_the_order_of_time(tmp_path: Path) -> None:
    """The column of the temperature is the hour's number here: all of the training are before all others."""
    rows = [f"{i},2011-01-01,1,0,1,{i % 24},0,6,0,1,{i},0.3,0.8,0.1,3,13,{1 + i % 7}" for i in range(1000)]
    (tmp_path / "hour.csv").write_text("\n".join(["a header", *rows]) + "\n")
    problem, other = (problem_of("bikes", tmp_path, 300, 80, 200) for _ in range(2))
    train, val, test = (part.inputs[:, 8] for part in problem.splits)
    assert train.max() < val.min() <= val.max() < test.min()
    assert [len(part) for part in (train, val, test)] == [300, 80, 200]
    log = problem.splits[2].targets[:, 0] * problem.scale + float(problem.target_mean or 0)
    torch.testing.assert_close(log[:7].exp(), torch.tensor([1.0 + i % 7 for i in range(800, 807)]), rtol=1e-4, atol=0)
    assert torch.equal(problem.splits[0].inputs, other.splits[0].inputs)


@pytest.mark.usefixtures("_made_up")
def test_long_sets_have_fewer_seeds_and_only_the_main_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small(german="german", pima="pima")
    settings.sets["pima"] |= {"seeds": 1, "main_only": True}
    monkeypatch.setattr(equal_cost, "read_settings", lambda *_: settings)
    cells: list[Any] = []
    monkeypatch.setattr(equal_cost, "run_jobs", lambda _, jobs, *__, **___: dict.fromkeys(jobs))
    monkeypatch.setattr("lightning_sgmcmc.recipes.equal_cost.pages.write_page", lambda found, *_: cells.append(found))
    for chosen, count in (((), 1 * len(SETTINGS.main)), (("csghmc", "auto"), 2)):
        equal_cost.run(Options(tmp_path, ROOT, methods=chosen))
        methods_run = len(chosen or methods.METHODS)
        assert len(cells.pop()) == 2 * methods_run + count


@pytest.mark.usefixtures("_made_up")
def test_a_grid_costs_one_budget_and_the_validation_data_choose(tmp_path: Path) -> None:
    """Two of its three settings learn nothing: lr = 1e-9 leaves two classes at about ln 2."""
    settings = small(german="german")
    useless = {"lr": 1e-9}
    grid = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 1e-4, "length": 1 / 3, "grid": [useless, {}, useless]}
    settings.methods["sgd_grid"] = {"classification": grid}
    cell = equal_cost.one("german", "sgd_grid", 0, replace(settings), Options(tmp_path, ROOT))
    assert cell["gradient_evaluations"] == pytest.approx(80 * 8, rel=0.05)
    rows = {row: found["metrics"] for row, found in cell["rows"].items()}
    assert set(rows) == {"sgd_grid", "sgd_grid_temperature"}
    assert rows["sgd_grid"]["nll"] < 0.9 * math.log(2)
    assert rows["sgd_grid"]["passes"] == 1


# -- scores -----------------------------------------------------------------------------------------------------------


def test_crps_of_a_gaussian_is_the_closed_form_and_of_a_mixture_the_integral() -> None:
    """σ·[z·(2Φ(z) - 1) + 2φ(z) - 1/√π] (Gneiting and Raftery 2007, eq. 21), and ∫(F(t) - 1{t ≥ y})² dt."""
    y, mean, std = torch.tensor([0.3, -2.0]).double(), torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[2.0, 0.5]])
    one = scores.Mixture(torch.ones(1).double(), mean, std.double())
    z = (y - mean[0]) / std[0]
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    expected = std[0] * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(gaussian_mixture_crps(*one, y), expected)
    both = scores.Mixture(torch.tensor([0.3, 0.7]).double(), mean.T.expand(2, 2), std.double().T.expand(2, 2))
    grid = torch.linspace(-40, 40, 400_001).double()
    for index, value in enumerate(y):
        own = scores.Mixture(both.weights, both.means[:, [index]], both.stds[:, [index]])
        integral = torch.trapezoid((scores.cdf(own, grid) - (grid >= value).double()).square(), grid)
        assert float(gaussian_mixture_crps(*both, y)[index]) == pytest.approx(float(integral), abs=1e-3)


def test_the_quantiles_of_a_mixture_invert_its_distribution_function() -> None:
    generator = torch.Generator().manual_seed(0)
    means, stds = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    of = scores.Mixture(torch.full((5,), 0.2).double(), means, stds.exp())
    for level in (0.025, 0.5, 0.975):
        assert scores.cdf(of, scores.quantile(of, level)).tolist() == pytest.approx([level] * 7)
    step = 1e-5
    slope = (scores.cdf(of, means[0] + step) - scores.cdf(of, means[0] - step)) / (2 * step)
    torch.testing.assert_close(scores.log_density(of, means[0]).exp(), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize("source", ["german", "kin8nm"])
def test_the_joint_nll_of_groups_averages_to_the_posteriors(source: str) -> None:
    """And for one network it is the NLL of each group's data."""
    problem = problems.Problem(source, small(**{source: source}).sets[source], ROOT)
    problem.setup("fit")
    torch.manual_seed(0)
    networks = [problem.net() for _ in range(3)]
    test = problem.splits[2]
    for states in (networks, networks[:1]):
        posterior = Posterior.from_states(networks[0], states, problem.likelihood())
        found = posterior.joint_nll([(test.inputs, test.targets)], scores.TAU)
        assert float(scores.joint_of_groups(posterior, problem).mean()) == pytest.approx(found.nll, rel=1e-6)
        assert (found.nll == pytest.approx(found.marginal_nll)) == (len(states) == 1)


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize("share", [0.7, 0.95])
def test_sets_of_classes_and_the_cost_of_a_prediction_are_counted(share: float) -> None:
    """A network that gives class 0 the same probability everywhere: at 0.7 a set of 90 % has both classes, at 0.95 the
    first. Of three networks two are equal, and one has no weight."""
    problem = problems.Problem("german", small(german="german").sets["german"], ROOT)
    problem.setup("fit")
    net = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(net.weight)
    with torch.no_grad():
        net.bias.copy_(torch.tensor([share, 1 - share]).log())
    other = torch.nn.Linear(3, 2)
    posterior = Posterior.from_states(net, [net, net, other], problem.likelihood(), [0.5, 0.5, 0.0])
    found = scores.score(posterior, problem).metrics
    first = float((problem.splits[2].targets == 0).double().mean())
    assert (found["set_size_90"], found["coverage_90"]) == ((2, 1) if share < 0.9 else (1, pytest.approx(first)))
    assert found["risk_80"] == pytest.approx(1 - first, abs=1e-6)  # all are equally sure
    assert (found["passes"], found["megabytes"]) == (2, pytest.approx(4 * 8 / 1e6))


# -- paired differences -----------------------------------------------------------------------------------------------


def cell(method: str, seed: int, nll: Any, **metrics: float) -> dict[str, Any]:
    row = {"metrics": {"nll": float(np.mean(nll)), "ood_auroc": 0.5} | metrics, "nll": list(nll), "loss": list(nll)}
    cost = {"gradient_evaluations": 10, "seconds": 1.0}
    return {"data": "set", "method": method, "seed": seed, "rows": {method: row}} | cost


def test_two_level_intervals_cover_seeds_and_data() -> None:
    """Effects of 6 seeds with sd 1 and 50 data each with sd 2: the sd of a resampled mean is
    √(s²(1 - 1/G)/G + 4/(G·n)), s² the variance between the seeds' means. Shared data: without seeds' effects the data
    alone, 2/√50. Fixed seeds; the tolerance is four standard errors of 2,000 resamples."""
    rng = np.random.default_rng(0)
    groups = [rng.normal() + 2 * rng.normal(size=(1, 50)) for _ in range(6)]
    between = np.var([group.mean() for group in groups])
    within = np.mean([group.var() / 50 for group in groups])
    draws = two_level_means(groups)
    assert draws.shape == (1, 2000)
    assert draws.std() == pytest.approx(math.sqrt((between + within) / 6), rel=0.07)
    assert draws.mean() == pytest.approx(np.mean([group.mean() for group in groups]), abs=0.05)
    shared = two_level_means([groups[0]] * 6, shared_data=True)
    assert shared.std() == pytest.approx(groups[0].std() / math.sqrt(50), rel=0.07)
    low, high = percentile_interval(draws[0])
    assert low < draws.mean() < high


def test_differences_are_paired_and_sentences_count_them() -> None:
    """auto is 0.1 ± 0.01 below ensemble on every datum, far inside the spread of the data; a rival beats it in both."""
    rng = np.random.default_rng(0)
    cells = []
    for seed in range(3):
        base = rng.normal(size=40)
        cells += [
            cell("ensemble", seed, base),
            cell("auto", seed, base - 0.1 + 0.01 * rng.normal(size=40)),
            cell("swag", seed, base - 0.2, ood_auroc=0.6),
            cell("csghmc", seed, base - 0.3, ood_auroc=0.4),
        ]
    cells.append({"data": "set", "method": "posterior", "seed": 0, "rows": {}, "failed": "it diverged"})
    results = comparison.Results(cells)
    change = results.differences("set", "ensemble")["auto"]
    assert change.value == pytest.approx(-0.1, abs=0.005)
    assert -0.11 < change.low < change.high < -0.09
    assert change.is_off_zero
    assert str(change).startswith("−0.1")
    assert results.failures == {("set", "posterior"): "it diverged"}
    assert comparison.sentences(results, ["set"], [], "posterior") == ["There is no row `posterior`: it diverged."]
    said = comparison.sentences(results, ["set"], [])
    assert said[0] == (
        "`auto` has a lower NLL than `ensemble` on 1 of 1 data sets (set); the 95 % interval is off zero on 1 (set)."
    )
    assert said[-1] == "Better in NLL and OOD AUROC at once, at equal cost: swag on set."
    worse = comparison.sentences(results, ["set"], [], subject="ensemble")
    assert not [one for one in worse if "ensemble_tuned" in one and "of 1" in one]


def test_rows_of_fewer_seeds_are_compared_on_the_seeds_of_both() -> None:
    """swag has the first seed only, an easy one: there its NLL is higher and its AUROC lower than auto's."""
    cells = [
        cell("auto", 0, [1.0] * 4, ood_auroc=0.9),
        cell("auto", 1, [5.0] * 4, ood_auroc=0.5),
        cell("swag", 0, [2.0] * 4, ood_auroc=0.8),
    ]
    results = comparison.Results(cells)
    assert results.paired_means("set", "swag", "auto", "nll") == (2.0, 1.0)
    assert comparison.sentences(results, ["set"], [])[-1].endswith("at equal cost: none.")
    assert comparison.best_auroc(results, ["set"], "auto") == ["`auto` has the best OOD AUROC on 1 of 1 data sets."]
    assert pages.overview(results, ["set"]).count("| swag | 2.000 (1) |") == 1


@pytest.mark.parametrize(("shift", "loss"), [(0.004, 0.002), (0.006, 0.004)])
def test_limits_are_kept_up_to_their_margins(shift: float, loss: float) -> None:
    """auto is `shift` above the better of two rivals, and ten samples lose `loss`: inside the limits, or outside."""
    rng = np.random.default_rng(0)
    cells = []
    for seed in range(2):
        base = rng.normal(size=30)
        auto = base + shift
        cells += [
            cell("ensemble", seed, base, ood_auroc=0.5, ece=0.02),
            cell("ensemble_temperature", seed, base + 1, ood_auroc=0.5, ece=0.02),
            cell("sgd_tuned_temperature", seed, base, ood_auroc=0.9, ece=0.0),
            cell("auto", seed, auto, ood_auroc=0.525 - shift, ece=0.02 + shift),
            cell("auto_10", seed, auto + loss, ood_auroc=0.5, ece=0.0),
        ]
    results = comparison.Results(cells)
    kept = shift < limits.NLL_MARGIN
    found = limits.verdicts(results, "set", False)
    assert [one.kept for one in found] == [kept] * 4
    assert "from sgd_tuned_temperature" in found[0].found
    said = limits.section(results, ["set", "absent"], [])
    assert said.count(f"kept on {int(kept)} of 1 data sets") == 4
    assert ("not on set" in said) == (not kept)
    assert limits.section(comparison.Results(cells[:1]), ["set"], []) == ""


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "notmnist").is_dir(), reason="no data files: set SGMCMC_DATA_ROOT")
def test_all_methods_learn_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of one seed on Digits, through the processes that a user's run has: none is near chance."""
    rows = equal_cost.run(Options(tmp_path, ROOT, repeats=1, changed={"chosen_sets": "[digits]"}))
    accuracy = {row.method: row.value for row in rows if row.metric == "accuracy"}
    assert len(accuracy) >= len(methods.METHODS)
    assert min(accuracy.values()) > 0.9
    for path in (tmp_path / "cells").rglob("*.json"):
        found = json.loads(path.read_text())
        if "failed" not in found and found["method"] not in ("ensemble_4x", "sgd_tuned"):
            assert found["gradient_evaluations"] == pytest.approx(1100 * 120, rel=0.02)
