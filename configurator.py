"""Settings for flat scripts: the globals at the top of a script, overridden by the command line.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT. Unlike there, nothing is
executed: a config file holds lines `name = literal`.

A script calls `configure(globals())`. Its settings are the assignments of literals to lowercase
names that precede this call and the first def, class or other block. A value must have the type of
the setting's default. If the default is None, any literal is allowed, and other text is a string.
"""

import ast
import contextlib
import difflib
import json
import math
import os
import pathlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

# A config file may come from a stranger, and must not be able to delete a run.
COMMAND_LINE_ONLY = ('overwrite',)
EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string'}
# Exceptions that parsing can raise, whatever the text is.
BROKEN = (SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError)

# ---- how a script starts and ends ----


class Mistake(ValueError):
    """A user's mistake. The message is one line that names the file, folder or setting and says
    what to do. run_script prints it without a traceback."""


def fail(message: str | Exception) -> NoReturn:
    """End the script because of a user's mistake: print one line on stderr and exit with 2."""
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def report_interrupt(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print one line for a ctrl-C that nothing has caught; for use as sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def setup_process() -> None:
    """Prepare the process of a script. Call it once, before torch is imported:

        if __name__ == '__main__':
            setup_process()

    A ctrl-C during the imports then ends the script with one line. And the threads of OpenMP spin
    for a shorter time between two parallel sections, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT is
    set: by default they spin so long that two programs on the same cores slow each other down
    tenfold. A program that runs alone does not get measurably slower (see LOG.md). OpenMP reads
    both variables when torch is imported."""
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '10000')
    sys.excepthook = report_interrupt


def run_script(
    main: Callable[[], int | None],
    interrupted: str = 'interrupted',
    explain: Callable[[Exception], str] | None = None,
) -> NoReturn:
    """Run main() and end the process with the exit status that it returns (None means 0).

    After a ctrl-C, print the line `interrupted` and exit with 130. After a Mistake or an OSError,
    such as a full disk, print one line and exit with 2. The same goes for a RuntimeError or a
    MemoryError about which explain(error) returns a line; it raises errors that it does not know
    (see common.error_explainer). If the reader of a pipe has ended (`| head`), exit with 0."""
    status = 0
    line = ''
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:
        status, line = 130, f'\n{interrupted}'
    except BrokenPipeError:
        pass
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        message = f'{error.filename}: {error.strerror}' if named else error
        status, line = 2, f'error: {message}'
    except Mistake as error:
        status, line = 2, f'error: {error}'
    except (RuntimeError, MemoryError) as error:
        if explain is None:
            raise
        status, line = 2, f'error: {explain(error)}'
    try:
        # Flush. After an error, also print a newline: if the error is that standard output is on a
        # full disk, the newline raises it again.
        print(end='\n' if line.startswith('error') else '', flush=True)
    except OSError as error:
        # Otherwise Python would fail once more, when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            status, line = 2, f'error: standard output: {error.strerror}'
    if line:
        print(line, file=sys.stderr, flush=True)
    if 'RANK' in os.environ:
        # A thread of gloo may outlive its process group and abort Python's shutdown (in 1 run of
        # 20; pytorch PR 179291).
        os._exit(status)
    sys.exit(status)


def every(seconds: float = 10.0) -> Callable[..., bool]:
    """Return a function due() that is true at most once every `seconds`; for progress lines.
    due(restart=True) starts a new wait in any case."""
    last = time.monotonic()

    def due(restart: bool = False) -> bool:
        nonlocal last
        is_due = time.monotonic() - last >= seconds
        if restart or is_due:
            last = time.monotonic()
        return is_due

    return due


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


def assign(config: dict, defaults: dict, key: str, value: object, source: str, text: str) -> None:
    """Set config[key] = value. Ends the script if there is no such setting, or the value has the
    wrong type or holds a NUL character; the message names the `source` of the setting and the
    `text` that the user wrote."""
    if key not in defaults:
        similar = difflib.get_close_matches(key.replace('-', '_').lower(), defaults, n=1)
        hint = f'did you mean {similar[0]!r}?' if similar else '--help lists the settings'
        fail(f'{source}: unknown setting {key!r}, {hint}')
    default = defaults[key]
    try:
        config[key] = convert(value, default)
    except ValueError:
        expected = EXPECTED.get(type(default), f'a {type(default).__name__}')
        fail(f'{source}: {key} expects {expected} (default {default!r}), got {text[:120]!r}')
    if isinstance(value, str) and '\0' in value:
        fail(f'{source}: {key} holds a NUL character, which no path or name can hold')


# ---- scripts, config files, the command line ----


