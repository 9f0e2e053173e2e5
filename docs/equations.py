"""Typeset the equations of the methods when the site is built: plain text becomes MathML, which browsers show by
themselves, without a script or a font from elsewhere. In the repository the pages keep the plain text.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any

FENCE = re.compile(r"^```equation\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GAP = re.compile(r" {2,}")  # between columns, or before a remark
WORD = r"(?:a[ ])?[A-Za-z][A-Za-z0-9-]+"  # with its article: an "a" that stands alone is a letter
TOKEN = re.compile(
    rf"(?P<words>'s\b|[A-Za-z]{{2,}}(?:_[a-z]{{2,}})+|{WORD}(?:[ ]{WORD})*(?![^\W_]))"
    r"|(?P<power>[²⁺⁰ᵀ₁₂'])|(?P<letter>[^\W\d_](?:\u0304)?\d?)|(?P<number>\d+(?:\.\d+)?)|(?P<space>\s+)|(?P<sign>.)"
)
ALIGNED = 3  # lines with a column at the same place
POWERS = {"²": "2", "⁺": "+", "⁰": "0", "ᵀ": "T", "'": "′"}
INDICES = {"₁": "1", "₂": "2"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its equations as MathML; mkdocs calls this for every page."""
    return FENCE.sub(lambda found: equation_block(found[1]), markdown)


def equation_block(text: str) -> str:
    """Lines of equations as a block of HTML; where columns of three lines or more are aligned, a table."""
    lines = text.splitlines()
    columns = Counter(found.end() for line in lines if (found := GAP.search(line.strip())))
    parts = [[f"<math>{to_mathml(part)}</math>" for part in GAP.split(line.strip())] for line in lines]
    if columns and columns.most_common(1)[0][1] >= ALIGNED:
        rows = (
            f'<td colspan="9">{line[0]}</td>' if len(line) == 1 else "".join(f"<td>{part}</td>" for part in line)
            for line in parts
        )
        return f'<div class="equation"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
    return f'<div class="equation">{lines_of(parts)}</div>'


def lines_of(parts: list[list[str]]) -> str:
    """Lines of HTML, the parts of each beside each other."""
    return "".join(f"<p>{''.join(line)}</p>" for line in parts)


def to_mathml(text: str) -> str:
    """One equation in MathML: letters, their indices, bars and powers, roots and exponents; words stay words."""
    atoms, position = list[str](), 0
    while position < len(text):
        if text[position] in "_^" and atoms:
            tag = "msub" if text[position] == "_" else "msup"
            raw, position = read_argument(text, position + 1)
            atoms.append(f"<{tag}>{atoms.pop()}<mrow>{to_mathml(raw.strip('{}'))}</mrow></{tag}>")
            continue
        if text[position] == "√":
            raw, position = read_argument(text, position + 1)
            atoms.append(f"<msqrt>{to_mathml(raw)}</msqrt>")
            continue
        found = TOKEN.match(text, position)
        assert found is not None
        position = found.end()
        add_token(atoms, str(found.lastgroup), found[0])
    return "".join(atoms)


def read_argument(text: str, start: int) -> tuple[str, int]:
    """What an index, an exponent or a root applies to, and where it ends: {…}, or letters and digits."""
    found = re.compile(r"\{(?:[^{}])*\}|[^\W_]+").match(text, start)
    assert found is not None, text
    return found[0], found.end()


def add_token(atoms: list[str], kind: str, token: str) -> None:
    """Append a token's MathML; a power or a small index joins what stands before it."""
    if kind == "power" and atoms:
        tag, sign = ("msub", INDICES[token]) if token in INDICES else ("msup", POWERS[token])
        atoms.append(f"<{tag}>{atoms.pop()}<mo>{sign}</mo></{tag}>")
    elif kind == "letter":
        letter = f"<mi>{token[0]}</mi>"
        letter = f"<mover>{letter}<mo>¯</mo></mover>" if "\u0304" in token else letter
        atoms.append(f"<msub>{letter}<mn>{token[-1]}</mn></msub>" if token[-1].isdigit() else letter)
    elif kind == "words":
        atoms.append(f"<mtext>{escape(token)}</mtext>")
    elif kind == "space":
        atoms.append('<mspace width=".15em"></mspace>')
    else:
        tag = "mn" if kind == "number" else "mo"
        atoms.append(f'<{tag} stretchy="false">{escape(token)}</{tag}>' if tag == "mo" else f"<mn>{token}</mn>")
