"""The server's settings. Each has one name, wherever it is given.

The setting ``max_queue`` is the line ``max_queue = 64`` of a TOML file, the environment variable
``SPECRAG_SERVE_MAX_QUEUE=64`` and the flag ``--max-queue 64``. A flag wins over the environment, the environment
over the file, the file over the default. Unknown names are refused.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specrag.errors import InputError
from specrag.serving.keys import ApiKey, master_key, read_key

PREFIX = "SPECRAG_SERVE_"

CONFIG_VARIABLE = "SPECRAG_SERVE_CONFIG"
"""Names the TOML file if no flag does."""

#: Valid names of knowledge bases: safe as a part of a path and of a URL.
NAME_PATTERN = r"[a-z0-9][a-z0-9_-]{0,63}"

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Table(BaseModel):
    """A knowledge base in PostgreSQL.

    Args:
        url: the database's; may hold a password and is never shown.
        table: the table's name.
        index: ``flat`` or ``hnsw``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: SecretStr
    table: str = "passages"
    index: Literal["flat", "hnsw"] = "flat"


class StoreSettings(BaseModel):
    """A knowledge base in a store, or in several stores as one.

    Args:
        address: as ``--kb`` of the command line takes it, such as ``qdrant://db:6333/notes`` or
            ``partial-shards:ADDRESS,ADDRESS``; may hold a password and is never shown.
        index: ``flat`` or ``hnsw``; with folders as shards also ``bm25`` and ``hybrid``.
        timeout, connect_timeout: seconds for a request, and for a connection.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    address: SecretStr
    index: Literal["flat", "hnsw", "bm25", "hybrid"] = "flat"
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    connect_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0


#: In place of a URL: the model of this machine, as one replica among others.
LOCAL = "local"

#: Valid names of upstreams: model names without ``@``, which introduces a knowledge base.
UPSTREAM_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class Upstream(BaseModel):
    """Endpoints that answer in place of a local model. Those with the same name form one pool.

    Args:
        name: the model's name in ``/v1/models``.
        urls: addresses up to and including ``/v1``, one per replica; ``local`` is the model of this machine.
        key: API key; sent to these addresses only, and never shown.
        key_file: a file whose first line is that key.
        weight: share of the work that each replica gets, relative to the others of the pool.
        role: ``generator`` writes answers; ``drafter`` and ``verifier`` are Speculative RAG's, for all generators.
        model: what the endpoints call the model; by default the name, or the first that they list.
        context_length: tokens of the model's context, if the endpoints do not tell.
        tokenizer: a local model with the same tokenizer, so that tokens are counted rather than estimated.
        silence_seconds: seconds without a byte of a stream after which a replica has failed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=f"^{UPSTREAM_PATTERN}$")]
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    key: SecretStr | None = None
    key_file: Path | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    role: Literal["generator", "drafter", "verifier"] = "generator"
    model: str | None = None
    context_length: Annotated[int, Field(ge=1)] | None = None
    tokenizer: str | None = None
    silence_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0

    @model_validator(mode="before")
    @classmethod
    def _split_word(cls, value: object) -> object:
        """Parse ``NAME=URL[,URL...]``, the form of the flag."""
        if not isinstance(value, str):
            return value
        name, equals, urls = value.partition("=")
        if not equals:
            raise InputError("upstreams", _without_password(value), "give NAME=URL[,URL...]")
        return {"name": name, "urls": _split(urls)}

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(url if url == LOCAL else _checked_url(url) for url in value)

    @property
    def is_local(self) -> bool:
        """Whether the model of this machine is one of the replicas."""
        return LOCAL in self.urls

    def secret(self) -> str:
        """The key; empty for none.

        Raises:
            InputError: both a key and a file are given, or the file cannot be read.
        """
        if self.key is not None and self.key_file is not None:
            raise InputError(f"upstreams: {self.name}", "two keys", "give key or key_file, not both")
        if self.key_file is not None:
            return read_key(self.key_file)
        return "" if self.key is None else self.key.get_secret_value()


Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Words = Annotated[tuple[str, ...], NoDecode]


