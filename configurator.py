"""Settings for flat scripts: the globals at the top of a script are its settings, and the command line overrides them.

    python train_lm.py config/small_L2.py --max_iters=20 --compile=False

Arguments are read from left to right and a later one wins, as in nanoGPT: a `.py` file overrides the settings it assigns, `--key=value`
or `--key value` one setting, and `--key` alone turns a switch on. Unlike nanoGPT, nothing is executed: a config file is data (literals,
arithmetic on literals and earlier names).
A default computed from another setting (`n_embd = 64 * n_layer`) is computed once, from the defaults.

It is the first of the project's modules that a script imports, before torch, because it says how a process waits and ends: see the settings of
OpenMP below, and `run_script`.

A script calls `config = configure(globals())`. Its settings are the plain assignments (`name = literal`, or arithmetic on literals and
earlier names; lowercase, no leading underscore) that stand before the first def, class or other block. A setting's type is its
default's type. A setting whose default is None takes any literal, else the text itself. A default that has to be computed by a call
is not a setting: give it a literal such as 'auto' and resolve it after `configure`.
"""

import ast
import difflib
import io
import json
import math
import operator
import os
import pathlib
import sys
import time
import tokenize
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import BinaryIO, NoReturn

# Between two parallel sections OpenMP's threads spin, by default so long that two programs on the same cores slow each other tenfold. A
# bounded spin costs a program that runs alone nothing that can be measured (LOG.md). Read when torch is loaded, so set before that.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

MAX_INT = (
    2**64
)  # an integer in a config stays below this, which also bounds what `**` can be made to compute
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}  # fmt: skip
COMMAND_LINE = ('overwrite',)  # a config file may come from a stranger, and must not remove a run
EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string',
            tuple: 'a tuple', list: 'a list', dict: 'a dict'}  # fmt: skip
BROKEN = (
    SyntaxError,
    ValueError,
    ArithmeticError,
    TypeError,
    MemoryError,
    RecursionError,
)  # all that reading hostile text can raise


def fail(message: str | Exception) -> NoReturn:
    """Ends the script on a user's mistake: one line on stderr, exit status 2, no traceback."""
    print('error: ' + ' '.join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """sys.excepthook: a ctrl-C that nothing has caught, as while torch is imported, is no error of the program."""
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = interrupted


def run_script(main: Callable[[], int | None], when_interrupted: str = 'interrupted') -> NoReturn:
    """Runs a script's main() and ends the process with the status that it returns (None: 0). Ctrl-C: the line given, 130. An OSError, such as
    a full disk: one line, 2. A reader that has seen enough (`| head`): 0, in silence."""
    message, trial = None, ''
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code or 0
    except KeyboardInterrupt:
        message, status = f'\n{when_interrupted}', 130
    except BrokenPipeError:
        status = 0
    except OSError as error:
        message, status, trial = (
            f'error: {error}',
            2,
            '\n',
        )  # if standard output was full, it says so once more when it is tried
    try:
        print(end=trial, flush=True)
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # what is left unwritten would fail once more at Python's end
        if not isinstance(error, BrokenPipeError):
            message, status = f'error: standard output: {error.strerror}', 2
    if message:
        print(message, file=sys.stderr, flush=True)
    if (
        'RANK' in os.environ
    ):  # a gloo thread that outlives its process group can abort Python's shutdown (1 run in 20; pytorch PR 179291)
        os._exit(status)
    sys.exit(status)


def every(seconds: float = 10.0) -> Callable[[], bool]:
    """-> due(): whether `seconds` have passed since it last was, or since now; due(said=True) starts the time anew. For lines of progress:
    nothing runs long in silence."""
    last = time.monotonic()

    def due(said: bool = False) -> bool:
        nonlocal last
        now = time.monotonic()
        is_due = now - last >= seconds
        if said or is_due:
            last = now
        return is_due

    return due


def first_line(error: Exception) -> str:
    """What an exception says, short enough for a line of its own."""
    return f'{type(error).__name__}: {(str(error).splitlines() or [""])[0][:200]}'


def parse(source: str | bytes, mode: str = 'exec') -> ast.Module | ast.Expression:
    with warnings.catch_warnings():
        warnings.simplefilter(
            'ignore'
        )  # e.g. an odd backslash in a user's text is not worth a warning
        return ast.parse(source, mode=mode)


def evaluate(
    node: ast.expr, names: dict | None
) -> bool | int | float | str | tuple | list | dict | None:
    """The value of an expression of literals, and of arithmetic on numbers and `names` (names=None: literals only).
    ValueError says what is not allowed."""
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, str, type(None)):
        value = node.value
    elif isinstance(node, ast.Name) and names is not None:
        if node.id not in names:
            raise ValueError(f'{node.id} is not defined here')
        value = names[node.id]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = evaluate(node.operand, names)
        if type(value) not in (int, float):
            raise ValueError('arithmetic needs numbers')
        value = -value if isinstance(node.op, ast.USub) else value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and names is not None:
        left, right = evaluate(node.left, names), evaluate(node.right, names)
        if type(left) not in (int, float) or type(right) not in (int, float):
            raise ValueError('arithmetic needs numbers')  # 'a' * 10**9 would fill the memory
        if (
            isinstance(node.op, ast.Pow)
            and type(left) is type(right) is int
            and left.bit_length() * right > 256
        ):
            raise ValueError('the power is too large')
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, (ast.Tuple, ast.List)):
        return (tuple if isinstance(node, ast.Tuple) else list)(
            evaluate(item, names) for item in node.elts
        )
    elif isinstance(node, ast.Dict) and None not in node.keys:
        return {
            evaluate(key, names): evaluate(item, names)
            for key, item in zip(node.keys, node.values, strict=True)
        }
    else:
        raise ValueError(
            f'only literals{"" if names is None else " and arithmetic"} are allowed, not {ast.unparse(node)[:60]!r}'
        )
    if (
        isinstance(value, complex)
        or type(value) is float
        and not math.isfinite(value)
        or type(value) is int
        and abs(value) >= MAX_INT
    ):
        raise ValueError('the number is not finite, or too large')
    return value


