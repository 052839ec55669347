"""Settings for flat scripts: the globals at the top of a script, overridden by the command line.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT. Unlike there, nothing is
executed: a config file holds lines `name = literal`.

A script calls `configure(globals())`. Its settings are the assignments of literals to lowercase
names, from the first one to that call or the next def, class or other block. What is computed there
has a name in capitals or with a leading _, so that it cannot pass for a setting.

A value must have the type of the setting's default, where a number may stand for a tuple of one; if
the default is None, any literal is allowed, and other text is a string. The script may define
RANGES, the allowed values by name: a pair (low, high) for a number or for each number of a tuple,
or a list of values. Every other number must be at least 0, unless its default is negative.
"""

import ast
import contextlib
import difflib
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable

from support.script import UserError, find_rank

from support.values import BROKEN, convert, literal, problem_of, tuples

EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string'}


def assigned_names(node: ast.stmt) -> list[str]:
    """Return the names to which a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    found = [x for target in targets for x in ast.walk(target)]
    return [x.id for x in found if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]


def calls_configure(node: ast.stmt) -> bool:
    """Return whether a statement calls `configure`."""
    calls = [ast.unparse(x.func) for x in ast.walk(node) if isinstance(x, ast.Call)]
    return any(name.rpartition('.')[2] == 'configure' for name in calls)


class Script:
    """The settings of a script, as its source has them."""

    def __init__(self, path: str | os.PathLike, ranges: dict | None = None):
        """ranges: the script's RANGES. Reads `defaults`, {name: default} in source order; `lines`,
        the source lines with settings; and `docstring`."""
        self.name = os.path.basename(path)
        self.ranges = ranges or {}
        source = pathlib.Path(path).read_text(encoding='utf-8')
        tree = ast.parse(source)
        self.docstring = ast.get_docstring(tree, clean=False) or ''
        self.defaults = {}
        first, last = 0, 0  # of the lines with settings
        lines = source.split('\n')
        has_code = False  # a function or class has been passed
        for node in tree.body:
            has_code |= isinstance(node, ast.FunctionDef | ast.ClassDef)
            if self.defaults and (hasattr(node, 'body') or calls_configure(node)):
                break
            names = assigned_names(node)
            if not any(name == name.lower() and not name.startswith('_') for name in names):
                if not self.defaults:
                    first = node.end_lineno  # docstring, imports
                continue
            try:
                (name,) = names
                value = literal(None if isinstance(node, ast.AugAssign) else node.value)
            except ValueError:  # as no setting, it would be missing from the model and the run
                if has_code and not self.defaults:
                    continue  # a module without settings
                line = f'{path}:{node.lineno}: {lines[node.lineno - 1].strip()[:60]!r}'
                advice = 'write its value, or compute it as a NAME in capitals or a _name'
                raise UserError(f'{line}: a setting must be a literal: {advice}') from None
            self.defaults[name] = value
            last = node.end_lineno
        while last < len(lines) and re.match(' +#', lines[last]):
            last += 1  # further lines of the last comment
        self.lines = lines[first:last]

    def check(self, name: str, value: object, source: str) -> object:
        """Return the value for the setting `name` in the type of its default. Raises UserError,
        which names the `source` of the value, if there is no such setting or it cannot have the
        value."""
        if name not in self.defaults:
            similar = difflib.get_close_matches(name.replace('-', '_').lower(), self.defaults, n=1)
            hint = f'did you mean {similar[0]!r}?' if similar else '--help lists the settings'
            raise UserError(f'{source}: unknown setting {name!r}, {hint}')
        default, allowed = self.defaults[name], self.ranges.get(name)
        try:
            if not isinstance(allowed, list):
                value = convert(value, default)
        except ValueError:
            expected = EXPECTED.get(type(default), f'a {type(default).__name__}')
            got = f'(default {default!r}), got {str(value)[:120]!r}'
            raise UserError(f'{source}: {name} expects {expected} {got}') from None
        if isinstance(value, str):  # '~/data' and 'FILE:~/data'
            marker, path = re.fullmatch('(FILE:)?(.*)', value, re.DOTALL).groups('')
            value = marker + os.path.expanduser(path)
        if problem := problem_of(name, value, default, allowed):
            raise UserError(f'{source}: {problem}')
        return value

    def read_argument(self, argument: str, rest: list[str]) -> dict:
        """Return the setting {name: value} of `--name=value`, or of `--name value`, whose value is
        then removed from `rest`, the arguments that follow."""
        name, equals, text = argument[2:].partition('=')
        default, allowed = self.defaults.get(name), self.ranges.get(name)
        if not equals and name in self.defaults:
            value = rest[0] if rest else '--'
            if default is None or isinstance(default, bool):
                if not value.startswith('-') and not value.endswith('.py'):
                    raise UserError(f'command line: a switch takes its value as --{name}={value}')
                text = 'True'
            elif value.startswith('--'):
                raise UserError(f'command line: --{name} needs a value, as in --{name}={default}')
            else:
                text = rest.pop(0)
        value = text  # for a string: --out_dir=123 means '123'
        if not isinstance(default, str) and not (isinstance(allowed, list) and text in allowed):
            with contextlib.suppress(ValueError):  # then `check` refuses the text
                value = literal(text.strip())
        return {name: self.check(name, value, 'command line')}

    def read_config(self, path: str) -> dict:
        """Return the settings in a config file: lines `name = literal`, comments, a docstring."""
        try:
            with warnings.catch_warnings(action='ignore'):  # about unknown escapes such as \d
                body = ast.parse(pathlib.Path(path).read_bytes()).body
        except OSError as error:
            raise UserError(f'{path}: cannot read the config file: {error.strerror}') from None
        except BROKEN as error:
            line = getattr(error, 'lineno', None) or 1
            reason = getattr(error, 'msg', None) or error
            raise UserError(f'{path}:{line}: not a valid config file: {reason}') from None
        found = {}
        for node in body:
            source = f'{path}:{node.lineno}'
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    continue  # docstring
                case ast.Assign(targets=[ast.Name(id=name)]):
                    pass
                case _:
                    text = ast.unparse(node).partition('\n')[0][:60]
                    allowed = 'a config file holds only `name = literal` lines'
                    raise UserError(f'{source}: {allowed}, not {text!r}')
            try:
                value = literal(node.value)
            except ValueError as error:
                raise UserError(f'{source}: {name}: {error}') from None
            found[name] = self.check(name, value, source)
        return found

    def help(self) -> str:
        """Return the text of --help: the docstring, the usage, and the settings with their comments
        and headings."""
        usage = f'usage: python {self.name} [config.py ...] [--key=value ...]'
        text = [self.docstring, '', usage, '']
        for line in self.lines:
            name = re.split(' = |:', line)[0]
            comment = line.partition('  # ')[2]
            if name in self.defaults:
                text.append(f'  --{name}={self.defaults[name]!r}'.ljust(40) + comment)
            elif line.startswith(' '):
                text[-1] += ' ' + line.strip(' #')  # a comment's second line
            elif not line.startswith('# fmt') and line.strip('#-=* '):
                if text[-1]:
                    text.append('')
                text.append(line.strip('#-=* '))  # a heading
        return '\n'.join(line.rstrip() for line in text).strip()


# ---- all settings ----


class Settings(dict):
    """All settings of a script by name, in the order of the source. `from_files` and
    `from_command_line` hold those that config files and the command line set, even to their
    `defaults`."""

    def __init__(self, defaults: dict, from_files: dict, from_command_line: dict):
        super().__init__({**defaults, **from_files, **from_command_line})
        self.defaults = defaults
        self.from_files = from_files
        self.from_command_line = from_command_line

    @property
    def set_by_user(self) -> set[str]:
        """Return the names of the settings that config files or the command line set."""
        return {*self.from_files, *self.from_command_line}

    def adopt(
        self,
        saved: dict,
        names: Iterable[str],
        source: str,
        depends_on: dict[str, tuple[str, ...]],
        report: Callable[[str], None] = print,
    ) -> None:
        """Take the settings `names` from `saved`, where it has them and the user has set none, and
        print those that change.

        depends_on: by setting, those (earlier in `names`) without whose value it makes no sense. If
        one of these has another value in `saved`, the setting is not taken, and a line says so.
        Raises UserError, which names the `source`, for a value of another type."""
        saved = {**self.defaults, **saved}
        for name in names:
            value = tuples(saved[name])  # of JSON
            differ = [other for other in depends_on.get(name, ()) if saved[other] != self[other]]
            if name in self.set_by_user or value == self[name]:
                continue
            if differ:
                report(f'{name} = {value!r} of {source} is not taken: {differ[0]} differs')
                continue
            try:
                self[name] = convert(value, self.defaults[name])
            except ValueError:
                raise UserError(f'{source}: damaged: {name} = {value!r}') from None
            report(f'{name} = {self[name]!r}  (from {source})')

    def show(self, report: Callable[[str], None] = print) -> None:
        """Print the settings that differ from their defaults, and those that the command line sets
        to an empty text, perhaps from an unset shell variable. report: prints a line."""
        for name, value in self.items():
            is_empty = self.from_command_line.get(name) == ''
            if is_empty or repr(value) != repr(self.defaults[name]):
                report(f'{name} = {value!r}  (default {self.defaults[name]!r})')


def check_folder(script: str) -> None:
    """Raise UserError if a script lies in another copy of the project than this module, where an
    edit of the modules beside the script would not be used."""
    used = pathlib.Path(__file__).resolve().parent
    for folder in pathlib.Path(script).resolve().parents:
        if folder == used:
            return
        if (folder / 'configurator.py').exists():
            advice = 'unset PYTHONPATH and PYTHONSAFEPATH, or restart the notebook'
            raise UserError(f'{script}: would run with the modules of {used}: {advice}')


def configure(settings: dict, argv: Iterable[str] | None = None, quiet: bool = False) -> Settings:
    """Override the settings of a script in place and return all of them.

    settings: the globals() of the script. The defaults are read from the source in its '__file__',
    so that two calls do not influence each other. argv: the arguments without the name of the
    script; None means those of the command line. Settings that differ from their defaults are
    printed, by rank 0 only, unless `quiet`. --help prints the settings and ends the
    script with status 0. Raises UserError."""
    check_folder(settings['__file__'])
    script = Script(settings['__file__'], settings.get('RANGES'))
    rest = sys.argv[1:] if argv is None else list(argv)
    if '--help' in rest or '-h' in rest:
        print(script.help())
        raise SystemExit(0)
    from_files, from_command_line = {}, {}
    while rest:
        argument = rest.pop(0)
        if argument.startswith('--'):
            from_command_line |= script.read_argument(argument, rest)
        elif argument.endswith('.py') and not argument.startswith('-'):
            found = script.read_config(argument)
            from_files |= found
            for name in found.keys() & from_command_line.keys():
                del from_command_line[name]  # a later argument wins
        else:
            expected = 'expected config.py or --key=value'
            raise UserError(f'command line: cannot read {argument!r}: {expected}')
    config = Settings(script.defaults, from_files, from_command_line)
    settings.update(config)
    if not quiet and find_rank()[0] == 0:
        config.show()
    return config
