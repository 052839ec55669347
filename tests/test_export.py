"""Test export.py: models are saved, published and loaded in the Hugging Face Hub's format,
offline."""

import errno
import json
import math
import os
import shutil
import types
from functools import partial

import huggingface_hub
import pytest
import safetensors.torch
import torch
from processes import ROOT
from small_runs import assert_equal, assert_refused

from convlstm import Agent, AgentConfig, build_agent, load_agent
from lstm import LSTM, build_lstm
from model import GPT, LanguageModel, ModelConfig, RecurrentGPT, build_model
from support import export
from support.export import initialize_from, refuse_unknown_sizes
from support.files import remove_temporary
from support.run_folder import CONFIG, LAST, WEIGHTS, load_export, sizes_in

FILES = ['README.md', 'config.json', 'model.safetensors']
SIZES = {'vocab_size': 256, 'n_expert': 2, 'n_embd': 16, 'n_head': 2, 'window': 8, 'block_size': 4}


def make_language_model(recurrent=True):
    """Return a small model with random weights everywhere; the head's are zero by default."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(**SIZES), recurrent).requires_grad_(False)
    for p in model.parameters():
        p.normal_()
    return model


def make_agent(recurrent=True):
    torch.manual_seed(0)
    return build_agent(AgentConfig('convglu', recurrent, n_embd=8, head_dim=8))


def make_lstm():
    torch.manual_seed(0)
    return build_lstm(ModelConfig(**SIZES), recurrent=True)


MODELS = [
    (make_language_model, LanguageModel),
    (partial(make_language_model, recurrent=False), LanguageModel),
    (make_agent, Agent),
    (partial(make_agent, recurrent=False), Agent),
    (make_lstm, LSTM),
]
NAMES = ['lm', 'nonrecurrent_lm', 'agent', 'nonrecurrent_agent', 'lstm']


@pytest.mark.parametrize('make, base_class', MODELS, ids=NAMES)
def test_a_saved_model_is_loaded_equal(tmp_path, make, base_class):
    """The base class and the class of the model load it, in evaluation mode."""
    model = make()
    model.save_pretrained(tmp_path, config={'step': 7})
    assert sorted(os.listdir(tmp_path)) == FILES
    for loader in (base_class, type(model)):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and loaded.config == model.config
        assert_equal(loaded.state_dict(), model.state_dict())
        assert loaded.metadata['step'] == 7 and not loaded.training


def routed_agent():
    config = AgentConfig('convlstm', n_expert=2, n_embd=8, head_dim=8, aggregation='softmax_l2')
    return build_agent(config)


def routed_language_model():
    return build_model(ModelConfig(**SIZES, aggregation='softmax_l2'), recurrent=False)


@pytest.mark.parametrize(
    'make, bias',
    [(routed_language_model, 'layers.0.router_k_bias'), (routed_agent, 'routers.0.k_bias')],
)
def test_models_saved_with_a_bias_of_the_routers_keys_load(tmp_path, capfd, make, bias):
    """Silently, because it changed nothing; a bias of that name that a model has is loaded."""
    model, old, edited = make(), make(), make()
    module, _, name = bias.rpartition('.')
    for saved in (old, edited):
        parameter = torch.nn.Parameter(torch.ones(64))
        saved.get_submodule(module).register_parameter(name, parameter)
    old.save_pretrained(tmp_path)
    loaded = type(old).from_pretrained(tmp_path)
    export.initialize_from(model, tmp_path)
    for found in (loaded, model):
        assert_equal(found.state_dict(), {k: x for k, x in old.state_dict().items() if k != bias})
    assert 'not taken' not in capfd.readouterr().out
    edited.get_parameter(bias).data.zero_()
    export.initialize_from(edited, tmp_path)
    assert edited.get_parameter(bias).sum() == 64


def test_agents_saved_before_a_size_was_added_load(tmp_path):
    """A new field of AgentConfig has its default, here as if `radius` and others were new."""
    make_agent().save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text('{"arch": "convglu", "n_embd": 8, "head_dim": 8}')
    assert Agent.from_pretrained(tmp_path).config == make_agent().config


def test_an_export_has_the_entries_that_rebuild_the_model_and_those_that_are_given(tmp_path):
    """What was said of the loaded weights is not said of changed ones, unless it is given again."""
    about_run = {'step': 7, 'score': math.nan, 'tokenizer': 'bytes', 'command': 'a \udc80'}
    built = make_language_model()
    with pytest.raises(TypeError):  # it would be the tokenizer of every model
        built.metadata['tokenizer'] = 'gpt2'
    built.save_pretrained(tmp_path, config=built.metadata | about_run)
    model = LanguageModel.from_pretrained(tmp_path)
    assert about_run | {'score': None} == {name: model.metadata[name] for name in about_run}
    assert r'a \udc80' in (tmp_path / 'README.md').read_text()
    model.save_pretrained(tmp_path, config={'best': 1})
    metadata = json.loads((tmp_path / CONFIG).read_text())
    assert metadata.keys() == {'recurrent', 'tokenizer', 'model', 'best'}
    assert metadata['tokenizer'] == 'bytes'


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_weights_are_stored_in_the_dtype_of_the_model_and_loaded_in_fp32(tmp_path, dtype):
    model = make_agent().to(dtype)
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / WEIGHTS)
    loaded = Agent.from_pretrained(tmp_path).state_dict()
    for name, x in model.state_dict().items():
        assert stored[name].dtype == dtype and torch.equal(stored[name], x)
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], x.float())


@pytest.mark.parametrize('name, model_class', [('lm', RecurrentGPT), ('lm_nonrecurrent', GPT)])
def test_the_shipped_language_models_know_a_phrase_of_the_speeches(name, model_class):
    """A uniform guess loses 5.5 nats per byte."""
    model = model_class.from_pretrained(ROOT / 'pretrained' / name)
    idx = torch.tensor([list(b'Fellow citizens of the Senate and of the House of Representat')])
    logits, _ = model(idx[:, :-1], state=model.init_state(1))  # (1, T, V)
    assert torch.nn.functional.cross_entropy(logits[0, 20:], idx[0, 21:]) < 1


@pytest.mark.parametrize('make, base_class', MODELS, ids=NAMES)
def test_a_pushed_model_is_loaded_by_the_name_of_its_repository(
    tmp_path, monkeypatch, make, base_class
):
    """push_to_hub uploads the three files and writes a card that says what was trained and how."""

    def create_repo(self, repo_id, **options):
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / repo_id)

    def snapshot_download(repo_id, *, revision, **options):
        assert revision == 'v1'
        return str(tmp_path / repo_id)

    monkeypatch.setattr(huggingface_hub.HfApi, 'create_repo', create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, 'upload_folder', upload_folder)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    model = make()
    about_run = {'tokenizer': 'bytes', 'score': '1.25 nats', 'step': 7, 'command': 'python a.py'}
    model.push_to_hub('owner/name', config=about_run)
    assert sorted(os.listdir(tmp_path / 'owner' / 'name')) == FILES
    card = (tmp_path / 'owner' / 'name' / 'README.md').read_text()
    for part in ('license: mit', '7 updates', 'python a.py', '1.25 nats', '| n_expert |'):
        assert part in card
    loaded = base_class.from_pretrained('owner/name', revision='v1')
    assert_equal(loaded.state_dict(), model.state_dict())


NAN = safetensors.torch.save({'head': torch.tensor(torch.nan)})
DAMAGES = [  # file, content, message
    (CONFIG, b'{', 'config.json: cannot be read: missing or damaged'),
    (CONFIG, b'[1]', 'config.json: cannot be read: missing or damaged'),
    (CONFIG, b'{"model": []}', 'config.json: damaged'),
    (CONFIG, b'{"model": {"n_layer": 0}, "recurrent": true}', 'config.json: .*n_layer'),
    (
        CONFIG,
        b'{"model": {"z_loss": 0.1}}',
        'config.json: .*unexpected .* .z_loss',
    ),
    (CONFIG, b'{"model": {"vocab_size": 9}, "recurrent": true}', 'model.safetensors: .*mismatch'),
    (WEIGHTS, b'x' * 100, 'model.safetensors: '),
    (WEIGHTS, NAN, 'model.safetensors: .*head holds NaN'),
]


def test_sizes_of_the_model_win_over_those_of_the_export_that_it_came_from(tmp_path):
    model = LanguageModel.from_pretrained(ROOT / 'pretrained/lm')
    sizes = {**model.metadata['model'], 'aggregation': 'mean', 'window': 32}
    build_model(ModelConfig(**sizes), True).save_pretrained(tmp_path, config=model.metadata)
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert (loaded.config.aggregation, loaded.config.window) == ('mean', 32)
    assert loaded.metadata['tokenizer'] == 'bytes'


def test_a_damaged_file_is_named_in_one_line(tmp_path):
    make_language_model().save_pretrained(tmp_path)
    for name, content, message in DAMAGES:
        saved = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        for load in (LanguageModel.load_trained, LanguageModel.from_pretrained):
            assert_refused(message, load, tmp_path)
        (tmp_path / name).write_bytes(saved)


@pytest.mark.parametrize('content', ['{"recurrent": tr', '{"recurrent": true, "model": 5}'])
def test_a_damaged_description_is_named_by_all_that_read_it(tmp_path, content):
    make_agent().save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(content)
    for read in (Agent.from_pretrained, load_agent, sizes_in, load_export):
        assert_refused('/config.json: ', read, tmp_path)


def test_a_model_of_the_other_kind_is_named(tmp_path):
    """To start from, or to evaluate."""
    make_agent().save_pretrained(tmp_path / 'a')
    make_language_model().save_pretrained(tmp_path / 'b')
    of_lm, of_agent = ('tokenizer', 'n_layer'), ('arch', 'n_layer')
    for read in (sizes_in, load_export):
        read(tmp_path / 'a', of_agent)
        read(tmp_path / 'b', of_lm)
        assert_refused('a: holds an agent, of another trainer', read, tmp_path / 'a', of_lm)
        assert_refused('b: holds a language model, of', read, tmp_path / 'b', of_agent)


@pytest.mark.parametrize('make', [make_agent, make_language_model])
def test_a_size_that_the_code_does_not_know_is_refused(tmp_path, make):
    """The weights of an edit that has been undone may fit, but in another function."""
    model = make()
    model.save_pretrained(tmp_path)
    metadata = json.loads((tmp_path / CONFIG).read_text())
    metadata['model']['n_loop'] = 2
    (tmp_path / CONFIG).write_text(json.dumps(metadata))
    assert_refused('n_loop', type(model).from_pretrained, tmp_path)
    message = 'model.safetensors: was trained with n_loop = 2, which this code does not have'
    assert_refused(message, initialize_from, make(), tmp_path)
    saved, path = load_export(tmp_path)
    assert_refused(message, refuse_unknown_sizes, model, saved['entries'], path)


def test_weights_that_do_not_fit_may_come_from_before_an_edit(tmp_path):
    """Of an export, of a checkpoint, and to start from."""
    model, path = make_language_model(), tmp_path / WEIGHTS
    model.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({f'old.{name}': x for name, x in weights.items()}, path)
    message = 'model.safetensors: .*the code has been edited since'
    assert_refused(message, LanguageModel.from_pretrained, tmp_path)
    assert_refused(message, export.initialize_from, model, tmp_path)
    assert_refused(
        'last.pt: .*the code has been edited since', export.load_weights, model, {}, LAST
    )


def test_a_home_folder_is_written_as_a_tilde(tmp_path, monkeypatch):
    """A folder that is not there is named, also one that no repository can be called."""
    monkeypatch.setenv('HOME', str(tmp_path))
    make_language_model().save_pretrained('~/e')
    assert sorted(os.listdir(tmp_path / 'e')) == FILES
    assert LanguageModel.from_pretrained('~/e').recurrent
    assert LanguageModel.load_trained('~/e').recurrent
    assert_refused('^~/f: no such folder', LanguageModel.from_pretrained, '~/f')


@pytest.mark.parametrize(
    'files, named',
    [
        ({'eval.csv': ''}, 'eval.csv'),
        ({'README.md': 'my notes'}, 'README.md'),
        ({CONFIG: '{"architectures": ["Other"]}', WEIGHTS: ''}, CONFIG),
        ({CONFIG: '{"recurrent": true, "tokenizer": ""}', 'probe.bin': ''}, 'probe.bin'),
    ],
)
def test_a_folder_that_holds_anything_but_an_export_is_kept(tmp_path, files, named):
    for name, text in files.items():
        (tmp_path / 'a').mkdir(exist_ok=True)
        (tmp_path / 'a' / name).write_text(text)
    assert_refused(f'a: holds {named}', make_language_model().save_pretrained, tmp_path / 'a')
    kept = {path.name: path.read_text() for path in (tmp_path / 'a').iterdir()}
    assert kept == files and os.listdir(tmp_path) == ['a']


def test_the_model_of_another_class_and_an_unknown_option_are_refused(tmp_path):
    make_language_model().save_pretrained(tmp_path)
    assert_refused('holds README.md, which no such', make_agent().save_pretrained, tmp_path)
    assert_refused('config.json: .* a RecurrentGPT, not a GPT', GPT.from_pretrained, tmp_path)
    assert_refused('config.json: .*KeyError: .arch', Agent.from_pretrained, tmp_path)
    with pytest.raises(TypeError, match='which'):
        LanguageModel.from_pretrained(tmp_path, which='last')


def test_a_head_that_is_tied_to_the_embedding_is_saved_and_loaded(tmp_path):
    """Both names are in the file, so that any model can take them; loading keeps the tie."""
    model, loaded = make_language_model(), make_language_model()
    for tied in (model, loaded):
        tied.head = tied.embedding
    model.embedding.mul_(2)
    model.save_pretrained(tmp_path)
    export.load_weights(loaded, safetensors.torch.load_file(tmp_path / WEIGHTS), tmp_path)
    assert_equal(loaded.state_dict(), model.state_dict())
    assert loaded.tied


def test_weights_that_differ_are_not_loaded_into_one_parameter(tmp_path):
    """As those of pretrained/lm, after an edit that ties the head to the embedding."""
    make_language_model().save_pretrained(tmp_path)
    tied = make_language_model()
    tied.head = tied.embedding
    weights = safetensors.torch.load_file(tmp_path / WEIGHTS)
    message = 'the code has been edited since .*embedding is one parameter with another weight'
    assert_refused(message, export.load_weights, tied, weights, tmp_path)


def test_a_save_that_fails_leaves_the_earlier_model_and_can_be_repeated(tmp_path, monkeypatch):
    """The disk is full before the last of the new files is written."""

    def write_card(self, path):
        raise OSError(errno.ENOSPC, 'No space left on device')

    model, other = make_language_model(), make_language_model(recurrent=False)
    model.save_pretrained(tmp_path / 'old')
    for name in ('old', 'new'):
        with monkeypatch.context() as patch, pytest.raises(OSError, match='No space .*' + name):
            patch.setattr(huggingface_hub.ModelCard, 'save', write_card)
            other.save_pretrained(tmp_path / name)
    assert os.listdir(tmp_path) == ['old']
    model.save_pretrained(tmp_path / 'new')
    for name in ('old', 'new'):
        loaded = LanguageModel.from_pretrained(tmp_path / name)
        assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('exists', [True, False])
@pytest.mark.parametrize('calls', range(5))
def test_a_save_that_is_killed_can_be_repeated(tmp_path, monkeypatch, exists, calls):
    """It is killed after some of the files have been written, or moved into the folder of an
    earlier export. What it leaves behind is removed when the run is resumed."""
    replace, done = os.replace, []

    def replace_or_die(source, target):
        if len(done) == calls:
            raise KeyboardInterrupt
        replace(source, target)
        done.append(target)

    model, folder = make_language_model(), tmp_path / 'best'
    if exists:
        make_language_model(recurrent=False).save_pretrained(folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, 'rmtree', lambda *args, **options: None)
        patch.setattr(os, 'replace', replace_or_die)
        model.save_pretrained(folder)
        raise KeyboardInterrupt  # after all
    remove_temporary(tmp_path)
    model.save_pretrained(folder)
    assert os.listdir(tmp_path) == ['best'] and sorted(os.listdir(folder)) == FILES
    assert_equal(LanguageModel.from_pretrained(folder).state_dict(), model.state_dict())


def test_two_models_may_be_saved_in_one_folder_at_once(tmp_path, monkeypatch):
    """The second is saved while the first is being written, and the first then replaces it."""
    first, second = make_language_model(), make_language_model(recurrent=False)
    write_tensors = export.write_tensors

    def write_second_too(tensors, path):
        monkeypatch.setattr(export, 'write_tensors', write_tensors)
        second.save_pretrained(tmp_path / 'a')
        write_tensors(tensors, path)

    monkeypatch.setattr(export, 'write_tensors', write_second_too)
    first.save_pretrained(tmp_path / 'a')
    assert os.listdir(tmp_path) == ['a'] and sorted(os.listdir(tmp_path / 'a')) == FILES
    loaded = LanguageModel.from_pretrained(tmp_path / 'a')
    assert_equal(loaded.state_dict(), first.state_dict())


def test_a_link_leads_to_the_folder_that_is_replaced(tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'a').symlink_to(tmp_path / 'disk')
    for recurrent in (True, False):
        make_language_model(recurrent).save_pretrained(tmp_path / 'a')
        assert LanguageModel.from_pretrained(tmp_path / 'disk').recurrent == recurrent
    assert (tmp_path / 'a').is_symlink() and sorted(os.listdir(tmp_path / 'disk')) == FILES
