"""The same evaluation on a Ray cluster: one lab per worker, each with the model in it; scores come to this process.

Only this process writes, so the folder need not be shared, and a run that is interrupted goes on as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eval.runner.folder import RunFolder
from eval.runner.jobs import Job, Jobs
from eval.runner.lab import Lab
from eval.runner.options import EvalOptions
from eval.vocabulary import Score
from retrieval.errors import ExtraMissing

__all__ = ["RayMeasure"]


class RayMeasure:
    """Measures on a Ray cluster; goes into :func:`eval.runner.run_eval`.

    Args:
        address: of the cluster; ``"local"`` starts one on this machine, ``"auto"`` finds the one that runs.
        workers: labs; None for one per GPU of the cluster, or per CPU where there is none.
        cpus: of each, which is also its torch threads.

    Raises:
        ExtraMissing: Ray is not installed.
    """

    def __init__(self, address: str = "local", workers: int | None = None, cpus: int = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise ExtraMissing('--ray needs Ray: pip install "kvblend[ray]"') from error
        self._ray: Any = ray
        self.address, self.workers, self.cpus = address, workers, cpus

    def __call__(
        self, options: EvalOptions, every: Jobs, left: Sequence[Job], folder: RunFolder
    ) -> Iterator[list[Score]]:
        """Scores of each job, as it is done."""
        ray = self._ray
        started = not ray.is_initialized()
        if started:
            ray.init(address=None if self.address == "local" else self.address, **self._quiet())
        try:
            yield from self._measured(options, every, left, folder)
        finally:
            if started:
                ray.shutdown()

    def _measured(
        self, options: EvalOptions, every: Jobs, left: Sequence[Job], folder: RunFolder
    ) -> Iterator[list[Score]]:
        ray = self._ray
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = self.workers or gpus or max(1, int(ray.cluster_resources().get("CPU", 1)) // self.cpus)
        actor = ray.remote(num_cpus=self.cpus, num_gpus=1 if gpus else 0)(_Worker)
        passages = ray.put(every.passages)
        workers = [actor.remote(options, passages, self.cpus) for _ in range(min(count, max(1, len(left))))]
        ray.get([workers[i % len(workers)].admit.remote(job) for i, job in enumerate(left)])
        folder.begin(options.identity, {"model": options.model, **ray.get(workers[0].record.remote())})
        waiting = list(reversed(left))
        busy = {worker.measure.remote(waiting.pop()): worker for worker in workers if waiting}
        while busy:
            (done,), _ = ray.wait(list(busy))
            worker = busy.pop(done)
            if waiting:
                busy[worker.measure.remote(waiting.pop())] = worker
            yield [Score.from_dict(plain) for plain in ray.get(done)]

    def _quiet(self) -> dict[str, Any]:
        """Ray's dashboard and log lines are of no use to somebody who runs an evaluation."""
        if self.address != "local":
            return {"log_to_driver": False}
        return {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}


class _Worker:
    """A lab in a process of its own, maybe on another machine."""

    def __init__(self, options: EvalOptions, passages: dict[str, tuple[str, ...]], threads: int) -> None:
        torch.set_num_threads(threads)
        self.lab = Lab(options.model, passages, dtype=options.dtype, store=options.store)

    def admit(self, job: Job) -> None:
        self.lab.admit(job)

    def record(self) -> dict[str, Any]:
        return self.lab.record()

    def measure(self, job: Job) -> list[dict[str, Any]]:
        return [score.as_dict() for score in self.lab.measure(job)]
