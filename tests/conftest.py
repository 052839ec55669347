"""Set up pytest: the option --long, one thread per process, and fixtures that several files use."""

import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# Several processes run side by side: threads would compete, and each of Inductor's workers would
# import torch for itself. This file imports torch only inside fixtures, after these lines.
for name in ('OMP', 'MKL', 'OPENBLAS'):
    os.environ.setdefault(f'{name}_NUM_THREADS', '1')
os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')

# Ignore what a git hook, a cluster job or a tracker has set, and the user's settings of git; leave
# the user's cache of data sets alone.
for name in list(os.environ):
    if name.startswith(('GIT_', 'HF_', 'WANDB_')) or name.endswith('_RESTART_COUNT'):
        del os.environ[name]
os.environ['GIT_CONFIG_GLOBAL'] = os.devnull
os.environ['HF_HOME'] = tempfile.mkdtemp()

# A shell starts its background jobs with SIGINT ignored; the tests of ctrl-C need the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
COMMON = {'deadline': None, 'suppress_health_check': SLOW}
settings.register_profile('short', max_examples=60, derandomize=True, **COMMON)
settings.register_profile('long', max_examples=3000, **COMMON)


def pytest_addoption(parser):
    text = 'twenty kills, 50 times as many random inputs, half-hour soaks, rare cases: two hours'
    parser.addoption('--long', action='store_true', help=text)


def pytest_configure(config):
    config.addinivalue_line('markers', 'long: runs with --long only')
    settings.load_profile('long' if config.getoption('--long') else 'short')


def pytest_unconfigure():
    shutil.rmtree(os.environ['HF_HOME'], ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    # Start the longest tests first: at the end, one process would be left alone with them.
    items.sort(key=lambda item: 'triton' not in item.nodeid)
    for item in items:
        if item.get_closest_marker('long') and not config.getoption('--long'):
            item.add_marker(pytest.mark.skip(reason='runs with pytest --long'))


STOPS = ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGXCPU')
HANDLERS = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in STOPS}


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """Restore the handlers that a trainer replaces, in a test or in a fixture."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """Return a folder of shards that a model can learn: one for validation and two for training,
    which hold five windows per epoch for the runs of small_runs.py."""
    from small_runs import write_shards

    folder = tmp_path_factory.mktemp('data')
    write_shards(folder, val_000000=150, train_000001=8 * 25, train_000002=8 * 17)
    return folder


@pytest.fixture(scope='session')
def trained(data, tmp_path_factory):
    """Return a folder with three trained language models: recurrent, nonrecurrent and lstm."""
    from small_runs import run_lm

    folder = tmp_path_factory.mktemp('trained')
    settings = {
        'recurrent': {},
        'nonrecurrent': {'recurrent': False, 'aggregation': 'softmax_l2'},
        'lstm': {'arch': 'lstm'},
    }
    for name, changes in settings.items():
        assert run_lm(data, folder / name, max_iters=4, **changes) == 0
    return folder
