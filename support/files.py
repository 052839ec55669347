"""Files: written completely or not at all, and read as text, JSON or tensors."""

import contextlib
import errno
import gzip
import io
import json
import lzma
import os
import pathlib
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator

from support.script import UserError, first_line

Path = str | os.PathLike


def write_atomic(path: Path, write: Callable, keep: str | None = None) -> None:
    """Write a file completely or not at all.

    write(file) writes to a temporary binary file, .NAME.RANDOM.tmp, which is then renamed to
    `path`; so two processes may write one file. keep: a name in the same folder, under which an
    existing file is kept. If anything fails, `path` is unchanged (with `keep`, the old file may
    then exist only under that name) and the error is raised; an OSError has the name of the file.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(temporary_name(path))
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, path.with_name(keep))  # killed here, only `keep` exists
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name; that of a full disk names none
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Sync a folder, so that a renaming in it survives a power cut, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # some file systems, such as SMB and FUSE, cannot sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


@contextlib.contextmanager
def replacing(folder: Path, *names: str) -> Iterator[pathlib.Path]:
    """Within a with statement, have a new folder beside `folder`, in which files that belong
    together are written; then move these files into `folder`, all at once if it does not exist,
    else one after the other in the order of `names`.

    If anything fails before that, `folder` is unchanged and the error is raised; an OSError has the
    name of the folder."""
    path = pathlib.Path(folder).resolve()  # a link may lead to another disk
    new = path.with_name(temporary_name(path))
    try:
        yield new
        for name in names:
            with open(new / name, 'rb') as file:
                os.fsync(file.fileno())
        if not path.exists():
            with contextlib.suppress(OSError):  # another process has just made it
                os.replace(new, path)
        if new.exists():
            for name in names:
                os.replace(new / name, path / name)
        sync_folder(path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def temporary_name(path: pathlib.Path) -> str:
    """Return a name for what becomes `path`: hidden, and of this process alone."""
    return f'.{path.name}.{secrets.token_hex(4)}.tmp'


def remove_temporary(folder: Path, name: str = '*') -> None:
    """Remove what killed processes have left of `write_atomic` and `replacing`, for all files of
    the folder or for one. No other process may be writing them."""
    for path in pathlib.Path(folder).glob(f'.{name}.{8 * "[0-9a-f]"}.tmp'):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """Write a text file in UTF-8, completely or not at all. What UTF-8 cannot encode, such as names
    of files in another encoding, is escaped."""
    write_atomic(path, lambda file: file.write(text.encode(errors='backslashreplace')))


def plain(obj: object) -> object:
    """Return obj with NaN and infinities, which standard JSON lacks, replaced by None."""
    return json.loads(json.dumps(obj), parse_constant=lambda _: None)


def write_json(obj: object, path: Path) -> None:
    """Write obj as indented standard JSON, completely or not at all."""
    write_text(json.dumps(plain(obj), indent=1) + '\n', path)


def read_json(path: Path) -> dict:
    """Return the dict in a JSON file, or {} if the file is missing, unreadable or holds none."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_tensors(path: Path, device: str = 'cpu') -> dict:
    """Return the tensors in a .safetensors file by name. Raises UserError if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device)
    except (OSError, SafetensorError) as error:
        raise UserError(f'{path}: cannot be read ({first_line(error)})') from None


def write_tensors(tensors: dict, path: Path) -> None:
    """Write tensors, by name, as a .safetensors file."""
    from safetensors.torch import save

    contiguous = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    data = save(contiguous, metadata={'format': 'pt'})
    write_atomic(path, lambda file: file.write(data))


# ---- text ----


def open_text(path: str, errors: str = 'strict') -> io.TextIOBase:
    """Open a file of text, also one that is compressed (.gz, .xz), or standard input for '-'."""
    if path == '-' and sys.stdin is None:
        raise UserError('-: standard input is closed')
    if path == '-':
        return io.TextIOWrapper(io.BytesIO(sys.stdin.buffer.read()), encoding='utf-8-sig')
    opener = {'.gz': gzip.open, '.xz': lzma.open}.get(os.path.splitext(path)[1].lower(), open)
    return opener(path, 'rt', encoding='utf-8-sig', errors=errors)


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for '-'. Raises UserError if it is no
    text."""
    try:
        with open_text(path) as file:
            return file.read()
    except UserError:
        raise
    except (ValueError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        advice = 'save it as UTF-8' if isinstance(error, UnicodeError) else 'is it damaged?'
        raise UserError(f'{path}: cannot be read: {first_line(error)}: {advice}') from None
