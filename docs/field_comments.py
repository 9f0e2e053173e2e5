"""An extension of the API reference: what a comment or a setting says of a class's field is shown as its description.

The fields of askew's classes are described by the text given to `setting`, or by the comment on their line or above it.
It is added to the class's docstring as a list of attributes, which the reference shows as a table.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe


@cache
def comments(path: Path) -> dict[int, str]:
    """The comments that follow code, by their line."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1][: token.start[1]].strip()
    }


def comment_above(line: int, path: Path) -> str:
    """The comment in the lines right above a field, where it has too many words for the field's own line."""
    lines = path.read_text(encoding="utf-8").splitlines()[: line - 1]
    above = takewhile(lambda text: text.startswith("#"), (text.strip() for text in reversed(lines)))
    return " ".join(text.lstrip("# ") for text in reversed(list(above)))


def setting_text(statement: ast.AnnAssign) -> str:
    """The text of a field that is declared as `name: type = setting("text", …)`; else nothing."""
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "setting":
        return ""
    texts = [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)]
    return str(texts[0]) if texts else ""


def field_descriptions(node: ast.ClassDef, path: Path) -> dict[str, str]:
    """The descriptions of a class's public fields, by their name."""
    found: dict[str, str] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            text = setting_text(statement) or comments(path).get(statement.end_lineno or 0, "")
            text = text or comment_above(statement.lineno, path)
            if not name.startswith("_"):
                found[name] = text
    return found


class FieldComments(griffe.Extension):
    """Adds the attributes of a class to its docstring."""

    def on_class_instance(self, *, node: ast.AST | griffe.ObjectNode, cls: griffe.Class, **kwargs: Any) -> None:
        if not isinstance(node, ast.ClassDef) or not isinstance(cls.filepath, Path):
            return
        fields = field_descriptions(node, cls.filepath)
        if not any(fields.values()):
            return
        lines = [f"    {name}: {text or '–'}" for name, text in fields.items()]
        text = cls.docstring.value if cls.docstring else ""
        cls.docstring = griffe.Docstring("\n".join([text, "", "Attributes:", *lines]), parent=cls)
