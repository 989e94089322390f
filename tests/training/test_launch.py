"""Starting the processes of a run, and ending all of them when one fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from training import rank_work

from lrmoe.training.launch import RunFailure, launch
from lrmoe.training.world import World


def test_exit_code_of_the_worst_rank() -> None:
    assert launch(rank_work.well, 1, size=2, timeout=60) == 1


def test_bad_input_found_by_a_rank() -> None:
    with pytest.raises(ValueError, match=r"^colour='mauve' is not known; choose another$"):
        launch(rank_work.bad_input, size=2, timeout=60)


def test_complaint_that_all_ranks_hear_of() -> None:
    with pytest.raises(ValueError, match=r"^rank 1: the disk is full$"):
        launch(rank_work.complains, size=2, timeout=60)


def test_bug_in_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailure, match=r"^rank 1 failed: 'a bug'; the other ranks were stopped$"):
        launch(rank_work.broken, size=2, timeout=60)
    assert "KeyError: 'a bug'" in capsys.readouterr().err


def test_error_in_a_rank_that_is_no_exception(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailure, match="rank 1 failed: neither fish nor fowl; the other ranks were stopped"):
        launch(rank_work.odd, size=2, timeout=60)


def test_optimizer_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"optimizer's state cannot be written to .*file.*: rank 0: .*file"):
        launch(rank_work.saves_optimizer, tmp_path / "file", size=2, timeout=60)


def test_killed_rank() -> None:
    with pytest.raises(RunFailure, match=r"^rank 1 was ended by SIGKILL; the other ranks were stopped; continue with"):
        launch(rank_work.killed, size=2, timeout=60)


@pytest.mark.slow
def test_rank_that_does_not_answer() -> None:
    began = time.monotonic()
    with pytest.raises(RunFailure, match=r"^rank 1 did not answer; all were stopped; continue with --resume"):
        launch(rank_work.deaf, size=2, timeout=5)
    assert time.monotonic() - began < 40


def test_a_world_of_one_waits_for_nobody() -> None:
    world = World()
    world.barrier()
    world.agree(None)
    assert world.is_main
    assert world.broadcast("x") == "x"
    assert world.mean([1.0, 2.0]) == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"^no$"):
        world.agree(ValueError("no"))
