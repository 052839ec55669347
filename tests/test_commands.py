"""The commands of README.md's code blocks and of docstrings name what exists; README's run as they
stand there, shrunk and with folders of their own, but for those that other tests run."""

import lzma
import os
import re
import shlex
import subprocess
import sys

import forks
import numpy as np
from test_train import ROOT, TINY, data  # noqa: F401  a fixture

import bench
import data_fineweb
import figures
import play_sokoban
import probe_sokoban
import sample
import sokoban
import sweep
import train_lm
import train_sokoban
from configurator import configure, read_script

MODULES = [bench, data_fineweb, figures, play_sokoban, probe_sokoban, sample, sokoban, sweep]
SCRIPTS = {f'{module.__name__}.py': module for module in [*MODULES, train_lm, train_sokoban]}
# in a code block: up to its comment
LINE = re.compile(r'^\s*(?:\$ )?((?:python|torchrun \S+ \S+) \w+\.py(?:[^#\n]*[^#\s])?)', re.M)
VALUE = r"""(?:=(?:'[^']*'|"[^"]*"|[\w./*,:-]*[\w*])| [a-z]+-[a-z]+|\b)"""
PROSE = re.compile(rf'python \w+\.py(?: (?:config/\w+\.py|--\w+{VALUE}))*')
ELSEWHERE = {'bench.py', 'sweep.py', 'probe_sokoban.py'}  # tests of their own run these
AGENT = 'n_envs=4 unroll=3 eval_games=4 compile=False threads=1 device=cpu dtype=float32'
SMALL = {  # what makes a command of a script small
    'train_lm.py': 'n_kv_head=1 batch_size=0 max_iters=2 data_dir={shards} overwrite=True '
    + ' '.join(f'{k}={v}' for k, v in TINY.items() if k != 'max_iters'),
    'train_sokoban.py': f'{AGENT} n_embd=4 total_steps=24 levels_dir={{folder}}/levels '
    'overwrite=True',
    'sokoban.py': 'picture={folder}/levels.png levels_dir={folder}/levels',
    'sample.py': 'max_new_tokens=3 device=cpu',
    'play_sokoban.py': 'levels_dir={folder}/levels device=cpu',
    'data_fineweb.py': 'tokenizer=bytes data_dir={folder}/shards{n}',
    'figures.py': '',
}


def from_readme():
    text = (ROOT / 'README.md').read_text()
    return LINE.findall(''.join(re.findall(r'^```$(.*?)^```$', text, re.M | re.S)))


def from_docstrings():
    found = []
    for path in [*(ROOT / name for name in SCRIPTS), *sorted((ROOT / 'config').glob('*.py'))]:
        for line in read_script(path)[2].splitlines():
            is_line = LINE.match(line) and path.parent == ROOT
            found += LINE.findall(line) if is_line else PROSE.findall(line)
    return found


def parts(command):
    """-> launcher, script, arguments."""
    words = shlex.split(command)
    k = next(k for k, word in enumerate(words) if word.endswith('.py'))
    return words[:k], words[k], words[k + 1 :]


def test_they_name_what_exists():
    """Scripts, config files and settings."""
    readme = from_readme()
    assert len(readme) > 20 and len(from_docstrings()) > 40
    for command in [*readme, *from_docstrings()]:
        _, script, argv = parts(command)
        argv = [os.path.join(ROOT, a) if a.startswith('config/') else a for a in argv]
        configure(dict(vars(SCRIPTS[script])), argv, quiet=True)


def make_files(folder):
    """What the commands read: books, levels, a prompt."""
    for name in ('books', 'levels'):
        (folder / name).mkdir()
    text = 'It was the best of times, it was the worst of times. '
    (folder / 'books' / 'a.txt').write_text(text * 100)
    (folder / 'web.jsonl.xz').write_bytes(lzma.compress(f'{{"text": "{text}"}}\n'.encode() * 200))
    (folder / 'prompt.txt').write_text('It was')
    for k, split in enumerate(('train', 'valid', 'test')):  # of which any agent solves some
        levels = sokoban.generate(100, 1, seed=k, max_moves=6)[0]
        np.save(folder / 'levels' / f'unfiltered-{split}.pack17.npy', levels)


def shrunk(command, folder, shards, number):
    """Its words: folders below this one, and after its own arguments those that make it small."""
    launcher, script, argv = parts(command)
    below = r'\b(out/|books/|web\.jsonl|prompt\.txt|game\.gif)'
    argv = [re.sub(below, rf'{folder}/\1', a) for a in argv]
    small = SMALL[script].format(folder=folder, shards=shards, n=number).split()
    config = next((a[7:-3] for a in argv if a.startswith('config/')), '')
    if script.startswith('train_') and not any(a.startswith('--out_dir=') for a in argv):
        small += [f'out_dir={folder}/out/{config}']
    if '--resume=True' in argv or '--eval_only=True' in argv:
        small += ['overwrite=False']
    if '--arch=transformer' in argv:
        small += ['n_expert=1']
    ranks = ['--ranks=2'] if launcher[0] == 'torchrun' else []
    return [sys.executable, *ranks, script, *argv, *[f'--{setting}' for setting in small]]


def test_they_run(data, tmp_path):  # noqa: F811
    """In order: some go on where others stopped. None of the downloads, which test_data.py tries
    on a hub of its own."""
    make_files(tmp_path)
    env, ran = {**os.environ, 'OMP_NUM_THREADS': '1'}, 0
    for command in from_readme():
        if parts(command)[1] not in ELSEWHERE and '--pretokenized' not in command:
            words = shrunk(command, tmp_path, data, ran)
            pipes = {'capture_output': True, 'text': True, 'stdin': subprocess.DEVNULL}
            done = forks.run(words, cwd=ROOT, env=env, **pipes)
            assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
            ran += 1
    assert ran >= 18
