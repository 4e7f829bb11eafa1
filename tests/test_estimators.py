"""BayesianClassifier and BayesianRegressor: scikit-learn's contract, tables with gaps, intervals, a new process."""

import logging
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from mapie.classification import SplitConformalClassifier
from mapie.regression import CrossConformalRegressor, SplitConformalRegressor
from scipy import stats
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes, make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    Bernoulli,
    Categorical,
    Censored,
    HeteroscedasticGaussian,
    Ordinal,
    Poisson,
    Weibull,
)
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.estimators import BayesianClassifier, BayesianRegressor

QUICK: dict[str, Any] = {"max_epochs": 20, "batch_size": 50, "num_chains": 1, "num_samples": 8, "hidden": (16,)}
CHECKED: dict[str, Any] = QUICK | {"max_epochs": 40, "batch_size": 20, "trainer": {"max_steps": 150}}

X, Y = make_regression(200, 4, noise=5.0, random_state=0)
X_CLASSES, LABELS = make_classification(200, 5, n_informative=3, class_sep=2.0, random_state=0)
NAMES = np.array(["no", "yes"])[LABELS]


@pytest.fixture(scope="module")
def regressor() -> BayesianRegressor:
    return BayesianRegressor(**QUICK | {"max_epochs": 60}, random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def classifier() -> BayesianClassifier:
    return BayesianClassifier(**QUICK, random_state=0).fit(X_CLASSES, NAMES)


# -- scikit-learn's contract -------------------------------------------------------------------------------------------


def test_fits_in_threads_are_those_of_one() -> None:
    """All fits seed the default generators, and hush Lightning's logger."""
    model, level = BayesianRegressor(**QUICK, random_state=0), logging.getLogger("pytorch_lightning").level
    alone = cross_val_score(model, X, Y, cv=4)
    with joblib.parallel_config("threading"):
        assert np.array_equal(cross_val_score(model, X, Y, cv=4, n_jobs=2), alone)
    assert logging.getLogger("pytorch_lightning").level == level


@pytest.mark.by_default("features_in_after", "dict_unchanged", "overwrite_params", "unfitted", "requires_y")
@parametrize_with_checks([BayesianClassifier(**CHECKED), BayesianRegressor(**CHECKED)])
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_labels_are_those_of_y(classifier: BayesianClassifier) -> None:
    proba = classifier.predict_proba(X_CLASSES)
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert proba.shape == (200, 2)
    np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-12)
    assert set(classifier.predict(X_CLASSES)) == {"no", "yes"}
    assert (classifier.predict(X_CLASSES) == classifier.classes_[proba.argmax(1)]).all()
    assert classifier.score(X_CLASSES, NAMES) > 0.85
    assert classifier.posterior_.columns.classes == ("no", "yes")


def test_integer_labels_need_not_count_from_0() -> None:
    model = BayesianClassifier(**QUICK, random_state=0).fit(X_CLASSES, 10 + 5 * LABELS)
    assert set(model.predict(X_CLASSES)) == {10, 15}


def test_a_regression_is_in_the_units_of_y(regressor: BayesianRegressor) -> None:
    far = BayesianRegressor(**QUICK | {"max_epochs": 60}, random_state=0).fit(100 * X + 7, 1_000 * Y + 5e5)
    assert regressor.score(X, Y) > 0.9
    mean, std = far.predict(100 * X + 7, return_std=True)
    ours, our_std = regressor.predict(X, return_std=True)
    np.testing.assert_allclose(mean, 1_000 * ours + 5e5, rtol=1e-3)
    np.testing.assert_allclose(std, 1_000 * our_std, rtol=1e-2)


