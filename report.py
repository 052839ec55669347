"""
Write a self-contained HTML page about a run or a sweep: a summary, curves, games, the settings
that differ from the defaults, evaluations, tables.

$ python report.py --out_dir=out/demo                 # writes out/demo/report.html

out_dir holds a run of train_lm.py or train_sokoban.py, runs in its subfolders, or the figures and
tables of sweep.py.
"""

import base64
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from configurator import Mistake, configure, run_script
from files import read_json, write_text
from configurator import read_script

from common import need_packages
from figures import COLORS, MODELS, describe_model, draw_curve, draw_episodes, draw_losses
from figures import finish_figure, format_number, new_figure, read_csv, read_log, run_value
from figures import unit_of, variant_name, variant_of

out_dir = ''  # folder of a run or a sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLD_ROWS = 20  # tables with more rows are folded
ABOUT = ('script', 'commit', 'torch', 'device_name')  # in config.json beside the settings

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 0 auto; padding: 1rem 1.25rem 3rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: 0.2rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.8rem; border-bottom: 1px solid #ddd }
h1, p, dd { overflow-wrap: anywhere }
td { overflow-wrap: break-word }
td:first-child { white-space: nowrap }
.folder { color: #666; margin-top: 0 }
dl { display: grid; gap: 0.8rem 1.5rem;
     grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)) }
