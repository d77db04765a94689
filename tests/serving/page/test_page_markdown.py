"""Markdown in answers: what becomes of it, and that nothing of it is ever read as markup."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.page.conftest import Visit

# An answer's text in pieces, as its tokens come; at every piece what is on the page is brought up to date.
SHOWN = """async (pieces) => {
    const { AnswerText } = await import("./page/answer.js");
    const root = document.createElement("div");
    document.body.append(root);
    const answer = new AnswerText(root);
    pieces.forEach((piece, index) => {
        answer.add(piece, index % 3 ? "suffix" : "target", false, index);
        answer.render();
    });
    const plain = root.cloneNode(true);
    for (const token of plain.querySelectorAll("span.token")) token.replaceWith(...token.childNodes);
    plain.normalize();
    return plain.innerHTML;
}"""

# What an answer may be made of, and what its elements may say.
STRANGE = """(markup) => {
    const page = new DOMParser().parseFromString(markup, "text/html");
    const known = new Set(["P", "H4", "UL", "OL", "LI", "PRE", "CODE", "BLOCKQUOTE", "HR", "EM", "STRONG", "DEL", "A",
        "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"]);
    const said = { OL: ["start"], H4: ["class"], TH: ["scope"], A: ["href", "target", "rel"] };
    return [...page.body.querySelectorAll("*")].filter((node) => !known.has(node.tagName)
        || [...node.attributes].some(({ name }) => !(said[node.tagName] ?? []).includes(name))
        || (node.tagName === "A" && !/^https?:$/.test(new URL(node.href).protocol)))
        .map((node) => node.outerHTML);
}"""

LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


DOUBTED = """async ([text, unheld]) => {
    const { AnswerText } = await import("./page/answer.js");
    const root = document.createElement("div");
    document.body.append(root);
    const answer = new AnswerText(root);
    answer.add(text, "target", false, 1);
    answer.render((number) => `source-${number}`, () => {}, unheld);
    return [...root.querySelectorAll(".unheld")].map((node) => [node.textContent, node.title]);
}"""


def test_what_no_cited_passage_has_is_marked(visit: Callable[..., Visit]) -> None:
    page = visit().page
    text = "**Nepal** has Nepalese hills of 8849 m, O'Brien says. [1] Not 88490 or Earthly."
    found = page.evaluate(DOUBTED, [text, ["Nepal", "8849", "O'Brien", "Earth"]])
    assert found == [[word, "In no cited passage"] for word in ("Nepal", "8849", "O'Brien")]
    assert page.evaluate(DOUBTED, [text, []]) == []


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("Two\nlines\n\nand more", "<p>Two\nlines</p><p>and more</p>"),
        ("# One\n\n### Three ###", '<h4 class="level-1">One</h4><h4 class="level-3">Three</h4>'),
        ("a *b* **c** __e__ ~~f~~", "<p>a <em>b</em> <strong>c</strong> <strong>e</strong> <del>f</del></p>"),
        ("***d*** e", "<p><strong><em>d</em></strong> e</p>"),
        ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
        ("**bold *both* bold**", "<p><strong>bold <em>both</em> bold</strong></p>"),
        ("2 * 3 * 4, snake_case_name, 5*", "<p>2 * 3 * 4, snake_case_name, 5*</p>"),
        (r"\*no\* `a*b*` ``c`d``", "<p>*no* <code>a*b*</code> <code>c`d</code></p>"),
        ("- a\n- b\n  more\n  - c", "<ul><li>a</li><li>b\nmore<ul><li>c</li></ul></li></ul>"),
        ("3. a\n4. b\n\ntext", '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>'),
        ("```py\nif a < b:\n    *c*\n```\nend", "<pre><code>if a &lt; b:\n    *c*</code></pre><p>end</p>"),
        ("```\nopen", "<pre><code>open</code></pre>"),
        ("> said\n> *so*\n\n---", "<blockquote><p>said\n<em>so</em></p></blockquote><hr>"),
        (
            "|a|b|\n|---|:-:|\n|1|**2**|\n|3|",
            '<table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead><tbody><tr><td>1</td>'
            "<td><strong>2</strong></td></tr><tr><td>3</td><td></td></tr></tbody></table>",
        ),
        ("[here](https://a.example/b_(c))", f'<p><a href="https://a.example/b_(c)" {LINK}>here</a></p>'),
        ("See https://a.example/x.", f'<p>See <a href="https://a.example/x" {LINK}>https://a.example/x</a>.</p>'),
        ("[1], as [2] says", "<p>[1], as [2] says</p>"),
    ],
)  # fmt: skip
def test_markdown_becomes_what_it_means(visit: Callable[..., Visit], text: str, markup: str) -> None:
    page = visit().page
    assert page.evaluate(SHOWN, [text]) == markup


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.injected = 1</script>",
        '<img src=x onerror="window.injected = 1">',
        "![picture](https://tracker.example/pixel.png)",
        "[click](javascript:window.injected=1)",
        "[click]( JaVaScRiPt:window.injected=1)",
        "[click](data:text/html,<script>window.injected=1</script>)",
        "[click](//elsewhere.example)",
        '[click](https://a.example/"onmouseover="window.injected=1)',
        "- > **<iframe srcdoc='<script>parent.injected=1</script>'>**",
        "```html\n<script>window.injected = 1</script>\n```",
        "|<b onclick=window.injected=1>|b|\n|-|-|\n|<svg onload=window.injected=1>|",
        "`<a href=javascript:window.injected=1>`",
    ],
)
def test_hostile_text_stays_text(visit: Callable[..., Visit], text: str) -> None:
    page = visit().page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    markup = page.evaluate(SHOWN, [text])
    assert page.evaluate(STRANGE, markup) == []
    # Every name and sign of the markup is there to be read.
    said = page.evaluate("(markup) => { const p = document.createElement('template'); p.innerHTML = markup;"
                         " return p.content.textContent; }", markup)  # fmt: skip
    for word in ("<script>", "<img", "<iframe", "<svg", "<b onclick", "![picture]", "javascript:", "onerror"):
        assert (word in text) == (word in said), word
    page.wait_for_timeout(50)
    assert page.evaluate("window.injected") is None
    assert [url for url in asked if not url.endswith(".js")] == []


def test_any_text_is_shown_and_the_same_however_it_comes(visit: Callable[..., Visit]) -> None:
    page = visit().page
    drawn = random.Random(7)
    signs = ["*", "**", "_", "~~", "`", "```", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|-|-|", "[", "](", ")", "!",
             "https://a.example", "javascript:x", "<b>", "\\", " ", "  ", "a", "b", "é", "🙂", "    "]  # fmt: skip
    for _ in range(150):
        pieces = drawn.choices(signs, k=drawn.randint(1, 40))
        grown, once = page.evaluate(SHOWN, pieces), page.evaluate(SHOWN, ["".join(pieces)])
        assert grown == once, pieces
        assert page.evaluate(STRANGE, once) == [], pieces


@pytest.mark.parametrize("sign", ["*a ", "[", "> ", "- ", "`", "![", "| ", "https://", "**a*", "_a", "\\"])
def test_a_long_text_of_signs_is_shown_soon(visit: Callable[..., Visit], sign: str) -> None:
    page = visit().page
    took: Any = page.evaluate(
        f"async (text) => {{ const show = {SHOWN}; const started = performance.now(); await show([text]);"
        " return performance.now() - started; }",
        sign * 8000,
    )
    assert took < 5000
