"""The words of an OpenQASM text, each with its line and column."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from unisono.errors import UsageError


class QasmError(UsageError):
    """A text that is not OpenQASM, or not the part that is read; the message starts with file:line:column."""


@dataclass(frozen=True)
class Token:
    kind: str  # "name", "integer", "real", "string", "symbol" or "end"
    text: str
    line: int
    column: int


_LONGEST_MESSAGE = 600
OPERATION = 4  # what making one costs, in steps of `Cursor.spend`
NOTHING = 128  # a call within a gate or a subroutine that makes none: only a text that is to take long has many
_PATTERN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*|/\*.*?\*/)
    |(?P<newline>\n)
    |(?P<directive>(?:\#?pragma|@[^\W\d]\w*)(?=[ \t\n])[^\n]*)
    |(?P<real>(?:\d[\d_]*\.(?!\.)[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?|\d[\d_]*[eE][+-]?\d+)
    |(?P<integer>0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<string>"[^"\n]*")
    |(?P<symbol>->|==|!=|<=|>=|&&|\|\||\*\*|\+\+|/(?!\*)|[-;,()\[\]{}+*^%=<>@:!$~&|])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str, source: str) -> list[Token]:
    """All words; comments, pragmas and annotations are left out. The last one is the "end"."""
    tokens: list[Token] = []
    position, line, start = 0, 1, 0
    while position < len(text):
        match = _PATTERN.match(text, position)
        column = position - start + 1
        if match is None:
            what = "a comment that never ends" if text.startswith("/*", position) else repr(text[position])
            raise QasmError(f"{source}:{line}:{column}: {what} is not OpenQASM")
        kind, word = str(match.lastgroup), match.group()
        if kind == "directive" and word.startswith("@") and tokens and tokens[-1].text not in (";", "{", "}"):
            kind, word = "symbol", "@"  # after a modifier it is no annotation: `ctrl @x q;`
        if kind not in ("space", "newline", "directive"):
            tokens.append(Token(kind, word, line, column))
        position += len(word)
        if newlines := word.count("\n"):
            line += newlines
            start = position - len(word) + word.rindex("\n") + 1
    tokens.append(Token("end", "the end of the file", line, position - start + 1))
    return tokens


class Work:
    """What it may still cost to read a text: a few lines can stand for any number of operations."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit


class Cursor:
    """A position among the tokens of one source."""

    def __init__(self, tokens: list[Token], source: str, work: Work, position: int = 0) -> None:
        self.tokens = tokens
        self.source = source
        self.work = work
        self.position = position
        self._ends: dict[int, int] = {}  # of blocks, by the position of the brace that opens one

    def at(self, position: int) -> Cursor:
        found = Cursor(self.tokens, self.source, self.work, position)
        found._ends = self._ends
        return found

    def spend(self, steps: int) -> None:
        """Of the work that a text may ask for: about four microseconds, or 100 bytes, a step."""
        self.work.left -= steps
        if self.work.left < 0:
            self.fail(
                f"what the text asks for up to here takes more than {self.work.limit} steps to write out; if its "
                "loops, gates and subroutines are meant to make so many operations, give a higher limit="
            )

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def next(self) -> Token:
        token = self.tokens[self.position]
        if token.kind != "end":
            self.position += 1
        return token

    def sees(self, *texts: str) -> bool:
        token = self.tokens[self.position]
        return token.text in texts and token.kind != "string"

    def skip(self, text: str) -> bool:
        if self.sees(text):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if not self.sees(text):
            self.fail(f"expected {text!r}, but found {self.shown()}")
        return self.next()

    def kind(self, kind: str, what: str) -> Token:
        if self.token.kind != kind:
            self.fail(f"expected {what}, but found {self.shown()}")
        return self.next()

    def shown(self) -> str:
        return self.token.text if self.token.kind == "end" else repr(self.token.text)

    def fail(self, message: str, token: Token | None = None) -> NoReturn:
        token = token or self.token
        if len(message) > _LONGEST_MESSAGE:  # it has a name or a number of the text
            message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
        raise QasmError(f"{self.source}:{token.line}:{token.column}: {message}")

    def block_end(self) -> int:
        """The position of the brace that closes the block that opens here."""
        if self.position in self._ends:
            return self._ends[self.position]
        depth, start = 0, self.token
        for position in range(self.position, len(self.tokens)):
            token = self.tokens[position]
            if token.kind == "symbol":
                depth += {"{": 1, "}": -1}.get(token.text, 0)
                if token.text == "}" and depth == 0:
                    self._ends[self.position] = position
                    return position
        raise QasmError(f"{self.source}:{start.line}:{start.column}: this block is never closed")
