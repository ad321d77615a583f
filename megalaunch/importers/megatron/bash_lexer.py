"""Split a bash script into words and operators, without running anything.

A word is a sequence of parts (text, variable, arithmetic, command), each quoted or not, as needed for word splitting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_BYTES = 1_000_000
_BLANK = " \t"
_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", ">&", "&>", "<", ">", ";", "|", "&", "(", ")", "\n")


class ScriptProblem(ValueError):
    """The text cannot be parsed as a script; `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        self.line, self.message = line, message
        super().__init__(f"line {line}: {message}")


@dataclass(frozen=True)
class Part:
    """A piece of a word: plain text, or the content of `${...}`, of `$((...))`, or of `$(...)` and backticks."""

    kind: Literal["text", "name", "arithmetic", "command"]
    text: str
    quoted: bool


@dataclass(frozen=True)
class Token:
    """A word (`parts`), an array literal (`NAME=( ... )`, elements in `items`), or an operator (neither).

    `text` is an operator, the `NAME=` or `NAME+=` of an array, or the body of a here-document.
    """

    line: int
    text: str = ""
    parts: tuple[Part, ...] | None = None
    items: tuple[tuple[Part, ...], ...] | None = None
    heredoc: bool = False

    @property
    def plain(self) -> str | None:
        """The text of a word that is one unquoted piece (a keyword, a name), else None."""
        if (
            self.parts is not None
            and len(self.parts) == 1
            and self.parts[0].kind == "text"
            and not self.parts[0].quoted
        ):
            return self.parts[0].text
        return None


def tokenize(script: str) -> Iterator[Token]:
    """Yield the tokens of a script. Raises ScriptProblem for an unclosed quote or bracket."""
    return _Lexer(script).tokens()


def split_words(text: str) -> list[tuple[Part, ...]]:
    """Return the words of a text (`a "b c" $d`), without operators."""
    return [token.parts for token in tokenize(text) if token.parts is not None]


class _Lexer:
    """Scans a script from left to right and counts its lines."""

    def __init__(self, script: str) -> None:
        self.text = script
        self.at = 0
        self.line = 1
        self.waiting: list[tuple[str, bool]] = []  # here-documents whose body follows the current line

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK or char == "\r":
                self._step()
            elif char == "\\" and self._ahead(1) == "\n":
                self._step(2)
            elif char == "#":
                self._comment()
            elif operator := self._operator():
                yield from self._after_operator(operator)
            else:
                yield self._word()

    def _after_operator(self, operator: str) -> Iterator[Token]:
        """Consume an operator. The bodies of here-documents follow at the end of the line."""
        line = self.line
        self._step(len(operator))
        if operator in ("<<", "<<-"):
            while self._here() in _BLANK and self._here():
                self._step()
            delimiter = self._word()
            self.waiting.append(
                ("".join(part.text for part in delimiter.parts or ()), any(p.quoted for p in delimiter.parts or ()))
            )
            return
        yield Token(line, operator)
        if operator == "\n":
            for name, literal in self.waiting:
                yield self._heredoc(name, literal)
            self.waiting = []

    def _heredoc(self, name: str, literal: bool) -> Token:
        line, body = self.line, []
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            row = self.text[self.at : end]
            self._step(end - self.at + 1)
            if row.strip("\t") == name:
                break
            body.append(row)
        kind: Literal["text", "name"] = "text"
        return Token(line, "\n".join(body), (Part(kind, "", literal),), heredoc=True)

    def _word(self) -> Token:
        """Consume a word, or an array assignment."""
        line = self.line
        parts: list[Part] = []
        while (char := self._here()) and char not in " \t\r\n" and not self._ends_word():
            if char == "\\":
                if self._ahead(1) == "\n":
                    self._step(2)
                    continue
                parts.append(Part("text", self._ahead(1), True))
                self._step(2)
            elif char == "'":
                parts.append(Part("text", self._until("'", line), True))
            elif char == '"':
                parts.extend(self._double_quoted(line))
            elif char == "$" or char == "`":
                parts.append(self._dollar(quoted=False))
            else:
                parts.append(Part("text", char, False))
                self._step()
        joined = _join(parts)
        if self._here() == "(" and len(joined) == 1 and _is_assignment(joined[0]):
            return Token(line, joined[0].text, None, self._array(line))
        return Token(line, parts=joined)

    def _array(self, line: int) -> tuple[tuple[Part, ...], ...]:
        """Consume the elements of an array literal."""
        self._step()
        items: list[tuple[Part, ...]] = []
        while True:
            char = self._here()
            if not char:
                raise ScriptProblem(line, "the array's ( is not closed")
            if char in " \t\r\n":
                self._step()
            elif char == "\\" and self._ahead(1) == "\n":
                self._step(2)
            elif char == "#":
                self._comment()
            elif char == ")":
                self._step()
                return tuple(items)
            elif char in "(<>;|&":
                raise ScriptProblem(self.line, f"cannot read {char!r} inside an array")
            else:
                items.append(self._word().parts or ())

    def _double_quoted(self, line: int) -> list[Part]:
        """Consume a double-quoted string, whose expansions are quoted parts."""
        self._step()
        parts: list[Part] = [Part("text", "", True)]
        while (char := self._here()) != '"':
            if not char:
                raise ScriptProblem(line, 'the quote " is not closed')
            if char == "\\" and self._ahead(1) in '"\\$`\n':
                if self._ahead(1) != "\n":
                    parts.append(Part("text", self._ahead(1), True))
                self._step(2)
            elif char in "$`":
                parts.append(self._dollar(quoted=True))
            else:
                parts.append(Part("text", char, True))
                self._step()
        self._step()
        return parts

    def _dollar(self, quoted: bool) -> Part:
        """Consume a `$` or backtick expansion, or a literal `$`."""
        line = self.line
        if self._here() == "`":
            return Part("command", self._until("`", line), quoted)
        following = self._ahead(1)
        if self.text.startswith("$((", self.at):
            inside = self._bracketed(3, "(", ")", line, depth=2)
            return Part("arithmetic", inside, quoted)
        if following == "(":
            return Part("command", self._bracketed(2, "(", ")", line), quoted)
        if following == "{":
            return Part("name", self._bracketed(2, "{", "}", line), quoted)
        name = following if following in tuple("0123456789@*#?!$-") else self._name(self.at + 1)
        if not name:
            self._step()
            return Part("text", "$", quoted)
        self._step(1 + len(name))
        return Part("name", name, quoted)

    def _bracketed(self, skip: int, opening: str, closing: str, line: int, depth: int = 1) -> str:
        """Consume text up to the closing bracket; `depth` brackets are open after `skip` characters."""
        self._step(skip)
        started, wanted = self.at, depth
        while depth:
            char = self._here()
            if not char:
                raise ScriptProblem(line, f"${opening * wanted} is not closed")
            if char == "'" and opening != "{":
                self._until("'", line)
                continue
            depth += (char == opening) - (char == closing)
            self._step()
        return self.text[started : self.at - wanted]

    def _name(self, start: int) -> str:
        end = start
        while end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"):
            end += 1
        return self.text[start:end]

    def _until(self, closing: str, line: int) -> str:
        end = self.text.find(closing, self.at + 1)
        if end < 0:
            raise ScriptProblem(line, f"the quote {closing} is not closed")
        inside = self.text[self.at + 1 : end]
        self._step(end + 1 - self.at)
        return inside

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        self._step((len(self.text) if end < 0 else end) - self.at)

    def _operator(self) -> str:
        return next((op for op in _OPERATORS if self.text.startswith(op, self.at)), "")

    def _ends_word(self) -> bool:
        return self._here() in ";|&()<>"

    def _here(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _ahead(self, count: int) -> str:
        return self.text[self.at + count] if self.at + count < len(self.text) else ""

    def _step(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count


def _join(parts: list[Part]) -> tuple[Part, ...]:
    """Merge adjacent text parts with the same quoting."""
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        if runs and part.kind == "text" == runs[-1][0].kind and runs[-1][0].quoted == part.quoted:
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return tuple(Part(first.kind, "".join(texts), first.quoted) for first, texts in runs)


def _is_assignment(part: Part) -> bool:
    name = part.text.removesuffix("=").removesuffix("+")
    return part.kind == "text" and not part.quoted and part.text.endswith("=") and name.isidentifier()