class Settings(dict):
    """All settings of a script by name, in the order of the source. `set_by_user` has the names of
    those that a config file or the command line sets, even to their defaults."""

    def __init__(self, defaults: dict, changes: dict):
        super().__init__({**defaults, **changes})
        self.set_by_user = set(changes)


parse_lock = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse Python source in one thread at a time, because Python 3.11 raises SystemError when two
    threads parse at once: it confuses their recursion depths."""
    with parse_lock:
        return ast.parse(source)


def read_script(path: str | os.PathLike) -> tuple[dict, list[str], str | None]:
    """Return the settings of a script as {name: default} in source order, the source lines from the
    first setting to the last, and the docstring."""
    source = pathlib.Path(path).read_text(encoding='utf-8')
    tree = parse(source)
    lines = source.split('\n')
    defaults = {}
    first, last = 0, 0  # of the lines with settings
    for node in tree.body:
        is_setup = is_main_block(node) and not defaults  # the call of setup_process()
        is_block = hasattr(node, 'body') and not is_setup
        if calls_configure(node) or is_block:
            break
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):  # a computed value is not a setting
                    if name == name.lower() and not name.startswith('_'):
                        defaults[name] = literal(value)
                        last = node.end_lineno
            case _ if not defaults:
                first = node.end_lineno  # docstring, imports
    while last < len(lines) and re.match(' +#', lines[last]):
        last += 1  # further lines of the last comment
    return defaults, lines[first:last], ast.get_docstring(tree, clean=False)


def calls_configure(node: ast.stmt) -> bool:
    """Return whether a statement calls configure()."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(getattr(call.func, 'id', '') == 'configure' for call in calls)


