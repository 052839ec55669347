"""Values of settings: literals, their types and their ranges."""

import ast
import math
import warnings
from dataclasses import fields

from support.script import UserError

# Exceptions that parsing can raise, whatever the text is.
BROKEN = (SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError)


def tuples(value: object) -> object:
    """Return a value from JSON with tuples for its lists, also for those within lists."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def literal(source: str | ast.expr) -> object:
    """Return the value of a literal: a string, a finite number, True, False, None, or a tuple or
    list of these (as a tuple). Raises ValueError for anything else. Nothing is executed."""

    def check(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(check(item) for item in value)
        if value is None or isinstance(value, str):
            return value
        limit = 2**64 if isinstance(value, int) else math.inf
        if not abs(value) < limit:  # this refuses NaN as well
            raise ValueError('not finite, or too large')
        return value

    try:
        with warnings.catch_warnings(action='ignore'):  # about unknown escapes such as \d
            return check(ast.literal_eval(source))
    except BROKEN:
        allowed = 'text, finite numbers, True, False, None, tuples'
        raise ValueError(f'only literals are allowed: {allowed}') from None


def convert(value: object, default: object) -> object:
    """Return `value` in the type of `default`; an int may stand for a float, and a number for a
    tuple of one. Raises ValueError if the types differ."""
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) is tuple and type(value) in (int, float):
        value = (value,)
    if type(default) is type(value) is tuple:
        if len({type(item) for item in default}) != 1:
            return value
        return tuple(convert(item, default[0]) for item in value)  # items of one type
    if default is None or type(value) is type(default):
        return value
    raise ValueError('wrong type')


def problem_of(name: str, value: object, default: object, allowed: object) -> str:
    """Return what is wrong with a value of the right type, '' if nothing is. allowed: the
    setting's entry in RANGES (configurator.py), None if it has none."""
    if isinstance(allowed, list):
        if not any(type(x) is type(value) and x == value for x in allowed):  # 1 is not True
            choices = ', '.join(str(x) or "''" for x in allowed)
            return f'{name} = {value!r}: expected one of {choices}'
        return ''
    if isinstance(value, str):
        if name.endswith('_dir') and default and not value:
            return f'{name} is empty: name a folder'
        return ''
    numbers = [x for x in (value if isinstance(value, tuple) else (value,)) if type(x) is not bool]
    if allowed and not all(type(x) in (int, float) for x in numbers):
        return f'{name} = {value!r}: expected numbers'
    low, high = allowed or (0, math.inf)
    if not allowed and type(default) in (int, float) and default < 0:
        low = -math.inf
    if all(type(x) in (int, float) for x in numbers) and not all(low <= x <= high for x in numbers):
        limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
        return f'{name} = {value}: must be {limits}'
    return ''


def check_fields(config: object, ranges: dict) -> None:
    """Raise UserError, naming the field, if a field of a dataclass has another type than its
    default, or a value outside of its range. ranges: allowed values by field, as in a script's
    RANGES. Without a range, an integer whose default is at least 1 must be at least 1."""
    for field in fields(config):
        name, value, default = field.name, getattr(config, field.name), field.default
        allowed = ranges.get(name)
        if allowed is None and type(default) is int and default > 0:
            allowed = (1, math.inf)
        if type(default) in (int, str, bool) and type(value) is not type(default):
            raise UserError(f'{name} = {value!r}: expected one {type(default).__name__}')
        if problem := problem_of(name, value, default, allowed):
            raise UserError(problem)
