"""Sets and tasks: every source of examples, what is read from it, and what is said about one that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from blend.errors import KVBlendError
from blend.testing.tokenizers import tiny_tokenizer
from blend.text import PromptText
from eval.tasks import TASKS, DataError, load_set
from eval.tasks.longbench import CHARACTERS, cut
from eval.tasks.needle import Kind
from eval.tasks.registry import HUB

KINDS = Kind.__args__

SHARED = {
    "2wikimqa": "2wikimqa",
    "banking77": "banking77",
    "cmrc2018": "cmrc2018",
    "hotpotqa": "hotpotqa",
    "musique": "musique",
    "musique_s": "musique",
    "nq_open": "nq_open",
    "qmsum": "qmsum",
    "squad_xquad_en": "squad",
    "wikimqa_s": "2wikimqa",
    "xquad_zh": "xquad_zh",
}
"""Files of the data folder, and the task of each."""

CHINESE = ("cmrc2018", "xquad_zh")


def line(**changes):
    """A line of a set in JSONL."""
    row = {
        "id": "q1",
        "task": "qa",
        "question": "Who lights the lamps?",
        "answers": ["the keeper"],
        "contexts": [
            {"title": "Pier", "text": "Its lamps are lit by the keeper.", "is_gold": True},
            {"title": "", "text": "Bread here is grey.", "is_gold": False},
        ],
    }
    return json.dumps({**row, **changes})


def write(folder, *lines, name="mine.jsonl"):
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def prompt_of(text, task, asked):
    return text.prompt(asked.question, [task.write(c) for c in asked.contexts], system=task.system, ask=task.ask)


def assert_prompts(dataset):
    """Every example makes a prompt of one chunk per context; unigrams, as they have an unknown token for Chinese."""
    text = PromptText(tiny_tokenizer("unigram"))
    for asked in dataset.examples:
        assert len(prompt_of(text, dataset.task, asked).chunks) == len(asked.contexts)


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_whole(name):
    task = TASKS[name]
    assert task.name == name
    assert task.title
    assert task.system.strip()
    assert task.ask.count("{question}") == 1
    assert 8 <= task.tokens <= 64
    assert set(task.metrics) <= {"f1", "em", "rouge_l", "label", "held"}
    assert len(set(task.metrics)) == len(task.metrics)


def test_every_hub_set_has_a_task():
    assert set(HUB) <= set(TASKS)
    assert set(TASKS) - set(HUB) == {"qa", "qmsum", "needle", "demo"}


# --- the data folder ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), SHARED.items())
def test_shared_sets(data, monkeypatch, name, task):
    monkeypatch.setenv("KVBLEND_DATA", str(data))
    dataset = load_set(name, seed=None)
    rows = [json.loads(row) for row in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (dataset.name, dataset.task.name) == (name, task)
    assert [e.id for e in dataset.examples] == [row["id"] for row in rows]
    assert [list(e.answers) for e in dataset.examples] == [row["answers"] for row in rows]
    assert [[c.gold for c in e.contexts] for e in dataset.examples] == [
        [c["is_gold"] for c in row["contexts"]] for row in rows
    ]
    assert [dict(e.meta) for e in dataset.examples] == [row.get("meta", {}) for row in rows]
    assert load_set(str(data / f"{name}.jsonl"), seed=None) == dataset


def test_no_shared_set_is_left_out(data):
    assert {path.stem for path in data.glob("*.jsonl")} == set(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_shared_sets_make_prompts(data, name):
    assert_prompts(load_set(str(data / f"{name}.jsonl"), limit=5))


def test_every_prompt_fits(data, smollm2):
    """With all contexts, but for CMRC's: in SmolLM2's vocabulary a Chinese character takes a token or two."""
    model, tokenizer = smollm2
    text, most = PromptText(tokenizer), model.config.max_position_embeddings
    for name in SHARED:
        dataset = load_set(str(data / f"{name}.jsonl"))
        longest = max(dataset.examples, key=lambda e: sum(len(c.text) for c in e.contexts))
        if name == "cmrc2018":
            longest = replace(longest, contexts=longest.contexts[:6])
        assert len(prompt_of(text, dataset.task, longest)) + dataset.task.tokens <= most, name


def test_labels_fit_their_tokens(data, smollm2):
    text = PromptText(smollm2[1])
    answers = {e.answers[0] for e in load_set(str(data / "banking77.jsonl")).examples}
    assert max(text.count(answer) for answer in answers) <= TASKS["banking77"].tokens


# --- sampling -------------------------------------------------------------------------------------


def test_a_greater_limit_takes_the_same_and_more(tmp_path):
    path = write(tmp_path, *(line(id=str(i)) for i in range(30)))
    ids = [e.id for e in load_set(path).examples]
    assert ids != sorted(ids, key=int)
    assert sorted(ids, key=int) == [str(i) for i in range(30)]
    assert all([e.id for e in load_set(path, limit=n).examples] == ids[:n] for n in (1, 7, 29, 30, 99))


def test_the_sample_depends_on_seed_and_ids_alone(tmp_path):
    there = write(tmp_path, *(line(id=str(i)) for i in range(30)))
    back = write(tmp_path, *(line(id=str(i)) for i in reversed(range(30))), name="back.jsonl")
    assert load_set(there, limit=9).examples == load_set(back, limit=9).examples
    assert load_set(there, limit=9).examples != load_set(there, limit=9, seed=1).examples


def test_without_a_seed_the_order_is_the_files(tmp_path):
    path = write(tmp_path, *(line(id=str(i)) for i in range(5)))
    assert [e.id for e in load_set(path, limit=3, seed=None).examples] == ["0", "1", "2"]


# --- JSONL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "said", "task"),
    [
        ("mine.jsonl", "qa", "qa"),
        ("mine.jsonl", "fewshot", "banking77"),
        ("mine.jsonl", "summarization", "qmsum"),
        ("mine.jsonl", "triviaqa", "triviaqa"),
        ("hotpotqa.jsonl", "qa", "hotpotqa"),
        ("hotpotqa.jsonl", None, "hotpotqa"),
        ("hotpotqa.jsonl", "musique", "musique"),
        ("wikimqa_s.jsonl", "qa", "2wikimqa"),
    ],
)
def test_which_task(tmp_path, file, said, task):
    assert load_set(write(tmp_path, line(task=said), name=file)).task is TASKS[task]
    assert load_set(write(tmp_path, line(task=said), name=file), task="squad").task is TASKS["squad"]


def test_further_keys_are_kept(tmp_path):
    (read,) = load_set(write(tmp_path, line(meta={"hops": 2}, level="hard"))).examples
    assert read.meta == {"hops": 2, "level": "hard"}


def test_titles_and_marks_may_be_missing(tmp_path):
    (read,) = load_set(write(tmp_path, line(id=7, contexts=[{"text": "a"}, {"text": "b", "title": None}]))).examples
    assert read.id == "7"
    assert [(c.text, c.title, c.gold) for c in read.contexts] == [("a", "", None), ("b", "", None)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no examples"),
        ([line(), "{oops"], r"line 2 is no JSON"),
        ([line(), "", "[1]"], r"line 3 is no object, but '\[1\]'"),
        ([json.dumps({"id": "q"})], r"line 1: 'question' is missing: an example has id, question, answers, contexts"),
        ([line(answers="a")], r"line 1: 'answers' is 'a'"),
        ([line(answers=[1])], r"line 1: 'answers' are \[1\]: they have to be texts"),
        ([line(id=True)], r"'id' is True"),
        ([line(contexts=["a"])], r"line 1, context 1 is 'a'"),
        ([line(contexts=[{"text": "a", "is_gold": "yes"}])], r"'is_gold' 'yes': a text, and true, false or null"),
        ([line(contexts=[{"text": "a"}, {"text": " "}])], "line 1: a context has no text"),
        ([line(answers=[])], "line 1: no answers"),
        ([line(answers=["a", " "])], "line 1: no answers, or an empty one"),
        ([line(question=" ")], "line 1: the question is empty"),
        ([line(), line(id="q2"), line()], "the id 'q1' is there 2 times"),
        ([line(), line(id="q2", task="fewshot")], r"different tasks \('fewshot', 'qa'\): give one for all"),
        ([line(task="translation")], "no task 'translation'; choose from squad, "),
        ([line(task=None)], "neither its lines nor its name say a task: give one of squad, "),
    ],
)
def test_files_that_cannot_be_used(tmp_path, lines, message):
    path = write(tmp_path, *lines)
    with pytest.raises(DataError, match=message) as caught:
        load_set(path)
    assert isinstance(caught.value, KVBlendError)
    assert isinstance(caught.value, ValueError)
    assert path in str(caught.value)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"mine\.jsonl cannot be read"):
        load_set(str(tmp_path / "mine.jsonl"))


def test_a_set_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBLEND_DATA", str(tmp_path))
    write(tmp_path, line(), name="other.jsonl")
    with pytest.raises(DataError, match=r"no set 'hotpotqa': .* holds other; or give a .jsonl file, .*hub:hotpotqa"):
        load_set("hotpotqa")
    with pytest.raises(DataError, match=r"no file gone\.jsonl"):
        load_set("gone.jsonl")


def test_arguments_out_of_range(tmp_path):
    path = write(tmp_path, line())
    with pytest.raises(DataError, match="limit is 0"):
        load_set(path, limit=0)
    with pytest.raises(DataError, match="no task 'poetry'"):
        load_set(path, task="poetry")


# --- needles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_needles_are_the_same_for_a_seed(kind):
    made = load_set(f"needle:{kind}?n=6", seed=3)
    assert made == load_set(f"needle:{kind}?n=6", seed=3)
    others = load_set(f"needle:{kind}?n=6", seed=4)
    assert {e.answers for e in made.examples}.isdisjoint(e.answers for e in others.examples)
    assert_prompts(made)


def test_needles_do_not_change_with_the_version():
    (made,) = load_set("needle:multi_value?n=1&contexts=2&words=1&needles=2").examples
    assert made.question == "What are all the special numbers of the ivory goblet?"
    assert made.answers == ("97996, 46069",)
    assert made.contexts[1].text == (
        "The farmer closed the window near the market that evening. "
        "One of the special numbers of the ivory goblet is 46069."
    )


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    contexts=st.integers(1, 12),
    words=st.integers(1, 80),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_answers_stand_in_gold_contexts(kind, contexts, words, data, seed):
    needles = data.draw(st.integers(1, contexts))
    dataset = load_set(f"needle:{kind}?contexts={contexts}&words={words}&needles={needles}&n=3", seed=seed)
    assert len(dataset.examples) == 3
    for made in dataset.examples:
        values = made.answers[0].split(", ")
        gold = [c.text for c in made.contexts if c.gold]
        others = [c.text for c in made.contexts if not c.gold]
        assert len(made.contexts) == contexts
        assert len(values) == len(gold) == (1 if kind in ("single", "multi_key") else needles)
        assert all(any(f"is {value}." in text for text in gold) for value in values)
        assert not any(value in text for value in values for text in others)
        assert all(len(c.text.split()) >= words for c in made.contexts)
        assert sum("special number" in text for text in others) == (needles - 1 if kind == "multi_key" else 0)


def test_all_that_is_asked_for_is_named():
    for made in load_set("needle:multi_query?n=5").examples:
        gold = " ".join(c.text for c in made.contexts if c.gold)
        keys = (
            made.question.removeprefix("What are all the special numbers of ")
            .rstrip("?")
            .replace(" and ", ", ")
            .split(", ")
        )
        assert len(keys) == 4
        assert all(
            f"numbers of {key} is {value}." in gold
            for key, value in zip(keys, made.answers[0].split(", "), strict=True)
        )


def test_values_of_one_thing_are_asked_in_the_order_of_the_text():
    for made in load_set("needle:multi_value?n=5").examples:
        gold = " ".join(c.text for c in made.contexts if c.gold)
        places = [gold.index(value) for value in made.answers[0].split(", ")]
        assert places == sorted(places)


def test_needle_alone_hides_one():
    assert load_set("needle?n=3").examples == load_set("needle:single?n=3").examples


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("needle:golden", "no needles 'golden': choose from single, multi_key, multi_value, multi_query"),
        ("needle:", "no needles ''"),
        ("needle:multi_key?needles=9", "needles=9 and contexts=8: each needle has a context of its own"),
        ("needle:multi_key?needles=0", "needles=0"),
        ("needle?words=0", "words=0 and n=40: both are 1 or more"),
        ("needle?n=x", r"are whole numbers, not \{'n': 'x'\}"),
        ("needle?size=3", "needle has no option 'size': its options are contexts, words, needles, n"),
        ("needle?n=1&n=2", "an option is given twice"),
        ("needle?n", "options are key=value"),
        ("demo?contexts=1", "demo.contexts=1: give 2 to "),
        ("demo?contexts=999", "demo.contexts=999"),
        ("demo:two", "the demo set has no kinds"),
    ],
)
def test_sets_that_cannot_be_made(data, message):
    with pytest.raises(DataError, match=message):
        load_set(data)


def test_what_is_made_has_its_own_task():
    with pytest.raises(DataError, match="needle:single is made for the task needle, not for squad"):
        load_set("needle:single", task="squad")


# --- demo -----------------------------------------------------------------------------------------


def test_demo():
    dataset = load_set("demo?contexts=5", seed=2)
    assert dataset == load_set("demo?contexts=5", seed=2)
    assert_prompts(dataset)
    for made in dataset.examples:
        gold = " ".join(c.text for c in made.contexts if c.gold).lower()
        assert len({c.text for c in made.contexts}) == 5
        assert sum(bool(c.gold) for c in made.contexts) == made.meta["hops"]
        assert any(answer.lower() in gold for answer in made.answers)
    assert load_set("demo", seed=None).examples[0].id == "q01"


# --- sets of the hub, from local files ------------------------------------------------------------


def spans(count, answer="tin {}", text="{} is made of tin {}, as all its like.", **more):
    return [
        {
            "id": f"s{i}",
            "title": f"Thing_{i}",
            "context": text.format(f"Thing {i}", i + 10),
            "question": f"What is thing {i} made of?",
            "answers": {"text": [answer.format(i + 10)] * 2, "answer_start": [5, 5]},
            **more,
        }
        for i in range(count)
    ]


def hops():
    return {
        "id": "h1",
        "question": "Which is older, the pier or the mill?",
        "answer": "the mill",
        "type": "comparison",
        "level": "easy",
        "supporting_facts": {"title": ["Pier", "Mill"], "sent_id": [0, 0]},
        "context": {
            "title": ["Pier", "Bread", "Mill", "Nothing"],
            "sentences": [["Built in 1911.", " It is long."], ["Grey."], ["Built in 1870."], []],
        },
    }


def dense():
    negative = [{"docid": str(i), "title": f"T{i}", "text": f"Distractor {i}."} for i in range(30)]
    return {
        "query_id": "d1",
        "query": "who lights the lamps",
        "answers": ["keeper", "the keeper"],
        "positive_passages": [{"docid": "p", "title": "Pier", "text": "The keeper lights them."}] * 2,
        "negative_passages": negative,
    }


def paragraphs():
    found = [("Pier", "The keeper lights the lamps.", True), ("Bread", "Grey.", False), ("Keeper", "Ada Voss.", True)]
    return {
        "id": "2hop__1_2",
        "question": "What is the lamplighter called?",
        "answer": "Ada Voss",
        "answer_aliases": ["Voss", "Ada Voss"],
        "answerable": True,
        "paragraphs": [
            {"idx": i, "title": title, "paragraph_text": text, "is_supporting": gold}
            for i, (title, text, gold) in enumerate(found)
        ],
    }


def long(subset, context, question, answers):
    return {"_id": "l1", "input": question, "context": context, "answers": answers, "dataset": subset, "language": "en"}


CHATS = [{"id": f"c{i}", "dialogue": f"Ann: {i}?\r\nBob: yes", "summary": f"Bob agrees to {i}."} for i in range(12)]
INTENTS = [{"text": f"Query {i} of {i % 12}", "label": i % 12, "label_text": f"intent_{i % 12}"} for i in range(120)]
NEWS = {
    "document": "Storm at sea. NEWLINE_CHAR Ships sank. ||||| Ships sink in storm. ||||| ",
    "summary": "– A storm sank ships.",
}
PASSAGES = "Passage 1:\nPier\nBuilt in 1911.\n\nPassage 2:\nMill\nBuilt in 1870.\n"

ROWS = {
    "squad": spans(12),
    "xquad_zh": spans(12, "锡{}", "{}是用锡{}做的。"),
    "cmrc2018": spans(12, "锡{}", "{}是用锡{}做的。"),
    "hotpotqa": [hops()],
    "2wikimqa": [hops()],
    "nq_open": [dense()],
    "triviaqa": [dense()],
    "musique": [paragraphs()],
    "samsum": CHATS,
    "banking77": INTENTS,
    "multinews": [NEWS, NEWS],
    "longbench": [long("hotpotqa", PASSAGES, "Which is older?", ["the mill"])],
    "longbench_summary": [long("gov_report", "A report.\n\n" * 300, "", ["It reports."])],
}
"""Rows in the form of each task's hub set."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Writes a local file with the columns of a task's hub set and reads it as one."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))

    def read(task, rows=None, **options):
        path = write(tmp_path, *map(json.dumps, ROWS[task] if rows is None else rows), name=f"{task}.jsonl")
        return load_set(f"hub:{path}", **options)

    return read


