r"""Score language models on state tracking: the share of right answers by number of moves.

    python data_states.py
    python train_lm.py config/states.py
    python -m paper.states out/states_S5             # runs, or folders of runs
    python -m paper.states out/states_S5 --erase=caches --moves_before=4 --chains=200

Every run is scored on a test text of its task (data_states.py): --chains chains of each length, up
to twice the longest in training, whose long chains no training text contains. An arrangement is
right if all its letters but the last, which the others imply, are the likeliest next bytes, each
after the true bytes before it. The text is read in 100 streams with a carried state, in fp32;
answers in the first 128 bytes of a stream do not count. Guessing, the gray line and the column
`floor`, is the best that a model can do that does not read the moves: it always answers with the
likeliest arrangement after n moves. With D4 that is right in a quarter of the chains, not in an
eighth, because only four of the eight arrangements can follow n moves.

With --erase the state is damaged on purpose, to show what carries the answer: before the '=' of
every chain, or before the move that is --moves_before moves earlier, s becomes zero, or the caches
of keys and values become empty. Chains of fewer moves do not count then.

Writes states.csv, a row per run and number of moves; states_table.csv and .md; and states.png. The
training time that the legend names is that of updates alone (train_lm.py).

A task of your own is any text of which a function says where the answers are. This is all of
copy_task.py, in the project's root: 'cab=cab ddacb=ddacb ...', scored by the number of letters.

    import random
    import re
    import sys
    from pathlib import Path

    from paper.states import Answer, main
    from support.script import run_script

    def make_text(seed, n):
        rng = random.Random(seed)
        inputs = [''.join(rng.choices('abcd', k=rng.randint(1, 16))) for _ in range(n)]
        return ''.join(f'{x}={x} ' for x in inputs).encode()

    def find_answers(text):
        for match in re.finditer(rb'(?<= )([a-d]+)=([a-d]+) ', text):
            yield Answer(len(match[1]), match.start(), match.start(2), match.end(2))

    if __name__ == '__main__':
        if len(sys.argv) == 1:
            Path('copy.txt').write_bytes(make_text(1, 200_000))
        else:
            run_script(lambda: main([make_text(2, 1000)], find_answers))

    python copy_task.py                              # write the text; prepare it; train both kinds
    python data_fineweb.py --text=copy.txt --tokenizer=bytes --data_dir=data/copy
    python train_lm.py config/states.py --data_dir=data/copy --out_dir=out/copy/recurrent
    python train_lm.py config/states_nonrecurrent.py --data_dir=data/copy \
        --out_dir=out/copy/nonrecurrent
    python copy_task.py out/copy                     # table and picture

Items must end in whitespace, because data_fineweb.py cuts a text there. The loss is over all
bytes, many of which can only be guessed; accuracy is the measure. Most short items of the test text
occur in training, too; long ones do not. In a notebook, `accuracy` scores a single model.
"""

import argparse
import functools
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for python PATH/paper/states.py

from support.script import UserError, run_script

import numpy as np
import pandas
import torch
from pandas import DataFrame, Series
from torch import Tensor

from data_states import HELD_OUT, MOVES, chains, likeliest
from lstm import LSTM, load_model
from model import LanguageModel, State
from paper.figures import name_cells, runs, save_table, summarize, varied
from paper.sweep import Parser, matching, path
from support.files import write_text
from support.loader import data_checksum, read_meta
from support.plots import Figure, chart, save_figure
from support.ranks import pick_device
from support.stream import SCORE_CHUNK

STREAMS = 100
WARM_UP = 128  # bytes at the start of a stream, in which answers do not count
TRACKED = 0.95  # accuracy from which on a length counts as tracked
GUESSING = 'guessing: the likeliest arrangement after this number of moves'
TITLE = 'Which arrangement do the moves lead to? L layers of E experts'
MOVES_LABEL = 'moves since an arrangement was last shown'


class Answer(NamedTuple):
    """An answer in a text: the bytes begin .. end - 1, all of which must be right."""

    length: int  # what accuracies are tabulated by: the number of moves
    first: int  # the first byte that determines the answer, as of the arrangement before
    begin: int
    end: int


# ---- the test text ----


