"""Feed bad input, drawn by hypothesis, to every reader of files, config files and command lines.

Input is read correctly or refused in one line: no traceback, no hang, no wrong result."""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

from configurator import configure
from support.script import UserError

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import levels as boxoban
import sample
import sokoban
import train_lm
import train_sokoban
from convlstm import AgentConfig, build_agent, load_agent
from model import ModelConfig, build_model
from support import loader, run_folder
from tokenizer import VOCAB


@pytest.fixture(autouse=True)
def work_in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def may_refuse(error, name):
    """Accept this exception if it has one line, which contains the name."""
    try:
        yield
    except error as refusal:
        assert '\n' not in str(refusal) and name in str(refusal), str(refusal)


# ---- damaged files ----
# Each function writes a file, lets damage(path) damage it, and checks what is read from it.


def read_damaged_shard(damage):
    path = Path('fineweb_train_000001.bin')
    loader.write_shard(path, np.arange(50, dtype=np.uint16))
    damage(path)
    with may_refuse(UserError, str(path)):
        tokens = loader.read_shard(path, 256)
        assert len(tokens) == 50 and (tokens < 256).all()


def read_damaged_checkpoint(damage):
    """Every byte that is read is checked, or does not matter: what loads is what was saved."""
    path, w = Path('last.pt'), torch.arange(12.0).view(3, 4)
    torch.save({'step': 7, 'model': {'w': w}, 'config': {'name': 'a'}}, path)
    damage(path)
    with may_refuse(UserError, str(path)):
        loaded = run_folder.load_checkpoint(path)
        assert (loaded['step'], loaded['config']) == (7, {'name': 'a'})
        assert torch.equal(loaded['model']['w'], w)


THREE_LEVELS = boxoban.generate(3, 1, seed=1, max_moves=6)[0]
LEVEL_TEXT = '\n'.join(['; 0', '#' * 10, '# @$.    #', *['#        #'] * 7, '#' * 10, ''])


def read_damaged_levels(damage):
    np.save('levels.npy', THREE_LEVELS)
    damage(Path('levels.npy'))
    assert_playable_or_refused('levels.npy')


def read_damaged_text_levels(damage):
    Path('levels.txt').write_text(3 * LEVEL_TEXT)
    damage(Path('levels.txt'))
    assert_playable_or_refused('levels.txt')


def assert_playable_or_refused(path):
    """A level has one agent, as many boxes as targets, at least one, and walls around it."""
    border = np.ones((10, 10), bool)
    border[1:-1, 1:-1] = False
    with may_refuse(UserError, path):
        levels = boxoban.load_levels('', path)[0]
        boards = sokoban.SokobanEnv(levels, len(levels), order='sequence').observe().numpy()
        variable, fixed = boards[..., 0], boards[..., 1]
        targets = (fixed == 2).sum((1, 2))
        assert ((variable == 3).sum((1, 2)) == 1).all() and (fixed[:, border] == 1).all()
        assert ((variable == 4).sum((1, 2)) == targets).all() and (targets > 0).all()


def read_damaged_meta(damage):
    loader.write_meta('.', {'tokenizer': 'bytes', 'shards': [5], 'source': 'a'})
    damage(Path('meta.json'))
    with may_refuse(UserError, 'meta.json'):
        assert loader.read_meta('.')['tokenizer'] in VOCAB


def read_damaged_log(damage):
    Path('log.jsonl').write_text('{"step": 0, "val_loss": 5.5}\n{"step": 1, "seconds": null}\n')
    damage(Path('log.jsonl'))
    assert all('step' in record for record in run_folder.log_of('.'))


READERS = [
    read_damaged_shard,
    read_damaged_checkpoint,
    read_damaged_levels,
    read_damaged_text_levels,
    read_damaged_meta,
    read_damaged_log,
]
SYNTAX = '# @ $ . * + ; \n \r 0 é [ ] { } " : , null 1e999 NaN'.split(' ')
PLACES = st.floats(0, 1)  # as a fraction of the file
BYTES = st.one_of(st.binary(max_size=8), st.sampled_from([text.encode() for text in SYNTAX]))
OVERWRITE = st.tuples(PLACES, BYTES)
REMOVE = st.tuples(PLACES, st.integers(0, 40))


