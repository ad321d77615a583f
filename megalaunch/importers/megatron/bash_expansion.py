"""Expand bash variables, arrays and integer arithmetic from a script's own assignments, without the environment.

Expansions that only a running shell could resolve stay in the text as `${NAME}` or `$(command)`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megalaunch.importers.megatron.bash_lexer import MAX_BYTES, Part, ScriptProblem, split_words

_NAME = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?!$-])(.*)", re.DOTALL)
_MAX_DEPTH = 20
_ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

Word = tuple[Part, ...]


def is_unresolved(text: str) -> bool:
    """Return True if a part of the text can be expanded only by a running shell."""
    return "${" in text or "$(" in text


@dataclass
class Variables:
    """The variables that the script has assigned so far: strings and arrays, by name."""

    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, tuple[str, ...]] = field(default_factory=dict)
    depth: int = 0

    def assign(self, name: str, value: str, add: bool) -> None:
        """Assign `NAME=value` or, with `add`, `NAME+=value`."""
        value = self.texts.get(name, "") + value if add else value
        if len(value) > MAX_BYTES:
            raise ScriptProblem(0, f"the variable {name} grows beyond {MAX_BYTES:,} characters")
        self.arrays.pop(name, None)
        self.texts[name] = value

    def assign_array(self, name: str, items: tuple[str, ...], add: bool) -> None:
        """Assign `NAME=( ... )` or, with `add`, `NAME+=( ... )`."""
        before = self.arrays.get(name, tuple(filter(None, [self.texts.get(name)]))) if add else ()
        items = (*before, *items)
        if sum(map(len, items)) + len(items) > MAX_BYTES:
            raise ScriptProblem(0, f"the array {name} grows beyond {MAX_BYTES:,} characters")
        self.texts.pop(name, None)
        self.arrays[name] = items

    def unset(self, name: str) -> None:
        """Remove a variable: `unset NAME`."""
        self.texts.pop(name, None)
        self.arrays.pop(name, None)

    def fields(self, word: Word) -> list[str]:
        """Expand a word into fields as bash does: none, one, or several by word splitting."""
        fields, solid = [""], False
        for part in word:
            if part.kind == "text":
                pieces = [part.text]
            else:
                values = self._values(part)
                pieces = values if part.quoted else [piece for value in values for piece in value.split()]
            solid = solid or part.quoted or any(pieces)
            if part.kind != "text" and not pieces and part.quoted and part.text.endswith("[@]"):
                solid = len(word) > 1 and solid
                continue
            for index, piece in enumerate(pieces):
                if index:
                    fields.append("")
                fields[-1] += piece
            if sum(map(len, fields)) > MAX_BYTES:
                raise ScriptProblem(0, f"a word expands beyond {MAX_BYTES:,} characters")
        return fields if solid and (len(fields) > 1 or fields[0] or any(part.quoted for part in word)) else []

    def text(self, word: Word) -> str:
        """Expand a word to one string, without word splitting, as in an assignment."""
        pieces = [part.text if part.kind == "text" else " ".join(self._values(part)) for part in word]
        return "".join(pieces)

    def _values(self, part: Part) -> list[str]:
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text)]
        if part.kind == "command":
            return [f"$({part.text})"]
        found = _NAME.fullmatch(part.text)
        if found is None:
            return [f"${{{part.text}}}"]
        return self._expand(found[1], found[2], part.text)

    def _expand(self, name: str, rest: str, expression: str) -> list[str]:
        """Expand `${name...}` to its values: plain, arrays, and the operators - = + ? with or without a colon."""
        known = self._known(name)
        if name in ("@", "*"):
            return []
        if rest in ("", "[@]", "[*]"):
            return [f"${{{expression}}}"] if known is None else known
        match = re.fullmatch(r"(?:\[[@*]\])?(:?)([-=+?])(.*)", rest, re.DOTALL)
        if match is None:
            return [f"${{{expression}}}"]
        has_value = known is not None and (not match[1] or any(known))
        if match[2] == "+":
            return self._other(match[3]) if has_value else []
        if has_value:
            return known or []
        if match[2] == "?":
            return [f"${{{name}}}"]
        value = self._other(match[3])
        if match[2] == "=":
            self.assign(name, " ".join(value), add=False)
        return value

    def _known(self, name: str) -> list[str] | None:
        if name in self.arrays:
            return list(self.arrays[name])
        return [self.texts[name]] if name in self.texts else None

    def _other(self, text: str) -> list[str]:
        """Expand the default value of `${NAME:-default}` and its variants."""
        if self.depth >= _MAX_DEPTH:
            raise ScriptProblem(0, f"defaults are nested deeper than {_MAX_DEPTH} levels")
        self.depth += 1
        try:
            return [self.text(word) for word in split_words(text)] or [""]
        finally:
            self.depth -= 1

    def _arithmetic(self, text: str) -> str:
        plain = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)", lambda m: self.texts.get(m[1] or m[2], "?"), text)
        number = evaluate_integer(plain)
        return f"$(({text}))" if number is None else str(number)


def evaluate_integer(text: str) -> int | None:
    """Evaluate an expression of integers, + - * / % and parentheses; None for anything else."""
    if len(text) > 200:
        return None
    try:
        tree = ast.parse(text.strip().replace("/", "//").replace("////", "//"), mode="eval")
        return _evaluate(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        if abs(value) > 10**18:
            raise ValueError("too large")
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("not integer arithmetic")


def known_texts(variables: Variables) -> Mapping[str, str]:
    """Return every variable as a string, with the elements of arrays joined."""
    return variables.texts | {name: " ".join(items) for name, items in variables.arrays.items()}
