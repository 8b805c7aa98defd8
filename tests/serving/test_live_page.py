"""The live page in Chromium: a teacher, a translator and a researcher, by light and dark, at three widths."""

import re
from pathlib import Path
from typing import Any

import pytest

from regard.serving.served import example_texts
from tests.serving.conftest import TRANSLATOR, WRITER, Running
from tests.views.chromium import Chromium
from tests.views.test_page_access import AXE, serious

DRAWN = "document.querySelector('#regard .heads')?.dataset.drawn && document.getElementById('stop').disabled"


def opened(browser: Chromium, server: Running, *, width: int = 1280, dark: bool = False) -> None:
    browser.size(width, 900)
    browser.dark(dark)
    browser.open(f"{server.address}/")
    browser.run("await regardStarted;")


def type_and_answer(browser: Chromium, text: str, model: str = TRANSLATOR, more: str = "") -> str:
    browser.run(f"""
      const set = (id, value) => {{
        document.getElementById(id).value = value;
        document.getElementById(id).dispatchEvent(new Event("change"));
      }};
      if (document.getElementById("model").value !== "{model}") set("model", "{model}");
      set("text", {text!r}); {more}
      document.getElementById("go").click();""")
    settle(browser)
    return answers(browser)[0]


def settle(browser: Chromium) -> None:
    browser.until(f"{DRAWN} && document.getElementById('status').textContent !== 'Stopped.'")
    browser.run("await regard().ready;")
    assert browser.errors == []


def answers(browser: Chromium) -> list[str]:
    found: list[str] = browser.run("return [...document.querySelectorAll('.said > p')].map((one) => one.textContent);")
    return found


def expected(server: Running, **question: Any) -> str:
    _, body, _ = server.ask("/regard/v1/answer", question)
    return body.decode().rpartition('"text":"')[2].partition('"')[0]


def test_a_teacher_types_by_the_keyboard_alone(browser: Chromium, server: Running) -> None:
    opened(browser, server)
    browser.run("document.getElementById('model').focus();")
    reached = []
    for _ in range(3):
        browser.press("Tab")
        reached.append(browser.run("return document.activeElement.id;"))
    assert reached == ["other", "text", "go"]
    browser.run("document.getElementById('text').focus();")
    browser.call("Input.insertText", text="we see two cats")
    browser.press("Enter")
    browser.until(DRAWN)
    settle(browser)
    assert answers(browser) == [expected(server, text="we see two cats")]
    # Every weight of a row comes from the server, and they are those of the model.
    row = """const chosen = { kind: "decoder cross", layer: "0", heads: [1] };
      regard().changed({ ...chosen, focus: { row: 1 }, pinned: true });
      await new Promise((done) => setTimeout(done, 100));
      return [...document.querySelectorAll(".reading li")].map((item) => item.textContent);"""
    browser.run(row)
    (strongest, *_) = browser.run(row)
    tokens = browser.run("return document.querySelectorAll('.written button').length;")
    asked = {"text": "we see two cats", "maps": ["decoder.0.cross"], "heads": [1], "target": answers(browser)[0]}
    found = server.json("/regard/v1/attention", asked | {"top_keys": 1})["heads"][0]
    assert found["queries"] == tokens
    assert f"{found['top_weights'][1][0]:.3f}" in strongest, strongest


WORDS = """return [document.title, ...["title", "go", "given"].map((id) => document.getElementById(id).textContent)]
    .join("|");"""
EXAMPLES = "return [...document.querySelectorAll('#try:not([hidden]) #examples button')].map((one) => one.textContent);"


def test_the_page_begins_with_an_answer_in_the_words_of_the_model(browser: Chromium, server: Running) -> None:
    opened(browser, server)
    settle(browser)
    examples = server.desk.models[TRANSLATOR].examples
    assert browser.run(EXAMPLES) == examples == ["we see one cats", "we see one trees", "we see one stars"]
    assert answers(browser) == [expected(server, text=examples[0])]
    assert "Press a word" in browser.run("return document.querySelector('.said .hint').textContent;")
    pair = "English to French"
    assert browser.run(WORDS).startswith(f"{pair} · regard|{pair}: translate a text, and see what")
    assert browser.run("return document.body.innerText.match(/Temperature/g).length;") == 1
    for _ in range(9):
        browser.press("Tab")
        if browser.run("return document.activeElement.textContent;") == examples[1]:
            break
    browser.press("Enter")
    settle(browser)
    assert answers(browser) == [expected(server, text=examples[1])]
    # Nothing of one model is shown under the name of another.
    browser.run(f"""const one = document.getElementById("model"); one.value = "{WRITER}";
                    one.dispatchEvent(new Event("change"));""")
    assert browser.run(WORDS).startswith(f"{WRITER} · regard|{WRITER}: continue a text, and see what")
    settle(browser)
    text = server.desk.models[WRITER].examples[0]
    assert browser.run(EXAMPLES)[0] == text
    assert answers(browser) == [expected(server, model=WRITER, text=text, max_tokens=24)]