def convert(value: object, default: object) -> object:
    """`value` in the type of `default`: an int may stand for a float, a list for a tuple. ValueError if it does not fit."""
    if default is None or type(value) is type(default) and not isinstance(value, (tuple, list)):
        return value
    if type(default) is float and type(value) is int:
        return float(value)
    if isinstance(default, (tuple, list)) and isinstance(value, (tuple, list)):
        one_type = (
            len({type(item) for item in default}) == 1
        )  # (0.8, 0.95): every item must be a number
        return type(default)(convert(item, default[0]) if one_type else item for item in value)
    raise ValueError('wrong type')


def assign(
    config: dict, defaults: dict, key: str, value: object, where: str, given: str | None = None
) -> None:
    """Sets config[key] = value, checked; `where` and `given` go into the message."""
    if key not in defaults:
        near = difflib.get_close_matches(key.replace('-', '_').lower(), defaults, 1, 0.6)
        fail(
            f'{where}: unknown setting {key!r}'
            + (f', did you mean {near[0]!r}?' if near else ', --help lists the settings')
        )
    try:
        config[key] = convert(value, defaults[key])
    except ValueError:
        given = repr(value) if given is None else repr(given)
        hint = (
            f', write {given[1:-1].capitalize()}'
            if given[1:-1].lower() in ('true', 'false') and type(defaults[key]) is bool
            else ''
        )
        fail(
            f'{where}: {key} expects {EXPECTED[type(defaults[key])]} (default {defaults[key]!r}), got {given[:120]}{hint}'
        )


def read_script(path: str | os.PathLike) -> tuple[dict, dict[str, tuple[str, str]], str | None]:
    """-> ({name: default} in source order, {name: (group heading, comment)} for --help, docstring) of the script at `path`."""
    with tokenize.open(path) as file:
        source = file.read()
    trailing, headings, owner = (
        {},
        {},
        0,
    )  # line -> comment behind code; line -> comment in column 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        if column == 0:
            headings[line] = token.string.strip('#-=* ')
        elif token.line.lstrip().startswith('#') and line - 1 in trailing:
            trailing[owner] += ' ' + token.string.lstrip(
                '# '
            )  # an indented comment line goes on with the comment above it
            trailing[line] = ''
        else:
            owner, trailing[line] = line, token.string.lstrip('# ')
    tree = parse(source)
    defaults, names, notes, heading, last = {}, {}, {}, '', 0
    for node in tree.body:
        if hasattr(node, 'body') or any(
            isinstance(part, ast.Name) and part.id == 'configure' for part in ast.walk(node)
        ):
            break  # a def, class or other block, or the call itself: what follows cannot be overridden
        above = ' '.join(
            headings[line] for line in range(last + 1, node.lineno) if headings.get(line)
        )
        last = node.end_lineno
        if (
            not isinstance(node, ast.Assign)
            or len(node.targets) != 1
            or not isinstance(node.targets[0], ast.Name)
        ):
            heading = ''  # comments above imports are no headings
            continue
        heading = above or heading
        try:
            name, value = node.targets[0].id, evaluate(node.value, names)
        except BROKEN:
            continue  # computed by a call: not a setting
        names[name] = value
        if name == name.lower() and not name.startswith('_'):
            defaults[name], notes[name] = (
                value,
                (heading, trailing.get(last) or trailing.get(node.lineno, '')),
            )
    return defaults, notes, ast.get_docstring(tree, clean=False)


