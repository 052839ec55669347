"""Test sample.py --export and what sample.py refuses."""

import io
import json
import os
import shutil
import sys

import pytest
import safetensors
import torch
from processes import ROOT
from small_runs import error_of

import hub
import sample
from configurator import Mistake, configure
from run import load_checkpoint
from sample import WEIGHTS


def export(run_folder, to, **settings):
    """Export the model of a run into the folder `to`."""
    settings = {'out_dir': run_folder, 'export': to, 'device': 'cpu', **settings}
    configure(vars(sample), [f'--{name}={x}' for name, x in settings.items()], quiet=True)
    sample.export_model()


@pytest.mark.parametrize('name, dtype', [('recurrent', 'float32'), ('nonrecurrent', 'bfloat16')])
def test_an_export_holds_the_trained_weights_and_sizes(trained, tmp_path, name, dtype):
    export(trained / name, tmp_path, dtype=dtype)
    assert sorted(os.listdir(tmp_path)) == ['README.md', 'config.json', 'model.safetensors']
    model = sample.load_model(str(tmp_path), 'best')
    assert model.about['tokenizer'] == 'bytes' and model.config.n_embd == 32
    assert model.recurrent == (name == 'recurrent')
    trained_weights = load_checkpoint(trained / name / 'last.pt')['model']  # also the best
    loaded_weights = model.state_dict()
    with safetensors.safe_open(tmp_path / 'model.safetensors', 'pt') as file:
        assert file.metadata() == {'format': 'pt'}
        for key, weight in trained_weights.items():
            rounded = weight.to(getattr(torch, dtype))
            assert torch.equal(file.get_tensor(key), rounded)
            assert torch.equal(loaded_weights[key], rounded.float())


def test_only_the_best_model_has_the_best_validation_loss(trained, tmp_path):
    for which in ('best', 'last'):
        export(trained / 'recurrent', tmp_path, which=which)
        about = json.loads((tmp_path / 'config.json').read_text())
        assert ('best_val_loss' in about) == (which == 'best') and about['step'] == 4
        assert about['settings']['n_embd'] == 32 and 'train_lm.py' in about['command']
        card = (tmp_path / 'README.md').read_text()
        assert ('Score: not recorded' in card) == (which == 'last')


def test_an_export_replaces_one_that_was_interrupted_between_its_files(
    trained, tmp_path, monkeypatch
):
    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub, 'write_tensors', fail)
        export(trained / 'recurrent', tmp_path)
    with pytest.raises(Mistake, match='config.json: damaged'):
        sample.LanguageModel.from_pretrained(tmp_path)
    export(trained / 'recurrent', tmp_path)
    assert sample.LanguageModel.from_pretrained(tmp_path).config.n_embd == 32


MISTAKES = [  # arguments, message; {0}: trained, {1}: the repository
    ('--export={0}/recurrent', 'holds files that no such export wrote'),
    ('--export={1}/pretrained/sokoban', 'holds files that no such export wrote'),
    ('--export=other', 'holds files that no such export wrote'),
    ('--out_dir={0}/lstm', 'holds an LSTM, which can be scored and exported, not sampled'),
    ('--out_dir={1}/pretrained/sokoban', 'damaged, or from another model'),
    ('--export=empty/x', 'Not a directory'),
    ('--export=x --interactive', 'exclude each other'),
    ('--score=none.txt', 'none.txt: No such file or directory'),
    ('--score=other/model.safetensors', 'cannot be read as UTF-8'),
    ('--score=empty', 'there is no text in it'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line_and_change_no_file(
    trained, tmp_path, monkeypatch, capfd, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').touch()
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'model.safetensors').write_bytes(b'other\xff')
    argv = [f'--out_dir={trained}/recurrent', *arguments.format(trained, ROOT).split()]
    assert message in error_of(capfd, sample, argv)
    assert sorted(os.listdir()) == ['empty', 'other']
    assert (tmp_path / 'other' / 'model.safetensors').read_bytes() == b'other\xff'


def test_a_damaged_checkpoint_is_refused_by_file_and_part(trained, tmp_path, capfd):
    """It is refused for sampling and for an export."""
    shutil.copytree(trained / 'recurrent', tmp_path / 'run')
    path = tmp_path / 'run' / 'last.pt'
    saved = load_checkpoint(path)
    for damage, message in (
        ({'model': {}}, 'Missing key'),
        ({'model': {'embedding': torch.full((256, 32), torch.nan)}}, 'holds NaN'),
        ({'entries': None}, 'damaged, or from another model'),
    ):
        torch.save(saved | damage, path)
        for arguments in ([], [f'--export={tmp_path}/export']):
            argv = [f'--out_dir={path.parent}', '--which=last', *arguments]
            error = error_of(capfd, sample, argv)
            assert f'{path}: ' in error and message in error, error
    assert not (tmp_path / 'export').exists()


def test_a_damaged_export_is_refused_by_file_and_reason(trained, tmp_path, capfd):
    export(trained / 'recurrent', tmp_path)
    config, weights = tmp_path / 'config.json', tmp_path / WEIGHTS
    about, content = json.loads(config.read_text()), weights.read_bytes()

    def with_width(n_embd):
        return json.dumps(about | {'model': about['model'] | {'n_embd': n_embd}})

    for config_text, weights_content, damaged, message in (
        ('hello', content, config, 'cannot be read'),
        (json.dumps(about | {'tokenizer': 'x'}), content, tmp_path, "tokenizer = 'x' does not fit"),
        (json.dumps(about | {'tokenizer': 'gpt2'}), content, tmp_path, 'not fit vocab_size = 256'),
        (with_width(64), content, weights, 'size mismatch'),
        (with_width(32), b'x', weights, 'cannot be read'),
    ):
        config.write_text(config_text)
        weights.write_bytes(weights_content)
        error = error_of(capfd, sample, [f'--out_dir={tmp_path}'])
        assert f'{damaged}: ' in error and message in error, error


TEXT = 'My fellow citizens, the Congress has passed a law for the relief of our soldiers.'


@pytest.fixture
def run_sample(monkeypatch, capsys):
    """Return a function that runs sample.py with the shipped model and TEXT as its standard input,
    and returns what it prints."""

    def run(*arguments):
        argv = ['sample.py', f'--out_dir={ROOT}/pretrained/lm', '--device=cpu', *arguments]
        monkeypatch.setattr(sys, 'argv', argv)
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        sample.main()
        return capsys.readouterr().out

    return run


def test_the_shipped_model_scores_standard_input(run_sample):
    """It knows such speeches: a uniform guess scores 5.5 nats per byte."""
    printed = run_sample('--score=-')
    head, _, score = printed.partition(' tokens: ')
    assert head.startswith(f'-: {len(TEXT)} bytes, ')
    assert float(score.partition(' nats per byte')[0]) < 1.5


def test_a_prompt_is_read_from_standard_input(run_sample):
    assert run_sample('--prompt=FILE:-', '--max_new_tokens=0') == f'{TEXT}\n'
