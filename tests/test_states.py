"""Test state tracking: the text of data_states.py, and the scores of paper/states.py."""

import itertools
import json
import math
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

from configurator import Script, Settings

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from matplotlib.collections import LineCollection
from small_runs import LM, assert_refused, run_agent, run_lm
from test_stream import make_model

import data_fineweb
import data_states
from data_states import MOVES, TRAIN, chains, entropy, likeliest, make_shards
from lstm import load_model
from paper import demo_states, plans, states
from paper.figures import runs
from paper.plans import full_settings
from paper.states import accuracy
from paper.studies import states as study
from paper.studies import states_rates
from support.loader import data_checksum, find_shards, read_shard

DEFAULTS = Script(data_states.__file__).defaults | {'train_tokens': 100_000, 'val_tokens': 70_000}
CHAIN = re.compile('([xr]+)=([a-h]+) ')
RANDOM = torch.Generator().manual_seed(1)


def prepare(folder, **settings):
    """Prepare small shards; return the text for training and for validation."""
    make_shards(DEFAULTS | {'data_dir': str(folder)} | settings)
    paths = [find_shards(folder, split, 'bytes')[0] for split in ('train', 'val')]
    return [bytes(read_shard(path, 256).astype(np.uint8)).decode() for path in paths]


# ---- the text ----


@pytest.mark.parametrize('pair', [*MOVES.values(), ('dcba', 'bcda')], ids=','.join)
def test_arrangements_are_products_of_permutation_matrices(pair):
    """10,000 chains. A move is a matrix whose row i takes letter i of the new arrangement from the
    old one."""
    letters = sorted(pair[0])
    matrices = {
        name: np.array([[int(a == b) for b in letters] for a in move])
        for name, move in zip('xr', pair, strict=True)
    }
    rng = random.Random(1)
    counts = [rng.randint(1, 40) for _ in range(10_000)]
    before, n_right = np.array([ord(x) for x in letters]), 0
    for chain, n in zip(chains(pair, counts, rng, TRAIN), counts, strict=True):
        names, arrangement = CHAIN.fullmatch(chain).groups()
        for name in names:
            before = matrices[name] @ before
        n_right += len(names) == n and arrangement == ''.join(map(chr, before))
    assert n_right == 10_000


SIZES = [('S5', 120), ('A5', 60), ('Z5', 5), ('D5', 10), ('parity', 2), ('dcba,bcda', 8)]


@pytest.mark.parametrize('moves, size', SIZES)
def test_moves_generate_the_group_of_their_name(moves, size):
    text = ''.join(chains(data_states.find_moves(moves), [5] * 5000, random.Random(1), TRAIN))
    assert len({arrangement for _, arrangement in CHAIN.findall(text)}) == size


def test_no_long_chain_of_held_out_text_is_in_the_training_text(tmp_path):
    """Even with any other arrangement before it. Long chains are an eighth of all."""
    train, val = prepare(tmp_path, train_tokens=2_000_000, val_tokens=300_000)
    long = [{x for x, _ in CHAIN.findall(text) if len(x) >= 16} for text in (train, val)]
    assert len(long[0]) > 20_000 and len(long[1]) > 3000 and not long[0] & long[1]
    every = [''.join(names) for names in itertools.product('xr', repeat=16)]
    assert sum(map(data_states.is_held_out, every)) / len(every) == pytest.approx(1 / 8, rel=0.05)
    short = [{x for x, _ in CHAIN.findall(text) if len(x) < 5} for text in (train, val)]
    assert len(short[0]) == 2 + 4 + 8 + 16 and short[0] == short[1]


@pytest.mark.parametrize('lengths', ['log-uniform', 'uniform'])
def test_lengths_and_entropy_are_those_of_the_text(tmp_path, lengths):
    """The entropy by counts of the text: that of the lengths, and a bit for each move."""
    text, _ = prepare(tmp_path, lengths=lengths, most_moves=8, train_tokens=1_000_000)
    found = np.array([len(names) for names, _ in CHAIN.findall(text)])
    shares = np.bincount(found)[1:] / len(found)
    expected = data_states.shares_of_counts(8, lengths)
    assert shares == pytest.approx(list(expected.values()), abs=0.005)
    assert sum(expected.values()) == pytest.approx(1)
    nats = -(shares * np.log(shares)).sum() + found.mean() * math.log(2)
    assert entropy(MOVES['S5'], expected) == pytest.approx(nats / (found.mean() + 7), abs=0.001)


def test_the_floor_is_the_likeliest_arrangement_of_all_sequences():
    for pair in MOVES.values():
        found = likeliest(pair, 6)
        for n in range(1, 7):
            ends = {}
            for moves in itertools.product(pair, repeat=n):
                arrangement = sorted(pair[0])
                for move in moves:
                    arrangement = [arrangement['abcde'.index(x)] for x in move]
                ends[tuple(arrangement)] = ends.get(tuple(arrangement), 0) + 1
            assert found[n] == pytest.approx(max(ends.values()) / 2**n)
    assert likeliest(MOVES['S5'], 32)[32] == pytest.approx(1 / 120, rel=0.15)


