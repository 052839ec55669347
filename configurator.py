"""Settings for flat scripts: the globals at the top of a script, overridden by the command line.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT. Unlike there, nothing is
executed: a config file holds lines `name = literal`.

A script calls `configure(globals())`. Its settings are the assignments of literals to lowercase
names before the first def, class or other block, or the call. A setting has its default's type;
one whose default is None takes any literal, or else the text itself.
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
# All exceptions that reading hostile text can raise.
BROKEN = SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError

# ---- how a script starts and ends ----


class Mistake(ValueError):
    """A user's mistake. The message is one line that names the file, folder or setting and says
    what to do; run_script prints it without a traceback."""


def fail(message: str | Exception) -> NoReturn:
    """End the script on a user's mistake: one line on stderr, exit status 2, no traceback."""
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def report_interrupt(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print one line for a ctrl-C that nothing has caught; a sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def setup_process() -> None:
    """Prepare the process of a script. Call it once, before torch is imported:

        if __name__ == '__main__':
            setup_process()

    It bounds how long OpenMP's threads spin between two parallel sections, unless the environment
    says otherwise: by default they spin so long that two programs on the same cores slow each
    other down tenfold, and a program that runs alone loses nothing measurable by the bound (see
    LOG.md). OpenMP reads this when torch loads it. A ctrl-C during the imports ends with one line.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ.setdefault('GOMP_SPINCOUNT', '10000')
    sys.excepthook = report_interrupt


def run_script(
    main: Callable[[], int | None],
    interrupted: str = 'interrupted',
    explain: Callable[[Exception], str] | None = None,
) -> NoReturn:
    """Run main() and end the process with the exit status that it returns (None means 0).

    Ctrl-C prints the line `interrupted` and exits with 130. A Mistake, or an OSError such as a
    full disk, prints one line and exits with 2; so do a RuntimeError and a MemoryError if
    explain(error) returns a line for them (it raises those that it does not know; see
    common.last_words). A reader that has seen enough (`| head`) ends the script with 0."""
    status, line = 0, ''
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:
        status, line = 130, f'\n{interrupted}'
    except BrokenPipeError:
        pass
    except (OSError, Mistake) as error:
        status, line = 2, f'error: {error}'
    except (RuntimeError, MemoryError) as error:
        if explain is None:
            raise
        status, line = 2, f'error: {explain(error)}'
    try:
        # If it is standard output whose disk is full, a newline meets the same error again.
        print(end='\n' if line.startswith('error') else '', flush=True)
    except OSError as error:
        # Python would fail once more when it flushes the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            status, line = 2, f'error: standard output: {error.strerror}'
    if line:
        print(line, file=sys.stderr, flush=True)
    if 'RANK' in os.environ:
        # A gloo thread that outlives its process group can abort Python's shutdown (1 run in 20;
        # pytorch PR 179291).
        os._exit(status)
    sys.exit(status)


def every(seconds: float = 10.0) -> Callable[[], bool]:
    """Return a function that is true at most once every `seconds`; for progress lines. Called with
    True it restarts the wait and returns as usual."""
    last = [time.monotonic()]

    def due(restart: bool = False) -> bool:
        is_due = time.monotonic() - last[0] >= seconds
        if restart or is_due:
            last[0] = time.monotonic()
        return is_due

    return due


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, at most 200 characters."""
    return f'{type(error).__name__}: {(str(error).splitlines() or [""])[0][:200]}'


# ---- values ----


def literal(source: str | ast.expr) -> object:
    """Return the value of a text, a number, True, False, None, or a tuple or list of these (as a
    tuple). Raises ValueError for anything else, whatever a stranger has written."""

    def checked(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(checked(item) for item in value)
        limit = 2**64 if isinstance(value, int) else math.inf
        if not (value is None or isinstance(value, str) or abs(value) < limit):  # NaN fails too
            raise ValueError('not finite, or too large')
        return value

    try:
        with warnings.catch_warnings(action='ignore'):  # of odd backslashes
            return checked(ast.literal_eval(source))
    except BROKEN:
        allowed = 'text, finite numbers, True, False, None, tuples'
        raise ValueError(f'only literals are allowed: {allowed}') from None


def convert(value: object, default: object) -> object:
    """Return `value` in the type of `default`; an int may stand for a float. Raises ValueError if
    the types differ."""
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) is type(value) is tuple:
        alike = len({type(item) for item in default}) == 1  # (0.8, 0.95): all must be numbers
        return tuple(convert(item, default[0]) if alike else item for item in value)
    if default is None or type(value) is type(default):
        return value
    raise ValueError('wrong type')


def assign(config: dict, defaults: dict, key: str, value: object, where: str, text: str) -> None:
    """Set config[key] = value after checking its name and type. `where` and the `text` that the
    user wrote go into the error message."""
    if key not in defaults:
        near = difflib.get_close_matches(key.replace('-', '_').lower(), defaults, 1, 0.6)
        hint = f'did you mean {near[0]!r}?' if near else '--help lists the settings'
        fail(f'{where}: unknown setting {key!r}, {hint}')
    default = defaults[key]
    try:
        config[key] = convert(value, default)
    except ValueError:
        expected = EXPECTED.get(type(default), f'a {type(default).__name__}')
        fail(f'{where}: {key} expects {expected} (default {default!r}), got {text[:120]!r}')


# ---- scripts, config files, the command line ----


class Settings(dict):
    """All settings of a script by name, in the source's order. `given` has the names that a config
    file or the command line has set, to whatever value."""

    def __init__(self, defaults: dict):
        super().__init__(defaults)
        self.given: set[str] = set()

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, value)
        self.given.add(name)


