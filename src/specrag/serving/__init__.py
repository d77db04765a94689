"""An OpenAI-compatible server that speculates, its knowledge bases and its page."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.serving.app import create_app
    from specrag.serving.launch import serve
    from specrag.serving.running import LOADING, RunningServer, folder, running_servers
    from specrag.serving.service import split_drafter
    from specrag.serving.settings import Settings, load_settings, read_toml
    from specrag.serving.upstreams import refuse_sessions
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "LOADING",
    "RunningServer",
    "Settings",
    "create_app",
    "folder",
    "load_settings",
    "read_toml",
    "refuse_sessions",
    "running_servers",
    "serve",
    "split_drafter",
]
