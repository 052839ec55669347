"""Test hub.py: models are saved, published and loaded in the Hugging Face Hub's format, offline."""

import errno
import json
import os
import re
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from processes import ROOT
from safetensors.torch import load_file
from small_runs import assert_refused

import hub
from convlstm import Agent, AgentConfig, ConvGLU, build_agent
from model import GPT, LanguageModel, ModelConfig, RecurrentGPT, build_model

FILES = ['README.md', 'config.json', 'model.safetensors']
SIZES = {'vocab_size': 256, 'n_expert': 2, 'n_embd': 16, 'n_head': 2, 'window': 8, 'block_size': 4}


def make_language_model(recurrent):
    """Return a small model with random weights everywhere; the head's are zero by default."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(**SIZES), recurrent).requires_grad_(False)
    for p in model.parameters():
        p.normal_()
    return model


def make_agent(recurrent):
    torch.manual_seed(0)
    return build_agent(AgentConfig('convglu', recurrent, n_embd=8, head_dim=8))


def has_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


both_kinds = pytest.mark.parametrize(
    'make, base_class', [(make_language_model, LanguageModel), (make_agent, Agent)]
)


@both_kinds
@pytest.mark.parametrize('recurrent', [True, False])
def test_a_saved_model_is_loaded_equal(tmp_path, make, base_class, recurrent):
    """The base class and the class of the model load it, in evaluation mode."""
    model = make(recurrent)
    model.save_pretrained(tmp_path / 'm', config={'step': 7})
    assert sorted(os.listdir(tmp_path / 'm')) == FILES
    for loader in (base_class, type(model)):
        loaded = loader.from_pretrained(tmp_path / 'm')
        assert type(loaded) is type(model) and loaded.config == model.config
        assert has_same_weights(loaded, model) and not loaded.training
        assert loaded.about['step'] == 7


@both_kinds
def test_a_saved_model_keeps_what_is_said_of_it_while_its_weights_are_those_loaded(
    tmp_path, make, base_class
):
    """Also in bfloat16. After a change, only the entries that rebuild it stay."""
    told = {'step': 7, 'command': 'python a.py', 'score': '1.25', 'tokenizer': 'bytes'}
    make(True).save_pretrained(tmp_path / 'm', config=told)
    for change, kept in (('bfloat16', told), ('train', {'tokenizer': 'bytes'})):
        model = base_class.from_pretrained(tmp_path / 'm')
        if change == 'train':
            next(model.parameters()).data.mul_(1.1)
        else:
            model.bfloat16()
        model.save_pretrained(tmp_path / change, config={'best': 1})
        about = json.loads((tmp_path / change / 'config.json').read_text())
        assert about.keys() == {*model.entries(), 'best', *(told if change == 'bfloat16' else ())}
        assert kept.items() <= about.items() or base_class is Agent
        assert ('1.25' in (tmp_path / change / 'README.md').read_text()) == (kept is told)


def test_an_option_that_from_pretrained_does_not_have_is_refused(tmp_path):
    make_language_model(True).save_pretrained(tmp_path)
    LanguageModel.from_pretrained(tmp_path, revision='v1', local_files_only=True)
    with pytest.raises(TypeError, match='which'):
        LanguageModel.from_pretrained(tmp_path, which='last')


def test_a_class_refuses_the_model_of_another_class(tmp_path):
    make_language_model(True).save_pretrained(tmp_path)
    message = r'config\.json: .* a RecurrentGPT, not a GPT'
    assert_refused(message, GPT.from_pretrained, tmp_path)
    assert_refused(r'config\.json: .*arch', Agent.from_pretrained, tmp_path)


@pytest.mark.parametrize('name, base_class, model_class, score', [
    ('lm', LanguageModel, RecurrentGPT, '1.0342 nats per byte'),
    ('lm_nonrecurrent', LanguageModel, GPT, '1.0592 nats per byte'),
    ('sokoban', Agent, ConvGLU, 'solves 98.2% of 512 evaluation levels'),
])  # fmt: skip
def test_shipped_models_load_and_have_a_card(name, base_class, model_class, score):
    folder = ROOT / 'pretrained' / name
    assert type(base_class.from_pretrained(folder)) is model_class
    card = ModelCard.load(folder / 'README.md')
    assert card.data.license == 'mit' and score in card.text


@pytest.mark.parametrize('name', ['lm', 'lm_nonrecurrent'])
def test_shipped_language_models_know_a_phrase_of_the_speeches(name):
    """A uniform guess loses 5.5 nats per byte."""
    model = LanguageModel.from_pretrained(ROOT / 'pretrained' / name)
    idx = torch.tensor([list(b'Fellow citizens of the Senate and of the House of Representat')])
    logits, _ = model(idx[:, :-1], state=model.init_state(1))  # (1, T, V)
    assert torch.nn.functional.cross_entropy(logits[0, 20:], idx[0, 21:]) < 1


def test_agents_saved_before_a_size_was_added_load(tmp_path):
    """A new field of AgentConfig has its default, here as if `radius` were new."""
    make_agent(True).save_pretrained(tmp_path)
    about = json.loads((tmp_path / 'config.json').read_text())
    del about['radius']
    (tmp_path / 'config.json').write_text(json.dumps(about))
    assert Agent.from_pretrained(tmp_path).config == make_agent(True).config


def test_a_pushed_model_is_loaded_by_the_name_of_its_repository(tmp_path, monkeypatch):
    """push_to_hub uploads the three files and writes a card that says what was trained and how."""
    remote = tmp_path / 'remote'

    def upload_folder(self, *, repo_id, repo_type, folder_path, **options):
        assert (repo_id, repo_type) == ('owner/name', 'model')
        shutil.copytree(folder_path, remote)
        return 'commit'

    def snapshot_download(repo_id, *, allow_patterns, revision, **options):
        assert (repo_id, revision) == ('owner/name', 'v1')
        assert set(allow_patterns) == {'config.json', 'model.safetensors'}
        return str(remote)

    def hf_hub_download(repo_id, filename, **options):
        return str(remote / filename)

    def create_repo(self, repo_id, **options):
        return huggingface_hub.RepoUrl(f'https://huggingface.co/{repo_id}')

    monkeypatch.setattr(huggingface_hub.HfApi, 'create_repo', create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, 'upload_folder', upload_folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    monkeypatch.setattr(huggingface_hub.hub_mixin, 'hf_hub_download', hf_hub_download)
    model = make_language_model(True)
    about = {'tokenizer': 'bytes', 'best_val_loss': 1.25, 'command': 'python train_lm.py --seed=2'}
    assert model.push_to_hub('owner/name', config=about) == 'commit'
    assert sorted(os.listdir(remote)) == FILES
    card = ModelCard.load(remote / 'README.md')
    assert card.data.license == 'mit' and card.data.pipeline_tag == 'text-generation'
    for part in (about['command'], '1.2500 nats per byte', 'L = 2, E = 2', '2609.12531'):
        assert part in card.text
    loaded = LanguageModel.from_pretrained('owner/name', revision='v1')
    assert has_same_weights(loaded, model) and loaded.about['tokenizer'] == 'bytes'


DAMAGES = [  # file, content
    ('config.json', b'{'),
    ('config.json', b'{}'),
    ('config.json', b'[]'),
    ('config.json', b'{"model": {"n_layer": 0}, "recurrent": true}'),
    ('model.safetensors', b''),
    ('model.safetensors', b'x' * 100),
]


@pytest.mark.parametrize('name, content', DAMAGES)
def test_a_damaged_file_is_named_in_one_line(tmp_path, name, content):
    make_language_model(True).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert_refused(f'{name}: ', LanguageModel.load_trained, tmp_path)


@pytest.mark.parametrize('name, message', [
    ('config.json', 'config.json: cannot be read'),
    ('model.safetensors', 'holds no trained run'),
])  # fmt: skip
def test_a_missing_file_is_named_in_one_line(tmp_path, name, message):
    make_language_model(True).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    assert_refused(message, LanguageModel.load_trained, tmp_path)


def test_a_head_that_is_tied_to_the_embedding_is_saved_and_loaded(tmp_path):
    """Both names are in the file, so that any model can take them; loading keeps the tie."""
    model = make_language_model(True)
    model.head = model.embedding
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / 'model.safetensors')
    assert torch.equal(weights['head'], weights['embedding'])
    loaded = make_language_model(True)
    loaded.head = loaded.embedding
    hub.load_weights(loaded, weights, tmp_path)
    assert has_same_weights(loaded, model) and loaded.tied
    hub.init_from(make_language_model(True), tmp_path)


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    model = make_language_model(True)
    model.head[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    assert_refused('head holds NaN', LanguageModel.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    'error',
    [
        ConnectionError('reset'),
        hub.EntryNotFoundError('404'),
        OSError(errno.ENOSPC, 'No space left on device'),
        RuntimeError('Data processing error: No space left on device (os error 28)'),  # of hf-xet
    ],
    ids=str,
)
def test_a_failed_download_is_reported_with_what_to_do(monkeypatch, error):
    def repo_info(repo):
        raise error

    monkeypatch.setattr(huggingface_hub, 'repo_info', repo_info)
    reason = re.escape(f'{type(error).__name__}: {error}')
    message = f'cannot download owner/name: {reason}: the same command continues; .*`hf auth login`'
    assert_refused(message, hub.call_hub, 'repo_info', 'owner/name')


def test_a_model_is_not_saved_into_a_folder_with_other_files(tmp_path):
    (tmp_path / 'thesis.tex').write_text('text')
    message = 'holds files that no such export wrote'
    assert_refused(message, make_language_model(True).save_pretrained, tmp_path)
    assert os.listdir(tmp_path) == ['thesis.tex']


def test_a_save_removes_what_a_killed_one_left(tmp_path):
    """It may have been killed at its first file, or later."""
    model = make_language_model(True)
    for leftover in ('.config.json.tmp', '.model.safetensors.tmp'):
        (tmp_path / leftover).touch()
        model.save_pretrained(tmp_path)
        assert sorted(os.listdir(tmp_path)) == FILES


def test_if_the_disk_is_full_the_model_that_was_to_be_replaced_is_still_complete(
    tmp_path, monkeypatch
):
    def write_tensors(tensors, path):
        raise OSError(errno.ENOSPC, 'No space left on device')

    make_agent(True).save_pretrained(tmp_path)
    model = Agent.from_pretrained(tmp_path)
    monkeypatch.setattr(hub, 'write_tensors', write_tensors)
    with pytest.raises(OSError, match='No space left'):
        model.bfloat16().save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES
    assert has_same_weights(Agent.from_pretrained(tmp_path), make_agent(True))


@pytest.mark.parametrize('step, updates', [(0, '0'), (7, '7'), (None, 'an unrecorded number of')])
def test_the_card_has_the_number_of_updates(step, updates):
    model = make_language_model(True)
    card = model.generate_model_card(**model.describe({'model': {}, 'step': step}))
    assert f'Trained for {updates} updates by:' in card.text


def test_an_unknown_setting_of_a_model_is_named(tmp_path):
    """The code may have had the setting when the model was saved."""
    make_language_model(True).save_pretrained(tmp_path, config={'model': SIZES | {'z_loss': 0.1}})
    message = r'config\.json: .*has a setting that this code does not know: z_loss'
    assert_refused(message, LanguageModel.from_pretrained, tmp_path)
