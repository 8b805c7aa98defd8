"""HTML is one document: its text is translated, and all else comes back as it was."""

import html

import pytest

from regard.tasks.translation.documents import cut_html, put_together
from regard.tasks.translation.options import Request
from tests.fuzz.serving.documents import Parsed
from tests.serving.conftest import Running

QUESTION = {"source": "en", "target": "fr", "format": "html"}


def translated(server: Running, document: str) -> str:
    text = server.json("/translate", QUESTION | {"q": document})["translatedText"]
    assert isinstance(text, str)
    return text


KEPT = {
    "a tag over two lines": ('we see <a\nhref="x">two</a> cats', '<a\nhref="x">'),
    "a comment over two lines": ("<!-- we see\n two -->\nwe see", "<!-- we see\n two -->\n"),
    "a script": ("<script>\nsee('two');\n</script>we see", "<script>\nsee('two');\n</script>"),
    "a style": ("<style>\np { color: red }\n</style>we see", "<style>\np { color: red }\n</style>"),
    "a doctype": ("<!DOCTYPE html>\r\n<p>we see</p>", "<!DOCTYPE html>\r\n<p>"),
    "code": ("we see <code>two cats</code> here", "<code>two cats</code>"),
    "pre": ("<pre>we see\n  two</pre>", "<pre>we see\n  two</pre>"),
    "translate=no": ('we see <b translate="no">two <i>cats</i></b>', '<b translate="no">two <i>cats</i></b>'),
    "notranslate": ('we see <b class="x notranslate">two</b>', '<b class="x notranslate">two</b>'),
    "an item that the next one ends": ("<ul><li translate=no>we see<li>we see</ul>", "<li translate=no>we see<li>"),
    "other bytes in tags": ("<p title='e\u0301\u00a0'>we see</p>", "<p title='e\u0301\u00a0'>"),
}


@pytest.mark.parametrize(("document", "kept"), KEPT.values(), ids=KEPT)
def test_what_is_no_text_comes_back_as_it_was(server: Running, document: str, kept: str) -> None:
    answer = translated(server, document)
    assert kept in answer
    assert sorted(Parsed(answer).tags) == sorted(Parsed(document).tags)


def test_a_block_is_one_text(server: Running) -> None:
    plain = server.json("/translate", QUESTION | {"q": "we see two cats", "format": "text"})["translatedText"]
    answer = translated(server, "<p>\n  we see\n  two cats\n</p><p>we see two cats</p>")
    assert "".join(answer.split()) == f"<p>{''.join(plain.split())}</p>" * 2
    assert answer.count("\n") == 3


def test_text_within_what_is_kept_may_be_translated_again() -> None:
    cut = cut_html("<div translate=no>we <p translate=yes>see</p> two</div>")
    assert [one if isinstance(one, str) else [one.source] for one in cut] == [
        "<div translate=no>we ",
        "<p translate=yes>",
        ["see"],
        "</p>",
        " two</div>",
    ]


def test_escaped_markup_stays_text(server: Running) -> None:
    plain = server.json("/translate", QUESTION | {"q": "we <b> see & two", "format": "text"})["translatedText"]
    answer = translated(server, "we &lt;b&gt; see &amp; two")
    assert (html.unescape(answer), "<b>" in answer) == (plain, False)


def test_a_translation_in_html_is_escaped_and_one_of_text_is_not() -> None:
    assert Request("", pieces=()).escaped("a < b & c") == "a &lt; b &amp; c"
    assert Request("").escaped("a < b & c") == "a < b & c"


def test_texts_keep_their_line_ends(server: Running) -> None:
    for document in ("we see\r\n\r\ntwo\rcats\n", "\r\n", "", "\n\nwe see"):
        answer = server.json("/translate", QUESTION | {"q": document, "format": "text"})["translatedText"]
        assert [answer.count(end) for end in ("\r\n", "\r", "\n")] == [
            document.count(end) for end in ("\r\n", "\r", "\n")
        ]


def test_what_is_cut_is_the_document() -> None:
    for document in ("<p>we <b>see<p>two</b> a <", "a<!--", "<b", "</", "&#<br>x", "a <b>c <i>d</b> e</i>\r\n<td>"):
        cut = cut_html(document)
        assert put_together(cut, [one.source for one in cut if not isinstance(one, str)]) == document