def test_preparing_again_changes_nothing_and_other_settings_are_refused(tmp_path, capsys):
    before = prepare(tmp_path)
    meta = (tmp_path / 'meta.json').read_text()
    assert prepare(tmp_path) == before and (tmp_path / 'meta.json').read_text() == meta
    assert (
        f'train_lm.py config/states_nonrecurrent.py --data_dir={tmp_path}'
        in capsys.readouterr().out
    )
    for name, value in {'seed': 2, 'most_moves': 16, 'moves': 'Z5', 'lengths': 'uniform'}.items():
        assert_refused(f'{name} = .*choose another', prepare, tmp_path, **{name: value})
    assert prepare(tmp_path / 'other', seed=2) != before


def test_a_killed_preparation_is_repeated(tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data_states, 'write_shard', kill)
        prepare(tmp_path / 'killed')
    assert prepare(tmp_path / 'killed') == prepare(tmp_path / 'whole')


NO_PAIRS = ['S6', 'bacde', 'bacde,bcd', 'abcd,bcdd', 'bca,cab,abc', 'abcdefghi,bcdefghia', ',', '']


@pytest.mark.parametrize('moves', NO_PAIRS)
def test_moves_that_are_no_permutations_are_refused(tmp_path, moves):
    assert_refused(f"moves = '{moves}': expected S5, A5, Z5", prepare, tmp_path, moves=moves)


@pytest.mark.parametrize('moves', ['ab,ab', 'abcd,abcd', 'abcdefgh,abcdefgh', 'still'])
def test_moves_that_leave_all_letters_are_refused(tmp_path, monkeypatch, moves):
    monkeypatch.setitem(MOVES, 'still', ('abc', 'abc'))
    message = f"moves = '{moves}': there is nothing to track"
    assert_refused(message, prepare, tmp_path, moves=moves)


def test_the_start_of_the_text_is_printed(tmp_path, capsys):
    text, _ = prepare(tmp_path, moves='dcba,bcda')
    assert f'the training text starts with {text[:80]} ...\n' in capsys.readouterr().out


# ---- scores ----


class Alphabet:
    """A model that expects 'a' after '=', and after every other byte the next one."""

    head = torch.zeros(1)
    layers = [SimpleNamespace(window=8)]

    def init_state(self, B):
        return None

    def __call__(self, idx, targets, state):
        guesses = torch.where(idx == ord('='), ord('a'), idx + 1)
        return F.one_hot(guesses, 256).float(), None


def test_accuracy_is_a_count_by_hand(monkeypatch):
    """The model is right about 'abc', and wrong about the first letter of 'bca' and the second of
    'acb'. With two letters to predict, three moves span 9 bytes, one more than its window."""
    monkeypatch.setattr(states, 'WARM_UP', 0)
    streams = [b'xxr=abc xr=abc r=bca xrx=abc x=acb ', b'r=abc x=abc xx=bca xrrr=acb r=bcax=']
    table = accuracy(Alphabet(), streams).set_index('length')
    assert table['accuracy'].to_dict() == {1: 1 / 3, 2: 1 / 2, 3: 1, 4: 0}
    assert table['answers'].to_dict() == {1: 3, 2: 2, 3: 1, 4: 1}
    assert table['exceeds'].to_dict() == {1: False, 2: False, 3: True, 4: True}
    assert table['span'].to_dict() == {1: 7, 2: 8, 3: 9, 4: 10} and set(table['window']) == {8}
    monkeypatch.setattr(states, 'WARM_UP', 19)
    assert accuracy(Alphabet(), streams)['answers'].to_list() == [1, 1, 1]


def test_streams_of_different_sizes_are_refused():
    message = 'streams of the test text are 10 to 12 bytes long: cut them to equal size'
    assert_refused(message, accuracy, Alphabet(), [b'x' * 11, b'x' * 12, b'x' * 10])


def half_right(model, B, n):
    """Return streams (B, n), in which every second byte, from byte 1 on, is the likeliest there."""
    ids, state = torch.randint(256, (B, n), generator=RANDOM), model.init_state(B)
    with torch.no_grad():
        for t in range(1, n):
            logits, state = model(ids[:, t - 1 : t], None, state)
            if t % 2:
                ids[:, t] = logits[:, 0].argmax(-1)
    return ids


KINDS = [{}, {'share_kv': False}, {'recurrent': False}, {'arch': 'lstm'}]


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_streams_are_read_with_carried_state_in_any_number_of_rows(kind):
    model = make_model(**kind)
    ids = half_right(model, 5, 150)
    right = states.read(model, ids, rows=5)
    assert right[:, 1::2].all() and right[:, 2::2].sum() < 25 and not right[:, 0].any()
    for rows in (1, 2, 100):
        assert torch.equal(states.read(model, ids, rows), right)


