"""export.py: the exported model is the trained one, other programs can read it, and what is wrong with one is said in a line."""

import json
import os
import sys

import pytest
import safetensors.torch
import torch
from test_train import data, run  # noqa: F401  a fixture

import export
import sample
from checkpoint import load_checkpoint, save_checkpoint
from configurator import configure, run_script


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp('trained')
    assert (
        run(data, folder / 'rnn', max_iters=4) == 0
        and run(data, folder / 'gpt', max_iters=4, recurrent=False, aggregation='softmax_l2') == 0
    )
    return folder


def call(monkeypatch, script, *argv):
    monkeypatch.setattr(sys, 'argv', [script.__name__, *map(str, argv)])
    script.main()


@pytest.mark.parametrize('name', ['rnn', 'gpt'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_is_read_is_what_was_trained(trained, tmp_path, monkeypatch, capsys, name, dtype):
    call(monkeypatch, export, f'--out_dir={trained / name}', f'--to={tmp_path}', f'--dtype={dtype}')
    assert (
        sorted(os.listdir(tmp_path)) == ['config.json', 'model.safetensors']
        and 'parameters' in capsys.readouterr().out
    )
    saved = load_checkpoint(trained / name / 'ckpt_best.pt')
    model, tokenizer = export.read_model(str(tmp_path))
    assert tokenizer == 'bytes' and model.recurrent == (name == 'rnn') and model.config.n_embd == 32
    for key, tensor in saved['model'].items():
        assert torch.equal(model.state_dict()[key], tensor.to(getattr(torch, dtype)).float())
    assert safetensors.torch.load_file(tmp_path / 'model.safetensors')[
        'embedding'
    ].dtype == getattr(torch, dtype)
    if dtype == 'float32':  # and sample.py draws the same from both
        texts = []
        for folder in (tmp_path, trained / name):
            configure(vars(sample), [], quiet=True)
            call(
                monkeypatch,
                sample,
                f'--out_dir={folder}',
                '--prompt=AB',
                '--max_new_tokens=20',
                '--dtype=float32',
            )
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and len(texts[0]) > 2


@pytest.mark.parametrize(
    'argv, words',
    [
        (['--to='], ['to = ']),
        (['--to={run}'], ['other than out_dir']),
        (['--to={other}'], ['holds a training run']),
        (['--out_dir=nowhere', '--to=x'], ['nowhere']),
        (['--to=x', '--dtype=float16'], ["dtype = 'float16'"]),
        (['--to=x', '--which=first'], ["which = 'first'"]),
        (['--to=file/x'], ['Not a directory']),
    ],
)
def test_mistakes(trained, tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    argv = [
        f'--out_dir={trained / "rnn"}',
        *(a.format(run=trained / 'rnn', other=trained / 'gpt') for a in argv),
    ]
    with pytest.raises(SystemExit) as stop:
        run_script(lambda: call(monkeypatch, export, *argv))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count('\n') == 1 and all(word in err for word in words), err
    assert os.listdir(tmp_path) == ['file'] and (trained / 'gpt' / 'config.json').exists()


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors'])
def test_a_strangers_model_is_kept(trained, tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, export, f'--out_dir={trained / "rnn"}', f'--to={tmp_path}')
    err = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and f'holds {name}, which no export of ours wrote' in err
        and err.count('\n') == 1
    ), err
    assert (
        os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == '{"model_type": "gpt2"}'
    )


def test_an_export_replaces_its_own(trained, tmp_path, monkeypatch):
    """Also one that was cut between its two files: until the weights are there, config.json describes no model."""

    def full(*_):
        raise OSError(28, 'No space left on device', 'model.safetensors')

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(export, 'write_atomic', full)
        call(patch, export, f'--out_dir={trained / "gpt"}', f'--to={tmp_path}')
    with pytest.raises(export.CheckpointError, match='not the description of an exported model'):
        export.read_model(str(tmp_path))
    for name in ('rnn', 'gpt'):
        call(monkeypatch, export, f'--out_dir={trained / name}', f'--to={tmp_path}')
        assert export.read_model(str(tmp_path))[0].recurrent == (name == 'rnn')


@pytest.mark.parametrize(
    'damage, message',
    [
        ({'model': {}}, 'model: has no weight embedding'),
        ('nan', 'holds NaN'),
        ({'model_config': {'n_layer': 10**9}}, 'needs more than'),
        ({'model_config': {'n_embd': 'x'}}, 'model_config does not fit'),
        ({'recurrent': 5}, 'model_config does not fit'),
    ],
    ids=str,
)
def test_a_damaged_checkpoint_is_refused(trained, tmp_path, monkeypatch, capsys, damage, message):
    saved = load_checkpoint(trained / 'rnn' / 'ckpt_best.pt')
    saved |= (
        {'model': {k: v * float('nan') for k, v in saved['model'].items()}}
        if damage == 'nan'
        else damage
    )
    (tmp_path / 'run').mkdir()
    save_checkpoint(saved, tmp_path / 'run' / 'ckpt_best.pt')
    for script, argv in ((sample, []), (export, [f'--to={tmp_path / "to"}'])):
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, script, f'--out_dir={tmp_path / "run"}', *argv)
        err = capsys.readouterr().err
        assert (
            stop.value.code == 2
            and err.count('\n') == 1
            and f'{tmp_path}/run/ckpt_best.pt: ' in err
            and message in err
        ), err
    assert not (tmp_path / 'to').exists()


@pytest.mark.parametrize(
    'damage, file',
    [
        ('cut', 'model.safetensors'),
        ('no weights', 'model.safetensors'),
        ('other sizes', 'model.safetensors'),
        ('no config', 'config.json'),
        ('text', 'config.json'),
        ('other tokenizer', 'config.json'),
        ('huge', 'config.json'),
        ('deep', 'config.json'),
        ('more', 'config.json'),
    ],
)
def test_damaged_exports_are_refused(trained, tmp_path, monkeypatch, capsys, damage, file):
    call(monkeypatch, export, f'--out_dir={trained / "rnn"}', f'--to={tmp_path}')
    weights, config = tmp_path / 'model.safetensors', tmp_path / 'config.json'
    about = json.loads(config.read_text())
    if damage in ('cut', 'no weights'):
        weights.write_bytes(weights.read_bytes()[:-4])
    if damage == 'no weights':
        weights.unlink()
        weights.mkdir()
    if damage == 'no config':
        config.unlink()
    new = {
        'other sizes': {'model': about['model'] | {'n_embd': 64}},
        'other tokenizer': {'tokenizer': 'x'},
        'huge': {'model': about['model'] | {'n_embd': 2**20}},
        'deep': {'model': about['model'] | {'n_layer': 10**9}},
        'more': {'model': about['model'] | {'x': 1}},
    }
    if damage in new:
        config.write_text(json.dumps(about | new[damage]))
    if damage == 'text':
        config.write_text('hello')
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, sample, f'--out_dir={tmp_path}')
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count('\n') == 1 and file in err, err
