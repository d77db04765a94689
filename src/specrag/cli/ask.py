"""``specrag ask QUESTION --kb DIR``: an answer from a knowledge base, with its sources."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import (
    ask_context,
    ask_options,
    ask_speculative,
    ask_standard,
    common,
    iterative,
    sampling,
    speculation,
    speculative_options,
    store,
)
from specrag.cli.iterative_answers import describe_iterative, show_iterative
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.options import Options
    from specrag.methods.retriever import PassageRetriever
    from specrag.retrieval.knowledge_base import KnowledgeBase


def ask(
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="What to ask; by default standard input.")
    ] = None,
    kb: Annotated[
        Path | None, typer.Option("--kb", metavar="DIR", help="A folder made by specrag index.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask again and again; follow-up questions are understood.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=common.integer,
            metavar="N",
            help="At most this many tokens (default 256; 128 with a retrieval every 4 tokens).",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message in front of the conversation.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="PATH", help="A file with the question; - is stdin.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(parser=common.number, metavar="SECONDS", help="End with an error after this time."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end in place of the text.")
    ] = False,
    context: ask_context.Context = None,
    eta: ask_context.Eta = None,
    gamma: ask_context.Gamma = None,
    retrieval_tokens: ask_context.RetrievalTokens = None,
    truncate_middle: ask_context.TruncateMiddle = False,
    keep_prefix: ask_context.KeepPrefix = None,
    k: ask_options.K = None,
    index: ask_options.Index = None,
    where: ask_options.Where = None,
    rerank: ask_options.Rerank = None,
    min_score: ask_options.MinScore = None,
    no_abstain: ask_options.NoAbstain = False,
    no_rewrite: ask_options.NoRewrite = False,
    temperature: sampling.Temperature = 0.0,
    top_k: sampling.TopK = 0,
    top_p: sampling.TopP = 1.0,
    seed: sampling.Seed = 0,
    pgvector: store.Url = None,
    table: store.Table = None,
    method: iterative.Method = "plain",
    stride: iterative.Stride = None,
    uncapped: iterative.Uncapped = False,
    prefetch: iterative.Prefetch = None,
    asynchronous: iterative.Asynchronous = False,
    early: iterative.Early = False,
    decoder: iterative.Decoder = None,
    drafter: speculation.Drafter = None,
    corpus: speculation.Corpus = None,
    verifier: speculative_options.Verifier = None,
    drafts: speculative_options.Drafts = None,
    passages: speculative_options.Passages = None,
    strategy: speculative_options.Strategy = None,
    evidence: speculative_options.Evidence = None,
    without: speculative_options.Without = None,
    length_normalized: speculative_options.LengthNormalized = False,
    option: speculative_options.Option = None,
    claim: speculative_options.Claim = False,
    show_drafts: speculative_options.ShowDrafts = False,
    relaxed: speculation.Relaxed = False,
    tolerance: speculation.Tolerance = 3.0,
    show_sources: speculation.ShowSources = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
    adapter: common.Adapter = None,
    batch_invariant: common.BatchInvariant = False,
    kv_dtype: common.KvDtype = "auto",
) -> None:
    """Answer a question from a knowledge base, citing its passages, or from a long context.

    Example: specrag ask "Who discovered radium?" --kb notes-kb
    """
    from specrag.language_model import load
    from specrag.methods.options import check_options
    from specrag.retrieval.filters import parse_conditions
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.single_index import SingleIndex

    options: Options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if timeout is not None:
        options["timeout"] = timeout
    own = ask_speculative.Own(
        verifier, drafts, passages, strategy, evidence, without, length_normalized, option, claim, show_drafts
    )
    asked = ask_context.choose(
        context,
        method=method,
        drafter=drafter,
        eta=eta,
        gamma=gamma,
        retrieval_tokens=retrieval_tokens,
        index=index,
        truncate_middle=truncate_middle,
        keep_prefix=keep_prefix,
        system=system,
    )
    if asked is not None:
        asked.refuse(
            {
                "--kb": None if kb is None else str(kb),
                "--pgvector": pgvector,
                "--table": table,
                "-k": k,
                "--where": where,
                "--rerank": rerank,
                "--min-score": min_score,
                "--no-abstain": no_abstain,
                "--no-rewrite": no_rewrite,
                "--stride": stride,
                "--decoder": decoder,
            }
        )
        ask_speculative.refuse(own.given(), method)
        reading = asked.decoding(
            lambda: speculation.method_of(method, drafter, relaxed, tolerance, corpus), temperature
        )
        settings = asked.settings()
        check_options(options)
        asking = _first_question(question, file, chat, as_json)
        files = ask_context.read(asked)
        ask_context.check_weights(model, dtype, device)
        llm = load(
            model,
            dtype=dtype,
            device=device,
            adapter=adapter,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
            progress=sys.stderr.isatty(),
        )
        made = asked.make(llm, reading, settings, reuse=chat)
        if chat:
            ask_context.chat(made, files, asking, options)
            return
        assert asking is not None
        colours = _colours(llm, show_sources)
        ask_context.answer(asked, made, files, asking, options, colours, as_json=as_json)
        return
    speculation.check_method(method, *iterative.METHODS, speculative_options.SPECULATIVE_RAG)
    if method == speculative_options.SPECULATIVE_RAG:
        others: dict[str, object] = {
            "--pgvector": pgvector,
            "--table": table,
            "--chat": chat,
            "--system": system,
            "--corpus": corpus,
        }
        others |= {"--temperature": temperature or None, "--show-sources": show_sources, "--relaxed": relaxed}
        others |= {
            "--stride": stride,
            "--prefetch": prefetch,
            "--early": early,
            "--asynchronous": asynchronous,
        }
        ask_speculative.refuse(others, method)
        searched = _index(index, kb, None, None, iterates=False)
        ask_speculative.answer(
            own,
            ask_standard.StandardChoice(
                k, searched, rerank, min_score, no_abstain, rewrite=False, system=None
            ),
            ask_speculative.Models(
                model, drafter, decoder, dtype, device, adapter, batch_invariant, kv_dtype
            ),
            common.read_prompt(question, file, raw=False),
            kb,
            parse_conditions(where or ()),
            max_tokens=max_tokens,
            timeout=timeout,
            seed=seed,
            as_json=as_json,
        )
        return
    ask_speculative.refuse(own.given(), method)
    chosen = iterative.choose(
        method,
        stride=stride,
        prefetch=prefetch,
        asynchronous=asynchronous,
        uncapped=uncapped,
        early=early,
        decoder=decoder,
        as_json=as_json,
    )
    if chosen is not None:
        chosen.refuse(
            {
                "--chat": chat,
                "-k": k,
                "--rerank": rerank,
                "--min-score": min_score,
                "--no-abstain": no_abstain,
                "--no-rewrite": no_rewrite,
            }
        )
    decoding = speculation.method_of(
        chosen.decoder if chosen else method, drafter, relaxed, tolerance, corpus
    )
    # All that can be wrong without the model is said before it is fetched and loaded.
    check_options({**options, "method": decoding})
    searched = _index(index, kb, pgvector, table, iterates=chosen is not None)
    standard = ask_standard.StandardChoice(
        k, searched, rerank, min_score, no_abstain, rewrite=not no_rewrite, system=system
    )
    if chosen is None:
        standard.check()
    words = _first_question(question, file, chat, as_json)
    conditions = parse_conditions(where or ())
    with ExitStack() as opened:
        base: KnowledgeBase | None = None
        retriever: PassageRetriever | None = None
        if kb is None:
            retriever = opened.enter_context(store.open_store(pgvector, table, searched, where=conditions))
        else:
            base = opened.enter_context(KnowledgeBase.open(kb))
            base.allowed(conditions)
            if chosen is None:
                standard.passages(base)
            else:
                retriever = SingleIndex(base, searched, conditions)
        if chosen is not None and retriever is not None:
            chosen.check(retriever)
        llm = load(
            model,
            dtype=dtype,
            device=device,
            adapter=adapter,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
            progress=sys.stderr.isatty(),
        )
        colours = _colours(llm, show_sources)
        if chosen is not None and retriever is not None:
            assert words is not None
            iterating = chosen.make(llm, retriever, decoding, system)
            iterating.check(words, **options)
            iterative.warm_up(retriever)
            if not as_json:
                show_iterative(iterating.stream(words, **options), colours, early=early)
                return
            described = describe_iterative(words, iterating.answer(words, **options))
            _print_json(described | {"method": method, "decoder": chosen.decoder, "index": searched}, llm)
            return
        assert base is not None
        options["method"] = decoding
        rag = standard.make(llm, base, conditions)
        if chat:
            ask_standard.chat(rag, words, options)
            return
        assert words is not None
        if as_json:
            _print_json(ask_standard.describe(rag, words, options) | {"method": method}, llm)
        else:
            ask_standard.answer(rag, words, options, colours)


def _index(
    name: str | None, kb: Path | None, pgvector: str | None, table: str | None, *, iterates: bool
) -> str:
    """The index that is searched, after a check of where it is.

    Raises:
        InputError: there is no knowledge base, there are two, or the method cannot use a table.
    """
    if pgvector is None and table is None:
        if kb is None:
            raise typer.BadParameter(
                "name a knowledge base with --kb, a table of PostgreSQL with --pgvector, or files with --context"
            )
        return name or "hybrid"
    option, value = ("--pgvector", pgvector) if pgvector is not None else ("--table", table)
    if kb is not None:
        raise InputError(option, value, "give a folder with --kb or a table, not both")
    if not iterates:
        raise InputError(
            option, value, f"add --method {iterative.RALMSPEC}; other methods need a folder, --kb"
        )
    return name or "flat"


def _print_json(described: dict[str, object], llm: LanguageModel) -> None:
    loaded = llm.loaded
    described |= {"model": loaded.name, "dtype": loaded.dtype, "device": loaded.device}
    typer.echo(json.dumps(described, ensure_ascii=False))


def _colours(llm: LanguageModel, wanted: bool) -> speculation.SourceColours | None:
    from specrag.models.tokenizer import TextStream

    return speculation.SourceColours(TextStream(llm.tokenizer)) if wanted else None


def _first_question(question: str | None, file: str | None, chat: bool, as_json: bool) -> str | None:
    """The question; ``None`` for a chat that begins with the first line of standard input."""
    if not chat:
        return common.read_prompt(question, file, raw=False)
    if as_json:
        raise InputError("--json", True, "a chat is for people; leave out --chat")
    if file is not None:
        raise InputError("--file", file, "a chat reads its questions from standard input; leave out --file")
    return None if question is None else common.read_prompt(question, None, raw=False)
