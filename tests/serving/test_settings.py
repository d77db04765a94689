"""One scheme for settings: who wins, what is refused, and that no secret is ever shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrag.errors import InputError

pytest.importorskip("pydantic_settings")

from specrag.serving.keys import ANYBODY, ApiKey, KeyRing
from specrag.serving.service import KEPT_IF_UNKNOWN, KeyValueMemory, divide
from specrag.serving.settings import load_settings

KEY = "a-secret-key-of-some-length"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests apart from the settings of whoever runs them."""
    import os

    for name in list(os.environ):
        if name.startswith("SPECRAG_SERVE_"):
            monkeypatch.delenv(name)


def refusal(**flags: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_settings(None, flags)
    return str(caught.value)


def test_flags_win_over_the_environment_and_it_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1001\nmax_queue = 1\nmax_jobs = 1\n[kbs]\nwiki = "/srv/wiki"\n', encoding="utf-8")
    monkeypatch.setenv("SPECRAG_SERVE_MAX_QUEUE", "2")
    monkeypatch.setenv("SPECRAG_SERVE_PORT", "1002")
    settings = load_settings(file, {"port": 1003, "max_jobs": None})
    assert (settings.port, settings.max_queue, settings.max_jobs) == (1003, 2, 1)
    assert settings.kbs == {"wiki": Path("/srv/wiki")}
    monkeypatch.setenv("SPECRAG_SERVE_CONFIG", str(file))
    assert load_settings().max_jobs == 1


def test_knowledge_bases_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAG_SERVE_KBS", "wiki=/srv/wiki, docs=/srv/docs")
    assert load_settings().kbs == {"wiki": Path("/srv/wiki"), "docs": Path("/srv/docs")}
    assert load_settings(None, {"kbs": ["a=/b"]}).kbs == {"a": Path("/b")}
    assert load_settings(None, {"kbs": "/x/wiki,b=/c"}).kbs == {"wiki": Path("/x/wiki"), "b": Path("/c")}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"port": 70000}, "port"),
        ({"deadline": float("nan")}, "deadline"),
        ({"max_queue": -1}, "max_queue"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes"),
        ({"kbs": "wiki="}, "NAME=FOLDER"),
        ({"kbs": "The Wiki"}, "NAME=FOLDER"),
        ({"kbs": ["a=/b", "a=/c"]}, "once"),
        ({"kbs": ["../a=/b"]}, "kbs"),
        ({"cors_origins": "*"}, "cors_origins"),
        ({"api_key": "short"}, "16 ASCII"),
        ({"api_key": "x" * 20 + " y"}, "16 ASCII"),
        ({"kbs": ["a=/b"], "tables": {"a": {"url": "postgresql://h/n"}}}, "same name"),
        ({"keys": [{"name": "a", "key": KEY, "kbs": ["b"]}]}, "no knowledge base"),
        ({"keys": [{"name": "a", "key": KEY}, {"name": "b", "key": KEY}]}, "same key"),
        ({"keys": [{"name": "a", "key": KEY, "kbs": ["b"], "create": True}]}, "create"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(flags: dict[str, Any], told: str) -> None:
    line = refusal(**flags)
    assert told in line
    assert "\n" not in line
    assert KEY not in line


@pytest.mark.parametrize(
    ("flags", "free", "running", "kept"),
    [
        ({}, 10_000, 4_000, 1_000),  # a tenth of what is free, out of its half
        ({}, 2**40, 2**39 - 2**32, 2**32),
        ({}, 3, 1, 0),
        ({}, None, None, KEPT_IF_UNKNOWN),
        ({"kv_memory_bytes": 50}, 10_000, 40, 10),  # never all of a small budget
        ({"kv_memory_bytes": 50}, None, 40, 10),
        ({"prefix_cache_bytes": 0}, 10_000, 5_000, 0),
        ({"prefix_cache_bytes": 7}, 10_000, 4_993, 7),
        ({"prefix_cache_bytes": 0}, None, None, 0),
    ],
)
def test_memory_is_divided_between_running_and_kept_texts(
    flags: dict[str, int], free: int | None, running: int | None, kept: int
) -> None:
    assert divide(load_settings(None, flags), free) == KeyValueMemory(running, kept)


def test_unknown_variables_and_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text("max_quue = 1\n", encoding="utf-8")
    with pytest.raises(InputError, match="max_quue"):
        load_settings(file)
    file.write_text("max_queue = \n", encoding="utf-8")
    with pytest.raises(InputError, match="no TOML"):
        load_settings(file)
    with pytest.raises(InputError, match="no such file"):
        load_settings(tmp_path / "none.toml")
    monkeypatch.setenv("SPECRAG_SERVE_MAX_QUUE", "1")
    with pytest.raises(InputError, match="MAX_QUUE"):
        load_settings()


def test_without_a_key_only_this_machine_is_served(tmp_path: Path) -> None:
    assert "without an API key" in refusal(host="0.0.0.0")
    assert "without an API key" in refusal(host="example.org")
    for host in ("127.0.0.1", "::1", "localhost"):
        assert load_settings(None, {"host": host}).loopback
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n", encoding="utf-8")
    assert load_settings(None, {"host": "0.0.0.0", "api_key_file": file}).needs_key
    file.write_text("", encoding="utf-8")
    assert "16 ASCII" in refusal(host="0.0.0.0", api_key_file=file)


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAG_SERVE_API_KEY", KEY)
    url = "postgresql://me:a-password@host/name"
    keys = [{"name": "alice", "key": f"{KEY}-2"}]
    settings = load_settings(None, {"keys": keys, "tables": {"t": {"url": url}}})
    shown = f"{settings!r} {settings} {settings.all_keys()!r} {json.dumps(settings.model_dump(mode='json'))}"
    assert KEY not in shown
    assert "a-password" not in shown
    # A mistake beside a secret does not show it either.
    assert KEY not in refusal(keys=[{"name": "no spaces", "key": KEY}])
    assert "a-password" not in refusal(tables={"t": {"url": url, "index": "none"}})


def test_a_key_is_found_by_its_digest_alone() -> None:
    import hashlib

    alice = ApiKey(name="alice", key=KEY, kbs=("wiki",))
    assert alice == ApiKey(name="alice", digest=hashlib.sha256(KEY.encode()).hexdigest(), kbs=("wiki",))
    ring = KeyRing([ApiKey(name="bob", key="another-key-of-some-length"), alice])
    assert ring.find(f"Bearer {KEY}") is alice
    assert ring.find(f"bearer  {KEY} ") is alice
    for header in (
        None,
        "",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer ",
        f"Bearer {alice.digest}",
        "Bearer ü\udcff",
    ):
        assert ring.find(header) is None, header
    assert KeyRing([]).find(None) is ANYBODY


def test_scopes() -> None:
    reader = ApiKey(name="a", key=KEY, kbs=("wiki",))
    assert reader.may_read("wiki")
    assert not reader.may_read("docs")
    assert not reader.may_upload("wiki")
    writer = ApiKey(name="a", key=KEY, kbs=("wiki",), upload=True)
    assert writer.may_upload("wiki")
    assert not writer.may_upload("docs")
    assert ANYBODY.may_upload("anything")
