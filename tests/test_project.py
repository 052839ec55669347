"""What is shipped fits together: configs load, and links in documents lead somewhere."""

import shutil
import subprocess
from pathlib import Path

import pytest
from processes import ROOT

from configurator import read_config, read_script

SETTINGS = [read_script(script)[0] for script in sorted(ROOT.glob('*.py'))]  # of every script
CONFIGS = sorted((ROOT / 'config').glob('*.py'))


def find_documents() -> list[Path]:
    """Return the documents under version control; none where there is no git."""
    if not shutil.which('git'):
        return []
    command = ['git', 'ls-files', '*.md']
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def accepts(defaults: dict, config: Path) -> bool:
    """Return whether a script with these settings has every setting of the config file."""
    try:
        read_config(str(config), dict(defaults), defaults)
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize('config', CONFIGS, ids=lambda path: path.stem)
def test_config_is_accepted_by_a_script(config):
    assert any(accepts(defaults, config) for defaults in SETTINGS)


@pytest.mark.parametrize('path', find_documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_name_existing_files(path):
    text = path.read_text(encoding='utf-8')
    links = [part.partition(')')[0] for part in text.split('](')[1:]]
    files = [link.partition('#')[0] for link in links if not link.startswith('http')]
    assert [name for name in files if name and not (path.parent / name).exists()] == []