@pytest.mark.parametrize('erase, kind', [('s', True), ('caches', True), ('caches', False)])
def test_erasing_all_of_the_state_is_a_new_start(erase, kind):
    """s is all of the state if W is one token; the caches are if the first layer does not read s,
    or if there is none."""
    model = make_model(recurrent=kind, window=1 if erase == 's' else 12)
    if kind:
        model.layers[0].a.data.fill_(4 if erase == 's' else 0)
    at = torch.zeros(2, 40, dtype=torch.bool)
    at[0, 17] = at[1, 4] = at[1, 24] = True
    parts = [[half_right(model, 1, n) for n in sizes] for sizes in ((17, 23), (4, 20, 16))]
    ids = torch.cat([torch.cat(row, 1) for row in parts])
    starts = [0, 17], [0, 4, 24]
    expected = torch.zeros(2, 40, dtype=torch.bool)
    for b, row in enumerate(starts):
        for start, end in zip(row, [*row[1:], 40], strict=True):
            expected[b, start + 1 : end : 2] = True
    assert states.read(model, ids, 2, erase, at)[expected].all()
    assert not states.read(model, ids, 2)[expected].all()


def test_the_state_is_erased_some_moves_before_the_answer(monkeypatch):
    """Chains of fewer moves are left out."""
    found = []
    monkeypatch.setattr(states, 'WARM_UP', 0)
    monkeypatch.setattr(states, 'read', lambda *args: found.append(args) or args[1] == args[1])
    streams = [b'xr=abc r=bca xrx=abc ']
    for moves_before, places in ((0, [8, 16]), (1, [7, 15]), (2, [14]), (3, [13])):
        table = accuracy(Alphabet(), streams, erase='s', moves_before=moves_before)
        *_, erase, at = found.pop()
        assert erase == 's' and at.nonzero()[:, 1].tolist() == places
        assert table['answers'].sum() == len(places)


def test_the_test_text_has_every_length_equally_often():
    for name, pair in MOVES.items():
        streams = states.test_text(pair, 12, 200)
        assert len({len(text) for text in streams}) == 1 and len(streams) == 100, name
        counts = [*range(1, 13), 15, 18, 21, 24]
        for text in streams[:3]:
            found = [x for x in states.find_answers(text) if x.begin >= states.WARM_UP]
            assert sorted(x.length for x in found) == sorted(2 * counts)
            for x in found:
                items = len(pair[0])
                start = text[x.first : x.first + items + 1].decode()
                chain = text[x.first + items + 1 : x.end + 1].decode()
                assert set(start) == {*pair[0], ' '} and x.end == x.begin + items - 1
                names, arrangement = CHAIN.fullmatch(chain + ' ').groups()
                assert len(names) == x.length
                for move in names:
                    start = data_states.apply(pair['xr'.index(move)], start[:items])
                assert arrangement == start
                assert x.length < 16 or data_states.is_held_out(names)


def test_the_tracked_length_is_the_longest_before_any_failure():
    assert states.tracked(pandas.Series([1, 0.95, 0.94, 1], [1, 2, 3, 4])) == 2
    assert states.tracked(pandas.Series([1.0, 1.0], [1, 6])) == 6
    assert states.tracked(pandas.Series([0.9, 1.0], [1, 6])) == 0


# ---- the script ----


@pytest.fixture(scope='module')
def trained_states(tmp_path_factory):
    """Return a folder with a text of at most 4 moves and runs on it: recurrent, nonrecurrent, lstm
    and a second seed of recurrent."""
    folder = tmp_path_factory.mktemp('states')
    prepare(folder / 'data', most_moves=4)
    settings = [{'name': 'recurrent'}, {'name': 'again', 'seed': 2}]
    settings += [{'name': 'nonrecurrent', 'recurrent': False}, {'name': 'lstm', 'arch': 'lstm'}]
    for run in settings:
        name = run.pop('name')
        sizes = {'n_expert': 4, 'window': 16, 'max_iters': 2, 'eval_interval': 2, **run}
        assert run_lm(folder / 'data', folder / 'states' / name, **sizes) == 0
    return folder


def score(monkeypatch, *arguments):
    """Run paper.states with these arguments."""
    monkeypatch.setattr(sys, 'argv', ['paper.states', *map(str, arguments)])
    states.main()