def read_config(path: str, config: dict, defaults: dict) -> None:
    """Applies the config file at `path`. Names that start with an underscore are the file's own helpers."""
    try:
        with open(path, 'rb') as file:
            source = file.read()
    except OSError as error:
        fail(f'{path}: cannot read the config file: {error.strerror}')
    try:
        body = parse(source).body
    except BROKEN as error:
        fail(
            f'{path}:{getattr(error, "lineno", None) or 1}: not a valid config file: {getattr(error, "msg", None) or error}'
        )
    helpers, lines = {}, source.decode(errors='replace').splitlines()
    for node in body:
        where = f'{path}:{node.lineno}'
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            continue  # docstring
        if not isinstance(node, ast.Assign) or not all(
            isinstance(target, ast.Name) for target in node.targets
        ):
            fail(
                f'{where}: a config file holds only `name = value` lines, not {lines[node.lineno - 1].strip()[:60]!r}'
            )
        try:
            value = evaluate(node.value, {**config, **helpers})
        except BROKEN as error:
            fail(f'{where}: {node.targets[0].id}: {error}')
        for target in node.targets:
            if target.id in COMMAND_LINE:
                fail(
                    f'{where}: {target.id} is for the command line alone, --{target.id}=True: a config file must not replace a run'
                )
            if target.id.startswith('_'):
                helpers[target.id] = value
            else:
                assign(config, defaults, target.id, value, where)


def joined(argv: list[str], defaults: dict) -> list[str]:
    """The arguments with `--key value` as `--key=value`, and a bare `--key` of a switch (True or False, or None) as `--key=True`."""
    arguments, rest = [], list(argv)
    while rest:
        argument = rest.pop(0)
        if argument[:2] == '--' and argument[2:] in defaults:
            default, following = defaults[argument[2:]], rest[0] if rest else '--'
            if isinstance(default, (bool, type(None))):
                if not following.startswith('-') and not following.endswith('.py'):
                    fail(
                        f'command line: {argument} alone turns it on; another value needs "=": {argument}={following}'
                    )
                argument += '=True'
            elif following.startswith('--'):
                fail(
                    f'command line: {argument} needs a value, as in {argument}={default or "value"}'
                )
            else:
                argument += f'={rest.pop(0)}'
        arguments.append(argument)
    return arguments


def gathered(argv: list[str], key: str) -> list[str]:
    """The arguments with `--key A B C` as `--key=A,B,C`, for a setting that is a list of files."""
    if f'--{key}' not in argv:
        return argv
    i = argv.index(f'--{key}')
    end = next(
        (k for k in range(i + 1, len(argv)) if argv[k].startswith('-') or argv[k].endswith('.py')),
        len(argv),
    )
    return [*argv[:i], f'--{key}={",".join(argv[i + 1 : end])}', *argv[end:]]


def read_argument(argument: str, config: dict, defaults: dict, where: str = 'command line') -> None:
    """Applies one `--key=value`; `where` goes into the message."""
    key, _, text = argument[2:].partition('=')
    default = defaults.get(key)
    try:
        value = evaluate(parse(text.strip(), 'eval').body, None)
    except BROKEN:
        value = (
            text if isinstance(default, str) or default is None else ...
        )  # ... fits no type: refused below
    if isinstance(default, str) and not isinstance(value, str):
        value = text  # --out_dir=123 is the text '123'
    assign(config, defaults, key, value, where, given=text)