def _default_model() -> str:
    from specrag.models.catalog import default_model  # torch, which `--list-settings` does without

    return default_model()


class Settings(BaseSettings):
    """All settings of ``specrag serve``. Made by :func:`load_settings`.

    Sizes are in bytes, times in seconds.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        nested_model_default_partial_update=False,
    )

    # -- the model ------------------------------------------------------------------------------------------
    model: str = Field(
        default_factory=_default_model,
        description="A catalog name, a folder, a .gguf file or a hub id; by default the best that this "
        "machine carries.",
    )
    served_name: str | None = Field(None, description="Name of the model in /v1/models; by default its own.")
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        "auto",
        description="Number type of the weights: fp32, bf16, fp16 or int8; auto: int8 on the CPU, bf16 on a GPU.",
    )
    device: str | None = Field(
        None, description="Device, such as cpu or cuda:0; by default the first GPU, else the CPU."
    )
    adapter: Path | None = Field(None, description="A folder with a LoRA adapter, merged into the weights.")
    rag_drafter: str | None = Field(
        None, description="Drafter of speculative-rag, and cascade's small model: MODEL or MODEL+ADAPTER."
    )
    batch_invariant: bool | None = Field(
        None, description="Equal bits whatever else is in a pass; by default with int8 where it costs little."
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto", description="Keys and values: as computed, or in 8 bits."
    )
    method: str = Field("adaptive", description="Method of decoding where a request does not say.")
    encoder: str = Field(
        "minilm-l6-v2", description="Encoder of /v1/embeddings and of knowledge bases made here."
    )
    reranker: str | None = Field(
        None, description="A cross-encoder for /v1/rerank and for requests that name it; none by default."
    )
    prefix_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="Memory for earlier texts; by default a fifth of kv_memory_bytes, at most 4 GiB.",
    )

    # -- endpoints in place of the model ----------------------------------------------------------------------
    upstreams: tuple[Upstream, ...] = Field(
        (),
        description="NAME=URL[,URL...] of OpenAI-compatible servers that answer in place of a local model; "
        "local in place of a URL is that model, as one of them.",
    )

    # -- the knowledge bases --------------------------------------------------------------------------------
    kbs: Annotated[dict[Name, Path], NoDecode] = Field({}, description="Folders of `specrag index`, by name.")
    tables: dict[Name, Table] = Field({}, description="Tables of PostgreSQL, by name.")
    stores: dict[Name, StoreSettings] = Field({}, description="Stores by name, each with its address.")
    datastores: Annotated[dict[Name, Path], NoDecode] = Field(
        {}, description="Folders of `specrag index --knn-lm`, by name, for the method knn-lm."
    )
    corpora: Annotated[dict[Name, Path], NoDecode] = Field(
        {}, description="Folders of `specrag index --corpus`, by name, for guesses to be copied from."
    )
    drafters: Words = Field(
        (), description="Draft models (model:NAME) and heads (eagle:NAME) that requests may let guess."
    )
    kb_root: Path | None = Field(
        None,
        description="Folder for knowledge bases made through the API and for all uploads; without it none.",
    )

    # -- who may ask ----------------------------------------------------------------------------------------
    host: str = Field("127.0.0.1", description="Address to listen on; without a key only this machine's own.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    api_key: SecretStr | None = Field(None, description="One key that may do everything.")
    api_key_file: Path | None = Field(None, description="A file whose first line is that key.")
    keys: tuple[ApiKey, ...] = Field((), description="Keys with scopes.")
    cors_origins: Words = Field((), description="Sites whose pages may call this server; none by default.")
    allowed_hosts: Words = Field(
        (), description="Names that a request may call this server by; without a key those of this machine."
    )

    # -- limits ---------------------------------------------------------------------------------------------
    max_body_bytes: Count = Field(
        4 * MIB, description="Largest request body that is not an upload, in bytes."
    )
    max_upload_bytes: Count = Field(256 * MIB, description="Largest upload, all files together, in bytes.")
    max_upload_files: Count = Field(256, description="Most files of one upload.")
    max_prompt_tokens: Count | None = Field(
        None, description="Most tokens of a prompt; by default the model's context."
    )
    max_output_tokens: Count | None = Field(
        None, description="Most tokens of an answer; by default what is left of the context."
    )
    max_choices: Count = Field(16, description="Most answers of one request: n times its prompts.")
    max_concurrent: Count = Field(32, description="Most texts that are written at the same time.")
    max_queue: int = Field(
        128, ge=0, description="Most requests that wait for their turn; more are answered 429."
    )
    max_jobs: Count = Field(16, description="Most uploads that wait to be indexed; more are answered 429.")
    max_uploads: Count = Field(8, description="Most uploads of one key that arrive at the same time.")
    max_document_pages: Count = Field(5000, description="Most pages of a PDF; a longer one is not indexed.")
    max_document_characters: Count = Field(
        20_000_000, description="Most characters of an uploaded document's text."
    )
    job_seconds: Seconds = Field(3600.0, description="Time limit for indexing an upload, in seconds.")
    job_memory_bytes: Count = Field(
        3 * GIB, description="Memory limit of the process that indexes uploads, in bytes."
    )
    max_kbs: Count = Field(100, description="Most knowledge bases in kb_root.")
    max_connections: Count = Field(
        1024, description="Most open connections; for a new one an idle or a slow one is closed."
    )
    max_client_connections: Count | None = Field(
        None,
        description="Most connections of one address; leave it out behind a proxy, whose address all have.",
    )
    deadline: Seconds = Field(600.0, description="Request timeout in seconds, from arrival to last token.")
    header_seconds: Seconds = Field(
        15.0, description="Time limit for the head of a request to arrive, in seconds."
    )
    body_seconds: Seconds = Field(
        30.0, description="Time limit for the body of a request to arrive, in seconds."
    )
    upload_seconds: Seconds = Field(900.0, description="Time limit for an upload to arrive, in seconds.")
    min_body_rate: Count = Field(
        8 * KIB,
        description="Least bytes a second at which a body that takes longer than body_seconds must arrive.",
    )
    search_seconds: Seconds = Field(
        30.0, description="Time limit for a search of a knowledge base, in seconds."
    )
    write_seconds: Seconds = Field(
        60.0, description="Time that a client may leave an answer unread, in seconds."
    )
    idle_seconds: Seconds | None = Field(
        None,
        description="Time without a request after which the server ends itself, in seconds; by default never.",
    )
    shutdown_seconds: Seconds = Field(
        30.0, description="Time for running requests to end when the server is stopped, in seconds."
    )
    kv_memory_bytes: Count | None = Field(
        None,
        description="Memory for keys and values, kept ones too, in bytes; by default half of the free memory at start.",
    )

    # -- what it tells --------------------------------------------------------------------------------------
    log_format: Literal["json", "text"] = Field("json", description="Format of the log: json or text.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged: debug to error."
    )
    log_prompts: bool = Field(False, description="Write prompts and answers into the log.")
    metrics: bool = Field(True, description="Serve /metrics.")
    page: bool = Field(True, description="Serve the pages at / and /docs.")
    tracing: bool = Field(False, description="Send OpenTelemetry traces; needs specrag[tracing].")

    @field_validator("kbs", "datastores", "corpora", mode="before")
    @classmethod
    def _split_folders(cls, value: object) -> object:
        """Parse ``NAME=FOLDER`` pairs, in a list or separated by commas; a folder alone goes by its own name."""
        words = _split(value) if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)):
            return words
        pairs = [_named(str(word)).partition("=") for word in words]
        for name, equals, folder in pairs:
            if not (name and equals and folder):
                raise InputError("folder", f"{name}{equals}{folder}", "give NAME=FOLDER")
            if not re.fullmatch(NAME_PATTERN, name):
                remedy = f"{name!r} is no name, which has small letters, digits, - and _; give NAME=FOLDER"
                raise InputError("folder", folder, remedy)
        if len({name for name, _, _ in pairs}) < len(pairs):
            raise ValueError("give every name once")
        return {name: folder for name, _, folder in pairs}

    @model_validator(mode="before")
    @classmethod
    def _without_model(cls, values: Any) -> Any:
        """Set the defaults with upstreams: the method is plain, and without a local replica there is no model."""
        if not isinstance(values, dict) or not values.get("upstreams"):
            return values
        usual = {"method": "plain"} if _names_local(values["upstreams"]) else {"model": "", "method": "plain"}
        return {**usual, **values}

    @field_validator("cors_origins", "allowed_hosts", "drafters", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return _split(value) if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise ValueError(
                    "give origins such as https://app.example.org, without a path; * is not taken"
                )
        return value

    @field_validator("kb_root", "adapter")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("kbs", "datastores", "corpora")
    @classmethod
    def _expand_all(cls, value: dict[str, Path]) -> dict[str, Path]:
        return {name: folder.expanduser() for name, folder in value.items()}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the frame's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment; the file's values come with the flags (see :func:`load_settings`)."""
        return init_settings, env_settings

    @property
    def name(self) -> str:
        """The model's name in requests and answers."""
        if self.upstreams:
            return next((each.name for each in self.upstreams if each.role == "generator"), "")
        return self.served_name or Path(self.model).name

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self.all_keys())

    def all_keys(self) -> tuple[ApiKey, ...]:
        """Every key, however it was given.

        Raises:
            InputError: the key file cannot be read or holds no key.
        """
        keys = list(self.keys)
        if self.api_key is not None:
            keys.append(master_key(self.api_key.get_secret_value(), "api_key"))
        if self.api_key_file is not None:
            keys.append(master_key(read_key(self.api_key_file), "api_key_file"))
        return tuple(keys)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Check what depends on several settings together.

        Raises:
            InputError: without a key the server would serve other machines; two knowledge bases, datastores or
                corpora share a name; two keys share a name or a value; a key's scope names something
                that does not exist.
        """
        keys = self.all_keys()
        self._check_upstreams()
        if not keys and not self.loopback:
            remedy = (
                "without an API key only 127.0.0.1 is served; set api_key_file or keys, or leave host out"
            )
            raise InputError("host", self.host, remedy)
        named = set(self.kbs)  # a key's scope names all kinds in one list
        for field in ("tables", "stores", "datastores", "corpora"):
            folders: Mapping[str, object] = getattr(self, field)
            for name in folders.keys() & named:
                raise InputError(field, name, "something else has the same name; give each one of its own")
            named |= folders.keys()
        for field, values in {
            "name": [key.name for key in keys],
            "key": [key.digest for key in keys],
        }.items():
            if len(set(values)) < len(values):
                remedy = f"two have the same {field}; give each its own"
                raise InputError("keys", f"{len(values)} keys", remedy)
        if self.kb_root is None:
            for key in keys:
                for name in sorted(set(key.kbs) - named - {"*"}):
                    raise InputError(
                        f"keys: {key.name}",
                        name,
                        "there is no knowledge base, datastore or corpus of this name",
                    )

    def _check_upstreams(self) -> None:
        """See :meth:`check`.

        Raises:
            InputError: a setting needs a local model as well, a name has two roles, the drafter or the verifier has
                two names, or there is no generator.
        """
        if not self.upstreams:
            return
        self._check_local()
        roles: dict[str, str] = {}
        for upstream in self.upstreams:
            upstream.secret()
            if roles.setdefault(upstream.name, upstream.role) != upstream.role:
                raise InputError("upstreams", upstream.name, "one name has one role; give another name")
        for role in ("drafter", "verifier"):
            named = [name for name, its in roles.items() if its == role]
            if len(named) > 1:
                raise InputError("upstreams", named[1], f"there is one {role}; give all of its urls one name")
        if "generator" not in roles.values():
            raise InputError(
                "upstreams", next(iter(roles)), "give one of role generator, which writes answers"
            )

    def _check_local(self) -> None:
        """Check the settings of the local model beside upstreams.

        Raises:
            InputError: it is set but no replica, it is a replica twice, or a setting does not work with upstreams.
        """
        local = sum(upstream.urls.count(LOCAL) for upstream in self.upstreams)
        if local > 1:
            raise InputError("upstreams", LOCAL, "give it once; this machine loads one model")
        for field in ("model", "adapter", "served_name", "rag_drafter", "datastores", "corpora", "drafters"):
            if getattr(self, field) and not (local and field in ("model", "adapter")):
                remedy = "leave it out; it is of a local model, and upstreams take a model's place"
                if field in ("model", "adapter"):
                    remedy += f"; to have both, give NAME={LOCAL},URL"
                raise InputError(field, getattr(self, field), remedy)


def load_settings(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the settings from flags, environment and file, and check them.

    Args:
        file: TOML; by default what ``SPECRAG_SERVE_CONFIG`` names, else none.
        flags: values by setting; None stands for a flag that was not given.
        defaults: values by setting, used if no other source has one.

    Raises:
        InputError: a value cannot be used; secrets are not shown.
    """
    variable = os.environ.get(CONFIG_VARIABLE)
    if file is None and variable:
        file = Path(variable)
    values = dict(defaults or {}) | ({} if file is None else read_toml(file))
    named = {
        name.upper().removeprefix(PREFIX).lower() for name in os.environ if name.upper().startswith(PREFIX)
    }
    for name in sorted(named - {"config"} - Settings.model_fields.keys()):
        raise InputError(f"{PREFIX}{name.upper()}", "", "there is no such setting; see docs/deployment.md")
    # The environment ranks between file and flags: settings that it gives are dropped from the file's.
    values = {name: value for name, value in values.items() if name not in named}
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "settings"
        cause = problem.get("ctx", {}).get("error")
        value = getattr(cause, "value", "the value given")  # that of an InputError is no secret
        raise InputError(field, value, getattr(cause, "remedy", _message(problem["msg"]))) from None
    except SettingsError as error:
        raise InputError("settings", PREFIX, f"{error}; lists of tables are given as JSON") from None
    settings.check()
    return settings


