"""Settings for flat scripts: the globals at the top of a script, overridden by the command line.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT. Unlike there, nothing is
executed: a config file holds lines `name = literal`.

A script calls `configure(globals())`. Its settings are the assignments of literals to lowercase
names before the first def, class or other block, or the call. A setting's type is its default's;
one whose default is None takes any literal, else the text itself.

Imported before torch, because it says how a process waits and ends: OpenMP below, `run_script`.
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
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

# Between two parallel sections OpenMP's threads spin, by default so long that two programs on the
# same cores slow each other tenfold. A bounded spin costs a program that runs alone nothing that
# can be measured (LOG.md). Read when torch is loaded, so set before that.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

COMMAND_LINE = ('overwrite',)  # a config file may come from a stranger, and must not remove a run
EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string'}
# all that reading hostile text can raise
BROKEN = SyntaxError, ValueError, ArithmeticError, TypeError, MemoryError, RecursionError

# an odd backslash in a user's text (ast.parse) is not worth a warning
warnings.filterwarnings('ignore', module='<unknown>')

# ---- how a script ends ----


class Mistake(ValueError):
    """A user's: one line that names the file, folder or setting, and what to do. run_script prints
    it."""


def fail(message: str | Exception) -> NoReturn:
    """Ends the script on a user's mistake: one line on stderr, exit status 2, no traceback."""
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def interrupted(what: type[BaseException], error: BaseException, trace: object) -> None:
    """sys.excepthook: a ctrl-C that nothing has caught, as while torch is imported, is no error."""
    if issubclass(what, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr)
    else:
        sys.__excepthook__(what, error, trace)


sys.excepthook = interrupted


def run_script(main: Callable, said='interrupted', last_words: Callable | None = None) -> NoReturn:
    """Runs main() and ends the process with the status it returns (None: 0). Ctrl-C: the line
    given, 130. A Mistake, or an OSError, such as a full disk: one line, 2; so the RuntimeErrors and
    MemoryErrors that last_words (common.py) has words for. A reader has seen enough (`| head`):
    0."""
    status, line = 0, ''
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:
        status, line = 130, f'\n{said}'
    except BrokenPipeError:
        pass
    except (OSError, Mistake) as error:
        status, line = 2, f'error: {error}'
    except (RuntimeError, MemoryError) as error:
        if last_words is None:
            raise
        status, line = 2, f'error: {last_words(error)}'
    try:
        # was it standard output that is full? then a newline meets the same error
        print(end='\n' if line.startswith('error') else '', flush=True)
    except OSError as error:
        # what is left unwritten would fail once more at Python's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            status, line = 2, f'error: standard output: {error.strerror}'
    if line:
        print(line, file=sys.stderr, flush=True)
    if 'RANK' in os.environ:
        # a gloo thread that outlives its process group can abort Python's shutdown
        # (1 run in 20; pytorch PR 179291)
        os._exit(status)
    sys.exit(status)


def every(seconds: float = 10.0) -> Callable[[], bool]:
    """-> due(): whether `seconds` have passed since it last was, or since now; due(said=True)
    starts the time anew. For lines of progress: nothing runs long in silence."""
    last = [time.monotonic()]

    def due(said: bool = False) -> bool:
        is_due = time.monotonic() - last[0] >= seconds
        if said or is_due:
            last[0] = time.monotonic()
        return is_due

    return due


def first_line(error: Exception) -> str:
    return f'{type(error).__name__}: {(str(error).splitlines() or [""])[0][:200]}'


# ---- values ----


def literal(source: str | ast.expr) -> object:
    """The value of a text, a number, True, False, None, or a tuple or list of these (-> a tuple).
    ValueError for anything else, whatever a stranger has written."""

    def checked(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(checked(item) for item in value)
        limit = 2**64 if isinstance(value, int) else math.inf
        if not (value is None or isinstance(value, str) or abs(value) < limit):  # NaN is not
            raise ValueError('not finite, or too large')
        return value

    try:
        return checked(ast.literal_eval(source))
    except BROKEN:
        words = 'only literals are allowed: text, finite numbers, True, False, None, tuples'
        raise ValueError(words) from None


def convert(value: object, default: object) -> object:
    """`value` in the type of `default`; an int may stand for a float. ValueError: neither."""
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) is type(value) is tuple:
        alike = len({type(item) for item in default}) == 1  # (0.8, 0.95): all must be numbers
        return tuple(convert(item, default[0]) if alike else item for item in value)
    if default is None or type(value) is type(default):
        return value
    raise ValueError('wrong type')


def assign(config: dict, defaults: dict, key: str, value: object, where: str, given: str) -> None:
    """config[key] = value, checked; `where` and what was `given` go into the message."""
    if key not in defaults:
        near = difflib.get_close_matches(key.replace('-', '_').lower(), defaults, 1, 0.6)
        hint = f'did you mean {near[0]!r}?' if near else '--help lists the settings'
        fail(f'{where}: unknown setting {key!r}, {hint}')
    default = defaults[key]
    try:
        config[key] = convert(value, default)
    except ValueError:
        expected = EXPECTED.get(type(default), f'a {type(default).__name__}')
        fail(f'{where}: {key} expects {expected} (default {default!r}), got {given[:120]!r}')


# ---- scripts, config files, the command line ----


