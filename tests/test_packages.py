"""Test packages.py: what counts as an installed package."""

import pytest
from small_runs import assert_refused

from support.packages import need_packages


@pytest.mark.parametrize('name', ['tracker_1', 'tracker_2/', 'tracker_3.py'])
def test_what_has_only_the_name_of_a_package_is_named(tmp_path, monkeypatch, name):
    """A folder, such as the one that wandb makes, and a script of the user; the first is nothing at
    all."""
    monkeypatch.syspath_prepend(tmp_path)
    package = name.removesuffix('/').removesuffix('.py')
    if name.endswith('/'):
        (tmp_path / name).mkdir()
    elif name.endswith('.py'):
        (tmp_path / name).write_text('raise ValueError')
    other = rf' \({tmp_path}/{name.strip("/")} is something else\)' if name != package else ''
    message = f'^{package} is asked for but not installed{other}: pip install {package}'
    assert_refused(message, need_packages, **{package: True})
    need_packages(**{package: False}, pytest=True)
