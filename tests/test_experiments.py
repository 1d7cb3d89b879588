"""The XOR experiment: small versions of everything that `taut xor` runs."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import taut
from tables import SEED
from taut.experiments.xor.draws import draw_patterns, generator
from taut.experiments.xor.figures import draw_all
from taut.experiments.xor.files import whole
from taut.experiments.xor.folder import Chunk, OtherSettings, open_folder
from taut.experiments.xor.plain import compare, plain_run
from taut.experiments.xor.runner import execute, plan
from taut.experiments.xor.settings import FREE, INPUTS, VARIANTS, Settings, variant_named
from taut.experiments.xor.teacher import Teacher, load_teacher, new_network, train_teacher
from taut.experiments.xor.training import MEASURES, TEST_MEASURES, fresh_patterns, train
from taut.experiments.xor.units import run_units, train_joint, train_predicted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return train_teacher("corners", seed=SEED)


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(
        runs=3,
        epochs=3,
        patterns=60,
        batch_size=20,
        inputs="corners",
        test_patterns=30,
        seed=SEED,
    )


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """A folder with every variant, all figures and results.json."""
    folder = open_folder(tmp_path_factory.mktemp("xor") / "out", settings)
    execute(folder, plan(folder, [*VARIANTS.values(), FREE], 1), 1, "cpu", lambda n: None)
    results = folder.write_results({"device": "cpu"})
    draw_all(results, folder.path)
    return folder


# The teacher


def test_teacher_knows_xor_on_patterns_it_has_not_seen(teacher):
    assert teacher.accuracy >= 0.99
    x, label = draw_patterns(5000, "corners", generator(99 + SEED, "test"))
    right = (teacher.network(x).squeeze(-1) > 0) == (label > 0)
    assert right.double().mean() >= 0.99


def test_constraints_are_the_weights_of_fc3(teacher):
    assert teacher.A.shape == (4, 10)
    x = torch.rand(7, 2, dtype=torch.float32)
    hidden = torch.sigmoid(teacher.network[2](torch.sigmoid(teacher.network[0](x))))
    torch.testing.assert_close(teacher.targets(x), hidden)
    torch.testing.assert_close(teacher.A, teacher.network[4].weight.detach())


def test_teacher_survives_saving(teacher, tmp_path):
    teacher.save(tmp_path / "teacher.pt")
    again = load_teacher(tmp_path / "teacher.pt")
    x = torch.rand(7, 2, dtype=torch.float32)
    assert torch.equal(again.network(x), teacher.network(x))
    assert again.facts == teacher.facts


def test_a_stuck_teacher_is_retried_with_another_seed(monkeypatch):
    module = "taut.experiments.xor.teacher._attempt"  # no seed is known to be stuck for sure
    tried = []

    def attempt(inputs: str, seed: int, goal: float) -> Teacher:
        tried.append(seed)
        return Teacher(new_network(), 0.75 if seed < 7 else 1.0, seed, 1)

    monkeypatch.setattr(module, attempt)
    assert train_teacher("corners", seed=5).seed == 7
    assert tried == [5, 6, 7]


def test_a_teacher_that_never_learns_is_an_error(monkeypatch):
    module = "taut.experiments.xor.teacher._attempt"  # no seed is known never to learn
    monkeypatch.setattr(module, lambda *_: Teacher(new_network(), 0.75, 0, 1))
    with pytest.raises(RuntimeError, match=r"no XOR network reached .*best 75\.0%"):
        train_teacher("corners")


@pytest.mark.parametrize("inputs", INPUTS)
def test_labels_are_xor(inputs):
    x, label = draw_patterns(1000, inputs, generator(SEED, "inputs"))
    assert x.shape == (1000, 2)
    assert 0.4 < label.mean() < 0.6
    middle = 0.5 if inputs == "corners" else 0.0
    agree = (((x[:, 0] > middle) ^ (x[:, 1] > middle)) == (label > 0)).double().mean()
    assert agree == 1.0


# The loop


def rounding(settings: Settings) -> dict[str, float]:
    """How far two trainings that sum in another order are apart after so few steps.

    Each step of the optimiser adds some units of rounding, and passes on what there was.
    """
    steps = settings.epochs * -(-settings.patterns // settings.batch_size)
    digits = 100 * steps * torch.finfo(getattr(torch, settings.dtype)).eps
    return {"rtol": digits, "atol": digits}


@pytest.mark.parametrize("variant", [*VARIANTS.values(), FREE], ids=lambda v: v.name)
def test_every_variant_trains(teacher, settings, variant):
    record = train(settings, teacher, variant, settings.run_seeds)
    assert {name: tuple(record[name].shape) for name in MEASURES} == dict.fromkeys(MEASURES, (3, 3))
    assert {name: tuple(record[name].shape) for name in TEST_MEASURES} == dict.fromkeys(
        TEST_MEASURES, (3,)
    )
    assert all(values.isfinite().all() for values in record.values())
    assert (record["loss"][:, -1] < record["loss"][:, 0]).all()
    torch.testing.assert_close(record["iterations"], 3 * record["iterations_per_batch"])


def test_newton_satisfies_the_constraints_and_nothing_else_does(teacher, settings):
    def worst(name: str) -> float:
        record = train(settings, teacher, variant_named(name), settings.run_seeds)
        return record["test_residual"].max().item()

    assert worst("newton") < 1e-4
    assert min(worst("scratch"), worst("history"), worst("free")) > 1e-3


def test_plain_networks_can_be_projected_at_test(teacher, settings):
    """The fair comparison: b is known at test to both, and only one was trained with it."""
    settings = Settings(**{**settings.as_dict(), "dtype": "float64"})
    free = train(settings, teacher, FREE, settings.run_seeds)
    assert free["test_projected_residual"].max() < 1e-11 < free["test_residual"].min()
    assert not torch.equal(free["test_projected_error"], free["test_error"])
    newton = train(settings, teacher, VARIANTS["newton"], settings.run_seeds)
    torch.testing.assert_close(newton["test_projected_error"], newton["test_error"])


@pytest.mark.parametrize("variant", [*VARIANTS.values(), FREE], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_among_others_is_the_run_alone(teacher, settings, variant, dtype):
    settings = Settings(**{**settings.as_dict(), "dtype": dtype, "batch_size": 25})
    seeds = settings.run_seeds
    together = train(settings, teacher, variant, seeds)
    alone = train(settings, teacher, variant, [seeds[1]])
    near, threshold = rounding(settings), getattr(variant.solver, "threshold", 0.0)
    if threshold and not torch.equal(together["iterations"][1:2], alone["iterations"]):
        # Rounding has stopped a descent at another step: D is within the threshold of its least
        # in both, and λ within about the root of that.
        near = {"rtol": threshold**0.5, "atol": threshold**0.5}
    for name in set(together) - {"seconds"}:
        torch.testing.assert_close(together[name][1:2], alone[name], **near)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda v: v.name)
def test_the_vectorised_loop_is_the_plain_loop(teacher, settings, variant):
    settings = Settings(**{**settings.as_dict(), "dtype": "float64"})
    record = train(settings, teacher, variant, settings.run_seeds)
    plain = plain_run(settings, teacher, variant, settings.run_seeds[2])
    torch.testing.assert_close(
        record["loss"][2], torch.tensor(plain["loss"], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    assert record["iterations"][2].tolist() == plain["iterations"]


def test_sgd_and_a_last_batch_that_is_smaller(teacher, settings):
    changed = {"optimizer": "sgd", "lr": 0.5, "batch_size": 50}
    settings = Settings(**{**settings.as_dict(), **changed})
    record = train(settings, teacher, VARIANTS["newton"], settings.run_seeds)
    plain = plain_run(settings, teacher, VARIANTS["newton"], settings.run_seeds[0])
    np.testing.assert_allclose(record["loss"][0], plain["loss"], rtol=1e-4)


def test_history_takes_fewer_iterations_than_starting_again(teacher, settings):
    longer = Settings(**{**settings.as_dict(), "epochs": 8})
    totals = {
        name: train(longer, teacher, VARIANTS[name], longer.run_seeds)["iterations"][:, 4:].sum()
        for name in ("scratch", "history")
    }
    assert totals["history"] < totals["scratch"]


def test_compare_measures_the_same_run_twice(teacher, settings):
    comparison = compare(settings, teacher, VARIANTS["newton"])
    assert comparison.runs == 3
    assert comparison.ratio == comparison.alone / comparison.together > 0
    assert comparison.largest_difference < 1e-3


# Lagrange units in three forms


def test_memory_with_a_shuffled_dataloader(teacher, settings):
    data = fresh_patterns(settings, teacher, [SEED], "inputs", CPU)
    x, y, b = data.x[0], data.y[0], data.b[0]
    loader = DataLoader(
        TensorDataset(torch.arange(len(x)), x, y, b),
        batch_size=16,
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
    )
    net = torch.nn.Linear(2, 10, dtype=torch.float32)
    layer = taut.Projection(teacher.A, activation="sigmoid")
    memory = taut.LagrangeMemory(len(x), 4).to(torch.float32)
    iterations = []
    for _ in range(2):
        seen = 0
        for index, inputs, target, constraint in loader:
            solution = layer.solve(net(inputs), constraint, init=memory[index])
            assert taut.matched_loss(solution, target).isfinite()
            memory.store(index, solution)
            seen += int(solution.iterations.sum())
        iterations.append(seen)
    # The weights did not move, so the second time every pattern starts at its own solution.
    assert iterations[1] < 0.5 * iterations[0]
    again = taut.LagrangeMemory(len(x), 4).to(torch.float32)
    again.load_state_dict(memory.state_dict())
    everything = torch.arange(len(x))
    assert torch.equal(again[everything], memory[everything])
    with pytest.raises(IndexError, match="sample indices must lie in 0 … 59"):
        memory[torch.tensor([60])]


def test_joint_multipliers_reach_the_order_of_the_papers_residual(teacher):
    settings = Settings(
        runs=1, epochs=40, patterns=100, batch_size=20, lr=0.03, inputs="corners", seed=SEED
    )
    joint = train_joint(settings, teacher, seed=1 + SEED)
    solved = train(settings, teacher, VARIANTS["scratch"], [1 + SEED])["residual"][0]
    assert joint.loss[-1] < 0.1 * joint.loss[0]
    # With eight teachers: to 0.007 … 0.12 of the first, and 0.2 … 5.1 of what the solver leaves.
    assert joint.residual[-1] < 0.3 * joint.residual[0]
    assert joint.residual[-1] < 10 * solved[-1]


def test_predicted_multipliers_save_iterations_and_beat_none():
    errors = []
    for seed in range(SEED, SEED + 5):
        settings = Settings(
            runs=1, epochs=40, patterns=100, batch_size=20, lr=0.03, inputs="corners", seed=seed
        )
        teacher = train_teacher("corners", seed=seed)
        predicted = train_predicted(settings, teacher, seed=seed)
        free = train(settings, teacher, FREE, [seed])
        errors.append(predicted.error / free["test_error"].item())
        assert predicted.solved_residual < 1e-4 < predicted.residual
        assert predicted.solved_error < predicted.error
        assert predicted.iterations < predicted.iterations_from_zero
        assert 0 < predicted.saved < 1
    # With seventeen teachers 0.3 … 1.9 of the error without constraints, and once 6.9.
    assert np.median(errors) < 2


def test_units_are_plain_numbers(teacher, settings):
    seen = []
    units = run_units(settings, teacher, lambda: seen.append(1))
    assert len(seen) == len(units["joint"]) == len(units["predicted"]) == 3
    assert len(units["solver_residual"]["scratch"][0]) == settings.epochs
    json.dumps(units)


# What is saved


def test_results_hold_one_number_per_epoch(finished, settings):
    results = json.loads((finished.path / "results.json").read_text())
    assert results == finished.read_results()
    assert list(results) == ["settings", "variants"]
    assert list(results["variants"]) == ["scratch", "history", "newton"]
    for record in results["variants"].values():
        for name in MEASURES:
            assert {key: len(values) for key, values in record[name].items()} == {
                "max": 3,
                "min": 3,
                "mean": 3,
            }
        kept = {"residual", "error", "projected_residual", "projected_error"}
        assert set(record["test"]) == kept | {"without_constraints"}
        assert set(record["test"]["without_constraints"]) == kept
    assert results["settings"]["run_seeds"] == settings.run_seeds
    assert results["settings"]["versions"]["torch"] == torch.__version__


def test_results_are_over_the_runs_in_the_files(finished):
    arrays, results = finished.load("history"), finished.read_results()
    for name in MEASURES:
        assert arrays[name].shape == (3, 3)
        np.testing.assert_allclose(
            results["variants"]["history"][name]["max"], arrays[name].max(axis=0)
        )
    assert not (finished.path / "chunks").exists()


def test_all_figures_are_drawn(finished):
    for name in ("figure1.png", "figure2.png", "figure3.png", "figure4.png"):
        assert (finished.path / name).stat().st_size > 10_000


def test_figures_of_one_variant(finished, tmp_path):
    results = finished.read_results()
    results["variants"] = {"history": results["variants"]["history"]}
    assert [path.name for path in draw_all(results, tmp_path, count="batch")] == ["figure2.png"]


def test_a_folder_goes_on_where_it_stopped(settings, tmp_path):
    folder = open_folder(tmp_path / "out", settings)
    chunks = plan(folder, [VARIANTS["scratch"]], workers=3)
    assert [list(chunk.runs) for chunk in chunks] == [[0], [1], [2]]

    def stop_in_the_second(n: int) -> None:
        epochs.append(n)
        if len(epochs) == settings.epochs + 1:
            raise KeyboardInterrupt

    epochs: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        execute(folder, chunks, 1, "cpu", stop_in_the_second)
    again = open_folder(tmp_path / "out", settings)
    assert again.missing("scratch", 10) == [Chunk("scratch", 1, 2)]
    execute(again, plan(again, [VARIANTS["scratch"]], 1), 1, "cpu", lambda n: None)
    assert again.is_complete("scratch") and again.missing("scratch", 10) == []

    whole = open_folder(tmp_path / "whole", settings)
    execute(whole, plan(whole, [VARIANTS["scratch"]], 1), 1, "cpu", lambda n: None)
    for name in ("loss", "iterations", "test_error"):
        np.testing.assert_allclose(
            again.load("scratch")[name], whole.load("scratch")[name], **rounding(settings)
        )


def test_a_folder_of_other_settings_is_refused(finished, settings):
    other = Settings(**{**settings.as_dict(), "lr": 0.02, "runs": 4})
    with pytest.raises(OtherSettings) as caught:
        open_folder(finished.path, other)
    assert "lr: 0.01 in the folder, 0.02 asked for" in str(caught.value)
    assert "runs: 3 in the folder, 4 asked for" in str(caught.value)
    assert "--out" in str(caught.value)


def test_a_folder_of_somebody_else_is_refused(settings, tmp_path):
    (tmp_path / "thesis.tex").write_text("…")
    with pytest.raises(OtherSettings, match="not a folder of this experiment"):
        open_folder(tmp_path, settings)
    with pytest.raises(OtherSettings, match="is a file"):
        open_folder(tmp_path / "thesis.tex", settings)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"runs": 0}, "runs must be at least 1; got 0"),
        ({"epochs": -1}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"seed": -1}, "seed must lie in 0"),
        ({"batch_size": 3000}, "batch_size 3000 is more than the 2000 patterns"),
        ({"inputs": "circle"}, "unknown inputs 'circle'; known: uniform"),
        ({"optimizer": "lbfgs"}, "unknown optimizer"),
        ({"runs": 10**7}, "runs must be at most"),
    ],
)
def test_settings_that_make_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_an_unknown_variant():
    with pytest.raises(ValueError, match="unknown variant 'fast'; known: scratch"):
        variant_named("fast")


@pytest.mark.parametrize("step", range(1, 8))
def test_it_may_be_stopped_at_any_step_of_saving(settings, tmp_path, monkeypatch, step):
    """Three chunks, the file of the variant, and three chunks that are not needed any more."""
    folder = open_folder(tmp_path / "out", settings)
    chunks = plan(folder, [VARIANTS["history"]], workers=3)
    steps, replace, unlink = [], os.replace, Path.unlink

    def counted(*given, go_on, **options):
        steps.append(given[0])
        if len(steps) == step:
            raise KeyboardInterrupt
        return go_on(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", partial(counted, go_on=replace))
        patch.setattr(
            Path,
            "unlink",
            lambda path, **options: (
                unlink(path, **options)
                if options
                else counted(path, go_on=unlink)  # of a file that is no part
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            execute(folder, chunks, 1, "cpu", lambda n: None)
    assert not list(folder.path.rglob("*.part"))
    again = open_folder(tmp_path / "out", settings)
    again.tidy(["history"])
    execute(again, plan(again, [VARIANTS["history"]], 1), 1, "cpu", lambda n: None)
    assert again.is_complete("history") and not (again.path / "chunks").exists()
    assert again.load("history")["loss"].shape == (3, 3)
    assert again.read_results() is None
    results = again.write_results({})
    assert again.read_results() == json.loads(json.dumps(results))


def test_a_write_that_is_stopped_leaves_what_was_there(tmp_path):
    path = tmp_path / "results.json"
    for text in ("{}", None):
        try:
            with whole(path) as part:
                part.write_text("half")
                if text is None:
                    raise KeyboardInterrupt
                part.write_text(text)
        except KeyboardInterrupt:
            assert text is None
    assert [x.name for x in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "{}"
