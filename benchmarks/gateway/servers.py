"""The gateway that is measured, in front of pools on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.server.subjects import ServerProcess


def gateway(
    folder: Path, tokenizer: str, pools: Mapping[str, Sequence[int]], kb: Path | None = None
) -> ServerProcess:
    """``specrag serve`` before some pools.

    Args:
        folder: for its configuration.
        tokenizer: of all pools.
        pools: the ports of each pool's replicas, by its name; one called ``drafter`` drafts for the others.
        kb: a knowledge base that is called ``wiki``.
    """
    file = folder / "gateway.toml"
    lines = ['log_level = "error"', "page = false"]
    lines += ["[kbs]", f"wiki = {json.dumps(str(kb))}"] if kb is not None else []
    for name, ports in pools.items():
        urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
        row = {
            "name": name,
            "role": "drafter" if name == "drafter" else "generator",
            "urls": urls,
            "tokenizer": tokenizer,
        }
        lines += ["[[upstreams]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items())]
    file.write_text("\n".join(lines), encoding="utf-8")
    return ServerProcess(
        [sys.executable, "-m", "specrag", "serve", "--config", str(file), "--port", "{port}"]
    )