@pytest.mark.by_default("100")
@pytest.mark.parametrize("count", [50, 100, 200])
def test_few_noisy_rows_are_predicted_better_than_by_a_guess(count: int) -> None:
    """With all defaults: a network of 3,000 weights can fit them exactly, with errors that look far too small."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.RandomState(1).permutation(len(y))
    train, test = order[:count], order[count:]
    model = BayesianRegressor(random_state=0).fit(x[train], y[train])
    mean = model.predict(x[test])
    assert np.mean((mean - y[test]) ** 2) < 0.9 * np.mean((y[train].mean() - y[test]) ** 2)
    low, high = model.predict_interval(x[test], level=0.9).T
    assert 0.75 < np.mean((low <= y[test]) & (y[test] <= high)) < 0.99
    found = model.posterior_.evaluate([(pd.DataFrame(x[test]), pd.Series(y[test]))])
    assert found.bma["nll"] < found.guessing["nll"] - 0.1


def test_noisy_rows_are_predicted_as_they_can_be() -> None:
    """With all defaults, y = w·x + ε with ε half of the variance: between the law's NLL and a guess's, 1.07 and 1.42 in
    units of y, and the law's coverage. A cold chain's NLL is 1.9 here."""
    drawn = np.random.RandomState(0)
    x = drawn.randn(2000, 20)
    y = 100 + 3 * (x @ drawn.randn(20) / 20**0.5 + drawn.randn(2000))
    model = BayesianRegressor(random_state=0).fit(x[:500], y[:500])
    rows = [(pd.DataFrame(x[500:]), pd.Series(y[500:])), (pd.DataFrame(x[:0]), pd.Series(y[:0]))]
    found = model.posterior_.evaluate(rows)
    truth = 0.5 * np.log(2 * np.pi * np.e * 9)
    assert truth < found.bma["nll"] < truth + 0.12 < found.guessing["nll"]
    assert 0.85 < found.bma["coverage_90"] < 0.95


def test_intervals_are_quantiles_of_the_mixture(regressor: BayesianRegressor) -> None:
    bounds = regressor.predict_interval(X[:20], level=0.8)
    assert bounds.shape == (20, 2)
    prediction = regressor.posterior_.predict(regressor.posterior_.inputs(X[:20]), return_samples=True)
    for bound, q in zip(bounds.T, (0.1, 0.9), strict=True):
        np.testing.assert_allclose(prediction.cdf(torch.as_tensor(bound)[:, None])[:, 0], q, atol=1e-4)
    wide = regressor.predict_interval(X[:20], level=0.99)
    assert (wide[:, 0] < bounds[:, 0]).all()
    assert (wide[:, 1] > bounds[:, 1]).all()
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 90"):
        regressor.predict_interval(X, level=90)


def test_several_targets() -> None:
    both = np.stack([Y, -3 * Y + X[:, 0]], 1)
    model = BayesianRegressor(**QUICK, likelihood=HeteroscedasticGaussian(), random_state=0).fit(X, both)
    assert model.predict(X).shape == (200, 2)
    assert model.predict_interval(X).shape == (200, 2, 2)
    assert model.score(X, both) > 0.8


def test_counts_stay_counts() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = rng.poisson(np.exp(1 + 0.5 * x[:, 0]))
    model = BayesianRegressor(**QUICK | {"max_epochs": 60}, likelihood=Poisson(), random_state=0).fit(x, y)
    bounds = model.predict_interval(x)
    assert (bounds == bounds.round()).all()
    assert (bounds >= 0).all()
    assert abs(model.predict(x).mean() - y.mean()) < 0.5
    inside = ((bounds[:, 0] <= y) & (y <= bounds[:, 1])).mean()
    assert stats.binom.cdf(inside * 300, 300, 0.9) > 1e-4


@pytest.mark.parametrize(("likelihood", "classes"), [(Bernoulli(), 2), (Ordinal(3), 3), (Categorical(), 3)], ids=str)
def test_likelihoods_of_classes(likelihood: Any, classes: int) -> None:
    y = np.digitize(X[:, 0], [-0.5, 0.5][: classes - 1])
    model = BayesianClassifier(**QUICK, likelihood=likelihood, random_state=0).fit(X, y)
    assert model.predict_proba(X).shape == (200, classes)
    assert model.score(X, y) > 0.7


def test_the_order_of_ordinal_classes() -> None:
    """Names have the order of their category, whose law is that of its codes; that of letters is refused."""
    codes = np.digitize(X[:, 0], [-0.5, 0.5])
    names = pd.Categorical.from_codes(codes, ["low", "medium", "high"], ordered=True)
    settings = QUICK | {"likelihood": Ordinal(3), "random_state": 0}
    named, numbered = (BayesianClassifier(**settings).fit(X, y) for y in (names, codes))
    assert named.classes_.tolist() == ["high", "low", "medium"]
    np.testing.assert_array_equal(named.predict_proba(X), numbered.predict_proba(X)[:, [2, 0, 1]])
    assert named.score(X, names) == numbered.score(X, codes)
    with pytest.raises(ValueError, match="the names 'high', 'low', 'medium' have that of their letters: pass y as"):
        BayesianClassifier(**settings).fit(X, np.asarray(names))


# -- networks, priors, callbacks ---------------------------------------------------------------------------------------


def test_networks_of_ones_own(classifier: BayesianClassifier) -> None:
    def wide(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 2))

    net = wide(5)
    before = [parameter.clone() for parameter in net.parameters()]
    for given in (net, wide):
        model = BayesianClassifier(net=given, **QUICK, random_state=0).fit(X_CLASSES, NAMES)
        assert model.score(X_CLASSES, NAMES) > 0.7
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    with pytest.raises(ValueError, match="net does not accept these data, which have 5 inputs"):
        BayesianClassifier(net=wide(7), **QUICK).fit(X_CLASSES, NAMES)
    with pytest.raises(TypeError, match=r"net must be a module, or a function .* got 3"):
        BayesianClassifier(net=lambda inputs: 3, **QUICK).fit(X_CLASSES, NAMES)


@pytest.mark.filterwarnings("ignore:RunPlan")  # the plan of so short a run
def test_a_schedule_and_a_sampler_of_ones_own() -> None:
    class Count(pl.Callback):
        draws = 0

    counting, schedule = Count(), SamplingSchedule(burn_in_epochs=10, every_n_epochs=2)
    settings = QUICK | {"num_chains": 2, "callbacks": [counting, schedule]}
    module = {"sampler": SGHMC, "lr": 0.01}
    model = BayesianRegressor(**settings, module=module, prior=1.0, validation_fraction=0, random_state=0).fit(X, Y)
    assert model.plan_.num_data == 200
    assert len(model.posterior_) == 2 * 5
    assert model.plan_.temperature == 1
    assert model.callbacks == [counting, schedule]


# -- seeds and places --------------------------------------------------------------------------------------------------


def test_a_random_state_repeats_the_fit_and_none_does_not(regressor: BayesianRegressor) -> None:
    again, others = clone(regressor).fit(X, Y), [BayesianRegressor(**QUICK).fit(X, Y) for _ in range(2)]
    np.testing.assert_array_equal(again.predict(X), regressor.predict(X))
    assert not np.array_equal(others[0].predict(X), others[1].predict(X))


def test_the_programs_own_generators_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002

    before = states()
    model = BayesianRegressor(**QUICK).fit(X, Y)
    model.predict_interval(X)
    assert states() == before


def test_it_writes_no_files_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], recwarn: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    BayesianClassifier(**QUICK).fit(X_CLASSES, NAMES).predict(X_CLASSES)
    assert list(tmp_path.iterdir()) == []
    assert "".join(capfd.readouterr()) == ""
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.slow
def test_a_new_process_reads_a_pickle(regressor: BayesianRegressor, tmp_path: Path) -> None:
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(regressor))
    np.save(tmp_path / "x.npy", X)
    program = (
        "import pickle, sys, numpy as np; from pathlib import Path; folder = Path(sys.argv[1]); "
        "model = pickle.loads((folder / 'model.pickle').read_bytes()); x = np.load(folder / 'x.npy'); "
        "np.save(folder / 'found.npy', np.c_[model.predict(x), model.predict_interval(x)])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    ours = np.c_[regressor.predict(X), regressor.predict_interval(X)]
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), ours, rtol=1e-6)
    assert path.stat().st_size < 200_000  # the samples, and not the run


# -- tables with gaps --------------------------------------------------------------------------------------------------


def insurance(count: int = 300) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a frame with texts, categories, and numbers that are missing where the target is high."""
    rng = np.random.default_rng(0)
    age, region = rng.uniform(20, 80, count), rng.choice(["north", "south", "west"], count)
    lacks = rng.random(count) < 0.3
    cost = 10 + 0.1 * age + 5 * (region == "south") + 8 * lacks + 0.5 * rng.normal(size=count)
    frame = pd.DataFrame({"age": np.where(lacks, np.nan, age), "region": region})
    frame["fuel"] = pd.Series(rng.choice(["gas", "wind"], count)).where(rng.random(count) < 0.9).astype("category")
    return frame, cost