def read_toml(file: Path) -> dict[str, Any]:
    """Read the settings in a file; only their names are checked.

    Raises:
        InputError: it cannot be read, is not TOML, or holds an unknown setting.
    """
    try:
        content = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError("config", str(file), f"{reason}; give a TOML file that can be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("config", str(file), f"it is no TOML: {error}") from None
    for name in sorted(content.keys() - Settings.model_fields.keys()):
        raise InputError(f"config {file}", name, "there is no such setting; see docs/deployment.md")
    return content


def _message(text: str) -> str:
    return text.removeprefix("Value error, ")


def _named(word: str) -> str:
    """Put a folder's own name in front of it, unless a name is given."""
    return word if "=" in word or not word else f"{Path(word).expanduser().resolve().name}={word}"


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _names_local(rows: object) -> bool:
    """Whether rows of upstreams, before validation, include the model of this machine."""
    found: list[object] = []
    for row in rows if isinstance(rows, list | tuple) else ():
        if isinstance(row, Upstream):
            found += row.urls
        elif isinstance(row, str):
            found += _split(row.partition("=")[2])
        elif isinstance(row, Mapping) and isinstance(row.get("urls"), list | tuple):
            found += row["urls"]
    return LOCAL in found


def _checked_url(url: str) -> str:
    """Check the URL of an OpenAI-compatible server, and strip the slash at its end.

    Raises:
        InputError: it is no such URL, or holds a password.
    """
    parts = urlsplit(url)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if parts.username is not None or parts.password is not None:
        raise InputError("upstreams", _without_password(url), "leave the password out; give key or key_file")
    if not is_address or parts.query or parts.fragment:
        raise InputError("upstreams", url, "give http://HOST:PORT/v1")
    return url.rstrip("/")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", text)
