"""The tests' one option, and ctrl-C: a shell's background jobs inherit that it is ignored. One
thread a process: several spin beside each other, and Inductor's workers would each import torch."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

THREADS = 'OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS TORCHINDUCTOR_COMPILE_THREADS'
for name in THREADS.split():
    os.environ.setdefault(name, '1')
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
COMMON = {'deadline': None, 'suppress_health_check': SLOW}
settings.register_profile('short', max_examples=60, derandomize=True, **COMMON)
settings.register_profile('long', max_examples=3000, **COMMON)


def pytest_addoption(parser):
    text = 'twenty kills, 50 times as much drawn input, half-hour soaks, what is rare: two hours'
    parser.addoption('--long', action='store_true', help=text)


def pytest_configure(config):
    config.addinivalue_line('markers', 'long: run with --long alone')
    settings.load_profile('long' if config.getoption('--long') else 'short')


def pytest_collection_modifyitems(config, items):
    # the longest single tests first, or one process ends with them alone
    items.sort(key=lambda item: 'triton' not in item.nodeid)
    for item in items:
        if item.get_closest_marker('long') and not config.getoption('--long'):
            item.add_marker(pytest.mark.skip(reason='pytest --long runs it'))