def test_runs_are_scored_tabulated_and_drawn(trained_states, tmp_path, monkeypatch, capsys):
    score(monkeypatch, trained_states / 'states', '--chains=100', f'--out={tmp_path}')
    printed = capsys.readouterr().out
    table = pandas.read_csv(tmp_path / 'states.csv')
    assert len(table) == 4 * 8 and set(table['length']) == {1, 2, 3, 4, 5, 6, 7, 8}
    assert (table['answers'] == 100).all() and (table['task'] == 'S5').all()
    assert set(table['panel']) == {'S5: x = bacde, r = bcdea; 1 to 4 moves'}
    assert (table['beyond'] == (table['length'] > 4)).all() and table['commit'].notna().all()
    is_long = (table['length'] + 10 > 16) & (table['model'] != 'LSTM')
    assert (table['exceeds'] == is_long).all()
    run = trained_states / 'states/nonrecurrent'
    one = accuracy(load_model(run, 'best'), states.test_text(MOVES['S5'], 4, 100))
    found = table[table['folder'] == str(run)]
    assert found['accuracy'].to_list() == one['accuracy'].to_list()
    assert (tmp_path / 'states.png').stat().st_size > 10_000
    lines = pandas.read_csv(tmp_path / 'states_table.csv', dtype=str)
    assert lines['seeds'].to_list() == ['1', '2', '1'] and lines['8'].str.endswith('+').all()
    assert 'non-recurrent, L = 2, E = 4, d = 32, trained on 0.0 MB in ' in printed


def test_seeds_that_have_not_finished_are_kept_apart(trained_states):
    frame = runs(trained_states / 'states').assign(scored_step=2)
    assert states.name_lines(frame).nunique() == 3
    frame.loc[frame['seed'] == 2, 'finished'] = False
    names = states.name_lines(frame)
    is_unfinished = names.str.endswith(', not finished, its model of update 2')
    assert states.name_lines(frame[~frame['finished']]).to_list() == names[is_unfinished].to_list()
    assert names.nunique() == 4 and (is_unfinished == ~frame['finished']).all()


def test_runs_of_two_plans_share_lines_unless_they_read_one_text(trained_states):
    """So S5 and Z5, each in a folder of its own, have the same colors in two panels."""
    one = runs(trained_states / 'states').assign(scored_step=2)
    other = one.assign(plan='other')
    apart = pandas.concat(
        [one, other.assign(data_dir='data/other', data_checksum=1)], ignore_index=True
    )
    assert set(states.name_lines(apart)) == set(states.name_lines(one))
    names = states.name_lines(pandas.concat([one, other], ignore_index=True))
    assert names.nunique() == 6 and names[len(one) :].str.startswith('other: ').all()


def test_runs_of_two_plans_that_differ_in_a_setting_have_lines_of_their_own(trained_states):
    one = runs(trained_states / 'states').assign(scored_step=2)
    later = {'max_iters': 4, 'step': 4, 'last_tokens': 2 * one['last_tokens'], 'scored_step': 4}
    other = one.assign(plan='other', data_dir='data/other', data_checksum=1, **later)
    names = states.name_lines(pandas.concat([one, other], ignore_index=True))
    assert not names.str.contains('scored at').any() and names.nunique() == 6
    assert names.str.contains(', max_iters = [24],').all()


def test_runs_that_cannot_be_scored_are_refused_before_any_is(trained_states, monkeypatch, capsys):
    folder = trained_states / 'states'
    message = f'{folder}/lstm: the model has no s to erase: leave it out by --only'
    assert_refused(message, score, monkeypatch, folder, '--chains=100', '--erase=s')
    assert 'reading' not in capsys.readouterr().out


@pytest.mark.parametrize('steps, text', [((1, 1), '1'), ((2, 1), '1 to 2'), ((2, 2), '')])
def test_seeds_scored_at_earlier_updates_share_a_line_that_says_so(trained_states, steps, text):
    frame = runs(trained_states / 'states').query("model != 'LSTM' and recurrent")
    [name] = states.name_lines(frame.assign(scored_step=steps)).unique()
    assert name.endswith(f' s, scored at update {text}' if text else ' s')


def test_a_run_has_the_step_of_its_model_and_a_line_for_its_text(
    trained_states, tmp_path, monkeypatch, capsys
):
    """The best model of the copy is that of an earlier update, and its text another one."""
    prepare(tmp_path / 'data', most_moves=4, seed=2)
    run = tmp_path / 'run'
    shutil.copytree(trained_states / 'states/recurrent', run)
    record = json.loads((run / 'config.json').read_text())
    checksum = data_checksum(tmp_path / 'data')
    record |= {'data_dir': str(tmp_path / 'data'), 'data_checksum': checksum}
    (run / 'config.json').write_text(json.dumps(record))
    best = json.loads((run / 'best/config.json').read_text())
    (run / 'best/config.json').write_text(json.dumps(best | {'step': 1}))
    original = trained_states / 'states/recurrent'
    score(monkeypatch, original, run, '--chains=100', f'--out={tmp_path}')
    assert f'{run}: its best model is that of update 1, not 2' in capsys.readouterr().out
    table = pandas.read_csv(tmp_path / 'states.csv')
    assert table.groupby('folder')['step'].first().to_dict() == {str(original): 2, str(run): 1}
    assert table['line'].nunique() == 2 and table['line'].str.contains(', data_dir = ').all()
    (run / 'config.json').write_text(json.dumps(record | {'data_checksum': checksum + 1}))
    message = f'{run}: was trained on another text than that in {tmp_path}'
    assert_refused(message, score, monkeypatch, run, '--chains=100')