def lengths_of_test(most: int) -> list[int]:
    """Return the numbers of moves in the test text: all in training, and four up to twice that."""
    return sorted({*range(1, most + 1), *(most * k // 4 for k in range(5, 9))})


@functools.cache
def test_text(pair: tuple[str, str], most: int, n_chains: int) -> list[bytes]:
    """Return STREAMS streams of equal length. Each has n_chains / STREAMS chains of every number of
    moves, in random order, after WARM_UP bytes of chains of eight moves."""
    rng, streams = random.Random('test'), []
    for _ in range(STREAMS):
        counts = lengths_of_test(most) * (n_chains // STREAMS)
        rng.shuffle(counts)
        size = WARM_UP + sum(n + len(pair[0]) + 2 for n in counts)
        text = ''.join(chains(pair, [8] * (WARM_UP // 8) + counts, rng, HELD_OUT))
        streams.append(text[-size:].encode())
    return streams


def find_answers(text: bytes) -> Iterator[Answer]:
    """Yield the arrangements, without their last letters, of all chains but the first."""
    for match in re.finditer(rb'(?<= )([xr]+)=([a-h]+)(?= )', text):
        items = len(match[2])
        start = match.start() - 1 - items  # of the arrangement before
        yield Answer(len(match[1]), start, match.start(2), match.end(2) - 1)


# ---- accuracies ----


def erase_in(state: State, part: str, rows: Tensor) -> State:
    """Return the state with s set to zero, or with empty caches, in the rows (B,) that are True."""
    if part == 's':
        return state._replace(s=state.s.masked_fill(rows[:, None], 0))
    return state._replace(count=state.count.masked_fill(rows, 0))


@torch.no_grad()
def read(
    model: LanguageModel | LSTM, ids: Tensor, rows: int, erase: str = '', at: Tensor | None = None
) -> Tensor:
    """Return whether each token of streams ids (N, n) is the likeliest after those before it: (N,
    n) bool, False for the first. `rows` streams at a time, which does not change the result, are
    read from an empty state. erase: 's' or 'caches', which are erased before each token at which
    `at` (N, n) is True."""
    T = 1 if erase else SCORE_CHUNK
    right = torch.zeros(ids.shape, dtype=torch.bool)
    for first in range(0, len(ids), rows):
        part = slice(first, first + rows)
        x = ids[part].to(model.head.device)
        state = model.init_state(len(x))
        for t in range(0, x.size(1) - 1, T):
            if erase:
                state = erase_in(state, erase, at[part, t].to(x.device))
            targets = x[:, t + 1 : t + 1 + T]
            logits, state = model(x[:, t : t + targets.size(1)], None, state)  # (B, T, V)
            right[part, t + 1 : t + 1 + T] = (logits.argmax(-1) == targets).cpu()
    return right


def accuracy(
    model: LanguageModel | LSTM,
    streams: list[bytes],
    find: Callable[[bytes], Iterable[Answer]] = find_answers,
    erase: str = '',
    moves_before: int = 0,
    rows: int = STREAMS,
) -> DataFrame:
    """Return the `accuracy` and the number of `answers` for each length of the answers that `find`
    finds in streams of equal size, and whether one of that length `exceeds` the `window` W: whether
    its `span` does, the bytes from the first that the model needs up to the last that it must
    predict, which does not count. Raises UserError if there is no answer, or if the sizes differ.

    erase: 's' or 'caches', which are erased before the last byte that precedes an answer, or
    `moves_before` bytes earlier. rows: streams to read at a time."""
    sizes = sorted(map(len, streams))
    if sizes and sizes[0] < sizes[-1]:
        reason = f'{sizes[0]} to {sizes[-1]} bytes long'
        raise UserError(f'the streams of the test text are {reason}: cut them to equal size')
    width = math.inf if isinstance(model, LSTM) else max(x.window for x in model.layers)
    ids = torch.tensor([[*text] for text in streams])  # (N, n)
    answers = [
        (b, answer)
        for b, text in enumerate(streams)
        for answer in find(text)
        if answer.begin >= WARM_UP and answer.length >= moves_before
    ]
    if not answers:
        least = f'of at least {moves_before} moves, ' if moves_before else ''
        raise UserError(
            f'the text has no answer {least}after the first {WARM_UP} bytes of a stream'
        )
    at = torch.zeros(ids.shape, dtype=torch.bool)
    for b, answer in answers:
        at[b, answer.begin - 1 - moves_before] = True
    right = read(model, ids, rows, erase, at)
    table = DataFrame(
        {
            'length': answer.length,
            'right': bool(right[b, answer.begin : answer.end].all()),
            'span': answer.end - 1 - answer.first,
        }
        for b, answer in answers
    )
    columns = {
        'accuracy': ('right', 'mean'),
        'answers': ('right', 'count'),
        'span': ('span', 'max'),
    }
    table = table.groupby('length').agg(**columns).reset_index()
    return table.assign(window=width, exceeds=table['span'] > width)


def check_model(run: dict, erase: str = '') -> None:
    """Raise UserError if the model of a run does not read bytes, or lacks what is to be erased."""
    folder = run['folder']
    if run.get('tokenizer') != 'bytes':
        raise UserError(f'{folder}: no model of bytes: leave it out by --only')
    if erase and (run['model'] == 'LSTM' or erase == 's' and not run['recurrent']):
        raise UserError(f'{folder}: the model has no {erase} to erase: leave it out by --only')


def read_task(run: dict) -> dict:
    """Return what data_states.py has written about the text of a run. Raises UserError if the run
    was trained on another text."""
    data_dir = str(run.get('data_dir'))  # agents have none
    meta = read_meta(data_dir) or {}
    if 'most_moves' not in meta:
        reason = f'data_dir = {data_dir!r} holds no text of data_states.py'
        advice = (
            'prepare it again, leave the run out by --only, or, for a task of your own, see --help'
        )
        raise UserError(f'{run["folder"]}: {reason}: {advice}')
    trained_on, found = run.get('data_checksum'), data_checksum(data_dir)
    if pandas.notna(trained_on) and found not in (None, trained_on):
        reason = f'was trained on another text than that in {data_dir}'
        raise UserError(f'{run["folder"]}: {reason}: leave the run out by --only')
    return meta


def score_on(
    run: dict, streams: list[bytes], find: Callable, which: str = 'best', **options
) -> DataFrame:
    """Return the accuracies of a run, a row of figures.runs, on streams of its task, which has the
    name of the folder of the data; `step` is the model's. Print a line if that is not the last one
    of the run. find, options: those of `accuracy`. Raises UserError."""
    folder = run['folder']
    check_model(run, options.get('erase', ''))
    model = load_model(folder, which, pick_device('auto'))
    step = model.metadata.get('step')
    if step != run['step']:
        print(f'{folder}: its {which} model is that of update {step}, not {run["step"]}')
    table = accuracy(model, streams, find, **options).assign(folder=folder, step=step)
    task = os.path.basename(os.path.abspath(run['data_dir']))
    return table.assign(task=task, panel=task, floor=math.nan, beyond=False)


def score(run: dict, n_chains: int, which: str = 'best', **options) -> DataFrame:
    """Return the accuracies of a run, a row of figures.runs, on the test text of its task. options:
    those of `accuracy`. Raises UserError if the run was trained on another text."""
    meta = read_task(run)
    pair, most = tuple(meta['moves']), meta['most_moves']
    table = score_on(run, test_text(pair, most, n_chains), find_answers, which, **options)
    names = [name for name, known in MOVES.items() if known == pair]
    return table.assign(
        task=names[0] if names else ','.join(pair),
        panel=': '.join([*names[:1], 'x = {}, r = {}'.format(*pair)]) + f'; 1 to {most} moves',
        floor=table['length'].map(likeliest(pair, 2 * most)),
        beyond=table['length'] > most,
    )


def tracked(accuracies: Series) -> int:
    """Return the largest length with an accuracy of at least TRACKED there and at all shorter ones.
    accuracies: by length, in ascending order."""
    kept = accuracies.index[(accuracies >= TRACKED).cumprod() == 1]
    return int(kept.max()) if len(kept) else 0


# ---- tables and pictures ----


def name_lines(frame: DataFrame) -> Series:
    """Return the name of each run's line. Finished runs that differ in seed and text alone share
    one: kind, sizes, settings that differ, the plan if a text has runs of several, the mean
    training data and time of updates, and the `scored_step` if it is not the last update. The name
    of an unfinished run ends in its `scored_step` instead."""
    texts = frame['data_dir'].map(os.path.realpath)
    if 'data_checksum' in frame:  # earlier runs have none
        texts = frame['data_checksum'].astype(object).where(frame['data_checksum'].notna(), texts)
    names_plan = (frame.groupby(texts, sort=False)['plan'].nunique() > 1).any()
    lstm = 'LSTM the size of recurrent'
    name = frame['kind'].where(frame['model'] != 'LSTM', lstm) + ', ' + name_cells(frame)
    # Plans that share a line are one: what differs between them is named, too.
    for setting in varied(frame if names_plan else frame.assign(plan='')):
        if setting not in ('data_dir', 'eval_interval', 'scored_step'):
            name += f', {setting} = ' + frame[setting].astype(str)
    if names_plan:
        name = frame['plan'] + ': ' + name
    finished = frame['finished'].astype(bool)
    of_line = frame.groupby([name, finished])
    cost = of_line[['last_tokens', 'seconds']].transform('mean')
    trained = (cost['last_tokens'] / 1e6).map(', trained on {:.1f} MB'.format)
    trained += cost['seconds'].map(' in {:.0f} s'.format)
    first, last = (of_line['scored_step'].transform(end) for end in ('min', 'max'))
    scored = ', scored at update ' + first.astype(str)
    scored += (' to ' + last.astype(str)).where(first < last, '')
    trained += scored.where(first < frame['step'], '')
    unfinished = frame['scored_step'].map(', not finished, its model of update {}'.format)
    return name + trained.where(finished, unfinished)


def tabulate(scores: DataFrame) -> DataFrame:
    """Return a table with a row for each task and line: the number of seeds, the means over seeds
    of the accuracy over the lengths of training and of the length that is tracked, and accuracies
    by length, marked by * where an answer exceeds W and by + beyond the lengths of training."""
    rows = []
    for (task, line), part in scores.groupby(['task', 'line'], sort=False):
        runs = [run.set_index('length')['accuracy'] for _, run in part.groupby('folder')]
        row = {'task': task, 'model': line, 'seeds': len(runs)}
        row['mean'] = part.loc[~part['beyond'], 'accuracy'].mean()
        row['tracked'] = sum(map(tracked, runs)) / len(runs)
        most = part.loc[~part['beyond'], 'length'].max()
        for length, one in part.groupby('length'):
            if length <= 2 or length % max(1, most // 8) == 0:
                marks = ('*' if one['exceeds'].any() else '') + ('+' if one['beyond'].any() else '')
                row[str(length)] = f'{one["accuracy"].mean():.2f}{marks}'
        rows.append(row)
    table = DataFrame(rows)
    lengths = sorted(filter(str.isdecimal, table), key=int)
    return table[['task', 'model', 'seeds', 'mean', 'tracked', *lengths]]


def draw(scores: DataFrame, title: str = TITLE, label: str = MOVES_LABEL) -> Figure:
    """Return a picture of the accuracies over the number of moves, a panel for each task, a color
    for each L, or for each line if two of one L and kind would look alike. The lengths beyond those
    of training are shaded, and a line stands where answers start to exceed a window, even if that
    length is not in the test text."""
    by = ['panel', 'line', 'model', 'kind', 'n_layer', 'length']
    guesses = scores.drop_duplicates(['panel', 'length'])[['panel', 'length', 'floor']].dropna()
    points = pandas.concat(
        [
            summarize(scores, by, 'accuracy'),
            guesses.rename(columns={'floor': 'accuracy'}).assign(line=GUESSING, model=GUESSING),
        ]
    )
    points['color'] = points['n_layer'].where(points['model'] == 'Transformer', points['model'])
    points['style'] = points['kind'].map({'non-recurrent': '--'}).fillna('-')
    if (points.groupby(['color', 'style'])['line'].nunique() > 1).any():
        points['color'] = points['line']  # as of several rates, budgets or texts
    labels = label, 'right answers'
    options = {'to_scale': True, 'reference': GUESSING}
    figure = chart(points, 'length', 'accuracy', labels, title, 'sem', **options)
    for axes, (_, part) in zip(figure.axes, scores.groupby('panel', sort=False), strict=True):
        most, last = part['length'].where(~part['beyond'], 0).max(), part['length'].max()
        if last > most:
            axes.axvspan(most + 0.5, last + 0.5, color='0.92', zorder=0)
            axes.text(most + 1, 1.02, 'longer than in training', fontsize=6)
        for window in part.loc[part['exceeds'], 'window'].unique():
            spans = part[part['window'] == window].groupby('length')['span'].max().cummax()
            start = math.ceil(np.interp(window + 1, spans, spans.index))
            axes.axvline(start, color='gray', ls=':', lw=1)
            text = f'from {start} on: longer than the window, W = {window:.0f} bytes'
            side = -1 if start > last / 2 else 1
            place = {'rotation': 90, 'ha': 'center', 'va': 'top', 'fontsize': 6}
            axes.text(start + side * last / 60, 0.98, text, **place)
        axes.set(xlim=(0, last + 0.5), ylim=(0, 1.08))
        axes.yaxis.set_major_formatter('{x:.0%}')
    return figure


def main(streams: list[bytes] | None = None, find: Callable = find_answers) -> None:
    """Score, tabulate and draw the runs that the command line names. streams, find: those of a task
    of your own, as `accuracy` expects them."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser('python -m paper.states', None, __doc__, formatter_class=form)
    add = parser.add_argument
    add('folders', nargs='+', type=path, metavar='FOLDER', help='runs, or folders of runs')
    if streams is None:
        add('--chains', type=int, default=1000, help='of each length in the test text: n x 100')
    add('--which', choices=['best', 'last'], default='best', help='checkpoint of a run')
    add('--erase', choices=['s', 'caches'], default='', help='part of the state to erase')
    add('--moves_before', type=int, default=0, help="erase this number of moves before the '='")
    add('--only', help='a condition on the runs, as in "n_layer == 1"')
    add('--out', type=path, help='folder to write to; default: that of the runs')
    args = parser.parse_args()
    if streams is None and (args.chains < STREAMS or args.chains % STREAMS):
        raise UserError(f'--chains={args.chains}: must be a multiple of {STREAMS}')
    if args.moves_before < 0 or args.moves_before and not args.erase:
        raise UserError(
            f'--moves_before={args.moves_before}: must be at least 0, and needs --erase'
        )
    frame = runs(args.folders)
    frame = frame if args.only is None else matching(frame, args.only)
    options = {'which': args.which, 'erase': args.erase, 'moves_before': args.moves_before}
    out = args.out or Path(os.path.commonpath([os.path.abspath(x) for x in args.folders]))
    # What is refused is refused before other runs are scored in vain.
    out.mkdir(parents=True, exist_ok=True)
    varied(frame)  # refuses a run that is there twice
    for run in frame.to_dict('records'):
        if streams is None:
            read_task(run)
        check_model(run, args.erase)
        load_model(run['folder'], args.which)  # refuses a run without a checkpoint
    parts = []
    for run in frame.to_dict('records'):
        print(f'{run["folder"]}: reading', flush=True)
        if streams is None:
            parts.append(score(run, args.chains, **options))
        else:
            parts.append(score_on(run, streams, find, **options))
    found = pandas.concat(parts)
    of_run = found.drop_duplicates('folder').set_index('folder')[['task', 'step']]
    frame = frame.assign(scored_step=frame['folder'].map(of_run['step']))
    frame['line'] = name_lines(frame)
    texts = frame['data_dir'].map(os.path.realpath)
    n_texts = texts.groupby(frame['folder'].map(of_run['task'])).transform('nunique')
    frame['line'] += (', data_dir = ' + texts.map(os.path.relpath)).where(n_texts > 1, '')
    about = 'folder model plan kind n_layer n_expert n_embd seed line seconds'.split()
    about += ['device_name', 'commit']
    scores = frame[about].merge(found, on='folder')
    name = f'states_without_{args.erase}_{args.moves_before}' if args.erase else 'states'
    write_text(scores.to_csv(index=False), out / f'{name}.csv')
    print(out / f'{name}.csv')
    table = tabulate(scores)
    note = '*: an answer spans more than W bytes'
    if streams is None:
        note = f'mean: over the lengths of training; {note}; +: more moves than in training'
    save_table(table, f'{out}/{name}_table', note)
    title, label, unit = TITLE, MOVES_LABEL, 'moves'
    if streams is not None:
        title, label, unit = 'L layers of E experts', 'length of an answer', 'bytes'
    if args.erase:
        title = f'{args.erase} erased {args.moves_before} {unit} before the answer'
    save_figure(draw(scores, title, label), out / f'{name}.png')
    print(f'{table.round(3).to_string(index=False)}\n{note}')


if __name__ == '__main__':
    run_script(main)
