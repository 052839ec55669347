"""Bad input, drawn by hypothesis: files, config files and command lines are read right, or refused
in one line; never a traceback, a hang or a silent wrong result."""

import contextlib
import io
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import common
import data_fineweb as df
import figures
import sokoban
import train_lm
import train_sokoban
from configurator import Mistake, configure


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def may_refuse(error, *names):
    """With these names in its one line."""
    try:
        yield
    except error as refusal:
        text = str(refusal)
        assert '\n' not in text and all(name in text for name in names), text


# ---- files: whole ones, damaged ----


def shard(damaged):
    path = Path('fineweb_train_000001.bin')
    df.write_shard(path, np.arange(50, dtype=np.uint16))
    damaged(path)
    with may_refuse(df.DataError, str(path)):
        tokens = df.read_shard(path, 256)
        assert len(tokens) == 50 and (tokens < 256).all()  # the header's count is the file's


def saved(damaged):
    """Every byte that is read is checked, or does not matter: what loads is what was saved."""
    path, w = Path('ckpt_last.pt'), torch.arange(12.0).view(3, 4)
    common.save_checkpoint({'step': 7, 'model': {'w': w}, 'name': 'a'}, path)
    damaged(path)
    with may_refuse(common.CheckpointError, str(path)):
        loaded = common.load_checkpoint(path)
        assert (loaded['step'], loaded['name']) == (7, 'a')
        assert torch.equal(loaded['model']['w'], w)


def packed_levels(damaged):
    np.save('levels.npy', THREE)
    playable('levels.npy', damaged)


def text_levels(damaged):
    Path('levels.txt').write_text(LEVELS)
    playable('levels.txt', damaged)


THREE = sokoban.generate(3, 1, seed=1, max_moves=6)[0]
LEVELS = 3 * '\n'.join(['; 0', '#' * 10, '# @$.    #', *['#        #'] * 7, '#' * 10, ''])


def playable(path, damaged):
    """Refused, or one agent, as many boxes as targets, at least one, and a wall around."""
    rim = np.ones((10, 10), bool)
    rim[1:-1, 1:-1] = False
    with may_refuse(Mistake, path):
        levels = sokoban.load_levels('', path)[0]
        boards = sokoban.SokobanEnv(levels, len(levels), order='sequence').observe().numpy()
        moving, fixed = boards[..., 0], boards[..., 1]
        targets = (fixed == 2).sum((1, 2))
        assert ((moving == 3).sum((1, 2)) == 1).all() and (fixed[:, rim] == 1).all()
        assert ((moving == 4).sum((1, 2)) == targets).all() and (targets > 0).all()


def description(damaged):
    df.write_meta('.', {'tokenizer': 'bytes', 'shards': [5], 'source': 'a'})
    damaged(Path('meta.json'))
    with may_refuse(df.DataError, 'meta.json'):
        assert df.read_meta('.')['tokenizer'] in df.VOCAB


def log(damaged):
    Path('log.jsonl').write_text('{"step": 0, "val_loss": 5.5}\n{"step": 1, "seconds": null}\n')
    damaged(Path('log.jsonl'))
    with may_refuse(Mistake, 'log.jsonl'):
        for record in figures.read_log('.'):
            assert type(record['step']) is int
            assert all(math.isfinite(record.get(key) or 0) for key in figures.NUMBERS)


FILES = [shard, saved, packed_levels, text_levels, description, log]
LETTERS = st.sampled_from('# @ $ . * + ; \n \r 0 é [ ] { } " : , null 1e999 NaN'.split(' '))
STRANGE = st.one_of(st.binary(max_size=8), LETTERS.map(str.encode), st.integers(0, 40))


@pytest.mark.parametrize('file', FILES)
@given(edits=st.lists(st.tuples(st.floats(0, 1), STRANGE), max_size=4))
@example(edits=[(0.0, b'[' * 100_000)])
def test_damaged_files(file, edits):
    """Bytes put over others at a place, or a number of bytes taken out."""

    def damaged(path):
        whole = path.read_bytes()
        for where, what in edits:
            at = int(where * len(whole))
            cut, new = (what, b'') if isinstance(what, int) else (len(what), what)
            whole = whole[:at] + new + whole[at + cut :]
        path.write_bytes(whole)

    file(damaged)


# ---- settings ----


NAMES = 'n_layer learning_rate betas recurrent out_dir compile n_layers __file__ os é seed'
NAMES = st.sampled_from(NAMES.split())
ODD = 'True false None () (0.8,) (0.9,"a") 10**99 9**9**9**9 1e400 -0 [1 " é \0 {1:2}'
ODD = [*ODD.split(' '), "'a'*9", '__import__("os").system("touch evil")', '1 if 1 else 2']
ODD += ['(' * 500, '-' * 2000 + '1']
NUMBERS = st.integers().map(str) | st.floats().map(str)
VALUES = NUMBERS | st.text(max_size=8) | st.sampled_from(ODD)
PAIRS = st.tuples(NAMES, VALUES)
WORDS = PAIRS.map('--{0[0]}={0[1]}'.format) | NAMES.map('--{}'.format) | VALUES
LINES = PAIRS.map(' = '.join) | st.text(max_size=20)
ENDS = st.sampled_from('\n\r;')


@pytest.mark.parametrize('module', [train_lm, train_sokoban])
@given(argv=st.lists(WORDS, max_size=4), lines=st.lists(LINES, max_size=4), end=ENDS)
def test_command_lines_and_config_files(module, argv, lines, end):
    """The settings are each of its default's type, and finite."""
    Path('some.py').write_bytes(end.join(lines).encode('utf-8', 'surrogatepass'))
    argv = [*['some.py'] * bool(lines), *(a for a in argv if not a.endswith(('.py', '-h', 'help')))]
    err, defaults = io.StringIO(), configure(dict(vars(module)), [], quiet=True)
    try:
        with contextlib.redirect_stderr(err):
            config = configure(dict(vars(module)), argv, quiet=True)
    except SystemExit as stop:
        text = err.getvalue()
        assert stop.code == 2 and text.startswith('error: ') and text.count('\n') == 1, text
    else:
        for key, value in config.items():
            assert type(value) is type(defaults[key]), (key, value)
            assert not isinstance(value, float) or math.isfinite(value), (key, value)
    assert not os.path.exists('evil')
