"""play_sokoban.py as a user starts it: terminals, text, GIFs, exports, policies, and mistakes."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from test_sokoban import numbered, text
from test_train import ROOT, mistake

import convlstm
import play_sokoban
import probe_sokoban
import sokoban
from common import save_checkpoint
from configurator import configure
from convlstm import AgentConfig, build_agent
from sokoban import board_image, generate

SIZES = {'arch': 'convglu', 'n_embd': 4, 'n_expert': 2, 'head_dim': 8, 'recurrent': True}


@pytest.fixture
def folder(tmp_path):
    """A run of train_sokoban.py, untrained: its checkpoint and settings."""
    torch.manual_seed(0)
    model, run = build_agent(AgentConfig(**SIZES)), tmp_path / 'run'
    run.mkdir()
    sizes = {name: getattr(model.config, name) for name in convlstm.SIZES}
    config = {**sizes, **play_sokoban.EASY, 'n_envs': 4, 'unroll': 2, 'dtype': 'auto'}
    saved = {'model': model.state_dict(), 'config': config, 'step': 3, 'best': 1.5}
    save_checkpoint(saved, run / 'ckpt_last.pt')
    np.save(tmp_path / 'levels.npy', generate(5, 1, 3, max_moves=6)[0])
    return tmp_path


def call(folder, *argv):
    words = [f'--levels={folder}/levels.npy', '--device=cpu', *argv]
    configure(vars(play_sokoban), words, quiet=True)
    play_sokoban.use_agent()


def test_an_export_plays_what_its_run_plays(folder, capsys):
    """As text where there is no terminal, as a GIF, and as a rate; a second export replaces it."""
    image = pytest.importorskip('PIL.Image')
    for _ in range(2):
        call(folder, f'--out_dir={folder}/run', f'--export={folder}/agent')
    assert sorted(os.listdir(folder / 'agent')) == ['config.json', 'model.safetensors']
    games, rates = [], []
    for name in ('run', 'agent'):
        capsys.readouterr()
        call(folder, f'--out_dir={folder}/{name}', '--level=2')
        games.append(capsys.readouterr().out)
        call(folder, f'--out_dir={folder}/{name}', '--measure')
        rates.append(capsys.readouterr().out.partition(': ')[2])
    assert games[0] == games[1] and rates[0] == rates[1] and '\x1b' not in games[0]
    boards = games[0].count('\nlevel 2, ')
    assert f'solved in {boards - 1} steps, return ' in games[0].splitlines()[-1]
    assert rates[0].startswith('solved ') and '5 levels of ' in rates[0]
    call(folder, f'--out_dir={folder}/agent', '--level=2', f'--gif={folder}/game.gif')
    with image.open(folder / 'game.gif') as gif:
        assert gif.n_frames == boards and gif.info['duration'] == 250


def in_terminal(folder, press, *more):
    """press(process, write, until) at a game in a terminal, left as it was -> its exit status."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    words = ['play_sokoban.py', f'--out_dir={folder}/run', f'--levels={folder}/levels.npy']
    command = [sys.executable, *words, '--ms=60000', '--device=cpu', *more]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    seen = b''

    def until(words):
        nonlocal seen
        while words not in seen:
            seen += os.read(ours, 4096)
        at, seen = seen.partition(words)[0], b''
        return at

    press(process, lambda key: os.write(ours, key), until)
    while process.poll() is None:
        time.sleep(0.01)
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
    return process.returncode


def save_probe(path, D):
    """One that always says right."""
    parts = {'weight': torch.zeros(5, D, 3, 3), 'bias': torch.tensor([0.0, 9, 0, 0, 0])}
    safetensors.save_file(parts | {'threshold': torch.tensor(0.5)}, path)


def test_keys_in_a_terminal(folder):
    """Each step is drawn over the last, with a probe's arrows; so many games end without a key."""
    save_probe(folder / 'run' / 'probe.safetensors', 4)

    def press(process, write, until):
        assert '→' in until(b'level 0, step 0').decode()
        write(b's')
        assert b'\x1b[11A' in until(b'level 0, step 1')
        write(b's')
        until(b'level 0, step 2')
        write(b'n')
        until(b'level 1, step 0')
        write(b' s')
        until(b'level 1, step 1')
        write(b'q')
        assert until(b'\x1b[?25h').count(b'level') == 0

    def wait(process, write, until):
        until(b'level 1, ')
        until(b'\x1b[?25h')

    assert in_terminal(folder, press) == 0
    assert in_terminal(folder, wait, '--games=2', '--ms=10') == 0


@pytest.mark.parametrize('number, status', [('TERM', 143), ('INT', 130), ('HUP', 129)])
def test_a_signal_leaves_the_terminal_as_it_was(folder, number, status):
    def press(process, write, until):
        until(b'level 0, step 0')
        process.send_signal(signal.Signals[f'SIG{number}'])
        until(b'\x1b[?25h')

    assert in_terminal(folder, press) == status