@pytest.mark.parametrize("task", HUB)
def test_hub_sets(hub, task):
    dataset = hub(task)
    assert dataset.task is TASKS[task]
    assert dataset.name == task
    assert len(dataset.examples) == len(ROWS[task])
    assert all(e.contexts for e in dataset.examples)
    assert dataset == hub(task)
    assert hub(task, limit=1).examples == dataset.examples[:1]
    assert_prompts(replace(dataset, examples=dataset.examples[:3]))


@pytest.mark.parametrize("task", ["squad", *CHINESE])
def test_paragraphs_of_others_are_distractors(hub, task):
    for read in hub(task).examples:
        gold = [c for c in read.contexts if c.gold]
        assert len(read.contexts) == len({c.text for c in read.contexts}) == 8
        assert len(gold) == 1
        assert [read.answers[0] in c.text for c in read.contexts] == [bool(c.gold) for c in read.contexts]
        assert gold[0].title == f"Thing {read.id[1:]}"


def test_distractors_hold_no_answer(hub):
    rows = spans(6)
    rows[0]["answers"]["text"] = ["Like"]  # in every paragraph, in small letters
    read = next(e for e in hub("squad", rows).examples if e.id == "s0")
    assert [c.gold for c in read.contexts] == [True]


def test_two_hops(hub):
    (read,) = hub("hotpotqa").examples
    assert [(c.title, c.text, c.gold) for c in read.contexts] == [
        ("Pier", "Built in 1911. It is long.", True),
        ("Bread", "Grey.", False),
        ("Mill", "Built in 1870.", True),
    ]


