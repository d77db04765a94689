#!/usr/bin/env python3
"""The long form of the load test: mixed requests of two tenants on a real server, compared with the same ones alone.

Run from the repository's root: ``python scripts/load_server.py --minutes 5 --clients 64``. It starts a server of its
own with SmolLM2 (int8, equal bits whatever else is in a pass) over a knowledge base for each tenant and a datastore for
one, and ends with 1 if an answer differed, a request failed, a tenant was let into the other's knowledge base,
something was left over, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specrag.serving.operation.setup import resident_bytes
from tests.sample import build_sample, build_village
from tests.serving.live_server import MODEL, running_server
from tests.serving.load import Report, Sample, alone, load, samples

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel

#: Growth of memory between the first quarter and the end that is no leak.
_ALLOWED = 0.05

#: oneDNN keeps up to 1,024 kernels, one for each matrix and number of rows: of this model those of some 170 numbers of
#: rows, about 450 MB. They are made before memory is looked at, or each new number of rows would look like a leak.
_ROWS = 256


@dataclass(frozen=True)
class Tenant:
    """Whose requests they are; ``other`` is a knowledge base that it must not see."""

    key: str
    kb: str
    other: str
    datastore: str | None = None

    def kinds(self, tokens: int) -> list[Sample]:
        """Its requests, one of them for the other tenant's knowledge base."""
        asking = {"model": MODEL, "messages": [{"role": "user", "content": "Who discovered radium?"}]}
        hidden = Sample("/v1/chat/completions", {**asking, "specrag": {"kb": self.other}}, 404)
        return [*samples(self.kb, tokens, self.datastore), hidden]


TENANTS = (
    Tenant("north-key-0123456789", "north", "south", "village"),
    Tenant("south-key-0123456789", "south", "north"),
)


async def both(
    url: str, expected: Sequence[Mapping[int, str]], options: argparse.Namespace, seconds: float, seed: int
) -> Report:
    """The load of both tenants at once, half of the clients each."""
    north, south = await asyncio.gather(
        *(
            load(
                url,
                tenant.kinds(options.tokens),
                answers,
                clients=options.clients // 2,
                seconds=seconds,
                seed=seed + number * 1000,
                key=tenant.key,
            )
            for number, (tenant, answers) in enumerate(zip(TENANTS, expected, strict=True))
        )
    )
    return Report(
        north.outcomes + south.outcomes,
        [*north.differences, *south.differences],
        [*north.surprises, *south.surprises],
        max(north.seconds, south.seconds),
    )


def held_bytes() -> float:
    """Memory of the process, without what the C library keeps to hand out again."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes()


def fill_kernels(llm: LanguageModel) -> None:
    """Read prompts of every length that one pass takes."""
    for rows in range(1, _ROWS + 1):
        llm.generate(list(range(5, 5 + rows)), max_tokens=1)


def main() -> int:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Any] = {
            "kbs": {tenant.kb: build_sample(Path(folder) / tenant.kb) for tenant in TENANTS},
            "datastores": {
                "village": build_village(Path(folder) / "store", MODEL, dtype="int8", batch_invariant=True)
            },
            "keys": [
                {"name": tenant.kb, "key": tenant.key, "kbs": [tenant.kb, *filter(None, [tenant.datastore])]}
                for tenant in TENANTS
            ],
        }
        with running_server(**stores, max_concurrent=64, max_queue=256) as server:
            expected = [
                asyncio.run(alone(server.url, tenant.kinds(options.tokens), tenant.key)) for tenant in TENANTS
            ]
            fill_kernels(server.service.llm)
            seconds = options.minutes * 60
            first = asyncio.run(both(server.url, expected, options, seconds / 4, options.seed))
            before = held_bytes()
            second = asyncio.run(both(server.url, expected, options, seconds * 3 / 4, options.seed + 1))
            deadline = time.monotonic() + 30
            while not server.idle and time.monotonic() < deadline:
                time.sleep(0.1)
            after, idle = held_bytes(), server.idle
    differences = [*first.differences, *second.differences]
    surprises = [*first.surprises, *second.surprises]
    grown = after / before - 1
    print(
        json.dumps(
            {
                "clients": options.clients,
                "seconds": round(first.seconds + second.seconds, 1),
                "outcomes": dict(first.outcomes + second.outcomes),
                "differences": differences[:5],
                "surprises": surprises[:5],
                "idle": idle,
                "memory_before": before,
                "memory_after": after,
                "memory_growth": round(grown, 4),
            },
            indent=1,
        )
    )
    return int(bool(differences or surprises or not idle or grown > _ALLOWED))


if __name__ == "__main__":
    sys.exit(main())