def test_arrows_are_what_the_probe_says(folder):
    words = [f'--out_dir={folder}/probe', '--seeds=1', '--epochs=2', '--device=cpu']
    configure(vars(probe_sokoban), words, quiet=True)
    player = probe_sokoban.load_player(f'{folder}/run', 'cpu')
    levels = np.load(folder / 'levels.npy')
    data = probe_sokoban.prepare(probe_sokoban.record(player, levels, 'cpu'), levels)
    player.probes, player.scale = probe_sokoban.train_probes(data, 'cpu')
    guess = probe_sokoban.predict(player.probes, player.scale, data)['3x3']
    threshold = float(np.median(guess.sure))
    player.about = {'3x3': {'threshold': threshold}}
    probe_sokoban.save_probe(player)
    wanted = np.where(guess.sure[0] >= threshold, guess.way[0], -1)
    argv = [f'--out_dir={folder}/run', f'--probe={folder}/probe/probe_run.safetensors']
    configure(vars(play_sokoban), argv, quiet=True)
    ways = (play_sokoban.film(player.model, levels, i, 'cpu')[1][:-1] for i in range(5))
    found = np.concatenate(list(ways)).reshape(-1, 100)
    assert found.shape == wanted.shape and (found == wanted).mean() > 0.98  # features: fp16


def test_any_policy_is_evaluated(folder, monkeypatch, capfd):
    """`right` solves one of two levels, by its first step."""
    monkeypatch.chdir(folder)
    code = 'import numpy as np\ndef right(seen):\n    assert seen.shape[1:] == (10, 10, 2)\n'
    code += '    return np.ones(len(seen), int)\n\ndef wild(seen):\n    return [4] * len(seen)\n'
    (folder / 'their_policy.py').write_text(code)
    (folder / 'two.txt').write_text(numbered([text('#@$.     #'), text('#.$@     #')]))
    configure(vars(play_sokoban), ['--policy=their_policy:right', '--levels=two.txt'], quiet=True)
    play_sokoban.use_agent()
    said = 'their_policy:right: solved 50.0%, return -0.55, 60 steps; 2 levels of two.txt\n'
    assert capfd.readouterr().out == said
    for name, words in (('their_policy:wild', '4 4], shape'), ('nowhere:right', 'module:function')):
        assert words in mistake(capfd, play_sokoban, [f'--policy={name}', '--levels=two.txt'])


def test_mistakes(folder, capfd, monkeypatch):
    monkeypatch.chdir(folder)
    call(folder, '--out_dir=run', '--export=agent')
    save_probe(folder / 'wide.safetensors', 5)
    (folder / 'theirs').mkdir()
    (folder / 'theirs' / 'config.json').write_text('{}')
    for words, message in {
        '--out_dir=run --policy=a:b': 'name one: ',
        '--out_dir=nowhere': 'nowhere: ',
        '--out_dir=run --level=5': 'there are 5 levels',
        '--out_dir=run --greedy=False': 'greedy = False: wants --measure',
        '--out_dir=run --export=theirs': 'no such export',
        f'--out_dir=run --export={ROOT}/pretrained/lm': 'no such export',
        '--out_dir=run --gif=none/a.gif': 'none/',
        '--out_dir=run --probe=wide.safetensors': 'wide.safetensors: model does not fit',
        '--out_dir=run --probe=none': 'none: cannot be read',
    }.items():
        argv = [f'--levels={folder}/levels.npy', '--device=cpu', *words.split()]
        assert message in mistake(capfd, play_sokoban, argv), words
    assert (folder / 'theirs' / 'config.json').read_text() == '{}'
    for name, content in (('config.json', b'{"arch": "convglu"}'), ('model.safetensors', b'hello')):
        (folder / 'agent' / name).write_bytes(content)
        assert f'agent/{name}: ' in mistake(capfd, play_sokoban, ['--out_dir=agent'])


def test_the_shipped_agent():
    """Solves most easy levels, and its probe draws arrows."""
    configure(vars(play_sokoban), [f'--out_dir={ROOT}/pretrained/sokoban'], quiet=True)
    model, about, _ = play_sokoban.load_agent(play_sokoban.out_dir, 'best', 'cpu')
    levels = generate(200, about['n_boxes'], 5, about['max_moves'])[0]
    trials = (model, None, 0.75, 1), (model, 1, 0.75, 1), (sokoban.RANDOM, 1, 0.1, 0.5)
    for agent, seed, low, high in trials:
        assert low < sokoban.evaluate(agent, levels, 'cpu', seed)['solve_rate'] <= high, seed
    frames, ways, said = play_sokoban.film(model, levels, 0, 'cpu')
    assert ways.shape == (len(frames), 10, 10) and 'level 0, ' in said and (ways >= 0).any()
    free, plain = (frames[0] == 0).all(-1), board_image(frames[0])
    picture, arrow = sokoban.plan_image(frames[0], np.where(free, 1, -1)), 0
    for y, x in np.argwhere(free):  # to the right: more of it on the left
        changed = (picture - plain).any(-1)[24 * y :, 24 * x :][:24, :24]
        arrow += changed[:, :12].sum() > changed[:, 12:].sum() > 0
    assert arrow == free.sum()