def read_script(path: str | os.PathLike) -> tuple[dict, list[str], str | None]:
    """-> {setting: default} in source order, the lines they stand in, and the docstring of a
    script."""
    source = pathlib.Path(path).read_text(encoding='utf-8')
    tree, lines = ast.parse(source), source.split('\n')
    defaults, first, last = {}, 0, 0
    for node in tree.body:
        calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
        if hasattr(node, 'body') or any(getattr(f, 'id', '') == 'configure' for f in calls):
            break  # what follows a block or the call cannot be overridden
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                with contextlib.suppress(ValueError):  # computed: not a setting
                    if name == name.lower() and not name.startswith('_'):
                        defaults[name], last = literal(value), node.end_lineno
            case _ if not defaults:
                first = node.end_lineno  # docstring, imports
    while last < len(lines) and re.match(' +#', lines[last]):
        last += 1  # a comment that goes on
    return defaults, lines[first:last], ast.get_docstring(tree, clean=False)


def read_config(path: str, config: dict, defaults: dict, follow: bool = True) -> None:
    """Apply the config file at `path`: lines `name = literal`, a docstring, comments. A line
    `renamed_to = 'new_name.py'` stands for that file of the same folder (unless not `follow`)."""
    try:
        body = ast.parse(pathlib.Path(path).read_bytes()).body
    except OSError as error:
        fail(f'{path}: cannot read the config file: {error.strerror}')
    except BROKEN as error:
        line, why = getattr(error, 'lineno', None) or 1, getattr(error, 'msg', None) or error
        fail(f'{path}:{line}: not a valid config file: {why}')
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
        if name in COMMAND_LINE:
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


def whole(argument: str, rest: list[str], defaults: dict) -> str:
    """`--key value` as `--key=value`, the value out of `rest`; a bare switch as --key=True."""
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
    """Applies one `--key=value`; `where` goes into the message."""
    key, _, text = argument[2:].partition('=')
    default, value = defaults.get(key), text  # --out_dir=123 is the text '123'
    if not isinstance(default, str):
        try:
            value = literal(text.strip())
        except ValueError:
            value = text if default is None else ...  # ... fits no type
    assign(config, defaults, key, value, where, text)


def help_text(path: str | os.PathLike) -> str:
    """--help: docstring, usage, and the lines of the settings, with the comments between them."""
    defaults, lines, docstring = read_script(path)
    usage = f'usage: python {os.path.basename(path)} [config.py ...] [--key=value ...]'
    text = [docstring or '', '', usage, '']
    for line in lines:
        (name, _, _), (_, _, comment) = line.partition(' = '), line.partition('  # ')
        if name in defaults:
            text.append(f'  --{name}={defaults[name]!r}'.ljust(40) + comment)
        elif line.startswith(' '):
            text[-1] += ' ' + line.strip(' #')  # a comment that goes on
        elif not line.startswith('# fmt') and line.strip('#-=* '):
            text += ['', line.strip('#-=* ')]  # a group's heading
    return '\n'.join(line.rstrip() for line in text).strip()


def configure(settings: dict, argv: Iterable[str] | None = None, quiet: bool = False) -> dict:
    """Overrides a script's settings in place -> all of them, a plain dict in the source's order.
    Its RANGES say what is allowed: {name: (low, high)}, of each number of a tuple, or {name:
    [values]}.

    settings: the script's globals(), with '__file__'; the defaults are read from that source, so
    two calls do not influence each other. argv: the arguments without the script's name (default:
    the command line's). The changed settings are printed, under torchrun by rank 0; quiet: not. A
    user's mistake ends the script (`fail`); --help prints and exits with status 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    defaults = read_script(settings['__file__'])[0]
    config = dict(defaults)
    if '--help' in argv or '-h' in argv:
        print(help_text(settings['__file__']))
        raise SystemExit(0)
    rest = list(argv)
    while rest:
        argument = whole(rest.pop(0), rest, defaults)
        if argument.startswith('--'):
            read_argument(argument, config, defaults)
        elif argument.endswith('.py') and not argument.startswith('-'):
            read_config(argument, config, defaults)
        else:
            fail(f'command line: cannot read {argument!r}: expected config.py or --key=value')
    for name, allowed in settings.get('RANGES', {}).items():
        value = config[name]
        if isinstance(allowed, list):
            if value not in allowed:
                fail(f'{name} = {value!r}: expected one of {", ".join(map(str, allowed))}')
            continue
        low, high = allowed
        if not all(low <= x <= high for x in (value if isinstance(value, tuple) else (value,))):
            limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            fail(f'{name} = {value}: must be {limits}')
    settings.update(config)
    if not quiet and os.environ.get('RANK', '0') == '0':
        for key, value in config.items():
            if repr(value) != repr(defaults[key]):
                print(f'{key} = {value!r}  (default {defaults[key]!r})', flush=True)
    return config


# ---- whole-or-nothing files ----


def write_atomic(path: str | os.PathLike, write: Callable, keep: str | None = None) -> None:
    """write(file) fills a binary temporary file, which then takes the name `path`; an existing file
    goes on as `keep`, if given (a name in the same folder). Whatever fails leaves `path` as it was
    and raises, an OSError with the file's name."""
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, path.with_name(keep))  # killed here: `keep` is the newest
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say whose write it refused
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # a rename is safe from a power cut only once its folder is on the disk
    os.close(folder)


def write_text(text: str, path: str | os.PathLike) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def plain(obj: object) -> object:
    """As the standard of JSON has it: NaN and infinities become null."""
    return json.loads(json.dumps(obj), parse_constant=lambda _: None)


def write_json(obj: object, path: str | os.PathLike) -> None:
    write_text(json.dumps(plain(obj), indent=1) + '\n', path)


def read_json(path: str | os.PathLike) -> dict:
    """What a file holds; empty where there is none to read."""
    try:
        saved = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (OSError, *BROKEN):
        return {}
    return saved if isinstance(saved, dict) else {}
