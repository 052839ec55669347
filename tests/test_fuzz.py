"""Bad input, drawn by hypothesis: files, config files and command lines are read right, or refused in one line; never a traceback, a hang
or a silent wrong result. `pytest --long tests/test_fuzz.py` draws fifty times as many."""

import contextlib
import io
import json
import math
import os
import shlex
import string
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import checkpoint
import data_fineweb as df
import figures
import sokoban
import sweep
import train_lm
import train_sokoban
from configurator import configure

edits = st.lists(
    st.tuples(st.floats(0, 1), st.one_of(st.binary(max_size=8), st.integers(0, 40))), max_size=4
)


def damaged(whole: bytes, edits: list) -> bytes:
    """Bytes put over others at a place, or a number of bytes taken out."""
    for where, what in edits:
        at = int(where * len(whole))
        whole = whole[:at] + (
            whole[at + what :] if isinstance(what, int) else what + whole[at + len(what) :]
        )
    return whole


def refused(error, *names) -> None:
    assert '\n' not in str(error) and all(name in str(error) for name in names), str(error)


def configured(module, argv: list[str]):
    """-> the settings, or what was said on stderr."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            return configure(dict(vars(module)), argv, quiet=True)
        except SystemExit as stop:
            if stop.code == 0:
                assert '--help' in argv or '-h' in argv
                return {}
            assert stop.code == 2
    text = err.getvalue()
    assert text.startswith('error: ') and text.count('\n') == 1, text
    return text


# ----------------------------------------------------------------------------- files


@given(edits)
def test_shards(tmp_path, edits):
    path = tmp_path / 'fineweb_train_000001.bin'
    df.write_shard(str(path), np.arange(50, dtype=np.uint16))
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, edits))
    try:
        tokens = df.read_shard(str(path), 256)
    except df.ShardError as error:
        return refused(error, str(path))
    assert len(tokens) == 50 and (tokens < 256).all()  # the header's count is the file's


@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(str.encode),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5),
            lambda x: (
                st.lists(x, max_size=3)
                | st.dictionaries(st.sampled_from(['tokenizer', 'shards', 'source', 'x']), x)
            ),
        ).map(lambda x: json.dumps(x).encode()),
    )
)
@example(b'[' * 100_000)
@example(b'{"tokenizer": "bytes", "shards": [], "source": 1e999}')
def test_descriptions_and_logs(tmp_path, content):
    (tmp_path / 'meta.json').write_bytes(content)
    try:
        assert df.read_meta(str(tmp_path))['tokenizer'] in df.VOCAB
    except df.DataError as error:
        refused(error, 'meta.json')
    (tmp_path / 'log.jsonl').write_bytes(content + b'\n')
    try:
        assert all(
            type(r['step']) is int and all(math.isfinite(r.get(k) or 0) for k in figures.NUMBERS)
            for r in figures.read_log(str(tmp_path))
        )
    except figures.LogError as error:
        refused(error, 'log.jsonl')


THREE = sokoban.generate(3, 1, seed=1, max_moves=6)[0]


@given(edits)
def test_packed_levels(tmp_path, edits):
    path = tmp_path / 'levels.npy'
    np.save(path, THREE)
    path.write_bytes(damaged(path.read_bytes(), edits))
    try:
        levels, _ = sokoban.load_levels('', str(path))
    except sokoban.LevelError as error:
        return refused(error, str(path))
    playable(levels)


def playable(levels: np.ndarray) -> None:
    """What an environment needs: one agent, as many boxes as targets, at least one, and a wall around."""
    boards = sokoban.SokobanEnv(levels, len(levels), order='sequence').observe().numpy()
    fixed, moving = boards[..., 1], boards[..., 0]
    rim = np.ones((10, 10), bool)
    rim[1:-1, 1:-1] = False
    assert ((moving == 3).sum((1, 2)) == 1).all() and (
        (moving == 4).sum((1, 2)) == (fixed == 2).sum((1, 2))
    ).all()
    assert ((fixed == 2).sum((1, 2)) > 0).all() and (fixed[:, rim] == 1).all()


LEVEL = '; 0\n##########\n#        #\n# @$.    #\n#        #\n#        #\n#        #\n#        #\n#        #\n#        #\n##########\n'


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * len(LEVEL)),
            st.sampled_from(list('#@$.*+ ;\n\r\t0x\0é')),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_text_levels(tmp_path, edits):
    path = tmp_path / 'levels.txt'
    text = list(LEVEL * 3)
    for at, letter, insert in edits:
        text[at : at + (not insert)] = letter
    path.write_text(''.join(text), encoding='utf-8')
    try:
        levels, _ = sokoban.load_levels('', str(path))
    except sokoban.LevelError as error:
        return refused(error, str(path))
    playable(levels)


@given(edits)
def test_checkpoints(tmp_path, edits):
    """Every byte that is read is checked, or does not matter: what loads is what was saved."""
    path, saved = (
        tmp_path / 'ckpt_last.pt',
        {'step': 7, 'model': {'w': torch.arange(12.0).view(3, 4)}, 'name': 'a'},
    )
    checkpoint.save_checkpoint(saved, path)
    path.write_bytes(damaged(path.read_bytes(), edits))
    try:
        loaded = checkpoint.load_checkpoint(path)
    except checkpoint.CheckpointError as error:
        return refused(error, str(path))
    assert (
        loaded['step'] == 7
        and loaded['name'] == 'a'
        and torch.equal(loaded['model']['w'], saved['model']['w'])
    )


@given(
    st.binary(max_size=40),
    st.sampled_from(['archive/data.pkl', 'archive/data/0', 'archive/version', 'archive/byteorder']),
)
@example(b'cos\nsystem\n(S"touch evil_was_here"\ntR.', 'archive/data.pkl')
def test_checkpoints_from_a_stranger(tmp_path, content, member):
    """A whole archive with other contents: refused, or plain data; it runs no code."""
    path = tmp_path / 'ckpt_last.pt'
    checkpoint.save_checkpoint({'step': 7, 'model': {'w': torch.arange(12.0)}}, path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    names = [name for name in members if name.endswith(member.partition('/')[2])]
    with zipfile.ZipFile(path, 'w') as new:
        for name, data in members.items():
            new.writestr(name, content if name in names else data)
    try:
        checkpoint.load_checkpoint(path)
    except checkpoint.CheckpointError as error:
        refused(error, str(path))
    assert not os.path.exists('evil_was_here')


# ----------------------------------------------------------------------------- settings

names = st.sampled_from(
    [
        'n_layer',
        'learning_rate',
        'betas',
        'recurrent',
        'out_dir',
        'compile',
        'n_layers',
        '__file__',
        'os',
        'é',
        '',
        'seed',
    ]
)
values = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
    st.sampled_from(
        [
            'True',
            'false',
            'None',
            '()',
            '(0.8,)',
            '(0.9, "a")',
            '10**99',
            '9**9**9**9',
            '1e400',
            '-0',
            '[1',
            '"',
            "'a'*9",
            '__import__("os")',
            '1 if 1 else 2',
            'é',
            '\0',
            '{1: 2}',
        ]
    ),
)


@given(
    st.lists(
        st.one_of(
            st.tuples(names, values).map(lambda x: f'--{x[0]}={x[1]}'),
            st.text(max_size=10),
            names.map(lambda x: f'--{x}'),
            values,
        ),
        max_size=4,
    ),
    st.sampled_from([train_lm, train_sokoban, sweep]),
)
@example(['-h'], train_lm)
@example(['--help', '--nonsense'], sweep)
def test_command_lines(argv, module):
    config = configured(module, [a for a in argv if not a.endswith('.py')])
    if isinstance(config, dict):
        valid(config, module)


def valid(config: dict, module) -> None:
    """Every setting has the type of its default, and every number is finite."""
    defaults = configure(dict(vars(module)), [], quiet=True)
    for key, value in config.items():
        assert defaults[key] is None or type(value) is type(defaults[key]), (key, value)
        assert not isinstance(value, float) or math.isfinite(value), (key, value)


lines = st.one_of(
    st.tuples(names, values).map(lambda x: f'{x[0]} = {x[1]}'),
    st.tuples(names, names).map(lambda x: f'{x[0]} = {x[1]} * 2 # twice'),
    st.sampled_from(
        [
            'import os',
            'os.system("touch evil_was_here")',
            'print(1)',
            'del n_layer',
            'n_layer += 1',
            'a: int = 1',
            'if True: seed = 1',
            '"""text"""',
            '(' * 500,
            'seed = ' + '-' * 2000 + '1',
            'x = lambda: 0',
            'n_layer = n_expert = 2',
            'n_layer, n_expert = 2, 2',
            '\\',
        ]
    ),
    st.text(max_size=20),
)


@given(st.lists(lines, max_size=5), st.sampled_from(['\n', '\r\n', '\r', ';']))
def test_config_files(tmp_path, lines, end):
    path = tmp_path / 'some.py'
    path.write_bytes(end.join(lines).encode('utf-8', 'surrogatepass'))
    config = configured(train_lm, [str(path)])
    if isinstance(config, dict):
        valid(config, train_lm)
    else:
        assert 'some.py' in config
    assert not os.path.exists('evil_was_here')


ROWS = []


@given(
    st.text(
        st.characters(exclude_characters='\0', exclude_categories=['Cs']), min_size=1, max_size=20
    ),
    st.sampled_from(['', 'a b', "x'; touch y", '$(touch y)', '../..']),
)
@example(string.punctuation, '')
def test_jobs_hold_names_as_data(capsys, name, more):
    """A shell that reads an emitted line gets each argument as it was given."""
    argv = [
        '--plan=lm-small',
        '--only=L=1 kind=recurrent d=768',
        '--emit=commands',
        f'--out_dir={name}{more}',
    ]
    config = configure(vars(sweep), argv, quiet=True)
    sweep.print_jobs(
        ROWS or ROWS.extend(sweep.plan_rows()) or ROWS, config
    )  # the same rows whatever the folder
    words = shlex.split(capsys.readouterr().out)
    assert (
        f'--out_dir={config["out_dir"]}' in words
        and words[0] == 'python'
        and words[-1] == '--index=0'
        and all(w.startswith('--') for w in words[2:])
    )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