def test_a_model_without_examples_says_how_to_begin(
    browser: Chromium, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.desk.models[WRITER], "examples", [])
    opened(browser, server)
    settle(browser)
    browser.run(f"""const one = document.getElementById("model"); one.value = "{WRITER}";
                    one.dispatchEvent(new Event("change"));""")
    assert browser.run(EXAMPLES) == answers(browser) == []
    assert browser.run("return document.getElementById('status').textContent;").startswith("Type the beginning")


def test_no_style_of_the_page_around_is_one_of_the_view(server: Running) -> None:
    """The styles of the live page also reach into the view: a class of both has the sizes of both."""
    _, style, _ = server.ask("/live.css")
    around, within = (set(re.findall(rf"^\.{name} \.(\w+)", style.decode(), re.M)) for name in ("live-page", "regard"))
    assert around & within == set()
    assert min(len(around), len(within)) > 2


def test_examples_are_sentences_as_they_were_written(server: Running, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = next(tmp_path_factory.getbasetemp().glob(f"served*/{TRANSLATOR}"))
    texts = run / "data" / "valid.jsonl"
    before = texts.read_text()
    try:
        texts.write_text('{"source": "I zzyzx  you, naïve one.", "target": "x"}\n')  # words that no tokenizer knows
        assert example_texts(run, "translation") == ["I zzyzx  you, naïve one."]
    finally:
        texts.write_text(before)
    lines = run.parent / WRITER
    assert all("\ufffd" not in text and text for text in example_texts(lines, "language-model"))


def test_a_translator_forces_another_word_and_sees_the_alignment_change(browser: Chromium, server: Running) -> None:
    opened(browser, server, width=768)
    before = type_and_answer(browser, "we see two cats")
    browser.run("document.querySelectorAll('.written button')[2].click();")
    others = "return [...document.querySelectorAll('.alternative')].map((one) => one.textContent);"
    assert len(browser.run(others)) == 3
    cells = "return [...regard().cells().values].join(' ');"
    first = browser.run(cells)
    browser.run("document.querySelector('.alternative').click();")
    browser.until("document.getElementById('prefix').value && document.getElementById('stop').disabled")
    settle(browser)
    (after,) = answers(browser)
    assert after != before
    assert after.startswith(browser.run("return document.getElementById('prefix').value;"))
    assert browser.run(cells) != first


def test_a_researcher_cuts_a_head_and_sees_both(browser: Chromium, server: Running) -> None:
    opened(browser, server)
    type_and_answer(browser, "1 and 2", WRITER)
    browser.run("regard().changed({ layer: '0', heads: [1] }); document.getElementById('cut').click();")
    browser.until("document.querySelectorAll('.said').length === 2 && regard()?.state().view === 'compare'")
    settle(browser)
    edits = [{"map": "decoder.0", "head": 1, "factor": 0}]
    common: dict[str, Any] = {"text": "1 and 2", "model": WRITER, "max_tokens": 24}
    assert answers(browser) == [expected(server, **common), expected(server, **common, edits=edits)]
    browser.run("regard().changed({ temperature: 2 }); await new Promise((done) => setTimeout(done, 200));")
    assert "Recomputed: temperature 2" in browser.run("return document.querySelector('.reading').textContent;")
    browser.run("document.querySelector('#edits button').click();")
    browser.until("document.querySelectorAll('.said').length === 1")
    settle(browser)


def test_two_models_answer_side_by_side(browser: Chromium, server: Running) -> None:
    opened(browser, server)
    more = f"document.getElementById('other').value = '{WRITER}';"
    type_and_answer(browser, "we see two cats", TRANSLATOR, more)
    assert len(answers(browser)) == 2
    assert browser.run("return document.querySelectorAll('#regard .choices label:first-child option').length;") == 2


def test_the_page_keeps_within_its_policy_and_tells_errors(browser: Chromium, server: Running) -> None:
    opened(browser, server)
    settle(browser)
    shown = "return ['regard', 'heads'].map((id) => document.getElementById(id).hidden);"
    assert browser.run(shown) == [False, False]
    browser.run("document.getElementById('text').value = ' '; document.getElementById('go').click();")
    browser.until("document.getElementById('status').textContent.includes('empty')")
    assert browser.run(shown) == [True, True]  # nothing of the text before
    broken = [one for one in browser.errors if "400" not in one]
    assert broken == []


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: `make browser` installs it")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious_in_the_live_page(browser: Chromium, server: Running, dark: bool) -> None:
    for width in (1280, 768, 360):
        opened(browser, server, width=width, dark=dark)
        type_and_answer(browser, "we see two cats")
        assert browser.run("return document.documentElement.scrollWidth;") <= width
        assert browser.run("return document.querySelector('#regard').dataset.theme;") == ("dark" if dark else "light")
        # The policy of the page, rightly, keeps the tool's script out: it comes by the protocol.
        assert serious(browser) == [], width
    browser.dark(False)
    assert Path(AXE).is_file()
