"""The commands of README.md's code blocks, shrunk and with folders of their own, run as they stand there, but for a few that run elsewhere in other
words; `pytest --long tests/test_commands.py`: these too, and every other one that README.md, a docstring or a config file tells a reader to type."""

import lzma
import os
import re
import shlex
import sys

import forks
import numpy as np
from test_train import ROOT, TINY, data  # noqa: F401  a fixture

import bench
import data_fineweb
import play_sokoban
import probe_sokoban
import sample
import sokoban
import sweep
import train_lm
import train_sokoban
from configurator import configure, read_script

SCRIPTS = {
    'train_lm.py': train_lm,
    'sample.py': sample,
    'data_fineweb.py': data_fineweb,
    'bench.py': bench,
    'sokoban.py': sokoban,
    'play_sokoban.py': play_sokoban,
    'train_sokoban.py': train_sokoban,
    'sweep.py': sweep,
    'probe_sokoban.py': probe_sokoban,
}

LINE = re.compile(
    r'^\s*(?:\$ )?((?:python|torchrun \S+ \S+) \w+\.py(?:[^#\n]*[^#\s])?)', re.M
)  # in a code block: up to its comment
PROSE = re.compile(
    r"""python \w+\.py(?: (?:config/\w+\.py|--\w+(?:=(?:'[^']*'|"[^"]*"|[\w./*,:-]*[\w*])| [a-z]+-[a-z]+|\b)))*"""
)
ELSEWHERE = {  # whose work these tests do in the short form
    'python bench.py': 'test_bench.py::test_suite_cpu',
    'python bench.py --suite=decode': 'test_bench.py::test_suites_of_the_paper',
    'python sweep.py --plan sokoban-small --run --figure --table': 'test_sweep.py::test_solve_table_of_trained_agents',
    'python sweep.py config/study_probe.py --run': 'test_sweep.py::test_studies, test_solve_table_of_trained_agents',
    'python probe_sokoban.py config/probe_tiny.py': 'test_probe.py::test_the_whole_command',
}
AGENT = {
    'n_envs': 4,
    'unroll': 3,
    'eval_games': 4,
    'compile': False,
    'threads': 1,
    'device': 'cpu',
    'dtype': 'float32',
}


def from_readme():
    """-> those of the code blocks, and those between backticks in the text."""
    text = (ROOT / 'README.md').read_text()
    blocks = ''.join(re.findall(r'^```$(.*?)^```$', text, re.M | re.S))
    quoted = re.findall(
        r'`(python \w+\.py [^`]*)`', re.sub(r'^```$.*?^```$', '', text, flags=re.M | re.S)
    )
    return LINE.findall(blocks), [' '.join(command.split()) for command in quoted]


def from_docstrings():
    found = []
    for path in [*(ROOT / name for name in SCRIPTS), *sorted((ROOT / 'config').glob('*.py'))]:
        for line in read_script(path)[2].splitlines():
            found += (
                LINE.findall(line)
                if LINE.match(line) and path.parent == ROOT
                else PROSE.findall(line)
            )
    return found


def parts(command):
    """-> launcher, script, arguments."""
    words = shlex.split(command)
    k = next(k for k, word in enumerate(words) if word.endswith('.py'))
    return words[:k], words[k], words[k + 1 :]


def test_they_name_what_exists():
    """Scripts, config files and settings."""
    assert '@@' not in (ROOT / 'README.md').read_text()  # every figure is filled in
    blocks, quoted = from_readme()
    assert len(blocks) > 20 and len(quoted) > 15 and len(from_docstrings()) > 40
    for command in [*blocks, *quoted, *from_docstrings()]:
        _, script, argv = parts(command)
        if '--compare' in argv:  # bench.py reads its two files itself
            continue
        configure(
            dict(vars(SCRIPTS[script])),
            [os.path.join(ROOT, a) if a.startswith('config/') else a for a in argv],
            quiet=True,
        )


def files(folder, shards):
    """What the commands read: books, levels, and small runs' settings for a sweep."""
    for name in ('books', 'levels'):
        (folder / name).mkdir()
    (folder / 'books' / 'a.txt').write_text(
        'It was the best of times, it was the worst of times. ' * 100
    )
    (folder / 'web.jsonl.xz').write_bytes(
        lzma.compress(
            b'{"text": "It was the age of wisdom, it was the age of foolishness."}\n' * 200
        )
    )
    (folder / 'prompt.txt').write_text('It was')
    for k, split in enumerate(
        ('unfiltered-train', 'unfiltered-valid', 'unfiltered-test')
    ):  # of which any agent solves some
        np.save(
            folder / 'levels' / f'{split}.pack17.npy',
            sokoban.generate(100, 1, seed=k, max_moves=6)[0],
        )
    for name, settings in {
        'lm': {**TINY, 'data_dir': str(shards), 'max_iters': 2},
        'agents': {**AGENT, 'levels_dir': str(folder / 'levels'), 'total_steps': 2400},
    }.items():
        (folder / f'{name}.py').write_text('\n'.join(f'{k} = {v!r}' for k, v in settings.items()))


