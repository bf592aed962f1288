"""Answers that a reasoning-gym dataset would run as code, screened before it sees them.

Some datasets read an answer with Python's ``eval`` or sympy's ``parse_expr`` (which evaluates too), in the process that
trains: a policy's text could run anything there, or stop everything with one ``9**9**9``. What a right answer never
needs is not passed on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

MAX_LENGTH = 4000
"""characters of an answer to an evaluating dataset"""
MAX_DIGITS = 20
"""digits of a number in such an answer"""
MAX_EXPONENT = 100

_LITERAL_NODES = (
    ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load,
)  # fmt: skip
_EXPRESSION_NODES = (
    ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UnaryOp, ast.USub, ast.UAdd,
    ast.Constant, ast.Name, ast.Call, ast.Load,
)  # fmt: skip
_TRIGONOMETRIC = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
_FUNCTIONS = frozenset({*_TRIGONOMETRIC, *_HYPERBOLIC, "exp", "log", "ln", "sqrt", "Abs", "erf"})
_NAME = re.compile(r"[A-Za-z]{1,3}")


def is_literal(answer: str) -> bool:
    """Whether ``eval`` of it does nothing: a list, a number or a string as Python writes them, or no Python at all.

    Example:
        >>> is_literal("[[0, 1], [1, 0]]"), is_literal("0 1\\n1 0"), is_literal("exit()")
        (True, True, False)
    """
    tree = _tree(answer)
    if tree is None:
        return len(answer) <= MAX_LENGTH
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def is_arithmetic(answer: str) -> bool:
    """Whether it is a sum of numbers, parentheses, ``+ - * /`` and nothing else.

    Example:
        >>> is_arithmetic("(3 + 5) * 2/4"), is_arithmetic("9**9**9"), is_arithmetic("x + 1")
        (True, False, False)
    """
    tree = _tree(answer)
    return tree is not None and all(
        _is_plain(node) and not isinstance(node, ast.Pow | ast.Name | ast.Call) for node in ast.walk(tree)
    )


def is_expression(answer: str) -> bool:
    """Whether it is a formula of short names, known functions and bounded powers.

    Example:
        >>> is_expression("x**3/3 + sin(2*x) + C"), is_expression("open(x)"), is_expression("x**(9**9)")
        (True, False, False)
    """
    tree = _tree(answer)
    if tree is None or not all(_is_plain(node) for node in ast.walk(tree)):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords:
                return False
        elif isinstance(node, ast.Name):
            if id(node) not in called and not _NAME.fullmatch(node.id):
                return False
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_small(node.right):
            return False
    return _power_depth(tree) <= 2


SCREENS: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "intermediate_integration": is_expression,
    "polynomial_multiplication": is_expression,
    "simple_integration": is_expression,
}
"""datasets that evaluate answers, and what an answer to them must be"""


def _tree(answer: str) -> ast.Expression | None:
    """Its syntax tree, ``^`` read as a power as sympy does; None if it is no Python expression."""
    if len(answer) > MAX_LENGTH:
        return None
    try:
        return ast.parse(answer.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_plain(node: ast.AST) -> bool:
    """Whether it is a node of formulas, and its number, if it has one, is short."""
    if isinstance(node, ast.Constant):
        value = node.value
        return isinstance(value, int | float) and not isinstance(value, bool) and len(str(value)) <= MAX_DIGITS
    return isinstance(node, _EXPRESSION_NODES)


def _is_small(exponent: ast.expr) -> bool:
    """Whether an exponent has no powers or products of its own, and no number above ``MAX_EXPONENT``."""
    return not any(
        isinstance(node, ast.Pow | ast.Mult)
        or (isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) > MAX_EXPONENT)
        for node in ast.walk(exponent)
    )


def _power_depth(node: ast.AST) -> int:
    """How deep powers are nested: 2 in ``(x**2 + 1)**3``."""
    deepest = max((_power_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
