"""Metrics against the library they follow, and against values worked out by hand from the published scripts."""

from __future__ import annotations

import json
import sys

import pytest
from rouge_score.rouge_scorer import RougeScorer

from eval.metrics import METRICS
from retrieval.errors import ExtraMissing, SettingError

em, f1, rouge_l, label, held = (METRICS[name] for name in ("em", "f1", "rouge_l", "label", "held"))


# --- every metric -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_the_best_accepted_answer_counts_and_an_answer_is_as_good_as_itself(name):
    metric = METRICS[name]
    assert metric("Lake Drenn", ["a copper roof", "Lake Drenn"]) == 1.0
    assert metric("德伦湖", ["铜屋顶", "德伦湖"]) == 1.0
    assert metric("something else", ["a copper roof", "Lake Drenn"]) == 0.0
    assert metric("", ["Lake Drenn"]) == 0.0


@pytest.mark.parametrize("name", METRICS)
def test_nothing_accepted_is_refused(name):
    with pytest.raises(SettingError, match="no accepted answer"):
        METRICS[name]("Lake Drenn", [])


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_between_0_and_1_on_real_sets(name, data):
    for file in ("squad_xquad_en", "xquad_zh"):
        lines = (data / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()[:20]
        for row, other in zip(map(json.loads, lines), map(json.loads, lines[1:]), strict=False):
            assert METRICS[name](row["answers"][0], row["answers"]) == 1.0
            assert 0.0 <= METRICS[name](other["answers"][0], row["answers"]) <= 1.0
            assert 0.0 <= METRICS[name](row["contexts"][0]["text"], row["answers"]) <= 1.0


@pytest.mark.parametrize("name", ["em", "f1", "label", "held"])
def test_only_the_first_line_of_a_short_answer_counts(name):
    assert METRICS[name]("\n Lake Drenn\n\nQuestion: Who steers the ferry?\nAnswer: Mira Tolle", ["Lake Drenn"]) == 1.0
    assert METRICS[name]("Nobody knows.\nLake Drenn", ["Lake Drenn"]) == 0.0


# --- SQuAD --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "accepted", "exact", "words"),
    [
        ("The cat", "a cat", 1, 1.0),  # articles
        ("theatre", "atre", 0, 0.0),  # only whole words are articles
        ("  New   York\t", "new york", 1, 1.0),  # case and white space
        ("New York!", '"New York"', 1, 1.0),  # punctuation
        ("state-of-the-art", "state of the art", 0, 0.0),  # punctuation leaves no space behind
        ("U.S.", "US", 1, 1.0),
        ("$1,000", "1000", 1, 1.0),
        ("3.5 percent", "35 percent", 1, 1.0),  # the script drops the point too
        ("3", "three", 0, 0.0),  # numbers are words
        ("1999 2000", "2000", 0, 2 / 3),
        ("in the city of Drenn", "Drenn", 0, 2 / 5),
        ("red red blue", "red blue blue", 0, 2 * 2 / 6),  # each as often as in both
        ("blue red", "red blue", 0, 1.0),  # in any order
        ("naïve Zoë", "naive zoë", 0, 0.5),  # accents stay
        ("“Drenn”", "Drenn", 0, 0.0),  # the script knows ASCII punctuation alone
        ("", "", 1, 1.0),
        ("the", "", 1, 1.0),  # nothing is left of it
        ("", "Drenn", 0, 0.0),
        ("Drenn", "the", 0, 0.0),
    ],
)
def test_squad_by_hand(answer, accepted, exact, words):
    assert em(answer, [accepted]) == exact
    assert f1(answer, [accepted]) == pytest.approx(words)
    assert f1(accepted, [answer]) == pytest.approx(words), "F1 is symmetric"