def check_ranges(config: dict, ranges: dict[str, tuple | list]) -> None:
    """A script's RANGES, beside its settings: {name: (low, high)}, both allowed, or {name: [values]}."""
    for name, allowed in ranges.items():
        value = config[name]
        if isinstance(allowed, list):
            if value not in allowed:
                fail(f'{name} = {value!r}: expected one of {", ".join(map(str, allowed))}')
            continue
        low, high = allowed
        for number in value if isinstance(value, tuple) else (value,):
            if not low <= number <= high:
                limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
                fail(f'{name} = {value}: must be {limits}')


def help_text(path: str | os.PathLike) -> str:
    """--help: docstring, usage, every setting with its default and comment under its group's heading."""
    defaults, notes, docstring = read_script(path)
    lines = [
        docstring or '',
        '',
        f'usage: python {os.path.basename(path)} [config.py ...] [--key=value ...]',
    ]
    previous = None
    for name, default in defaults.items():
        heading, comment = notes[name]
        if heading != previous:
            lines += ['', heading] if heading else ['']
        previous = heading
        lines.append(f'  --{name}={default!r}'.ljust(40) + comment)
    return '\n'.join(line.rstrip() for line in lines).strip()


def config_diff(config: dict, defaults: dict) -> str:
    """The settings that differ from their defaults, one a line ('' if none)."""
    changed = [key for key in config if repr(config[key]) != repr(defaults.get(key))]
    return '\n'.join(f'{key} = {config[key]!r}  (default {defaults.get(key)!r})' for key in changed)


def configure(settings: dict, argv: Iterable[str] | None = None, quiet: bool = False) -> dict:
    """Overrides a script's settings in place and returns them as a plain dict, in the order of the source.

    settings: the script's globals(), with '__file__'; the defaults are read from that source, so two calls do not influence each other.
    argv: the arguments without the script's name (default: the command line's). Under torchrun only rank 0 prints the changed
    settings; quiet=True prints none. A user's mistake ends the script (`fail`); --help prints and exits with status 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    defaults = read_script(settings['__file__'])[0]
    config = dict(defaults)
    if '--help' in argv or '-h' in argv:
        print(help_text(settings['__file__']))
        raise SystemExit(0)
    for argument in joined(argv, defaults):
        if argument.startswith('--'):
            read_argument(argument, config, defaults)
        elif argument.endswith('.py') and not argument.startswith('-'):
            read_config(argument, config, defaults)
        else:
            fail(f'command line: cannot read {argument!r}: expected config.py or --key=value')
    check_ranges(config, settings.get('RANGES', {}))
    settings.update(config)
    if not quiet and os.environ.get('RANK', '0') == '0' and config != defaults:
        print(config_diff(config, defaults), flush=True)
    return config


# ----------------------------------------------------------------------------- whole-or-nothing files


def sync_folder(folder: str | os.PathLike) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(
            descriptor
        )  # a rename is safe from a power cut only once its folder is on the disk
    finally:
        os.close(descriptor)


def write_atomic(
    path: str | os.PathLike, write: Callable[[BinaryIO], object], keep: str | None = None
) -> None:
    """write(file) fills a binary temporary file, which then takes the name `path`; an existing file goes on as `keep`, if given (a name
    in the same folder). Whatever fails leaves `path` as it was and raises."""
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            kept, link = path.with_name(keep), path.with_name(f'.{keep}.tmp')
            link.unlink(missing_ok=True)
            try:
                os.link(path, link)  # a second name, so that `path` exists at every moment
                os.replace(link, kept)
            except OSError:  # a file system without hard links: for a moment only `keep` exists
                os.replace(path, kept)
            link.unlink(
                missing_ok=True
            )  # renaming between two names of one file does nothing: happens after a kill right here
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say whose write it refused
        raise
    sync_folder(path.parent)


def write_text(text: str, path: str | os.PathLike) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def json_line(obj: object) -> str:
    """JSON as the standard has it: NaN and infinities become null."""

    def plain(x):
        if isinstance(x, float) and not math.isfinite(x):
            return None
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        return [plain(item) for item in x] if isinstance(x, (list, tuple)) else x

    return json.dumps(plain(obj), allow_nan=False)


def write_json(obj: object, path: str | os.PathLike) -> None:
    write_text(json.dumps(json.loads(json_line(obj)), indent=1) + '\n', path)