dt { color: #666; font-size: 0.85rem }
dd { margin: 0; font-variant-numeric: tabular-nums }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; flex: 1 1 20rem; max-width: 30rem }
figure.wide { flex-basis: 100%; max-width: 54rem }
figure.game { flex: 0 1 15rem }
img { width: 100%; height: auto }
figcaption { color: #666; font-size: 0.85rem }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.25rem 1.2rem 0.25rem 0; text-align: left; vertical-align: top }
th { vertical-align: bottom; border-bottom: 1px solid #999 }
.number { text-align: right }
tr:nth-child(even) td { background: #f7f7f5 }
pre { font-size: 0.85rem; background: #f7f7f5; padding: 0.8rem; white-space: pre-wrap;
      overflow-wrap: anywhere }
summary { cursor: pointer; margin: 0.8rem 0 }
@media (max-width: 40rem) {  /* a phone: each row of a table becomes a block of lines */
  td { overflow-wrap: anywhere }
  .many, .many tbody, .many tr, .many td { display: block }
  .many thead { display: none }
  .many tr { border-bottom: 1px solid #ddd; padding: 0.4rem 0 }
  .many td { display: flex; justify-content: space-between; gap: 1rem; padding: 0.1rem 0;
             text-align: right; overflow-wrap: anywhere; white-space: normal }
  .many td::before { content: attr(data-heading); color: #666; text-align: left; flex: none;
                     max-width: 60% }
}
</style>
</head>
<body>
<h1>{{ title | replace(' = ', '&nbsp;=&nbsp;' | safe) }}</h1>
<p class="folder">{{ folder }}</p>

{% macro draw_table(rows) %}
<table{% if rows[0] | length > 3 %} class="many"{% endif %}>
<thead><tr>{% for cell in rows[0] -%}
<th{% if cell.is_number %} class="number"{% endif %}>{{ cell.heading }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in rows -%}
<tr>{% for cell in row -%}
<td data-heading="{{ cell.heading }}"{% if cell.is_number %} class="number"{% endif %}>
{{- cell.text }}</td>
{%- endfor %}</tr>
{% endfor -%}
</tbody>
</table>
{% endmacro %}

{% for section in sections %}
<section>
<h2>{{ section.heading }}</h2>
{% if section.facts %}<dl>{% for name, text in section.facts.items() %}
<div><dt>{{ name }}</dt>
<dd>{{ text | replace(' = ', '&nbsp;=&nbsp;' | safe) }}</dd></div>{% endfor %}
</dl>{% endif %}
{% if section.pictures %}<div class="pictures">{% for picture in section.pictures %}
<figure class="{{ picture.kind }}"><img src="{{ picture.source }}" alt="{{ picture.caption }}">
{%- if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}</figure>
{%- endfor %}
</div>{% endif %}
{% if section.rows and section.folded %}<details><summary>{{ section.folded }}</summary>
{{ draw_table(section.rows) }}</details>
{% elif section.rows %}{{ draw_table(section.rows) }}{% endif %}
{% if section.text %}<pre>{{ section.text }}</pre>{% endif %}
</section>
{% endfor %}
</body>
</html>
"""


@dataclass
class Section:
    """A part of the page. Everything but the heading may be missing."""

    heading: str
    facts: dict[str, str] = field(default_factory=dict)  # {name: text}
    pictures: list['Picture'] = field(default_factory=list)
    rows: list[list['Cell']] = field(default_factory=list)  # of a table
    folded: str = ''  # hide the table behind this line
    text: str = ''


class Picture(NamedTuple):
    """A picture with its caption."""

    source: str  # a data URL
    caption: str = ''
    kind: str = ''  # 'wide': has several panels; 'game': an animation


class Cell(NamedTuple):
    """A cell of a table, with its column's heading."""

    heading: str
    text: str
    is_number: bool


# ----------------------------------------------------------------------------- pictures


def data_url(content: bytes, form: str) -> str:
    """Return the content of a file as a URL that contains it. form: such as 'gif'."""
    return f'data:image/{form};base64,{base64.b64encode(content).decode()}'


def svg_picture(content: bytes, caption: str = '') -> Picture:
    """Return an SVG file as a picture. One that is wider than one panel is wide on the page too."""
    width = re.search(rb'<svg [^>]*?width="([0-9.]+)pt"', content)
    kind = 'wide' if width and float(width[1]) > 300 else ''
    return Picture(source=data_url(content, 'svg+xml'), caption=caption, kind=kind)


def figure_picture(figure: 'Figure') -> Picture:
    """Return a figure as a picture, and close it."""
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format='svg', metadata={'Date': None})
    plt.close(figure)
    return svg_picture(file.getvalue())


def game_picture(path: Path) -> Picture:
    """Return the picture of a game that --eval_only wrote into eval_NAME_solved.gif or
    eval_NAME_failed.gif."""
    name, _, end = path.stem.removeprefix('eval_').rpartition('_')
    level = read_json(path.with_name(f'eval_{name}.json')).get(f'{end}_level')
    caption = name if level is None else f'Level {level} of {name}'
    caption += ': solved' if end == 'solved' else ': not solved'
    return Picture(source=data_url(path.read_bytes(), 'gif'), caption=caption, kind='game')


def run_curves(log: list[dict], unit: str) -> list[Picture]:
    """Return the curves of one run as separate pictures, which a phone shows one above the other.

    unit: 'token' or 'byte', or '' for an agent.
    """
    if unit:
        figure, (axes,) = new_figure(1, 3.0)
        draw_losses(axes, log, unit)
        return [figure_picture(finish_figure(figure, ''))]
    pictures = []
    for key in ('return', 'solve_rate'):
        figure, (axes,) = new_figure(1, 3.0)
        draw_episodes(axes, log, key)
        pictures.append(figure_picture(finish_figure(figure, '')))
    return pictures


def sweep_curves(logs: dict[Path, list], configs: dict[Path, dict], unit: str) -> Picture:
    """Return the curves of all runs, with a color for each L; non-recurrent runs are dotted."""
    figure, (axes,) = new_figure(1, 3.8, width=5)
    x, y = ('tokens', 'val_loss') if unit else ('env_steps', 'return_1000')
    for path in sorted(logs, key=lambda path: configs[path].get('n_layer', 0)):
        L = configs[path].get('n_layer', 0)
        recurrent = configs[path].get('recurrent', True)
        color = COLORS[L.bit_length() % len(COLORS)]  # another one for each power of two
        style = '-' if recurrent else ':'
        label = f'L = {L}, {variant_of(recurrent)}'
        log = logs[path][1:]  # the first record is from before training
        draw_curve(axes, log, x, y, label, color=color, lw=1, ls=style)
    if unit:
        axes.set(xlabel=f'{unit}s (millions)', ylabel=f'validation loss ({nats(unit)})')
    else:
        axes.set(xlabel='environment steps (millions)', ylabel='return, last 1,000 episodes')
    return figure_picture(finish_figure(figure, ''))


# ----------------------------------------------------------------------------- texts and tables


def count(x: float) -> str:
    return f'{x:,.0f}'


def percent(x: float) -> str:
    return f'{x:.1%}'


def four_decimals(x: float) -> str:
    return f'{x:.4f}'


def two_decimals(x: float) -> str:
    return f'{x:.2f}'


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def nats(unit: str) -> str:
    """Return 'nats per token' or 'nats per byte', or 'nats' if the unit is not known."""
    return f'nats per {unit}' if unit else 'nats'


# {key of a log or column of a table: (heading, function that formats a value)}
COLUMNS = {
    'step': ('Updates', count),
    'tokens': ('{units} read', count),
    'env_steps': ('Environment steps', count),
    'train_loss': ('Training loss ({nats})', four_decimals),
    'val_loss': ('Validation loss ({nats})', four_decimals),
    'val_bits_per_byte': ('Validation, bits per byte', four_decimals),
    'return_1000': ('Return, last 1,000 training episodes', two_decimals),
    'solve_rate_1000': ('Solved, last 1,000 training episodes', percent),
    'eval_return': ('Return, evaluation levels', two_decimals),
    'eval_solve_rate': ('Solved, evaluation levels', percent),
    'seconds': ('Training time', duration),
    'variant': ('Variant', variant_name),
    'kind': ('Variant', variant_name),
    'L': ('Layers L', format_number),
    'E': ('Experts E', format_number),
    'd': ('Width d', format_number),
    'n_seeds': ('Seeds', format_number),
    'mean_loss': ('Mean loss ({nats})', format_number),
    'variance': ('Variance over seeds', format_number),
    'paper_mean': ('Paper: mean', format_number),
    'paper_variance': ('Paper: variance', format_number),
    'unfiltered_test_percent': ('Solved, unfiltered-test (%)', format_number),
    'evaluation_levels_percent': ('Solved, evaluation levels (%)', format_number),
    'held_out_percent': ('Solved, evaluation levels (%)', format_number),
    'std': ('Standard deviation', format_number),
}
EVALUATION = (  # columns of the table of evaluations
    'step',
    'tokens',
    'env_steps',
    'train_loss',
    'val_loss',
    'val_bits_per_byte',
    'return_1000',
    'solve_rate_1000',
    'eval_return',
    'eval_solve_rate',
    'seconds',
)


def table_rows(records: list[dict], unit: str = '') -> list[list[Cell]]:
    """Return a table of records, with a column for every key that has a value in one of them.

    Numbers are formatted; text, such as the values of a table from a file, stays unchanged.
    """
    names = dict.fromkeys(name for record in records for name in record)
    rows = [[] for _ in records]
    for name in names:
        values = [record.get(name) for record in records]
        present = [x for x in values if x is not None and x != '']
        if not present:
            continue
        heading, form = COLUMNS.get(name, (name.replace('_', ' ').capitalize(), format_number))
        heading = heading.format(nats=nats(unit), units=(unit or 'token').capitalize() + 's')
        is_number = all(map(is_numeric, present))
        for row, x in zip(rows, values, strict=True):
            if x is None:
                text = ''
            elif form is variant_name or isinstance(x, (int, float)):
                text = form(x)
            else:
                text = x
            row.append(Cell(heading=heading, text=str(text), is_number=is_number))
    return rows


def is_numeric(x: object) -> bool:
    """Return whether x is a number, or text that is one."""
    try:
        float(x)
    except (TypeError, ValueError):
        return False
    return True


def table_section(heading: str, records: list[dict], unit: str = '') -> Section:
    """Return a section with a table, folded if it is long."""
    folded = f'{len(records)} rows' if len(records) > FOLD_ROWS else ''
    return Section(heading, rows=table_rows(records, unit), folded=folded)


def setting_sections(configs: list[dict]) -> tuple[Section, Section]:
    """Return two sections about the entries of config.json that all runs share: the settings that
    differ from the script's defaults or that only a copied trainer has, and, folded, all
    entries."""
    first = configs[0] if configs else {}
    shared = {k: x for k, x in first.items() if all(c.get(k) == x for c in configs)}
    script = 'train_sokoban.py' if 'n_envs' in first else 'train_lm.py'
    defaults, _, _ = read_script(Path(__file__).with_name(script))
    defaults = json.loads(json.dumps(defaults))  # tuples become lists, as in config.json
    changed = [
        {'setting': name, 'value': str(x), 'default': str(defaults.get(name, 'none'))}
        for name, x in shared.items()
        if defaults.get(name) != x and name not in ('out_dir', *ABOUT)
    ]
    settings = [{'setting': name, 'value': str(x)} for name, x in shared.items() if x != '']
    of_all = ' of all runs' if len(configs) > 1 else ''
    folded = f'{len(settings)} rows'
    return (
        Section(f'Settings{of_all} that differ from the defaults', rows=table_rows(changed)),
        Section(f'All settings{of_all}', rows=table_rows(settings), folded=folded),
    )


# ----------------------------------------------------------------------------- a run


def language_model_facts(log: list[dict], config: dict, unit: str) -> dict[str, str]:
    """Return what a language model's run has reached, as {name: text}."""
    last = log[-1]
    facts = {}
    evaluated = [r for r in log if r.get('val_loss') is not None]
    if evaluated:
        final, best = evaluated[-1], min(evaluated, key=lambda r: r['val_loss'])
        facts['Validation loss'] = f'{four_decimals(final["val_loss"])} {nats(unit)}'
        if final.get('val_bits_per_byte') is not None:
            facts['Bits per byte'] = four_decimals(final['val_bits_per_byte'])
        at = f'at update {count(best["step"])}'
        facts['Lowest validation loss'] = f'{four_decimals(best["val_loss"])} {at}'
    total = config.get('max_iters', last['step'])
    facts['Trained'] = f'{count(last["step"])} of {count(total)} updates'
    facts[f'{unit.capitalize()}s read'] = count(last['tokens'])
    return facts


def agent_facts(folder: Path, log: list[dict], config: dict) -> dict[str, str]:
    """Return what an agent's run has reached, as {name: text}."""
    last = log[-1]
    facts = {}
    evaluated = [r for r in log if r.get('eval_solve_rate') is not None]
    if evaluated:
        final, best = evaluated[-1], max(evaluated, key=lambda r: r['eval_solve_rate'])
        facts['Evaluation levels solved'] = percent(final['eval_solve_rate'])
        facts['Return'] = two_decimals(final['eval_return'])
        at = f'at {count(best["env_steps"])} steps'
        facts['Most solved'] = f'{percent(best["eval_solve_rate"])} {at}'
    if log[0].get('random_solve_rate') is not None:
        facts['A random policy solves'] = percent(log[0]['random_solve_rate'])
    if 'eval_games' in config and 'eval_split' in config:
        facts['Evaluation levels'] = f'{config["eval_games"]}, {config["eval_split"]}'
    for path in sorted(folder.glob('eval_*.json')):  # written by --eval_only
        record = read_json(path)
        if 'solve_rate' in record and 'n' in record:
            solved = f'{percent(record["solve_rate"])} of {count(record["n"])} levels'
            facts[f'Solved, {path.stem.removeprefix("eval_")}'] = solved
    total = config.get('total_steps', last['env_steps'])
    facts['Trained'] = f'{count(last["env_steps"])} of {count(total)} environment steps'
    return facts


def run_sections(folder: Path, log: list[dict], config: dict, unit: str) -> list[Section]:
    """Return the sections of the page of one run. unit: 'token' or 'byte', or '' for an agent."""
    facts = language_model_facts(log, config, unit) if unit else agent_facts(folder, log, config)
    if log[-1].get('seconds'):
        facts['Training time'] = duration(log[-1]['seconds'])
    for key, name in (('device_name', 'Device'), ('torch', 'torch'), ('commit', 'Commit')):
        if config.get(key):
            facts[name] = str(config[key])
    changed, settings = setting_sections([config])
    evaluated = [r for r in log if 'val_loss' in r or 'eval_return' in r]
    records = [{key: r.get(key) for key in EVALUATION} for r in evaluated]
    sections = [
        Section('Summary', facts=facts),
        Section('Curves', pictures=run_curves(log, unit)),
        Section('Games', pictures=[game_picture(p) for p in sorted(folder.glob('eval_*.gif'))]),
        changed,
        table_section('Evaluations', records, unit),
    ]
    has_text = unit and config.get('arch', 'experts') == 'experts'  # no baseline can be sampled
    if has_text and (folder / 'ckpt_last.pt').exists():
        sections.append(Section('A sample', text=sample_text(folder)))
    return [*sections, settings]


def sample_text(folder: Path) -> str:
    """Return what sample.py prints for a run's last checkpoint; '' if it fails, with the reason on
    stderr."""
    print(f'sampling from {folder / "ckpt_last.pt"}', flush=True)
    command = [sys.executable, 'sample.py', f'--out_dir={folder.resolve()}', '--which=last']
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if done.returncode != 0:
        print(f'the page has no sample: {done.stderr.strip()}', file=sys.stderr)
        return ''
    return done.stdout


# ----------------------------------------------------------------------------- a sweep


def sweep_sections(folder: Path, logs: dict[Path, list], configs: dict) -> list[Section]:
    """Return the sections of the page of a sweep: a summary, the figures and tables of sweep.py,
    and what the logs of the runs have."""
    about = read_json(folder / 'runs.json')
    is_text = any('tokens' in log[-1] for log in logs.values())
    unit = unit_of(configs.values()) if is_text else ''
    tables = {path: read_csv(path) for path in sorted(folder.glob('*.csv'))}
    drawings = [
        svg_picture(path.read_bytes(), title_of(path.stem)) for path in sorted(folder.glob('*.svg'))
    ]
    if logs:
        runs = [run_record(path, log, configs[path]) for path, log in logs.items()]
    else:
        hidden = ('model', 'reported', 'over_budget', 'device', 'device_name', 'torch')
        runs = [{k: x for k, x in run.items() if k not in hidden} for run in about.get('runs', [])]
    facts = {}
    has_several_models = sum(path.stem.startswith('table_') for path in tables) > 1
    for path, rows in tables.items():
        model = MODELS.get(path.stem.removeprefix('table_'), '') if has_several_models else ''
        facts |= best_allocations(rows, unit, model)
    for key, x in about.items():
        if key.startswith('best_'):  # of sweep.best_depths
            model = MODELS.get(key.removeprefix('best_'), '') if has_several_models else ''
            name = 'Certainty of the best depth' + (f', {model}' if model else '')
            facts[name] = str(x).replace('feedforward', 'non-recurrent')
    if not facts:
        facts |= best_runs('recurrent', logs, configs) | best_runs('non-recurrent', logs, configs)
    facts['Runs'] = str(len(runs))
    if logs:
        seconds = sum(log[-1].get('seconds') or 0 for log in logs.values())
        facts['Total training time'] = duration(seconds)
    names = {'plan': 'Plan', 'device': 'Device', 'torch': 'torch'}
    names |= {'commit': 'Commit', 'drawn_at_commit': 'Drawn at commit'}
    facts |= {name: str(about[key]) for key, name in names.items() if about.get(key)}
    changed, settings = setting_sections(list(configs.values()))
    return [
        Section('Summary', facts=facts, text=about.get('command', '')),
        Section('Figures', pictures=drawings),
        Section('Curves', pictures=[sweep_curves(logs, configs, unit)] if logs else []),
        changed,
        *(table_section(title_of(path.stem), rows, unit) for path, rows in tables.items()),
        table_section('Runs', runs, unit),
        settings,
    ]


def title_of(stem: str) -> str:
    """Return the title of a file of sweep.py, such as 'Allocations, ConvGLU' for the stem
    'allocations_convglu'."""
    name, _, model = stem.partition('_')
    return f'{name.capitalize()}, {MODELS[model]}' if model in MODELS else stem.replace('_', ' ')


# Columns of a table of mean losses or returns; all others are further settings.
VALUE_COLUMNS = """variant budget L E d mean_loss mean_return variance n_seeds paper_mean
    paper_variance""".split()


def best_allocations(rows: list[dict], unit: str, model: str = '') -> dict[str, str]:
    """Return as {name: text} the best allocation of each variant and budget in a table of mean
    losses or returns, and the gain from recurrence: the best loss of the non-recurrent models minus
    that of the recurrent ones. {} for other tables. model: the table's, if a page has several.

    An allocation with fewer seeds than others of its group does not count (figures.best_cell)."""
    if rows and 'mean_loss' in rows[0]:
        key, measure = 'mean_loss', nats(unit)
    elif rows and 'mean_return' in rows[0]:
        key, measure = 'mean_return', 'return'
    else:
        return {}
    best = {}  # {group: (number of seeds, score, row)}
    for row in rows:
        group = (variant_name(row['variant']), row.get('budget', ''))
        n_seeds = int(row.get('n_seeds') or 1)
        score = float(row[key]) * (-1 if key == 'mean_loss' else 1)
        if group not in best or (n_seeds, score) > best[group][:2]:
            best[group] = n_seeds, score, row
    facts = {}
    of_model = f' {model}' if model else ''
    for (variant, budget), (_, score, row) in best.items():
        allocation = f'L = {row["L"]}, E = {row["E"]}, d = {row["d"]}'
        for name, x in row.items():
            if x and name not in VALUE_COLUMNS:
                allocation += f', {name} = {x}'
        value = f'{float(row[key]):.5g} {measure}'
        facts[f'Best {variant}{of_model}, {budget} budget'] = f'{value}: {allocation}'
        if key == 'mean_loss' and variant == 'recurrent' and ('non-recurrent', budget) in best:
            gain = score - best['non-recurrent', budget][1]
            name = f'Gain from recurrence{of_model}, {budget} budget'
            facts[name] = f'{four_decimals(gain)} {measure}'
    return facts


def best_runs(variant: str, logs: dict[Path, list], configs: dict) -> dict[str, str]:
    """Return as {name: text} the value and the folder of the best language model and of the best
    agent of a variant; {} if no run is of that variant."""
    losses, returns = {}, {}
    for path, log in logs.items():
        recurrent = configs[path].get('recurrent', True)
        if recurrent == (variant == 'recurrent') and run_value(log) is not None:
            values = losses if 'tokens' in log[-1] else returns
            values[path] = run_value(log)
    facts = {}
    if losses:
        path = min(losses, key=losses.get)
        facts[f'Best {variant} language model'] = f'loss {losses[path]:.5g}: {path.name}'
    if returns:
        path = max(returns, key=returns.get)
        facts[f'Best {variant} agent'] = f'return {returns[path]:.5g}: {path.name}'
    return facts


def run_record(path: Path, log: list[dict], config: dict) -> dict:
    """Return the row of a run in the table of a sweep."""
    last = log[-1]
    keys = ('tokens', 'env_steps', 'val_loss', 'eval_return', 'eval_solve_rate', 'seconds')
    return {
        'variant': variant_of(config.get('recurrent', True)),
        'L': config.get('n_layer'),
        'E': config.get('n_expert'),
        'd': config.get('n_embd'),
        'seed': config.get('seed'),
        **{key: last.get(key) for key in keys},
        'folder': path.name,
    }


# ----------------------------------------------------------------------------- the page


def write_report(folder: Path) -> Path:
    """Write folder/report.html, which contains all its pictures, and return its path.

    Ends the script if the folder holds neither a run nor a sweep. Raises Mistake if a log is
    damaged.
    """
    import jinja2

    paths = sorted(path.parent for path in (*folder.glob('log.jsonl'), *folder.glob('*/log.jsonl')))
    logs = {path: log for path in paths if (log := read_log(path))}
    if not logs and not (folder / 'runs.json').exists():
        raise Mistake(f'out_dir = {str(folder)!r}: no log.jsonl in it or in a subfolder, and no runs.json')
    configs = {path: read_json(path / 'config.json') for path in logs}
    if folder in logs:
        log, config = logs[folder], configs[folder]
        unit = unit_of([config]) if 'tokens' in log[-1] else ''
        title = describe_model(config)
        sections = run_sections(folder, log, config, unit)
    else:
        plan = read_json(folder / 'runs.json').get('plan', folder.name)
        title = f'Sweep: {plan}'
        sections = sweep_sections(folder, logs, configs)
    sections = [s for s in sections if s.facts or s.pictures or s.rows or s.text]
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    page = template.render(title=title, folder=str(folder), sections=sections)
    write_text(page, folder / 'report.html')
    return folder / 'report.html'


def main() -> None:
    configure(globals(), quiet=True)
    if not out_dir:
        raise Mistake('out_dir is empty: name the folder of a run or a sweep, --out_dir=out/demo')
    need_packages(matplotlib=True, pandas=True, jinja2=True)
    print(write_report(Path(out_dir)))


if __name__ == '__main__':
    run_script(main)
