"""Test sample.py --export and what sample.py refuses."""

import json
import os
import shutil

from configurator import configure

import pytest
import torch
from processes import ROOT
from safetensors.torch import load_file
from small_runs import error_of

import sample
from support.run_folder import load_checkpoint


@pytest.mark.parametrize(
    'name, which, dtype', [('recurrent', 'best', 'float32'), ('nonrecurrent', 'last', 'bfloat16')]
)
def test_an_export_holds_the_trained_model_and_how_it_was_trained(
    trained, tmp_path, name, which, dtype
):
    """Only the best model has the best validation loss; the last has equal weights here."""
    arguments = {'out_dir': trained / name, 'which': which, 'dtype': dtype, 'export': tmp_path}
    configure(vars(sample), [f'--{key}={x}' for key, x in arguments.items()], quiet=True)
    sample.export_model()
    assert sorted(os.listdir(tmp_path)) == ['README.md', 'config.json', 'model.safetensors']
    metadata = json.loads((tmp_path / 'config.json').read_text())
    assert metadata['step'] == 4 and metadata['settings']['n_embd'] == 32
    assert 'train_lm.py' in metadata['command'] and metadata['tokenizer'] == 'bytes'
    assert ('best_val_loss' in metadata) == (which == 'best')
    assert ('Score: not recorded' in (tmp_path / 'README.md').read_text()) == (which == 'last')
    weights = load_file(tmp_path / 'model.safetensors')
    model = sample.load(str(tmp_path))
    assert model.recurrent == (name == 'recurrent')
    lone = tmp_path / 'lone' / 'last.pt'  # a copy of the checkpoint alone
    lone.parent.mkdir()
    shutil.copy(trained / name / 'last.pt', lone)
    assert sample.load(str(lone.parent)).recurrent == model.recurrent
    for key, weight in load_checkpoint(trained / name / 'last.pt')['model'].items():
        assert torch.equal(weights[key], weight.to(getattr(torch, dtype)))
        assert torch.equal(model.state_dict()[key], weights[key].float())


MISTAKES = [  # arguments, message; {0}: trained, {1}: the repository
    ('--export=other', 'other: holds a.txt, which no such export wrote: choose another folder'),
    ('--export={0}/recurrent/best', 'is the best model of a run: choose another folder'),
    ('--out_dir={0}/lstm', 'holds an LSTM, which can be scored and exported, not sampled'),
    ('--out_dir={1}/pretrained/sokoban', 'config.json: damaged, or from another model'),
    ('--out_dir=other', 'other: holds no trained run'),
    ('--export=x --interactive', 'exclude each other'),
    ('--score=none.txt', 'none.txt: No such file or directory'),
    ('--score=other/a.txt', 'there is no text in it'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line_and_change_no_file(
    trained, tmp_path, monkeypatch, capfd, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'a.txt').touch()
    argv = [f'--out_dir={trained}/recurrent', *arguments.format(trained, ROOT).split()]
    assert message in error_of(capfd, sample, argv)
    assert os.listdir() == ['other'] and os.listdir('other') == ['a.txt']


def test_a_damaged_checkpoint_is_refused_by_file_and_part(trained, tmp_path, capfd):
    shutil.copytree(trained / 'recurrent', tmp_path / 'run')
    path = tmp_path / 'run' / 'last.pt'
    saved = load_checkpoint(path)
    for damage, name, message in (
        ({'model': {}}, path, 'Missing key'),
        ({'entries': None}, path, 'damaged, or from another model'),
        ({'entries': saved['entries'] | {'tokenizer': 'gpt2'}}, path.parent, "'gpt2' does not fit"),
    ):
        torch.save(saved | damage, path)
        argv = [f'--out_dir={path.parent}', '--which=last', f'--export={tmp_path}/export']
        error = error_of(capfd, sample, argv)
        assert f'{name}: ' in error and message in error
    assert not (tmp_path / 'export').exists()