def test_frames_with_texts_categories_and_gaps() -> None:
    frame, cost = insurance()
    model = BayesianRegressor(**QUICK | {"max_epochs": 60}, random_state=0).fit(frame, cost)
    assert model.feature_names_in_.tolist() == ["age", "region", "fuel"]
    assert model.score(frame, cost) > 0.9  # which needs all three: 0.8 is what the gaps leave unexplained
    np.testing.assert_allclose(model.predict(frame.iloc[:3]), model.predict(frame)[:3], rtol=1e-5)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict(frame), model.predict(frame), rtol=1e-6)
    np.testing.assert_allclose(model.posterior_.predict(frame).mean[:, 0], model.predict(frame), rtol=1e-5)
    with pytest.raises(ValueError, match=r"the category 'east' in column 'region', which the training data lack"):
        model.predict(frame.assign(region="east"))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.drop(columns="fuel"))


def test_gaps_where_the_fit_had_none_are_refused(regressor: BayesianRegressor) -> None:
    gaps = X.copy()
    gaps[3, 1] = np.nan
    with pytest.raises(ValueError, match="x has 1 values that are NaN or infinite in column 1: fill"):
        regressor.predict(gaps)
    model = BayesianRegressor(**QUICK, random_state=0).fit(gaps, Y)
    assert np.isfinite(model.predict(gaps)).all()
    assert model.n_features_in_ == 4


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BayesianClassifier, BayesianRegressor])
def test_sample_weights_are_refused_with_the_reason(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"sample_weight is not supported: .* a weighted loss has none\. Repeat rows"):
        kind(**QUICK).fit(X, LABELS, sample_weight=np.ones(200))
    with pytest.raises(TypeError, match="fit takes X and y, got epochs"):
        kind(**QUICK).fit(X, LABELS, epochs=3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hidden must be the widths of layers, such as .* got 8"):
        BayesianRegressor(hidden=8).fit(X, Y)
    with pytest.raises(TypeError, match=r"likelihood=Poisson is a class: pass an instance"):
        BayesianRegressor(likelihood=Poisson).fit(X, Y)
    with pytest.raises(TypeError, match="likelihood should be a Likelihood, got a str"):
        BayesianClassifier(likelihood="bernoulli").fit(X_CLASSES, NAMES)
    with pytest.raises(TypeError, match="use BayesianRegressor"):
        BayesianClassifier(likelihood=Poisson()).fit(X, LABELS)
    with pytest.raises(TypeError, match="use BayesianClassifier"):
        BayesianRegressor(likelihood=Categorical()).fit(X, Y)
    for likelihood in (Weibull(), Censored(Weibull())):
        with pytest.raises(TypeError, match="bounds or positive numbers"):
            BayesianRegressor(likelihood=likelihood).fit(np.ones((9, 1)), np.ones(9))
    for several in (np.eye(2, dtype=int)[np.arange(200) % 2], np.full((200, 2), "a")):
        with pytest.raises(ValueError, match=r"y has the shape \(200, 2\), and must have one label a row: .*argmax"):
            BayesianClassifier().fit(X, several)
    with pytest.raises(ValueError, match="y has one class, 0:"):
        BayesianClassifier().fit(X, np.zeros(200, int))
    with pytest.raises(ValueError, match="X has 1 rows, of which validation takes 1: pass two or more"):
        BayesianRegressor().fit(pd.DataFrame({"a": [1.0]}), [1.0])
    rows = pd.DataFrame(X)
    with pytest.raises(ValueError, match="y has the rows of x in another order"):
        BayesianRegressor().fit(rows, pd.Series(Y)[::-1])
    with pytest.raises(ValueError, match="num_chains must be"):
        BayesianClassifier(num_chains=0).fit(X, LABELS)
    with pytest.raises(ValueError, match=r"validation_fraction must be in \[0, 1\), got 1"):
        BayesianClassifier(validation_fraction=1).fit(X, LABELS)
    for settings in ({"trainer": {"callbacks": []}}, {"module": {"net": None}}):
        with pytest.raises(ValueError, match="which is an argument of its own"):
            BayesianRegressor(**settings).fit(X, Y)
    with pytest.raises(NotFittedError):
        BayesianRegressor().predict(X)


# -- around it ---------------------------------------------------------------------------------------------------------


def test_pipelines_cross_validation_and_searches() -> None:
    frame = pd.DataFrame(X_CLASSES, columns=list("abcde"))
    first = make_column_transformer((StandardScaler(), ["a", "b", "c"]), remainder="passthrough")
    pipeline = make_pipeline(first, BayesianClassifier(**QUICK, random_state=0))
    assert cross_val_score(pipeline, frame, NAMES, cv=3).mean() > 0.75
    search = GridSearchCV(BayesianClassifier(**QUICK, random_state=0), {"hidden": [(4,), (16, 16)]}, cv=2)
    search.fit(X_CLASSES, NAMES)
    assert search.best_params_["hidden"] in ((4,), (16, 16))
    assert search.predict(X_CLASSES).shape == (200,)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_mapies_intervals_have_their_coverage(regressor: BayesianRegressor, level: float) -> None:
    x, y = make_regression(1_200, 4, noise=5.0, random_state=0)
    conformal = SplitConformalRegressor(regressor, confidence_level=level, prefit=True)
    conformal.conformalize(x[200:700], y[200:700])
    points, bounds = conformal.predict_interval(x[700:])
    np.testing.assert_allclose(points, regressor.predict(x[700:]))
    inside = ((bounds[:, 0, 0] <= y[700:]) & (y[700:] <= bounds[:, 1, 0])).sum()
    # the coverage of new data given the calibration data is a beta variable
    law = stats.betabinom(500, np.ceil(501 * level), 501 - np.ceil(501 * level))
    assert law.ppf(1e-4) <= inside <= law.ppf(1 - 1e-4)


def test_mapie_and_a_column_of_texts() -> None:
    """Split conformal tries a row of zeros, so texts are encoded in front; cross conformal takes the frame."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.uniform(20, 80, 400), "region": rng.choice(["north", "south"], 400)})
    y = 3 * frame["age"] + 80 * (frame["region"] == "south") + rng.normal(0, 20, 400)
    encoder = make_column_transformer((OneHotEncoder(), ["region"]), remainder="passthrough", sparse_threshold=0)
    model = BayesianRegressor(**QUICK, random_state=0)
    fitted = make_pipeline(encoder, model).fit(frame[:200], y[:200])
    split = SplitConformalRegressor(fitted, confidence_level=0.9, prefit=True)
    split.conformalize(frame[200:300], y[200:300])
    cross = CrossConformalRegressor(model, confidence_level=0.9, cv=2).fit_conformalize(frame[:300], y[:300])
    for conformal in (split, cross):
        low, high = conformal.predict_interval(frame[300:])[1][:, :, 0].T
        assert ((low <= y[300:]) & (y[300:] <= high)).sum() >= 70
    alone = SplitConformalRegressor(model.fit(frame[:200], y[:200]), confidence_level=0.9, prefit=True)
    with pytest.raises(UserWarning, match="pass a data frame with the columns 'age', 'region'"):
        alone.conformalize(frame[200:300], y[200:300])


def test_mapies_sets_have_their_coverage(classifier: BayesianClassifier) -> None:
    x, labels = make_classification(1_200, 5, n_informative=3, class_sep=2.0, random_state=0)
    names = np.array(["no", "yes"])[labels]
    conformal = SplitConformalClassifier(classifier, confidence_level=0.9, prefit=True)
    conformal.conformalize(x[200:700], names[200:700])
    _, sets = conformal.predict_set(x[700:])
    inside = sets[np.arange(500), labels[700:], 0].sum()
    assert stats.betabinom(500, 451, 50).ppf(1e-4) <= inside


def test_a_fit_too_short_for_its_samples_names_its_own_arguments() -> None:
    """The schedule's own error named an argument of a callback that nobody had passed."""
    with pytest.raises(ValueError, match=r"max_epochs=1 makes 2 steps.*num_samples=80 of 4 chains.*max_epochs=13 or"):
        BayesianRegressor(max_epochs=1).fit(X, Y)
    fitted = BayesianRegressor(max_epochs=13).fit(X, Y)
    assert len(fitted.posterior_) == 80