def shrunk(command, folder, shards, number):
    """Its words: folders below this one, and after its own arguments those that make it small; None: it needs a network."""
    launcher, script, argv = parts(command)
    argv = [
        re.sub(
            r'\b(out/|books/|web\.jsonl|prompt\.txt|A\.json)',
            lambda m: f'{folder}/{m[1]}',
            a.replace('B.json', 'A.json'),
        )
        for a in argv
    ]

    def flags(settings):
        return [f'--{key}={value}' for key, value in settings.items()]

    config = next((a[7:-3] for a in argv if a.startswith('config/')), '')
    more = (
        {}
        if any(a.startswith('--out_dir=') for a in argv)
        else {'out_dir': folder / 'out' / (config or script[:-3])}
    )
    if script == 'train_lm.py':
        more |= {
            **TINY,
            'n_kv_head': 1,
            'batch_size': 0,
            'data_dir': shards,
            'max_iters': 2,
            'overwrite': True,
            **({'n_expert': 1} if '--arch=transformer' in argv else {}),
        }
    if script == 'train_sokoban.py':
        more |= {
            **AGENT,
            'n_embd': 4,
            'total_steps': 24,
            'levels_dir': folder / 'levels',
            'overwrite': True,
        }
    elif script == 'bench.py':
        suite = next((a[8:] for a in argv if a.startswith('--suite=')), '')
        boards = suite == 'sokoban'
        cells = "('decode',1,1,8,32)," if suite == 'first' else '(1,1,8,32),'
        more = {
            'rounds': 1,
            'seconds': 0,
            'threads': 1,
            'out': folder / ('boards.json' if boards else f'A{suite}.json'),
            **(
                {'cells': '(1,1,4),', 'n_envs': 2}
                if boards
                else {
                    'cells': cells,
                    'n_embd': 128,
                    'paths': 'eager' if suite == 'kernels' else 'fast',
                }
            ),
        }
        if boards and not any(a.startswith('--paths=') for a in argv):
            more['paths'] = 'fast'  # no compiling, but where it is asked for
        if any(a.startswith('--compare') for a in argv):  # that run with itself
            more = {}
    elif script == 'sokoban.py':
        more = {'picture': folder / 'levels.png', 'levels_dir': folder / 'levels'}
    elif script == 'sample.py':
        more = {'max_new_tokens': 3, 'device': 'cpu'}
    elif script == 'play_sokoban.py':
        more = {'picture': folder / 'compare.png'}
    elif script == 'data_fineweb.py':
        if not any(a.startswith(('--text=', '--demo=')) for a in argv):
            return None
        more = {'tokenizer': 'bytes', 'data_dir': folder / f'shards{number}'}
    elif script == 'probe_sokoban.py':
        more = {
            'models': folder / 'out' / 'sokoban_small_L4',
            'out_dir': folder / f'probe{number}',
            'test_levels': folder / 'levels' / 'unfiltered-test.pack17.npy',
            'min_levels': 1,
            'n_train': 8,
            'n_test': 100,
            'epochs': 1,
            'seeds': 1,
            'device': 'cpu',
            'threads': 1,
        }
    elif script == 'sweep.py':
        more = {'out_dir': folder / 'sweep', 'length': 1}
        if '--run' in argv or '--figure' in argv or '--table=solve' in argv:
            text = (
                config in ('study_lm', 'study_residual', 'study_aggregation') or 'lm-small' in argv
            )
            more |= {'base': folder / ('lm.py' if text else 'agents.py'), 'base_ff': '', 'seeds': 1}
            if config == 'study_lm':
                more |= {'only': 'd=48 L=1', 'tune': 'learning_rate=0.02,0.04'}
            elif not config:
                more |= {
                    'width': 0.0625,
                    'only': 'L=1 E=4'
                    if text
                    else 'L=1 E=1 model=convglu'
                    if {'sokoban', 'sokoban-small'} & set(argv)
                    else 'L=1 d=64 kind=recurrent',
                }
    if '--resume=True' in argv or '--eval_only=True' in argv:
        more['overwrite'] = False
    if launcher[0] == 'torchrun':
        launcher = ['python', '--ranks=2']
    return [sys.executable, *launcher[1:], script, *argv, *flags(more)]


def test_they_run(data, tmp_path, request):  # noqa: F811
    """In order: some go on where others stopped. None of the downloads, which test_data.py and test_faults.py try on a hub of their own."""
    files(tmp_path, data)
    blocks, quoted = from_readme()
    ran, long = [], request.config.getoption('--long')
    assert not ELSEWHERE.keys() - set(blocks)
    for command in dict.fromkeys(
        blocks + quoted + from_docstrings()
        if long
        else [command for command in blocks if command not in ELSEWHERE]
    ):
        words = shrunk(command, tmp_path, data, len(ran))
        if words is None:
            continue
        print(command, flush=True)
        done = forks.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, 'OMP_NUM_THREADS': '1'},
        )
        assert done.returncode == 0, (command, words, done.stdout[-1000:], done.stderr[-2000:])
        ran.append(command)
    assert len(ran) >= 18