def test_several_hops(hub):
    (read,) = hub("musique").examples
    assert read.answers == ("Ada Voss", "Voss")
    assert [c.gold for c in read.contexts] == [True, False, True]
    assert read.meta == {"type": "2hop"}


@pytest.mark.parametrize("task", ["nq_open", "triviaqa"])
def test_dense_retrieval_passages(hub, task):
    (read,) = hub(task).examples
    assert len(read.contexts) == 10
    assert [c.text for c in read.contexts if c.gold] == ["The keeper lights them."]
    assert {c.title for c in read.contexts} == {"Pier", *(f"T{i}" for i in range(9))}


def test_chats_are_shown_with_others(hub):
    for read in hub("samsum").examples:
        assert len(read.contexts) == 8
        assert all(
            c.text.startswith("Dialogue:\nAnn: ") and "\nSummary: Bob agrees to " in c.text for c in read.contexts
        )
        assert not any(read.answers[0] in c.text for c in read.contexts)
        assert "\r" not in read.question


def test_shots_come_from_their_split(tmp_path, monkeypatch):
    """From a folder: the test split is asked, the train split shown, without its empty dialogue."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    (tmp_path / "chats").mkdir()
    write(tmp_path / "chats", *map(json.dumps, CHATS[:4]), name="test.jsonl")
    write(tmp_path / "chats", *map(json.dumps, [*CHATS[4:], {**CHATS[4], "dialogue": None}]), name="train.jsonl")
    dataset = load_set(f"hub:{tmp_path / 'chats'}", task="samsum")
    shown = {c.text for e in dataset.examples for c in e.contexts}
    assert sorted(e.id for e in dataset.examples) == ["c0", "c1", "c2", "c3"]
    assert shown == {f"Dialogue:\n{c['dialogue']}\nSummary: {c['summary']}".replace("\r", "") for c in CHATS[4:]}
    with pytest.raises(DataError, match=r"split dev of the folder .* cannot be loaded: Unknown split"):
        load_set(f"hub:{tmp_path / 'chats'}?split=dev", task="samsum")


def test_intents_are_shown_in_groups(hub):
    dataset = hub("banking77")
    for read in dataset.examples:
        assert read.answers == (f"intent_{read.meta['type'][7:]}", f"intent {read.meta['type'][7:]}")
        assert len(read.contexts) == 10
        assert [f"Intent: {read.answers[0]}\n" in c.text for c in read.contexts] == [
            bool(c.gold) for c in read.contexts
        ]
        assert all(c.text.count("Query: ") == 8 for c in read.contexts)
        assert not any(f"Query: {read.question}\n" in c.text for c in read.contexts)
    used = Counter(c.text for e in dataset.examples for c in e.contexts if not c.gold)
    assert len(used) == 12  # chunks come back


def test_articles_are_contexts(hub):
    first, second = hub("multinews", seed=None).examples
    assert [c.text for c in first.contexts] == ["Storm at sea. \n Ships sank.", "Ships sink in storm."]
    assert first.answers == ("A storm sank ships.",)
    assert (first.id, second.id) == ("0", "1")


def test_long_texts_are_cut(hub):
    (read,) = hub("longbench").examples
    assert [c.text for c in read.contexts] == ["Pier\nBuilt in 1911.", "Mill\nBuilt in 1870."]
    (read,) = hub("longbench_summary").examples
    assert read.question == "Write a summary of all the passages."
    assert "".join("".join(c.text.split()) for c in read.contexts) == "Areport." * 300
    assert all(len(c.text) <= CHARACTERS for c in read.contexts)


def test_long_chats_are_cut_into_dialogues(hub):
    shots = "Dialogue: Ann: a?\nBob: yes\nSummary: Bob agrees.\nDialogue: Ann: b?\nSummary: Ann asks.\n"
    rows = [long("samsum", shots, "Dialogue: Ann: c?\nSummary: ", ["Ann asks."])]
    (read,) = hub("longbench_summary", rows).examples
    assert read.question == "Dialogue: Ann: c?"
    assert [c.text for c in read.contexts] == [
        "Dialogue: Ann: a?\nBob: yes\nSummary: Bob agrees.",
        "Dialogue: Ann: b?\nSummary: Ann asks.",
    ]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(codec="utf-8"), max_size=3000))
@example("Passage 1:\n\nPassage 2:\n")
@example("中文。" * 900)
def test_cutting_loses_nothing(text):
    pieces = cut(text)
    marks = text if "Passage" not in text else ""
    assert all(piece.text.strip() for piece in pieces)
    assert "".join("".join(piece.text.split()) for piece in pieces) == "".join(marks.split())


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        (
            "squad",
            [{"id": "1", "question": "a"}],
            r"row 0 of .*squad.jsonl is not of this task's form \(KeyError: 'context'\)",
        ),
        (
            "hotpotqa",
            [{**hops(), "context": {"title": ["a"], "sentences": []}}],
            r"not of this task's form \(ValueError",
        ),
        ("musique", [{**paragraphs(), "answer": "", "answer_aliases": []}], "example 2hop__1_2: no answers"),
        ("musique", [paragraphs(), paragraphs()], "the id '2hop__1_2' is there 2 times"),
        ("samsum", [{**CHATS[0], "dialogue": None}], "example c0: the question is empty"),
        (
            "longbench",
            [long("lcc", "a", "b", ["c"])],
            "LongBench's lcc is no subset of longbench, which knows 2wikimqa",
        ),
        ("squad", [], "cannot be loaded: it is empty"),
    ],
)
def test_rows_that_cannot_be_used(hub, task, rows, message):
    with pytest.raises(DataError, match=message):
        hub(task, rows)


def test_a_hub_set_out_of_reach():
    """What was tried, and the way out."""
    message = (
        r"split validation of hotpotqa/hotpot_qa, configuration distractor, on the hub, cannot be loaded: .*hub:FILE"
    )
    with pytest.raises(DataError, match=message):
        load_set("hub:hotpotqa")
    with pytest.raises(DataError, match="split train of hotpotqa/hotpot_qa, configuration fullwiki"):
        load_set("hub:hotpotqa?config=fullwiki&split=train")
    with pytest.raises(DataError, match="split validation of someone/copy, on the hub"):
        load_set("hub:someone/copy", task="hotpotqa")


def test_hub_names_that_say_too_little(tmp_path):
    with pytest.raises(DataError, match=r"give the task whose columns it has, one of squad, .*; 'copy' has no hub set"):
        load_set("hub:someone/copy")
    with pytest.raises(DataError, match="'needle' has no hub set"):
        load_set("hub:someone/copy", task="needle")
    with pytest.raises(DataError, match="no option 'size': its options are config, split"):
        load_set("hub:hotpotqa?size=3")
    path = write(tmp_path, "{}", name="squad.jsonl")
    with pytest.raises(DataError, match="no option 'split': it has no options"):
        load_set(f"hub:{path}?split=dev")


def test_files_that_datasets_cannot_read(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    broken = write(tmp_path, "{}", "{oops", name="squad.jsonl")
    with pytest.raises(DataError, match=r"the file .*squad\.jsonl cannot be loaded: .*JSON"):
        load_set(f"hub:{broken}")
    table = write(tmp_path, "a", name="squad.txt")
    with pytest.raises(DataError, match=r"its name does not end in \.json, \.jsonl, \.csv, \.parquet"):
        load_set(f"hub:{table}")


def test_csv_files(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    path = write(
        tmp_path, "id,dialogue,summary", '1,"Ann: a?",Ann asks.', '2,"Ann: b?",Ann asks again.', name="chats.csv"
    )
    dataset = load_set(f"hub:{path}", task="samsum", seed=None)
    assert [(e.id, e.question) for e in dataset.examples] == [("1", "Ann: a?"), ("2", "Ann: b?")]
    assert [c.text for c in dataset.examples[0].contexts] == ["Dialogue:\nAnn: b?\nSummary: Ann asks again."]
