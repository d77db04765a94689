"""A cluster of three nodes on this machine: a head that runs no tasks, and two workers of one processor each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

# What Ray's own modules do in the old way is no error of ours.
with warnings.catch_warnings(), suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")
    import ray.serve
_ROOT = Path(__file__).parents[3]
_STORE = 78 * 2**20  # the least that Ray takes, a little rounded up


@pytest.fixture(scope="session")
def cluster(model_home: Path) -> Iterator[Cluster]:
    """Give the cluster; leave it with its two workers."""
    pytest.importorskip("ray")
    with cluster_of(2) as made:
        yield made


@contextmanager
def cluster_of(workers: int) -> Iterator[Cluster]:
    """A cluster that this process has joined, for as long as the block runs."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        # What this process imports the workers can import, too.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(workers):
            add_worker(made)
        ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def add_worker(cluster: Cluster) -> Any:
    """A further node; its handle."""
    return cluster.add_node(num_cpus=1, object_store_memory=_STORE)
