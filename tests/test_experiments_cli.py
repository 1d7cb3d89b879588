"""The command line, as a person uses it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from taut import cli
from taut.experiments.xor import options
from taut.experiments.xor.settings import DTYPES, INPUTS, OPTIMIZERS, VARIANTS

SMALL = ["--epochs", "2", "--patterns", "40", "--batch-size", "20", "--test-patterns", "20"]
SMALL += ["--inputs", "corners"]


@pytest.fixture(autouse=True)
def wide_plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def taut(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build(), list(arguments))


def text(result: Result) -> str:
    """What it printed, without colours and the frames around messages."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", plain).split())


def test_help_names_every_option():
    shown = text(taut("xor", "--help"))
    for option in (
        *("--runs", "--epochs", "--variant", "--batch-size", "--lr", "--seed", "--out"),
        *("--device", "--threads", "--inputs", "--optimizer", "--compare-loop", "--units"),
    ):
        assert option in shown
    assert "paper" in shown


def test_without_arguments_it_helps():
    assert "xor" in text(taut())


def test_choices_are_those_of_the_settings():
    def choices(annotated) -> tuple[str, ...]:
        return annotated.__origin__.__args__

    assert choices(options.Variant) == (*VARIANTS, "all")
    assert choices(options.Inputs) == INPUTS
    assert choices(options.Optimizer) == tuple(OPTIMIZERS)
    assert choices(options.Dtype) == tuple(DTYPES)


def test_xor_writes_results_figures_and_a_summary(tmp_path):
    out = tmp_path / "out"
    command = ["xor", "--runs", "2", "--threads", "1", "--out", str(out), *SMALL]
    result = taut(*command)
    assert result.exit_code == 0, result.output
    shown = text(result)
    assert "scratch" in shown and "no constraints" in shown
    assert "taut xor --runs 1000" in shown
    names = {"results.json", "scratch.npz", "history.npz", "newton.npz", "teacher.pt"}
    names |= {"figure1.png", "figure2.png", "figure3.png", "figure4.png"}
    assert names <= {path.name for path in out.iterdir()}
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["runs"] == 2 and results["settings"]["teacher"]["accuracy"] >= 0.99

    written = (out / "newton.npz").stat().st_mtime_ns
    again = taut(*command)
    assert again.exit_code == 0 and "already" in text(again)
    assert (out / "newton.npz").stat().st_mtime_ns == written

    other = taut(*command, "--lr", "0.5")
    assert other.exit_code == 2
    assert "lr: 0.01 in the folder, 0.5 asked for" in text(other)


def test_variants_one_after_the_other(tmp_path):
    command = ["xor", "--runs", "2", "--threads", "1", "--out", str(tmp_path), *SMALL]
    assert taut(*command, "--variant", "newton").exit_code == 0
    assert not (tmp_path / "figure1.png").exists()
    assert taut(*command, "--variant", "scratch", "--count", "batch").exit_code == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["variants"]) == ["scratch", "newton"]
    assert (tmp_path / "figure1.png").exists()


def test_units_and_the_loop(tmp_path):
    shown = taut("xor", "--units", "--runs", "1", "--out", str(tmp_path / "u"), *SMALL)
    assert shown.exit_code == 0, shown.output
    assert "saved" in text(shown) and (tmp_path / "u" / "units.json").exists()
    command = ["xor", "--compare-loop", "--variant", "newton", "--runs", "2"]
    shown = taut(*command, "--out", str(tmp_path / "l"), *SMALL)
    assert shown.exit_code == 0, shown.output
    assert "newton" in text(shown)
    (measured,) = json.loads((tmp_path / "l" / "loop.json").read_text())
    assert measured["ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "0"], "runs must be at least 1; got 0"),
        (["--runs", "many"], "--runs"),
        (["--lr", "-1"], "lr must be a positive number"),
        (["--variant", "fast"], "scratch"),
        (["--threads", "0"], "threads must be at least 1; got 0"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--batch-size", "9999"], "batch_size 9999 is more than the 2000 patterns"),
        (["--units", "--compare-loop"], "ask for one"),
    ],
)
def test_bad_options_are_named(arguments, message, tmp_path):
    result = taut("xor", "--out", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2
    assert message in text(result)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_it_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert missing in str(stop.value) and "pip install 'taut[cli]'" in str(stop.value)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups, as a terminal has")
def test_ctrl_c_stops_and_the_next_call_goes_on(tmp_path):
    out = tmp_path / "out"
    command = ["xor", "--runs", "2", "--threads", "2", "--out", str(out), "--epochs", "30"]
    command += ["--patterns", "40", "--batch-size", "20", "--inputs", "corners"]
    source = Path(cli.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "taut.cli", *command],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # Four parts on two processes: when the first is saved, at least one has not begun.
        deadline = time.monotonic() + 120
        while not (first := list(out.glob("*.npz"))):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        shown, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, shown
    assert "Stopped." in shown and "Traceback" not in shown
    assert not (out / "results.json").exists()
    assert not list(out.rglob("*.part"))
    written = first[0].stat().st_mtime_ns
    again = taut(*command, "--threads", "1")
    assert again.exit_code == 0, again.output
    assert (out / "results.json").exists()
    assert first[0].stat().st_mtime_ns == written
