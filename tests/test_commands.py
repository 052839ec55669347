"""The commands of README.md's code blocks, shrunk and with folders of their own, run as they stand
there, but for a few that run elsewhere in other words; `pytest --long tests/test_commands.py`:
these too, and every one that a docstring or a config file tells a reader to type."""

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
ELSEWHERE = {  # whose work these tests do in the short form
    'python bench.py': 'test_bench.py',
    'python bench.py --suite=first --budget=540': 'test_bench.py',
    'python sweep.py --plan sokoban-small --run --figure --table': 'test_sweep.py',
    'python sweep.py config/study_probe.py --run': 'test_sweep.py',
    'python probe_sokoban.py config/probe_tiny.py': 'test_probe.py',
}
AGENT = 'n_envs=4 unroll=3 eval_games=4 compile=False threads=1 device=cpu dtype=float32'
SMALL = {  # what makes a command of a script small
    'train_lm.py': 'n_kv_head=1 batch_size=0 max_iters=2 data_dir={shards} overwrite=True '
    + ' '.join(f'{k}={v}' for k, v in TINY.items() if k != 'max_iters'),
    'train_sokoban.py': f'{AGENT} n_embd=4 total_steps=24 levels_dir={{folder}}/levels '
    'overwrite=True',
    'sokoban.py': 'picture={folder}/levels.png levels_dir={folder}/levels',
    'sample.py': 'max_new_tokens=3 device=cpu',
    'play_sokoban.py': 'picture={folder}/compare.png levels_dir={folder}/levels device=cpu',
    'data_fineweb.py': 'tokenizer=bytes data_dir={folder}/shards{n}',
    'probe_sokoban.py': 'models={folder}/out/sokoban_small_L4 out_dir={folder}/probe{n} '
    'test_levels={folder}/levels/unfiltered-test.pack17.npy min_levels=1 n_train=8 n_test=100 '
    'epochs=1 seeds=1 device=cpu threads=1',
    'figures.py': '',
    'bench.py': 'rounds=1 seconds=0 threads=1 out={folder}/A.json',
    'sweep.py': 'out_dir={folder}/sweep length=1',
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
    assert len(readme) > 20 and len(from_docstrings()) > 40 and not ELSEWHERE.keys() - set(readme)
    for command in [*readme, *from_docstrings()]:
        _, script, argv = parts(command)
        if '--compare' not in argv:  # bench.py reads its two files itself
            argv = [os.path.join(ROOT, a) if a.startswith('config/') else a for a in argv]
            configure(dict(vars(SCRIPTS[script])), argv, quiet=True)


def make_files(folder, shards):
    """What the commands read: books, levels, and small runs' settings for a sweep."""
    for name in ('books', 'levels'):
        (folder / name).mkdir()
    text = 'It was the best of times, it was the worst of times. '
    (folder / 'books' / 'a.txt').write_text(text * 100)
    (folder / 'web.jsonl.xz').write_bytes(lzma.compress(f'{{"text": "{text}"}}\n'.encode() * 200))
    (folder / 'prompt.txt').write_text('It was')
    for k, split in enumerate(('train', 'valid', 'test')):  # of which any agent solves some
        levels = sokoban.generate(100, 1, seed=k, max_moves=6)[0]
        np.save(folder / 'levels' / f'unfiltered-{split}.pack17.npy', levels)
    lm = {**TINY, 'data_dir': str(shards), 'max_iters': 2}
    agents = dict(word.split('=') for word in AGENT.split())
    agents |= {'levels_dir': str(folder / 'levels'), 'total_steps': '2400'}
    for name, settings in (('lm', lm), ('agents', agents)):
        lines = [f'{k} = {v!r}' for k, v in settings.items()]
        text = '\n'.join(lines).replace("'False'", 'False')
        (folder / f'{name}.py').write_text(re.sub(r"'(\d+)'", r'\1', text))


def settings_of(script, argv, folder):
    """What else makes it small, by what it asks for."""
    config = next((a[7:-3] for a in argv if a.startswith('config/')), '')
    more = []
    if script.startswith('train_') and not any(a.startswith('--out_dir=') for a in argv):
        more = [f'out_dir={folder}/out/{config}']
    if '--resume=True' in argv or '--eval_only=True' in argv:
        more += ['overwrite=False']
    if '--arch=transformer' in argv:
        more += ['n_expert=1']
    if script == 'bench.py':
        boards = '--suite=sokoban' in argv
        cells = "('decode',1,1,8,32)," if '--suite=first' in argv else '(1,1,8,32),'
        more = ['cells=(1,1,4),', 'n_envs=2'] if boards else [f'cells={cells}', 'n_embd=128']
        more += [] if any(a.startswith('--paths=') for a in argv) else ['paths=fast']
    if script == 'sweep.py' and {'--run', '--figure', '--table=solve'} & set(argv):
        text = 'lm-small' in argv or config.startswith(('study_lm', 'study_re', 'study_ag'))
        more = [f'base={folder}/{"lm" if text else "agents"}.py', 'base_ff=', 'seeds=1', 'also=']
        if config.startswith('study_lm'):
            more += ['only=d=48 L=1', 'tune=learning_rate=0.02,0.04']
        elif not config:
            only = 'L=1 E=4' if text else 'L=1 d=64 variant=recurrent'
            small = {'sokoban', 'sokoban-small'} & set(argv)
            more += ['width=0.0625', f'only={"L=1 E=1 model=convglu" if small else only}']
    return more


def shrunk(command, folder, shards, number):
    """Its words: folders below this one, and after its own arguments those that make it small;
    None: it needs a network."""
    launcher, script, argv = parts(command)
    if script == 'data_fineweb.py' and not any(a.startswith(('--text=', '--demo=')) for a in argv):
        return None
    below = r'\b(out/|books/|web\.jsonl|prompt\.txt|A\.json|game\.gif)'
    argv = [re.sub(below, rf'{folder}/\1', a.replace('B.json', 'A.json')) for a in argv]
    small = SMALL[script].format(folder=folder, shards=shards, n=number).split()
    small += settings_of(script, argv, folder)
    if '--compare' in argv:  # a run with itself
        small = []
    ranks = ['--ranks=2'] if launcher[0] == 'torchrun' else []
    return [sys.executable, *ranks, script, *argv, *[f'--{setting}' for setting in small]]


def test_they_run(data, tmp_path, request):  # noqa: F811
    """In order: some go on where others stopped. None of the downloads, which test_data.py and
    test_faults.py try on a hub of their own."""
    make_files(tmp_path, data)
    commands, ran = [command for command in from_readme() if command not in ELSEWHERE], 0
    if request.config.getoption('--long'):
        commands = from_readme() + from_docstrings()
    env = {**os.environ, 'OMP_NUM_THREADS': '1'}
    for command in dict.fromkeys(commands):
        words = shrunk(command, tmp_path, data, ran)
        if words is not None:
            print(command, flush=True)
            pipes = {'capture_output': True, 'text': True, 'stdin': subprocess.DEVNULL}
            done = forks.run(words, cwd=ROOT, env=env, **pipes)
            assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
            ran += 1
    assert ran >= 18
