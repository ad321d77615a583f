"""Interpret a bash script far enough to find the arguments of the command that it would launch; nothing is executed.

Assignments, arrays and tests of known values are interpreted. A loop around a launch is interpreted as one pass. Other
loops, sourced files and unknown tests are skipped, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megalaunch.importers.megatron.bash_expansion import Variables, is_unresolved
from megalaunch.importers.megatron.bash_lexer import Token, split_words, tokenize

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SEPARATORS = {"\n", ";", "&&", "||", "|", "&", "(", ")", ";;"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_SLURM = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command with its words expanded; `after` is the operator before it, "" at the start."""

    line: int
    argv: tuple[str, ...]
    after: str = ""


@dataclass
class Script:
    """An interpreted script: commands, final variables, `#SBATCH` arguments, exports, and notes on skipped parts."""

    commands: list[Command] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)
    sbatch_arguments: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(text: str, given: Mapping[str, str]) -> Script:
    """Interpret a script.

    Args:
        text: the script.
        given: values of variables that are set outside of the script (`1` is its first argument).

    Raises:
        ScriptProblem: the text cannot be parsed; has the line.
    """
    script = Script()
    for name, value in given.items():
        script.variables.assign(name, value, add=False)
    for line in _SLURM.findall(text):
        script.sbatch_arguments += line.partition(" #")[0].split()
    _Interpreter(script, list(tokenize(text)), given).interpret()
    return script


@dataclass
class _Branch:
    """An `if`: whether the current branch runs, and whether a branch has run before."""

    runs: bool
    done: bool
    unknown_line: int = 0


