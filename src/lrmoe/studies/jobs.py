"""Training runs in worker processes that end when the process that started them does."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from lrmoe.training.config import TrainConfig
from lrmoe.training.run import prepare, train


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run to carry out, or to continue where it was left, in ``out``."""

    name: str
    config: TrainConfig
    out: Path


# Called with the job's name, its step and, at log steps, the record.
Progress = Callable[[str, int, "dict[str, Any] | None"], None]


def run_jobs(jobs: Sequence[Job], *, parallel: int, progress: Progress) -> None:
    """Carries out all jobs, ``parallel`` at a time; one at a time runs in this process.

    Raises:
        Exception: what the first failing run raised, when those that were already running have ended. Runs that had
            finished keep their results.
    """
    if parallel == 1 or len(jobs) <= 1:
        for job in jobs:
            carry_out(job, partial(progress, job.name))
        return
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    with ProcessPoolExecutor(parallel, mp_context=context, initializer=_start_worker, initargs=(messages,)) as pool:
        pending: set[Future[None]] = {pool.submit(_work, job) for job in jobs}
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                _forward(messages, progress)
                for future in done:
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _forward(messages, progress)


def carry_out(job: Job, progress: Callable[[int, dict[str, Any] | None], None]) -> None:
    """Runs one job to its end, from its newest checkpoint if it has one."""
    resume = (job.out / "config.json").exists()
    train(prepare(job.config, job.out, resume=resume), progress=progress)


_messages: Any = None


def _start_worker(messages: Any) -> None:
    global _messages
    _messages = messages
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A run that outlived a killed comparison would go on writing into a folder that the next one continues.
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(job: Job) -> None:
    carry_out(job, lambda step, record: _messages.put((job.name, step, record)))


def _forward(messages: Any, progress: Progress) -> None:
    while True:
        try:
            progress(*messages.get_nowait())
        except queue.Empty:
            return
