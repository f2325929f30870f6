"""OpenCost's filter language, version 2: which allocations an answer keeps.

    filter = element (('+' | '|') element)*      + is and, | is or; both together only with parentheses
    element = '(' filter ')' | key operator value
    key = cluster, node, namespace, ... | label[id] | annotation[id]
    operator = ':' equals, '~:' contains, '<~:' starts with, '~>:' ends with; '!' before it negates
    value = "text" (',' "text")*                 one of them; negated: none of them

Source: OpenCost core/pkg/filter/ast/parser.go and core/pkg/filter/allocation/parser.go. A key that this ledger
does not know is refused rather than ignored: a filter that silently keeps everything shows other people's cost.
`one_of` is a filter of version 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Properties = Mapping[str, str]
"""Of one allocation, by the filter's names of keys; labels as label[NAME]."""
Predicate = Callable[[Properties], bool]

MAX_CHARACTERS = 4_096
MAX_DEPTH = 32
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"[^"]*")|(?P<op>!?(?:<~|~)?>?:)|(?P<key>[A-Za-z]+(?:\[[^\]]+\])?)|(?P<sign>[()+|,]))'
)
_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    ":": str.__eq__,
    "~:": str.__contains__,
    "<~:": str.startswith,
    "~>:": str.endswith,
}


class NotAFilter(ValueError):
    """The text is no filter, or asks for a property there is not: the place and the reason."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def parse(text: str, keys: frozenset[str]) -> Predicate:
    """A test of an allocation's properties; without text it keeps everything. keys: those that may be asked,
    among them `label` if any label may. Raises NotAFilter."""
    if len(text) > MAX_CHARACTERS:
        raise NotAFilter(f"a filter of more than {MAX_CHARACTERS} characters")
    if not text.strip():
        return lambda _: True
    parser = _Parser(_tokens(text), keys)
    found = parser.filter(0)
    parser.end()
    return found


def one_of(key: str, names: Sequence[str]) -> Predicate:
    """A test whether the property is one of the names; a name that ends with * matches what begins like it."""
    wanted = [name.strip() for name in names if name.strip()]

    def keeps(properties: Properties) -> bool:
        found = properties.get(key, "")
        return any(found.startswith(name[:-1]) if name.endswith("*") else found == name for name in wanted)

    return keeps


def keys_of(text: str) -> frozenset[str]:
    """The properties that a filter asks for, without what stands in brackets. Raises NotAFilter."""
    return frozenset(token.text.partition("[")[0] for token in _tokens(text) if token.kind == "key")


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if not match or match.lastgroup is None:
            raise NotAFilter(f"character {at + 1}: {text[at : at + 20]!r} is no part of a filter")
        tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1))
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[_Token], keys: frozenset[str]) -> None:
        self._tokens = tokens
        self._keys = keys
        self._next = 0

    def filter(self, depth: int) -> Predicate:
        if depth > MAX_DEPTH:
            raise NotAFilter(f"more than {MAX_DEPTH} parentheses inside one another")
        parts = [self._element(depth)]
        sign = ""
        while (token := self._peek()) is not None and token.text in ("+", "|"):
            if sign and token.text != sign:
                raise NotAFilter(f"character {token.at}: + and | together need parentheses")
            sign = token.text
            self._take()
            parts.append(self._element(depth))
        if sign == "|":
            return lambda properties: any(part(properties) for part in parts)
        return lambda properties: all(part(properties) for part in parts)

    def end(self) -> None:
        token = self._peek()
        if token is not None:
            raise NotAFilter(f"character {token.at}: {token.text!r} follows the end of the filter")

    def _element(self, depth: int) -> Predicate:
        token = self._take()
        if token.text == "(":
            inner = self.filter(depth + 1)
            self._take(")")
            return inner
        if token.kind != "key":
            raise NotAFilter(f"character {token.at}: expected a property or (, not {token.text!r}")
        if token.text.partition("[")[0] not in self._keys:
            known = ", ".join(sorted(self._keys))
            raise NotAFilter(f"character {token.at}: unknown property {token.text!r}; there are {known}")
        operator = self._take()
        negated = operator.text.startswith("!")
        test = _TESTS.get(operator.text.removeprefix("!"))
        if operator.kind != "op" or test is None:
            raise NotAFilter(f"character {operator.at}: expected an operator such as : after {token.text}")
        values = [self._value()]
        while (comma := self._peek()) is not None and comma.text == ",":
            self._take()
            values.append(self._value())
        key = token.text

        def keeps(properties: Properties) -> bool:
            found = properties.get(key, "")
            return any(test(found, value) for value in values) != negated

        return keeps

    def _value(self) -> str:
        token = self._take()
        if token.kind != "text":
            raise NotAFilter(f"character {token.at}: expected a value in quotes, not {token.text!r}")
        return token.text[1:-1]

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, expected: str | None = None) -> _Token:
        token = self._peek()
        if token is None or (expected is not None and token.text != expected):
            where = "the end" if token is None else f"character {token.at}"
            raise NotAFilter(f"{where}: expected {expected or 'more'}")
        self._next += 1
        return token