class _Interpreter:
    """Interprets a token list; appends commands and notes to `script`."""

    def __init__(self, script: Script, tokens: Sequence[Token], given: Mapping[str, str]) -> None:
        self.script, self.tokens, self.given = script, tokens, given
        self.at = 0
        self.branches: list[_Branch] = []
        self.skip_next = False

    def interpret(self) -> None:
        """Interpret all tokens."""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            keyword = token.plain
            if token.heredoc:
                self._heredoc(token)
            elif token.parts is None and token.items is None:
                self.at += 1
                self.skip_next = False if token.text in ("\n", ";") else self.skip_next
            elif keyword in ("if", "elif"):
                self._condition(keyword)
            elif keyword in ("then", "{", "}", "!", "do", "done", "time"):
                self.at += 1
            elif keyword == "else":
                self._else()
            elif keyword == "fi":
                self.at += 1
                if self.branches:
                    self.branches.pop()
            elif keyword in _LOOPS:
                self._skip_loop(keyword, _LOOPS[keyword])
            else:
                self._simple()

    @property
    def active(self) -> bool:
        return all(branch.runs for branch in self.branches)

    def _condition(self, keyword: str) -> None:
        """Interpret the condition of an `if` or `elif`; an unknown condition skips its branch."""
        line = self.tokens[self.at].line
        self.at += 1
        condition: list[Token] = []
        while self.at < len(self.tokens) and self.tokens[self.at].plain != "then":
            condition.append(self.tokens[self.at])
            self.at += 1
        if keyword == "if":
            outer = self.active
            holds = self._holds(condition) if outer else False
            self.branches.append(_Branch(bool(holds), bool(holds), 0 if holds is not None else line))
        elif self.branches:
            branch = self.branches[-1]
            holds = False if branch.done else self._holds(condition)
            branch.runs, branch.done = bool(holds), branch.done or bool(holds)
            branch.unknown_line = line if holds is None else 0

    def _else(self) -> None:
        self.at += 1
        if self.branches:
            branch = self.branches[-1]
            branch.runs, branch.done, branch.unknown_line = not branch.done, True, 0

    def _skip_loop(self, opening: str, closing: str) -> None:
        """Skip a loop or a `case`. A loop that contains a command with flags is entered for one pass instead."""
        line, end = self.tokens[self.at].line, self._end_of_loop()
        inside = self.tokens[self.at : end]
        variable = inside[1].plain if opening in ("for", "select") and len(inside) > 1 else None
        if self.active and opening != "case" and _has_flags(inside):
            self.script.notes.append(
                f"line {line}: the {opening} ... {closing} is imported as one pass"
                + (f"; the value of {variable} is unknown (--set {variable}=VALUE)" if variable else "")
            )
            if variable and variable not in self.given:
                self.script.variables.unset(variable)
            self.at += next((index for index, token in enumerate(inside) if token.plain == "do"), 0) + 1
            return
        sets = any(token.items is not None or _parse_assignment(token) is not None for token in inside)
        used = variable is not None and _uses(self.tokens[end:], variable)
        if self.active and (sets or used or _has_flags(inside)):
            self.script.notes.append(f"line {line}: the {opening} ... {closing} is skipped")
        self.at = end

    def _end_of_loop(self) -> int:
        """Return the index after the `done` or `esac` of the loop that starts at the current token."""
        depth = 0
        for index in range(self.at, len(self.tokens)):
            token = self.tokens[index]
            depth += (token.plain in _LOOPS) - (token.plain in ("done", "esac"))
            if depth == 0:
                return index + 1
        return len(self.tokens)

    def _simple(self) -> None:
        """Interpret one simple command, up to an operator."""
        start = self.at
        words: list[Token] = []
        in_brackets = False
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.heredoc:
                break
            in_brackets = (in_brackets or token.plain == "[[") and token.plain != "]]"
            if token.parts is None and token.items is None and not in_brackets:
                if token.text in _SEPARATORS:
                    break
                self.at += 2  # a redirection and its target
                continue
            words.append(token)
            self.at += 1
        self.at = max(self.at, start + 1)
        following = self.tokens[self.at].text if self.at < len(self.tokens) else ""
        after = self.tokens[start - 1].text if start else ""
        skipped, self.skip_next = self.skip_next or not self.active, False
        if words and not skipped:
            holds = self._run(words, after)
        else:
            holds = None if skipped else True
            self._note_skipped(words)
        if following in ("&&", "||"):
            self.skip_next = skipped or (not holds if following == "&&" else holds is not False)

    def _note_skipped(self, words: Sequence[Token]) -> None:
        branch = next((b for b in self.branches if b.unknown_line), None)
        if branch is None or branch.runs:
            return
        if any(word.items is not None or _parse_assignment(word) for word in words):
            self.script.notes.append(
                f"line {branch.unknown_line}: the condition depends on the running shell; its branch is skipped"
            )
            branch.unknown_line = 0

    def _run(self, words: list[Token], after: str) -> bool | None:
        """Interpret one command, which comes after an operator; return whether it succeeds, None if unknown."""
        variables = self.script.variables
        head = words[0].plain
        if head in ("[", "[[", "test"):
            return self._test(words)
        if head == "unset":
            for word in words[1:]:
                variables.unset(word.plain or "")
            return True
        declaring = head in _DECLARING
        rest = words[1:] if declaring else words
        while rest and self._assign(rest[0], head == "export"):
            rest = rest[1:]
        if declaring or not rest:
            return True
        if rest[0].plain in ("source", "."):
            name = " ".join(field for word in rest[1:] for field in variables.fields(word.parts or ()))
            self.script.notes.append(f"line {rest[0].line}: the file {name} is not read")
        fields = [field for word in rest for field in variables.fields(word.parts or ())]
        if fields:
            self.script.commands.append(Command(rest[0].line, tuple(fields), after))
        return True

    def _assign(self, word: Token, export: bool) -> bool:
        """Interpret a word as an assignment; return False if it is none. Given variables are not overwritten."""
        variables = self.script.variables
        if word.items is not None:
            name = word.text.rstrip("=").rstrip("+")
            items = tuple(field for item in word.items for field in variables.fields(item))
            if name not in self.given:
                variables.assign_array(name, items, word.text.endswith("+="))
            return True
        match = _parse_assignment(word)
        if match is None or word.parts is None:
            return export and word.plain is not None and word.plain.isidentifier()
        first = word.parts[0]
        value = variables.text((type(first)("text", match[3], False), *word.parts[1:]))
        if match[1] not in self.given:
            variables.assign(match[1], value, match[2] == "+")
        if export:
            self.script.exports.append(f"{match[1]}={value}")
        return True

    def _heredoc(self, token: Token) -> None:
        """Interpret a here-document as a script, which it often is (sbatch <<EOF)."""
        self.at += 1
        literal = bool(token.parts and token.parts[0].quoted)
        if self.active and "--" in token.text and not literal:
            for line in _SLURM.findall(token.text):
                self.script.sbatch_arguments += line.split()
            _Interpreter(self.script, list(tokenize(token.text)), self.given).interpret()

    def _holds(self, condition: Sequence[Token]) -> bool | None:
        """Evaluate `[ ... ] || [[ ... ]] && ...`; None if unknown."""
        outcome: bool | None = None
        joined_by, group = "", list[Token]()
        in_brackets = False
        for token in [*condition, Token(0, "\n")]:
            in_brackets = (in_brackets or token.plain == "[[") and token.plain != "]]"
            if token.parts is None and not in_brackets and token.text in ("&&", "||", ";", "\n"):
                if group:
                    value = self._test(group)
                    outcome = value if not joined_by else _join(outcome, joined_by, value)
                    joined_by, group = token.text, []
            else:
                group.append(token)
        return outcome

    def _test(self, words: Sequence[Token]) -> bool | None:
        """Evaluate one test command with its -a, -o, && and ||; None if unknown."""
        negated = bool(words) and words[0].plain == "!"
        words = words[1:] if negated else words
        if not words or words[0].plain not in ("[", "[[", "test"):
            return None
        inner = [word for word in words[1:] if word.plain not in ("]", "]]")]
        outcome: bool | None = None
        joined_by, group = "", list[str]()
        for word in [*inner, Token(0, "\n")]:
            operator = word.text if word.parts is None else {"-a": "&&", "-o": "||"}.get(word.plain or "", "")
            if operator in ("&&", "||", "\n"):
                value = _comparison(group)
                outcome = value if not joined_by else _join(outcome, joined_by, value)
                joined_by, group = operator, []
            else:
                group.append(self._operand(word))
        return None if outcome is None else outcome != negated

    def _operand(self, word: Token) -> str:
        """Expand an operand. A variable that the script never sets is empty, as in a fresh shell."""
        text = self.script.variables.text(word.parts or ())
        return re.sub(r"\$\{\w+\}", "", text)