def test_scores_of_an_erased_state_have_files_of_their_own(trained_states, tmp_path, monkeypatch):
    run = trained_states / 'states/recurrent'
    arguments = '--erase=caches', '--moves_before=3', '--chains=100'
    score(monkeypatch, run, *arguments, f'--out={tmp_path}')
    table = pandas.read_csv(tmp_path / 'states_without_caches_3.csv')
    assert table['length'].to_list() == [3, 4, 5, 6, 7, 8]
    assert (tmp_path / 'states_without_caches_3.png').exists()


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['nonrecurrent', '--erase=s'], 'nonrecurrent: the model has no s to erase'),
        (['lstm', '--erase=caches'], 'lstm: the model has no caches to erase'),
        (['lstm', '--chains=150'], '--chains=150: must be a multiple of 100'),
        (['recurrent', '--moves_before=2'], '--moves_before=2: .* needs --erase'),
        (['recurrent', '--erase=s', '--moves_before=-1'], '--moves_before=-1: must be at least 0'),
        (['recurrent', '--erase=s', '--moves_before=9'], 'no answer of at least 9 moves'),
        (['missing'], 'missing: holds no run'),
        ([''], 'FOLDER: is empty, name a folder'),  # not the current one
    ],
)
def test_what_cannot_be_scored_is_refused(trained_states, monkeypatch, arguments, message):
    monkeypatch.chdir(trained_states / 'states')
    assert_refused(message, score, monkeypatch, *arguments)


def test_a_run_on_another_text_and_an_agent_are_refused(data, tmp_path, monkeypatch):
    assert run_lm(data, tmp_path / 'other', max_iters=1) == 0
    message = 'holds no text of data_states.py: .* for a task of your own, see --help'
    assert_refused(message, score, monkeypatch, tmp_path / 'other')
    assert run_agent(tmp_path / 'agent') == 0
    assert_refused('agent: .* no text of data_states.py', score, monkeypatch, tmp_path / 'agent')


