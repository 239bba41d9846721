"""Docstrings name their subject by a noun: first lines of code, texts of fields, genitives.

For collage_fx, passes, runtime, benchmarks, examples and tests.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("collage_fx", "passes", "runtime", "benchmarks", "examples", "tests")
SOURCES = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXCEPTIONS: dict[str, int] = {}
"""Files with faults that are let be, and how many; none is the aim."""

CLAUSES = {"what", "which", "whether", "how", "where", "when", "who", "whom", "whose", "why"}
"""First words of a clause in place of a noun."""
PRONOUNS = {"it", "its", "itself", "they", "their", "those", "these", "that", "him", "her"}
"""First words that refer to a noun which is not there yet."""
NO_NOUNS = {
    *("about", "after", "as", "at", "because", "before", "behind", "below", "beside", "between"),
    *("beyond", "but", "by", "else", "for", "from", "if", "in", "into", "likewise", "of", "on"),
    *("or", "so", "then", "to", "too", "under", "until", "with", "within", "without"),
    *("is", "are", "has", "have", "does", "was", "were", "can", "may", "must"),
    *("added", "called", "gone", "kept", "made", "put", "taken", "told", "written"),
    *("keeps", "makes", "looks", "stands", "takes", "tells"),
}
"""First words with which the text of a field says no noun: prepositions, conjunctions, verb forms.

A list, since no rule tells a verb from a noun. "True if" and "None if" begin otherwise, and a
field that is called may say "Returns ...", as a function does.
"""
FIRST_WORD = re.compile(r"[a-z]+(?:'s)?", re.IGNORECASE)

CONTINUATION = (
    *("a", "and", "are", "as", "at", "but", "by", "can", "do", "does", "for", "from", "has"),
    *("have", "if", "in", "is", "it", "may", "nor", "not", "of", "on", "or", "reads", "so"),
    *("than", "that", "the", "they", "to", "too", "under", "was", "were", "when", "where"),
    *("which", "who", "whose", "will", "with", "without"),
)
"""Words that follow a genitive without a noun."""
_AFTER = rf"(?! ?[\w`(])| (?=(?:{'|'.join(CONTINUATION)})\b)"
DOUBLE_GENITIVE = re.compile(
    rf"\bof (?:the |a |an )?(?:[A-Za-z]\w*'s(?:{_AFTER})|(?:ours|theirs|mine|yours|hers)\b(?!\.\w))"
)
"""A genitive without a noun after it; "of Dynamo's graphs" has one, and is plain English."""


class Text(NamedTuple):
    """A docstring, the text of a field, or a comment."""

    kind: str
    """`code`, of a module, class or function, `field` or `comment`."""
    line: int
    """Line of the file on which the text begins."""
    text: str
    """Words of the text, with single spaces between."""


def texts(code: str) -> Iterator[Text]:
    """Yield the docstrings, texts of fields and comments of a source."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if (text := _string(statement)) is None:
                continue
            if before is None:
                yield Text("code", statement.lineno, text)
            elif isinstance(before, ast.Assign | ast.AnnAssign | ast.AugAssign):
                yield Text("field", statement.lineno, text)
    yield from _comments(code)


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return " ".join(value.split()) if isinstance(value, str) else None
    return None


def _comments(code: str) -> Iterator[Text]:
    """Yield comments; those on consecutive lines are one, since a sentence goes on."""
    found: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            if found and token.start[0] > found[-1][0] + 1:
                yield Text("comment", found[0][0], " ".join(text for _, text in found))
                found = []
            found.append((token.start[0], token.string.lstrip("# ")))
    if found:
        yield Text("comment", found[0][0], " ".join(text for _, text in found))


def faults(text: Text) -> Iterator[str]:
    """Yield what is wrong with the words of a text: each fault as its kind, and the words."""
    start = FIRST_WORD.match(text.text)
    word = start.group().lower() if start else ""
    if text.kind != "comment":
        if word in CLAUSES:
            yield f"clause: {text.text[:60]}"
        elif word in PRONOUNS or re.match(r"One of (?:that|those|these|them)\b", text.text):
            yield f"pronoun: {text.text[:60]}"
        elif text.kind == "field" and word in NO_NOUNS:
            yield f"no noun: {text.text[:60]}"
    yield from genitives(text.text)


def genitives(text: str) -> Iterator[str]:
    for found in DOUBLE_GENITIVE.finditer(text):
        yield f"genitive: {text[found.start() : found.end() + 20]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = {}
    for path in (path for path in SOURCES if path.is_relative_to(ROOT / folder)):
        where = path.relative_to(ROOT).as_posix()
        lines = [f"{t.line}: {f}" for t in texts(path.read_text()) for f in faults(t)]
        if len(lines) != EXCEPTIONS.get(where, 0):
            found[where] = lines
    assert not found, "\n".join(f"{w}:{line}" for w, lines in found.items() for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_have_no_double_genitive(page: Path) -> None:
    assert not list(genitives(" ".join(page.read_text().split())))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ('"""What a graph takes."""', "clause"),
        ('def f():\n    """Whether it holds."""', "clause"),
        ('class A:\n    """How a state is laid out."""', "clause"),
        ('class A:\n    def f(self):\n        """Its address."""', "pronoun"),
        ('"""One of those that step."""', "pronoun"),
        ('class A:\n    a: int\n    """Where it lies."""', "clause"),
        ('A = 1\n"""Those of the class."""', "pronoun"),
        ('A = 1\n"""By parameter, its states."""', "no noun"),
        ('A = 1\n"""Of the inputs, their names."""', "no noun"),
        ('A = 1\n"""If given, the seed."""', "no noun"),
        ('class A:\n    a: int\n    """Told of each graph."""', "no noun"),
        ('def f():\n    """Return a graph of Dynamo\'s."""', "genitive"),
        ('def f():\n    """Return a graph of\n    Dynamo\'s that ends."""', "genitive"),
        ("a = 1  # a tensor of ours", "genitive"),
        ("# a method of the\n# optimizer's, which reads\na = 1", "genitive"),
    ],
)
def test_a_fault_is_found(code: str, kind: str) -> None:
    """The control: one text of each kind."""
    assert [f.partition(":")[0] for t in texts(code) for f in faults(t)] == [kind]


@pytest.mark.parametrize(
    "code",
    [
        '"""Warnings for graphs that are not compensated."""',
        'def f():\n    """Return what a graph takes."""',
        'class A:\n    a: bool\n    """True if the state is compensated."""',
        'A = {}\n"""Name of a parameter -> its states."""',
        'def f():\n    """Return a graph of its own, of Dynamo\'s graphs the first."""',
        "a = 1  # a cache of PyTorch's own, in place of Python's `dict`",
        "x = 'a tensor of ours'",
    ],
)
def test_plain_words_pass(code: str) -> None:
    assert not [f for t in texts(code) for f in faults(t)]
