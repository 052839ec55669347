"""Settings for flat scripts: the globals at the top of a script, overridden by the command line.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT. Unlike there, nothing is
executed: a config file holds lines `name = literal`.

A script calls `configure(globals())`. Its settings are the assignments of literals to lowercase
names that precede the first def, class or other block. A value must have the type of the setting's
default; if the default is None, any literal is allowed, and other text is a string. The script may
define RANGES, the allowed values by name: a pair (low, high) for a number or for each number of a
tuple, or a list of values. Every other number must be at least 0, unless its default is negative.

This module must be imported before torch: see GOMP_SPINCOUNT below.
"""

import ast
import contextlib
import difflib
import math
import os
import pathlib
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import NoReturn

# How long the threads of OpenMP spin between two parallel sections: by default so long that two
# programs on the same cores slow each other down tenfold. A program that runs alone does not get
# measurably slower (LOG.md). OpenMP reads this when torch is imported.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string'}
# Exceptions that parsing can raise, whatever the text is.
BROKEN = (SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError)

# What torchrun sets for each of its processes.
TORCHRUN = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')


class UserError(ValueError):
    """A user's mistake. The message is one line that names the file, folder or setting and says
    what to do. run_script prints it without a traceback."""


# ---- ranks ----


def under_torchrun() -> bool:
    """Return whether torchrun has started this process. RANK or WORLD_SIZE alone say nothing: pods,
    cluster images and parent processes leave them behind."""
    return all(os.environ.get(name) for name in TORCHRUN)


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, (0, 1) without torchrun. Raises
    UserError if the environment holds no such numbers."""
    if not under_torchrun():
        return 0, 1
    rank, world = os.environ['RANK'], os.environ['WORLD_SIZE']
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        advice = 'start it with torchrun, or unset them'
        raise UserError(f'RANK = {rank}, WORLD_SIZE = {world} in the environment: {advice}')
    return int(rank), int(world)


# ---- how a script prints and ends ----


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run main() and end the process with the exit status that it returns (None means 0).

    After a UserError or an OSError, such as a full disk, print one line and exit with 2. After a
    ctrl-C exit with 130. If the reader of standard output has ended (`| head`), exit with 0."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, 'reconfigure'):  # a closed stream is None
            stream.reconfigure(errors='replace')  # of what their encoding does not have
    status, line, rank = 0, '', 0
    try:
        try:
            rank, _ = find_rank()
            status = main() or 0
        except SystemExit as end:  # --help
            status = end.code or 0
        print(end='', flush=True)
    except KeyboardInterrupt:
        status, line = 130, '\ninterrupted'
    except UserError as error:
        status, line = 2, 'error: ' + ' '.join(str(error).splitlines())
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        status, line = 2, f'error: {f"{error.filename}: {error.strerror}" if named else error}'
        # Writing to standard output fails once more if that was the reason.
        broken = None if named else write_stdout(' ')
        if isinstance(broken, BrokenPipeError):
            status, line = 0, ''
        elif broken:
            line = f'error: standard output: {broken.strerror}'
        elif isinstance(error, ConnectionError):
            raise
    if line:
        if rank > 0:
            # If rank 0 has met the same mistake, torchrun ends this process meanwhile, and the
            # line is printed once.
            time.sleep(3)
        print(line, file=sys.stderr, flush=True)
    if under_torchrun():
        # A thread of gloo may outlive its process group and abort Python's shutdown (in 1 run of
        # 20; pytorch PR 179291).
        os._exit(status)
    sys.exit(status)


def write_stdout(text: str) -> OSError | None:
    """Write a text to standard output at once. If that fails, discard what is written from now on,
    and return the error."""
    try:
        print(text, end='', flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error
    return None


def print0(text: str) -> None:
    """Print on rank 0 only. If standard output cannot be written (a full disk, a terminal that is
    gone), nothing is printed from then on, because what is printed is not the run. If its reader
    has ended (`| head`), the process gets SIGTERM, at which a trainer saves and stops."""
    if find_rank()[0] == 0 and (error := write_stdout(f'{text}\n')):
        if isinstance(error, BrokenPipeError):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            warn(f'standard output is switched off: {error.strerror}')


def warn(text: str) -> None:
    """Print a warning on standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f'warning: {text}', file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:200]}'


# ---- values ----


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
    """Return `value` in the type of `default`; an int may stand for a float. Raises ValueError if
    the types differ."""
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) is type(value) is tuple:
        if len({type(item) for item in default}) != 1:
            return value
        return tuple(convert(item, default[0]) for item in value)  # items of one type
    if default is None or type(value) is type(default):
        return value
    raise ValueError('wrong type')


def problem_of(name: str, value: object, default: object, allowed: object) -> str:
    """Return what is wrong with a value of the right type, '' if nothing is. allowed: see RANGES
    above; None for a setting that is not there."""
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
    RANGES."""
    for field in fields(config):
        name, value, default = field.name, getattr(config, field.name), field.default
        if type(default) in (int, str, bool) and type(value) is not type(default):
            raise UserError(f'{name} = {value!r}: expected one {type(default).__name__}')
        if problem := problem_of(name, value, default, ranges.get(name)):
            raise UserError(problem)


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
        for node in tree.body:
            if hasattr(node, 'body'):
                break
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    with contextlib.suppress(ValueError):  # a computed value is not a setting
                        if name == name.lower() and not name.startswith('_'):
                            self.defaults[name] = literal(value)
                            last = node.end_lineno
                case _ if not self.defaults:
                    first = node.end_lineno  # docstring, imports
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
            name = line.partition(' = ')[0]
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

        depends_on: by setting, those (earlier in `names`) without whose value it makes no sense. It
        is not taken, and a line says so, if the user has set one of these to another value. Raises
        UserError, which names the `source`, for a value of another type."""
        saved = {**self.defaults, **saved}
        for name in names:
            value = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]  # of JSON
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
        """Print the settings that differ from their defaults. report: prints a line."""
        for name, value in self.items():
            if repr(value) != repr(self.defaults[name]):
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
