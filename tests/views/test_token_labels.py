"""Labels of a run's tokens: the space before a word is a part of its token, and is seen."""

from regard.tasks.pictures.token_maps import axis
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.views import printable


def test_two_numbers_side_by_side_are_not_read_as_one() -> None:
    tokenizer = ByteLevelBPE(vocab_size=300).train(["in 20 46 and in 2046 it was 20 46"] * 9)
    one, two = (axis(tokenizer, tokenizer.encode(text)).texts for text in ("in 20 46", "in 2046"))
    assert [printable(text) for text in one] == ["in", "␣20", "␣46"]
    assert "".join(one) == "in 20 46"
    assert "".join(two) == "in 2046"
    assert one != two


def test_words_and_characters_stay_as_they_are() -> None:
    words, characters = Words().train(["the cat 20 46"]), Characters().train(["a 2"])
    assert axis(words, words.encode("cat 20 46")).texts == ["cat", "20", "46"]
    assert axis(characters, characters.encode("a 2")).texts == ["a", "␣", "2"]
