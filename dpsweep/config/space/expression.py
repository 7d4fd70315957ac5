"""Arithmetic over a trial's keys, as `where:` and `derive:` write it; parsed, never run.

    train.epochs * data.size / train.batch_size <= 20000
    0.01 * sqrt(train.batch_size)
    method.name in ["disk", "fftkf"] and 0.1 < method.kappa < 1

A formula is read by Python's own parser and walked node by node; what is not listed in this file
is refused, so a file cannot call, index or import anything. Names are dotted keys of the trial
config, letters of the papers included, and `data.size`, the number of training examples.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpsweep.core.errors import suggest_names

Scalar = int | float | str | bool
Lookup = Callable[[str], Any]
"""The value of a dotted key; raises FormulaError if there is none to use."""

_MOST_CHARACTERS = 500
_MOST_EXPONENT = 64
"""Powers of whole numbers beyond this are computed as real ones."""


class FormulaError(ValueError):
    """A formula that cannot be read or has no value; says why, and the caller says where."""


@dataclass(frozen=True)
class Formula:
    """One expression."""

    text: str  # as it was written
    node: ast.expr = field(repr=False, compare=False)  # as Python's parser reads it
    names: Mapping[str, str]  # dotted key as written -> its proper spelling

    def resolve_aliases(self, spell: Callable[[str], str]) -> "Formula":
        """The same with each name's spelling given by `spell`."""
        return Formula(self.text, self.node, {name: spell(name) for name in self.names})

    def value(self, lookup: Lookup) -> Scalar:
        """Compute the value; FormulaError if it has no finite value."""
        found = _evaluate(self.node, lambda name: lookup(self.names[name]))
        if isinstance(found, list):
            raise FormulaError("is a list, which only `in` can use")
        return found  # type: ignore[no-any-return]

    def holds(self, lookup: Lookup) -> bool:
        """The answer of a formula that is a condition; FormulaError if it is a number or a text."""
        found = self.value(lookup)
        if not isinstance(found, bool):
            raise FormulaError(
                f"is {_format_value(found)}, not true or false. Compare it with something"
            )
        return found


def parse_formula(text: str) -> Formula:
    """Read one expression.

    Raises:
        FormulaError: If it is none, or uses what is not allowed.

    >>> formula = parse_formula("train.epochs * data.size <= 5000")
    >>> sorted(formula.names), formula.holds({"train.epochs": 3, "data.size": 1437}.get)
    (['data.size', 'train.epochs'], True)
    """
    if len(text) > _MOST_CHARACTERS:
        raise FormulaError(f"has {len(text)} characters; at most {_MOST_CHARACTERS} are read")
    try:
        node = ast.parse(_escape_lambda(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise FormulaError(
            f"{text!r} is no formula: {getattr(e, 'msg', e)}. Write one such as "
            f"train.epochs * data.size / train.batch_size <= 20000"
        ) from e
    names: dict[str, str] = {}
    _check_node(node, names)
    return Formula(text, node, names)


def _escape_lambda(text: str) -> str:
    """`text` with the letter lambda, a word of Python's own, as a name."""
    return re.sub(r"(?<=\.)lambda\b", "lambda_", text)


def _check_node(node: ast.AST, names: dict[str, str]) -> None:
    """Raise FormulaError for a node that is not on the list; note the names on the way."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Name() | ast.Attribute():
            name = _get_dotted_name(node)
            if name not in _WORDS:
                names[name] = name
            return
        case ast.Call(func=ast.Name(id=called), args=args, keywords=[]):
            if called not in _FUNCTIONS:
                raise FormulaError(
                    f"unknown function {called!r}.{suggest_names(called, _FUNCTIONS)}"
                )
            parts: list[ast.expr] = args
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            parts = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            parts = [left, right]
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            pass
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            parts = [left, *others]
        case _:
            raise FormulaError(
                f"{ast.unparse(node)!r} is not allowed. A formula has keys, numbers, texts, "
                f"+ - * / // % **, comparisons, in, and, or, not, and {', '.join(_FUNCTIONS)}"
            )
    for part in parts:
        _check_node(part, names)


def _get_dotted_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return (
                f"{_get_dotted_name(inner)}.{name.removesuffix('_') if name == 'lambda_' else name}"
            )
    raise FormulaError(f"{ast.unparse(node)!r} is not allowed: a key is words and dots")


def _evaluate(node: ast.expr, lookup: Lookup) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            name = _get_dotted_name(node)
            return _WORDS[name] if name in _WORDS else lookup(name)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, lookup) for item in items]
        case ast.BoolOp(op=op, values=values):
            answers = (_require_bool(_evaluate(value, lookup)) for value in values)
            return all(answers) if isinstance(op, ast.And) else any(answers)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _require_bool(_evaluate(operand, lookup))
        case ast.UnaryOp(op=op, operand=operand):
            return _call_function(_UNARY[type(op)], _evaluate(operand, lookup))
        case ast.BinOp(left=left, op=op, right=right):
            return _call_function(
                _BINARY[type(op)], _evaluate(left, lookup), _evaluate(right, lookup)
            )
        case ast.Call(func=ast.Name(id=called), args=args):
            return _call_function(_FUNCTIONS[called], *(_evaluate(arg, lookup) for arg in args))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_evaluate(each, lookup) for each in (left, *others)]
            pairs = zip(ops, values, values[1:], strict=False)
            return all(_compare(op, one, other) for op, one, other in pairs)
    raise AssertionError(f"{ast.dump(node)} passed the check")


def _require_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FormulaError(f"and, or, not take conditions, got {_format_value(value)}")
    return value


def _compare(op: ast.cmpop, one: Any, other: Any) -> bool:
    if isinstance(op, ast.In | ast.NotIn) != isinstance(other, list) or isinstance(one, list):
        raise FormulaError(
            f"in takes a list on its right, got {_format_value(one)} and {_format_value(other)}"
        )
    ordered = isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    if ordered and not (_is_number(one) and _is_number(other)):
        raise FormulaError(
            f"compares {_format_value(one)} with {_format_value(other)}; only numbers have order"
        )
    return bool(_COMPARISONS[type(op)](one, other))


def _call_function(function: Callable[..., Any], *numbers: Any) -> int | float:
    """The function's finite value; FormulaError where there is none."""
    wrong = [n for n in numbers if not _is_number(n)]
    if wrong or not numbers:
        raise FormulaError(f"computes with {_format_value(wrong[0]) if wrong else 'nothing'}")
    try:
        found = function(*numbers)
        finite = not isinstance(found, complex) and math.isfinite(found)
    except (ArithmeticError, ValueError, TypeError) as e:
        raise FormulaError(f"has no value at {', '.join(map(_format_value, numbers))}: {e}") from e
    if not finite:
        raise FormulaError(f"has no finite value at {', '.join(map(_format_value, numbers))}")
    return found  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compute_power(base: float, exponent: float) -> Any:
    """Base ** exponent; as a real number where whole ones would take long to write out."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and 0 <= exponent <= _MOST_EXPONENT:
        return base**exponent
    return float(base) ** float(exponent)


def _format_value(value: Any) -> str:
    return repr(value) if isinstance(value, str | list) else str(value).lower()


_WORDS = {"true": True, "false": False, "pi": math.pi}
_UNARY: Mapping[type, Callable[..., Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_BINARY: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _compute_power,
}
_COMPARISONS: Mapping[type, Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "max": lambda *xs: max(xs),
    "min": lambda *xs: min(xs),
    "round": lambda x: round(x),
    "sqrt": math.sqrt,
}