def test_the_copy_task_of_the_docstring(tmp_path, monkeypatch, capsys):
    """The model of the alphabet is right about 'ab' and 'abc', and wrong about 'ba'. Trained ones
    are scored by the number of letters in a text that they have not read."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r'\n    import random.*?(?=\n    python )', states.__doc__, re.DOTALL)[0]
    Path('copy_task.py').write_text(textwrap.dedent(code).replace('200_000', '4000'))
    task = SimpleNamespace(**runpy.run_path('copy_task.py'))
    with monkeypatch.context() as patch:
        patch.setattr(states, 'WARM_UP', 0)
        table = accuracy(Alphabet(), [b'cab=cab ab=ab abc=abc ba=ba '], task.find_answers)
    assert table.set_index('length')['accuracy'].to_dict() == {2: 1 / 2, 3: 1}

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['copy_task.py', *arguments])
        runpy.run_path('copy_task.py', run_name='__main__')

    assert not Path('copy.txt').exists()
    run()
    settings = {'text': 'copy.txt', 'tokenizer': 'bytes', 'data_dir': 'data/copy'}
    data_fineweb.make_shards(Settings(Script(data_fineweb.__file__).defaults, {}, settings))
    for name, recurrent in (('recurrent', True), ('nonrecurrent', False)):
        sizes = {'recurrent': recurrent, 'max_iters': 2, 'eval_interval': 2, 'window': 16}
        assert run_lm('data/copy', f'out/copy/{name}', **sizes) == 0
    Path('copy.txt').unlink()
    with pytest.raises(SystemExit, match='0'):
        run('out/copy')
    table = pandas.read_csv('out/copy/states.csv')
    assert table['length'].to_list() == 2 * [*range(1, 17)] and set(table['task']) == {'copy'}
    assert 1900 < table['answers'].sum() < 2000 and not table['beyond'].any()
    assert (table['exceeds'] == (2 * table['length'] > 16)).all() and not Path('copy.txt').exists()
    assert Path('out/copy/states.png').exists()
    assert re.search('copy +recurrent, L = 2', capsys.readouterr().out)
    with pytest.raises(SystemExit, match='2'):
        run('out/copy', '--chains=100')
    assert 'unrecognized arguments: --chains=100' in capsys.readouterr().err


def test_a_model_of_other_tokens_is_refused():
    run = {'folder': 'out/a', 'tokenizer': 'gpt2', 'data_dir': 'data/a'}
    assert_refused('out/a: no model of bytes', states.score_on, run, [b'ab'], states.find_answers)


def scores_of(task, n_seeds=1, window=64):
    """Return scores as of two models on a task with 1 to 32 moves."""
    pair = data_states.find_moves(task)
    floor, points = likeliest(pair, 64), itertools.product(range(n_seeds), (1, 8), range(1, 65))
    frame = pandas.DataFrame(points, columns=['seed', 'n_layer', 'length'])
    frame = frame[frame['length'].isin(states.lengths_of_test(32))]
    kind = frame['n_layer'].map({1: 'recurrent', 8: 'non-recurrent'})
    span = frame['length'] + 2 * len(pair[0])
    return frame.assign(
        task=task,
        panel=f'{task}: moves',
        model='Transformer',
        kind=kind,
        line=kind + ', L = ' + frame['n_layer'].astype(str),
        accuracy=1 / (frame['length'] + frame['seed']),
        floor=frame['length'].map(floor),
        beyond=frame['length'] > 32,
        span=span,
        window=window,
        exceeds=span > window,
    )


def test_lines_of_one_depth_look_different():
    scores = scores_of('S5').assign(kind='recurrent', n_layer=1)
    (axes,) = states.draw(scores).axes
    models = [line for line in axes.lines if line.get_marker() != 'None']
    assert len({(x.get_color(), x.get_marker(), x.get_linestyle()) for x in models}) == 2


def test_lengths_of_several_texts_are_columns_in_order():
    scores = scores_of('S5').assign(folder='a')
    few = scores.query('length in (1, 4, 32)').assign(line='few')
    table = states.tabulate(pandas.concat([few, scores]))
    lengths = [*map(int, table.columns[5:])]
    assert lengths[:4] == [1, 2, 4, 8] and lengths == sorted(lengths)


@pytest.mark.parametrize('window, start', [(64, 57), (60, 53), (20, 13), (4, 1)])
def test_a_picture_shows_where_answers_exceed_the_window(window, start):
    """An answer of D4 spans its moves and 8 bytes. No chain of 57 moves is in the test text. The
    note stays within its panel."""
    figure = states.draw(scores_of('dcba,bcda', window=window))
    (axes,) = figure.axes
    (line,) = [x for x in axes.lines if x.get_linestyle() == ':']
    (note,) = [x for x in axes.texts if 'window' in x.get_text()]
    assert list(line.get_xdata()) == [start, start]
    assert note.get_text() == f'from {start} on: longer than the window, W = {window} bytes'
    figure.draw_without_rendering()
    inner, outer = note.get_window_extent(), axes.get_window_extent()
    assert outer.x0 < inner.x0 < inner.x1 < outer.x1 and outer.y0 < inner.y0 < inner.y1 < outer.y1


def test_a_picture_names_guessing_last_and_counts_seeds():
    one = states.draw(scores_of('S5'))
    names = [text.get_text() for text in one.legends[0].get_texts()]
    assert names == ['recurrent, L = 1', 'non-recurrent, L = 8', states.GUESSING]
    markers = {line.get_marker() for line in one.axes[0].lines if line.get_color() == 'gray'}
    assert markers == {'None'} and not one.legends[0].findobj(LineCollection)  # bars of errors
    assert one.get_suptitle().endswith('experts; 1 seed each')
    two = states.draw(pandas.concat([scores_of('S5', 4), scores_of('Z5', 4)]))
    assert [axes.get_title() for axes in two.axes] == ['S5: moves', 'Z5: moves']
    assert two.get_suptitle().endswith('; ± one standard error; 4 seeds each')
    assert len(two.legends[0].findobj(LineCollection)) == 2


def test_a_picture_of_lengths_beyond_training_alone_is_shaded():
    """As of a state that is erased more moves before the answer than training has."""
    scores = scores_of('S5')
    (axes,) = states.draw(scores[scores['beyond']]).axes
    assert axes.patches[0].get_x() == 0.5 and axes.patches[0].get_width() == 64


def test_the_demo_trains_both_kinds_for_equal_time(trained_states, tmp_path, monkeypatch, capsys):
    """The small models of small_runs.py, a second each."""
    for name, recurrent in (('recurrent', True), ('nonrecurrent', False)):
        sizes = {**LM, 'recurrent': recurrent}
        lines = [f'{key} = {value!r}' for key, value in sizes.items()]
        (tmp_path / f'{name}.py').write_text('\n'.join(lines))
        monkeypatch.setitem(demo_states.CONFIGS, name, tmp_path / f'{name}.py')
    data, out = trained_states / 'data', tmp_path / 'out'
    argv = ['demo_states', f'--data_dir={data}', f'--out_dir={out}', '--seconds=1']
    monkeypatch.setattr(sys, 'argv', argv)
    demo_states.main()
    frame = runs(out)
    assert frame['finished'].all() and frame['kind'].to_list() == ['recurrent', 'non-recurrent']
    found = re.findall(r': (\d+) ms per update, (\d+) in 1 s', capsys.readouterr().out)
    assert [int(n) for _, n in found] == frame['step'].to_list()
    for ms, n in found:
        assert abs(int(n) * int(ms) - 1000) <= int(ms) + int(n)  # both are rounded
    assert_refused(f'{out}: holds runs already', demo_states.main)
    assert runs(out)['finished'].all()
    monkeypatch.setattr(sys, 'argv', [*argv, '--data_dir=missing', '--overwrite=True'])
    assert_refused("recurrent.txt: error: no val shards in 'missing'", demo_states.main)


def test_a_signal_to_the_demo_ends_what_it_has_started(tmp_path, monkeypatch):
    started = []

    def start(*args, real=subprocess.Popen, **options):
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(demo_states.subprocess, 'Popen', start)
    sleep = SimpleNamespace(sleep=lambda _: signal.raise_signal(signal.SIGUSR1))
    monkeypatch.setattr(demo_states, 'time', sleep)
    monkeypatch.setattr(sys, 'argv', ['demo_states', f'--out_dir={tmp_path}/out'])
    former = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
            demo_states.main()
        assert [process.wait(60) for process in started] == 2 * [-signal.SIGTERM]
    finally:
        signal.signal(signal.SIGUSR1, former)


# ---- the registered study


def write_rates(path, processor='some CPU', **ms):
    """Write the losses of all models at two rates, whose times do not count, and the times of runs
    whose losses do not count."""
    rows = [
        {'name': name, 'rate': rate, 'loss': loss, 'step': 800, 'ms': 1, 'processor': processor}
        for name in states_rates.MODELS
        for rate, loss in ((0.04, 0.7), (0.02, 0.6))
    ]
    rows += [
        {'name': name, 'step': 60, 'loss': 0, 'ms': ms.get(name, 200), 'processor': processor}
        for name in states_rates.MODELS
    ]
    states_rates.append(pandas.DataFrame(rows).assign(seed=1), path)


def test_rates_come_from_whole_runs_and_times_from_short_ones_on_one_processor(tmp_path):
    path = tmp_path / 'rates.csv'
    assert states_rates.tuned(path).empty
    one = {'name': 'r1', 'rate': 1, 'loss': 1, 'step': 60, 'ms': 1, 'processor': 'other', 'seed': 1}
    states_rates.append(pandas.DataFrame([one]), path)
    assert states_rates.tuned(path).empty
    write_rates(path, r1=300, n8=250, r8=900)
    found = states_rates.tuned(path)
    assert [*found.index] == ['r1', 'r2', 'r4', 'r8', 'n1', 'n2', 'n4', 'n8', 'lstm']
    assert set(found['rate']) == {0.02}
    assert found['updates'][['r1', 'n8', 'r8', 'n1']].to_list() == [800, 960, 267, 1200]
    # what is added later, on another processor or by another seed, changes nothing
    better = {'name': 'r1', 'rate': 0.08, 'loss': 0.1, 'step': 800, 'seed': 2, 'ms': 1}
    for origin in ({'processor': 'some CPU'}, {'processor': 'another CPU', 'seed': 1}):
        states_rates.append(pandas.DataFrame([better | origin]), path)
    assert states_rates.tuned(path).equals(found)
    incomplete = pandas.DataFrame([better])
    assert_refused('rates.csv: has the columns .*processor', states_rates.append, incomplete, path)


def test_the_plan_has_all_models_budgets_and_seeds(tmp_path, monkeypatch):
    path = tmp_path / 'rates.csv'
    write_rates(path, r1=300, n8=250, n4=150)
    monkeypatch.setattr(study, 'tuned', lambda: states_rates.tuned(path))
    settings = [full_settings(run) for run in plans.runs_of('states')]
    assert {s['seed'] for s in settings} == {11, 12, 13, 14}
    first = [s for s in settings if s['seed'] == 11]
    # Z5; equal bytes, which is equal seconds of r1; twice the bytes, which is equal seconds of n4
    assert len(first) == 9 + (2 + 7 * 3 + 2) and len(settings) == 4 * len(first)
    n8 = [s for s in first if not s['recurrent'] and s['n_layer'] == 8]
    assert sorted((s['data_dir'][-2:], s['max_iters']) for s in n8) == [
        ('S5', 800),
        ('S5', 960),
        ('S5', 1600),
        ('Z5', 800),
    ]
    assert all(s['n_layer'] * s['n_expert'] == 8 and s['n_embd'] == 64 for s in first)
    assert all(s['eval_interval'] == s['max_iters'] for s in settings)
    assert all(s['block_size'] == (32 if s['recurrent'] else 256) for s in settings)
    rates = {s['baseline_lr'] if s['arch'] == 'lstm' else s['learning_rate'] for s in settings}
    assert rates == {0.02}


def make_blocks(**means):
    """Return four blocks with noise of 0.01 around these means, of others 0.5."""
    noise = np.random.default_rng(1).normal(size=(4, 9)) / 100
    blocks = pandas.DataFrame(noise, columns=[*states_rates.MODELS])
    return blocks + pandas.Series({name: means.get(name, 0.5) for name in blocks})


@pytest.mark.parametrize(
    'means, words',
    [
        ({'r1': 0.8, 'n8': 0.6}, 'confirmed confirmed confirmed'),
        ({'r1': 0.8, 'r8': 0.9}, 'confirmed refuted refuted'),
        ({'n2': 0.6, 'n8': 0.55}, 'refuted confirmed undecided'),
        ({'r1': 0.99, 'r8': 0.98, 'n1': 0.98, 'n8': 0.98}, 'undecided undecided undecided'),
    ],
)
def test_the_rules_of_the_study(means, words):
    found = study.verdicts(make_blocks(**means))
    assert [line.partition(': ')[2].split(',')[0].split()[0] for line in found] == words.split()
    assert [line[:3] for line in found] == ['(a)', '(b)', '(c)']


def test_finished_runs_are_scored_and_added_once(trained_states, tmp_path, monkeypatch, capsys):
    """Blocks need all nine models: here there is none."""
    path, rates = tmp_path / 'states.csv', tmp_path / 'rates.csv'
    write_rates(rates)
    monkeypatch.setattr(study, 'tuned', lambda: states_rates.tuned(rates))
    assert_refused('no run has finished yet', study.report, path)
    folder = tmp_path / 'states'
    shutil.copytree(trained_states / 'states', folder)
    for config in folder.glob('*/config.json'):  # as if the code of this test were committed
        text = re.sub('"commit": ".*"', '"commit": "abc"', config.read_text())
        config.write_text(text)
    assert_refused(r'most_moves = 4, in the study 32', study.add, path, str(folder))
    text = {'most_moves': 4, 'lengths': 'log-uniform', 'seed': 1}
    monkeypatch.setattr(study, 'TEXT', text)
    for _ in range(2):
        study.add(path, str(folder))
    table = pandas.read_csv(path)
    assert sorted(table['name']) == ['lstm', 'n2', 'r2', 'r2'] and set(table['step']) == {2}
    assert table['commit'].notna().all() and len(set(table['processor'])) == 1
    lengths = [f'at_{n}' for n in range(1, 5)]
    assert np.allclose(table['mean'], table[lengths].mean(axis=1))
    study.report(path)
    assert capsys.readouterr().out.count('0 of 4 blocks') == 3


def test_whole_blocks_of_the_study_are_judged_by_budget(tmp_path, monkeypatch, capsys):
    path, rates = tmp_path / 'states.csv', tmp_path / 'rates.csv'
    write_rates(rates, r1=300)  # equal seconds: 800 updates of r1, 1200 of others
    monkeypatch.setattr(study, 'tuned', lambda: states_rates.tuned(rates))
    for seed in study.SEEDS:
        for name in states_rates.MODELS:
            row = {'name': name, 'rate': 0.02, 'seed': seed, 'processor': 'some CPU'}
            row |= {'tracked': 8, 'seconds': 100, 'commit': 'b' if seed == 13 else f'{name}b'}
            for task, step in (('S5', 800), ('S5', 1600), ('S5', 1200), ('Z5', 800)):
                mean = {'r1': 0.9, 'n8': 0.95 if step == 1200 else 0.5}.get(name, 0.5)
                row |= {'task': task, 'step': step, 'mean': mean + seed / 10_000}
                if (name, step) != ('r1', 1200):
                    states_rates.append(pandas.DataFrame([row]), path)
    study.report(path)
    printed = capsys.readouterr().out
    assert printed.count('seed 11 has runs of 9 commits: ') == 3 and 'seed 13 has' not in printed
    after_bytes, after_seconds = printed.split('S5, twice the bytes')
    assert '(a) r1 above n1, n2, n4, n8: confirmed' in after_bytes
    assert '(c) n8 more than 0.05 above n1: refuted' in after_bytes
    assert '(a) r1 above n1, n2, n4, n8: refuted' in after_seconds
    assert '(c) n8 more than 0.05 above n1: confirmed' in after_seconds
    table = pandas.read_csv(path)
    updates = states_rates.tuned(rates)['updates']
    whole = study.whole_blocks(table, updates)
    assert len(whole) == 4
    table.loc[(table['seed'] == 12) & (table['name'] == 'n2'), 'processor'] = 'another CPU'
    assert [seed for seed, _ in study.whole_blocks(table, updates).index] == [11, 13, 14]
