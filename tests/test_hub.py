"""hub.py: models saved, published and loaded in the format of the Hugging Face Hub, offline."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import hub
from common import CheckpointError
from convlstm import Agent, AgentConfig, ConvGLU, build_agent
from model import GPT, LanguageModel, ModelConfig, RecurrentGPT, build_model

ROOT = Path(hub.__file__).parent
FILES = ['README.md', 'config.json', 'model.safetensors']
SIZES = {'vocab_size': 256, 'n_expert': 2, 'n_embd': 16, 'n_head': 2, 'window': 8, 'block_size': 4}


def language_model(recurrent):
    """Return a small model with random weights everywhere; the head's are zero by default."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(**SIZES), recurrent)
    return model.requires_grad_(False).apply(lambda part: [p.normal_() for p in part.parameters()])


def agent(recurrent):
    torch.manual_seed(0)
    return build_agent(AgentConfig('convglu', recurrent, n_embd=8, head_dim=8))


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize('make, base', [(language_model, LanguageModel), (agent, Agent)])
@pytest.mark.parametrize('recurrent', [True, False])
def test_a_saved_model_is_loaded_equal(tmp_path, make, base, recurrent):
    """By the base class and by its own, in evaluation mode, with the same sizes."""
    model = make(recurrent)
    model.save_pretrained(tmp_path / 'm', config={'step': 7, 'command': 'python train_lm.py'})
    assert sorted(os.listdir(tmp_path / 'm')) == FILES
    for one in (base, type(model)):
        loaded = one.from_pretrained(tmp_path / 'm')
        assert type(loaded) is type(model) and loaded.config == model.config
        assert same_weights(loaded, model) and not loaded.training
        assert loaded.about['step'] == 7
    # what it was loaded with stays, and a second save replaces the first
    loaded.save_pretrained(tmp_path / 'm', config={'step': 8})
    about = json.loads((tmp_path / 'm' / 'config.json').read_text())
    assert about['step'] == 8 and about['command'] == 'python train_lm.py'
    assert sorted(os.listdir(tmp_path / 'm')) == FILES


def test_another_class_is_refused(tmp_path):
    language_model(True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r'config\.json: .* a RecurrentGPT, not a GPT'):
        GPT.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r'config\.json: .*arch'):
        Agent.from_pretrained(tmp_path)


@pytest.mark.parametrize('name, kind, score', [
    ('lm', RecurrentGPT, '1.0342 nats per byte'),
    ('lm_nonrecurrent', GPT, '1.0592 nats per byte'),
    ('sokoban', ConvGLU, 'solves 98.2% of 512 evaluation levels'),
])  # fmt: skip
def test_shipped_models_load_and_have_a_card(name, kind, score):
    folder = ROOT / 'pretrained' / name
    model = (LanguageModel if name.startswith('lm') else Agent).from_pretrained(folder)
    assert type(model) is kind
    card = ModelCard.load(folder / 'README.md')
    assert card.data.license == 'mit' and score in card.text
    if name.startswith('lm'):
        idx = torch.tensor([list(b'Fellow citizens of the Senate and of the House of Representat')])
        state = model.init_state(1)
        logits = model(idx[:, :-1], state=state)[0]  # (1, T, V)
        loss = torch.nn.functional.cross_entropy(logits[0, 20:], idx[0, 21:])
        assert loss < 1  # the phrase is in half of the speeches; a uniform guess: 5.5


def test_models_saved_before_the_layers_were_renamed_load(tmp_path):
    """Their weights are named levels.0.wq and so on, and config.json may hold `path`."""
    model = language_model(True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / 'model.safetensors')
    renamed = {name.replace('layers.', 'levels.'): tensor for name, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / 'model.safetensors')
    about = json.loads((tmp_path / 'config.json').read_text())
    about['model'] |= {'path': 'fast'}
    (tmp_path / 'config.json').write_text(json.dumps(about))
    assert same_weights(LanguageModel.from_pretrained(tmp_path), model)


def test_push_and_pull(tmp_path, monkeypatch):
    """push_to_hub uploads the three files; from_pretrained loads them by the repository's name."""
    remote = tmp_path / 'remote'

    def upload_folder(self, *, repo_id, repo_type, folder_path, **options):
        assert (repo_id, repo_type) == ('owner/name', 'model')
        shutil.copytree(folder_path, remote)
        return 'commit'

    def snapshot_download(repo_id, *, allow_patterns, revision):
        assert (repo_id, revision) == ('owner/name', 'v1')
        assert set(allow_patterns) == {'config.json', 'model.safetensors'}
        return str(remote)

    def create_repo(self, repo_id, **options):
        return huggingface_hub.RepoUrl(f'https://huggingface.co/{repo_id}')

    monkeypatch.setattr(huggingface_hub.HfApi, 'create_repo', create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, 'upload_folder', upload_folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    model = language_model(True)
    about = {'tokenizer': 'bytes', 'best_val_loss': 1.25, 'command': 'python train_lm.py --seed=2'}
    assert model.push_to_hub('owner/name', config=about) == 'commit'
    assert sorted(os.listdir(remote)) == FILES
    card = ModelCard.load(remote / 'README.md')
    assert card.data.license == 'mit' and card.data.pipeline_tag == 'text-generation'
    for part in (
        'python train_lm.py --seed=2',
        '1.2500 nats per byte',
        'L = 2, E = 2',
        '2609.12531',
    ):
        assert part in card.text
    loaded = LanguageModel.from_pretrained('owner/name', revision='v1')
    assert same_weights(loaded, model) and loaded.about['tokenizer'] == 'bytes'


def test_damaged_folders_are_one_line(tmp_path):
    """The message names the file."""
    model, folder = language_model(True), tmp_path / 'm'
    damages = {
        'config.json': [b'{', b'{}', b'[]', b'{"model": {"n_layer": 0}, "recurrent": true}'],
        'model.safetensors': [b'', b'x' * 100],
    }
    for name, contents in damages.items():
        for content in (*contents, None):
            shutil.rmtree(folder, ignore_errors=True)
            model.save_pretrained(folder)
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=f'{name}: ') as caught:
                LanguageModel.from_pretrained(folder)
            assert '\n' not in str(caught.value)
    shutil.rmtree(folder)
    model.head[0, 0] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match='head holds NaN'):
        LanguageModel.from_pretrained(folder)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / 'thesis.tex').write_text('mine')
    with pytest.raises(SystemExit):
        language_model(True).save_pretrained(tmp_path)
    assert os.listdir(tmp_path) == ['thesis.tex']


def test_the_training_command_has_what_differs_from_the_defaults():
    settings = {'seed': 5, 'n_layer': 2, 'out_dir': 'out/x', 'data_dir': 'my data', 'resume': True}
    assert hub.training_command('train_lm.py', settings | {'unknown': 1}) == (
        "python train_lm.py '--data_dir=my data' --seed=5"
    )
