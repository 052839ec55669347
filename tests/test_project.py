"""What is shipped fits together: configs load, and links in documents lead somewhere."""

from pathlib import Path

import pytest

from configurator import read_config, read_script

ROOT = Path(__file__).parents[1]
SETTINGS = [read_script(script)[0] for script in sorted(ROOT.glob('*.py'))]  # of every script
CONFIGS = sorted((ROOT / 'config').glob('*.py'))
DOCUMENTS = [*sorted(ROOT.glob('*.md')), *sorted(ROOT.glob('*/*.md'))]


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


@pytest.mark.parametrize('path', DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_name_existing_files(path):
    text = path.read_text(encoding='utf-8')
    links = [part.partition(')')[0] for part in text.split('](')[1:]]
    files = [link.partition('#')[0] for link in links if not link.startswith('http')]
    assert [name for name in files if name and not (path.parent / name).exists()] == []
