"""sample.py --export: the files are the trained model; what is wrong with them is said in a
line."""

import json
import os

import pytest
import safetensors
import torch
from processes import ROOT, run
from small_runs import error_of

import sample
from common import CheckpointError, load_checkpoint, save_checkpoint
from configurator import configure
from sample import WEIGHTS


def call(*argv):
    configure(vars(sample), [*map(str, argv), '--device=cpu'], quiet=True)
    sample.export_model() if sample.export else sample.use_model()


@pytest.mark.parametrize('name, dtype', [('rnn', 'float32'), ('gpt', 'bfloat16')])
def test_what_is_read_is_what_was_trained(trained, tmp_path, monkeypatch, name, dtype):
    """And an export replaces its own, also one that was cut between its two files."""
    argv = [f'--out_dir={trained / name}', f'--export={tmp_path}', f'--dtype={dtype}']
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(sample.common, 'write_tensors', lambda *_: 1 / 0)
        call(*argv)
    with pytest.raises(CheckpointError, match='is damaged'):
        sample.LanguageModel.from_pretrained(tmp_path)
    call(*argv)
    assert sorted(os.listdir(tmp_path)) == ['README.md', 'config.json', 'model.safetensors']
    model = sample.load_model(str(tmp_path), 'best')
    assert (
        model.about['tokenizer'] == 'bytes'
        and model.recurrent == (name == 'rnn')
        and model.config.n_embd == 32
    )
    kind = getattr(torch, dtype)
    saved = load_checkpoint(trained / name / 'ckpt_best.pt')['model']
    with safetensors.safe_open(tmp_path / 'model.safetensors', 'pt') as file:
        assert file.metadata() == {'format': 'pt'}
        for key, tensor in saved.items():
            assert torch.equal(file.get_tensor(key), tensor.to(kind))
            assert torch.equal(model.state_dict()[key], tensor.to(kind).float())


MISTAKES = """
--export={0}/rnn | holds what no such export wrote
--export={1}/pretrained/sokoban | holds what no such export wrote
--export=theirs | holds what no such export wrote
--export=x --out_dir={0}/lstm | arch = 'lstm'
--export=file/x | Not a directory
--export=x --interactive | exclude each other
--score=none.txt | No such file or directory: 'none.txt'
--score=theirs/model.safetensors | cannot be read as text
--score=file | there is no text in it
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes(trained, tmp_path, monkeypatch, capfd, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    (tmp_path / 'theirs').mkdir()
    (tmp_path / 'theirs' / 'model.safetensors').write_bytes(b'theirs\xff')
    argv, words = line.format(trained, ROOT).split(' | ')
    assert words in error_of(capfd, sample, [f'--out_dir={trained}/rnn', *argv.split()])
    assert sorted(os.listdir()) == ['file', 'theirs']
    assert (tmp_path / 'theirs' / 'model.safetensors').read_bytes() == b'theirs\xff'


def test_what_is_damaged_is_refused(trained, tmp_path, capfd):
    """A checkpoint and an export, by the file and what is wrong."""
    run, export = tmp_path / 'run', tmp_path / 'export'
    checkpoint, config, weights = (run / 'ckpt_best.pt', export / 'config.json', export / WEIGHTS)
    call(f'--out_dir={trained / "rnn"}', f'--export={export}')
    run.mkdir()
    saved, about = load_checkpoint(trained / 'rnn/ckpt_best.pt'), json.loads(config.read_text())
    sizes, good = about['model'], weights.read_bytes()

    def refused(file, message, *argv):
        error = error_of(capfd, sample, [f'--out_dir={file.parent}', *argv])
        assert f'{file}: ' in error and message in error, error

    for damage, message in (
        ({'model': {}}, 'Missing key'),
        ({'model': {'embedding': torch.full((256, 32), torch.nan)}}, 'holds NaN'),
        ({'model_config': {'n_layer': 10**9}}, 'needs more than'),
    ):
        save_checkpoint(saved | damage, checkpoint)
        refused(checkpoint, message)
        refused(checkpoint, message, f'--export={tmp_path / "to"}')
    assert not (tmp_path / 'to').exists()
    for text, message in (
        ('hello', 'JSONDecodeError'),
        (json.dumps(about | {'tokenizer': 'x'}), 'unknown tokenizer'),
        (json.dumps(about | {'model': sizes | {'n_embd': 2**20}}), 'needs more than'),
    ):
        config.write_text(text)
        refused(config, message)
    for n, content, message in ((64, good, 'size mismatch'), (32, b'x', 'too small')):
        config.write_text(json.dumps(about | {'model': sizes | {'n_embd': n}}))
        weights.write_bytes(content)
        refused(weights, message)


def test_the_shipped_model(tmp_path):
    """Scores and continues standard input: speeches well (a uniform guess: 5.5 nats)."""
    text = 'My fellow citizens, the Congress has passed a law for the relief of our soldiers.'
    (tmp_path / 'a.txt').write_text(text)
    said = []
    for words in ('--score=-', '--prompt=FILE:- --max_new_tokens=0'):
        argv = ['sample.py', '--out_dir=pretrained/lm', *words.split()]
        with open(tmp_path / 'a.txt') as file:
            done = run(argv, stdin=file)
        said.append(done.stdout)
    assert said[0].startswith(f'-: {len(text)} bytes, ') and float(said[0].split()[-8]) < 1.5
    assert said[1] == f'{text}\n'
