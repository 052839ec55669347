"""What is shipped fits together: configs load, and links in documents lead somewhere."""

import shutil
import subprocess
from pathlib import Path

import pytest
from processes import ROOT

from configurator import Mistake, Script

SCRIPTS = [Script(path) for path in sorted([*ROOT.glob('*.py'), *ROOT.glob('paper/*.py')])]
CONFIGS = sorted((ROOT / 'config').glob('*.py'))


def find_documents() -> list[Path]:
    """Return the documents under version control; none where there is no git."""
    if not shutil.which('git'):
        return []
    command = ['git', 'ls-files', '*.md']
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def accepts(script: Script, config: Path) -> bool:
    """Return whether a script has every setting of the config file."""
    try:
        script.read_config(config)
    except Mistake:
        return False
    return True


@pytest.mark.parametrize('config', CONFIGS, ids=lambda path: path.stem)
def test_config_is_accepted_by_a_script(config):
    assert any(accepts(script, config) for script in SCRIPTS)


@pytest.mark.parametrize('path', find_documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_name_existing_files(path):
    text = path.read_text(encoding='utf-8')
    links = [part.partition(')')[0] for part in text.split('](')[1:]]
    files = [link.partition('#')[0] for link in links if not link.startswith('http')]
    assert [name for name in files if name and not (path.parent / name).exists()] == []