# --- Chinese ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "accepted", "exact", "words"),
    [
        ("北京", "北京。", 1, 1.0),  # punctuation of both kinds
        ("《红楼梦》", "红楼梦", 1, 1.0),
        ("北京 大学", "北京大学", 1, 1.0),  # white space
        ("中国北京", "北京", 0, 2 * 2 / 6),
        ("京北", "北京", 0, 2 * 1 / 4),  # the longest run, not all characters in any order
        ("北方的京城", "北京", 0, 2 * 1 / 7),
        ("1956年", "1956", 0, 2 * 1 / 3),  # a number is one word beside Chinese
        ("1956", "1956年", 0, 2 * 1 / 3),
        ("195年", "1956年", 0, 2 * 1 / 4),
        ("Windows XP系统", "windows xp", 0, 2 * 2 / 6),  # Latin words whole, each Chinese character alone
        ("广州", "上海", 0, 0.0),
        ("。", "北京", 0, 0.0),
        ("さくら", "さくら咲く", 0, 2 * 3 / 8),  # kana
    ],
)
def test_chinese_by_hand(answer, accepted, exact, words):
    assert em(answer, [accepted]) == exact
    assert f1(answer, [accepted]) == pytest.approx(words)


# --- ROUGE-L ------------------------------------------------------------------------------------------


SUMMARIES = [
    ("The committee agreed to fund the bridge.", "The committee decided that the bridge would be funded next year."),
    ("police killed the gunman", "the gunman kill police"),
    ("Line one.\nLine two, which is longer.", "Line two is longer.\nLine one."),
    ("running runs ran", "run runner running"),  # stems do not count
    ("", "nothing was said"),
    ("...", "nothing was said"),
    ("It's 3.5 %, they said - twice", "They said it was 3.5 % twice"),
]


@pytest.mark.parametrize(("answer", "accepted"), SUMMARIES)
def test_rouge_l_is_the_librarys(answer, accepted):
    library = RougeScorer(["rougeL"], use_stemmer=False)
    assert rouge_l(answer, [accepted]) == library.score(accepted, answer)["rougeL"].fmeasure
    both = ["something", accepted]
    assert rouge_l(answer, both) == library.score_multi(both, answer)["rougeL"].fmeasure


def test_rouge_l_of_a_published_pair():
    # Lin 2004, section 3.1: "police killed the gunman" and "police kill the gunman" share three of four words in order.
    assert rouge_l("police kill the gunman", ["police killed the gunman"]) == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", ["police killed the gunman"]) == pytest.approx(0.5)


def test_rouge_l_of_chinese_goes_by_character():
    spaced = RougeScorer(["rougeL"], tokenizer=type("Spaces", (), {"tokenize": lambda self, text: text.split()})())
    score = spaced.score("委 员 会 同 意 出 资 建 桥", "委 员 会 决 定 建 桥")["rougeL"].fmeasure
    assert rouge_l("委员会决定建桥。", ["委员会同意出资，建桥。"]) == pytest.approx(score)
    assert score == pytest.approx(2 * 5 / 16)


def test_rouge_l_without_the_library_names_the_extra(monkeypatch):
    from eval.metrics import rouge

    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    rouge._scorer.cache_clear()
    with pytest.raises(ExtraMissing, match=r'pip install "kvblend\[eval\]"'):
        rouge_l("a bridge", ["a bridge"])
    rouge._scorer.cache_clear()


# --- labels and answers in sentences ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("card_arrival", 1),
        ("card arrival", 1),
        (" Card Arrival.\n", 1),
        ('"card_arrival"', 1),
        ("Intent: card_arrival", 1),
        ("card_arrival or card_linking", 0),
        ("card_arrival, card_linking", 0),
        ("wrong_card_arrival", 0),
        ("card", 0),
        ("The intent is card_arrival", 0),
        ("card_linking: card_arrival is another", 0),
        ("", 0),
    ],
)
def test_a_label_and_no_other(answer, right):
    assert label(answer, ["card_arrival"]) == right


def test_a_label_with_punctuation_of_its_own():
    assert label("reverted card payment", ["reverted_card_payment?"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "accepted", "stands"),
    [
        ("It is steered by Mira Tolle, I think.", "Mira Tolle", 1),
        ("It is steered by mira  tolle", "Mira Tolle", 1),
        ("Tolle, Mira", "Mira Tolle", 0),
        ("In 1956 it burned", "1956", 1),
        ("In 1956 it burned", "195", 0),
        ("It cost $1,000.", "$1,000", 1),
        ("It is state-of-the-art", "art", 1),
        ("它建于1956年。", "1956年", 1),
        ("它建于1956年。", "1956", 1),
        ("它位于中国北京。", "北京", 1),
        ("它位于京北。", "北京", 0),
        ("", "Drenn", 0),
    ],
)
def test_an_answer_that_stands_in_a_sentence(answer, accepted, stands):
    assert held(answer, [accepted]) == stands