parsing = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse Python source, one thread at a time: Python 3.11 confuses the recursion depths of
    threads that parse side by side (SystemError)."""
    with parsing:
        return ast.parse(source)


def read_script(path: str | os.PathLike) -> tuple[dict, list[str], str | None]:
    """Return a script's {setting: default} in source order, the source lines from its first setting
    to its last, and its docstring."""
    source = pathlib.Path(path).read_text(encoding='utf-8')
    tree, lines = parse(source), source.split('\n')
    defaults, first, last = {}, 0, 0
    for node in tree.body:
        calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
        configures = any(getattr(f, 'id', '') == 'configure' for f in calls)
        if configures or hasattr(node, 'body') and (defaults or not is_main_block(node)):
            break  # what follows a block or the call cannot be overridden
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):  # a computed value is not a setting
                    if name == name.lower() and not name.startswith('_'):
                        defaults[name], last = literal(value), node.end_lineno
            case _ if not defaults:
                first = node.end_lineno  # docstring, imports
    while last < len(lines) and re.match(' +#', lines[last]):
        last += 1  # the last comment's further lines
    return defaults, lines[first:last], ast.get_docstring(tree, clean=False)


def is_main_block(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == '__main__':`, as before setup_process()."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def read_config(path: str, config: dict, defaults: dict, follow: bool = True) -> None:
    """Apply the config file at `path`: lines `name = literal`, a docstring, comments. A line
    `renamed_to = 'new_name.py'` stands for that file of the same folder (unless not `follow`)."""
    try:
        with warnings.catch_warnings(action='ignore'):  # of odd backslashes
            body = parse(pathlib.Path(path).read_bytes()).body
    except OSError as error:
        fail(f'{path}: cannot read the config file: {error.strerror}')
    except BROKEN as error:
        line, reason = getattr(error, 'lineno', None) or 1, getattr(error, 'msg', None) or error
        fail(f'{path}:{line}: not a valid config file: {reason}')
    for node in body:
        where = f'{path}:{node.lineno}'
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue  # docstring
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case _:
                text = ast.unparse(node).partition('\n')[0][:60]
                fail(f'{where}: a config file holds only `name = literal` lines, not {text!r}')
        if name in COMMAND_LINE_ONLY:
            fail(f'{where}: {name} is for the command line alone, --{name}=True')
        try:
            value = literal(node.value)
        except ValueError as error:
            fail(f'{where}: {name}: {error}')
        if name == 'renamed_to' and follow:
            successor = pathlib.Path(path).with_name(str(value))
            print(f'note: {path} is now {successor}: use that name', file=sys.stderr)
            read_config(str(successor), config, defaults, follow=False)
            continue
        assign(config, defaults, name, value, where, str(value))


def join_value(argument: str, rest: list[str], defaults: dict) -> str:
    """Return `--key value` as `--key=value`, taking the value out of `rest`, and a bare switch as
    `--key=True`; any other argument unchanged."""
    if argument[:2] != '--' or argument[2:] not in defaults:
        return argument
    default, value = defaults[argument[2:]], rest[0] if rest else '--'
    if default is None or isinstance(default, bool):
        if not value.startswith('-') and not value.endswith('.py'):
            fail(f'command line: a switch takes its value as {argument}={value}')
        return f'{argument}=True'
    if value.startswith('--'):
        fail(f'command line: {argument} needs a value, as in {argument}={default}')
    return f'{argument}={rest.pop(0)}'


def read_argument(argument: str, config: dict, defaults: dict, where: str = 'command line') -> None:
    """Apply one `--key=value`; `where` goes into the error message."""
    key, _, text = argument[2:].partition('=')
    default, value = defaults.get(key), text  # --out_dir=123 is the text '123'
    if not isinstance(default, str):
        try:
            value = literal(text.strip())
        except ValueError:
            value = text if default is None else ...  # ... fits no type
    assign(config, defaults, key, value, where, text)


def check_ranges(config: dict, ranges: dict) -> None:
    """End the script if a setting lies outside its range; see `configure`."""
    for name, allowed in ranges.items():
        value = config[name]
        if isinstance(allowed, list):
            if value not in allowed:
                fail(f'{name} = {value!r}: expected one of {", ".join(map(str, allowed))}')
            continue
        low, high = allowed
        if not all(low <= x <= high for x in (value if isinstance(value, tuple) else (value,))):
            limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            fail(f'{name} = {value}: must be {limits}')


def help_text(path: str | os.PathLike) -> str:
    """Return the text of --help: docstring, usage, and the lines of the settings with their
    comments and headings."""
    defaults, lines, docstring = read_script(path)
    usage = f'usage: python {os.path.basename(path)} [config.py ...] [--key=value ...]'
    text = [docstring or '', '', usage, '']
    for line in lines:
        (name, _, _), (_, _, comment) = line.partition(' = '), line.partition('  # ')
        if name in defaults:
            text.append(f'  --{name}={defaults[name]!r}'.ljust(40) + comment)
        elif line.startswith(' '):
            text[-1] += ' ' + line.strip(' #')  # a comment's further line
        elif not line.startswith('# fmt') and line.strip('#-=* '):
            text += ['', line.strip('#-=* ')]  # a heading
    return '\n'.join(line.rstrip() for line in text).strip()


def configure(settings: dict, argv: Iterable[str] | None = None, quiet: bool = False) -> Settings:
    """Override a script's settings in place and return all of them.

    settings: the script's globals(), with '__file__'; the defaults are read from that source, so
    that two calls do not influence each other. argv: the arguments without the script's name
    (default: the command line's). The script may define RANGES, which says what is allowed:
    {name: (low, high)}, for each number of a tuple, or {name: [values]}; and RENAMED, {old name of
    a setting: its new name}. The changed settings are printed, under torchrun by rank 0, unless
    quiet. A user's mistake ends the script (`fail`); --help prints and exits with status 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    defaults = read_script(settings['__file__'])[0]
    renamed = settings.get('RENAMED', {})
    # An old name is read as a setting of its own, with its successor's type.
    known = defaults | {old: defaults[new] for old, new in renamed.items()}
    config = Settings(defaults)
    if '--help' in argv or '-h' in argv:
        print(help_text(settings['__file__']))
        raise SystemExit(0)
    rest = list(argv)
    while rest:
        argument = join_value(rest.pop(0), rest, known)
        if argument.startswith('--'):
            read_argument(argument, config, known)
        elif argument.endswith('.py') and not argument.startswith('-'):
            read_config(argument, config, known)
        else:
            fail(f'command line: cannot read {argument!r}: expected config.py or --key=value')
        for old in config.keys() & renamed.keys():
            config[renamed[old]] = config.pop(old)
            print_settings(f'{old} is now called {renamed[old]}; the old name will go', quiet)
    check_ranges(config, settings.get('RANGES', {}))
    settings.update(config)
    for name, value in config.items():
        if repr(value) != repr(defaults[name]):
            print_settings(f'{name} = {value!r}  (default {defaults[name]!r})', quiet)
    return config


def print_settings(line: str, quiet: bool) -> None:
    """Print a line on the first rank, unless quiet."""
    if not quiet and os.environ.get('RANK', '0') == '0':
        print(line, flush=True)


# ---- files that are written completely or not at all ----


def write_atomic(path: str | os.PathLike, write: Callable, keep: str | None = None) -> None:
    """Write a file completely or not at all.

    write(file) fills a binary temporary file, which then takes the name `path`. With keep (a name
    in the same folder) an existing file is kept under that name. Whatever fails leaves `path`
    unchanged and raises; an OSError carries the file's name."""
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, path.with_name(keep))  # if killed here, `keep` is the newest
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say whose write it refused
        raise
    if os.name != 'nt':  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # a rename survives a power cut only once its folder is on the disk
        os.close(folder)


def write_text(text: str, path: str | os.PathLike) -> None:
    """Write a text file in UTF-8, completely or not at all."""
    write_atomic(path, lambda file: file.write(text.encode()))


def plain(obj: object) -> object:
    """Return obj as standard JSON has it: NaN and infinities become null."""
    return json.loads(json.dumps(obj), parse_constant=lambda _: None)


def write_json(obj: object, path: str | os.PathLike) -> None:
    """Write obj as indented standard JSON, completely or not at all."""
    write_text(json.dumps(plain(obj), indent=1) + '\n', path)


def read_json(path: str | os.PathLike) -> dict:
    """Return the dict in a JSON file; an empty one if the file is missing or unreadable."""
    try:
        saved = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (OSError, *BROKEN):
        return {}
    return saved if isinstance(saved, dict) else {}