def is_main_block(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == '__main__':`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def read_config(path: str, config: dict, defaults: dict, follow: bool = True) -> None:
    """Apply the config file at `path`: lines `name = literal`, with comments and a docstring. If
    `follow` is true, a line `renamed_to = 'new_name.py'` applies that file of the same folder."""
    try:
        with warnings.catch_warnings(action='ignore'):  # about unknown escapes such as \d
            body = parse(pathlib.Path(path).read_bytes()).body
    except OSError as error:
        fail(f'{path}: cannot read the config file: {error.strerror}')
    except BROKEN as error:
        line = getattr(error, 'lineno', None) or 1
        reason = getattr(error, 'msg', None) or error
        fail(f'{path}:{line}: not a valid config file: {reason}')
    for node in body:
        source = f'{path}:{node.lineno}'
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue  # docstring
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case _:
                text = ast.unparse(node).partition('\n')[0][:60]
                fail(f'{source}: a config file holds only `name = literal` lines, not {text!r}')
        if name in COMMAND_LINE_ONLY:
            fail(f'{source}: {name} is for the command line alone, --{name}=True')
        try:
            value = literal(node.value)
        except ValueError as error:
            fail(f'{source}: {name}: {error}')
        if name == 'renamed_to' and follow:
            successor = pathlib.Path(path).with_name(str(value))
            print(f'note: {path} is now called {successor}: use that name', file=sys.stderr)
            read_config(str(successor), config, defaults, follow=False)
            continue
        assign(config, defaults, name, value, source, str(value))


def join_value(argument: str, rest: list[str], defaults: dict) -> str:
    """Return `--key value` as `--key=value`, removing the value from `rest`, the arguments that
    follow. Return a switch without a value as `--key=True`, and any other argument unchanged."""
    if argument[:2] != '--' or argument[2:] not in defaults:
        return argument
    default = defaults[argument[2:]]
    value = rest[0] if rest else '--'
    if default is None or isinstance(default, bool):
        if not value.startswith('-') and not value.endswith('.py'):
            fail(f'command line: a switch takes its value as {argument}={value}')
        return f'{argument}=True'
    if value.startswith('--'):
        fail(f'command line: {argument} needs a value, as in {argument}={default}')
    return f'{argument}={rest.pop(0)}'


def read_argument(
    argument: str, config: dict, defaults: dict, source: str = 'command line'
) -> None:
    """Apply one `--key=value`. `source` is named in error messages."""
    key, _, text = argument[2:].partition('=')
    default = defaults.get(key)
    value = text  # for a string: --out_dir=123 means '123'
    if not isinstance(default, str):
        with contextlib.suppress(ValueError):  # `assign` refuses text, unless the default is None
            value = literal(text.strip())
    assign(config, defaults, key, value, source, text)


def check_ranges(config: dict, ranges: dict) -> None:
    """End the script if a setting lies outside its range; see `configure`."""
    for name, allowed in ranges.items():
        value = config[name]
        if isinstance(allowed, list):
            if value not in allowed:
                fail(f'{name} = {value!r}: expected one of {", ".join(map(str, allowed))}')
            continue
        low, high = allowed
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(low <= x <= high for x in numbers):
            limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            fail(f'{name} = {value}: must be {limits}')


def help_text(path: str | os.PathLike) -> str:
    """Return the text of --help: the docstring, the usage, and the settings with their comments and
    headings."""
    defaults, lines, docstring = read_script(path)
    usage = f'usage: python {os.path.basename(path)} [config.py ...] [--key=value ...]'
    text = [docstring or '', '', usage, '']
    for line in lines:
        name = line.partition(' = ')[0]
        comment = line.partition('  # ')[2]
        if name in defaults:
            text.append(f'  --{name}={defaults[name]!r}'.ljust(40) + comment)
        elif line.startswith(' '):
            text[-1] += ' ' + line.strip(' #')  # a comment's second line
        elif not line.startswith('# fmt') and line.strip('#-=* '):
            if text[-1]:
                text.append('')
            text.append(line.strip('#-=* '))  # a heading
    return '\n'.join(line.rstrip() for line in text).strip()


def configure(settings: dict, argv: Iterable[str] | None = None, quiet: bool = False) -> Settings:
    """Override the settings of a script in place and return all of them.

    settings: the globals() of the script. The defaults are read from the source in its '__file__',
    so that two calls do not influence each other. argv: the arguments without the name of the
    script; None means those of the command line. Settings that differ from their defaults are
    printed, under torchrun by rank 0, unless `quiet`. A user's mistake ends the script (`fail`);
    --help prints the settings and ends it with status 0.

    The script may define RANGES, the allowed values by name: (low, high) for a number or for each
    number of a tuple, or a list of values; and RENAMED, the new names of settings by their old
    names, of which a note on stderr informs the user."""
    argv = sys.argv[1:] if argv is None else list(argv)
    defaults = read_script(settings['__file__'])[0]
    renamed = settings.get('RENAMED', {})
    # An old name is read as another setting of the same type, and then replaced.
    known = {**defaults, **{old: defaults[new] for old, new in renamed.items()}}
    changes = {}  # the settings on the command line and in config files
    notes = []
    if '--help' in argv or '-h' in argv:
        print(help_text(settings['__file__']))
        raise SystemExit(0)
    rest = list(argv)
    while rest:
        argument = join_value(rest.pop(0), rest, known)
        if argument.startswith('--'):
            read_argument(argument, changes, known)
        elif argument.endswith('.py') and not argument.startswith('-'):
            read_config(argument, changes, known)
        else:
            fail(f'command line: cannot read {argument!r}: expected config.py or --key=value')
        for old in changes.keys() & renamed.keys():
            changes[renamed[old]] = changes.pop(old)
            notes.append(f'note: {old} is now called {renamed[old]}; the old name will go')
    config = Settings(defaults, changes)
    check_ranges(config, settings.get('RANGES', {}))
    settings.update(config)
    is_first_rank = os.environ.get('RANK', '0') == '0'
    if notes and is_first_rank:
        print(*notes, sep='\n', file=sys.stderr)
    for name, value in config.items():
        if not quiet and is_first_rank and repr(value) != repr(defaults[name]):
            print(f'{name} = {value!r}  (default {defaults[name]!r})', flush=True)
    return config


# ---- files that are written completely or not at all ----


def write_atomic(path: str | os.PathLike, write: Callable, keep: str | None = None) -> None:
    """Write a file completely or not at all.

    write(file) writes to a temporary binary file, which is then renamed to `path`. keep: a name in
    the same folder, under which an existing file is kept. If anything fails, `path` is unchanged
    (with `keep`, the old file may then exist only under that name) and the error is raised; an
    OSError then has the name of the file."""
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, path.with_name(keep))  # killed here, only `keep` exists
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the error of a full disk names no file
        raise
    if os.name != 'nt':  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the renaming, too, survives a power cut
        finally:
            os.close(folder)


def write_text(text: str, path: str | os.PathLike) -> None:
    """Write a text file in UTF-8, completely or not at all."""
    write_atomic(path, lambda file: file.write(text.encode()))


def plain(obj: object) -> object:
    """Return obj with NaN and infinities, which standard JSON lacks, replaced by None."""
    return json.loads(json.dumps(obj), parse_constant=lambda _: None)


def write_json(obj: object, path: str | os.PathLike) -> None:
    """Write obj as indented standard JSON, completely or not at all."""
    write_text(json.dumps(plain(obj), indent=1) + '\n', path)


def read_json(path: str | os.PathLike) -> dict:
    """Return the dict in a JSON file, or {} if the file is missing, unreadable or holds none."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (OSError, *BROKEN):
        return {}
    return value if isinstance(value, dict) else {}
