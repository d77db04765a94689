"""The gateway's pools: built from the settings, monitored, reported at ``/readyz`` and in ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specrag.engine import Executor
from specrag.errors import InputError
from specrag.methods import Method, Needs, RemoteModel
from specrag.models.endpoint import Address, Pool, PooledEndpoint, Replica, ReplicaSettings
from specrag.serving.own_engine import OwnEngine
from specrag.serving.settings import LOCAL

if TYPE_CHECKING:
    from specrag.models import Tokenizer
    from specrag.serving.settings import Settings, Upstream


class Upstreams:
    """The endpoints that answer in place of a local model.

    Args:
        settings: rows of ``upstreams`` with the same name form one pool.

    Attributes:
        executor: runs the coroutines of all requests.
        pools: the pools by name.
        roles: each pool's role, by name.
    """

    def __init__(self, settings: Settings) -> None:
        rows = settings.upstreams
        self.executor = Executor()
        self._engine = next((OwnEngine(settings, row.name) for row in rows if row.is_local), None)
        self.roles = {row.name: row.role for row in rows}
        self._rows = {name: [row for row in rows if row.name == name] for name in self.roles}
        self.pools = {name: self._pool(name, own) for name, own in self._rows.items()}
        self._endpoints: dict[str, PooledEndpoint] = {}
        self._models: dict[str, RemoteModel] = {}

    def connect(self) -> None:
        """Ask every replica for its models and start monitoring them; takes seconds if one does not answer.

        Raises:
            SpecragError: a tokenizer cannot be loaded.
        """
        if self._engine is not None:
            self._engine.start()
        for name, pool in self.pools.items():
            first = self._rows[name][0]
            tokenizer = self._tokenizer(name)
            self._endpoints[name] = PooledEndpoint(pool, tokenizer, first.context_length)
            self._models[name] = RemoteModel(
                pool,
                self.executor,
                tokenizer=tokenizer,
                context_length=first.context_length,
                clock=self.executor.clock,
            )
            pool.connect()

    def close(self) -> None:
        """End everything in progress and close the pools."""
        self.executor.close()
        for pool in self.pools.values():
            pool.close()
        if self._engine is not None:
            self._engine.close()

    @property
    def names(self) -> list[str]:
        """Names of the pools that write answers."""
        return [name for name, role in self.roles.items() if role == "generator"]

    def model(self, name: str) -> RemoteModel:
        """The pool of this name, as a model that writes answers."""
        return self._models[name]

    def drafter(self, name: str) -> PooledEndpoint:
        """The endpoint that writes drafts for a generator: the drafter, else the generator itself."""
        return self._endpoints[self._of_role("drafter", name)]

    def verifier(self, name: str) -> PooledEndpoint:
        """The endpoint that scores drafts for a generator: the verifier, else the generator itself."""
        return self._endpoints[self._of_role("verifier", name)]

    def _pool(self, name: str, rows: Sequence[Upstream]) -> Pool:
        replicas = []
        for row in rows:
            for url in row.urls:
                if url == LOCAL and self._engine is not None:
                    replicas.append(ReplicaSettings(self._engine.address, row.weight, name, own_name=True))
                    continue
                address = Address(url, row.secret(), silence_seconds=row.silence_seconds)
                replicas.append(ReplicaSettings(address, row.weight, row.model))
        return Pool(name, replicas)

    def _tokenizer(self, name: str) -> Tokenizer | None:
        """The tokenizer that a pool's rows name, else the local model's if that is one of the replicas."""
        rows = self._rows[name]
        named = next((row.tokenizer for row in rows if row.tokenizer), None)
        if named is None:
            return self._engine.tokenizer if self._engine and any(row.is_local for row in rows) else None
        from specrag.models import Tokenizer as Loaded
        from specrag.models.catalog import resolve

        return Loaded(resolve(named))

    def _of_role(self, role: str, otherwise: str) -> str:
        return next((name for name, its in self.roles.items() if its == role), otherwise)

    # -- how they are -----------------------------------------------------------------------------------------

    def reason(self) -> str | None:
        """Why no answer can be written; ``None`` if some generator has a healthy replica."""
        if any(self.pools[name].healthy for name in self.names):
            return None
        return "no generator has a replica that answers"

    def report(self) -> dict[str, Any]:
        """The state of each pool for the operator, without addresses."""
        return {
            name: {
                "role": self.roles[name],
                "replicas": len(pool.replicas),
                "healthy": pool.healthy,
                "reasons": pool.reasons,
            }
            for name, pool in self.pools.items()
        }

    def collect(self) -> Iterator[Metric]:
        """Metrics of each replica; Prometheus's registry calls this."""
        labels = ["upstream", "replica"]
        gauges: Mapping[tuple[str, str], Callable[[Replica], float]] = {
            ("healthy", "1 while the replica is not left out."): lambda each: not each.breaker.is_open,
            ("outstanding_tokens", "Of its calls under way."): lambda each: each.outstanding,
        }
        counters: Mapping[tuple[str, str], Callable[[Replica], float]] = {
            ("requests", "Calls that were made."): lambda each: each.calls,
            ("failures", "Calls that have failed."): lambda each: each.failed,
        }
        for (name, help_text), read in gauges.items():
            gauge = GaugeMetricFamily(f"specrag_upstream_{name}", help_text, labels=labels)
            self._fill(gauge, read)
            yield gauge
        for (name, help_text), read in counters.items():
            counter = CounterMetricFamily(f"specrag_upstream_{name}", help_text, labels=labels)
            self._fill(counter, read)
            yield counter
        retries = CounterMetricFamily(
            "specrag_upstream_retries", "Calls that were made again.", labels=["upstream"]
        )
        for name, pool in self.pools.items():
            retries.add_metric([name], pool.retries)
        yield retries

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[Replica], float]
    ) -> None:
        for name, pool in self.pools.items():
            for replica in pool.replicas:
                family.add_metric([name, str(replica.number)], float(read(replica)))


#: Methods that need no session, as error messages list them.
_OVER_ENDPOINTS = "plain, standard-rag, sequential, ralmspec and speculative-rag"


def refuse_sessions(method: type[Method], field: str) -> None:
    """Refuse a method that decodes in the engine's own sessions, which no endpoint has.

    Raises:
        InputError: the method does.
    """
    if Needs.SESSIONS in method.needs:
        beyond_tokens = Needs.RETRIEVER | Needs.DATASTORE | Needs.CONTEXT
        way = (
            "decodes in sessions of a model on this machine: serve one without upstreams"
            if method.needs & beyond_tokens
            else "works inside the engine: install its drafter there (docs/vllm.md)"
        )
        remedy = f"{method.name} {way}; through upstreams there are {_OVER_ENDPOINTS}"
        raise InputError(field, method.name, remedy)
