"""Options of the tests, and ctrl-C: a shell starts its background jobs with it ignored, their children inherit that, and the tests that press
it need the default."""
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption('--kills', type=int, default=2, help='how often tests/test_faults.py kills each script')
