"""`bsi.train` as a function: the returned run, its messages, and the trackers of its journal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.backbones.config import MLPConfig
from bsi.errors import Preempted, UsageError
from bsi.recipe import Data, Ema, Evaluation, Every, Optimizer, Recipe, Samples
from bsi.runtime.run_folder import TRACKERS

DATA = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
RECIPE = Recipe(
    name="tiny", method=bsi.BSI(alpha_M=1e3), backbone=MLPConfig(8, 1), data=Data("normal"), steps=6, batch=16,
    optimizer=Optimizer(lr=1e-3), ema=Ema(beta=0.9, start=0), every=Every(journal=2, evaluate=6, checkpoint=3),
    compile=False, threads=1,
)  # fmt: skip


class MyNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, mu, t):
        return self.layer(mu)


def test_a_run_has_a_path_model_journal_and_evaluations(tmp_path: Path) -> None:
    run = bsi.train(RECIPE, data=DATA, test=DATA[:8], out=tmp_path / "run", device="cpu")
    assert (run.path, os.fspath(run)) == (tmp_path / "run", str(tmp_path / "run"))
    assert torch.equal(run.model().sample(2, steps=2), bsi.load(run).sample(2, steps=2))
    assert not torch.equal(run.model().sample(2, steps=2), run.model(ema=False).sample(2, steps=2))
    assert [record["step"] for record in run.journal() if record["event"] == "train"] == [2, 4, 6]
    (bound,) = run.evaluations()
    first, second = str(run).splitlines()
    assert first == f"{tmp_path / 'run'}: finished, step 6"
    assert f"{bound['nats_per_dim']:.4f} nats/dim ± " in second  # as the training showed it
    assert ("± at most" not in second) == bound["data_resolved"]
    assert "(data set), step 6" in second
    assert bsi.Run(tmp_path / "run") == run
    assert str(bsi.Run(str(tmp_path / "run"))) == str(run)
    assert str(bsi.Run(tmp_path / "none")) == f"{tmp_path / 'none'}: not begun, step 0"
    with pytest.raises(UsageError, match="neither a run"):
        bsi.Run(tmp_path / "none").model()


def test_a_run_of_text_prints_its_bound_per_character(tmp_path: Path) -> None:
    letters = (10 * DATA).long() % 3
    given = {"data": letters, "test": letters[:8], "kind": bsi.Symbols(3, tuple("abc"))}
    assert " bits/char ± " in str(bsi.train(RECIPE, **given, out=tmp_path / "run", device="cpu"))


def test_a_run_with_a_custom_network_loads_it(tmp_path: Path) -> None:
    own = bsi.train(replace(RECIPE, steps=1), data=DATA, backbone=MyNet(), out=tmp_path / "own", device="cpu")
    assert own.model().sample(2, steps=2).shape == (2, 3)
    assert own.evaluations() == []


# Messages


def test_messages_name_arguments_in_python_and_options_in_commands(tmp_path: Path) -> None:
    bsi.train(RECIPE, data=DATA, out=tmp_path / "run", device="cpu")
    for changed, option, argument in (
        (replace(RECIPE, seed=1), "another --out, or --allow seed", "another out, or allow seed"),
        (replace(RECIPE, steps=3), "Use --steps 6 or more", "Use steps=6 or more"),
        (replace(RECIPE, backbone=MLPConfig(16, 1)), "--out; --init-from takes", "out; init_from takes"),
    ):
        for command_line, words in ((True, option), (False, argument)):
            with pytest.raises(UsageError, match=words):
                bsi.train(changed, data=DATA, out=tmp_path / "run", device="cpu", command_line=command_line)


def interrupted(**given: object) -> None:
    def stop(record: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    bsi.train(RECIPE, data=DATA, device="cpu", sinks=[stop], **given)


def test_ctrl_c_in_an_interactive_session_raises_with_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Preempted, match="the same command or call resumes"):
        interrupted(out=tmp_path / "run")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt, match=r"saved step \d of 6"):
        interrupted(out=tmp_path / "run")
    monkeypatch.undo()
    assert bsi.train(RECIPE, data=DATA, out=tmp_path / "run", device="cpu").journal()[-1]["step"] == 6


def test_ctrl_c_ends_a_program_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from test_run import interrupted\ninterrupted(out={str(tmp_path / 'run')!r})\n"
    )
    ended = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 75
    assert "Traceback" not in ended.stderr
    assert "saved step 2 of 6; the same command or call resumes" in ended.stderr


class Slow(MyNet):
    def forward(self, mu, t):
        if not self.training:
            time.sleep(0.3)
        return super().forward(mu, t)


def slow_evaluation(out: str) -> None:
    recipe = replace(RECIPE, evaluation=Evaluation(images=48, measure=2, recon=2, batch=4), samples=Samples(2))
    bsi.train(recipe, data=DATA, test=DATA, backbone=Slow(), out=out, device="cpu", hang_after_s=3)


@pytest.mark.slow
def test_a_slow_evaluation_is_no_hang_and_shows_that_it_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from test_run import slow_evaluation\nslow_evaluation({str(tmp_path / 'run')!r})\n"
    )
    ended = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "evaluating" in ended.stderr


# Trackers


def test_unknown_trackers_and_missing_packages_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, words in ((["wandbb"], "did you mean 'wandb'"), ("wandb", r"track=\['wandb'\]")):
        with pytest.raises(UsageError, match=words):
            bsi.train(RECIPE, data=DATA, out=tmp_path / "run", track=wrong)
    for name, (package, _) in TRACKERS.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=rf"bsi\[{name}\]"):
            bsi.train(RECIPE, data=DATA, out=tmp_path / "run", track=[name])
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(TRACKERS, "broken", ("json", broken))
    run = bsi.train(RECIPE, data=DATA, out=tmp_path / "run", device="cpu", track=["broken"])
    assert run.journal()[-1]["step"] == 6
    assert "broken failed, and training continues without this record: no route" in capsys.readouterr().err


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [SystemExit("you must log in"), Unprintable()])
def test_a_tracker_that_exits_or_raises_what_cannot_be_printed_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    def broken(*given: object) -> None:
        raise error

    monkeypatch.setitem(TRACKERS, "broken", ("json", broken))
    bsi.train(RECIPE, data=DATA, out=tmp_path / "run", device="cpu", track=["broken"])
    assert "training continues without this record" in capsys.readouterr().err


def tracked(name: str, out: Path) -> bsi.Run:
    """A run with a tracker that is interrupted and resumed, with the real package and no network."""
    with pytest.raises(Preempted):
        interrupted(out=out, track=[name])
    return bsi.train(RECIPE, data=DATA, test=DATA[:8], out=out, device="cpu", track=[name], allow=["data.version"])


def losses(run: bsi.Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.journal() if record["event"] == "train"}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="the extra")
    run = tracked("tensorboard", tmp_path / "run")
    seen = reader.EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert {event.step: event.value for event in seen.Scalars("train/loss")} == pytest.approx(losses(run))
    assert [event.step for event in seen.Scalars("evaluate/bits_per_dim")] == [6]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = tracked("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    known = json.loads((run.path / "trackers.json").read_text())["mlflow"]
    assert {m.step: m.value for m in client.get_metric_history(known, "train/loss")} == pytest.approx(losses(run))
    found = client.get_run(known)
    assert (found.info.status, found.data.params["optimizer.lr"]) == ("FINISHED", "0.001")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="the extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tracked("wandb", tmp_path / "run")
    written = list((run.path / "wandb").glob("offline-run-*/*.wandb"))
    known = json.loads((run.path / "trackers.json").read_text())["wandb"]
    assert len(written) == 2
    assert all(known in path.name for path in written)
    assert any(b"train/loss" in path.read_bytes() for path in written)
    assert "failed" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_a_local_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra")
    run = tracked("trackio", tmp_path / "run")
    assert run.journal()[-1]["step"] == 6
    assert list((tmp_path / "trackio").glob("bsi*"))
    assert not re.search("trackio failed", capfd.readouterr().err)
