"""A shell starts its background jobs with ctrl-C ignored, and their children inherit that: the tests that press it need the default."""
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