@pytest.mark.parametrize('read', READERS)
@given(edits=st.lists(OVERWRITE | REMOVE, max_size=4))
@example(edits=[(0.0, b'[' * 100_000)])
def test_damaged_files(read, edits):
    """An edit overwrites bytes, or removes a number of bytes."""

    def damage(path):
        content = path.read_bytes()
        for place, edit in edits:
            at = int(place * len(content))
            if isinstance(edit, int):
                content = content[:at] + content[at + edit :]
            else:
                content = content[:at] + edit + content[at + len(edit) :]
        path.write_bytes(content)

    read(damage)


LM = {'vocab_size': 256, 'n_layer': 1, 'n_embd': 16, 'n_head': 2, 'window': 8, 'block_size': 4}
AGENT = {'arch': 'convglu', 'n_embd': 8, 'head_dim': 8}
EXPORTS = [
    (
        lambda: build_model(ModelConfig(**LM), True),
        sample.load,
        train_lm,
    ),
    (lambda: build_agent(AgentConfig(**AGENT)), load_agent, train_sokoban),
]
WRONG = [None, True, -1, 0, 1, 3, 1.5, '', 'a', [], [1], {}, {'a': 1}]


@pytest.mark.parametrize('make, load, trainer', EXPORTS, ids=['lm', 'agent'])
@given(edits=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(WRONG)), max_size=3))
def test_wrong_entries_of_an_export(make, load, trainer, edits):
    """By all that read it: to use it, to evaluate it and to start from it."""
    entries = {'tokenizer': 'bytes', 'settings': {'n_layer': 1, 'dtype': 'float32'}}
    shutil.rmtree('export', ignore_errors=True)
    make().save_pretrained('export', config=entries)
    metadata = json.loads(Path('export/config.json').read_text())
    for number, value in edits:
        groups = [metadata, *(x for x in metadata.values() if isinstance(x, dict))]
        places = [(group, name) for group in groups for name in group]
        group, name = places[number % len(places)]
        group[name] = value
    Path('export/config.json').write_text(json.dumps(metadata))
    config = configure(dict(vars(trainer)), [], quiet=True)
    for read in (load, run_folder.load_export):
        with may_refuse(UserError, 'export'):
            read('export')
    with may_refuse(UserError, 'export'):
        saved = run_folder.sizes_in('export')
        config.adopt(saved, trainer.MODEL_SETTINGS, 'export', trainer.DEPENDS_ON, str)


# ---- settings ----


NAMES = st.sampled_from(
    'n_layer learning_rate betas recurrent out_dir compile n_layers __file__ os é seed'.split()
)
ODD = [
    *'True false None () (0.8,) (0.9,"a") 10**99 9**9**9**9 1e400 -0 [1 " é \0 {1:2}'.split(' '),
    "'a'*9",
    '__import__("os").system("touch evil")',
    '1 if 1 else 2',
    '(' * 500,
    '-' * 2000 + '1',
]
NUMBERS = st.integers().map(str) | st.floats().map(str)
VALUES = NUMBERS | st.text(max_size=8) | st.sampled_from(ODD)
PAIRS = st.tuples(NAMES, VALUES)
ARGUMENTS = PAIRS.map('--{0[0]}={0[1]}'.format) | NAMES.map('--{}'.format) | VALUES
LINES = PAIRS.map(' = '.join) | st.text(max_size=20)
LINE_ENDS = st.sampled_from('\n\r;')


@pytest.mark.parametrize('script', [train_lm, train_sokoban])
@given(argv=st.lists(ARGUMENTS, max_size=4), lines=st.lists(LINES, max_size=4), end=LINE_ENDS)
def test_command_lines_and_config_files(script, argv, lines, end):
    """Accepted settings have the type of their default and are finite. Nothing is executed."""
    # no names of config files, and not --help, which exits with 0
    argv = [word for word in argv if not word.endswith(('.py', '-h', 'help'))]
    if lines:
        Path('some.py').write_bytes(end.join(lines).encode('utf-8', 'surrogatepass'))
        argv = ['some.py', *argv]
    defaults = configure(dict(vars(script)), [], quiet=True)
    with contextlib.suppress(UserError):
        config = configure(dict(vars(script)), argv, quiet=True)
        for key, value in config.items():
            assert type(value) is type(defaults[key]) or key == 'resume', (key, value)
            assert not isinstance(value, float) or math.isfinite(value), (key, value)
    assert not os.path.exists('evil')
