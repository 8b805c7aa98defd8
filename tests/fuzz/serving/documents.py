"""The ground `documents`: HTML, also ill formed, is translated; the answer parses to the same tags."""

from html.parser import HTMLParser
from typing import Any

from hypothesis import note

from tests.fuzz.drawing import Drawn
from tests.fuzz.serving.served import client

WORDS = (
    "we see",
    "two cats.",
    "l'été",
    "木",
    "&amp;",
    "&nbsp;",
    "3 &lt; 4",
    "&eacute;",
    "{n}",
    "100 %",
    "&#8217;",
    "é",
)
LINE_ENDS = ("\n", "\r\n", "\n  ", "\r")
ATTRIBUTES = (
    "",
    ' class="a b"',
    " title='x > y'",
    '\nhref="?a=1&amp;b=2"',
    " disabled",
    " translate=yes",
    ' alt="a\nb"',
)
KEPT = (
    "<!-- we <b>see</b>\ntwo -->", "<script>if (a < b)\n we('see');</script>", "<style>p > b { color: red }</style>",
    "<code>we <i>see</i></code>", "<pre>we\n  see two</pre>", '<span translate="no">we see <b>two</b></span>',
    "<b class='x notranslate'>we see</b>", "<p translate=no>we<br>see</p>", "<textarea>we\nsee</textarea>",
    "<ul translate='no'><li>we<li>see</ul>", "<CODE>we see</CODE>", "<svg><text>we see</text></svg>",
)  # fmt: skip
ALONE = ("<br>", "<br/>", "<img src=x alt='two cats'>", "<hr>", "<wbr>", "<input value='we see'>")
BROKEN = (
    "<",
    "</b>",
    "<b>",
    "<p>",
    "</p>",
    "<3",
    "&",
    "<!x",
    "</",
    "<i",
    "a < b",
    "]]>",
    "<a b='",
    "<!--",
    "<?x>",
    "&#",
)
INLINE, BLOCKS = ("b", "i", "a", "span", "x-y"), ("p", "div", "li", "td", "h1")


class Parsed(HTMLParser):
    """The tags of a document, in order and by kind, and what is no text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[Any] = []
        self.others: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", ()))

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.others.append(data)

    def handle_decl(self, decl: str) -> None:
        self.others.append(decl)

    handle_pi = unknown_decl = handle_comment

    def of(self, *names: str) -> list[Any]:
        """The tags of some elements, in order."""
        return [one for one in self.tags if one[0].strip("/") in names]


def case(drawn: Drawn) -> None:
    """One document."""
    document, kept = _drawn(drawn, 3, is_broken=drawn.chance(3))
    note(f"document: {document!r}")
    answer = client().post("/translate", json={"q": document, "source": "en", "target": "fr", "format": "html"})
    if answer.status_code == 400:
        assert "tokens" in answer.json()["error"], answer.text
        return
    assert answer.status_code == 200, answer.text
    found = answer.json()["translatedText"]
    note(f"answer: {found!r}")
    before, after = Parsed(document), Parsed(found)
    assert sorted(after.tags, key=str) == sorted(before.tags, key=str), "the tags are others"
    assert sorted(after.others) == sorted(before.others), "what is no text has changed"
    assert after.of(*BLOCKS) == before.of(*BLOCKS), "the blocks are in another order"
    for one in kept:
        assert found.count(one) >= kept.count(one), f"{one!r} is not as it was"
    for end in "\n\r":
        assert found.count(end) == document.count(end), f"the line ends {end!r} are not as they were"


def _drawn(drawn: Drawn, depth: int, *, is_broken: bool) -> tuple[str, list[str]]:
    """Some parts in a row, and those of them that stay as they are."""
    text, kept = "", list[str]()
    for _ in range(drawn.number(1, 4)):
        kind = drawn.number(0, 6 if is_broken else 5)
        if kind <= 1:
            text += drawn.of(("", " ", *LINE_ENDS)) + " ".join(drawn.some(WORDS, 4)) + drawn.of(("", " ", *LINE_ENDS))
        elif kind == 2 and depth:
            name, attribute = drawn.of(INLINE + BLOCKS), drawn.of(ATTRIBUTES)
            inner, more = _drawn(drawn, depth - 1, is_broken=is_broken)
            text, kept = f"{text}<{name}{attribute}>{inner}</{name}>", kept + more
        elif kind == 3:
            text += drawn.of(ALONE)
        elif kind == 6:
            text, kept = text + drawn.of(BROKEN), kept
        else:
            one = drawn.of(KEPT)
            text, kept = text + one, [*kept, *([] if is_broken else [one])]
    return text, kept
