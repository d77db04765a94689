"""``specrag ask QUESTION --kb DIR``: an answer from a knowledge base, or from a long context, with its sources."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common, configuration, values
from specrag.cli.chat import Chat, interrupts_stop
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.cli.remote import RemoteBackend
    from specrag.cli.resources import LocalResources
    from specrag.cli.values import Chosen
    from specrag.methods import Method
    from specrag.request import Request, Result


def ask(
    line: typer.Context,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="The question; standard input if omitted.")
    ] = None,
    kb: Annotated[
        str | None,
        typer.Option(
            "--kb",
            metavar="DIR|ADDRESS",
            help="A folder made by specrag index, or a store: postgresql://USER@HOST/NAME#TABLE, qdrant://HOST/NAME, "
            "milvus://HOST/NAME, shards:A,B.",
        ),
    ] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Answer from this file or folder, read whole, instead; may be repeated."
        ),
    ] = None,
    method: common.Method = None,
    option: values.KeyValues = None,
    k: Annotated[
        str | None, typer.Option("-k", metavar="N", help="How many passages (default 5; 10 for drafts).")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help='Such as "year>=2000 or title=A,B"; may be repeated.'),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask several questions in a row; follow-ups are understood.")
    ] = False,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = None,
    system: common.System = None,
    file: common.File = None,
    details: common.Details = False,
    as_json: common.Json = False,
    model: common.DefaultModel = None,
) -> None:
    """Answer a question from a knowledge base, citing its passages, or from a long context.

    Example: specrag ask "Who discovered radium?" --kb notes-kb
    """
    if kb is not None and context and configuration.is_from_file(line, "kb"):
        kb = None
    elif kb is not None and context and configuration.is_from_file(line, "context"):
        context = None
    if kb is not None and context:
        raise InputError("--context", str(context[0]), "give a knowledge base or a context, not both")
    usual = "long-context" if context else "standard-rag"
    flags: dict[str, dict[str, Any]] = {
        "search": {"k": k, "where": where or None},
        "generation": {"max_tokens": max_tokens, "temperature": temperature},
    }
    chosen = values.choose(line, method or usual, option, flags)
    _check_needs(chosen.method, kb, context)
    if chosen.method.retracts and (as_json or not sys.stdout.isatty()):
        raise InputError("-o early", True, "text can be taken back on a terminal only; leave it out")
    words = _first_question(question, file, chat, as_json)
    with ExitStack() as opened:
        backend: LocalBackend | RemoteBackend | None = None
        if kb is not None and not (details or as_json):
            backend = _running(chosen, kb, model, system)
        if backend is None:
            with common.status("opening"):  # torch is imported, which takes seconds
                name = common.model_name(model)
            backend = _open(chosen, kb, context, name, opened, system=system, chat=chat)
        if chat:
            Chat(backend, details).run(words)
            return
        assert words is not None
        backend.answer(words, details=details, as_json=as_json)


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A command's method with everything that it answers from.

    Attributes:
        request: without a question.
        given: models and passages.
        notes: for the user, about what was not read.
    """

    chosen: Chosen
    request: Request
    given: LocalResources
    system: str | None
    notes: tuple[str, ...]

    def without_abstaining(self) -> LocalBackend:
        """The same, except that it answers whatever its passages are about."""
        search = self.request.search.model_copy(update={"abstain": False, "min_score": None})
        return replace(self, request=replace(self.request, search=search))

    def answer(
        self,
        question: str,
        history: tuple[Any, ...] = (),
        *,
        details: bool = False,
        as_json: bool = False,
        stoppable: bool = False,
    ) -> Result:
        """Answer a question and show it, as it comes or for programs.

        Args:
            stoppable: whether Ctrl-C ends only the answer.

        Raises:
            Cancelled: Ctrl-C ended it.
        """
        from specrag.cli import render
        from specrag.methods import mark_missing_shards

        method, given = self.chosen.method, self.given
        messages = [*history, {"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        plan = method.plan(replace(self.request, prompt=messages), given)
        if not history:
            _warm_up(given.retriever, self.request.search.index)
        task = given.submit(
            mark_missing_shards(method.run(plan), given.retriever), self.chosen.generation.timeout
        )
        if as_json:
            result = given.executor.run(task)
            described = render.describe(result, method.name, given.tokenizer)
            typer.echo(json.dumps({"question": question} | described | given.describe(), ensure_ascii=False))
            return result
        with interrupts_stop(task) if stoppable else nullcontext():
            events = given.executor.stream(task)
            result = render.show(events, given.colours(details), retracts=method.retracts)
        if self.chosen.generation.log_probs is not None and given.tokenizer is not None:
            render.show_log_probs(given.tokenizer, result.tokens)
        absent = [f"partial: {name} did not answer" for name in result.missing]
        render.show_result(result, details=details, notes=(*self.notes, *absent))
        return result


def _running(chosen: Chosen, kb: str, model: str | None, system: str | None) -> RemoteBackend | None:
    """A running server on this machine that answers in this command's place; ``None`` if there is none."""
    from specrag.cli.background import wait_until_ready
    from specrag.cli.remote import RemoteBackend, find_server

    server = find_server(chosen, kb, model)
    base = None if server is None else server.base(kb)
    if server is None or base is None or not wait_until_ready(server):
        return None
    return RemoteBackend(chosen, server, base, system)


def _check_needs(method: Method, kb: str | None, context: list[Path] | None) -> None:
    """Refuse a method that lacks what it answers from.

    Raises:
        InputError: passages or a context are missing.
    """
    from specrag.methods import Needs

    if Needs.CONTEXT in method.needs and not context:
        raise InputError("--method", method.name, "it needs a long context; add --context FILE")
    if kb is None and not context:
        raise typer.BadParameter("name a knowledge base with --kb, or files with --context")
    if Needs.RETRIEVER in method.needs and kb is None:
        raise InputError("--method", method.name, "it answers from passages; name them with --kb")


def _open(
    chosen: Chosen,
    kb: str | None,
    context: list[Path] | None,
    model: str,
    opened: ExitStack,
    *,
    system: str | None,
    chat: bool,
) -> LocalBackend:
    """Open everything to answer from; all that needs no model is checked before one is loaded."""
    from specrag.cli.resources import LocalResources, open_passages
    from specrag.request import Request, check_options

    method, search = chosen.method, chosen.search
    options = chosen.generation.options()
    check_options(options)
    documents: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    if context:
        files = common.read_context(context)
        documents = tuple(files.documents)
        notes = tuple(f"not read: {entry.source}: {entry.reason}" for entry in files.skipped)
    retriever = None if kb is None else open_passages(kb, opened, search.index, search.where)
    given = LocalResources(model, chosen.model, opened, retriever=retriever, holds_documents=chat)
    given.check(method)
    if context:  # long ones need memory besides the weights
        common.check_weights(model, chosen.model)
    if kb is not None and not _is_folder(retriever):
        search = search.model_copy(update={"index": None, "where": ()})  # the store has been opened with them
    request = Request("", options, search, documents)
    return LocalBackend(chosen, request, given, system, notes)


def _is_folder(retriever: Any) -> bool:
    """Whether it is a folder, whose index and conditions are chosen for each question."""
    from specrag.retrieval import KnowledgeBase

    return isinstance(retriever, KnowledgeBase)


def _warm_up(retriever: Any, index: str | None) -> None:
    """Read index and encoder and compile loops, which a server does once, outside an answer's time."""
    if retriever is not None:
        retriever.search(["warm-up"], 1, index=index or "hybrid")


def _first_question(question: str | None, file: str | None, chat: bool, as_json: bool) -> str | None:
    """The question; ``None`` for a chat that begins with the first line of standard input."""
    if not chat:
        return common.read_prompt(question, file, raw=False)
    if as_json:
        raise InputError("--json", True, "a chat is for people; leave out --chat")
    if file is not None:
        raise InputError("--file", file, "a chat reads its questions from standard input; leave out --file")
    return None if question is None else common.read_prompt(question, None, raw=False)