def _has_flags(tokens: Sequence[Token]) -> bool:
    """Return True if a token is a long flag, and not a `case` pattern (`--help)`)."""
    followed = zip(tokens, [*tokens[1:], Token(0, "\n")], strict=True)
    return any(
        token.plain is not None
        and token.plain.startswith("--")
        and len(token.plain) > 2
        and after.text not in (")", "|")
        for token, after in followed
    )


def _uses(tokens: Sequence[Token], variable: str) -> bool:
    """Return True if a token expands the variable."""
    parts = (part for token in tokens for words in (token.parts or (), *(token.items or ())) for part in words)
    return any(part.kind == "name" and part.text == variable for part in parts)


def _parse_assignment(word: Token) -> re.Match[str] | None:
    if not word.parts or word.parts[0].kind != "text" or word.parts[0].quoted:
        return None
    return _ASSIGNMENT.fullmatch(word.parts[0].text)


def _join(left: bool | None, by: str, right: bool | None) -> bool | None:
    if by == "||":
        return True if left or right else (None if left is None or right is None else False)
    return False if left is False or right is False else (None if left is None or right is None else True)


def _comparison(words: Sequence[str]) -> bool | None:
    """Evaluate `-n text`, `-z text`, `a == b`, `a -eq b` and the like; None for file tests and unknown values."""
    negated = bool(words) and words[0] == "!"
    words = words[1:] if negated else words
    value = _compare(list(words))
    return None if value is None else value != negated


def _compare(words: list[str]) -> bool | None:
    """Evaluate one comparison without negation."""
    if any(is_unresolved(word) for word in words):
        return None
    match words:
        case []:
            return False
        case [text]:
            return bool(text)
        case ["-n"]:
            return False
        case ["-z"]:
            return True
        case ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right] if not any(c in right for c in "*?["):
            return left == right
        case [left, "!=", right] if not any(c in right for c in "*?["):
            return left != right
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as how, right]:
            return _numbers(left, how, right)
    return None


def _numbers(left: str, how: str, right: str) -> bool | None:
    try:
        a, b = int(left or 0), int(right or 0)
    except ValueError:
        return None
    return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[how]


def split_text(script: Script, text: str) -> Iterator[str]:
    """Yield the words of a string that is a command line (`bash -c "..."`)."""
    for word in split_words(text):
        yield from script.variables.fields(word)
