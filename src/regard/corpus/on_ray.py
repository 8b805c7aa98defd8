"""Shards as tasks of Ray: on this machine, or on the cluster that RAY_ADDRESS names and that sees the same folders."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from regard.corpus.documents import Shard
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.settings import CorpusJob, extra_package
from regard.corpus.shard_work import AHEAD, measure_shard, records_of
from regard.errors import EngineError
from regard.tasks.training.distributed.devices import find_device

RETRIES = 5
"""How often Ray runs a shard again whose process or machine has died. A shard writes the same bytes each time."""


def in_ray(job: CorpusJob, left: Iterator[Shard], settings: dict[str, Any]) -> Iterator[CorpusCounts]:
    """Measure shards in tasks of Ray, with as many at a time as the cluster has room for."""
    ray = extra_package("ray", extra="ray")
    begins = not ray.is_initialized()
    if begins:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    # The device of this process, whose name is in run.toml.
    device = find_device(job.measure.device).type
    job = replace(job, measure=replace(job.measure, device=device))
    is_gpu = device != "cpu"
    task = ray.remote(num_cpus=job.measure.threads, num_gpus=int(is_gpu), max_retries=RETRIES)(measure_shard)
    room = ray.cluster_resources().get("GPU" if is_gpu else "CPU", 1) // (1 if is_gpu else job.measure.threads)

    def submit(shard: Shard) -> Future[CorpusCounts]:
        future: Future[CorpusCounts] = task.remote(job, shard, settings).future()
        return future

    try:
        # A cluster may grow: more tasks wait than it has room for now.
        yield from records_of(submit, left, AHEAD * max(int(room), job.workers or 1))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"a shard could not be measured in {RETRIES + 1} tries ({str(error).splitlines()[0]:.200}); "
            "go on with --resume"
        ) from None
    finally:
        if begins:
            ray.shutdown()
